#include "access/access.h"

#include <gtest/gtest.h>

#include <thread>

namespace petps::access {
namespace {

using base::Code;

constexpr Roles kRead = static_cast<Roles>(Role::kRead);
constexpr Roles kWrite = static_cast<Roles>(Role::kWrite);
const std::string kToken = "petps_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG";

Grant token_grant(const std::string& name, const std::string& token, Roles roles,
                  std::vector<std::string> models = {}) {
  Grant grant;
  grant.name = name;
  grant.has_token = true;
  grant.token = hash_token(token);
  grant.roles = roles;
  grant.models = std::move(models);
  return grant;
}

Grant certificate_grant(const std::string& name, const std::string& certificate, Roles roles) {
  Grant grant;
  grant.name = name;
  grant.certificate = certificate;
  grant.roles = roles;
  return grant;
}

Credentials with_token(std::string_view token) { return {token, {}, "10.0.0.7:1234"}; }

TEST(Access, AnOpenGateAdmitsEverybodyToEverything) {
  Gate gate;
  const auto caller = gate.authenticate(with_token("nonsense"));
  ASSERT_TRUE(caller.ok());
  EXPECT_TRUE(caller.value()->is_anyone());
  EXPECT_TRUE(caller.value()->may_everywhere(Role::kAdmin));
  EXPECT_TRUE(caller.value()->may(Role::kWrite, "any"));
  EXPECT_EQ(gate.counts().logins_failed, 0u);
}

TEST(Access, ATokenIsFoundByItsHash) {
  Gate gate(Mode::kGrants);
  gate.replace({token_grant("other", "x", kWrite), token_grant("reader", kToken, kRead)});
  const auto caller = gate.authenticate(with_token(kToken));
  ASSERT_TRUE(caller.ok()) << caller.status().to_string();
  EXPECT_EQ(caller.value()->name(), "reader");
  EXPECT_TRUE(caller.value()->may_everywhere(Role::kRead));
  EXPECT_FALSE(caller.value()->may(Role::kWrite, "ranking"));
  EXPECT_FALSE(caller.value()->may_everywhere(Role::kAdmin));
}

TEST(Access, EveryByteOfTheHashCounts) {
  Gate gate(Mode::kGrants);
  const Grant right = token_grant("reader", kToken, kRead);
  gate.replace({right});
  const auto caller = gate.authenticate(with_token(kToken));
  ASSERT_TRUE(caller.ok());
  for (size_t i = 0; i < sizeof(TokenHash); ++i) {
    Grant other = right;
    other.token[i] ^= 1;
    gate.replace({other});
    EXPECT_FALSE(gate.authenticate(with_token(kToken)).ok()) << "byte " << i;
    EXPECT_EQ(gate.renew(caller.value()), nullptr) << "byte " << i;
  }
}

TEST(Access, AnExpiredGrantOfACertificateIsRefused) {
  Gate gate(Mode::kGrants);
  Grant grant = certificate_grant("inference", "host.a", kRead);
  gate.replace({grant});
  const std::vector<std::string> names{"host.a"};
  ASSERT_TRUE(gate.authenticate({"", names, ""}).ok());
  grant.expires_s = 1;
  gate.replace({grant});
  EXPECT_EQ(gate.authenticate({"", names, ""}).status().code(), Code::kUnauthenticated);
}

TEST(Access, TheHashIsSha256) {
  const TokenHash hash = hash_token("abc");  // FIPS 180-2, appendix B.1
  EXPECT_EQ(hash[0], 0xba);
  EXPECT_EQ(hash[1], 0x78);
  EXPECT_EQ(hash[31], 0xad);
}

TEST(Access, NobodyPassesAGateWithGrantsWithoutACredential) {
  Gate gate(Mode::kGrants);
  EXPECT_EQ(gate.authenticate({}).status().code(), Code::kUnauthenticated);
  gate.replace({token_grant("reader", kToken, kRead), certificate_grant("c", "host.a", kRead)});
  EXPECT_EQ(gate.authenticate({}).status().code(), Code::kUnauthenticated);
  for (const std::string& wrong : {kToken.substr(1), kToken + "x", std::string("reader"),
                                   std::string("host.a"), std::string(1, '\0')})
    EXPECT_EQ(gate.authenticate({wrong, {}, wrong}).status().code(), Code::kUnauthenticated);
  EXPECT_EQ(gate.counts().logins_failed, 7u);
}

TEST(Access, ACertificateIsFoundByAnyOfItsNames) {
  Gate gate(Mode::kGrants);
  gate.replace({certificate_grant("inference", "host.b", kRead)});
  const std::vector<std::string> names{"host.a", "host.b"};
  const auto caller = gate.authenticate({"", names, ""});
  ASSERT_TRUE(caller.ok()) << caller.status().to_string();
  EXPECT_EQ(caller.value()->name(), "inference");
  const std::vector<std::string> others{"host.c"};
  EXPECT_EQ(gate.authenticate({"", others, ""}).status().code(), Code::kUnauthenticated);
}

TEST(Access, AWrongTokenIsRefusedBesideAGoodCertificate) {
  Gate gate(Mode::kGrants);
  gate.replace({certificate_grant("inference", "host.b", kRead)});
  const std::vector<std::string> names{"host.b"};
  EXPECT_EQ(gate.authenticate({"wrong", names, ""}).status().code(), Code::kUnauthenticated);
}

TEST(Access, WithoutGrantsACertificateReadsAndWritesButDoesNotAdminister) {
  Gate gate(Mode::kCertificates);
  EXPECT_EQ(gate.authenticate({}).status().code(), Code::kUnauthenticated);
  const std::vector<std::string> names{"host.b"};
  const auto caller = gate.authenticate({"", names, ""});
  ASSERT_TRUE(caller.ok());
  EXPECT_EQ(caller.value()->name(), "host.b");
  EXPECT_TRUE(caller.value()->may_everywhere(Role::kRead));
  EXPECT_TRUE(caller.value()->may_everywhere(Role::kWrite));
  EXPECT_FALSE(caller.value()->may(Role::kAdmin, "ranking"));
  EXPECT_EQ(gate.renew(caller.value()), caller.value());
}

TEST(Access, AGrantOfModelsEndsAtThem) {
  Gate gate(Mode::kGrants);
  gate.replace({token_grant("reader", kToken, kRead, {"ranking"})});
  const CallerPointer caller = gate.authenticate(with_token(kToken)).value();
  EXPECT_TRUE(caller->may(Role::kRead, "ranking"));
  EXPECT_TRUE(caller->knows("ranking"));
  for (const char* other : {"", "rank", "ranking2", "RANKING"}) {
    EXPECT_FALSE(caller->may(Role::kRead, other));
    EXPECT_FALSE(caller->knows(other));
  }
  EXPECT_FALSE(caller->may_everywhere(Role::kRead));
  EXPECT_FALSE(caller->may_see_all());
}

TEST(Access, ARevokedTokenIsRefusedAndItsCallersEnd) {
  Gate gate(Mode::kGrants);
  gate.replace({token_grant("a", kToken, kRead), token_grant("b", "other", kRead)});
  const CallerPointer a = gate.authenticate(with_token(kToken)).value();
  const CallerPointer b = gate.authenticate(with_token("other")).value();
  const uint64_t generation = gate.generation();
  gate.replace({token_grant("b", "other", kRead)});
  EXPECT_GT(gate.generation(), generation);
  EXPECT_EQ(gate.renew(a), nullptr);
  EXPECT_EQ(gate.renew(b), b) << "an unchanged grant keeps its caller, and so its limits";
  EXPECT_EQ(gate.authenticate(with_token(kToken)).status().code(), Code::kUnauthenticated);
}

TEST(Access, AChangedGrantChangesWhatItsCallersMayDo) {
  Gate gate(Mode::kGrants);
  gate.replace({token_grant("a", kToken, kRead), certificate_grant("c", "host.c", kRead)});
  const std::vector<std::string> names{"host.c"};
  const CallerPointer by_token = gate.authenticate(with_token(kToken)).value();
  const CallerPointer by_certificate = gate.authenticate({"", names, ""}).value();
  gate.replace({token_grant("a", kToken, kWrite), certificate_grant("c", "host.c", kWrite)});
  for (const CallerPointer& old : {by_token, by_certificate}) {
    const CallerPointer now = gate.renew(old);
    ASSERT_NE(now, nullptr);
    EXPECT_FALSE(now->may(Role::kRead, "m"));
    EXPECT_TRUE(now->may(Role::kWrite, "m"));
  }
}

TEST(Access, AnExpiredGrantIsRefusedAndItsCallersEnd) {
  Gate gate(Mode::kGrants);
  Grant expired = token_grant("a", kToken, kRead);
  expired.expires_s = 1;  // in 1970
  Grant later = token_grant("b", "other", kRead);
  later.expires_s = ~uint64_t{0};
  gate.replace({expired, later});
  EXPECT_EQ(gate.authenticate(with_token(kToken)).status().code(), Code::kUnauthenticated);
  const auto caller = gate.authenticate(with_token("other"));
  ASSERT_TRUE(caller.ok());
  later.expires_s = 1;
  gate.replace({later});
  EXPECT_EQ(gate.renew(caller.value()), nullptr);
}

TEST(Access, AfterTooManyFailuresAPeerIsToldSo) {
  Gate gate(Mode::kGrants);
  gate.replace({token_grant("a", kToken, kRead)});
  for (uint32_t i = 0; i < kFailuresMax; ++i) {
    const std::string peer = "10.0.0.7:" + std::to_string(1000 + i);
    EXPECT_EQ(gate.authenticate({"wrong", {}, peer}).status().code(), Code::kUnauthenticated);
  }
  const auto refused = gate.authenticate({"wrong", {}, "10.0.0.7:9"}).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("10.0.0.7"), std::string_view::npos);
  // A right token still passes, because others may share the address.
  EXPECT_TRUE(gate.authenticate({kToken, {}, "10.0.0.7:10"}).ok());
  EXPECT_EQ(gate.authenticate({"wrong", {}, "10.0.0.8:9"}).status().code(), Code::kUnauthenticated);
}

TEST(Access, ManyPeersTakeBoundedMemory) {
  Gate gate(Mode::kGrants);
  for (size_t i = 0; i < 2 * kPeersMax; ++i) {
    const std::string peer = std::to_string(i) + ".0.0.7:1";
    (void)gate.authenticate({"wrong", {}, peer});
  }
  EXPECT_EQ(gate.peers_remembered(), kPeersMax);
}

TEST(Access, ALimitAdmitsABurstOfASecondAndNoMore) {
  Grant grant = token_grant("a", kToken, kRead);
  grant.requests_per_second = 100;
  Caller caller(grant, false);
  int admitted = 0;
  base::Status status;
  while ((status = caller.charge(1)).ok() && admitted < 10'000) ++admitted;
  EXPECT_GE(admitted, 100);
  EXPECT_LT(admitted, 10'000);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("'a' has used up its 100 requests"), std::string_view::npos);
}

TEST(Access, BytesOfRepliesCountInTheNextRequest) {
  Grant grant = token_grant("a", kToken, kRead);
  grant.bytes_per_second = 1000;
  Caller caller(grant, false);
  EXPECT_TRUE(caller.charge(10).ok());
  caller.spend_bytes(1'000'000);  // 1,000 s ahead of the rate
  const auto status = caller.charge(1);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("1000 bytes a second"), std::string_view::npos);
}

TEST(Access, ALimitRecoversWithTime) {
  Rate rate(1000);
  EXPECT_TRUE(rate.admits(0));
  rate.spend(3000, 0);
  EXPECT_FALSE(rate.admits(1'999'999'999));
  EXPECT_TRUE(rate.admits(2'000'000'000));
}

TEST(Access, ThreadsShareOneLimitExactly) {
  Rate rate(1'000'000'000);  // a unit costs 1 ns
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&rate] {
      for (int i = 0; i < 100'000; ++i) rate.spend(10'000, 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const uint64_t ahead = uint64_t{4} * 100'000 * 10'000;
  EXPECT_FALSE(rate.admits(ahead - kBurstNs - 1));
  EXPECT_TRUE(rate.admits(ahead - kBurstNs));
}

TEST(Access, GrantsMayBeReplacedWhileCallersComeAndGo) {
  Gate gate(Mode::kGrants);
  const auto with = [&](Roles roles) { gate.replace({token_grant("a", kToken, roles)}); };
  with(kRead);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      CallerPointer caller = gate.authenticate(with_token(kToken)).value();
      while (!stop) {
        caller = gate.renew(caller);
        ASSERT_NE(caller, nullptr);
        ASSERT_TRUE(caller->may(Role::kRead, "m") || caller->may(Role::kWrite, "m"));
      }
    });
  }
  for (int i = 0; i < 1000; ++i) with(i % 2 == 0 ? kWrite : kRead);
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace petps::access
