// The dialect that every kernel body is written in, for Metal and for CUDA.
//
// A body uses Metal's own names for simdgroup operations, barriers, thread positions and address spaces, and what is
// defined here for the rest. It computes in float32, converts explicitly at loads and stores, and treats vectors as
// carriers of 16 bytes; see the rules in loader.py.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
// ---- CUDA ----
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long long ulong;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

#define HELPER static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define THREADGROUP_ARRAY(type, name, extent) __shared__ __align__(16) type name[extent]
#define EVERY_LANE 0xffffffffu

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
HELPER void threadgroup_barrier(mem_flags) { __syncthreads(); }
HELPER void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <typename V>
HELPER V simd_shuffle(V value, ushort lane) { return __shfl_sync(EVERY_LANE, value, lane); }
template <typename V>
HELPER V simd_shuffle_xor(V value, ushort mask) { return __shfl_xor_sync(EVERY_LANE, value, mask); }
template <typename V>
HELPER V simd_sum(V value) {
  for (ushort mask = 16; mask > 0; mask >>= 1) value += simd_shuffle_xor(value, mask);
  return value;
}
template <typename V>
HELPER V simd_max(V value) {
  for (ushort mask = 16; mask > 0; mask >>= 1) {
    const V other = simd_shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

#if __CUDA_ARCH__ >= 800
// In one instruction, and preferred to the template.
HELPER uint simd_max(uint value) { return __reduce_max_sync(EVERY_LANE, value); }
#endif

HELPER float exp2_of(float x) { return exp2f(x); }
HELPER float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// The bits of a mask below 2^23 as a number; conversions run at a fraction of the rate. In one logical operation, which
// compilers make two of: they run at half the rate of sums.
HELPER float masked_number(uint bits, uint mask) {
  uint number;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(number) : "r"(bits), "r"(mask), "r"(0x4b000000u));
  return __uint_as_float(number) - 8388608.0f;
}
HELPER uint masked_or(uint bits, uint mask, uint base) {
  uint merged;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(merged) : "r"(bits), "r"(mask), "r"(base));
  return merged;
}
HELPER uint bits_set(uint bits) { return uint(__popc(bits)); }
// The lower and the upper halves of two words side by side, and a number of 16 bits twice.
HELPER uint lower_halves(uint one, uint two) { return __byte_perm(one, two, 0x5410); }
HELPER uint upper_halves(uint one, uint two) { return __byte_perm(one, two, 0x7632); }
HELPER uint twice(uint number) { return __byte_perm(number, number, 0x1010); }
HELPER uint simd_flags(bool flag, uint) { return __ballot_sync(EVERY_LANE, flag); }
HELPER float exp_of(float x) { return expf(x); }
// To some units in the last place, without the branches that an exact quotient takes.
HELPER float sigmoid_of(float x) { return __fdividef(1.0f, 1.0f + exp2f(x * -1.4426950408889634f)); }
HELPER float rsqrt_of(float x) { return rsqrtf(x); }
// To a few units in the last place of a float32: a fraction of the work where the result is rounded to 16 bits.
HELPER float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
HELPER float sin_of(float x) { return sinf(x); }
HELPER float cos_of(float x) { return cosf(x); }
template <typename To, typename From>
HELPER To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Matrix tiles; what they are is said below, with what both targets share.
template <typename T>
struct left_tile {
  uint pair[4];
};
template <typename T>
struct right_tile {
  uint pair[2];
};
struct sum_tile {
  float number[4];
};
HELPER uint tile_row(uint lane) { return lane >> 2; }
HELPER uint tile_column(uint lane) { return (lane & 3u) * 2u; }
HELPER ushort tile_row_mask(int i) { return ushort(4 << i); }
HELPER uint right_row(uint lane, uint i) { return tile_column(lane) + (i & 1u) + (i >> 1) * 8u; }
HELPER uint right_column(uint lane, uint) { return tile_row(lane); }
template <typename T>
HELPER void left_set(left_tile<T>& tile, int i, int j, uint pair) { tile.pair[i + 2 * j] = pair; }
template <typename T>
HELPER void right_set(right_tile<T>& tile, int i, uint pair) { tile.pair[i] = pair; }
template <typename T>
HELPER uint right_get(const right_tile<T>& tile, int i) { return tile.pair[i]; }
HELPER float sum_get(const sum_tile& tile, int i) { return tile.number[i]; }
HELPER void sum_set(sum_tile& tile, int i, float number) { tile.number[i] = number; }

#define TILE_PRODUCT(type, name)                                                                                  \
  HELPER void tile_multiply(sum_tile& sum, const left_tile<type>& left, const right_tile<type>& right) {          \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                                                                                       \
        : "+f"(sum.number[0]), "+f"(sum.number[1]), "+f"(sum.number[2]), "+f"(sum.number[3])                      \
        : "r"(left.pair[0]), "r"(left.pair[1]), "r"(left.pair[2]), "r"(left.pair[3]), "r"(right.pair[0]),         \
          "r"(right.pair[1]));                                                                                    \
  }
TILE_PRODUCT(bfloat16_t, "bf16")
TILE_PRODUCT(float16_t, "f16")

HELPER uint tile_pair(float low, float high, bfloat16_t) {
  return as_type<uint>(__floats2bfloat162_rn(low, high));
}
HELPER uint tile_pair(float low, float high, float16_t) { return as_type<uint>(__floats2half2_rn(low, high)); }

HELPER uint scaled_pair(uint pair, uint base, uint scale, uint bias, bfloat16_t) {
  const __nv_bfloat162 codes = __hsub2(as_type<__nv_bfloat162>(pair), as_type<__nv_bfloat162>(base));
  return as_type<uint>(__hfma2(codes, as_type<__nv_bfloat162>(scale), as_type<__nv_bfloat162>(bias)));
}
HELPER uint scaled_pair(uint pair, uint base, uint scale, uint bias, float16_t) {
  const __half2 codes = __hsub2(as_type<__half2>(pair), as_type<__half2>(base));
  return as_type<uint>(__hfma2(codes, as_type<__half2>(scale), as_type<__half2>(bias)));
}

// Sums lie transposed to a right tile; one instruction turns 8 × 8 numbers of 16 bits over.
template <typename T>
HELPER void right_from_sums(right_tile<T>& tile, const sum_tile& sum) {
  UNROLL for (int i = 0; i < 2; ++i) {
    const uint pair = tile_pair(sum.number[2 * i], sum.number[2 * i + 1], T());
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(tile.pair[i]) : "r"(pair));
  }
}

template <typename T>
HELPER uint tile_two(const T* from, uint apart) {
  return uint(as_type<ushort>(from[0])) | uint(as_type<ushort>(from[apart])) << 16;
}
template <bool TRANSPOSED, typename T>
HELPER void left_load(left_tile<T>& tile, const T* from, uint ld, uint lane) {
  UNROLL for (uint i = 0u; i < 4u; ++i) {
    const uint row = tile_row(lane) + (i & 1u) * 8u, column = tile_column(lane) + (i >> 1) * 8u;
    tile.pair[i] = TRANSPOSED ? tile_two(from + column * ld + row, ld) : *(const uint*)(from + row * ld + column);
  }
}
template <bool TRANSPOSED, typename T>
HELPER void right_load(right_tile<T>& tile, const T* from, uint ld, uint lane) {
  UNROLL for (uint i = 0u; i < 2u; ++i) {
    const uint row = right_row(lane, 2u * i), column = tile_row(lane);
    tile.pair[i] = TRANSPOSED ? *(const uint*)(from + column * ld + row) : tile_two(from + row * ld + column, ld);
  }
}
template <bool TRANSPOSED, typename T>
HELPER void left_load_shared(left_tile<T>& tile, const T* from, uint ld, uint lane) {
  const uint row = (lane & 7u) + (TRANSPOSED ? lane >> 4 : (lane >> 3) & 1u) * 8u;
  const uint column = (TRANSPOSED ? (lane >> 3) & 1u : lane >> 4) * 8u;
  const uint at = uint(__cvta_generic_to_shared(from + row * ld + column));
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(tile.pair[0]), "=r"(tile.pair[1]), "=r"(tile.pair[2]), "=r"(tile.pair[3]) : "r"(at) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(tile.pair[0]), "=r"(tile.pair[1]), "=r"(tile.pair[2]), "=r"(tile.pair[3]) : "r"(at) : "memory");
  }
}
template <bool TRANSPOSED, typename T>
HELPER void right_load_shared(right_tile<T>& tile, const T* from, uint ld, uint lane) {
  const uint eight = ((lane >> 3) & 1u) * 8u;
  const T* word = from + ((lane & 7u) + (TRANSPOSED ? 0u : eight)) * ld + (TRANSPOSED ? eight : 0u);
  const uint at = uint(__cvta_generic_to_shared(word));
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
        : "=r"(tile.pair[0]), "=r"(tile.pair[1]) : "r"(at) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
        : "=r"(tile.pair[0]), "=r"(tile.pair[1]) : "r"(at) : "memory");
  }
}
template <typename T>
HELPER void right_load_blocks(right_tile<T>& one, right_tile<T>& two, const T* from, uint apart, uint lane) {
  const uint at = uint(__cvta_generic_to_shared(from + ((lane >> 3) & 1u) * apart + (lane >> 4) * 64u + (lane & 7u) * 8u));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(one.pair[0]), "=r"(one.pair[1]), "=r"(two.pair[0]), "=r"(two.pair[1]) : "r"(at) : "memory");
}
HELPER void sum_store_shared(const sum_tile& tile, float* to, uint ld, uint lane) {
  UNROLL for (uint i = 0u; i < 4u; ++i) {
    to[(tile_row(lane) + (i >> 1) * 8u) * ld + tile_column(lane) + (i & 1u)] = tile.number[i];
  }
}

#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroups_per_grid gridDim
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)

// The address spaces come last, since CUDA's headers use these words. CUDA spells __device__ as
// __attribute__((device)), which an empty `device` would turn into nothing.
#undef __device__
#define __device__ __attribute__((__device__))
#define device
#define constant
#define thread
#define threadgroup
#else
// ---- Metal ----
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

#define HELPER static inline
#define UNROLL _Pragma("clang loop unroll(full)")
#define THREADGROUP_ARRAY(type, name, extent) alignas(16) threadgroup type name[extent]

HELPER float exp2_of(float x) { return metal::exp2(x); }
HELPER float multiply_add(float a, float b, float c) { return metal::fma(a, b, c); }
HELPER float masked_number(uint bits, uint mask) { return float(bits & mask); }
HELPER uint masked_or(uint bits, uint mask, uint base) { return (bits & mask) | base; }
HELPER uint bits_set(uint bits) { return metal::popcount(bits); }
HELPER uint lower_halves(uint one, uint two) { return (one & 0xffffu) | two << 16; }
HELPER uint upper_halves(uint one, uint two) { return one >> 16 | (two & 0xffff0000u); }
HELPER uint twice(uint number) { return (number & 0xffffu) * 0x10001u; }
HELPER uint simd_flags(bool flag, uint lane) { return simd_or(flag ? 1u << lane : 0u); }
// Whatever the math mode: the fast forms lose a rotary angle of 1e5 rad altogether.
HELPER float exp_of(float x) { return metal::precise::exp(x); }
HELPER float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
HELPER float rsqrt_of(float x) { return metal::precise::rsqrt(x); }
HELPER float quick_sigmoid(float x) { return 1.0f / (1.0f + metal::exp(-x)); }
HELPER float sin_of(float x) { return metal::precise::sin(x); }
HELPER float cos_of(float x) { return metal::precise::cos(x); }

// Matrix tiles, as simdgroup matrices of 8 × 8. What a lane holds of one is the order in which MLX's own kernels have it.
template <typename T>
struct left_tile {
  simdgroup_matrix<T, 8, 8> part[4];
};
template <typename T>
struct right_tile {
  simdgroup_matrix<T, 8, 8> part[2];
};
struct sum_tile {
  simdgroup_matrix<float, 8, 8> part[2];
};
HELPER uint tile_row(uint lane) { return ((lane >> 1) & 3u) + ((lane >> 2) & 4u); }
HELPER uint tile_column(uint lane) { return (lane & 1u) * 2u + ((lane >> 1) & 4u); }
HELPER ushort tile_row_mask(int i) { return ushort(i < 2 ? 2 << i : 16); }
HELPER uint right_row(uint lane, uint i) { return tile_row(lane) + (i >> 1) * 8u; }
HELPER uint right_column(uint lane, uint i) { return tile_column(lane) + (i & 1u); }
template <typename T>
HELPER void set_pair(thread simdgroup_matrix<T, 8, 8>& part, uint pair) {
  part.thread_elements()[0] = as_type<T>(ushort(pair & 0xffffu));
  part.thread_elements()[1] = as_type<T>(ushort(pair >> 16));
}
template <typename T>
HELPER void left_set(thread left_tile<T>& tile, int i, int j, uint pair) { set_pair(tile.part[i + 2 * j], pair); }
template <typename T>
HELPER void right_set(thread right_tile<T>& tile, int i, uint pair) { set_pair(tile.part[i], pair); }
template <typename T>
HELPER uint right_get(thread right_tile<T>& tile, int i) {
  const uint low = uint(as_type<ushort>(T(tile.part[i].thread_elements()[0])));
  return low | uint(as_type<ushort>(T(tile.part[i].thread_elements()[1]))) << 16;
}
HELPER float sum_get(thread sum_tile& tile, int i) { return tile.part[i / 2].thread_elements()[i % 2]; }
HELPER void sum_set(thread sum_tile& tile, int i, float number) { tile.part[i / 2].thread_elements()[i % 2] = number; }

template <typename T>
HELPER void tile_multiply(thread sum_tile& sum, thread left_tile<T>& left, thread right_tile<T>& right) {
  UNROLL for (int i = 0; i < 2; ++i) {
    UNROLL for (int k = 0; k < 2; ++k) {
      simdgroup_multiply_accumulate(sum.part[i], left.part[i + 2 * k], right.part[k], sum.part[i]);
    }
  }
}
template <typename T>
HELPER uint tile_pair(float low, float high, T) {
  return uint(as_type<ushort>(T(low))) | uint(as_type<ushort>(T(high))) << 16;
}
template <typename T>
HELPER void right_from_sums(thread right_tile<T>& tile, thread sum_tile& sum) {
  UNROLL for (int i = 0; i < 4; ++i) tile.part[i / 2].thread_elements()[i % 2] = T(sum_get(sum, i));
}

#define TILE_LOADS(space, left, right)                                                                      \
  template <bool TRANSPOSED, typename T>                                                                    \
  HELPER void left(thread left_tile<T>& tile, const space T* from, uint ld, uint) {                         \
    UNROLL for (uint i = 0u; i < 4u; ++i) {                                                                 \
      const uint row = (i & 1u) * 8u, column = (i >> 1) * 8u;                                               \
      const space T* block = from + (TRANSPOSED ? column * ld + row : row * ld + column);                   \
      simdgroup_load(tile.part[i], block, ulong(ld), ulong2(0), TRANSPOSED);                             \
    }                                                                                                       \
  }                                                                                                         \
  template <bool TRANSPOSED, typename T>                                                                    \
  HELPER void right(thread right_tile<T>& tile, const space T* from, uint ld, uint) {                       \
    UNROLL for (uint i = 0u; i < 2u; ++i) {                                                                 \
      simdgroup_load(tile.part[i], from + i * 8u * (TRANSPOSED ? 1u : ld), ulong(ld), ulong2(0), TRANSPOSED); \
    }                                                                                                       \
  }
TILE_LOADS(device, left_load, right_load)
TILE_LOADS(threadgroup, left_load_shared, right_load_shared)
template <typename T>
HELPER void right_load_blocks(
    thread right_tile<T>& one, thread right_tile<T>& two, const threadgroup T* from, uint apart, uint) {
  UNROLL for (uint i = 0u; i < 2u; ++i) {
    simdgroup_load(one.part[i], from + i * apart, 8ul, ulong2(0), true);
    simdgroup_load(two.part[i], from + i * apart + 64u, 8ul, ulong2(0), true);
  }
}
template <typename T>
HELPER float of_pair(uint pair, uint i, T) { return float(as_type<T>(ushort(pair >> (16u * i) & 0xffffu))); }
template <typename T>
HELPER uint scaled_pair(uint pair, uint base, uint scale, uint bias, T) {
  float number[2];
  UNROLL for (uint i = 0u; i < 2u; ++i) {
    const float code = of_pair(pair, i, T()) - of_pair(base, i, T());
    number[i] = multiply_add(code, of_pair(scale, i, T()), of_pair(bias, i, T()));
  }
  return tile_pair(number[0], number[1], T());
}
HELPER void sum_store_shared(thread sum_tile& tile, threadgroup float* to, uint ld, uint) {
  UNROLL for (uint i = 0u; i < 2u; ++i) simdgroup_store(tile.part[i], to + i * 8u * ld, ulong(ld));
}
#endif
// ---- both ----

// A kernel that finds its inputs laid out in a way it does not read ends with NaN in its first output instead of
// plausible numbers: the strides of an array in a traced step cannot be seen on the host.
#define REFUSE_UNLESS(condition, output, type, first_thread)      \
  if (!(condition)) {                                             \
    if (first_thread) (output)[0] = type(as_type<float>(0x7fc00000u)); \
    return;                                                       \
  }

// log(1 + x) for x from 0 to 1 to full precision, as twice the series of atanh(x / (2 + x)): Metal has no log1p.
HELPER float log1p_of(float x) {
  const float ratio = x / (2.0f + x);
  const float square = ratio * ratio;
  float series = 1.0f / 17.0f;
  UNROLL for (int power = 15; power > 0; power -= 2) series = multiply_add(series, square, 1.0f / float(power));
  return 2.0f * ratio * series;
}

// One 16-byte word of device memory as floats: eight 16-bit numbers or four of 32 bits.
HELPER void load_word(const device bfloat16_t* from, thread float* to) {
  const uint4 word = ((const device uint4*)from)[0];
  to[0] = as_type<float>(word.x << 16);
  to[1] = as_type<float>(word.x & 0xffff0000u);
  to[2] = as_type<float>(word.y << 16);
  to[3] = as_type<float>(word.y & 0xffff0000u);
  to[4] = as_type<float>(word.z << 16);
  to[5] = as_type<float>(word.z & 0xffff0000u);
  to[6] = as_type<float>(word.w << 16);
  to[7] = as_type<float>(word.w & 0xffff0000u);
}
HELPER float half_bits(uint bits) { return float(as_type<float16_t>(ushort(bits))); }
HELPER void load_word(const device float16_t* from, thread float* to) {
  const uint4 word = ((const device uint4*)from)[0];
  to[0] = half_bits(word.x & 0xffffu);
  to[1] = half_bits(word.x >> 16);
  to[2] = half_bits(word.y & 0xffffu);
  to[3] = half_bits(word.y >> 16);
  to[4] = half_bits(word.z & 0xffffu);
  to[5] = half_bits(word.z >> 16);
  to[6] = half_bits(word.w & 0xffffu);
  to[7] = half_bits(word.w >> 16);
}
HELPER void load_word(const device float* from, thread float* to) {
  const float4 word = ((const device float4*)from)[0];
  to[0] = word.x;
  to[1] = word.y;
  to[2] = word.z;
  to[3] = word.w;
}

// One 16-byte word as it is: four pairs of 16-bit numbers, the first of a pair in the lower half.
template <typename V>
HELPER void load_pairs(const device V* from, thread uint* to) {
  const uint4 word = ((const device uint4*)from)[0];
  to[0] = word.x;
  to[1] = word.y;
  to[2] = word.z;
  to[3] = word.w;
}

// Row `at` of a cache: of the new rows from `cached` on, of the recent ones (RECENT) from `settled` on, else of `rows`; the
// last row before `end` in place of later ones.
template <bool RECENT, typename V>
HELPER const device V* row_of(
    const device V* rows, int64_t stride, const device V* recent, int64_t recent_stride, uint settled,
    const device V* fresh, int64_t fresh_stride, uint cached, uint at, uint end) {
  at = at < end ? at : end - 1u;
  if (at >= cached) return fresh + (at - cached) * fresh_stride;
  return RECENT && at >= settled ? recent + (at - settled) * recent_stride : rows + at * stride;
}

HELPER void store_word(const thread float* from, device float* to) {
  float4 word;
  word.x = from[0];
  word.y = from[1];
  word.z = from[2];
  word.w = from[3];
  ((device float4*)to)[0] = word;
}

// Eight neighbouring numbers that start on 16 bytes.
template <typename V>
HELPER void load_eight(const device V* from, thread float* to) {
  load_word(from, to);
  if constexpr (sizeof(V) == 4) load_word(from + 4, to + 4);
}

template <typename V>
HELPER void store_eight(const thread float* from, device V* to) {
  uint4 word;
  word.x = tile_pair(from[0], from[1], V());
  word.y = tile_pair(from[2], from[3], V());
  word.z = tile_pair(from[4], from[5], V());
  word.w = tile_pair(from[6], from[7], V());
  ((device uint4*)to)[0] = word;
}
HELPER void store_eight(const thread float* from, device float* to) {
  store_word(from, to);
  store_word(from + 4, to + 4);
}

// Bits that compare as unsigned integers the way the numbers do: both zeros equal, every NaN above infinity.
HELPER uint ordered_bits(float x) {
  const uint bits = as_type<uint>(x);
  const uint magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0xffffffffu;
  if (magnitude == 0u) return 0x80000000u;
  return bits == magnitude ? bits | 0x80000000u : ~bits;
}
HELPER float from_ordered_bits(uint bits) {
  return as_type<float>((bits & 0x80000000u) != 0u ? bits ^ 0x80000000u : ~bits);
}

// One exchange of `simd_sum_each` and those after it. The count is a template argument since a loop over it is not
// always unrolled, and `values` would then leave the registers.
template <int HALF>
HELPER void simd_halve(thread float* values, uint lane) {
  if constexpr (HALF > 0) {
    const bool upper = (lane & uint(HALF)) != 0u;
    UNROLL for (int i = 0; i < HALF; ++i) {
      const float keep = upper ? values[i + HALF] : values[i];
      const float give = upper ? values[i] : values[i + HALF];
      values[i] = keep + simd_shuffle_xor(give, ushort(HALF));
    }
    simd_halve<HALF / 2>(values, lane);
  }
}

// Sums of COUNT values over the simdgroup, COUNT a power of two up to 32: the lane gets the sum of value
// `lane % COUNT`. Halving what a lane still carries at each exchange takes COUNT - 1 of them where sums one by one
// take five each. `values` is used up.
template <int COUNT>
HELPER float simd_sum_each(thread float* values, uint lane) {
  simd_halve<COUNT / 2>(values, lane);
  float total = values[0];
  UNROLL for (int mask = COUNT; mask < 32; mask *= 2) total += simd_shuffle_xor(total, ushort(mask));
  return total;
}

// ---- packed 4-bit weights ----
//
// A block is 32 inputs of a product: the codes of one 16-byte word, half a group of 64. Inputs wait in threadgroup
// memory as X (bfloat16_t or float). The words of a block are turned by its number, so that lanes on neighbouring blocks
// meet in no memory bank.
//
// Two codes of a word, 16 bits apart, become numbers by one mask: the bits 0x4300 | code are 128 + code in bfloat16. Taken
// as a float32, the pair is 128 + upper code + (0x4300 + lower code) / 2^16; the input of the lower code is lessened by
// that last part, and what the constants add up to is subtracted once a block.

template <typename X>
HELPER uint staged_at(uint block, uint word) {
  constexpr uint WORDS = 2u * uint(sizeof(X));
  return block * WORDS + (word ^ (WORDS == 4u ? (block >> 1) & 3u : block & 7u));
}

// Eight inputs, the part `unit % 4` of block `unit / 4`, are stored if `inside`; every lane of the simdgroup takes part,
// its neighbour on the next part. sums [blocks, 2] gets the sum of a block and what the constants of its codes add up to.
template <typename X>
HELPER void stage(
    threadgroup uint4* staged, threadgroup float* sums, uint unit, bool inside, const thread float* values) {
  float kept[8];
  UNROLL for (int i = 0; i < 8; ++i) kept[i] = float(X(values[i]));
  float upper = (kept[4] + kept[5]) + (kept[6] + kept[7]);
  float sum = (kept[0] + kept[1]) + (kept[2] + kept[3]) + upper;
  UNROLL for (int mask = 1; mask < 4; mask *= 2) {
    sum += simd_shuffle_xor(sum, ushort(mask));
    upper += simd_shuffle_xor(upper, ushort(mask));
  }
  uint4 word[2];
  if constexpr (sizeof(X) == 2) {
    // A bfloat16 is the upper half of its float32.
    word[0].x = (as_type<uint>(kept[0]) >> 16) | as_type<uint>(kept[1]);
    word[0].y = (as_type<uint>(kept[2]) >> 16) | as_type<uint>(kept[3]);
    word[0].z = (as_type<uint>(kept[4]) >> 16) | as_type<uint>(kept[5]);
    word[0].w = (as_type<uint>(kept[6]) >> 16) | as_type<uint>(kept[7]);
  } else {
    UNROLL for (int i = 0; i < 2; ++i) {
      word[i].x = as_type<uint>(kept[4 * i]);
      word[i].y = as_type<uint>(kept[4 * i + 1]);
      word[i].z = as_type<uint>(kept[4 * i + 2]);
      word[i].w = as_type<uint>(kept[4 * i + 3]);
    }
  }
  constexpr uint COUNT = uint(sizeof(X)) / 2u;
  if (inside) {
    UNROLL for (uint i = 0u; i < COUNT; ++i) staged[staged_at<X>(unit / 4u, unit % 4u * COUNT + i)] = word[i];
    if (unit % 4u == 0u) {
      sums[unit / 2u] = sum;
      sums[unit / 2u + 1u] = multiply_add(0.259765625f, upper, 128.0f * sum);
    }
  }
}

// The 32 inputs of a block as `dot_codes` takes them.
template <typename X>
HELPER void staged_block(const threadgroup uint4* staged, uint block, thread float* to) {
  constexpr uint WORDS = 2u * uint(sizeof(X));
  UNROLL for (uint w = 0u; w < WORDS; ++w) {
    const uint4 word = staged[staged_at<X>(block, w)];
    const uint part[4] = {word.x, word.y, word.z, word.w};
    UNROLL for (uint i = 0u; i < 4u; ++i) {
      if constexpr (sizeof(X) == 2) {
        to[8u * w + 2u * i] = as_type<float>(part[i] << 16);
        to[8u * w + 2u * i + 1u] = as_type<float>(part[i] & 0xffff0000u);
      } else {
        to[4u * w + i] = as_type<float>(part[i]);
      }
    }
  }
  UNROLL for (uint i = 0u; i < 32u; ++i) {
    if ((i & 4u) == 0u) to[i] = multiply_add(-1.0f / 65536.0f, to[i + 4u], to[i]);
  }
}

HELPER float dot_codes(uint word, const thread float* x) {
  float sum = 0.0f;
  UNROLL for (int i = 0; i < 4; ++i) {
    const uint pair = masked_or(word >> (4 * i), 0x000f000fu, 0x43004300u);
    sum = multiply_add(as_type<float>(pair << 16), x[i], sum);
    sum = multiply_add(as_type<float>(pair), x[i + 4], sum);
  }
  return sum;
}

// The 32 codes of a word times the inputs of its block, as four independent sums; constants as `stage` gives them.
HELPER float dot_codes(uint4 word, const thread float* x, float constants) {
  const float low = dot_codes(word.x, x) + dot_codes(word.y, x + 8);
  return (low + (dot_codes(word.z, x + 16) + dot_codes(word.w, x + 24))) - constants;
}

HELPER uint4 no_codes() {
  uint4 word;
  word.x = word.y = word.z = word.w = 0u;
  return word;
}

// Sums over the lanes that share `lane / LANES`, LANES a power of two up to 32.
template <int LANES>
HELPER float sum_lanes(float value) {
  UNROLL for (int mask = 1; mask < LANES; mask *= 2) value += simd_shuffle_xor(value, ushort(mask));
  return value;
}

// ---- matrix tiles ----
//
// The unit is sums [16, 8] += left [16, 16] · right [16, 8], left and right of T (bfloat16_t or float16_t; float32 has no
// tiles), sums of float32: one instruction on CUDA, four products of simdgroup matrices on Metal. All lanes of the
// simdgroup take part in everything but `_set` and `_get`.
//
// Of a block of 8 × 8 a lane holds two numbers: row `tile_row`, columns `tile_column` and the next.
//   left_set(tile, i, j, pair)   the pair of rows 8i … and columns 8j …, the first in the lower half
//   sum_get, sum_set (tile, i)   number i % 2 of the rows 8 (i / 2) …
//   right_set, right_get (tile, i)  numbers 2i and 2i + 1, where number n is row `right_row`, column `right_column` (lane, n)
// tile_pair(low, high, T()) makes such a pair of two floats.
// Lanes with the same columns differ by `tile_row_mask` 0, 1 and 2.
//
// left_load, right_load <TRANSPOSED> (tile, from, ld, lane) read device memory, the forms with `_shared` threadgroup
// memory: element (row, column) at from[row · ld + column], transposed at from[column · ld + row]. Rows in memory start
// on 4 bytes in device memory and on 16 in threadgroup memory. sum_store_shared writes float32 likewise.
// right_load_blocks reads two right tiles of neighbouring columns from threadgroup memory, each block of 8 × 8 transposed
// and dense: rows 0 … 7 of both at `from`, rows 8 … 15 `apart` numbers on.
// right_from_sums rounds sums to T as the right side of the next product.

HELPER void sum_fill(thread sum_tile& tile, float number) {
  UNROLL for (int i = 0; i < 4; ++i) sum_set(tile, i, number);
}

// The largest, and the sum, over lanes that hold the same columns.
HELPER float tile_rows_max(float value) {
  UNROLL for (int i = 0; i < 3; ++i) {
    const float other = simd_shuffle_xor(value, tile_row_mask(i));
    value = other > value ? other : value;
  }
  return value;
}
HELPER float tile_rows_sum(float value) {
  UNROLL for (int i = 0; i < 3; ++i) value += simd_shuffle_xor(value, tile_row_mask(i));
  return value;
}

// Two neighbours of a left tile's row out of eight weights that lie together: numbers i and i + 4, rounded to T once.
// Weights are codes of BITS bits, times scale plus bias (each twice in its word), or with BITS 16 numbers of T.
HELPER uint code_base(bfloat16_t) { return 0x43004300u; }
HELPER uint code_base(float16_t) { return 0x64006400u; }
template <int BITS, typename T>
HELPER uint weight_pair(const thread uint* words, int i, uint scale, uint bias) {
  if constexpr (BITS == 4) {
    // Put into the low bits of 128 or 1024, whose last bit counts one, a code is added to it.
    const uint base = code_base(T());
    return scaled_pair(masked_or(words[0] >> (4 * i), 0x000f000fu, base), base, scale, bias, T());
  } else if constexpr (BITS == 8) {
    const float slope = float(as_type<T>(ushort(scale & 0xffffu))), start = float(as_type<T>(ushort(bias & 0xffffu)));
    const float low = masked_number(words[0] >> (8 * i), 0xffu), high = masked_number(words[1] >> (8 * i), 0xffu);
    return tile_pair(multiply_add(low, slope, start), multiply_add(high, slope, start), T());
  } else {
    const uint low = words[i / 2], high = words[2 + i / 2];
    return i % 2 == 0 ? lower_halves(low, high) : upper_halves(low, high);
  }
}
