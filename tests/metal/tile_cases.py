"""A small kernel that uses every matrix tile operation, and what it should give."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from engine.kernels import loader
from engine.kernels.loader import Launch

TYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
LD = 24
"""Leading dimension of every matrix in memory: longer than a row, rows on 16 bytes."""

BODY = f"""
const uint lane = thread_index_in_simdgroup;
THREADGROUP_ARRAY(T, shared_left, 16 * {LD});
THREADGROUP_ARRAY(T, shared_right, RIGHT ? 8 * {LD} : 16 * {LD});
THREADGROUP_ARRAY(float, shared_sums, 128);
left_tile<T> l;
right_tile<T> r;
if constexpr (SHARED) {{
  for (uint e = lane; e < 16u * {LD}u; e += 32u) shared_left[e] = left[e];
  for (uint e = lane; e < (RIGHT ? 8u : 16u) * {LD}u; e += 32u) shared_right[e] = right[e];
  // staged
simdgroup_barrier(mem_flags::mem_threadgroup);
  left_load_shared<LEFT>(l, shared_left, {LD}u, lane);
  right_load_shared<RIGHT>(r, shared_right, {LD}u, lane);
}} else {{
  left_load<LEFT>(l, left, {LD}u, lane);
  right_load<RIGHT>(r, right, {LD}u, lane);
}}
sum_tile sum;
sum_fill(sum, 1.0f);
tile_multiply(sum, l, r);
sum_store_shared(sum, shared_sums, 8u, lane);
// summed
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint e = lane; e < 128u; e += 32u) out[e] = shared_sums[e];

// By single numbers: left [16, 16] times the rounded sums, plus left times the first eight rows of itself.
left_tile<T> whole;
UNROLL for (int i = 0; i < 2; ++i) {{
  UNROLL for (int j = 0; j < 2; ++j) {{
    const uint row = uint(i) * 8u + tile_row(lane), column = uint(j) * 8u + tile_column(lane);
    uint pair[2];
    for (uint n = 0u; n < 2u; ++n) {{
      const uint at = LEFT ? (column + n) * {LD}u + row : row * {LD}u + column + n;
      pair[n] = uint(as_type<ushort>(T(left[at])));
    }}
    left_set(whole, i, j, pair[0] | pair[1] << 16);
  }}
}}
sum_tile again;
sum_fill(again, 0.0f);
right_tile<T> turned;
right_from_sums(turned, sum);
tile_multiply(again, whole, turned);
UNROLL for (uint i = 0u; i < 2u; ++i) {{
  uint pair[2];
  for (uint n = 2u * i; n < 2u * i + 2u; ++n) {{
    const uint row = right_column(lane, n), column = right_row(lane, n);
    pair[n % 2u] = uint(as_type<ushort>(T(left[LEFT ? column * {LD}u + row : row * {LD}u + column])));
  }}
  right_set(turned, int(i), pair[0] | pair[1] << 16);
  right_set(turned, int(i), right_get(turned, int(i)));
}}
tile_multiply(again, whole, turned);
UNROLL for (int i = 0; i < 4; ++i) {{
  const uint row = uint(i / 2) * 8u + tile_row(lane);
  chained[row * 8u + tile_column(lane) + uint(i % 2)] = sum_get(again, i);
}}
"""
TEXT = f"""// kernel: tiles
// inputs: left right
// dense: left right
// outputs: out chained
// template: typename T, bool LEFT, bool RIGHT, bool SHARED
{BODY}"""


def call(dtype: mx.Dtype, left: bool, right: bool, shared: bool) -> Launch:
    """A launch of one simdgroup.

    left, right: whether that side lies transposed; shared: whether it is read from threadgroup memory.
    """
    header = loader.load("attention_decode")["merge"].header
    kernel = loader.parse("tiles", TEXT, header)["tiles"]
    sides = [mx.random.normal((n, LD), key=mx.random.key(n + 1)).astype(dtype) for n in (16, 8 if right else 16)]
    template = kernel.arguments(T=dtype, LEFT=left, RIGHT=right, SHARED=shared)
    return Launch(kernel, sides, template, (32, 1, 1), (32, 1, 1), [(16, 8), (16, 8)], [mx.float32] * 2)


def expected(made: Launch) -> tuple[np.ndarray, np.ndarray]:
    """What `call` should give, in float64."""
    chosen = dict(made.template)
    left, right = (np.array(array.astype(mx.float32), np.float64) for array in made.inputs)
    left = left[:, :16].T if chosen["LEFT"] else left[:, :16]
    right = right[:, :16].T if chosen["RIGHT"] else right[:, :8]
    out = left @ right + 1
    rounded = np.array(mx.array(out.astype(np.float32)).astype(chosen["T"]).astype(mx.float32), np.float64)
    return out, left @ rounded + left @ left[:8].T
