// The pages of a table, copied out under a pin. While a Scan exists, migration waits and the pool
// cannot be closed.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "bindings/table_handle.h"

namespace petps::bindings {

// The keys and rows of one page. They become numpy arrays without a copy.
struct Page {
  std::vector<uint64_t> keys;
  std::vector<uint8_t> rows;
};

class Scan {
 public:
  Scan(const TableHandle& handle, uint64_t buckets_per_page)
      : handle_(handle), buckets_per_page_(buckets_per_page) {
    if (buckets_per_page == 0) invalid("buckets_per_page must be at least 1");
    hold_.emplace(handle.session, "a scan of table '" + handle.record.spec.name + "'");
    table_ = handle.open();
    guard_.emplace(*table_);
    buckets_ = table_->bucket_count();
  }

  void close() {
    const std::lock_guard lock(mutex_);
    release();
  }

  size_t row_bytes() const { return handle_.record.spec.row_bytes; }
  uint64_t buckets_done() const { return next_.load(std::memory_order_relaxed); }
  uint64_t buckets() const { return buckets_; }

  // Return the next page, or nothing after close(). After the last page, close the scan and return
  // nothing.
  std::optional<Page> page() {
    const std::lock_guard lock(mutex_);
    const uint64_t from = buckets_done();
    if (!hold_.has_value() || from >= buckets()) {
      release();
      return std::nullopt;
    }
    Session::Lease lease(*handle_.session);
    const epoch::Pin pin = lease.pin();
    table::ScanPage scanned = table_->scan(from, buckets_per_page_);
    Page page;
    page.rows.resize(scanned.rows.size() * row_bytes());
    for (size_t i = 0; i < scanned.rows.size(); ++i) {
      std::memcpy(page.rows.data() + i * row_bytes(), scanned.rows[i], row_bytes());
    }
    page.keys = std::move(scanned.keys);
    next_.store(scanned.next_bucket, std::memory_order_relaxed);
    return page;
  }

 private:
  void release() {
    guard_.reset();
    table_.reset();
    hold_.reset();
  }

  TableHandle handle_;
  uint64_t buckets_ = 0;  // of the table while it is scanned: it may grow before and after
  uint64_t buckets_per_page_;
  std::atomic<uint64_t> next_{0};
  std::mutex mutex_;                   // guards the members below: one page() or close() at a time
  std::optional<Session::Hold> hold_;  // before table_ and guard_, so that the pool outlives them
  table::TablePointer table_;
  std::optional<table::Table::ScanGuard> guard_;
};

}  // namespace petps::bindings
