#include "pool/pool.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "base/check.h"
#include "pool/catalogue.h"
#include "pool/layout.h"

namespace petps::pool {

using base::Code;
using base::Result;
using base::Status;
using media::Flusher;
using media::Site;

namespace {

Status not_a_pool_error(const std::string& path, const std::string& why) {
  return Status(Code::kInvalidArgument, "'" + path + "' is not a petps pool: " + why +
                                            "; name a file that `petps create` made");
}

Status cut_short_error(const std::string& path, uint64_t needed, uint64_t available) {
  return Status(Code::kDataLoss, "pool '" + path + "' is cut short: its extents need " +
                                     std::to_string(needed) + " bytes and it has " +
                                     std::to_string(available) +
                                     "; copy it again while no server has it open");
}

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Compute the checksum: of the header with its checksum field zeroed, then of the records behind
// it.
uint64_t superblock_checksum(const std::byte* copy, uint32_t length) {
  layout::Superblock header;
  std::memcpy(&header, copy, sizeof header);
  header.checksum = 0;
  const uint64_t parts[2] = {base::checksum64(&header, sizeof header),
                             base::checksum64(copy + sizeof header, length - sizeof header)};
  return base::checksum64(parts, sizeof parts);
}

// A private copy of a superblock copy, because a writer may be changing the bytes in the medium.
struct Copy {
  layout::Superblock header;
  const layout::Map* map = nullptr;  // null: the copy is not whole
  int number = 0;
  std::vector<std::byte> bytes;
};

Copy read_copy(const media::Media& medium, const layout::Map& map, int number) {
  Copy copy;
  const uint64_t offset = map.superblock(number);
  layout::Superblock& header = copy.header;
  if (offset + sizeof header > medium.size()) return copy;
  std::memcpy(&header, medium.base() + offset, sizeof header);
  if (header.signature != layout::kSignature || header.length < sizeof header ||
      header.length > map.superblock_bytes || offset + header.length > medium.size())
    return copy;
  copy.bytes.assign(medium.base() + offset, medium.base() + offset + header.length);
  std::memcpy(&header, copy.bytes.data(), sizeof header);
  if (superblock_checksum(copy.bytes.data(), static_cast<uint32_t>(copy.bytes.size())) !=
          header.checksum ||
      header.length != copy.bytes.size() || &layout::map_of(header.format_version) != &map)
    return copy;
  copy.map = &map;
  copy.number = number;
  return copy;
}

// Return the newest whole copy. Copy 0 is at the same place in every map, copy 1 is not.
Copy newest_copy(const media::Media& medium) {
  Copy newest;
  for (const layout::Map* map : {&layout::kMap, &layout::kMapBefore3}) {
    for (const int number : {0, 1}) {
      Copy copy = read_copy(medium, *map, number);
      const bool is_newer = newest.map == nullptr || copy.header.sequence > newest.header.sequence;
      if (copy.map != nullptr && is_newer) newest = std::move(copy);
    }
  }
  return newest;
}

bool is_signed(const media::Media& medium) {
  for (const layout::Map* map : {&layout::kMap, &layout::kMapBefore3}) {
    for (const int number : {0, 1}) {
      const uint64_t offset = map->superblock(number);
      uint64_t signature = 0;
      if (offset + sizeof signature <= medium.size())
        std::memcpy(&signature, medium.base() + offset, sizeof signature);
      if (signature == layout::kSignature) return true;
    }
  }
  return false;
}

// A writer changes one copy at a time, so a read finds a whole copy unless the writer changed
// both copies during the read.
constexpr int kTornTries = 100;

bool is_valid_unit(uint64_t unit) {
  return unit >= kTestUnitBytes && unit <= (uint64_t{64} << 20) && (unit & (unit - 1)) == 0;
}

}  // namespace

std::array<uint8_t, 16> random_uuid() {
  std::random_device source;
  std::array<uint8_t, 16> uuid;
  for (auto& byte : uuid) byte = static_cast<uint8_t>(source());
  return uuid;
}

namespace {
std::optional<std::array<uint8_t, 16>>& boot_id_for_test() {
  static std::optional<std::array<uint8_t, 16>> id;
  return id;
}
}  // namespace

void set_boot_id_for_test(std::optional<std::array<uint8_t, 16>> id) { boot_id_for_test() = id; }

std::array<uint8_t, 16> current_boot_id() {
  if (boot_id_for_test()) return *boot_id_for_test();
  std::array<uint8_t, 16> id{};
  const int file = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (file < 0) return id;
  char text[64] = {};
  const ssize_t bytes = ::read(file, text, sizeof text - 1);
  ::close(file);
  size_t nibble = 0;
  for (ssize_t i = 0; i < bytes && nibble < 32; ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) continue;
    id[nibble / 2] = static_cast<uint8_t>((id[nibble / 2] << 4) | digit);
    ++nibble;
  }
  return id;
}

Pool::Pool()
    : map_(&layout::kMap),
      format_version_(layout::kMap.format_version),
      catalogue_(std::make_unique<Catalogue>()) {}
Pool::~Pool() = default;

uint64_t Pool::first_extent() const { return round_up(map_->metadata_bytes, unit_bytes_); }

Result<std::unique_ptr<Pool>> Pool::create(const Options& options) {
  if (!is_valid_unit(options.unit_bytes)) {
    return Status(Code::kInvalidArgument, "pool unit must be a power of two from 64 KiB to 64 MiB");
  }
  auto medium = media::Media::create(options.media,
                                     round_up(layout::kMap.metadata_bytes, options.unit_bytes));
  if (!medium.ok()) return medium.status();
  auto pool = format(std::move(medium).value(), options.unit_bytes);
  if (!pool.ok()) return undo_create(options, pool.status());
  return pool;
}

Status Pool::undo_create(const Options& options, const Status& reason) {
  const std::string& path = options.media.path;
  if (path.empty()) return reason;
  const Status removed = media::Media::discard(path);
  if (removed.ok()) return reason;
  return Status(reason.code(),
                std::string(reason.message()) +
                    "; the unfinished pool is left behind: " + std::string(removed.message()));
}

Result<std::unique_ptr<Pool>> Pool::open(const Options& options) {
  media::Options of_medium = options.media;
  of_medium.own_blocks = false;  // attach() does it, for all but free extents
  auto medium = media::Media::open(of_medium);
  if (!medium.ok()) return medium.status();
  return attach(std::move(medium).value());
}

Result<std::unique_ptr<Pool>> Pool::format(std::unique_ptr<media::Media> medium,
                                           uint64_t unit_bytes) {
  std::unique_ptr<Pool> pool(new Pool());
  pool->media_ = std::move(medium);
  pool->base_ = pool->media_->base();
  pool->unit_bytes_ = unit_bytes;
  pool->uuid_ = random_uuid();
  pool->generation_ = 1;
  pool->was_clean_ = true;
  pool->end_ = pool->first_extent();
  if (pool->media_->size() < pool->end_) PETPS_RETURN_IF_ERROR(pool->media_->grow(pool->end_));
  Catalogue& catalogue = *pool->catalogue_;
  catalogue.durability = pool->media_->durability();
  catalogue.boot_id = current_boot_id();
  catalogue.clean = true;
  // Write both copies, so that one is whole even if the next write of the other one tears.
  PETPS_RETURN_IF_ERROR(pool->write_superblock());
  PETPS_RETURN_IF_ERROR(pool->write_superblock());
  return pool;
}

Result<std::unique_ptr<Pool>> Pool::attach(std::unique_ptr<media::Media> medium) {
  std::unique_ptr<Pool> pool(new Pool());
  pool->media_ = std::move(medium);
  pool->base_ = pool->media_->base();
  pool->read_only_ = pool->media_->read_only();
  if (!pool->read_only_) {
    const uint64_t metadata = std::min(pool->media_->size(), layout::kMap.metadata_bytes);
    PETPS_RETURN_IF_ERROR(pool->media_->own_blocks(0, metadata));
  }
  PETPS_RETURN_IF_ERROR(pool->load_superblock());
  PETPS_RETURN_IF_ERROR(pool->load_extents());
  pool->media_->forget_beyond(pool->end_);
  PETPS_RETURN_IF_ERROR(pool->load_slots());
  pool->load_progress();
  pool->publish_snapshot();
  return pool;
}

Status Pool::load_superblock() {
  const std::string& path = media_->path();
  if (media_->size() < layout::kMapBefore3.metadata_bytes) {
    return not_a_pool_error(path, "it is shorter than a pool's metadata (" +
                                      std::to_string(media_->size()) + " bytes)");
  }
  Copy copy = newest_copy(*media_);
  for (int tries = media_->is_read_beside() ? kTornTries : 0; copy.map == nullptr && tries > 0;
       --tries)
    copy = newest_copy(*media_);
  if (copy.map == nullptr) {
    if (!is_signed(*media_)) return not_a_pool_error(path, "its signature is missing");
    return Status(Code::kDataLoss,
                  "both superblock copies of pool '" + path +
                      "' fail their checksum; restore the pool from a base (petps load)");
  }
  const layout::Superblock& header = copy.header;
  if (header.format_version < layout::kOldestFormatVersion ||
      header.format_version > layout::kFormatVersion) {
    return Status(
        Code::kUnimplemented,
        "pool '" + path + "' has format version " + std::to_string(header.format_version) +
            ", this build reads versions " + std::to_string(layout::kOldestFormatVersion) + " to " +
            std::to_string(layout::kFormatVersion) +
            "; open it with the petps that wrote it, export it, and load the export here");
  }
  map_ = copy.map;
  format_version_ = std::max(header.format_version, map_->format_version);
  if (!is_valid_unit(header.unit_bytes)) {
    return Status(Code::kDataLoss, "pool '" + path + "' has an impossible unit of " +
                                       std::to_string(header.unit_bytes) +
                                       " bytes; restore it from a base (petps load)");
  }
  std::copy(std::begin(header.uuid), std::end(header.uuid), uuid_.begin());
  unit_bytes_ = header.unit_bytes;
  generation_ = header.generation;
  was_clean_ = header.clean != 0;
  // After an unclean stop no bucket's tags are trusted until they are healed, so raise the
  // generation; begin_writing() makes the raise durable. A reader beside the writer sees each of
  // the writer's stores, so it trusts what the writer trusts, even after the writer's end.
  const auto boot = current_boot_id();
  const bool same_boot =
      boot != decltype(boot){} && std::equal(boot.begin(), boot.end(), header.boot_id);
  if (!was_clean_ && !(media_->is_read_beside() && same_boot)) generation_ += 1;
  const auto durability = static_cast<media::Durability>(header.durability);
  media_->set_durability(durability);
  // On dax every drained store is durable, whatever the superblock says.
  lost_power_ = !was_clean_ && !same_boot && media_->kind() == media::Kind::kFile &&
                durability == media::Durability::kProcess;
  return catalogue_->parse(copy.bytes.data(), header, copy.number, path);
}

uint64_t Pool::sequence() const { return catalogue_->sequence; }

uint64_t Pool::newest_sequence() const {
  uint64_t newest = 0;
  for (const int copy : {0, 1}) {
    auto* word = reinterpret_cast<uint64_t*>(base_ + map_->superblock(copy) +
                                             offsetof(layout::Superblock, sequence));
    newest = std::max(newest, std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire));
  }
  return newest;
}

Status Pool::load_extents() {
  end_ = first_extent();
  if (end_ > media_->size()) return cut_short_error(media_->path(), end_, media_->size());
  const auto* words = reinterpret_cast<const uint64_t*>(base_ + map_->extents());
  for (uint64_t i = 0; i < map_->max_extents() && words[i] != 0; ++i) {
    layout::ExtentWord extent;
    if (!layout::unpack_extent(words[i], i, &extent)) {
      return Status(Code::kDataLoss, "extent record " + std::to_string(i) + " of pool '" +
                                         media_->path() +
                                         "' is corrupt; restore the pool from a base (petps load)");
    }
    const uint64_t bytes = extent.units * unit_bytes_;
    if (end_ + bytes > media_->size() && media_->is_read_beside()) media_->refresh_size();
    // The record reached the disk before the power loss; the file's new length did not.
    if (end_ + bytes > media_->size() && lost_power_) break;
    if (end_ + bytes > media_->size())
      return cut_short_error(media_->path(), end_ + bytes, media_->size());
    catalogue_->extents.push_back({extent.table, extent.kind, end_, bytes});
    catalogue_->next_table = std::max(catalogue_->next_table, extent.table + 1);
    end_ += bytes;
  }
  return Status();
}

Status Pool::load_slots() {
  for (const TableRecord& record : catalogue_->tables) {
    catalogue_->slots[record.id] =
        std::make_unique<Slots>(*this, record.id, record.spec.row_bytes, record.spec.capacity);
  }
  std::unordered_map<uint64_t, const ExtentPlace*> buckets;  // by offset
  for (ExtentPlace& place : catalogue_->extents) {
    const auto slots = catalogue_->slots.find(place.table);
    if (slots == catalogue_->slots.end()) {
      place.table = 0;
    } else if (place.kind == static_cast<uint32_t>(layout::ExtentKind::kSlots)) {
      slots->second->add(place.offset, place.bytes, /*old=*/true);
    } else if (place.kind == static_cast<uint32_t>(layout::ExtentKind::kClocks)) {
      Clocks& clocks = catalogue_->clocks[place.table];
      clocks.offset = place.offset;
      clocks.bytes = place.bytes;
    } else if (catalogue_->table(place.table)->bucket_offset != place.offset) {
      place.table = 0;  // of an array that was copied, or was the table's before it grew
    } else {
      buckets.emplace(place.offset, &place);
    }
  }
  if (!read_only_) PETPS_RETURN_IF_ERROR(own_used_blocks());
  for (TableRecord& record : catalogue_->tables) {
    PETPS_RETURN_IF_ERROR(load_clocks(record));
    const auto place = buckets.find(record.bucket_offset);
    const bool has_buckets = place != buckets.end() && place->second->table == record.id &&
                             record.bucket_count <= place->second->bytes / layout::kBucketBytes;
    const Slots& slots = *catalogue_->slots.at(record.id);
    if (has_buckets && (record.default_row == 0 || slots.is_slot(record.default_row))) {
      if (record.default_row != 0) {
        const std::byte* row = slots.row(record.default_row);
        record.spec.default_row.assign(row, row + record.spec.row_bytes);
      }
      continue;
    }
    return Status(Code::kDataLoss, "table '" + record.spec.name + "' of pool '" + media_->path() +
                                       "' lies outside the extents that are recorded for it; "
                                       "restore the pool from a base (petps load)");
  }
  return Status();
}

Status Pool::check_writable() const {
  if (read_only_) {
    return Status(Code::kFailedPrecondition, "pool '" + media_->path() + "' is open read-only");
  }
  if (media_->failed()) {
    return Status(Code::kFailedPrecondition,
                  "pool '" + media_->path() +
                      "' is read-only because a write-back failed; check the disk, then restart");
  }
  return Status();
}

// Write the superblock. It is on the disk when this returns, whatever the durability. So names
// never go back, a copy is whole before the other one is overwritten, and no bucket has a
// generation that the superblock does not know.
Status Pool::write_superblock() {
  Catalogue& catalogue = *catalogue_;
  catalogue.sequence += 1;
  catalogue.newest ^= 1;
  std::vector<std::byte> image = catalogue.serialise(*this);
  layout::Superblock header;
  std::memcpy(&header, image.data(), sizeof header);
  header.checksum = superblock_checksum(image.data(), header.length);
  std::memcpy(image.data(), &header, sizeof header);
  Flusher flusher(*media_);
  std::byte* const copy = base_ + map_->superblock(catalogue.newest);
  flusher.copy(copy, image.data(), image.size(), Site::kSuperblock);
  const Status drain_status = flusher.drain(Site::kSuperblockDrain);
  const Status sync_status = media_->sync_range(copy, image.size(), Site::kSuperblockSync);
  PETPS_RETURN_IF_ERROR(drain_status);
  PETPS_RETURN_IF_ERROR(sync_status);
  publish_snapshot();
  return Status();
}

// Publish a snapshot for readers, so that no reader waits for the next change to become durable.
void Pool::publish_snapshot() {
  auto next = std::make_shared<Snapshot>();
  next->tables = catalogue_->tables;
  next->names = {catalogue_->instances, catalogue_->aliases, catalogue_->sequence};
  const std::lock_guard state(state_mutex_);
  snapshot_ = std::move(next);
}

std::shared_ptr<const Pool::Snapshot> Pool::snapshot() const {
  const std::lock_guard state(state_mutex_);
  return snapshot_;
}

Status Pool::begin_writing() {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  catalogue_->clean = false;
  // A pool that lost power keeps its old boot id, and so its state, until it is accepted.
  if (!lost_power_) catalogue_->boot_id = current_boot_id();
  Flusher flusher(*media_);
  // A process that was killed may have left its writes in caches: visible now, gone after a power
  // cut. So first make durable what this open builds on. Even for a clean pool that is the
  // superblock copy that was read, because the other one is overwritten next.
  flusher.flush(base_ + map_->superblock(catalogue_->newest), map_->superblock_bytes,
                Site::kAdoptedMetadata);
  if (!was_clean_) {
    if (!catalogue_->extents.empty())
      flusher.flush(base_ + map_->extents(), catalogue_->extents.size() * 8,
                    Site::kAdoptedMetadata);
    const uint64_t progress = catalogue_->progress_pairs * uint64_t{128};
    if (progress > 0) flusher.flush(base_ + map_->progress(), progress, Site::kAdoptedMetadata);
    for (const auto& [table, clocks] : catalogue_->clocks)
      flusher.flush(base_ + clocks.offset, clocks.partitions.size() * layout::kClockPairBytes,
                    Site::kAdoptedMetadata);
  }
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kAdoptedDrain));
  PETPS_RETURN_IF_ERROR(media_->sync_range(base_ + map_->superblock(catalogue_->newest),
                                           map_->superblock_bytes, Site::kAdoptedSync));
  return write_superblock();
}

Status Pool::finish_clean() {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  if (lost_power_) return lost_power_refusal();
  // The clean flag must not reach the disk before what it vouches for, whatever the durability.
  PETPS_RETURN_IF_ERROR(sync_everything(Site::kCloseSync));
  catalogue_->clean = true;
  return write_superblock();
}

// Sync everything. A failed sync loses pages of any age, and the next sync succeeds without them.
// That equals a power loss, so record it in the superblock (boot id 0) if that can still be
// written.
Status Pool::sync_everything(Site site) {
  const media::Durability before = media_->durability();
  media_->set_durability(media::Durability::kPower, site);
  if (!media_->failed() || before == media::Durability::kPower) return check_writable();
  media_->set_durability(before);
  catalogue_->boot_id = {};
  [[maybe_unused]] const Status failed = write_superblock();
  return check_writable();
}

Status Pool::lost_power_refusal() const {
  return Status(Code::kFailedPrecondition,
                "pool '" + media_->path() +
                    "' has durability 'process' and the machine went down while it was open (or "
                    "cannot tell its boot: /proc/sys/kernel/random/boot_id), so rows may be lost; "
                    "run `petps verify --accept` on it, or rebuild it from a base");
}

Status Pool::set_durability(media::Durability durability) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  if (lost_power_) return lost_power_refusal();
  // The superblock never promises more than the medium keeps. A stronger promise is written after
  // the medium changes, a weaker one before.
  if (durability == media::Durability::kPower)
    PETPS_RETURN_IF_ERROR(sync_everything(Site::kPowerSync));
  catalogue_->durability = durability;
  PETPS_RETURN_IF_ERROR(write_superblock());
  media_->set_durability(durability);
  return Status();
}

std::byte* Pool::journal() const { return base_ + map_->journal(); }

void Pool::verify_metadata(std::vector<std::string>* problems) const {
  {
    const std::lock_guard lock(mutex_);  // a writer may change both copies during a read
    if (newest_copy(*media_).map == nullptr)
      problems->push_back("no superblock copy passes its checksum");
  }
  const auto* words = reinterpret_cast<const uint64_t*>(base_ + map_->extents());
  uint64_t end = first_extent();
  uint64_t i = 0;
  for (; i < map_->max_extents() && words[i] != 0; ++i) {
    layout::ExtentWord extent;
    if (!layout::unpack_extent(words[i], i, &extent)) {
      problems->push_back("extent record " + std::to_string(i) + " is corrupt");
      break;
    }
    end += extent.units * unit_bytes_;
  }
  // Records have no gap between them: look one line beyond the first missing record.
  for (uint64_t after = i + 1; after < std::min(i + 1 + media::kLineBytes / 8, map_->max_extents());
       ++after) {
    if (words[i] == 0 && words[after] != 0)
      problems->push_back("extent record " + std::to_string(i) + " is missing before later ones");
  }
  if (end > media_->size()) problems->push_back("extents reach beyond the end of the pool");
  verify_progress(problems);
}

}  // namespace petps::pool
