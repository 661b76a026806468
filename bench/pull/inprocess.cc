// pull.inprocess: compares 500-key pulls in this process (pin, lookup, copy the rows out) with a
// prefetched gather that knows every address beforehand. For each row, the gather reads one cache
// line of tags and one of an entry, and copies the row to the same kind of buffer.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/common/puller.h"
#include "bench/common/random.h"
#include "table/impl.h"

namespace petps::bench {
namespace {

constexpr uint64_t kLine = media::kLineBytes;

// The addresses that the limit reads, in cache lines from the pool's start.
struct Place {
  uint32_t tags;
  uint32_t entry;
  uint32_t row;
};

struct Pulls {
  std::vector<uint64_t> keys;
  std::vector<Place> places;
};

class Sides {
 public:
  Sides(LoadedTable& loaded, uint64_t request_keys)
      : loaded_(loaded),
        request_(request_keys),
        row_bytes_(loaded.row_bytes()),
        puller_(loaded, request_keys) {}

  void pull(const uint64_t* keys) { puller_.pull(keys); }

  void gather(const Place* places, uint64_t ahead) {
    const std::byte* base = loaded_.tables().pool().at(0);
    std::byte* out = puller_.out();
    uint64_t sum = 0;
    for (uint64_t i = 0; i < request_ + ahead; ++i) {
      if (i < request_) {
        __builtin_prefetch(base + places[i].tags * kLine);
        __builtin_prefetch(base + places[i].entry * kLine);
        const std::byte* row = base + places[i].row * kLine;
        for (uint64_t at = 0; at < row_bytes_; at += kLine) __builtin_prefetch(row + at);
      }
      if (i < ahead) continue;
      const Place& place = places[i - ahead];
      uint64_t tags, entry;
      std::memcpy(&tags, base + place.tags * kLine, 8);
      std::memcpy(&entry, base + place.entry * kLine, 8);
      sum += tags ^ entry;
      std::memcpy(out, base + place.row * kLine, row_bytes_);
      out += row_bytes_;
    }
    keep(sum);
    keep(puller_.out());
  }

  const std::byte* out() { return puller_.out(); }

 private:
  LoadedTable& loaded_;
  uint64_t request_;
  uint64_t row_bytes_;
  Puller puller_;  // the gather writes to its buffer too
};

Pulls make_pulls(LoadedTable& loaded, Access access, uint64_t count, uint64_t seed) {
  Pulls pulls;
  const index::Index& index = loaded.table().impl().index();
  const pool::Pool& pool = loaded.tables().pool();
  const auto line = [&](const void* at) {
    return static_cast<uint32_t>(
        static_cast<uint64_t>(static_cast<const std::byte*>(at) - pool.at(0)) / kLine);
  };
  for (const uint32_t row : row_stream(access, loaded.rows(), count, seed)) {
    const uint64_t key = LoadedTable::key(row);
    const index::Place place = index.find_one(key);
    if (place.ref == 0 || place.ref % kLine != 0) fail("a row is missing or not on a line");
    const index::Bucket& bucket = index.bucket(place.bucket);
    pulls.keys.push_back(key);
    pulls.places.push_back({line(&bucket), line(&bucket.entries[place.entry]),
                            static_cast<uint32_t>(place.ref / kLine)});
  }
  return pulls;
}

void measure(LoadedTable& loaded, const std::string& medium, Access access, uint64_t request_keys,
             uint64_t window_pulls, const Plan& plan) {
  // Both sides cycle through the same requests, half a cycle apart. So neither side finds its lines
  // in the caches because the other has just read them.
  const uint64_t count = window_pulls * plan.windows * request_keys;
  const Pulls pulls = make_pulls(loaded, access, count, 1);
  Sides sides(loaded, request_keys);
  sides.pull(pulls.keys.data());
  for (uint64_t i = 0; i < request_keys; ++i) {
    if (!LoadedTable::whole(pulls.keys[i], sides.out() + i * loaded.row_bytes(),
                            loaded.row_bytes()))
      fail("a row is torn");
  }
  uint64_t ours = 0;
  uint64_t theirs = count / 2;
  uint64_t ahead = 8;
  const auto pull = [&] {
    for (uint64_t i = 0; i < window_pulls; ++i, ours = (ours + request_keys) % count) {
      sides.pull(pulls.keys.data() + ours);
    }
    return window_pulls * request_keys;
  };
  const auto gather = [&] {
    for (uint64_t i = 0; i < window_pulls; ++i, theirs = (theirs + request_keys) % count) {
      sides.gather(pulls.places.data() + theirs, ahead);
    }
    return window_pulls * request_keys;
  };
  tune(plan.windows, gather, {2, 4, 6, 8, 12, 16, 24, 32}, &ahead);
  const Compared compared = compare(plan, pull, gather);
  // The design's target is for a table much larger than the caches, so it applies to uniform keys.
  // Under Zipf 0.99 most rows are in the caches, and instructions decide the figure.
  const bool uniform = access == Access::kUniform;
  Line(uniform ? "pull.inprocess" : "pull.inprocess.zipf099", medium)
      .text("access", access_name(access))
      .text("unit", "rows/s")
      .text("ratio_to", "prefetched gather of tags line, entry line and row by address")
      .number("rows", static_cast<double>(loaded.rows()))
      .number("limit_ahead", static_cast<double>(ahead))
      .compared(compared);
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  const TableShape shape = read_shape(arguments);
  const uint64_t request_keys = arguments.number("request_keys", 500);
  const uint64_t window_pulls = arguments.number("window_pulls", 60);
  Plan plan;
  plan.rounds = arguments.small_number("rounds", plan.rounds);
  plan.windows = arguments.small_number("windows", plan.windows);
  arguments.finish();
  LoadedTable loaded(shape);
  for (const Access access : {Access::kUniform, Access::kZipf}) {
    measure(loaded, shape.medium, access, request_keys, window_pulls, plan);
  }
}
