#include "bench/pull/pull_load.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "bench/common/loaded_table.h"
#include "bench/common/random.h"
#include "bench/pull/loopback.h"

namespace petps::bench {
namespace {

constexpr uint32_t kFrames = 64;
constexpr size_t kWasteBytes = size_t{256} << 10;

void receive_whole(int fd, std::byte* out, size_t n) {
  if (::recv(fd, out, n, MSG_WAITALL) != static_cast<ssize_t>(n)) fail("a reply was cut off");
}

}  // namespace

Requests make_requests(uint32_t table, uint64_t rows, uint32_t row_bytes, uint32_t keys) {
  Requests requests;
  requests.keys = keys;
  requests.row_bytes = row_bytes;
  Random random(keys * 7919 + row_bytes);
  std::vector<uint64_t> frame_keys(keys);
  const wire::PullSection section{table, keys};
  for (uint32_t i = 0; i < kFrames; ++i) {
    for (uint64_t& key : frame_keys) key = LoadedTable::key(random.below(rows));
    if (i == 0) requests.first_keys = frame_keys;
    wire::encode_pull(i, {0, 0, 0, {&section, 1}, frame_keys}, requests.frames.emplace_back());
  }
  return requests;
}

PullLoad::PullLoad(uint32_t port, const Requests& requests, uint32_t connections,
                   uint32_t in_flight)
    : requests_(requests),
      in_flight_(in_flight),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      connections_(connections),
      waste_(kWasteBytes) {
  for (uint32_t i = 0; i < connections; ++i) {
    connections_[i].fd = connect_to_loopback(static_cast<uint16_t>(port));
    connections_[i].next = i;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = i;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, connections_[i].fd, &event);
  }
}

PullLoad::~PullLoad() {
  for (const Connection& connection : connections_) ::close(connection.fd);
  ::close(epoll_);
}

void PullLoad::check() {
  Connection& connection = connections_[0];
  connection.next = 0;
  ask(connection);
  connection.sent_ns.clear();
  std::vector<std::byte> bytes(wire::kHeaderBytes);
  receive_whole(connection.fd, bytes.data(), bytes.size());
  wire::FrameHeader header;
  check_ok(wire::decode_reply_header(bytes, header));
  bytes.resize(header.body_bytes);
  receive_whole(connection.fd, bytes.data(), bytes.size());
  wire::PullReplyPrefix prefix;
  check_ok(wire::decode_pull_reply_prefix(header, bytes, prefix));
  const std::byte* row = bytes.data() + prefix.rows_offset;
  if (bytes.size() != prefix.rows_offset + uint64_t{requests_.keys} * requests_.row_bytes)
    fail("a loaded key is missing");
  for (const uint64_t key : requests_.first_keys) {
    if (!LoadedTable::whole(key, row, requests_.row_bytes)) fail("a row is torn");
    row += requests_.row_bytes;
  }
}

void PullLoad::ask(Connection& connection) {
  const wire::Frame& frame = requests_.frames[connection.next++ % requests_.frames.size()];
  connection.sent_ns.push_back(base::monotonic_ns());
  if (::send(connection.fd, frame.data(), frame.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(frame.size())) {
    fail(std::string("send: ") + std::strerror(errno));
  }
}

uint32_t PullLoad::receive(Connection& connection, Load& load) {
  const ssize_t n = ::recv(connection.fd, waste_.data(), waste_.size(), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n <= 0) fail("the server closed a connection");
  uint32_t replies = 0;
  for (size_t at = 0; at < static_cast<size_t>(n);) {
    const size_t left = static_cast<size_t>(n) - at;
    if (connection.head_at < wire::kHeaderBytes) {
      const size_t take = std::min(left, wire::kHeaderBytes - connection.head_at);
      std::memcpy(connection.head + connection.head_at, waste_.data() + at, take);
      connection.head_at += take;
      at += take;
      if (connection.head_at < wire::kHeaderBytes) break;
      wire::FrameHeader header;
      check_ok(wire::decode_reply_header(connection.head, header));
      if (header.code != 0) fail("a pull was refused");
      connection.body_left = header.body_bytes;
      continue;
    }
    const uint64_t take = std::min<uint64_t>(left, connection.body_left);
    connection.body_left -= take;
    at += take;
    if (connection.body_left > 0) break;
    connection.head_at = 0;
    load.latencies_us.push_back(
        static_cast<double>(base::monotonic_ns() - connection.sent_ns.front()) / 1e3);
    connection.sent_ns.erase(connection.sent_ns.begin());
    load.rows += requests_.keys;
    ++replies;
  }
  return replies;
}

Load PullLoad::run(double seconds) {
  Load load;
  const uint64_t start = base::monotonic_ns();
  const uint64_t until = start + static_cast<uint64_t>(seconds * 1e9);
  uint64_t in_flight = 0;
  for (Connection& connection : connections_) {
    for (uint32_t i = 0; i < in_flight_; ++i, ++in_flight) ask(connection);
  }
  std::array<epoll_event, 256> ready;
  while (in_flight > 0) {
    const int n = ::epoll_wait(epoll_, ready.data(), ready.size(), 60'000);
    if (n == 0) fail("no reply for 60 s");
    for (int i = 0; i < n; ++i) {
      Connection& connection = connections_[ready[static_cast<size_t>(i)].data.u32];
      const uint32_t replies = receive(connection, load);
      in_flight -= replies;
      if (base::monotonic_ns() >= until) continue;
      for (uint32_t again = 0; again < replies; ++again, ++in_flight) ask(connection);
    }
  }
  load.seconds = static_cast<double>(base::monotonic_ns() - start) / 1e9;
  return load;
}

}  // namespace petps::bench
