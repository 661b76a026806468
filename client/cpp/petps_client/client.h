// petps_client: pulls rows from petps servers, and pushes rows to them.
//
// Owns:        connections, splitting of large pulls and by the servers' shard map, dedup, retries on another replica, widening to
//              float32, hot-set sampling.
// Never does:  throw; trust a length a server sent; assume that there is one server; cache rows.
// Called by:   programs in C++; petps_client._native (Python).
// Invariants:  a call returns by its deadline; on an error the caller's arrays hold no promise, on OK every row is whole;
//              after a call returned, nothing writes into its arrays.
// Threads:     every method is safe from any thread; a Client made before fork() refuses work in the child.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "codec/codec.h"

namespace petps::transport {
class Verbs;
}

namespace petps::client {

// Largest dim of a table; a server that announces more is not believed.
inline constexpr uint32_t kMaxDim = 4096;
inline constexpr uint16_t kDefaultPort = 7070;

// Opens an RDMA device of this machine for Options::rdma: `device`, or the first with an active port when it
// is empty. A program that calls it links libibverbs.
// Errors: kFailedPrecondition (no such device; names the remedy).
base::Result<std::shared_ptr<transport::Verbs>> open_rdma(const std::string& device);

struct Options {
  std::string name;                 // shown in the servers' reports; at most 255 bytes
  uint32_t deadline_ms = 2'000;     // of calls that name none
  uint32_t keys_per_request = 500;  // a longer pull is split; requests of one call are pipelined
  uint32_t requests_in_flight = 8;  // per connection; the server's own limit holds too
  uint32_t connections = 16;  // at most, per server: so many calls run at once, the others wait
  uint32_t hot_sample_every =
      16;  // 1 of so many requests is sampled for the hot set; 0: no hot sets are sent
  uint32_t hot_keys = 4'096;  // longest hot set of a table
  uint32_t hot_set_ms = 0;    // how often hot sets are sent; 0: as the servers ask (10 s)
  // Servers that offer RDMA are pulled from over this device; over TCP when they do not, or refuse.
  std::shared_ptr<transport::Verbs> rdma;
  uint32_t catalogue_ms =
      5'000;  // how often tables and aliases are read again in the background; 0: only when one is missing
};

enum class Dedup : uint8_t {
  kWhenItPays,  // from what earlier pulls of the table saw
  kAlways,
  kNever,
};

struct PullOptions {
  uint32_t deadline_ms = 0;  // 0: the client's
  uint64_t min_version = 0;  // rows at least this new, or STALE
  uint32_t wait_ms = 0;      // how long servers may wait for it before that; the deadline holds too
  Dedup dedup = Dedup::kWhenItPays;
};

enum class Form : uint8_t {
  kFloat32,  // float32[n, dim], whatever the table's dtype
  kStored,   // the stored bytes, uint8[n, row_bytes]
};

// The rows of `keys` go to `out` in their order: n * dim * 4 bytes or n * row_bytes; missing keys receive the table's default
// row. `mask` is empty, or receives n bytes: 1 = found.
struct TablePull {
  std::string_view table;
  std::span<const uint64_t> keys;
  std::span<std::byte> out;
  std::span<uint8_t> mask = {};
  Form form = Form::kFloat32;
};

struct PullReport {
  uint64_t applied_version =
      0;  // every row is at least that new (the lowest of the shards asked); 0 when no key was asked for
  uint64_t found = 0;    // keys found; a repeated key counts each time
  std::string instance;  // that all rows are of ("ranking@7"); may be empty for no keys
};

struct PushOptions {
  uint32_t deadline_ms = 0;
  bool allow_not_finite =
      false;           // otherwise rows with NaN or infinity, before or after encoding, are refused
  uint32_t stamp = 0;  // low bits of the version
  struct PushReport* report =
      nullptr;  // also filled when the call fails: what one server acknowledged before that
};

struct PushReport {
  uint64_t inserted = 0;
  uint64_t updated = 0;
  uint64_t deleted = 0;
  uint64_t absent = 0;   // deletions of keys that were not there
  uint64_t refused = 0;  // new keys that a full table did not take
};

struct Table {
  std::string name;
  std::string model;
  std::string instance;  // "ranking@7"
  codec::Dtype dtype = codec::Dtype::kF32;
  uint32_t dim = 0;
  uint32_t row_bytes = 0;  // as stored
  bool takes_pushes = true;
  uint64_t capacity = 0;
  uint64_t rows = 0;  // when the catalogue was read
};

class [[nodiscard]] Client {
 public:
  // "petps://h1:7070,h2:7070/model": any servers of the model. If they have a shard map, it says who is asked for what, and is
  // read again when it has changed; else they are replicas, tried one after another. The port may be left out (7070), a
  // numeric IPv6 host stands in brackets. The model (or alias, or instance) may be left out when the server has only one.
  // Errors: kInvalidArgument (the URL, an option), kUnavailable (no server could be reached; each is named with its reason),
  // kNotFound (model; lists the known ones).
  static base::Result<std::unique_ptr<Client>> connect(std::string_view url,
                                                       const Options& options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // float32[n, dim]. Errors: kNotFound (lists the tables), kInvalidArgument (sizes), kStale, kDeadlineExceeded, kUnavailable.
  base::Result<PullReport> pull(std::string_view table, std::span<const uint64_t> keys,
                                std::span<float> out, std::span<uint8_t> mask = {},
                                const PullOptions& options = {});
  // Several tables in the same frames; all rows are of one instance.
  base::Result<PullReport> pull_many(std::span<const TablePull> pulls,
                                     const PullOptions& options = {});

  // rows: float32[n, dim], encoded to the table's dtype; durable on the server that has the key's
  // partition when it returns OK. Of a repeated key the last row wins. Not retried: an error names
  // the server, and whether it may have taken rows. One that timed out may be applied later, but
  // never over a newer push of this client (limits: client/README.md).
  // Errors: kResourceExhausted (table full: the message counts refused keys; the others are
  // applied), kFailedPrecondition (the table is delta-fed; or any key has several servers, the
  // addresses of a URL without a shard map included: nothing was sent), kInvalidArgument (dim, not
  // finite: names the row).
  base::Result<PushReport> push(std::string_view table, std::span<const uint64_t> keys,
                                std::span<const float> rows, uint32_t dim,
                                const PushOptions& options = {});
  // rows: n * row_bytes as stored.
  base::Result<PushReport> push_stored(std::string_view table, std::span<const uint64_t> keys,
                                       std::span<const std::byte> rows,
                                       const PushOptions& options = {});
  base::Result<PushReport> erase(std::string_view table, std::span<const uint64_t> keys,
                                 const PushOptions& options = {});

  // As last read from the servers; a request is sent only where the table, or what a server means by the model, is unknown.
  base::Result<Table> describe(std::string_view table, uint32_t deadline_ms = 0);
  // Read from a server now; rows and capacity are those of that server.
  base::Result<std::vector<Table>> tables(uint32_t deadline_ms = 0);
  // The status text (JSON) of the first server of the URL that answers; `server` is its number there, or -1 for any.
  base::Result<std::string> status(int server = -1, uint32_t deadline_ms = 0);
  size_t servers() const;

  // For operators. On every server of the URL, or of the shard map, one after another, durable when it returns; once more changes nothing, so after
  // an error (which names the server) ask again. From now on `alias` means `instance`, of all tables at once.
  base::Status switch_alias(std::string_view alias, std::string_view instance,
                            uint32_t deadline_ms = 0);
  // Removes an instance that no alias means (else kFailedPrecondition) and its tables.
  base::Status drop_instance(std::string_view instance, uint32_t deadline_ms = 0);

  // Sends the hot sets gathered so far, now. The background thread calls it.
  base::Status send_hot_sets();

  struct Impl;

 private:
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace petps::client
