// A pool that someone altered: it is opened as a server and as a reader do it, read, verified,
// written and closed. Nothing may crash, hang or read outside the pool.
//
// An input is a byte that selects one of the golden pools (tests/golden/pool, all versions of the
// format), a byte of flags, and edits of 16 bytes each. So an input is small, and the fuzzer need
// not find where the pool's bytes are. Checksums of the metadata are computed again after the
// edits, unless a flag says no: they have no key, so whoever alters a pool can do it too.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "pool/layout.h"
#include "table/table.h"
#include "tests/fuzz/expect.h"

namespace petps::table {
namespace {

constexpr size_t kReserve = size_t{4} << 20;
constexpr std::array<const char*, 8> kPools = {"clean-4", "killed-4", "clean-3", "killed-3",
                                               "clean-2", "killed-2", "clean-1", "killed-1"};

enum Flag : uint8_t {
  kKeepChecksums = 1,  // leave metadata with checksums that do not match
  kFile = 2,           // open a file, read-only
  kWrite = 4,          // write to the pool
  kCut = 8,            // the first edit sets the length
};

struct Edit {
  uint32_t where;  // kind: the lowest 2 bits; the rest: a place of that kind
  uint32_t width;  // bytes to write, modulo 9
  uint64_t value;
};
static_assert(sizeof(Edit) == 16, "read in place from the input");

struct Image {
  std::vector<std::byte> bytes;
  std::vector<uint64_t> used;  // offsets of the lines that are not zeros
};

// Read a golden pool: its length, then each line of 64 bytes that is not zeros.
Image read_image(const char* name) {
  std::ifstream file(std::string("tests/golden/pool/") + name + ".lines");
  Image image;
  uint64_t length = 0;
  std::string offset;
  std::string line;
  file >> length;
  image.bytes.resize(length);
  while (file >> offset >> line) {
    const uint64_t at = std::stoull(offset, nullptr, 16);
    image.used.push_back(at);
    for (uint64_t i = 0; i < 64; ++i) {
      image.bytes[at + i] = static_cast<std::byte>(std::stoul(line.substr(2 * i, 2), nullptr, 16));
    }
  }
  if (length == 0) {
    std::fprintf(stderr, "run this program in the root of the repository: no golden pools\n");
    std::exit(1);
  }
  return image;
}

const Image& image_of(size_t number) {
  static const std::vector<Image> images = [] {
    std::vector<Image> all;
    for (const char* name : kPools) all.push_back(read_image(name));
    return all;
  }();
  return images[number % images.size()];
}

// The memory of the pool under test. Behind its end, ASan's poison begins.
std::byte* memory() {
  static auto* const bytes = static_cast<std::byte*>(std::aligned_alloc(4096, kReserve));
  return bytes;
}

template <typename T>
T read(uint64_t offset) {
  T value;
  std::memcpy(&value, memory() + offset, sizeof value);
  return value;
}

void edit(const Edit& change, const Image& image, uint64_t length) {
  const pool::layout::Map& map =
      pool::layout::map_of(read<pool::layout::Superblock>(0).format_version);
  const uint64_t place = change.where >> 2;
  uint64_t at = 0;
  switch (change.where & 3) {
    case 0:  // anywhere
      at = place % length;
      break;
    case 1:  // a superblock's copy, or the journal
      at = place % 3 == 2 ? map.journal() + (place / 3) % 64
                          : map.superblock(static_cast<int>(place % 3)) + (place / 3) % 2048;
      break;
    case 2: {  // an extent's record, with its check
      const uint64_t position = place % 24;
      uint64_t word = change.value;
      pool::layout::ExtentWord extent{};
      pool::layout::unpack_extent(word, position, &extent);
      word = pool::layout::pack_extent(extent, position);
      at = map.extents() + position * 8;
      if (at + 8 <= length) std::memcpy(memory() + at, &word, 8);
      return;
    }
    default:  // where the pool has content
      at = image.used[place % image.used.size()] + (change.width >> 8) % 64;
      break;
  }
  const uint64_t width = std::min<uint64_t>(change.width % 9, length - std::min(at, length));
  std::memcpy(memory() + at, &change.value, width);
}

// Compute the checksums of the metadata again.
void seal(uint64_t length) {
  using namespace pool::layout;
  for (int copy = 0; copy < 2; ++copy) {
    const Map& map = map_of(read<Superblock>(0).format_version);
    const uint64_t at = map.superblock(copy);
    if (at + map.superblock_bytes > length) return;
    auto header = read<Superblock>(at);
    if (header.signature != kSignature || header.length < sizeof header ||
        header.length > map.superblock_bytes)
      continue;
    header.checksum = 0;
    const uint64_t parts[2] = {
        base::checksum64(&header, sizeof header),
        base::checksum64(memory() + at + sizeof header, header.length - sizeof header)};
    header.checksum = base::checksum64(parts, sizeof parts);
    std::memcpy(memory() + at, &header, sizeof header);
  }
  const Map& map = map_of(read<Superblock>(0).format_version);
  for (uint64_t at = map.progress(); at < map.progress() + 64 * 64 && at + 64 <= length; at += 64) {
    auto entry = read<ProgressEntry>(at);
    entry.checksum =
        static_cast<uint32_t>(base::checksum64(&entry, offsetof(ProgressEntry, checksum)));
    std::memcpy(memory() + at, &entry, sizeof entry);
  }
  // Clocks are in an extent; an entry is 512 bytes long.
  for (uint64_t at = map.metadata_bytes; at + sizeof(ClockEntry) <= length; at += 512) {
    auto entry = read<ClockEntry>(at);
    if (entry.table == 0 || entry.table > 8 || entry.turn == 0 || entry.turn > 1000) continue;
    entry.checksum = base::checksum64(&entry, offsetof(ClockEntry, checksum));
    std::memcpy(memory() + at, &entry, sizeof entry);
  }
}

// Read everything that a reader can reach. Return whether verify finds no fault.
bool read_all(Tables& tables) {
  epoch::Reader* const reader = tables.epochs().lease();
  epoch::Pin pin = reader->pin();
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < 40; ++key) keys.push_back(key);
  for (uint64_t key = 995; key < 1065; ++key) keys.push_back(key);
  std::vector<const std::byte*> rows(keys.size());
  volatile uint8_t sum = 0;
  const auto touch = [&](const std::byte* row, uint32_t bytes) {
    for (uint32_t i = 0; row != nullptr && i < bytes; ++i)
      sum = static_cast<uint8_t>(sum ^ static_cast<uint8_t>(row[i]));
  };
  for (const TablePointer& table : tables.tables()) {
    const uint32_t row_bytes = table->record().spec.row_bytes;
    table->lookup(keys, rows.data());
    for (const std::byte* row : rows) {
      touch(row, row_bytes);
      if (row != nullptr) table->stamp_of(row);
    }
    touch(table->default_row(), row_bytes);
    const Table::ScanGuard guard(*table);
    for (uint64_t bucket = 0; bucket < table->bucket_count();) {
      const ScanPage page = table->scan(bucket, 64);
      for (const std::byte* row : page.rows) touch(row, row_bytes);
      bucket = page.next_bucket;
    }
    ScrubCursor cursor;
    while (true) {
      const auto step = table->scrub(&cursor, 1 << 20);
      if (!step.ok() || step.value().complete) break;
    }
    table->status();
  }
  for (const pool::InstanceRecord& instance : tables.pool().instances()) {
    tables.applied_version(instance.id);
    tables.resolve(instance.name).ok();
  }
  tables.pool().all_progress();
  const bool is_clean = tables.verify().clean();
  pin.drop();
  tables.epochs().release(reader);
  return is_clean;
}

// Write rows, delete some, and change the catalogue. Any of it may be refused.
void write_all(Tables& tables) {
  tables.walk();
  for (const TablePointer& table : tables.tables()) {
    const std::vector<uint64_t> keys = {1, 2, 1001, 5000, 5001, 5002};
    const std::vector<std::byte> rows(keys.size() * table->record().spec.row_bytes, std::byte{7});
    Batch batch{.keys = keys, .rows = rows.data(), .stamp = 9};
    table->apply(batch).ok();
    const std::vector<uint8_t> deleted(keys.size(), 1);
    batch.deleted = deleted;
    table->apply(batch).ok();
    table->expire({.paced = false, .progress = {}}).ok();
    table->migrate(keys).ok();
    table->rehome().ok();
    table->recount().ok();
    if (table->capacity() < 1000) table->grow({.capacity = 1000, .paced = false}).ok();
  }
  const pool::Progress progress = {1, 0, 90, 91, 92, 93};
  const pool::Commit commit = {1, 0, 93, 93'000'000'000'000};
  tables.record_progress({&progress, 1}, {&commit, 1}).ok();
  tables.create_table({.name = "new", .instance = 1, .dim = 4, .row_bytes = 16, .capacity = 40})
      .ok();
  tables.drop_instance(1).ok();
  tables.reclaim();
}

void open_in_memory(uint64_t length, bool writes) {
  for (int time = 0; time < 2; ++time) {
    auto opened = pool::Pool::attach(media::Media::borrow(memory(), length, kReserve, nullptr));
    if (!opened.ok()) {
      FUZZ_EXPECT(!opened.status().message().empty());
      return;
    }
    auto attached = Tables::attach(std::move(opened).value(), /*background=*/false);
    if (!attached.ok()) {
      FUZZ_EXPECT(!attached.status().message().empty());
      return;
    }
    Tables& tables = *attached.value();
    // A write replaces what its entry names. Where two entries name one slot, or an entry none, the
    // slots' own checks stop the process, so only a pool without a fault is written.
    const bool is_clean = read_all(tables);
    if (writes && is_clean) write_all(tables);
    length = tables.pool().medium().size();
    tables.close().ok();
  }
}

void open_file(uint64_t length) {
  static const std::string path = "/dev/shm/petps-fuzz-" + std::to_string(::getpid());
  static const int file = ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
  static const bool removes = std::atexit([] { ::unlink(path.c_str()); }) == 0;
  FUZZ_EXPECT(file >= 0 && removes);
  FUZZ_EXPECT(::ftruncate(file, static_cast<off_t>(length)) == 0);
  FUZZ_EXPECT(::pwrite(file, memory(), length, 0) == static_cast<ssize_t>(length));
  TablesOptions options;
  options.pool.media.path = path;
  options.pool.media.access = media::Access::kReadOnly;
  options.pool.media.reserve_bytes = kReserve;
  options.allow_lost_power = true;
  options.background = false;
  auto opened = Tables::open(options);
  if (opened.ok()) {
    read_all(*opened.value());
  } else {
    FUZZ_EXPECT(!opened.status().message().empty());
  }
}

void run(const uint8_t* data, size_t size) {
  if (size < 2) return;
  const Image& image = image_of(data[0]);
  const uint8_t flags = data[1];
  uint64_t length = image.bytes.size();
  std::memcpy(memory(), image.bytes.data(), length);
  std::memset(memory() + length, 0, kReserve - length);
  for (size_t at = 2; at + sizeof(Edit) <= size; at += sizeof(Edit)) {
    Edit change;
    std::memcpy(&change, data + at, sizeof change);
    if (at == 2 && (flags & kCut) != 0) {
      length = change.value % (image.bytes.size() + 1);
    } else if (length >= 4096) {
      edit(change, image, length);
    }
  }
  if ((flags & kKeepChecksums) == 0 && length >= 4096) seal(length);
  if ((flags & kFile) != 0) {
    open_file(length);
  } else {
    open_in_memory(length, (flags & kWrite) != 0);
  }
}

}  // namespace
}  // namespace petps::table

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  petps::table::run(data, size);
  return 0;
}
