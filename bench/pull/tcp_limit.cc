#include "bench/pull/tcp_limit.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "bench/common/loaded_table.h"
#include "bench/common/memory.h"
#include "bench/pull/loopback.h"

namespace petps::bench {
namespace {

constexpr uint32_t kRequestRowsMax = 4096;
constexpr size_t kLine = 64;

// Return false if the peer is gone.
bool send_whole(int socket, const std::byte* bytes, size_t n) {
  while (n > 0) {
    const ssize_t sent = send(socket, bytes, n, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes += sent;
    n -= static_cast<size_t>(sent);
  }
  return true;
}

class Session {
 public:
  Session(int socket, const std::byte* rows, uint32_t row_bytes)
      : socket_(socket),
        rows_(rows),
        row_bytes_(row_bytes),
        inbox_(2 * (kRequestRowsMax + 1)),
        stage_(kLine + size_t{kRequestRowsMax} * row_bytes) {}
  ~Session() { close(socket_); }

  void run() {
    uint32_t setting[2];
    if (recv(socket_, setting, sizeof setting, MSG_WAITALL) != sizeof setting) return;
    send_rows_ = setting[0];
    ahead_ = setting[1];
    size_t have = 0;  // bytes in the inbox
    auto* inbox = reinterpret_cast<std::byte*>(inbox_.data());
    for (;;) {
      const ssize_t received = recv(socket_, inbox + have, inbox_.size() * 4 - have, 0);
      if (received <= 0) return;
      have += static_cast<size_t>(received);
      size_t at = 0;
      while (have - at >= 4) {
        const uint32_t* request = inbox_.data() + at / 4;
        if (request[0] > kRequestRowsMax * 4) fail("a request of the limit has too many rows");
        if (have - at < size_t{4} + request[0]) break;
        if (!answer(request + 1, request[0] / 4)) return;
        at += size_t{4} + request[0];
      }
      std::memmove(inbox, inbox + at, have - at);
      have -= at;
    }
  }

 private:
  bool answer(const uint32_t* numbers, uint32_t n) {
    std::byte* out = stage_.at() + kLine;  // rows begin on a cache line, behind the length
    const uint32_t bytes = n * row_bytes_;
    std::memcpy(out - 4, &bytes, 4);
    const std::byte* unsent = out - 4;
    for (uint32_t i = 0; i < std::min(ahead_, n); ++i) prefetch(numbers[i]);
    for (uint32_t i = 0; i < n; ++i) {
      if (i + ahead_ < n) prefetch(numbers[i + ahead_]);
      std::memcpy(out, rows_ + size_t{numbers[i]} * row_bytes_, row_bytes_);
      out += row_bytes_;
      if ((i + 1) % send_rows_ != 0 && i + 1 != n) continue;
      if (!send_whole(socket_, unsent, static_cast<size_t>(out - unsent))) return false;
      unsent = out;
    }
    return true;
  }

  void prefetch(uint32_t number) const {
    const std::byte* row = rows_ + size_t{number} * row_bytes_;
    for (uint32_t at = 0; at < row_bytes_; at += kLine) __builtin_prefetch(row + at);
  }

  int socket_;
  const std::byte* rows_;
  uint32_t row_bytes_;
  uint32_t send_rows_ = 1;
  uint32_t ahead_ = 0;
  std::vector<uint32_t> inbox_;
  Memory stage_;
};

}  // namespace

int listen_on_loopback(uint16_t* port) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 16) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    fail("the limit cannot listen on 127.0.0.1");
  }
  *port = ntohs(address.sin_port);
  return listener;
}

void serve_rows(int listener, const std::byte* rows, uint32_t row_bytes) {
  for (;;) {
    const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) fail("the limit cannot accept");
    set_no_delay(socket);
    std::thread([=] { Session(socket, rows, row_bytes).run(); }).detach();
  }
}

LimitClient::LimitClient(uint16_t port, const LimitSetting& setting, uint32_t request_rows,
                         uint32_t row_bytes)
    : socket_(connect_to_loopback(port)),
      request_rows_(request_rows),
      reply_bytes_(request_rows * row_bytes),
      wait_all_(setting.wait_all),
      request_(request_rows + 1) {
  if (request_rows > kRequestRowsMax) fail("requests of more than 4096 keys are not compared");
  const uint32_t head[2] = {setting.send_rows, setting.ahead};
  if (!send_whole(socket_, reinterpret_cast<const std::byte*>(head), sizeof head)) {
    fail("the limit's server is gone");
  }
  request_[0] = request_rows * 4;
}

LimitClient::~LimitClient() { close(socket_); }

void LimitClient::ask(const uint32_t* numbers) {
  std::memcpy(request_.data() + 1, numbers, size_t{request_rows_} * 4);
  if (!send_whole(socket_, reinterpret_cast<const std::byte*>(request_.data()),
                  request_.size() * 4)) {
    fail("the limit's server is gone");
  }
}

void LimitClient::take(std::byte* out) {
  uint32_t bytes = 0;
  size_t have = 0;
  const size_t wanted = 4 + size_t{reply_bytes_};
  while (have < wanted) {
    const size_t rows_have = have < 4 ? 0 : have - 4;
    iovec parts[2] = {{reinterpret_cast<std::byte*>(&bytes) + std::min<size_t>(have, 4),
                       4 - std::min<size_t>(have, 4)},
                      {out + rows_have, reply_bytes_ - rows_have}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t received = recvmsg(socket_, &message, wait_all_ ? MSG_WAITALL : 0);
    if (received <= 0) fail("the limit's server is gone");
    have += static_cast<size_t>(received);
  }
  if (bytes != reply_bytes_) fail("a reply of the limit has the wrong length");
}

}  // namespace petps::bench
