// The blocks under a pool file: a store into a mapped page that has no block of its own is a SIGBUS
// once the disk is full. Private to room media; DURABILITY.md has the table of file systems.
//
// ERRORS: every Status names the path and what to do about it.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace petps::media {

// Adds [from, to) behind the end of the file, with blocks. On failure the file has `from` bytes
// again. kResourceExhausted when the disk or a quota is full.
base::Status append_blocks(int file, const std::string& path, uint64_t from, uint64_t to);

// What append_blocks() does by system calls; 0 or an errno.
int allocate_at_end(int file, uint64_t from, uint64_t bytes);
// Gives back what was added behind `bytes`.
void cut_back(int file, uint64_t bytes);

// Gives each hole in [0, bytes) blocks and each block that is shared with another file (a reflink, a
// snapshot) a copy of its own. Never changes a byte or the length of the file, whether it succeeds
// or not, and reads nothing where the file system tells where its blocks are. Where nothing tells
// (NFS before 4.2, some FUSE) it does nothing: see bus_error.h.
//
// ASSUMPTIONS: the caller has the pool's exclusive lock, and bytes is at most the file's length.
// Returns kResourceExhausted when the disk is full, kFailedPrecondition when the file system copies
// a block whenever it is written.
base::Status own_blocks(int file, const std::string& path, uint64_t bytes);

// Asks a copy-on-write file system to write this new, empty file in place.
base::Status forbid_copy_on_write(int file, const std::string& path);

// The bytes of the whole file system, used or not; 0 where it does not say.
uint64_t file_system_bytes(int file);

}  // namespace petps::media
