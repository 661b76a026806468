// Parts of a router that its clients do not see: which connections a worker tries again at once,
// and the memory that jobs take and keep.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "router/requests.h"
#include "router/shared.h"
#include "router_fixture.h"

namespace petps::router {
namespace {

using client::testing::FakeServer;
using client::testing::first_keys;
using transport::ConnectionId;
using transport::Event;

ConnectionId id_of(uint32_t slot, uint32_t generation = 1) {
  return ConnectionId{generation} << 32 | slot;
}

// An endpoint whose connections have each sent a hello with a token of their own. It stops the
// router after some polls.
class HelloEndpoint : public transport::Endpoint {
 public:
  HelloEndpoint(Shared& shared, uint32_t connections, uint32_t polls)
      : shared_(shared), polls_left_(polls) {
    for (uint32_t slot = 0; slot < connections; ++slot) open(id_of(slot));
  }
  // Close the connection at the next poll, and open another one in its slot.
  void replace(uint32_t slot) {
    events_.push_back({Event::Kind::kClosed, id_of(slot), {}});
    open(id_of(slot, 2));
  }
  // Return the connections that were resumed before each poll.
  const std::vector<std::vector<ConnectionId>>& resumed() const { return resumed_; }

  std::span<const Event> poll(int timeout_ms) override {
    resumed_.emplace_back(std::move(resumed_now_));
    resumed_now_.clear();
    polled_ = std::move(events_);
    events_.clear();
    for (const Peer& peer : peers_) {
      if (peer.has_frame && !peer.is_paused) polled_.push_back({Event::Kind::kFrames, peer.id, {}});
    }
    if (polled_.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(timeout_ms));
    if (--polls_left_ == 0) shared_.stopping = true;
    if (polls_left_ == replace_at_) replace(kReplaced);
    return polled_;
  }
  bool peek(ConnectionId connection, std::span<const std::byte>& frame) override {
    const Peer& peer = peers_[transport::slot_of(connection)];
    frame = peer.frame;
    return peer.id == connection && peer.has_frame && !peer.is_paused;
  }
  void consume(ConnectionId connection) override {
    peers_[transport::slot_of(connection)].has_frame = false;
  }
  void post(ConnectionId, gather::GatherList&& list, epoch::Pin&&) override { list.clear(); }
  void flush() override {}
  void pause(ConnectionId connection) override {
    peers_[transport::slot_of(connection)].is_paused = true;
  }
  void resume(ConnectionId connection) override {
    resumed_now_.push_back(connection);
    peers_[transport::slot_of(connection)].is_paused = false;
  }
  void close(ConnectionId, Status) override {}
  size_t pending_posts() const override { return 0; }
  std::vector<ConnectionId> connections() const override { return {}; }
  std::string peer(ConnectionId) const override { return "127.0.0.1:1"; }
  void wake() override {}
  Status watch(int) override { return {}; }

  static constexpr uint32_t kReplaced = 99;
  void replace_at(uint32_t polls_left) { replace_at_ = polls_left; }

 private:
  struct Peer {
    ConnectionId id = 0;
    wire::Frame frame;
    bool has_frame = true;
    bool is_paused = false;
  };
  void open(ConnectionId id) {
    const uint32_t slot = transport::slot_of(id);
    if (slot >= peers_.size()) peers_.resize(slot + 1);
    peers_[slot] = {.id = id, .frame = {}};
    wire::encode_hello(1, {.client = "raw", .token = std::to_string(id)}, peers_[slot].frame);
    events_.push_back({Event::Kind::kOpened, id, {}});
  }

  Shared& shared_;
  uint32_t polls_left_;
  uint32_t replace_at_ = UINT32_MAX;
  std::vector<Peer> peers_;  // by slot
  std::vector<Event> events_;
  std::vector<Event> polled_;
  std::vector<ConnectionId> resumed_now_;
  std::vector<std::vector<ConnectionId>> resumed_;
};

// Serve the endpoint until it stops the router. No thread takes the logins, so their places stay
// taken.
void serve(Shared& shared, HelloEndpoint& endpoint) {
  Worker worker(shared, 0, endpoint);
  const Status opened = worker.open();
  ASSERT_TRUE(opened.ok()) << opened.to_string();
  worker.run();
}

TEST(Worker, TriesFewConnectionsAtOnceThatFindNoPlace) {
  constexpr uint32_t kConnections = 100;
  RouterOptions options;
  options.deadline_ms = 600'000;
  Shared shared(options);
  HelloEndpoint endpoint(shared, kConnections, 60);
  serve(shared, endpoint);
  std::vector<ConnectionId> all;
  for (const auto& resumed : endpoint.resumed()) {
    EXPECT_LE(resumed.size(), kResumedAtOnce);
    all.insert(all.end(), resumed.begin(), resumed.end());
  }
  // One host has half of the places. The others are tried in the order in which they wait, and none
  // twice before all were tried.
  constexpr uint32_t kBlocked = kConnections - kLogins / 2;
  ASSERT_GT(all.size(), 2 * kBlocked);
  std::vector<size_t> tries(kBlocked);
  for (size_t i = 0; i < all.size(); ++i) {
    const uint32_t slot = transport::slot_of(all[i]) - kLogins / 2;
    if (i < kBlocked) {
      ASSERT_EQ(slot, i);
    }
    ++tries.at(slot);
  }
  const auto [fewest, most] = std::ranges::minmax(tries);
  EXPECT_LE(most - fewest, 1u);
}

// A connection that waited and is closed has nothing to do with the next one in its slot.
TEST(Worker, ForgetsConnectionsThatAreClosedWhileTheyWait) {
  RouterOptions options;
  options.deadline_ms = 600'000;
  Shared shared(options);
  HelloEndpoint endpoint(shared, 100, 60);
  endpoint.replace_at(57);  // before it is resumed for the first time
  serve(shared, endpoint);
  std::vector<ConnectionId> all;
  for (const auto& resumed : endpoint.resumed())
    all.insert(all.end(), resumed.begin(), resumed.end());
  EXPECT_EQ(std::ranges::count(all, id_of(HelloEndpoint::kReplaced)), 0);
  EXPECT_GT(std::ranges::count(all, id_of(HelloEndpoint::kReplaced, 2)), 0);
}

TEST(Calls, KeepNoLargeBuffers) {
  Calls calls("call", 1, [](JobPointer) {});
  JobPointer job = calls.begin(1);
  ASSERT_NE(job, nullptr);
  job->scratch.reserve(2 * kReplyBytesKept);
  job->frame.reserve(2 * kReplyBytesKept);
  calls.end(std::move(job));
  job = calls.begin(1);
  ASSERT_NE(job, nullptr);
  EXPECT_LE(job->scratch.capacity(), kReplyBytesKept);
  EXPECT_LE(job->frame.capacity(), kReplyBytesKept);
  calls.end(std::move(job));
}

// The worker's other callers would wait while it fills room for a large reply with zeros.
TEST(StartPull, MakesNoRoomForALargePull) {
  struct Case {
    uint32_t dim;
    size_t keys;
    bool is_small;
  };
  for (const Case& tried : {Case{4, 100, true}, Case{4, 60'000, false}, Case{4096, 200, false}}) {
    FakeServer server;
    server.tables().tables[0].dim = tried.dim;
    server.tables().tables[0].row_bytes = tried.dim * 4;
    RouterOptions options;
    options.servers = "petps://" + server.address();
    options.deadline_ms = 20'000;
    Shared shared(options);
    const auto caller = shared.callers.open("", "127.0.0.1", true);
    ASSERT_TRUE(caller.ok()) << caller.status().to_string();
    const uint32_t table = caller.value()->names().listing()->reply.tables.at(0).id;
    Job job;
    job.frame = server::pull_frame(1, {{table, first_keys(tried.keys)}});
    std::memcpy(&job.header, job.frame.data(), sizeof(job.header));
    job.caller = caller.value();
    EXPECT_EQ(start_pull(shared, job), tried.is_small);
    EXPECT_EQ(job.reply.capacity() > 0, tried.is_small);
    EXPECT_EQ(shared.memory->used() > 0, tried.is_small);
  }
}

}  // namespace
}  // namespace petps::router
