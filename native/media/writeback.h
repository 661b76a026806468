// The instructions behind flush, drain and copy: write a line back, fence, store past the cache.
//
// Private to room media. Which write-back instruction runs is chosen once, at start, by what the
// CPU has: clwb (keeps the line cached) before clflushopt (evicts, unordered) before clflush
// (evicts, ordered).
#pragma once

#include <cstddef>
#include <cstdint>

namespace petps::media {

enum class LineInstruction : uint8_t { kClwb, kClflushopt, kClflush };

const char* line_instruction_name(LineInstruction instruction);
bool cpu_has(LineInstruction instruction);
LineInstruction best_line_instruction();

// Starts the write-back of every line that [at, at + bytes) touches, the last one included.
// Unordered until store_fence().
void write_back_lines(const void* at, size_t bytes);
// The same with a given instruction. ASSUMPTION: cpu_has(instruction).
void write_back_lines_by(LineInstruction instruction, const void* at, size_t bytes);

// Earlier write-backs, streamed and plain stores come before later stores, for every observer.
void store_fence();

// Copies `lines` whole lines past the cache. ASSUMPTION: `to` is line-aligned. Visible to others,
// and durable on dax, after store_fence(). Sanitizer builds copy plainly, because they cannot see
// streamed stores.
void stream_lines(std::byte* to, const std::byte* from, size_t lines);
// The same for 16 bytes. ASSUMPTION: `to` is aligned to them.
void stream_16(void* to, const void* from);

// Tests only: every line goes to `seam` instead of an instruction, until it is set back to null.
using LineSeam = void (*)(const std::byte* line);
void set_line_seam_for_test(LineSeam seam);

}  // namespace petps::media
