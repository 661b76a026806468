// The cost of writing a row: copied by memcpy, streamed past the cache, flushed, drained.
#include "media/media.h"

#include <benchmark/benchmark.h>

#include <cstring>
#include <random>
#include <vector>

#include "media/writeback.h"

namespace petps::media {
namespace {

constexpr uint64_t kBytes = uint64_t{512} << 20;  // far beyond the caches

std::unique_ptr<Media> touched_memory() {
  auto media = Media::create(Options{}, kBytes);
  if (!media.ok()) return nullptr;
  std::memset(media.value()->base(), 1, kBytes);
  return std::move(media).value();
}

// Return the offsets of slots of `bytes` each: at random, or in ascending order, in which a writer
// takes free slots.
std::vector<uint64_t> places(size_t bytes, bool at_random) {
  std::vector<uint64_t> offsets(1 << 20);
  std::mt19937_64 random(1);
  const uint64_t slots = kBytes / bytes;
  for (size_t i = 0; i < offsets.size(); ++i)
    offsets[i] = (at_random ? random() % slots : i % slots) * bytes;
  return offsets;
}

template <typename Copy>
void copy_rows(benchmark::State& state, Copy copy) {
  const auto media = touched_memory();
  if (media == nullptr) return state.SkipWithError("no memory");
  const auto bytes = static_cast<size_t>(state.range(0));
  const std::vector<uint64_t> offsets = places(bytes, state.range(1) != 0);
  const std::vector<std::byte> source(64 * bytes, std::byte{3});
  Flusher flusher(*media);
  size_t i = 0;
  for (auto _ : state) {
    copy(flusher, media->base() + offsets[i % offsets.size()], source.data() + i % 64 * bytes,
         bytes);
    ++i;
  }
  store_fence();
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void rows_by_memcpy(benchmark::State& state) {
  copy_rows(state, [](Flusher&, std::byte* to, const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
  });
}
void rows_by_flusher(benchmark::State& state) {
  copy_rows(state, [](Flusher& flusher, std::byte* to, const std::byte* from, size_t bytes) {
    flusher.copy(to, from, bytes, Site::kRow);
  });
}
const std::vector<std::vector<int64_t>> kShapes = {{64, 128, 272, 512, 4096}, {0, 1}};
BENCHMARK(rows_by_memcpy)->ArgsProduct(kShapes)->ArgNames({"bytes", "random"});
BENCHMARK(rows_by_flusher)->ArgsProduct(kShapes)->ArgNames({"bytes", "random"});

// flush() on dram and file only records that something is dirty.
void flush_on_dram(benchmark::State& state) {
  const auto media = touched_memory();
  if (media == nullptr) return state.SkipWithError("no memory");
  Flusher flusher(*media);
  for (auto _ : state) {
    flusher.flush(media->base(), 512, Site::kRow);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(flush_on_dram);

// The write-back instructions of dax, on ordinary memory: dirty 8 lines, write them back, fence.
void write_back_512_bytes(benchmark::State& state) {
  const LineInstruction instruction = kLineInstructions[state.range(0)];
  if (!cpu_has(instruction)) return state.SkipWithError("not on this processor");
  state.SetLabel(line_instruction_name(instruction));
  alignas(64) static std::byte row[512];
  for (auto _ : state) {
    std::memset(row, static_cast<int>(state.iterations()), sizeof row);
    write_back_lines_by(instruction, row, sizeof row);
    store_fence();
  }
}
BENCHMARK(write_back_512_bytes)->DenseRange(0, std::size(kLineInstructions) - 1);

void drain_on_dram(benchmark::State& state) {
  const auto media = touched_memory();
  if (media == nullptr) return state.SkipWithError("no memory");
  Flusher flusher(*media);
  for (auto _ : state) benchmark::DoNotOptimize(flusher.drain(Site::kFilled).ok());
}
BENCHMARK(drain_on_dram);

}  // namespace
}  // namespace petps::media
