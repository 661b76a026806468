// The file under a pool: made, opened, locked, lengthened, synced. Private to room media.
//
// ERRORS: every Status names the path and what to do about it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "media/media.h"

namespace petps::media {

// A device-DAX device: persistent memory without a file system, mapped whole.
struct Device {
  uint64_t bytes = 0;      // a multiple of align
  uint64_t alignment = 0;  // of every mapping's address and length
};

// System calls that tests replace: to make a disk full or an fsync fail (each returns 0 or an errno),
// or to have a device that is an ordinary file.
struct FileCalls {
  int (*allocate)(int file, uint64_t from, uint64_t bytes);
  int (*sync_data)(int file);
  std::optional<Device> (*device)(const std::string& path);
};
FileCalls& file_calls();        // what is used
FileCalls system_file_calls();  // the real ones, to put back

// A new empty file, locked for writing. kAlreadyExists, kNotFound (no such folder), kIoError.
base::Result<int> create_file(const std::string& path);
// The device at `path`, or nothing when something else is there, or nothing at all.
std::optional<Device> device_at(const std::string& path);
// An existing regular file or device, locked: exclusively for kReadWrite, shared for kReadOnly.
base::Result<int> open_file(const std::string& path, Access access);
base::Result<uint64_t> file_bytes(int file, const std::string& path);

// Gives [from, to) of the file blocks of its own. kResourceExhausted when the disk or a quota is
// full; the file then has `from` bytes again. Reads as zero where nothing was written.
base::Status allocate_range(int file, const std::string& path, uint64_t from, uint64_t to);
// True when some of the file's bytes have no block (a sparse copy): storing there could hit a full
// disk.
base::Result<bool> has_holes(int file, const std::string& path);
// Makes the file's directory entry durable.
base::Status sync_folder_of(const std::string& path);

}  // namespace petps::media
