/// @file
/// Which request of a `batch_scheduler` comes first: by arrival, by priority, by deadline, or by the share
/// that its tenant has received.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// What a client says about a request. An order reads the members that it needs.
struct request_class {
  std::uint32_t priority = 0;          ///< a higher one is more urgent
  std::uint32_t tenant = 0;            ///< on whose account the request runs
  std::uint64_t deadline = unlimited;  ///< in any unit of the client's clock

  friend constexpr bool operator==(const request_class&, const request_class&) noexcept = default;
};

/// A request as an order sees it. No two requests of a scheduler have the same arrival.
struct ranked_request {
  std::uint64_t arrival = 0;  ///< 1 for the first request that was submitted
  request_class of{};
};

/// A type that decides which request of a `batch_scheduler` comes first.
///
///     precedes(a, b)           whether `a` comes before `b`: a strict total order at any moment, so arrivals
///                              decide between equals
///     accepts(of)              whether a request of this class may be submitted
///     arrived(a)               a request was submitted; called before `queued`
///     queued(a), unqueued(a)   a request begins or ceases to wait
///     computed(a, prompt, answer)  tokens of a request are computed for the first time
///     is_static                whether `precedes` gives the same answer for two requests at all times
///     is_by_arrival            whether `precedes` compares arrivals only; the scheduler then searches
///     nothing
template <class O>
concept scheduling_order =
    std::movable<O> && requires(O& order, const O& seen, const ranked_request& a, std::uint64_t tokens) {
      { O::is_static } -> std::convertible_to<bool>;
      { O::is_by_arrival } -> std::convertible_to<bool>;
      { seen.precedes(a, a) } noexcept -> std::same_as<bool>;
      { seen.accepts(a.of) } noexcept -> std::same_as<bool>;
      { order.arrived(a) } noexcept;
      { order.queued(a) } noexcept;
      { order.unqueued(a) } noexcept;
      { order.computed(a, tokens, tokens) } noexcept;
    };

namespace paging {

/// An order that depends on nothing but the requests: a base for orders.
struct static_order {
  static constexpr bool is_static = true;
  static constexpr bool is_by_arrival = false;

  [[nodiscard]] static constexpr bool accepts(const request_class&) noexcept { return true; }
  static constexpr void arrived(const ranked_request&) noexcept {}
  static constexpr void queued(const ranked_request&) noexcept {}
  static constexpr void unqueued(const ranked_request&) noexcept {}
  static constexpr void computed(const ranked_request&, std::uint64_t, std::uint64_t) noexcept {}
};

}  // namespace paging

/// First come, first served.
///
/// *Starvation*: none; a request waits only for those that arrived before it.
struct first_come_first_served : paging::static_order {
  static constexpr bool is_by_arrival = true;

  [[nodiscard]] static constexpr bool precedes(const ranked_request& a, const ranked_request& b) noexcept {
    return a.arrival < b.arrival;
  }
};

static_assert(scheduling_order<first_come_first_served>);

}  // namespace v0
}  // namespace llmmem
