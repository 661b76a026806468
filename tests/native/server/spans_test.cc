// Spans of sampled pulls: which pulls have one, what it says, and what happens to too many.
#include "server/spans.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <thread>

#include "base/clock.h"
#include "server_fixture.h"

namespace petps::server {
namespace {

using base::Code;

wire::TraceContext context_of(uint8_t number) {
  wire::TraceContext trace;
  trace.trace_id[0] = number;
  trace.span_id[7] = number;
  trace.flags = wire::kTraceSampled;
  return trace;
}

class SpansTest : public ServerTest {
 protected:
  SpansTest() { options_.trace = true; }

  wire::Frame traced_pull(const wire::TraceContext& trace, const std::vector<uint64_t>& keys,
                          uint64_t min_version = 0, uint32_t wait_ms = 0) {
    const std::vector<wire::PullSection> sections = {
        {users_.id(), static_cast<uint32_t>(keys.size())}};
    wire::Frame frame;
    wire::encode_pull(1, {min_version, 0, wait_ms, sections, keys, trace}, frame);
    return frame;
  }
  // Take spans until there are `count`.
  std::vector<Span> take(size_t count) {
    std::vector<Span> spans;
    EXPECT_TRUE(waits_until([&] {
      server_->take_spans(1000, spans);
      return spans.size() >= count;
    }));
    EXPECT_EQ(spans.size(), count);
    return spans;
  }
  uint64_t dropped() {
    std::vector<Span> spans;
    return server_->take_spans(0, spans);
  }
};

TEST_F(SpansTest, ASampledPullHasASpanAndAnotherHasNone) {
  start();
  auto client = connect();
  const uint64_t before_ns = base::wall_ns();
  EXPECT_TRUE(decode_pulled(client->call(pull_frame(1, {{users_.id(), {1}}}))).status.ok());
  EXPECT_TRUE(decode_pulled(client->call(traced_pull(context_of(9), {1, 2, 5000}))).status.ok());
  const std::vector<Span> spans = take(1);
  ASSERT_EQ(spans.size(), 1u);
  const Span& span = spans[0];
  EXPECT_EQ(span.trace_id, context_of(9).trace_id);
  EXPECT_EQ(span.parent_id, context_of(9).span_id);
  EXPECT_NE(span.span_id, span.parent_id);
  EXPECT_EQ(span.keys, 3u);
  EXPECT_EQ(span.rows_found, 2u);
  EXPECT_EQ(span.sections, 1u);
  EXPECT_EQ(span.tables[0], users_.id());
  EXPECT_EQ(span.instance, pool_.instance);
  EXPECT_EQ(span.code, Code::kOk);
  EXPECT_GE(span.start_ns, before_ns - 1'000'000'000);
  EXPECT_LE(span.start_ns + span.duration_ns, base::wall_ns() + 1'000'000'000);
  EXPECT_GT(span.lookup_ns, 0u);
  EXPECT_EQ(span.waited_ns, 0u);
  EXPECT_LE(span.queued_ns + span.waited_ns + span.lookup_ns + span.send_ns, span.duration_ns);
}

TEST_F(SpansTest, TheHelloSaysWhetherSpansAreRecorded) {
  for (const bool trace : {true, false}) {
    options_.trace = trace;
    start();
    wire::Frame frame;
    wire::encode_hello(1, {1, 1, "test"}, frame);
    const Reply reply = connect()->call(frame);
    wire::HelloReply hello;
    ASSERT_TRUE(wire::decode_hello_reply(reply.header, reply.body, hello).ok());
    EXPECT_EQ((hello.features & wire::kFeatureTrace) != 0, trace);
    server_.reset();
  }
}

TEST_F(SpansTest, AServerThatRecordsNoneServesATracedPull) {
  options_.trace = false;
  start();
  EXPECT_TRUE(decode_pulled(connect()->call(traced_pull(context_of(9), {1}))).status.ok());
  std::vector<Span> spans;
  EXPECT_EQ(server_->take_spans(10, spans), 0u);
  EXPECT_TRUE(spans.empty());
}

TEST_F(SpansTest, GarbageOfAClientIsIgnored) {
  start();
  auto client = connect();
  wire::Frame frame = traced_pull(context_of(9), {1});
  const size_t context_at = frame.size() - sizeof(wire::TraceContext);
  std::fill(frame.begin() + static_cast<ptrdiff_t>(context_at), frame.end(), std::byte{0});
  EXPECT_TRUE(decode_pulled(client->call(frame)).status.ok());
  std::fill(frame.begin() + static_cast<ptrdiff_t>(context_at), frame.end(), std::byte{0xfe});
  EXPECT_TRUE(decode_pulled(client->call(frame)).status.ok());  // not sampled
  std::fill(frame.begin() + static_cast<ptrdiff_t>(context_at), frame.end(), std::byte{0xff});
  EXPECT_TRUE(decode_pulled(client->call(frame)).status.ok());  // sampled, whatever the ids mean
  const std::vector<Span> spans = take(1);
  EXPECT_EQ(spans[0].trace_id[3], 0xff);
}

TEST_F(SpansTest, ARefusedPullHasASpanWithItsCode) {
  start();
  auto client = connect();
  expect_error(client->call(traced_pull(context_of(9), {1}, /*min_version=*/7)).error(),
               Code::kStale, "version 7");
  const std::vector<Span> spans = take(1);
  EXPECT_EQ(spans[0].code, Code::kStale);
  EXPECT_EQ(spans[0].version, 0u);
  EXPECT_EQ(spans[0].parent_id, context_of(9).span_id);
}

TEST_F(SpansTest, APullThatItsCallerMayNotMakeHasNoSpan) {
  options_.gate = std::make_shared<access::Gate>(access::Mode::kGrants);
  access::Grant grant;
  grant.name = "elsewhere";
  grant.has_token = true;
  grant.token = access::hash_token("e");
  grant.roles = access::kAllRoles;
  grant.models = {"other"};
  options_.gate->replace({grant});
  start();
  auto client = connect();
  wire::Frame hello;
  wire::encode_hello(1, {1, 1, "test", "e"}, hello);
  ASSERT_TRUE(client->call(hello).error().ok());
  EXPECT_EQ(client->call(traced_pull(context_of(9), {1})).error().code(), Code::kPermissionDenied);
  EXPECT_TRUE(client->call(hello).error().ok());  // what the pull left behind is flushed
  std::vector<Span> spans;
  server_->take_spans(1000, spans);
  EXPECT_TRUE(spans.empty());
}

TEST_F(SpansTest, ASpanCoversTheWaitForAVersion) {
  start();
  auto client = connect();
  client->send(traced_pull(context_of(9), {1}, /*min_version=*/2, 60'000));
  // The parked pull does not keep the spans of other pulls back, nor lends them its span.
  ASSERT_TRUE(waits_until([&] { return server_->stats().waits_for_version > 0; }));
  wire::Frame hello;
  wire::encode_hello(1, {1, 1, "test"}, hello);
  EXPECT_TRUE(connect()->call(hello).error().ok());
  EXPECT_TRUE(decode_pulled(connect()->call(traced_pull(context_of(8), {1}))).status.ok());
  EXPECT_EQ(take(1)[0].trace_id, context_of(8).trace_id);
  pool_.record_version(2);
  EXPECT_EQ(decode_pulled(client->receive()).applied_version, 2u);
  const Span span = take(1)[0];
  EXPECT_EQ(span.trace_id, context_of(9).trace_id);
  EXPECT_GT(span.waited_ns, 0u);
  EXPECT_GE(span.duration_ns, span.waited_ns);
  EXPECT_EQ(span.version, 2u);
  // The next pull of the connection has not waited.
  EXPECT_TRUE(decode_pulled(client->call(traced_pull(context_of(7), {1}))).status.ok());
  EXPECT_EQ(take(1)[0].waited_ns, 0u);
}

TEST_F(SpansTest, AServerThatSamplesBeginsTraces) {
  options_.trace_sample = 1;
  start();
  auto client = connect();
  constexpr size_t kPulls = 20;
  for (uint64_t i = 0; i < kPulls; ++i)
    EXPECT_TRUE(decode_pulled(client->call(pull_frame(i, {{users_.id(), {1}}}))).status.ok());
  EXPECT_TRUE(decode_pulled(client->call(traced_pull(context_of(9), {1}))).status.ok());
  std::set<std::array<uint8_t, 16>> traces;
  std::set<std::array<uint8_t, 8>> ids;
  size_t roots = 0;
  for (const Span& span : take(kPulls + 1)) {
    traces.insert(span.trace_id);
    ids.insert(span.span_id);
    roots += span.parent_id == std::array<uint8_t, 8>{};
  }
  EXPECT_EQ(roots, kPulls);
  EXPECT_EQ(traces.size(), kPulls + 1);
  EXPECT_EQ(ids.size(), kPulls + 1);
}

TEST_F(SpansTest, TooManySpansAreDroppedAndCounted) {
  start();
  auto client = connect();
  constexpr size_t kMore = 5;
  for (size_t i = 0; i < kSpansKept + kMore; ++i)
    ASSERT_TRUE(decode_pulled(client->call(traced_pull(context_of(9), {1}))).status.ok());
  EXPECT_TRUE(waits_until([&] { return dropped() == kMore; }));
  take(kSpansKept);
  EXPECT_TRUE(decode_pulled(client->call(traced_pull(context_of(8), {1}))).status.ok());
  EXPECT_EQ(take(1)[0].trace_id, context_of(8).trace_id);
  EXPECT_EQ(dropped(), kMore);
}

TEST_F(SpansTest, SpansCanBeTakenAfterTheStop) {
  start();
  EXPECT_TRUE(decode_pulled(connect()->call(traced_pull(context_of(9), {1}))).status.ok());
  EXPECT_TRUE(server_->stop().ok());
  std::vector<Span> spans;
  EXPECT_EQ(server_->take_spans(10, spans), 0u);
  EXPECT_EQ(spans.size(), 1u);
}

TEST_F(SpansTest, ASampleBeyondOneIsRefused) {
  for (const double sample : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    options_.trace_sample = sample;
    const auto started = Server::start(*pool_.tables, options_);
    expect_error(started.status(), Code::kInvalidArgument, "trace_sample");
  }
}

// One thread takes while the other writes: each span arrives once, whole and in order, or is
// counted as dropped.
TEST(SpanRing, ATakerSeesWholeSpansInOrder) {
  SpanRing ring;
  constexpr uint64_t kSpans = 200'000;
  std::thread writer([&] {
    for (uint64_t i = 1; i <= kSpans; ++i) {
      Span span;
      span.start_ns = span.duration_ns = span.version = i;
      ring.push(span);
    }
  });
  std::vector<Span> spans;
  uint64_t taken = 0;
  uint64_t last = 0;
  while (taken + ring.dropped() < kSpans) {
    spans.clear();
    ring.take(100, spans);
    for (const Span& span : spans) {
      ASSERT_GT(span.start_ns, last);
      ASSERT_EQ(span.duration_ns, span.start_ns);
      ASSERT_EQ(span.version, span.start_ns);
      last = span.start_ns;
    }
    taken += spans.size();
  }
  writer.join();
  EXPECT_EQ(taken + ring.dropped(), kSpans);
}

}  // namespace
}  // namespace petps::server
