// A push whose deadline passed, and whose bytes reach the server after those of a newer push.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <set>
#include <thread>

#include "fixtures.h"

namespace petps::client {
namespace {

using testing::RealServer;

constexpr uint32_t kDim = 4;
constexpr std::chrono::minutes kPatience{1};

// A network between one client and one server. It can hold the client's bytes on its current
// connections, and deliver them later, even if the client has closed the connections by then.
class Relay {
 public:
  explicit Relay(uint16_t server) : server_(server) {
    listener_ = testing::listen_anywhere(&port_);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~Relay() {
    deliver();
    shutdown(listener_, SHUT_RDWR);
    accepting_.join();
    {
      const std::lock_guard lock(mutex_);
      for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
    }
    for (std::thread& thread : threads_) thread.join();
    for (const int socket : sockets_) close(socket);
    close(listener_);
  }
  std::string url() const { return "petps://127.0.0.1:" + std::to_string(port_) + "/ranking"; }

  void hold() {
    const std::lock_guard lock(mutex_);
    held_ = connections_;
  }
  void deliver() {
    const std::lock_guard lock(mutex_);
    held_ = 0;
    changed_.notify_all();
  }
  // Return of how many connections the relay has held bytes.
  size_t count_held() {
    const std::lock_guard lock(mutex_);
    return was_held_.size();
  }
  // Wait until the server has sent `replies` replies over connections that were held.
  bool await_late_replies(int replies) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return late_replies_ >= replies; });
  }

 private:
  void accept_all() {
    for (int client; (client = accept(listener_, nullptr, nullptr)) >= 0;) {
      const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const sockaddr_in address = testing::loopback(server_);
      if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
        ADD_FAILURE() << "the server refuses the connection";
        close(server);
        close(client);
        continue;
      }
      const std::lock_guard lock(mutex_);
      const int number = connections_++;
      sockets_.insert(sockets_.end(), {client, server});
      threads_.emplace_back([=, this] { forward(client, server, number, /*is_reply=*/false); });
      threads_.emplace_back([=, this] { forward(server, client, number, /*is_reply=*/true); });
    }
  }

  void forward(int from, int to, int number, bool is_reply) {
    std::byte bytes[4096];
    bool was_held = false;
    for (ssize_t n; (n = recv(from, bytes, sizeof bytes, 0)) > 0;) {
      if (is_reply) {
        const std::lock_guard lock(mutex_);
        if (was_held_.contains(number)) late_replies_ += 1;
        changed_.notify_all();
      } else {
        std::unique_lock lock(mutex_);
        was_held = was_held || number < held_;
        if (was_held) was_held_.insert(number);
        changed_.notify_all();
        changed_.wait(lock, [&] { return number >= held_; });
      }
      static_cast<void>(send(to, bytes, static_cast<size_t>(n), MSG_NOSIGNAL));
    }
    // The server must answer the late bytes before it sees that the client is gone.
    if (is_reply || !was_held) shutdown(to, SHUT_WR);
  }

  const uint16_t server_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::thread accepting_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::list<std::thread> threads_;
  std::vector<int> sockets_;
  int connections_ = 0;
  int held_ = 0;  // connections with lower numbers are held
  std::set<int> was_held_;
  int late_replies_ = 0;
};

class LatePush : public ::testing::Test {
 protected:
  void SetUp() override {
    server_.add_table("users", codec::Dtype::kF32, kDim, 100, 10);
    server_.start();
    relay_ = std::make_unique<Relay>(server_.server().port());
    Options options;
    options.deadline_ms = 60'000;
    options.catalogue_ms = 0;  // only the test's calls use the connections
    options.hot_sample_every = 0;
    client_ = testing::connect_to(relay_->url(), options);
  }
  void TearDown() override {
    relay_->deliver();
    if (older_.joinable()) older_.join();
  }
  base::Status push(uint64_t key, uint64_t version, uint32_t deadline_ms = 60'000) {
    PushOptions options;
    options.deadline_ms = deadline_ms;
    const std::vector<uint64_t> keys = {key};
    return client_->push("users", keys, testing::row_of(key, kDim, version), kDim, options)
        .status();
  }
  // Push this version of key 3 with a short deadline, until the relay holds a push that the client
  // has given up. If the machine stalls, a push uses another connection and arrives, because one
  // that was idle for a second takes none; or the deadline passes before the push is sent.
  void give_up_push(uint64_t version) {
    const size_t held = relay_->count_held();
    bool is_given_up = false;
    while (!is_given_up || relay_->count_held() == held) {
      relay_->hold();
      const base::Status status = push(3, version, 300);
      is_given_up = is_given_up || !status.ok();
      ASSERT_TRUE(status.ok() || status.code() == base::Code::kDeadlineExceeded)
          << status.to_string();
    }
  }
  // Push this version of key 7 on a thread, until the relay holds the push.
  void start_older_push(uint64_t version) {
    while (relay_->count_held() == 0) {
      if (older_.joinable()) older_.join();
      is_older_over_ = false;
      relay_->hold();
      older_ = std::thread([this, version] {
        older_status_ = push(7, version);
        is_older_over_ = true;
      });
      while (relay_->count_held() == 0 && !is_older_over_) std::this_thread::yield();
    }
  }
  std::vector<float> row(uint64_t key) {
    const std::vector<uint64_t> keys = {key};
    std::vector<float> row(kDim);
    EXPECT_TRUE(client_->pull("users", keys, row).ok());
    return row;
  }

  RealServer server_;
  std::unique_ptr<Relay> relay_;
  std::unique_ptr<Client> client_;
  std::thread older_;
  base::Status older_status_;
  std::atomic<bool> is_older_over_{false};
};

TEST_F(LatePush, DoesNotOverwriteANewerPushOfTheSameClient) {
  ASSERT_TRUE(push(3, 1).ok());
  give_up_push(2);
  ASSERT_TRUE(push(3, 3).ok());
  relay_->deliver();
  ASSERT_TRUE(relay_->await_late_replies(1)) << "the server has read the late push";
  EXPECT_EQ(row(3), testing::row_of(3, kDim, 3));
}

TEST_F(LatePush, DoesNotOverwriteANewerPushWhileAnOlderCallIsInFlight) {
  ASSERT_TRUE(push(3, 1).ok());
  start_older_push(5);
  EXPECT_TRUE(push(3, 1).ok());
  give_up_push(2);
  EXPECT_TRUE(push(3, 3).ok());
  relay_->deliver();
  older_.join();
  EXPECT_TRUE(older_status_.ok()) << older_status_.to_string();
  ASSERT_TRUE(relay_->await_late_replies(2));
  EXPECT_EQ(row(3), testing::row_of(3, kDim, 3));
  EXPECT_EQ(row(7), testing::row_of(7, kDim, 5));
}

}  // namespace
}  // namespace petps::client
