/// @file
/// A mapper without memory: it counts, refuses the n-th call, and records what a real system would punish.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/space/virtual_memory.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// Options of a simulated mapper.
struct simulated_mapper_options {
  std::uint64_t granularity = std::uint64_t{2} << 20;  ///< that of CUDA devices
  std::uint64_t most_mappings = ~std::uint64_t{0};     ///< refuses more, as vm.max_map_count does
};

/// Which calls to refuse: those of `reserve`, `create`, `map`, `allow` and `unmap`, counted together from 1.
struct mapper_faults {
  std::uint64_t first = 0;  ///< the call to refuse; 0: none
  bool lasting = false;     ///< whether to refuse all calls after it, too
};

/// Addresses that cannot be dereferenced, given out in order, so that a run repeats bit for bit.
///
/// It keeps its own records, separate from the bookkeeping above it: an overlapping mapping, an unmapping of
/// unmapped addresses, memory destroyed while it is mapped or twice, each adds a sentence to `violations`.
///
/// @par Thread safety   none.
/// @par Errors   exhaustion of memory for its own records ends the program.
class simulated_mapper {
 public:
  static constexpr bool is_host_accessible = false;
  static constexpr std::uint32_t error = 12;  ///< the error of a refused call: ENOMEM of Linux

  explicit simulated_mapper(const simulated_mapper_options& options = {}) : options_(options) {}

  [[nodiscard]] std::uint64_t granularity() const noexcept { return options_.granularity; }

  [[nodiscard]] mapper_answer reserve(std::uint64_t bytes) noexcept {
    if (refuses()) return {.error = error};
    const std::uint64_t at = next_address_;
    next_address_ += (bytes / options_.granularity + 2) * options_.granularity;  // a gap: overruns are seen
    ranges_[at] = bytes;
    return {.value = at};
  }

  void release(std::byte* data, std::uint64_t bytes) noexcept {
    const std::uint64_t at = number(data);
    const auto found = ranges_.find(at);
    if (found == ranges_.end() || found->second != bytes) {
      note("released " + text(at, bytes) + ", which was not reserved as such");
      return;
    }
    if (const auto m = overlapping(at, bytes); m != mappings_.end()) {
      note("released " + text(at, bytes) + " while " + text(m->first, m->second.bytes) + " is mapped");
    }
    ranges_.erase(found);
  }

  [[nodiscard]] mapper_answer create(std::uint64_t bytes) noexcept {
    if (refuses()) return {.error = error};
    handles_[next_token_] = {bytes, 0};
    return {.value = next_token_++};
  }

  void destroy(std::uint64_t token, std::uint64_t bytes) noexcept {
    const auto found = handles_.find(token);
    if (found == handles_.end() || found->second.bytes != bytes) {
      note("destroyed handle " + std::to_string(token) + ", which is not there");
      return;
    }
    if (found->second.mappings != 0)
      note("destroyed handle " + std::to_string(token) + " while it is mapped");
    handles_.erase(found);
  }

  [[nodiscard]] std::uint32_t map(std::byte* data, std::uint64_t token, std::uint64_t bytes) noexcept {
    if (refuses() || mappings_.size() >= options_.most_mappings) return error;
    const std::uint64_t at = number(data);
    auto range = ranges_.upper_bound(at);
    if (range == ranges_.begin() || at + bytes > std::prev(range)->first + std::prev(range)->second) {
      note("mapped " + text(at, bytes) + " outside the reserved addresses");
    }
    if (const auto m = overlapping(at, bytes); m != mappings_.end()) {
      note("mapped " + text(at, bytes) + " over " + text(m->first, m->second.bytes));
    }
    const auto found = handles_.find(token);
    if (found == handles_.end() || found->second.bytes != bytes) {
      note("mapped handle " + std::to_string(token) + ", which is not there or not of that size");
    } else {
      ++found->second.mappings;
    }
    mappings_[at] = {bytes, token, false};
    return 0;
  }

  [[nodiscard]] std::uint32_t allow(std::byte* data, std::uint64_t bytes) noexcept {
    if (refuses()) return error;
    each_mapping(number(data), bytes, "allowed", [](auto m) { m->second.allowed = true; });
    return 0;
  }

  [[nodiscard]] std::uint32_t unmap(std::byte* data, std::uint64_t bytes) noexcept {
    if (refuses()) return error;
    each_mapping(number(data), bytes, "unmapped", [&](auto m) {
      if (const auto h = handles_.find(m->second.token); h != handles_.end()) --h->second.mappings;
      mappings_.erase(m);
    });
    return 0;
  }

  /// Never refused: a hint.
  void set_aside(std::byte* data, std::uint64_t bytes) noexcept {
    each_mapping(number(data), bytes, "set aside", [](auto) {});
  }

  /// Refuses as planned from now on; the count of calls starts again.
  void refuse(mapper_faults faults) noexcept {
    faults_ = faults;
    calls_ = 0;
    refused_ = 0;
  }

  /// Returns the calls since `refuse`, or construction, and how many of them it refused.
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_; }
  [[nodiscard]] std::uint64_t refused() const noexcept { return refused_; }

  /// Returns what a real system would have punished, in order.
  [[nodiscard]] const std::vector<std::string>& violations() const noexcept { return violations_; }

  /// Returns the memory that an access to `at` would reach, and where in it: two addresses with the same
  /// result are aliases. `{0, 0}` if an access would fault.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> resolve(const std::byte* data) const {
    const std::uint64_t at = number(data);
    auto next = mappings_.upper_bound(at);
    if (next == mappings_.begin()) return {0, 0};
    --next;
    if (at >= next->first + next->second.bytes || !next->second.allowed) return {0, 0};
    return {next->second.token, at - next->first};
  }

 private:
  struct handle {
    std::uint64_t bytes;
    std::uint64_t mappings;
  };
  struct mapping {
    std::uint64_t bytes;
    std::uint64_t token;
    bool allowed;
  };
  using mapping_map = std::map<std::uint64_t, mapping>;

  [[nodiscard]] static std::uint64_t number(const std::byte* at) noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(at));
  }
  [[nodiscard]] static std::string text(std::uint64_t at, std::uint64_t bytes) {
    return std::to_string(bytes) + " bytes at " + std::to_string(at);
  }
  void note(std::string what) { violations_.push_back(std::move(what)); }

  [[nodiscard]] bool refuses() noexcept {
    ++calls_;
    if (faults_.first == 0 || calls_ < faults_.first || (calls_ > faults_.first && !faults_.lasting)) {
      return false;
    }
    ++refused_;
    return true;
  }

  [[nodiscard]] mapping_map::iterator overlapping(std::uint64_t at, std::uint64_t bytes) {
    auto next = mappings_.lower_bound(at + bytes);
    if (next == mappings_.begin()) return mappings_.end();
    --next;
    return next->first + next->second.bytes > at ? next : mappings_.end();
  }

  template <class Action>
  void each_mapping(std::uint64_t at, std::uint64_t bytes, const char* verb, Action action) {
    std::uint64_t covered = at;
    for (auto m = mappings_.lower_bound(at); m != mappings_.end() && m->first < at + bytes;) {
      if (m->first != covered) break;
      covered += m->second.bytes;
      action(m++);
    }
    if (covered != at + bytes) note(std::string(verb) + " " + text(at, bytes) + ", not whole mappings");
  }

  simulated_mapper_options options_;
  mapper_faults faults_;
  std::uint64_t calls_ = 0;
  std::uint64_t refused_ = 0;
  std::uint64_t next_address_ = std::uint64_t{1} << 62;  // no user address of any 64-bit system
  std::uint64_t next_token_ = 1;
  std::map<std::uint64_t, std::uint64_t> ranges_;
  std::map<std::uint64_t, handle> handles_;
  mapping_map mappings_;
  std::vector<std::string> violations_;
};

/// Virtual memory without memory, for planners and their tests.
using simulated_virtual_memory = basic_virtual_memory<simulated_mapper>;

static_assert(page_mapper<simulated_mapper>);
static_assert(virtual_memory<simulated_virtual_memory>);

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
