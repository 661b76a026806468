// Certificates and their files: what is accepted, and what the errors say. Does not cover:
// revocation, which TLS contexts do not check.
#include <openssl/ssl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "pair.h"

namespace petps::tls {
namespace {

using base::Code;
using base::Status;

using CertificatesTest = TlsTest;

#define EXPECT_HAS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << std::string(text)

TEST_F(CertificatesTest, ErrorsNameTheFileTheFaultAndTheRemedy) {
  const auto good = authority_.issue_local();
  const auto other = authority_.issue_local("other");
  tests::CertificateSpec spec;
  spec.valid_until_s = -60;
  const auto expired = authority_.issue("expired", spec);
  const std::string garbage = authority_.folder().write("garbage", "no PEM\n");
  const std::string torn = authority_.folder().write(
      "torn", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n");
  const std::string encrypted =
      authority_.folder().write("encrypted", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n");
  const auto error = [&](const std::string& certificate, const std::string& key,
                         const std::string& ca = "",
                         ClientCertificates clients = ClientCertificates::kOff) {
    const auto context = ServerContext::open({certificate, key, ca, clients});
    return context.status().to_string();
  };
  EXPECT_HAS(error("/nowhere", good.key), "IO_ERROR: certificate '/nowhere' cannot be opened");
  EXPECT_HAS(error(good.certificate, "/nowhere"), "key '/nowhere' cannot be opened");
  EXPECT_HAS(error(garbage, good.key), "garbage' holds no certificate in PEM form");
  EXPECT_HAS(error(torn, good.key), "torn' holds no certificate in PEM form (");
  EXPECT_HAS(error(good.certificate, garbage), "garbage' holds no private key in PEM form");
  EXPECT_HAS(error(good.certificate, encrypted), "is encrypted: decrypt it");
  EXPECT_HAS(error(good.certificate, other.key), "other.key' does not belong to certificate");
  EXPECT_HAS(error(expired.certificate, expired.key), "FAILED_PRECONDITION: certificate");
  EXPECT_HAS(error(expired.certificate, expired.key), " UTC: renew it");
  EXPECT_HAS(error("", good.key), "but certificate is empty");
  EXPECT_HAS(error(good.certificate, good.key, "", ClientCertificates::kRequired),
             "client certificates need client_ca");
  EXPECT_HAS(error(good.certificate, good.key, garbage, ClientCertificates::kOptional),
             "client_ca '");
  EXPECT_HAS(ClientContext::open({authority_.ca(), good.certificate, ""}).status().to_string(),
             "without its key");
}

std::string content_of(const std::string& path) {
  std::ostringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

TEST_F(CertificatesTest, APairInOneFileMayBeReplacedAtAnyTime) {
  std::string contents[2];
  for (std::string& content : contents) {
    const auto pair = authority_.issue_local(&content == contents ? "server" : "other");
    content = content_of(pair.certificate) + content_of(pair.key);
  }
  const std::string path = authority_.folder().write("pair.pem", contents[0]);
  std::atomic<bool> is_over{false};
  std::thread rotation([&] {
    for (size_t n = 1; !is_over; ++n) {
      const std::string next = authority_.folder().write("pair.new", contents[n % 2]);
      std::filesystem::rename(next, path);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (int n = 0; n < 300; ++n) {
    const auto context = ServerContext::open({path, path, "", ClientCertificates::kOff});
    EXPECT_TRUE(context.ok()) << context.status().to_string();
    if (!context.ok()) break;
  }
  is_over = true;
  rotation.join();
}

TEST_F(CertificatesTest, APairOfTwoFilesThatIsBeingReplacedIsReadAgain) {
  const auto before = authority_.issue_local();
  const auto after = authority_.issue_local("other");
  bool has_opened = false;
  for (int n = 0; n < 50 && !has_opened; ++n) {  // a busy machine may stall for longer than a try
    const std::string key = authority_.folder().write("own.key", content_of(before.key));
    std::thread rotation([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::filesystem::rename(authority_.folder().write("own.new", content_of(after.key)), key);
    });
    has_opened = ServerContext::open({after.certificate, key, "", ClientCertificates::kOff}).ok();
    rotation.join();
  }
  EXPECT_TRUE(has_opened);
}

TEST_F(CertificatesTest, ReportsTheVerifiedNames) {
  const auto server = serve(authority_.issue_local(), ClientCertificates::kRequired);
  const auto names = [&](const tests::CertificateSpec& spec) {
    const auto own = authority_.issue("client", spec);
    Pair pair(*server, *connect({authority_.ca(), own.certificate, own.key}));
    pair.shake();
    EXPECT_TRUE(pair.is_open()) << pair.client_status.to_string();
    return pair.server->peer_names();
  };
  tests::CertificateSpec spec;
  spec.common_name = "reader";
  EXPECT_EQ(names(spec), std::vector<std::string>{"reader"});
  spec.names = {"DNS:a.example", "IP:10.0.0.1", "URI:spiffe://x/reader"};
  EXPECT_EQ(names(spec), (std::vector<std::string>{"a.example", "spiffe://x/reader"}));
  // Errors and the status show names, so these are none: the common name remains.
  for (const std::string odd :
       {"URI:x:\xff", "URI:x:\x1b[2J", "DNS:a\x7f", "URI:x:\xc2\x9b", "URI:x:\xed\xa0\x80"}) {
    spec.names = {odd};
    EXPECT_EQ(names(spec), std::vector<std::string>{"reader"}) << odd;
  }
  spec.names = {"URI:" + std::string(256, 'x'), "URI:" + std::string(255, 'y')};
  EXPECT_EQ(names(spec), std::vector<std::string>{std::string(255, 'y')});
}

TEST_F(CertificatesTest, AClientWithoutARequiredCertificateIsRefused) {
  const auto own = authority_.issue_local();
  Pair optional(*serve(own, ClientCertificates::kOptional), *connect());
  optional.shake();
  EXPECT_TRUE(optional.is_open());
  EXPECT_TRUE(optional.server->peer_names().empty());
  Pair required(*serve(own, ClientCertificates::kRequired), *connect());
  required.shake();
  EXPECT_FALSE(required.server->is_open());
  EXPECT_EQ(required.server_status.code(), Code::kUnauthenticated);
  EXPECT_EQ(required.client_status.code(), Code::kUnauthenticated);
  EXPECT_HAS(required.client_status.message(), "requires a client certificate");
}

TEST_F(CertificatesTest, AClientOfAnotherAuthorityIsRefused) {
  const tests::Authority stranger("stranger");
  const auto own = stranger.issue("client");
  for (const auto clients : {ClientCertificates::kOptional, ClientCertificates::kRequired}) {
    Pair pair(*serve(authority_.issue_local(), clients),
              *connect({authority_.ca(), own.certificate, own.key}));
    pair.shake();
    EXPECT_FALSE(pair.server->is_open());
    EXPECT_HAS(pair.server_status.message(), "was issued by CN=stranger, which is unknown to");
    EXPECT_EQ(pair.client_status.code(), Code::kUnauthenticated);
    EXPECT_HAS(pair.client_status.message(), "the server refuses this client's certificate");
  }
}

TEST_F(CertificatesTest, TheClientVerifiesTheServer) {
  const auto refusal = [&](const ServerContext& server, ClientContext& client,
                           const std::string& name = "localhost") {
    Pair pair(server, client, name);
    pair.shake();
    EXPECT_FALSE(pair.client->is_open());
    EXPECT_FALSE(pair.server->is_open());
    EXPECT_EQ(pair.client_status.code(), Code::kUnauthenticated);
    EXPECT_EQ(pair.server_status.code(), Code::kUnauthenticated) << pair.server_status.to_string();
    return std::string(pair.client_status.message());
  };
  const auto server = serve(authority_.issue_local());
  EXPECT_HAS(refusal(*server, *connect(), "a.example"),
             "is for localhost, 127.0.0.1, not for 'a.example': connect to a name that it has");
  EXPECT_HAS(refusal(*server, *connect(), "127.0.0.2"), "not for '127.0.0.2'");
  const tests::Authority stranger("stranger");
  EXPECT_HAS(refusal(*server, *connect({stranger.ca(), "", ""})),
             "was issued by CN=test authority, which is unknown to ca '" + stranger.ca());
  tests::CertificateSpec spec;
  spec.common_name = "localhost";  // a common name is no name of a server
  EXPECT_HAS(refusal(*serve(authority_.issue("nameless", spec)), *connect()),
             "is for no DNS name or IP address, not for 'localhost'");
  for (const std::string name : {"localhost", "127.0.0.1"}) {
    Pair pair(*server, *connect(), name);
    pair.shake();
    EXPECT_TRUE(pair.is_open()) << name << ": " << pair.client_status.to_string();
  }
}

TEST_F(CertificatesTest, AnUnknownAuthorityThatIsSentAlongIsNotTakenForTheServer) {
  auto files = authority_.issue_local();
  std::ofstream(files.certificate, std::ios::app) << std::ifstream(authority_.ca()).rdbuf();
  const tests::Authority stranger("stranger");
  Pair pair(*serve(files), *connect({stranger.ca(), "", ""}));
  pair.shake();
  EXPECT_HAS(
      pair.client_status.message(),
      "the server's certificate (CN=test) was issued by CN=test authority, which is unknown");
}

TEST_F(CertificatesTest, AnExpiredServerIsRefusedByItsDate) {
  tests::CertificateSpec spec;
  spec.names = {"DNS:localhost"};
  spec.valid_until_s = 1;
  std::shared_ptr<ServerContext> server;
  while (server == nullptr) {  // the second may end before the files are read
    const auto files = authority_.issue("short", spec);
    auto opened = ServerContext::open(
        {files.certificate, files.key, authority_.ca(), ClientCertificates::kOff});
    if (opened.ok()) server = std::move(opened).value();
  }
  const auto client = connect();
  for (;;) {  // until the second has passed
    Pair pair(*server, *client);
    pair.shake();
    if (pair.is_open()) {
      usleep(50'000);
      continue;
    }
    EXPECT_EQ(pair.client_status.code(), Code::kUnauthenticated);
    EXPECT_HAS(pair.client_status.message(), " expired at 20");
    break;
  }
}

TEST_F(CertificatesTest, ReloadIsForNewStreamsAndKeepsTheOldFilesOnAnError) {
  tests::CertificateSpec spec;
  spec.names = {"DNS:localhost"};
  const auto files = authority_.issue("server", spec);
  const auto server = serve(files);
  const auto client = connect();
  Pair old(*server, *client);
  old.shake();
  spec.names = {"DNS:localhost", "DNS:second"};
  authority_.issue("server", spec);
  Pair before(*server, *client);
  before.shake();
  EXPECT_EQ(before.client->peer_names().size(), 1u);
  ASSERT_TRUE(server->reload().ok());
  Pair after(*server, *client);
  after.shake();
  EXPECT_EQ(after.client->peer_names().size(), 2u);
  authority_.folder().write("server.key", "");
  EXPECT_HAS(server->reload().message(), "holds no private key");
  Pair kept(*server, *client);
  kept.shake();
  EXPECT_EQ(kept.client->peer_names().size(), 2u);
  Bytes records;
  Bytes plain;
  ASSERT_TRUE(old.client->write(pattern(5), records).ok());
  ASSERT_TRUE(read_all(*old.server, records, plain, old.to_client).ok());
  EXPECT_EQ(plain, pattern(5));
}

TEST_F(CertificatesTest, TheClientReadsChangedFilesAgain) {
  const auto server = serve(authority_.issue_local(), ClientCertificates::kRequired);
  tests::CertificateSpec spec;
  spec.common_name = "first";
  const auto own = authority_.issue("client", spec);
  const auto client = connect({authority_.ca(), own.certificate, own.key});
  const auto name = [&] {
    Pair pair(*server, *client);
    pair.shake();
    return pair.server->peer_names().at(0);
  };
  EXPECT_EQ(name(), "first");
  spec.common_name = "second, longer";
  authority_.issue("client", spec);
  EXPECT_EQ(name(), "second, longer");
  authority_.folder().write("client.crt", "");
  EXPECT_EQ(name(), "second, longer");
}

TEST_F(CertificatesTest, OlderVersionsAreRefused) {
  const auto server = std::move(serve(authority_.issue_local())->accept()).value();
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  SSL_CTX_set_max_proto_version(context, TLS1_2_VERSION);
  SSL* old = SSL_new(context);
  BIO* sent = BIO_new(BIO_s_mem());
  SSL_set_bio(old, BIO_new(BIO_s_mem()), sent);
  SSL_set_connect_state(old);
  EXPECT_EQ(SSL_do_handshake(old), -1);
  const char* data = nullptr;
  const long n = BIO_get_mem_data(sent, &data);
  std::span<const std::byte> arrived(reinterpret_cast<const std::byte*>(data),
                                     static_cast<size_t>(n));
  Bytes out;
  const Status status = server->handshake(arrived, out);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_HAS(status.message(), "does not speak TLS 1.3");
  SSL_free(old);
  SSL_CTX_free(context);
}

}  // namespace
}  // namespace petps::tls
