// The file under a pool: made, opened, locked, synced. Private to room media.
//
// ERRORS: every Status names the path and what to do about it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "base/status.h"
#include "media/calls.h"
#include "media/media.h"

namespace petps::media {

// A new empty file, locked for writing. kAlreadyExists, kNotFound (no such folder), kIoError.
base::Result<int> create_file(const std::string& path);
// Removes a file that could not be finished; returns `reason`, and that it was left behind if so.
base::Status remove_file(const std::string& path, const base::Status& reason);
// The device at `path`, or nothing when something else is there, or nothing at all.
std::optional<Device> device_at(const std::string& path);
// An existing regular file or device, locked: exclusively for kReadWrite, shared for kReadOnly.
base::Result<int> open_file(const std::string& path, Access access);
base::Result<uint64_t> file_bytes(int file, const std::string& path);

// The folder of a file that is about to be made. Opened before the file is, because an error of
// writing the folder is reported only to descriptors that were open by then.
class Folder {
 public:
  static base::Result<Folder> open_of(const std::string& path);
  Folder(Folder&& other) noexcept;
  Folder& operator=(Folder&&) = delete;
  ~Folder();
  // Makes the entries durable that were made since.
  base::Status sync() const;

 private:
  Folder(int file, std::string name) : file_(file), name_(std::move(name)) {}
  int file_;
  std::string name_;
};

// Writes what the whole file system has not written yet, and flushes the disk's cache, where
// FileCalls::may_skip_flush says that a sync of the file alone may not. 0 or an errno.
int flush_disk(int file);

// Linux calls pages clean that it failed to write, and shows them to every process until they leave
// the page cache. The mark says that a sync of this file failed; it lives as long as the inode, so
// at least as long as the pages.
void mark_failed_sync(int file);
// Where the mark is: drops the pages from the page cache, so that what is read is what the disk
// has, then removes the mark. kFailedPrecondition while another process maps such pages.
base::Status drop_lost_pages(int file, const std::string& path, uint64_t bytes);

}  // namespace petps::media
