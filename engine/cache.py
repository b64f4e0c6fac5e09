"""The state of one sequence: growing keys and values, constant recurrent and convolution state.

Arrays, one per layer of their kind, all in `Cache.state` (a plain dict, so that a compiled step can capture it):
    keys, values: ``[1, kv heads, capacity, head_dim]`` in the activation type; rows from `position` on are stale;
    recurrent: float32 ``[1, value heads, value dim, key dim]``; conv: the last ``kernel - 1`` rows, oldest first, each
    ``[1, 1, conv_dim]`` an array of its own, so that a step moves on by one without copying any;
    position: int32 ``[4]``, four times the number of tokens in the cache, since MLX's CUDA build keeps an array of up
        to 8 bytes in the host's memory, where every kernel would wait for it; token: uint32 ``[1]``, the next to feed;
    finite: bool ``[1]``, whether every logit chosen since the last reset was finite.

`PagedCache` holds keys and values in pages instead (`engine.pages`): keys, values are pools and more_keys, more_values
their extensions, all ``[1, kv heads, pages * 256, head_dim]``, and pages is the table, int32 ``[at least pages]``.

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
from engine.kernels.recent import update_metal
from engine.pages import PAGE, Paged, Recent, rows_of

Rows = mx.array | Paged | Recent
"""A layer's keys or values as attention takes them."""
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

    grown = ("keys", "values")
    """Names in `state` of what a layer of full attention has of its own."""
    shared = ("position",)
    """Names in `state` of what all layers read."""

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
        for name in self.grown:
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
        grown = sum((s[name] for name in self.grown), [])
        return [
            *grown,
            *s["recurrent"],
            *sum(s["conv"], []),
            *(s[name] for name in self.shared),
            s["token"],
            s["finite"],
        ]

    def reserve(self, positions: int) -> None:
        """Make room for `positions` in all, rounded up to a multiple of `step`; one layer is copied at a time."""
        if positions <= self.capacity:
            return
        self.settle()
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
        self.state["position"] = mx.array([position] * 4, dtype=mx.int32)

    # -- keys and values -------------------------------------------------------------------

    def place(self, rows: int, at: mx.array | None = None) -> Any:
        """Where the next `rows` rows go, for `write`: from the host's position, or from int32 ``[1]`` on the device."""
        if at is None:
            return slice(self.position, self.position + rows)
        return at if rows == 1 else at + mx.arange(rows, dtype=mx.int32)

    def write(self, index: int, k: mx.array, v: mx.array, place: Any) -> None:
        """Put rows ``[1, kv heads, rows, head_dim]`` into attention layer `index` of its kind."""
        for name, rows in (("keys", k), ("values", v)):
            if isinstance(place, slice):
                self.state[name][index][..., place, :] = rows
            else:
                self.state[name][index] = _scattered(self.state[name][index], place, rows)

    def shown(self, index: int, positions: int) -> tuple[Rows, Rows]:
        """The first `positions` keys and values of attention layer `index` of its kind."""
        return tuple(self.state[name][index][..., :positions, :] for name in ("keys", "values"))  # type: ignore[return-value]

    def boundary(self, rows: int) -> int:
        """What of the next `rows` rows a trace depends on beside shapes; nothing here."""
        return 0

    def finish(self) -> None:
        """End of a traced pass: every layer has written its rows."""

    def moved(self, rows: int) -> None:
        """A traced pass has moved the position on the device; follow it on the host."""
        self.position += rows

    def settle(self) -> None:
        """Put rows that are kept apart into keys and values; here there are none."""

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
        self.settle()
        s, n = self.state, self.position
        pairs = [tuple(map(in_one_piece, self.shown(i, n))) for i in range(len(self.attention_index))]
        made = {
            "keys": mx.concatenate([k for k, _ in pairs]),
            "values": mx.concatenate([v for _, v in pairs]),
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
        place = self.place(n)
        for i in range(len(self.attention_index)):
            k, v = (arrays[name][i][None].astype(self.dtype) for name in ("keys", "values"))
            self.write(i, k, v, place)
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


class PagedCache(Cache):
    """A `Cache` whose keys and values lie in pages of 256 positions, found through a table on the device.

    Growth takes whole pages and leaves the others where they are: the first ones make a pool, later ones an extension.
    An extension that is full becomes part of the pool, which copies it; it is made a quarter of the pool at least, so
    that this is rare.
    """

    grown = ("keys", "values", "more_keys", "more_values")
    shared = ("position", "pages")

    def wipe(self) -> None:
        self.state["pages"] = mx.zeros((0,), mx.int32)
        super().wipe()

    @property
    def pooled(self) -> int:
        """Positions that the pool has room for; the extension holds those after them."""
        return super().capacity

    @property
    def capacity(self) -> int:
        if not self.attention_index:
            return super().capacity
        return self.pooled + self.state["more_keys"][0].shape[2]

    def reserve(self, positions: int) -> None:
        """Make room for `positions` in all, in whole pages; what is there is not copied while an extension is free."""
        if positions <= self.capacity:
            return
        if self.capacity > self.pooled:
            self._merge()
        held = self.capacity // PAGE
        need = -(-(positions - self.capacity) // PAGE)
        if self.pooled:
            need = max(need, self.pooled // PAGE // 4)
        for name in ("more_keys", "more_values") if self.pooled else ("keys", "values"):
            for i, old in enumerate(self.state[name]):
                self.state[name][i] = mx.zeros((*old.shape[:2], need * PAGE, old.shape[3]), self.dtype)
        pages = mx.arange(need, dtype=mx.int32)
        # At least four entries, for the reason that the position is four numbers.
        rest = mx.zeros((max(0, 4 - (held + need)),), mx.int32)
        self.state["pages"] = mx.concatenate([self.state["pages"][:held], -1 - pages if held else pages, rest])
        mx.eval(self.arrays())

    def _merge(self) -> None:
        """Make the extension part of the pool, a layer at a time."""
        pooled = self.pooled
        for name in ("keys", "values"):
            pools, mores = self.state[name], self.state[f"more_{name}"]
            for i in range(len(pools)):
                pools[i] = mx.concatenate([pools[i], mores[i]], axis=2)
                mores[i] = mores[i][:, :, :0]
                mx.eval(pools[i])
        table = self.state["pages"]
        self.state["pages"] = mx.where(table < 0, -1 - table + pooled // PAGE, table)

    def boundary(self, rows: int) -> int:
        """Of the next `rows` rows, how many go into the pool."""
        return max(0, min(rows, self.pooled - self.position))

    def place(self, rows: int, at: mx.array | None = None) -> Any:
        if at is None:
            at = mx.array([self.position], dtype=mx.int32)
        return rows_of(self.state["pages"], super().place(rows, at))

    def write(self, index: int, k: mx.array, v: mx.array, place: Any) -> None:
        cut = self.boundary(k.shape[2])
        for name, rows in (("keys", k), ("values", v)):
            for where, part in ((name, slice(0, cut)), (f"more_{name}", slice(cut, rows.shape[2]))):
                if part.start < part.stop:
                    stored = self.state[where]
                    stored[index] = _scattered(stored[index], place[part], rows[:, :, part])

    def shown(self, index: int, positions: int) -> tuple[Rows, Rows]:
        s, pooled = self.state, min(positions, self.pooled)
        return tuple(  # type: ignore[return-value]
            Paged(s[name][index], more if more.shape[2] else None, s["pages"], positions, pooled)
            for name, more in (("keys", s["more_keys"][index]), ("values", s["more_values"][index]))
        )


class Apart(Cache):
    """The last positions stand apart, in one small array of all layers that each traced pass makes anew.

    A pass that writes into keys and values while an earlier one that reads them is still under way makes MLX copy them
    whole: it writes in place only where nothing holds the old array. Here steps only read them, and every `ROOM`
    positions, with nothing under way, the rows that stand apart are put in their place.

    ``state["recent"]``: ``[1, attention layers * 2 * kv heads, ROOM, head_dim]``, position ``state["first"]`` (int32
    ``[4]``) on; each layer's key heads, then its value heads. Only `engine.kernels.attention` reads such keys.
    """

    ROOM = 256

    def wipe(self) -> None:
        planes = len(self.config.attention_layers) * 2 * self.config.num_key_value_heads
        self.state["recent"] = mx.zeros((1, planes, self.ROOM, self.config.head_dim), self.dtype)
        self._fresh: dict[int, tuple[mx.array, mx.array]] = {}
        super().wipe()

    def _hold(self, position: int) -> None:
        """Rows from `position` on will stand apart; there are none yet."""
        self.first = self.written = position
        self.state["first"] = mx.array([position] * 4, dtype=mx.int32)

    def reset(self) -> None:
        # Rows of a sequence that is gone: the next one may come to as many positions without having written any here.
        self._hold(0)
        super().reset()

    def reserve(self, positions: int) -> None:
        """As `Cache.reserve`; also settles where the next rows would find no room apart."""
        super().reserve(positions)
        if positions > self.first + self.ROOM:
            self.settle()

    def seek(self, position: int) -> None:
        if not self.first <= position <= self.written:
            # Before the rows that stand apart, or past all that were written.
            if position > self.written:
                self.settle()
            self._hold(position)
        super().seek(position)

    def moved(self, rows: int) -> None:
        super().moved(rows)
        self.written = self.position

    def settle(self) -> None:
        end, count = self.position, self.position - self.first
        if count > 0:
            # Only what nothing holds is written in place.
            mx.synchronize()
            self.position = self.first
            place, recent = super().place(count), self.state["recent"][:, :, :count]
            for i in range(len(self.attention_index)):
                k, v = (recent[:, plane] for plane in self._planes(i))
                super().write(i, k, v, place)
                mx.eval([self.state[name][i] for name in self.grown])
        self._fresh = {}
        self.position = end
        self._hold(end)

    def place(self, rows: int, at: mx.array | None = None) -> Any:
        return super().place(rows) if at is None else None

    def _planes(self, index: int) -> tuple[slice, slice]:
        """Where the keys and the values of an attention layer stand in ``state["recent"]``."""
        kv = self.config.num_key_value_heads
        return slice(2 * index * kv, (2 * index + 1) * kv), slice((2 * index + 1) * kv, (2 * index + 2) * kv)

    def write(self, index: int, k: mx.array, v: mx.array, place: Any) -> None:
        if place is None:
            self._fresh[index] = k, v
        else:
            super().write(index, k, v, place)

    def shown(self, index: int, positions: int) -> tuple[Rows, Rows]:
        stored = super().shown(index, positions)
        if index not in self._fresh:
            return stored
        recent, first = self.state["recent"], self.state["first"]
        return tuple(  # type: ignore[return-value]
            Recent(held, recent[:, plane], first, fresh)  # type: ignore[arg-type]
            for held, plane, fresh in zip(stored, self._planes(index), self._fresh[index], strict=True)
        )

    def finish(self) -> None:
        keys = [self._fresh[i][0] for i in range(len(self.attention_index))]
        values = [self._fresh[i][1].swapaxes(1, 2) for i in range(len(self.attention_index))]
        rows = [v.reshape(1, v.shape[1], -1) for v in values]
        s = self.state
        s["recent"] = update_metal(s["recent"], s["first"], s["position"], keys, rows)
        self._fresh = {}


class RecentCache(Apart, Cache):
    """A contiguous cache with its last positions apart."""

    shared = ("position", "first", "recent")


class RecentPages(Apart, PagedCache):
    """A cache in pages with its last positions apart."""

    shared = ("position", "pages", "first", "recent")


def in_one_piece(rows: Rows) -> mx.array:
    """Keys or values as one array, pages gathered."""
    assert not isinstance(rows, Recent)
    return rows.gathered() if isinstance(rows, Paged) else rows


def _scattered(stored: mx.array, at: mx.array, rows: mx.array) -> mx.array:
    """`stored` with `rows` at positions int32 ``[rows]``, both ``[1, kv heads, …, head_dim]``.

    A scatter writes the new rows alone. `mx.slice_update` with a position on the device also works in place, but its
    CUDA kernel runs once per element of the whole cache (0.54 ms a layer at 128K).
    """
    return mx.put_along_axis(stored, mx.broadcast_to(at.reshape(1, 1, -1, 1), rows.shape), rows, axis=2)


def conv_rows(window: mx.array) -> list[mx.array]:
    """Rows ``[1, n, conv_dim]`` as n arrays ``[1, 1, conv_dim]`` of their own memory."""
    return [mx.contiguous(window[:, i : i + 1]) for i in range(window.shape[1])]


class ExactView:
    """How a pass that knows its position on the host reads and writes a cache.

    Keys and values are written at the host's position and read up to the last new row: no masked positions.
    """

    def __init__(self, cache: Cache, rows: int):
        cache.settle()
        self.cache, self.start, self.end = cache, cache.position, cache.position + rows
        self.offset: int | mx.array = self.start
        self.position: mx.array | None = None
        self._place: Any = None

    def append(self, layer: int, k: mx.array, v: mx.array) -> tuple[Rows, Rows]:
        """Store new rows ``[1, kv heads, rows, head_dim]`` of a layer; keys and values to attend over."""
        i = self.cache.attention_index[layer]
        if self._place is None:
            self._place = self.cache.place(k.shape[2], self.position)
        self.cache.write(i, k, v, self._place)
        return self.cache.shown(i, self.end)

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
        self.cache, self.end = cache, bucket
        self.offset = self.position = cache.state["position"][:1]
        self._place = None


def bucket_for(positions: int) -> int:
    """Positions a traced step attends over: `positions` rounded up to 256, coarser (1/32) at long contexts.

    A coarse step costs at most 3 % masked reads and saves a trace every few hundred tokens.
    """
    step = max(256, 1 << max(0, positions.bit_length() - 6))
    return -(-positions // step) * step
