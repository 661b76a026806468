// The instructions behind flush, drain and copy: write a line back, fence, store past the cache.
//
// Private to room media. The write-back instruction is chosen once, at start, by what the CPU
// has. x86-64: clwb (keeps the line cached) before clflushopt (evicts, unordered) before clflush
// (evicts, ordered). aarch64: dc cvap (to the point of persistence) before dc cvac (to the point of
// coherency, as Linux does on a processor without the first).
#pragma once

#include <cstddef>
#include <cstdint>

namespace petps::media {

#ifdef __x86_64__
enum class LineInstruction : uint8_t { kClwb, kClflushopt, kClflush };
inline constexpr LineInstruction kLineInstructions[] = {
    LineInstruction::kClwb, LineInstruction::kClflushopt, LineInstruction::kClflush};
#else
enum class LineInstruction : uint8_t { kDcCvap, kDcCvac };
inline constexpr LineInstruction kLineInstructions[] = {LineInstruction::kDcCvap,
                                                        LineInstruction::kDcCvac};
#endif

const char* line_instruction_name(LineInstruction instruction);
bool cpu_has(LineInstruction instruction);
LineInstruction best_line_instruction();

// Start the write-back of every line that [at, at + bytes) touches, the last one included. The
// write-backs are unordered until store_fence().
void write_back_lines(const void* at, size_t bytes);
// Do the same with the given instruction. ASSUMPTION: cpu_has(instruction).
void write_back_lines_by(LineInstruction instruction, const void* at, size_t bytes);

// Order earlier write-backs, streamed and plain stores before later stores, for every observer.
void store_fence();

// Copy `lines` whole lines past the cache. ASSUMPTION: `to` is line-aligned. After store_fence()
// the lines are visible to other threads, and durable on dax. Sanitizer builds copy plainly,
// because sanitizers cannot see streamed stores.
void stream_lines(std::byte* to, const std::byte* from, size_t lines);
// Do the same for 16 bytes. ASSUMPTION: `to` is 16-byte aligned.
void stream_16(void* to, const void* from);

// Tests only: pass every line to `seam` instead of an instruction, until it is set back to null.
using LineSeam = void (*)(const std::byte* line);
void set_line_seam_for_test(LineSeam seam);

}  // namespace petps::media
