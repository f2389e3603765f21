#include <llmmem/testing/simulated_mapper.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem::testing;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t unit = std::uint64_t{2} << 20;

virtual_memory_options small(std::uint64_t units = 16) {
  return {.budget = units * unit, .max_ranges = 8, .max_handles = 32, .max_mappings = 32, .name = "vm"};
}

template <class T>
std::string text_of(const result<T>& refused) {
  REQUIRE_FALSE(refused);
  return refused.error().message();
}

/// What was asked for, kept naively: which handle lies at which unit of which range.
struct naive_range {
  virtual_range range;
  std::map<std::uint64_t, std::size_t> mapped;  // offset in units -> index of the handle
};
struct naive_handle {
  physical_handle handle;
  std::uint64_t units = 0;
  std::uint64_t mappings = 0;
};

class model {
 public:
  explicit model(std::uint64_t budget) : budget_(budget) {}

  void step(simulated_virtual_memory& memory, random_numbers& random) {
    switch (random.below(std::uint64_t{8})) {
      case 0:
        reserve(memory, random);
        break;
      case 1:
        release(memory, random);
        break;
      case 2:
      case 3:
        create(memory, random);
        break;
      case 4:
        destroy(memory, random);
        break;
      case 5:
      case 6:
        map(memory, random);
        break;
      default:
        unmap(memory, random);
    }
    check(memory);
  }

 private:
  void reserve(simulated_virtual_memory& memory, random_numbers& random) {
    const std::uint64_t units = 1 + random.below(std::uint64_t{6});
    const auto got = memory.try_reserve(units * unit);
    REQUIRE(got.has_value() == (ranges_.size() < 8));
    if (got) ranges_.push_back({*got, {}});
  }

  void release(simulated_virtual_memory& memory, random_numbers& random) {
    if (ranges_.empty()) return;
    const auto at = ranges_.begin() + static_cast<std::ptrdiff_t>(random.below(ranges_.size()));
    const auto done = memory.release(at->range);
    REQUIRE(done.has_value() == at->mapped.empty());
    if (!done) return;
    CHECK(memory.release(at->range).code() == errc::stale_handle);
    ranges_.erase(at);
  }

  void create(simulated_virtual_memory& memory, random_numbers& random) {
    const std::uint64_t units = 1 + random.below(std::uint64_t{3});
    const auto got = memory.try_create(units * unit);
    REQUIRE(got.has_value() == (used() + units * unit <= budget_ && live() < 32));
    if (got) handles_.push_back({*got, units, 0});
  }

  void destroy(simulated_virtual_memory& memory, random_numbers& random) {
    naive_handle* chosen = any_handle(random);
    if (chosen == nullptr) return;
    REQUIRE(memory.destroy(chosen->handle).has_value() == (chosen->mappings == 0));
    if (chosen->mappings == 0) chosen->units = 0;
  }

  void map(simulated_virtual_memory& memory, random_numbers& random) {
    if (ranges_.empty()) return;
    naive_range& into = ranges_[random.below(ranges_.size())];
    std::vector<std::size_t> chosen;
    std::vector<physical_handle> handles;
    std::uint64_t units = 0;
    for (std::uint64_t i = 0; i < 1 + random.below(std::uint64_t{3}); ++i) {
      const naive_handle* each = any_handle(random);
      if (each == nullptr) return;
      chosen.push_back(static_cast<std::size_t>(each - handles_.data()));
      handles.push_back(each->handle);
      units += each->units;
    }
    const std::uint64_t offset = random.below(std::uint64_t{7});
    bool fits = (offset + units) * unit <= into.range.bytes && mappings() + handles.size() <= 32;
    for (const auto& [at, index] : into.mapped) {
      if (at < offset + units && offset < at + handles_[index].units) fits = false;
    }
    REQUIRE(memory.map(into.range, offset * unit, handles).has_value() == fits);
    if (!fits) return;
    std::uint64_t at = offset;
    for (const std::size_t index : chosen) {
      into.mapped[at] = index;
      at += handles_[index].units;
      ++handles_[index].mappings;
    }
  }

  void unmap(simulated_virtual_memory& memory, random_numbers& random) {
    if (ranges_.empty()) return;
    naive_range& from = ranges_[random.below(ranges_.size())];
    const std::uint64_t offset = random.below(std::uint64_t{6});
    const std::uint64_t units = 1 + random.below(std::uint64_t{4});
    std::uint64_t covered = offset;
    while (covered < offset + units && from.mapped.contains(covered))
      covered += handles_[from.mapped.at(covered)].units;
    const bool whole = covered == offset + units && (offset + units) * unit <= from.range.bytes;
    const bool destroys = random.once_in(2);
    const auto done = destroys ? memory.decommit(from.range, offset * unit, units * unit)
                               : memory.unmap(from.range, offset * unit, units * unit);
    REQUIRE(done.has_value() == whole);
    if (!whole) return;
    std::vector<std::size_t> touched;
    for (std::uint64_t at = offset; at < offset + units;) {
      const std::size_t index = from.mapped.at(at);
      from.mapped.erase(at);
      --handles_[index].mappings;
      touched.push_back(index);
      at += handles_[index].units;
    }
    for (const std::size_t index : touched) {
      if (destroys && handles_[index].mappings == 0) handles_[index].units = 0;
    }
  }

  void check(const simulated_virtual_memory& memory) const {
    REQUIRE(memory.audit() == std::vector<std::string>{});
    REQUIRE(memory.mapper().violations() == std::vector<std::string>{});
    REQUIRE(memory.used() == used());
    REQUIRE(memory.stats().mappings == mappings());
    for (const naive_range& r : ranges_) {
      for (std::uint64_t at = 0; at < r.range.bytes / unit; ++at) {
        const auto found = memory.mapped_at(r.range, at * unit);
        const auto expected = r.mapped.find(at);
        REQUIRE(found.has_value() == (expected != r.mapped.end()));
        if (!found) continue;
        REQUIRE(*found == handles_[expected->second].handle);
        REQUIRE(memory.mappings_of(*found) == handles_[expected->second].mappings);
        // Wherever it is mapped, the same handle is the same memory.
        const auto [token, offset] = memory.mapper().resolve(r.range.data + at * unit + 5);
        REQUIRE(offset == 5);
        REQUIRE(tokens_.try_emplace(expected->second, token).first->second == token);
      }
    }
  }

  [[nodiscard]] naive_handle* any_handle(random_numbers& random) {
    if (live() == 0) return nullptr;
    for (;;) {
      naive_handle& each = handles_[random.below(handles_.size())];
      if (each.units != 0) return &each;
    }
  }
  [[nodiscard]] std::uint64_t used() const {
    std::uint64_t sum = 0;
    for (const naive_handle& each : handles_)
      sum += each.units * unit;
    return sum;
  }
  [[nodiscard]] std::uint64_t live() const {
    std::uint64_t count = 0;
    for (const naive_handle& each : handles_)
      count += each.units != 0 ? 1 : 0;
    return count;
  }
  [[nodiscard]] std::uint64_t mappings() const {
    std::uint64_t sum = 0;
    for (const naive_range& each : ranges_)
      sum += each.mapped.size();
    return sum;
  }

  std::uint64_t budget_;
  std::vector<naive_range> ranges_;
  std::vector<naive_handle> handles_;  // units 0: destroyed
  mutable std::map<std::size_t, std::uint64_t> tokens_;
};

}  // namespace

TEST_CASE("virtual memory behaves as a list of mappings, and never misuses the system") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    simulated_virtual_memory memory(small());
    model naive(16 * unit);
    for (int i = 0; i < 300; ++i)
      naive.step(memory, random);
  }
}

TEST_CASE("impossible mappings are refused with the numbers, and change nothing") {
  simulated_virtual_memory memory(small(4));
  const virtual_range range = memory.try_reserve(4 * unit).value();
  const physical_handle one = memory.try_create(unit).value();
  const physical_handle two = memory.try_create(2 * unit).value();
  memory.map(range, unit, std::span(&two, 1)).value();
  const std::uint64_t calls = memory.mapper().calls();

  CHECK(text_of(memory.try_reserve(0)) == "vm: an allocation of 0 bytes; request at least 1");
  CHECK(text_of(memory.try_reserve(unit + 1)) ==
        "vm: 2097153 bytes is not a multiple of the granularity, 2097152 bytes");
  CHECK(text_of(memory.try_create(2 * unit)) ==
        "vm: 4194304 bytes needed, but 2097152 left in its budget; release ranges, or raise the budget");
  CHECK(text_of(memory.map(range, 2 * unit, std::span(&one, 1))) ==
        "vm: offset 4194304 of the range overlaps the mapping at offset 2097152; unmap that first");
  CHECK(memory.map(range, 0, std::span(&two, 1)).code() == errc::already_mapped);
  CHECK(text_of(memory.map(range, 4 * unit, std::span(&one, 1))) ==
        "vm: bytes up to 10485760 requested, but it has 8388608; request fewer, or make it larger");
  CHECK(memory.map(range, ~std::uint64_t{0} - unit + 1, std::span(&one, 1)).code() == errc::past_the_bytes);
  CHECK(memory.map(range, 1, std::span(&one, 1)).code() == errc::bad_granularity);
  CHECK(memory.map(range, 0, {}).code() == errc::zero_bytes);
  CHECK(memory.map(virtual_range{}, 0, std::span(&one, 1)).code() == errc::null_handle);
  const physical_handle none{};
  CHECK(memory.map(range, 0, std::span(&none, 1)).code() == errc::null_handle);
  CHECK(text_of(memory.unmap(range, 0, unit)) ==
        "vm: no mapping begins or ends at offset 0 of the range; unmap whole mappings that are there");
  CHECK(text_of(memory.unmap(range, unit, unit)) ==
        "vm: no mapping begins or ends at offset 4194304 of the range; unmap whole mappings that are there");
  CHECK(memory.unmap(range, 2 * unit, unit).code() == errc::not_mapped);
  CHECK(memory.unmap(range, unit, 3 * unit).code() == errc::not_mapped);
  CHECK(memory.decommit(range, unit, unit).code() == errc::not_mapped);
  CHECK(memory.unmap(range, unit, 0).code() == errc::zero_bytes);
  CHECK(text_of(memory.destroy(two)) == "vm: 1 mappings prevent its release; unmap them first");
  CHECK(memory.release(range).code() == errc::still_mapped);
  CHECK(memory.mapped_at(range, 2 * unit).code() == errc::not_mapped);
  CHECK(memory.mapped_at(range, 4 * unit).code() == errc::not_mapped);

  CHECK(memory.mapper().calls() == calls);  // the system was never asked
  CHECK(memory.stats().refusals == 19);
  CHECK(memory.audit().empty());
}

TEST_CASE("a memory distinguishes its ranges and handles from those of another, and from old ones") {
  simulated_virtual_memory memory(small());
  simulated_virtual_memory other(small());
  const virtual_range range = memory.try_reserve(unit).value();
  const physical_handle handle = memory.try_create(unit).value();
  static_cast<void>(other.try_reserve(unit).value());
  static_cast<void>(other.try_create(unit).value());
  CHECK(other.release(range).code() == errc::foreign_handle);
  CHECK(other.destroy(handle).code() == errc::foreign_handle);
  CHECK(other.bytes_of(handle) == 0);
  memory.destroy(handle).value();
  memory.release(range).value();
  CHECK(memory.destroy(handle).code() == errc::stale_handle);
  CHECK(memory.bytes_of(handle) == 0);
  CHECK(memory.mapped_at(range, 0).code() == errc::stale_handle);
}

TEST_CASE("a full table is reported, and nothing is taken from the system") {
  virtual_memory_options options = small();
  options.max_ranges = options.max_handles = 1;
  options.max_mappings = 1;
  simulated_virtual_memory memory(options);
  const virtual_range range = memory.try_reserve(2 * unit).value();
  const physical_handle handle = memory.try_create(unit).value();
  CHECK(memory.try_reserve(unit).code() == errc::table_full);
  CHECK(memory.try_create(unit).code() == errc::table_full);
  const physical_handle twice[] = {handle, handle};
  CHECK(text_of(memory.map(range, 0, twice)) ==
        "vm: a table of fixed size is full: 2 entries needed, 1 free; raise its max_ option");
  memory.map(range, 0, std::span(twice, 1)).value();
  CHECK(memory.map(range, unit, std::span(twice, 1)).code() == errc::table_full);
  CHECK(memory.mapper().calls() == 4);
}

TEST_CASE("if the system refuses any call, a stitch is complete or absent") {
  for (std::uint64_t nth = 1;; ++nth) {
    CAPTURE(nth);
    simulated_virtual_memory memory(small());
    std::vector<physical_handle> handles;
    for (int i = 0; i < 3; ++i)
      handles.push_back(memory.try_create(unit).value());
    const virtual_stats before = memory.stats();
    memory.mapper().refuse({.first = nth});
    const auto stitched = stitch(memory, handles);
    CHECK(memory.audit() == std::vector<std::string>{});
    CHECK(memory.mapper().violations() == std::vector<std::string>{});
    if (memory.mapper().refused() == 0) {
      REQUIRE(stitched);
      CHECK(nth == 6);  // one reservation, three mappings, one access
      CHECK(memory.stats().mapped_bytes == 3 * unit);
      CHECK(memory.mapper().resolve(stitched->data + unit).second == 0);
      break;
    }
    REQUIRE_FALSE(stitched);
    CHECK(stitched.code() == (nth == 1 ? errc::reserve_refused : errc::map_refused));
    CHECK(stitched.error().index == simulated_mapper::error);
    CHECK(memory.stats().ranges == before.ranges);
    CHECK(memory.stats().mapped_bytes == 0);
    CHECK(memory.used() == before.used);
  }
}

TEST_CASE("a mapping that can be neither completed nor undone is reported, kept and counted") {
  simulated_virtual_memory memory(small());
  std::vector<physical_handle> handles;
  for (int i = 0; i < 3; ++i)
    handles.push_back(memory.try_create(unit).value());
  const virtual_range range = memory.try_reserve(3 * unit).value();
  memory.mapper().refuse({.first = 3, .lasting = true});
  CHECK(text_of(memory.map(range, 0, handles)) ==
        "vm: the system refused to change the mapping of 6291456 bytes (error 12) with 2 mappings held; hold "
        "fewer, map larger pieces, or raise vm.max_map_count");
  CHECK(memory.stats().stuck_mappings == 2);
  CHECK(memory.audit().empty());
  CHECK(memory.unmap(range, 0, 2 * unit).code() == errc::map_refused);
  CHECK(memory.stats().mappings == 2);
  memory.mapper().refuse({});
  memory.unmap(range, 0, 2 * unit).value();
  memory.release(range).value();
  CHECK(memory.mapper().violations().empty());
}

TEST_CASE("if the system refuses any call, a commit takes nothing") {
  for (std::uint64_t nth = 1; nth <= 3; ++nth) {
    CAPTURE(nth);
    simulated_virtual_memory memory(small());
    const virtual_range range = memory.try_reserve(unit).value();
    memory.mapper().refuse({.first = nth});
    const auto refused = commit(memory, range, 0, unit);
    CHECK(refused.code() == (nth == 1 ? errc::system_refused : errc::map_refused));
    CHECK(memory.used() == 0);
    CHECK(memory.stats().handles == 0);
    CHECK(memory.stats().mappings == 0);
    CHECK(memory.audit().empty());
    CHECK(commit(memory, range, 0, unit).has_value());
  }
}

TEST_CASE("the destruction of a memory returns everything, in an order that the system allows") {
  std::vector<std::string> violations;
  struct watched : simulated_mapper {
    explicit watched(std::vector<std::string>& to) : sink(&to) {}
    watched(watched&& other) noexcept : simulated_mapper(other), sink(std::exchange(other.sink, nullptr)) {}
    watched& operator=(watched&&) = default;
    ~watched() {
      if (sink != nullptr) *sink = violations();
    }
    std::vector<std::string>* sink;
  };
  {
    basic_virtual_memory<watched> memory(watched(violations), small());
    const virtual_range range = memory.try_reserve(4 * unit).value();
    static_cast<void>(commit(memory, range, unit, 2 * unit).value());
  }
  CHECK(violations == std::vector<std::string>{});
}

TEST_CASE("a failed setup of a memory reports the reason") {
  CHECK_THROWS_WITH_AS(simulated_virtual_memory({.name = "vm"}),
                       "vm: the budget is 0 bytes; set the bytes that it may hold", length_error);
  CHECK_THROWS_WITH_AS(simulated_virtual_memory({.budget = max_bytes + 1, .name = "vm"}),
                       "vm: a budget of 9223372036854775808 bytes exceeds the limit of 2^63 - 1",
                       length_error);
  CHECK_THROWS_WITH_AS(simulated_virtual_memory({.budget = 1, .max_handles = 0, .name = "vm"}),
                       "vm: max_ranges, max_handles and max_mappings must each be at least 1", length_error);
  CHECK(fail_each_allocation([](const metadata_source& source) {
          virtual_memory_options options = small();
          options.metadata = source;
          simulated_virtual_memory memory(options);
        }) == 4);
}
