// What stands between an attention layer's projections and its cache for a few new rows: RMSNorm over each head of
// queries and keys and the rotary embedding of its leading 64 dimensions, head_dim 256, in one launch (rotary.py).
// Pairs are half-split (i, i + 32); angles are float32, position · base^(-i / 32), as mx.fast.rope has them on a GPU.
//
// q [1, rows, heads · 512] holds query and gate of each head side by side, k [1, rows, kv heads · 256]; both of T, read
// by their strides, so that they may be parts of one product's output. position int32 [1] is that of the first row.

// kernel: rotate
// inputs: q k q_gain k_gain position
// dense: q_gain k_gain position
// outputs: q_out k_out
// template: typename T, int SIMDGROUPS, int EPS_BITS, int BASE_BITS
//
// q_gain, k_gain [256]. EPS_BITS, BASE_BITS: the norm's epsilon and log2(base) as float32.
// q_out [heads, rows, 256] and k_out [kv heads, rows, 256] of T.
// Grid: (heads + kv heads, rounded up to a multiple of SIMDGROUPS) × rows simdgroups, one a head and row.
// SIMDGROUPS  simdgroups of a threadgroup.
const uint lane = thread_index_in_simdgroup;
const uint row = threadgroup_position_in_grid.y;
const uint rows = uint(q_shape[1]);
const uint q_heads = uint(q_shape[2]) / 512u;
const uint kv_heads = uint(k_shape[2]) / 256u;
const uint head = threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup;

if (head < q_heads + kv_heads) {
  const bool query = head < q_heads;
  const uint own = query ? head : head - q_heads;
  // Columns 32 apart: the two of a rotary pair lie in one lane, and its number is the pair's.
  float x[8];
  float square = 0.0f;
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint column = uint(i) * 32u + lane;
    x[i] = query ? float(q[row * q_strides[1] + (own * 512u + column) * q_strides[2]])
                 : float(k[row * k_strides[1] + (own * 256u + column) * k_strides[2]]);
    square = multiply_add(x[i], x[i], square);
  }
  const float scale = rsqrt_of(simd_sum(square) * (1.0f / 256.0f) + as_type<float>(EPS_BITS));
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint column = uint(i) * 32u + lane;
    x[i] *= scale * (query ? float(q_gain[column]) : float(k_gain[column]));
  }
  const float angle = float(uint(position[0]) + row) * exp2_of(float(lane) * (-1.0f / 32.0f) * as_type<float>(BASE_BITS));
  const float cosine = cos_of(angle);
  const float sine = sin_of(angle);
  const float turned = x[0] * cosine - x[1] * sine;
  x[1] = x[0] * sine + x[1] * cosine;
  x[0] = turned;
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint to = (own * rows + row) * 256u + uint(i) * 32u + lane;
    if (query) {
      q_out[to] = T(x[i]);
    } else {
      k_out[to] = T(x[i]);
    }
  }
}
