// A pool read in this process while a server writes it: DESIGN section 8, the embedded reader.
//
// ASSUMPTIONS: a view, and every row found through it, is used under the pin that was taken before.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "epoch/epoch.h"
#include "table/table.h"

namespace petps::table {

// Threads: all methods are safe from any thread of the process that opened it.
class LiveReader {
 public:
  // Errors: as Tables::open, and those of epoch::ReadersFile::join.
  static base::Result<std::unique_ptr<LiveReader>> open(const std::string& path);

  epoch::Domain& epochs() { return epochs_; }
  // The catalogue as it is now: read again when the superblock has changed. Take the pin first: then
  // what the view shows stays until it is dropped. kFailedPrecondition in a forked child.
  base::Result<std::shared_ptr<Tables>> view();

 private:
  explicit LiveReader(std::string path) : path_(std::move(path)) {}
  static base::Result<std::shared_ptr<Tables>> read(const std::string& path);

  const std::string path_;
  epoch::Domain epochs_;
  std::mutex mutex_;  // guards view_
  std::shared_ptr<Tables> view_;
};

}  // namespace petps::table
