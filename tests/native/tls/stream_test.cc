// Streams: data in both directions however it is cut, damage, ends, new keys, memory. Does not
// cover: OpenSSL's ciphers.
#include <malloc.h>

#include <random>

#include "pair.h"
#include "tests/seed.h"

namespace petps::tls {
namespace {

using base::Code;
using base::Status;

using StreamTest = TlsTest;

TEST_F(StreamTest, CarriesBytesInBothDirections) {
  Pair pair = open_pair();
  for (const size_t n : {size_t{1}, size_t{500}, kRecordBytes, 3 * kRecordBytes + 5}) {
    Bytes records;
    Bytes plain;
    ASSERT_TRUE(pair.client->write(pattern(n), records).ok());
    ASSERT_TRUE(read_all(*pair.server, records, plain, pair.to_client).ok());
    EXPECT_EQ(plain, pattern(n));
    EXPECT_LE(records.size(), n + (n / kRecordBytes + 1) * kRecordExtraBytes);
    records.clear();
    ASSERT_TRUE(pair.server->write(plain, records).ok());
    plain.clear();
    ASSERT_TRUE(read_all(*pair.client, records, plain, pair.to_server).ok());
    EXPECT_EQ(plain, pattern(n));
  }
  EXPECT_TRUE(pair.to_client.empty());
}

TEST_F(StreamTest, HandshakesHoweverTheBytesAreCut) {
  const auto server = serve(authority_.issue_local());
  const auto client = connect();
  for (const size_t part : {1, 2, 3, 5, 7, 64, 1000}) {
    Pair pair(*server, *client);
    pair.shake(part);
    EXPECT_TRUE(pair.is_open()) << part << ": " << pair.client_status.to_string();
  }
}

TEST_F(StreamTest, ReadsWholeBytesWhereverTheStreamIsCut) {
  Pair pair = open_pair();
  for (size_t cut = 0;; ++cut) {
    Bytes records;
    ASSERT_TRUE(pair.client->write(pattern(40), records).ok());
    ASSERT_TRUE(pair.client->write(pattern(3), records).ok());
    if (cut > records.size()) break;
    Bytes plain;
    ASSERT_TRUE(read_all(*pair.server, std::span(records).first(cut), plain, pair.to_client).ok());
    EXPECT_EQ(plain.size(), cut == records.size() ? 43u : cut >= 40 + kRecordExtraBytes ? 40u : 0u);
    const bool is_between = cut == 0 || cut == 40 + kRecordExtraBytes || cut == records.size();
    EXPECT_EQ(pair.server->has_partial_record(), !is_between) << cut;
    ASSERT_TRUE(
        read_all(*pair.server, std::span(records).subspan(cut), plain, pair.to_client).ok());
    EXPECT_EQ(plain.size(), 43u);
  }
}

TEST_F(StreamTest, KeepsCiphertextThatHasNoRoom) {
  Pair pair = open_pair();
  Bytes records;
  ASSERT_TRUE(pair.client->write(pattern(20'000), records).ok());
  std::span<const std::byte> arrived = records;
  Bytes plain;
  while (plain.size() < 20'000) {
    std::byte few[7];
    size_t n = 0;
    ASSERT_TRUE(pair.server->read(arrived, few, n, pair.to_client).ok());
    ASSERT_GT(n, 0u);
    plain.insert(plain.end(), few, few + n);
  }
  EXPECT_EQ(plain, pattern(20'000));
  EXPECT_TRUE(arrived.empty());
  EXPECT_FALSE(pair.server->has_plain());
}

TEST_F(StreamTest, RefusesARecordThatWasChanged) {
  Bytes sample;
  ASSERT_TRUE(open_pair().client->write(pattern(20), sample).ok());
  for (size_t at = 0; at < sample.size(); ++at) {
    Pair pair = open_pair();
    Bytes records;
    ASSERT_TRUE(pair.client->write(pattern(20), records).ok());
    records[at] ^= std::byte{0x10};
    records.resize(records.size() + 20'000);  // a longer length must not make it wait
    Bytes plain;
    Bytes alert;
    const Status status = read_all(*pair.server, records, plain, alert);
    EXPECT_FALSE(status.ok()) << at;
    EXPECT_TRUE(plain.empty());
    EXPECT_FALSE(alert.empty());
    EXPECT_TRUE(pair.server->has_failed());
    EXPECT_FALSE(pair.server->write(pattern(1), alert).ok()) << "a failed stream stays failed";
    EXPECT_FALSE(read_all(*pair.client, alert, plain, records).ok()) << "the peer is told";
  }
}

TEST_F(StreamTest, SurvivesAnyBytes) {
  const auto server = serve(authority_.issue_local());
  const auto client = connect();
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 300; ++round) {
    Pair pair(*server, *client);
    Bytes hello;
    std::span<const std::byte> nothing;
    ASSERT_TRUE(pair.client->handshake(nothing, hello).ok());
    for (int i = 0; i < 3; ++i) hello[random() % hello.size()] = static_cast<std::byte>(random());
    if (round % 3 == 0) {
      hello.resize(5 + random() % 2000);
      for (size_t i = 3; i < hello.size(); ++i) hello[i] = static_cast<std::byte>(random());
    }
    std::span<const std::byte> arrived = hello;
    Bytes out;
    Status status = pair.server->handshake(arrived, out);
    EXPECT_FALSE(pair.server->is_open());
    // The client gets what a hostile server may send.
    for (int i = 0; i < 3 && !out.empty(); ++i)
      out[random() % out.size()] = static_cast<std::byte>(random());
    arrived = out;
    status = pair.client->handshake(arrived, hello);
    EXPECT_LT(hello.size() + out.size(), 40'000u);
  }
}

TEST_F(StreamTest, NamesAPeerThatSpeaksPlainText) {
  const auto server = serve(authority_.issue_local());
  for (const std::string_view text : {"PTPS", "GET / HTTP/1.1\r\n", "P"}) {
    const auto stream = std::move(server->accept()).value();
    const Bytes bytes = bytes_of(text);
    std::span<const std::byte> arrived = bytes;
    Bytes out;
    EXPECT_EQ(stream->handshake(arrived, out).code(), Code::kFailedPrecondition);
    EXPECT_TRUE(stream->is_plain_text());
    EXPECT_TRUE(out.empty());
  }
}

TEST_F(StreamTest, AnEndInOneDirectionLeavesTheOtherOpen) {
  Pair pair = open_pair();
  Bytes records;
  Bytes plain;
  ASSERT_TRUE(pair.client->write(pattern(9), records).ok());
  pair.client->end(records);
  ASSERT_TRUE(read_all(*pair.server, records, plain, pair.to_client).ok());
  EXPECT_TRUE(pair.server->has_ended());
  EXPECT_EQ(plain.size(), 9u);
  records.clear();
  ASSERT_TRUE(pair.server->write(pattern(11), records).ok());
  pair.server->end(records);
  plain.clear();
  ASSERT_TRUE(read_all(*pair.client, records, plain, pair.to_server).ok());
  EXPECT_EQ(plain.size(), 11u);
  EXPECT_TRUE(pair.client->has_ended());
}

TEST_F(StreamTest, ChangesKeys) {
  Pair pair = open_pair();
  for (const bool both : {true, false, true}) {
    Bytes records;
    Bytes plain;
    ASSERT_TRUE(pair.client->update_keys(both).ok());
    ASSERT_TRUE(pair.client->write(pattern(9), records).ok());
    Bytes reply;
    ASSERT_TRUE(read_all(*pair.server, records, plain, reply).ok());
    EXPECT_EQ(plain, pattern(9));
    ASSERT_TRUE(pair.server->write(pattern(11), reply).ok());
    EXPECT_EQ(reply.size() > 11 + kRecordExtraBytes, both) << "new keys go before the bytes";
    plain.clear();
    ASSERT_TRUE(read_all(*pair.client, reply, plain, records).ok());
    EXPECT_EQ(plain, pattern(11));
  }
}

// Each change makes the server derive keys, and answer: 20 bytes that cost as much as a kilobyte.
TEST_F(StreamTest, RefusesPeersThatChangeKeysAllTheTime) {
  for (const size_t bytes : {size_t{1}, size_t{70'000}}) {
    Pair pair = open_pair();
    Status status;
    int changes = 0;
    for (; changes < 100 && status.ok(); ++changes) {
      Bytes records;
      Bytes plain;
      Bytes reply;
      ASSERT_TRUE(pair.client->update_keys(true).ok());
      ASSERT_TRUE(pair.client->write(pattern(bytes), records).ok());
      status = read_all(*pair.server, records, plain, reply);
    }
    EXPECT_EQ(status.ok(), bytes > 1);
    EXPECT_EQ(changes, bytes > 1 ? 100 : 17);
    if (bytes == 1) {
      EXPECT_EQ(status.message(), "TLS failed: the peer changed its keys 17 times within 16 bytes");
    }
  }
}

TEST_F(StreamTest, HoldsNoMoreMemoryThanItSays) {
  const auto server = serve(authority_.issue_local());
  const auto client = connect();
  constexpr size_t kStreams = 200;
  std::vector<std::unique_ptr<Stream>> clients;
  std::vector<std::unique_ptr<Stream>> servers;
  const auto used = [] {
    const auto now = mallinfo2();
    return now.uordblks + now.hblkhd;
  };
  const size_t before = used();
  for (size_t i = 0; i < kStreams; ++i) {
    Pair pair(*server, *client);
    pair.shake();
    Bytes records;
    Bytes plain;
    ASSERT_TRUE(pair.client->write(pattern(100), records).ok());
    ASSERT_TRUE(read_all(*pair.server, records, plain, pair.to_client).ok());
    servers.push_back(std::move(pair.server));
  }
  const size_t bytes = (used() - before) / kStreams;
  RecordProperty("bytes", static_cast<int>(bytes));
  EXPECT_LE(bytes, Stream::kBytes);
}

TEST_F(StreamTest, WhenTheKernelEncryptsNothingElseDoes) {
  Pair pair = open_pair();
  KernelKeys keys;
  ASSERT_GT(pair.server->take_kernel_keys(keys), 0u);
  EXPECT_EQ(pair.server->take_kernel_keys(keys), 0u) << "once";
  pair.server->leave_writing_to_kernel();
  Bytes out;
  EXPECT_FALSE(pair.server->write(pattern(1), out).ok());
  Bytes records;
  Bytes plain;
  ASSERT_TRUE(pair.client->write(pattern(20), records).ok());
  records.back() ^= std::byte{1};
  EXPECT_FALSE(read_all(*pair.server, records, plain, out).ok());
  EXPECT_TRUE(out.empty()) << "a nonce that the kernel uses too";
  const std::vector<Notice> notices = pair.server->take_notices();
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_EQ(notices[0].record_type, 21);
  EXPECT_EQ(notices[0].bytes, (Bytes{std::byte{2}, std::byte{20}})) << "fatal, bad_record_mac";
  EXPECT_TRUE(pair.server->take_notices().empty());
}

TEST_F(StreamTest, TheKernelAnnouncesTheEnd) {
  Pair pair = open_pair();
  KernelKeys keys;
  ASSERT_GT(pair.server->take_kernel_keys(keys), 0u);
  pair.server->leave_writing_to_kernel();
  Bytes out;
  pair.server->end(out);
  EXPECT_TRUE(out.empty());
  const std::vector<Notice> notices = pair.server->take_notices();
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_EQ(notices[0].record_type, 21);
  EXPECT_EQ(notices[0].bytes, (Bytes{std::byte{1}, std::byte{0}})) << "warning, close_notify";
}

TEST_F(StreamTest, ThePeersNewKeysAreReadWhereTheKernelEncrypts) {
  for (const bool asks : {false, true}) {
    Pair pair = open_pair();
    KernelKeys keys;
    ASSERT_GT(pair.server->take_kernel_keys(keys), 0u);
    pair.server->leave_writing_to_kernel();
    ASSERT_TRUE(pair.client->update_keys(asks).ok());
    Bytes records;
    Bytes plain;
    Bytes out;
    ASSERT_TRUE(pair.client->write(pattern(20), records).ok());
    const Status status = read_all(*pair.server, records, plain, out);
    EXPECT_EQ(status.ok(), !asks) << status.to_string();
    if (asks) {
      EXPECT_NE(status.to_string().find("asks for new keys"), std::string::npos);
    } else {
      EXPECT_EQ(plain, pattern(20));
    }
    EXPECT_TRUE(out.empty());
  }
}

TEST_F(StreamTest, OnlyAServersFreshStreamHasKeysForTheKernel) {
  Pair pair = open_pair();
  KernelKeys keys;
  EXPECT_EQ(pair.client->take_kernel_keys(keys), 0u);
  Bytes records;
  ASSERT_TRUE(pair.server->write(pattern(1), records).ok());
  EXPECT_EQ(pair.server->take_kernel_keys(keys), 0u) << "the nonce of its first record is used";
  const auto unfinished = std::move(serve(authority_.issue_local())->accept()).value();
  EXPECT_EQ(unfinished->take_kernel_keys(keys), 0u);
}

}  // namespace
}  // namespace petps::tls
