// What a decode step of one row does beside its layers: the row of the embedding, the new key and value put into the
// cache, the token handed on. For a step whose launches are recorded and replayed (step.py, engine/replay.py), where
// kernels write into arrays that are there already: `keep` and `settle` do, and MLX itself cannot launch them.

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
// template: int RING
//
// A step's end: token uint32 [4] becomes chosen[0], which also goes to ring uint32 [RING] at the step's own position
// modulo RING, where the host reads it; position int32 [4] grows by one; finite uint32 [4] becomes 0 if the token's
// logit best[0] is not finite, and stays as it is otherwise. Grid: one simdgroup.
if (thread_index_in_simdgroup == 0u) {
  const uint at = uint(position[0]);
  token[0] = chosen[0];
  ring[at % uint(RING)] = chosen[0];
  if (!(best[0] - best[0] == 0.0f)) finite[0] = 0u;
  UNROLL for (uint i = 0u; i < 4u; ++i) position[i] = int(at + 1u);
}
