/// @file
/// `simulated_space`: a device without hardware. Its memory crashes a host that touches it, its copies take
/// virtual time, and a use of bytes before their fence is an error.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/testing/aliased_pages.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/testing/virtual_link.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// A copy that touches bytes of an unfinished copy: the text names both, the bytes and the times.
class fence_error : public error {
 public:
  using error::error;
};

/// Options of a simulated space.
struct simulated_options {
  std::uint64_t budget = 0;                                                   ///< most bytes; 0 is refused
  std::string name = "simulated_space";                                       ///< the name in error texts
  link_model link{.bytes_per_second = 25'000'000'000, .latency_ns = 10'000};  ///< to and from the host
  link_model internal{.bytes_per_second = 1'000'000'000'000, .latency_ns = 2'000};  ///< copies within
  std::optional<std::byte> fresh = std::byte{0xCD};  ///< fills new ranges; nullopt leaves pages untouched
  misuse_handler on_misuse = &abort_on_misuse;       ///< called instead of taking back a wrong range
  void* misuse_context = nullptr;
};

/// Counters of a simulated space.
struct simulated_stats {
  space_stats memory;
  std::uint64_t copies_in = 0;
  std::uint64_t copies_out = 0;
  std::uint64_t copies_within = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t bytes_within = 0;
  std::uint64_t in_flight = 0;  ///< copies that have not finished
};

/// A device's memory and its link, simulated so strictly that an engine that runs on it without errors waits
/// wherever it must.
///
/// - **The host cannot touch it.** The addresses it gives out are PROT_NONE, permanently; its copies use an
///   alias.
/// - **Copies take time.** Those in and out queue on one link, those within on another: `finish = max(now,
///   link free, after) + latency + bytes / bandwidth` on a clock that the test drives.
/// - **Bytes move late.** A copy reads its source when it *finishes*, and fills its destination with `0xDD`
///   when it starts: host code that reuses a source or reads a destination too early always gets wrong bytes.
/// - **Order must be explicit.** A copy that reads what an unfinished copy writes, or writes what one reads
///   or writes, without a wait for its fence or its fence in `after`, throws `fence_error`, even if the link
///   would have ordered them. Both ends count, on the host as in the space.
///
/// Virtual time decides the order: a wait for a later event also passes all earlier ones. Run a test with
/// several bandwidths if that could hide a missing fence.
///
/// @par Complexity      O(copies in flight) for a copy; a few system calls for an allocation.
/// @par Thread safety   none: one thread drives the clock and its spaces, and a run repeats bit for bit.
/// @par Errors          the constructor throws `length_error` and `argument_error`; copies throw
///                      `fence_error`, and `length_error` past the end of time; a refusal of a real space is
///                      a value.
class simulated_space {
 public:
  using range_type = memory_range<simulated_space>;
  using fence_type = virtual_fence;
  static constexpr bool is_host_accessible = false;

  /// The contents of destinations while their copy is in flight.
  static constexpr std::byte in_flight_fill{0xDD};

  /// @param clock  outlives the space.
  /// @param options  budget and links.
  simulated_space(virtual_clock& clock, simulated_options options)
      : clock_(&clock), options_(std::move(options)), link_(options_.link), internal_(options_.internal) {
    if (options_.budget == 0) {
      throw length_error(options_.name + ": the budget is 0 bytes; set the bytes that it may hold");
    }
    if (options_.budget > max_bytes) {
      throw length_error(options_.name + ": a budget of " + std::to_string(options_.budget) +
                         " bytes exceeds the limit of 2^63 - 1");
    }
  }

  simulated_space(const simulated_space&) = delete;
  simulated_space& operator=(const simulated_space&) = delete;

  /// Drops the copies in flight, and unmaps everything.
  ~simulated_space() {
    clock_->forget(this);
    for (const auto& live : live_) {
      aliased_pages pages = live.payload.pages;
      pages.unmap();
    }
  }

  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept;
  void deallocate(range_type range) noexcept;

  [[nodiscard]] std::uint64_t capacity() const noexcept { return options_.budget; }
  [[nodiscard]] std::uint64_t used() const noexcept { return stats_.memory.used; }
  [[nodiscard]] std::string_view name() const noexcept { return options_.name; }

  /// @name Copies   see `copy_queue`
  /// @{
  [[nodiscard]] result<virtual_fence> copy_in_async(range_type destination, std::span<const std::byte> source,
                                                    std::span<const virtual_fence> after) {
    if (!holds(destination)) return dead(destination);
    return start(direction::in, {source.data(), source.size()}, {destination.data, destination.bytes}, after);
  }
  [[nodiscard]] result<virtual_fence> copy_out_async(std::span<std::byte> destination, range_type source,
                                                     std::span<const virtual_fence> after) {
    if (!holds(source)) return dead(source);
    return start(direction::out, {source.data, source.bytes}, {destination.data(), destination.size()},
                 after);
  }
  [[nodiscard]] result<virtual_fence> copy_within_async(range_type destination, range_type source,
                                                        std::span<const virtual_fence> after) {
    if (!holds(source)) return dead(source);
    if (!holds(destination)) return dead(destination);
    return start(direction::within, {source.data, source.bytes}, {destination.data, destination.bytes},
                 after);
  }
  /// @}

  /// Returns the bytes as the device's own programs see them, for a test that plays the device: at another
  /// address, which the host may touch.
  /// @throws handle_error  for a range that is not live.
  /// @throws fence_error   while a copy into it is in flight.
  [[nodiscard]] std::span<std::byte> device_view(range_type range) const;

  /// Whether all of `range` is inside one live range; an empty one is inside any.
  [[nodiscard]] bool holds(range_type range) const noexcept {
    return range.bytes == 0 || live_.holding(range.data, range.bytes) != nullptr;
  }

  [[nodiscard]] simulated_stats stats() const noexcept {
    simulated_stats now = stats_;
    now.memory.ranges = live_.size();
    now.memory.metadata_bytes = live_.metadata_bytes();
    now.in_flight = in_flight_.size();
    return now;
  }

  /// Returns the links, to query when they are free and how long they were busy.
  [[nodiscard]] const virtual_link& link() const noexcept { return link_; }
  [[nodiscard]] const virtual_link& internal() const noexcept { return internal_; }

 private:
  enum class direction : std::uint8_t { in, out, within };

  struct placed {
    aliased_pages pages;
    std::uint64_t number =
        0;  // how many ranges were given out before it: a name that repeats from run to run
  };

  /// Bytes at one end of a copy, on the host or in the space: addresses of the space differ from the host's.
  struct interval {
    const std::byte* data = nullptr;
    std::uint64_t bytes = 0;

    [[nodiscard]] bool overlaps(const interval& other) const noexcept {
      const auto a = reinterpret_cast<std::uintptr_t>(data);
      const auto b = reinterpret_cast<std::uintptr_t>(other.data);
      return a < b ? b - a < bytes && other.bytes != 0 : a - b < other.bytes && bytes != 0;
    }
  };

  struct copy {
    std::uint64_t number = 0;
    direction way = direction::in;
    interval from;
    interval to;
    virtual_time finish;
  };

  [[nodiscard]] failure dead(range_type range) const noexcept {
    return {.code = errc::dead_range, .wanted = range.bytes, .where = options_.name.c_str()};
  }

  [[nodiscard]] result<virtual_fence> start(direction way, interval from, interval to,
                                            std::span<const virtual_fence> after);
  void check_order(const copy& wanted, virtual_time ready) const;
  [[nodiscard]] std::string describe(const interval& bytes) const;
  [[nodiscard]] std::byte* touchable(const interval& bytes) const noexcept;
  void begin(std::uint64_t number) noexcept;
  void finish(std::uint64_t number) noexcept;
  [[nodiscard]] std::size_t find(std::uint64_t number) const noexcept {
    std::size_t i = 0;
    while (in_flight_[i].number != number)
      ++i;
    return i;
  }

  virtual_clock* clock_;
  simulated_options options_;
  virtual_link link_;
  virtual_link internal_;
  live_ranges<placed> live_;
  std::vector<copy> in_flight_;
  std::uint64_t copies_ = 0;
  simulated_stats stats_;
};

static_assert(memory_space<simulated_space>);
static_assert(copy_queue<simulated_space, simulated_space>);

}  // namespace testing
}  // namespace v0
}  // namespace llmmem

#include <llmmem/testing/detail/simulated_space_body.hpp>
