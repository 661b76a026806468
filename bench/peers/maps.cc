// Hash maps from a key to the number of its row in an array, in this process. They are volatile.
#include <absl/container/flat_hash_map.h>

#include <cstring>
#include <libcuckoo/cuckoohash_map.hh>

#include "base/prefetch.h"
#include "bench/common/loaded_table.h"
#include "bench/common/memory.h"
#include "bench/peers/peer.h"

namespace petps::bench {
namespace {

struct AbslMap {
  absl::flat_hash_map<uint64_t, uint32_t> map;
  explicit AbslMap(uint64_t rows) { map.reserve(rows); }
  uint32_t find_or_add(uint64_t key) {
    return map.try_emplace(key, static_cast<uint32_t>(map.size())).first->second;
  }
  uint32_t find(uint64_t key) const {
    const auto found = map.find(key);
    if (found == map.end()) fail("absl: a loaded key is missing");
    return found->second;
  }
  void prefetch(uint64_t key) const { map.prefetch(key); }
};

struct CuckooMap {
  libcuckoo::cuckoohash_map<uint64_t, uint32_t> map;
  uint32_t next = 0;
  explicit CuckooMap(uint64_t rows) { map.reserve(rows); }
  uint32_t find_or_add(uint64_t key) {
    uint32_t row = next;  // map.size() counts
    if (map.upsert(
            key, [&](uint32_t existing) { row = existing; }, row))
      ++next;
    return row;
  }
  uint32_t find(uint64_t key) const {
    uint32_t row;
    if (!map.find(key, row)) fail("libcuckoo: a loaded key is missing");
    return row;
  }
  void prefetch(uint64_t) const {}
};

template <typename Map>
class MapPeer : public Peer {
 public:
  explicit MapPeer(const PeerShape& shape)
      : shape_(shape),
        map_(shape.rows),
        rows_(shape.rows * shape.row_bytes),
        places_(shape.request_keys) {}

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    for (size_t i = 0; i < keys.size(); ++i)
      std::memcpy(row(map_.find_or_add(keys[i])), rows + i * shape_.row_bytes, shape_.row_bytes);
  }
  // Prefetch keys some steps before they are searched, and rows before they are copied.
  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    constexpr size_t kAhead = 16;
    for (; !keys.empty(); keys = keys.subspan(shape_.request_keys)) {
      const size_t n = shape_.request_keys;
      for (size_t i = 0; i < n + 2 * kAhead; ++i) {
        if (i < n) map_.prefetch(keys[i]);
        if (i >= kAhead && i < n + kAhead) {
          places_[i - kAhead] = map_.find(keys[i - kAhead]);
          base::prefetch(row(places_[i - kAhead]), shape_.row_bytes);
        }
        if (i < 2 * kAhead) continue;
        std::memcpy(out, row(places_[i - 2 * kAhead]), shape_.row_bytes);
        out += shape_.row_bytes;
      }
    }
  }
  // A row would be copied while it changes.
  bool writes_beside_pulls() const override { return false; }

 private:
  std::byte* row(uint32_t number) { return rows_.at() + uint64_t{number} * shape_.row_bytes; }

  PeerShape shape_;
  Map map_;
  Memory rows_;
  std::vector<uint32_t> places_;
};

}  // namespace

std::unique_ptr<Peer> open_absl(const PeerShape& shape) {
  return std::make_unique<MapPeer<AbslMap>>(shape);
}
std::unique_ptr<Peer> open_libcuckoo(const PeerShape& shape) {
  return std::make_unique<MapPeer<CuckooMap>>(shape);
}

}  // namespace petps::bench
