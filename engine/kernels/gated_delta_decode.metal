// The Gated DeltaNet step of a few new rows in one launch: convolution of 4 with SiLU, l2 norm of queries and keys,
// gates, the delta rule with the state in registers and, if NORMED, the gated norm. For the variant `registers` of the
// op `gated_delta` (gated_delta.py), key and value dim 128. Everything is computed in float32.
//
// qkv [1, rows, queries | keys | values], z [1, rows, value heads · 128] of T and b, a [1, rows, value heads] are read
// by their strides, so that they may be parts of one product's output, but the last axis of qkv and z must be dense and
// their rows must start on 16 bytes. kept0, kept1, kept2 of T are the three rows before, oldest first; state float32
// [1, value heads, 128 values, 128 keys], or several of which the first is read; conv [channels, 4, 1] of T; a_log,
// dt_bias [value heads]; gain [128].

// kernel: step
// inputs: qkv z b a kept0 kept1 kept2 state conv a_log dt_bias gain
// dense: kept0 kept1 kept2 state conv a_log dt_bias gain
// outputs: out new_state
// template: typename T, typename O, int ROWS, int COLUMNS, int SIMDGROUPS, bool NORMED, bool EACH
//
// out [1, rows, value heads · 128] of O: the read-out S q, or its gated norm; new_state as state. With EACH it holds rows
// states: the one after all rows is its first, that after fewer rows stands at their number. It may be `state` itself.
// Grid: (128 / SPAN) × value heads threadgroups of SIMDGROUPS simdgroups, SPAN = COLUMNS · SIMDGROUPS value columns
// each; the state is read once and written once however many rows there are. The threadgroups of a head (and of the
// value heads that share its key head) each convolve its queries and keys anew: under 3 KB a row against 64 KB of state.
// ROWS        rows whose queries, keys and values are staged at once; any number of rows is taken in such blocks.
// COLUMNS     value columns of a simdgroup: 4, 8 or 16.
// SIMDGROUPS  simdgroups of a threadgroup.
// NORMED      apply RMSNorm(out) · gain · silu(z); needs a head's 128 columns in one threadgroup (SPAN = 128).
// EACH        leave the state after every row, not only after the last.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint index = thread_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y;
constexpr int PER_WORD = 16 / int(sizeof(T));
REFUSE_UNLESS(
    qkv_strides[2] == 1 && z_strides[2] == 1 && (qkv_shape[1] == 1 || qkv_strides[1] % PER_WORD == 0), out, O,
    index + threadgroup_position_in_grid.x + head == 0u)

constexpr int SPAN = COLUMNS * SIMDGROUPS;
// A lane convolves a word of channels: a simdgroup takes the query and the key of a row at once, or one of them; the
// values of a row are another unit of work.
constexpr int HEAD_LANES = 128 / PER_WORD;
constexpr int HEADS = 32 / HEAD_LANES;
constexpr int UNITS = 2 / HEADS + 1;
// Eight lanes share a row of the state, 16 of its 128 keys each in four words; a simdgroup loads four rows at once.
constexpr int HELD = COLUMNS / 4;
constexpr int KEYS = 16;

const uint heads = uint(state_shape[1]);
const uint rows = uint(qkv_shape[1]);
const uint width = (uint(qkv_shape[2]) - heads * 128u) / 2u;
const uint key_head = head * (width / 128u) / heads;
const uint first_column = threadgroup_position_in_grid.x * uint(SPAN);
const uint part = lane & 7u;
const uint own = simdgroup * uint(COLUMNS) + lane / 8u;
const uint place = (head * 128u + first_column + own) * 128u + part * 4u;
THREADGROUP_ARRAY(float, shared_heads, ROWS * 256);
THREADGROUP_ARRAY(float, shared_values, ROWS * SPAN);
THREADGROUP_ARRAY(float, shared_decay, ROWS);
THREADGROUP_ARRAY(float, shared_beta, ROWS);
THREADGROUP_ARRAY(float, shared_out, NORMED ? ROWS * 128 : 1);

// The state comes first: the rest of the work up to its use hides the time it takes.
float held[HELD][KEYS];
UNROLL for (int c = 0; c < HELD; ++c) {
  UNROLL for (int w = 0; w < KEYS / 4; ++w) {
    load_word(state + place + uint(c) * 512u + uint(w) * 32u, held[c] + w * 4);
  }
}

for (uint first = 0u; first < rows; first += uint(ROWS)) {
  const uint count = rows - first < uint(ROWS) ? rows - first : uint(ROWS);

  // The last threads make the gates while the first convolve.
  const uint from_end = uint(SIMDGROUPS) * 32u - 1u - index;
  if (from_end < count) {
    const uint row = first + from_end;
    const float raised = float(a[row * a_strides[1] + head * a_strides[2]]) + float(dt_bias[head]);
    const float above = raised > 0.0f ? raised : 0.0f;
    const float softplus = above + log1p_of(exp_of(raised > 0.0f ? -raised : raised));
    shared_decay[from_end] = exp_of(-exp_of(float(a_log[head])) * softplus);
    shared_beta[from_end] = sigmoid_of(float(b[row * b_strides[1] + head * b_strides[2]]));
  }

  for (uint unit = simdgroup; unit < count * uint(UNITS); unit += uint(SIMDGROUPS)) {
    const uint t = unit / uint(UNITS);
    const uint kind = unit % uint(UNITS);
    const bool values = kind + 1u == uint(UNITS);
    const uint key = HEADS == 2 ? lane / uint(HEAD_LANES) : kind;  // 0: the query
    const uint at = (values ? lane : lane % uint(HEAD_LANES)) * uint(PER_WORD);
    const uint channel = values ? 2u * width + head * 128u + first_column + at : key * width + key_head * 128u + at;
    const bool mine = !values || at < uint(SPAN);
    float mixed[PER_WORD];
    UNROLL for (int i = 0; i < PER_WORD; ++i) mixed[i] = 0.0f;
    if (mine) {
      float taps[PER_WORD * 4];
      UNROLL for (int w = 0; w < 4; ++w) {
        load_word(conv + channel * 4u + uint(w * PER_WORD), taps + w * PER_WORD);
      }
      UNROLL for (int tap = 0; tap < 4; ++tap) {
        const uint from = first + t + uint(tap);
        const device T* row = from == 0u   ? kept0
                              : from == 1u ? kept1
                              : from == 2u ? kept2
                                           : qkv + (from - 3u) * qkv_strides[1];
        float word[PER_WORD];
        load_word(row + channel, word);
        UNROLL for (int i = 0; i < PER_WORD; ++i) mixed[i] = multiply_add(word[i], taps[i * 4 + tap], mixed[i]);
      }
      UNROLL for (int i = 0; i < PER_WORD; ++i) mixed[i] *= sigmoid_of(mixed[i]);
    }
    float square = 0.0f;
    UNROLL for (int i = 0; i < PER_WORD; ++i) square = multiply_add(mixed[i], mixed[i], square);
    UNROLL for (int mask = 1; mask < HEAD_LANES; mask *= 2) square += simd_shuffle_xor(square, ushort(mask));
    const float unit_length = rsqrt_of(square + 1.0e-6f) * (key == 0u ? 0.08838834764831845f : 1.0f);
    if (values) {
      if (mine) {
        UNROLL for (int i = 0; i < PER_WORD; ++i) shared_values[t * uint(SPAN) + at + uint(i)] = mixed[i];
      }
    } else {
      UNROLL for (int i = 0; i < PER_WORD; ++i) {
        shared_heads[t * 256u + key * 128u + at + uint(i)] = mixed[i] * unit_length;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint t = 0u; t < count; ++t) {
    // S k and S q are taken of the state as it was, in one round of exchanges: with d = beta (v - g S k) the new state
    // is g S + d kT, so that the read-out is g S q + d (k q).
    float query[KEYS];
    float key[KEYS];
    float sum[2 * HELD + 1];
    UNROLL for (int c = 0; c < 2 * HELD + 1; ++c) sum[c] = 0.0f;
    UNROLL for (int i = 0; i < KEYS; ++i) {
      const uint at = t * 256u + uint(i / 4) * 32u + part * 4u + uint(i % 4);
      query[i] = shared_heads[at];
      key[i] = shared_heads[at + 128u];
      sum[2 * HELD] = multiply_add(key[i], query[i], sum[2 * HELD]);
    }
    UNROLL for (int c = 0; c < HELD; ++c) {
      UNROLL for (int i = 0; i < KEYS; ++i) {
        sum[c] = multiply_add(held[c][i], key[i], sum[c]);
        sum[HELD + c] = multiply_add(held[c][i], query[i], sum[HELD + c]);
      }
    }
    UNROLL for (int mask = 1; mask < 8; mask *= 2) {
      UNROLL for (int c = 0; c < 2 * HELD + 1; ++c) sum[c] += simd_shuffle_xor(sum[c], ushort(mask));
    }
    const float decay = shared_decay[t];
    const float beta = shared_beta[t];
    float read = 0.0f;
    UNROLL for (int c = 0; c < HELD; ++c) {
      const float value = shared_values[t * uint(SPAN) + own + uint(c) * 4u];
      const float delta = beta * (value - decay * sum[c]);
      // Lane `part` of the eight stores column `part`: a simdgroup's columns lie side by side.
      if (part == uint(c)) read = multiply_add(decay, sum[HELD + c], delta * sum[2 * HELD]);
      UNROLL for (int i = 0; i < KEYS; ++i) held[c][i] = multiply_add(delta, key[i], decay * held[c][i]);
    }
    if constexpr (EACH) {
      const uint after = first + t + 1u;
      if (after < rows) {
        device float* to = new_state + after * heads * 16384u + place;
        UNROLL for (int c = 0; c < HELD; ++c) {
          UNROLL for (int w = 0; w < KEYS / 4; ++w) store_word(held[c] + w * 4, to + uint(c) * 512u + uint(w) * 32u);
        }
      }
    }
    if (part < uint(HELD)) {
      const uint column = own + part * 4u;
      if constexpr (NORMED) {
        shared_out[t * 128u + column] = read;
      } else {
        out[((first + t) * heads + head) * 128u + first_column + column] = O(read);
      }
    }
  }
  // The next block overwrites what this one read; the norm reads what other simdgroups wrote.
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if constexpr (NORMED) {
    for (uint t = simdgroup; t < count; t += uint(SIMDGROUPS)) {
      float read[4];
      float square = 0.0f;
      UNROLL for (int i = 0; i < 4; ++i) {
        read[i] = shared_out[t * 128u + uint(i) * 32u + lane];
        square = multiply_add(read[i], read[i], square);
      }
      const float scale = rsqrt_of(simd_sum(square) * (1.0f / 128.0f) + 1.0e-6f);
      UNROLL for (int i = 0; i < 4; ++i) {
        const uint column = uint(i) * 32u + lane;
        const float gate = float(z[(first + t) * z_strides[1] + head * 128u + column]);
        const float normed = read[i] * scale * float(gain[column]);
        out[((first + t) * heads + head) * 128u + column] = O(normed * gate * sigmoid_of(gate));
      }
    }
  }
}

UNROLL for (int c = 0; c < HELD; ++c) {
  UNROLL for (int w = 0; w < KEYS / 4; ++w) {
    store_word(held[c] + w * 4, new_state + place + uint(c) * 512u + uint(w) * 32u);
  }
}
