"""Server and terminal chat on the engine: the one room of `engine` that may read clocks.

Read in this order: `source` (which model), `reuse` (what of a prompt is not computed again), `generation` (one
request on the engine), `text` (tokens to an answer), `worker` (the one thread that owns MLX), `requests` (what a
client may ask), `app` (the API), `guard` (who may ask, and how much), `server` and `chat` (the commands).
"""
