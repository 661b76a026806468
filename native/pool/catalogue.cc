// Tables, instances, aliases: their bytes, their checks, their changes.
#include "pool/catalogue.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/crc32c.h"

namespace petps::pool {

using base::Code;
using base::Result;
using base::Status;
using media::Flusher;
using media::Site;

namespace {

template <typename Entry>
void append(std::vector<std::byte>* image, const Entry& entry) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&entry);
  image->insert(image->end(), bytes, bytes + sizeof entry);
}

void set_name(char (&to)[kMaxNameBytes + 1], const std::string& from) {
  std::memcpy(to, from.data(), from.size());
}

std::string name_of(const char (&from)[kMaxNameBytes + 1]) {
  return std::string(from, strnlen(from, kMaxNameBytes));
}

// Return the record that matches; null if there is none.
template <typename Record, typename Predicate>
Record* find_record(std::vector<Record>* records, Predicate matches) {
  const auto at = std::find_if(records->begin(), records->end(), matches);
  return at == records->end() ? nullptr : &*at;
}

bool is_prime(uint64_t n) {
  if (n < 4) return n >= 2;
  if (n % 2 == 0) return false;
  for (uint64_t d = 3; d * d <= n; d += 2) {
    if (n % d == 0) return false;
  }
  return true;
}

// Return a prime, so that every probing step visits every bucket.
uint64_t bucket_count_for(uint64_t capacity) {
  const uint64_t entries =
      (capacity * layout::kLoadDenominator + layout::kLoadNumerator - 1) / layout::kLoadNumerator;
  uint64_t count =
      std::max<uint64_t>(2, (entries + layout::kEntriesPerBucket - 1) / layout::kEntriesPerBucket);
  while (!is_prime(count)) ++count;
  return count;
}

Status check_alias_room(size_t aliases) {
  if (aliases < kMaxAliases) return Status();
  return Status(Code::kResourceExhausted,
                "a pool holds at most " + std::to_string(kMaxAliases) + " aliases");
}

}  // namespace

uint64_t index_bytes_for(uint64_t capacity) {
  return bucket_count_for(capacity) * layout::kBucketBytes;
}

InstanceRecord* Pool::Catalogue::instance(uint32_t id) {
  return find_record(&instances, [&](const InstanceRecord& instance) { return instance.id == id; });
}

TableRecord* Pool::Catalogue::table(uint32_t id) {
  return find_record(&tables, [&](const TableRecord& table) { return table.id == id; });
}

AliasRecord* Pool::Catalogue::alias(const std::string& name) {
  return find_record(&aliases, [&](const AliasRecord& alias) { return alias.name == name; });
}

const InstanceRecord* Pool::Catalogue::newest_of(const std::string& model) {
  const InstanceRecord* record = nullptr;
  for (const InstanceRecord& instance : instances) {
    if (instance.model == model) record = &instance;
  }
  return record;
}

std::vector<std::byte> Pool::Catalogue::serialise(const Pool& pool) const {
  layout::Superblock header{};
  header.signature = layout::kSignature;
  header.format_version = pool.format_version_;
  header.sequence = sequence;
  std::copy(pool.uuid_.begin(), pool.uuid_.end(), header.uuid);
  std::copy(boot_id.begin(), boot_id.end(), header.boot_id);
  header.unit_bytes = pool.unit_bytes_;
  header.generation = pool.generation_;
  header.clean = clean ? 1 : 0;
  header.durability = static_cast<uint32_t>(durability);
  header.next_table = next_table;
  header.next_instance = next_instance;
  header.table_count = static_cast<uint32_t>(tables.size());
  header.instance_count = static_cast<uint32_t>(instances.size());
  header.alias_count = static_cast<uint32_t>(aliases.size());
  for (size_t i = 0; i < instances.size(); ++i) header.frozen |= uint64_t{instances[i].frozen} << i;
  std::vector<std::byte> image(sizeof header);
  for (const TableRecord& table : tables) {
    layout::TableEntry entry{};
    entry.id = table.id;
    entry.instance = table.spec.instance;
    entry.dtype = table.spec.dtype;
    entry.feed = static_cast<uint8_t>(table.spec.feed);
    entry.dim = table.spec.dim;
    entry.row_bytes = table.spec.row_bytes;
    entry.expire_after = table.spec.expire_after;
    entry.capacity = table.spec.capacity;
    entry.bucket_offset = table.bucket_offset;
    entry.bucket_count = table.bucket_count;
    entry.default_row = table.default_row;
    entry.rows = table.rows;
    entry.displaced = table.displaced;
    set_name(entry.name, table.spec.name);
    append(&image, entry);
  }
  for (const InstanceRecord& instance : instances) {
    layout::InstanceEntry entry{};
    entry.id = instance.id;
    entry.partitions = instance.partitions;
    set_name(entry.model, instance.model);
    set_name(entry.name, instance.name);
    append(&image, entry);
  }
  for (const AliasRecord& alias : aliases) {
    layout::AliasEntry entry{};
    entry.instance = alias.instance;
    entry.previous = alias.previous;
    set_name(entry.name, alias.name);
    append(&image, entry);
  }
  header.length = static_cast<uint32_t>(image.size());
  std::memcpy(image.data(), &header, sizeof header);
  return image;
}

Status Pool::Catalogue::parse(const std::byte* copy, const layout::Superblock& header, int number,
                              const std::string& path) {
  const uint64_t needed = sizeof header +
                          uint64_t{header.table_count} * sizeof(layout::TableEntry) +
                          uint64_t{header.instance_count} * sizeof(layout::InstanceEntry) +
                          uint64_t{header.alias_count} * sizeof(layout::AliasEntry);
  if (needed != header.length) {
    return Status(Code::kDataLoss, "the superblock of pool '" + path +
                                       "' contradicts itself; restore it from a base");
  }
  sequence = header.sequence;
  newest = number;
  clean = header.clean != 0;
  durability = static_cast<media::Durability>(header.durability);
  std::copy(std::begin(header.boot_id), std::end(header.boot_id), boot_id.begin());
  next_table = header.next_table;
  next_instance = header.next_instance;
  const std::byte* at = copy + sizeof header;
  for (uint32_t i = 0; i < header.table_count; ++i, at += sizeof(layout::TableEntry)) {
    layout::TableEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    TableRecord record;
    record.id = entry.id;
    record.spec.name = name_of(entry.name);
    record.spec.instance = entry.instance;
    record.spec.dtype = entry.dtype;
    record.spec.feed = static_cast<Feed>(entry.feed);
    record.spec.dim = entry.dim;
    record.spec.row_bytes = entry.row_bytes;
    record.spec.expire_after = entry.expire_after;
    record.spec.capacity = entry.capacity;
    record.bucket_offset = entry.bucket_offset;
    record.bucket_count = entry.bucket_count;
    record.default_row = entry.default_row;
    record.rows = entry.rows;
    record.displaced = entry.displaced;
    tables.push_back(std::move(record));
  }
  for (uint32_t i = 0; i < header.instance_count; ++i, at += sizeof(layout::InstanceEntry)) {
    layout::InstanceEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    instances.push_back({entry.id, name_of(entry.model), name_of(entry.name), entry.partitions,
                         ((header.frozen >> i) & 1) != 0});
  }
  for (uint32_t i = 0; i < header.alias_count; ++i, at += sizeof(layout::AliasEntry)) {
    layout::AliasEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    aliases.push_back({name_of(entry.name), entry.instance, entry.previous});
  }
  const Status status = check(layout::map_of(header.format_version));
  if (status.ok()) return status;
  return Status(Code::kDataLoss, "the superblock of pool '" + path + "' contradicts itself: " +
                                     std::string(status.message()) + "; restore it from a base");
}

Status Pool::validate(const TableSpec& spec) const {
  const std::string prefix = "table '" + spec.name + "': ";
  PETPS_RETURN_IF_ERROR(check_shape(spec));
  if (!spec.default_row.empty() && spec.default_row.size() != spec.row_bytes) {
    return Status(Code::kInvalidArgument,
                  prefix + "the default row has " + std::to_string(spec.default_row.size()) +
                      " bytes, a row has " + std::to_string(spec.row_bytes));
  }
  PETPS_RETURN_IF_ERROR(check_expiry(spec.expire_after));
  if (catalogue_->instance(spec.instance) == nullptr) {
    return Status(Code::kNotFound,
                  prefix + "instance " + std::to_string(spec.instance) + " does not exist");
  }
  for (const TableRecord& table : catalogue_->tables) {
    if (table.spec.instance == spec.instance && table.spec.name == spec.name) {
      return Status(Code::kAlreadyExists,
                    prefix + "exists already in this instance; choose another name");
    }
  }
  if (catalogue_->tables.size() >= map_->max_tables) {
    const std::string remedy =
        map_->max_tables < kMaxTables
            ? "; export it into a new pool, which holds up to " + std::to_string(kMaxTables)
            : "; drop an instance that is not served (petps drop)";
    return Status(Code::kResourceExhausted,
                  prefix + "a pool of format version " + std::to_string(map_->format_version) +
                      " holds at most " + std::to_string(map_->max_tables) + " tables" + remedy);
  }
  return Status();
}

Result<InstanceRecord> Pool::create_instance(const std::string& model, const std::string& name,
                                             uint32_t partitions) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  PETPS_RETURN_IF_ERROR(check_name("model", model, /*at_sign=*/false));
  PETPS_RETURN_IF_ERROR(check_name("instance", name, /*at_sign=*/true));
  if (partitions == 0 || partitions > kMaxPartitions) {
    return Status(Code::kInvalidArgument, "instance '" + name + "' needs 1 to " +
                                              std::to_string(kMaxPartitions) + " partitions, not " +
                                              std::to_string(partitions));
  }
  for (const InstanceRecord& instance : catalogue_->instances) {
    if (instance.name == name)
      return Status(Code::kAlreadyExists, "instance '" + name + "' exists already");
    if (instance.model == model && instance.partitions != partitions) {
      return Status(Code::kInvalidArgument,
                    "model '" + model + "' has " + std::to_string(instance.partitions) +
                        " partitions, which never change; instance '" + name + "' cannot have " +
                        std::to_string(partitions));
    }
  }
  if (catalogue_->instances.size() >= kMaxInstances) {
    return Status(Code::kResourceExhausted,
                  "a pool holds at most " + std::to_string(kMaxInstances) + " instances");
  }
  const auto aliases_before = catalogue_->aliases;
  if (const InstanceRecord* newest = catalogue_->newest_of(model);
      newest != nullptr && catalogue_->alias(model) == nullptr) {
    PETPS_RETURN_IF_ERROR(check_alias_room(catalogue_->aliases.size()));
    catalogue_->aliases.push_back({model, newest->id, 0});
  }
  const InstanceRecord record{catalogue_->next_instance++, model, name, partitions};
  catalogue_->instances.push_back(record);
  if (Status status = write_superblock(); !status.ok()) {
    catalogue_->instances.pop_back();
    catalogue_->aliases = aliases_before;
    return status;
  }
  return record;
}

Status Pool::check_droppable(uint32_t instance) const {
  std::lock_guard lock(mutex_);
  return check_droppable_locked(instance);
}

Status Pool::check_droppable_locked(uint32_t instance) const {
  PETPS_RETURN_IF_ERROR(check_writable());
  Catalogue& catalogue = *catalogue_;
  const InstanceRecord* dropped = catalogue.instance(instance);
  if (dropped == nullptr) {
    return Status(Code::kNotFound, "instance " + std::to_string(instance) + " does not exist");
  }
  std::string alias_name;
  for (const AliasRecord& alias : catalogue.aliases) {
    if (alias.instance == instance) alias_name = alias.name;
  }
  if (catalogue.alias(dropped->model) == nullptr &&
      catalogue.newest_of(dropped->model) == dropped) {
    alias_name = dropped->model;
  }
  if (alias_name.empty()) return Status();
  return Status(Code::kFailedPrecondition,
                "name '" + alias_name + "' refers to instance '" + dropped->name +
                    "': switch the name to another instance first (petps alias)");
}

Status Pool::drop_instance(uint32_t instance) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_droppable_locked(instance));
  Catalogue& catalogue = *catalogue_;
  const auto tables = catalogue.tables;
  const auto instances = catalogue.instances;
  const auto aliases = catalogue.aliases;
  std::erase_if(catalogue.tables, [&](const auto& t) { return t.spec.instance == instance; });
  std::erase_if(catalogue.instances, [&](const auto& i) { return i.id == instance; });
  for (AliasRecord& alias : catalogue.aliases) {
    if (alias.previous == instance) alias.previous = 0;
  }
  if (Status status = write_superblock(); !status.ok()) {
    catalogue.tables = tables;
    catalogue.instances = instances;
    catalogue.aliases = aliases;
    return status;
  }
  const std::lock_guard state(state_mutex_);
  std::erase_if(catalogue.progress, [&](const auto& known) {
    if (known.first.first != instance) return false;
    catalogue.free_progress.push_back(known.second);
    return true;
  });
  return Status();
}

Status Pool::drop_table(uint32_t table) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  const TableRecord* dropped = catalogue_->table(table);
  if (dropped == nullptr)
    return Status(Code::kNotFound, "table id " + std::to_string(table) + " does not exist");
  if (dropped->spec.feed == Feed::kDelta) {
    return Status(Code::kFailedPrecondition,
                  "table '" + dropped->spec.name +
                      "' is fed by deltas, and the log goes on with its rows: publish a base "
                      "without it as a new instance (petps publish --base --instance), and drop "
                      "the present instance");
  }
  const auto before = catalogue_->tables;
  std::erase_if(catalogue_->tables, [&](const TableRecord& t) { return t.id == table; });
  Status status = write_superblock();
  if (!status.ok()) catalogue_->tables = before;
  return status;
}

// Refuse a table if its rows could never all fit, so that no row fails later because the disk is
// full. Compare with the whole file system and not with the space that is free now: other files
// may be deleted, and a pool grows only as rows come.
Status Pool::check_room(const TableSpec& spec, uint64_t bucket_bytes, uint32_t table) const {
  __extension__ typedef unsigned __int128 Wide;
  const uint64_t largest = media_->largest_size();
  uint64_t in_use = first_extent();
  {
    const std::lock_guard state(state_mutex_);
    for (const ExtentPlace& place : catalogue_->extents) {
      const bool has_rows = place.kind == static_cast<uint32_t>(layout::ExtentKind::kSlots);
      if (place.table != 0 && !(has_rows && place.table == table)) in_use += place.bytes;
    }
  }
  const Wide rows = Wide{spec.capacity} * (spec.row_bytes + sizeof(SlotHeader));
  if (rows + bucket_bytes + in_use <= largest) return Status();
  const bool is_device = media_->is_device();
  const auto text = [](Wide bytes) {
    const Wide gib = bytes >> 30;
    return gib > 0 ? std::to_string(static_cast<uint64_t>(gib)) + " GiB"
                   : std::to_string(static_cast<uint64_t>(bytes)) + " bytes";
  };
  return Status(
      Code::kResourceExhausted,
      "table '" + spec.name + "' with capacity " + std::to_string(spec.capacity) + " needs " +
          text(rows) + " of rows and " + text(bucket_bytes) +
          " of index; the other tables of pool '" + media_->path() + "' have " + text(in_use) +
          ", and its " + (is_device ? "device" : "file system") + " has " + text(largest) +
          " in all: give the table less capacity, or " +
          (is_device ? "make a larger namespace (ndctl)" : "place the pool on a larger disk"));
}

Result<TableRecord> Pool::create_table(const TableSpec& spec) {
  TableRecord record;
  const Status status = make_table(spec, &record);
  if (status.ok()) return record;
  if (record.id != 0) free_table(record.id);
  return status;
}

Status Pool::make_table(const TableSpec& spec, TableRecord* created) {
  TableRecord& record = *created;
  {
    std::lock_guard lock(mutex_);
    PETPS_RETURN_IF_ERROR(check_writable());
    PETPS_RETURN_IF_ERROR(validate(spec));
    if (spec.expire_after > 0) PETPS_RETURN_IF_ERROR(write_as_expiring());
    record.id = catalogue_->next_table++;
  }
  record.spec = spec;
  record.bucket_count = bucket_count_for(spec.capacity);
  const uint64_t bucket_bytes = record.bucket_count * layout::kBucketBytes;
  PETPS_RETURN_IF_ERROR(check_room(spec, bucket_bytes));
  // Not under mutex_, which progress needs too: zeroing the buckets of a dropped table takes
  // long.
  auto buckets = add_extent(static_cast<uint32_t>(layout::ExtentKind::kBuckets), record.id,
                            length_of_buckets(bucket_bytes));
  if (!buckets.ok()) return buckets.status();
  record.bucket_offset = buckets.value().offset;
  auto slots = std::make_unique<Slots>(*this, record.id, spec.row_bytes, spec.capacity);
  if (!spec.default_row.empty()) {
    bool wait = false;
    PETPS_RETURN_IF_ERROR(slots->allocate({&record.default_row, 1}, &wait));
    Flusher flusher(*media_);
    flusher.copy(slots->row(record.default_row), spec.default_row.data(), spec.row_bytes,
                 Site::kRow);
    const SlotHeader header{0, 0, base::crc32c(spec.default_row.data(), spec.row_bytes)};
    flusher.copy(slots->header(record.default_row), &header, sizeof header, Site::kRowHeader);
    PETPS_RETURN_IF_ERROR(flusher.drain(Site::kFilled));
  }
  if (spec.expire_after > 0) PETPS_RETURN_IF_ERROR(add_clocks(record));
  PETPS_RETURN_IF_ERROR(sync_new_table(record, *slots));
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(validate(spec));  // again: the instance may be gone or the name taken
  catalogue_->tables.push_back(record);
  if (Status status = write_superblock(); !status.ok()) {
    catalogue_->tables.pop_back();
    return status;
  }
  const std::lock_guard state(state_mutex_);
  catalogue_->slots[record.id] = std::move(slots);
  return Status();
}

// Sync what a superblock is about to name. The superblock itself reaches the disk at once,
// whatever the durability, so everything that it names must be on the disk before.
Status Pool::sync_new_table(const TableRecord& record, const Slots& slots) {
  size_t records = 0;
  {
    const std::lock_guard state(state_mutex_);
    records = catalogue_->extents.size();
  }
  PETPS_RETURN_IF_ERROR(
      media_->sync_range(base_ + map_->extents(), records * 8, Site::kNewTableSync));
  if (record.default_row == 0) return Status();
  PETPS_RETURN_IF_ERROR(media_->sync_range(slots.header(record.default_row), sizeof(SlotHeader),
                                           Site::kNewTableSync));
  return media_->sync_range(slots.row(record.default_row), record.spec.row_bytes,
                            Site::kNewTableSync);
}

Pool::Length Pool::length_of_buckets(uint64_t bytes) const {
  const uint64_t whole = (bytes + unit_bytes_ - 1) / unit_bytes_ * unit_bytes_;
  return {whole, whole, 2 * whole};
}

Result<BucketArray> Pool::reserve_buckets(uint32_t table, uint64_t capacity) {
  TableSpec spec;
  {
    std::lock_guard lock(mutex_);
    PETPS_RETURN_IF_ERROR(check_writable());
    const TableRecord* record = catalogue_->table(table);
    if (record == nullptr)
      return Status(Code::kNotFound, "table id " + std::to_string(table) + " does not exist");
    spec = record->spec;
  }
  if (capacity <= spec.capacity || capacity > kMaxCapacity) {
    return Status(Code::kInvalidArgument,
                  "table '" + spec.name + "' has capacity " + std::to_string(spec.capacity) +
                      ": give it more, at most 2^40 rows; got " + std::to_string(capacity));
  }
  spec.capacity = capacity;
  BucketArray array{0, bucket_count_for(capacity), capacity};
  const uint64_t bytes = array.count * layout::kBucketBytes;
  PETPS_RETURN_IF_ERROR(check_room(spec, bytes, table));
  auto extent = add_extent(static_cast<uint32_t>(layout::ExtentKind::kBuckets), table,
                           length_of_buckets(bytes));
  if (!extent.ok()) return extent.status();
  array.offset = extent.value().offset;
  return array;
}

void Pool::set_counts(uint32_t table, uint64_t rows, uint64_t displaced) {
  std::lock_guard lock(mutex_);
  if (TableRecord* record = catalogue_->table(table); record != nullptr) {
    record->rows = rows;
    record->displaced = displaced;
  }
}

Status Pool::set_feed(uint32_t table, Feed feed) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  TableRecord* record = catalogue_->table(table);
  if (record == nullptr)
    return Status(Code::kNotFound, "table id " + std::to_string(table) + " does not exist");
  if (record->spec.feed == feed) return Status();
  if (record->spec.expire_after > 0) {
    return Status(Code::kFailedPrecondition,
                  "table '" + record->spec.name +
                      "' keeps its feed while its rows expire: let them never expire first");
  }
  record->spec.feed = feed;
  return write_superblock();
}

Status Pool::set_alias(const std::string& alias, uint32_t instance, bool unless_frozen) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  PETPS_RETURN_IF_ERROR(check_name("alias", alias, /*at_sign=*/false));
  Catalogue& catalogue = *catalogue_;
  if (catalogue.instance(instance) == nullptr) {
    return Status(Code::kNotFound, "alias '" + alias + "': instance " + std::to_string(instance) +
                                       " does not exist");
  }
  if (unless_frozen && catalogue.instance(instance)->frozen) {
    return Status(Code::kFailedPrecondition, "alias '" + alias + "' was switched away from '" +
                                                 catalogue.instance(instance)->name + "'");
  }
  if (AliasRecord* known = catalogue.alias(alias); known != nullptr)
    return switch_alias(known, instance);
  PETPS_RETURN_IF_ERROR(check_alias_room(catalogue.aliases.size()));
  // A plain model name without an alias refers to the model's newest instance.
  const InstanceRecord* newest = catalogue.newest_of(alias);
  catalogue.aliases.push_back({alias, newest == nullptr ? 0 : newest->id, 0});
  Status status = switch_alias(&catalogue.aliases.back(), instance);
  if (!status.ok()) catalogue.aliases.pop_back();
  return status;
}

Status Pool::switch_alias(AliasRecord* alias, uint32_t instance) {
  Catalogue& catalogue = *catalogue_;
  if (alias->instance == instance) return write_superblock();
  const auto before = catalogue.instances;
  const AliasRecord alias_before = *alias;
  *alias = {alias->name, instance, alias->instance};
  catalogue.instance(instance)->frozen = false;
  InstanceRecord* left = catalogue.instance(alias_before.instance);
  if (left != nullptr) {
    left->frozen = std::none_of(catalogue.aliases.begin(), catalogue.aliases.end(),
                                [&](const auto& a) { return a.instance == left->id; });
  }
  Status status = write_superblock();
  if (!status.ok()) {
    *alias = alias_before;
    catalogue.instances = before;
  }
  return status;
}

std::vector<TableRecord> Pool::tables() const { return snapshot()->tables; }
std::vector<InstanceRecord> Pool::instances() const { return snapshot()->names.instances; }
std::vector<AliasRecord> Pool::aliases() const { return snapshot()->names.aliases; }
Names Pool::names() const { return snapshot()->names; }

Slots& Pool::slots(uint32_t table) {
  const std::lock_guard state(state_mutex_);
  const auto slots = catalogue_->slots.find(table);
  PETPS_CHECK(slots != catalogue_->slots.end(), "slots of a table that does not exist");
  return *slots->second;
}

}  // namespace petps::pool
