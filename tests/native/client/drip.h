// A proxy between clients and one server that can hold back what the server sends, and let it pass
// in pieces of any length. The server's address in the shard map is the proxy's.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace petps::client::testing {

class Drip {
 public:
  Drip();
  ~Drip();
  // The server; call it before the first client connects.
  void lead_to(const std::string& server_address);
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  void hold(bool holds);  // false: also let what is held pass
  // Let between 1 and `most` held bytes of one connection pass. Return false if none are held.
  bool step(size_t most, std::mt19937_64& random);
  void close_all();  // connections; later ones are accepted

 private:
  struct Pair {
    int client = -1;
    int server = -1;
    std::vector<std::byte> held;  // of the server's bytes
    bool is_over = false;
  };
  void run();
  void open_pair();
  void forward(Pair& pair, bool is_from_server);
  static void end(Pair& pair);

  uint16_t port_ = 0;
  int listener_ = -1;
  std::mutex mutex_;  // guards everything below
  uint16_t server_port_ = 0;
  std::list<Pair> pairs_;
  bool holds_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace petps::client::testing
