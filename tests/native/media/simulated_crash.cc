// The states that a crash can leave a SimulatedMedium in: random ones, or all of them.
#include <algorithm>
#include <array>
#include <limits>

#include "base/check.h"
#include "simulated_medium.h"

namespace petps::media {

std::vector<SimulatedMedium::OpenPage> SimulatedMedium::open_pages(size_t point) const {
  std::vector<OpenPage> pages;
  std::unordered_map<uint32_t, size_t> place_of;
  for (uint32_t i = 0; i < top().used; ++i) {
    const Line& line = top().lines[i];
    const Span span = span_at(line, point);
    if (span.stored == span.durable) continue;
    const auto [place, fresh] = place_of.try_emplace(line.number / kPageLines, pages.size());
    if (fresh) pages.push_back({line.number / kPageLines, {}, {}});
    OpenPage& page = pages[place->second];
    page.lines.push_back(i);
    for (uint32_t s = span.durable; s < span.stored; ++s)
      page.events.push_back(line.stores[s].event);
  }
  std::sort(pages.begin(), pages.end(),
            [](const OpenPage& a, const OpenPage& b) { return a.number < b.number; });
  for (OpenPage& page : pages) {
    std::sort(page.events.begin(), page.events.end());
    page.events.erase(std::unique(page.events.begin(), page.events.end()), page.events.end());
  }
  return pages;
}

void SimulatedMedium::write_page(const OpenPage& page, const std::array<uint32_t, kSectors>& kept,
                                 size_t point) {
  uint32_t least = kept[0];
  for (const uint32_t place : page.lines) {
    const Line& line = top().lines[place];
    const Span span = span_at(line, point);
    const uint32_t events = kept[line.number % kPageLines / kSectorLines];
    least = std::min(least, events);
    uint32_t stores = span.durable;
    while (stores < span.stored && events > 0 &&
           line.stores[stores].event <= page.events[events - 1])
      ++stores;
    write_line(line.number, content(line, stores));
  }
  choices_.push_back(
      {page.number * kPageLines, 0, least, static_cast<uint32_t>(page.events.size())});
}

// Write every line with its stores up to the point. write_page() then overwrites the lines of open
// pages.
void SimulatedMedium::write_stored(size_t point) {
  for (size_t i = 0; i < top().used; ++i) {
    const Line& line = top().lines[i];
    write_line(line.number, content(line, span_at(line, point).stored));
  }
}

void SimulatedMedium::crash_pages(size_t point, std::mt19937_64& random) {
  // Most states are those of a kernel that wrote everything back at some moment and a few pages
  // at another moment. Uniform states alone would almost never be whole.
  enum Mode : uint32_t { kUniform, kAllOrNothing, kFewEarlier, kFewLater, kOneOther, kModes };
  const auto mode = static_cast<Mode>(random() % kModes);
  const bool tears = random() % 3 == 0;
  const std::vector<OpenPage> pages = open_pages(point);
  write_stored(point);
  const uint64_t moment = random() % 2 == 0 ? point : random() % (point + 1);
  const size_t chosen = random() % std::max<size_t>(1, pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const OpenPage& page = pages[i];
    const auto all = static_cast<uint32_t>(page.events.size());
    const auto usual = static_cast<uint32_t>(
        std::lower_bound(page.events.begin(), page.events.end(), moment) - page.events.begin());
    const auto any = [&] { return static_cast<uint32_t>(random() % (all + 1)); };
    uint32_t kept = usual;
    bool other = mode == kUniform || (mode == kOneOther ? i == chosen : random() % 4 == 0);
    if (mode == kAllOrNothing) {
      kept = (random() & 1) != 0 ? all : 0;
    } else if (other && mode == kFewEarlier) {
      kept = static_cast<uint32_t>(random() % (usual + 1));
    } else if (other && mode == kFewLater) {
      kept = usual + static_cast<uint32_t>(random() % (all - usual + 1));
    } else if (other) {
      kept = any();
    }
    std::array<uint32_t, kSectors> sectors;
    sectors.fill(kept);
    if (tears && random() % 2 == 0) {
      for (uint32_t& sector : sectors) sector = (random() & 1) != 0 ? any() : kept;
    }
    write_page(page, sectors, point);
  }
}

void SimulatedMedium::crash(size_t point, std::mt19937_64& random) {
  begin_crash(point);
  if (keeps_ == Keeps::kPages) {
    crash_pages(point, random);
    end_crash(point);
    return;
  }
  // Uniform prefixes alone would almost never leave out a single line, and that is what finds a
  // missing flush.
  enum Mode : uint32_t { kUniform, kAllOrNothing, kFewKept, kFewLost, kOneKept, kOneLost, kModes };
  const auto mode = static_cast<Mode>(random() % kModes);
  // In kFewKept and kFewLost, one line in 2..256 is the exception.
  const uint32_t few = 1 + static_cast<uint32_t>(random() % 8);
  Recording& recording = top();
  // For kOneKept and kOneLost: the number of the chosen open line.
  size_t chosen =
      mode == kOneKept || mode == kOneLost ? random() % std::max<size_t>(1, open_lines(point)) : 0;
  for (size_t i = 0; i < recording.used; ++i) {
    const Line& line = recording.lines[i];
    const Span span = span_at(line, point);
    uint32_t kept = span.stored;
    if (span.stored > span.durable) {
      const uint64_t draw = random();
      const bool exception = ((draw >> 32) & ((uint64_t{1} << few) - 1)) == 0;
      const auto uniform = span.durable + static_cast<uint32_t>((draw & 0xffffffff) %
                                                                (span.stored - span.durable + 1));
      switch (mode) {
        case kUniform:
          kept = uniform;
          break;
        case kAllOrNothing:
          kept = (draw & 1) != 0 ? span.stored : span.durable;
          break;
        case kFewKept:
          kept = exception ? uniform : span.durable;
          break;
        case kFewLost:
          kept = exception ? uniform : span.stored;
          break;
        case kOneKept:
          kept = chosen-- == 0 ? span.stored : span.durable;
          break;
        case kOneLost:
          kept = chosen-- == 0 ? span.durable : span.stored;
          break;
        case kModes:
          break;
      }
      choices_.push_back({line.number, span.durable, kept, span.stored});
    }
    const bool torn = any_word_ && kept < span.stored;
    write_line(line.number,
               torn ? torn_content(line, span.durable, kept, random) : content(line, kept));
  }
  end_crash(point);
}

uint64_t SimulatedMedium::state_count(size_t point) const {
  uint64_t count = 1;
  if (keeps_ == Keeps::kPages) {
    for (const OpenPage& page : open_pages(point)) {
      if (count > std::numeric_limits<uint64_t>::max() / (page.events.size() + 1))
        return std::numeric_limits<uint64_t>::max();
      count *= page.events.size() + 1;
    }
    return count;
  }
  for (size_t i = 0; i < top().used; ++i) {
    const Span span = span_at(top().lines[i], point);
    const uint64_t choices = span.stored - span.durable + 1;
    if (count > std::numeric_limits<uint64_t>::max() / choices)
      return std::numeric_limits<uint64_t>::max();
    count *= choices;
  }
  return count;
}

void SimulatedMedium::crash_exhaustive(size_t point, uint64_t index) {
  PETPS_CHECK(index < state_count(point), "there are fewer crash states at this point");
  begin_crash(point);
  if (keeps_ == Keeps::kPages) {
    const std::vector<OpenPage> pages = open_pages(point);
    write_stored(point);
    for (const OpenPage& page : pages) {
      std::array<uint32_t, kSectors> kept;
      kept.fill(static_cast<uint32_t>(index % (page.events.size() + 1)));
      index /= page.events.size() + 1;
      write_page(page, kept, point);
    }
    end_crash(point);
    return;
  }
  for (size_t i = 0; i < top().used; ++i) {
    const Line& line = top().lines[i];
    const Span span = span_at(line, point);
    const uint64_t choices = span.stored - span.durable + 1;
    const auto kept = static_cast<uint32_t>(span.durable + index % choices);
    index /= choices;
    if (choices > 1) choices_.push_back({line.number, span.durable, kept, span.stored});
    write_line(line.number, content(line, kept));
  }
  end_crash(point);
}

}  // namespace petps::media
