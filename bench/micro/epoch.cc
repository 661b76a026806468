// The cost of a pin to a pull, and the cost of retire and reclaim to a batch.
#include "epoch/epoch.h"

#include <benchmark/benchmark.h>

#include <numeric>
#include <vector>

namespace petps::epoch {
namespace {

class Nobody : public Reclaimer {
 public:
  void reclaim(std::span<const uint64_t> items) override { benchmark::DoNotOptimize(items.data()); }
};

// range(0): other live pins of the same reader, such as replies in flight hold.
void pin_and_drop(benchmark::State& state) {
  Domain domain;
  Reader* reader = domain.lease();
  std::vector<Pin> live;
  for (int64_t i = 0; i < state.range(0); ++i) live.push_back(reader->pin());
  for (auto _ : state) {
    Pin pin = reader->pin();
    benchmark::DoNotOptimize(pin);
  }
}
BENCHMARK(pin_and_drop)->Arg(0)->Arg(16)->Arg(255);

// Replies that complete in order: drop the oldest of range(0) pins, then take a new one.
void pin_first_in_first_out(benchmark::State& state) {
  Domain domain;
  Reader* reader = domain.lease();
  std::vector<Pin> live;
  for (int64_t i = 0; i < state.range(0); ++i) live.push_back(reader->pin());
  size_t oldest = 0;
  for (auto _ : state) {
    live[oldest].drop();
    live[oldest] = reader->pin();
    oldest = oldest + 1 == live.size() ? 0 : oldest + 1;
  }
}
BENCHMARK(pin_first_in_first_out)->Arg(16)->Arg(256);

void lease_and_release(benchmark::State& state) {
  Domain domain;
  for (auto _ : state) domain.release(domain.lease());
}
BENCHMARK(lease_and_release);

// range(0): items in the batch. Reports items per second.
void retire_and_reclaim(benchmark::State& state) {
  Domain domain;
  Nobody owner;
  std::vector<uint64_t> items(static_cast<size_t>(state.range(0)));
  std::iota(items.begin(), items.end(), uint64_t{1});
  for (auto _ : state) {
    domain.retire(owner, items);
    benchmark::DoNotOptimize(domain.reclaim());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(retire_and_reclaim)->Arg(1)->Arg(1000)->Arg(100'000);

// The scan at the start of a reclaim, over range(0) readers with range(1) live pins each.
void scan(benchmark::State& state) {
  Domain domain;
  std::vector<Pin> pins;
  for (int64_t r = 0; r < state.range(0); ++r) {
    Reader* reader = domain.lease();
    for (int64_t i = 0; i < state.range(1); ++i) pins.push_back(reader->pin());
  }
  for (auto _ : state) benchmark::DoNotOptimize(domain.oldest());
}
BENCHMARK(scan)->Args({1, 1})->Args({16, 1})->Args({16, 256})->Args({1024, 1})->Args({1024, 256});

}  // namespace
}  // namespace petps::epoch
