// The time until a killed peer answers again: over TCP from the start of the server's process, in
// this process from the call that opens the store, in both cases to the first correct pull. Each
// round updates rows before it kills, as a peer that is in use does.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <new>

#include "bench/common/loaded_table.h"
#include "bench/peers/contender.h"
#include "bench/pull/tcp_processes.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

// The content of the rows: `turn` for the first `updated` ones, 0 for the others.
struct Content {
  uint64_t updated;
  uint64_t turn;
  uint64_t turn_of(uint64_t row) const { return row < updated ? turn : 0; }
};

class Restarted {
 public:
  Restarted(const Candidate& candidate, const Setting& setting)
      : candidate_(candidate),
        shape_(setting.shape),
        updated_(std::min(setting.update_batches * kWriteRows, shape_.rows / 2)) {
    shape_.folder += "/" + candidate.name;
    std::filesystem::create_directories(shape_.folder);
    end_by_kill([this] {
      const auto peer = candidate_.open(shape_);
      write(*peer, shape_.rows, 0);
      peer->settle();
      write(*peer, updated_, 1);
      peer->persist();
      end(peer);
    });
  }
  ~Restarted() { std::filesystem::remove_all(shape_.folder); }

  const std::string& name() const { return candidate_.name; }

  // Restart the peer, check rows, update rows and kill the peer. `turn`: 2 at first, then one more
  // each time. Return the milliseconds to the first pull.
  double run(uint64_t turn) {
    double milliseconds = 0;
    const auto restart = [&](double* taken) {
      const std::vector<uint64_t> rows = draw_rows(turn);
      std::vector<uint64_t> keys;
      for (const uint64_t row : rows) keys.push_back(LoadedTable::key(row));
      std::vector<std::byte> out(keys.size() * shape_.row_bytes);
      const auto begun = Clock::now();
      const auto peer = candidate_.open(shape_);
      peer->pull(keys, out.data());
      *taken = std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
      check(rows, out, {updated_, turn - 1});
      write(*peer, updated_, turn);
      peer->persist();
      end(peer);
    };
    if (candidate_.over_tcp) {
      restart(&milliseconds);
      return milliseconds;
    }
    void* const shared =
        mmap(nullptr, sizeof(double), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("mmap failed");
    end_by_kill([&] { restart(new (shared) double(0)); });
    std::memcpy(&milliseconds, shared, sizeof milliseconds);
    munmap(shared, sizeof(double));
    return milliseconds;
  }

 private:
  // Run `work` in this process over TCP, where the peer's server is killed with the Peer, and else
  // in a child process that kills itself.
  void end_by_kill(const std::function<void()>& work) {
    if (candidate_.over_tcp) return work();
    const pid_t child = fork_child("peer-restart", work);
    int status;
    waitpid(child, &status, 0);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
      fail(name() + ": the process that held the rows failed before its kill");
  }
  // Kill the process that holds the rows; over TCP, the caller's Peer does.
  void end(const std::unique_ptr<Peer>&) {
    if (!candidate_.over_tcp) raise(SIGKILL);
  }

  // Half of a request's rows are among those that are updated.
  std::vector<uint64_t> draw_rows(uint64_t seed) const {
    Random random(seed);
    std::vector<uint64_t> rows;
    while (rows.size() < shape_.request_keys)
      rows.push_back(random.below(rows.size() % 2 == 0 ? updated_ : shape_.rows));
    return rows;
  }

  void write(Peer& peer, uint64_t count, uint64_t turn) const {
    std::vector<uint64_t> keys;
    std::vector<std::byte> rows(kWriteRows * shape_.row_bytes);
    for (uint64_t row = 0; row < count; row += keys.size()) {
      keys.clear();
      for (; keys.size() < kWriteRows && row + keys.size() < count;) {
        const uint64_t key = LoadedTable::key(row + keys.size());
        LoadedTable::fill(key, turn, rows.data() + keys.size() * shape_.row_bytes,
                          shape_.row_bytes);
        keys.push_back(key);
      }
      peer.write(keys, rows.data());
    }
  }

  void check(const std::vector<uint64_t>& rows, const std::vector<std::byte>& pulled,
             const Content& content) const {
    std::vector<std::byte> expected(shape_.row_bytes);
    for (size_t i = 0; i < rows.size(); ++i) {
      LoadedTable::fill(LoadedTable::key(rows[i]), content.turn_of(rows[i]), expected.data(),
                        shape_.row_bytes);
      if (std::memcmp(expected.data(), pulled.data() + i * shape_.row_bytes, shape_.row_bytes) != 0)
        fail(name() + " returned a wrong row after its restart");
    }
  }

  Candidate candidate_;
  PeerShape shape_;
  uint64_t updated_;  // the first rows, whose keys are anywhere
};

// Run the rounds of petps and of variants of one peer in turn, and print the fastest variant.
void compare_restarts(const std::string& peer, const Candidate& petps,
                      const std::vector<Candidate>& variants, const Setting& setting) {
  Restarted ours(petps, setting);
  std::vector<std::unique_ptr<Restarted>> theirs;
  for (const Candidate& variant : variants)
    theirs.push_back(std::make_unique<Restarted>(variant, setting));
  std::vector<double> values;
  std::vector<std::vector<double>> limits(variants.size());
  for (uint32_t round = 0; round < setting.rounds; ++round) {
    values.push_back(ours.run(round + 2));
    for (size_t i = 0; i < theirs.size(); ++i) limits[i].push_back(theirs[i]->run(round + 2));
  }
  const auto fastest = std::min_element(limits.begin(), limits.end(),
                                        [](auto& a, auto& b) { return median(a) < median(b); });
  Compared compared;
  summarise(values, *fastest, &compared);
  Line line("peers.restart." + peer);
  line.text("medium", "file")
      .text("unit", "ms")
      .text("ratio_to", variants[static_cast<size_t>(fastest - limits.begin())].name)
      .number("rows", static_cast<double>(setting.shape.rows))
      .number("value", compared.value)
      .number("limit", compared.limit)
      .number("ratio", compared.ratio)
      .number("ratio_low", compared.ratio_low)
      .number("ratio_high", compared.ratio_high)
      .number("highest", *std::max_element(values.begin(), values.end()));
  for (size_t i = 0; i < variants.size(); ++i)
    line.number((variants[i].name + "_ms").c_str(), median(limits[i]));
}

}  // namespace

void measure_restart(const Setting& setting) {
  // In process first: the children are forked from a process without other threads.
  const Candidate in_process{"petps", false, open_petps_in_process};
  run_on(-1);  // a store's own threads may use any core
  compare_restarts("rocksdb", in_process, {{"rocksdb", false, open_rocksdb}}, setting);
  compare_restarts("lmdb", in_process, {{"lmdb", false, open_lmdb}}, setting);
  run_on(client_core());
  compare_restarts("redis", {"petps", true, open_petps_over_tcp},
                   {{"redis_append_only", true, open_redis_append_only},
                    {"redis_snapshot", true, open_redis_snapshot}},
                   setting);
}

}  // namespace petps::bench
