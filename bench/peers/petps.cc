// petps on a file pool with durability `process`: over TCP from a server in a child process, and in
// this process.
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "base/prefetch.h"
#include "bench/common/loaded_table.h"
#include "bench/peers/peer.h"
#include "petps_client/client.h"
#include "server/server.h"

namespace petps::bench {
namespace {

// Open the pool in the peer's folder, or create it with an empty table.
std::unique_ptr<table::Tables> open_pool(const PeerShape& shape) {
  table::TablesOptions options;
  options.pool.media.path = shape.folder + "/petps.pool";
  options.pool.media.durability = media::Durability::kProcess;
  if (std::filesystem::exists(options.pool.media.path))
    return value_of(table::Tables::open(options));
  auto tables = value_of(table::Tables::create(options));
  pool::TableSpec spec;
  spec.name = "rows";
  spec.instance = value_of(tables->pool().create_instance("bench", "bench@1", 1)).id;
  spec.dim = shape.row_bytes / 4;
  spec.row_bytes = shape.row_bytes;
  spec.capacity = shape.rows;
  value_of(tables->create_table(spec));
  return tables;
}

class InProcess : public Peer {
 public:
  explicit InProcess(const PeerShape& shape)
      : shape_(shape),
        tables_(open_pool(shape)),
        table_(tables_->find("bench@1", "rows")),
        rows_(shape.request_keys),
        reader_(tables_->epochs().lease()) {}
  ~InProcess() override { tables_->epochs().release(reader_); }

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    if (value_of(table_->apply({keys, rows, {}, 0})).refused != 0) fail("petps refused a row");
  }
  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    const uint32_t bytes = shape_.row_bytes;
    for (; !keys.empty(); keys = keys.subspan(shape_.request_keys)) {
      const epoch::Pin pin = reader_->pin();
      const auto request = keys.first(shape_.request_keys);
      table_->lookup(request, rows_.data(), [&](size_t searched, size_t ready) {
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
  std::unique_ptr<table::Tables> tables_;
  table::TablePointer table_;
  std::vector<const std::byte*> rows_;
  epoch::Reader* reader_;
};

class OverTcp : public Peer {
 public:
  explicit OverTcp(const PeerShape& shape)
      : shape_(shape),
        port_(free_port()),
        server_(shape.folder, "petps",
                {"/proc/self/exe", "--side=serve", "--folder=" + shape.folder,
                 "--port=" + std::to_string(port_), "--rows=" + std::to_string(shape.rows),
                 "--dim=" + std::to_string(shape.row_bytes / 4)}) {
    client::Options options;
    options.keys_per_request = shape.request_keys;
    options.requests_in_flight = kInFlight;
    options.deadline_ms = 30'000;
    retry("petps", [&] {
      auto client = client::Client::connect("petps://127.0.0.1:" + std::to_string(port_), options);
      if (client.ok()) client_ = std::move(client).value();
      return client.ok();
    });
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
  pid_t server() const override { return server_.process(); }

 private:
  PeerShape shape_;
  uint16_t port_;
  ServerProgram server_;
  std::unique_ptr<client::Client> client_;
};

}  // namespace

void serve_petps(const PeerShape& shape, uint16_t port) {
  const auto tables = open_pool(shape);
  server::ServerOptions options;
  options.port = port;
  const auto server = value_of(server::Server::start(*tables, options));
  for (;;) pause();
}

std::unique_ptr<Peer> open_petps_in_process(const PeerShape& shape) {
  return std::make_unique<InProcess>(shape);
}
std::unique_ptr<Peer> open_petps_over_tcp(const PeerShape& shape) {
  return std::make_unique<OverTcp>(shape);
}

}  // namespace petps::bench
