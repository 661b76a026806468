// The client's side of the rdma transport: one connection, as a stream of bytes.
//
// ASSUMPTIONS: one thread at a time. The Verbs outlives the peer.
// ERRORS: kUnavailable (the connection failed). Every later call fails too.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "transport/rdma/rdma.h"

namespace petps::transport {

struct RdmaPeerOptions {
  uint32_t ring_bytes = 4u << 20;  // 16 replies of 500 rows of 512 bytes
  uint32_t ring_messages = 64;
};

class RdmaPeer {
 public:
  static base::Result<std::unique_ptr<RdmaPeer>> open(Verbs& verbs, const RdmaPeerOptions& options);

  // Return what the server must receive.
  const RdmaHello& hello() const { return hello_; }
  base::Status connect(const RdmaWelcome& welcome);

  // Queue bytes and send what the credits allow now; later calls of any of these send the rest.
  base::Status send(std::span<const std::byte> bytes);
  base::Status end_sending();
  // Send and take what is possible. On an error the connection has failed, but bytes that arrived
  // before can still be read.
  base::Status progress();
  // Return up to out.size() bytes that have arrived; 0: none yet.
  size_t receive(std::span<std::byte> out);
  // Return whether the server sends no more and everything that it sent was received.
  bool has_ended() const { return last_seen_ && messages_.empty(); }
  bool has_bytes() const { return !messages_.empty(); }
  bool has_unsent() const { return out_at_ < out_.size(); }
  // The file becomes readable when progress() may have something to do. First call arm(), then
  // progress() once more.
  int file() const { return channel_->file; }
  base::Status arm();

 private:
  struct Message {
    uint64_t line;
    uint32_t bytes;
    uint32_t read;
  };
  explicit RdmaPeer(Verbs& verbs, const RdmaPeerOptions& options)
      : verbs_(verbs), options_(options) {}
  base::Status make();
  base::Status complete(const ibv_wc& completion);
  int post_receive();
  base::Status send_some();
  base::Status send_message(std::span<const std::byte> bytes, bool last);
  base::Status report_taken();
  void drop_empty();
  base::Status break_with(std::string text);

  Verbs& verbs_;
  const RdmaPeerOptions options_;
  std::unique_ptr<std::byte[]> ring_;
  std::unique_ptr<MemoryRegion> ring_region_;
  std::unique_ptr<std::byte[]> buffers_;  // for requests, kMessageBytes each
  std::unique_ptr<MemoryRegion> buffers_region_;
  std::unique_ptr<CompletionChannel> channel_;
  std::unique_ptr<CompletionQueue> queue_;
  std::unique_ptr<QueuePair> pair_;
  RdmaHello hello_;

  std::vector<uint32_t> free_buffers_;
  uint32_t credits_ = 0;
  uint32_t message_bytes_ = 0;
  uint32_t sends_in_flight_ = 0;
  std::vector<std::byte> out_;
  size_t out_at_ = 0;
  bool ending_ = false;  // end_sending() was called
  bool ended_ = false;   // the last message was sent to the server

  std::deque<Message> messages_;
  uint64_t arrived_lines_ = 0;
  uint64_t taken_lines_ = 0;
  uint64_t reported_lines_ = 0;  // taken lines that were reported
  uint32_t unreported_messages_ = 0;
  bool last_seen_ = false;
  base::Status broken_;
};

}  // namespace petps::transport
