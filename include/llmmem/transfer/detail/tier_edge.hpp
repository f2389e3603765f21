/// @file
/// What lies between two tiers of a `tiered_buffer`: the transfers under way from one to the other.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/transfer/file_copy.hpp>
#include <llmmem/transfer/tier.hpp>
#include <llmmem/version/dirty_ranges.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem::inline v0::detail {

/// Waits for a copy, and says how it went where its fence can tell.
template <fence F>
[[nodiscard]] result<void> settle(const F& fence) {
  if constexpr (requires { fence.conclude(); }) {
    return fence.conclude();
  } else if constexpr (requires { fence.settled(); }) {
    return fence.settled();
  } else {
    fence.wait();
    return {};
  }
}

/// Copies parts of chunks between two spaces, of which the host can touch one: the other one's queue does it.
///
/// @par Thread safety   one thread at a time.
template <class Upper, class Lower>
class tier_edge {
 public:
  static constexpr bool host_above = Upper::is_host_accessible;
  static_assert(host_above || Lower::is_host_accessible,
                "of two neighbouring tiers the host must be able to touch one: put a tier of host memory "
                "between them");

  using queue_type = std::conditional_t<host_above, Lower, Upper>;
  using fence_type = typename queue_type::fence_type;

  tier_edge(Upper& upper, Lower& lower, std::uint32_t most)
      : upper_(&upper), lower_(&lower), flights_(most) {}

  /// Begins to copy `parts` of a chunk down. After a refusal nothing is under way.
  result<void> store(std::uint32_t id, typename Upper::range_type from, typename Lower::range_type to,
                     std::span<const byte_interval> parts, urgency how) {
    return each_part(id, parts, [&](const byte_interval& part) {
      const auto source = sub(from, part);
      const auto destination = sub(to, part);
      if constexpr (host_above) {
        return copy_in(*lower_, destination, std::span<const std::byte>(source.span()), how);
      } else {
        return copy_out(*upper_, destination.span(), source, how);
      }
    });
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return flights_.size() * sizeof(flight); }

  /// Begins to copy a chunk up.
  result<void> fetch(std::uint32_t id, typename Upper::range_type to, typename Lower::range_type from,
                     urgency how) {
    const byte_interval whole{0, to.bytes};
    return each_part(id, std::span(&whole, 1), [&](const byte_interval&) {
      if constexpr (host_above) {
        return copy_out(*lower_, to.span(), from, how);
      } else {
        return copy_in(*upper_, to, std::span<const std::byte>(from.span()), how);
      }
    });
  }

  [[nodiscard]] bool ready(std::uint32_t id) const noexcept {
    const flight& f = flights_[id];
    return all_ready(std::span(f.fences).first(f.count));
  }

  /// Waits, and says how it went: of several failures the first, but `errc::completion_lost` before others.
  /// To be asked once. What a fence throws is thrown when all have been waited for.
  [[nodiscard]] result<void> settled(std::uint32_t id) {
    flight& f = flights_[id];
    result<void> outcome;
    while (f.count != 0) {
      const fence_type fence = f.fences[--f.count];
      try {
        const result<void> one = settle(fence);
        if (!one && outcome.code() != errc::completion_lost) outcome = one;
      } catch (...) {
        static_cast<void>(quieted(id));
        throw;
      }
    }
    return outcome;
  }

  /// Somebody waits for it now.
  void hurry(std::uint32_t id) noexcept {
    if constexpr (requires(queue_type& q, const fence_type& f) { q.queue().promote(f, urgency::demand); }) {
      const flight& f = flights_[id];
      for (std::size_t i = 0; i < f.count; ++i)
        queue().queue().promote(f.fences[i], urgency::demand);
    }
  }

  /// Lets a queue that only goes on when asked go on.
  void poll() noexcept {
    if constexpr (requires(queue_type& q) { q.queue().poll(); }) queue().queue().poll();
  }

 private:
  struct flight {
    std::array<fence_type, dirty_ranges::capacity> fences{};
    std::size_t count = 0;
  };

  [[nodiscard]] queue_type& queue() noexcept {
    if constexpr (host_above) {
      return *lower_;
    } else {
      return *upper_;
    }
  }

  template <class Range>
  [[nodiscard]] static Range sub(const Range& range, const byte_interval& part) noexcept {
    return {range.data + part.begin, part.end - part.begin};
  }

  template <class Queue, class Range>
  [[nodiscard]] static result<fence_type> copy_in(Queue& queue, Range to, std::span<const std::byte> from,
                                                  urgency how) {
    if constexpr (requires { queue.copy_in_async(to, from, {}, how); }) {
      return queue.copy_in_async(to, from, {}, how);
    } else {
      return queue.copy_in_async(to, from, {});
    }
  }
  template <class Queue, class Range>
  [[nodiscard]] static result<fence_type> copy_out(Queue& queue, std::span<std::byte> to, Range from,
                                                   urgency how) {
    if constexpr (requires { queue.copy_out_async(to, from, {}, how); }) {
      return queue.copy_out_async(to, from, {}, how);
    } else {
      return queue.copy_out_async(to, from, {});
    }
  }

  template <class Begin>
  result<void> each_part(std::uint32_t id, std::span<const byte_interval> parts, Begin begin) {
    flight& f = flights_[id];
    f.count = 0;
    try {
      for (const byte_interval& part : parts) {
        result<fence_type> begun = begin(part);
        if (begun.code() == errc::table_full && f.count != 0) {
          // A queue too small for all parts at once takes them one after the other.
          if (const result<void> before = settled(id); !before) return before;
          begun = begin(part);
        }
        if (!begun) {
          // What has begun still touches both copies.
          const result<void> rest = settled(id);
          return rest.code() == errc::completion_lost ? rest : result<void>(begun.error());
        }
        f.fences[f.count++] = *begun;
      }
    } catch (...) {
      static_cast<void>(quieted(id));
      throw;
    }
    return {};
  }

  /// As `settled`, of what is left; what it throws has been thrown once.
  bool quieted(std::uint32_t id) noexcept {
    try {
      return settled(id).has_value();
    } catch (...) {
      return false;
    }
  }

  Upper* upper_;
  Lower* lower_;
  std::vector<flight> flights_;
};

}  // namespace llmmem::inline v0::detail
