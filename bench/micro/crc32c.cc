// Nanoseconds per row of each CRC-32C code path, for rows of 32, 128 and 1024 f32 values.
#include "base/crc32c.h"

#include <benchmark/benchmark.h>

#include <vector>

#include "base/checksum.h"
#include "base/cpu.h"

namespace {

using Path = uint32_t (*)(uint32_t, const void*, size_t);

void run(benchmark::State& state, Path path, bool supported) {
  if (!supported) {
    state.SkipWithError("this processor does not have it");
    return;
  }
  const auto size = static_cast<size_t>(state.range(0));
  const std::vector<uint8_t> row(size, 0x5A);
  for (auto _ : state) benchmark::DoNotOptimize(path(0, row.data(), size));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
}

uint32_t xxh3(uint32_t, const void* data, size_t size) {
  return petps::base::checksum32(data, size);
}

[[maybe_unused]] const petps::base::CpuFeatures& features = petps::base::cpu_features();

BENCHMARK_CAPTURE(run, chosen, petps::base::crc32c_extend, true)->Arg(128)->Arg(512)->Arg(4096);
BENCHMARK_CAPTURE(run, instruction, petps::base::crc32c_paths::instruction, true)
    ->Arg(128)
    ->Arg(512)
    ->Arg(4096);
#ifdef __x86_64__
BENCHMARK_CAPTURE(run, pclmul, petps::base::crc32c_paths::pclmul, features.pclmul)
    ->Arg(128)
    ->Arg(512)
    ->Arg(4096);
BENCHMARK_CAPTURE(run, vpclmulqdq, petps::base::crc32c_paths::vpclmulqdq, features.vpclmulqdq)
    ->Arg(128)
    ->Arg(512)
    ->Arg(4096);
#endif
BENCHMARK_CAPTURE(run, xxh3, xxh3, true)->Arg(128)->Arg(512)->Arg(4096);

}  // namespace
