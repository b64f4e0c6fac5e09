"""What of a prompt is not computed again, exactly and within a memory budget.

Recurrent state cannot be cut back, so a prompt can only be resumed where a snapshot was taken. Prompts are
prefilled in blocks that start at multiples of `block`, whether anything is reused or not, and a snapshot is kept at
every such edge and at the end of the prompt. A snapshot serves a new prompt if their tokens agree up to it and the
new prompt's own blocks have an edge there: then what follows is the same arithmetic on the same numbers as
without reuse, bit for bit. What was decoded is never reused, since a decoded row is rounded differently from a
prefilled one.

Saved conversations hold references to arrays, which MLX copies when one of several holders writes: a sequence that
branches off a saved one copies keys and values at its first write, one that goes on from its end writes in place.
A recorded step (`engine.replay`) writes unseen by MLX: where there is one, a branch begins with the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from engine.cache import Snapshot
from engine.generate import Engine

MOST_SNAPSHOTS = 16
"""Restore points kept of one conversation; the crowded ones go first, the newest stay."""


@dataclass(eq=False)
class Conversation:
    """A saved prompt: its ids, its keys and values, its restore points in ascending order."""

    key: str | None
    tokens: list[int]
    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes held: keys and values at their capacity, and the constant arrays of each snapshot."""
        rows = sum(a.nbytes for a in (*self.keys, *self.values))
        return rows + sum(_nbytes(s) for s in self.snapshots)


def _handles(arrays: list[mx.array]) -> list[mx.array]:
    """New Python objects for the same memory: assigning to rows changes the object assigned to, and no other."""
    return [mx.array(a) for a in arrays]


def _copies(arrays: list[mx.array]) -> list[mx.array]:
    """The same in memory of their own."""
    made = [a * 1 for a in arrays]
    mx.eval(made)
    return made


def _nbytes(snapshot: Snapshot) -> int:
    return sum(a.nbytes for a in snapshot.recurrent) + sum(a.nbytes for rows in snapshot.conv for a in rows)


class Prefixes:
    """Saved prompts of one engine, least recently used first out.

    Args:
        engine: the engine whose sequence is filled and saved. block: positions between edges.
        budget: bytes that saved prompts may hold; 0 switches reuse off.
    """

    def __init__(self, engine: Engine, block: int, budget: int):
        self.engine, self.block, self.budget = engine, block, budget
        self._saved: list[Conversation] = []
        self._live: Conversation | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that saved prompts hold."""
        return sum(c.nbytes for c in self._saved)

    def begin(self, prompt: Sequence[int], key: str | None) -> tuple[int, str]:
        """Put the longest usable prefix of `prompt` into the engine.

        Args:
            prompt: ids, at least one. key: only prompts saved under the same key are looked at.

        Returns:
            Its length, and in words how it was found or why it is 0.
        """
        cache = self.engine.cache
        self.engine.reset()
        if not self.budget:
            return 0, "off"
        at, found, common = self._best(prompt, key)
        if found is None or at is None:
            # Fresh arrays: the present ones may belong to a saved conversation.
            c = self.engine.config
            for name in ("keys", "values"):
                empty = mx.zeros((1, c.num_key_value_heads, 0, c.head_dim), cache.dtype)
                cache.state[name][:] = [empty] * len(cache.state[name])
            self._live = Conversation(key, list(prompt))
            return 0, f"agrees for {common} tokens, no edge before" if common else "nothing in common"
        kept = [s for s in found.snapshots if s.position <= at.position]
        self._saved.remove(found)
        keys, values = found.keys, found.values
        if common < len(found.tokens):
            # Another continuation: the saved one stays, as the most recently used.
            self._saved.append(found)
            branch = _handles if self.engine.replay is None else _copies
            keys, values = branch(keys), branch(values)
        cache.state["keys"][:], cache.state["values"][:] = keys, values
        cache.seek(len(found.tokens))
        self.engine.restore(at)
        self._live = Conversation(key, list(prompt), snapshots=kept)
        return at.position, "reused"

    def _best(self, prompt: Sequence[int], key: str | None) -> tuple[Snapshot | None, Conversation | None, int]:
        """The snapshot furthest into `prompt`, whose it is, and how many tokens agree with that (or any) prompt."""
        best: tuple[Snapshot | None, Conversation | None, int] = None, None, 0
        for saved in reversed(self._saved):
            if saved.key != key:
                continue
            common = _common(saved.tokens, prompt)
            usable = [s for s in saved.snapshots if s.position <= common and self._is_edge(s.position, prompt)]
            if usable and (best[0] is None or usable[-1].position > best[0].position):
                best = usable[-1], saved, common
            elif best[0] is None:
                best = None, None, max(best[2], common)
        return best

    def _is_edge(self, position: int, prompt: Sequence[int]) -> bool:
        return position % self.block == 0 or position == len(prompt) - 1

    def edges(self, start: int, prompt: Sequence[int]) -> list[int]:
        """Ends of the blocks still to prefill from `start`; the last token is left to the first decode step."""
        last = len(prompt) - 1
        return [*range((start // self.block + 1) * self.block, last, self.block), last] if start < last else []

    def mark(self) -> None:
        """Keep a restore point here."""
        if self._live is None:
            return
        mx.eval(self.engine.cache.arrays())
        self._live.snapshots.append(self.engine.snapshot())
        _thin(self._live.snapshots, MOST_SNAPSHOTS)

    def end(self) -> None:
        """Save what was marked of the live prompt, and drop the oldest until the budget holds."""
        live, self._live = self._live, None
        if live is None or not live.snapshots:
            return
        self.engine.cache.settle()
        state = self.engine.cache.state
        live.tokens = live.tokens[: live.snapshots[-1].position]
        live.keys, live.values = _handles(state["keys"]), _handles(state["values"])
        self._saved = [c for c in self._saved if not (c.key == live.key and c.tokens == live.tokens)]
        self._saved.append(live)
        while self.nbytes > self.budget and len(self._saved) > 1:
            del self._saved[0]
        while live.nbytes > self.budget and len(live.snapshots) > 1:
            _thin(live.snapshots, len(live.snapshots) - 1)
        if live.nbytes > self.budget:
            self._saved.clear()

    def clear(self) -> None:
        """Forget everything; after an error nothing of the engine's state is trusted."""
        self._saved.clear()
        self._live = None
        self.engine.reset()


def _thin(snapshots: list[Snapshot], most: int) -> None:
    """Drop the snapshots that stand closest between their neighbours; first and last stay if possible."""
    while len(snapshots) > max(most, 1):
        if len(snapshots) == 2:
            del snapshots[0]
            continue
        gaps = [b.position - a.position for a, b in zip(snapshots, snapshots[2:])]
        del snapshots[1 + gaps.index(min(gaps))]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
