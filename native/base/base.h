// Front door of room base: what every native room builds on.
//
// Owns:        Status/Result, checked asserts, clocks, the two hashes of a key, checksums, cpu
//              features detected at run time, the length of a thread's time slice (time_slice.h).
// Never does:  allocate on the data path, log, read configuration, keep mutable global state
//              (cpu features and the checksum's code path are chosen once and never change).
// Called by:   every other room.
// Invariants:  partition_hash and index_hash never change: partitions on the wire and buckets in
//              a pool depend on them. crc32c and checksum64 never change: pools store their
//              values. Golden values in tests/native/base pin all four functions.
// Threads:     every function here may be called from any thread at any time.
#pragma once

#include "base/check.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/crc32c.h"
#include "base/hash.h"
#include "base/status.h"
