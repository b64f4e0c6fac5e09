"""A 5-gram model of token ids with interpolated Kneser-Ney smoothing: what plain counting reaches."""

from __future__ import annotations

import numpy as np

ORDER = 5
BITS = 12
"""Bits of a token id: five fit a 64-bit key, oldest token in the highest bits."""


class KneserNey:
    """Interpolated Kneser-Ney, one absolute discount an order, the lowest order mixed with a uniform one.

    The highest order counts occurrences, every other one the number of different tokens seen before its n-gram.

    Args:
        ids: training tokens, uint16, below 4,096.
    """

    def __init__(self, ids: np.ndarray, vocabulary: int = 4096) -> None:
        self.vocabulary = vocabulary
        self.tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.contexts: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.discounts: dict[int, float] = {}
        keys, counts = np.unique(grams(ids, ORDER), return_counts=True)
        for order in range(ORDER, 0, -1):
            self._keep(order, keys, counts)
            if order > 1:
                keys, counts = np.unique(keys & ((1 << BITS * (order - 1)) - 1), return_counts=True)

    def _keep(self, order: int, keys: np.ndarray, counts: np.ndarray) -> None:
        counts = counts.astype(np.int32)
        self.tables[order] = keys, counts
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        self.discounts[order] = once / max(1, once + 2 * twice)
        # Keys are sorted, so the n-grams of one context stand together.
        heads, starts = np.unique(keys >> BITS, return_index=True)
        totals = np.add.reduceat(counts.astype(np.int64), starts)
        kinds = np.diff(np.append(starts, len(keys)))
        self.contexts[order] = heads, totals, kinds

    def log_probabilities(self, ids: np.ndarray) -> np.ndarray:
        """Natural log probability of each token of `ids` from the fifth on, given the four before it."""
        keys = grams(ids, ORDER)
        p = np.full(len(keys), 1.0 / self.vocabulary)
        for order in range(1, ORDER + 1):
            key = keys & ((1 << BITS * order) - 1)
            count = _look_up(*self.tables[order], key)
            heads, totals, kinds = self.contexts[order]
            total, kind = _look_up(heads, totals, key >> BITS), _look_up(heads, kinds, key >> BITS)
            d = self.discounts[order]
            seen = total > 0
            safe = np.where(seen, total, 1)
            p = np.where(seen, np.maximum(count - d, 0) / safe + d * kind / safe * p, p)
        return np.log(p)


def grams(ids: np.ndarray, order: int) -> np.ndarray:
    """The key of every run of `order` tokens, int64 ``[len(ids) - order + 1]``."""
    wide = ids.astype(np.int64)
    key = np.zeros(len(ids) - order + 1, np.int64)
    for i in range(order):
        key = (key << BITS) | wide[i : len(ids) - order + 1 + i]
    return key


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
