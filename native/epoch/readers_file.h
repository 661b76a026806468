// Pins of other processes: a file beside the pool, mapped by the server and by every process that
// reads the pool beside it. READERS.md has the layout, the locks and what each crash leaves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/atomics.h"
#include "base/status.h"

namespace petps::epoch {

inline constexpr size_t kPinsPerReader =
    256;  // replies in flight of one worker; a full list is back-pressure

// One reader's epoch list: in its process, or in the readers file.
struct Places {
  // Places [0, window) were ever used since the lease; a scan reads no further. Grows by doubling.
  base::Atomic<size_t> window{0};
  // On lines of their own: written by the reader, by whoever drops, and read by every scan. 0 =
  // free.
  alignas(64) std::array<base::Atomic<uint64_t>, kPinsPerReader> epochs{};
};
static_assert(base::Atomic<uint64_t>::is_always_lock_free, "epochs are shared between processes");

// Callers of other processes that read at once, over all of them.
inline constexpr size_t kMaxOutsideReaders = 128;

// Beside the pool itself, whichever link names it.
std::string readers_path(const std::string& pool);

class ReadersFile {
 public:
  using Uuid = std::array<uint8_t, 16>;

  // The server's side: makes the file, or takes over that of readers that outlived the last server.
  // Where it cannot be made and nobody reads the pool, readers are kept out as long as this object
  // lives, and refused() says why. Errors, all while some process reads the pool:
  // kFailedPrecondition (its pins cannot be seen), kUnimplemented (format), kDataLoss (no readers
  // file), kIoError.
  static base::Result<std::unique_ptr<ReadersFile>> serve(const std::string& pool_path,
                                                          const Uuid& pool);
  // A reader's side. Errors: kNotFound (no pool), kFailedPrecondition (no server has made the file,
  // or it keeps readers out), kUnimplemented (format, or a file system without locks), kDataLoss (no
  // readers file), kPermissionDenied, kIoError.
  static base::Result<std::unique_ptr<ReadersFile>> join(const std::string& pool_path);
  ~ReadersFile();
  ReadersFile(const ReadersFile&) = delete;
  ReadersFile& operator=(const ReadersFile&) = delete;

  base::Atomic<uint64_t>& global() const;
  bool serves() const { return serves_; }
  const std::string& refused() const { return refused_; }
  // kFailedPrecondition: the file is another pool's, or the pool's path names another file by now.
  base::Status belongs_to(const Uuid& pool) const;
  // In a child forked from the process that opened it: nothing is shared with anybody.
  bool forked() const { return forked_.load(std::memory_order_relaxed); }

  // Reader's side: an empty list of its own, locked as long as this object lives; null when
  // kMaxOutsideReaders are taken. One thread at a time.
  Places* claim();

  // Server's side: the smallest epoch that any reader holds; ~0 when there is none.
  uint64_t oldest() const;
  // Server's side: drops the pins of readers that have died. One thread at a time.
  void drop_dead();
  // Server's side, at a clean close: removes the file unless readers have it.
  void remove();

 private:
  struct Header;
  struct Record;
  ReadersFile(const std::string& pool_path, int pool_file, bool serves);
  base::Status create(const Uuid& pool);
  base::Status take_over(const Uuid& pool);
  base::Status open_existing();
  base::Status map();
  void let_go();
  void cut_off();  // in a forked child
  Header& header() const;
  Record& record(size_t i) const;
  friend struct OpenFiles;

  const std::string pool_path_;
  const std::string path_;
  const bool serves_;
  int pool_file_;  // its lock says that somebody reads the pool, whatever it is called
  int file_ = -1;
  std::byte* at_ = nullptr;
  std::string refused_;
  base::Atomic<bool> forked_{false};
  std::array<bool, kMaxOutsideReaders> held_{};  // records that this object has locked
};

}  // namespace petps::epoch
