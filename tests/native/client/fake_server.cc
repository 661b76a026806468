#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <random>

#include "fixtures.h"

namespace petps::client::testing {

wire::FrameHeader header_of(const wire::Frame& frame) {
  wire::FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof(header));
  return header;
}

void replace_by_error(wire::Frame& reply, base::Code code, const std::string& message) {
  wire::encode_error(static_cast<uint16_t>(wire::Opcode::kPull), header_of(reply).request_id,
                     base::Status(code, message), reply);
}

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

int listen_anywhere(uint16_t* port) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(0, bind(listener, reinterpret_cast<sockaddr*>(&address), size));
  EXPECT_EQ(0, listen(listener, 64));
  EXPECT_EQ(0, getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size));
  *port = ntohs(address.sin_port);
  return listener;
}

void send_all(int socket, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
}

namespace {

bool read_all(int socket, std::byte* out, size_t n) {
  while (n > 0) {
    const ssize_t received = recv(socket, out, n, 0);
    if (received <= 0) return false;
    out += received;
    n -= static_cast<size_t>(received);
  }
  return true;
}

// Claim a port for this process, by a name that other tests look for too. Return whether it is new.
bool claim(uint16_t port) {
  const int holder = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);  // open as long as the process
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const int n =
      std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "petps-test-port-%u", port);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  const bool is_new = bind(holder, reinterpret_cast<const sockaddr*>(&name), bytes) == 0;
  if (!is_new) close(holder);
  return is_new;
}

}  // namespace

uint16_t stable_port() {
  std::random_device random;
  std::uniform_int_distribution<uint16_t> ports(15'000, 31'999);
  for (;;) {
    const uint16_t port = ports(random);
    const int probe = socket(AF_INET, SOCK_STREAM, 0);
    const sockaddr_in address = loopback(port);
    const bool is_free =
        bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    close(probe);
    if (is_free && claim(port)) return port;
  }
}

FakeServer::FakeServer(Tamper tamper) : tamper_(std::move(tamper)) {
  tables_.instances.push_back({1, "ranking", "ranking@1", 1, 5});
  wire::TableInfo info;
  info.id = kTable;
  info.instance = 1;
  info.name = "users";
  info.dim = kDim;
  info.row_bytes = kDim * 4;
  info.capacity = 1000;
  tables_.tables.push_back(info);
  listener_ = listen_anywhere(&port_);
  accepting_ = std::thread([this] { accept_all(); });
}

FakeServer::~FakeServer() {
  shutdown(listener_, SHUT_RDWR);
  accepting_.join();
  {
    const std::lock_guard lock(mutex_);
    for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  }
  for (std::thread& thread : serving_) thread.join();
  for (const int socket : sockets_) close(socket);
  close(listener_);
}

void FakeServer::accept_all() {
  for (;;) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) return;
    const int on = 1;  // a reply consists of several small sends
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    const std::lock_guard lock(mutex_);
    sockets_.push_back(socket);
    serving_.emplace_back([this, socket] { serve(socket); });
  }
}

void FakeServer::serve(int socket) {
  std::vector<std::byte> body;
  wire::Frame reply;
  for (;;) {
    std::byte bytes[wire::kHeaderBytes];
    wire::FrameHeader header;
    if (!read_all(socket, bytes, sizeof(bytes))) return;
    if (!wire::decode_request_header(bytes, header).ok()) return;
    body.resize(header.body_bytes);
    if (!read_all(socket, body.data(), body.size())) return;
    answer(header, body, reply);
    const auto opcode = static_cast<wire::Opcode>(header.opcode);
    const uint64_t count = counts_.at(header.opcode).fetch_add(1);
    const Answer answer = tamper_ ? tamper_(opcode, count, reply) : Answer::kSend;
    if (answer == Answer::kSend || answer == Answer::kSendAndClose) send_all(socket, reply);
    if (answer != Answer::kSend && answer != Answer::kSilent) {
      shutdown(socket, SHUT_RDWR);
      return;
    }
  }
}

void FakeServer::set_shard_map(const wire::ShardMap& map) {
  hello_.features = wire::kFeatureShardMap;
  hello_.shard.map_version = map.version;
  shard_map_ = map;
}

void FakeServer::move_to_pool(uint8_t uuid, uint32_t table) {
  const std::lock_guard lock(mutex_);
  hello_.pool_uuid[0] = uuid;
  tables_.tables[0].id = table;
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
}

void FakeServer::answer(const wire::FrameHeader& header, std::span<const std::byte> body,
                        wire::Frame& reply) {
  const std::lock_guard lock(mutex_);
  switch (static_cast<wire::Opcode>(header.opcode)) {
    case wire::Opcode::kHello:
      wire::encode_hello_reply(header.request_id, hello_, reply);
      return;
    case wire::Opcode::kTables:
      EXPECT_TRUE(wire::encode_tables_reply(header.request_id, tables_, reply).ok());
      return;
    case wire::Opcode::kPull:
      return answer_pull(header, body, reply);
    case wire::Opcode::kPush:
      wire::encode_push_reply(header.request_id, {1, 0, 0, 0, 0}, reply);
      return;
    case wire::Opcode::kStatus:
      EXPECT_TRUE(wire::encode_status_reply(header.request_id, "{}", reply).ok());
      return;
    case wire::Opcode::kHotKeys:
      wire::encode_hot_keys_reply(header.request_id, reply);
      return;
    case wire::Opcode::kShardMap:
      wire::encode_shard_map_reply(header.request_id, shard_map_, reply);
      return;
    case wire::Opcode::kControl:
    case wire::Opcode::kRdma:
      wire::encode_error(header.opcode, header.request_id,
                         base::Status(base::Code::kUnimplemented, "not here"), reply);
      return;
  }
}

void FakeServer::answer_pull(const wire::FrameHeader& header, std::span<const std::byte> body,
                             wire::Frame& reply) {
  wire::PullRequest pull;
  ASSERT_TRUE(wire::decode_pull(header, body, {}, pull).ok());
  traces_.emplace_back(pull.trace, body.size());
  for (const wire::PullSection& section : pull.sections) {
    if (section.table == tables_.tables[0].id) continue;
    const base::Status unknown(base::Code::kNotFound, "no table " + std::to_string(section.table));
    return wire::encode_error(header.opcode, header.request_id, unknown, reply);
  }
  const size_t head_bytes = wire::pull_reply_head_bytes(pull.sections);
  reply.assign(head_bytes, std::byte{0});
  const wire::PullReplyParts parts = wire::start_pull_reply(pull.sections, reply);
  std::vector<float> rows;
  size_t key_at = 0;
  size_t word_at = 0;
  for (size_t s = 0; s < pull.sections.size(); ++s) {
    parts.sections[s].row_bytes = kDim * 4;
    for (uint32_t i = 0; i < pull.sections[s].keys; ++i) {
      const uint64_t key = pull.keys[key_at + i];
      if (key % 2 == 1) continue;
      parts.bitmaps[word_at + i / 64] |= uint64_t{1} << (i % 64);
      parts.sections[s].rows_found += 1;
      const std::vector<float> row = row_of(key, kDim);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    key_at += pull.sections[s].keys;
    word_at += wire::bitmap_words(pull.sections[s].keys);
  }
  wire::finish_pull_reply(header.request_id, kVersion, pull.sections.size(), rows.size() * 4,
                          reply);
  const auto bytes = std::as_bytes(std::span(rows));
  reply.insert(reply.end(), bytes.begin(), bytes.end());
}

}  // namespace petps::client::testing
