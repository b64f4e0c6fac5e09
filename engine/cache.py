"""The state of one sequence: growing keys and values, constant recurrent and convolution state.

Arrays, one per layer of their kind, all in `Cache.state` (a plain dict, so that a compiled step can capture it):
    keys, values: ``[1, kv heads, capacity, head_dim]`` in the activation type; rows from `position` on are stale;
    recurrent: float32 ``[1, value heads, value dim, key dim]``; conv: the last ``kernel - 1`` rows, oldest first, each
    ``[1, 1, conv_dim]`` an array of its own, so that a step moves on by one without copying any;
    position: int32 ``[1]``, the number of tokens in the cache; token: uint32 ``[1]``, the next token to feed;
    finite: bool ``[1]``, whether every logit chosen since the last reset was finite.

Keys and values are append-only, so a snapshot is a length and references to the constant part: nothing is copied,
and what lies past the restored length is overwritten before it can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.config import ModelConfig

Inputs = tuple[mx.array, mx.array, mx.array, mx.array]
"""What a Gated DeltaNet layer's projections make of new rows: qkv, z, b, a, as `engine.ops.gated_delta` takes them."""
Recurred = tuple[mx.array, list[mx.array], mx.array]
"""Output rows, convolution rows and recurrent state after them."""
Core = Callable[[Inputs, list[mx.array], mx.array], Recurred]
"""A layer's recurrence between its projections: inputs, convolution rows and state before."""


class CacheError(ValueError):
    """A snapshot or file that does not belong to this cache."""


@dataclass(frozen=True)
class Snapshot:
    """A restore point of one sequence: its length and its constant-size arrays (shared, not copied).

    drafts: where the engine's drafter stood, if it has one (`engine.speculative`).
    """

    position: int
    recurrent: tuple[mx.array, ...]
    conv: tuple[tuple[mx.array, ...], ...]
    drafts: Any = None


class Cache:
    """Keys, values and recurrent state of one sequence.

    Args:
        config: the architecture.
        dtype: type of keys, values and convolution rows (recurrent state is float32 always).
        step: positions by which the capacity grows.
    """

    def __init__(self, config: ModelConfig, dtype: mx.Dtype, step: int = 256):
        self.config, self.dtype, self.step = config, dtype, step
        self.attention_index = {layer: i for i, layer in enumerate(config.attention_layers)}
        self.linear_index = {layer: i for i, layer in enumerate(config.linear_layers)}
        # One dict for the cache's whole life: compiled steps capture it.
        self.state: dict[str, Any] = {"token": mx.zeros((1,), mx.uint32)}
        self.wipe()

    def wipe(self) -> None:
        """Empty, and no room kept: after a fault stale rows may be NaN, which even a masked position lets through."""
        rows = (1, self.config.num_key_value_heads, 0, self.config.head_dim)
        for name in ("keys", "values"):
            self.state[name] = [mx.zeros(rows, self.dtype)] * len(self.config.attention_layers)
        self.reset()

    def reset(self) -> None:
        """Empty: no positions, zero state. The room for keys and values is kept; its rows are stale."""
        c = self.config
        state = (1, c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim)
        self.state["recurrent"] = [mx.zeros(state, mx.float32) for _ in c.linear_layers]
        row = (1, 1, c.conv_dim)
        self.state["conv"] = [
            [mx.zeros(row, self.dtype) for _ in range(c.linear_conv_kernel_dim - 1)] for _ in c.linear_layers
        ]
        self.state["finite"] = mx.array([True])
        self.seek(0)

    @property
    def capacity(self) -> int:
        """Positions that keys and values have room for."""
        return self.state["keys"][0].shape[2] if self.state["keys"] else 1 << 62

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays at their present capacity."""
        return sum(a.nbytes for a in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All arrays, for evaluation."""
        s = self.state
        return [*s["keys"], *s["values"], *s["recurrent"], *sum(s["conv"], []), s["position"], s["token"], s["finite"]]

    def reserve(self, positions: int) -> None:
        """Make room for `positions` in all, rounded up to a multiple of `step`; one layer is copied at a time."""
        if positions <= self.capacity:
            return
        capacity = -(-positions // self.step) * self.step
        for name in ("keys", "values"):
            for i, old in enumerate(self.state[name]):
                new = mx.zeros((*old.shape[:2], capacity, old.shape[3]), self.dtype)
                if self.position:
                    new[..., : self.position, :] = old[..., : self.position, :]
                self.state[name][i] = new
                del old
                # Evaluated layer by layer, so that old and new are never alive for more than one.
                mx.eval(new)

    def advance(self, rows: int) -> None:
        """Count `rows` more tokens, on host and device."""
        self.seek(self.position + rows)

    def seek(self, position: int) -> None:
        """Set the length on host and device."""
        self.position = position
        self.state["position"] = mx.array([position], dtype=mx.int32)

    # -- restore points --------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A restore point of the sequence as it is now."""
        return Snapshot(self.position, tuple(self.state["recurrent"]), tuple(map(tuple, self.state["conv"])))

    def restore(self, snapshot: Snapshot) -> None:
        """Back to a snapshot of this sequence, bit for bit.

        Raises:
            CacheError: the snapshot lies past what is cached, so its keys cannot be there.
        """
        if snapshot.position > min(self.position, self.capacity):
            raise CacheError(
                f"the snapshot is at position {snapshot.position}, the cache holds {self.position}: "
                "restore only a prefix of the sequence that is cached"
            )
        self.state["recurrent"] = list(snapshot.recurrent)
        self.state["conv"] = [list(rows) for rows in snapshot.conv]
        self.seek(snapshot.position)

    # -- canonical form --------------------------------------------------------------------

    def export(self) -> dict[str, mx.array]:
        """Copies in canonical form.

        Returns:
            keys, values ``[attention layers, kv heads, position, head_dim]``; state float32
            ``[linear layers, value heads, value dim, key dim]``; conv ``[linear layers, kernel - 1, conv_dim]``.
        """
        s, n = self.state, self.position
        made = {
            "keys": mx.stack([k[0, :, :n] for k in s["keys"]]),
            "values": mx.stack([v[0, :, :n] for v in s["values"]]),
            "state": mx.concatenate(s["recurrent"]),
            "conv": mx.concatenate([mx.concatenate(rows, axis=1) for rows in s["conv"]]),
        }
        mx.eval(made)
        return made

    def load(self, arrays: dict[str, mx.array]) -> None:
        """Replace the sequence by canonical arrays (copied in).

        Raises:
            CacheError: an array is missing or its shape does not fit this model.
        """
        self._check(arrays)
        self.reset()
        n = arrays["keys"].shape[2]
        self.reserve(max(n, 1))
        for i in range(len(self.state["keys"])):
            self.state["keys"][i][..., :n, :] = arrays["keys"][i][None].astype(self.dtype)
            self.state["values"][i][..., :n, :] = arrays["values"][i][None].astype(self.dtype)
        for i in range(len(self.state["recurrent"])):
            # Contiguous copies: a slice would keep the whole stacked array alive.
            self.state["recurrent"][i] = mx.contiguous(arrays["state"][i][None].astype(mx.float32))
            self.state["conv"][i] = conv_rows(arrays["conv"][i][None].astype(self.dtype))
        self.seek(n)
        mx.eval(self.arrays())

    def _check(self, arrays: dict[str, mx.array]) -> None:
        c = self.config
        kv = (len(c.attention_layers), c.num_key_value_heads, None, c.head_dim)
        want = {
            "keys": kv,
            "values": kv,
            "state": (
                len(c.linear_layers),
                c.linear_num_value_heads,
                c.linear_value_head_dim,
                c.linear_key_head_dim,
            ),
            "conv": (len(c.linear_layers), c.linear_conv_kernel_dim - 1, c.conv_dim),
        }
        for name, shape in want.items():
            if name not in arrays:
                raise CacheError(f"the saved state has no {name}")
            got = tuple(arrays[name].shape)
            if len(got) != len(shape) or any(w is not None and w != g for w, g in zip(shape, got, strict=True)):
                raise CacheError(f"the saved state's {name} has shape {list(got)}, this model needs {list(shape)}")
        if arrays["keys"].shape[2] != arrays["values"].shape[2]:
            raise CacheError("the saved state's keys and values differ in length")

    def save(self, path: Path, tokens: Sequence[int] = ()) -> None:
        """Write the canonical form as safetensors; `tokens` are kept as metadata for the reader."""
        mx.save_safetensors(str(path), self.export(), {"tokens": " ".join(map(str, tokens))})

    def read(self, path: Path) -> list[int]:
        """Load what `save` wrote and return its tokens.

        Raises:
            CacheError: no readable file, or arrays of another model.
        """
        try:
            arrays, metadata = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
        except Exception as error:
            raise CacheError(f"cannot read the saved state {path}: {error}") from None
        self.load(arrays)  # type: ignore[arg-type]
        return [int(t) for t in metadata.get("tokens", "").split()]  # type: ignore[union-attr]


def conv_rows(window: mx.array) -> list[mx.array]:
    """Rows ``[1, n, conv_dim]`` as n arrays ``[1, 1, conv_dim]`` of their own memory."""
    return [mx.contiguous(window[:, i : i + 1]) for i in range(window.shape[1])]


class ExactView:
    """How a pass that knows its position on the host reads and writes a cache.

    Keys and values are written at the host's position and read up to the last new row: no masked positions.
    """

    def __init__(self, cache: Cache, rows: int):
        self.cache, self.start, self.end = cache, cache.position, cache.position + rows
        self.offset: int | mx.array = self.start
        self.position: mx.array | None = None

    def append(self, layer: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows ``[1, kv heads, rows, head_dim]`` of a layer; keys and values to attend over."""
        s, i = self.cache.state, self.cache.attention_index[layer]
        s["keys"][i][..., self.start : self.end, :] = k
        s["values"][i][..., self.start : self.end, :] = v
        return s["keys"][i][..., : self.end, :], s["values"][i][..., : self.end, :]

    def recurrent(self, layer: int) -> tuple[list[mx.array], mx.array]:
        """Convolution rows and recurrent state of a layer."""
        s, i = self.cache.state, self.cache.linear_index[layer]
        return s["conv"][i], s["recurrent"][i]

    def set_recurrent(self, layer: int, conv: list[mx.array], state: mx.array) -> None:
        """Replace them."""
        s, i = self.cache.state, self.cache.linear_index[layer]
        s["conv"][i], s["recurrent"][i] = conv, state

    def recur(self, layer: int, inputs: Inputs, core: Core) -> mx.array:
        """Run a layer's recurrence from the cached state and put the new state in its place; the output rows."""
        out, conv, state = core(inputs, *self.recurrent(layer))
        self.set_recurrent(layer, conv, state)
        return out


class TracedView(ExactView):
    """How a compiled step reads and writes it: the position is on the device, shapes are fixed.

    Attention covers the first `bucket` positions, masked past the row's own, so one trace serves many steps.
    """

    def __init__(self, cache: Cache, bucket: int):
        self.cache, self.bucket = cache, bucket
        self.offset = self.position = cache.state["position"]

    def append(self, layer: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        s, i = self.cache.state, self.cache.attention_index[layer]
        at = self.cache.state["position"]
        if k.shape[2] > 1:
            at = at + mx.arange(k.shape[2], dtype=mx.int32)
        for name, rows in (("keys", k), ("values", v)):
            # A scatter writes the new rows alone. `mx.slice_update` with a position on the device also works in
            # place, but its CUDA kernel runs once per element of the whole cache (0.54 ms a layer at 128K).
            index = mx.broadcast_to(at.reshape(1, 1, -1, 1), rows.shape)
            s[name][i] = mx.put_along_axis(s[name][i], index, rows, axis=2)
        return s["keys"][i][..., : self.bucket, :], s["values"][i][..., : self.bucket, :]


def bucket_for(positions: int) -> int:
    """Positions a traced step attends over: `positions` rounded up to 256, coarser (1/32) at long contexts.

    A coarse step costs at most 3 % masked reads and saves a trace every few hundred tokens.
    """
    step = max(256, 1 << max(0, positions.bit_length() - 6))
    return -(-positions // step) * step
