/// @file
/// Which request of a `batch_scheduler` comes first: by arrival, by priority, by deadline, or by the share
/// that its tenant has received.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
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
///     check(of)                whether a request of this class may be submitted, or why not
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
      { seen.check(a.of) } noexcept -> std::same_as<result<void>>;
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

  [[nodiscard]] static result<void> check(const request_class&) noexcept { return {}; }
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

/// Higher priorities first.
///
/// *Starvation*: with a `head_start`, a request of priority p counts as if it had arrived p x `head_start`
/// submissions earlier. So at most (q - p) x `head_start` requests of priority q that arrive after it are
/// admitted before it. Without one (`unlimited`, the default) the order is strict: a request waits as long as
/// there are requests of higher priority.
class by_priority : public paging::static_order {
 public:
  constexpr by_priority() noexcept = default;
  /// @param head_start  submissions for each step of priority.
  explicit constexpr by_priority(std::uint64_t head_start) noexcept : head_start_(head_start) {}

  [[nodiscard]] constexpr bool precedes(const ranked_request& a, const ranked_request& b) const noexcept {
    if (a.of.priority == b.of.priority) return a.arrival < b.arrival;
    if (a.of.priority < b.of.priority) return !precedes(b, a);
    if (a.arrival < b.arrival) return true;
    const std::uint64_t steps = a.of.priority - b.of.priority;
    return head_start_ > unlimited / steps || a.arrival - b.arrival < steps * head_start_;
  }

 private:
  std::uint64_t head_start_ = unlimited;
};

static_assert(scheduling_order<by_priority>);

/// The earliest deadline first (EDF); requests without a deadline come last, by arrival.
///
/// *Starvation*: a request is overtaken only by requests with earlier deadlines. If no client gives a
/// deadline that has passed already, none that is submitted at or after a request's deadline overtakes it. A
/// request without a deadline waits as long as there are requests with one.
struct earliest_deadline_first : paging::static_order {
  [[nodiscard]] static constexpr bool precedes(const ranked_request& a, const ranked_request& b) noexcept {
    if (a.of.deadline != b.of.deadline) return a.of.deadline < b.of.deadline;
    return a.arrival < b.arrival;
  }
};

static_assert(scheduling_order<earliest_deadline_first>);

/// What a tenant pays for a token.
struct token_prices {
  std::uint32_t prompt = 1;
  std::uint32_t answer = 2;
};

/// Fair shares among tenants: the tenant that has received the least service comes first (virtual token
/// counter).
///
/// A tenant pays for each token that is computed for it the first time: tokens found in the cache and tokens
/// computed again after a preemption are free. A tenant that returns after a time without waiting requests
/// starts at the counter of the waiting tenant that has received the least, so that it saves up no credit.
///
/// *Starvation*: while two tenants with equal shares both have waiting requests, the service that one
/// receives exceeds that of the other by at most twice `max_running` x (the price of the longest prompt + the
/// price of the longest answer). So a tenant waits for a bounded amount of others' work, regardless of how
/// many requests they submit. Requests of one tenant are served by arrival.
///
/// *No deadlock*: the order changes while requests run, so the scheduler keeps the running request that was
/// first once in first place until it ends.
///
/// @par Complexity   O(1) for each call, O(tenants) for a submission; 24 bytes for each tenant.
/// @par Thread safety   one caller at a time.
/// @par Errors   the constructor throws `length_error` for no tenants, and `out_of_memory`.
/// @par Source   Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). There the whole
///   prompt is paid on admission; here each part when it is computed.
class fair_shares {
 public:
  static constexpr bool is_static = false;
  static constexpr bool is_by_arrival = false;

  explicit fair_shares(std::uint32_t tenants, token_prices prices = {}, const metadata_source& metadata = {})
      : tenants_(checked(tenants), account{}, metadata, "fair_shares: tenants"), prices_(prices) {}

  /// Sets the share of a tenant, 1 to `max_share`: with share 2 it receives twice what a tenant with share 1
  /// receives.
  /// @return `errc::out_of_range` for another share, or a tenant that does not exist.
  result<void> set_share(std::uint32_t tenant, std::uint32_t share) noexcept {
    if (const auto exists = check({.tenant = tenant}); !exists) return exists;
    if (share == 0 || share > max_share)
      return failure{errc::out_of_range, 0, share, max_share, "fair_shares: share, from 1"};
    tenants_[tenant].share = share;
    return {};
  }
  static constexpr std::uint32_t max_share = 65'536;

  [[nodiscard]] std::uint32_t tenants() const noexcept { return static_cast<std::uint32_t>(tenants_.size()); }
  /// The price of the service that a tenant has received, divided by its share, in units of 1 / `max_share`,
  /// with what returning tenants were raised by. @pre `tenant` < `tenants()`
  [[nodiscard]] std::uint64_t counter(std::uint32_t tenant) const noexcept {
    return tenants_[tenant].counter;
  }

  // What the scheduler asks, see `scheduling_order`

  [[nodiscard]] result<void> check(const request_class& of) const noexcept {
    if (of.tenant < tenants_.size()) return {};
    return failure{errc::out_of_range, 0, of.tenant, tenants_.size() - 1, "fair_shares: tenant"};
  }
  [[nodiscard]] bool precedes(const ranked_request& a, const ranked_request& b) const noexcept {
    const std::uint64_t first = tenants_[a.of.tenant].counter;
    const std::uint64_t second = tenants_[b.of.tenant].counter;
    return first != second ? first < second : a.arrival < b.arrival;
  }
  void arrived(const ranked_request& request) noexcept {
    account& comes = tenants_[request.of.tenant];
    if (comes.waiting != 0) return;
    std::uint64_t least = unlimited;
    for (std::size_t i = 0; i < tenants_.size(); ++i) {
      if (tenants_[i].waiting != 0 && tenants_[i].counter < least) least = tenants_[i].counter;
    }
    if (least == unlimited) least = tenants_[last_unqueued_].counter;
    if (comes.counter < least) comes.counter = least;
  }
  void queued(const ranked_request& request) noexcept { ++tenants_[request.of.tenant].waiting; }
  void unqueued(const ranked_request& request) noexcept {
    --tenants_[request.of.tenant].waiting;
    last_unqueued_ = request.of.tenant;
  }
  void computed(const ranked_request& request, std::uint64_t prompt, std::uint64_t answer) noexcept {
    account& served = tenants_[request.of.tenant];
    served.counter += (prompt * prices_.prompt + answer * prices_.answer) * max_share / served.share;
  }

 private:
  struct account {
    std::uint64_t counter = 0;
    std::uint64_t waiting = 0;
    std::uint32_t share = 1;
  };

  [[nodiscard]] static std::uint64_t checked(std::uint32_t tenants) {
    if (tenants == 0) throw length_error("fair_shares: 0 tenants; at least 1 is needed");
    return tenants;
  }

  detail::fixed_array<account> tenants_;
  token_prices prices_;
  std::uint32_t last_unqueued_ = 0;
};

static_assert(scheduling_order<fair_shares>);

}  // namespace v0
}  // namespace llmmem
