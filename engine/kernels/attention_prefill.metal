// Prefill attention: softmax(q kᵀ · scale) v of many new rows over the cache and themselves, causal (lower right),
// head_dim 256, by matrix tiles, for the variant `metal` of the op `prefill_attention` (attention_prefill.py). No array
// of scores: a running maximum and sum go with each row. `lay` comes first, `attend` does the rest.

// kernel: lay
// inputs: keys values
// dense: none
// outputs: laid_keys laid_values
// template: typename T, int SIMDGROUPS
//
// Keys and values as left tiles in the order in which a lane holds them (left_set), a word of 16 bytes a lane, so that
// every load of `attend` is one coalesced access; a percent of its time and as much memory as what is shown of the cache.
// keys, values [1, kv heads, n, 256] of T by their strides, last axis dense, rows on 4 bytes.
// laid_keys [kv heads, blocks, 16, 32 lanes, 8]: tile d holds 16 keys × dims 16 d …; laid_values alike: tile d holds
// dims 16 d … × 16 keys. Keys past n are zeros. Grid: a simdgroup takes a block of 16 keys.
const uint lane = thread_index_in_simdgroup;
const uint block = threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y;
const uint blocks = threadgroups_per_grid.x * uint(SIMDGROUPS);
REFUSE_UNLESS(
    keys_strides[3] == 1 && values_strides[3] == 1 && keys_strides[2] % 2 == 0, laid_keys, T,
    thread_index_in_threadgroup + threadgroup_position_in_grid.x + head == 0u)

const uint n = uint(keys_shape[2]);
const device T* key_rows = keys + head * keys_strides[1];
const device T* value_rows = values + head * values_strides[1];
const uint to = (head * blocks + block) * 16u;
for (uint d = 0u; d < 16u; ++d) {
  uint key[4];
  uint value[4];
  UNROLL for (uint e = 0u; e < 4u; ++e) {
    const uint at = block * 16u + e % 2u * 8u + tile_row(lane);
    const uint dim = d * 16u + e / 2u * 8u + tile_column(lane);
    key[e] = at < n ? ((const device uint*)(key_rows + at * keys_strides[2] + dim))[0] : 0u;
    const uint first = block * 16u + e / 2u * 8u + tile_column(lane);
    const device T* column = value_rows + d * 16u + e % 2u * 8u + tile_row(lane);
    value[e] = 0u;
    if (first < n) value[e] = uint(as_type<ushort>(column[first * values_strides[2]]));
    if (first + 1u < n) value[e] |= uint(as_type<ushort>(column[(first + 1u) * values_strides[2]])) << 16;
  }
  uint4 word;
  word.x = key[0];
  word.y = key[1];
  word.z = key[2];
  word.w = key[3];
  ((device uint4*)laid_keys)[(to + d) * 32u + lane] = word;
  word.x = value[0];
  word.y = value[1];
  word.z = value[2];
  word.w = value[3];
  ((device uint4*)laid_values)[(to + d) * 32u + lane] = word;
}

// kernel: attend
// inputs: q keys laid_keys laid_values
// dense: laid_keys laid_values
// outputs: out
// template: typename T, int TOKENS, int SIMDGROUPS, int SCALE_BITS
//
// q [1, heads, rows, 256] of T by its strides, last axis dense; of keys [1, kv heads, n, 256] only the shape is read;
// laid_keys and laid_values as `lay` leaves them; out [1, rows, heads, 256] of T. The first row sees n - rows + 1 keys.
// SCALE_BITS holds scale · log2(e) as float32.
// Scores are products of T summed in float32, weights are rounded to T. Keys are the rows of the scores and dims the rows
// of the output, tokens the columns of both.
// Grid: a simdgroup takes TOKENS tokens of a head, a threadgroup as many heads of one kv head as it has simdgroups: they
// read the same keys and values at about the same time. The tokens that see most start first.
// TOKENS      8 or 16; half of them take half of the registers.
// SIMDGROUPS  simdgroups of a threadgroup: 4 or 8, a divisor of the heads that share a kv head.
constexpr int NQ = TOKENS / 8;
constexpr uint KEYS = 32u;
const uint lane = thread_index_in_simdgroup;
const uint rows = uint(q_shape[2]);
const uint head = threadgroup_position_in_grid.y * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup;
const uint heads = uint(q_shape[1]);
const uint kv_head = head / (heads / uint(laid_keys_shape[0]));
const uint first = (threadgroups_per_grid.x - 1u - threadgroup_position_in_grid.x) * uint(TOKENS);
REFUSE_UNLESS(
    q_strides[3] == 1 && keys_strides[3] == 1, out, T,
    thread_index_in_threadgroup + threadgroup_position_in_grid.x + threadgroup_position_in_grid.y == 0u)

const uint row = tile_row(lane);
const uint column = tile_column(lane);
const float factor = as_type<float>(SCALE_BITS);
// Tokens past the last are worked on as if they were there, reading the last one's query, and not stored.
right_tile<T> query[NQ][16];
UNROLL for (int c = 0; c < NQ; ++c) {
  UNROLL for (int d = 0; d < 16; ++d) {
    UNROLL for (int i = 0; i < 2; ++i) {
      uint pair[2];
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint asked = first + uint(c) * 8u + right_column(lane, uint(2 * i + e));
        const uint token = asked < rows ? asked : rows - 1u;
        const uint dim = uint(d) * 16u + right_row(lane, uint(2 * i + e));
        pair[e] = uint(as_type<ushort>(q[head * q_strides[1] + token * q_strides[2] + dim]));
      }
      right_set(query[c][d], i, pair[0] | pair[1] << 16);
    }
  }
}

sum_tile sum[NQ][16];
float largest[NQ][2];  // of columns `column` and the next
float weight[NQ][2];
UNROLL for (int c = 0; c < NQ; ++c) {
  UNROLL for (int d = 0; d < 16; ++d) sum_fill(sum[c][d], 0.0f);
  UNROLL for (int i = 0; i < 2; ++i) {
    largest[c][i] = -1.0e30f;
    weight[c][i] = 0.0f;
  }
}

const uint before = uint(keys_shape[2]) - rows;
const uint last = first + uint(TOKENS) < rows ? first + uint(TOKENS) : rows;
const uint end = before + last;
const uint laid = kv_head * uint(laid_keys_shape[1]) * 512u + lane;
for (uint base = 0u; base < end; base += KEYS) {
  const device uint4* key_words = (const device uint4*)laid_keys + laid + base * 32u;
  const device uint4* value_words = (const device uint4*)laid_values + laid + base * 32u;
  sum_tile score[2][NQ];
  UNROLL for (int u = 0; u < 2; ++u) {
    UNROLL for (int c = 0; c < NQ; ++c) sum_fill(score[u][c], 0.0f);
  }
  UNROLL for (int d = 0; d < 16; ++d) {
    UNROLL for (int u = 0; u < 2; ++u) {
      const uint4 word = key_words[u * 512 + d * 32];
      left_tile<T> left;
      left_set(left, 0, 0, word.x);
      left_set(left, 1, 0, word.y);
      left_set(left, 0, 1, word.z);
      left_set(left, 1, 1, word.w);
      UNROLL for (int c = 0; c < NQ; ++c) tile_multiply(score[u][c], left, query[c][d]);
    }
  }

  if (base + KEYS > before + first + 1u) {
    UNROLL for (int u = 0; u < 2; ++u) {
      UNROLL for (int c = 0; c < NQ; ++c) {
        UNROLL for (int i = 0; i < 4; ++i) {
          const uint key = base + uint(u) * 16u + uint(i / 2) * 8u + row;
          const uint sees = before + first + uint(c) * 8u + column + uint(i % 2);
          if (key > sees) sum_set(score[u][c], i, -1.0e30f);
        }
      }
    }
  }
  float top[NQ][2];
  bool grown = false;
  UNROLL for (int c = 0; c < NQ; ++c) {
    UNROLL for (int i = 0; i < 2; ++i) {
      top[c][i] = largest[c][i];
      UNROLL for (int u = 0; u < 2; ++u) {
        UNROLL for (int w = 0; w < 2; ++w) {
          const float number = sum_get(score[u][c], 2 * w + i) * factor;
          top[c][i] = number > top[c][i] ? number : top[c][i];
        }
      }
      top[c][i] = tile_rows_max(top[c][i]);
      grown = grown || top[c][i] > largest[c][i];
    }
  }
  // Past the first blocks a maximum seldom grows, and the output need not be scaled.
  if (simd_max(uint(grown)) != 0u) {
    UNROLL for (int c = 0; c < NQ; ++c) {
      float scaled[2];
      UNROLL for (int i = 0; i < 2; ++i) {
        scaled[i] = exp2_of(largest[c][i] - top[c][i]);
        largest[c][i] = top[c][i];
        weight[c][i] *= scaled[i];
      }
      UNROLL for (int d = 0; d < 16; ++d) {
        UNROLL for (int i = 0; i < 4; ++i) sum_set(sum[c][d], i, sum_get(sum[c][d], i) * scaled[i % 2]);
      }
    }
  }
  right_tile<T> weights[2][NQ];
  UNROLL for (int u = 0; u < 2; ++u) {
    UNROLL for (int c = 0; c < NQ; ++c) {
      UNROLL for (int i = 0; i < 4; ++i) {
        const float number = exp2_of(multiply_add(sum_get(score[u][c], i), factor, -largest[c][i % 2]));
        weight[c][i % 2] += number;
        sum_set(score[u][c], i, number);
      }
      right_from_sums(weights[u][c], score[u][c]);
    }
  }
  UNROLL for (int d = 0; d < 16; ++d) {
    UNROLL for (int u = 0; u < 2; ++u) {
      const uint4 word = value_words[u * 512 + d * 32];
      left_tile<T> left;
      left_set(left, 0, 0, word.x);
      left_set(left, 1, 0, word.y);
      left_set(left, 0, 1, word.z);
      left_set(left, 1, 1, word.w);
      UNROLL for (int c = 0; c < NQ; ++c) tile_multiply(sum[c][d], left, weights[u][c]);
    }
  }
}

UNROLL for (int c = 0; c < NQ; ++c) {
  float scaled[2];
  UNROLL for (int i = 0; i < 2; ++i) scaled[i] = 1.0f / tile_rows_sum(weight[c][i]);
  UNROLL for (int i = 0; i < 4; ++i) {
    const uint token = first + uint(c) * 8u + column + uint(i % 2);
    if (token < rows) {
      UNROLL for (int d = 0; d < 16; ++d) {
        const uint dim = uint(d) * 16u + uint(i / 2) * 8u + row;
        out[(token * heads + head) * 256u + dim] = T(sum_get(sum[c][d], i) * scaled[i % 2]);
      }
    }
  }
}
