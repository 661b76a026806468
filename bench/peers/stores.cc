// RocksDB and LMDB, in this process, without a sync for each write: rows survive a kill of the
// process.
#include <lmdb.h>
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>

#include <cstring>

#include "bench/common/loaded_table.h"
#include "bench/peers/peer.h"

namespace petps::bench {
namespace {

rocksdb::Slice slice(const void* at, size_t bytes) {
  return rocksdb::Slice(static_cast<const char*>(at), bytes);
}

void check(const rocksdb::Status& status) {
  if (!status.ok()) fail("rocksdb: " + status.ToString());
}

// Uncompressed; the cache holds everything; blocks have a hash index, and files a filter.
class Rocks : public Peer {
 public:
  explicit Rocks(const PeerShape& shape) : shape_(shape) {
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = rocksdb::NewLRUCache(2 * shape.rows * (shape.row_bytes + 32));
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
    rocksdb::Options options;
    options.create_if_missing = true;
    options.compression = rocksdb::kNoCompression;
    options.max_open_files = -1;
    options.IncreaseParallelism();
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    check(rocksdb::DB::Open(options, shape.folder + "/rocksdb", &database_));
  }
  ~Rocks() override { delete database_; }

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    rocksdb::WriteBatch batch;
    for (size_t i = 0; i < keys.size(); ++i) {
      check(batch.Put(slice(&keys[i], sizeof keys[i]),
                      slice(rows + i * shape_.row_bytes, shape_.row_bytes)));
    }
    check(database_->Write({}, &batch));
  }
  void settle() override {
    check(database_->CompactRange({}, nullptr, nullptr));
    std::unique_ptr<rocksdb::Iterator> all(database_->NewIterator({}));
    for (all->SeekToFirst(); all->Valid(); all->Next()) {  // fills the cache
    }
  }
  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    const uint32_t n = shape_.request_keys;
    names_.resize(n);
    rows_.resize(n);
    results_.resize(n);
    for (; !keys.empty(); keys = keys.subspan(n)) {
      for (uint32_t i = 0; i < n; ++i) names_[i] = slice(&keys[i], sizeof keys[i]);
      database_->MultiGet({}, database_->DefaultColumnFamily(), n, names_.data(), rows_.data(),
                          results_.data());
      for (uint32_t i = 0; i < n; ++i, out += shape_.row_bytes) {
        if (!results_[i].ok() || rows_[i].size() != shape_.row_bytes)
          fail("rocksdb: a loaded key is missing");
        std::memcpy(out, rows_[i].data(), shape_.row_bytes);
        rows_[i].Reset();
      }
    }
  }

 private:
  PeerShape shape_;
  rocksdb::DB* database_ = nullptr;
  std::vector<rocksdb::Slice> names_;
  std::vector<rocksdb::PinnableSlice> rows_;
  std::vector<rocksdb::Status> results_;
};

void check_lmdb(int result) {
  if (result != 0) fail(std::string("lmdb: ") + mdb_strerror(result));
}

class Lmdb : public Peer {
 public:
  explicit Lmdb(const PeerShape& shape) : shape_(shape) {
    check_lmdb(mdb_env_create(&environment_));
    check_lmdb(
        mdb_env_set_mapsize(environment_, 4 * shape.rows * (shape.row_bytes + 64) + (1 << 26)));
    check_lmdb(mdb_env_open(environment_, (shape.folder + "/lmdb").c_str(),
                            MDB_NOSUBDIR | MDB_NOSYNC | MDB_WRITEMAP | MDB_NORDAHEAD, 0600));
    MDB_txn* change;
    check_lmdb(mdb_txn_begin(environment_, nullptr, 0, &change));
    check_lmdb(mdb_dbi_open(change, nullptr, MDB_INTEGERKEY, &table_));
    check_lmdb(mdb_txn_commit(change));
    check_lmdb(mdb_txn_begin(environment_, nullptr, MDB_RDONLY, &reader_));
    mdb_txn_reset(reader_);
  }
  ~Lmdb() override {
    mdb_txn_abort(reader_);
    mdb_env_close(environment_);
  }

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    MDB_txn* change;
    check_lmdb(mdb_txn_begin(environment_, nullptr, 0, &change));
    for (size_t i = 0; i < keys.size(); ++i) {
      MDB_val key{sizeof keys[i], const_cast<uint64_t*>(&keys[i])};
      MDB_val row{shape_.row_bytes, const_cast<std::byte*>(rows + i * shape_.row_bytes)};
      check_lmdb(mdb_put(change, table_, &key, &row, 0));
    }
    check_lmdb(mdb_txn_commit(change));
  }
  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    for (; !keys.empty(); keys = keys.subspan(shape_.request_keys)) {
      check_lmdb(mdb_txn_renew(reader_));
      for (const uint64_t& wanted : keys.first(shape_.request_keys)) {
        MDB_val key{sizeof wanted, const_cast<uint64_t*>(&wanted)};
        MDB_val row;
        check_lmdb(mdb_get(reader_, table_, &key, &row));
        std::memcpy(out, row.mv_data, shape_.row_bytes);
        out += shape_.row_bytes;
      }
      mdb_txn_reset(reader_);
    }
  }

 private:
  PeerShape shape_;
  MDB_env* environment_ = nullptr;
  MDB_dbi table_ = 0;
  MDB_txn* reader_ = nullptr;
};

}  // namespace

std::unique_ptr<Peer> open_rocksdb(const PeerShape& shape) {
  return std::make_unique<Rocks>(shape);
}
std::unique_ptr<Peer> open_lmdb(const PeerShape& shape) { return std::make_unique<Lmdb>(shape); }

}  // namespace petps::bench
