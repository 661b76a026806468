#include "base/peer.h"

#include <gtest/gtest.h>

namespace petps::base {
namespace {

TEST(HostOf, OneHostHasAllAddressesOfAnIPv6Network) {
  EXPECT_EQ(host_of("10.0.0.7:51234"), "10.0.0.7");
  EXPECT_EQ(host_of("[2001:db8:1:2:3:4:5:6]:51234"), "[2001:db8:1:2::/64]");
  EXPECT_EQ(host_of("[2001:db8:1:2::9]:1"), "[2001:db8:1:2::/64]");
  EXPECT_EQ(host_of("[2001:db8:1:3::9]:1"), "[2001:db8:1:3::/64]");
  EXPECT_EQ(host_of("[::ffff:10.0.0.7]:1"), "[::ffff:10.0.0.7]");
  EXPECT_EQ(host_of("[fe80::1:2:3:4%eth0]:1"), "[fe80::%eth0/64]");
  EXPECT_EQ(host_of("[fe80::9%eth0]:1"), "[fe80::%eth0/64]");
  EXPECT_EQ(host_of("[fe80::9%eth1]:1"), "[fe80::%eth1/64]");  // another link, other hosts
}

}  // namespace
}  // namespace petps::base
