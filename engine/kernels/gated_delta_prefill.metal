// Gated DeltaNet over many rows, for the variants `registers` and `chunked` of the op `gated_delta`
// (gated_delta_prefill.py), key and value dim 128. What depends on no other row is prepared for all rows at once; then
// the recurrence runs over the rows, one by one (`scan`) or in chunks (`solve`, `carry`); the gated norm comes last
// (`norm`). The state is float32 throughout.
//
// Between launches rows lie by head, [heads, padded, 128]: `padded` rounds the rows up to whole blocks, and a padding
// row changes nothing (no key, no value, β = 0, no decay).

// kernel: prepare
// inputs: qkv b a kept0 kept1 kept2 conv a_log dt_bias
// dense: kept0 kept1 kept2 conv a_log dt_bias
// outputs: queries keys values gates row0 row1 row2
// template: typename T, int SIMDGROUPS
//
// Convolution of 4 with SiLU, l2 norm of queries (scaled by 128^-1/2) and keys, gates.
// qkv [1, rows, queries | keys | values] of T and b, a [1, rows, value heads] are read by their strides; the last axis of
// qkv must be dense and its rows must start on 16 bytes. kept0, kept1, kept2 of T are the three rows before, oldest
// first; conv [channels, 4, 1] of T; a_log, dt_bias [value heads].
// queries, keys [key heads, padded, 128], values [value heads, padded, 128] of T; gates float32
// [value heads, padded, (log g, β, k·q, 0)]; row0, row1, row2 are the three rows that the next call convolves with.
// Grid: a simdgroup takes 8 rows of the query and the key of a key head, or of the values of two value heads.
constexpr uint ROWS = 8u;
constexpr int PER_WORD = 16 / int(sizeof(T));
const uint lane = thread_index_in_simdgroup;
const uint unit = threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup;
const uint first = threadgroup_position_in_grid.y * ROWS;
const uint padded = threadgroups_per_grid.y * ROWS;
REFUSE_UNLESS(
    qkv_strides[2] == 1 && (qkv_shape[1] == 1 || qkv_strides[1] % PER_WORD == 0), queries, T,
    thread_index_in_threadgroup + threadgroup_position_in_grid.x + threadgroup_position_in_grid.y == 0u)

const uint heads = uint(b_shape[2]);
const uint rows = uint(qkv_shape[1]);
const uint width = (uint(qkv_shape[2]) - heads * 128u) / 2u;
const uint key_heads = width / 128u;
const uint group = heads / key_heads;
const bool is_values = unit >= key_heads;
const uint side = lane / 16u;  // of a key head 0 is the query, 1 the key
const uint head = is_values ? (unit - key_heads) * 2u + side : unit;
const uint at = lane % 16u * 8u;
const uint channel = (is_values ? 2u : side) * width + head * 128u + at;
const bool mine = !is_values || head < heads;

float taps[32];
float held[4][8];
UNROLL for (int w = 0; w < 4; ++w) {
  UNROLL for (int i = 0; i < 8; ++i) taps[w * 8 + i] = 0.0f;
  if (mine) load_eight(conv + channel * 4u + uint(w) * 8u, taps + w * 8);
}
float own_dot = 0.0f;
UNROLL for (int n = 0; n < int(ROWS) + 3; ++n) {
  // Rows are counted from the oldest of the three before.
  const uint from = first + uint(n);
  UNROLL for (int i = 0; i < 8; ++i) held[n % 4][i] = 0.0f;
  if (mine && from < rows + 3u) {
    const device T* row = from == 0u   ? kept0
                          : from == 1u ? kept1
                          : from == 2u ? kept2
                                       : qkv + (from - 3u) * qkv_strides[1];
    load_eight(row + channel, held[n % 4]);
  }
  if (n >= 3) {
    const uint t = from - 3u;
    float mixed[8];
    float square = 0.0f;
    UNROLL for (int i = 0; i < 8; ++i) {
      mixed[i] = 0.0f;
      UNROLL for (int tap = 0; tap < 4; ++tap) {
        mixed[i] = multiply_add(held[(n + 1 + tap) % 4][i], taps[i * 4 + tap], mixed[i]);
      }
      mixed[i] = t < rows ? mixed[i] * sigmoid_of(mixed[i]) : 0.0f;
      square = multiply_add(mixed[i], mixed[i], square);
    }
    const uint to = (head * padded + t) * 128u + at;
    if (is_values) {
      if (mine) store_eight(mixed, values + to);
    } else {
      const float unit_length = rsqrt_of(sum_lanes<16>(square) + 1.0e-6f) * (side == 0u ? 0.08838834764831845f : 1.0f);
      float dot = 0.0f;
      UNROLL for (int i = 0; i < 8; ++i) {
        mixed[i] *= unit_length;
        dot = multiply_add(mixed[i], simd_shuffle_xor(mixed[i], ushort(16)), dot);
      }
      dot = sum_lanes<16>(dot);
      if (lane % ROWS == uint(n) - 3u) own_dot = dot;
      if (side == 0u) {
        store_eight(mixed, queries + to);
      } else {
        store_eight(mixed, keys + to);
      }
    }
  }
}

if (!is_values) {
  const uint t = first + lane % ROWS;
  for (uint n = lane / ROWS; n < group; n += 32u / ROWS) {
    const uint value_head = head * group + n;
    float gate[4] = {0.0f, 0.0f, own_dot, 0.0f};
    if (t < rows) {
      const float raised = float(a[t * a_strides[1] + value_head * a_strides[2]]) + float(dt_bias[value_head]);
      const float above = raised > 0.0f ? raised : 0.0f;
      const float softplus = above + log1p_of(exp_of(raised > 0.0f ? -raised : raised));
      gate[0] = -exp_of(float(a_log[value_head])) * softplus;
      gate[1] = sigmoid_of(float(b[t * b_strides[1] + value_head * b_strides[2]]));
    }
    store_word(gate, gates + (value_head * padded + t) * 4u);
  }
}
if (mine && first < rows && rows <= first + ROWS) {
  UNROLL for (uint i = 0u; i < 3u; ++i) {
    const uint from = rows + i;
    const device T* row = from == 1u   ? kept1
                          : from == 2u ? kept2
                                       : qkv + (from - 3u) * qkv_strides[1];
    float word[8];
    load_eight(row + channel, word);
    store_eight(word, (i == 0u ? row0 : i == 1u ? row1 : row2) + channel);
  }
}

// kernel: scan
// inputs: queries keys values gates state
// dense: queries keys values gates state
// outputs: out new_state
// template: typename T, int LANES, int HELD, int SIMDGROUPS
//
// The delta rule row by row, the state in registers from the first row to the last. All as `prepare` leaves it; state
// float32 [1, value heads, 128 values, 128 keys]. out float32 [value heads, padded, 128] is the read-out S q.
// Grid: (128 / SPAN) × value heads threadgroups, SPAN = 32 / LANES · HELD · SIMDGROUPS value columns each. The next
// eight rows are loaded while eight are worked on; a row costs a simdgroup one round of exchanges and no barrier.
// LANES       lanes that share a value column: 4, 8 or 16, each with 128 / LANES keys.
// HELD        value columns of a lane: 1, 2 or 4.
// SIMDGROUPS  simdgroups of a threadgroup, up to 8.
constexpr int STEPS = 8;
constexpr int KEYS = 128 / LANES;
constexpr int APART = 32 / LANES;
constexpr int SPAN = APART * HELD * SIMDGROUPS;
constexpr int THREADS = 32 * SIMDGROUPS;
constexpr int WORDS = STEPS * 32 / THREADS;
const uint lane = thread_index_in_simdgroup;
const uint index = thread_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y;
const uint first_column = threadgroup_position_in_grid.x * uint(SPAN);
const uint heads = uint(state_shape[1]);
const uint padded = uint(queries_shape[1]);
const uint key_head = head * uint(queries_shape[0]) / heads;
const uint part = lane % uint(LANES);
const uint own = simdgroup_index_in_threadgroup * uint(APART * HELD) + lane / uint(LANES);
const uint place = (head * 128u + first_column + own) * 128u + part * 4u;
THREADGROUP_ARRAY(float4, shared_heads, 2 * STEPS * 64);
THREADGROUP_ARRAY(float4, shared_gates, 2 * STEPS);
THREADGROUP_ARRAY(float, shared_values, 2 * STEPS * SPAN);
THREADGROUP_ARRAY(float, shared_out, 2 * STEPS * SPAN);

float held[HELD][KEYS];
UNROLL for (int c = 0; c < HELD; ++c) {
  UNROLL for (int w = 0; w < KEYS / 4; ++w) {
    load_word(state + place + uint(c * APART) * 128u + uint(w * LANES) * 4u, held[c] + w * 4);
  }
}

const uint blocks = padded / uint(STEPS);
for (uint block = 0u; block <= blocks; ++block) {
  // What the next block needs is on its way while this one is worked on.
  float next_heads[WORDS][8];
  float next_values[8];
  float next_gate[4];
  const bool has_values = index < uint(STEPS * SPAN / 8);
  const bool has_gate = index < uint(STEPS);
  if (block < blocks) {
    const uint row = block * uint(STEPS);
    UNROLL for (int w = 0; w < WORDS; ++w) {
      const uint word = index + uint(w * THREADS);
      const uint within = (key_head * padded + row) * 128u + word % uint(STEPS * 16) * 8u;
      load_eight((word < uint(STEPS * 16) ? queries : keys) + within, next_heads[w]);
    }
    if (has_values) {
      const uint from = (head * padded + row + index / uint(SPAN / 8)) * 128u + first_column;
      load_eight(values + from + index % uint(SPAN / 8) * 8u, next_values);
    }
    if (has_gate) load_word(gates + (head * padded + row + index) * 4u, next_gate);
  }

  if (block > 0u) {
    const uint base = (block - 1u) % 2u * uint(STEPS);
    UNROLL for (uint step = 0u; step < uint(STEPS); ++step) {
      const uint t = base + step;
      // S k and S q are taken of the state as it was, in one round of exchanges: with d = β (v - g S k) the new state
      // is g S + d kT, so that the read-out is g S q + d (k q).
      float key[KEYS];
      float seen[HELD];
      float read[HELD];
      UNROLL for (int c = 0; c < HELD; ++c) seen[c] = read[c] = 0.0f;
      UNROLL for (int w = 0; w < KEYS / 4; ++w) {
        const float4 query = shared_heads[t * 64u + uint(w * LANES) + part];
        const float4 word = shared_heads[t * 64u + 32u + uint(w * LANES) + part];
        key[w * 4] = word.x;
        key[w * 4 + 1] = word.y;
        key[w * 4 + 2] = word.z;
        key[w * 4 + 3] = word.w;
        UNROLL for (int c = 0; c < HELD; ++c) {
          UNROLL for (int i = 0; i < 4; ++i) seen[c] = multiply_add(held[c][w * 4 + i], key[w * 4 + i], seen[c]);
          read[c] = multiply_add(held[c][w * 4], query.x, read[c]);
          read[c] = multiply_add(held[c][w * 4 + 1], query.y, read[c]);
          read[c] = multiply_add(held[c][w * 4 + 2], query.z, read[c]);
          read[c] = multiply_add(held[c][w * 4 + 3], query.w, read[c]);
        }
      }
      UNROLL for (int c = 0; c < HELD; ++c) seen[c] = sum_lanes<LANES>(seen[c]);
      // Lane `part` of those that share columns ends with the read-out of column `part`.
      simd_halve<HELD / 2>(read, lane);
      UNROLL for (int mask = HELD; mask < LANES; mask *= 2) read[0] += simd_shuffle_xor(read[0], ushort(mask));

      const float4 gate = shared_gates[t];  // g, β, k·q
      const float faded = gate.y * gate.x;
      float own_delta = 0.0f;
      UNROLL for (int c = 0; c < HELD; ++c) {
        const float value = gate.y * shared_values[t * uint(SPAN) + own + uint(c * APART)];
        const float delta = multiply_add(-faded, seen[c], value);
        if (part == uint(c)) own_delta = delta;
        UNROLL for (int i = 0; i < KEYS; ++i) held[c][i] = multiply_add(delta, key[i], gate.x * held[c][i]);
      }
      if (part < uint(HELD)) {
        shared_out[t * uint(SPAN) + own + part * uint(APART)] = multiply_add(gate.x, read[0], own_delta * gate.z);
      }
    }
  }

  if (block < blocks) {
    const uint base = block % 2u * uint(STEPS);
    UNROLL for (int w = 0; w < WORDS; ++w) {
      const uint word = index + uint(w * THREADS);
      const uint within = word % uint(STEPS * 16);
      const uint to = (base + within / 16u) * 64u + word / uint(STEPS * 16) * 32u + within % 16u * 2u;
      UNROLL for (uint i = 0u; i < 2u; ++i) {
        float4 four;
        four.x = next_heads[w][i * 4u];
        four.y = next_heads[w][i * 4u + 1u];
        four.z = next_heads[w][i * 4u + 2u];
        four.w = next_heads[w][i * 4u + 3u];
        shared_heads[to + i] = four;
      }
    }
    if (has_values) {
      UNROLL for (uint i = 0u; i < 8u; ++i) shared_values[base * uint(SPAN) + index * 8u + i] = next_values[i];
    }
    if (has_gate) {
      float4 gate;
      gate.x = exp_of(next_gate[0]);
      gate.y = next_gate[1];
      gate.z = next_gate[2];
      gate.w = 0.0f;
      shared_gates[base + index] = gate;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (block > 0u) {
    const uint base = (block - 1u) % 2u * uint(STEPS);
    for (uint word = index; word < uint(STEPS * SPAN / 4); word += uint(THREADS)) {
      float four[4];
      UNROLL for (uint i = 0u; i < 4u; ++i) four[i] = shared_out[base * uint(SPAN) + word * 4u + i];
      const uint row = (block - 1u) * uint(STEPS) + word / uint(SPAN / 4);
      store_word(four, out + (head * padded + row) * 128u + first_column + word % uint(SPAN / 4) * 4u);
    }
  }
}

UNROLL for (int c = 0; c < HELD; ++c) {
  UNROLL for (int w = 0; w < KEYS / 4; ++w) {
    store_word(held[c] + w * 4, new_state + place + uint(c * APART) * 128u + uint(w * LANES) * 4u);
  }
}

// kernel: solve
// inputs: queries keys values gates
// dense: queries keys values gates
// outputs: carried own inner tiled_queries tiled_keys fades
// template: typename T, int CHUNK
//
// What a chunk of CHUNK rows contributes whatever the state before it. With Γ_t the decay from the chunk's start to t
// and A_ti = β_t (Γ_t / Γ_i) k_t·k_i for i < t (Yang et al., arXiv:2412.06464, in the form of arXiv:2406.06484):
//   carried = -(I + A)⁻¹ β Γ K;  own = (I + A)⁻¹ β V;  local_ti = (Γ_t / Γ_i) q_t·k_i for i ≤ t;
//   fades_t = Γ_t and Γ_L / Γ_t.
// Ratios are formed from differences of logarithms and the inverse by forward substitution, both in float32; products
// of T add up in float32. Matrices leave as tiles of 16 × 16 in the order in which a lane holds them (left_set), a
// word of 16 bytes a lane, so that `carry` loads each in one coalesced access:
//   carried [value heads, chunks, R, 8], inner [value heads, chunks, R (R + 1) / 2: lower triangle by rows],
//   tiled_queries [key heads, chunks, R, 8] and tiled_keys (turned: keys dim × rows) [key heads, chunks, 8, R], all
//   [..., 32 lanes, 8] of T with R = CHUNK / 16; own float32 [value heads, chunks, 16, R, 32 lanes, 4] as sums;
//   fades float32 [value heads, chunks, CHUNK, 2].
// Grid: chunks × value heads threadgroups of R simdgroups; simdgroup s makes rows 16 s … of everything.
constexpr int R = CHUNK / 16;
constexpr uint LD = 72u;
constexpr uint XLD = uint(CHUNK) + 4u;
const uint lane = thread_index_in_simdgroup;
const uint index = thread_index_in_threadgroup;
const int s = int(simdgroup_index_in_threadgroup);
const uint chunk = threadgroup_position_in_grid.x;
const uint chunks = threadgroups_per_grid.x;
const uint head = threadgroup_position_in_grid.y;
const uint padded = uint(queries_shape[1]);
const uint group = uint(values_shape[0]) / uint(queries_shape[0]);
const uint key_head = head / group;
// The first of the value heads that share a key head lays its tiles out.
const bool lays = head % group == 0u;
const uint at = head * chunks + chunk;
const uint key_at = key_head * chunks + chunk;
const uint rows_at = (key_head * padded + chunk * uint(CHUNK)) * 128u;
const uint values_at = (head * padded + chunk * uint(CHUNK)) * 128u;
const uint row = tile_row(lane);
const uint column = tile_column(lane);
THREADGROUP_ARRAY(T, staged, CHUNK * 72);
THREADGROUP_ARRAY(float, inverse, CHUNK * (CHUNK + 4));
THREADGROUP_ARRAY(float, shared_log, CHUNK);
THREADGROUP_ARRAY(float, run, CHUNK);
THREADGROUP_ARRAY(float, beta, CHUNK);

if (index < uint(CHUNK)) {
  const device float* gate = gates + (head * padded + chunk * uint(CHUNK) + index) * 4u;
  shared_log[index] = gate[0];
  beta[index] = gate[1];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (index < uint(CHUNK)) {
  float before = 0.0f;
  float after = 0.0f;
  for (uint i = 0u; i < uint(CHUNK); ++i) {
    if (i <= index) {
      before += shared_log[i];
    } else {
      after += shared_log[i];
    }
  }
  run[index] = before;
  fades[(at * uint(CHUNK) + index) * 2u] = exp_of(before);
  fades[(at * uint(CHUNK) + index) * 2u + 1u] = exp_of(after);
}

// Products of keys and of queries with keys, half of the dims at a time. Column tiles past the diagonal are left out.
sum_tile key_key[2 * R];
sum_tile query_key[2 * R];
UNROLL for (int j = 0; j < 2 * R; ++j) {
  sum_fill(key_key[j], 0.0f);
  sum_fill(query_key[j], 0.0f);
}
for (uint part = 0u; part < 2u; ++part) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (uint w = 0u; w < 4u; ++w) {
    const uint word = index + w * uint(R) * 32u;
    const device T* from = keys + rows_at + word / 8u * 128u + part * 64u + word % 8u * 8u;
    ((threadgroup uint4*)(staged + word / 8u * LD + word % 8u * 8u))[0] = ((const device uint4*)from)[0];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (uint k = 0u; k < 4u; ++k) {
    left_tile<T> key;
    left_tile<T> query;
    uint query_pair[4];
    uint key_pair[4];
    left_load_shared<false>(key, staged + uint(s) * 16u * LD + k * 16u, LD, lane);
    UNROLL for (uint e = 0u; e < 4u; ++e) {
      const uint i = (e % 2u) * 8u, j = (e / 2u) * 8u;
      const uint from = rows_at + (uint(s) * 16u + i + row) * 128u + part * 64u + k * 16u + j + column;
      query_pair[e] = ((const device uint*)(queries + from))[0];
      left_set(query, int(e % 2u), int(e / 2u), query_pair[e]);
      const threadgroup T* turned = staged + (uint(s) * 16u + j + column) * LD + k * 16u + i + row;
      key_pair[e] = uint(as_type<ushort>(turned[0])) | uint(as_type<ushort>(turned[LD])) << 16;
    }
    if (lays) {
      uint4 word;
      word.x = query_pair[0];
      word.y = query_pair[1];
      word.z = query_pair[2];
      word.w = query_pair[3];
      ((device uint4*)tiled_queries)[((key_at * uint(R) + uint(s)) * 8u + part * 4u + k) * 32u + lane] = word;
      word.x = key_pair[0];
      word.y = key_pair[1];
      word.z = key_pair[2];
      word.w = key_pair[3];
      ((device uint4*)tiled_keys)[((key_at * 8u + part * 4u + k) * uint(R) + uint(s)) * 32u + lane] = word;
    }
    UNROLL for (int j = 0; j < 2 * R; ++j) {
      if (j <= 2 * s + 1) {
        right_tile<T> right;
        right_load_shared<true>(right, staged + uint(j) * 8u * LD + k * 16u, LD, lane);
        tile_multiply(key_key[j], key, right);
        tile_multiply(query_key[j], query, right);
      }
    }
  }
}

UNROLL for (int b = 0; b < R; ++b) {
  if (b <= s) {
    uint pair[4];
    UNROLL for (int j = 0; j < 2; ++j) {
      float seen[4];
      UNROLL for (int i = 0; i < 4; ++i) {
        const uint t = uint(s) * 16u + uint(i / 2) * 8u + row;
        const uint past = uint(b) * 16u + uint(j) * 8u + column + uint(i % 2);
        const float ratio = past <= t ? exp_of(run[t] - run[past]) : 0.0f;
        seen[i] = ratio * sum_get(query_key[2 * b + j], i);
        inverse[t * XLD + past] = past < t ? beta[t] * ratio * sum_get(key_key[2 * b + j], i) : 0.0f;
      }
      pair[2 * j] = tile_pair(seen[0], seen[1], T());
      pair[2 * j + 1] = tile_pair(seen[2], seen[3], T());
    }
    uint4 word;
    word.x = pair[0];
    word.y = pair[1];
    word.z = pair[2];
    word.w = pair[3];
    const uint tile = at * uint(R * (R + 1) / 2) + uint(s * (s + 1) / 2 + b);
    ((device uint4*)inner)[tile * 32u + lane] = word;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Forward substitution in place, 16 rows at a time: a lane makes one column, two lanes share its sums over the rows above.
const uint mine = uint(s) * 16u + lane % 16u;
const uint side = lane / 16u;
for (int r = 0; r < R; ++r) {
  threadgroup float* block = inverse + uint(r) * 16u * XLD;
  float x[16];
  UNROLL for (int t = 0; t < 16; ++t) x[t] = 0.0f;
  if (r >= s) {
    for (uint i = uint(s) * 16u + side * 4u; i < uint(r) * 16u; i += 8u) {
      float above[4];
      UNROLL for (uint e = 0u; e < 4u; ++e) above[e] = inverse[(i + e) * XLD + mine];
      UNROLL for (int t = 0; t < 16; ++t) {
        const float4 a = ((const threadgroup float4*)(block + uint(t) * XLD + i))[0];
        x[t] = multiply_add(-a.x, above[0], x[t]);
        x[t] = multiply_add(-a.y, above[1], x[t]);
        x[t] = multiply_add(-a.z, above[2], x[t]);
        x[t] = multiply_add(-a.w, above[3], x[t]);
      }
    }
    UNROLL for (int t = 0; t < 16; ++t) {
      x[t] += simd_shuffle_xor(x[t], ushort(16));
      if (uint(r) * 16u + uint(t) == mine) x[t] += 1.0f;
      UNROLL for (int i = 0; i < t; ++i) x[t] = multiply_add(-block[uint(t) * XLD + uint(r * 16 + i)], x[i], x[t]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int t = 0; t < 16; ++t) {
    if (side == uint(t / 8)) block[uint(t) * XLD + mine] = x[t];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

left_tile<T> for_keys[R];
left_tile<T> for_values[R];
UNROLL for (int b = 0; b < R; ++b) {
  UNROLL for (int e = 0; e < 4; ++e) {
    const uint past = uint(b) * 16u + uint(e / 2) * 8u + column;
    const threadgroup float* from = inverse + (uint(s) * 16u + uint(e % 2) * 8u + row) * XLD + past;
    const float low = beta[past] * from[0], high = beta[past + 1u] * from[1];
    left_set(for_values[b], e % 2, e / 2, tile_pair(low, high, T()));
    left_set(
        for_keys[b], e % 2, e / 2, tile_pair(-exp_of(run[past]) * low, -exp_of(run[past + 1u]) * high, T()));
  }
}
// The second half of the keys' dims is still there.
for (uint phase = 0u; phase < 4u; ++phase) {
  const uint part = phase < 2u ? 1u - phase : phase - 2u;
  if (phase > 0u) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const device T* source = phase == 1u ? keys + rows_at : values + values_at;
    UNROLL for (uint w = 0u; w < 4u; ++w) {
      const uint word = index + w * uint(R) * 32u;
      const device T* from = source + word / 8u * 128u + part * 64u + word % 8u * 8u;
      ((threadgroup uint4*)(staged + word / 8u * LD + word % 8u * 8u))[0] = ((const device uint4*)from)[0];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL for (uint n = 0u; n < 4u; ++n) {
    sum_tile sum[2];
    UNROLL for (int j = 0; j < 2; ++j) {
      sum_fill(sum[j], 0.0f);
      UNROLL for (int b = 0; b < R; ++b) {
        if (b <= s) {
          right_tile<T> right;
          right_load_shared<false>(right, staged + uint(b) * 16u * LD + n * 16u + uint(j) * 8u, LD, lane);
          if (phase < 2u) {
            tile_multiply(sum[j], for_keys[b], right);
          } else {
            tile_multiply(sum[j], for_values[b], right);
          }
        }
      }
    }
    if (phase < 2u) {
      uint4 word;
      word.x = tile_pair(sum_get(sum[0], 0), sum_get(sum[0], 1), T());
      word.y = tile_pair(sum_get(sum[0], 2), sum_get(sum[0], 3), T());
      word.z = tile_pair(sum_get(sum[1], 0), sum_get(sum[1], 1), T());
      word.w = tile_pair(sum_get(sum[1], 2), sum_get(sum[1], 3), T());
      ((device uint4*)carried)[((at * uint(R) + uint(s)) * 8u + part * 4u + n) * 32u + lane] = word;
    } else {
      UNROLL for (uint j = 0u; j < 2u; ++j) {
        float four[4];
        UNROLL for (int i = 0; i < 4; ++i) four[i] = sum_get(sum[j], i);
        const uint tile = (at * 16u + part * 8u + n * 2u + j) * uint(R) + uint(s);
        store_word(four, own + (tile * 32u + lane) * 4u);
      }
    }
  }
}

// kernel: carry
// inputs: carried own inner tiled_queries tiled_keys fades state
// dense: carried own inner tiled_queries tiled_keys fades state
// outputs: out new_state
// template: typename T, int CHUNK, int TILES, int SIMDGROUPS
//
// The state from chunk to chunk, in registers as sums: with S before the chunk and D = own + carried Sᵀ,
//   O = Γ (Q Sᵀ) + inner D;  Sᵀ ← Γ_L Sᵀ + Kᵀ (Γ_L / Γ) D.
// Inputs as `solve` leaves them; state float32 [1, value heads, 128 values, 128 keys]; out float32
// [value heads, padded, 128]. Operands are rounded to T, sums and state are float32.
// Grid: a simdgroup owns TILES · 8 value columns of a head; nothing is shared, so there is no barrier.
// TILES       column tiles of a simdgroup: 1 or 2.
// SIMDGROUPS  simdgroups of a threadgroup; they read the same words at about the same time.
constexpr int R = CHUNK / 16;
const uint lane = thread_index_in_simdgroup;
const uint head = threadgroup_position_in_grid.y;
const uint first_tile = (threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup) * uint(TILES);
const uint chunks = uint(own_shape[1]);
const uint key_head = head * uint(tiled_queries_shape[0]) / uint(own_shape[0]);
const uint row = tile_row(lane);
const uint column = tile_column(lane);

sum_tile held[TILES][8];
UNROLL for (int n = 0; n < TILES; ++n) {
  UNROLL for (int m = 0; m < 8; ++m) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const uint value = head * 128u + (first_tile + uint(n)) * 8u + column + uint(i % 2);
      sum_set(held[n][m], i, state[value * 128u + uint(m) * 16u + uint(i / 2) * 8u + row]);
    }
  }
}

for (uint chunk = 0u; chunk < chunks; ++chunk) {
  const uint at = head * chunks + chunk;
  const uint key_at = key_head * chunks + chunk;
  const device float* fade = fades + at * uint(CHUNK) * 2u;
  right_tile<T> before[TILES][8];
  right_tile<T> delta[TILES][R];
  right_tile<T> late[TILES][R];
  UNROLL for (int n = 0; n < TILES; ++n) {
    UNROLL for (int m = 0; m < 8; ++m) right_from_sums(before[n][m], held[n][m]);
  }
  UNROLL for (int r = 0; r < R; ++r) {
    sum_tile change[TILES];
    sum_tile read[TILES];
    UNROLL for (int n = 0; n < TILES; ++n) {
      float four[4];
      load_word(own + (((at * 16u + first_tile + uint(n)) * uint(R) + uint(r)) * 32u + lane) * 4u, four);
      UNROLL for (int i = 0; i < 4; ++i) sum_set(change[n], i, four[i]);
      sum_fill(read[n], 0.0f);
    }
    UNROLL for (int m = 0; m < 8; ++m) {
      left_tile<T> left;
      left_tile<T> query;
      uint pair[4];
      load_pairs(carried + (((at * uint(R) + uint(r)) * 8u + uint(m)) * 32u + lane) * 8u, pair);
      UNROLL for (int e = 0; e < 4; ++e) left_set(left, e % 2, e / 2, pair[e]);
      load_pairs(tiled_queries + (((key_at * uint(R) + uint(r)) * 8u + uint(m)) * 32u + lane) * 8u, pair);
      UNROLL for (int e = 0; e < 4; ++e) left_set(query, e % 2, e / 2, pair[e]);
      UNROLL for (int n = 0; n < TILES; ++n) {
        tile_multiply(change[n], left, before[n][m]);
        tile_multiply(read[n], query, before[n][m]);
      }
    }
    float reach[2];
    float tail[2];
    UNROLL for (int i = 0; i < 2; ++i) {
      reach[i] = fade[(uint(r) * 16u + uint(i) * 8u + row) * 2u];
      tail[i] = fade[(uint(r) * 16u + uint(i) * 8u + row) * 2u + 1u];
    }
    UNROLL for (int n = 0; n < TILES; ++n) {
      right_from_sums(delta[n][r], change[n]);
      UNROLL for (int i = 0; i < 4; ++i) {
        sum_set(change[n], i, sum_get(change[n], i) * tail[i / 2]);
        sum_set(read[n], i, sum_get(read[n], i) * reach[i / 2]);
      }
      right_from_sums(late[n][r], change[n]);
    }
    UNROLL for (int b = 0; b <= r; ++b) {
      left_tile<T> left;
      uint pair[4];
      load_pairs(inner + ((at * uint(R * (R + 1) / 2) + uint(r * (r + 1) / 2 + b)) * 32u + lane) * 8u, pair);
      UNROLL for (int e = 0; e < 4; ++e) left_set(left, e % 2, e / 2, pair[e]);
      UNROLL for (int n = 0; n < TILES; ++n) tile_multiply(read[n], left, delta[n][b]);
    }
    UNROLL for (int n = 0; n < TILES; ++n) {
      UNROLL for (int i = 0; i < 4; ++i) {
        const uint t = (at * uint(R) + uint(r)) * 16u + uint(i / 2) * 8u + row;
        out[t * 128u + (first_tile + uint(n)) * 8u + column + uint(i % 2)] = sum_get(read[n], i);
      }
    }
  }
  const float last = fade[(uint(CHUNK) - 1u) * 2u];
  UNROLL for (int m = 0; m < 8; ++m) {
    UNROLL for (int n = 0; n < TILES; ++n) {
      UNROLL for (int i = 0; i < 4; ++i) sum_set(held[n][m], i, sum_get(held[n][m], i) * last);
    }
    UNROLL for (int r = 0; r < R; ++r) {
      left_tile<T> left;
      uint pair[4];
      load_pairs(tiled_keys + (((key_at * 8u + uint(m)) * uint(R) + uint(r)) * 32u + lane) * 8u, pair);
      UNROLL for (int e = 0; e < 4; ++e) left_set(left, e % 2, e / 2, pair[e]);
      UNROLL for (int n = 0; n < TILES; ++n) tile_multiply(held[n][m], left, late[n][r]);
    }
  }
}

UNROLL for (int n = 0; n < TILES; ++n) {
  UNROLL for (int m = 0; m < 8; ++m) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const uint value = head * 128u + (first_tile + uint(n)) * 8u + column + uint(i % 2);
      new_state[value * 128u + uint(m) * 16u + uint(i / 2) * 8u + row] = sum_get(held[n][m], i);
    }
  }
}

// kernel: norm
// inputs: read z gain
// dense: read gain
// outputs: out
// template: typename T, typename O, int SIMDGROUPS
//
// out [1, rows, value heads · 128] of O: RMSNorm(read) · gain · silu(z), each head by itself. read float32
// [value heads, padded, 128]; z [1, rows, value heads · 128] of T by its strides, its last axis dense and its rows on 16
// bytes; gain [128]. Grid: 16 lanes take a head of a row.
constexpr int PER_WORD = 16 / int(sizeof(T));
const uint index = thread_index_in_threadgroup;
REFUSE_UNLESS(
    z_strides[2] == 1 && (z_shape[1] == 1 || z_strides[1] % PER_WORD == 0), out, O,
    index + threadgroup_position_in_grid.x == 0u)
const uint heads = uint(read_shape[0]);
const uint units = uint(z_shape[1]) * heads;
const uint asked = threadgroup_position_in_grid.x * uint(SIMDGROUPS) * 2u + index / 16u;
const uint unit = asked < units ? asked : units - 1u;
const uint row = unit / heads;
const uint head = unit % heads;
const uint at = index % 16u * 8u;
float number[8];
float gate[8];
float scale[8];
load_eight(read + (head * uint(read_shape[1]) + row) * 128u + at, number);
load_eight(z + row * z_strides[1] + head * 128u + at, gate);
load_eight(gain + at, scale);
float square = 0.0f;
UNROLL for (int i = 0; i < 8; ++i) square = multiply_add(number[i], number[i], square);
const float length = rsqrt_of(sum_lanes<16>(square) * (1.0f / 128.0f) + 1.0e-6f);
UNROLL for (int i = 0; i < 8; ++i) number[i] = number[i] * length * scale[i] * (gate[i] * sigmoid_of(gate[i]));
if (asked < units) store_eight(number, out + unit * 128u + at);
