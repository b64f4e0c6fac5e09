// Products of many rows with packed weights, for the variants `packed` of the ops `experts` and `linear`
// (experts_prefill.py). `group` sorts the routed pairs of a row and an expert by expert, `products` multiplies tiles of
// rows of one expert, or of a dense matrix, and `combine` weighs and adds what the experts of a row gave.
//
// Weights are as MLX packs them, in groups of 64: codes uint32 [experts, out, in · BITS / 32], scales and biases of T
// [experts, out, in / 64]. T is a 16-bit type: weights are expanded to it, products summed in float32.

// kernel: group
// inputs: ids
// dense: none
// outputs: pairs tiles
// template: int EXPERTS, int CHOSEN, int ROWS, int SIMDGROUPS
//
// ids uint32 [rows, CHOSEN], read by their strides, each less than EXPERTS. pairs uint32 [rows · CHOSEN]: numbers
// row · CHOSEN + place of the pairs, by expert and then in order. tiles uint32 [rows · CHOSEN / ROWS + EXPERTS, 4]:
// expert, where it begins in `pairs`, and how many pairs it has, at most ROWS; 0 for those that are not needed. Those of
// expert e begin at (pairs of lower experts) / ROWS + e, which leaves room for every part of a tile.
// Grid: a threadgroup of SIMDGROUPS simdgroups for each expert; each reads all ids.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint expert = threadgroup_position_in_grid.x;
const uint total = uint(ids_shape[0]) * uint(CHOSEN);
constexpr uint AHEAD = 8u;
constexpr uint STEP = AHEAD * 32u;
THREADGROUP_ARRAY(uint, lower_of, SIMDGROUPS);
THREADGROUP_ARRAY(uint, equal_of, SIMDGROUPS);

// Every simdgroup has a run of the pairs.
const uint steps = (total + STEP * uint(SIMDGROUPS) - 1u) / (STEP * uint(SIMDGROUPS));
const uint first = simdgroup * steps * STEP;
uint lower = 0u;
uint equal = 0u;
for (uint step = 0u; step < steps; ++step) {
  UNROLL for (uint i = 0u; i < AHEAD; ++i) {
    const uint pair = first + step * STEP + i * 32u + lane;
    if (pair < total) {
      const uint id = uint(ids[pair / uint(CHOSEN) * ids_strides[0] + pair % uint(CHOSEN) * ids_strides[1]]);
      lower += id < expert ? 1u : 0u;
      equal += id == expert ? 1u : 0u;
    }
  }
}
lower = simd_sum(lower);
equal = simd_sum(equal);
if (lane == 0u) {
  lower_of[simdgroup] = lower;
  equal_of[simdgroup] = equal;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint begin = 0u;
uint count = 0u;
uint at = 0u;
for (uint s = 0u; s < uint(SIMDGROUPS); ++s) {
  begin += lower_of[s];
  count += equal_of[s];
  at += s < simdgroup ? equal_of[s] : 0u;
}
at += begin;

for (uint step = 0u; step < steps; ++step) {
  UNROLL for (uint i = 0u; i < AHEAD; ++i) {
    const uint pair = first + step * STEP + i * 32u + lane;
    bool here = false;
    if (pair < total) {
      here = uint(ids[pair / uint(CHOSEN) * ids_strides[0] + pair % uint(CHOSEN) * ids_strides[1]]) == expert;
    }
    const uint flags = simd_flags(here, lane);
    if (here) pairs[at + bits_set(flags & ((1u << lane) - 1u))] = pair;
    at += bits_set(flags);
  }
}

const uint first_tile = begin / uint(ROWS) + expert;
const uint end_tile = (begin + count) / uint(ROWS) + expert + 1u;
for (uint tile = first_tile + thread_index_in_threadgroup; tile < end_tile; tile += uint(SIMDGROUPS) * 32u) {
  const uint before = (tile - first_tile) * uint(ROWS);
  const uint left = before < count ? count - before : 0u;
  tiles[tile * 4u] = expert;
  tiles[tile * 4u + 1u] = begin + before;
  tiles[tile * 4u + 2u] = left < uint(ROWS) ? left : uint(ROWS);
  tiles[tile * 4u + 3u] = 0u;
}

// kernel: products
// inputs: x pairs tiles weight scales biases other other_scales other_biases
// dense: pairs tiles weight scales biases other other_scales other_biases
// outputs: out
// template: typename T, int BITS, int CHOSEN, int ROWS, int LEFT, int SIMDGROUPS, int DEPTH, bool GROUPED, bool GATHER, bool SCATTER, bool GATED
//
// x [1, rows, in] of T, its last axis dense and its rows on 16 bytes; weight and other [experts, out, in · BITS / 32] with
// scales and biases, or [experts, out, in] of T if BITS is 16. out [rows of the result, out] of T.
// GROUPED  pairs and tiles as `group` leaves them for ROWS; otherwise they are not read, there is one expert, and tile t
//          has the rows from t · ROWS on.
// GATHER   row pairs[i] / CHOSEN of x is multiplied for place i of `pairs`; otherwise row i.
// SCATTER  the product of place i goes to row pairs[i] of out; otherwise to row i.
// GATED    silu(weight x) · other x; otherwise weight x, and other is not read.
// Grid: tiles × ceil(out / columns) threadgroups of SIMDGROUPS simdgroups, columns first, so that an expert's weights
// are read while they are near; columns = 16 · LEFT · SIMDGROUPS, half of that if GATED.
//
// A simdgroup has LEFT tiles of weights of its own, 16 rows of the matrix each, as the left side of products with all of
// the threadgroup's rows of x: codes go from device memory to where the tile's lanes need them and are expanded there. A
// lane reads 32 weights of a row together, so the order of the inputs in a tile is another: inputs 8 · w + i and 8 · w + i + 4
// of the 32 (w = 0 … 3, i = 0 … 3) are neighbours. Rows of x go through threadgroup memory in that order, DEPTH inputs at
// a time in two buffers, as blocks of 8 × 8 for each tile. Inputs past the end are zeros; rows past it are copies of the
// last, as are rows of weights, and not stored. Codes are asked for 128 inputs ahead.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint inputs = uint(x_shape[2]);
const uint outputs = uint(weight_shape[1]);
constexpr uint THREADS = uint(SIMDGROUPS) * 32u;
constexpr int OWN = GATED ? LEFT / 2 : LEFT;           // tiles of weights that are columns of the result
constexpr uint COLUMNS = uint(OWN) * 16u * uint(SIMDGROUPS);
const uint column_tiles = (outputs + COLUMNS - 1u) / COLUMNS;
const uint tile = threadgroup_position_in_grid.x / column_tiles;
const uint base = threadgroup_position_in_grid.x % column_tiles * COLUMNS + simdgroup * uint(OWN) * 16u;
REFUSE_UNLESS(x_strides[2] == 1, out, T, index + threadgroup_position_in_grid.x == 0u)

uint expert = 0u;
uint first = tile * uint(ROWS);
uint count = uint(x_shape[1]) - first;
if constexpr (GROUPED) {
  expert = uint(tiles[tile * 4u]);
  first = uint(tiles[tile * 4u + 1u]);
  count = uint(tiles[tile * 4u + 2u]);
  if (count == 0u) return;
}
count = count < uint(ROWS) ? count : uint(ROWS);

// Of x a thread moves the same words of 8 inputs of one or several rows.
constexpr uint PLACES = uint(DEPTH) / 8u;
constexpr uint AT_ONCE = THREADS / PLACES;
constexpr uint PASSES = (uint(ROWS) + AT_ONCE - 1u) / AT_ONCE;
constexpr uint APART = uint(ROWS) * 8u + 8u;           // blocks of 8 columns, apart enough to fall into different banks
constexpr uint BUFFER = PLACES * APART / 2u;           // in words of two numbers
constexpr uint WIDTH = uint(OWN) * 16u + 8u;           // of 16 rows of the result on their way out
constexpr uint STAGED = BUFFER * 2u > uint(SIMDGROUPS) * WIDTH * 8u ? BUFFER * 2u : uint(SIMDGROUPS) * WIDTH * 8u;
THREADGROUP_ARRAY(uint, staged, STAGED);
const uint place = index % PLACES;
const uint quarter = place % 4u;
const uint eight = place / 4u;
const device uint4* words_of_x = (const device uint4*)x;
uint row_of_x[PASSES];                                 // in words
UNROLL for (uint p = 0u; p < PASSES; ++p) {
  uint r = p * AT_ONCE + index / PLACES;
  r = first + (r < count ? r : count - 1u);
  if constexpr (GATHER) r = uint(pairs[r]) / uint(CHOSEN);
  row_of_x[p] = uint(r * x_strides[1] / 8) + quarter * 4u + eight;
}

// Of weights a lane has row `tile_row` of both halves of a tile, and a quarter of every 128 inputs.
constexpr int WORDS = BITS / 4;                        // of 16 bytes in a lane's 32 weights
const uint units = inputs / 32u;
const uint own_quarter = tile_column(lane) / 2u;
const device uint4* codes_of[2] = {(const device uint4*)weight, (const device uint4*)other};
uint row_unit[OWN][2];
UNROLL for (int l = 0; l < OWN; ++l) {
  UNROLL for (uint i = 0u; i < 2u; ++i) {
    const uint n = base + uint(l) * 16u + i * 8u + tile_row(lane);
    row_unit[l][i] = (n < outputs ? n : outputs - 1u) * units;
  }
}
codes_of[0] += ulong(expert) * outputs * units * uint(WORDS);
codes_of[1] += ulong(expert) * outputs * units * uint(WORDS);
const ulong first_group = ulong(expert) * outputs * (units / 2u);
const device ushort* scales_of[2] = {
    (const device ushort*)scales + first_group, (const device ushort*)other_scales + first_group};
const device ushort* biases_of[2] = {
    (const device ushort*)biases + first_group, (const device ushort*)other_biases + first_group};

uint next[LEFT][2][BITS];
uint next_scale[LEFT][2];
uint next_bias[LEFT][2];
#define LOAD_WEIGHTS(block)                                                                  \
  UNROLL for (int l = 0; l < LEFT; ++l) {                                                    \
    UNROLL for (int i = 0; i < 2; ++i) {                                                     \
      const uint in_row = (block) * 4u + own_quarter;                                        \
      const uint unit = row_unit[l % OWN][i] + (in_row < units ? in_row : units - 1u);       \
      UNROLL for (int w = 0; w < WORDS; ++w) {                                               \
        const uint4 word = codes_of[l / OWN][unit * uint(WORDS) + uint(w)];                  \
        next[l][i][4 * w] = word.x;                                                          \
        next[l][i][4 * w + 1] = word.y;                                                      \
        next[l][i][4 * w + 2] = word.z;                                                      \
        next[l][i][4 * w + 3] = word.w;                                                      \
      }                                                                                      \
      if constexpr (BITS < 16) {                                                             \
        next_scale[l][i] = scales_of[l / OWN][unit / 2u];                                    \
        next_bias[l][i] = biases_of[l / OWN][unit / 2u];                                     \
      }                                                                                      \
    }                                                                                        \
  }
uint4 moving[PASSES];
#define LOAD_ROWS(from)                                                                      \
  UNROLL for (uint p = 0u; p < PASSES; ++p) {                                                \
    moving[p] = no_codes();                                                                  \
    if ((from) + quarter * 32u + eight * 8u < inputs) moving[p] = words_of_x[row_of_x[p] + (from) / 8u]; \
  }
#define STORE_ROWS(buffer)                                                                                 \
  UNROLL for (uint p = 0u; p < PASSES; ++p) {                                                              \
    const uint r = p * AT_ONCE + index / PLACES;                                                           \
    if (uint(ROWS) % AT_ONCE == 0u || r < uint(ROWS)) {                                                    \
      threadgroup uint* to = staged + (buffer) * BUFFER + eight * 2u * APART + r * 4u + quarter;           \
      to[0] = lower_halves(moving[p].x, moving[p].z);                                                      \
      to[APART / 2u] = upper_halves(moving[p].x, moving[p].z);                                             \
      to[APART] = lower_halves(moving[p].y, moving[p].w);                                                  \
      to[APART / 2u * 3u] = upper_halves(moving[p].y, moving[p].w);                                        \
    }                                                                                                      \
  }

sum_tile sum[LEFT][ROWS / 8];
UNROLL for (int l = 0; l < LEFT; ++l) {
  UNROLL for (int t = 0; t < ROWS / 8; ++t) sum_fill(sum[l][t], 0.0f);
}
constexpr uint PARTS = 128u / uint(DEPTH);
const uint blocks = (inputs + 127u) / 128u;
LOAD_WEIGHTS(0u)
LOAD_ROWS(0u)
STORE_ROWS(0u)
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint block = 0u; block < blocks; ++block) {
  uint codes[LEFT][2][BITS];
  uint scale[LEFT][2];
  uint bias[LEFT][2];
  UNROLL for (int l = 0; l < LEFT; ++l) {
    UNROLL for (int i = 0; i < 2; ++i) {
      UNROLL for (int w = 0; w < BITS; ++w) codes[l][i][w] = next[l][i][w];
      scale[l][i] = bias[l][i] = 0u;
      if constexpr (BITS < 16) {
        scale[l][i] = twice(next_scale[l][i]);
        bias[l][i] = twice(next_bias[l][i]);
      }
    }
  }
  if (block + 1u < blocks) {
    LOAD_WEIGHTS(block + 1u)
  }
  UNROLL for (uint part = 0u; part < PARTS; ++part) {
    const uint buffer = PARTS == 1u ? block % 2u : part % 2u;
    const bool more = part + 1u < PARTS || block + 1u < blocks;
    if (more) {
      LOAD_ROWS(part + 1u < PARTS ? block * 128u + (part + 1u) * uint(DEPTH / 4) : (block + 1u) * 128u)
    }
    // Compilers would sink loads to where they are used, behind the products.
    simdgroup_barrier(mem_flags::mem_none);
    const threadgroup T* rows = (const threadgroup T*)(staged + buffer * BUFFER);
    UNROLL for (int s = 0; s < DEPTH / 16; ++s) {
      left_tile<T> left[LEFT];
      UNROLL for (int l = 0; l < LEFT; ++l) {
        UNROLL for (int i = 0; i < 2; ++i) {
          const int w = int(part) * (DEPTH / 32) + s / 2;
          UNROLL for (int j = 0; j < 2; ++j) {
            left_set(left[l], i, j,
                weight_pair<BITS, T>(codes[l][i] + w * (BITS / 4), s % 2 * 2 + j, scale[l][i], bias[l][i]));
          }
        }
      }
      UNROLL for (int t = 0; t < ROWS / 16; ++t) {
        if (uint(t) * 16u < count) {
          right_tile<T> right[2];
          right_load_blocks(right[0], right[1], rows + uint(s) * 2u * APART + uint(t) * 128u, APART, lane);
          UNROLL for (int l = 0; l < LEFT; ++l) {
            tile_multiply(sum[l][2 * t], left[l], right[0]);
            tile_multiply(sum[l][2 * t + 1], left[l], right[1]);
          }
        }
      }
    }
    if (more) {
      STORE_ROWS(1u - buffer)
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
#undef LOAD_WEIGHTS
#undef LOAD_ROWS
#undef STORE_ROWS

// 16 rows of the result at a time, turned over in what was the rows' memory.
threadgroup ushort* turned = (threadgroup ushort*)(staged + simdgroup * WIDTH * 8u);
UNROLL for (int t = 0; t < ROWS / 16; ++t) {
  if (uint(t) * 16u < count) {
    UNROLL for (int l = 0; l < OWN; ++l) {
      UNROLL for (int i = 0; i < 8; ++i) {
        float number = sum_get(sum[l][2 * t + i / 4], i % 4);
        if constexpr (GATED) number = number * quick_sigmoid(number) * sum_get(sum[l + LEFT - OWN][2 * t + i / 4], i % 4);
        const uint r = uint(i / 4) * 8u + tile_column(lane) + uint(i % 2);
        const uint n = uint(l) * 16u + uint(i % 4 / 2) * 8u + tile_row(lane);
        turned[r * WIDTH + n] = as_type<ushort>(T(number));
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 0; i < OWN; ++i) {
      const uint word = uint(i) * 32u + lane;
      const uint r = word / uint(OWN * 2);
      const uint n = word % uint(OWN * 2) * 8u;
      const uint row = uint(t) * 16u + r;
      if (row < count && base + n < outputs) {
        uint to = first + row;
        if constexpr (SCATTER) to = uint(pairs[to]);
        device T* stored = out + ulong(to) * outputs + base + n;
        if (outputs % 8u == 0u) {
          ((device uint4*)stored)[0] = ((const threadgroup uint4*)(turned + r * WIDTH + n))[0];
        } else {
          for (uint e = 0u; e < 8u && base + n + e < outputs; ++e) stored[e] = as_type<T>(turned[r * WIDTH + n + e]);
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// kernel: combine
// inputs: routed weights shared logit residual
// outputs: out
// dense: routed shared
// template: typename T, int CHOSEN, bool RESIDUAL
//
// out [rows, n] of T: Σ weights · routed + sigmoid(logit) · shared (+ residual), summed in float32 in order of places.
// routed [rows, CHOSEN, n] and shared [1, rows, n] of T, weights [rows, CHOSEN] and logit [1, rows, 1] of any float type,
// residual [1, rows, n] of T with its last axis dense; n a multiple of 8. A thread has 8 columns of a row.
const uint width = uint(routed_shape[2]) / 8u;
const uint word = threadgroup_position_in_grid.x * threads_per_threadgroup.x + thread_index_in_threadgroup;
const uint row = word / width;
const uint column = word % width * 8u;
REFUSE_UNLESS(!RESIDUAL || residual_strides[2] == 1, out, T, word == 0u)
if (row < uint(routed_shape[0])) {
  float sum[8];
  float value[8];
  load_eight(shared + ulong(row) * width * 8u + column, sum);
  const float open = sigmoid_of(float(logit[row * logit_strides[1]]));
  UNROLL for (int i = 0; i < 8; ++i) sum[i] *= open;
  UNROLL for (uint e = 0u; e < uint(CHOSEN); ++e) {
    load_eight(routed + (ulong(row) * uint(CHOSEN) + e) * width * 8u + column, value);
    const float weight = float(weights[row * weights_strides[0] + e * weights_strides[1]]);
    UNROLL for (int i = 0; i < 8; ++i) sum[i] = multiply_add(weight, value[i], sum[i]);
  }
  if constexpr (RESIDUAL) {
    load_eight(residual + row * residual_strides[1] + column, value);
    UNROLL for (int i = 0; i < 8; ++i) sum[i] += value[i];
  }
  store_eight(sum, out + ulong(word) * 8u);
}
