// scale: pulls, applies and pushes of 1 to 16 threads over a file, each compared with one thread.
// Threads may run on any processor.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <thread>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/puller.h"
#include "bench/common/random.h"
#include "bench/pull/tcp_processes.h"
#include "bench/scale/windows.h"
#include "petps_client/client.h"
#include "pool/slots.h"
#include "server/server.h"

namespace petps::bench {
namespace {

constexpr uint32_t kWorkersMax = 8;  // what `petps serve` starts on a large machine

// Pulls of one thread in this process.
class ThreadPulls {
 public:
  ThreadPulls(LoadedTable& loaded, const std::vector<uint64_t>& keys, size_t request, size_t at)
      : puller_(loaded, request), keys_(keys), request_(request), at_(at) {}

  uint64_t pull() {
    if (at_ + request_ > keys_.size()) at_ = 0;
    puller_.pull(keys_.data() + at_);
    at_ += request_;
    return request_;
  }

 private:
  Puller puller_;
  const std::vector<uint64_t>& keys_;
  size_t request_;
  size_t at_;
};

// The keys that one thread writes, and its rows. Threads write at the same time, so that each
// object has cache lines of its own.
class alignas(128) Batch {
 public:
  Batch(uint64_t size, uint32_t row_bytes, uint64_t seed)
      : keys_(size), rows_(size * row_bytes), random_(mix(seed)) {
    for (uint64_t i = 0; i < size; ++i)
      LoadedTable::fill(i, seed, rows_.data() + i * row_bytes, row_bytes);
  }
  // Draw keys of the rows [from, to).
  const std::vector<uint64_t>& draw(uint64_t from, uint64_t to) {
    for (uint64_t& key : keys_) key = LoadedTable::key(from + random_.below(to - from));
    return keys_;
  }
  const std::vector<std::byte>& rows() const { return rows_; }

 private:
  std::vector<uint64_t> keys_;
  std::vector<std::byte> rows_;
  Random random_;
};

std::vector<std::unique_ptr<Batch>> make_batches(uint64_t size, uint32_t row_bytes) {
  std::vector<std::unique_ptr<Batch>> batches;
  for (uint32_t thread = 0; thread < kThreadsMax; ++thread)
    batches.push_back(std::make_unique<Batch>(size, row_bytes, thread + 1));
  return batches;
}

void measure_pulls(const TableShape& shape, const Windows& windows, uint64_t request) {
  LoadedTable loaded(shape);
  std::vector<uint64_t> keys;
  for (const uint32_t row : row_stream(Access::kUniform, shape.rows, 4096 * request, 1))
    keys.push_back(LoadedTable::key(row));
  std::vector<std::unique_ptr<ThreadPulls>> pullers;
  for (uint32_t thread = 0; thread < kThreadsMax; ++thread)
    pullers.push_back(
        std::make_unique<ThreadPulls>(loaded, keys, request, thread * keys.size() / kThreadsMax));
  const auto prepare = [&](uint32_t) -> Work {
    return [&](uint32_t thread) { return pullers[thread]->pull(); };
  };
  measure_scale("scale.pull", windows, prepare, [&](Line& line) {
    line.text("access", access_name(Access::kUniform))
        .number("rows", static_cast<double>(shape.rows))
        .number("batch", static_cast<double>(request));
  });
}

void measure_applies(const TableShape& shape, const Windows& windows, uint64_t size) {
  LoadedTable loaded(shape);
  const auto batches = make_batches(size, loaded.row_bytes());
  const auto apply = [&](Batch& batch, uint64_t from, uint64_t to) {
    const auto report =
        value_of(loaded.table().apply({batch.draw(from, to), batch.rows().data(), {}, 1}));
    if (report.updated + report.superseded != size) fail("apply did not update every row");
    return size;
  };
  // Touch every slot that replaced rows will use before the clock starts.
  for (uint64_t rows = 0; rows < loaded.rows() / 4 + 2 * pool::kSpareSlots;)
    rows += apply(*batches[0], 0, loaded.rows());
  for (const bool disjoint : {true, false}) {
    const auto prepare = [&](uint32_t threads) -> Work {
      return [&, threads](uint32_t thread) {
        if (!disjoint) return apply(*batches[thread], 0, loaded.rows());
        return apply(*batches[thread], thread * loaded.rows() / threads,
                     (thread + 1) * loaded.rows() / threads);
      };
    };
    measure_scale("scale.apply", windows, prepare, [&](Line& line) {
      line.text("keys", disjoint ? "disjoint" : "shared")
          .text("durability", shape.durability)
          .number("rows", static_cast<double>(shape.rows))
          .number("batch", static_cast<double>(size));
    });
  }
}

// A server in a child process, which is killed with this object. The caller must have no other
// threads.
class ServedTable {
 public:
  ServedTable(const TableShape& shape, uint32_t workers) {
    void* shared =
        mmap(nullptr, sizeof *port_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("mmap failed");
    port_ = new (shared) std::atomic<uint32_t>(0);
    process_ = fork_child("scale-server", [&] {
      LoadedTable loaded(shape);
      server::ServerOptions options;
      options.port = 0;
      options.workers = workers;
      const auto server = value_of(server::Server::start(loaded.tables(), options));
      port_->store(server->port());
      for (;;) pause();
    });
    while (port_->load() == 0) {
      if (waitpid(process_, nullptr, WNOHANG) != 0) fail("the server process ended");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ~ServedTable() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    munmap(port_, sizeof *port_);
  }
  ServedTable(const ServedTable&) = delete;
  ServedTable& operator=(const ServedTable&) = delete;
  pid_t process() const { return process_; }
  std::unique_ptr<client::Client> connect() const {
    client::Options options;
    options.deadline_ms = 60'000;  // a busy disk syncs slowly
    return value_of(
        client::Client::connect("petps://127.0.0.1:" + std::to_string(port_->load()), options));
  }

 private:
  std::atomic<uint32_t>* port_;
  pid_t process_;
};

void measure_pushes(const TableShape& shape, Windows windows, uint64_t size, uint64_t small_size) {
  const uint32_t workers = std::min(processors(), kWorkersMax);
  const ServedTable served(shape, workers);
  windows.server = served.process();
  std::vector<std::unique_ptr<client::Client>> clients;
  for (uint32_t thread = 0; thread < kThreadsMax; ++thread) clients.push_back(served.connect());
  const std::string name = shape.durability == "power" ? "scale.push.power" : "scale.push";
  for (const uint64_t batch_rows : {size, small_size}) {
    const auto batches = make_batches(batch_rows, shape.dim * 4);
    const auto push = [&](uint32_t thread) {
      client::PushOptions options;
      options.allow_not_finite = true;  // the rows' bytes are no numbers
      Batch& batch = *batches[thread];
      value_of(
          clients[thread]->push_stored("rows", batch.draw(0, shape.rows), batch.rows(), options));
      return batch_rows;
    };
    const std::string suffix = batch_rows == size ? "" : ".small";
    measure_scale(
        name + suffix, windows, [&](uint32_t) -> Work { return push; },
        [&](Line& line) {
          line.text("durability", shape.durability)
              .number("workers", workers)
              .number("rows", static_cast<double>(shape.rows))
              .number("batch", static_cast<double>(batch_rows));
        });
  }
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  const TableShape shape = read_shape(arguments);
  Windows windows;
  windows.rounds = arguments.small_number("rounds", windows.rounds);
  windows.window = std::chrono::milliseconds(arguments.number("window_ms", 500));
  const uint64_t batch = arguments.number("batch", 500);
  const uint64_t small_batch = arguments.number("small_batch", 10);
  const std::string what = arguments.text("what", "pull");
  arguments.finish();
  if (what == "pull") {
    measure_pulls(shape, windows, batch);
  } else if (what == "apply") {
    measure_applies(shape, windows, batch);
  } else if (what == "push") {
    measure_pushes(shape, windows, batch, small_batch);
  } else {
    fail("--what=" + what + " is none of pull, apply and push");
  }
}
