// The scenarios of pins, retire and reclaim. The index is one word that names the slot of a row. A
// reclaimed slot is poisoned at once, as if a writer reused it.
#include <memory>
#include <optional>

#include "epoch/epoch.h"
#include "tests/model/scenarios.h"

namespace petps::model {
namespace {

constexpr uint64_t kPoison = 0xDEAD;

class EpochRig final : public epoch::Reclaimer {
 public:
  void restart(size_t readers) {
    domain.reset();
    domain.emplace();
    leased.clear();
    for (size_t i = 0; i < readers; ++i) leased.push_back(domain->lease());
    current = 1;
    for (size_t i = 0; i < 8; ++i) rows[i] = 100 + i;
    reclaimed = 0;
  }
  void reclaim(std::span<const uint64_t> items) override {
    for (const uint64_t slot : items) {
      store_plain(rows[slot], kPoison);
      reclaimed += 1;
    }
  }
  // Point the index to another slot, and retire the old one.
  void publish(uint64_t slot, uint64_t old) {
    store(&current, 8, slot, std::memory_order_release, kNowhere);
    domain->retire(*this, {&old, 1});
  }
  epoch::Pin read(size_t reader) {
    epoch::Pin pin = leased[reader]->pin();
    if (!pin) fail("the list is full");
    check_row(load(&current, 8, std::memory_order_acquire, kNowhere));
    return pin;
  }
  void check_row(uint64_t slot) {
    if (load_plain(rows[slot]) == kPoison) fail("a pinned row was reclaimed");
  }

  std::optional<epoch::Domain> domain;
  std::vector<epoch::Reader*> leased;
  uint64_t current = 1;
  uint64_t rows[8] = {};
  size_t reclaimed = 0;
};

Scenario make_scenario(const std::shared_ptr<EpochRig>& rig, size_t readers,
                       const std::string& name, std::vector<std::function<void()>> threads) {
  Scenario scenario;
  scenario.name = name;
  scenario.fixed_addresses = false;  // each run creates a new Domain
  scenario.setup = [rig, readers] { rig->restart(readers); };
  scenario.threads = std::move(threads);
  scenario.check = [rig] {
    while (rig->domain->reclaim() != 0) {
    }
    if (rig->domain->retired_items() != 0) fail("a slot that no reader reads is never reclaimed");
  };
  return scenario;
}

Scenario a_pin_and_a_reclaim() {
  auto rig = std::make_shared<EpochRig>();
  const auto write = [=] {
    rig->publish(2, 1);
    rig->domain->reclaim();
  };
  const auto read = [=] {
    const epoch::Pin pin = rig->read(0);
    rig->check_row(load(&rig->current, 8, std::memory_order_acquire, kNowhere));
  };
  return make_scenario(rig, 1, "a pin beside a reclaim", {write, read});
}

// A reader drops a pin and uses its place for a second pin. The row that the first pin protected is
// not overwritten before its last read.
Scenario a_place_is_used_again() {
  auto rig = std::make_shared<EpochRig>();
  const auto write = [=] {
    rig->publish(2, 1);
    rig->domain->reclaim();
    rig->publish(3, 2);
    rig->domain->reclaim();
  };
  const auto read = [=] {
    { const epoch::Pin pin = rig->read(0); }
    const epoch::Pin pin = rig->read(0);
  };
  return make_scenario(rig, 1, "a place is used again", {write, read});
}

// A completion drops the pin on another thread.
Scenario another_thread_drops() {
  auto rig = std::make_shared<EpochRig>();
  auto passed_on = std::make_shared<epoch::Pin>();
  auto ready = std::make_shared<uint64_t>(0);
  const auto write = [=] {
    rig->publish(2, 1);
    rig->domain->reclaim();
  };
  const auto read = [=] {
    *passed_on = rig->read(0);
    store(ready.get(), 8, 1, std::memory_order_release, kNowhere);
    const epoch::Pin second = rig->read(0);
  };
  const auto complete = [=] {
    while (load(ready.get(), 8, std::memory_order_acquire, kNowhere) == 0) wait();
    rig->check_row(load(&rig->current, 8, std::memory_order_acquire, kNowhere));
    passed_on->drop();
  };
  Scenario scenario =
      make_scenario(rig, 1, "another thread drops the pin", {write, read, complete});
  scenario.setup = [=] {
    *passed_on = epoch::Pin();
    *ready = 0;
    rig->restart(1);
  };
  return scenario;
}

Scenario two_writers() {
  auto rig = std::make_shared<EpochRig>();
  auto other = std::make_shared<uint64_t>(4);
  const auto first = [=] {
    rig->publish(2, 1);
    rig->domain->reclaim();
  };
  const auto second = [=] {
    const uint64_t old = 4;
    store(other.get(), 8, 5, std::memory_order_release, kNowhere);
    rig->domain->retire(*rig, {&old, 1});
  };
  const auto read = [=] {
    const epoch::Pin pin = rig->read(0);
    rig->check_row(load(other.get(), 8, std::memory_order_acquire, kNowhere));
  };
  Scenario scenario = make_scenario(rig, 1, "two writers retire", {first, second, read});
  scenario.setup = [=] {
    *other = 4;
    rig->restart(1);
  };
  return scenario;
}

}  // namespace

std::vector<Scenario> epoch_scenarios() {
  return {a_pin_and_a_reclaim(), a_place_is_used_again(), another_thread_drops(), two_writers()};
}

}  // namespace petps::model
