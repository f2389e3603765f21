/// @file
/// S3-FIFO eviction.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ghost_table.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem::inline v0 {

/// Evicts early what was not used twice soon after it came in; keeps the rest by a clock.
///
/// Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023. New
/// entries join the *small* queue; an entry that came to its old end is evicted and leaves a ghost, unless it
/// was used twice or more meanwhile: then it goes on to the *main* queue with its uses forgotten. The main
/// queue gives an entry that comes to its old end as many more passes as it was used since, three at most.
/// What returns while its ghost is remembered, by `access_hint::content`, joins the main queue at once. The
/// small queue gives the victim while it has its tenth of the capacity, the main queue otherwise. Right where
/// most blocks are used once, as one-shot prompts are.
///
/// Ghosts are as many as the main queue may have entries, and one: room is made before it is known what comes
/// in, so the eviction may not cost the newcomer its own ghost.
///
/// Pinned entries count in their queue's size and keep their place, taken at the first `unpin`; those that an
/// eviction passes over are put aside, and are their queue's oldest when they are unpinned. When the queue
/// whose turn it is has no candidate, the other one gives.
///
/// @par Complexity   O(1), `victim` and `evict` amortised over evictions of what `victim` names: they walk
/// over
///      what that eviction moves on or puts aside, at most one entry for each use and each `pin` counted. 50
///      to 64 bytes a slot, ghosts included, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class s3fifo_eviction {
 public:
  explicit s3fifo_eviction(slot_count capacity, const metadata_source& source = {})
      : queues_(capacity, source, "s3fifo_eviction"),
        contents_(to_number(capacity), source, "s3fifo_eviction"),
        entries_(to_number(capacity), entry{}, source, "s3fifo_eviction"),
        small_share_(std::max<std::uint64_t>(to_number(capacity) / 10, 1)),
        ghosts_(to_number(capacity) - to_number(capacity) / 10 + 1, source, "s3fifo_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    const bool returns = ghosts_.take(hint.content).has_value();
    contents_[to_index(slot)] = hint.content;
    at(slot) = {.queue = returns ? main_queue : small_queue};
    if (!returns) ++small_size_;
  }

  void touch(slot_id slot, const access_hint& = {}) noexcept {
    entry& e = at(slot);
    const bool was_candidate = e.is_candidate;
    withdraw(e);
    if (e.uses < most_uses) ++e.uses;
    if (was_candidate) enter(e);
  }

  void pin(slot_id slot) noexcept { withdraw(at(slot)); }

  void unpin(slot_id slot) noexcept {
    entry& e = at(slot);
    if (!e.has_place) {
      queues_.push_back(e.queue, slot);
      e.has_place = true;
    } else if (!queues_.contains(slot)) {  // put aside
      queues_.push_front(e.queue, slot);
    }
    enter(e);
  }

  void erase(slot_id slot) noexcept {
    entry& e = at(slot);
    withdraw(e);
    if (queues_.contains(slot)) queues_.remove(e.queue, slot);
    if (e.queue == small_queue) --small_size_;
    e.queue = unknown;
  }

  /// As `erase`; an entry of the small queue leaves a ghost, and of the victim's queue all that was passed
  /// over on the way to it has moved on.
  void evict(slot_id slot) noexcept {
    if (victim() == slot) make_way_to(slot);
    const bool was_small = at(slot).queue == small_queue;
    erase(slot);
    if (was_small) ghosts_.push(0, contents_[to_index(slot)]);
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const bool main_gives = main_candidates() != 0;
    const std::uint8_t fewest = fewest_uses();
    if (is_small_turn()) {
      if (small_by_worth_[cold] != 0) return first_small(cold);
      // All that is in the small queue goes on to the main one: behind what stands there, unused.
      if (small_by_worth_[hot] != 0 && (!main_gives || fewest != 0)) return first_small(hot);
    }
    if (!main_gives) return std::nullopt;
    return first_of(main_queue, [&](const entry& e) noexcept { return uses_left(e) == fewest; });
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept {
    return entries_[to_index(slot)].is_candidate;
  }
  [[nodiscard]] slot_count capacity() const noexcept { return queues_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return queues_.bytes() + contents_.bytes() + entries_.bytes() + ghosts_.bytes();
  }

 private:
  static constexpr std::uint8_t small_queue = 0;
  static constexpr std::uint8_t main_queue = 1;
  static constexpr std::uint8_t unknown = 2;
  static constexpr std::uint8_t most_uses = 3;
  static constexpr std::uint8_t enough_uses = 2;  // to go on from the small queue
  // What the small queue's candidates are worth: hot ones may go on.
  static constexpr std::size_t cold = 0;
  static constexpr std::size_t hot = 1;

  struct entry {
    std::uint8_t queue = unknown;
    std::uint8_t uses = 0;  // of a candidate in the main queue: see uses_left
    bool is_candidate = false;
    bool has_place = false;  // in its queue, or put aside
  };

  [[nodiscard]] entry& at(slot_id slot) noexcept { return entries_[to_index(slot)]; }
  [[nodiscard]] const entry& at(slot_id slot) const noexcept { return entries_[to_index(slot)]; }

  // Whole rounds of the main queue, which take a use from each candidate, are counted and not carried out:
  // the candidates' uses are kept as the remainder of uses and rounds by 4.
  [[nodiscard]] static std::uint8_t remainder(std::uint64_t x) noexcept {
    return static_cast<std::uint8_t>(x % (most_uses + 1));
  }
  [[nodiscard]] std::uint8_t uses_left(const entry& e) const noexcept {
    return remainder(e.uses + std::uint64_t{most_uses + 1} - remainder(rounds_));
  }

  void enter(entry& e) noexcept {
    e.is_candidate = true;
    if (e.queue == main_queue) e.uses = remainder(e.uses + rounds_);
    ++counter_of(e);
  }
  void withdraw(entry& e) noexcept {
    if (!e.is_candidate) return;
    --counter_of(e);
    if (e.queue == main_queue) e.uses = uses_left(e);
    e.is_candidate = false;
  }
  [[nodiscard]] std::uint64_t& counter_of(const entry& e) noexcept {
    return e.queue == main_queue ? main_by_uses_[e.uses] : small_by_worth_[worth(e)];
  }
  [[nodiscard]] static std::size_t worth(const entry& e) noexcept {
    return e.uses < enough_uses ? cold : hot;
  }

  [[nodiscard]] std::uint64_t main_candidates() const noexcept {
    std::uint64_t all = 0;
    for (const std::uint64_t count : main_by_uses_)
      all += count;
    return all;
  }
  /// Of the main queue's candidates; `most_uses` if there are none.
  [[nodiscard]] std::uint8_t fewest_uses() const noexcept {
    std::uint8_t uses = 0;
    while (uses < most_uses && main_by_uses_[remainder(uses + rounds_)] == 0)
      ++uses;
    return uses;
  }
  [[nodiscard]] bool is_small_turn() const noexcept {
    return small_size_ >= small_share_ || main_candidates() == 0;
  }

  /// The oldest candidate of `queue` that is `wanted`. @pre there is one.
  template <class Wanted>
  [[nodiscard]] slot_id first_of(std::uint8_t queue, Wanted&& wanted) const noexcept {
    auto next = queues_.front(queue);
    while (!at(*next).is_candidate || !wanted(at(*next)))
      next = queues_.after(*next);
    return *next;
  }
  [[nodiscard]] slot_id first_small(std::size_t of_worth) const noexcept {
    return first_of(small_queue, [&](const entry& e) noexcept { return worth(e) == of_worth; });
  }

  /// Puts a candidate at the new end of the main queue.
  void go_on(slot_id slot, std::uint8_t uses) noexcept {
    entry& e = at(slot);
    withdraw(e);
    queues_.remove(e.queue, slot);
    if (e.queue == small_queue) --small_size_;
    e.queue = main_queue;
    e.uses = uses;
    queues_.push_back(main_queue, slot);
    enter(e);
  }

  /// Empties `queue` up to `last`, or to its end: candidates `pass`, the pinned are put aside.
  template <class Pass>
  void walk(std::uint8_t queue, std::optional<slot_id> last, Pass&& pass) noexcept {
    for (auto next = queues_.front(queue); next && next != last; next = queues_.front(queue)) {
      if (at(*next).is_candidate) {
        pass(*next);
      } else {
        queues_.remove(queue, *next);
      }
    }
  }

  /// Moves on what the queues pass before they give the victim.
  void make_way_to(slot_id slot) noexcept {
    const bool whole_small = small_by_worth_[cold] == 0 && is_small_turn();
    if (at(slot).queue == small_queue || whole_small) {
      walk(small_queue, whole_small ? std::nullopt : std::optional(slot),
           [this](slot_id passed) noexcept { go_on(passed, 0); });
    }
    if (at(slot).queue != main_queue) return;
    // Whole rounds first, which change no order; then the part of one.
    rounds_ += uses_left(at(slot));
    walk(main_queue, slot, [this](slot_id passed) noexcept {
      go_on(passed, static_cast<std::uint8_t>(uses_left(at(passed)) - 1));
    });
  }

  detail::slot_lists<2> queues_;                 // small and main, oldest first, the pinned among them
  detail::fixed_array<std::uint64_t> contents_;  // of every known slot
  detail::fixed_array<entry> entries_;
  std::uint64_t small_share_;
  std::uint64_t small_size_ = 0;                   // with those put aside
  std::array<std::uint64_t, 2> small_by_worth_{};  // candidates
  std::array<std::uint64_t, most_uses + 1> main_by_uses_{};
  std::uint64_t rounds_ = 0;
  detail::ghost_table<1> ghosts_;  // oldest first
};

static_assert(eviction_policy<s3fifo_eviction> && remembers_evictions<s3fifo_eviction>);

}  // namespace llmmem::inline v0
