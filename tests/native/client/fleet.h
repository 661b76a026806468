// Several servers of one model with a shard map. Each pool holds only the keys of the partitions
// that the test gives it, so a key requested from the wrong server would be missing.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "fixtures.h"

namespace petps::client::testing {

constexpr uint32_t kPartitions = 8;
constexpr uint64_t kKeys = 2000;  // only lower keys exist, on the server with their partition
constexpr uint32_t kDim = 8;

inline const std::vector<float> kDefaultRow = {9, 8, 7, 6, 5, 4, 3, 2};

inline Options quiet() {
  Options options;
  options.deadline_ms = 20'000;
  options.catalogue_ms = 0;
  options.hot_sample_every = 0;
  return options;
}

inline std::vector<uint64_t> keys_of(uint64_t partitions) {
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < kKeys; ++key) {
    if (((partitions >> wire::partition_of(key, kPartitions)) & 1) != 0) keys.push_back(key);
  }
  return keys;
}

class Fleet : public ::testing::Test {
 protected:
  // Add a server for a set of partitions (a bitmap). `filled`: the partitions whose rows its pool
  // holds; 0: the owned ones.
  RealServer& add_server(uint64_t owned, uint64_t filled = 0,
                         const server::ServerOptions& options = {}) {
    auto server = std::make_unique<RealServer>(options, kPartitions);
    const std::vector<uint64_t> keys = keys_of(filled != 0 ? filled : owned);
    // Give the same table another id on each server.
    for (size_t i = 0; i < servers_.size(); ++i)
      server->add_table("spare" + std::to_string(i), codec::Dtype::kF32, 1, 10, 0);
    for (const codec::Dtype dtype :
         {codec::Dtype::kF32, codec::Dtype::kF16, codec::Dtype::kBf16, codec::Dtype::kInt8}) {
      table::Table& table = server->add_table(std::string(codec::dtype_name(dtype)), dtype, kDim,
                                              4 * kKeys, 0, kDefaultRow);
      RealServer::fill(table, keys, 0);
    }
    server->start();
    owned_.push_back(owned);
    servers_.push_back(std::move(server));
    return *servers_.back();
  }
  wire::ShardMap map() const {
    wire::ShardMap map{"ranking", version_, kPartitions, {}};
    for (size_t i = 0; i < servers_.size(); ++i) {
      if (owned_[i] != 0) map.servers.push_back({servers_[i]->address(), {owned_[i]}});
    }
    return map;
  }
  void publish() {
    ++version_;
    for (const auto& server : servers_) server->set_shard_map(map());
  }
  std::unique_ptr<Client> connect(const Options& options = quiet()) {
    return connect_to(servers_[0]->url(), options);
  }
  // Record that the partitions have applied `version`.
  static void record(RealServer& server, uint64_t partitions, uint64_t version) {
    for (uint32_t p = 0; p < kPartitions; ++p) {
      if (((partitions >> p) & 1) == 0) continue;
      pool::Progress progress;
      progress.instance = server.instance();
      progress.partition = p;
      progress.run = 1;
      progress.seq = version;
      progress.version = version;
      ASSERT_TRUE(server.tables().record_progress(progress).ok());
    }
  }
  static base::Result<PullReport> pull(Client& client, const std::vector<uint64_t>& keys,
                                       const PullOptions& options = {}) {
    std::vector<float> rows(keys.size() * kDim);
    return client.pull("f32", keys, rows, {}, options);
  }
  // Return how many requests all servers have refused with WRONG_SHARD.
  uint64_t wrong_shards() {
    uint64_t count = 0;
    for (const auto& server : servers_)
      count += server->server().stats().errors_of(base::Code::kWrongShard);
    return count;
  }
  // Start the next version of the map. `owned`: the partitions of server 0; server 1 owns the rest.
  void split_between_two(uint64_t owned) {
    ++version_;
    owned_ = {owned, 0xFF & ~owned};
  }

  std::vector<std::unique_ptr<RealServer>> servers_;
  std::vector<uint64_t> owned_;
  uint64_t version_ = 0;
};

}  // namespace petps::client::testing
