// The data path allocates nothing once its buffers have grown: this program counts every operator
// new.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "raw_client.h"
#include "server/server.h"

namespace {
std::atomic<uint64_t> allocations{0};
}  // namespace

// Not inlined, because the compiler would then warn that free() releases memory of operator new.
[[gnu::noinline]] void* operator new(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace petps::server {
namespace {

constexpr size_t kKeys = 500;
constexpr size_t kRowBytes = 512;

// A client that allocates nothing during a pull.
class QuietClient {
 public:
  QuietClient(uint16_t port, wire::Frame request)
      : fd_(::socket(AF_INET, SOCK_STREAM, 0)), request_(std::move(request)), reply_(1 << 20) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~QuietClient() { ::close(fd_); }

  // Send two pulls at once. Return false if a reply is not a success.
  bool pull_two() {
    for (int i = 0; i < 2; ++i) {
      if (::send(fd_, request_.data(), request_.size(), MSG_NOSIGNAL) < 0) return false;
    }
    return receive_one() && receive_one();
  }

 private:
  bool receive_one() {
    wire::FrameHeader header;
    if (::recv(fd_, &header, sizeof(header), MSG_WAITALL) != sizeof(header)) return false;
    if (header.code != 0 || header.body_bytes > reply_.size()) return false;
    return ::recv(fd_, reply_.data(), header.body_bytes, MSG_WAITALL) ==
           static_cast<ssize_t>(header.body_bytes);
  }

  int fd_;
  wire::Frame request_;
  std::vector<std::byte> reply_;
};

void expect_no_allocations(transport::GatherMode mode) {
  TestPool pool;
  table::Table& table = pool.add_table("rows", kRowBytes / 4, kRowBytes, 2000);
  fill(table, 1000, 1);
  ServerOptions options;
  options.port = 0;
  options.gather = mode;
  auto server = Server::start(*pool.tables, options);
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  std::vector<uint64_t> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i * 3;  // a third of them are missing
  QuietClient client(server.value()->port(),
                     pull_frame(1, {{table.id(), keys}, {table.id(), {1, 2}}}));
  // Let the buffers grow, also those for output that waits for a full socket.
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(client.pull_two());
  const uint64_t before = allocations.load();
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(client.pull_two());
  // Other threads allocate now and then, more often on a slow machine. A pull that allocates would
  // count 600 times.
  EXPECT_LT(allocations.load() - before, 300u);
}

TEST(ServerAllocations, PullsAllocateNothingInCopyMode) {
  expect_no_allocations(transport::GatherMode::kCopy);
}

TEST(ServerAllocations, PullsAllocateNothingInSendmsgMode) {
  expect_no_allocations(transport::GatherMode::kSendmsg);
}

TEST(ServerAllocations, PullsAllocateNothingInZerocopyMode) {
  // In this mode a socket counts whole pages, so it is full more often and more output waits.
  expect_no_allocations(transport::GatherMode::kZerocopy);
}

}  // namespace
}  // namespace petps::server
