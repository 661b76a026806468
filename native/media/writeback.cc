#include "media/writeback.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <atomic>
#include <cstring>
#include <iterator>

#include "base/cpu.h"
#include "media/media.h"
#include "media/stream.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define PETPS_MEDIA_SANITIZED 1
#endif

namespace petps::media {
namespace {

std::atomic<LineSeam> g_seam{nullptr};

// One loop for every primitive, so that the tests count the code that runs in production.
template <typename Primitive>
void for_each_line(const void* at, size_t bytes, Primitive primitive) {
  if (bytes == 0) return;
  const auto first = reinterpret_cast<uintptr_t>(at) & ~(kLineBytes - 1);
  const auto end = reinterpret_cast<uintptr_t>(at) + bytes;  // the line of byte end - 1 is the last
  for (uintptr_t line = first; line < end; line += kLineBytes) {
    primitive(reinterpret_cast<const std::byte*>(line));
  }
}

#ifdef __x86_64__
// Inline assembly, because the intrinsics need a target attribute that a template cannot carry.
void clwb(const std::byte* line) { asm volatile("clwb (%0)" ::"r"(line) : "memory"); }
void clflushopt(const std::byte* line) { asm volatile("clflushopt (%0)" ::"r"(line) : "memory"); }
void clflush(const std::byte* line) { asm volatile("clflush (%0)" ::"r"(line) : "memory"); }
#else
// "dc cvap", as a number: assemblers know the name from armv8.2-a on.
void dc_cvap(const std::byte* line) {
  asm volatile("sys #3, c7, c12, #1, %0" ::"r"(line) : "memory");
}
void dc_cvac(const std::byte* line) { asm volatile("dc cvac, %0" ::"r"(line) : "memory"); }
#endif

const LineInstruction g_best = best_line_instruction();

#if defined(__x86_64__) && !defined(PETPS_MEDIA_SANITIZED)

// One store per line where the processor has it. It uses fewer entries of the store queue, so the
// core continues while memory takes the lines.
[[gnu::target("avx512f")]] void stream_by_64(std::byte* to, const std::byte* from, size_t lines) {
  for (size_t i = 0; i < lines; ++i, to += kLineBytes, from += kLineBytes)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

[[gnu::target("avx")]] void stream_by_32(std::byte* to, const std::byte* from, size_t lines) {
  for (size_t i = 0; i < lines; ++i, to += kLineBytes, from += kLineBytes) {
    const auto* source = reinterpret_cast<const __m256i*>(from);
    auto* target = reinterpret_cast<__m256i*>(to);
    const __m256i low = _mm256_loadu_si256(source);
    const __m256i high = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, low);
    _mm256_stream_si256(target + 1, high);
  }
}

void stream_by_16(std::byte* to, const std::byte* from, size_t lines) {
  for (size_t i = 0; i < lines; ++i, to += kLineBytes, from += kLineBytes) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    // Four stores in a row fill the line's write-combining buffer: one full-line write.
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

using Stream = void (*)(std::byte*, const std::byte*, size_t);

Stream best_stream() {
  if (base::cpu_features().avx512f) return stream_by_64;
  if (base::cpu_features().avx2) return stream_by_32;
  return stream_by_16;
}

const Stream g_stream = best_stream();

#endif

}  // namespace

#ifdef __x86_64__

const char* line_instruction_name(LineInstruction instruction) {
  static constexpr const char* kNames[] = {"clwb", "clflushopt", "clflush"};
  return kNames[static_cast<size_t>(instruction)];
}

bool cpu_has(LineInstruction instruction) {
  if (instruction == LineInstruction::kClwb) return base::has_clwb();
  if (instruction == LineInstruction::kClflushopt) return base::has_clflushopt();
  return true;  // clflush is part of x86-64
}

void write_back_lines_by(LineInstruction instruction, const void* at, size_t bytes) {
  switch (instruction) {
    case LineInstruction::kClwb:
      for_each_line(at, bytes, clwb);
      break;
    case LineInstruction::kClflushopt:
      for_each_line(at, bytes, clflushopt);
      break;
    case LineInstruction::kClflush:
      for_each_line(at, bytes, clflush);
      break;
  }
}

void store_fence() { _mm_sfence(); }

#else

const char* line_instruction_name(LineInstruction instruction) {
  return instruction == LineInstruction::kDcCvap ? "dc_cvap" : "dc_cvac";
}

bool cpu_has(LineInstruction instruction) {
  return instruction == LineInstruction::kDcCvac || base::has_dcpop();
}

void write_back_lines_by(LineInstruction instruction, const void* at, size_t bytes) {
  if (instruction == LineInstruction::kDcCvap) {
    for_each_line(at, bytes, dc_cvap);
  } else {
    for_each_line(at, bytes, dc_cvac);
  }
}

// Only a dsb waits for the write-backs; a dmb would only order them.
void store_fence() { asm volatile("dsb sy" ::: "memory"); }

#endif

LineInstruction best_line_instruction() {
  for (const LineInstruction instruction : kLineInstructions) {
    if (cpu_has(instruction)) return instruction;
  }
  return kLineInstructions[std::size(kLineInstructions) - 1];
}

void write_back_lines(const void* at, size_t bytes) {
  if (const LineSeam seam = g_seam.load(std::memory_order_relaxed)) {
    for_each_line(at, bytes, seam);
    return;
  }
  write_back_lines_by(g_best, at, bytes);
}

void stream_lines(std::byte* to, const std::byte* from, size_t lines) {
#if defined(__x86_64__) && !defined(PETPS_MEDIA_SANITIZED)
  g_stream(to, from, lines);
#else
  std::memcpy(to, from, lines * kLineBytes);
#endif
}

void stream_16(void* to, const void* from) {
#ifdef PETPS_MEDIA_SANITIZED
  std::memcpy(to, from, 16);
#else
  copy_16_past_cache(to, from);
#endif
}

void set_line_seam_for_test(LineSeam seam) { g_seam.store(seam, std::memory_order_relaxed); }

}  // namespace petps::media
