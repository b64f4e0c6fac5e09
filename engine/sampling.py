"""How a token is drawn from logits, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. temperature 0 is greedy; top_k 0 and top_p 1.0 keep everything."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


LEAST = 1e-30
"""Smaller temperatures and shares of mass count as this: float32 would take them for 0."""

GREEDY = Sampling()
"""The likeliest token, always."""


def kept_scores(logits: mx.array, how: Sampling) -> mx.array:
    """Scores float32 ``[rows, vocabulary]`` whose softmax is what `sample` draws from; cut tokens are ``-inf``.

    The temperature must not be 0.
    """
    wide = logits.astype(mx.float32)
    # Measured from the best, so that a small temperature overflows to certainty, not to infinity over infinity.
    scores = (wide - mx.max(wide, axis=-1, keepdims=True)) / max(how.temperature, LEAST)
    if how.top_k and how.top_k < scores.shape[-1]:
        floor = mx.min(mx.topk(scores, how.top_k, axis=-1), axis=-1, keepdims=True)
        scores = mx.where(scores < floor, -mx.inf, scores)
    if how.top_p < 1:
        order = mx.argsort(-scores, axis=-1)
        ranked = mx.softmax(mx.take_along_axis(scores, order, axis=-1), axis=-1)
        # A token stays if the mass before it is short of top_p, so the first always stays.
        cut = mx.cumsum(ranked, axis=-1) - ranked >= max(how.top_p, LEAST)
        ranked_scores = mx.where(cut, -mx.inf, mx.take_along_axis(scores, order, axis=-1))
        scores = mx.put_along_axis(scores, order, ranked_scores, axis=-1)
    return scores


def sample(logits: mx.array, how: Sampling, key: mx.array | None = None) -> mx.array:
    """Draw one id per row, on the device.

    Args:
        logits: ``[rows, vocabulary]``. key: a random key; needed unless greedy.

    Returns:
        uint32 ``[rows]``. Ties of the greedy choice go to the lowest id.
    """
    if how.temperature == 0:
        return mx.argmax(logits, axis=-1).astype(mx.uint32)
    return mx.random.categorical(kept_scores(logits, how), key=key).astype(mx.uint32)
