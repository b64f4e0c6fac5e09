"""`python -m engine serve`: an OpenAI-compatible API on one model, for this machine unless told otherwise."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from dataclasses import dataclass, field

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.arguments import Arguments
from engine.serve.app import Limits, Service
from engine.serve.guard import Guard, is_loopback
from engine.serve.requests import error_body
from engine.serve.source import DEFAULT, DRAFTERS, REAL, drafting, find
from engine.serve.worker import Worker

OWED_S = 30.0
"""Seconds a connection may take to send the head of a request, or the rest of a body that was refused already."""

UNREAD_S = 60.0
"""Seconds a client may leave an answer unread once no more of it fits on the way."""

ENDING_S = 0.5
"""Seconds that requests have, once the server is told to stop, to send what they end with."""

SWITCH_S = 0.001
"""Seconds after which the thread that runs MLX hands the interpreter to the event loop that waits for it; Python's
default is five times as long, and a request takes several turns."""

GIB = 1 << 30


class ServeError(ValueError):
    """An address or option that cannot be used."""


@dataclass(frozen=True)
class Options:
    """What `serve` is told; the command line has the same names."""

    model: str = DEFAULT
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allow_host: tuple[str, ...] = ()
    queue: int = 128
    block: int = 512
    reuse_bytes: int = 2 * GIB
    draft: str = "off"
    draft_depth: int = 4
    limits: Limits = field(default_factory=Limits)


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, but what is no HTTP is answered with this API's error, and nobody may keep it waiting.

    A client that owes bytes (a head begun, a body that nobody wants any more) or does not read is cut off in the end.
    """

    _owed: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first head."""
        super().connection_made(transport)
        self._owed = self.loop.call_later(OWED_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        for clock in (self._owed, self._unread):
            if clock is not None:
                clock.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and see what is still owed."""
        super().data_received(data)
        self._mind()

    def on_response_complete(self) -> None:
        """Go on to the next request, and see what is still owed."""
        super().on_response_complete()
        self._mind()

    def pause_writing(self) -> None:
        """The client has not read what was sent."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _mind(self) -> None:
        state, answered = self.conn.their_state, self.cycle is None or self.cycle.response_complete
        owes = answered and (state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0])))
        if not owes and self._owed is not None:
            self._owed.cancel()
            self._owed = None
        elif owes and self._owed is None:
            self._owed = self.loop.call_later(OWED_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP; called while the parser's error is being handled."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        # Once an answer has begun, a second one in its midst would only confuse its reader.
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not begun:
            body = json.dumps(error_body(f"{msg} ({error})" if error else msg, status)).encode()
            head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class Ending(uvicorn.Server):
    """uvicorn's server, but what is under way when it is told to stop is told so and ends, instead of being waited for.

    Args:
        config: uvicorn's. worker: stopped first, which ends every request that waits for it.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker):
        super().__init__(config)
        self.worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, end all requests, close all connections."""
        for server in self.servers:
            server.close()
        self.worker.stop()
        await self._ended()
        # What is left has no end in sight: a body that does not arrive, an answer that nobody reads.
        for connection in list(self.server_state.connections):
            cycle = connection.cycle if isinstance(connection, Protocol) else None
            if cycle is not None and cycle.response_started and not cycle.response_complete:
                connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
        await self._ended()
        late = asyncio.get_running_loop().call_later(ENDING_S, self._abort)
        await super().shutdown(sockets)
        late.cancel()

    async def _ended(self) -> None:
        if tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=ENDING_S)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class Server:
    """A listening socket, the worker, and uvicorn over both; made ready by the constructor, run by `run`.

    Args:
        options: everything. Port 0 takes any free one; `port` tells which.

    Raises:
        ValueError: a model that cannot be loaded, or an address that cannot be bound.
    """

    def __init__(self, options: Options):
        self.options, self.source = options, find(options.model)
        how = drafting(options.draft, options.draft_depth)
        # Before the model is loaded: a port that is taken should cost no minute.
        self.socket = _bind(options.host, options.port)
        self.port: int = self.socket.getsockname()[1]
        self.worker = Worker(self.source, options.block, options.reuse_bytes, options.queue, how)
        self.worker.start()
        try:
            self.worker.wait()
        except BaseException:
            self.socket.close()
            raise
        self.wide = not is_loopback(options.host)
        names = frozenset(name.lower() for name in (options.host, *options.allow_host))
        app = Service(self.worker, options.limits).app()
        guarded = Guard(app, names, self.wide, options.api_key, options.limits.body)
        config = uvicorn.Config(
            guarded,  # type: ignore[arg-type]
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        self.uvicorn = Ending(config, self.worker)

    def run(self) -> None:
        """Serve until told to stop, then end the worker."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            self.uvicorn.run(sockets=[self.socket])
        finally:
            sys.setswitchinterval(before)
            self.worker.close()
            self.socket.close()

    def stop(self) -> None:
        """Make `run` return, from any thread."""
        self.uvicorn.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        raise ServeError(f"cannot listen on {host} port {port}: {error}; give another --host or --port") from None
    return made


def main(argv: list[str]) -> int:
    """The command. Returns its exit status.

    Raises:
        ValueError: one line for the user.
    """
    options = parse(argv)
    logging.basicConfig(level=logging.ERROR, format="serve: %(message)s", stream=sys.stderr)
    server = Server(options)
    say = _say
    if server.wide:
        key = (
            "every request needs the API key" if options.api_key else "ANYONE who reaches it can use it (no --api-key)"
        )
        say(f"WARNING: bound to {options.host}: other machines can reach this server, unencrypted; {key}")
    shown = f"[{options.host}]" if ":" in options.host else options.host
    say(f"{server.source.name} at http://{shown}:{server.port}/v1 (context {server.worker.context} tokens)")
    server.run()
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(argv: list[str]) -> Options:
    """Options of a command line.

    Raises:
        ServeError: a number out of its range.
    """
    p = Arguments("python -m engine serve", description=__doc__)
    p.add_argument("--model", default=DEFAULT, help=f"{DEFAULT} (default), {REAL}, or a checkpoint's folder")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    p.add_argument("--port", type=int, default=8080, help="0 takes any free port")
    p.add_argument("--api-key", help="require it of every request but /health")
    p.add_argument("--allow-host", action="append", default=[], help="a further name that clients may call it by")
    p.add_argument("--queue", type=int, default=128, help="requests that may wait; more are refused (429)")
    p.add_argument("--block", type=int, default=512, help="prompt tokens a pass, and between points of reuse")
    p.add_argument("--reuse-gib", type=float, default=2.0, help="memory for prompts to be reused; 0 switches it off")
    p.add_argument("--draft", choices=DRAFTERS, default="off", help="draft tokens and verify several in one pass")
    p.add_argument("--draft-depth", type=int, default=4, help="most tokens drafted at once, 1 to 7; fewer if they fail")
    p.add_argument("--max-body-mib", type=float, default=Limits.body / (1 << 20))
    p.add_argument("--max-messages", type=int, default=Limits.messages)
    given = p.parse_args(argv)
    for name, least in (("queue", 1), ("block", 1), ("max_messages", 1), ("port", 0)):
        if getattr(given, name) < least:
            raise ServeError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(given, name)}")
    if given.port > 65535 or not 0 <= given.reuse_gib < 1e6 or not 0 < given.max_body_mib < 1e6:
        raise ServeError("--port must be at most 65535, --reuse-gib 0 or more, --max-body-mib above 0")
    if given.api_key is not None and not given.api_key.strip():
        raise ServeError("--api-key is empty; leave it out to ask for none")
    return Options(
        model=given.model,
        host=given.host,
        port=given.port,
        api_key=given.api_key,
        allow_host=tuple(given.allow_host),
        queue=given.queue,
        block=given.block,
        reuse_bytes=int(given.reuse_gib * GIB),
        draft=given.draft,
        draft_depth=given.draft_depth,
        limits=Limits(body=int(given.max_body_mib * (1 << 20)), messages=given.max_messages),
    )
