// petps_client: pulls rows from petps servers and pushes rows to them.
//
// Owns:        connections; splitting of pulls by size and by the servers' shard map; dedup;
//              retries on another replica; widening to float32; sampling of hot sets.
// Never does:  throw; trust a length that a server sent; assume a single server; cache rows.
// Called by:   programs in C++; petps_client._native (Python).
// Invariants:  A call returns by its deadline. After OK every row is whole; after an error the
//              contents of the caller's arrays are undefined. After a call returned, nothing
//              writes into its arrays.
// Threads:     Every method is safe from any thread. In a forked child every request fails.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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

// Largest dim of a table. The client rejects a server that announces a larger one.
inline constexpr uint32_t kMaxDim = 4096;
inline constexpr uint16_t kDefaultPort = 7070;

// Open an RDMA device of this machine for Options::rdma: `device`, or the first one with an
// active port when `device` is empty. A program that calls it links libibverbs.
// Errors: kFailedPrecondition (no such device; the message names the remedy).
base::Result<std::shared_ptr<transport::Verbs>> open_rdma(const std::string& device);

// How connections of a petps+tls:// URL prove who is at their ends. The fields are paths of PEM
// files, except server_name. Files that change are read again for the next connection.
struct TlsOptions {
  std::string ca;           // the authorities of the servers; empty: those of the system
  std::string certificate;  // this client's, with the intermediate ones; empty: none
  std::string key;          // of `certificate`
  // The DNS name or IP address that the certificate of each server must have; empty: the one in
  // the server's address.
  std::string server_name;
};

// What a pull does with the keys of a shard that no server answers for.
enum class OnUnavailable : uint8_t {
  kError,    // the pull fails
  kDefault,  // they receive the table's default row, and are marked (TablePull::unavailable)
};

struct Options {
  std::string name;              // shown in the servers' reports; at most 255 bytes
  uint32_t deadline_ms = 2'000;  // for calls that set none
  // A longer pull is split into pipelined requests. The part of a pull for one of several servers
  // may have a quarter more.
  uint32_t keys_per_request = 500;
  uint32_t requests_in_flight = 8;  // limit per connection; the server's own limit holds too
  uint32_t connections = 16;        // limit per server; further calls wait for a connection
  // One pull in this number is sampled for the hot set; 0: no hot sets are sent.
  uint32_t hot_sample_every = 16;
  uint32_t hot_keys = 65'536;  // limit of a table's hot set
  uint32_t hot_set_ms = 0;     // period of sending hot sets; 0: the servers' choice (10 s)
  // Pull over this device from servers that offer RDMA. Servers without RDMA, or that refuse
  // it, are used over TCP.
  std::shared_ptr<transport::Verbs> rdma;
  // Period of reading tables and aliases in the background; 0: only when one is missing.
  uint32_t catalogue_ms = 5'000;
  // The credential for servers that ask for one: itself, or the file that has it, which is read
  // for each new connection. Sent only to this machine or over an encrypted connection.
  std::string token;
  std::string token_file;
  TlsOptions tls;  // for a petps+tls:// URL
  // Returns the numeric addresses of a host's name, or an error: kNotFound if the name is unknown,
  // another one if they are not known now. Called on threads of the client. Empty: the system's
  // resolver. Numeric hosts are passed too.
  std::function<base::Result<std::vector<std::string>>(const std::string& host)> resolve = {};
  // For pulls that set none. Not set: that of the URL ("?on_unavailable=default"), or kError.
  std::optional<OnUnavailable> on_unavailable = {};
  // Pulls prefer servers of this zone of the shard map while they are well; empty: no preference.
  std::string zone = {};
  // Ask a second server if the first one is slower than 95 % of recent requests: for at most 5 % of
  // the requests, and never for pushes.
  bool hedge = true;
  // Close connections that no call has used for this time; 0: only their servers close them.
  uint32_t idle_ms = 0;
};

// Whether a pull requests each repeated key once.
enum class Dedup : uint8_t {
  kWhenItPays,  // decided from earlier pulls of the table
  kAlways,
  kNever,
};

// A pull that belongs to a trace (OpenTelemetry). The call replaces `parts`, also if it fails.
struct PullTrace {
  using SpanId = std::array<uint8_t, 8>;
  // What the call asked of one server.
  struct Part {
    std::string server;  // empty: it was not asked
    // That were requested last: distinct ones, if repeated keys are left out.
    uint64_t keys = 0;
    uint64_t found = 0;     // of these
    uint32_t attempts = 0;  // requests for these or other keys of the call, one after another
    uint64_t end_ns = 0;    // since 1970: when the rows had arrived, or the attempt had failed
    base::Code code = base::Code::kOk;  // of the last attempt
  };

  // Ids in network order, not zeros, as in a `traceparent`.
  std::array<uint8_t, 16> trace_id{};
  SpanId span_id{};  // of the pull
  // Of the parts, one for each server in the order of the map: a server's span is a child of the
  // part's. Parts beyond these, as after a change of the shard map, have the pull's.
  std::vector<SpanId> part_ids;
  std::vector<Part> parts;
};

struct PullOptions {
  uint32_t deadline_ms = 0;  // 0: that of Options
  uint64_t min_version = 0;  // rows must be at least this new, else kStale
  uint32_t wait_ms = 0;      // limit of the servers' wait for min_version; the deadline holds too
  Dedup dedup = Dedup::kWhenItPays;
  std::optional<OnUnavailable> on_unavailable = {};  // not set: that of the client
  // Set only for a sampled pull. Servers that record spans receive its ids.
  PullTrace* trace = nullptr;
  // Pull from this instance ("ranking@7"), whatever the URL's model refers to; empty: that one.
  std::string_view instance = {};
};

enum class Form : uint8_t {
  kFloat32,  // float32[n, dim], whatever the table's dtype
  kStored,   // the bytes as stored, uint8[n, row_bytes]
};

// One table of a pull. `out` receives the rows in the order of `keys`: n * dim * 4 bytes,
// or n * row_bytes. Missing keys receive the table's default row. `mask` is empty, or
// receives n bytes: 1 = found. `unavailable` is empty, or receives n bytes: 1 = no server answered
// for the key, so whether it exists is unknown; its row is the default row, and its mask is 0.
// With OnUnavailable::kDefault, a pull that takes `mask` must take `unavailable` too.
struct TablePull {
  std::string_view table;
  std::span<const uint64_t> keys;
  std::span<std::byte> out;
  std::span<uint8_t> mask = {};
  Form form = Form::kFloat32;
  std::span<uint8_t> unavailable = {};
};

struct PullReport {
  // Every row of a key that a server answered for is at least this new: the lowest version of the
  // shards that replied. 0: there were no such keys.
  uint64_t applied_version = 0;
  uint64_t found = 0;        // keys found; a repeated key counts each time
  uint64_t unavailable = 0;  // keys that no server answered for; only with kDefault
  std::string instance;      // of all rows ("ranking@7"); may be empty when there are no keys
};

// Counts since the client was connected.
struct PullCounts {
  uint64_t pulls = 0;             // that succeeded
  uint64_t partial_pulls = 0;     // of these, pulls with unavailable keys
  uint64_t unavailable_keys = 0;  // keys of these that no server answered for
  uint64_t hedges = 0;            // requests to a second server, because the first was slow
  uint64_t hedges_won = 0;        // requests whose keys these answered first
};

// How a server was for a client.
struct ServerCounts {
  std::string server;     // its address
  uint64_t failures = 0;  // requests without a reply, since the client has known the server
  bool is_live = true;    // false after several failures or a long silence, until the next reply
};

struct PushOptions {
  uint32_t deadline_ms = 0;
  // False: refuse rows with NaN or infinity, before or after encoding.
  bool allow_not_finite = false;
  uint32_t stamp = 0;              // low bits of the version
  std::string_view instance = {};  // as PullOptions::instance
  // Receives what the servers acknowledged, on success and on failure.
  struct PushReport* report = nullptr;
};

// Counts of rows.
struct PushReport {
  uint64_t inserted = 0;
  uint64_t updated = 0;
  uint64_t deleted = 0;
  uint64_t absent = 0;   // deletions of keys that did not exist
  uint64_t refused = 0;  // new keys that did not fit into a full table
  // Whether servers have answered for every row. Then a full table is the only error.
  bool is_complete = false;
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
  uint64_t rows = 0;  // at the time the catalogue was read
};

class [[nodiscard]] Client {
 public:
  // Connect to "petps://h1:7070,h2:7070/model", where the addresses are any servers of the model.
  // If the servers have a shard map, it decides which server receives which keys, and the client
  // reads a changed map. Without one, the addresses are replicas, tried one after another. The
  // default port is 7070. A numeric IPv6 host is written in brackets. The model (an alias,
  // instance or model) may be omitted when the server has only one. With "petps+tls://" all
  // connections use TLS 1.3. "?on_unavailable=default" at the end sets Options::on_unavailable.
  // Errors: kInvalidArgument (the URL, an option); kUnavailable (no server is reachable; the
  // message names each server and its reason); kUnauthenticated (a certificate is not accepted);
  // kNotFound (the model; lists the known ones).
  static base::Result<std::unique_ptr<Client>> connect(std::string_view url,
                                                       const Options& options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Pull rows into `out`: float32[n, dim]. For OnUnavailable::kDefault use pull_many, or no mask.
  // Errors: kNotFound (lists the tables), kInvalidArgument (sizes), kStale,
  // kDeadlineExceeded, kUnavailable. With kDefault the last two mean that no server of the model
  // answers.
  base::Result<PullReport> pull(std::string_view table, std::span<const uint64_t> keys,
                                std::span<float> out, std::span<uint8_t> mask = {},
                                const PullOptions& options = {});
  // Pull from several tables in the same frames. All rows are of one instance. Errors as pull.
  base::Result<PullReport> pull_many(std::span<const TablePull> pulls,
                                     const PullOptions& options = {});

  // Write full rows. `rows`: float32[n, dim], encoded to the table's dtype. When it returns OK,
  // each row is durable on the server that owns the key's partition. For a repeated key the last
  // row wins. There is no retry: an error names the server and says whether it may have taken
  // rows. A push that timed out may be applied later, but never over a newer push of this client
  // (limits: client/README.md).
  // Errors: kResourceExhausted (table full: the message counts the refused keys, all others are
  // applied); kFailedPrecondition (the table is delta-fed, or any key has several servers, as
  // with a URL of several addresses and no shard map: nothing was sent); kInvalidArgument (wrong
  // dim or a value that is not finite; names the row).
  base::Result<PushReport> push(std::string_view table, std::span<const uint64_t> keys,
                                std::span<const float> rows, uint32_t dim,
                                const PushOptions& options = {});
  // Write full rows as stored: n * row_bytes. Otherwise as push.
  base::Result<PushReport> push_stored(std::string_view table, std::span<const uint64_t> keys,
                                       std::span<const std::byte> rows,
                                       const PushOptions& options = {});
  // Delete rows. Keys that do not exist are counted as `absent`. Otherwise as push.
  base::Result<PushReport> erase(std::string_view table, std::span<const uint64_t> keys,
                                 const PushOptions& options = {});

  // Return a table as last read from the servers. Sends a request only when the table, or the
  // instance that the model resolves to, is unknown.
  base::Result<Table> describe(std::string_view table, uint32_t deadline_ms = 0);
  // Read the tables of the URL's model from one server now; `rows` and `capacity` are its own.
  base::Result<std::vector<Table>> tables(uint32_t deadline_ms = 0);
  // Return the status text (JSON) of server number `server` of the URL, or, for -1, of the
  // first one that replies.
  base::Result<std::string> status(int server = -1, uint32_t deadline_ms = 0);
  PullCounts pull_counts() const;
  // Return the counts of every server that the client asks now; none in a forked child. Sends no
  // request.
  std::vector<ServerCounts> server_counts() const;
  // Return the number of servers that pulls are split over now: the parts of a PullTrace. 0 in a
  // forked child.
  size_t shards() const;
  // Return the number of servers in the URL.
  size_t servers() const;

  // Send the sampled hot sets now. The background thread does the same periodically.
  base::Status send_hot_sets();

  struct Impl;

 private:
  friend class Forwarder;  // forward.h
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace petps::client
