// What a device's memory gives at best, for other kernels to be held against (bandwidth.py): nothing is computed, and a
// lane asks for all its words before it uses one, where MLX's elementwise kernels give each thread a single word (on an
// H200 3.67 TB/s copied by MLX, 3.6 to 3.85 by the tiles here, read at 3.5 to 4.06).

// kernel: copy
// inputs: source
// dense: source
// outputs: out
// template: int EACH, int SIMDGROUPS
//
// source and out uint32 [words · 4], words a multiple of EACH · SIMDGROUPS · 32.
// Grid: one threadgroup of SIMDGROUPS simdgroups for every EACH · SIMDGROUPS · 32 words.
// EACH  words of 16 bytes that a lane moves, a threadgroup's lanes apart.
constexpr uint LANES = uint(SIMDGROUPS) * 32u;
const uint first = threadgroup_position_in_grid.x * LANES * uint(EACH) + thread_index_in_threadgroup;
const device uint4* from = (const device uint4*)source;
device uint4* to = (device uint4*)out;
uint4 word[EACH];
UNROLL for (int i = 0; i < EACH; ++i) word[i] = from[first + uint(i) * LANES];
UNROLL for (int i = 0; i < EACH; ++i) to[first + uint(i) * LANES] = word[i];

// kernel: read
// inputs: source
// dense: source
// outputs: out
// template: int EACH, int SIMDGROUPS
//
// As `copy`, but all that is kept is the exclusive or of a simdgroup's words: out uint32 [simdgroups of the grid].
constexpr uint LANES = uint(SIMDGROUPS) * 32u;
const uint first = threadgroup_position_in_grid.x * LANES * uint(EACH) + thread_index_in_threadgroup;
const device uint4* from = (const device uint4*)source;
uint4 word[EACH];
UNROLL for (int i = 0; i < EACH; ++i) word[i] = from[first + uint(i) * LANES];
uint bits = 0u;
UNROLL for (int i = 0; i < EACH; ++i) bits ^= word[i].x ^ word[i].y ^ word[i].z ^ word[i].w;
UNROLL for (int mask = 1; mask < 32; mask *= 2) bits ^= simd_shuffle_xor(bits, ushort(mask));
if (thread_index_in_simdgroup == 0u) {
  out[threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup] = bits;
}
