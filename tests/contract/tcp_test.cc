// Behaviour that only the tcp transport has: addresses, ports, file descriptors.
#include "transport/tcp/tcp.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "transport_echo.h"

namespace petps::transport {
namespace {

using base::Code;

TEST(Tcp, RefusesAnAddressThatIsNone) {
  TcpOptions options;
  options.host = "localhost";
  options.rules = test_rules();
  const auto made = make_tcp(options);
  EXPECT_EQ(made.status().code(), Code::kInvalidArgument);
  EXPECT_NE(made.status().message().find("'localhost' is not a numeric"), std::string_view::npos);
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

TEST(Tcp, SurvivesTheLackOfFileDescriptors) {
  TcpOptions options;
  options.rules = test_rules();
  auto made = make_tcp(options);
  ASSERT_TRUE(made.ok());
  ASSERT_TRUE(made.value()->start().ok());
  epoch::Domain domain;
  Echo echo(*made.value(), 0, domain);
  echo.start();
  const Backend tcp = backends()[1];
  auto before = tcp.connect(*made.value());
  ASSERT_TRUE(before->send(test_frame(1, 8)));
  EXPECT_EQ(before->receive_frame(), echo.expected_reply(1));

  // Accepted while descriptors are left; afterwards none are left.
  auto refused = tcp.connect(*made.value());
  ASSERT_TRUE(refused->send(test_frame(2, 8)));
  EXPECT_EQ(refused->receive_frame(), echo.expected_reply(2));
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  // The lowest free number: the client's socket takes it, and no descriptor is left for the server.
  const int next = ::dup(0);
  ::close(next);
  const rlimit tight{static_cast<rlim_t>(next) + 1, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  auto third = tcp.connect(*made.value());
  const std::string told = third->read_to_end();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_NE(told.find("RESOURCE_EXHAUSTED: the server has no file descriptors left"),
            std::string::npos)
      << told;
  EXPECT_EQ(made.value()->refused(), 1u);
  auto after = tcp.connect(*made.value());
  ASSERT_TRUE(after->send(test_frame(3, 8)));
  EXPECT_EQ(after->receive_frame(), echo.expected_reply(3));
  ASSERT_TRUE(before->send(test_frame(4, 8)));
  EXPECT_EQ(before->receive_frame(), echo.expected_reply(4));
}

}  // namespace
}  // namespace petps::transport
