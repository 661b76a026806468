#include <numeric>

#include "fixtures.h"

namespace petps::client::testing {

std::vector<float> row_of(uint64_t key, uint32_t dim, uint64_t version) {
  std::vector<float> row(dim);
  for (uint32_t i = 0; i < dim; ++i)
    row[i] = static_cast<float>((key * 31 + i * 7 + version * 13) % 97) * 0.25f - 3.0f;
  return row;
}

std::vector<float> shown_row(codec::Dtype dtype, uint64_t key, uint32_t dim, uint64_t version) {
  std::vector<float> row = row_of(key, dim, version);
  std::vector<std::byte> stored(codec::row_bytes(dtype, dim));
  codec::encode(dtype, row.data(), 1, dim, stored.data());
  codec::decode(dtype, stored.data(), 1, dim, row.data());
  return row;
}

RealServer::RealServer(server::ServerOptions options, uint32_t partitions)
    : options_(std::move(options)) {
  table::TablesOptions tables;
  tables.pool.unit_bytes = pool::kTestUnitBytes;
  tables.pool.media.reserve_bytes = uint64_t{1} << 30;
  auto made = table::Tables::create(tables);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  tables_ = std::move(made.value());
  const auto record = tables_->pool().create_instance("ranking", "ranking@1", partitions);
  EXPECT_TRUE(record.ok()) << record.status().to_string();
  instance_ = record.value().id;
  options_.port = 0;
}

table::Table& RealServer::add_table(const std::string& name, codec::Dtype dtype, uint32_t dim,
                                    uint64_t capacity, uint64_t rows,
                                    const std::vector<float>& default_row, pool::Feed feed,
                                    uint32_t instance) {
  pool::TableSpec spec;
  spec.name = name;
  spec.instance = instance == UINT32_MAX ? instance_ : instance;
  spec.feed = feed;
  spec.dtype = static_cast<uint8_t>(dtype);
  spec.dim = dim;
  spec.row_bytes = static_cast<uint32_t>(codec::row_bytes(dtype, dim));
  spec.capacity = capacity;
  if (!default_row.empty()) {
    spec.default_row.resize(spec.row_bytes);
    codec::encode(dtype, default_row.data(), 1, dim, spec.default_row.data());
  }
  const auto made = tables_->create_table(spec);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  fill(*made.value(), rows, 0);
  return *made.value();
}

void RealServer::fill(table::Table& table, uint64_t rows, uint64_t version) {
  std::vector<uint64_t> keys(rows);
  std::iota(keys.begin(), keys.end(), 0);
  fill(table, keys, version);
}

void RealServer::fill(table::Table& table, std::span<const uint64_t> keys, uint64_t version) {
  const pool::TableSpec spec = table.record().spec;
  std::vector<std::byte> stored;
  for (const uint64_t key : keys) {
    const std::vector<float> row = row_of(key, spec.dim, version);
    stored.resize(stored.size() + spec.row_bytes);
    codec::encode(static_cast<codec::Dtype>(spec.dtype), row.data(), 1, spec.dim,
                  stored.data() + stored.size() - spec.row_bytes);
  }
  table::Batch batch;
  batch.keys = keys;
  batch.rows = stored.data();
  if (keys.empty()) return;
  const auto report = table.apply(batch);
  EXPECT_TRUE(report.ok()) << report.status().to_string();
}

void RealServer::start() {
  auto started = server::Server::start(*tables_, options_);
  ASSERT_TRUE(started.ok()) << started.status().to_string();
  server_ = std::move(started.value());
  options_.port = server_->port();
}

void RealServer::set_shard_map(const wire::ShardMap& map) {
  options_.shard_map = map;
  if (server_ == nullptr) return;
  const base::Status status = server_->set_shard_map(map);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

void RealServer::stop() {
  if (server_ == nullptr) return;
  EXPECT_TRUE(server_->stop().ok());
  server_ = nullptr;
}

}  // namespace petps::client::testing
