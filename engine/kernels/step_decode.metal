// What a decode step of a few rows does beside its layers: the rows of the embedding, new keys and values put into the
// cache, tokens handed on, and rows taken back. For a step whose launches are recorded and replayed (step.py,
// engine/replay.py), where kernels write into arrays that are there already: all but `embed` do, and MLX itself cannot
// launch them.

// kernel: embed
// inputs: token weight scales biases
// dense: token weight scales biases
// outputs: out
// template: typename T, int BITS, int INPUTS
//
// out [1, rows, INPUTS] of T: the rows of a packed table that token uint32 [rows] names; weight uint32 [tokens,
// INPUTS · BITS / 32], scales and biases of T [tokens, INPUTS / 64], BITS 4 or 8, in float32 and rounded once.
// Grid: INPUTS / 8 threads, rounded up to whole simdgroups, × rows; eight inputs a thread, which share a scale.
const uint unit = threadgroup_position_in_grid.x * 32u + thread_index_in_simdgroup;
const uint row = threadgroup_position_in_grid.y;
const uint from = uint(token[row]);
if (unit < uint(INPUTS / 8)) {
  const uint group = from * uint(INPUTS / 64) + unit / 8u;
  const float scale = float(scales[group]);
  const float bias = float(biases[group]);
  constexpr uint CODES = 32u / uint(BITS);
  UNROLL for (uint i = 0u; i < 8u; ++i) {
    const uint word = weight[from * uint(INPUTS * BITS / 32) + (unit * 8u + i) / CODES];
    const uint code = word >> (i % CODES * uint(BITS)) & ((1u << uint(BITS)) - 1u);
    out[row * uint(INPUTS) + unit * 8u + i] = T(multiply_add(scale, float(code), bias));
  }
}

// kernel: keep
// inputs: k v position room
// dense: k position room
// outputs: keys values
// template: typename T
//
// Rows k [1, kv heads, rows, 256], dense, and v of that shape, its last axis dense and its rows on 16 bytes, go to
// positions position[0] and after of keys and values [1, kv heads, room[0], 256]; nothing else there is touched.
// position and room int32. Grid: a simdgroup for each head and row.
const uint lane = thread_index_in_simdgroup;
const uint head = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint rows = uint(v_shape[2]);
const uint to = (head * uint(room[0]) + uint(position[0]) + row) * 256u + lane * 8u;
float eight[8];
load_eight(k + (head * rows + row) * 256u + lane * 8u, eight);
UNROLL for (uint i = 0u; i < 8u; ++i) keys[to + i] = T(eight[i]);
load_eight(v + head * v_strides[1] + row * v_strides[2] + lane * 8u, eight);
UNROLL for (uint i = 0u; i < 8u; ++i) values[to + i] = T(v_strides[3] == 1 ? eight[i] : as_type<float>(0x7fc00000u));

// kernel: settle
// inputs: chosen best
// dense: chosen best
// outputs: token position finite ring
// template: int RING, int ROWS
//
// A step's end: chosen uint32 [ROWS] go to ring uint32 [RING] at their rows' own positions modulo RING, where the host
// reads them, and token uint32 [4] becomes the last; position int32 [4] grows by ROWS; finite uint32 [4] becomes 0 if a
// token's logit, best [ROWS], is not finite, and stays as it is otherwise. Grid: one simdgroup.
if (thread_index_in_simdgroup == 0u) {
  const uint at = uint(position[0]);
  token[0] = chosen[ROWS - 1];
  UNROLL for (uint row = 0u; row < uint(ROWS); ++row) {
    ring[(at + row) % uint(RING)] = chosen[row];
    if (!(best[row] - best[row] == 0.0f)) finite[0] = 0u;
  }
  UNROLL for (uint i = 0u; i < 4u; ++i) position[i] = int(at + uint(ROWS));
}

// kernel: slide
// inputs: new0 new1 new2 new3 new4 new5 new6 new7 new8 new9 new10 new11 new12 new13 new14 kept
// dense: new0 new1 new2 new3 new4 new5 new6 new7 new8 new9 new10 new11 new12 new13 new14 kept
// outputs: now before
// template: typename T, int LAYERS, int ROWS, bool BACK
//
// The rows that convolutions read next. now and before [LAYERS, 3, channels] of T; new0 … new14 [ROWS, channels] are the
// new rows of up to fifteen layers, the rest are not read; channels a multiple of 8.
// BACK  false: `before` becomes `now`, and `now` the last three of its rows and the new ones. true: `now` becomes what
//       it would be, had there been only the first kept[0] (uint32) of the new ones.
// Grid: channels in words of 16 bytes, rounded up to whole threadgroups of 128 threads, × LAYERS.
const uint word = threadgroup_position_in_grid.x * 128u + thread_index_in_threadgroup;
const uint layer = threadgroup_position_in_grid.y;
const uint words = uint(new0_shape[2]) * uint(sizeof(T)) / 16u;
const device T* rows = new0;
if (LAYERS > 1 && layer == 1u) rows = new1;
if (LAYERS > 2 && layer == 2u) rows = new2;
if (LAYERS > 3 && layer == 3u) rows = new3;
if (LAYERS > 4 && layer == 4u) rows = new4;
if (LAYERS > 5 && layer == 5u) rows = new5;
if (LAYERS > 6 && layer == 6u) rows = new6;
if (LAYERS > 7 && layer == 7u) rows = new7;
if (LAYERS > 8 && layer == 8u) rows = new8;
if (LAYERS > 9 && layer == 9u) rows = new9;
if (LAYERS > 10 && layer == 10u) rows = new10;
if (LAYERS > 11 && layer == 11u) rows = new11;
if (LAYERS > 12 && layer == 12u) rows = new12;
if (LAYERS > 13 && layer == 13u) rows = new13;
if (LAYERS > 14 && layer == 14u) rows = new14;
if (word < words) {
  const device uint4* fresh = (const device uint4*)rows;
  device uint4* here = (device uint4*)now + layer * 3u * words + word;
  device uint4* there = (device uint4*)before + layer * 3u * words + word;
  uint4 held[3];
  UNROLL for (uint i = 0u; i < 3u; ++i) held[i] = BACK ? there[i * words] : here[i * words];
  const uint count = BACK ? uint(kept[0]) : uint(ROWS);
  UNROLL for (uint i = 0u; i < 3u; ++i) {
    if (!BACK) there[i * words] = held[i];
    const uint from = count + i;
    here[i * words] = from == 0u   ? held[0]
                      : from == 1u ? held[1]
                      : from == 2u ? held[2]
                                   : fresh[(from - 3u) * words + word];
  }
}

// kernel: back
// inputs: kept
// dense: kept
// outputs: states
// template: int SLOTS, int NUMBERS
//
// Of each layer's states [layers, SLOTS, NUMBERS] float32, number kept[0] (uint32) becomes the first.
// Grid: NUMBERS / 4 threads × layers, in threadgroups of 256; NUMBERS a multiple of 1024.
const uint word = threadgroup_position_in_grid.x * 256u + thread_index_in_threadgroup;
device uint4* first = (device uint4*)states + threadgroup_position_in_grid.y * uint(SLOTS * (NUMBERS / 4));
first[word] = first[uint(kept[0]) * uint(NUMBERS / 4) + word];
