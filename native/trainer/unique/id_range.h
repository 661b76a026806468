// The distinct ids of a range that is not much larger than their number, as one bit for each id of
// the range. This gives ascending order, and costs a third of hashing.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace petps::unique {

// A set of ids that are close together.
class IdRange {
 public:
  // Replace the content of the set by `ids` if they are close enough together. Return whether they
  // are. The limits are 16 bits for each id, and 4 MiB, so that the bits stay in the caches.
  bool hold(std::span<const uint64_t> ids) {
    if (ids.empty()) return false;
    uint64_t last = ids[0];
    lowest_ = ids[0];
    const uint64_t bits_max = std::min<uint64_t>(ids.size() * kBitsPerId, kBitsMax);
    // Check the range after each piece, to give up early on ids that are far apart.
    for (size_t i = 0; i < ids.size(); i += kPieceIds) {
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

  // Write the ids, ascending, to `out`; return how many there are. place_of() is valid after this.
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

  // Return the index in `out` at which list() wrote an id of the set.
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
  std::vector<uint64_t> words_;   // bit i of word w: the set contains lowest_ + 64 w + i
  std::vector<uint32_t> starts_;  // for each word, the number of ids in the words before it
};

}  // namespace petps::unique
