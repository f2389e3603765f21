#include <llmmem/device/device_mapper.hpp>
#include <llmmem/space/virtual_memory.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

/// A driver that keeps account of addresses and memory, and can refuse a call.
struct driver_state {
  const char* why_missing = nullptr;
  std::uint64_t refuse_at = ~std::uint64_t{0};
  std::uint64_t calls = 0;
  std::uint64_t next = 64 * mib;
  std::map<std::uint64_t, std::uint64_t> ranges{};    // address, bytes
  std::map<std::uint64_t, std::uint64_t> memory{};    // token, bytes
  std::map<std::uint64_t, std::uint64_t> mappings{};  // address, token
  std::vector<std::pair<std::uint64_t, std::uint32_t>> allowed{};
  std::vector<std::uint32_t> devices{};  // on which memory was made

  [[nodiscard]] device_status call() { return calls++ == refuse_at ? 999 : 0; }
};

struct fake_paging {
  driver_state* state;

  [[nodiscard]] const char* why_missing() const noexcept { return state->why_missing; }
  [[nodiscard]] const char* text(device_status) const noexcept { return "refused by the test"; }
  device_status granularity(std::uint64_t* bytes, device_id) const noexcept {
    *bytes = 2 * mib;
    return state->call();
  }
  device_status reserve(std::uint64_t* address, std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    if (const auto status = state->call(); status != 0) return status;
    *address = (state->next + alignment - 1) / alignment * alignment;
    state->next = *address + bytes;
    state->ranges.emplace(*address, bytes);
    return 0;
  }
  device_status release(std::uint64_t address, std::uint64_t bytes) const noexcept {
    CHECK(state->ranges.at(address) == bytes);
    state->ranges.erase(address);
    return 0;
  }
  device_status create(std::uint64_t* token, std::uint64_t bytes, device_id device) const noexcept {
    if (const auto status = state->call(); status != 0) return status;
    *token = ++state->next;
    state->memory.emplace(*token, bytes);
    state->devices.push_back(to_index(device));
    return 0;
  }
  device_status destroy(std::uint64_t token) const noexcept {
    CHECK(state->memory.erase(token) == 1);
    return 0;
  }
  device_status map(std::uint64_t address, std::uint64_t bytes, std::uint64_t token) const noexcept {
    if (const auto status = state->call(); status != 0) return status;
    CHECK(state->memory.at(token) == bytes);
    state->mappings.emplace(address, token);
    return 0;
  }
  device_status allow(std::uint64_t address, std::uint64_t, device_id device) const noexcept {
    if (const auto status = state->call(); status != 0) return status;
    state->allowed.emplace_back(address, to_index(device));
    return 0;
  }
  device_status unmap(std::uint64_t address, std::uint64_t bytes) const noexcept {
    if (const auto status = state->call(); status != 0) return status;
    for (std::uint64_t at = address; at < address + bytes; at += state->memory.at(state->mappings.at(at)))
      CHECK(state->mappings.contains(at));
    state->mappings.erase(state->mappings.lower_bound(address), state->mappings.lower_bound(address + bytes));
    return 0;
  }
};
static_assert(device_paging<fake_paging>);

using fake_mapper = device_mapper<fake_paging>;
using fake_memory = basic_virtual_memory<fake_mapper>;
static_assert(page_mapper<fake_mapper> && virtual_memory<fake_memory> && !fake_memory::is_host_accessible);

}  // namespace

TEST_SUITE("device_mapper") {
  TEST_CASE("device memory is mapped to addresses, visible to peers, and completely returned") {
    driver_state driver;
    {
      fake_memory memory(
          fake_mapper({.device = device_id{1}, .seen_by = {device_id{0}, device_id{3}}}, {&driver}),
          {.budget = 64 * mib});
      CHECK(memory.granularity() == 2 * mib);
      const virtual_range range = memory.try_reserve(16 * mib).value();
      const std::array both{memory.try_create(2 * mib).value(), memory.try_create(4 * mib).value()};
      memory.map(range, 2 * mib, both).value();
      CHECK(driver.devices == std::vector<std::uint32_t>{1, 1});
      const auto at = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(range.data)) + 2 * mib;
      using allowed = std::vector<std::pair<std::uint64_t, std::uint32_t>>;
      CHECK(driver.allowed == allowed{{at, 1}, {at, 0}, {at, 3}});
      CHECK(driver.mappings.size() == 2);
      CHECK(memory.used() == 6 * mib);
      memory.decommit(range, 2 * mib, 6 * mib).value();
      CHECK(driver.mappings.empty());
      CHECK(driver.memory.empty());
      commit(memory, range, 0, 8 * mib).value();
    }
    CHECK(driver.mappings.empty());
    CHECK(driver.memory.empty());
    CHECK(driver.ranges.empty());
  }

  TEST_CASE("if the driver refuses any call, its number is reported, and nothing stays half done") {
    for (std::uint64_t at = 0; at < 6; ++at) {
      CAPTURE(at);
      driver_state driver;
      driver.refuse_at = at;
      const fake_paging paging{&driver};
      if (at == 0) {
        CHECK_THROWS_WITH_AS(
            fake_mapper({.device = device_id{2}}, paging),
            "device_mapper: device 2: cannot read the granularity: refused by the test (999)", system_error);
        continue;
      }
      fake_memory memory(fake_mapper({.seen_by = {device_id{1}}}, paging), {.budget = 64 * mib});
      const auto range = memory.try_reserve(4 * mib);
      if (!range) {
        CHECK(at == 1);
        CHECK(range.error().index == 999);
        continue;
      }
      const auto made = commit(memory, *range, 0, 4 * mib);
      CHECK_FALSE(made.has_value());
      CHECK(made.error().index == 999);
      CHECK(driver.mappings.empty());
      CHECK(driver.memory.empty());
      CHECK(memory.used() == 0);
      CHECK(commit(memory, *range, 0, 4 * mib).has_value());
    }
  }

  TEST_CASE("without such a driver the mapper says why, and a granularity must fit the driver's") {
    driver_state driver;
    driver.why_missing = "there is no driver";
    CHECK_THROWS_WITH_AS(fake_mapper({}, {&driver}),
                         "device_mapper: no virtual memory management: there is no driver; use "
                         "host_virtual_memory where there is no device",
                         system_error);
    driver.why_missing = nullptr;
    CHECK_THROWS_WITH_AS(fake_mapper({.granularity = 3 * mib}, {&driver}),
                         "device_mapper: a granularity of 3145728 bytes must be a multiple of the driver's, "
                         "2097152, and a power of two",
                         argument_error);
    CHECK_THROWS_AS(fake_mapper({.granularity = 6 * mib}, {&driver}), argument_error);
    CHECK(fake_mapper({.granularity = 64 * mib}, {&driver}).granularity() == 64 * mib);
  }
}
