// The mixture of experts of a few rows in two launches, for the variant `metal` of the op `experts` and for the form of a
// decode step that fuses norm, routing, shared expert and residual with it (experts.py). `up` decides the routing and
// leaves silu(gate_e x) · up_e x of every chosen expert; `down` multiplies these with down_e, weighs and adds them.
//
// Weights are as MLX packs them, 4 bits in groups of 64: codes uint32 [..., out, in / 8], scales and biases of T
// [..., out, in / 64]. A lane reads 16-byte words of codes, 32 inputs each; LANES lanes share a row of a matrix, so a
// simdgroup reads 32 / LANES rows at once, and STEPS words a lane cover it: in <= 32 · LANES · STEPS. Everything that a
// simdgroup needs of the weights is asked for before it waits for anything else. An expert that two rows chose is read
// by both. Offsets are 32 bits in units of 16 bytes for codes: experts · out · in < 2^37; and of one element for scales:
// experts · out · in < 2^38. The full model's stacks have 2^28.

// kernel: up
// inputs: x gain logits gate gate_scales gate_biases up up_scales up_biases
// dense: gain gate gate_scales gate_biases up up_scales up_biases
// outputs: hidden ids weights
// template: typename T, typename X, int EXPERTS, int LANES, int STEPS, int ROWS, int SIMDGROUPS, bool ROUTED, bool NARROW, bool RENORMALISE, bool NORM, int EPS_BITS, int ROWS_AXIS
//
// x [1, T rows, in] of T, its last axis dense and its rows on 16 bytes, gain [in] of T, gate and up [experts, wide, in].
// hidden [T rows, k, wide] of T; ids uint32 and weights float32 [T rows, k], largest weight first.
// Grid: ceil(wide / columns) × k × T rows threadgroups of SIMDGROUPS simdgroups, each with ROWS · 32 / LANES columns.
// X       what x waits in: bfloat16_t or float.
// ROWS    columns of `hidden` that a lane works on.
// ROUTED  logits holds the chosen experts, uint32 [T rows, k]; ids and weights are then one element of nothing.
//         Otherwise logits [T rows, EXPERTS] of any float type, and among equal ones the higher index wins.
// ROWS_AXIS  axis of the rows in logits: 1 if a 1 stands before.
// NARROW  logits are of a 16-bit type.
// RENORMALISE  weights sum to 1 over the chosen; otherwise over all experts.
// NORM    x comes before the norm: rsqrt(mean(x²) + eps) · gain · x is what the experts get. EPS_BITS: eps as float32.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint tile = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.z;
const uint k = threadgroups_per_grid.y;
// The last slot takes most rounds below and writes the routing, so it starts first.
const uint slot = k - 1u - threadgroup_position_in_grid.y;
const bool first_of_row = tile == 0u && slot == k - 1u;

const uint inputs = uint(x_shape[2]);
const uint wide = uint(gate_shape[1]);
constexpr uint BLOCKS = uint(LANES * STEPS);
constexpr uint UNITS = BLOCKS * 4u;
THREADGROUP_ARRAY(uint4, staged, LANES * STEPS * 2 * int(sizeof(X)));
THREADGROUP_ARRAY(float, block_sums, LANES * STEPS * 2);
THREADGROUP_ARRAY(float, squares, SIMDGROUPS);
THREADGROUP_ARRAY(uint, chosen, 1);

// The first simdgroup finds the expert, the largest first, while the others stage x; in the end its lane i has what round
// i found.
constexpr uint EACH = uint(EXPERTS + 31) / 32u;
uint found = 0u;
if (simdgroup == 0u) {
  uint expert = 0u;
  if constexpr (ROUTED) {
    expert = uint(logits[row * logits_strides[ROWS_AXIS] + slot * logits_strides[ROWS_AXIS + 1]]);
  } else {
    // A 16-bit number leaves the low 13 bits of its float32 alone: the index goes there and makes equal ones differ.
    constexpr uint INDEX = 8191u;
    uint keys[EACH];
    UNROLL for (uint i = 0u; i < EACH; ++i) {
      const uint e = i * 32u + lane;
      keys[i] = 0u;
      if (e < uint(EXPERTS)) {
        keys[i] = ordered_bits(float(logits[row * logits_strides[ROWS_AXIS] + e * logits_strides[ROWS_AXIS + 1]]));
        if constexpr (NARROW) keys[i] = (keys[i] & ~INDEX) | e;
      }
    }
    for (uint round = 0u; round <= slot; ++round) {
      uint top = keys[0];
      UNROLL for (uint i = 1u; i < EACH; ++i) top = keys[i] > top ? keys[i] : top;
      top = simd_max(top);
      if constexpr (NARROW) {
        expert = top & INDEX;
      } else {
        uint after = 0u;
        UNROLL for (uint i = 0u; i < EACH; ++i) after = keys[i] == top ? i * 32u + lane + 1u : after;
        expert = simd_max(after) - 1u;
      }
      UNROLL for (uint i = 0u; i < EACH; ++i) keys[i] = i * 32u + lane == expert ? 0u : keys[i];
      found = lane == round ? expert : found;
    }
  }
  if (lane == 0u) chosen[0] = expert;
} else {
  // x, or gain · x, since the rest of a norm is one factor for the whole row. An x that is not dense is taken as NaN
  // instead of refused by a return: `down` needs ids that are in range.
  constexpr uint STAGING = uint(SIMDGROUPS - 1) * 32u;
  constexpr uint PASSES = (UNITS + STAGING - 1u) / STAGING;
  const bool readable = x_strides[2] == 1;
  const uint last_unit = inputs / 8u - 1u;
  float value[PASSES][8];
  float factor[PASSES][8];
  if (readable) {
    UNROLL for (uint pass = 0u; pass < PASSES; ++pass) {
      uint unit = pass * STAGING + index - 32u;
      unit = unit < last_unit ? unit : last_unit;
      load_eight(x + row * x_strides[1] + unit * 8u, value[pass]);
      if constexpr (NORM) load_eight(gain + unit * 8u, factor[pass]);
    }
  }
  float square = 0.0f;
  UNROLL for (uint pass = 0u; pass < PASSES; ++pass) {
    const uint unit = pass * STAGING + index - 32u;
    UNROLL for (int i = 0; i < 8; ++i) {
      float one = readable ? value[pass][i] : as_type<float>(0x7fc00000u);
      if (unit > last_unit) one = 0.0f;
      if constexpr (NORM) {
        square = multiply_add(one, one, square);
        one *= readable ? factor[pass][i] : 1.0f;
      }
      value[pass][i] = one;
    }
    stage<X>(staged, block_sums, unit, unit < UNITS, value[pass]);
  }
  if constexpr (NORM) {
    square = simd_sum(square);
    if (lane == 0u) squares[simdgroup] = square;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint expert = chosen[0];

// A lane without a row or a word of its own reads the last one: without branches, and without conversions, which would
// wait, every load is on its way before the first is needed. Inputs past the end are zero, rows past it are not stored.
const uint part = lane % uint(LANES);
constexpr uint AT_ONCE = 32u / uint(LANES);
const uint column = (tile * uint(SIMDGROUPS) + simdgroup) * uint(ROWS) * AT_ONCE + lane / uint(LANES);
const uint last_block = inputs / 32u - 1u;
uint4 gate_codes[STEPS][ROWS];
uint4 up_codes[STEPS][ROWS];
T gate_scale[STEPS][ROWS];
T gate_bias[STEPS][ROWS];
T up_scale[STEPS][ROWS];
T up_bias[STEPS][ROWS];
UNROLL for (int s = 0; s < STEPS; ++s) {
  uint block = uint(s * LANES) + part;
  block = block < last_block ? block : last_block;
  UNROLL for (int r = 0; r < ROWS; ++r) {
    uint n = column + uint(r) * AT_ONCE;
    n = n < wide ? n : wide - 1u;
    const uint at = (expert * wide + n) * (inputs / 32u) + block;
    const uint group = (expert * wide + n) * (inputs / 64u) + block / 2u;
    gate_codes[s][r] = ((const device uint4*)gate)[at];
    up_codes[s][r] = ((const device uint4*)up)[at];
    gate_scale[s][r] = gate_scales[group];
    gate_bias[s][r] = gate_biases[group];
    up_scale[s][r] = up_scales[group];
    up_bias[s][r] = up_biases[group];
  }
}
// Compilers would sink loads to where they are used, between the products.
simdgroup_barrier(mem_flags::mem_none);

float gate_sum[ROWS];
float up_sum[ROWS];
UNROLL for (int r = 0; r < ROWS; ++r) gate_sum[r] = up_sum[r] = 0.0f;
UNROLL for (int s = 0; s < STEPS; ++s) {
  const uint block = uint(s * LANES) + part;
  float input[32];
  staged_block<X>(staged, block, input);
  const float all = block_sums[2u * block];
  const float constants = block_sums[2u * block + 1u];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const float gate_dot = dot_codes(gate_codes[s][r], input, constants);
    const float up_dot = dot_codes(up_codes[s][r], input, constants);
    gate_sum[r] = multiply_add(float(gate_scale[s][r]), gate_dot, gate_sum[r]);
    gate_sum[r] = multiply_add(float(gate_bias[s][r]), all, gate_sum[r]);
    up_sum[r] = multiply_add(float(up_scale[s][r]), up_dot, up_sum[r]);
    up_sum[r] = multiply_add(float(up_bias[s][r]), all, up_sum[r]);
  }
}
float factor = 1.0f;
if constexpr (NORM) {
  float total = 0.0f;
  UNROLL for (int s = 1; s < SIMDGROUPS; ++s) total += squares[s];
  factor = rsqrt_of(total / float(inputs) + as_type<float>(EPS_BITS));
}
UNROLL for (int r = 0; r < ROWS; ++r) {
  const uint n = column + uint(r) * AT_ONCE;
  const float gated = factor * sum_lanes<LANES>(gate_sum[r]);
  const float plain = factor * sum_lanes<LANES>(up_sum[r]);
  if (part == 0u && n < wide) hidden[(row * k + slot) * wide + n] = T(gated * sigmoid_of(gated) * plain);
}

if (first_of_row && simdgroup == 0u) {
  if constexpr (ROUTED) {
    if (lane + row == 0u) {
      ids[0] = 0u;
      weights[0] = 0.0f;
    }
  } else {
    constexpr float LOG2_E = 1.44269504f;
    const float score = float(logits[row * logits_strides[ROWS_AXIS] + found * logits_strides[ROWS_AXIS + 1]]);
    const float largest = simd_shuffle(score, ushort(0));
    const float weight = exp2_of((score - largest) * LOG2_E);
    float total = 0.0f;
    if constexpr (RENORMALISE) {
      total = lane < k ? weight : 0.0f;
    } else {
      for (uint e = lane; e < uint(EXPERTS); e += 32u) {
        total += exp2_of((float(logits[row * logits_strides[ROWS_AXIS] + e * logits_strides[ROWS_AXIS + 1]]) - largest) * LOG2_E);
      }
    }
    total = simd_sum(total);
    if (lane < k) {
      ids[row * k + lane] = found;
      weights[row * k + lane] = weight / total;
    }
  }
}

// kernel: down
// inputs: hidden ids weights down down_scales down_biases shared_gate shared_up shared_logit shared shared_scales shared_biases residual
// dense: hidden down down_scales down_biases shared shared_scales shared_biases
// outputs: out
// template: typename T, typename X, int CHOSEN, int LANES, int STEPS, int ROWS, int SPLIT, bool RESIDUAL
//
// hidden [T rows, CHOSEN, wide] of T as `up` leaves it, ids [T rows, CHOSEN], weights [T rows, CHOSEN] of any float type,
// down [experts, out, wide]. Of the shared expert shared_gate and shared_up [1, T rows, wide] of T, its products with x,
// last axis dense and rows on 16 bytes; shared_logit [1, T rows, 1]; shared [out, wide], its down_proj.
// out [T rows, out] of T: residual [1, T rows, out] (if RESIDUAL) + Σ weights · down_e hidden
// + sigmoid(shared_logit) · shared (silu(shared_gate) · shared_up).
// Grid: ceil(out / columns) × T rows threadgroups of SPLIT simdgroups with the same ROWS · 32 / LANES columns; each
// takes every SPLIT-th expert, the shared one being the last, and their sums meet in the end.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint tile = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
REFUSE_UNLESS(shared_gate_strides[2] == 1 && shared_up_strides[2] == 1, out, T, index + tile + row == 0u)

const uint outputs = uint(down_shape[1]);
const uint wide = uint(hidden_shape[2]);
constexpr uint BLOCKS = uint(LANES * STEPS);
constexpr uint UNITS = BLOCKS * 4u;
constexpr int EACH = (CHOSEN + SPLIT) / SPLIT;
constexpr uint WORDS = BLOCKS * 2u * uint(sizeof(X));
constexpr uint AT_ONCE = 32u / uint(LANES);
constexpr uint COLUMNS = uint(ROWS) * AT_ONCE;
THREADGROUP_ARRAY(uint4, staged, SPLIT * EACH * LANES * STEPS * 2 * int(sizeof(X)));
THREADGROUP_ARRAY(float, block_sums, SPLIT * EACH * LANES * STEPS * 2);
THREADGROUP_ARRAY(float, sums, SPLIT * ROWS * 32 / LANES);

const uint part = lane % uint(LANES);
const uint column = tile * COLUMNS + lane / uint(LANES);
const uint last_block = wide / 32u - 1u;
// As in `up`: loads without branches or conversions. SPLIT may leave a simdgroup one expert short.
constexpr bool EVEN = EACH * SPLIT == CHOSEN + 1;
uint4 codes[EACH][STEPS][ROWS];
T scale[EACH][STEPS][ROWS];
T bias[EACH][STEPS][ROWS];
UNROLL for (int i = 0; i < EACH; ++i) {
  const uint e = simdgroup + uint(i * SPLIT);
  const bool routed = e < uint(CHOSEN);
  const uint expert = routed ? uint(ids[row * ids_strides[0] + e * ids_strides[1]]) : 0u;
  const device uint4* all_codes = routed ? (const device uint4*)down : (const device uint4*)shared;
  const device T* all_scales = routed ? down_scales : shared_scales;
  const device T* all_biases = routed ? down_biases : shared_biases;
  UNROLL for (int s = 0; s < STEPS; ++s) {
    uint block = uint(s * LANES) + part;
    block = block < last_block ? block : last_block;
    UNROLL for (int r = 0; r < ROWS; ++r) {
      uint n = column + uint(r) * AT_ONCE;
      n = n < outputs ? n : outputs - 1u;
      codes[i][s][r] = no_codes();
      scale[i][s][r] = bias[i][s][r] = T(0.0f);
      if (EVEN || e <= uint(CHOSEN)) {
        const uint group = (expert * outputs + n) * (wide / 64u) + block / 2u;
        codes[i][s][r] = all_codes[(expert * outputs + n) * (wide / 32u) + block];
        scale[i][s][r] = all_scales[group];
        bias[i][s][r] = all_biases[group];
      }
    }
  }
}
simdgroup_barrier(mem_flags::mem_none);

// A simdgroup stages what its own experts get, so it waits for no other.
constexpr uint PASSES = (UNITS + 31u) / 32u;
const uint last_unit = wide / 8u - 1u;
float factor[EACH];
UNROLL for (int i = 0; i < EACH; ++i) {
  const uint e = simdgroup + uint(i * SPLIT);
  const uint place = simdgroup * uint(EACH) + uint(i);
  factor[i] = 0.0f;
  if (e < uint(CHOSEN)) factor[i] = float(weights[row * weights_strides[0] + e * weights_strides[1]]);
  if (e == uint(CHOSEN)) factor[i] = sigmoid_of(float(shared_logit[row * shared_logit_strides[1]]));
  float value[PASSES][8];
  UNROLL for (uint pass = 0u; pass < PASSES; ++pass) {
    uint unit = pass * 32u + lane;
    unit = unit < last_unit ? unit : last_unit;
    UNROLL for (int j = 0; j < 8; ++j) value[pass][j] = 0.0f;
    if (e < uint(CHOSEN)) load_eight(hidden + (row * uint(CHOSEN) + e) * wide + unit * 8u, value[pass]);
    if (e == uint(CHOSEN)) {
      float other[8];
      load_eight(shared_gate + row * shared_gate_strides[1] + unit * 8u, value[pass]);
      load_eight(shared_up + row * shared_up_strides[1] + unit * 8u, other);
      UNROLL for (int j = 0; j < 8; ++j) value[pass][j] *= sigmoid_of(value[pass][j]) * other[j];
    }
  }
  UNROLL for (uint pass = 0u; pass < PASSES; ++pass) {
    const uint unit = pass * 32u + lane;
    UNROLL for (int j = 0; j < 8; ++j) value[pass][j] = unit > last_unit ? 0.0f : value[pass][j];
    stage<X>(staged + place * WORDS, block_sums + place * BLOCKS * 2u, unit, unit < UNITS, value[pass]);
  }
}
simdgroup_barrier(mem_flags::mem_threadgroup);

float sum[ROWS];
UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
UNROLL for (int i = 0; i < EACH; ++i) {
  const uint place = simdgroup * uint(EACH) + uint(i);
  UNROLL for (int s = 0; s < STEPS; ++s) {
    const uint block = uint(s * LANES) + part;
    float input[32];
    staged_block<X>(staged + place * WORDS, block, input);
    const float all = block_sums[(place * BLOCKS + block) * 2u];
    const float constants = block_sums[(place * BLOCKS + block) * 2u + 1u];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float dot = dot_codes(codes[i][s][r], input, constants);
      const float product = multiply_add(float(scale[i][s][r]), dot, float(bias[i][s][r]) * all);
      sum[r] = multiply_add(factor[i], product, sum[r]);
    }
  }
}
UNROLL for (int r = 0; r < ROWS; ++r) {
  const float total = sum_lanes<LANES>(sum[r]);
  if (part == 0u) sums[simdgroup * COLUMNS + uint(r) * AT_ONCE + lane / uint(LANES)] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint c = index; c < COLUMNS; c += uint(SPLIT) * 32u) {
  const uint n = tile * COLUMNS + c;
  if (n < outputs) {
    float total = 0.0f;
    UNROLL for (int s = 0; s < SPLIT; ++s) total += sums[uint(s) * COLUMNS + c];
    if constexpr (RESIDUAL) total += float(residual[row * residual_strides[1] + n * residual_strides[2]]);
    out[row * outputs + n] = T(total);
  }
}
