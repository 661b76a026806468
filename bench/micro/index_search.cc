// index.search.*: compares Index::find_refs with absl::flat_hash_map and prefetching. Both hold
// 8-byte values at load 0.8; one thread searches. The map gets the best that its public interface
// allows: its own hash, the same medium, pre-faulted memory, and prefetch() at a tuned distance.
#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/limit_memory.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/common/random.h"
#include "table/impl.h"

namespace petps::bench {
namespace {

using index::Index;
using index::Op;
using index::OpState;
using Map =
    absl::flat_hash_map<uint64_t, uint64_t, absl::container_internal::hash_default_hash<uint64_t>,
                        absl::container_internal::hash_default_eq<uint64_t>,
                        LimitAllocator<std::pair<const uint64_t, uint64_t>>>;

uint64_t ref_of(uint64_t row) { return (row + 1) * 8; }

// Publishes entries whose refs point to no slot; this bench follows no ref.
void fill_index(Index& index, media::Media& medium, uint64_t rows) {
  constexpr uint64_t kBatch = 4096;
  media::Flusher flusher(medium);
  std::vector<Op> ops;
  for (uint64_t begin = 0; begin < rows; begin += kBatch) {
    ops.assign(std::min(kBatch, rows - begin), Op());
    for (uint64_t i = 0; i < ops.size(); ++i) {
      ops[i].key = LoadedTable::key(begin + i);
      ops[i].ref = ref_of(begin + i);
    }
    index.plan(ops);
    for (bool waiting = true; waiting;) {
      for (Op& op : ops) {
        if (op.state != OpState::kDone) index.raise(op, flusher);
      }
      check_ok(flusher.drain(media::Site::kFilled));
      index.publish(ops, flusher);
      waiting = std::any_of(ops.begin(), ops.end(),
                            [](const Op& op) { return op.state != OpState::kDone; });
    }
    check_ok(flusher.drain(media::Site::kPublished));
    for (const Op& op : ops) index.settle(op);
  }
}

uint64_t search_map(const Map& map, const uint64_t* keys, uint64_t* refs, uint64_t n,
                    uint64_t ahead) {
  for (uint64_t i = 0; i < std::min(ahead, n); ++i) map.prefetch(keys[i]);
  for (uint64_t i = 0; i < n; ++i) {
    if (i + ahead < n) map.prefetch(keys[i + ahead]);
    const auto entry = map.find(keys[i]);
    refs[i] = entry == map.end() ? 0 : entry->second;
  }
  return n;
}

// Like search_map, but computes the hashes first and passes them to find().
uint64_t search_map_hashed(const Map& map, const uint64_t* keys, uint64_t* refs, uint64_t n,
                           uint64_t ahead, uint64_t* hashes) {
  const auto hash = map.hash_function();
  for (uint64_t i = 0; i < n; ++i) hashes[i] = hash(keys[i]);
  for (uint64_t i = 0; i < std::min(ahead, n); ++i) map.prefetch(keys[i]);
  for (uint64_t i = 0; i < n; ++i) {
    if (i + ahead < n) map.prefetch(keys[i + ahead]);
    const auto entry = map.find(keys[i], hashes[i]);
    refs[i] = entry == map.end() ? 0 : entry->second;
  }
  return n;
}

struct Setting {
  uint64_t rows;
  uint64_t batch;  // keys per call, on both sides
  uint64_t calls;  // per window
  Plan plan;
};

void measure(const Index& index, const Map& map, const std::string& medium, Access access,
             const Setting& setting) {
  const uint64_t window = setting.batch * setting.calls;
  const uint64_t count = window * setting.plan.windows;
  std::vector<uint64_t> keys;
  for (const uint32_t row : row_stream(access, setting.rows, count, 7))
    keys.push_back(LoadedTable::key(row));
  std::vector<uint64_t> refs(setting.batch), expected(setting.batch), hashes(setting.batch);
  index.find_refs({keys.data(), setting.batch}, refs.data());
  search_map(map, keys.data(), expected.data(), setting.batch, 8);
  if (refs != expected) fail("index and map disagree");

  uint64_t ours = 0;
  uint64_t theirs = count / 2;
  uint64_t ahead = 8;
  bool hashed = false;
  const auto search = [&] {
    for (uint64_t i = 0; i < setting.calls; ++i, ours = (ours + setting.batch) % count) {
      index.find_refs({keys.data() + ours, setting.batch}, refs.data());
      keep(refs.data());
    }
    return window;
  };
  const auto limit = [&] {
    for (uint64_t i = 0; i < setting.calls; ++i, theirs = (theirs + setting.batch) % count) {
      if (hashed) {
        search_map_hashed(map, keys.data() + theirs, refs.data(), setting.batch, ahead,
                          hashes.data());
      } else {
        search_map(map, keys.data() + theirs, refs.data(), setting.batch, ahead);
      }
      keep(refs.data());
    }
    return window;
  };
  const auto tune_limit = [&](bool hashes_once, uint64_t* best_ahead) {
    hashed = hashes_once;
    const double rate = tune(setting.plan.windows, limit, {4, 8, 12, 16, 24, 32, 48}, &ahead);
    *best_ahead = ahead;
    return rate;
  };
  uint64_t plain_ahead = 0, hashed_ahead = 0;
  const double plain_rate = tune_limit(false, &plain_ahead);
  hashed = tune_limit(true, &hashed_ahead) > plain_rate;
  ahead = hashed ? hashed_ahead : plain_ahead;
  const Compared compared = compare(setting.plan, search, limit);
  Line(std::string("index.search.") + access_name(access), medium)
      .text("unit", "keys/s")
      .text("ratio_to", "absl::flat_hash_map with prefetch")
      .number("rows", static_cast<double>(setting.rows))
      .number("load", static_cast<double>(setting.rows) /
                          static_cast<double>(index.bucket_count() * index::kEntries))
      .number("limit_load", static_cast<double>(map.load_factor()))
      .number("limit_ahead", static_cast<double>(ahead))
      .number("limit_hashed_once", hashed ? 1 : 0)
      .compared(compared);
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  Setting setting;
  // 0.8 of a power of two, so that the map is at load 0.8 too.
  setting.rows = arguments.number("rows", (uint64_t{1} << 24) / 5 * 4);
  setting.batch = arguments.number("batch", 500);
  setting.calls = arguments.number("calls", 100);
  setting.plan.rounds = arguments.small_number("rounds", setting.plan.rounds);
  setting.plan.windows = arguments.small_number("windows", setting.plan.windows);
  TableShape shape;
  shape.medium = arguments.text("medium", "file");
  shape.folder = arguments.text("folder", shape.folder);
  arguments.finish();

  shape.capacity = setting.rows;
  shape.dim = 2;
  LoadedTable loaded(shape);
  petps::index::Index& index = loaded.table().impl().index();
  fill_index(index, loaded.tables().pool().medium(), setting.rows);
  // A power of two of slots with 16 bytes and a control byte each, and a group of control bytes.
  LimitMemory memory(shape, std::bit_ceil(setting.rows * 8 / 7) * 17 + 4096);
  Map map{LimitAllocator<std::pair<const uint64_t, uint64_t>>(memory)};
  map.reserve(setting.rows);
  for (uint64_t row = 0; row < setting.rows; ++row) map.emplace(LoadedTable::key(row), ref_of(row));
  for (const Access access : {Access::kUniform, Access::kZipf})
    measure(index, map, shape.medium, access, setting);
}
