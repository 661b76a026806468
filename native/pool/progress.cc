// Progress records: two 64-byte lines per partition, written alternately, so that a torn write
// leaves the other one whole.
#include <cstring>
#include <set>

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

bool is_whole(const ProgressEntry& entry) {
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

ProgressEntry entry_of(const Progress& progress, uint64_t turn) {
  ProgressEntry entry{};
  entry.instance = progress.instance;
  entry.partition = progress.partition;
  entry.run = progress.run;
  entry.seq = progress.seq;
  entry.offset = progress.offset;
  entry.version = progress.version;
  entry.target = progress.target;
  entry.turn = turn;
  entry.state = static_cast<uint32_t>(progress.state) | progress.publisher << 8;
  entry.checksum = entry_checksum(entry);
  return entry;
}

// Return the newest whole record of a pair; its turn is 0 if neither is whole.
ProgressEntry read_pair(const std::byte* pair) {
  ProgressEntry entries[2];
  std::memcpy(entries, pair, sizeof entries);
  ProgressEntry none{};
  const ProgressEntry& a = is_whole(entries[0]) ? entries[0] : none;
  const ProgressEntry& b = is_whole(entries[1]) ? entries[1] : none;
  return b.turn > a.turn ? b : a;
}

bool is_blank(const std::byte* pair) {
  static constexpr std::byte kZeros[128] = {};
  return std::memcmp(pair, kZeros, sizeof kZeros) == 0;
}

}  // namespace

void Pool::load_progress() {
  const std::byte* area = base_ + map_->progress();
  for (uint32_t pair = 0; pair < kMaxProgress; ++pair) {
    if (is_blank(area + pair * 128)) {
      if (!lost_power_) break;
      continue;  // after a power loss, a pair before the last one may be missing
    }
    const ProgressEntry entry = read_pair(area + pair * 128);
    catalogue_->progress_pairs = pair + 1;
    const ProgressPlace place{entry.turn, value_of(entry), pair};
    // Turn 0: the crash came before the pair's first record was whole, so no caller relies on it.
    if (entry.turn == 0 || catalogue_->instance(entry.instance) == nullptr) {
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
  for (uint32_t pair = catalogue_->progress_pairs; pair < kMaxProgress; ++pair) {
    if (read_pair(base_ + map_->progress() + pair * 128).turn != 0) {
      problems->push_back("progress record " + std::to_string(pair) +
                          " is behind the end of the list");
    }
  }
}

Status Pool::check_progress(std::span<const Progress> all) const {
  std::set<std::pair<uint32_t, uint32_t>> keys;
  size_t claims = 0;
  for (const Progress& progress : all) {
    if (progress.publisher > kMaxPublisherMark) {
      return Status(Code::kInvalidArgument, "a publisher's mark is at most " +
                                                std::to_string(kMaxPublisherMark) + ", not " +
                                                std::to_string(progress.publisher));
    }
    if (catalogue_->instance(progress.instance) == nullptr) {
      return Status(Code::kNotFound,
                    "instance " + std::to_string(progress.instance) + " does not exist");
    }
    const auto key = std::make_pair(progress.instance, progress.partition);
    // Two records of one pair without a drain between them could both be torn.
    if (!keys.insert(key).second) {
      return Status(Code::kInvalidArgument,
                    "progress of instance " + std::to_string(progress.instance) + " partition " +
                        std::to_string(progress.partition) + " appears twice in one batch");
    }
    if (!catalogue_->progress.contains(key)) ++claims;
  }
  const size_t left = catalogue_->free_progress.size() + kMaxProgress - catalogue_->progress_pairs;
  if (claims > left) {
    return Status(Code::kResourceExhausted, "a pool keeps progress of at most " +
                                                std::to_string(kMaxProgress) + " partitions");
  }
  return Status();
}

// Give a pair to each {instance, partition} that has none: freed pairs first, then fresh ones.
// The list of pairs ends at the first blank pair, so no record may become whole behind a blank
// pair. Otherwise a crash hides that record, and it comes back when later claims fill the gap. A
// single fresh pair needs no care, because the call drains its record before the next claim.
// Several fresh pairs first get a mark each, which is not a whole record, and one drain covers
// all marks.
Status Pool::claim_progress(std::span<const Progress> all, media::Flusher& flusher) {
  std::vector<Progress> fresh;
  std::unique_lock state(state_mutex_);
  for (const Progress& progress : all) {
    const auto key = std::make_pair(progress.instance, progress.partition);
    if (catalogue_->progress.contains(key)) continue;
    if (catalogue_->free_progress.empty()) {
      fresh.push_back(progress);
    } else {
      const ProgressPlace& freed = catalogue_->free_progress.back();
      catalogue_->progress.emplace(key, ProgressPlace{freed.turn, progress, freed.pair});
      catalogue_->free_progress.pop_back();
    }
  }
  state.unlock();
  if (fresh.size() > 1) {
    for (size_t i = 0; i < fresh.size(); ++i) {
      ProgressEntry mark{};  // turn 0
      mark.instance = fresh[i].instance;
      mark.partition = fresh[i].partition;
      flusher.copy(base_ + map_->progress() + (catalogue_->progress_pairs + i) * 128, &mark,
                   sizeof mark, media::Site::kProgressMark);
    }
    PETPS_RETURN_IF_ERROR(flusher.drain(media::Site::kProgressMarked));
  }
  state.lock();
  for (const Progress& progress : fresh) {
    catalogue_->progress.emplace(std::make_pair(progress.instance, progress.partition),
                                 ProgressPlace{0, progress, catalogue_->progress_pairs++});
  }
  return Status();
}

Status Pool::write_progress(std::span<const Progress> all, media::Flusher& flusher) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  PETPS_RETURN_IF_ERROR(check_progress(all));
  const uint32_t pairs_before = catalogue_->progress_pairs;
  PETPS_RETURN_IF_ERROR(claim_progress(all, flusher));
  for (const Progress& progress : all) {
    ProgressPlace& place = catalogue_->progress.at({progress.instance, progress.partition});
    place.turn += 1;
    {
      const std::lock_guard state(state_mutex_);
      place.value = progress;
    }
    const ProgressEntry entry = entry_of(progress, place.turn);
    std::byte* to = base_ + map_->progress() + place.pair * 128 + (place.turn % 2) * 64;
    flusher.copy(to, &entry, sizeof entry, media::Site::kProgress);
  }
  // Another thread may claim the next pair before the caller drains, so drain a single claim
  // here.
  return catalogue_->progress_pairs == pairs_before + 1 ? flusher.drain(media::Site::kProgressed)
                                                        : Status();
}

// Lower every progress. After a power loss under durability `process` the records may promise
// more than the rows hold, so every partition needs a base. A partition whose record is gone
// claims nothing; it is followed as a new one.
Status Pool::lower_progress(media::Flusher& flusher) {
  std::vector<Progress> all;
  for (const Progress& progress : all_progress()) {
    Progress lowered;
    lowered.instance = progress.instance;
    lowered.partition = progress.partition;
    lowered.run = progress.run;  // older runs stay fenced off
    const bool passes =
        progress.state == ProgressState::kPassing || progress.state == ProgressState::kLostPower;
    if (map_->format_version >= 3) {
      lowered.state = ProgressState::kLostPower;
      lowered.target = passes ? progress.target : 0;
    } else {  // a reader of version 2 knows no such state
      lowered.state = ProgressState::kCatchingUp;
      lowered.run = passes ? std::max(progress.run, progress.target) : progress.run;
    }
    all.push_back(lowered);
  }
  PETPS_RETURN_IF_ERROR(write_progress(all, flusher));
  // The list ends at the first blank pair, and nothing may be behind its end. So fill blank pairs
  // before the end with instance 0, which does not exist; a later claim takes them over.
  for (uint32_t pair = 0; pair < catalogue_->progress_pairs; ++pair) {
    std::byte* const at = base_ + map_->progress() + pair * 128;
    if (!is_blank(at)) continue;
    const ProgressEntry filler = entry_of(Progress{}, 1);
    flusher.copy(at + 64, &filler, sizeof filler, media::Site::kProgress);
  }
  return Status();
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
