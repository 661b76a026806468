// What users would pick instead of petps, behind one interface: the same rows, keys and requests.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace petps::bench {

constexpr uint32_t kInFlight = 2;
constexpr uint64_t kWriteRows = 500;

struct PeerShape {
  uint64_t rows = 0;
  uint32_t row_bytes = 0;
  uint32_t request_keys = 0;
  std::string folder;  // of the peer's files; a peer with persistence opens those that it finds
};

// The destructor kills the peer's server.
class Peer {
 public:
  virtual ~Peer() = default;
  // Write rows with these keys, which may exist. At most kWriteRows at a time.
  virtual void write(std::span<const uint64_t> keys, const std::byte* rows) = 0;
  // Pull rows in requests of `request_keys`, of which kInFlight are in flight over TCP. Exit the
  // program if a key is missing.
  virtual void pull(std::span<const uint64_t> keys, std::byte* out) = 0;
  // Return whether a second thread may write while one pulls.
  virtual bool writes_beside_pulls() const { return true; }
  // Called once after all rows are written: what an operator would do before serving.
  virtual void settle() {}
  // Called before the server is killed, if its rows are to survive.
  virtual void persist() {}
  virtual pid_t server() const { return 0; }  // 0: in this process
};

// A peer, and what it takes part in.
struct Candidate {
  std::string name;
  bool over_tcp;
  std::function<std::unique_ptr<Peer>(const PeerShape&)> open;
};

std::unique_ptr<Peer> open_petps_over_tcp(const PeerShape& shape);
std::unique_ptr<Peer> open_petps_in_process(const PeerShape& shape);
std::unique_ptr<Peer> open_redis(const PeerShape& shape);              // no persistence
std::unique_ptr<Peer> open_redis_append_only(const PeerShape& shape);  // synced once a second
std::unique_ptr<Peer> open_redis_snapshot(const PeerShape& shape);     // taken by persist()
std::unique_ptr<Peer> open_memcached(const PeerShape& shape);
std::unique_ptr<Peer> open_rocksdb(const PeerShape& shape);
std::unique_ptr<Peer> open_lmdb(const PeerShape& shape);
std::unique_ptr<Peer> open_absl(const PeerShape& shape);
std::unique_ptr<Peer> open_libcuckoo(const PeerShape& shape);

// The server process of open_petps_over_tcp: serve the pool in the folder until it is killed.
[[noreturn]] void serve_petps(const PeerShape& shape, uint16_t port);

// A server program that is killed with this object. Its output goes to `folder`/`name`.log.
class ServerProgram {
 public:
  ServerProgram(const std::string& folder, const std::string& name,
                const std::vector<std::string>& command);
  ~ServerProgram();
  ServerProgram(const ServerProgram&) = delete;
  ServerProgram& operator=(const ServerProgram&) = delete;
  pid_t process() const { return process_; }

 private:
  pid_t process_;
};

// Return a TCP port of 127.0.0.1 that is free now.
uint16_t free_port();
// Call `attempt` until it succeeds; exit the program after two minutes.
void retry(const std::string& what, const std::function<bool()>& attempt);
// Return the bytes that the files below a folder occupy on the disk.
uint64_t bytes_below(const std::string& folder);

}  // namespace petps::bench
