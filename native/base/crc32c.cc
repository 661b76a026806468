#include "base/crc32c.h"

#ifdef __x86_64__
#include <immintrin.h>
#else
#include <arm_acle.h>
#endif

#include <cstring>

#include "base/cpu.h"

namespace petps::base {
namespace {

uint64_t load_u64(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

#ifdef __x86_64__
uint64_t extend_by_8(uint64_t state, uint64_t word) { return _mm_crc32_u64(state, word); }
uint32_t extend_by_1(uint32_t state, uint8_t byte) { return _mm_crc32_u8(state, byte); }
#else
uint64_t extend_by_8(uint64_t state, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(state), word);
}
uint32_t extend_by_1(uint32_t state, uint8_t byte) { return __crc32cb(state, byte); }
#endif

// Extend the inner state, which is the checksum with its bits inverted.
uint32_t instruction_state(uint32_t state, const uint8_t* at, size_t size) {
  uint64_t wide = state;
  for (; size >= 8; size -= 8, at += 8) wide = extend_by_8(wide, load_u64(at));
  state = static_cast<uint32_t>(wide);
  for (; size > 0; --size, ++at) state = extend_by_1(state, *at);
  return state;
}

#ifdef __x86_64__

constexpr uint32_t kPolynomial = 0x82F63B78u;  // Castagnoli, bit-reflected

// Return x^n modulo the polynomial, bit-reflected.
constexpr uint32_t power_of_x(unsigned n) {
  uint32_t power = 0x80000000u;
  for (unsigned i = 0; i < n; ++i) power = (power >> 1) ^ ((power & 1) != 0 ? kPolynomial : 0);
  return power;
}

// Return the two multipliers that move 16 bytes forward by `bytes` (Gopal et al., "Fast CRC
// computation for generic polynomials using PCLMULQDQ"): `earlier` for the first 8 bytes, `later`
// for the last 8. The product of a reflected 64-bit and a reflected 32-bit value is 33 bits too
// low, hence -33.
consteval uint64_t earlier(unsigned bytes) { return power_of_x(8 * bytes + 64 - 33); }
consteval uint64_t later(unsigned bytes) { return power_of_x(8 * bytes - 33); }
static_assert(earlier(16) == 0xF20C0DFEu && later(16) == 0x493C7D27u,
              "the published constants of the 128-bit fold");

[[gnu::target("pclmul")]] inline __m128i fold(__m128i block, __m128i multipliers, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(block, multipliers, 0x00);
  const __m128i high = _mm_clmulepi64_si128(block, multipliers, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

template <unsigned bytes>  // a template, so that the multipliers are constants in the code
inline __m128i multipliers() {
  return _mm_set_epi64x(static_cast<long long>(later(bytes)),
                        static_cast<long long>(earlier(bytes)));
}

inline __m128i load_block(const uint8_t* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// Fold the remaining bytes into `block`, 16 at a time, then finish with the crc32 instruction.
[[gnu::target("pclmul")]] inline uint32_t finish(__m128i block, const uint8_t* at, size_t size) {
  const __m128i by_16 = multipliers<16>();
  for (; size >= 16; size -= 16, at += 16) block = fold(block, by_16, load_block(at));
  uint64_t wide = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(block)));
  wide = _mm_crc32_u64(wide, static_cast<uint64_t>(_mm_extract_epi64(block, 1)));
  return instruction_state(static_cast<uint32_t>(wide), at, size);
}

// For shorter input the crc32 instruction is faster, because the chains of consecutive rows overlap
// (bench/micro/crc32c.cc: 512 bytes take 21 ns by instruction, 31 by pclmul, 11 by vpclmulqdq).
constexpr size_t kPclmulFloor = 1024;
constexpr size_t kVpclmulqdqFloor = 256;
static_assert(kPclmulFloor >= 64, "pclmul starts with four 16-byte registers");
static_assert(kVpclmulqdqFloor >= 256, "vpclmulqdq starts with four 64-byte registers");

[[gnu::target("pclmul")]] uint32_t pclmul_state(uint32_t state, const uint8_t* at, size_t size) {
  if (size < kPclmulFloor) return instruction_state(state, at, size);
  __m128i a = _mm_xor_si128(load_block(at), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load_block(at + 16);
  __m128i c = load_block(at + 32);
  __m128i d = load_block(at + 48);
  const __m128i by_64 = multipliers<64>();
  for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
    a = fold(a, by_64, load_block(at));
    b = fold(b, by_64, load_block(at + 16));
    c = fold(c, by_64, load_block(at + 32));
    d = fold(d, by_64, load_block(at + 48));
  }
  const __m128i by_16 = multipliers<16>();
  return finish(fold(fold(fold(a, by_16, b), by_16, c), by_16, d), at, size);
}

#define PETPS_WIDE "avx512f,avx512bw,avx512vl,pclmul,vpclmulqdq"

[[gnu::target(PETPS_WIDE)]] inline __m512i fold_wide(__m512i block, __m512i multipliers_of_four,
                                                     __m512i next) {
  constexpr int kXorOfThree = 0x96;
  const __m512i low = _mm512_clmulepi64_epi128(block, multipliers_of_four, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(block, multipliers_of_four, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, kXorOfThree);
}

// Load the 64 bytes at `at`. If `copies`, also stream them to `to`.
template <bool copies>
[[gnu::target(PETPS_WIDE)]] inline __m512i take(const uint8_t* at, std::byte* to) {
  const __m512i block = _mm512_loadu_si512(at);
  if constexpr (copies) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), block);
  return block;
}

// Extend `state` by `size` bytes. If `copies`, also write them to `to`, past the cache; `to` must
// then be line-aligned and `size` a multiple of 64.
// ASSUMPTION: size >= kVpclmulqdqFloor.
template <bool copies>
[[gnu::target(PETPS_WIDE)]] inline uint32_t wide_state(uint32_t state, const uint8_t* at,
                                                       size_t size, std::byte* to) {
  const __m512i first = _mm512_maskz_set1_epi32(1, static_cast<int>(state));
  __m512i a = _mm512_xor_si512(take<copies>(at, to), first);
  __m512i b = take<copies>(at + 64, to + 64);
  __m512i c = take<copies>(at + 128, to + 128);
  __m512i d = take<copies>(at + 192, to + 192);
  const __m512i by_256 = _mm512_broadcast_i32x4(multipliers<256>());
  for (at += 256, to += 256, size -= 256; size >= 256; at += 256, to += 256, size -= 256) {
    a = fold_wide(a, by_256, take<copies>(at, to));
    b = fold_wide(b, by_256, take<copies>(at + 64, to + 64));
    c = fold_wide(c, by_256, take<copies>(at + 128, to + 128));
    d = fold_wide(d, by_256, take<copies>(at + 192, to + 192));
  }
  const __m512i by_64 = _mm512_broadcast_i32x4(multipliers<64>());
  // Fold four registers into one, then its four lanes into one. The products of a step are
  // independent of one another.
  const __m512i ahead = fold_wide(a, _mm512_broadcast_i32x4(multipliers<192>()),
                                  fold_wide(b, _mm512_broadcast_i32x4(multipliers<128>()), d));
  a = fold_wide(c, by_64, ahead);
  for (; size >= 64; at += 64, to += 64, size -= 64) a = fold_wide(a, by_64, take<copies>(at, to));
  const __m512i by_lane = _mm512_inserti32x4(
      _mm512_inserti32x4(_mm512_zextsi128_si512(multipliers<48>()), multipliers<32>(), 1),
      multipliers<16>(), 2);
  const __m512i last = _mm512_maskz_mov_epi64(0xC0, a);
  a = fold_wide(a, by_lane, last);
  const __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  return finish(_mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)), at,
                size);
}

[[gnu::target(PETPS_WIDE)]] uint32_t vpclmulqdq_state(uint32_t state, const uint8_t* at,
                                                      size_t size) {
  if (size < kVpclmulqdqFloor) return instruction_state(state, at, size);
  // Without copying, wide_state advances `to` but never writes through it, so any valid address
  // will do.
  return wide_state<false>(state, at, size, reinterpret_cast<std::byte*>(const_cast<uint8_t*>(at)));
}

[[gnu::target(PETPS_WIDE)]] uint32_t vpclmulqdq_copy(std::byte* to, const std::byte* from,
                                                     size_t size) {
  return ~wide_state<true>(~0u, reinterpret_cast<const uint8_t*>(from), size, to);
}

#endif

using Path = uint32_t (*)(uint32_t, const uint8_t*, size_t);

Path choose_path() {
#ifdef __x86_64__
  if (cpu_features().vpclmulqdq) return vpclmulqdq_state;
  if (cpu_features().pclmul) return pclmul_state;
#endif
  return instruction_state;
}

const Path g_path = choose_path();

}  // namespace

uint32_t crc32c_extend(uint32_t crc, const void* data, size_t size) {
  return ~g_path(~crc, static_cast<const uint8_t*>(data), size);
}

StreamWithCrc32c stream_with_crc32c() {
#ifdef __x86_64__
  if (cpu_features().vpclmulqdq) return vpclmulqdq_copy;
#endif
  return nullptr;
}

uint32_t crc32c(const void* data, size_t size) { return crc32c_extend(0, data, size); }

namespace crc32c_paths {

uint32_t instruction(uint32_t crc, const void* data, size_t size) {
  return ~instruction_state(~crc, static_cast<const uint8_t*>(data), size);
}
#ifdef __x86_64__
uint32_t pclmul(uint32_t crc, const void* data, size_t size) {
  return ~pclmul_state(~crc, static_cast<const uint8_t*>(data), size);
}
uint32_t vpclmulqdq(uint32_t crc, const void* data, size_t size) {
  return ~vpclmulqdq_state(~crc, static_cast<const uint8_t*>(data), size);
}
#endif

}  // namespace crc32c_paths
}  // namespace petps::base
