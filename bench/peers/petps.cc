// petps on a file pool with durability `process`: over TCP from a server in a child process, and in
// this process.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>

#include "base/prefetch.h"
#include "bench/common/loaded_table.h"
#include "bench/peers/peer.h"
#include "bench/pull/tcp_processes.h"
#include "petps_client/client.h"
#include "server/server.h"

namespace petps::bench {
namespace {

TableShape empty_table(const PeerShape& shape) {
  TableShape table;
  table.medium = "file";
  table.folder = shape.folder;
  table.capacity = shape.rows;
  table.dim = shape.row_bytes / 4;
  return table;
}

class InProcess : public Peer {
 public:
  explicit InProcess(const PeerShape& shape)
      : shape_(shape),
        loaded_(empty_table(shape)),
        rows_(shape.request_keys),
        reader_(loaded_.tables().epochs().lease()) {}
  ~InProcess() override { loaded_.tables().epochs().release(reader_); }

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    if (value_of(loaded_.table().apply({keys, rows, {}, 0})).refused != 0)
      fail("petps refused a row");
  }
  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    const uint32_t bytes = shape_.row_bytes;
    for (; !keys.empty(); keys = keys.subspan(shape_.request_keys)) {
      const epoch::Pin pin = reader_->pin();
      const auto request = keys.first(shape_.request_keys);
      loaded_.table().lookup(request, rows_.data(), [&](size_t searched, size_t ready) {
        if (searched != table::kNoKey) base::prefetch(rows_[searched], bytes);
        if (ready == table::kNoKey) return;
        if (rows_[ready] == nullptr) fail("petps: a loaded key is missing");
        std::memcpy(out + ready * bytes, rows_[ready], bytes);
      });
      out += request.size() * bytes;
    }
  }

 private:
  PeerShape shape_;
  LoadedTable loaded_;
  std::vector<const std::byte*> rows_;
  epoch::Reader* reader_;
};

class OverTcp : public Peer {
 public:
  explicit OverTcp(const PeerShape& shape) : shape_(shape) {
    void* shared =
        mmap(nullptr, sizeof *port_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("mmap failed");
    port_ = new (shared) std::atomic<uint32_t>(0);
    process_ = fork_child("peer-petps", [this] { serve(); });
    retry("petps", [this] { return port_->load() != 0; });
    client::Options options;
    options.keys_per_request = shape.request_keys;
    options.requests_in_flight = kInFlight;
    client_ = value_of(
        client::Client::connect("petps://127.0.0.1:" + std::to_string(port_->load()), options));
  }
  ~OverTcp() override {
    client_.reset();
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    munmap(port_, sizeof *port_);
  }

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    client::PushOptions options;
    options.allow_not_finite = true;  // the rows' bytes are no numbers
    value_of(client_->push_stored("rows", keys, {rows, keys.size() * shape_.row_bytes}, options));
  }
  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    client::PullOptions options;
    options.dedup = client::Dedup::kNever;  // the others send repeated rows too
    const auto report = value_of(client_->pull(
        "rows", keys, {reinterpret_cast<float*>(out), keys.size() * shape_.row_bytes / 4}, {},
        options));
    if (report.found != keys.size()) fail("petps: a loaded key is missing");
  }
  pid_t server() const override { return process_; }

 private:
  [[noreturn]] void serve() {
    run_on(server_core());
    LoadedTable loaded(empty_table(shape_));
    server::ServerOptions options;
    options.port = 0;
    const auto server = value_of(server::Server::start(loaded.tables(), options));
    port_->store(server->port());
    for (;;) pause();
  }

  PeerShape shape_;
  std::atomic<uint32_t>* port_;
  pid_t process_;
  std::unique_ptr<client::Client> client_;
};

}  // namespace

std::unique_ptr<Peer> open_petps_in_process(const PeerShape& shape) {
  return std::make_unique<InProcess>(shape);
}
std::unique_ptr<Peer> open_petps_over_tcp(const PeerShape& shape) {
  return std::make_unique<OverTcp>(shape);
}

}  // namespace petps::bench
