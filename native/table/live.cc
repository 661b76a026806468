#include "table/live.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;

Result<std::shared_ptr<Tables>> LiveReader::read(const std::string& path) {
  TablesOptions options;
  options.pool.media.path = path;
  options.pool.media.access = media::Access::kReadBeside;
  auto opened = Tables::open(options);
  if (!opened.ok()) return opened.status();
  return std::shared_ptr<Tables>(std::move(opened).value());
}

Result<std::unique_ptr<LiveReader>> LiveReader::open(const std::string& path) {
  std::unique_ptr<LiveReader> reader(new LiveReader(path));
  auto joined = epoch::ReadersFile::join(path);
  if (!joined.ok()) return joined.status();
  reader->epochs_.share(std::move(joined).value());
  epoch::Reader* const list = reader->epochs_.lease();
  if (list == nullptr) {
    return Status(Code::kResourceExhausted,
                  "pool '" + path + "': " + std::to_string(epoch::kMaxOutsideReaders) +
                      " calls of all processes read it at once; use fewer");
  }
  {
    const epoch::Pin pin = list->pin();  // keeps what the catalogue names while it is read
    auto view = read(path);
    if (!view.ok()) return view.status();
    reader->view_ = std::move(view).value();
  }
  reader->epochs_.release(list);
  PETPS_RETURN_IF_ERROR(reader->epochs_.shared()->belongs_to(reader->view_->pool().uuid()));
  return reader;
}

Result<std::shared_ptr<Tables>> LiveReader::view() {
  if (epochs_.shared()->forked()) {
    return Status(
        Code::kFailedPrecondition,
        "pool '" + path_ +
            "' was opened before this process was forked: open it again here (its pins are "
            "the parent's)");
  }
  const std::lock_guard lock(mutex_);
  const pool::Pool& pool = view_->pool();
  if (pool.newest_sequence() == pool.sequence()) return view_;
  auto next = read(path_);
  PETPS_RETURN_IF_ERROR(epochs_.shared()->belongs_to(pool.uuid()));
  if (!next.ok()) return next.status();
  view_ = std::move(next).value();
  return view_;
}

}  // namespace petps::table
