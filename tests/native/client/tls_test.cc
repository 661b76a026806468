// The client over TLS, against a real server: data, reuse of connections, what the errors say.
// Does not cover: certificates and streams themselves (tests/native/tls).
#include <algorithm>

#include "fixtures.h"
#include "tests/support/certificates/certificates.h"

namespace petps::client::testing {
namespace {

using base::Code;

constexpr uint32_t kDim = 64;

class TlsClients : public ::testing::Test {
 protected:
  static std::shared_ptr<tls::ServerContext> context(const tls::ServerFiles& files) {
    auto opened = tls::ServerContext::open(files);
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    return std::move(opened).value();
  }
  void serve(const tests::KeyPair& files, bool requires_clients = false, uint64_t idle_ms = 0) {
    server::ServerOptions options;
    const auto clients =
        requires_clients ? tls::ClientCertificates::kRequired : tls::ClientCertificates::kOff;
    context_ = context({files.certificate, files.key, authority_.ca(), clients});
    options.tls = context_;
    options.transport.idle_ms = idle_ms;
    start(options);
  }
  void start(const server::ServerOptions& options) {
    server_ = std::make_unique<RealServer>(options);
    server_->add_table("users", codec::Dtype::kF32, kDim, 20'000, 10'000);
    server_->start();
  }
  std::string url() const { return "petps+tls://" + server_->address() + "/ranking"; }
  Options options() const {
    Options options;
    options.deadline_ms = 600'000;  // a retry until the deadline would be seen as a hang
    options.tls.ca = authority_.ca();
    return options;
  }
  // Connect to a server that closes idle connections soon. On a busy machine it may close one
  // before the client has read the names, and connecting is not retried.
  std::unique_ptr<Client> connect_despite_closes(const Options& options) const {
    for (int attempts = 1;; ++attempts) {
      auto client = Client::connect(url(), options);
      if (client.ok()) return std::move(client).value();
      const bool is_closed = client.status().code() == Code::kUnavailable;
      if (is_closed && attempts < 100) continue;
      ADD_FAILURE() << client.status().to_string();
      return nullptr;
    }
  }
  server::StatsSnapshot stats() const { return server_->server().stats(); }
  static void expect_pull(Client& client, size_t n) {
    std::vector<uint64_t> keys = first_keys(n);
    std::shuffle(keys.begin(), keys.end(), std::mt19937_64(seed()));
    std::vector<float> rows(n * kDim);
    const auto report = client.pull("users", keys, rows);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    for (size_t i = 0; i < n; ++i) ASSERT_TRUE(has_row(rows, i, row_of(keys[i], kDim))) << i;
  }
  void expect_refusal(const Options& options, std::initializer_list<std::string_view> parts) {
    expect_error(Client::connect(url(), options).status(), Code::kUnauthenticated, parts);
    while (stats().handshakes_failed == 0) std::this_thread::yield();
    EXPECT_EQ(stats().handshakes_failed, 1u) << "a refused certificate is not tried again";
  }

  tests::Authority authority_;
  std::shared_ptr<tls::ServerContext> context_;
  std::unique_ptr<RealServer> server_;
};

TEST_F(TlsClients, PullsAndPushesOverOneConnection) {
  serve(authority_.issue_local());
  const auto client = connect_to(url(), options());
  // A long reply is encrypted in parts of 64 KiB: 256 rows.
  for (const size_t n : {1, 15, 255, 500, 511, 512, 767, 1'024, 10'000}) expect_pull(*client, n);
  PullOptions dedup;
  dedup.dedup = Dedup::kAlways;  // rows are scattered in the caller's memory
  std::vector<uint64_t> keys = first_keys(3'000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 7919 % 1'500;
  std::vector<float> rows(keys.size() * kDim);
  ASSERT_TRUE(client->pull("users", keys, rows, {}, dedup).ok());
  for (size_t i = 0; i < keys.size(); ++i)
    ASSERT_TRUE(has_row(rows, i, row_of(keys[i], kDim))) << i;
  const std::vector<uint64_t> pushed = first_keys(4'000);
  const auto report = client->push("users", pushed, rows_of(pushed, kDim), kDim);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().updated, 4'000u);
  EXPECT_EQ(stats().handshakes_finished, 1u) << "connections are reused";
}

TEST_F(TlsClients, AConnectionThatTheServerClosedWhileIdleIsReplaced) {
  serve(authority_.issue_local(), false, 30);
  Options idle = options();
  idle.catalogue_ms = 0;
  idle.hot_sample_every = 0;
  const auto client = connect_despite_closes(idle);
  ASSERT_NE(client, nullptr);
  for (int i = 0; i < 5; ++i) {
    while (stats().connections > 0) std::this_thread::yield();
    expect_pull(*client, 500);
  }
  EXPECT_GE(stats().connections_closed_idle, 5u);
}

TEST_F(TlsClients, AnExpiredCertificateIsNamed) {
  tests::CertificateSpec spec;
  spec.names = {"IP:127.0.0.1"};
  spec.valid_until_s = 5;
  serve(authority_.issue("short", spec));
  base::Status status;
  while ((status = Client::connect(url(), options()).status()).ok()) std::this_thread::yield();
  expect_error(status, Code::kUnauthenticated,
               {server_->address(), "the server's certificate (CN=test) expired at 20", "renew"});
}

TEST_F(TlsClients, AnUnknownAuthorityIsNamed) {
  serve(authority_.issue_local());
  const tests::Authority other("other");
  Options wrong = options();
  wrong.tls.ca = other.ca();
  expect_refusal(wrong, {server_->address(), "was issued by CN=test authority", "unknown to ca '",
                         "set ca to the file"});
}

TEST_F(TlsClients, AWrongNameIsNamed) {
  serve(authority_.issue_local());
  Options wrong = options();
  wrong.tls.server_name = "a.example";
  expect_refusal(wrong, {"is for localhost, 127.0.0.1, not for 'a.example'", "set server_name"});
  wrong.tls.server_name = "localhost";
  EXPECT_TRUE(Client::connect(url(), wrong).ok());
}

TEST_F(TlsClients, APullDoesNotRetryARefusedCertificate) {
  serve(authority_.issue_local(), false, 30);
  Options idle = options();
  idle.catalogue_ms = 0;
  idle.hot_sample_every = 0;
  const auto client = connect_despite_closes(idle);
  ASSERT_NE(client, nullptr);
  tests::CertificateSpec spec;
  spec.names = {"DNS:a.example"};
  authority_.issue("server", spec);
  ASSERT_TRUE(context_->reload().ok());
  while (stats().connections > 0) std::this_thread::yield();
  const std::vector<uint64_t> keys = first_keys(10);
  std::vector<float> rows(keys.size() * kDim);
  expect_error(client->pull("users", keys, rows).status(), Code::kUnauthenticated,
               {"is for a.example, not for '127.0.0.1'"});
}

TEST_F(TlsClients, AMissingClientCertificateIsNamed) {
  serve(authority_.issue_local(), true);
  expect_refusal(options(), {"requires a client certificate", "set certificate and key"});
  Options named = options();
  const tests::KeyPair own = authority_.issue("client");
  named.tls.certificate = own.certificate;
  named.tls.key = own.key;
  expect_pull(*connect_to(url(), named), 100);
}

TEST_F(TlsClients, APlainClientIsToldToUseTls) {
  serve(authority_.issue_local());
  Options plain = options();
  plain.tls = {};
  expect_error(Client::connect(server_->url(), plain).status(), Code::kFailedPrecondition,
               {"this port speaks TLS: use petps+tls://"});
}

TEST_F(TlsClients, ATlsClientIsToldThatThePortIsPlain) {
  start({});
  expect_error(Client::connect(url(), options()).status(), Code::kFailedPrecondition,
               {"the server does not speak TLS: use petps://"});
  while (server_->server().status_json().find("the client speaks TLS, but this port does not") ==
         std::string::npos)
    std::this_thread::yield();
}

TEST_F(TlsClients, OptionsOfTlsNeedItsScheme) {
  start({});
  expect_error(Client::connect(server_->url(), options()).status(), Code::kInvalidArgument,
               {"Options.tls is given, but 'petps://", "use petps+tls://"});
  Options missing = options();
  missing.tls.ca = "/nowhere";
  expect_error(Client::connect(url(), missing).status(), Code::kIoError, {"ca '/nowhere'"});
}

TEST_F(TlsClients, RenewedFilesFailNoPull) {
  const tests::KeyPair files = authority_.issue_local();
  serve(files);
  std::atomic<bool> is_over{false};
  std::atomic<int> renewals{0};
  std::thread renewing([&] {
    while (!is_over) {
      authority_.issue_local();
      if (context_->reload().ok()) ++renewals;  // else: between the two files
    }
  });
  const auto lasting = connect_to(url(), options());
  for (int i = 0; i < 30 || renewals < 10; ++i) {
    expect_pull(*lasting, 50);
    expect_pull(*connect_to(url(), options()), 50);
  }
  is_over = true;
  renewing.join();
}

}  // namespace
}  // namespace petps::client::testing
