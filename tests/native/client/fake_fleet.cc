#include "fake_fleet.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fixtures.h"

namespace petps::client::testing {

bool FakePool::has(uint32_t number) const {
  return std::find(instances.begin(), instances.end(), number) != instances.end();
}

void FakePool::create(uint32_t number) {
  if (has(number)) return;
  instances.insert(std::upper_bound(instances.begin(), instances.end(), number), number);
  ++counter;
}

void FakePool::switch_to(uint32_t number) {
  ASSERT_TRUE(has(number));
  if (current == number) return;
  previous = std::exchange(current, number);
  ++counter;
}

void FakePool::drop(uint32_t number) {
  ASSERT_NE(current, number);
  std::erase(instances, number);
  if (previous == number) previous = 0;
  ++counter;
}

FakeFleet::FakeFleet(size_t servers) : servers_(servers), pools_(servers) {
  for (size_t i = 0; i < servers; ++i) {
    pools_[i].uuid[0] = static_cast<uint8_t>(i + 1);
    pools_[i].first_id = static_cast<uint32_t>(1 + 7 * i);
    pools_[i].counter = 1 + 100 * i;
    servers_[i].pool = i;
    listen_at(servers_[i]);
  }
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  thread_ = std::thread([this] { run(); });
}

FakeFleet::~FakeFleet() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
  for (const Peer& peer : peers_) close(peer.socket);
  for (const Server& server : servers_) close(server.listener);
  close(wake_);
}

std::string FakeFleet::address(size_t server) const {
  return "127.0.0.1:" + std::to_string(servers_[server].port);
}

void FakeFleet::wake() const {
  const uint64_t count = 1;
  ASSERT_EQ(write(wake_, &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
}

void FakeFleet::listen_at(Server& server) {
  server.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  // A later listen() needs the same port, although its old connections may linger.
  const int on = 1;
  setsockopt(server.listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  server.port = stable_port();
  const sockaddr_in address = loopback(server.port);
  ASSERT_EQ(0, bind(server.listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)));
  ASSERT_EQ(0, listen(server.listener, 64));
}

// Shut the sockets down first: the server's thread may be polling them, which would delay a close.
void FakeFleet::close_peers(size_t server) {
  std::erase_if(peers_, [&](const Peer& peer) {
    if (peer.server != server) return false;
    shutdown(peer.socket, SHUT_RDWR);
    close(peer.socket);
    return true;
  });
}

void FakeFleet::change(size_t server, const std::function<void(FakePool&)>& how) {
  const std::lock_guard lock(mutex_);
  how(pools_[servers_[server].pool]);
}

FakePool FakeFleet::pool(size_t server) const {
  const std::lock_guard lock(mutex_);
  return pools_[servers_[server].pool];
}

void FakeFleet::kill(size_t server) {
  const std::lock_guard lock(mutex_);
  close_peers(server);
  // The server keeps its port, and refuses connections until it listens again.
  if (std::exchange(servers_[server].listens, false))
    shutdown(servers_[server].listener, SHUT_RDWR);
  wake();
}

void FakeFleet::revive(size_t server) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(servers_[server].listens, true)) {
    ASSERT_EQ(0, listen(servers_[server].listener, 64));
  }
  wake();
}

void FakeFleet::pause(size_t server, bool paused) {
  const std::lock_guard lock(mutex_);
  servers_[server].paused = paused;
  wake();
}

void FakeFleet::swap(size_t one, size_t other) {
  const std::lock_guard lock(mutex_);
  std::swap(servers_[one].pool, servers_[other].pool);
}

void FakeFleet::close_idle(size_t server) {
  const std::lock_guard lock(mutex_);
  std::erase_if(peers_, [&](const Peer& peer) {
    if (peer.server != server || !peer.inbox.empty()) return false;
    close(peer.socket);
    return true;
  });
  wake();
}

std::vector<std::string> FakeFleet::violations() const {
  const std::lock_guard lock(mutex_);
  return violations_;
}

std::string FakeFleet::key_of(const std::string& client, size_t server, size_t pool) {
  return client + "/" + std::to_string(server) + "/" + std::to_string(pool);
}

void FakeFleet::record_seen(const std::string& client, size_t server,
                            const wire::CatalogueState& state) {
  const std::lock_guard lock(mutex_);
  uint64_t& seen = seen_[key_of(client, server, state.pool_uuid[0] - size_t{1})];
  seen = std::max(seen, state.counter);
}

uint64_t FakeFleet::seen_of(const std::string& client, size_t server, size_t pool) const {
  const auto at = seen_.find(key_of(client, server, pool));
  return at == seen_.end() ? 0 : at->second;
}

uint64_t FakeFleet::seen(const std::string& client, size_t server) const {
  const std::lock_guard lock(mutex_);
  return seen_of(client, server, servers_[server].pool);
}

void FakeFleet::run() {
  for (;;) {
    std::vector<pollfd> entries = {{wake_, POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      for (const Server& server : servers_)
        entries.push_back({server.paused || !server.listens ? -1 : server.listener, POLLIN, 0});
      for (const Peer& peer : peers_)
        entries.push_back({servers_[peer.server].paused ? -1 : peer.socket, POLLIN, 0});
    }
    poll(entries.data(), entries.size(), -1);
    uint64_t count = 0;
    (void)!read(wake_, &count, sizeof(count));
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < servers_.size(); ++i) {
      if (!servers_[i].listens || servers_[i].paused) continue;
      for (;;) {
        const int socket =
            accept4(servers_[i].listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (socket < 0) break;
        const int on = 1;
        setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        peers_.push_back({socket, i, servers_[i].pool, {}, {}, 0});
      }
    }
    std::erase_if(peers_, [&](Peer& peer) {
      if (servers_[peer.server].paused) return false;
      const bool open = take_bytes(peer);
      answer_all(peer);
      if (!open) close(peer.socket);
      return !open;
    });
  }
}

bool FakeFleet::take_bytes(Peer& peer) {
  std::byte bytes[4096];
  for (;;) {
    const ssize_t received = recv(peer.socket, bytes, sizeof(bytes), 0);
    if (received == 0) return false;
    if (received < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    peer.inbox.insert(peer.inbox.end(), bytes, bytes + received);
  }
}

void FakeFleet::answer_all(Peer& peer) {
  while (peer.inbox.size() >= wire::kHeaderBytes) {
    wire::FrameHeader header;
    ASSERT_TRUE(wire::decode_request_header(peer.inbox, header).ok());
    const size_t whole = wire::kHeaderBytes + header.body_bytes;
    if (peer.inbox.size() < whole) return;
    // Aligned like a server's receive buffer.
    std::vector<uint64_t> body((header.body_bytes + 7) / 8);
    std::memcpy(body.data(), peer.inbox.data() + wire::kHeaderBytes, header.body_bytes);
    peer.inbox.erase(peer.inbox.begin(), peer.inbox.begin() + static_cast<ptrdiff_t>(whole));
    wire::Frame reply;
    answer(peer, header, std::as_bytes(std::span(body)).first(header.body_bytes), reply);
    requests_.fetch_add(1);
    (void)!send(peer.socket, reply.data(), reply.size(), MSG_NOSIGNAL);
  }
}

wire::TablesReply FakeFleet::tables_of(const FakePool& pool) const {
  wire::TablesReply tables;
  for (const uint32_t number : pool.instances) {
    const uint32_t id = pool.first_id + number;
    tables.instances.push_back({id, "m", instance_of(number), 1, number});
    wire::TableInfo table;
    table.id = id;
    table.instance = id;
    table.name = "t";
    table.dim = row_dim(number);
    table.row_bytes = table.dim * 4;
    table.capacity = 1000;
    tables.tables.push_back(table);
  }
  const uint32_t previous = pool.previous == 0 ? 0 : pool.first_id + pool.previous;
  tables.aliases.push_back({"m", pool.first_id + pool.current, previous});
  tables.state = {pool.uuid, pool.counter};
  return tables;
}

void FakeFleet::answer(Peer& peer, const wire::FrameHeader& header, std::span<const std::byte> body,
                       wire::Frame& reply) {
  const FakePool& pool = pools_[peer.pool];
  if (peer.sent != 0) {
    uint64_t& seen = seen_[key_of(peer.client, peer.server, peer.pool)];
    seen = std::max(seen, std::exchange(peer.sent, 0));
  }
  switch (static_cast<wire::Opcode>(header.opcode)) {
    case wire::Opcode::kHello: {
      wire::HelloRequest request;
      ASSERT_TRUE(wire::decode_hello(header, body, request).ok());
      peer.client = request.client;
      wire::HelloReply hello;
      hello.pool_uuid = pool.uuid;
      hello.features = wire::kFeatureCatalogueState;
      return wire::encode_hello_reply(header.request_id, hello, reply);
    }
    case wire::Opcode::kTables: {
      peer.sent = pool.counter;
      ASSERT_TRUE(wire::encode_tables_reply(header.request_id, tables_of(pool), reply).ok());
      return;
    }
    case wire::Opcode::kPull:
      return answer_pull(peer, header, body, reply);
    default:
      wire::encode_error(header.opcode, header.request_id,
                         base::Status(base::Code::kUnimplemented, "not here"), reply);
  }
}

void FakeFleet::answer_pull(Peer& peer, const wire::FrameHeader& header,
                            std::span<const std::byte> body, wire::Frame& reply) {
  const FakePool& pool = pools_[peer.pool];
  wire::PullRequest pull;
  ASSERT_TRUE(wire::decode_pull(header, body, {}, pull).ok());
  const uint32_t number = pull.sections[0].table - pool.first_id;
  if (!pool.has(number) || pull.instance != pull.sections[0].table) {
    const base::Status unknown(base::Code::kNotFound, "no such table");
    return wire::encode_error(header.opcode, header.request_id, unknown, reply);
  }
  const uint64_t seen = seen_of(peer.client, peer.server, peer.pool);
  if (pool.counter < seen) {
    violations_.push_back(peer.client + " took rows of a pool at counter " +
                          std::to_string(pool.counter) + " after it had seen " +
                          std::to_string(seen));
  }
  reply.assign(wire::pull_reply_head_bytes(pull.sections), std::byte{0});
  const wire::PullReplyParts parts = wire::start_pull_reply(pull.sections, reply);
  const size_t keys = pull.keys.size();
  parts.sections[0].row_bytes = row_dim(number) * 4;
  parts.sections[0].rows_found = static_cast<uint32_t>(keys);
  for (size_t i = 0; i < keys; ++i) parts.bitmaps[i / 64] |= uint64_t{1} << (i % 64);
  const std::vector<float> rows(keys * row_dim(number), static_cast<float>(number));
  wire::finish_pull_reply(header.request_id, number, 1, rows.size() * 4, reply);
  const auto bytes = std::as_bytes(std::span(rows));
  reply.insert(reply.end(), bytes.begin(), bytes.end());
}

}  // namespace petps::client::testing
