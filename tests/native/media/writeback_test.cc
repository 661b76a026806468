// Checks which lines are written back, for every (offset, length) up to four lines, and that each
// instruction of this processor runs and leaves the bytes unchanged.
#include "media/writeback.h"

#include <gtest/gtest.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <vector>

#include "media/media.h"

namespace petps::media {
namespace {

std::vector<const std::byte*> g_lines;
void remember_line(const std::byte* line) { g_lines.push_back(line); }

class LineSeamGuard {
 public:
  LineSeamGuard() {
    g_lines.clear();
    set_line_seam_for_test(remember_line);
  }
  ~LineSeamGuard() { set_line_seam_for_test(nullptr); }
};

alignas(4096) std::byte g_memory[16 * kLineBytes];

// Find the lines that hold a byte of [offset, offset + bytes) the slow way, byte by byte.
std::vector<const std::byte*> lines_of(size_t offset, size_t bytes) {
  std::vector<const std::byte*> lines;
  for (size_t i = offset; i < offset + bytes; ++i) {
    const std::byte* line = g_memory + i / kLineBytes * kLineBytes;
    if (lines.empty() || lines.back() != line) lines.push_back(line);
  }
  return lines;
}

TEST(WriteBack, EveryOffsetAndLengthUpToFourLinesWritesBackExactlyTheTouchedLines) {
  const LineSeamGuard guard;
  for (size_t offset = 0; offset < 4 * kLineBytes; ++offset) {
    for (size_t bytes = 0; bytes <= 4 * kLineBytes; ++bytes) {
      g_lines.clear();
      write_back_lines(g_memory + offset, bytes);
      ASSERT_EQ(g_lines, lines_of(offset, bytes)) << "offset " << offset << " bytes " << bytes;
    }
  }
}

TEST(WriteBack, AFlusherOnDaxWritesBackTheSameLines) {
  const LineSeamGuard guard;
  auto media = Media::borrow(g_memory, sizeof g_memory, sizeof g_memory, nullptr, Kind::kDax);
  Flusher flusher(*media);
  for (size_t offset = 0; offset < 2 * kLineBytes; ++offset) {
    for (size_t bytes = 0; bytes <= 2 * kLineBytes; ++bytes) {
      g_lines.clear();
      flusher.flush(g_memory + offset, bytes, Site::kRow);
      ASSERT_EQ(g_lines, lines_of(offset, bytes)) << "offset " << offset << " bytes " << bytes;
    }
  }
}

// On dax a copied byte is durable after the fence if its line was written back or streamed. The
// streamed lines are those that the copy does not write back; they must be whole lines of a long
// copy.
TEST(WriteBack, ACopyOnDaxWritesBackEveryLineThatItDoesNotStream) {
  const LineSeamGuard guard;
  auto media = Media::borrow(g_memory, sizeof g_memory, sizeof g_memory, nullptr, Kind::kDax);
  Flusher flusher(*media);
  const std::vector<std::byte> row(12 * kLineBytes, std::byte{9});
  for (size_t offset = 0; offset < kLineBytes; ++offset) {
    for (size_t bytes = 0; bytes <= row.size(); ++bytes) {
      g_lines.clear();
      flusher.copy(g_memory + offset, row.data(), bytes, Site::kRow);
      size_t streamed = 0;
      for (const std::byte* line : lines_of(offset, bytes)) {
        if (std::find(g_lines.begin(), g_lines.end(), line) != g_lines.end()) continue;
        const auto start = static_cast<size_t>(line - g_memory);
        ASSERT_GE(start, offset) << "a line that begins before the row must be written back";
        ASSERT_LE(start + kLineBytes, offset + bytes) << "and one that ends after it";
        ++streamed;
      }
      const bool whole_lines = (offset | bytes) % kLineBytes == 0;
      const bool streams = bytes >= (whole_lines ? 128u : 256u);
      ASSERT_EQ(streamed > 0, streams) << "offset " << offset << " bytes " << bytes;
    }
  }
}

TEST(WriteBack, FlushOnDramAndFileWritesNothingBack) {
  const LineSeamGuard guard;
  auto media = Media::borrow(g_memory, sizeof g_memory, sizeof g_memory, nullptr);
  Flusher flusher(*media);
  flusher.flush(g_memory, sizeof g_memory, Site::kRow);
  flusher.copy(g_memory, g_memory + 512, 8, Site::kRow);
  EXPECT_TRUE(g_lines.empty());
}

class LineInstructionTest : public testing::TestWithParam<LineInstruction> {};

TEST_P(LineInstructionTest, RunsAndKeepsTheBytes) {
  if (!cpu_has(GetParam())) {
    GTEST_SKIP() << "this processor has no " << line_instruction_name(GetParam());
  }
  std::vector<std::byte> expected(sizeof g_memory);
  for (size_t i = 0; i < sizeof g_memory; ++i) expected[i] = static_cast<std::byte>(i * 7);
  std::memcpy(g_memory, expected.data(), sizeof g_memory);
  for (size_t bytes = 0; bytes < 3 * kLineBytes; ++bytes) {
    write_back_lines_by(GetParam(), g_memory + 31, bytes);
  }
  store_fence();
  EXPECT_EQ(std::memcmp(g_memory, expected.data(), sizeof g_memory), 0);
}

#ifdef __x86_64__

uint64_t median_load_cycles(void (*between)()) {
  constexpr int kRounds = 2001;
  std::vector<uint64_t> cycles;
  unsigned processor = 0;
  for (int i = 0; i < kRounds; ++i) {
    g_memory[0] = static_cast<std::byte>(i);
    between();
    _mm_mfence();
    const uint64_t start = __rdtscp(&processor);
    const std::byte seen = *static_cast<volatile std::byte*>(g_memory);
    _mm_lfence();
    cycles.push_back(__rdtscp(&processor) - start);
    if (seen != static_cast<std::byte>(i)) return 0;
  }
  std::nth_element(cycles.begin(), cycles.begin() + kRounds / 2, cycles.end());
  return cycles[kRounds / 2];
}

// The tests above count the lines; this one shows that the instruction has an effect: a flushed
// line is no longer in the cache. (clwb may keep the line, so this cannot show it.)
TEST_P(LineInstructionTest, AFlushedLineLeavesTheCache) {
  if (GetParam() == LineInstruction::kClwb) GTEST_SKIP() << "clwb may keep the line in the cache";
  if (!cpu_has(GetParam())) {
    GTEST_SKIP() << "this processor has no " << line_instruction_name(GetParam());
  }
  const uint64_t cached = median_load_cycles([] {});
  const uint64_t flushed =
      GetParam() == LineInstruction::kClflush
          ? median_load_cycles([] { write_back_lines_by(LineInstruction::kClflush, g_memory, 1); })
          : median_load_cycles(
                [] { write_back_lines_by(LineInstruction::kClflushopt, g_memory, 1); });
  std::printf("[media] load after %s: %lu cycles, cached: %lu\n", line_instruction_name(GetParam()),
              static_cast<unsigned long>(flushed), static_cast<unsigned long>(cached));
  EXPECT_GT(flushed, cached + 50) << "a load from memory takes hundreds of cycles";
}

#endif

INSTANTIATE_TEST_SUITE_P(All, LineInstructionTest, testing::ValuesIn(kLineInstructions),
                         [](const auto& backend) { return line_instruction_name(backend.param); });

TEST(WriteBack, TheBestInstructionIsOneThatTheProcessorHas) {
  EXPECT_TRUE(cpu_has(best_line_instruction()));
  std::printf("[media] lines are written back by %s\n",
              line_instruction_name(best_line_instruction()));
}

}  // namespace
}  // namespace petps::media
