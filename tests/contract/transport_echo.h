// A small server for the transport suites.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "epoch/epoch.h"
#include "transport/transport.h"
#include "transport_client.h"

namespace petps::transport {

inline constexpr uint64_t kMs = 1'000'000;

// Answers every frame with a frame of the same number, whose content is gathered from rows.
class Echo {
 public:
  Echo(Transport& transport, size_t worker, epoch::Domain& domain, size_t row_bytes = 512)
      : endpoint_(transport.endpoint(worker)),
        domain_(domain),
        reader_(domain.lease()),
        row_bytes_(row_bytes),
        rows_(row_memory(kRows * row_bytes)) {
    for (size_t i = 0; i < rows_.size(); ++i)
      rows_[i] = static_cast<std::byte>(i * 7 + i / row_bytes_);
  }
  ~Echo() {
    stop();
    domain_.release(reader_);
  }

  // Rows in a reply to frame `number`: 0 to kRows - 1.
  static constexpr size_t kRows = 1024;
  std::function<size_t(uint32_t number)> rows_of = [](uint32_t number) { return number % 7; };
  std::function<void(ConnectionId)> on_frame = [](ConnectionId) {};

  void start() {
    thread_ = std::thread([this] {
      while (!stopping_) {
        step(50);
        pending = endpoint_.pending_posts();
      }
    });
  }
  void stop() {
    stopping_ = true;
    if (!thread_.joinable()) return;
    endpoint_.wake();
    thread_.join();
  }

  void step(int timeout_ms) {
    for (const Event& event : endpoint_.poll(timeout_ms)) {
      switch (event.kind) {
        case Event::Kind::kOpened:
          ++opened;
          break;
        case Event::Kind::kClosed:
          keep_reason(event.reason);
          ++closed;  // after the reason, so that a test that sees the count finds the reason
          break;
        case Event::Kind::kOverdue:
          if (!event.reason.ok()) {  // already closed
            keep_reason(event.reason);
          } else {
            endpoint_.close(event.connection,
                            base::Status(base::Code::kDeadlineExceeded, "rows held too long"));
          }
          ++overdue;
          break;
        case Event::Kind::kFrames:
          answer_frames(event.connection);
          break;
      }
    }
  }

  std::vector<std::byte> expected_reply(uint32_t number) const {
    const size_t n = rows_of(number);
    std::vector<std::byte> reply(sizeof(TestHeader) + n * row_bytes_);
    const TestHeader header{static_cast<uint32_t>(reply.size()), number};
    std::memcpy(reply.data(), &header, sizeof(header));
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(reply.data() + sizeof(header) + i * row_bytes_, row(number, i), row_bytes_);
    }
    return reply;
  }
  // Send a frame and return whether its reply is right. The Echo's thread must run.
  bool answers(Client& client, uint32_t number) const {
    return client.send(test_frame(number, 8)) && client.receive_frame() == expected_reply(number);
  }
  std::vector<std::string> reasons() {
    const std::lock_guard lock(mutex_);
    return reasons_;
  }
  bool wait_until(const std::function<bool()>& condition, int timeout_ms = 60'000) {
    const uint64_t until = base::monotonic_ns() + static_cast<uint64_t>(timeout_ms) * kMs;
    while (!condition()) {
      if (base::monotonic_ns() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  std::atomic<size_t> pending{0};  // posts, after the last step of its thread
  std::atomic<int> opened{0};
  std::atomic<int> closed{0};
  std::atomic<int> overdue{0};
  std::atomic<int> frames{0};
  std::atomic<int> no_pin{0};
  epoch::Reader& reader() { return *reader_; }
  Endpoint& endpoint() { return endpoint_; }
  std::span<std::byte> rows() { return rows_; }

 private:
  const std::byte* row(uint32_t number, size_t i) const {
    return rows_.data() + (number * 13 + i * 3) % kRows * row_bytes_;
  }

  void keep_reason(const base::Status& reason) {
    const std::lock_guard lock(mutex_);
    reasons_.push_back(reason.to_string());
  }

  void answer_frames(ConnectionId connection) {
    std::span<const std::byte> frame;
    while (endpoint_.peek(connection, frame)) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(frame.data()) % 8, 0u);
      const TestHeader header = header_of(frame);
      EXPECT_EQ(test_frame(header.number, frame.size() - sizeof(TestHeader)),
                std::vector<std::byte>(frame.begin(), frame.end()));
      epoch::Pin pin = reader_->pin();
      if (!pin) {
        ++no_pin;
        return;
      }
      ++frames;
      on_frame(connection);
      list_.clear();
      const size_t n = rows_of(header.number);
      const std::span<std::byte> head = list_.header(sizeof(TestHeader));
      for (size_t i = 0; i < n; ++i) list_.add(row(header.number, i), row_bytes_);
      const TestHeader out{static_cast<uint32_t>(list_.bytes()), header.number};
      std::memcpy(head.data(), &out, sizeof(out));
      endpoint_.post(connection, std::move(list_), std::move(pin));
      endpoint_.consume(connection);
    }
    endpoint_.flush();
  }

  Endpoint& endpoint_;
  epoch::Domain& domain_;
  epoch::Reader* reader_;
  const size_t row_bytes_;
  const std::span<std::byte> rows_;
  gather::GatherList list_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::vector<std::string> reasons_;
  std::thread thread_;
};

}  // namespace petps::transport
