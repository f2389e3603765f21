/// @file
/// Eviction that knows the entries that waiting requests will use.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/slot_heap.hpp>
#include <llmmem/eviction/lru.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The next use of an entry, in an order with the furthest first.
struct expectation {
  std::uint64_t next_use = access_hint::never;
  std::uint64_t last = 0;  // number of the last event, so that no two slots rank equal

  friend bool operator<(const expectation& a, const expectation& b) noexcept {
    return a.next_use != b.next_use ? a.next_use > b.next_use : a.last < b.last;
  }
};

}  // namespace detail

/// Evicts entries that none of the next `n` requests is known to use, in the order of `Base`. If there are
/// none, evicts entries that these requests use, those of the furthest request first.
///
/// Requests are numbered as they are queued. `expect(slot, r)`, or `access_hint::next_use` of an insert or a
/// touch, declares that request r uses the entry; `advance(r)` declares that request r is now at the head of
/// the queue. A use counts while r is one of the n requests from the head on: a use further ahead waits until
/// the head comes near; a use that the head has passed lapses. So an engine that matches its waiting requests
/// against the cache before it serves them keeps the entries that they will hit (MIN with a horizon). With an
/// empty queue the policy is `Base`.
///
/// `Base` sees an expected entry as in use: pinned when the expectation begins, unpinned when it lapses. A
/// touch without a next use ends the expectation, because the use has come. `advance` counts requests and
/// does not reach `Base`, whose time may differ: advance `base()` for that.
///
/// @tparam n  requests, from the head on; at least 1.
/// @par Complexity   in addition to `Base`: insert, touch, pin, unpin, erase, expect O(log slots); advance
///      the same for each entry whose expectation begins or lapses; victim O(1). 40 bytes a slot in addition
///      to `Base`'s, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`, and `Base`'s; nothing else fails.
template <std::uint64_t n, eviction_policy Base = lru_eviction>
class queue_lookahead {
 public:
  static_assert(n != 0, "a lookahead of no requests is Base itself");

  explicit queue_lookahead(slot_count capacity, const metadata_source& source = {})
      : base_(capacity, source),
        expected_(capacity, source, "queue_lookahead"),
        changes_(capacity, source, "queue_lookahead") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    base_.insert(slot, hint);
    expect(slot, hint.next_use);
  }

  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    base_.touch(slot, hint);
    expected_.set_rank(slot, {hint.next_use, next_++});
    place(slot);
  }

  void pin(slot_id slot) noexcept {
    if (expected_.contains(slot)) {
      expected_.remove(slot);
    } else {
      base_.pin(slot);
    }
  }

  void unpin(slot_id slot) noexcept {
    expected_.set_rank(slot, {next_use(slot), next_++});
    if (is_near(next_use(slot))) {
      expected_.push(slot);
    } else {
      base_.unpin(slot);
    }
  }

  void erase(slot_id slot) noexcept {
    forget(slot);
    base_.erase(slot);
  }
  void evict(slot_id slot) noexcept {
    forget(slot);
    detail::evict(base_, slot);
  }

  void expect(slot_id slot, std::uint64_t request) noexcept {
    expected_.set_rank(slot, {request, expected_.rank(slot).last});
    place(slot);
  }

  /// Declares that request `head` is served next. Does nothing for a request before the present head.
  void advance(std::uint64_t head) noexcept {
    head_ = std::max(head_, head);
    for (auto due = changes_.front(); due && changes_.rank(*due) <= head_; due = changes_.front())
      place(*due);
  }

  void retain(slot_id slot, retention keep) noexcept
    requires retains<Base>
  {
    base_.retain(slot, keep);
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const auto unexpected = base_.victim();
    return unexpected ? unexpected : expected_.front();
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept {
    return expected_.contains(slot) || base_.is_candidate(slot);
  }
  [[nodiscard]] slot_count capacity() const noexcept { return base_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return base_.metadata_bytes() + expected_.bytes() + changes_.bytes();
  }

  [[nodiscard]] const Base& base() const noexcept { return base_; }
  [[nodiscard]] Base& base() noexcept { return base_; }

 private:
  [[nodiscard]] std::uint64_t next_use(slot_id slot) const noexcept { return expected_.rank(slot).next_use; }
  [[nodiscard]] bool is_near(std::uint64_t request) const noexcept {
    return request != access_hint::never && request >= head_ && request - head_ < n;
  }

  /// Puts a candidate where its next use requires, and records the head at which that changes.
  void place(slot_id slot) noexcept {
    const std::uint64_t request = next_use(slot);
    const bool soon = is_near(request);
    if (soon && base_.is_candidate(slot)) {
      base_.pin(slot);
      expected_.push(slot);
    } else if (!soon && expected_.contains(slot)) {
      expected_.remove(slot);
      base_.unpin(slot);
    }
    changes_.remove(slot);
    if (request == access_hint::never || request < head_) return;
    changes_.set_rank(slot, soon ? request + 1 : request - n + 1);
    changes_.push(slot);
  }

  void forget(slot_id slot) noexcept {
    expected_.remove(slot);
    changes_.remove(slot);
  }

  Base base_;
  detail::slot_heap<detail::expectation> expected_;  // candidates near their use; ranks of every known slot
  detail::slot_heap<std::uint64_t> changes_;         // by the head at which a use comes near or lapses
  std::uint64_t head_ = 0;
  std::uint64_t next_ = 0;
};

static_assert(eviction_policy<queue_lookahead<8>> && expects_uses<queue_lookahead<8>> &&
              keeps_time<queue_lookahead<8>>);

}  // namespace v0
}  // namespace llmmem
