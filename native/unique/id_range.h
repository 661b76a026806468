// The distinct ids of a range that is not much larger than their number: a bit each. They come in
// ascending order, for a third of what hashing costs.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace petps::unique {

class IdRange {
 public:
  // Whether the ids lie close enough together; if so they are in the set, which held others before.
  // At most 16 bits an id, and 4 MiB, so that the bits stay near the processor.
  bool hold(std::span<const uint64_t> ids) {
    if (ids.empty()) return false;
    uint64_t last = ids[0];
    lowest_ = ids[0];
    const uint64_t bits_max = std::min<uint64_t>(ids.size() * kBitsPerId, kBitsMax);
    for (size_t i = 0; i < ids.size(); i += kPieceIds) {  // ids that are far apart show soon
      for (const uint64_t id : ids.subspan(i, std::min(kPieceIds, ids.size() - i))) {
        lowest_ = std::min(lowest_, id);
        last = std::max(last, id);
      }
      if (last - lowest_ >= bits_max) return false;
    }
    words_.assign((last - lowest_) / 64 + 1, 0);
    for (const uint64_t id : ids) words_[word_of(id)] |= bit_of(id);
    return true;
  }

  // Writes the ids, ascending, to `out`; returns how many they are. After it place_of() is right.
  size_t list(uint64_t* out) {
    starts_.resize(words_.size());
    size_t count = 0;
    for (size_t at = 0; at < words_.size(); ++at) {
      starts_[at] = static_cast<uint32_t>(count);
      for (uint64_t word = words_[at]; word != 0; word &= word - 1) {
        out[count++] = lowest_ + 64 * at + static_cast<uint64_t>(std::countr_zero(word));
      }
    }
    return count;
  }

  // Where list() wrote an id of the set.
  uint32_t place_of(uint64_t id) const {
    const size_t at = word_of(id);
    return starts_[at] + static_cast<uint32_t>(std::popcount(words_[at] & (bit_of(id) - 1)));
  }

 private:
  static constexpr uint64_t kBitsPerId = 16;
  static constexpr uint64_t kBitsMax = uint64_t{1} << 25;
  static constexpr size_t kPieceIds = 512;

  size_t word_of(uint64_t id) const { return static_cast<size_t>((id - lowest_) / 64); }
  uint64_t bit_of(uint64_t id) const { return uint64_t{1} << ((id - lowest_) % 64); }

  uint64_t lowest_ = 0;
  std::vector<uint64_t> words_;   // bit i of word w: lowest_ + 64 w + i is there
  std::vector<uint32_t> starts_;  // ids in the words before
};

}  // namespace petps::unique
