// Names with several addresses: each address is a server. The addresses are 127.0.0.1, 127.0.0.2
// and so on, with one port, and the tests are the resolver.
#include "petps_client/host.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <thread>

#include "base/clock.h"
#include "fixtures.h"

namespace petps::client {
namespace {

using base::Code;
using base::Result;
using base::Status;
using testing::expect_error;
using testing::RealServer;

constexpr uint32_t kLongMs = 60'000;
const char* const kName = "servers.example";

// The addresses of kName, which a test may change.
class Names {
 public:
  explicit Names(std::vector<std::string> addresses) : addresses_(std::move(addresses)) {}
  void set(std::vector<std::string> addresses) {
    const std::lock_guard lock(mutex_);
    addresses_ = std::move(addresses);
  }
  std::function<Result<std::vector<std::string>>(const std::string&)> resolve() {
    return [this](const std::string& host) -> Result<std::vector<std::string>> {
      const std::lock_guard lock(mutex_);
      if (host != kName) return std::vector<std::string>{host};
      lookups_ += 1;
      if (addresses_.empty()) return Status(Code::kUnavailable, "no name server");
      return addresses_;
    };
  }
  int lookups() {
    const std::lock_guard lock(mutex_);
    return lookups_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> addresses_;
  int lookups_ = 0;
};

class HostTest : public ::testing::Test {
 protected:
  std::unique_ptr<Host> host_of(Names& names) {
    options_.resolve = names.resolve();
    const auto resolve = resolver_of(options_);
    const auto make = [this, resolve](const Address& address, const SocketAddress* at) {
      return std::make_shared<RemoteServer>(address, "", options_, BackoffOptions(), resolve,
                                            nullptr, at);
    };
    return std::make_unique<Host>(Address{kName, 7070}, resolve, make);
  }
  static std::vector<std::string> names_of(const Host& host) {
    std::vector<std::string> names;
    for (const auto& server : host.servers()) names.push_back(server->name());
    return names;
  }
  Options options_;
};

TEST_F(HostTest, EachOfSeveralAddressesOfAFamilyIsAServer) {
  Names names({"127.0.0.2", "::1", "127.0.0.1", "127.0.0.2"});
  const auto host = host_of(names);
  EXPECT_EQ(names_of(*host), std::vector<std::string>{"servers.example:7070"});
  EXPECT_TRUE(host->refresh(Deadline::in_ms(kLongMs)));
  EXPECT_EQ(names_of(*host), (std::vector<std::string>{"servers.example:7070 (127.0.0.1)",
                                                       "servers.example:7070 (127.0.0.2)",
                                                       "servers.example:7070 (::1)"}));
  for (const auto& server : host->servers()) EXPECT_EQ(server->host(), "servers.example:7070");
  EXPECT_FALSE(host->refresh(Deadline::in_ms(kLongMs))) << "the result is new";
  EXPECT_EQ(names.lookups(), 1);
}

TEST_F(HostTest, OneAddressOfEachFamilyIsOneServer) {
  Names names({"::1", "127.0.0.1"});
  const auto host = host_of(names);
  EXPECT_FALSE(host->refresh(Deadline::in_ms(kLongMs)));
  EXPECT_EQ(names_of(*host), std::vector<std::string>{"servers.example:7070"});
}

// A server whose address stays keeps its connections and its state.
TEST_F(HostTest, ADeadServerLeadsToALookupThatKeepsTheOthers) {
  Names names({"127.0.0.1", "127.0.0.2"});
  const auto host = host_of(names);
  ASSERT_TRUE(host->refresh(Deadline::in_ms(kLongMs)));
  const RemoteServers before = host->servers();
  const auto refresh = [&] {
    for (int i = 0; i < 3; ++i) before[1]->record_failure();
    const uint64_t due = host->refresh_due_ns();
    EXPECT_LE(due, base::monotonic_ns() + 1'000'000'000);
    while (base::monotonic_ns() < due) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return host->refresh(Deadline::in_ms(kLongMs));
  };
  names.set({});  // no answer changes nothing
  EXPECT_FALSE(refresh());
  EXPECT_EQ(host->servers(), before);
  names.set({"127.0.0.3", "127.0.0.1"});
  EXPECT_TRUE(refresh());
  const RemoteServers after = host->servers();
  ASSERT_EQ(after.size(), 2u);
  EXPECT_EQ(after[0], before[0]);
  EXPECT_EQ(after[1]->name(), "servers.example:7070 (127.0.0.3)");
}

TEST_F(HostTest, ANumericHostNeedsNoLookup) {
  const auto make = [this](const Address& address, const SocketAddress* at) {
    return std::make_shared<RemoteServer>(address, "", options_, BackoffOptions(), nullptr, nullptr,
                                          at);
  };
  const Host host(Address{"127.0.0.1", 7070}, nullptr, make);
  EXPECT_EQ(host.refresh_due_ns(), UINT64_MAX);
}

// ---- A client of a name

class NamedServers : public ::testing::Test {
 protected:
  // Start a server with table "t" at 127.0.0.N. All servers have one port.
  RealServer& add_server(int number) {
    server::ServerOptions options;
    options.host = "127.0.0." + std::to_string(number);
    options.port = port_;
    auto server = std::make_unique<RealServer>(options);
    server->add_table("t", codec::Dtype::kF32, 4, 1000, 100);
    server->start();
    return *(servers_[number] = std::move(server));
  }
  std::unique_ptr<Client> connect(Names& names) {
    Options options;
    options.resolve = names.resolve();
    options.deadline_ms = 20'000;
    options.hot_sample_every = 0;
    return testing::connect_to(
        "petps://" + std::string(kName) + ":" + std::to_string(port_) + "/ranking", options);
  }
  static Status pull(Client& client) {
    std::vector<float> rows(4);
    const std::vector<uint64_t> keys = {1};
    return client.pull("t", keys, rows).status();
  }
  uint64_t pulls(int number) { return servers_.at(number)->server().stats().pulls; }

  const uint16_t port_ = testing::stable_port();
  std::map<int, std::unique_ptr<RealServer>> servers_;
};

TEST_F(NamedServers, PullsAreDividedOverAllAddresses) {
  for (int number : {2, 3, 4}) add_server(number);
  Names names({"127.0.0.2", "127.0.0.3", "127.0.0.4"});
  const auto client = connect(names);
  const auto have_pulls = [&] { return pulls(2) >= 5 && pulls(3) >= 5 && pulls(4) >= 5; };
  while (!have_pulls()) ASSERT_TRUE(pull(*client).ok());
  EXPECT_EQ(client->servers(), 1u) << "the URL has one name";
  EXPECT_TRUE(client->status(0).ok());
}

TEST_F(NamedServers, AnAddressThatFailsIsAServerThatFails) {
  for (int number : {2, 3}) add_server(number);
  Names names({"127.0.0.2", "127.0.0.3"});
  const auto client = connect(names);
  ASSERT_TRUE(pull(*client).ok());
  servers_[2]->stop();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(pull(*client).ok());
  servers_[3]->stop();
  PullOptions options;
  options.deadline_ms = 300;
  std::vector<float> rows(4);
  const std::vector<uint64_t> keys = {1};
  Status status = client->pull("t", keys, rows, {}, options).status();
  // On a busy machine a short deadline may pass before the last attempts are refused.
  const auto is_refused = [&] { return status.message().find("refused") != std::string::npos; };
  for (; !status.ok() && !is_refused() && options.deadline_ms < 10'000; options.deadline_ms *= 4)
    status = client->pull("t", keys, rows, {}, options).status();
  const bool is_late = status.code() == Code::kDeadlineExceeded;
  expect_error(status, is_late ? status.code() : Code::kUnavailable,
               {"servers.example:", "(127.0.0.", "refused"});
  servers_[2]->start();
  EXPECT_TRUE(pull(*client).ok());
}

// All servers of the name move, as when a service is rolled out. A pull during the move finds the
// new ones.
TEST_F(NamedServers, APullFollowsTheNameToNewAddresses) {
  for (int number : {2, 3, 4, 5}) add_server(number);
  Names names({"127.0.0.2", "127.0.0.3"});
  const auto client = connect(names);
  ASSERT_TRUE(pull(*client).ok());
  names.set({"127.0.0.4", "127.0.0.5"});
  servers_[2]->stop();
  servers_[3]->stop();
  const Status status = pull(*client);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_GT(pulls(4) + pulls(5), 0u);
  // The name may become that of one server.
  names.set({"127.0.0.5"});
  servers_[4]->stop();
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(pull(*client).ok());
}

TEST_F(NamedServers, PushesNeedAnAddressOfOnePool) {
  RealServer& first = add_server(2);
  Names names({"127.0.0.2", "127.0.0.3"});
  add_server(3);
  const auto client = connect(names);
  const std::vector<uint64_t> keys = {7};
  const std::vector<float> row(4, 1.5f);
  expect_error(client->push("t", keys, row, 4).status(), Code::kFailedPrecondition,
               {"servers.example", "127.0.0.2", "127.0.0.3"});
  // Two addresses of one server, as of a load balancer: 0.0.0.0 listens on both.
  first.stop();
  servers_[3]->stop();
  server::ServerOptions options;
  options.host = "0.0.0.0";
  options.port = port_;
  RealServer both(options);
  both.add_table("t", codec::Dtype::kF32, 4, 1000, 100);
  both.start();
  // A push waits 550 ms for each address to name its pool, and is refused if one does not. A busy
  // machine may stall for longer.
  Status status(Code::kFailedPrecondition, "not pushed yet");
  bool is_disturbed = true;
  for (int i = 0; i < 20 && status.code() == Code::kFailedPrecondition && is_disturbed; ++i) {
    const auto other = connect(names);
    status = other->push("t", keys, row, 4).status();
    const std::vector<ServerCounts> counts = other->server_counts();
    is_disturbed = std::any_of(counts.begin(), counts.end(),
                               [](const ServerCounts& of) { return of.failures > 0; });
  }
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(both.server().stats().pushes, 1u);
}

}  // namespace
}  // namespace petps::client
