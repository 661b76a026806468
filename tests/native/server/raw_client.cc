#include "raw_client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/clock.h"

namespace petps::server {

using base::Code;
using base::Status;

Status Reply::error() const {
  if (closed) return Status(Code::kUnavailable, "no reply came");
  return header.code == 0 ? Status() : wire::decode_error(header, body);
}

RawClient::RawClient(uint16_t port, const std::string& host, const std::string& source)
    : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in own{};
  own.sin_family = AF_INET;
  EXPECT_EQ(::inet_pton(AF_INET, source.c_str(), &own.sin_addr), 1) << source;
  EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&own), sizeof(own)), 0) << strerror(errno);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  EXPECT_EQ(::inet_pton(AF_INET, host.c_str(), &address.sin_addr), 1) << host;
  EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
      << strerror(errno);
  const timeval limit{10, 0};
  setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

RawClient::RawClient(std::unique_ptr<transport::LoopbackClient> loopback)
    : loopback_(std::move(loopback)) {}

RawClient::~RawClient() {
  if (fd_ >= 0) ::close(fd_);
}

bool RawClient::send(std::span<const std::byte> bytes) {
  if (loopback_) return loopback_->send(bytes);
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

void RawClient::reset() {
  const linger now{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  ::close(std::exchange(fd_, -1));
}

void RawClient::end_sending() {
  if (loopback_) {
    loopback_->end_sending();
  } else {
    ::shutdown(fd_, SHUT_WR);
  }
}

bool RawClient::receive_exactly(std::byte* out, size_t n, int timeout_ms) {
  const uint64_t until = base::monotonic_ns() + static_cast<uint64_t>(timeout_ms) * 1'000'000;
  while (n > 0) {
    const uint64_t now = base::monotonic_ns();
    if (now >= until) return false;
    const int left = static_cast<int>((until - now) / 1'000'000) + 1;
    size_t received = 0;
    if (loopback_) {
      received = loopback_->receive({out, n}, left);
    } else {
      pollfd waiting{fd_, POLLIN, 0};
      if (::poll(&waiting, 1, left) <= 0) return false;
      received = static_cast<size_t>(std::max<ssize_t>(::recv(fd_, out, n, 0), 0));
    }
    if (received == 0) return false;
    out += received;
    n -= received;
  }
  return true;
}

Reply RawClient::receive(int timeout_ms) {
  Reply reply;
  std::vector<std::byte> head(wire::kHeaderBytes);
  if (!receive_exactly(head.data(), head.size(), timeout_ms)) {
    reply.closed = true;
    return reply;
  }
  const Status status = wire::decode_reply_header(head, reply.header);
  EXPECT_TRUE(status.ok()) << status.to_string();
  reply.body.resize(reply.header.body_bytes);
  if (!reply.body.empty() && !receive_exactly(reply.body.data(), reply.body.size(), timeout_ms))
    reply.closed = true;
  return reply;
}

Status RawClient::last_error(int timeout_ms) {
  Status last;
  while (true) {
    const Reply reply = receive(timeout_ms);
    if (reply.closed) return last;
    if (reply.header.code != 0) last = reply.error();
  }
}

Pulled decode_pulled(const Reply& reply) {
  Pulled pulled;
  pulled.status = reply.error();
  if (!pulled.status.ok()) return pulled;
  wire::PullReplyPrefix prefix;
  wire::PullReply head;
  pulled.status = wire::decode_pull_reply_prefix(reply.header, reply.body, prefix);
  if (!pulled.status.ok()) return pulled;
  pulled.status = wire::decode_pull_reply_head(
      reply.header, std::span(reply.body).first(prefix.rows_offset), head);
  if (!pulled.status.ok()) return pulled;
  pulled.applied_version = head.applied_version;
  const std::byte* row = reply.body.data() + prefix.rows_offset;
  size_t word = 0;
  for (const wire::PullReplySection& section : head.sections) {
    pulled.sections.push_back(section);
    for (size_t i = 0; i < section.keys; ++i) {
      pulled.rows.emplace_back();
      if (((head.bitmaps[word + i / 64] >> (i % 64)) & 1) == 0) continue;
      pulled.rows.back().assign(row, row + section.row_bytes);
      row += section.row_bytes;
    }
    word += wire::bitmap_words(section.keys);
  }
  EXPECT_EQ(row, reply.body.data() + reply.body.size());
  return pulled;
}

wire::Frame pull_frame(uint64_t id, const std::vector<Section>& sections, uint32_t instance,
                       uint64_t min_version, uint32_t wait_ms) {
  std::vector<wire::PullSection> heads;
  std::vector<uint64_t> keys;
  for (const Section& section : sections) {
    heads.push_back({section.table, static_cast<uint32_t>(section.keys.size())});
    keys.insert(keys.end(), section.keys.begin(), section.keys.end());
  }
  wire::Frame frame;
  wire::encode_pull(id, {min_version, instance, wait_ms, heads, keys}, frame);
  return frame;
}

TestPool::TestPool(const std::string& path) {
  table::TablesOptions options;
  options.pool.media.path = path;
  options.pool.media.replace = true;
  options.pool.unit_bytes = pool::kTestUnitBytes;
  options.pool.media.reserve_bytes = uint64_t{1} << 30;
  auto created = table::Tables::create(options);
  EXPECT_TRUE(created.ok()) << created.status().to_string();
  tables = std::move(created.value());
  const auto record = tables->pool().create_instance("ranking", "ranking@1", 2);
  EXPECT_TRUE(record.ok()) << record.status().to_string();
  instance = record.value().id;
}

table::Table& TestPool::add_table(const std::string& name, uint32_t dim, uint32_t row_bytes,
                                  uint64_t capacity, pool::Feed feed) {
  pool::TableSpec spec;
  spec.name = name;
  spec.instance = instance;
  spec.feed = feed;
  spec.dim = dim;
  spec.row_bytes = row_bytes;
  spec.capacity = capacity;
  const auto table = tables->create_table(spec);
  EXPECT_TRUE(table.ok()) << table.status().to_string();
  return *table.value();
}

void TestPool::record_version(uint32_t partition, uint64_t version) {
  pool::Progress progress;
  progress.instance = instance;
  progress.partition = partition;
  progress.run = 1;
  progress.seq = progress.version = version;
  EXPECT_TRUE(tables->record_progress(progress).ok());
}

void TestPool::record_version(uint64_t version) {
  for (uint32_t partition = 0; partition < 2; ++partition) record_version(partition, version);
}

std::vector<std::byte> row_of(uint64_t key, uint64_t version, size_t row_bytes) {
  std::vector<std::byte> row(row_bytes);
  const uint64_t word = key * 0x9E3779B97F4A7C15u + version;
  for (size_t i = 0; i < row_bytes; ++i)
    row[i] = static_cast<std::byte>((i < 8 ? version >> (8 * i) : word >> (8 * (i % 8))));
  return row;
}

bool is_whole(uint64_t key, std::span<const std::byte> row, uint64_t* version) {
  uint64_t shown = 0;
  std::memcpy(&shown, row.data(), std::min<size_t>(8, row.size()));
  if (version != nullptr) *version = shown;
  const std::vector<std::byte> expected = row_of(key, shown, row.size());
  return std::equal(row.begin(), row.end(), expected.begin());
}

std::vector<std::byte> rows_of(std::span<const uint64_t> keys, uint64_t version, size_t row_bytes) {
  std::vector<std::byte> rows;
  for (const uint64_t key : keys) {
    const std::vector<std::byte> row = row_of(key, version, row_bytes);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

wire::Frame push_frame(uint64_t id, const table::Table& table, const std::vector<uint64_t>& keys,
                       uint64_t version, const wire::PushOrder& order) {
  const pool::TableSpec& spec = table.record().spec;
  const std::vector<std::byte> rows = rows_of(keys, version, spec.row_bytes);
  wire::Frame frame;
  wire::encode_push(id,
                    {table.id(),
                     0,
                     spec.dim,
                     spec.dtype,
                     spec.row_bytes,
                     static_cast<uint32_t>(version),
                     order,
                     keys,
                     {},
                     rows},
                    frame);
  return frame;
}

void fill(table::Table& table, uint64_t keys, uint64_t version) {
  std::vector<uint64_t> batch_keys(keys);
  std::iota(batch_keys.begin(), batch_keys.end(), uint64_t{0});
  const std::vector<std::byte> rows = rows_of(batch_keys, version, table.record().spec.row_bytes);
  table::Batch batch;
  batch.keys = batch_keys;
  batch.rows = rows.data();
  batch.stamp = static_cast<uint32_t>(version);
  const auto report = table.apply(batch);
  EXPECT_TRUE(report.ok()) << report.status().to_string();
}

}  // namespace petps::server
