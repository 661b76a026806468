// apply: batches of full rows for keys that exist. The limit is a loop that reads two random index
// lines per row and streams the row to a given place, on the same medium, with the same number of
// threads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/common/random.h"
#include "media/stream.h"
#include "media/writeback.h"
#include "table/impl.h"

namespace petps::bench {
namespace {

constexpr uint64_t kLine = media::kLineBytes;

struct Place {
  uint32_t tags;
  uint32_t entry;
};

struct Setting {
  uint64_t batch;  // rows of one apply
  uint64_t window_batches;
  uint64_t target_rows;  // rows in the limit's mapped memory
  uint32_t threads;
  Plan plan;
};

// Reads lines of the real index, and writes rows one after another into an extent of its own on the
// same medium; at the end of the extent it begins again. It copies the batch of rows that petps
// applies. The objects of several threads lie in one vector, so each has cache lines of its own.
class alignas(2 * kLine) Limit {
 public:
  // Writes to `rows` rows of the target, starting at row `first`.
  Limit(LoadedTable& loaded, media::Media& target, uint64_t first, uint64_t rows)
      : medium_(target),
        base_(loaded.tables().pool().at(0)),
        target_(target.base() + first * loaded.row_bytes()),
        rows_(rows),
        row_bytes_(loaded.row_bytes()) {}

  void run(const Place* places, const std::byte* rows, uint64_t n, uint64_t ahead) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; ++i) {
      if (i + ahead < n) {
        __builtin_prefetch(base_ + places[i + ahead].tags * kLine);
        __builtin_prefetch(base_ + places[i + ahead].entry * kLine);
      }
      uint64_t tags, entry;
      std::memcpy(&tags, base_ + places[i].tags * kLine, 8);
      std::memcpy(&entry, base_ + places[i].entry * kLine, 8);
      sum += tags ^ entry;
      stream(target_ + next_ * row_bytes_, rows + i * row_bytes_);
      if (++next_ == rows_) next_ = 0;
    }
    media::store_fence();
    if (medium_.durability() ==
        media::Durability::kPower) {  // the disk's own limit: one sync a batch
      media::Flusher flusher(medium_);
      flusher.flush(target_, 1, media::Site::kRow);
      check_ok(flusher.drain(media::Site::kFilled));
    }
    keep(sum);
  }

 private:
  void stream(std::byte* to, const std::byte* from) const {
    for (uint64_t at = 0; at < row_bytes_; at += 16) media::copy_16_past_cache(to + at, from + at);
  }

  media::Media& medium_;
  const std::byte* base_;
  std::byte* target_;
  uint64_t rows_;
  uint64_t row_bytes_;
  uint64_t next_ = 0;
};

struct Batches {
  std::vector<std::vector<uint64_t>> keys;
  std::vector<std::vector<Place>> places;
};

// The keys within a batch are distinct, as in a delta.
Batches make_batches(LoadedTable& loaded, uint64_t count, uint64_t size) {
  Batches batches;
  const index::Index& index = loaded.table().impl().index();
  const std::byte* base = loaded.tables().pool().at(0);
  Random random(11);
  std::vector<uint32_t> rows(loaded.rows());
  for (uint32_t i = 0; i < rows.size(); ++i) rows[i] = i;
  uint64_t used = 0;
  for (uint64_t b = 0; b < count; ++b) {
    std::vector<uint64_t> keys;
    std::vector<Place> places;
    if (used + size > rows.size()) used = 0;
    for (uint64_t i = 0; i < size; ++i, ++used) {
      std::swap(rows[used], rows[used + random.below(rows.size() - used)]);
      keys.push_back(LoadedTable::key(rows[used]));
      const index::Place place = index.find_one(keys.back());
      if (place.ref == 0) fail("a row is missing");
      const auto* bucket = reinterpret_cast<const std::byte*>(&index.bucket(place.bucket));
      const auto tags = static_cast<uint32_t>(static_cast<uint64_t>(bucket - base) / kLine);
      places.push_back(
          {tags,
           tags + static_cast<uint32_t>(offsetof(index::Bucket, entries) + place.entry * 16) / 64});
    }
    batches.keys.push_back(std::move(keys));
    batches.places.push_back(std::move(places));
  }
  return batches;
}

std::vector<std::byte> make_rows(const LoadedTable& loaded, uint64_t count) {
  std::vector<std::byte> rows(count * loaded.row_bytes());
  for (uint64_t i = 0; i < count; ++i)
    LoadedTable::fill(i, 1, rows.data() + i * loaded.row_bytes(), loaded.row_bytes());
  return rows;
}

void measure(const TableShape& shape, const Setting& setting) {
  LoadedTable loaded(shape);
  media::Options options;
  const bool power = shape.medium == "file" && shape.durability == "power";
  options.durability = power ? media::Durability::kPower : media::Durability::kProcess;
  if (shape.medium == "file") options.path = shape.folder + "/bench-limit.pool";
  auto target = value_of(media::Media::create(options, setting.target_rows * loaded.row_bytes()));
  std::memset(target->base(), 0, target->size());
  const uint32_t threads = setting.threads;
  Crew crew(threads);
  Plan plan = setting.plan;
  if (threads > 1) plan.crew = &crew;
  std::vector<Limit> limits;
  for (uint32_t t = 0; t < threads; ++t) {
    const uint64_t share = setting.target_rows / threads;
    limits.emplace_back(loaded, *target, t * share, share);
  }

  // Thread t takes batches t, t + threads, and so on.
  const uint64_t count = setting.window_batches * setting.plan.windows * threads;
  const Batches batches = make_batches(loaded, count, setting.batch);
  // Keep the original beside its copies. Without it the limit is a fifth slower, which flatters
  // petps. The cause is where the rows lie in memory; huge pages and other offsets do not help.
  const std::vector<std::byte> original = make_rows(loaded, setting.batch);
  const std::vector<std::vector<std::byte>> rows(threads, original);
  const uint64_t window_batches = setting.window_batches * threads;
  uint64_t ours = 0;
  uint64_t theirs = count / 2 / threads * threads;
  uint64_t ahead = 8;
  const auto apply = [&] {
    crew.run([&](uint32_t t) {
      for (uint64_t i = t; i < window_batches; i += threads) {
        const auto report =
            loaded.table().apply({batches.keys[(ours + i) % count], rows[t].data(), {}, 1});
        if (!report.ok() || report.value().updated != setting.batch)
          fail("apply did not update every row");
      }
    });
    ours = (ours + window_batches) % count;
    return window_batches * setting.batch;
  };
  const auto loop = [&] {
    crew.run([&](uint32_t t) {
      for (uint64_t i = t; i < window_batches; i += threads) {
        limits[t].run(batches.places[(theirs + i) % count].data(), rows[t].data(), setting.batch,
                      ahead);
      }
    });
    theirs = (theirs + window_batches) % count;
    return window_batches * setting.batch;
  };
  // Touch every slot that replaced rows will use before the clock starts.
  for (uint64_t done = 0; done < loaded.rows() / 4 + 2 * pool::kSpareSlots;
       done += setting.batch * window_batches) {
    apply();
  }
  tune(setting.plan.windows, loop, {4, 8, 16, 24, 32, 48}, &ahead);
  const Compared compared = compare(plan, apply, loop);
  if (!options.path.empty()) std::remove(options.path.c_str());
  Line line(power ? "apply.power" : threads > 1 ? "apply.parallel" : "apply", shape.medium);
  if (threads > 1) {
    const double trip = line_round_trip_ns();
    line.text("cores", distance_name(trip)).number("line_round_trip_ns", trip);
  }
  line.text("durability", shape.medium == "dram" ? "volatile" : shape.durability)
      .text("unit", "rows/s")
      .text("ratio_to", power ? "two random index lines read, the row streamed, one sync a batch"
                              : "two random index lines read and the row streamed, per row")
      .number("rows", static_cast<double>(loaded.rows()))
      .number("batch", static_cast<double>(setting.batch))
      .number("threads", threads)
      .number("limit_ahead", static_cast<double>(ahead))
      .compared(compared);
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  const TableShape shape = read_shape(arguments);
  Setting setting;
  setting.batch = arguments.number("batch", 2000);
  setting.window_batches = arguments.number("window_batches", 5);
  setting.target_rows = arguments.number("target_rows", 500'000);
  setting.plan.rounds = arguments.small_number("rounds", setting.plan.rounds);
  setting.plan.windows = arguments.small_number("windows", setting.plan.windows);
  setting.threads = arguments.small_number("threads", 1);
  arguments.finish();
  // A wait for the disk must not count as a lost core.
  if (shape.durability == "power") setting.plan.calm = 0;
  measure(shape, setting);
}
