// The file under a pool: create, open, lock, sync. Private to room media.
//
// ERRORS: every Status names the path and the remedy.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "base/status.h"
#include "media/calls.h"
#include "media/media.h"

namespace petps::media {

// Create a new empty file, locked for writing. ERRORS: kAlreadyExists, kNotFound (no such
// folder), kPermissionDenied, kIoError.
base::Result<int> create_file(const std::string& path);
// Remove an unfinished file. Return `reason`; if the file could not be removed, the message says
// so.
base::Status remove_file(const std::string& path, const base::Status& reason);
// Return the device at `path`; std::nullopt if the path is something else or does not exist.
std::optional<Device> device_at(const std::string& path);
// Open and lock an existing regular file or device: exclusively for kReadWrite, shared for
// kReadOnly, without a lock for kReadBeside.
base::Result<int> open_file(const std::string& path, Access access);
base::Result<uint64_t> file_bytes(int file, const std::string& path);

// A file descriptor that is closed on destruction unless it was released.
class Descriptor {
 public:
  explicit Descriptor(int file) : file_(file) {}
  Descriptor(Descriptor&& other) noexcept : file_(other.release()) {}
  ~Descriptor() {
    if (file_ >= 0) calls::close(file_);
  }
  int number() const { return file_; }
  int release() { return std::exchange(file_, -1); }

 private:
  int file_;
};

// The folder of a file that is about to be created. Open it before creating the file, because an
// error of writing the folder is reported only to descriptors that were open by then.
class Folder {
 public:
  static base::Result<Folder> open_of(const std::string& path);
  // Make durable the entries that were created since the folder was opened.
  base::Status sync() const;

 private:
  Folder(int file, std::string name) : file_(file), name_(std::move(name)) {}
  Descriptor file_;
  std::string name_;
};

// Write what the whole file system has not written yet and flush the disk's cache. Needed where
// FileCalls::may_skip_flush says that a sync of the file alone may leave out the flush. Return 0
// or an errno.
int flush_disk(int file);

// Mark the file: a sync of it failed. Linux calls pages clean that it failed to write, and shows
// them to every process until they leave the page cache. The mark lives as long as the inode, so
// at least as long as the pages.
void mark_failed_sync(int file);
// If the mark is set, drop the pages from the page cache, so that reads see what is on the disk,
// then remove the mark. Return kFailedPrecondition while another process maps such pages.
base::Status drop_lost_pages(int file, const std::string& path, uint64_t bytes);

}  // namespace petps::media
