// A slow disk: no request waits for the disk operation of a writer.
//
// The medium holds one operation of the disk (a drain at one site, or the growth of the file) until
// the test releases it. While a writer waits in this operation, the server's one worker must answer
// each kind of request, and the worker of calls must answer pulls. A request that waits fails the
// test after kPatienceMs.
//
// Does not cover: page faults of the mapping, which the kernel serves without our locks.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "raw_client.h"
#include "server/server.h"

namespace petps::server {
namespace {

using base::Code;
using base::Status;
using media::Site;

constexpr int kPatienceMs = 20'000;

class SlowDisk final : public media::Observer {
 public:
  // Hold the next drain at `site`, or the next growth of the file.
  void hold_drain(Site site) {
    hold([site](const Site* at) { return at != nullptr && *at == site; });
  }
  void hold_growth() {
    hold([](const Site* at) { return at == nullptr; });
  }
  bool wait_until_held() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(kPatienceMs),
                             [this] { return held_; });
  }
  void release() {
    const std::lock_guard lock(mutex_);
    is_slow_ = nullptr;
    changed_.notify_all();
  }

  void on_store(const void*, size_t) override {}
  void on_flush(const void*, size_t, Site) override {}
  uint64_t drains() const { return drains_.load(); }
  Status on_drain(Site site) override {
    drains_.fetch_add(1);
    work(&site);
    return {};
  }
  void on_grow(const void*, size_t) override { work(nullptr); }

 private:
  using IsSlow = std::function<bool(const Site*)>;  // null: growth
  void hold(IsSlow is_slow) {
    const std::lock_guard lock(mutex_);
    is_slow_ = std::move(is_slow);
  }
  void work(const Site* site) {
    std::unique_lock lock(mutex_);
    if (is_slow_ == nullptr || !is_slow_(site)) return;
    held_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return is_slow_ == nullptr; });
    held_ = false;
  }

  std::atomic<uint64_t> drains_{0};  // begun
  std::mutex mutex_;
  std::condition_variable changed_;
  IsSlow is_slow_;
  bool held_ = false;
};

class SlowDiskTest : public testing::Test {
 protected:
  static constexpr uint64_t kReserve = uint64_t{64} << 20;

  SlowDiskTest() : memory_(kReserve + 4096) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    std::byte* const at = memory_.data() + (4096 - address % 4096) % 4096;
    auto pool = pool::Pool::format(media::Media::borrow(at, uint64_t{1} << 20, kReserve, &disk_),
                                   pool::kTestUnitBytes);
    EXPECT_TRUE(pool.ok()) << pool.status().to_string();
    auto tables = table::Tables::attach(std::move(pool).value(), /*background=*/false);
    EXPECT_TRUE(tables.ok()) << tables.status().to_string();
    tables_ = std::move(tables).value();
    first_ = tables_->pool().create_instance("ranking", "ranking@1", 2).value().id;
    second_ = tables_->pool().create_instance("ranking", "ranking@2", 2).value().id;
    users_ = create_table(first_, "users");
    other_ = create_table(second_, "users");
    fill(*users_, 100, 1);
    EXPECT_TRUE(tables_->switch_alias("ranking", first_).ok());
    ServerOptions options;
    options.port = 0;
    options.call_workers = 1;
    options.address = "here:1";
    options.shard_map = map_of(1);
    auto started = Server::start(*tables_, options);
    EXPECT_TRUE(started.ok()) << started.status().to_string();
    server_ = std::move(started.value());
    client_ = std::make_unique<RawClient>(server_->port());
  }
  ~SlowDiskTest() override { disk_.release(); }

  table::TablePointer create_table(uint32_t instance, const std::string& name) {
    pool::TableSpec spec;
    spec.name = name;
    spec.instance = instance;
    spec.dim = 16;
    spec.row_bytes = 64;
    spec.capacity = 20'000;
    const auto table = tables_->create_table(spec);
    EXPECT_TRUE(table.ok()) << table.status().to_string();
    return table.value();
  }
  static wire::ShardMap map_of(uint64_t version) {
    return {"ranking", version, 2, {{"here:1", {0b11}}}};
  }
  Status record(uint32_t partition) {
    pool::Progress progress;
    progress.instance = first_;
    progress.partition = partition;
    progress.run = progress.seq = progress.version = 1;
    return tables_->record_progress(progress);
  }

  void expect_answer(const std::string& request_name, const wire::Frame& request) {
    if (HasFailure()) return;  // the worker is already blocked
    ASSERT_TRUE(client_->send(request));
    const Reply reply = client_->receive(kPatienceMs);
    ASSERT_FALSE(reply.closed) << request_name << " waits for the disk";
    EXPECT_TRUE(reply.error().ok()) << request_name << ": " << reply.error().to_string();
  }
  void expect_call_answered() {
    if (HasFailure()) return;
    const auto ticket = server_->calls().submit(pull_frame(1, {{users_->id(), {1}}}));
    ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
    for (int waited = 0; waited < kPatienceMs; ++waited) {
      if (!server_->calls().take().empty()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    FAIL() << "a pull of this process waits for the disk";
  }
  // Send every kind of request that a worker serves, and some that change its state.
  void expect_everything_answered() {
    wire::Frame frame;
    expect_answer("a pull", pull_frame(1, {{users_->id(), {1, 2, 3}}}));
    wire::encode_tables(2, {}, frame);
    expect_answer("the catalogue", frame);
    wire::encode_status(3, frame);
    expect_answer("the status", frame);
    wire::encode_hello(4, {}, frame);
    expect_answer("hello", frame);
    const std::vector<uint64_t> keys = {1, 2};
    wire::encode_hot_keys(5, {users_->id(), keys}, frame);
    expect_answer("hot keys", frame);
    wire::encode_shard_map(6, frame);
    expect_answer("the shard map", frame);
    auto changed = std::async(std::launch::async,
                              [this] { return server_->set_shard_map(map_of(++map_version_)); });
    expect_answer("a pull during a change of the map", pull_frame(7, {{users_->id(), {1}}}));
    const bool is_changed =
        changed.wait_for(std::chrono::milliseconds(kPatienceMs)) == std::future_status::ready;
    EXPECT_TRUE(is_changed) << "a change of the shard map waits for the disk";
    expect_answer("a pull with the new map", pull_frame(8, {{users_->id(), {1}}}));
    expect_call_answered();
    if (HasFailure()) disk_.release();  // `changed` may wait for the disk
  }
  // Run `work`, which must reach the held operation, and expect that no request waits for it.
  void expect_no_request_waits(const std::function<Status()>& work) {
    auto done = std::async(std::launch::async, work);
    ASSERT_TRUE(disk_.wait_until_held()) << "the work did not reach the held operation";
    expect_everything_answered();
    disk_.release();
    const Status status = done.get();
    EXPECT_TRUE(status.ok()) << status.to_string();
  }

  // Drop the second instance and call `hold`. While `work` waits in the held operation, expect that
  // releasing the last pointer to a dropped table does not wait.
  void expect_release_does_not_wait(const std::function<void()>& hold,
                                    const std::function<void()>& work) {
    ASSERT_TRUE(tables_->drop_instance(second_).ok());
    tables_->reclaim();
    const std::weak_ptr<table::Table> table = other_;
    hold();
    auto busy = std::async(std::launch::async, work);
    ASSERT_TRUE(disk_.wait_until_held());
    auto reset = std::async(std::launch::async, [&] { other_.reset(); });
    EXPECT_EQ(reset.wait_for(std::chrono::milliseconds(kPatienceMs)), std::future_status::ready);
    EXPECT_TRUE(table.expired());
    disk_.release();
    busy.get();
  }

  std::vector<std::byte> memory_;
  SlowDisk disk_;
  std::unique_ptr<table::Tables> tables_;
  uint32_t first_ = 0;
  uint32_t second_ = 0;
  table::TablePointer users_;
  table::TablePointer other_;
  uint64_t map_version_ = 1;
  std::unique_ptr<Server> server_;
  std::unique_ptr<RawClient> client_;
};

TEST_F(SlowDiskTest, NoRequestWaitsWhileATableGetsAnExtent) {
  const uint64_t slots = users_->status().slots;
  disk_.hold_growth();
  expect_no_request_waits([&] {
    fill(*users_, 10'000, 2);
    return Status();
  });
  EXPECT_GT(users_->status().slots, slots);
}

TEST_F(SlowDiskTest, NoRequestWaitsWhileAnExtentsRecordIsWritten) {
  disk_.hold_drain(Site::kExtentRecordDrain);
  expect_no_request_waits([&] {
    fill(*users_, 10'000, 2);
    return Status();
  });
}

TEST_F(SlowDiskTest, NoRequestWaitsWhileRowsAreWritten) {
  for (const Site site : {Site::kFilled, Site::kPublished}) {
    disk_.hold_drain(site);
    expect_no_request_waits([&] {
      fill(*users_, 300, 3);
      return Status();
    });
  }
}

TEST_F(SlowDiskTest, NoRequestWaitsWhileAnAliasIsSwitched) {
  disk_.hold_drain(Site::kSuperblockDrain);
  expect_no_request_waits([&] { return tables_->switch_alias("ranking", second_); });
}

TEST_F(SlowDiskTest, NoRequestWaitsWhileATableIsCreated) {
  for (const Site site : {Site::kExtentRecordDrain, Site::kSuperblockDrain}) {
    disk_.hold_drain(site);
    expect_no_request_waits([&] {
      create_table(first_, "table-" + std::to_string(static_cast<int>(site)));
      return Status();
    });
  }
}

TEST_F(SlowDiskTest, NoRequestWaitsWhileProgressIsRecorded) {
  disk_.hold_drain(Site::kProgressed);  // the first record of the partition, which drains its pair
  expect_no_request_waits([&] { return record(0); });
  disk_.hold_drain(Site::kProgressed);
  expect_no_request_waits([&] { return record(0); });
}

TEST_F(SlowDiskTest, NoRequestWaitsWhileAnInstanceIsDropped) {
  other_.reset();
  disk_.hold_drain(Site::kSuperblockDrain);
  expect_no_request_waits([&] { return tables_->drop_instance(second_); });
}

// Pushes that wait for the disk are written together, by the drains of one.
TEST_F(SlowDiskTest, PushesThatWaitAreWrittenTogether) {
  const auto push = [&](uint64_t key, uint64_t request) {
    const std::vector<uint64_t> keys = {key, key + 1};
    return push_frame(request, *users_, keys, 7);
  };
  RawClient first(server_->port());
  disk_.hold_drain(Site::kFilled);
  ASSERT_TRUE(first.send(push(1, 1)));
  ASSERT_TRUE(disk_.wait_until_held());
  std::vector<std::unique_ptr<RawClient>> others;
  for (uint64_t i = 0; i < 6; ++i) {
    others.push_back(std::make_unique<RawClient>(server_->port()));
    ASSERT_TRUE(others.back()->send(push(99 + i, 2)));  // keys 99, which exists, to 105
  }
  const auto waiting = [&] { return server_->stats().pushes_waiting; };
  for (int waited = 0; waiting() < 6 && waited < kPatienceMs; ++waited)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_EQ(waiting(), 6u);
  const uint64_t drains = disk_.drains();
  disk_.release();
  EXPECT_TRUE(first.receive(kPatienceMs).error().ok());
  wire::PushReply sum;
  for (const auto& other : others) {
    const Reply reply = other->receive(kPatienceMs);
    wire::PushReply counts;
    ASSERT_TRUE(wire::decode_push_reply(reply.header, reply.body, counts).ok());
    EXPECT_EQ(counts.inserted + counts.updated, 2u);
    sum.inserted += counts.inserted;
    sum.updated += counts.updated;
  }
  EXPECT_EQ(sum.inserted, 6u) << "keys 100 to 105, each by the first push that has it";
  EXPECT_EQ(sum.updated, 6u);
  const StatsSnapshot stats = server_->stats();
  EXPECT_EQ(stats.pushes, 7u);
  EXPECT_EQ(stats.push_groups, 2u);
  // The rest of the first push, and both drains of the others.
  EXPECT_EQ(disk_.drains() - drains, 3u);
}

// A worker that lists the tables holds them, and may be the last holder of a dropped table.
TEST_F(SlowDiskTest, ReleasingADroppedTableDoesNotWaitForASwitch) {
  expect_release_does_not_wait([&] { disk_.hold_drain(Site::kSuperblockDrain); },
                               [&] { EXPECT_TRUE(tables_->switch_alias("ranking", first_).ok()); });
}

TEST_F(SlowDiskTest, ReleasingADroppedTableDoesNotWaitForAnExtent) {
  expect_release_does_not_wait([&] { disk_.hold_growth(); }, [&] { fill(*users_, 10'000, 2); });
}

// Several writers need slots at the same time. One of them grows the pool; the others use the new
// slots or grow it again.
TEST_F(SlowDiskTest, WritersThatGrowThePoolAtTheSameTimeLeaveItClean) {
  disk_.hold_growth();
  auto first = std::async(std::launch::async, [&] { fill(*users_, 10'000, 2); });
  ASSERT_TRUE(disk_.wait_until_held());
  auto second = std::async(std::launch::async, [&] { fill(*users_, 10'000, 3); });
  auto third = std::async(std::launch::async, [&] { fill(*other_, 10'000, 3); });
  expect_everything_answered();
  disk_.release();
  first.get();
  second.get();
  third.get();
  const table::VerifyReport report = tables_->verify();
  EXPECT_TRUE(report.clean()) << report.problems.front();
}

}  // namespace
}  // namespace petps::server
