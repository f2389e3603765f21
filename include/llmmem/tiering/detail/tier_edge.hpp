/// @file
/// The edge between two tiers of a `tiered_buffer`: the transfers in flight from one to the other.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/tiering/tier.hpp>
#include <llmmem/transfer/bounce_queue.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/file_copy.hpp>
#include <llmmem/transfer/settle.hpp>
#include <llmmem/version/dirty_ranges.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define LLMMEM_LOOKS_FOR_LEAKS
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LLMMEM_LOOKS_FOR_LEAKS
#endif
#endif
#if defined(LLMMEM_LOOKS_FOR_LEAKS)
#include <sanitizer/lsan_interface.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The setup of an edge.
template <class Upper, class Lower>
struct tier_edge_setup {
  Upper& upper;
  Lower& lower;
  std::uint32_t most = 0;  // transfers
  std::uint64_t bounce_bytes = 0;
  std::uint64_t bounce_slot_bytes = 0;
  std::string name;
  const metadata_source& metadata;
};

/// Moves bytes from one space to the other by the queue of the space that the host cannot access.
template <class Traits, class Upper, class Lower>
class tier_link {
 public:
  static constexpr bool host_above = Upper::is_host_accessible;
  static constexpr bool bounces = false;
  using queue_type = std::conditional_t<host_above, Lower, Upper>;
  using fence_type = typename queue_type::fence_type;

  explicit tier_link(const tier_edge_setup<Upper, Lower>& setup)
      : upper_(&setup.upper), lower_(&setup.lower) {}

  [[nodiscard]] result<fence_type> down(typename Lower::range_type to, typename Upper::range_type from,
                                        transfer::urgency how, bounce_checksum*) {
    if constexpr (host_above) {
      return copy_in(*lower_, to, std::span<const std::byte>(from.span()), how);
    } else {
      return copy_out(*upper_, to.span(), from, how);
    }
  }
  [[nodiscard]] result<fence_type> up(typename Upper::range_type to, typename Lower::range_type from,
                                      transfer::urgency how, bounce_checksum*) {
    if constexpr (host_above) {
      return copy_out(*lower_, to.span(), from, how);
    } else {
      return copy_in(*upper_, to, std::span<const std::byte>(from.span()), how);
    }
  }
  void promote(const fence_type& fence, transfer::urgency how) noexcept {
    if constexpr (requires(queue_type& q) { q.queue().promote(fence, how); })
      queue().queue().promote(fence, how);
  }
  void poll() noexcept { poll_queue(queue()); }
  [[nodiscard]] static constexpr bounce_stats stats() noexcept { return {}; }

 private:
  [[nodiscard]] queue_type& queue() noexcept {
    if constexpr (host_above) {
      return *lower_;
    } else {
      return *upper_;
    }
  }

  Upper* upper_;
  Lower* lower_;
};

/// Marks `object` for leak checkers: the memory that it holds is deliberately never freed.
inline void left_for_good([[maybe_unused]] const void* object) noexcept {
#if defined(LLMMEM_LOOKS_FOR_LEAKS)
  __lsan_ignore_object(object);
#endif
}

/// The space of a ring. A device that never answered may write to the ring after its last user is destroyed;
/// the ring then stays allocated permanently.
template <class Traits>
class ring_space {
 public:
  using space_type = typename Traits::bounce_space;

  explicit ring_space(std::uint64_t bytes) : space_(new space_type(Traits::make_bounce_space(bytes))) {}
  ring_space(const ring_space&) = delete;
  ring_space& operator=(const ring_space&) = delete;
  ~ring_space() {
    if (space_->used() == 0) {
      delete space_;
    } else {
      left_for_good(space_);
    }
  }
  [[nodiscard]] space_type& operator*() const noexcept { return *space_; }

 private:
  space_type* space_;
};

template <class Upper, class Lower>
concept beyond_the_host = !Upper::is_host_accessible && !Lower::is_host_accessible;

/// If the host can access neither space: moves bytes through a ring of host memory.
template <class Traits, class Upper, class Lower>
  requires beyond_the_host<Upper, Lower>
class tier_link<Traits, Upper, Lower> {
 public:
  static constexpr bool bounces = true;
  using staging_type = typename Traits::bounce_space;
  using queue_type = bounce_queue<Upper, Lower, staging_type>;
  using fence_type = typename queue_type::fence_type;

  explicit tier_link(const tier_edge_setup<Upper, Lower>& setup)
      : staging_(setup.bounce_bytes), queue_(setup.upper, setup.lower, *staging_, options(setup)) {}

  [[nodiscard]] result<fence_type> down(typename Lower::range_type to, typename Upper::range_type from,
                                        transfer::urgency how, bounce_checksum* sum) {
    return queue_.copy_down_async(to, from, {}, how, sum);
  }
  [[nodiscard]] result<fence_type> up(typename Upper::range_type to, typename Lower::range_type from,
                                      transfer::urgency how, bounce_checksum* sum) {
    return queue_.copy_up_async(to, from, {}, how, sum);
  }
  void promote(const fence_type& fence, transfer::urgency how) noexcept { queue_.promote(fence, how); }
  void poll() noexcept { queue_.poll(); }
  [[nodiscard]] bounce_stats stats() const noexcept { return queue_.stats(); }

 private:
  [[nodiscard]] static bounce_options options(const tier_edge_setup<Upper, Lower>& setup) {
    bounce_options all;
    all.budget_bytes = setup.bounce_bytes;
    all.slot_bytes = setup.bounce_slot_bytes;
    // Each part of each transfer is an operation, and may fail before a call asks for its outcome.
    all.max_operations = setup.most * static_cast<std::uint32_t>(dirty_ranges::capacity);
    all.max_failures = all.max_operations;
    all.name = setup.name;
    all.metadata = setup.metadata;
    return all;
  }

  ring_space<Traits> staging_;
  queue_type queue_;
};

/// If the host can access neither space, but one of them reaches the other: moves bytes directly. The host
/// does not see these bytes, so they have no checksum.
template <class Traits, class Upper, class Lower>
  requires beyond_the_host<Upper, Lower> && (straight_queue<Lower, Upper> || straight_queue<Upper, Lower>)
class tier_link<Traits, Upper, Lower> {
 public:
  static constexpr bool bounces = false;
  static constexpr bool by_lower = straight_queue<Lower, Upper>;
  using queue_type = std::conditional_t<by_lower, Lower, Upper>;
  using fence_type = typename queue_type::fence_type;

  explicit tier_link(const tier_edge_setup<Upper, Lower>& setup)
      : upper_(&setup.upper), lower_(&setup.lower) {}

  [[nodiscard]] result<fence_type> down(typename Lower::range_type to, typename Upper::range_type from,
                                        transfer::urgency, bounce_checksum*) {
    if constexpr (by_lower) {
      return lower_->copy_from_async(to, from, {});
    } else {
      return upper_->copy_to_async(to, from, {});
    }
  }
  [[nodiscard]] result<fence_type> up(typename Upper::range_type to, typename Lower::range_type from,
                                      transfer::urgency, bounce_checksum*) {
    if constexpr (by_lower) {
      return lower_->copy_to_async(to, from, {});
    } else {
      return upper_->copy_from_async(to, from, {});
    }
  }
  void promote(const fence_type&, transfer::urgency) noexcept {}
  void poll() noexcept {
    if constexpr (by_lower) {
      poll_queue(*lower_);
    } else {
      poll_queue(*upper_);
    }
  }
  [[nodiscard]] static constexpr bounce_stats stats() noexcept { return {}; }

 private:
  Upper* upper_;
  Lower* lower_;
};

/// Copies parts of chunks between two neighbouring spaces.
///
/// @par Thread safety   one thread at a time.
template <class Traits, class Upper, class Lower>
class tier_edge {
 public:
  using link_type = tier_link<Traits, Upper, Lower>;
  using fence_type = typename link_type::fence_type;
  using setup = tier_edge_setup<Upper, Lower>;
  static constexpr bool bounces = link_type::bounces;

  explicit tier_edge(const setup& s) : link_(s), flights_(s.most) {}

  /// Begins to copy `parts` of a chunk down. After a refusal nothing is in flight.
  /// @param sum_bytes  how many bytes `checksum` covers, if the copy goes through a ring and its only part
  ///                   begins with the chunk; 0 for none.
  result<void> store(std::uint32_t id, typename Upper::range_type from, typename Lower::range_type to,
                     std::span<const byte_interval> parts, transfer::urgency how,
                     std::uint64_t sum_bytes = 0) {
    bounce_checksum* const sum = expect_checksum(id, sum_bytes);
    return each_part(id, parts, [&](const byte_interval& part) {
      return link_.down(sub(to, part), sub(from, part), how, sum);
    });
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return flights_.size() * sizeof(flight) + static_cast<std::size_t>(link_.stats().metadata_bytes);
  }
  [[nodiscard]] std::uint64_t bounce_bytes() const noexcept { return link_.stats().budget_bytes; }

  /// Begins to copy a chunk up.
  /// @param sum_bytes  as in `store`.
  result<void> fetch(std::uint32_t id, typename Upper::range_type to, typename Lower::range_type from,
                     transfer::urgency how, std::uint64_t sum_bytes = 0) {
    const byte_interval whole{0, to.bytes};
    bounce_checksum* const sum = expect_checksum(id, sum_bytes);
    return each_part(id, std::span(&whole, 1),
                     [&](const byte_interval&) { return link_.up(to, from, how, sum); });
  }

  /// Returns the CRC-32C of the moved bytes, if `sum_bytes` asked for it. @pre the transfer has ended
  /// successfully.
  [[nodiscard]] std::optional<std::uint32_t> checksum(std::uint32_t id) const noexcept {
    if constexpr (bounces) {
      if (flights_[id].sum.bytes != 0) return flights_[id].sum.crc;
    }
    return {};
  }

  [[nodiscard]] bool ready(std::uint32_t id) const noexcept {
    const flight& f = flights_[id];
    return all_ready(std::span(f.fences).first(f.count));
  }

  /// Waits, and returns the outcome: of several failures the first, except that `errc::completion_lost` comes
  /// before others. Call it once. If a fence throws, the exception follows after the wait for all fences.
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

  /// Raises the transfer's urgency, because a call waits for it now.
  void hurry(std::uint32_t id) noexcept {
    const flight& f = flights_[id];
    for (std::size_t i = 0; i < f.count; ++i)
      link_.promote(f.fences[i], transfer::urgency::demand);
  }

  /// Advances a queue that moves only inside calls.
  void poll() noexcept { link_.poll(); }

 private:
  struct no_checksum {};
  struct flight {
    std::array<fence_type, dirty_ranges::capacity> fences{};
    std::size_t count = 0;
    LLMMEM_NO_UNIQUE_ADDRESS std::conditional_t<bounces, bounce_checksum, no_checksum> sum{};
  };

  [[nodiscard]] bounce_checksum* expect_checksum(std::uint32_t id, std::uint64_t bytes) noexcept {
    if constexpr (bounces) {
      flights_[id].sum.bytes = bytes;
      if (bytes != 0) return &flights_[id].sum;
    }
    return nullptr;
  }

  template <class Range>
  [[nodiscard]] static Range sub(const Range& range, const byte_interval& part) noexcept {
    return {range.data + part.begin, part.end - part.begin};
  }

  template <class Begin>
  result<void> each_part(std::uint32_t id, std::span<const byte_interval> parts, Begin begin) {
    flight& f = flights_[id];
    f.count = 0;
    try {
      for (const byte_interval& part : parts) {
        result<fence_type> begun = begin(part);
        if (begun.code() == errc::table_full && f.count != 0) {
          // If the queue is too small for all parts at once, they go one after another.
          if (const result<void> before = settled(id); !before) return before;
          begun = begin(part);
        }
        if (!begun) {
          // The parts that have begun still access both copies.
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

  /// As `settled` for the remaining parts; swallows exceptions, because the first wait has thrown already.
  bool quieted(std::uint32_t id) noexcept {
    try {
      return settled(id).has_value();
    } catch (...) {
      return false;
    }
  }

  link_type link_;
  std::vector<flight> flights_;
};

/// The edges between neighbours of `Spaces`, fastest first. `Index` is 0 to the number of edges.
template <class Traits, class Indices, class... Spaces>
struct tier_edges;
template <class Traits, std::size_t... Index, class... Spaces>
struct tier_edges<Traits, std::index_sequence<Index...>, Spaces...> {
  template <std::size_t At>
  using space = std::tuple_element_t<At, std::tuple<Spaces...>>;
  template <std::size_t At>
  using edge = tier_edge<Traits, space<At>, space<At + 1>>;
  using type = std::tuple<edge<Index>...>;
  using setup = std::tuple<typename edge<Index>::setup...>;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
