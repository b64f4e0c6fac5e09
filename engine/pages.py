"""Keys or values that do not lie in one array: in pages of fixed size, or the last ones apart from the others.

Pages are found through a table. A layer's pages lie in a pool, in the order in which they were taken, and, once that is
full, in an extension, so that growth leaves what is there where it is. The table holds, for each 256 positions, the
number of a page in the pool, or ``-1 - number`` for one in the extension.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

PAGE = 256
"""Positions of a page."""


@dataclass(frozen=True)
class Paged:
    """One layer's keys, or its values, as attention takes them in place of an array.

    Attributes:
        pool: ``[1, kv heads, pages * 256, head_dim]``. more: the extension, in the same form; None if there is none.
        table: int32 ``[at least pages]`` in the order of positions.
        positions: how many are shown. pooled: of those, how many lie in the pool.
    """

    pool: mx.array
    more: mx.array | None
    table: mx.array
    positions: int
    pooled: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the array it stands for: ``(1, kv heads, positions, head_dim)``."""
        return (1, self.pool.shape[1], self.positions, self.pool.shape[3])

    @property
    def dtype(self) -> mx.Dtype:
        """Element type."""
        return self.pool.dtype

    def gathered(self) -> mx.array:
        """The shown positions in order, copied into one array."""
        parts = [_taken(self.pool, self.table[: -(-self.pooled // PAGE)])]
        if self.more is not None and self.pooled < self.positions:
            parts.append(_taken(self.more, -1 - self.table[self.pooled // PAGE : -(-self.positions // PAGE)]))
        rows = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return rows[:, :, : self.positions]


@dataclass(frozen=True)
class Recent:
    """One layer's keys, or its values, of which the last have not been written into the cache yet.

    Attributes:
        stored: ``[1, kv heads, positions, head_dim]``, or in pages; those from `first` on are stale.
        recent: ``[1, kv heads, room, head_dim]``, from position `first` on. first: int32 ``[at least 1]``.
        fresh: the new rows, ``[1, kv heads, rows, head_dim]``.
    """

    stored: mx.array | Paged
    recent: mx.array
    first: mx.array
    fresh: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array it stands for."""
        return self.stored.shape

    @property
    def dtype(self) -> mx.Dtype:
        """Element type."""
        return self.stored.dtype


def _taken(pool: mx.array, pages: mx.array) -> mx.array:
    _, heads, rows, dim = pool.shape
    return mx.take(pool.reshape(1, heads, rows // PAGE, PAGE * dim), pages, axis=2).reshape(1, heads, -1, dim)


def rows_of(table: mx.array, at: mx.array) -> mx.array:
    """Where positions int32 ``[n]`` lie: rows of the pool, or of the extension for those it holds, int32 ``[n]``."""
    page = table[at // PAGE]
    return mx.where(page < 0, -1 - page, page) * PAGE + at % PAGE
