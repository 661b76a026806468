// A set of ids that numbers them in the order in which they come: open addressing, at most half
// full.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace petps::unique {

__extension__ typedef unsigned __int128 Product;

// Both halves of one product, so that ids in a row, of one stride or alike in their low bits are
// spread over all bits. Parts are chosen by the highest bits, slots by the lowest.
inline uint64_t hash_of(uint64_t id) {
  const Product product = static_cast<Product>(id ^ 0x2d358dccaa6c78a5u) * 0x8bb84b93962eacc9u;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class IdSet {
 public:
  // Empties the set, for a part of `ids` ids: room for all of them, unless there are many: they may
  // be few distinct ones.
  void begin(size_t ids, bool places) {
    has_empty_ = false;
    clear(std::bit_ceil(2 * std::min(ids, kFirstIds)), places);
  }

  // Makes room for `more`. added: what was added since begin().
  template <bool kPlaces>
  void make_room(std::span<const uint64_t> added, size_t more) {
    if (2 * (added.size() + more) <= capacity_) return;
    clear(4 * capacity_, kPlaces);
    for (uint32_t place = 0; place < added.size(); ++place) {  // kEmpty only meets a free slot
      const size_t slot = find(added[place]);
      ids_[slot] = added[place];
      if constexpr (kPlaces) places_[slot] = place;
    }
  }

  // The place of an id in `out`, which has `count`; a new one is appended. Only with kPlaces is the
  // place returned true. Writes out[*count] also for an id that is there: a branch would be
  // mispredicted every second time.
  template <bool kPlaces>
  uint32_t add(uint64_t id, uint64_t* out, uint32_t* count) {
    if (id == kEmpty) [[unlikely]]
      return add_empty(out, count);
    const size_t slot = find(id);
    const bool is_new = ids_[slot] == kEmpty;
    uint32_t place = *count;
    if constexpr (kPlaces) {
      place = is_new ? place : places_[slot];
      places_[slot] = place;
    }
    ids_[slot] = id;
    out[*count] = id;
    *count += is_new ? 1 : 0;
    return place;
  }

 private:
  static constexpr uint64_t kEmpty =
      ~uint64_t{0};  // a free slot; the id of this number is kept apart
  static constexpr size_t kFirstIds = 65536;

  void clear(size_t capacity, bool places) {
    capacity_ = capacity;
    if (ids_.size() < capacity) ids_.resize(capacity);
    if (places && places_.size() < capacity) places_.resize(capacity);
    std::fill_n(ids_.begin(), capacity, kEmpty);
  }

  // Where the id is, or the free slot where it belongs.
  size_t find(uint64_t id) const {
    size_t slot = hash_of(id) & (capacity_ - 1);
    // Zero where one of both is: whether an id is new or there is as good as random, so it must not
    // be a branch.
    while (std::min(ids_[slot] ^ id, ids_[slot] - kEmpty) != 0) slot = (slot + 1) & (capacity_ - 1);
    return slot;
  }

  uint32_t add_empty(uint64_t* out, uint32_t* count) {
    if (!has_empty_) {
      has_empty_ = true;
      empty_place_ = *count;
      out[(*count)++] = kEmpty;
    }
    return empty_place_;
  }

  std::vector<uint64_t> ids_;
  std::vector<uint32_t> places_;  // of the ids in their slots
  size_t capacity_ = 0;           // a power of two, at most the size of ids_
  bool has_empty_ = false;
  uint32_t empty_place_ = 0;
};

}  // namespace petps::unique
