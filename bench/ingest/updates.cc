// apply.zipf and push.zipf: small batches of new rows for keys that exist, drawn from a Zipf
// distribution, as servers receive them from trainers: applied to the table, and pushed over
// loopback by one client to a server in this process. The results have the pages that became dirty,
// and the page faults, for each changed row. Each round begins with clean pages.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/common/random.h"
#include "petps_client/client.h"
#include "server/server.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Setting {
  uint64_t batch;
  uint64_t batches;  // of a round
  uint32_t rounds;
};

// Return the bytes of file pages that have become dirty since the machine started.
double dirtied_bytes() {
  std::ifstream counters("/proc/vmstat");
  std::string name;
  uint64_t value;
  while (counters >> name >> value) {
    if (name == "nr_dirtied") return static_cast<double>(value) * 4096;
  }
  fail("/proc/vmstat has no nr_dirtied");
}

double faults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_minflt);
}

// Draws the keys of one batch. They are distinct, as in a delta.
class Keys {
 public:
  Keys(uint64_t rows, uint64_t batch) : zipf_(rows, 0.99), random_(17), batch_(batch) {}
  const std::vector<uint64_t>& next() {
    keys_.clear();
    while (keys_.size() < batch_) {
      while (keys_.size() < batch_) keys_.push_back(LoadedTable::key(zipf_.next(random_)));
      std::sort(keys_.begin(), keys_.end());
      keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
    }
    return keys_;
  }

 private:
  Zipf zipf_;
  Random random_;
  uint64_t batch_;
  std::vector<uint64_t> keys_;
};

struct Figures {
  std::vector<double> rates;
  std::vector<double> batch_us;
  double faults = 0;
  double dirtied = 0;
  double rows = 0;
};

// Write the new rows of some keys, and return how many were updated.
using Update =
    std::function<uint64_t(const std::vector<uint64_t>& keys, const std::vector<std::byte>& rows)>;

void run_round(LoadedTable& loaded, const TableShape& shape, const Setting& setting, Keys& keys,
               const Update& update, Figures* figures) {
  std::vector<std::byte> rows(setting.batch * loaded.row_bytes());
  clean_pages(shape.folder);
  const double dirtied_before = dirtied_bytes();
  const double faults_before = faults();
  double seconds = 0;
  for (uint64_t b = 0; b < setting.batches; ++b) {
    const std::vector<uint64_t>& batch = keys.next();
    for (uint64_t i = 0; i < batch.size(); ++i)
      LoadedTable::fill(batch[i], b + 1, rows.data() + i * loaded.row_bytes(), loaded.row_bytes());
    const auto begun = Clock::now();
    const uint64_t updated = update(batch, rows);
    const std::chrono::duration<double> taken = Clock::now() - begun;
    if (updated != batch.size()) fail("a batch did not update every row");
    seconds += taken.count();
    figures->batch_us.push_back(taken.count() * 1e6);
  }
  const auto changed = static_cast<double>(setting.batch * setting.batches);
  figures->rates.push_back(changed / seconds);
  figures->faults += faults() - faults_before;
  figures->dirtied += dirtied_bytes() - dirtied_before;
  figures->rows += changed;
}

void print(const std::string& name, const TableShape& shape, const Setting& setting,
           Figures figures) {
  std::sort(figures.batch_us.begin(), figures.batch_us.end());
  Line(name)
      .text("medium", shape.medium)
      .text("durability", shape.durability)
      .text("unit", "rows/s")
      .number("rows", static_cast<double>(shape.rows))
      .number("batch", static_cast<double>(setting.batch))
      .number("value", median(figures.rates))
      .number("batch_p50_us", percentile(figures.batch_us, 0.5))
      .number("batch_p99_us", percentile(figures.batch_us, 0.99))
      .number("faults_per_row", figures.faults / figures.rows)
      .number("dirtied_bytes_per_row", figures.dirtied / figures.rows);
}

void measure(const TableShape& shape, const Setting& setting) {
  LoadedTable loaded(shape);
  server::ServerOptions server_options;
  server_options.port = 0;
  const auto server = value_of(server::Server::start(loaded.tables(), server_options));
  client::Options client_options;
  client_options.deadline_ms = 60'000;  // a busy disk syncs slowly
  const auto client = value_of(client::Client::connect(
      "petps://127.0.0.1:" + std::to_string(server->port()), client_options));
  const Update apply = [&](const std::vector<uint64_t>& keys, const std::vector<std::byte>& rows) {
    return value_of(loaded.table().apply({keys, rows.data(), {}, 1})).updated;
  };
  client::PushOptions push_options;
  push_options.allow_not_finite = true;  // the rows' bytes are no numbers
  const Update push = [&](const std::vector<uint64_t>& keys, const std::vector<std::byte>& rows) {
    return value_of(client->push_stored("rows", keys, rows, push_options)).updated;
  };
  Keys keys(loaded.rows(), setting.batch);
  // A table that is written takes spare slots until it has its share.
  for (Figures warm_up; warm_up.rows < static_cast<double>(loaded.rows()) / 4;)
    run_round(loaded, shape, setting, keys, apply, &warm_up);
  // A table is fed in one of the two ways, so their rounds do not alternate: each writer has
  // regions of its own.
  Figures applied, pushed;
  for (uint32_t round = 0; round < setting.rounds; ++round)
    run_round(loaded, shape, setting, keys, apply, &applied);
  for (uint32_t round = 0; round < setting.rounds; ++round)
    run_round(loaded, shape, setting, keys, push, &pushed);
  print("apply.zipf", shape, setting, std::move(applied));
  print("push.zipf", shape, setting, std::move(pushed));
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  const TableShape shape = read_shape(arguments);
  Setting setting;
  setting.batch = arguments.number("batch", 500);
  setting.batches = arguments.number("batches", 2000);
  setting.rounds = arguments.small_number("rounds", 5);
  arguments.finish();
  measure(shape, setting);
}
