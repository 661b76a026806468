#include "drip.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "fixtures.h"

namespace petps::client::testing {

namespace {

constexpr int kLookMs = 1;  // the thread looks this often whether the set of connections changed

}  // namespace

Drip::Drip() {
  listener_ = listen_anywhere(&port_);
  thread_ = std::thread([this] { run(); });
}

Drip::~Drip() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  thread_.join();
  for (Pair& pair : pairs_) end(pair);
  close(listener_);
}

void Drip::lead_to(const std::string& server_address) {
  const std::lock_guard lock(mutex_);
  server_port_ = static_cast<uint16_t>(std::stoul(server_address.substr(sizeof("127.0.0.1"))));
}

void Drip::hold(bool holds) {
  const std::lock_guard lock(mutex_);
  holds_ = holds;
  if (holds) return;
  for (Pair& pair : pairs_) {
    send_all(pair.client, pair.held);
    pair.held.clear();
  }
}

bool Drip::step(size_t most, std::mt19937_64& random) {
  const std::lock_guard lock(mutex_);
  for (Pair& pair : pairs_) {
    if (pair.held.empty()) continue;
    const size_t n = std::min<size_t>(1 + random() % most, pair.held.size());
    send_all(pair.client, std::span(pair.held).first(n));
    pair.held.erase(pair.held.begin(), pair.held.begin() + static_cast<ptrdiff_t>(n));
    return true;
  }
  return false;
}

void Drip::close_all() {
  const std::lock_guard lock(mutex_);
  for (Pair& pair : pairs_) {
    end(pair);
    pair.is_over = true;
  }
  pairs_.clear();
}

void Drip::end(Pair& pair) {
  close(pair.client);
  close(pair.server);
}

void Drip::open_pair() {
  Pair pair;
  pair.client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  pair.server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback(server_port_);
  const int failed =
      connect(pair.server, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  if (pair.client < 0 || failed != 0) return end(pair);
  const int on = 1;
  setsockopt(pair.client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(pair.server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  pairs_.push_back(std::move(pair));
}

void Drip::forward(Pair& pair, bool is_from_server) {
  std::array<std::byte, 65'536> bytes;
  const ssize_t n =
      recv(is_from_server ? pair.server : pair.client, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (n < 0) return;
  if (n == 0) {
    end(pair);
    pair.is_over = true;
    return;
  }
  const auto received = std::span(bytes).first(static_cast<size_t>(n));
  if (!is_from_server) {
    send_all(pair.server, received);
  } else if (holds_) {
    pair.held.insert(pair.held.end(), received.begin(), received.end());
  } else {
    send_all(pair.client, received);
  }
}

void Drip::run() {
  for (;;) {
    std::vector<pollfd> entries;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      entries.push_back({listener_, POLLIN, 0});
      for (const Pair& pair : pairs_) {
        entries.push_back({pair.client, POLLIN, 0});
        entries.push_back({pair.server, POLLIN, 0});
      }
    }
    poll(entries.data(), entries.size(), kLookMs);
    const std::lock_guard lock(mutex_);
    for (Pair& pair : pairs_) {
      for (const bool is_from_server : {false, true}) {
        if (!pair.is_over) forward(pair, is_from_server);
      }
    }
    std::erase_if(pairs_, [](const Pair& pair) { return pair.is_over; });
    if (entries[0].revents != 0) open_pair();
  }
}

}  // namespace petps::client::testing
