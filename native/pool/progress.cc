// Progress records: two 64-byte lines a partition, written alternately, so that a torn write leaves the other one whole.
#include <cstring>

#include "pool/catalogue.h"
#include "pool/layout.h"
#include "pool/pool.h"

namespace petps::pool {

using base::Code;
using base::Status;
using layout::ProgressEntry;

namespace {

uint32_t entry_checksum(const ProgressEntry& entry) {
  return static_cast<uint32_t>(base::checksum64(&entry, offsetof(ProgressEntry, checksum)));
}

bool whole(const ProgressEntry& entry) {
  return entry.turn != 0 && entry.checksum == entry_checksum(entry);
}

Progress value_of(const ProgressEntry& e) {
  return {e.instance,
          e.partition,
          e.run,
          e.seq,
          e.offset,
          e.version,
          static_cast<ProgressState>(e.state & 0xFF),
          e.target,
          e.state >> 8};
}

// The newest whole record of a pair; turn 0 when neither is.
ProgressEntry read_pair(const std::byte* pair) {
  ProgressEntry entries[2];
  std::memcpy(entries, pair, sizeof entries);
  ProgressEntry none{};
  const ProgressEntry& a = whole(entries[0]) ? entries[0] : none;
  const ProgressEntry& b = whole(entries[1]) ? entries[1] : none;
  return b.turn > a.turn ? b : a;
}

bool blank(const std::byte* pair) {
  static constexpr std::byte kZeros[128] = {};
  return std::memcmp(pair, kZeros, sizeof kZeros) == 0;
}

}  // namespace

void Pool::load_progress() {
  const std::byte* area = base_ + map_->progress();
  for (uint32_t pair = 0; pair < kMaxProgress && !blank(area + pair * 128); ++pair) {
    const ProgressEntry entry = read_pair(area + pair * 128);
    catalogue_->progress_pairs = pair + 1;
    // A first record torn by a crash was never acknowledged: the pair stays unused, so that pairs need no owner of their own.
    if (entry.turn == 0) continue;
    const ProgressPlace place{entry.turn, value_of(entry), pair};
    if (catalogue_->instance(entry.instance) == nullptr) {
      catalogue_->free_progress.push_back(place);
    } else {
      catalogue_->progress[{entry.instance, entry.partition}] = place;
    }
  }
}

void Pool::verify_progress(std::vector<std::string>* problems) const {
  std::lock_guard lock(mutex_);
  for (const auto& [key, place] : catalogue_->progress) {
    const ProgressEntry entry = read_pair(base_ + map_->progress() + place.pair * 128);
    if (entry.turn != place.turn || entry.instance != key.first || entry.partition != key.second) {
      problems->push_back("progress of instance " + std::to_string(key.first) + " partition " +
                          std::to_string(key.second) + " reads back differently");
    }
  }
}

Status Pool::write_progress(const Progress& progress, media::Flusher& flusher) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(writable());
  if (progress.publisher > kMaxPublisherMark) {
    return Status(Code::kInvalidArgument, "a publisher's mark is at most " +
                                              std::to_string(kMaxPublisherMark) + ", not " +
                                              std::to_string(progress.publisher));
  }
  const auto key = std::make_pair(progress.instance, progress.partition);
  std::unique_lock state(state_mutex_);
  if (catalogue_->instance(progress.instance) == nullptr) {
    return Status(Code::kNotFound,
                  "instance " + std::to_string(progress.instance) + " does not exist");
  }
  auto known = catalogue_->progress.find(key);
  bool claims_pair = false;
  if (known == catalogue_->progress.end() && !catalogue_->free_progress.empty()) {
    known = catalogue_->progress.emplace(key, catalogue_->free_progress.back()).first;
    catalogue_->free_progress.pop_back();
  } else if (known == catalogue_->progress.end()) {
    claims_pair = true;
    if (catalogue_->progress_pairs >= kMaxProgress) {
      return Status(Code::kResourceExhausted, "a pool keeps progress of at most " +
                                                  std::to_string(kMaxProgress) + " partitions");
    }
    known =
        catalogue_->progress.emplace(key, ProgressPlace{0, {}, catalogue_->progress_pairs++}).first;
  }
  ProgressPlace& place = known->second;
  place.turn += 1;
  place.value = progress;
  state.unlock();  // the place itself changes under mutex_ only
  ProgressEntry entry{};
  entry.instance = progress.instance;
  entry.partition = progress.partition;
  entry.run = progress.run;
  entry.seq = progress.seq;
  entry.offset = progress.offset;
  entry.version = progress.version;
  entry.target = progress.target;
  entry.turn = place.turn;
  entry.state = static_cast<uint32_t>(progress.state) | progress.publisher << 8;
  entry.checksum = entry_checksum(entry);
  std::byte* to = base_ + map_->progress() + place.pair * 128 + (place.turn % 2) * 64;
  flusher.copy(to, &entry, sizeof entry, media::Site::kProgress);
  // Reopening stops at the first blank pair, so a pair is durable before the next one can be claimed.
  return claims_pair ? flusher.drain(media::Site::kProgressed) : Status();
}

std::optional<Progress> Pool::read_progress(uint32_t instance, uint32_t partition) const {
  const std::lock_guard state(state_mutex_);
  const auto known = catalogue_->progress.find({instance, partition});
  if (known == catalogue_->progress.end()) return std::nullopt;
  return known->second.value;
}

std::vector<Progress> Pool::all_progress() const {
  const std::lock_guard state(state_mutex_);
  std::vector<Progress> all;
  for (const auto& [key, place] : catalogue_->progress) all.push_back(place.value);
  return all;
}

}  // namespace petps::pool
