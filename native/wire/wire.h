// Room wire: the bytes between processes. FORMAT.md beside this file describes every field of
// every frame.
//
// Owns:        the frame header, opcodes, limits, encode and decode of every request and reply; key
//              -> partition -> shard, and which shard maps are valid.
// Never does:  sockets, tables, threads; allocate memory out of proportion to the frame; trust a
//              length before checking it.
// Called by:   server (decodes requests, encodes replies) and client (the other way round).
// Invariants:  decode(encode(x)) == x; the views in a decoded message point only into the bytes it
//              was decoded from; every check is written so that it cannot overflow; the numbers of
//              opcodes, flags and codes are never reused.
// Threads:     pure functions.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace petps::wire {

static_assert(std::endian::native == std::endian::little,
              "frames are little-endian and are read in place");

// ---- Limits. A request beyond one gets an error; other connections are not affected. The hello
// reply reports those in struct Limits; a server may lower them.

// Longest body of a request or reply. 500 rows of the largest size (4096 x f32 = 16 KiB) need 8
// MiB; twice that also holds a push of these rows. It bounds the memory of one connection.
inline constexpr uint32_t kMaxBodyBytes = 16u << 20;
// One worker runs a pull to completion: 65,536 keys take about 10 ms, the longest that other
// connections should wait.
inline constexpr uint32_t kMaxKeysPerPull = 65536;
// Sections of one pull. Some models have thousands of features; more are a client's mistake.
inline constexpr uint32_t kMaxSectionsPerPull = 4096;
// Rows of one push. The drain of a larger batch would delay the pushes behind it too long.
inline constexpr uint32_t kMaxKeysPerPush = 65536;
// Keys of one hot set (512 KiB): only the most pulled keys are worth moving.
inline constexpr uint32_t kMaxHotKeys = 65536;
// Unanswered requests of one connection. At this number the server stops reading from it.
inline constexpr uint32_t kMaxInFlight = 64;
// Connections of one server. Each costs a file descriptor and at least one receive buffer (64 KiB).
inline constexpr uint32_t kMaxConnections = 4096;
// Bytes of a name: of a table, model, instance, alias or client.
inline constexpr uint32_t kMaxNameBytes = 255;
// The first frame of a connection that has to say who it is. A hello has at most about 560 bytes.
inline constexpr size_t kFirstFrameBytes = 1024;
// Bytes of an error reply's text; a longer text is cut.
inline constexpr uint32_t kMaxErrorBytes = 4096;
// Partitions of a model, and so bits of a shard's ownership bitmap.
inline constexpr uint32_t kMaxPartitions = 1024;
// Servers of a shard map, replicas included.
inline constexpr uint32_t kMaxShardServers = 1024;
// Tables, instances and aliases of one list: far more than a pool holds (native/pool/pool.h), or a
// router that merges many. A short entry of a frame takes a kilobyte of a client's memory.
inline constexpr uint32_t kMaxTables = 65536;
inline constexpr uint32_t kMaxInstances = 4096;
inline constexpr uint32_t kMaxAliases = 4096;
// How long a pull may wait for its version. It bounds what a parked connection costs a server.
inline constexpr uint32_t kMaxWaitMs = 60'000;

inline constexpr uint16_t kProtocolVersion = 1;     // the newest that this build speaks
inline constexpr uint16_t kProtocolVersionMin = 1;  // the oldest that this build speaks
inline constexpr uint32_t kSignature = 0x53505450;  // the bytes "PTPS"
inline constexpr uint16_t kReplyBit = 0x8000;       // reply opcode = request opcode | kReplyBit
// A request's body is a multiple of this, so that consecutive frames in a buffer have aligned keys.
inline constexpr uint32_t kBodyAlignment = 8;

enum class Opcode : uint16_t {  // never renumber
  kHello = 1,                   // versions, and the limits
  kTables = 2,                  // tables, instances and aliases
  kPull = 3,                    // read rows
  kPush = 4,                    // write full rows or deletions
  kStatus = 5,                  // the server's status as JSON text
  kHotKeys = 6,                 // a client's hot set of one table
  kShardMap = 7,                // which server owns which partitions; see kFeatureShardMap
  kControl = 8,                 // refused: switches and drops, before the first release
  kRdma = 9,                    // offer a queue pair; see kFeatureRdma
};
inline constexpr size_t kOpcodesEnd = 10;  // above every Opcode: the size of an array by opcode
// Return the opcode's name, such as "pull", or "unknown". kReplyBit is ignored.
std::string_view opcode_name(uint16_t opcode);

// ---- The header: 32 bytes before every body.

struct FrameHeader {
  uint32_t signature = kSignature;
  uint16_t version = kProtocolVersion;
  uint16_t opcode = 0;
  uint64_t request_id = 0;  // chosen by the client, echoed by the reply
  uint32_t flags = 0;       // kFlag...; those that are not defined must be 0
  uint32_t sections = 0;    // pull and its reply; 0 elsewhere
  uint32_t body_bytes = 0;
  // base::Code; 0 in requests. If it is not 0 in a reply, the body is the message, UTF-8 text.
  uint16_t code = 0;
  uint16_t reserved = 0;
};
static_assert(sizeof(FrameHeader) == 32, "the header is copied to and from frames whole");
inline constexpr size_t kHeaderBytes = sizeof(FrameHeader);
// Of a pull: a TraceContext follows the keys. Only to a server with kFeatureTrace.
inline constexpr uint32_t kFlagTrace = 1;

// Decode a header from at least kHeaderBytes bytes. Check signature, version and body length, so
// that the caller may then receive the body.
// Errors: kInvalidArgument (not petps, reserved bits), kUnimplemented (version),
// kResourceExhausted (body above the limit).
base::Status decode_header(std::span<const std::byte> bytes, FrameHeader& header);
// Decode a header as decode_header does. Also check that it is a request: no reply bit, code 0,
// body a multiple of kBodyAlignment.
base::Status decode_request_header(std::span<const std::byte> bytes, FrameHeader& header);
// Decode a header as decode_header does. Also check that it is a reply. The result is OK for an
// error reply too: see header.code and decode_error.
base::Status decode_reply_header(std::span<const std::byte> bytes, FrameHeader& header);

// Every encode_... below replaces the content of `frame`, header included. A reused frame keeps its
// memory.
using Frame = std::vector<std::byte>;

// ---- Errors

void encode_error(uint16_t request_opcode, uint64_t request_id, const base::Status& status,
                  Frame& frame);
// Return the Status of a reply whose header.code is not 0.
base::Status decode_error(const FrameHeader& header, std::span<const std::byte> body);

// ---- Hello

struct Limits {
  uint32_t body_bytes = kMaxBodyBytes;
  uint32_t keys_per_pull = kMaxKeysPerPull;
  uint32_t sections_per_pull = kMaxSectionsPerPull;
  uint32_t keys_per_push = kMaxKeysPerPush;
  uint32_t hot_keys = kMaxHotKeys;
  uint32_t in_flight = kMaxInFlight;
  uint32_t connections = kMaxConnections;
  bool operator==(const Limits&) const = default;
};

using PartitionSet = std::array<uint64_t, kMaxPartitions / 64>;  // bit p: partition p
inline bool has_partition(const PartitionSet& set, uint32_t partition) {
  return ((set[partition / 64] >> (partition % 64)) & 1) != 0;
}
// Return "0-3, 7", or "none" for an empty set.
std::string partitions_text(const PartitionSet& set);

// The partitions that one server owns. The default is a server that owns everything.
struct Shard {
  uint32_t shard = 0;  // this server's number in the map
  uint32_t shards = 1;
  uint32_t partitions = 1;   // P of the map, 1..kMaxPartitions
  uint64_t map_version = 0;  // 0: there is no map
  PartitionSet owned{1};
  bool owns(uint32_t partition) const {
    return partition < partitions && has_partition(owned, partition);
  }
  bool owns_all() const;
  bool operator==(const Shard&) const = default;
};

// What a server can do beyond the first release of protocol version 1 (hello reply). Bits are
// never reused; unknown bits are ignored.
inline constexpr uint64_t kFeatureShardMap = 1;  // answers kShardMap
inline constexpr uint64_t kFeaturePullWait = 2;  // supports PullRequest::wait_ms; else it must be 0
inline constexpr uint64_t kFeatureRdma = 4;      // answers kRdma
// TablesRequest::with_state may be set.
inline constexpr uint64_t kFeatureCatalogueState = 8;
// Supports PushRequest::order; else it must be empty.
inline constexpr uint64_t kFeaturePushOrder = 16;
// Records the spans of sampled pulls (PullRequest::trace); else a pull must carry no trace.
inline constexpr uint64_t kFeatureTrace = 32;

struct HelloRequest {
  uint16_t version_min = kProtocolVersionMin;
  uint16_t version_max = kProtocolVersion;
  std::string_view client;      // the client's name, at most kMaxNameBytes
  std::string_view token = {};  // the caller's credential, at most kMaxNameBytes; "": none
};
struct HelloReply {
  uint16_t version_min = kProtocolVersionMin;
  uint16_t version_max = kProtocolVersion;
  // Another uuid after a reconnect means another pool: request its tables again.
  std::array<uint8_t, 16> pool_uuid{};
  Limits limits;
  Shard shard;
  uint32_t hot_set_seconds = 10;  // how often a client should send its hot set
  uint64_t features = 0;          // kFeature...
};

void encode_hello(uint64_t request_id, const HelloRequest& hello, Frame& frame);
base::Status decode_hello(const FrameHeader& header, std::span<const std::byte> body,
                          HelloRequest& hello);
void encode_hello_reply(uint64_t request_id, const HelloReply& hello, Frame& frame);
base::Status decode_hello_reply(const FrameHeader& header, std::span<const std::byte> body,
                                HelloReply& hello);

// ---- Tables

struct TableInfo {
  uint32_t id = 0;
  uint32_t instance = 0;
  std::string name;
  uint8_t dtype = 0;  // codec::Dtype
  uint8_t feed = 0;   // 0: takes pushes, 1: takes deltas
  uint32_t dim = 0;
  uint32_t row_bytes = 0;
  uint64_t capacity = 0;
  uint64_t rows = 0;
  std::vector<std::byte> default_row;  // row_bytes as stored; empty: zeros
  bool operator==(const TableInfo&) const = default;
};
struct InstanceInfo {
  uint32_t id = 0;
  std::string model;  // "ranking"
  std::string name;   // "ranking@7"
  uint32_t partitions = 1;
  uint64_t applied_version = 0;
  bool operator==(const InstanceInfo&) const = default;
};
struct AliasInfo {
  std::string name;
  uint32_t instance = 0;
  uint32_t previous = 0;  // the instance before the last switch; 0: none, or not reported
  bool operator==(const AliasInfo&) const = default;
};
// The state of the pool that a list of names describes. Of two states of one pool, the one with
// the higher counter is newer. Counters of different pools are not comparable.
struct CatalogueState {
  std::array<uint8_t, 16> pool_uuid{};
  uint64_t counter = 0;  // at least 1 in a pool; grows with every change of names
  bool operator==(const CatalogueState&) const = default;
};
struct TablesReply {
  std::vector<InstanceInfo> instances;
  std::vector<AliasInfo> aliases;
  std::vector<TableInfo> tables;
  CatalogueState state;  // counter 0: not reported
  bool operator==(const TablesReply&) const = default;
};
struct TablesRequest {
  bool with_state = false;  // only to a server with kFeatureCatalogueState
};

void encode_tables(uint64_t request_id, const TablesRequest& request, Frame& frame);
base::Status decode_tables(const FrameHeader& header, std::span<const std::byte> body,
                           TablesRequest& request);
// Include the state and the aliases' previous instances if reply.state.counter is not 0.
// Errors: kResourceExhausted if the catalogue does not fit in one frame, or is above kMaxTables,
// kMaxInstances or kMaxAliases.
base::Status encode_tables_reply(uint64_t request_id, const TablesReply& reply, Frame& frame);
base::Status decode_tables_reply(const FrameHeader& header, std::span<const std::byte> body,
                                 TablesReply& reply);

// ---- Pull

struct PullSection {
  uint32_t table = 0;
  uint32_t keys = 0;
};
static_assert(sizeof(PullSection) == 8, "read in place from the frame");

inline constexpr uint8_t kTraceSampled = 1;
// The span that a request belongs to, with the values of W3C Trace Context. The ids are in network
// order, as in a `traceparent`. A context that is not sampled, or whose ids are zeros, is ignored.
struct TraceContext {
  std::array<uint8_t, 16> trace_id{};
  std::array<uint8_t, 8> span_id{};  // of the caller: the parent of the server's span
  uint8_t flags = 0;                 // kTraceSampled; the others are ignored
  std::array<uint8_t, 7> reserved{};
  bool is_sampled() const {
    return (flags & kTraceSampled) != 0 && trace_id != std::array<uint8_t, 16>{} &&
           span_id != std::array<uint8_t, 8>{};
  }
  bool operator==(const TraceContext&) const = default;
};
static_assert(sizeof(TraceContext) == 32, "copied whole: see FORMAT.md, pull");
struct PullRequest {
  uint64_t min_version = 0;  // 0: any
  uint32_t instance = 0;     // every table must be of this instance; 0: do not check
  uint32_t wait_ms = 0;      // how long to wait for min_version before STALE; at most kMaxWaitMs
  std::span<const PullSection> sections;
  std::span<const uint64_t> keys;  // of all sections, one section after another
  TraceContext trace = {};         // sent only if it is sampled; only with kFeatureTrace
};

// Return the bytes of the whole frame of a pull without a trace.
size_t pull_request_bytes(size_t sections, size_t keys);
// ASSUMPTIONS: the keys of the sections sum to keys.size(); the request is within the limits.
void encode_pull(uint64_t request_id, const PullRequest& pull, Frame& frame);
base::Status decode_pull(const FrameHeader& header, std::span<const std::byte> body,
                         const Limits& limits, PullRequest& pull);

struct PullReplySection {
  // base::Code: kNotFound if the table is unknown; then row_bytes and rows_found are 0.
  uint16_t code = 0;
  uint16_t reserved = 0;
  uint32_t table = 0;
  uint32_t row_bytes = 0;
  uint32_t keys = 0;        // as in the request
  uint32_t rows_found = 0;  // set bits of the section's presence bitmap
  uint32_t reserved2 = 0;
};
static_assert(sizeof(PullReplySection) == 24, "read in place from the frame");

// The start of a pull reply's body. rows_offset is the number of bytes to read before the rows.
struct PullReplyPrefix {
  uint64_t applied_version = 0;
  uint64_t rows_offset = 0;  // from the start of the body: prefix, section heads, bitmaps
};
static_assert(sizeof(PullReplyPrefix) == 16, "read in place from the frame");

// body = prefix | PullReplySection[sections] | bitmap of each section | rows. The rows found are
// packed in request order, section after section, so that a client can read them straight into
// the caller's array.
struct PullReply {
  uint64_t applied_version = 0;
  std::span<const PullReplySection> sections;
  // Of all sections, one after another; bitmap_words(keys) each; bit i%64 of word i/64 = key i.
  std::span<const uint64_t> bitmaps;
  uint64_t rows_offset = 0;
  uint64_t rows_bytes = 0;  // body_bytes - rows_offset
};

inline constexpr size_t bitmap_words(size_t keys) { return (keys + 63) / 64; }
// Return the bytes of a pull reply before its rows: header, prefix, section heads, bitmaps.
size_t pull_reply_head_bytes(std::span<const PullSection> sections);
// The parts of a reply's head in a buffer of pull_reply_head_bytes, 8-byte aligned.
struct PullReplyParts {
  std::span<PullReplySection> sections;
  std::span<uint64_t> bitmaps;
};
// Write section heads without rows, and zeroed bitmaps. The caller then sets bits, rows_found,
// row_bytes and code, and calls finish_pull_reply.
PullReplyParts start_pull_reply(std::span<const PullSection> sections, std::span<std::byte> head);
void finish_pull_reply(uint64_t request_id, uint64_t applied_version, size_t sections,
                       uint64_t rows_bytes, std::span<std::byte> head);

// Decode the prefix from at least the first 16 bytes of the body. Check rows_offset against the
// header and the limits.
base::Status decode_pull_reply_prefix(const FrameHeader& header, std::span<const std::byte> prefix,
                                      PullReplyPrefix& out);
// Decode `head`, the first rows_offset bytes of the body, 8-byte aligned. Check that bitmaps,
// rows_found and row_bytes agree with each other and with the body's length.
base::Status decode_pull_reply_head(const FrameHeader& header, std::span<const std::byte> head,
                                    PullReply& reply);

// ---- Push

inline constexpr uint32_t kPushHasDeletions = 1;  // a deletion bitmap follows the keys
inline constexpr uint32_t kPushHasOrder = 2;      // a PushOrder precedes the keys

// The position of a push among the pushes of its client. A push that the client gave up may arrive
// late, and must not overwrite a newer push. So a server refuses a push whose call had already
// finished when the client sent a later push.
struct PushOrder {
  uint64_t client = 0;    // drawn at random; 0: no order
  uint64_t number = 0;    // of the call; all frames of a call share it
  uint64_t oldest = 0;    // oldest call that had not finished when this was sent; at most `number`
  uint64_t finished = 0;  // bit i: call `oldest` + i had finished
  bool operator==(const PushOrder&) const = default;
};
static_assert(sizeof(PushOrder) == 32, "copied whole: see FORMAT.md, push");
inline constexpr uint64_t kPushOrderCalls = 64;  // calls that `finished` reports

struct PushRequest {
  uint32_t table = 0;
  uint32_t instance = 0;   // 0: do not check
  uint32_t dim = 0;        // the server refuses a dim, dtype or row_bytes unlike the table's
  uint32_t dtype = 0;      // codec::Dtype
  uint32_t row_bytes = 0;  // 0: all keys are deletions and no rows follow
  uint32_t stamp = 0;      // low bits of the version, kept beside the row
  PushOrder order;         // only to a server with kFeaturePushOrder
  std::span<const uint64_t> keys;
  std::span<const uint64_t> deletions;  // empty, or bitmap_words(keys): bit = delete that key
  std::span<const std::byte> rows;  // keys * row_bytes, as stored; those of deletions are ignored
};
// table::ApplyReport. refused != 0: the table is full; clients report RESOURCE_EXHAUSTED.
struct PushReply {
  uint64_t inserted = 0;
  uint64_t updated = 0;
  uint64_t deleted = 0;
  uint64_t absent = 0;
  uint64_t refused = 0;
  bool operator==(const PushReply&) const = default;
};

// Return the bytes of the whole frame of a push that has an order.
size_t push_request_bytes(size_t keys, size_t row_bytes, bool deletions);
void encode_push(uint64_t request_id, const PushRequest& push, Frame& frame);
base::Status decode_push(const FrameHeader& header, std::span<const std::byte> body,
                         const Limits& limits, PushRequest& push);
void encode_push_reply(uint64_t request_id, const PushReply& reply, Frame& frame);
base::Status decode_push_reply(const FrameHeader& header, std::span<const std::byte> body,
                               PushReply& reply);

// ---- Status and hot keys

void encode_status(uint64_t request_id, Frame& frame);
base::Status decode_status(const FrameHeader& header, std::span<const std::byte> body);
// Errors: kResourceExhausted if the text does not fit in one frame.
base::Status encode_status_reply(uint64_t request_id, std::string_view json, Frame& frame);
base::Status decode_status_reply(const FrameHeader& header, std::span<const std::byte> body,
                                 std::string_view& json);

struct HotKeysRequest {
  uint32_t table = 0;
  std::span<const uint64_t> keys;
};
void encode_hot_keys(uint64_t request_id, const HotKeysRequest& hot, Frame& frame);
base::Status decode_hot_keys(const FrameHeader& header, std::span<const std::byte> body,
                             const Limits& limits, HotKeysRequest& hot);
void encode_hot_keys_reply(uint64_t request_id, Frame& frame);  // empty body
base::Status decode_hot_keys_reply(const FrameHeader& header, std::span<const std::byte> body);

// ---- Shard map

struct ShardServer {
  std::string address;  // "host:port", as clients reach the server
  PartitionSet partitions{};
  std::string zone = {};  // such as a data centre, at most 255 bytes; empty: not given
  bool operator==(const ShardServer&) const = default;
};
// The servers and the partitions that each owns. A partition may have several owners, which need
// not share other partitions.
struct ShardMap {
  std::string model;
  uint64_t version = 0;  // grows with every change; 0: no map, each server owns everything
  uint32_t partitions = 1;
  std::vector<ShardServer> servers;
  bool operator==(const ShardMap&) const = default;
};

// Check a map. Errors: kInvalidArgument, which names the first fault: a limit, a repeated
// address, a partition without an owner. A map of version 0 has no servers.
base::Status check_shard_map(const ShardMap& map);
// Return what the server of this address owns: nothing if the map does not name it.
Shard shard_of(const ShardMap& map, std::string_view address);
// Return the addresses of all servers that own the partition.
std::vector<std::string> owners_of(const ShardMap& map, uint32_t partition);
// Return the partitions of the server of this address that other servers own too.
PartitionSet shared_partitions(const ShardMap& map, std::string_view address);
// Refuse a push (or deletions) of keys that all these servers own.
// Pushes have no order across servers, so two clients could leave replicas different forever.
// Client and server refuse with this text. Errors: kFailedPrecondition, always.
base::Status refuse_replicated_push(std::string_view table, std::span<const std::string> servers);

void encode_shard_map(uint64_t request_id, Frame& frame);
base::Status decode_shard_map(const FrameHeader& header, std::span<const std::byte> body);
// ASSUMPTIONS: check_shard_map(map) is OK.
void encode_shard_map_reply(uint64_t request_id, const ShardMap& map, Frame& frame);
base::Status decode_shard_map_reply(const FrameHeader& header, std::span<const std::byte> body,
                                    ShardMap& map);

// ---- RDMA set-up: the addresses and limits that two queue pairs exchange
// (native/transport/rdma/RDMA.md)

struct QueuePair {
  uint32_t number = 0;         // 24 bits, not 0
  uint32_t packet_number = 0;  // 24 bits
  uint16_t lid = 0;
  uint8_t mtu = 1;  // 1..5: 256, 512, 1024, 2048, 4096 bytes
  uint8_t reserved = 0;
  std::array<uint8_t, 16> gid{};
  bool operator==(const QueuePair&) const = default;
};
struct RdmaRequest {
  QueuePair pair;
  uint32_t ring_key = 0;  // of the memory that replies are written to
  uint64_t ring_address = 0;
  uint32_t ring_bytes = 0;
  uint32_t ring_messages = 0;  // receives that the client keeps posted
  bool operator==(const RdmaRequest&) const = default;
};
struct RdmaReply {
  QueuePair pair;
  uint32_t credits = 0;        // SENDs with content that may be in flight
  uint32_t message_bytes = 0;  // of one SEND
  uint32_t reserved = 0;
  bool operator==(const RdmaReply&) const = default;
};
static_assert(sizeof(QueuePair) == 28 && sizeof(RdmaRequest) == 48 && sizeof(RdmaReply) == 40,
              "copied whole: see FORMAT.md, rdma");
void encode_rdma(uint64_t request_id, const RdmaRequest& rdma, Frame& frame);
// Errors: kInvalidArgument (no address of a queue pair, reserved bits).
base::Status decode_rdma(const FrameHeader& header, std::span<const std::byte> body,
                         RdmaRequest& rdma);
void encode_rdma_reply(uint64_t request_id, const RdmaReply& rdma, Frame& frame);
base::Status decode_rdma_reply(const FrameHeader& header, std::span<const std::byte> body,
                               RdmaReply& rdma);

// ---- Key -> partition

// Return XXH3-64 of the key's 8 little-endian bytes, seed 0, modulo partitions. The partition of a
// key never changes.
uint32_t partition_of(uint64_t key, uint32_t partitions);

}  // namespace petps::wire
