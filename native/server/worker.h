// One worker, run to completion: receive -> decode -> pin -> lookup -> gather -> post. Internal
// to server.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "epoch/epoch.h"
#include "gather/gather.h"
#include "server/push_writer.h"
#include "server/server.h"
#include "server/spans.h"
#include "server/stats.h"
#include "table/table.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::server {

struct Shared;
struct Ownership;

class Worker {
 public:
  // Whose requests the endpoint brings: those of peers, or those of this process, which has
  // authenticated its callers itself.
  enum class Source : uint8_t { kTcp, kCalls, kRdma };
  Worker(Shared& shared, size_t number, transport::Endpoint& endpoint, epoch::Reader& reader,
         Source source);

  void run();                                // serve until shared.stopping, then drain
  bool drained() const { return drained_; }  // after run(): whether nothing was left in flight
  // The spans that the worker has recorded; null: the server traces nothing.
  SpanRing* spans() { return spans_ == nullptr ? nullptr : &spans_->ring(); }
  void finish_push(PushDone done);                      // called by the writer's thread
  void close_soon(transport::ConnectionId connection);  // called by any thread

  const WorkerStats& stats() const { return stats_; }
  // Grows at least twice a second while the worker makes progress, also without requests.
  uint64_t rounds() const { return rounds_.load(std::memory_order_relaxed); }
  const StatsByTable& table_stats() const { return table_stats_; }
  transport::Endpoint& endpoint() { return endpoint_; }
  epoch::Reader& reader() { return reader_; }

 private:
  // The result of handling a frame. kDone: the frame was answered or refused. kWait, kPark: it
  // stays at the front of its connection, and the worker retries it soon, or once the version that
  // it waits for is applied.
  enum class Outcome : uint8_t { kDone, kWait, kPark };
  struct Request {
    transport::ConnectionId connection;
    wire::FrameHeader header;
    std::span<const std::byte> frame;
    uint64_t start_ns;
    std::span<const std::byte> body() const { return frame.subspan(wire::kHeaderBytes); }
  };
  struct ConnectionState {
    transport::ConnectionId id = 0;
    uint32_t pushes_in_flight = 0;
    uint64_t parked_until_ns = 0;  // of the frame at the front; 0: it has not been parked
    uint64_t pairing = 0;          // the rdma connection that it opened, or its own over rdma
    access::CallerPointer caller = nullptr;  // null: not authenticated yet
    std::string peer = {};
    uint64_t push_owner = 0;         // see PushJob; 0: it has not pushed yet
    bool admitted = false;           // the frame at the front is counted in the caller's limits
    SpanRecorder::Front front = {};  // of the frame at the front, if spans are recorded
  };
  struct Parked {
    transport::ConnectionId connection;
    uint32_t instance;
    uint64_t version;
    uint64_t until_ns;
  };
  struct Applied {
    uint64_t version;
    uint32_t instance;  // the requested instance with the lowest version
  };

  ConnectionState& state_of(transport::ConnectionId connection);
  std::span<const transport::Event> poll(int timeout_ms);
  void handle(const transport::Event& event);
  bool handle_frames(transport::ConnectionId connection);
  Outcome handle_frame(transport::ConnectionId connection, std::span<const std::byte> frame);
  void resume_blocked();
  void collect_due();
  void post_pushes();
  void close_doors();
  void opened(transport::ConnectionId connection);
  void closed(const transport::Event& event);
  void drain();

  // The caller of each connection: access.cc.

  // Set caller_ to the connection's caller: authenticate it at its first frame, and at a hello with
  // a token. Count the frame in the caller's limits. On an error, `is_refused` tells whether the
  // connection must be closed.
  base::Status admit(const Request& request, bool& is_refused);
  base::Result<access::CallerPointer> authenticate(const Request& request);
  // Refuse a request for a table that the caller may not use so, or that does not exist. For a
  // caller with the role for all models, return OK also for an unknown table.
  base::Status check_right(access::Role role, uint32_t id, const table::Table* table);
  const std::string* model_of(const table::Table& table);
  // Close the connections whose grant is revoked or expired.
  void renew_callers();

  // One function per opcode.
  base::Status hello(const wire::FrameHeader& header, std::span<const std::byte> body);
  base::Status list_tables(const wire::FrameHeader& header, std::span<const std::byte> body);
  base::Status show_status(const wire::FrameHeader& header, std::span<const std::byte> body);
  base::Status hot_keys(const wire::FrameHeader& header, std::span<const std::byte> body);
  base::Status show_shard_map(const wire::FrameHeader& header, std::span<const std::byte> body);
  base::Status open_rdma(transport::ConnectionId connection, const wire::FrameHeader& header,
                         std::span<const std::byte> body);
  Outcome pull(const Request& request, base::Status& refusal);
  Outcome push(const Request& request, base::Status& refusal);
  bool may_park(const std::string& peer) const;
  uint64_t push_owner_of(transport::ConnectionId connection, const access::Caller& caller) const;
  // Queue a request for the writer's thread.
  Outcome queue(const Request& request, const table::TablePointer& table, uint32_t stamp = 0,
                size_t keys = 0);

  // Parts of a pull.
  base::Status find_tables(const wire::PullRequest& request);
  // Set rows_bytes_max to the bytes of all rows that the request could find.
  base::Status check_reply_size(const wire::PullRequest& request, size_t head_bytes,
                                uint64_t& rows_bytes_max) const;
  bool copies_rows(size_t keys, uint64_t rows_bytes_max) const;
  Applied applied_version(const wire::PullRequest& request) const;
  bool is_any_partial() const;
  base::Status check_loaded(const wire::PullRequest& request) const;
  // Park a pull whose version is not applied yet, or refuse it as STALE.
  Outcome park(transport::ConnectionId connection, const wire::PullRequest& request,
               const Applied& applied, base::Status& refusal);
  void gather_section(std::span<const uint64_t> keys, const table::Table& table,
                      wire::PullReplySection& section, std::span<uint64_t> bitmap, bool copy);
  // Count an answered pull, and set section_stats_ for its latency.
  void count_pull(const wire::PullRequest& request,
                  std::span<const wire::PullReplySection> sections, uint64_t rows_found);

  // Return null for an unknown table. The pointer is valid under a Pin that was taken before the
  // call, which is why pull takes its Pin first.
  table::Table* find_table(uint32_t id);
  TableStats& stats_of(uint32_t table);
  base::Status unknown_table(uint32_t id) const;
  bool has_current_map() const;
  void take_map();
  base::Status check_pulled(std::span<const uint64_t> keys) const;
  base::Status check_one_owner(std::string_view table, std::span<const uint64_t> keys) const;
  base::Status check_push(const wire::PushRequest& push, const table::Table& table) const;
  void reply(transport::ConnectionId connection);  // posts reply_
  void reply_error(transport::ConnectionId connection, const wire::FrameHeader& header,
                   const base::Status& status);

  Shared& shared_;
  const size_t number_;
  transport::Endpoint& endpoint_;
  epoch::Reader& reader_;
  const Source source_;
  std::shared_ptr<const Ownership> ownership_;
  uint64_t map_change_count_ = 0;

  std::vector<ConnectionState> connections_;  // by slot
  // Paused connections: the frame at the front waits for a pin or for the writer ..
  std::vector<transport::ConnectionId> blocked_;
  std::string status_;            // the last status, of
  uint64_t status_until_ns_ = 0;  // which is sent again until then
  std::vector<Parked> parked_;    // .. or is a pull that waits for a version.
  std::vector<transport::ConnectionId> unblocked_;
  struct KnownTable {
    table::Table* table = nullptr;
    TableStats* stats = nullptr;  // null before its first pull
  };
  std::vector<KnownTable> tables_by_id_;    // ids are never reused
  std::map<uint32_t, std::string> models_;  // by instance
  uint64_t tables_change_count_ = 0;        // of shared.tables, as of tables_by_id_ and models_
  access::Caller* caller_ = nullptr;        // of the frame that is handled
  uint64_t grants_generation_ = 0;          // of the gate, as of the last renew_callers()
  uint64_t renewed_ns_ = 0;                 // when that was
  uint64_t pushes_in_flight_ = 0;
  bool draining_ = false;
  bool drained_ = false;

  // Reused by every request, so that the data path allocates nothing.
  wire::Frame reply_;
  gather::GatherList list_;
  std::vector<const std::byte*> rows_;
  std::vector<table::Table*> section_tables_;
  std::vector<TableStats*> section_stats_;  // null: the table of the section is unknown

  std::mutex done_mutex_;  // guards done_ and to_close_
  std::vector<PushDone> done_;
  std::vector<transport::ConnectionId> to_close_;
  std::atomic<bool> has_to_close_{false};
  std::vector<PushDone> done_now_;
  std::atomic<bool> has_done_{false};
  std::atomic<uint64_t> rounds_{0};  // of run() and drain()
  std::unique_ptr<SpanRecorder> spans_;
  WorkerStats stats_;
  StatsByTable table_stats_;
};

}  // namespace petps::server
