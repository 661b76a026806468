// A set of ids that numbers them in the order in which they are added: open addressing, at most
// half full.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace petps::unique {

__extension__ typedef unsigned __int128 Product;

// Return a hash that uses both halves of one product, so that consecutive ids, ids of one stride
// and ids with equal low bits are spread over all bits. The highest bits choose the part, the
// lowest bits the slot.
inline uint64_t hash_of(uint64_t id) {
  const Product product = static_cast<Product>(id ^ 0x2d358dccaa6c78a5u) * 0x8bb84b93962eacc9u;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class IdSet {
 public:
  // Empty the set for a part of `ids` ids. Make room for all of them, but for at most kFirstIds:
  // many ids may contain few distinct ones. places: whether add<true> will be called.
  void begin(size_t ids, bool places) {
    has_empty_ = false;
    clear(std::bit_ceil(2 * std::min(ids, kFirstIds)), places);
  }

  // Make room for `more` ids. added: the ids that were added since begin(), in order.
  template <bool kPlaces>
  void make_room(std::span<const uint64_t> added, size_t more) {
    if (2 * (added.size() + more) <= capacity_) return;
    clear(4 * capacity_, kPlaces);
    // If kEmpty is among the ids, storing it in a free slot changes nothing.
    for (uint32_t place = 0; place < added.size(); ++place) {
      const size_t slot = find(added[place]);
      ids_[slot] = added[place];
      if constexpr (kPlaces) places_[slot] = place;
    }
  }

  // Add an id; `out` has *count ids and gets a new id appended. Return the id's place in `out`; the
  // place is valid only with kPlaces. This writes out[*count] even if the id is present, so `out`
  // needs room for one more id: a branch would be mispredicted every second time.
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
  // Marks a free slot. The id with this value is kept apart (has_empty_).
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static constexpr size_t kFirstIds = 65536;

  void clear(size_t capacity, bool places) {
    capacity_ = capacity;
    if (ids_.size() < capacity) ids_.resize(capacity);
    if (places && places_.size() < capacity) places_.resize(capacity);
    std::fill_n(ids_.begin(), capacity, kEmpty);
  }

  // Return the slot of the id, or the free slot where it belongs.
  size_t find(uint64_t id) const {
    size_t slot = hash_of(id) & (capacity_ - 1);
    // The minimum is 0 if the slot has the id or is free. One condition tests both, because a
    // branch on whether the id is new would be unpredictable.
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
  std::vector<uint32_t> places_;  // for each slot, the place of its id
  size_t capacity_ = 0;           // a power of two, at most the size of ids_
  bool has_empty_ = false;
  uint32_t empty_place_ = 0;
};

}  // namespace petps::unique
