// Room tls: TLS 1.3 for both sides of a connection, over byte buffers.
//
// Owns:        the certificates, keys and authorities in use; the cipher state of a connection;
//              the check of the peer's certificate and name.
// Never does:  touch a socket or wait; log; speak a version before 1.3; resume a session.
// Called by:   transport/tcp (server side), client/cpp (client side).
// Invariants:  no byte of a peer is decrypted before its certificate has been verified as the
//              context demands; a stream that failed stays failed; a stream holds at most one
//              record beside the caller's buffers; new streams use the newest files, and existing
//              ones keep theirs; once the kernel encrypts, no byte that OpenSSL encrypted leaves.
// Threads:     any thread may call the contexts; a Stream belongs to one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

struct ssl_st;
struct ssl_ctx_st;

namespace petps::tls {

// A record carries at most this many bytes of plain text.
inline constexpr size_t kRecordBytes = size_t{16} << 10;
// A record is at most this much longer than its plain text: its head, a type and a tag.
inline constexpr size_t kRecordExtraBytes = 5 + 1 + 16;
// RFC 8446, section 5.5: a key of AES-GCM is good for 2^24.5 records.
inline constexpr uint64_t kRecordsPerKey = uint64_t{1} << 23;
// The longest of what kernel_keys() returns.
inline constexpr size_t kKernelKeysBytes = 64;
using KernelKeys = std::array<std::byte, kKernelKeysBytes>;

// Overwrite a key that has served.
void erase(std::span<std::byte> key);

// A message of TLS itself, such as an alert, which is a record of a type of its own.
struct Notice {
  uint8_t record_type = 0;
  std::vector<std::byte> bytes;
};

enum class ClientCertificates : uint8_t {
  kOff,       // none is requested
  kOptional,  // verified if the client sends one
  kRequired,  // a client without one is refused
};

// Paths of PEM files.
struct ServerFiles {
  std::string certificate;  // the server's, followed by the intermediate ones
  std::string key;          // of the certificate; not encrypted
  std::string client_ca;    // the authorities of client certificates
  ClientCertificates client_certificates = ClientCertificates::kOff;
};

struct ClientFiles {
  std::string ca;           // the authorities of servers; empty: those of the system
  std::string certificate;  // empty: the client has none
  std::string key;
};

// One side of one connection. Ciphertext that arrived goes in and plain text comes out, and the
// other way round. After an error the stream is of no more use, but `out` may hold an alert for
// the peer.
class Stream {
 public:
  // The memory of a stream that has received a part of a record, rounded up; an idle one has half
  // of it. tests/native/tls measures it.
  static constexpr size_t kBytes = size_t{32} << 10;

  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Take the next step of the handshake. `arrived` is cut by what was used; what follows the
  // handshake stays in it. Append to `out` what must be sent.
  // Errors: kUnauthenticated (a certificate is missing, or is not accepted by one of the sides),
  // kFailedPrecondition (the peer speaks no TLS, or no TLS 1.3), kUnavailable (anything else).
  base::Status handshake(std::span<const std::byte>& arrived, std::vector<std::byte>& out);
  bool is_open() const { return is_open_; }
  bool has_failed() const { return !failed_.ok(); }
  // Return whether the handshake failed because the peer's first byte is of no TLS record.
  bool is_plain_text() const { return is_plain_text_; }

  // Decrypt into `plain` and set `n` to the number of its bytes. `arrived` is cut by what was used:
  // it is empty afterwards unless `plain` is full or the peer has ended. Append to `out` what the
  // peer must receive besides write()'s bytes. Errors as handshake().
  base::Status read(std::span<const std::byte>& arrived, std::span<std::byte> plain, size_t& n,
                    std::vector<std::byte>& out);
  // Return whether the peer has announced that it sends no more (close_notify).
  bool has_ended() const { return has_ended_; }
  // Return whether read() would return bytes without any that arrive.
  bool has_plain() const;
  // Return whether a record has arrived in part.
  bool has_partial_record() const;

  // Encrypt all of `plain` and append the records to `out`. Errors: kUnavailable.
  base::Status write(std::span<const std::byte> plain, std::vector<std::byte>& out);
  // Append the announcement that this side sends no more. read() stays possible.
  void end(std::vector<std::byte>& out);
  // Change this side's keys with the next write(), and ask the peer to do so too if `both`. write()
  // calls it itself before a key has served too long.
  base::Status update_keys(bool both);

  // The kernel may encrypt in the place of write() (kernel TLS), so that `sendmsg` can gather. Set
  // `keys` to what setsockopt(SOL_TLS, TLS_TX) takes, and return its length. 0: it cannot, because
  // this is the client's side or has written already. Afterwards the stream no longer has them;
  // the caller must erase() them.
  size_t take_kernel_keys(KernelKeys& keys);
  // The kernel encrypts from now on: write() fails, and the other calls append nothing to `out`.
  // read() fails if the peer asks this side for new keys, because the kernel keeps those it has.
  void leave_writing_to_kernel() { writes_by_kernel_ = true; }
  bool writes_by_kernel() const { return writes_by_kernel_; }
  // Return what the kernel must send as the records of TLS itself, in order.
  std::vector<Notice> take_notices() { return std::exchange(notices_, {}); }

  // Return the DNS names and URIs of the peer's certificate, else its common name; nothing if the
  // peer sent no certificate.
  const std::vector<std::string>& peer_names() const { return peer_names_; }

 private:
  friend class ServerContext;
  friend class ClientContext;
  friend struct StreamBio;
  friend struct StreamMessages;
  friend struct StreamSecrets;
  friend struct StreamVerify;
  Stream(ssl_st* ssl, std::string expected_name, std::string authorities);
  static base::Result<std::unique_ptr<Stream>> make(ssl_ctx_st* context, std::string expected_name,
                                                    std::string authorities);
  base::Status fail();
  base::Status failure();
  bool changes_keys_too_often() const;

  ssl_st* const ssl_;
  const std::string expected_name_;           // of the server; empty on the server's side
  const std::string authorities_;             // where they come from, for errors
  std::span<const std::byte>* in_ = nullptr;  // of the call in progress
  std::vector<std::byte>* out_ = nullptr;
  bool has_started_ = false;
  bool is_open_ = false;
  bool is_plain_text_ = false;
  bool has_ended_ = false;
  uint64_t records_ = 0;  // written with the current key
  uint64_t keys_received_ = 0;
  uint64_t plain_received_ = 0;  // bytes
  bool is_asked_for_keys_ = false;
  std::vector<std::byte> secret_;  // of the records that the server's side writes, until taken
  bool writes_by_kernel_ = false;
  std::vector<Notice> notices_;
  base::Status certificate_;  // what is wrong with the peer's certificate
  base::Status failed_;
  std::vector<std::string> peer_names_;
};

class ServerContext {
 public:
  // Read the files. Errors: kInvalidArgument, kFailedPrecondition (expired), kIoError (cannot be
  // read); each names the file, what is wrong and the remedy.
  static base::Result<std::shared_ptr<ServerContext>> open(ServerFiles files);
  ~ServerContext();
  ServerContext(const ServerContext&) = delete;
  ServerContext& operator=(const ServerContext&) = delete;

  // Read all files again, for streams made from now on. On an error the old ones stay in use.
  base::Status reload();
  // Read these files instead, from now on. On an error the old ones stay in use.
  base::Status reload(ServerFiles files);
  // Return the server's side of a new connection. Errors: kResourceExhausted (no memory).
  base::Result<std::unique_ptr<Stream>> accept() const;

 private:
  explicit ServerContext(ServerFiles files);
  mutable std::mutex mutex_;  // guards the next two
  ServerFiles files_;
  ssl_ctx_st* context_ = nullptr;
};

class ClientContext {
 public:
  // Errors: as ServerContext::open.
  static base::Result<std::shared_ptr<ClientContext>> open(ClientFiles files);
  ~ClientContext();
  ClientContext(const ClientContext&) = delete;
  ClientContext& operator=(const ClientContext&) = delete;

  // Return the client's side of a new connection to the server whose certificate must have
  // `server_name`, a DNS name or a numeric IP address. If files have changed, read them again;
  // while the new ones are of no use, the old ones stay in use. Errors: kInvalidArgument
  // (server_name), kResourceExhausted.
  base::Result<std::unique_ptr<Stream>> connect(const std::string& server_name);

 private:
  // What tells whether a file has changed.
  struct Stamp {
    uint64_t inode = 0;
    int64_t size = -1;
    int64_t changed_ns = 0;
    bool operator==(const Stamp&) const = default;
  };
  using Stamps = std::array<Stamp, 3>;
  explicit ClientContext(ClientFiles files);
  Stamps stamps() const;

  const ClientFiles files_;
  std::mutex mutex_;  // guards the members below
  Stamps stamps_;
  ssl_ctx_st* context_ = nullptr;
};

}  // namespace petps::tls
