"""Sizes and inputs on which the kernel of the rotary embedding is tried, and what it is compared with."""

from __future__ import annotations

import mlx.core as mx

from engine.ops import relative_rms

TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-6, "float16": 5e-4}
"""Relative RMS error at position 0: that of rounding the result once."""
BY_POSITION = 1e-9
"""What a position adds: an angle's last place, where two ways to base^(-i / 32) differ by one of theirs."""
SIZES = [
    # rows, query heads, key/value heads, position
    (1, 4, 1, 0),
    (3, 3, 2, 131072),
    (8, 2, 2, 77),
    (1, 5, 2, 262143),
    (2, 1, 1, 4095),
    (1, 16, 2, 32767),
]
Size = tuple[int, int, int, int]


def arguments(size: Size, dtype: mx.Dtype, apart: bool = True) -> tuple[mx.array, ...]:
    """What `rotate_metal` takes; unless `apart`, q and k are parts of one array, as one product leaves them."""
    rows, heads, kv, position = size
    keys = iter(mx.random.split(mx.random.key(0), 4))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(dtype)

    # Keys so small that the norm's epsilon counts.
    q, k = normal(1, rows, heads * 512), 1e-3 * normal(1, rows, kv * 256)
    if not apart:
        q, k = mx.split(mx.concatenate([q, k], axis=-1), [heads * 512], axis=-1)
    return q, k, 1 + 0.1 * normal(256), 1 + 0.1 * normal(256), mx.array([position], dtype=mx.int32)


def reference(size: Size, given: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
    """MLX's norm and rotary embedding in float32, on the CPU, where its sines are exact at every angle."""
    rows, heads, kv, position = size

    def one(x: mx.array, gain: mx.array, heads: int) -> mx.array:
        x = x.astype(mx.float32).reshape(1, rows, heads, -1)[..., :256]
        normed = mx.fast.rms_norm(x, gain.astype(mx.float32), 1e-6, stream=mx.cpu).swapaxes(1, 2)
        return mx.fast.rope(normed, 64, traditional=False, base=1e7, scale=1.0, offset=position, stream=mx.cpu)

    q, k, q_gain, k_gain, _ = given
    return one(q, q_gain, heads), one(k, k_gain, kv)


def agrees(size: Size, given: tuple[mx.array, ...], result: tuple[mx.array, mx.array], dtype: str) -> bool:
    errors = [relative_rms(got, want) for got, want in zip(result, reference(size, given), strict=True)]
    return max(errors) <= TOLERANCE[dtype] + BY_POSITION * size[3]
