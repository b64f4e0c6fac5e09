// Decode attention: softmax(q kᵀ · scale) v of a few new rows over the cache, head_dim 256, for the variant `metal` of
// the op `decode_attention` (attention.py). Positions are divided into parts; `split` or `tiles` gives every part its own
// unnormalised sum, its largest score and its sum of weights in float32, and `merge` adds the parts up.
//
// q [1, heads, rows, 256], keys and values [1, kv heads, n, 256] of T; strides are read, so that the used part of a
// larger cache is taken as it lies, but the last axis must be dense and rows must start on 16 bytes. position int32
// [1] is the cache position of the first row: row r sees keys 0 … position + r. SCALE_BITS holds
// scale · log2(e) as float32, since weights are powers of two. With FRESH the cache holds the positions before the first
// row only, and those from there on are fresh_keys and fresh_values [1, kv heads, rows, 256] of T.
//
// With PAGED keys and values are pools of pages of 256 positions, [1, kv heads, pages · 256, 256], and more_keys and
// more_values further ones; places int32 holds, for each 256 positions, the number of a page of the pool or -1 - that of one
// of the further pages. With RECENT (and FRESH) the cache, in pages or not, holds the positions before recent_from[0] only,
// and those from there to the first new row are recent_keys and recent_values [1, kv heads, …, 256] of T. None of these is
// read otherwise.

// kernel: split
// inputs: q keys values fresh_keys fresh_values more_keys more_values places recent_keys recent_values recent_from position
// dense: places recent_from position
// outputs: partial sums
// template: typename T, typename O, int G, int SIMDGROUPS, int CHUNK, bool COALESCED, bool FINAL, bool FRESH, bool RECENT, int SCALE_BITS, bool PAGED
//
// partial [heads, rows, parts, 256] of O, sums float32 [heads, rows, parts, 2] = (largest score, sum of weights).
// Grid: parts × (heads / G) × rows threadgroups of SIMDGROUPS simdgroups.
// T       type of q, keys and values.
// G       query heads (of one key/value head) that share every fetch of a key and a value: 1, 2, 4 or 8.
// CHUNK   positions of a part; 0: the positions seen are divided evenly among the parts of the grid.
// COALESCED  lanes read neighbouring 16-byte words of a row; otherwise apart, each lane walking a row of its own.
// FINAL   there is one part: O is T and partial the finished rows.
// FRESH   rows at `position` and after come from fresh_keys and fresh_values, which are not read otherwise.
// RECENT  positions from recent_from[0] to the first new row are rows of recent_keys and recent_values.
// PAGED   keys and values lie in pages.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint part = threadgroup_position_in_grid.x;
const uint group = threadgroup_position_in_grid.y;
const uint row = threadgroup_position_in_grid.z;
REFUSE_UNLESS(
    q_strides[3] == 1 && keys_strides[3] == 1 && values_strides[3] == 1 && fresh_keys_strides[3] == 1 &&
        fresh_values_strides[3] == 1 && more_keys_strides[3] == 1 && more_values_strides[3] == 1 &&
        recent_keys_strides[3] == 1 && recent_values_strides[3] == 1,
    partial, O, index + part + group + row == 0u)

const uint kv_head = group * uint(G) / (uint(q_shape[1]) / uint(keys_shape[1]));
const device T* q_row = q + group * uint(G) * q_strides[1] + row * q_strides[2];
const device T* key_rows = keys + kv_head * keys_strides[1];
const device T* value_rows = values + kv_head * values_strides[1];
const device T* fresh_key_rows = fresh_keys + kv_head * fresh_keys_strides[1];
const device T* fresh_value_rows = fresh_values + kv_head * fresh_values_strides[1];
const device T* more_key_rows = more_keys + kv_head * more_keys_strides[1];
const device T* more_value_rows = more_values + kv_head * more_values_strides[1];
const device T* recent_key_rows = recent_keys + kv_head * recent_keys_strides[1];
const device T* recent_value_rows = recent_values + kv_head * recent_values_strides[1];

const uint settled = RECENT ? uint(recent_from[0]) : 0u;
// Of pages it is the caller who shows no more than there are.
const uint n = PAGED ? 0xffffffffu : uint(keys_shape[2]);
const uint cached = FRESH && uint(position[0]) < n ? uint(position[0]) : n;
const uint visible = FRESH ? cached + row + 1u : uint(position[0]) + row + 1u;
const uint seen = FRESH || visible < n ? visible : n;
const uint parts = threadgroups_per_grid.x;
const uint length = CHUNK > 0 ? uint(CHUNK) : (seen + parts - 1u) / parts;
const uint first = part * length;
const uint end = first + length < seen ? first + length : seen;

// A lane holds 8 of a row's 256 numbers: one 16-byte word of a 16-bit type, two of float32.
constexpr int PER_WORD = 16 / int(sizeof(T));
constexpr int WORDS = 8 / PER_WORD;
constexpr float NOTHING = -1.0e30f;
THREADGROUP_ARRAY(float, shared_q, COALESCED ? 1 : G * 256);
THREADGROUP_ARRAY(float, shared_out, SIMDGROUPS * 256);
THREADGROUP_ARRAY(float, shared_largest, SIMDGROUPS * G);
THREADGROUP_ARRAY(float, shared_weight, SIMDGROUPS * G);

float out[G][8];
UNROLL for (int g = 0; g < G; ++g) {
  UNROLL for (int i = 0; i < 8; ++i) out[g][i] = 0.0f;
}

if constexpr (COALESCED) {
  constexpr int ROWS = 4;
  constexpr int SCORES = ROWS * G;
  float query[G][8];
  UNROLL for (int g = 0; g < G; ++g) {
    UNROLL for (int w = 0; w < WORDS; ++w) {
      load_word(q_row + g * q_strides[1] + (w * 32 + int(lane)) * PER_WORD, query[g] + w * PER_WORD);
    }
    UNROLL for (int i = 0; i < 8; ++i) query[g][i] *= as_type<float>(SCALE_BITS);
  }
  // Of the scores of ROWS positions and G heads the lane keeps number `lane % SCORES`, head `lane % G`.
  float largest = NOTHING;
  float weight_sum = 0.0f;
  for (uint base = first + simdgroup * uint(ROWS); base < end; base += uint(SIMDGROUPS * ROWS)) {
    float value[ROWS][8];
    float score[SCORES];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      float key[8];
      UNROLL for (int i = 0; i < 8; ++i) {
        key[i] = 0.0f;
        value[r][i] = 0.0f;
      }
      const uint at = base + uint(r);
      if (at < end) {
        const device T* key_row;
        const device T* value_row;
        if (FRESH && at >= cached) {
          key_row = fresh_key_rows + (at - cached) * fresh_keys_strides[2];
          value_row = fresh_value_rows + (at - cached) * fresh_values_strides[2];
        } else if (RECENT && at >= settled) {
          key_row = recent_key_rows + (at - settled) * recent_keys_strides[2];
          value_row = recent_value_rows + (at - settled) * recent_values_strides[2];
        } else {
          const int page = PAGED ? int(places[at / 256u]) : 0;
          const uint slot = PAGED ? uint(page < 0 ? -1 - page : page) * 256u + at % 256u : at;
          key_row = page < 0 ? more_key_rows + slot * more_keys_strides[2] : key_rows + slot * keys_strides[2];
          value_row =
              page < 0 ? more_value_rows + slot * more_values_strides[2] : value_rows + slot * values_strides[2];
        }
        UNROLL for (int w = 0; w < WORDS; ++w) {
          const uint column = (uint(w) * 32u + lane) * uint(PER_WORD);
          load_word(key_row + column, key + w * PER_WORD);
          load_word(value_row + column, value[r] + w * PER_WORD);
        }
      }
      UNROLL for (int g = 0; g < G; ++g) {
        float dot = 0.0f;
        UNROLL for (int i = 0; i < 8; ++i) dot = multiply_add(query[g][i], key[i], dot);
        score[r * G + g] = dot;
      }
    }
    float mine = simd_sum_each<SCORES>(score, lane);
    if (base + (lane % uint(SCORES)) / uint(G) >= end) mine = NOTHING;
    float top = mine;
    UNROLL for (int mask = G; mask < SCORES; mask *= 2) {
      const float other = simd_shuffle_xor(top, ushort(mask));
      top = other > top ? other : top;
    }
    top = top > largest ? top : largest;
    const float fade = exp2_of(largest - top);
    const float weight = exp2_of(mine - top);
    largest = top;
    weight_sum = multiply_add(weight_sum, fade, weight);
    UNROLL for (int g = 0; g < G; ++g) {
      const float f = simd_shuffle(fade, ushort(g));
      UNROLL for (int i = 0; i < 8; ++i) out[g][i] *= f;
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const float p = simd_shuffle(weight, ushort(r * G + g));
        UNROLL for (int i = 0; i < 8; ++i) out[g][i] = multiply_add(p, value[r][i], out[g][i]);
      }
    }
  }
  UNROLL for (int mask = G; mask < SCORES; mask *= 2) weight_sum += simd_shuffle_xor(weight_sum, ushort(mask));
  if (lane < uint(G)) {
    shared_largest[simdgroup * uint(G) + lane] = largest;
    shared_weight[simdgroup * uint(G) + lane] = weight_sum;
  }
} else {
  for (uint e = index; e < uint(G) * 256u; e += uint(SIMDGROUPS) * 32u) {
    shared_q[e] = float(q_row[(e / 256u) * q_strides[1] + e % 256u]) * as_type<float>(SCALE_BITS);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float largest[G];
  float weight_sum[G];
  UNROLL for (int g = 0; g < G; ++g) {
    largest[g] = NOTHING;
    weight_sum[g] = 0.0f;
  }
  for (uint base = first + simdgroup * 32u; base < end; base += uint(SIMDGROUPS) * 32u) {
    float score[G];
    UNROLL for (int g = 0; g < G; ++g) score[g] = base + lane < end ? 0.0f : NOTHING;
    if (base + lane < end) {
      const uint own = base + lane;
      const device T* key_row;
      if (FRESH && own >= cached) {
        key_row = fresh_key_rows + (own - cached) * fresh_keys_strides[2];
      } else if (RECENT && own >= settled) {
        key_row = recent_key_rows + (own - settled) * recent_keys_strides[2];
      } else {
        const int page = PAGED ? int(places[own / 256u]) : 0;
        const uint slot = PAGED ? uint(page < 0 ? -1 - page : page) * 256u + own % 256u : own;
        key_row = page < 0 ? more_key_rows + slot * more_keys_strides[2] : key_rows + slot * keys_strides[2];
      }
      for (uint at = 0u; at < 256u; at += uint(PER_WORD)) {
        float key[PER_WORD];
        load_word(key_row + at, key);
        UNROLL for (int g = 0; g < G; ++g) {
          UNROLL for (int i = 0; i < PER_WORD; ++i) {
            score[g] = multiply_add(shared_q[uint(g) * 256u + at + uint(i)], key[i], score[g]);
          }
        }
      }
    }
    UNROLL for (int g = 0; g < G; ++g) {
      float top = simd_max(score[g]);
      top = top > largest[g] ? top : largest[g];
      const float fade = exp2_of(largest[g] - top);
      score[g] = exp2_of(score[g] - top);
      largest[g] = top;
      weight_sum[g] = multiply_add(weight_sum[g], fade, score[g]);
      UNROLL for (int i = 0; i < 8; ++i) out[g][i] *= fade;
    }
    const uint count = end - base < 32u ? end - base : 32u;
    for (uint r = 0u; r < count; ++r) {
      const uint next = base + r;
      const device T* value_row;
      if (FRESH && next >= cached) {
        value_row = fresh_value_rows + (next - cached) * fresh_values_strides[2];
      } else if (RECENT && next >= settled) {
        value_row = recent_value_rows + (next - settled) * recent_values_strides[2];
      } else {
        const int page = PAGED ? int(places[next / 256u]) : 0;
        const uint slot = PAGED ? uint(page < 0 ? -1 - page : page) * 256u + next % 256u : next;
        value_row =
            page < 0 ? more_value_rows + slot * more_values_strides[2] : value_rows + slot * values_strides[2];
      }
      float value[8];
      UNROLL for (int i = 0; i < 8; ++i) value[i] = float(value_row[uint(i) * 32u + lane]);
      UNROLL for (int g = 0; g < G; ++g) {
        const float p = simd_shuffle(score[g], ushort(r));
        UNROLL for (int i = 0; i < 8; ++i) out[g][i] = multiply_add(p, value[i], out[g][i]);
      }
    }
  }
  UNROLL for (int g = 0; g < G; ++g) {
    const float total = simd_sum(weight_sum[g]);
    if (lane == 0u) {
      shared_largest[simdgroup * uint(G) + uint(g)] = largest[g];
      shared_weight[simdgroup * uint(G) + uint(g)] = total;
    }
  }
}

// The simdgroups' sums are brought to one largest score and added, a head at a time.
UNROLL for (int g = 0; g < G; ++g) {
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint at = COALESCED ? (uint(i / PER_WORD) * 32u + lane) * uint(PER_WORD) + uint(i % PER_WORD)
                              : uint(i) * 32u + lane;
    shared_out[simdgroup * 256u + at] = out[g][i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float largest = NOTHING;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) {
    const float other = shared_largest[s * G + g];
    largest = other > largest ? other : largest;
  }
  float scaled[SIMDGROUPS];
  float total = 0.0f;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) {
    scaled[s] = exp2_of(shared_largest[s * G + g] - largest);
    total = multiply_add(scaled[s], shared_weight[s * G + g], total);
  }
  const uint slot = ((group * uint(G) + uint(g)) * uint(q_shape[2]) + row) * parts + part;
  for (uint d = index; d < 256u; d += uint(SIMDGROUPS) * 32u) {
    float sum = 0.0f;
    UNROLL for (int s = 0; s < SIMDGROUPS; ++s) sum = multiply_add(scaled[s], shared_out[uint(s) * 256u + d], sum);
    partial[slot * 256u + d] = O(FINAL ? sum / total : sum);
  }
  if (index == 0u) {
    sums[slot * 2u] = largest;
    sums[slot * 2u + 1u] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// kernel: tiles
// inputs: q keys values fresh_keys fresh_values recent_keys recent_values recent_from position
// dense: recent_from position
// outputs: partial sums
// template: typename T, typename O, int SIMDGROUPS, int CHUNK, bool AHEAD, bool FINAL, bool FRESH, bool RECENT, int SCALE_BITS
//
// What `split` computes, by matrix tiles: 8 query heads of a key/value head are the columns, positions the rows of the
// scores, columns of values the rows of the output. Weights are rounded to T, a 16-bit type, and added in float32.
// partial and sums, CHUNK, FINAL, FRESH and RECENT as there. Grid: (rows × parts) × (heads / 8) threadgroups, rows first, since
// threadgroups that start together then read the same keys and values.
//
// AHEAD  a step of a simdgroup is 16 positions, whose keys and values are all on their way before any is used: 16 KiB in
//         flight for 128 registers. Otherwise it is 32 positions, loaded where they are used.
//
// Keys are taken as 16-byte words along a row, four lanes a row: the words of a
// lane are the columns of four tiles, so these hold the dimensions in another order, and the query is laid out to match.
// Values are taken as 16-byte words of the two rows that are neighbours in a tile, and paired number by number.
// Positions past the end read the last row instead and get no weight.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint rows = uint(q_shape[2]);
const uint row = threadgroup_position_in_grid.x % rows;
const uint part = threadgroup_position_in_grid.x / rows;
const uint group = threadgroup_position_in_grid.y;
REFUSE_UNLESS(
    q_strides[3] == 1 && keys_strides[3] == 1 && values_strides[3] == 1 && fresh_keys_strides[3] == 1 &&
        fresh_values_strides[3] == 1 && recent_keys_strides[3] == 1 && recent_values_strides[3] == 1,
    partial, O, index + part + group + row == 0u)

const uint kv_head = group * 8u / (uint(q_shape[1]) / uint(keys_shape[1]));
const device T* query = q + group * 8u * q_strides[1] + row * q_strides[2];
const device T* key_rows = keys + kv_head * keys_strides[1];
const device T* value_rows = values + kv_head * values_strides[1];
const device T* fresh_key_rows = fresh_keys + kv_head * fresh_keys_strides[1];
const device T* fresh_value_rows = fresh_values + kv_head * fresh_values_strides[1];
const device T* recent_key_rows = recent_keys + kv_head * recent_keys_strides[1];
const device T* recent_value_rows = recent_values + kv_head * recent_values_strides[1];

const uint n = uint(keys_shape[2]);
const uint settled = RECENT ? uint(recent_from[0]) : 0u;
const uint cached = FRESH && uint(position[0]) < n ? uint(position[0]) : n;
const uint visible = FRESH ? cached + row + 1u : uint(position[0]) + row + 1u;
const uint seen = FRESH || visible < n ? visible : n;
const uint parts = threadgroups_per_grid.x / rows;
const uint length = CHUNK > 0 ? uint(CHUNK) : (seen + parts - 1u) / parts;
const uint first = part * length;
const uint end = first + length < seen ? first + length : seen;

constexpr float NOTHING = -1.0e30f;
// 64 columns of 8 heads, in 8 strips apart enough to fall into different banks.
constexpr uint STRIP = 68u;
THREADGROUP_ARRAY(uint, shared_q, 1024);
THREADGROUP_ARRAY(float, shared_out, SIMDGROUPS * 544);
THREADGROUP_ARRAY(float, shared_largest, SIMDGROUPS * 8);
THREADGROUP_ARRAY(float, shared_weight, SIMDGROUPS * 8);

// The query as right tiles: pair i of a lane in tile t, whose columns are the dimensions that a lane's half word has.
for (uint e = index; e < 1024u; e += uint(SIMDGROUPS) * 32u) {
  const uint tile = e / 64u;
  const uint owner = e / 2u % 32u;
  uint pair[2];
  UNROLL for (uint i = 0u; i < 2u; ++i) {
    const uint k = right_row(owner, e % 2u * 2u + i);
    const uint dim = tile / 2u * 32u + k % 8u / 2u * 8u + tile % 2u * 4u + k / 8u * 2u + k % 2u;
    pair[i] = uint(as_type<ushort>(T(query[right_column(owner, e % 2u * 2u + i) * q_strides[1] + dim])));
  }
  shared_q[e] = pair[0] | pair[1] << 16;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const uint tile_r = tile_row(lane);
const uint tile_c = tile_column(lane);
sum_tile out[16];
UNROLL for (int t = 0; t < 16; ++t) sum_fill(out[t], 0.0f);
// Of heads tile_c and tile_c + 1.
float largest[2] = {NOTHING, NOTHING};
float weight_sum[2] = {0.0f, 0.0f};

constexpr int TILES = AHEAD ? 1 : 2;
const float factor = as_type<float>(SCALE_BITS);
const uint kept = FRESH ? cached : 0xffffffffu;
constexpr uint STEP = 16u * uint(TILES);

for (uint base = first + simdgroup * STEP; base < end; base += uint(SIMDGROUPS) * STEP) {
  const device T* key_row[TILES * 2];
  UNROLL for (int a = 0; a < TILES * 2; ++a) {
    const uint at = base + uint(a) * 8u + tile_r;
    key_row[a] = tile_c * 4u + row_of<RECENT>(
                                   key_rows, keys_strides[2], recent_key_rows, recent_keys_strides[2], settled,
                                   fresh_key_rows, fresh_keys_strides[2], kept, at, end);
  }
  uint key[8][TILES * 2][4];
  uint value[TILES][4][4][4];
  if constexpr (AHEAD) {
    UNROLL for (int j = 0; j < 8; ++j) {
      UNROLL for (int a = 0; a < TILES * 2; ++a) load_pairs(key_row[a] + j * 32, key[j][a]);
    }
    UNROLL for (int a = 0; a < 4; ++a) {
      const uint at = base + uint(a / 2) * 8u + tile_c + uint(a % 2);
      const device T* value_row = row_of<RECENT>(
          value_rows, values_strides[2], recent_value_rows, recent_values_strides[2], settled, fresh_value_rows,
          fresh_values_strides[2], kept, at, end);
      UNROLL for (int j = 0; j < 4; ++j) load_pairs(value_row + tile_r * 8u + j * 64, value[0][j][a]);
    }
    // Nothing to wait for, but compilers do not move loads past it.
    simdgroup_barrier(mem_flags::mem_none);
  }

  // Two sums a tile, since each product waits for the one before it in a sum.
  sum_tile score[TILES][2];
  UNROLL for (int p = 0; p < TILES; ++p) {
    UNROLL for (int h = 0; h < 2; ++h) sum_fill(score[p][h], 0.0f);
  }
  UNROLL for (int j = 0; j < 8; ++j) {
    if constexpr (!AHEAD) {
      UNROLL for (int a = 0; a < TILES * 2; ++a) load_pairs(key_row[a] + j * 32, key[j][a]);
    }
    UNROLL for (int h = 0; h < 2; ++h) {
      right_tile<T> right;
      UNROLL for (int i = 0; i < 2; ++i) right_set(right, i, shared_q[uint((2 * j + h) * 64 + i) + lane * 2u]);
      UNROLL for (int p = 0; p < TILES; ++p) {
        left_tile<T> left;
        UNROLL for (int i = 0; i < 2; ++i) {
          UNROLL for (int k = 0; k < 2; ++k) left_set(left, i, k, key[j][2 * p + i][2 * h + k]);
        }
        tile_multiply(score[p][h], left, right);
      }
    }
  }

  float weight[TILES][4];
  float top[2] = {largest[0], largest[1]};
  UNROLL for (int p = 0; p < TILES; ++p) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const bool inside = base + uint(p * 16 + i / 2 * 8) + tile_r < end;
      weight[p][i] = inside ? (sum_get(score[p][0], i) + sum_get(score[p][1], i)) * factor : NOTHING;
      top[i % 2] = weight[p][i] > top[i % 2] ? weight[p][i] : top[i % 2];
    }
  }
  float fade[2];
  UNROLL for (int s = 0; s < 2; ++s) {
    top[s] = tile_rows_max(top[s]);
    fade[s] = exp2_of(largest[s] - top[s]);
    largest[s] = top[s];
    weight_sum[s] *= fade[s];
  }
  right_tile<T> weights[TILES];
  UNROLL for (int p = 0; p < TILES; ++p) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const float w = exp2_of(weight[p][i] - largest[i % 2]);
      weight_sum[i % 2] += w;
      sum_set(score[p][0], i, w);
    }
    right_from_sums(weights[p], score[p][0]);
  }
  UNROLL for (int t = 0; t < 16; ++t) {
    UNROLL for (int i = 0; i < 4; ++i) sum_set(out[t], i, sum_get(out[t], i) * fade[i % 2]);
  }

  UNROLL for (int p = 0; p < TILES; ++p) {
    const device T* value_row[4];
    UNROLL for (int a = 0; a < 4; ++a) {
      const uint at = base + uint(p) * 16u + uint(a / 2) * 8u + tile_c + uint(a % 2);
      value_row[a] = tile_r * 8u + row_of<RECENT>(
                                       value_rows, values_strides[2], recent_value_rows, recent_values_strides[2], settled,
                                       fresh_value_rows, fresh_values_strides[2], kept, at, end);
    }
    UNROLL for (int j = 0; j < 4; ++j) {
      if constexpr (!AHEAD) {
        UNROLL for (int a = 0; a < 4; ++a) load_pairs(value_row[a] + j * 64, value[p][j][a]);
      }
      UNROLL for (int w = 0; w < 4; ++w) {
        left_tile<T> left;
        UNROLL for (int k = 0; k < 2; ++k) {
          const uint even = value[p][j][2 * k][w];
          const uint odd = value[p][j][2 * k + 1][w];
          left_set(left, 0, k, (even & 0xffffu) | odd << 16);
          left_set(left, 1, k, even >> 16 | (odd & 0xffff0000u));
        }
        tile_multiply(out[4 * j + w], left, weights[p]);
      }
    }
  }
}

// The simdgroups' sums are brought to one largest score and added, 64 columns at a time.
UNROLL for (int s = 0; s < 2; ++s) {
  weight_sum[s] = tile_rows_sum(weight_sum[s]);
  if (tile_r == 0u) {
    shared_largest[simdgroup * 8u + tile_c + uint(s)] = largest[s];
    shared_weight[simdgroup * 8u + tile_c + uint(s)] = weight_sum[s];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float scaled[2];
UNROLL for (int s = 0; s < 2; ++s) {
  float top = largest[s];
  UNROLL for (int g = 0; g < SIMDGROUPS; ++g) {
    const float other = shared_largest[uint(g) * 8u + tile_c + uint(s)];
    top = other > top ? other : top;
  }
  scaled[s] = exp2_of(largest[s] - top);
}
UNROLL for (int j = 0; j < 4; ++j) {
  UNROLL for (int w = 0; w < 4; ++w) {
    UNROLL for (int i = 0; i < 4; ++i) {
      shared_out[simdgroup * 544u + uint(2 * w + i / 2) * STRIP + (tile_c + uint(i % 2)) * 8u + tile_r] =
          sum_get(out[4 * j + w], i) * scaled[i % 2];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = index; e < 512u; e += uint(SIMDGROUPS) * 32u) {
    const uint head = e / 64u;
    const uint column = e % 64u;
    const uint slot = ((group * 8u + head) * rows + row) * parts + part;
    float sum = 0.0f;
    UNROLL for (int g = 0; g < SIMDGROUPS; ++g) {
      sum += shared_out[uint(g) * 544u + column % 8u * STRIP + head * 8u + column / 8u];
    }
    float top = NOTHING;
    float total = 0.0f;
    if (FINAL || (j == 0 && column == 0u)) {
      UNROLL for (int g = 0; g < SIMDGROUPS; ++g) {
        const float other = shared_largest[uint(g) * 8u + head];
        top = other > top ? other : top;
      }
      UNROLL for (int g = 0; g < SIMDGROUPS; ++g) {
        const float faded = exp2_of(shared_largest[uint(g) * 8u + head] - top);
        total = multiply_add(faded, shared_weight[uint(g) * 8u + head], total);
      }
    }
    if (j == 0 && column == 0u) {
      sums[slot * 2u] = top;
      sums[slot * 2u + 1u] = total;
    }
    partial[slot * 256u + uint(j) * 64u + column] = O(FINAL ? sum / total : sum);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// kernel: merge
// inputs: partial sums
// dense: partial sums
// outputs: out
// template: typename T, int SIMDGROUPS
//
// partial and sums as `split` leaves them, out [heads, rows, 256] of T.
// Grid: 2 × (heads · rows) threadgroups of SIMDGROUPS simdgroups; each adds 128 columns, four a lane.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint column = threadgroup_position_in_grid.x * 128u + lane * 4u;
const uint row = threadgroup_position_in_grid.y;
const uint parts = uint(partial_shape[2]);
THREADGROUP_ARRAY(float, shared_largest, SIMDGROUPS);
THREADGROUP_ARRAY(float, shared_weight, SIMDGROUPS);
THREADGROUP_ARRAY(float, shared_out, SIMDGROUPS * 128);

float largest = -1.0e30f;
for (uint p = index; p < parts; p += uint(SIMDGROUPS) * 32u) {
  const float other = sums[(row * parts + p) * 2u];
  largest = other > largest ? other : largest;
}
largest = simd_max(largest);
if (lane == 0u) shared_largest[simdgroup] = largest;
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int s = 0; s < SIMDGROUPS; ++s) {
  largest = shared_largest[s] > largest ? shared_largest[s] : largest;
}

float total = 0.0f;
float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
for (uint p = simdgroup; p < parts; p += uint(SIMDGROUPS)) {
  const float scaled = exp2_of(sums[(row * parts + p) * 2u] - largest);
  total = multiply_add(scaled, sums[(row * parts + p) * 2u + 1u], total);
  float word[4];
  load_word(partial + (row * parts + p) * 256u + column, word);
  UNROLL for (int i = 0; i < 4; ++i) sum[i] = multiply_add(scaled, word[i], sum[i]);
}
if (lane == 0u) shared_weight[simdgroup] = total;
UNROLL for (int i = 0; i < 4; ++i) shared_out[simdgroup * 128u + lane * 4u + uint(i)] = sum[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (index < 128u) {
  float all = 0.0f;
  float column_sum = 0.0f;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) {
    all += shared_weight[s];
    column_sum += shared_out[uint(s) * 128u + index];
  }
  out[row * 256u + threadgroup_position_in_grid.x * 128u + index] = T(column_sum / all);
}
