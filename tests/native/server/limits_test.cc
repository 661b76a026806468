// Limits over all connections of a server, and a medium that fails while the server uses it.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <numeric>

#include "server_fixture.h"
#include "tests/native/media/temporary_folder.h"

namespace petps::server {
namespace {

using base::Code;
using base::Status;

constexpr size_t kRowBytes = 4096;

class ServerLimits : public ServerFixture {
 protected:
  ServerLimits() { fill(rows_, 256, 1); }
  void expect_served(RawClient& client) {
    const Pulled pulled = decode_pulled(client.call(pull_frame(7, {{rows_.id(), {1}}})));
    ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
    EXPECT_EQ(pulled.rows[0], row_of(1, 1, kRowBytes));
  }
  std::vector<uint64_t> all_keys() const {
    std::vector<uint64_t> keys(256);
    std::iota(keys.begin(), keys.end(), uint64_t{0});
    return keys;
  }

  table::Table& rows_ = pool_.add_table("rows", 1024, kRowBytes, 1000);
};

TEST_F(ServerLimits, APullThatWaitsForItsVersionIsNotIdle) {
  options_.transport.idle_ms = 50;
  start();
  std::unique_ptr<RawClient> parked;
  uint64_t closed = 0;
  do {  // on a busy machine a connection may count as idle before its request arrives
    closed = server_->stats().connections_closed_idle;
    parked = connect();
    parked->send(pull_frame(1, {{rows_.id(), {1}}}, 0, /*min_version=*/5, 60'000));
    ASSERT_TRUE(waits_until([&] {
      const auto stats = server_->stats();
      return stats.waits_for_version > 0 || stats.connections_closed_idle > closed;
    }));
  } while (server_->stats().waits_for_version == 0);
  closed = server_->stats().connections_closed_idle;
  auto idle = connect();  // connected later
  EXPECT_TRUE(idle->last_error().ok() || idle->last_error().code() == Code::kUnavailable);
  ASSERT_TRUE(waits_until([&] { return server_->stats().connections_closed_idle == closed + 1; }));
  pool_.record_version(5);
  EXPECT_EQ(decode_pulled(parked->receive()).applied_version, 5u);
}

TEST_F(ServerLimits, MemoryBelowFourFramesIsRefused) {
  options_.memory_bytes = uint64_t{1} << 20;
  expect_error(Server::start(*pool_.tables, options_).status(), Code::kInvalidArgument,
               "limit memory_bytes = 1048576 is below");
}

// Hostile clients at the same time: some send a part of a long push, others never read replies.
TEST_F(ServerLimits, HostileClientsShareOneMemoryBudget) {
  options_.limits.body_bytes = uint32_t{2} << 20;
  options_.memory_bytes = uint64_t{10} << 20;
  options_.transport.output_stall_ms = 600'000;
  options_.gather = transport::GatherMode::kCopy;
  options_.workers = 2;
  start();
  auto good = connect();
  expect_served(*good);
  std::vector<std::unique_ptr<RawClient>> hostile;
  const wire::Frame long_push = push_frame(1, rows_, all_keys(), 2);
  ASSERT_GT(long_push.size(), size_t{1} << 20);
  const std::span<const std::byte> half = std::span(long_push).first(long_push.size() - 64);
  uint64_t memory_max = 0;
  for (int i = 0; i < 16; ++i) {
    hostile.push_back(connect());
    hostile.back()->send(half);
    hostile.push_back(connect());
    for (int k = 0; k < 8; ++k) hostile.back()->send(pull_frame(1, {{rows_.id(), all_keys()}}));
    expect_served(*good);
    memory_max = std::max(memory_max, server_->stats().memory_used_bytes);
  }
  EXPECT_TRUE(waits_until([&] { return server_->stats().refused_for_memory > 0; }));
  const uint64_t beyond = 2 * transport::kTakeBytes + 33 * 2 * transport::kFreeBytes;
  EXPECT_LE(memory_max, options_.memory_bytes + beyond);
  EXPECT_TRUE(status_contains("\"memory_limit_bytes\":10485760")) << server_->status_json();
  expect_served(*good);
  hostile.clear();
  ASSERT_TRUE(waits_until([&] { return server_->stats().memory_used_bytes < (1u << 20); }));
  EXPECT_TRUE(good->call(long_push).error().ok());
}

TEST_F(ServerLimits, CallsOfThisProcessCountUntilTheyAreTaken) {
  options_.call_workers = 1;
  options_.limits.body_bytes = uint32_t{2} << 20;
  options_.memory_bytes = uint64_t{10} << 20;
  start();
  const wire::Frame request = pull_frame(1, {{rows_.id(), all_keys()}});
  size_t sent = 0;
  while (sent < 64 && server_->stats().memory_used_bytes < options_.memory_bytes) {
    ASSERT_TRUE(server_->calls().submit(request).ok());
    ++sent;
    ASSERT_TRUE(waits_until([&] {  // each reply has 1 MiB
      return server_->stats().memory_used_bytes >= sent * kRowBytes * 256;
    }));
  }
  EXPECT_LE(sent, 11u);
  const auto refused = server_->calls().submit(push_frame(1, rows_, all_keys(), 2));
  EXPECT_EQ(refused.status().code(), Code::kResourceExhausted);
  size_t taken = 0;  // the last reply counts a moment before it can be taken
  EXPECT_TRUE(waits_until([&] {
    taken += server_->calls().take().size();
    return taken == sent;
  }));
  EXPECT_EQ(server_->stats().memory_used_bytes, 0u);
}

// A send from a lost page fails with EFAULT, a copy raises SIGBUS. The server must stop in both
// cases. If it only closed the connection, clients would request the row again and again, and no
// error would name the pool.
using LostMedium = ServerLimits;

void pull_from_a_file_that_was_cut(transport::GatherMode mode) {
  testing_support::TemporaryFolder folder;
  const std::string path = folder.path("cut.pool");
  TestPool pool(path);
  table::Table& rows = pool.add_table("rows", 1024, kRowBytes, 1000);
  fill(rows, 256, 1);
  ServerOptions options;
  options.port = 0;
  options.gather = mode;
  auto server = Server::start(*pool.tables, options);
  if (!server.ok()) _exit(90);
  const std::byte* row = nullptr;
  const uint64_t key = 200;
  rows.lookup({&key, 1}, &row);
  const auto page = static_cast<off_t>(row - pool.tables->pool().medium().base()) / 4096 * 4096;
  if (::truncate(path.c_str(), page) != 0) _exit(91);
  RawClient client(server.value()->port());
  static_cast<void>(client.call(pull_frame(1, {{rows.id(), {key}}})));
  static_cast<void>(client.call(pull_frame(2, {{rows.id(), {key}}})));
  _exit(0);  // reached only if the server continues to serve errors
}

bool is_stopped(int status) {
  return (WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS) ||
         (WIFEXITED(status) && WEXITSTATUS(status) != 0 && WEXITSTATUS(status) < 90);
}

TEST_F(LostMedium, ALostPageStopsTheServerInEveryGatherMode) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const transport::GatherMode mode :
       {transport::GatherMode::kCopy, transport::GatherMode::kSendmsg,
        transport::GatherMode::kZerocopy}) {
    EXPECT_EXIT(pull_from_a_file_that_was_cut(mode), is_stopped, "");
  }
}

}  // namespace
}  // namespace petps::server
