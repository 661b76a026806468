// The disk blocks under a pool file. If a mapped page has no block of its own, a store into it is
// a SIGBUS once the disk is full. Private to room media; DURABILITY.md has the table of file
// systems.
//
// ERRORS: every Status names the path and the remedy.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace petps::media {

// Append [from, to) with blocks to the end of the file. On failure, cut the file back to `from`
// bytes. Return kResourceExhausted if the disk or a quota is full.
base::Status append_blocks(int file, const std::string& path, uint64_t from, uint64_t to);

// Make the system calls of append_blocks(). Return 0 or an errno.
int allocate_at_end(int file, uint64_t from, uint64_t bytes);
// Cut the file back to `bytes`.
void cut_back(int file, uint64_t bytes);

// Allocate blocks for each hole in [from, to), and give each block there that is shared with
// another file (a reflink, a snapshot) a copy of its own. Never change a byte or the length of the
// file, whether the call succeeds or fails. Read no data if the file system reports where its
// blocks are. Do nothing if it cannot (NFS before 4.2, some FUSE): see bus_error.h.
//
// ASSUMPTIONS: the caller has the pool's exclusive lock, and `to` is at most the file's length.
// ERRORS: kResourceExhausted if the disk is full; kFailedPrecondition if the file system copies a
// block whenever it is written, or cannot unshare a shared block.
base::Status own_blocks(int file, const std::string& path, uint64_t from, uint64_t to);

// Do the same with bytes that mean nothing, which may become zeros. It syncs nothing, because other
// threads may sync the file now: a sync takes the error of a failed write-back from theirs.
base::Status claim_blocks(int file, const std::string& path, uint64_t from, uint64_t to);

// Give the blocks of [from, to) back to the file system: a hole is left, which reads as zeros. The
// length of the file stays. ERRORS: kUnimplemented if the file system cannot do that, or could not
// fill the hole again.
base::Status free_blocks(int file, const std::string& path, uint64_t from, uint64_t to);

// Return the bytes of disk that the file has; 0 if that is unknown.
uint64_t allocated_bytes(int file);

// Ask a copy-on-write file system to write this new, empty file in place.
base::Status forbid_copy_on_write(int file, const std::string& path);

// Return the size of the whole file system in bytes, used or not; 0 if it is unknown.
uint64_t file_system_bytes(int file);

}  // namespace petps::media
