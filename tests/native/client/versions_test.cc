// Several instances of a model at the same time: clients follow the alias, no result mixes two
// instances, and clients notice dropped ones. Rows of instance ranking@N are those of version N.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "fixtures.h"

namespace petps::client::testing {
namespace {

constexpr uint32_t kDim = 16;
constexpr uint64_t kRows = 300;
constexpr uint64_t kVersions = 40;  // row_of() has 97 different ones

// Add instance ranking@N with the tables a and b, every row of version N.
void add_version(RealServer& server, uint64_t version) {
  uint32_t instance = server.instance();
  if (version > 1) {
    const auto record =
        server.tables().pool().create_instance("ranking", "ranking@" + std::to_string(version), 2);
    ASSERT_TRUE(record.ok()) << record.status().to_string();
    instance = record.value().id;
  }
  for (const char* name : {"a", "b"}) {
    table::Table& table =
        server.add_table(name, codec::Dtype::kF32, kDim, 500, 0, {}, pool::Feed::kPush, instance);
    RealServer::fill(table, kRows, version);
  }
}

std::unique_ptr<Client> connect(const std::string& url, uint32_t catalogue_ms = 0) {
  Options options;
  options.deadline_ms = 20'000;  // the machine may be busy
  options.catalogue_ms = catalogue_ms;
  return connect_to(url, options);
}

uint32_t id_of(RealServer& server, const std::string& instance) {
  return server.tables().resolve(instance).value().id;
}

base::Status switch_alias(RealServer& server, const std::string& alias,
                          const std::string& instance) {
  return server.tables().switch_alias(alias, id_of(server, instance));
}

base::Status drop(RealServer& server, const std::string& instance) {
  return server.tables().drop_instance(id_of(server, instance));
}

// Return the version that all rows of a and b have, if the report agrees. Return 0 if rows are of
// several versions, torn or missing.
base::Result<uint64_t> pull_version(Client& client, uint64_t first_key) {
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < 20; ++i) keys.push_back((first_key + i * 7) % kRows);
  std::vector<float> a(keys.size() * kDim);
  std::vector<float> b(keys.size() * kDim);
  const TablePull pulls[] = {{"a", keys, std::as_writable_bytes(std::span(a)), {}, Form::kFloat32},
                             {"b", keys, std::as_writable_bytes(std::span(b)), {}, Form::kFloat32}};
  const auto report = client.pull_many(pulls);
  if (!report.ok()) return report.status();
  for (uint64_t version = 1; version <= kVersions; ++version) {
    const std::vector<float> rows = rows_of(keys, kDim, version);
    if (a == rows && b == rows)
      return report.value().instance == "ranking@" + std::to_string(version) ? version : 0;
  }
  return uint64_t{0};
}

TEST(Versions, InstancesAreServedSideBySideAndSwitched) {
  RealServer server;
  add_version(server, 1);
  server.start();
  const auto before = connect(server.url());
  add_version(server, 2);
  const auto plain = connect(server.url());
  const auto second = connect("petps://" + server.address() + "/ranking@2");
  EXPECT_EQ(pull_version(*before, 3).value(), 1u);
  EXPECT_EQ(pull_version(*plain, 3).value(), 1u)
      << "the model still resolves to the first instance";
  EXPECT_EQ(pull_version(*second, 3).value(), 2u);
  EXPECT_EQ(drop(server, "ranking@1").code(), base::Code::kFailedPrecondition);
  ASSERT_TRUE(switch_alias(server, "ranking", "ranking@2").ok());
  ASSERT_TRUE(plain->tables().ok());
  EXPECT_EQ(pull_version(*plain, 3).value(), 2u) << "it has read the catalogue";
  EXPECT_EQ(pull_version(*before, 3).value(), 1u) << "it has not read the catalogue again";
  ASSERT_TRUE(switch_alias(server, "ranking", "ranking@1").ok()) << "switch back";
  ASSERT_TRUE(plain->tables().ok());
  EXPECT_EQ(pull_version(*plain, 3).value(), 1u);
  ASSERT_TRUE(switch_alias(server, "ranking", "ranking@2").ok());
  ASSERT_TRUE(drop(server, "ranking@1").ok());
  EXPECT_EQ(pull_version(*before, 3).value(), 2u)
      << "its instance is gone, so it reads the catalogue";
  ASSERT_TRUE(switch_alias(server, "other", "ranking@2").ok());
  EXPECT_EQ(drop(server, "ranking@2").code(), base::Code::kFailedPrecondition);
}

// Record that all partitions of the instance have applied `version`.
void record(RealServer& server, const std::string& instance, uint64_t version) {
  const uint32_t id = id_of(server, instance);
  for (uint32_t partition = 0; partition < 2; ++partition)
    ASSERT_TRUE(server.tables().record_progress({id, partition, 1, 1, 1, version, {}, 0}).ok());
}

TEST(Versions, APullFindsAVersionThatOnlyTheNewInstanceHas) {
  RealServer server;
  add_version(server, 1);
  add_version(server, 2);
  server.start();
  record(server, "ranking@1", 1);
  record(server, "ranking@2", 2);
  const auto plain = connect(server.url());
  const auto first = connect("petps://" + server.address() + "/ranking@1");
  EXPECT_EQ(pull_version(*plain, 3).value(), 1u);
  const std::vector<uint64_t> keys = {3};
  std::vector<float> rows(kDim);
  PullOptions options;
  options.min_version = 2;
  EXPECT_EQ(plain->pull("a", keys, rows, {}, options).status().code(), base::Code::kStale);
  ASSERT_TRUE(switch_alias(server, "ranking", "ranking@2").ok());
  const auto report = plain->pull("a", keys, rows, {}, options);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().applied_version, 2u);
  EXPECT_EQ(rows, row_of(3, kDim, 2));
  options.min_version = 3;
  EXPECT_EQ(plain->pull("a", keys, rows, {}, options).status().code(), base::Code::kStale);
  options.min_version = 2;
  EXPECT_EQ(first->pull("a", keys, rows, {}, options).status().code(), base::Code::kStale)
      << "the URL names the instance";
}

TEST(Versions, ADroppedInstanceNamedInTheUrlIsNotFound) {
  RealServer server;
  add_version(server, 1);
  add_version(server, 2);
  server.start();
  const auto first = connect("petps://" + server.address() + "/ranking@1");
  EXPECT_EQ(pull_version(*first, 0).value(), 1u);
  ASSERT_TRUE(switch_alias(server, "ranking", "ranking@2").ok());
  ASSERT_TRUE(drop(server, "ranking@1").ok());
  const base::Status gone = pull_version(*first, 0).status();
  EXPECT_EQ(gone.code(), base::Code::kNotFound);
  EXPECT_NE(gone.message().find("ranking@2"), std::string_view::npos) << gone.to_string();
}

// Instances are created, switched to and dropped one after another, while clients pull both tables.
TEST(Versions, NoResultMixesTwoInstancesWhileTheyChange) {
  server::ServerOptions options;
  options.workers = 2;
  RealServer server(options);
  add_version(server, 1);
  server.start();
  std::atomic<uint64_t> served{1};
  std::atomic<bool> done{false};
  std::atomic<uint64_t> pulls{0};
  std::vector<std::thread> readers;
  for (uint64_t salt = 1; salt <= 3; ++salt) {
    readers.emplace_back([&, salt] {
      const auto client = connect(server.url(), 10);
      uint64_t last = 0;
      for (uint64_t i = 0; !done.load(); ++i) {
        const auto version = pull_version(*client, salt * 31 + i);
        ASSERT_TRUE(version.ok()) << version.status().to_string();
        ASSERT_GE(version.value(), last) << "0: rows of two instances";
        ASSERT_NE(version.value(), 0u);
        last = version.value();
        pulls.fetch_add(1);
      }
    });
  }
  for (uint64_t version = 2; version <= kVersions && !::testing::Test::HasFailure(); ++version) {
    add_version(server, version);
    const uint64_t before = pulls.load();
    EXPECT_TRUE(switch_alias(server, "ranking", "ranking@" + std::to_string(version)).ok());
    EXPECT_TRUE(drop(server, "ranking@" + std::to_string(version - 1)).ok());
    for (int i = 0; i < 20'000 && pulls.load() < before + 3; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GE(pulls.load(), 3 * (kVersions - 1));  // at least three after each switch
  server.stop();
  for (int i = 0; i < 3; ++i) server.tables().reclaim();
  const table::VerifyReport report = server.tables().verify();
  EXPECT_TRUE(report.clean()) << report.problems.front();
  EXPECT_LT(server.tables().pool().medium().size(), uint64_t{16} << 20)
      << "the space of dropped instances was used again";
}

}  // namespace
}  // namespace petps::client::testing
