// Behaviour that only the tcp transport has: addresses, ports, file descriptors.
#include "transport/tcp/tcp.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "transport_echo.h"

namespace petps::transport {
namespace {

using base::Code;

TEST(Tcp, RefusesAHostThatIsNotNumeric) {
  TcpOptions options;
  options.host = "localhost";
  options.rules = test_rules();
  const auto transport = make_tcp(options);
  EXPECT_EQ(transport.status().code(), Code::kInvalidArgument);
  EXPECT_NE(transport.status().message().find("'localhost' is not a numeric"),
            std::string_view::npos);
}

TEST(Tcp, RefusesAPortInUse) {
  TcpOptions options;
  options.rules = test_rules();
  const auto first = make_tcp(options);
  ASSERT_TRUE(first.ok());
  options.port = first.value()->port();
  const auto second = make_tcp(options);
  EXPECT_EQ(second.status().code(), Code::kUnavailable);
  EXPECT_NE(second.status().message().find("choose another port"), std::string_view::npos);
}

TEST(Tcp, APollReturnsWhenAWatchedFileIsReadable) {
  TcpOptions options;
  options.rules = test_rules();
  auto transport = make_tcp(options);
  ASSERT_TRUE(transport.ok());
  Endpoint& endpoint = transport.value()->endpoint(0);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  ASSERT_TRUE(endpoint.watch(pipe[0]).ok());
  EXPECT_EQ(endpoint.watch(pipe[0]).code(), Code::kIoError) << "it is watched already";
  for (int round = 0; round < 3; ++round) {
    char byte = 'x';
    ASSERT_EQ(::write(pipe[1], &byte, 1), 1);
    EXPECT_TRUE(endpoint.poll(-1).empty());  // without a limit: else it would hang
    EXPECT_TRUE(endpoint.poll(-1).empty()) << "the byte still waits";
    ASSERT_EQ(::read(pipe[0], &byte, 1), 1);
  }
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(Tcp, SurvivesTheLackOfFileDescriptors) {
  TcpOptions options;
  options.rules = test_rules();
  auto transport = make_tcp(options);
  ASSERT_TRUE(transport.ok());
  ASSERT_TRUE(transport.value()->start().ok());
  epoch::Domain domain;
  Echo echo(*transport.value(), 0, domain);
  echo.start();
  const Backend tcp = backend_named("tcp_copy");
  auto before = tcp.connect(*transport.value());
  EXPECT_TRUE(echo.answers(*before, 1));

  // Accepted while descriptors are left; afterwards none are left.
  auto refused = tcp.connect(*transport.value());
  EXPECT_TRUE(echo.answers(*refused, 2));
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  // The lowest free number: the client's socket takes it, and no descriptor is left for the server.
  const int next = ::dup(0);
  ::close(next);
  const rlimit tight{static_cast<rlim_t>(next) + 1, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  auto third = tcp.connect(*transport.value());
  const std::string error = third->read_to_end();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_NE(error.find("RESOURCE_EXHAUSTED: the server has no file descriptors left"),
            std::string::npos)
      << error;
  EXPECT_EQ(transport.value()->refused(), 1u);
  auto after = tcp.connect(*transport.value());
  EXPECT_TRUE(echo.answers(*after, 3));
  EXPECT_TRUE(echo.answers(*before, 4));
}

}  // namespace
}  // namespace petps::transport
