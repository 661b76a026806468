// Pins of other processes: a file beside the pool. The server maps it, and so does every process
// that reads the pool beside the server. READERS.md gives the layout, the locks and what each crash
// leaves behind.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/atomics.h"
#include "base/status.h"

namespace petps::epoch {

// Replies in flight of one worker. A full list is backpressure.
inline constexpr size_t kPinsPerReader = 256;

// The epoch list of one reader: in its process, or in the readers file.
struct Places {
  // The reader has used places [0, window) since the lease; a scan reads no further. The window
  // grows by doubling.
  base::Atomic<size_t> window{0};
  // 0: free. On cache lines of their own: the reader and the threads that drop pins write them, and
  // every scan reads them.
  alignas(64) std::array<base::Atomic<uint64_t>, kPinsPerReader> epochs{};
};
static_assert(base::Atomic<uint64_t>::is_always_lock_free, "epochs are shared between processes");

// Callers that read at once, summed over all other processes.
inline constexpr size_t kMaxOutsideReaders = 128;

// Return the path of the readers file: beside the pool itself, even if `pool` is a link.
std::string readers_path(const std::string& pool);

// The readers file of one pool, opened by its server (serve) or by a reader (join).
class ReadersFile {
 public:
  using Uuid = std::array<uint8_t, 16>;

  // Server side: create the file, or take over the file of readers that outlived the last server.
  // If the file cannot be created and no process reads the pool, keep readers out while this
  // object lives; refused() then returns the reason. Errors while some process reads the pool:
  // kFailedPrecondition (its pins cannot be seen), kUnimplemented (format), kDataLoss (not a
  // readers file), kPermissionDenied, kIoError. Errors of opening the pool: kNotFound,
  // kPermissionDenied, kIoError.
  static base::Result<std::unique_ptr<ReadersFile>> serve(const std::string& pool_path,
                                                          const Uuid& pool);
  // Reader side: open the file that a server has created. Errors: kNotFound (no pool),
  // kFailedPrecondition (no server has created the file, or the server keeps readers out),
  // kUnimplemented (format, or a file system without locks), kDataLoss (not a readers file),
  // kPermissionDenied, kIoError.
  static base::Result<std::unique_ptr<ReadersFile>> join(const std::string& pool_path);
  ~ReadersFile();
  ReadersFile(const ReadersFile&) = delete;
  ReadersFile& operator=(const ReadersFile&) = delete;

  base::Atomic<uint64_t>& global() const;
  bool serves() const { return serves_; }
  const std::string& refused() const { return refused_; }
  // Return kFailedPrecondition if the file belongs to another pool, or if the pool's path names
  // another file by now.
  base::Status belongs_to(const Uuid& pool) const;
  // Return true in a child that was forked after the file was opened: the child shares nothing with
  // other processes.
  bool forked() const { return forked_.load(std::memory_order_relaxed); }

  // Reader side: return an empty list for one caller, locked while this object lives; null if all
  // kMaxOutsideReaders are taken. One thread at a time.
  Places* claim();

  // Server side: return the smallest epoch that a reader holds; ~0 if no reader holds one.
  uint64_t oldest() const;
  // Server side: drop the pins of readers that have died. One thread at a time.
  void drop_dead();
  // Server side, at a clean close: remove the file unless some process reads the pool.
  void remove();

 private:
  struct Header;
  ReadersFile(const std::string& pool_path, int pool_file, bool serves);
  base::Status create(const Uuid& pool);
  base::Status take_over(const Uuid& pool);
  base::Status open_existing();
  base::Status map();
  void close();    // the readers file, and release its locks
  void cut_off();  // called in a forked child
  Header& header() const;
  Places& record(size_t i) const;
  size_t used_records() const;
  friend struct OpenFiles;

  const std::string pool_path_;
  const std::string path_;
  const bool serves_;
  int pool_file_;  // its lock on byte 0 shows that a process reads the pool, whatever its name is
  int file_ = -1;
  std::byte* at_ = nullptr;
  std::string refused_;
  base::Atomic<bool> forked_{false};
  std::array<bool, kMaxOutsideReaders> held_{};  // records that this object has locked
};

}  // namespace petps::epoch
