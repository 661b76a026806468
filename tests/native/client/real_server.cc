#include <cstring>
#include <numeric>

#include "fixtures.h"

namespace petps::client::testing {

std::vector<float> row_of(uint64_t key, uint32_t dim, uint64_t version) {
  std::vector<float> row(dim);
  for (uint32_t i = 0; i < dim; ++i)
    row[i] = static_cast<float>((key * 31 + i * 7 + version * 13) % 97) * 0.25f - 3.0f;
  return row;
}

std::vector<float> rows_of(std::span<const uint64_t> keys, uint32_t dim, uint64_t version) {
  std::vector<float> rows;
  for (const uint64_t key : keys) {
    const std::vector<float> row = row_of(key, dim, version);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

bool has_row(std::span<const float> rows, size_t i, const std::vector<float>& row) {
  const auto actual = rows.subspan(i * row.size(), row.size());
  return std::memcmp(actual.data(), row.data(), row.size() * sizeof(float)) == 0;
}

std::vector<uint64_t> first_keys(size_t n) {
  std::vector<uint64_t> keys(n);
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

std::unique_ptr<Client> connect_to(const std::string& url, const Options& options) {
  auto client = Client::connect(url, options);
  EXPECT_TRUE(client.ok()) << client.status().to_string();
  return std::move(client).value();
}

void expect_error(const base::Status& status, base::Code code,
                  std::initializer_list<std::string_view> parts) {
  EXPECT_EQ(code, status.code()) << status.to_string();
  for (const std::string_view part : parts)
    EXPECT_NE(std::string_view::npos, status.message().find(part)) << status.to_string();
}

std::vector<float> pulled_row(codec::Dtype dtype, uint64_t key, uint32_t dim, uint64_t version) {
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
  auto created = table::Tables::create(tables);
  EXPECT_TRUE(created.ok()) << created.status().to_string();
  tables_ = std::move(created.value());
  const auto record = tables_->pool().create_instance("ranking", "ranking@1", partitions);
  EXPECT_TRUE(record.ok()) << record.status().to_string();
  instance_ = record.value().id;
  if (options_.host == kHost) options_.port = stable_port();
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
  const auto table = tables_->create_table(spec);
  EXPECT_TRUE(table.ok()) << table.status().to_string();
  fill(*table.value(), rows, 0);
  return *table.value();
}

void RealServer::fill(table::Table& table, uint64_t rows, uint64_t version) {
  fill(table, first_keys(rows), version);
}

void RealServer::fill(table::Table& table, std::span<const uint64_t> keys, uint64_t version) {
  const pool::TableSpec spec = table.record().spec;
  const std::vector<float> rows = rows_of(keys, spec.dim, version);
  std::vector<std::byte> stored(keys.size() * spec.row_bytes);
  codec::encode(static_cast<codec::Dtype>(spec.dtype), rows.data(), keys.size(), spec.dim,
                stored.data());
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
