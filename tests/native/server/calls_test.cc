// Requests from this process: each gets exactly one reply, even while the server stops.
#include "server/calls.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "server_fixture.h"

namespace petps::server {
namespace {

using base::Code;

class CallsTest : public ServerTest {
 protected:
  void start_with(uint32_t call_workers) {
    options_.call_workers = call_workers;
    start();
  }
  Calls& calls() { return server_->calls(); }
  wire::Frame pull(uint64_t key) { return pull_frame(key, {{users_.id(), {key}}}); }

  // Take replies until the map has `count` of them, by ticket.
  void take_until(std::map<uint64_t, Reply>& replies, size_t count) {
    while (replies.size() < count) {
      pollfd ready{calls().ready_descriptor(), POLLIN, 0};
      ASSERT_GT(::poll(&ready, 1, 60'000), 0) << "no reply arrived";
      for (CallReply& reply : calls().take()) {
        Reply decoded;
        ASSERT_TRUE(wire::decode_reply_header(reply.frame, decoded.header).ok());
        decoded.body.assign(reply.frame.begin() + wire::kHeaderBytes, reply.frame.end());
        ASSERT_TRUE(replies.emplace(reply.ticket, std::move(decoded)).second) << "a second reply";
      }
    }
  }
};

TEST_F(CallsTest, EachCallerGetsItsOwnReplies) {
  start_with(2);
  constexpr size_t kCallers = 4;
  constexpr uint64_t kEach = 500;
  std::mutex mutex;
  std::map<uint64_t, uint64_t> keys;  // by ticket
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (uint64_t i = 0; i < kEach; ++i) {
        const uint64_t key = (caller * 31 + i) % 100;
        const auto ticket = calls().submit(pull(key));
        ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
        const std::lock_guard lock(mutex);
        ASSERT_TRUE(keys.emplace(ticket.value(), key).second);
      }
    });
  }
  std::map<uint64_t, Reply> replies;
  take_until(replies, kCallers * kEach);
  for (std::thread& caller : callers) caller.join();
  for (const auto& [ticket, reply] : replies) {
    const uint64_t key = keys.at(ticket);
    EXPECT_EQ(reply.header.request_id, key);
    const Pulled pulled = decode_pulled(reply);
    ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
    EXPECT_EQ(pulled.rows[0], row_of(key, 1, 64));
  }
  EXPECT_EQ(server_->stats().pulls, kCallers * kEach);
}

TEST_F(CallsTest, AStopAnswersEveryCall) {
  start_with(1);
  std::atomic<bool> has_begun{false};
  size_t submitted = 0;
  std::thread caller([&] {
    while (true) {
      const auto ticket = calls().submit(pull(submitted % 100));
      if (!ticket.ok() && ticket.status().code() == Code::kUnavailable) break;
      // RESOURCE_EXHAUSTED: no thread takes replies during this loop, so the bound is reached.
      if (ticket.ok()) ++submitted;
      if (submitted > 10) has_begun.store(true);
    }
  });
  while (!has_begun.load()) std::this_thread::yield();
  EXPECT_TRUE(server_->stop().ok());
  caller.join();
  std::map<uint64_t, Reply> replies;
  take_until(replies, submitted);
  EXPECT_EQ(replies.size(), submitted);
  for (const auto& [ticket, reply] : replies) {
    const Code code = reply.error().code();
    EXPECT_TRUE(code == Code::kOk || code == Code::kUnavailable) << reply.error().to_string();
  }
  EXPECT_EQ(calls().submit(pull(1)).status().code(), Code::kUnavailable);
}

TEST_F(CallsTest, APullThatWaitsDoesNotDelayOthers) {
  start_with(1);
  ASSERT_TRUE(calls().submit(pull_frame(1, {{users_.id(), {3}}}, 0, 9, 60'000)).ok());
  while (server_->stats().waits_for_version == 0) std::this_thread::yield();
  const auto other = calls().submit(pull(3));
  ASSERT_TRUE(other.ok());
  std::map<uint64_t, Reply> replies;
  take_until(replies, 1);
  EXPECT_EQ(replies.begin()->first, other.value());
  EXPECT_TRUE(server_->stop().ok());
  take_until(replies, 2);
  EXPECT_EQ(replies.begin()->second.error().code(), Code::kStale);
}

TEST_F(CallsTest, WhatADoorHoldsCountsInTheMemory) {
  options_.memory_bytes = 4 * (wire::kHeaderBytes + uint64_t{options_.limits.body_bytes});
  start_with(1);
  const size_t limit = options_.memory_bytes;
  const uint64_t before = server_->stats().memory_used_bytes;
  ASSERT_TRUE(calls().hold(limit - before).ok());
  EXPECT_EQ(calls().hold(transport::kFreeBytes + 1).code(), Code::kResourceExhausted);
  EXPECT_TRUE(calls().hold(transport::kFreeBytes).ok()) << "little is never refused";
  EXPECT_EQ(server_->stats().memory_used_bytes, limit + transport::kFreeBytes);
  calls().release(limit - before + transport::kFreeBytes);
  EXPECT_EQ(server_->stats().memory_used_bytes, before);
}

TEST_F(CallsTest, CallsAreRefusedWithoutCallWorkers) {
  start_with(0);
  EXPECT_EQ(calls().submit(pull(1)).status().code(), Code::kFailedPrecondition);
}

TEST_F(CallsTest, AnInvalidFrameIsRefused) {
  start_with(1);
  wire::Frame frame = pull(1);
  frame[0] = std::byte{0};
  ASSERT_TRUE(calls().submit(std::move(frame)).ok());
  std::map<uint64_t, Reply> replies;
  take_until(replies, 1);
  EXPECT_EQ(replies.begin()->second.error().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace petps::server
