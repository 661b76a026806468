// Every system call of room media fails once, at each call number, while a pool is created,
// opened, written, grown, closed, and opened again as a sparse copy. Afterwards every
// acknowledged row is whole, no other row appears, and the pool is whole or read-only.
//
//   build/release/test_crash --gtest_filter='*FailingCalls*'
//
// The test does not cover what a disk keeps of unsynced pages (crash_test) or calls of other rooms.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <thread>

#include "media/calls.h"
#include "scale.h"
#include "table/table.h"
#include "tests/native/media/temporary_folder.h"
#include "tests/native/table/model.h"
#include "tests/seed.h"

namespace petps::crash {
namespace {

using base::Status;
using media::Call;
using table::Tables;

constexpr size_t kRowBytes = 64;
constexpr uint64_t kKeysPerBatch = 500;
constexpr uint64_t kBatches = 3;

// The call that fails, and how it fails.
struct Fault {
  uint64_t at = 0;  // the number of the call; 0: no call fails
  int error_number = 0;
  bool stays = false;  // every later call of that kind fails too
};

// A counter of calls that makes them fail. As in Linux, a failed sync may have lost the pages of
// every writer, but only one sync returns the error.
class Injector {
 public:
  void begin(const Fault& fault, int threads) {
    fault_ = fault;
    threads_ = threads;
    calls_ = 0;
    fired_ = Call::kCount;
    syncing_ = 0;
    writers_ = 1;
    sync_failed_ = false;
    media::file_calls().before = [](Call call) { return the().on(call); };
  }
  void end() { media::file_calls() = media::system_file_calls(); }

  // Another file is used from now on: no sync of it has failed.
  void begin_file() { sync_failed_ = false; }

  uint64_t calls() const { return calls_; }
  Call fired() const { return fired_; }
  bool sync_failed() const { return sync_failed_; }
  void begin_writers() { writers_ = threads_; }
  // Make this thread writer `number`.
  void register_writer(size_t number) {
    writer() = number;
    threads_of_[number] = gettid();
  }
  // The number of this thread's writer: 0 or 1.
  static size_t& writer() {
    static thread_local size_t number = 0;
    return number;
  }
  void end_writer() { writers_ -= 1; }
  // True if this thread's last sync overlapped a failed one, or came after it: its success must
  // not be trusted.
  bool& is_misled() {
    static thread_local bool misled = false;
    return misled;
  }
  static Injector& the() {
    static Injector injector;
    return injector;
  }

 private:
  int on(Call call) {
    if (call == Call::kAwaitSync) return 0;
    if (call == Call::kSyncData) {
      syncing_ += 1;
      if (sync_failed_) is_misled() = true;
    }
    const uint64_t number = ++calls_;
    const bool again = fault_.stays && fired_ == call;
    if (number != fault_.at && !again) return 0;
    const bool can_be_half = call == Call::kRead || call == Call::kWrite || call == Call::kAllocate;
    if (fault_.error_number == media::kHalf && !can_be_half) return 0;
    fired_ = call;
    const bool loses_pages = call == Call::kSyncData && fault_.error_number != EINTR;
    if (loses_pages && !sync_failed_.exchange(true)) await_another_writer();
    return fault_.error_number;
  }

  // Wait until the other thread is in a sync of its own, sleeps (on this sync, or on a lock that
  // this thread holds), or has ended.
  void await_another_writer() {
    const int syncing = syncing_;
    while (writers_ > 1 && syncing_ == syncing && !is_asleep(threads_of_[1 - writer()]))
      std::this_thread::yield();
  }

  static bool is_asleep(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string text;
    std::getline(file, text);  // empty if the thread has ended; a stream buffer would throw
    const size_t name_end = text.rfind(')');
    return name_end == std::string::npos || text[name_end + 2] == 'S';
  }

  Fault fault_;
  int threads_ = 1;
  std::atomic<uint64_t> calls_{0};
  std::atomic<Call> fired_{Call::kCount};
  std::atomic<int> syncing_{0};                     // number of syncs begun
  std::array<std::atomic<pid_t>, 2> threads_of_{};  // the kernel's thread ids
  std::atomic<int> writers_{1};
  std::atomic<bool> sync_failed_{false};
};

// What a table must hold: for each key the acknowledged value, or one that was tried since.
struct Expected {
  std::map<uint64_t, uint64_t> acknowledged;
  std::map<uint64_t, std::set<uint64_t>> tried;
};

std::string check_rows(const table::Table& table, const Expected& expected) {
  for (uint64_t key = 0; key < kBatches * 3 * kKeysPerBatch; ++key) {
    const std::byte* const row = table.lookup_one(key);
    const auto known = expected.acknowledged.find(key);
    const auto tried = expected.tried.find(key);
    const std::string name = "key " + std::to_string(key);
    if (row == nullptr) {
      if (known != expected.acknowledged.end()) return name + " was acknowledged and is missing";
      continue;
    }
    uint64_t value = 0;
    if (!table::testing::read_row(key, row, kRowBytes, &value)) return name + " has a torn row";
    const bool is_known = known != expected.acknowledged.end() && known->second == value;
    const bool was_tried = tried != expected.tried.end() && tried->second.count(value) > 0;
    if (!is_known && !was_tried)
      return name + " has the row of value " + std::to_string(value) +
             ", which no caller wrote last";
  }
  return "";
}

std::string content_of(const std::string& path) {
  std::string content(std::filesystem::file_size(path), '\0');
  std::ifstream(path, std::ios::binary)
      .read(content.data(), static_cast<std::streamsize>(content.size()));
  return content;
}

// Copy like `cp --sparse=always`.
void copy_sparsely(const std::string& from, const std::string& to) {
  constexpr size_t kPage = 4096;
  const std::string content = content_of(from);
  const int file = ::open(to.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(content.size())), 0);
  const std::string zeros(kPage, '\0');
  for (size_t at = 0; at < content.size(); at += kPage) {
    if (content.compare(at, kPage, zeros) == 0) continue;
    ASSERT_EQ(pwrite(file, content.data() + at, kPage, static_cast<off_t>(at)),
              static_cast<ssize_t>(kPage));
  }
  ::close(file);
}

// One life of a pool: created, written by one or two threads, closed, copied, opened, written.
class Life {
 public:
  Life(const std::string& folder, int threads) : threads_(threads) {
    options_.background = false;
    options_.pool.unit_bytes = pool::kTestUnitBytes;
    options_.pool.media.path = folder + "/pool";
    options_.pool.media.reserve_bytes = uint64_t{64} << 20;
    copy_ = folder + "/copy";
  }

  // Live one life with the fault. Return the first error, or an empty string.
  std::string live(const Fault& fault) {
    remove_files();
    Injector& injector = Injector::the();
    injector.begin(fault, threads_);
    std::string wrong = create_and_write();
    if (wrong.empty()) wrong = open_sparse_copy();
    injector.end();
    if (wrong.empty()) wrong = reopen();
    remove_files();
    return wrong;
  }

 private:
  void remove_files() {
    for (const std::string& path : {options_.pool.media.path, copy_}) {
      std::filesystem::remove(path);
      std::filesystem::remove(path + ".readers");
    }
    was_created_ = false;
    for (Expected& table : expected_) table = Expected();
  }

  std::string create_and_write() {
    auto created = Tables::create(options_);
    if (!created.ok()) return "";
    was_created_ = true;
    Tables& tables = *created.value();
    if (!tables.pool().create_instance("m", "m@1", 1).ok()) return "";
    for (const char* name : kNames) {
      pool::TableSpec spec;
      spec.name = name;
      spec.instance = 1;
      spec.dim = 16;
      spec.row_bytes = kRowBytes;
      spec.capacity = 4000;
      static_cast<void>(tables.create_table(spec).status());
    }
    std::string wrong = write(tables, 0);
    if (!wrong.empty()) return wrong;
    const bool failed = tables.pool().medium().failed();
    const Status closed = tables.close();
    if (failed && closed.ok()) return "a pool whose sync had failed was closed as clean";
    return "";
  }

  // Write batches to both tables, by one thread for both or one for each.
  std::string write(Tables& tables, uint64_t first_batch) {
    std::string wrong[2];
    Injector& injector = Injector::the();
    const auto write_table = [&](int i) {
      for (uint64_t batch = first_batch; batch < first_batch + kBatches && wrong[i].empty();
           ++batch)
        wrong[i] = apply(tables, i, batch);
    };
    if (threads_ == 1) {
      for (int i = 0; i < 2; ++i) write_table(i);
    } else {
      std::atomic<bool> is_registered{false};
      injector.register_writer(0);
      injector.begin_writers();
      std::thread other([&] {
        injector.register_writer(1);
        is_registered = true;
        write_table(1);
        injector.end_writer();
      });
      while (!is_registered) std::this_thread::yield();
      write_table(0);
      injector.end_writer();
      other.join();
    }
    for (int i = 0; i < 2 && wrong[0].empty() && wrong[1].empty(); ++i) {
      const auto table = tables.find("m@1", kNames[i]);
      if (table != nullptr) wrong[i] = check_rows(*table, expected_[i]);
    }
    return wrong[0].empty() ? wrong[1] : wrong[0];
  }

  // Apply one batch. A third of its keys are also in the batch before.
  std::string apply(Tables& tables, int i, uint64_t batch) {
    const auto table = tables.find("m@1", kNames[i]);
    if (table == nullptr) return "";
    Injector& injector = Injector::the();
    std::vector<table::testing::Change> changes;
    const uint64_t first = batch * (kKeysPerBatch * 2 / 3);
    for (uint64_t key = first; key < first + kKeysPerBatch; ++key) {
      changes.push_back({key, batch + 1, false});
      expected_[i].tried[key].insert(batch + 1);
    }
    const bool had_failed = tables.pool().medium().failed();
    injector.is_misled() = false;
    const auto report = table::testing::apply(*table, changes);
    if (!report.ok()) return "";
    if (had_failed) return "a batch was acknowledged by a pool whose sync had failed";
    if (injector.is_misled())
      return "a batch was acknowledged by a sync that overlapped a failed one, or followed it";
    for (const auto& change : changes) {
      expected_[i].acknowledged[change.key] = change.value;
      expected_[i].tried[change.key].clear();
    }
    return "";
  }

  std::string open_sparse_copy() {
    if (!was_created_) return "";
    copy_sparsely(options_.pool.media.path, copy_);
    Injector::the().begin_file();
    const std::string before = content_of(copy_);
    table::TablesOptions options = options_;
    options.pool.media.path = copy_;
    {
      auto opened = Tables::open(options);
      if (opened.ok()) {
        std::string wrong = write(*opened.value(), kBatches);
        if (wrong.empty()) static_cast<void>(opened.value()->close().ok());
        copy_is_newer_ = true;
        return wrong;
      }
    }
    if (wrote_while_opening(before)) return "";
    return content_of(copy_) == before ? "" : "an open that failed changed the file";
  }

  // Opening a pool that was not closed writes its superblock: generation and clean flag. Media
  // itself writes nothing, so the length and the rows are unchanged.
  bool wrote_while_opening(const std::string& before) const {
    const std::string after = content_of(copy_);
    constexpr size_t kSuperblocks = size_t{1} << 20;
    return after.size() == before.size() && after.size() > kSuperblocks &&
           after.compare(kSuperblocks, std::string::npos, before, kSuperblocks) == 0;
  }

  // Reopen the pool and check it; no call fails any more.
  std::string reopen() {
    if (!was_created_) return create_again();
    table::TablesOptions options = options_;
    if (copy_is_newer_) options.pool.media.path = copy_;
    copy_is_newer_ = false;
    auto opened = Tables::open(options);
    if (!opened.ok()) return "reopening: " + opened.status().to_string();
    Tables& tables = *opened.value();
    for (int i = 0; i < 2; ++i) {
      const auto table = tables.find("m@1", kNames[i]);
      if (table == nullptr) {
        if (!expected_[i].acknowledged.empty()) return std::string(kNames[i]) + " is gone";
        continue;
      }
      const std::string wrong = check_rows(*table, expected_[i]);
      if (!wrong.empty()) return std::string("reopened, table ") + kNames[i] + ": " + wrong;
    }
    const table::VerifyReport report = tables.verify();
    if (!report.clean()) return "verify: " + report.problems[0];
    tables.walk();
    const std::string wrong = write(tables, 2 * kBatches);
    if (!wrong.empty()) return "written again: " + wrong;
    const Status closed = tables.close();
    return closed.ok() ? "" : "closed again: " + closed.to_string();
  }

  // A failed create must have left no file, or reported that it could not remove the file.
  std::string create_again() {
    if (Injector::the().fired() != Call::kUnlink &&
        std::filesystem::exists(options_.pool.media.path))
      return "a create that failed left a file";
    std::filesystem::remove(options_.pool.media.path);
    const auto created = Tables::create(options_);
    return created.ok() ? "" : "creating again: " + created.status().to_string();
  }

  static constexpr const char* kNames[2] = {"a", "b"};
  const int threads_;
  table::TablesOptions options_;
  std::string copy_;
  bool was_created_ = false;
  bool copy_is_newer_ = false;
  Expected expected_[2];
};

struct Setting {
  const char* name;
  const char* folder;  // null: the temporary folder
  int threads;
  uint64_t stride;  // step between call numbers; a real disk is slow
  uint64_t promised;
};

class FailingCalls : public testing::TestWithParam<Setting> {};

TEST_P(FailingCalls, LoseNothingThatWasAcknowledged) {
  const Setting& setting = GetParam();
  if (setting.folder != nullptr && access(setting.folder, W_OK) != 0)
    GTEST_SKIP() << "there is no " << setting.folder;
  const testing_support::TemporaryFolder own;
  struct Removed {
    std::string folder;
    ~Removed() {
      if (!folder.empty()) std::filesystem::remove_all(folder);
    }
  } in_memory;
  std::string folder = own.path();
  if (setting.folder != nullptr) {
    folder = std::string(setting.folder) + "/petps_failing_" + std::to_string(getpid());
    std::filesystem::create_directory(folder);
    in_memory.folder = folder;
  }
  Life life(folder, setting.threads);
  ASSERT_EQ(life.live(Fault()), "");
  const uint64_t calls = Injector::the().calls();
  const std::vector<std::pair<int, bool>> faults = {{ENOSPC, false}, {ENOSPC, true},
                                                    {EIO, false},    {EIO, true},
                                                    {EINTR, false},  {media::kHalf, false}};
  // With two threads, the order of the calls varies and some syncs are shared, so `calls` varies
  // too. A part of the calls is another one with another seed.
  const uint64_t skipped =
      std::max<uint64_t>(1, calls * faults.size() / scaled(calls * faults.size(), 60));
  const uint64_t stride = setting.stride * skipped;
  uint64_t cases = 0;
  std::set<Call> kinds;
  for (uint64_t at = 1 + tests::seed() % std::min(stride, calls); at <= calls; at += stride) {
    for (const auto& [error_number, stays] : faults) {
      const std::string wrong = life.live({at, error_number, stays});
      const Call fired = Injector::the().fired();
      if (fired != Call::kCount) {
        cases += 1;
        kinds.insert(fired);
      }
      ASSERT_EQ(wrong, "") << "call " << at << " of " << calls << " (" << call_name(fired)
                           << ") returns "
                           << (error_number > 0 ? std::strerror(error_number) : "half")
                           << (stays ? ", and so does every later one" : "")
                           << ", PETPS_SEED=" << tests::seed();
    }
  }
  std::cout << "[failing calls] " << setting.name << ": " << cases << " cases, " << calls
            << " calls of " << kinds.size() << " kinds" << std::endl;
  EXPECT_GE(cases, scaled(setting.promised, 1));
}

INSTANTIATE_TEST_SUITE_P(Settings, FailingCalls,
                         testing::Values(Setting{"memory_one_thread", "/dev/shm", 1, 1, 500},
                                         Setting{"memory_two_threads", "/dev/shm", 2, 1, 500},
                                         Setting{"disk_one_thread", nullptr, 1, 5, 100},
                                         Setting{"disk_two_threads", nullptr, 2, 5, 100}),
                         [](const auto& setting) { return std::string(setting.param.name); });

}  // namespace
}  // namespace petps::crash
