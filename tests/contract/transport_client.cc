#include "transport_client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "rdma_peer.h"
#include "tls_client.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

class TcpClient final : public Client {
 public:
  TcpClient(uint16_t port, uint32_t from) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    if (from != 0) {
      address.sin_addr.s_addr = htonl(from);
      EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    }
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
        << strerror(errno);
    const timeval limit{5, 0};  // so that a server that does not read cannot block the test
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  }
  ~TcpClient() override { close(); }

  bool send(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return true;
  }
  size_t receive(std::span<std::byte> out, int timeout_ms) override {
    pollfd waiting{fd_, POLLIN, 0};
    if (::poll(&waiting, 1, timeout_ms) <= 0) return 0;
    const ssize_t n = ::recv(fd_, out.data(), out.size(), 0);
    return n > 0 ? static_cast<size_t>(n) : 0;
  }
  void end_sending() override { ::shutdown(fd_, SHUT_WR); }
  void close() override {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

class LoopbackPeer final : public Client {
 public:
  explicit LoopbackPeer(std::unique_ptr<LoopbackClient> client) : client_(std::move(client)) {}
  bool send(std::span<const std::byte> bytes) override { return client_->send(bytes); }
  size_t receive(std::span<std::byte> out, int timeout_ms) override {
    return client_->receive(out, timeout_ms);
  }
  void end_sending() override { client_->end_sending(); }
  void close() override { client_->close(); }

 private:
  std::unique_ptr<LoopbackClient> client_;
};

Status test_frame_length(std::span<const std::byte> bytes, size_t& length) {
  const TestHeader header = header_of(bytes);
  if (header.length == kBadLength || header.length % 8 != 0) {
    return Status(Code::kInvalidArgument, "broken header");
  }
  length = header.length;
  return {};
}

void encode_test_error(const Status& reason, std::vector<std::byte>& frame) {
  const std::string text = reason.to_string();
  frame = test_frame(kErrorNumber, (text.size() + 7) / 8 * 8);
  std::memset(frame.data() + sizeof(TestHeader), 0, frame.size() - sizeof(TestHeader));
  std::memcpy(frame.data() + sizeof(TestHeader), text.data(), text.size());
}

Backend tcp_backend(std::string name, GatherMode mode, bool has_tls = false) {
  const auto make = [mode, has_tls](const Limits& limits, size_t endpoints, const Admit& admit) {
    TcpOptions options;
    if (has_tls) options.tls = test_tls().server;
    options.endpoints = endpoints;
    options.gather = std::make_shared<const GatherChoice>(mode);
    options.zerocopy_bytes = 1;  // so that small lists test it too
    options.handshakes.handshake_ms = 600'000;
    options.limits = limits;
    options.rules = test_rules();
    options.admit = admit;
    auto tcp = make_tcp(options);
    EXPECT_TRUE(tcp.ok()) << tcp.status().to_string();
    return std::move(tcp.value());
  };
  const auto connect = [has_tls](Transport& transport) -> std::unique_ptr<Client> {
    if (has_tls) return connect_tls(connect_plain(transport.port()));
    return connect_plain(transport.port());
  };
  return {std::move(name), make, connect};
}

}  // namespace

std::vector<std::byte> test_frame(uint32_t number, size_t content_bytes) {
  std::vector<std::byte> frame(sizeof(TestHeader) + content_bytes);
  const TestHeader header{static_cast<uint32_t>(frame.size()), number};
  std::memcpy(frame.data(), &header, sizeof(header));
  for (size_t i = sizeof(header); i < frame.size(); ++i)
    frame[i] = static_cast<std::byte>(number * 31 + i);
  return frame;
}

TestHeader header_of(std::span<const std::byte> frame) {
  TestHeader header;
  if (frame.size() >= sizeof(header)) std::memcpy(&header, frame.data(), sizeof(header));
  return header;
}

FrameRules test_rules() {
  return {.header_bytes = sizeof(TestHeader),
          .frame_bytes_max = kTestFrameBytesMax,
          .frame_length = test_frame_length,
          .encode_error = encode_test_error};
}

bool Client::receive_up_to(size_t n, uint64_t until_ns) {
  while (frame_.size() < n) {
    const uint64_t now = base::monotonic_ns();
    if (now >= until_ns) return false;
    const size_t had = frame_.size();
    frame_.resize(n);
    const size_t part =
        receive(std::span(frame_).subspan(had), static_cast<int>((until_ns - now) / 1'000'000) + 1);
    frame_.resize(had + part);
    if (part == 0) return false;
  }
  return true;
}

std::vector<std::byte> Client::receive_frame(int timeout_ms) {
  const uint64_t until = base::monotonic_ns() + static_cast<uint64_t>(timeout_ms) * 1'000'000;
  if (!receive_up_to(sizeof(TestHeader), until)) return {};
  const TestHeader header = header_of(frame_);
  if (header.length < sizeof(TestHeader) || !receive_up_to(header.length, until)) return {};
  return std::exchange(frame_, {});
}

std::string Client::read_to_end(int timeout_ms) {
  std::string message;
  while (true) {
    const std::vector<std::byte> frame = receive_frame(timeout_ms);
    if (frame.empty()) return message;
    if (header_of(frame).number != kErrorNumber) continue;
    message.assign(reinterpret_cast<const char*>(frame.data()) + sizeof(TestHeader),
                   frame.size() - sizeof(TestHeader));
    message.erase(message.find_last_not_of('\0') + 1);
  }
}

std::unique_ptr<Client> connect_plain(uint16_t port, uint32_t from) {
  return std::make_unique<TcpClient>(port, from);
}

std::span<std::byte> row_memory() {
  static std::vector<std::byte> memory(kRowMemoryBytes);
  return memory;
}

std::span<std::byte> row_memory(size_t bytes) {
  static size_t used = 0;
  if (used + bytes > kRowMemoryBytes) used = 0;
  used += bytes;
  return row_memory().subspan(used - bytes, bytes);
}

std::vector<Backend> backends() {
  const auto make_loopback = [](const Limits& limits, size_t endpoints, const Admit& admit) {
    return std::make_unique<LoopbackTransport>(
        LoopbackOptions{endpoints, limits, test_rules(), admit});
  };
  const auto connect_loopback = [](Transport& transport) {
    return std::make_unique<LoopbackPeer>(static_cast<LoopbackTransport&>(transport).connect());
  };
  std::vector<Backend> all = {
      {"loopback", make_loopback, connect_loopback},
      tcp_backend("tcp_copy", GatherMode::kCopy),
      tcp_backend("tcp_sendmsg", GatherMode::kSendmsg),
      tcp_backend("tcp_zerocopy", GatherMode::kZerocopy),
      tcp_backend("tcp_auto", GatherMode::kAuto),
      tcp_backend("tcp_tls", GatherMode::kCopy, true),
      // Where the kernel has TLS (tests/lab), it encrypts, and rows are gathered.
      tcp_backend("tcp_kernel_tls", GatherMode::kSendmsg, true),
  };
  for (Backend& rdma : rdma_backends()) all.push_back(std::move(rdma));
  return all;
}

Backend backend_named(const std::string& name) {
  const std::vector<Backend> all = backends();
  return *std::find_if(all.begin(), all.end(), [&](const Backend& b) { return b.name == name; });
}

}  // namespace petps::transport
