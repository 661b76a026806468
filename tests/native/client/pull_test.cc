// Pulls and pushes against a real server, over TCP and over rdma (fake devices).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/clock.h"
#include "fixtures.h"
#include "tests/contract/fake_verbs.h"

namespace petps::client {
namespace {

using base::Code;
using base::Status;
using codec::Dtype;
using testing::connect_to;
using testing::expect_error;
using testing::first_keys;
using testing::has_row;

constexpr Dtype kAll[] = {Dtype::kF32, Dtype::kF16, Dtype::kBf16, Dtype::kInt8};
constexpr uint64_t kRows = 2000;
constexpr uint32_t kDim = 24;
constexpr uint32_t kPatientMs = 100'000;  // for calls that must succeed on a busy machine too

Options with_long_deadline() {
  Options options;
  options.deadline_ms = kPatientMs;
  return options;
}

// kDevice: rdma over a real or software device of this machine, such as the one in the lab's guest.
enum class Over { kTcp, kRdma, kDevice };
const char* name_of(Over over) {
  return over == Over::kTcp ? "tcp" : over == Over::kRdma ? "rdma" : "rdma_device";
}
void PrintTo(Over over, std::ostream* out) { *out << name_of(over); }

class PullTest : public ::testing::TestWithParam<Over> {
 protected:
  PullTest() {
    for (const Dtype dtype : kAll) {
      const std::vector<float> default_row =
          dtype == Dtype::kF16 ? std::vector<float>() : testing::row_of(12345, kDim);
      server_.add_table(std::string(codec::dtype_name(dtype)), dtype, kDim, 5000, kRows,
                        default_row);
    }
    server_.add_table("large", Dtype::kF32, 4096, 600, 600);
    server_.add_table("clicks", Dtype::kF32, 8, 100, 10, {}, pool::Feed::kDelta);
    server_.add_table("small", Dtype::kF32, 2, 64, 0);
    server_.start();
  }
  std::unique_ptr<Client> connect(Options options = {}) {
    options.deadline_ms = kPatientMs;
    options.rdma = device_;
    return connect_to(server_.url(), options);
  }
  static std::vector<float> default_of(Dtype dtype) {
    return dtype == Dtype::kF16 ? std::vector<float>(kDim, 0.0f)
                                : testing::pulled_row(dtype, 12345, kDim);
  }
  static std::vector<float> expected_row(Dtype dtype, uint64_t key) {
    return key < kRows ? testing::pulled_row(dtype, key, kDim) : default_of(dtype);
  }
  // Pull, and compare every row and every byte of the mask with the expected ones.
  static void check_pull(Client& client, Dtype dtype, const std::vector<uint64_t>& keys,
                         const PullOptions& options = {}) {
    std::vector<float> rows(keys.size() * kDim + 1, -99.0f);
    std::vector<uint8_t> mask(keys.size(), 7);
    const auto report = client.pull(codec::dtype_name(dtype), keys,
                                    std::span(rows).first(keys.size() * kDim), mask, options);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    uint64_t found_count = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const bool is_present = keys[i] < kRows;
      found_count += is_present ? 1 : 0;
      ASSERT_EQ(is_present ? 1 : 0, mask[i]) << "key " << keys[i] << " at " << i;
      ASSERT_TRUE(has_row(rows, i, expected_row(dtype, keys[i])))
          << "key " << keys[i] << " at " << i;
    }
    EXPECT_EQ(found_count, report.value().found);
    EXPECT_EQ(-99.0f, rows.back()) << "wrote past the end";
  }

  void SetUp() override {
    if (GetParam() == Over::kDevice && device_ == nullptr)
      GTEST_SKIP() << open_rdma("").status().to_string();
  }
  std::shared_ptr<transport::Verbs> open_device() {
    if (GetParam() == Over::kRdma)
      return std::make_shared<transport::FakeVerbs>(fabric_, transport::FakeLimits{});
    if (GetParam() == Over::kTcp) return nullptr;
    auto opened = open_rdma("");
    return opened.ok() ? std::move(opened).value() : nullptr;
  }
  server::ServerOptions options_with_rdma() {
    server::ServerOptions options;
    options.rdma = open_device();
    return options;
  }

  transport::FakeFabric fabric_;
  const std::shared_ptr<transport::Verbs> device_ = open_device();
  testing::RealServer server_{options_with_rdma()};
};

INSTANTIATE_TEST_SUITE_P(All, PullTest, ::testing::Values(Over::kTcp, Over::kRdma, Over::kDevice),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(PullTest, RowsAreCorrectAtEachSplitBoundaryForAllDtypes) {
  const auto client = connect();
  std::mt19937_64 random(testing::seed());
  for (const Dtype dtype : kAll) {
    for (const size_t n : {0, 1, 63, 64, 65, 499, 500, 501, 1000, 1001, 4001}) {
      for (const Dedup dedup : {Dedup::kNever, Dedup::kAlways}) {
        std::vector<uint64_t> keys(n);
        for (uint64_t& key : keys) key = random() % (kRows + kRows / 4);
        PullOptions options;
        options.dedup = dedup;
        check_pull(*client, dtype, keys, options);
        if (HasFatalFailure()) return;
      }
    }
  }
  if (GetParam() != Over::kTcp) {
    EXPECT_GT(server_.server().stats().lists_zerocopy, 0u) << "it went over TCP";
  }
}

TEST_P(PullTest, ACallMayHaveMoreKeysThanARequest) {
  Options options;
  options.keys_per_request = 65536;
  const auto client = connect(options);
  std::vector<uint64_t> keys(70'000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i % 3000;
  PullOptions never;
  never.dedup = Dedup::kNever;
  check_pull(*client, Dtype::kF16, keys, never);
  check_pull(*client, Dtype::kF16, keys);
}

TEST_P(PullTest, AllKeysMayBePresentOrMissing) {
  const auto client = connect();
  std::vector<uint64_t> present = first_keys(kRows);
  std::reverse(present.begin(), present.end());
  std::vector<uint64_t> missing = first_keys(700);
  for (uint64_t& key : missing) key += kRows;
  for (const Dtype dtype : kAll) {
    check_pull(*client, dtype, present);
    check_pull(*client, dtype, missing);
  }
}

TEST_P(PullTest, StoredRowsArePulledUnchanged) {
  const auto client = connect();
  const std::vector<uint64_t> keys = {5, kRows + 1, 5, 7};
  for (const Dtype dtype : kAll) {
    const size_t row_bytes = codec::row_bytes(dtype, kDim);
    std::vector<std::byte> rows(keys.size() * row_bytes);
    const TablePull pull{codec::dtype_name(dtype), keys, rows, {}, Form::kStored};
    PullOptions options;
    options.dedup = Dedup::kAlways;
    const auto report = client->pull_many({&pull, 1}, options);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(3u, report.value().found);
    for (size_t i = 0; i < keys.size(); ++i) {
      std::vector<std::byte> expected(row_bytes);
      const std::vector<float> row = testing::row_of(keys[i] < kRows ? keys[i] : 12345, kDim);
      if (keys[i] < kRows || dtype != Dtype::kF16)
        codec::encode(dtype, row.data(), 1, kDim, expected.data());
      EXPECT_EQ(0, std::memcmp(expected.data(), rows.data() + i * row_bytes, row_bytes)) << i;
    }
  }
}

TEST_P(PullTest, ACallPullsFromManyTables) {
  Options options;
  options.keys_per_request = 100;  // splits sections between requests
  const auto client = connect(options);
  std::mt19937_64 random(testing::seed());
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<uint64_t>> keys;
    std::vector<std::vector<float>> rows;
    std::vector<std::vector<uint8_t>> masks;
    std::vector<TablePull> pulls;
    for (int i = 0; i < 7; ++i) {
      keys.emplace_back(random() % 250);
      for (uint64_t& key : keys.back()) key = random() % (kRows + 500);
      rows.emplace_back(keys.back().size() * kDim);
      masks.emplace_back(keys.back().size());
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      pulls.push_back({codec::dtype_name(kAll[i % 4]), keys[i],
                       std::as_writable_bytes(std::span(rows[i])),
                       i == 3 ? std::span<uint8_t>() : std::span(masks[i])});
    }
    const auto report = client->pull_many(pulls);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    for (size_t i = 0; i < keys.size(); ++i) {
      for (size_t k = 0; k < keys[i].size(); ++k) {
        if (i != 3) {
          ASSERT_EQ(keys[i][k] < kRows ? 1 : 0, masks[i][k]);
        }
        ASSERT_TRUE(has_row(rows[i], k, expected_row(kAll[i % 4], keys[i][k]))) << testing::seed();
      }
    }
  }
  EXPECT_TRUE(client->pull_many({}).ok());
}

TEST_P(PullTest, APullOfLargeRowsIsSplitByTheSizeOfTheReply) {
  Options options;
  options.keys_per_request = 65536;  // 600 rows of 16 KiB do not fit into a frame
  const auto client = connect(options);
  std::vector<uint64_t> keys(1200);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i % 600;
  std::vector<float> rows(keys.size() * 4096);
  PullOptions pull;
  pull.dedup = Dedup::kNever;
  const auto report = client->pull("large", keys, rows, {}, pull);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(1200u, report.value().found);
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_TRUE(has_row(rows, i, testing::row_of(keys[i], 4096))) << i;
  }
}

TEST_P(PullTest, WrongArgumentsAreNamed) {
  const auto client = connect();
  const std::vector<uint64_t> keys = {1, 2};
  std::vector<float> rows(2 * kDim);
  expect_error(client->pull("nothere", keys, rows).status(), Code::kNotFound,
               {"'nothere'", "bf16, clicks, f16, f32, int8, large"});
  expect_error(client->pull("f32", keys, std::span(rows).first(2 * kDim - 1)).status(),
               Code::kInvalidArgument, {"'f32'", "dim 24", "need 192"});
  std::vector<uint8_t> mask(3);
  expect_error(client->pull("f32", keys, rows, mask).status(), Code::kInvalidArgument,
               {"mask has 3 bytes for 2 keys"});
  std::vector<std::byte> bytes(2 * kDim * 4 + 1);
  const TablePull odd{"f32", keys, std::span(bytes).subspan(1), {}, Form::kFloat32};
  expect_error(client->pull_many({&odd, 1}).status(), Code::kInvalidArgument, {"not aligned"});
  expect_error(client->describe("nothere").status(), Code::kNotFound, {"known: bf16"});
  expect_error(client->status(3).status(), Code::kInvalidArgument, {"outside 0..0"});
  EXPECT_TRUE(client->pull("f32", keys, rows).ok()) << "a later call is not affected";
}

TEST_P(PullTest, WrongOptionsAreNamed) {
  const auto expect_refused = [&](const Options& options, std::string_view part) {
    expect_error(Client::connect(server_.url(), options).status(), Code::kInvalidArgument, {part});
  };
  const auto with = [](auto option, auto value) {
    Options options;
    options.*option = value;
    return options;
  };
  expect_refused(with(&Options::keys_per_request, 0u), "keys_per_request must be 1 to 65536");
  expect_refused(with(&Options::requests_in_flight, 65u), "requests_in_flight");
  expect_refused(with(&Options::connections, 0u), "connections");
  expect_refused(with(&Options::deadline_ms, 0u), "deadline_ms");
  expect_refused(with(&Options::hot_keys, 65537u), "hot_keys");
  expect_refused(with(&Options::name, std::string(256, 'n')), "name");
  const std::string unknown = "petps://" + server_.address() + "/other";
  expect_error(Client::connect(unknown, with_long_deadline()).status(), Code::kNotFound,
               {"'other'", server_.address().c_str(), "known: ranking, ranking@1"});
}

TEST_P(PullTest, TheUrlMayNameAModelAnInstanceAnAliasOrNothing) {
  for (const std::string model : {"/ranking", "/ranking@1", "", "/"}) {
    const auto client = connect_to("petps://" + server_.address() + model, with_long_deadline());
    check_pull(*client, Dtype::kF32, {1, 2, 3});
  }
  ASSERT_TRUE(server_.tables().pool().set_alias("live", server_.instance()).ok());
  const auto live = connect_to("petps://" + server_.address() + "/live", with_long_deadline());
  check_pull(*live, Dtype::kF32, {1, 2, 3});
  ASSERT_TRUE(server_.tables().pool().create_instance("other", "other@1", 1).ok());
  // tables() needs no model
  const auto unnamed = connect_to("petps://" + server_.address(), with_long_deadline());
  std::vector<float> rows(kDim);
  const std::vector<uint64_t> keys = {1};
  expect_error(unnamed->pull("f32", keys, rows).status(), Code::kInvalidArgument,
               {"several models", "other, ranking"});
  EXPECT_EQ(7u, unnamed->tables().value().size());
}

TEST_P(PullTest, APullFindsATableCreatedAfterConnecting) {
  const auto client = connect();
  server_.add_table("later", Dtype::kF32, 4, 100, 10);
  const std::vector<uint64_t> keys = {3};
  std::vector<float> rows(4);
  const auto report = client->pull("later", keys, rows);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(testing::row_of(3, 4), rows);
  EXPECT_EQ(4u, client->describe("later").value().dim);
}

TEST_P(PullTest, TheBackgroundThreadNoticesASwitchOfTheAlias) {
  const auto second = server_.tables().pool().create_instance("ranking", "ranking@2", 2);
  ASSERT_TRUE(second.ok());
  table::Table& table =
      server_.add_table("f32", Dtype::kF32, kDim, 100, 0, {}, pool::Feed::kPush, second.value().id);
  testing::RealServer::fill(table, 50, 9);
  ASSERT_TRUE(server_.tables().pool().set_alias("live", server_.instance()).ok());
  Options options = with_long_deadline();
  options.catalogue_ms = 20;
  const auto client = connect_to("petps://" + server_.address() + "/live", options);
  const std::vector<uint64_t> keys = {3};
  std::vector<float> rows(kDim);
  ASSERT_TRUE(client->pull("f32", keys, rows).ok());
  EXPECT_EQ(testing::row_of(3, kDim, 0), rows);
  ASSERT_TRUE(server_.tables().pool().set_alias("live", second.value().id).ok());
  const uint64_t until = base::monotonic_ns() + 30'000'000'000;
  while (rows != testing::row_of(3, kDim, 9) && base::monotonic_ns() < until) {
    ASSERT_TRUE(client->pull("f32", keys, rows).ok());
  }
  EXPECT_EQ(testing::row_of(3, kDim, 9), rows);
}

TEST_P(PullTest, AnOldServerIsStaleAtOnce) {
  const auto client = connect();
  const std::vector<uint64_t> keys = {3};
  std::vector<float> rows(kDim);
  PullOptions options;
  options.min_version = 1000;
  options.deadline_ms = 50'000;
  const uint64_t before = base::monotonic_ns();
  expect_error(client->pull("f32", keys, rows, {}, options).status(), Code::kStale,
               {"1000", server_.address().c_str()});
  EXPECT_LT(base::monotonic_ns() - before, 30'000'000'000u)
      << "there is no other server to wait for";
  EXPECT_TRUE(client->pull("f32", keys, rows).ok());
}

TEST_P(PullTest, APullReturnsPushedRows) {
  const auto client = connect();
  std::vector<uint64_t> keys = first_keys(1000);
  for (uint64_t& key : keys) key += kRows - 500;
  const std::vector<float> rows = testing::rows_of(keys, kDim, 3);
  for (const Dtype dtype : kAll) {
    const auto report = client->push(codec::dtype_name(dtype), keys, rows, kDim);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(500u, report.value().inserted);
    EXPECT_EQ(500u, report.value().updated);
    std::vector<float> back(rows.size());
    ASSERT_TRUE(client->pull(codec::dtype_name(dtype), keys, back).ok());
    for (size_t i = 0; i < keys.size(); ++i) {
      ASSERT_TRUE(has_row(back, i, testing::pulled_row(dtype, keys[i], kDim, 3)));
    }
    const auto erased = client->erase(codec::dtype_name(dtype), std::span(keys).last(501));
    ASSERT_TRUE(erased.ok()) << erased.status().to_string();
    EXPECT_EQ(501u, erased.value().deleted);
    std::vector<uint8_t> mask(keys.size());
    ASSERT_TRUE(client->pull(codec::dtype_name(dtype), keys, back, mask).ok());
    EXPECT_EQ(499, std::count(mask.begin(), mask.end(), 1));
    EXPECT_EQ(1, mask[498]);
    EXPECT_EQ(0, mask[499]);
  }
}

TEST_P(PullTest, StoredRowsAndEmptyPushesAreAccepted) {
  const auto client = connect();
  const std::vector<uint64_t> keys = {5};
  std::vector<std::byte> stored(codec::row_bytes(Dtype::kInt8, kDim));
  const auto row = testing::row_of(77, kDim);
  codec::encode(Dtype::kInt8, row.data(), 1, kDim, stored.data());
  ASSERT_TRUE(client->push_stored("int8", keys, stored).ok());
  std::vector<float> back(kDim);
  ASSERT_TRUE(client->pull("int8", keys, back).ok());
  EXPECT_EQ(testing::pulled_row(Dtype::kInt8, 77, kDim), back);
  EXPECT_TRUE(client->push("f32", {}, {}, kDim).ok());
  EXPECT_TRUE(client->push_stored("f32", {}, {}).ok());
  EXPECT_TRUE(client->erase("f32", {}).ok());
}

TEST_P(PullTest, WrongPushesAreNamed) {
  const auto client = connect();
  const std::vector<uint64_t> keys = {5, 6};
  std::vector<float> rows(2 * kDim, 1.0f);
  expect_error(client->push("f32", keys, std::span(rows).first(30), 15).status(),
               Code::kInvalidArgument, {"dim 15", "has 24"});
  expect_error(client->push("f32", keys, std::span(rows).first(kDim), kDim).status(),
               Code::kInvalidArgument, {"2 keys need 48 values, not 24"});
  expect_error(client->push_stored("int8", keys, std::as_bytes(std::span(rows))).status(),
               Code::kInvalidArgument, {"need 64 bytes as stored"});
  expect_error(client->push("clicks", keys, std::span(rows).first(16), 8).status(),
               Code::kFailedPrecondition, {"'clicks'", "deltas"});
  expect_error(client->push("nothere", keys, rows, kDim).status(), Code::kNotFound, {"known: "});
  rows[kDim + 3] = std::numeric_limits<float>::quiet_NaN();
  expect_error(client->push("f32", keys, rows, kDim).status(), Code::kInvalidArgument,
               {"row 1 (key 6)", "allow_not_finite"});
  rows[kDim + 3] = 1e6f;
  expect_error(client->push("f16", keys, rows, kDim).status(), Code::kInvalidArgument,
               {"row 1 (key 6)", "as f16", "out of range"});
  PushOptions options;
  options.allow_not_finite = true;
  EXPECT_TRUE(client->push("f16", keys, rows, kDim, options).ok());
  std::vector<float> back(2 * kDim);
  ASSERT_TRUE(client->pull("f16", keys, back).ok());
  EXPECT_TRUE(std::isinf(back[kDim + 3]));
}

TEST_P(PullTest, AFullTableRefusesNewKeysAndCountsThem) {
  const auto client = connect();
  const std::vector<float> rows(80 * 2, 1.0f);
  expect_error(client->push("small", first_keys(80), rows, 2).status(), Code::kResourceExhausted,
               {"'small' is full", "of 80 rows were refused"});
}

TEST_P(PullTest, TablesAndStatusDescribeTheServer) {
  const auto client = connect();
  const auto tables = client->tables();
  ASSERT_TRUE(tables.ok());
  ASSERT_EQ(7u, tables.value().size());
  const Table& f32 = tables.value()[3];
  EXPECT_EQ("f32", f32.name);
  EXPECT_EQ("ranking", f32.model);
  EXPECT_EQ("ranking@1", f32.instance);
  EXPECT_EQ(kRows, f32.rows);
  EXPECT_EQ(kDim * 4, f32.row_bytes);
  EXPECT_FALSE(tables.value()[1].takes_pushes);
  const auto status = client->status(0);
  ASSERT_TRUE(status.ok());
  EXPECT_EQ('{', status.value().front());
}

TEST_P(PullTest, HotSetsReachTheServer) {
  Options options;
  options.hot_sample_every = 1;
  options.hot_set_ms = 30;
  const auto client = connect(options);
  const std::vector<uint64_t> keys = {3, 3, 3, 4, 4};
  std::vector<float> rows(5 * kDim);
  const uint64_t until = base::monotonic_ns() + 30'000'000'000;
  while (server_.server().stats().hot_sets == 0 && base::monotonic_ns() < until) {
    ASSERT_TRUE(client->pull("f32", keys, rows).ok());
  }
  EXPECT_GT(server_.server().stats().hot_sets, 0u);
  // The client waits one second for the server, which a busy machine may take.
  Status status;
  do {
    ASSERT_TRUE(client->pull("f32", keys, rows).ok());
    status = client->send_hot_sets();
  } while (status.code() == Code::kDeadlineExceeded && base::monotonic_ns() < until);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(PullTest, ManyThreadsShareOneClient) {
  Options options;
  options.connections = 3;  // fewer than threads, so that some wait
  const auto client = connect(options);
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(testing::seed() + static_cast<uint64_t>(t));
      for (int round = 0; round < 60; ++round) {
        std::vector<uint64_t> keys(1 + random() % 1500);
        for (uint64_t& key : keys) key = random() % (kRows + 100);
        check_pull(*client, kAll[random() % 4], keys);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace petps::client
