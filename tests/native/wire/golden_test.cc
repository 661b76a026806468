// The bytes of one frame of each kind never change, so that clients and servers of different
// releases understand each other.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "frames.h"

namespace petps::wire {
namespace {

std::string read_golden(const std::string& name) {
  std::ifstream file(std::string(PETPS_GOLDEN_FOLDER) + "/wire/" + name + ".hex");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Golden, EveryFrameIsEncodedToItsGoldenBytes) {
  for (const NamedFrame& frame : sample_frames()) {
    EXPECT_EQ(to_hex(frame.bytes), read_golden(frame.name)) << "frame " << frame.name;
  }
}

TEST(Golden, EveryGoldenFrameIsDecoded) {
  for (const NamedFrame& frame : sample_frames()) {
    const Frame golden = from_hex(read_golden(frame.name));
    ASSERT_GE(golden.size(), kHeaderBytes) << frame.name;
    const base::Status status = decode_any(golden);
    EXPECT_TRUE(status.ok()) << frame.name << ": " << status.to_string();
  }
}

TEST(Golden, AHelloReplyOfTheFirstReleaseHasNoFeatures) {
  const Frame golden = from_hex(read_golden("hello_reply_first"));
  HelloReply reply;
  reply.features = 99;
  ASSERT_TRUE(decode_frame(decode_hello_reply, golden, reply).ok());
  EXPECT_EQ(reply.shard.map_version, 5u);
  EXPECT_EQ(reply.features, 0u);
}

TEST(Golden, AKeyKeepsItsPartition) {
  // XXH3-64 of 8 little-endian bytes, seed 0: the values that tests/native/base pins.
  EXPECT_EQ(partition_of(0, 1), 0u);
  EXPECT_EQ(partition_of(0, 1024), 0xc77b3abb6f87acd9u % 1024);
  EXPECT_EQ(partition_of(1, 1000), 0x2fbc593564db792eu % 1000);
}

}  // namespace
}  // namespace petps::wire
