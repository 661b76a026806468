// A pool that this process reads while a server writes it, for an embedded reader (READERS.md in
// native/epoch).
//
// ASSUMPTIONS: the caller takes a pin first, and uses a view and every row found through it only
// under that pin.
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
  // Open the pool. Errors: as Tables::open, and those of epoch::ReadersFile::join.
  static base::Result<std::unique_ptr<LiveReader>> open(const std::string& path);

  epoch::Domain& epochs() { return epochs_; }
  // Return the catalogue as it is now; read it again if the superblock has changed. Take the pin
  // first: everything that the view shows stays until the pin is dropped. Return
  // kFailedPrecondition in a forked child.
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
