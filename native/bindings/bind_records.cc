// The records that calls return: plain structs of pool and table, seen from Python.
#include <pybind11/stl.h>

#include "bindings/pool_info.h"
#include "bindings/record.h"
#include "codec/codec.h"

namespace petps::bindings {

namespace {

std::string uuid_text(std::span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

std::string dtype_of(const pool::TableRecord& record) {
  return std::string(codec::dtype_name(static_cast<codec::Dtype>(record.spec.dtype)));
}

const char* state_name(pool::ProgressState state) {
  switch (state) {
    case pool::ProgressState::kFollowing:
      return "following";
    case pool::ProgressState::kCatchingUp:
      return "catching_up";
    case pool::ProgressState::kPassing:
      return "passing";
    case pool::ProgressState::kIncomplete:
      return "incomplete";
    case pool::ProgressState::kConflict:
      return "conflict";
    case pool::ProgressState::kLostPower:
      return "lost_power";
  }
  return "unknown";
}

pool::ProgressState parse_state(const std::string& name) {
  using State = pool::ProgressState;
  for (const State state : {State::kFollowing, State::kCatchingUp, State::kPassing,
                            State::kIncomplete, State::kConflict, State::kLostPower}) {
    if (name == state_name(state)) return state;
  }
  invalid("progress state '" + name +
          "' is unknown; write 'following', 'catching_up', 'passing', 'incomplete', 'conflict' or "
          "'lost_power'");
}

void bind_pool_records(py::module_& module) {
  Record<PoolInfo>(module, "PoolInfo", "An open pool as it is now.")
      .field("path", &PoolInfo::path)
      .field("medium", &PoolInfo::medium)
      .field("durability", &PoolInfo::durability)
      .field("volatile", &PoolInfo::is_volatile)
      .field("read_only", &PoolInfo::read_only)
      .field("failed", &PoolInfo::failed)
      .field("uuid", &PoolInfo::uuid)
      .field("generation", &PoolInfo::generation)
      .field("was_clean", &PoolInfo::was_clean)
      .field("lost_power", &PoolInfo::lost_power)
      .field("size_bytes", &PoolInfo::size_bytes)
      .field("allocated_bytes", &PoolInfo::allocated_bytes)
      .field("free_bytes", &PoolInfo::free_bytes)
      .field("unit_bytes", &PoolInfo::unit_bytes)
      .field("readers_refused", &PoolInfo::readers_refused)
      .field("epoch_current", &PoolInfo::epoch_current)
      .field("epoch_retired_items", &PoolInfo::epoch_retired_items);
  using Instance = pool::InstanceRecord;
  Record<Instance>(module, "InstanceRecord", "An instance of a model: its tables and partitions.")
      .field("id", &Instance::id)
      .field("model", &Instance::model)
      .field("name", &Instance::name)
      .field("partitions", &Instance::partitions)
      .field("frozen", &Instance::frozen);
  using Table = pool::TableRecord;
  Record<Table>(module, "TableRecord", "A table as it was created.")
      .field("id", &Table::id)
      .field("name", [](const Table& record) { return record.spec.name; })
      .field("instance", [](const Table& record) { return record.spec.instance; })
      .field("dim", [](const Table& record) { return record.spec.dim; })
      .field("dtype", dtype_of)
      .field("row_bytes", [](const Table& record) { return record.spec.row_bytes; })
      .field("capacity", [](const Table& record) { return record.spec.capacity; })
      .field("feed", [](const Table& record) { return feed_name(record.spec.feed); })
      .field("bucket_count", &Table::bucket_count)
      .field("expire_after", [](const Table& record) { return record.spec.expire_after; });
}

void bind_table_records(py::module_& module) {
  using Status = table::TableStatus;
  Record<Status>(module, "TableStatus", "Rows, slots and bytes of a table now.")
      .field("rows", &Status::rows)
      .field("capacity", &Status::capacity)
      .field("slots", &Status::slots)
      .field("free_slots", &Status::free_slots)
      .field("retired_slots", &Status::retired_slots)
      .field("index_bytes", &Status::index_bytes)
      .field("header_bytes", &Status::header_bytes)
      .field("row_bytes_total", &Status::row_bytes_total)
      .field("allocator_bytes", &Status::allocator_bytes)
      .field("displaced", &Status::displaced)
      .field("walked", &Status::walked)
      .field("expire_after", &Status::expire_after)
      .field("event_time_ns", &Status::event_time_ns)
      .field("expired", &Status::expired)
      .field("expiry_delay", &Status::expiry_delay)
      .field("evicted", &Status::evicted)
      .field("missing_rows", &Status::missing_rows)
      .field("damaged_slots", &Status::damaged_slots)
      .field("heat_bytes", &Status::heat_bytes);
  using Apply = table::ApplyReport;
  Record<Apply>(module, "ApplyReport", "What one batch did.")
      .field("inserted", &Apply::inserted)
      .field("updated", &Apply::updated)
      .field("deleted", &Apply::deleted)
      .field("absent", &Apply::absent)
      .field("refused", &Apply::refused)
      .field("superseded", &Apply::superseded);
  using Verify = table::VerifyReport;
  Record<Verify>(module, "VerifyReport", "What verify read and what it found wrong.")
      .field("clean", &Verify::clean)
      .field("rows", &Verify::rows)
      .field("buckets", &Verify::buckets)
      .field("stale_tags", &Verify::stale_tags)
      .field("high_counters", &Verify::high_counters)
      .field("unreachable_slots", &Verify::unreachable_slots)
      .field("complete", &Verify::complete)
      .field("problem_count", &Verify::problem_count)
      .field("problems", &Verify::problems);
}

void bind_progress(py::module_& module) {
  using Progress = pool::Progress;
  Record<Progress> record(module, "Progress", "What a partition of an instance has applied.");
  record.field("instance", &Progress::instance)
      .field("partition", &Progress::partition)
      .field("run", &Progress::run)
      .field("seq", &Progress::seq)
      .field("offset", &Progress::offset)
      .field("version", &Progress::version)
      .field("state", [](const Progress& progress) { return state_name(progress.state); })
      .field("target", &Progress::target)
      .field("publisher", &Progress::publisher);
  record.python_class().def(
      py::init([](uint32_t instance, uint32_t partition, uint64_t run, uint64_t seq,
                  uint64_t offset, uint64_t version, const std::string& state, uint64_t target,
                  uint32_t publisher) {
        return Progress{instance, partition,          run,    seq,      offset,
                        version,  parse_state(state), target, publisher};
      }),
      py::kw_only(), py::arg("instance"), py::arg("partition"), py::arg("run"), py::arg("seq"),
      py::arg("offset"), py::arg("version"), py::arg("state") = "following", py::arg("target") = 0,
      py::arg("publisher") = 0);
}

}  // namespace

PoolInfo pool_info(table::Tables& tables) {
  const pool::Pool& pool = tables.pool();
  const media::Media& medium = pool.medium();
  PoolInfo info;
  info.path = medium.path();
  info.medium = media::kind_name(medium.kind());
  info.durability = media::durability_name(medium.durability());
  info.is_volatile = medium.is_volatile();
  info.read_only = pool.read_only();
  info.failed = medium.failed();
  info.uuid = uuid_text(pool.uuid());
  info.generation = pool.generation();
  info.was_clean = pool.was_clean();
  info.lost_power = pool.lost_power();
  info.size_bytes = medium.size();
  info.allocated_bytes = medium.allocated_bytes();
  info.free_bytes = pool.free_bytes();
  info.unit_bytes = pool.unit_bytes();
  info.readers_refused = tables.readers_refused();
  info.epoch_current = tables.epochs().current();
  info.epoch_retired_items = tables.epochs().retired_items();
  return info;
}

const char* feed_name(pool::Feed feed) { return feed == pool::Feed::kPush ? "push" : "delta"; }

pool::Feed parse_feed(const std::string& name) {
  if (name == "push") return pool::Feed::kPush;
  if (name == "delta") return pool::Feed::kDelta;
  invalid("feed '" + name + "' is unknown; a table takes 'push' or 'delta'");
}

media::Durability parse_durability(const std::string& name) {
  if (name == "power") return media::Durability::kPower;
  if (name == "process") return media::Durability::kProcess;
  invalid("durability '" + name +
          "' is unknown; write 'power' (survives power loss) or 'process' (survives kill -9)");
}

void bind_records(py::module_& module) {
  bind_pool_records(module);
  bind_table_records(module);
  bind_progress(module);
}

}  // namespace petps::bindings
