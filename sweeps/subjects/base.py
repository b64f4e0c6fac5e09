"""What can be timed: one protocol for the engine, MLX-LM and stand-ins.

The worker owns the clock. A subject only does the work and tells what it did; it never times itself.
Methods that run on the device leave work in flight unless they say "drained".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

NO_DRAFTS = "unsupported: MLX-LM refuses speculative decoding for this model: its recurrent state cannot be trimmed"
"""Why there is no arm of MLX-LM that drafts."""


class SubjectError(ValueError):
    """A subject that cannot be built from what the job says; the message names the thing and the fix."""


class SubjectUnsupported(Exception):
    """This subject cannot do what was asked here; the message is the reason of a `skipped` row."""


class SubjectOutOfMemory(Exception):
    """The device ran out of memory; becomes status `oom`, and larger frontiers of the arm are skipped."""


_NO_MEMORY = (
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "unable to allocate",
    "failed to allocate",
    "attempting to allocate",
    "memory allocation failed",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a device or host allocation failure, whatever backend words it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)


@contextlib.contextmanager
def memory_errors(doing: str) -> Iterator[None]:
    """Turn an allocation failure while `doing` something into `SubjectOutOfMemory`; other errors pass."""
    try:
        yield
    except (RuntimeError, ValueError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).strip().splitlines()
        raise SubjectOutOfMemory(f"{doing}: {first[0] if first else 'out of memory'}") from error


def chunk_lengths(count: int, chunk: int, tail: bool = False) -> list[int]:
    """Lengths of the passes over `count` tokens in steps of `chunk`; with `tail` the last token runs alone."""
    body = count - 1 if tail else count
    lengths = [chunk] * (body // chunk) + ([body % chunk] if body % chunk else [])
    return lengths + ([1] if tail else [])


@dataclass
class CanonicalState:
    """State of a sequence in the form subjects exchange.

    keys, values: ``[attention layers, kv heads, positions, head_dim]`` each. state: float32
    ``[linear layers, value heads, value dim, key dim]``. conv: ``[linear layers, kernel - 1, conv_dim]``.
    tokens: ids that produced it. Arrays are whatever the subjects share (mx.array).
    """

    tokens: Sequence[int]
    keys: Any
    values: Any
    state: Any
    conv: Any


@dataclass
class Prefilled:
    """What a prefill did: the chunk lengths it ran, the greedy next token, tokens found already cached."""

    chunks: list[int]
    next_token: int
    cached_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Decoded:
    """What a decode window did: ids in order; `stamps` are clock readings at hand-over of each id if asked for."""

    tokens: list[int]
    stamps: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


Progress = Callable[[int, int], None]
"""Called as ``progress(processed, total)`` after each prefill chunk is complete on the device (drained)."""


class Subject(Protocol):
    """Something that can prefill and decode on one model, kept behind one interface so that one clock serves all."""

    name: str

    def reset(self) -> None:
        """Forget the sequence: an empty cache. Outside every window."""
        ...

    def prefill(self, tokens: Sequence[int], *, last: bool = True, progress: Progress | None = None) -> Prefilled:
        """Append `tokens` to the cache; drained on return.

        last: also compute the next token (head). A walk passes False for the whole chunks in between, where
        `next_token` is -1. Raises SubjectUnsupported or SubjectOutOfMemory.
        """
        ...

    def decode(self, first: int, count: int, *, clock: Callable[[], int] | None = None) -> Decoded:
        """Greedy-decode `count` further tokens after feeding `first`; end-of-sequence is ignored; drained on return.

        clock: if given, called at the hand-over of each id (per-token series; not used in timed windows).
        """
        ...

    def position(self) -> int:
        """Tokens in the cache."""
        ...

    def snapshot(self) -> Any:
        """A restore point: a length and the constant-size state; keys and values are not copied."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Back to `snapshot`, which must be of this sequence (a prefix of what is cached now). Bit-exact."""
        ...

    def export_state(self) -> CanonicalState:
        """The state in canonical form (copies)."""
        ...

    def import_state(self, state: CanonicalState) -> None:
        """Replace the sequence by a canonical state (copies in)."""
        ...

    def logits(self, tokens: Sequence[int], phase: Literal["prefill", "decode"] = "decode") -> Any:
        """Teacher-forced logits float32 ``[len(tokens), vocabulary]`` from the current state on, through the
        very path that is timed for `phase`: a row at a time (decode) or in the timed chunks (prefill).
        Advances the cache. Used by the quality guard."""
        ...

    def executed(self) -> list[dict[str, Any]]:
        """``[{op, variant, tile, calls}]`` since `reset_executed`."""
        ...

    def reset_executed(self) -> None:
        """Start counting anew."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for rows: versions, weights hash, dtype, chunk length, whether log-probabilities are computed."""
        ...

    def close(self) -> None:
        """Drop weights and caches."""
        ...
