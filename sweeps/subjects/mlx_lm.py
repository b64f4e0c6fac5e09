"""MLX-LM, the baseline, driven through its own `generate_step` and nothing else.

What its loop does, and what is made of it here:

* A prompt of n tokens runs as chunks over the first n-1 and then one pass over the last token, whose logits give
  the next token. `Prefilled.chunks` lists all of them. With ``max_tokens=0`` nothing is yielded, so the next
  token is taken from the sampler, which is MLX-LM's own greedy one with its result kept.
* A stretch in the middle of a walk must be whole chunks, without the pass over a last token: the loop is given one
  token too many and is left from its progress callback once the stretch is done.
* While decoding, each step is queued before the token of the one before is handed over, and after the last token
  one step more is left in the queue. Asking for ``count - 1`` tokens makes that last queued step the one that
  computes token `count`: `count` tokens cost exactly `count` steps, and none is charged that nobody wanted.
* Every step computes log-probabilities over all rows of the head, the padded tail of the vocabulary included.

Off Metal its Gated DeltaNet runs as a Python loop over tokens. That is the baseline as it is, and rows say so.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.sample_utils import greedy_sampler

from engine.config import ModelConfig
from sweeps.subjects.base import (
    NO_DRAFTS,
    CanonicalState,
    Decoded,
    Prefilled,
    Progress,
    SubjectUnsupported,
    chunk_lengths,
    memory_errors,
)

DEFAULT_CHUNK = 2048
"""MLX-LM's own prefill step size."""


class _StretchDone(Exception):
    """Leaves MLX-LM's loop once the whole chunks of a stretch are complete."""


@dataclass(frozen=True)
class Mark:
    """A restore point: sequence length and, for each Gated DeltaNet layer, its (convolution rows, state)."""

    length: int
    states: tuple[tuple[mx.array | None, ...], ...]


def set_wired_limit() -> dict[str, int | None]:
    """Let the GPU wire its recommended working set, as MLX-LM's `stream_generate` does; once a process, for all arms.

    Returns:
        ``{"limit": bytes or None, "before": bytes or None}`` for the run's row; None where the device has no such
        limit (anything but Metal).
    """
    limit = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
    before = mx.set_wired_limit(int(limit)) if limit else None
    return {"limit": int(limit) if limit else None, "before": before}


class MlxLm:
    """MLX-LM on a loaded model.

    Args:
        model: an mlx_lm model in evaluation mode (in training mode it avoids its own kernels).
        config: the architecture.
        chunk: prefill step size in tokens.
        speculative: only ``"off"`` can run here.

    Raises:
        SubjectUnsupported: speculation is asked for.
    """

    name = "mlx_lm"

    def __init__(self, model: Any, config: ModelConfig, chunk: int = DEFAULT_CHUNK, speculative: str = "off"):
        if speculative != "off":
            raise SubjectUnsupported(NO_DRAFTS)
        if model.training:
            raise ValueError("the mlx_lm model is in training mode: call model.eval() first")
        self.model: Any = model
        self.config, self.chunk = config, chunk
        self._sampled: mx.array | None = None
        self.reset()
        self.reset_executed()

    # -- the sequence ----------------------------------------------------------------------------

    def reset(self) -> None:
        """A new empty cache. The old one's memory stays with the allocator, as between two prompts of MLX-LM."""
        self.cache: list[Any] = self.model.make_cache()
        self._tokens: list[int] = []

    def prefill(self, tokens: Sequence[int], *, last: bool = True, progress: Progress | None = None) -> Prefilled:
        """Append `tokens`: chunks over all but the last and a pass for it (`last`), or whole chunks only.

        Raises:
            SubjectOutOfMemory: the device ran out of memory.
        """
        if not tokens:
            raise ValueError("prefill needs at least one token")
        with memory_errors(f"MLX-LM prefill of {len(tokens)} tokens after {len(self._tokens)}"):
            chunks = self._run_prompt(tokens, last, progress)
            next_token = self._last_sampled() if last else -1
            self._drain()
        self._tokens += tokens
        return Prefilled(chunks, next_token)

    def _run_prompt(self, tokens: Sequence[int], last: bool, progress: Progress | None) -> list[int]:
        total, edges = len(tokens), [0]

        def on_chunk(processed: int, _: int) -> None:
            if processed > edges[-1]:
                edges.append(processed)
                self._passes += 1
                if progress:
                    progress(processed, total)
            if not last and processed == total:
                raise _StretchDone

        prompt = mx.array(list(tokens) if last else [*tokens, 0])
        try:
            for _ in self._generate(prompt, 0, on_chunk):
                pass
        except _StretchDone:
            mx.clear_cache()  # as its loop does after each chunk
        chunks = [b - a for a, b in zip(edges, edges[1:])]
        if chunks != chunk_lengths(total, self.chunk, tail=last):
            raise RuntimeError(f"MLX-LM ran chunks {chunks} over {total} tokens; its loop is not the one known here")
        return chunks

    def decode(self, first: int, count: int, *, clock: Callable[[], int] | None = None) -> Decoded:
        """Feed `first` and decode `count` greedy tokens in `count` steps; the cache then ends before the last one.

        Raises:
            SubjectOutOfMemory: the device ran out of memory.
        """
        if count < 1:
            raise ValueError("decode needs a count of at least 1")
        made = Decoded([])
        with memory_errors(f"MLX-LM decode after {len(self._tokens)} tokens"):
            for token, _ in self._generate(mx.array([first]), count - 1, None):
                made.tokens.append(int(token))
                if clock:
                    made.stamps.append(clock())
            made.tokens.append(self._last_sampled())
            if clock:
                made.stamps.append(clock())
            self._drain()
        self._tokens += [first, *made.tokens[:-1]]
        self._steps += count
        return made

    def _generate(self, prompt: mx.array, count: int, on_chunk: Callable[[int, int], None] | None) -> Any:
        return generate_step(
            prompt,
            self.model,
            max_tokens=count,
            sampler=self._sample,
            prompt_cache=self.cache,
            prefill_step_size=self.chunk,
            prompt_progress_callback=on_chunk,
        )

    def _sample(self, logprobs: mx.array) -> mx.array:
        self._sampled = greedy_sampler(logprobs)
        return self._sampled

    def _last_sampled(self) -> int:
        assert self._sampled is not None
        token = int(self._sampled)
        self._sampled = None
        return token

    def _drain(self) -> None:
        # Convolution rows of the last step feed no token yet, so nothing else would compute them.
        mx.eval([c.state for c in self.cache])
        mx.synchronize(generation_stream)

    def position(self) -> int:
        """Tokens in the cache."""
        return len(self._tokens)

    # -- state -----------------------------------------------------------------------------------

    def snapshot(self) -> Mark:
        """Length and references to the recurrent states. The list of an `ArraysCache` is live, hence the copy."""
        return Mark(len(self._tokens), tuple(tuple(c.cache) for c in self._linear()))

    def restore(self, snapshot: Mark) -> None:
        """Set the length back and the states in again; keys and values beyond the length are overwritten later."""
        if snapshot.length > len(self._tokens):
            raise ValueError(f"snapshot at {snapshot.length} tokens is no prefix of the {len(self._tokens)} cached now")
        for c in self._growing():
            c.offset = snapshot.length
        for c, state in zip(self._linear(), snapshot.states):
            c.cache = list(state)
        del self._tokens[snapshot.length :]

    def export_state(self) -> CanonicalState:
        """Copies of everything, in the form subjects exchange.

        Raises:
            ValueError: nothing is cached yet.
        """
        if not self._tokens:
            raise ValueError("an empty sequence has no state to export")
        n = len(self._tokens)
        made = CanonicalState(
            list(self._tokens),
            mx.stack([c.keys[0, :, :n] for c in self._growing()]),
            mx.stack([c.values[0, :, :n] for c in self._growing()]),
            mx.stack([c[1][0] for c in self._linear()]),
            mx.stack([c[0][0] for c in self._linear()]),
        )
        mx.eval(made.keys, made.values, made.state, made.conv)
        return made

    def import_state(self, state: CanonicalState) -> None:
        """Copies of a canonical state, with keys and values in buffers of the size its own prefill would leave."""
        self.reset()
        n = len(state.tokens)
        size = -(-n // KVCache.step) * KVCache.step
        for i, c in enumerate(self._growing()):
            c.keys, c.values = _padded(state.keys[i], size), _padded(state.values[i], size)
            c.offset = n
        for i, c in enumerate(self._linear()):
            c.cache = [mx.array(state.conv[i])[None], mx.array(state.state[i])[None]]
        self._tokens = list(state.tokens)
        self._drain()

    def _growing(self) -> list[Any]:
        return [c for c in self.cache if isinstance(c, KVCache)]

    def _linear(self) -> list[Any]:
        return [c for c in self.cache if isinstance(c, ArraysCache)]

    # -- the quality guard -----------------------------------------------------------------------

    def logits(self, tokens: Sequence[int], phase: Literal["prefill", "decode"] = "decode") -> mx.array:
        """Teacher-forced logits float32 ``[len(tokens), vocab_size]``, a row at a time or in chunks; advances."""
        size = 1 if phase == "decode" else self.chunk
        parts = []
        with memory_errors(f"MLX-LM logits after {len(self._tokens)} tokens"):
            for at in range(0, len(tokens), size):
                piece = tokens[at : at + size]
                with mx.stream(generation_stream):
                    rows = self.model(mx.array(list(piece))[None], cache=self.cache)[0].astype(mx.float32)
                    mx.eval(rows, [c.state for c in self.cache])
                parts.append(rows)
                self._tokens += piece
                if phase == "decode":
                    self._steps += 1
                else:
                    self._passes += 1
            mx.synchronize(generation_stream)
        return mx.concatenate(parts)

    # -- what ran --------------------------------------------------------------------------------

    def executed(self) -> list[dict[str, Any]]:
        """Passes and steps of MLX-LM's loop, and the path its Gated DeltaNet takes on this device."""
        calls = self._passes + self._steps
        lines = [
            {"op": "prefill_pass", "variant": "mlx_lm", "tile": f"chunk={self.chunk}", "calls": self._passes},
            {"op": "decode_step", "variant": "mlx_lm", "tile": None, "calls": self._steps},
            {
                "op": "gated_delta",
                "variant": gated_delta_path(),
                "tile": None,
                "calls": calls * len(self.config.linear_layers),
            },
        ]
        return [line for line in lines if line["calls"]]

    def reset_executed(self) -> None:
        """Start counting anew."""
        self._passes = self._steps = 0

    def describe(self) -> dict[str, Any]:
        """Versions, dtype of the activations, chunk, and the work MLX-LM does beyond a bare argmax."""
        norm = self.model.language_model.model.norm.weight
        return {
            "subject": self.name,
            "mlx_lm": importlib.metadata.version("mlx-lm"),
            "mlx": importlib.metadata.version("mlx"),
            "dtype": str(norm.dtype).removeprefix("mlx.core."),
            "chunk": self.chunk,
            "logprobs": True,
            "vocabulary_rows": self.config.vocab_size,
            "gated_delta": gated_delta_path(),
            "speculative": "unsupported",
        }

    def close(self) -> None:
        """Drop cache and model."""
        self.cache, self._tokens, self.model = [], [], None
        mx.clear_cache()


def gated_delta_path() -> str:
    """``metal_kernel`` where MLX-LM has one for Gated DeltaNet, else ``python_loop`` (a step per token in mx ops)."""
    kernel = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return "metal_kernel" if kernel else "python_loop"


def _padded(rows: Any, size: int) -> mx.array:
    """``[1, heads, size, dim]`` whose first positions are a copy of `rows` ``[heads, n, dim]``."""
    rows = mx.array(rows)
    heads, n, dim = rows.shape
    held = mx.zeros((1, heads, size, dim), rows.dtype)
    held[..., :n, :] = rows[None]
    return held
