// A broken frame never causes a crash, and its refusal always has a message. Each frame has memory
// of exactly its size, so that ASan detects a read beyond the end.
// Does not cover: frames larger than a few hundred bytes, and what a server does with a frame
// that decodes (tests/native/server).
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>

#include "base/clock.h"
#include "frames.h"
#include "tests/seed.h"

namespace petps::wire {
namespace {

constexpr uint64_t kDeadlineNs = 200'000'000'000;  // a hang is a failure
constexpr int kMutationsPerFrame = 30'000;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  Frame mutate(Frame frame) {
    const int changes = 1 + static_cast<int>(random_() % 4);
    for (int i = 0; i < changes; ++i) change(frame);
    return frame;
  }

 private:
  void change(Frame& frame) {
    if (frame.empty()) return;
    const size_t at = random_() % frame.size();
    switch (random_() % 6) {
      case 0:
        frame[at] ^= static_cast<std::byte>(1u << (random_() % 8));
        break;
      case 1:
        frame[at] = static_cast<std::byte>(random_());
        break;
      case 2:
        frame.resize(at);
        break;
      case 3:
        overwrite(frame, kEdges[random_() % std::size(kEdges)]);
        break;
      case 4:
        frame.insert(frame.end(), random_() % 16, std::byte{0});
        break;
      default:
        fix_length(frame);
        break;
    }
  }
  void overwrite(Frame& frame, uint64_t value) {
    const size_t width = size_t{1} << (random_() % 4);
    if (frame.size() < width) return;
    const size_t at = random_() % (frame.size() - width + 1) / width * width;
    std::memcpy(frame.data() + at, &value, width);
  }
  // Make the header agree with the size, so that the mutation reaches the body's decoder.
  void fix_length(Frame& frame) {
    if (frame.size() < kHeaderBytes) return;
    const auto length = static_cast<uint32_t>(frame.size() - kHeaderBytes);
    std::memcpy(frame.data() + offsetof(FrameHeader, body_bytes), &length, sizeof(length));
  }

  static constexpr uint64_t kEdges[] = {
      0,        1,          0x7f,       0x80,       0xff,
      0xffff,   0x7fffffff, 0x80000000, 0xffffffff, 0xffffffffffffffff,
      1u << 24, 65535,      65536,      65537,      0x2000000000000001};
  std::mt19937_64 random_;
};

TEST(Mutation, AMutatedFrameIsDecodedOrRefusedWithAMessage) {
  const uint64_t seed = tests::seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Mutator mutator(seed);
  const uint64_t start = base::monotonic_ns();
  size_t refused = 0;
  size_t accepted = 0;
  for (const NamedFrame& sample : sample_frames()) {
    for (int i = 0; i < kMutationsPerFrame; ++i) {
      const Frame mutated = mutator.mutate(sample.bytes);
      const std::unique_ptr<std::byte[]> exact(new std::byte[mutated.size()]);
      if (!mutated.empty()) std::memcpy(exact.get(), mutated.data(), mutated.size());
      const base::Status status = decode_any({exact.get(), mutated.size()});
      if (status.ok()) {
        ++accepted;
      } else {
        ++refused;
        ASSERT_FALSE(status.message().empty()) << sample.name << "\n" << to_hex(mutated);
      }
    }
    ASSERT_LT(base::monotonic_ns() - start, kDeadlineNs);
  }
  // Both outcomes must occur often; otherwise the mutations are too wild or too tame to test
  // anything.
  EXPECT_GT(refused, 1000u);
  EXPECT_GT(accepted, 1000u);
}

TEST(Mutation, EveryTruncatedFrameIsRefused) {
  for (const NamedFrame& sample : sample_frames()) {
    for (size_t n = 0; n < sample.bytes.size(); ++n) {
      const std::unique_ptr<std::byte[]> exact(new std::byte[n]);
      if (n > 0) std::memcpy(exact.get(), sample.bytes.data(), n);
      EXPECT_FALSE(decode_any({exact.get(), n}).ok()) << sample.name << " cut to " << n;
      // Make the header agree with the cut length. Only messages that end in text are still valid.
      if (n < kHeaderBytes || sample.name == "error" || sample.name == "status_reply") continue;
      const auto length = static_cast<uint32_t>(n - kHeaderBytes);
      // Fields that releases after the first append to the hello reply may be missing.
      if (sample.name == "hello_reply" && length == 200) continue;
      // The state of the tables may be missing too: 24 bytes, then 4 for the one alias.
      if (sample.name == "tables_state" && length == 0) continue;
      if (sample.name == "tables_state_reply" && n + 28 == sample.bytes.size()) continue;
      std::memcpy(exact.get() + offsetof(FrameHeader, body_bytes), &length, sizeof(length));
      const base::Status status = decode_any({exact.get(), n});
      EXPECT_FALSE(status.ok()) << sample.name << " cut to " << n;
    }
  }
}

}  // namespace
}  // namespace petps::wire
