// Old and new clients against a fleet that changes: servers die, pause, come back late, switch,
// switch back, resize their rows, are restored from old copies, and exchange their pools. A slow
// model, which sees the whole fleet, knows which results are allowed.
//
// Checked for every pull: its rows are of one instance and of that instance's length; the client
// does not return to an older instance, unless an operator switched back; no row comes from a pool
// in an older state than the client has seen. Checked when a client has contacted all servers and
// nothing changes: it pulls the newest instance that every group has a server for, whatever dead,
// lagging or restored servers last reported; and it fails only when the model expects that.
//
// Not covered here: several threads of one client (shards_test.cc, versions_test.cc), changes of
// the shard map (shards_test.cc), applied versions within an instance.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>

#include "fake_fleet.h"
#include "petps_client/pull_call.h"
#include "tests/seed.h"

namespace petps::client::testing {
namespace {

constexpr size_t kClients = 4;
constexpr size_t kKeysPerPull = 24;  // over all partitions
constexpr uint32_t kInstancesKept = 3;
constexpr uint64_t kMs = 1'000'000;
// Limit of the rounds in which a client contacts all servers: three failures each, with backoffs
// between them. On a busy machine healthy servers may look dead for a round; their next reply
// corrects that.
constexpr int kMaxRounds = 400;

// How long the model waits for a client, and the client for its servers.
struct Patience {
  int rounds = kMaxRounds;
  uint64_t pull_ms = 2'000;
  uint32_t failures_until_gone = kFailuresUntilGone;
};

int event_count(int whole) {
  const char* given = std::getenv("PETPS_TEST_SCALE");
  return given == nullptr ? whole : std::max(1, static_cast<int>(whole * std::atof(given)));
}

struct Subject {
  std::string name;
  std::unique_ptr<Client::Impl> impl;
  std::shared_ptr<const Routing> by;
  uint32_t last = 0;  // the instance of its last successful pull
};

struct Outcome {
  base::Status status;
  uint32_t number = 0;  // 0: failed
};

class World {
 public:
  World(std::vector<size_t> groups, uint64_t seed, const Patience& patience = {})
      : patience_(patience),
        random_(seed),
        groups_(std::move(groups)),
        fleet_(count(groups_)),
        alive_(count(groups_), true),
        paused_(alive_.size(), false),
        snapshots_(alive_.size()),
        former_(alive_.size()),
        places_(alive_.size()) {
    for (size_t i = 0; i < alive_.size(); ++i) {
      places_[i] = i;
      fleet_.change(i, [](FakePool& pool) {
        pool.create(1);
        pool.switch_to(1);
        pool.previous = 0;
      });
      snapshots_[i] = fleet_.pool(i);
    }
    for (size_t i = 0; i < kClients; ++i) renew(i);
  }

  void step() {
    ++now_;
    const size_t server = random_() % alive_.size();
    const size_t client = random_() % kClients;
    switch (random_() % 32) {
      case 0:
        return publish();
      case 1:
      case 2:
      case 3:
      case 4:
        return advance(server);
      case 5:
        return switch_back();
      case 6:
      case 7:
        return kill(server);
      case 8:
      case 9:
      case 10:
        return revive(server);
      case 11:
        return random_() % 4 == 0 ? pause(server) : revive(server);
      case 12:
        return restore(server);
      case 13:
        return swap(server, random_() % alive_.size());
      case 14:
        return fleet_.close_idle(server);
      case 15:
        return random_() % 4 == 0 ? renew(client) : snapshot(server);
      case 16:
      case 17:
        return read_all(subjects_[client]);
      case 18:
      case 19:
        return settle(subjects_[client]);
      default:
        (void)pull(subjects_[client]);
    }
  }

  // All servers come back and catch up. Then every client must pull the newest instance.
  void end_well() {
    for (size_t i = 0; i < alive_.size(); ++i) {
      revive(i);
      catch_up(i, newest_);
    }
    for (Subject& subject : subjects_) {
      settle(subject);
      EXPECT_EQ(subject.last, newest_) << where(subject);
    }
  }
  // A client reads of an instance that only one server has switched to, and that server dies. The
  // client must then use the others.
  void lose_the_only_new_server() {
    publish();
    while (fleet_.pool(0).current != newest_) advance(0);
    read_all(subjects_[0]);
    kill(0);
    settle(subjects_[0]);
  }
  // The same, but all servers count as gone before the others come back. The client's next call
  // must notice that, because there is no background thread here.
  void lose_all_and_revive_the_old_servers() {
    publish();
    while (fleet_.pool(0).current != newest_) advance(0);
    Subject& subject = subjects_[0];
    read_all(subject);
    for (size_t i = 0; i < alive_.size(); ++i) kill(i);
    for (const auto& remote : subject.by->all) {
      while (remote->is_live()) read_all(subject);
    }
    for (size_t i = 1; i < alive_.size(); ++i) revive(i);
    const Outcome outcome = pull(subject);
    EXPECT_EQ(outcome.number, newest_ - 1) << outcome.status.to_string() << where(subject);
  }
  uint64_t requests() const { return fleet_.requests(); }
  uint64_t pulls = 0;
  uint64_t settled = 0;
  uint64_t refused = 0;  // settled on a failure that the model expects
  uint64_t went_back = 0;

 private:
  static size_t count(const std::vector<size_t>& groups) {
    size_t all = 0;
    for (const size_t servers : groups) all += servers;
    return all;
  }

  // ---- The fleet and its operator

  void publish() {
    if (newest_ < 1'000'000) ++newest_;
    withdrawn_ = false;
  }
  // One server takes the next step towards the newest instance: it creates it, or switches to it.
  void advance(size_t server) {
    if (!alive_[server]) return;
    FakePool pool = fleet_.pool(server);
    const uint32_t goal = withdrawn_ ? newest_ - 1 : newest_;
    if (pool.current >= goal) return;
    if (!pool.has(goal)) return fleet_.change(server, [&](FakePool& of) { of.create(goal); });
    switch_to(server, goal);
    const uint32_t lowest = lowest_current();
    fleet_.change(server, [&](FakePool& of) {
      while (of.instances.size() > kInstancesKept && of.instances.front() < lowest)
        of.drop(of.instances.front());
    });
  }
  void catch_up(size_t server, uint32_t goal) {
    while (fleet_.pool(server).counter < highest_counter(server))
      fleet_.change(server, [](FakePool& of) { of.counter += 1000; });
    fleet_.change(server, [&](FakePool& of) { of.create(goal); });
    switch_to(server, goal);
  }
  uint64_t highest_counter(size_t server) const {
    uint64_t highest = 0;
    for (const Subject& subject : subjects_)
      highest = std::max(highest, fleet_.seen(subject.name, server));
    return highest;
  }
  void switch_to(size_t server, uint32_t goal) {
    const uint32_t before = fleet_.pool(server).current;
    if (before == goal) return;
    fleet_.change(server, [&](FakePool& of) { of.switch_to(goal); });
    former_[places_[server]].insert(before);
  }
  // Return the lowest instance that a pool, or its snapshot, resolves to. Only lower
  // ones may be dropped.
  uint32_t lowest_current() const {
    uint32_t lowest = UINT32_MAX;
    for (size_t i = 0; i < alive_.size(); ++i)
      lowest = std::min({lowest, fleet_.pool(i).current, snapshots_[i].current});
    return lowest;
  }
  // The operator switches back from the newest instance, on all servers that can be reached.
  void switch_back() {
    if (newest_ < 2 || random_() % 3 != 0) return;
    for (size_t i = 0; i < alive_.size(); ++i) {
      if (alive_[i] && fleet_.pool(i).current == newest_ && !fleet_.pool(i).has(newest_ - 1))
        return;
    }
    withdrawn_ = true;
    for (size_t i = 0; i < alive_.size(); ++i) {
      if (alive_[i] && fleet_.pool(i).current == newest_) switch_to(i, newest_ - 1);
    }
  }
  void kill(size_t server) {
    fleet_.kill(server);
    alive_[server] = false;
  }
  void revive(size_t server) {
    paused_[server] = false;
    fleet_.pause(server, false);
    fleet_.revive(server);
    alive_[server] = true;
  }
  void pause(size_t server) {
    paused_[server] = true;
    fleet_.pause(server, true);
  }
  void snapshot(size_t server) { snapshots_[places_[server]] = fleet_.pool(server); }
  // Replace the server's pool by an old copy of itself.
  void restore(size_t server) {
    kill(server);
    // Once its counter has passed the one seen, clients accept its names, as after a switch back.
    former_[places_[server]].insert(fleet_.pool(server).current);
    fleet_.change(server, [&](FakePool& of) { of = snapshots_[places_[server]]; });
    if (random_() % 2 == 0) revive(server);
  }
  void swap(size_t one, size_t other) {
    if (one == other) return;
    fleet_.kill(one);
    fleet_.kill(other);
    fleet_.swap(one, other);
    std::swap(places_[one], places_[other]);
    if (alive_[one]) fleet_.revive(one);
    if (alive_[other]) fleet_.revive(other);
  }

  // ---- Clients

  void renew(size_t at) {
    subjects_.resize(kClients);
    Subject& subject = subjects_[at];
    subject = {};
    subject.name = "client " + std::to_string(++clients_);
    Options options;
    options.name = subject.name;
    options.hot_sample_every = 0;
    subject.impl = std::make_unique<Client::Impl>(options);
    Client::Impl& impl = *subject.impl;
    impl.url.model = "m";
    impl.process = getpid();
    BackoffOptions backoff_options;
    backoff_options.first_ns = kMs / 20;
    backoff_options.longest_ns = kMs / 2;
    backoff_options.silence_ns = 4 * kMs;
    backoff_options.failures_until_gone = patience_.failures_until_gone;
    backoff_options.seed = 1 + random_() % 1'000'000;
    auto routing = std::make_shared<Routing>();
    routing->partitions = static_cast<uint32_t>(groups_.size());
    size_t server = 0;
    for (size_t group = 0; group < groups_.size(); ++group) {
      routing->group_of.push_back(static_cast<uint32_t>(group));
      std::vector<uint32_t> owners;
      for (size_t i = 0; i < groups_[group]; ++i, ++server) {
        const std::string address = fleet_.address(server);
        owners.push_back(routing->add_server(std::make_shared<RemoteServer>(
            parse_address(address, address).value(), "m", options, backoff_options)));
      }
      routing->add_group(std::move(owners));
    }
    impl.routing = routing;
    subject.by = routing;
  }

  void read_all(const Subject& subject) {
    Client::Impl::read_catalogues(*subject.by, Deadline::in_ms(any_paused() ? 20 : 2'000), 0);
    note_seen(subject);
  }
  // Record what the client has seen. This runs between its calls: no server changes during a call.
  void note_seen(const Subject& subject) {
    for (size_t i = 0; i < subject.by->all.size(); ++i) {
      const auto known = subject.by->all[i]->last_catalogue();
      if (known != nullptr) fleet_.record_seen(subject.name, i, known->state());
    }
  }
  bool any_paused() const {
    return std::find(paused_.begin(), paused_.end(), true) != paused_.end();
  }

  Outcome pull(Subject& subject) {
    // Do not wait long for a pull that the model expects to fail.
    const uint64_t ms = expected(subject).contains(0) ? 5 : any_paused() ? 60 : patience_.pull_ms;
    const Deadline deadline = Deadline::in_ms(ms);
    Outcome outcome;
    for (int tries = 0; tries < 4; ++tries) {
      outcome = pull_once(subject, deadline);
      note_seen(subject);
      if (outcome.status.code() != base::Code::kInvalidArgument) break;
    }
    if (outcome.number == 0) return outcome;
    ++pulls;
    if (outcome.number < subject.last) {
      ++went_back;
      EXPECT_TRUE(was_switched_back(subject.last))
          << "from " << subject.last << " to " << outcome.number << where(subject);
    }
    subject.last = outcome.number;
    return outcome;
  }
  Outcome pull_once(Subject& subject, const Deadline& deadline) {
    Choice choice;
    if (const base::Status status = subject.impl->choose_instance(*subject.by, deadline, choice);
        !status.ok())
      return {status, 0};
    std::string name = choice.instance;
    for (const auto& remote : subject.by->all) {
      if (name.empty() && remote->last_catalogue() != nullptr)
        name = remote->last_catalogue()->instance_name();
    }
    const uint32_t guess = name.empty() ? 1 : static_cast<uint32_t>(std::stoul(name.substr(2)));
    std::vector<uint64_t> keys(kKeysPerPull);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
    std::vector<float> rows(keys.size() * row_dim(guess));
    const TablePull wanted{"t", keys, std::as_writable_bytes(std::span(rows)), {}, Form::kFloat32};
    const PullOptions options;  // PullCall keeps a reference
    PullCall call(*subject.impl, {&wanted, 1}, options, deadline);
    PullReport report;
    const base::Status status = call.run(*subject.by, report);
    if (!status.ok()) return {status, 0};
    EXPECT_EQ(report.found, keys.size());
    const auto number = static_cast<uint32_t>(std::stoul(report.instance.substr(2)));
    EXPECT_EQ(row_dim(number), row_dim(guess)) << where(subject);
    for (const float value : rows)
      EXPECT_EQ(value, static_cast<float>(number))
          << "two instances in one result" << where(subject);
    return {{}, number};
  }

  // ---- The model

  bool is_live(const Subject& subject, size_t server) const {
    return alive_[server] && !paused_[server] &&
           fleet_.pool(server).counter >= fleet_.seen(subject.name, server);
  }
  bool has_dead_group(const Subject& subject) const {
    size_t server = 0;
    for (const size_t servers : groups_) {
      bool any = false;
      for (size_t i = 0; i < servers; ++i, ++server) any = any || is_live(subject, server);
      if (!any) return true;
    }
    return false;
  }
  bool was_switched_back(uint32_t number) const {
    return std::any_of(former_.begin(), former_.end(),
                       [&](const auto& instances) { return instances.contains(number); });
  }
  // Return all instances that this client may pull now; 0: a failure. There are several if the
  // result depends on whether the client has seen a switch back.
  std::set<uint32_t> expected(const Subject& subject) const {
    if (has_dead_group(subject)) return {0};
    std::set<uint32_t> sure;
    // Older than the last pull's, but allowed if the client has seen a switch back.
    std::set<uint32_t> perhaps;
    for (size_t i = 0; i < alive_.size(); ++i) {
      if (!is_live(subject, i)) continue;
      const uint32_t current = fleet_.pool(i).current;
      if (!is_feasible(subject, current)) continue;
      if (current >= subject.last) sure.insert(current);
      if (current < subject.last && was_switched_back(subject.last)) perhaps.insert(current);
    }
    if (!sure.empty()) return {*sure.rbegin()};
    perhaps.insert(0);
    return perhaps;
  }
  bool is_feasible(const Subject& subject, uint32_t number) const {
    if (alive_.size() == 1) return true;
    size_t server = 0;
    for (const size_t servers : groups_) {
      bool reached = false;
      for (size_t i = 0; i < servers; ++i, ++server) {
        const FakePool pool = fleet_.pool(server);
        reached =
            reached || (is_live(subject, server) && pool.has(number) && pool.current >= number);
      }
      if (!reached) return false;
    }
    return true;
  }

  // Let the client contact all servers until its result is one that the model allows.
  void settle(Subject& subject) {
    Outcome outcome;
    std::set<uint32_t> allowed;
    for (int round = 0; round < patience_.rounds; ++round) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kMs / 2));  // let backoffs pass
      read_all(subject);
      if (round + 1 < static_cast<int>(kFailuresUntilGone)) continue;
      allowed = expected(subject);
      outcome = pull(subject);
      if (allowed.contains(outcome.number)) {
        ++settled;
        refused += outcome.number == 0 ? 1 : 0;
        return;
      }
    }
    std::string names;
    for (const uint32_t number : allowed) names += " " + std::to_string(number);
    ADD_FAILURE() << "pulled " << outcome.number << " (" << outcome.status.to_string()
                  << "), the model allows" << names << where(subject);
  }

 public:
  std::string where(const Subject& subject) const {
    std::string text = "\n  event " + std::to_string(now_) + ", " + subject.name + ", last pull " +
                       std::to_string(subject.last);
    size_t server = 0;
    for (size_t group = 0; group < groups_.size(); ++group) {
      for (size_t i = 0; i < groups_[group]; ++i, ++server) {
        const FakePool pool = fleet_.pool(server);
        text += "\n  group " + std::to_string(group) + ", pool " + std::to_string(places_[server]) +
                (alive_[server] ? "" : ", dead") + (paused_[server] ? ", paused" : "") +
                ", current " + std::to_string(pool.current) + ", before " +
                std::to_string(pool.previous) + ", counter " + std::to_string(pool.counter) +
                " (seen " + std::to_string(fleet_.seen(subject.name, server)) + "), has";
        for (const uint32_t number : pool.instances) text += " " + std::to_string(number);
        const auto& remote = subject.by->all[server];
        const auto known = remote->last_catalogue();
        text += "; the client knows " + (known == nullptr ? "nothing" : known->instance_name()) +
                (remote->is_live() ? "" : ", gone");
      }
    }
    return text;
  }
  std::vector<std::string> violations() const { return fleet_.violations(); }

 private:
  const Patience patience_;
  std::mt19937_64 random_;
  const std::vector<size_t> groups_;
  FakeFleet fleet_;
  std::vector<bool> alive_;  // by address, like paused_
  std::vector<bool> paused_;
  std::vector<FakePool> snapshots_;         // by pool
  std::vector<std::set<uint32_t>> former_;  // by pool: the instances that it switched away from
  std::vector<size_t> places_;              // the pool at each address
  std::vector<Subject> subjects_;
  uint64_t now_ = 0;
  uint64_t clients_ = 0;
  uint32_t newest_ = 1;
  bool withdrawn_ = false;
};

class FleetModel : public ::testing::TestWithParam<std::vector<size_t>> {};

TEST_P(FleetModel, EveryResultIsOneThatTheModelAllows) {
  const uint64_t seed = tests::seed();
  World world(GetParam(), seed);
  const int events = event_count(1'000);
  for (int i = 0; i < events && !HasFailure(); ++i) world.step();
  if (!HasFailure()) world.end_well();
  for (const std::string& violation : world.violations()) ADD_FAILURE() << violation;
  std::printf(
      "%d events, %llu requests, %llu pulls, %llu settled (%llu on a failure), %llu went back\n",
      events, static_cast<unsigned long long>(world.requests()),
      static_cast<unsigned long long>(world.pulls), static_cast<unsigned long long>(world.settled),
      static_cast<unsigned long long>(world.refused),
      static_cast<unsigned long long>(world.went_back));
  EXPECT_GT(world.pulls, 0u);
  EXPECT_GT(world.settled, 0u);
}

using Groups = std::vector<size_t>;
INSTANTIATE_TEST_SUITE_P(Fleets, FleetModel,
                         ::testing::Values(Groups{1}, Groups{3}, Groups{1, 1}, Groups{2, 1},
                                           Groups{2, 2}),
                         [](const auto& groups) {
                           std::string name = "groups";
                           for (const size_t servers : groups.param)
                             name += "_" + std::to_string(servers);
                           return name;
                         });

TEST(FleetAllGone, ThePullUsesTheFirstServerThatIsBack) {
  for (const std::vector<size_t>& groups : {Groups{3}, Groups{2, 1}})
    World(groups, tests::seed(), {.pull_ms = 20'000}).lose_all_and_revive_the_old_servers();
}

// Return the model's complaint about a client whose servers count as gone after this number of
// failures; empty: none.
std::string complaint_about(uint32_t failures_until_gone, int rounds) {
  ::testing::TestPartResultArray failures;
  const ::testing::ScopedFakeTestPartResultReporter reporter(
      ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
  World({3}, tests::seed(), {rounds, 20, failures_until_gone}).lose_the_only_new_server();
  return failures.size() == 0 ? "" : failures.GetTestPartResult(0).message();
}

// The model must notice a client that still considers what dead servers last reported.
TEST(FleetModelMutation, TheModelDetectsAClientThatConsidersDeadServers) {
  EXPECT_EQ("", complaint_about(kFailuresUntilGone, kMaxRounds));
  const std::string complaint = complaint_about(UINT32_MAX, 8);
  EXPECT_NE(complaint.find("pulled 0 ("), std::string::npos) << complaint;
  EXPECT_NE(complaint.find(", the model allows 1"), std::string::npos) << complaint;
}

}  // namespace
}  // namespace petps::client::testing
