/// @file
/// `host_space`: ordinary memory of the host, under a hard budget, with misuse of its ranges caught.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/fence.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/space/pages.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem::inline v0 {

/// How a host space is set up.
struct host_options {
  std::uint64_t budget = 0;                     ///< most bytes it may hold; there is no default, 0 is refused
  std::string name = "host_space";              ///< for error texts
  misuse_handler on_misuse = &abort_on_misuse;  ///< called instead of taking back a wrong range
  void* misuse_context = nullptr;               ///< passed to the handler
};

/// Counters of a space.
struct space_stats {
  std::uint64_t used = 0;            ///< bytes charged to the budget now
  std::uint64_t peak = 0;            ///< most bytes charged at once
  std::uint64_t ranges = 0;          ///< live ranges
  std::uint64_t allocations = 0;     ///< ranges given out since construction
  std::uint64_t refusals = 0;        ///< allocations refused
  std::uint64_t misuses = 0;         ///< deallocations refused
  std::uint64_t metadata_bytes = 0;  ///< bytes of bookkeeping, outside the budget
};

/// Host memory from a `byte_source`, under a hard budget.
///
/// For arenas, slabs and staging buffers: hundreds of ranges, carved further by what uses them. For millions
/// of small objects take an allocator that carves ranges of this.
///
/// The budget is charged with what the source takes (`footprint`): whole pages for mapped requests. Every
/// range is recorded, and `deallocate` finds the record before it touches memory: a range taken back twice,
/// with another length, from its middle or from another space goes to the misuse handler, which aborts unless
/// told otherwise. Destroying the space gives everything still live back to the source.
///
/// @par Complexity      O(log n) look-up and O(n) bookkeeping in the number of live ranges, plus the source.
/// @par Thread safety   any number of threads; one mutex. Copies run on the calling thread, outside the
/// mutex.
/// @par Errors          the constructor throws `length_error`; nothing else throws.
/// @tparam Source  where bytes come from: `page_source`, `pmr_source` (space/pmr.hpp), or your own.
template <byte_source Source>
class basic_host_space {
 public:
  using range_type = memory_range<basic_host_space>;
  using fence_type = host_fence;
  using source_type = Source;
  static constexpr bool is_host_accessible = true;

  explicit basic_host_space(host_options options)
    requires(std::default_initializable<Source>)
      : basic_host_space(Source{}, std::move(options)) {}

  basic_host_space(Source source, host_options options)
      : source_(std::move(source)), options_(std::move(options)) {
    if (options_.budget == 0) {
      throw length_error(options_.name + ": the budget is 0 bytes; say how much it may hold");
    }
    if (options_.budget > max_bytes) {
      throw length_error(options_.name + ": a budget of " + std::to_string(options_.budget) +
                         " bytes passes the limit of 2^63 - 1");
    }
  }

  basic_host_space(const basic_host_space&) = delete;
  basic_host_space& operator=(const basic_host_space&) = delete;

  ~basic_host_space() {
    for (const auto& live : live_) {
      source_.give_back(to_mutable(live.data), live.bytes, live.payload);
    }
  }

  /// At least `bytes` bytes at a multiple of `alignment`; their content is anything.
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const std::lock_guard lock(mutex_);
    const auto refuse = [&](errc code, std::uint64_t wanted) {
      ++stats_.refusals;
      return failure{.code = code,
                     .wanted = wanted,
                     .found = options_.budget - stats_.used,
                     .where = options_.name.c_str()};
    };
    if (bytes == 0) return refuse(errc::zero_bytes, 0);
    if (!std::has_single_bit(alignment)) return refuse(errc::bad_alignment, alignment);
    const std::uint64_t left = options_.budget - stats_.used;
    if (bytes > left) return refuse(errc::out_of_bytes, bytes);
    const std::uint64_t charge = source_.footprint(bytes, alignment);
    if (charge > left) return refuse(errc::out_of_bytes, charge);
    if (!live_.reserve_one()) return refuse(errc::system_refused, bytes);
    std::byte* const data = source_.take(bytes, alignment);
    if (data == nullptr) return refuse(errc::system_refused, bytes);
    if ((reinterpret_cast<std::uintptr_t>(data) & (alignment - 1)) != 0) {
      source_.give_back(data, bytes, alignment);
      return refuse(errc::system_refused, bytes);
    }
    live_.insert(data, bytes, alignment);
    stats_.used += charge;
    if (stats_.used > stats_.peak) stats_.peak = stats_.used;
    ++stats_.allocations;
    return range_type{data, bytes};
  }

  /// Takes back a range as `try_allocate` gave it; an empty one is no change. See the class for a wrong one.
  void deallocate(range_type range) noexcept {
    if (range.data == nullptr && range.bytes == 0) return;
    misuse wrong;
    {
      const std::lock_guard lock(mutex_);
      wrong = live_.check(options_.name.c_str(), range.data, range.bytes);
      if (wrong.what == misuse::kind::none) {
        const auto removed = live_.remove(range.data);
        stats_.used -= source_.footprint(removed.bytes, removed.payload);
        source_.give_back(to_mutable(removed.data), removed.bytes, removed.payload);
        return;
      }
      ++stats_.misuses;
    }
    options_.on_misuse(wrong, options_.misuse_context);
  }

  [[nodiscard]] std::uint64_t capacity() const noexcept { return options_.budget; }
  [[nodiscard]] std::uint64_t used() const noexcept {
    const std::lock_guard lock(mutex_);
    return stats_.used;
  }
  [[nodiscard]] std::string_view name() const noexcept { return options_.name; }

  /// @name Copies
  /// Run on the calling thread: they wait for `after`, copy, and return a fence that has passed.
  /// @{
  [[nodiscard]] result<host_fence> copy_in_async(range_type destination, std::span<const std::byte> source,
                                                 std::span<const host_fence> after) noexcept {
    return copy(destination, destination.data, destination.bytes, source.data(), source.size(), after);
  }
  [[nodiscard]] result<host_fence> copy_out_async(std::span<std::byte> destination, range_type source,
                                                  std::span<const host_fence> after) noexcept {
    return copy(source, destination.data(), destination.size(), source.data, source.bytes, after);
  }
  [[nodiscard]] result<host_fence> copy_within_async(range_type destination, range_type source,
                                                     std::span<const host_fence> after) noexcept {
    if (!holds(destination)) return dead(destination);
    return copy(source, destination.data, destination.bytes, source.data, source.bytes, after);
  }
  /// @}

  /// Whether all of `range` lies inside one live range.
  [[nodiscard]] bool holds(range_type range) const noexcept {
    const std::lock_guard lock(mutex_);
    return live_.holding(range.data, range.bytes) != nullptr;
  }

  [[nodiscard]] space_stats stats() const noexcept {
    const std::lock_guard lock(mutex_);
    space_stats now = stats_;
    now.ranges = live_.size();
    now.metadata_bytes = live_.metadata_bytes();
    return now;
  }

  /// Proves that the live ranges do not overlap and that their bytes are what the budget was charged with.
  /// Returns one sentence for each violation; none means proven. O(ranges); allocates.
  [[nodiscard]] std::vector<std::string> audit() {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> found = live_.audit(options_.name.c_str());
    std::uint64_t charged = 0;
    for (const auto& live : live_) {
      charged += source_.footprint(live.bytes, live.payload);
    }
    if (charged != stats_.used || charged > options_.budget) {
      found.push_back(options_.name + ": live ranges take " + std::to_string(charged) +
                      " bytes, the budget of " + std::to_string(options_.budget) + " was charged with " +
                      std::to_string(stats_.used));
    }
    return found;
  }

  /// What lies beneath, for its report. Not while another thread allocates.
  [[nodiscard]] const Source& source() const noexcept { return source_; }

 private:
  [[nodiscard]] static std::byte* to_mutable(const std::byte* data) noexcept {
    return const_cast<std::byte*>(data);
  }

  [[nodiscard]] failure dead(range_type range) const noexcept {
    return {.code = errc::dead_range, .wanted = range.bytes, .where = options_.name.c_str()};
  }

  [[nodiscard]] result<host_fence> copy(range_type ours, std::byte* to, std::uint64_t to_bytes,
                                        const std::byte* from, std::uint64_t from_bytes,
                                        std::span<const host_fence> after) const noexcept {
    if (to_bytes != from_bytes) {
      return failure{.code = errc::size_mismatch,
                     .wanted = to_bytes,
                     .found = from_bytes,
                     .where = options_.name.c_str()};
    }
    if (ours.bytes != 0 && !holds(ours)) return dead(ours);
    const auto a = reinterpret_cast<std::uintptr_t>(to);
    const auto b = reinterpret_cast<std::uintptr_t>(from);
    const std::uint64_t apart = a > b ? a - b : b - a;
    if (apart < to_bytes) {
      return failure{.code = errc::overlapping_ranges,
                     .wanted = to_bytes,
                     .found = to_bytes - apart,
                     .where = options_.name.c_str()};
    }
    wait_all(after);
    if (to_bytes != 0) std::memmove(to, from, static_cast<std::size_t>(to_bytes));
    return host_fence{};
  }

  mutable std::mutex mutex_;
  Source source_;
  host_options options_;
  live_ranges<std::uint64_t> live_;  // payload: the alignment it was asked with
  space_stats stats_;
};

/// Host memory from the heap and the operating system's pages.
using host_space = basic_host_space<page_source>;

static_assert(memory_space<host_space>);
static_assert(copy_queue<host_space, host_space>);

}  // namespace llmmem::inline v0
