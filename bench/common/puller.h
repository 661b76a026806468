// Pulls in this process, as the figures measure them: pin, lookup, copy the rows out.
#pragma once

#include <cstring>
#include <vector>

#include "base/prefetch.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"

namespace petps::bench {

class Puller {
 public:
  Puller(LoadedTable& loaded, uint64_t request_keys)
      : loaded_(loaded),
        request_(request_keys),
        out_(request_keys * loaded.row_bytes()),
        rows_(request_keys),
        reader_(loaded.tables().epochs().lease()) {}
  ~Puller() { loaded_.tables().epochs().release(reader_); }
  Puller(const Puller&) = delete;
  Puller& operator=(const Puller&) = delete;

  // Pull the next request's keys. All of them must have been loaded.
  void pull(const uint64_t* keys) {
    const size_t bytes = loaded_.row_bytes();
    const epoch::Pin pin = reader_->pin();
    loaded_.table().lookup({keys, request_}, rows_.data(), [&](size_t searched, size_t ready) {
      if (searched != table::kNoKey) base::prefetch(rows_[searched], bytes);
      if (ready == table::kNoKey) return;
      if (rows_[ready] == nullptr) fail("a loaded key is missing");
      std::memcpy(out_.data() + ready * bytes, rows_[ready], bytes);
    });
    keep(out_.data());
  }

  std::byte* out() { return out_.data(); }

 private:
  LoadedTable& loaded_;
  uint64_t request_;
  std::vector<std::byte> out_;
  std::vector<const std::byte*> rows_;
  epoch::Reader* reader_;
};

}  // namespace petps::bench
