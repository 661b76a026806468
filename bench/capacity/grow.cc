// capacity.grow: a table grows while it is pulled. 500-key pulls in this process (pin, lookup, copy
// the rows out) are timed in windows without and with a growth in another thread; the paced growth
// must leave them nearly as they were. Its time is measured too, and the time of an unpaced one
// beside that of inserting the same refs into a fresh index, without a lock and without readers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/common/puller.h"
#include "bench/common/random.h"
#include "table/impl.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kRequestKeys = 500;
constexpr uint64_t kInsertedTogether = 512;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Pulls {
 public:
  explicit Pulls(LoadedTable& loaded) : puller_(loaded, kRequestKeys) {
    constexpr uint64_t kDrawn = 4'000'000;
    for (const uint32_t row : row_stream(Access::kZipf, loaded.rows(), kDrawn, 3))
      keys_.push_back(LoadedTable::key(row));
  }

  // Pull until `ends` returns true; return the times of all pulls, in microseconds.
  template <typename Ends>
  std::vector<double> run(const Ends& ends) {
    std::vector<double> times;
    while (!ends()) {
      const auto begin = Clock::now();
      puller_.pull(keys_.data() + at_);
      times.push_back(1e6 * seconds_since(begin));
      at_ = (at_ + kRequestKeys) % keys_.size();
    }
    return times;
  }

 private:
  Puller puller_;
  std::vector<uint64_t> keys_;
  size_t at_ = 0;
};

// Insert every ref of the table into a fresh index of the same number of buckets; return seconds.
double insert_all(LoadedTable& loaded, uint64_t capacity) {
  pool::Pool& pool = loaded.tables().pool();
  const auto array = value_of(pool.reserve_buckets(loaded.table().id(), capacity + 1));
  index::Index fresh(pool, array.offset, array.count);
  fresh.set_walked(0, 0);
  const index::Index& index = loaded.table().impl().index();
  std::vector<index::Op> ops(kInsertedTogether);
  media::Flusher flusher(pool.medium());
  const auto begin = Clock::now();
  size_t filled = 0;
  const auto insert = [&] {
    const std::span<index::Op> part{ops.data(), filled};
    fresh.plan(part);
    const auto is_left = [](const index::Op& op) { return op.state != index::OpState::kDone; };
    while (std::any_of(part.begin(), part.end(), is_left)) {
      for (index::Op& op : part) {
        if (is_left(op)) fresh.raise(op, flusher);
        if (op.state == index::OpState::kSkipped) fail("a fresh index has no room");
      }
      fresh.publish(part, flusher);
    }
    check_ok(flusher.drain(media::Site::kPublished));
    filled = 0;
  };
  for (uint64_t number = 0; number < index.bucket_count(); ++number) {
    const auto live = index.read_bucket(number);
    for (size_t i = 0; i < live.count; ++i) {
      ops[filled] = {};
      ops[filled].key = live.entries[i].key;
      ops[filled].ref = live.entries[i].ref;
      if (++filled == ops.size()) insert();
    }
  }
  insert();
  const double seconds = seconds_since(begin);
  if (fresh.rows() != loaded.rows()) fail("the fresh index lacks rows");
  pool.free_buckets(array);
  return seconds;
}

struct Round {
  double idle_p99, grown_p99, idle_rate, grown_rate, paced_s, unpaced_s, insert_s;
};

Round run_round(LoadedTable& loaded, Pulls& pulls, uint64_t* capacity, double idle_s,
                const std::string& folder) {
  Round round{};
  round.insert_s = insert_all(loaded, *capacity);
  auto begin = Clock::now();
  check_ok(loaded.table().grow({++*capacity, false, nullptr}));
  round.unpaced_s = seconds_since(begin);
  // Else the kernel writes what the two measurements above left during those below.
  clean_pages(folder);
  begin = Clock::now();
  std::vector<double> idle = pulls.run([&] { return seconds_since(begin) > idle_s; });
  round.idle_rate = static_cast<double>(idle.size()) / seconds_since(begin);
  std::atomic<bool> grown{false};
  begin = Clock::now();
  std::thread grower([&] {
    check_ok(loaded.table().grow({++*capacity, true, nullptr}));
    grown = true;
  });
  std::vector<double> during = pulls.run([&] { return grown.load(); });
  round.paced_s = seconds_since(begin);
  round.grown_rate = static_cast<double>(during.size()) / round.paced_s;
  grower.join();
  std::sort(idle.begin(), idle.end());
  std::sort(during.begin(), during.end());
  round.idle_p99 = percentile(idle, 0.99);
  round.grown_p99 = percentile(during, 0.99);
  return round;
}

// Print one figure: the median of `of(round)` and of its ratio to `to(round)`.
template <typename Of, typename To>
void report(const std::string& name, const std::string& medium, const std::string& unit,
            const std::string& ratio_to, const std::vector<Round>& rounds, uint64_t rows,
            const Of& of, const To& to) {
  std::vector<double> values, limits;
  for (const Round& round : rounds) {
    values.push_back(of(round));
    limits.push_back(to(round));
  }
  Compared compared;
  summarise(values, limits, &compared);
  Line(name, medium)
      .text("unit", unit)
      .text("ratio_to", ratio_to)
      .number("rows", static_cast<double>(rows))
      .compared(compared);
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  TableShape shape = read_shape(arguments);
  const uint64_t rounds = arguments.small_number("rounds", 5);
  const double idle_s = static_cast<double>(arguments.number("idle_ms", 5000)) / 1000;
  uint64_t capacity = arguments.number("grow_to", 2 * shape.rows);
  arguments.finish();
  LoadedTable loaded(shape);
  Pulls pulls(loaded);
  check_ok(loaded.table().grow({capacity, false, nullptr}));
  std::vector<Round> all;
  for (uint64_t i = 0; i < rounds; ++i)
    all.push_back(run_round(loaded, pulls, &capacity, idle_s, shape.folder));
  const auto print = [&](const char* name, const char* unit, const char* to, auto of, auto limit) {
    report(std::string("capacity.grow.") + name, shape.medium, unit, to, all, shape.rows, of,
           limit);
  };
  print(
      "p99", "us", "pulls while nothing grows", [](const Round& r) { return r.grown_p99; },
      [](const Round& r) { return r.idle_p99; });
  print(
      "throughput", "pulls/s", "pulls while nothing grows",
      [](const Round& r) { return r.grown_rate; }, [](const Round& r) { return r.idle_rate; });
  print(
      "unpaced", "s", "inserting the same refs into a fresh index",
      [](const Round& r) { return r.unpaced_s; }, [](const Round& r) { return r.insert_s; });
  print(
      "paced", "s", "a growth that is not paced", [](const Round& r) { return r.paced_s; },
      [](const Round& r) { return r.unpaced_s; });
}
