// Products of 1 to 8 rows with packed matrices, for the variants `metal` of the ops `linear` and `head` and for the
// decode step (linear.py): most of what a step reads goes by here. Up to four matrices of one input are one launch,
// with what comes before the product (a norm, a gate) at its start and the residual at its end.
//
// A matrix is packed as MLX packs it: rows of 4-bit or 8-bit codes in uint32 words, a scale and a bias of T per 64
// inputs. Since w = scale · code + bias, a lane sums code · x over its 16-byte word of 32 4-bit codes and adds
// scale · sum + bias · (sum of those x). An 8-bit code is read as two 4-bit ones, so a word holds 16 of them and its
// row is twice as long; nothing else differs. All arithmetic is in float32.
//
// A code becomes a number without a conversion: put into the mantissa of 1.0 it is 1 + code / 16 (or 1 + code / 256, the
// lower of two that one shift has put there). Inputs wait in threadgroup memory in the order in which lanes read them,
// times 16 or 256; the ones that each product has too many add up to the sum of those inputs, with which a dot product
// begins, negative. In float32 that costs up to 5 bits of 24.
//
// Offsets fit in 32 bits: the largest matrix, 248320 × 2048 in 4 bits, has 2^24 16-byte words.

// kernel: products
// inputs: x gate gain residual weight0 scales0 biases0 weight1 scales1 biases1 weight2 scales2 biases2 weight3 scales3 biases3
// dense: gain weight0 scales0 biases0 weight1 scales1 biases1 weight2 scales2 biases2 weight3 scales3 biases3
// outputs: out
// template: typename T, typename X, typename O, int ROWS, int OUTPUTS, int SIMDGROUPS, int SPAN, int STEPS, int LOOP, int INPUTS, int DIM, int GATE_DIM, int MATRICES, int PROLOGUE, int EPS_BITS, bool RESIDUAL, bool BEST
//
// x [1, ROWS, heads, dim] of X and gate (as many inputs, T) are read by strides, so that a part of a larger array is
// taken as it lies, but the last axis must be dense and rows must start on 16 bytes; heads · dim is the number K of
// inputs, a multiple of 64. Without heads they are [1, ROWS, K]. gain [K] or [128] of T, residual [.., ROWS, outputs] of T by strides;
// weightM uint32 [outputs, K · bits / 32], scalesM and biasesM [outputs, K / 64] of T. What a launch does not use is
// any array. out [ROWS · all outputs] of O: matrix after matrix, each [ROWS, outputs].
// Grid: for each matrix its outputs over LOOP · SIMDGROUPS · OUTPUTS · 32 / SPAN threadgroups of SIMDGROUPS simdgroups.
// OUTPUTS   outputs that a lane works on at once, each reading the same inputs.
// SPAN      lanes on one output: 32, 16 or 8; a simdgroup has 32 / SPAN outputs side by side.
// STEPS     words of each lane (a power of two) whose inputs wait in threadgroup memory together.
// LOOP      blocks of outputs that a threadgroup works off.
// INPUTS    K. DIM, GATE_DIM  of a head of x and of gate: known to the compiler, since a division costs a lane more than
//           the words it waits for.
// PROLOGUE  0 none; 1 RMS norm; 2 RMS norm per 128 inputs, times silu(gate); 3 times sigmoid(gate).
// EPS_BITS  the norm's epsilon as float32: known to the compiler, since an array this small lies in the host's memory on
//           CUDA, and every threadgroup would wait for it there.
// RESIDUAL  residual is added.
// BEST      instead of the products, the largest of each row and threadgroup: out uint32 [ROWS, threadgroups, 2] =
//           (ordered bits, output). Of equal ones the lowest output; NaN counts as larger than every number.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
constexpr uint BLOCK = uint(SIMDGROUPS * OUTPUTS * (32 / SPAN));
constexpr uint SHARE = BLOCK * uint(LOOP);
constexpr uint CHUNK = uint(STEPS * SPAN);
// Words of a lane that are asked for together; as many again are in use.
constexpr int FLIGHT = OUTPUTS >= 4 ? 1 : 4 / OUTPUTS;
constexpr int AHEAD = FLIGHT < STEPS ? FLIGHT : STEPS;

// Inputs are made ready 256 at a time by a simdgroup.
constexpr uint UNITS = (CHUNK * 32u + 255u) / 256u;
constexpr uint WIDE_UNITS = (CHUNK * 16u + 255u) / 256u;
constexpr int PASSES = (ROWS * int(UNITS) + SIMDGROUPS - 1) / SIMDGROUPS;
const float epsilon = as_type<float>(EPS_BITS);

THREADGROUP_ARRAY(float, shared_x, ROWS * STEPS * SPAN * 32);
THREADGROUP_ARRAY(float, shared_sums, ROWS * STEPS * SPAN);
THREADGROUP_ARRAY(float, shared_ones, ROWS * STEPS * SPAN);
THREADGROUP_ARRAY(float, shared_squares, PROLOGUE == 1 ? SIMDGROUPS * ROWS : 1);
THREADGROUP_ARRAY(uint, shared_best, BEST ? SIMDGROUPS * ROWS * 2 : 1);

constexpr int X_AXIS = DIM == INPUTS ? 2 : 3;
constexpr int GATE_AXIS = GATE_DIM == INPUTS ? 2 : 3;
const bool readable = x_strides[X_AXIS] == 1 && (PROLOGUE < 2 || gate_strides[GATE_AXIS] == 1);
if constexpr (BEST) {
  // Every threadgroup says so: `choose` must find no output that was never written.
  if (!readable) {
    if (index < uint(ROWS)) {
      const uint slot = (index * threadgroups_per_grid.x + threadgroup_position_in_grid.x) * 2u;
      out[slot] = O(0xffffffffu);
      out[slot + 1u] = O(0u);
    }
    return;
  }
} else {
  REFUSE_UNLESS(readable, out, O, index + threadgroup_position_in_grid.x == 0u)
}

// Which matrix this threadgroup works on.
uint group = threadgroup_position_in_grid.x;
uint begin = 0u;
uint outputs = uint(weight0_shape[0]);
uint words = uint(weight0_shape[1]) / 4u;
const device uint4* weight = (const device uint4*)weight0;
const device T* scales = scales0;
const device T* biases = biases0;
if constexpr (MATRICES > 1) {
  if (group >= (outputs + SHARE - 1u) / SHARE) {
    group -= (outputs + SHARE - 1u) / SHARE;
    begin += uint(ROWS) * outputs;
    outputs = uint(weight1_shape[0]);
    words = uint(weight1_shape[1]) / 4u;
    weight = (const device uint4*)weight1;
    scales = scales1;
    biases = biases1;
    if (MATRICES > 2 && group >= (outputs + SHARE - 1u) / SHARE) {
      group -= (outputs + SHARE - 1u) / SHARE;
      begin += uint(ROWS) * outputs;
      outputs = uint(weight2_shape[0]);
      words = uint(weight2_shape[1]) / 4u;
      weight = (const device uint4*)weight2;
      scales = scales2;
      biases = biases2;
      if (MATRICES > 3 && group >= (outputs + SHARE - 1u) / SHARE) {
        group -= (outputs + SHARE - 1u) / SHARE;
        begin += uint(ROWS) * outputs;
        outputs = uint(weight3_shape[0]);
        words = uint(weight3_shape[1]) / 4u;
        weight = (const device uint4*)weight3;
        scales = scales3;
        biases = biases3;
      }
    }
  }
}
constexpr uint inputs = uint(INPUTS);
constexpr uint groups = inputs / 64u;
const bool wide = words * 16u == inputs;     // 8-bit codes
const uint group_shift = wide ? 2u : 1u;     // a group of 64 inputs is so many words, as a power of two
const uint chunk_inputs = wide ? CHUNK * 16u : CHUNK * 32u;
const uint sub = lane % uint(SPAN);

if constexpr (PROLOGUE == 1) {
  if (lane == 0u) {
    UNROLL for (int t = 0; t < ROWS; ++t) shared_squares[simdgroup * uint(ROWS) + uint(t)] = 0.0f;
  }
}
float inverse[ROWS];
uint best[ROWS];
uint best_output[ROWS];
UNROLL for (int t = 0; t < ROWS; ++t) {
  inverse[t] = 1.0f;
  best[t] = 0u;  // below every number
  best_output[t] = 0xffffffffu;
}

// The work is a sequence of rounds, AHEAD words of each output and lane in each: all rounds of a turn's outputs, then the
// next turn. A round's weights are asked for before those of the round before are used, across the ends of turns too.
const uint first_output = (simdgroup * uint(32 / SPAN) + lane / uint(SPAN)) * uint(OUTPUTS);
const uint turn_rounds = (words + uint(AHEAD * SPAN) - 1u) / uint(AHEAD * SPAN);
const uint left = outputs > group * SHARE ? (outputs - group * SHARE + BLOCK - 1u) / BLOCK : 0u;
const uint rounds = (left < uint(LOOP) ? left : uint(LOOP)) * turn_rounds;
constexpr uint CHUNK_ROUNDS = uint(STEPS / AHEAD);
float sum[OUTPUTS][ROWS];
uint word[AHEAD][OUTPUTS][4];
T scale[AHEAD][OUTPUTS];
T bias[AHEAD][OUTPUTS];
// Inputs of the first chunk are asked for before the weights, behind which they would wait.
float ready[PASSES][8];
UNROLL for (int pass = 0; pass < PASSES; ++pass) {
  UNROLL for (int i = 0; i < 8; ++i) ready[pass][i] = 0.0f;
}

uint turn = 0u;
uint round = 0u;  // of the turn, of those that are asked for
for (uint q = 0u;; ++q) {
  // Round q - 1, which is to be used, and whether its chunk's inputs have to be made ready for it.
  const uint used = round == 0u ? turn_rounds - 1u : round - 1u;
  const uint used_turn = round == 0u ? turn - 1u : turn;
  const uint chunk = used / CHUNK_ROUNDS * CHUNK;
  const uint step = used % CHUNK_ROUNDS * uint(AHEAD);
  const bool staging = q > 0u && step == 0u && (used_turn == 0u || words > CHUNK);
  if (q == 0u || (staging && q > 1u)) {
    const uint from = q == 0u ? 0u : chunk;
    UNROLL for (int pass = 0; pass < PASSES; ++pass) {
      const uint unit = simdgroup + uint(pass * SIMDGROUPS);
      const uint t = wide ? unit / WIDE_UNITS : unit / UNITS;
      const uint here = (wide ? unit % WIDE_UNITS : unit % UNITS) * 256u + lane * 8u;
      const uint k = from * (wide ? 16u : 32u) + here;
      UNROLL for (int i = 0; i < 8; ++i) ready[pass][i] = 0.0f;
      if (t < uint(ROWS) && here < chunk_inputs && k < inputs) {
        load_eight(x + t * uint(x_strides[1]) + k / uint(DIM) * uint(x_strides[2]) + k % uint(DIM), ready[pass]);
      }
    }
  }

  // Beyond the last output or word the last one is read again: its sum is not kept, or its inputs are zeros.
  uint next[AHEAD][OUTPUTS][4];
  T next_scale[AHEAD][OUTPUTS];
  T next_bias[AHEAD][OUTPUTS];
  if (q < rounds) {
    UNROLL for (int a = 0; a < AHEAD; ++a) {
      const uint wanted = (round * uint(AHEAD) + uint(a)) * uint(SPAN) + sub;
      const uint at = wanted < words ? wanted : words - 1u;
      UNROLL for (int r = 0; r < OUTPUTS; ++r) {
        const uint asked = group * SHARE + turn * BLOCK + first_output + uint(r);
        const uint output = asked < outputs ? asked : outputs - 1u;
        const uint4 four = weight[output * words + at];
        next[a][r][0] = four.x;
        next[a][r][1] = four.y;
        next[a][r][2] = four.z;
        next[a][r][3] = four.w;
        next_scale[a][r] = scales[output * groups + (at >> group_shift)];
        next_bias[a][r] = biases[output * groups + (at >> group_shift)];
      }
    }
  }

  if (q > 0u) {
    if (staging) {
      if (q > 1u) threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int pass = 0; pass < PASSES; ++pass) {
        const uint unit = simdgroup + uint(pass * SIMDGROUPS);
        const uint t = wide ? unit / WIDE_UNITS : unit / UNITS;
        if (t >= uint(ROWS)) continue;  // the whole simdgroup
        const uint here = (wide ? unit % WIDE_UNITS : unit % UNITS) * 256u + lane * 8u;
        const uint k = chunk * (wide ? 16u : 32u) + here;
        const bool inside = here < chunk_inputs && k < inputs;
        thread float* value = ready[pass];
        if constexpr (PROLOGUE == 1 || PROLOGUE == 2) {
          float squares = 0.0f;
          UNROLL for (int i = 0; i < 8; ++i) squares = multiply_add(value[i], value[i], squares);
          if constexpr (PROLOGUE == 1) {
            // The norm's factor is the same for all inputs of a row: it waits for the end.
            squares = simd_sum(squares);
            if (used_turn == 0u && lane == 0u) shared_squares[simdgroup * uint(ROWS) + t] += squares;
          } else {
            UNROLL for (int mask = 1; mask < 16; mask *= 2) squares += simd_shuffle_xor(squares, ushort(mask));
            const float factor = rsqrt_of(squares * 0.0078125f + epsilon);
            UNROLL for (int i = 0; i < 8; ++i) value[i] *= factor;
          }
          if (inside) {
            float by[8];
            load_eight(gain + (PROLOGUE == 1 ? k : k % 128u), by);
            UNROLL for (int i = 0; i < 8; ++i) value[i] *= by[i];
          }
        }
        if constexpr (PROLOGUE == 2 || PROLOGUE == 3) {
          if (inside) {
            float by[8];
            load_eight(
                gate + t * uint(gate_strides[1]) + k / uint(GATE_DIM) * uint(gate_strides[2]) + k % uint(GATE_DIM),
                by);
            UNROLL for (int i = 0; i < 8; ++i) value[i] *= sigmoid_of(by[i]) * (PROLOGUE == 2 ? by[i] : 1.0f);
          }
        }
        // An 8-bit code is two 4-bit ones of the same input, the upper of them worth 16 times as much.
        float total = 0.0f;
        float ones = 0.0f;
        UNROLL for (int i = 0; i < 8; ++i) total += value[i];
        UNROLL for (int i = 0; i < 8; ++i) ones += value[i] * (wide ? 512.0f : i % 2 == 0 ? 256.0f : 16.0f);
        total += simd_shuffle_xor(total, ushort(1));
        ones += simd_shuffle_xor(ones, ushort(1));
        const float other = simd_shuffle_xor(total, ushort(2));
        const float other_ones = simd_shuffle_xor(ones, ushort(2));
        if (!wide) {
          total += other;
          ones += other_ones;
        }
        if (here < chunk_inputs) {
          const uint code = wide ? here * 2u : here;  // 4-bit codes before the first of these inputs
          const uint place = t * uint(STEPS) + code / uint(32 * SPAN);
          const uint by_lane = code / 32u % uint(SPAN);
          threadgroup float4* to = (threadgroup float4*)shared_x + (place * 8u + code % 32u / 4u) * uint(SPAN) + by_lane;
          float4 four;
          if (wide) {
            UNROLL for (int h = 0; h < 4; ++h) {
              four.x = value[2 * h] * 256.0f;
              four.y = four.x;
              four.z = value[2 * h + 1] * 256.0f;
              four.w = four.z;
              to[h * SPAN] = four;
            }
          } else {
            UNROLL for (int h = 0; h < 2; ++h) {
              four.x = value[4 * h] * 256.0f;
              four.y = value[4 * h + 1] * 16.0f;
              four.z = value[4 * h + 2] * 256.0f;
              four.w = value[4 * h + 3] * 16.0f;
              to[h * SPAN] = four;
            }
          }
          if (code % 32u == 0u) {
            shared_sums[place * uint(SPAN) + by_lane] = total;
            shared_ones[place * uint(SPAN) + by_lane] = ones;
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if constexpr (PROLOGUE == 1) {
        if (used_turn == 0u && chunk + CHUNK >= words) {
          UNROLL for (int t = 0; t < ROWS; ++t) {
            float squares = 0.0f;
            UNROLL for (int s = 0; s < SIMDGROUPS; ++s) squares += shared_squares[s * ROWS + t];
            inverse[t] = rsqrt_of(squares * (1.0f / float(INPUTS)) + epsilon);
          }
        }
      }
    }

    UNROLL for (int a = 0; a < AHEAD; ++a) {
      float dot[OUTPUTS][ROWS];
      UNROLL for (int t = 0; t < ROWS; ++t) {
        const float ones = shared_ones[(uint(t * STEPS) + step + uint(a)) * uint(SPAN) + sub];
        UNROLL for (int r = 0; r < OUTPUTS; ++r) dot[r][t] = -ones;
      }
      UNROLL for (int half_word = 0; half_word < 8; ++half_word) {
        float code[OUTPUTS][4];
        UNROLL for (int r = 0; r < OUTPUTS; ++r) {
          const uint both = word[a][r][half_word / 2];
          const uint first = half_word % 2 == 0 ? both << 15 : both >> 1;
          const uint second = half_word % 2 == 0 ? both << 7 : both >> 9;
          code[r][0] = as_type<float>(masked_or(first, 0x78000u, 0x3f800000u));
          code[r][1] = as_type<float>(masked_or(first, 0x780000u, 0x3f800000u));
          code[r][2] = as_type<float>(masked_or(second, 0x78000u, 0x3f800000u));
          code[r][3] = as_type<float>(masked_or(second, 0x780000u, 0x3f800000u));
        }
        UNROLL for (int t = 0; t < ROWS; ++t) {
          const uint place = uint(t * STEPS) + step + uint(a);
          const float4 four = ((const threadgroup float4*)shared_x)[(place * 8u + uint(half_word)) * uint(SPAN) + sub];
          UNROLL for (int r = 0; r < OUTPUTS; ++r) {
            dot[r][t] = multiply_add(code[r][0], four.x, dot[r][t]);
            dot[r][t] = multiply_add(code[r][1], four.y, dot[r][t]);
            dot[r][t] = multiply_add(code[r][2], four.z, dot[r][t]);
            dot[r][t] = multiply_add(code[r][3], four.w, dot[r][t]);
          }
        }
      }
      UNROLL for (int t = 0; t < ROWS; ++t) {
        const float total = shared_sums[(uint(t * STEPS) + step + uint(a)) * uint(SPAN) + sub];
        UNROLL for (int r = 0; r < OUTPUTS; ++r) {
          sum[r][t] = multiply_add(float(scale[a][r]), dot[r][t], multiply_add(float(bias[a][r]), total, sum[r][t]));
        }
      }
    }

    if (used + 1u == turn_rounds) {
      // Lane `l` of a span ends with the sum of output `l % OUTPUTS` of its own.
      UNROLL for (int t = 0; t < ROWS; ++t) {
        float mine[OUTPUTS];
        UNROLL for (int r = 0; r < OUTPUTS; ++r) mine[r] = sum[r][t];
        simd_halve<OUTPUTS / 2>(mine, lane);
        float total = mine[0];
        UNROLL for (int mask = OUTPUTS; mask < SPAN; mask *= 2) total += simd_shuffle_xor(total, ushort(mask));
        total *= inverse[t];
        const uint output = group * SHARE + used_turn * BLOCK + first_output + lane % uint(OUTPUTS);
        if (sub < uint(OUTPUTS) && output < outputs) {
          if constexpr (BEST) {
            const uint bits = ordered_bits(total);
            if (bits > best[t]) {
              best[t] = bits;
              best_output[t] = output;
            }
          } else {
            if constexpr (RESIDUAL) {
              total += float(residual[uint(t) * uint(residual_strides[1]) + output * uint(residual_strides[2])]);
            }
            out[begin + uint(t) * outputs + output] = O(total);
          }
        }
      }
    }
  }

  if (q == rounds) break;
  // A turn's first round begins its sums anew.
  if (round == 0u) {
    UNROLL for (int r = 0; r < OUTPUTS; ++r) {
      UNROLL for (int t = 0; t < ROWS; ++t) sum[r][t] = 0.0f;
    }
  }
  UNROLL for (int a = 0; a < AHEAD; ++a) {
    UNROLL for (int r = 0; r < OUTPUTS; ++r) {
      UNROLL for (int i = 0; i < 4; ++i) word[a][r][i] = next[a][r][i];
      scale[a][r] = next_scale[a][r];
      bias[a][r] = next_bias[a][r];
    }
  }
  ++round;
  if (round == turn_rounds) {
    round = 0u;
    ++turn;
  }
}

if constexpr (BEST) {
  UNROLL for (int t = 0; t < ROWS; ++t) {
    UNROLL for (int mask = 1; mask < 32; mask *= 2) {
      const uint bits = simd_shuffle_xor(best[t], ushort(mask));
      const uint output = simd_shuffle_xor(best_output[t], ushort(mask));
      if (bits > best[t] || (bits == best[t] && output < best_output[t])) {
        best[t] = bits;
        best_output[t] = output;
      }
    }
    if (lane == 0u) {
      shared_best[(simdgroup * uint(ROWS) + uint(t)) * 2u] = best[t];
      shared_best[(simdgroup * uint(ROWS) + uint(t)) * 2u + 1u] = best_output[t];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index < uint(ROWS)) {
    uint bits = shared_best[index * 2u];
    uint output = shared_best[index * 2u + 1u];
    UNROLL for (int s = 1; s < SIMDGROUPS; ++s) {
      // Outputs of a later simdgroup may be lower than those of an earlier one's later turn.
      const uint slot = (uint(s * ROWS) + index) * 2u;
      const bool better = shared_best[slot] > bits || (shared_best[slot] == bits && shared_best[slot + 1u] < output);
      bits = better ? shared_best[slot] : bits;
      output = better ? shared_best[slot + 1u] : output;
    }
    const uint slot = (index * threadgroups_per_grid.x + threadgroup_position_in_grid.x) * 2u;
    out[slot] = O(bits);
    out[slot + 1u] = O(output);
  }
}

// kernel: choose
// inputs: values
// dense: values
// outputs: best_output best
// template: typename V, int SIMDGROUPS, bool PAIRS
//
// The largest of each row, by the rule of `products`: best_output uint32 [rows], best float32 [rows].
// values: with PAIRS what `products` leaves, uint32 [rows, count, 2]; without, the logits themselves [rows, count] of V.
// Grid: a threadgroup of SIMDGROUPS simdgroups for each row.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint row = threadgroup_position_in_grid.y;
const uint count = uint(values_shape[1]);
THREADGROUP_ARRAY(uint, shared_bits, SIMDGROUPS);
THREADGROUP_ARRAY(uint, shared_output, SIMDGROUPS);

uint bits = 0u;
uint output = 0xffffffffu;
for (uint i = index; i < count; i += uint(SIMDGROUPS) * 32u) {
  uint other = 0u;
  uint other_output = i;
  if constexpr (PAIRS) {
    other = uint(values[(row * count + i) * 2u]);
    other_output = uint(values[(row * count + i) * 2u + 1u]);
  } else {
    other = ordered_bits(float(values[row * count + i]));
  }
  if (other > bits || (other == bits && other_output < output)) {
    bits = other;
    output = other_output;
  }
}
UNROLL for (int mask = 1; mask < 32; mask *= 2) {
  const uint other = simd_shuffle_xor(bits, ushort(mask));
  const uint other_output = simd_shuffle_xor(output, ushort(mask));
  if (other > bits || (other == bits && other_output < output)) {
    bits = other;
    output = other_output;
  }
}
if (lane == 0u) {
  shared_bits[simdgroup] = bits;
  shared_output[simdgroup] = output;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (index == 0u) {
  UNROLL for (int s = 1; s < SIMDGROUPS; ++s) {
    if (shared_bits[s] > bits || (shared_bits[s] == bits && shared_output[s] < output)) {
      bits = shared_bits[s];
      output = shared_output[s];
    }
  }
  best_output[row] = output;
  best[row] = from_ordered_bits(bits);
}
