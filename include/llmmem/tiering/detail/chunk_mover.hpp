/// @file
/// Decides which chunks of a `tiered_buffer` move, and when: up for a lease or in advance, down to make
/// space, on a call, or to be written through.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/named_range.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/detail/slot_queue.hpp>
#include <llmmem/tiering/detail/tier_steps.hpp>
#include <llmmem/tiering/detail/transfer_engine.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The mover decides, the stack knows which copy has which place, and the engine moves bytes. A movement that
/// cannot begin at once is `attempt::blocked` by a transfer; the functions with `patience`, and `evict` and
/// `flush`, wait for that transfer. Two queues hold the movements that have not begun: prefetches, and copies
/// to be written through.
///
/// @par Complexity      an attempt O(1) for each copy that must leave; `progress` O(prefetches + transfers).
///                      No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          values; the engine notes a failure that no call waits for. Exceptions of a space pass
///                      through.
template <class Traits, class... Tiers>
class chunk_mover {
 public:
  using engine_type = transfer_engine<Traits, Tiers...>;
  using stack_type = typename engine_type::stack_type;
  using table_type = typename engine_type::table_type;
  using record_type = typename engine_type::record_type;
  static constexpr std::size_t tiers = engine_type::tiers;
  static constexpr std::size_t last = engine_type::last;

  chunk_mover(table_type& chunks, stack_type& stack, engine_type& engine, const tiered_options& options)
      : chunks_(chunks),
        stack_(stack),
        engine_(engine),
        wanted_(options.max_chunks, options.metadata, "tiered_buffer: prefetches"),
        due_(options.max_chunks, options.metadata, "tiered_buffer: writes through") {}
  chunk_mover(const chunk_mover&) = delete;
  chunk_mover& operator=(const chunk_mover&) = delete;
  /// Waits for transfers in flight.
  ~chunk_mover();

  /// @name For a lease
  /// @{ Waits until the chunk is in tier 0. If its contents are not needed, it only gets a place there.
  [[nodiscard]] result<void> make_resident(std::uint32_t slot, bool needs_contents, tiering::patience wait);
  /// Gives `fresh` a place in tier 0, waiting until patience ends.
  /// @param held  the record whose copy in tier 0 stays there meanwhile, or `no_index`.
  [[nodiscard]] result<void> await_top_place(tier_copy& fresh, std::uint64_t bytes, std::uint32_t held,
                                             tiering::patience wait, std::uint64_t began_ns);
  /// Waits for the chunk's transfer, if it has one, and returns its outcome.
  result<void> await_quiet(std::uint32_t slot) {
    const std::uint32_t id = chunks_[slot].transfer;
    return id == no_index ? result<void>{} : wait_for(id, tiering::wait_complete, engine_.now_ns());
  }
  /// As `await_quiet`, but notes a failure instead of returning it.
  void quiet(std::uint32_t slot) {
    if (const result<void> ended = await_quiet(slot); !ended) engine_.note(ended.error());
  }
  /// Notes which transfers have ended.
  void note_ended() {
    if (!engine_.is_idle()) complete_ready();
  }
  /// Notes that a lease that wrote has ended.
  void written(std::uint32_t slot) noexcept {
    if (stack_.is_due(chunks_[slot], 0)) mark_due(slot);
  }
  /// Begins to write through the copies that are due, as far as possible without waiting.
  /// @param except  a chunk that is about to change, or `no_index`.
  void write_through_due(std::uint32_t except) {
    if (!due_.empty()) begin_due(except);
  }
  /// @}

  /// @name On a call
  /// @{
  void prefetch(std::uint32_t slot);
  [[nodiscard]] result<void> evict(std::uint32_t slot);
  [[nodiscard]] result<void> flush(std::uint32_t slot);
  [[nodiscard]] result<void> flush();
  void progress();
  [[nodiscard]] tiering::step_outcome execute(std::uint32_t slot, plan_operation operation, std::size_t tier);
  [[nodiscard]] tiering::step_blocker step_blocker() const noexcept { return step_blocker_; }
  /// Removes the chunk from the queue of prefetches.
  void unqueue_prefetch(std::uint32_t slot) noexcept;
  /// Cancels all movement of the chunk, and frees its copies in all tiers. @pre no lease and no transfer.
  void forget_contents(std::uint32_t slot) noexcept;
  /// @}

  void add_to(tiered_stats<tiers>& now) const noexcept {
    now.metadata_bytes += wanted_.bytes() + due_.bytes();
  }
  void audit(std::vector<std::string>& found) const;

 private:
  template <std::size_t Index>
  class skip_reason;

  template <std::size_t Index>
  [[nodiscard]] attempt make_room(tier_copy& into, std::uint64_t bytes, transfer::urgency how);
  template <std::size_t Index>
  [[nodiscard]] attempt begin_store(std::uint32_t slot, bool then_drops, transfer::urgency how);
  [[nodiscard]] attempt begin_store(std::size_t tier, std::uint32_t slot, transfer::urgency how);
  template <std::size_t Index>
  void let_go(std::uint32_t slot, transfer::urgency how);
  bool cancel_reservations() noexcept;
  [[nodiscard]] attempt advance(std::uint32_t slot, bool needs_contents, transfer::urgency how);
  template <std::size_t Index>
  [[nodiscard]] attempt hop(std::uint32_t slot, transfer::urgency how, bool& has_moved);
  template <std::size_t Index>
  [[nodiscard]] tiering::step_outcome execute_fetch(std::uint32_t slot);
  template <std::size_t Index>
  [[nodiscard]] tiering::step_outcome execute_store(std::uint32_t slot, plan_operation operation);
  result<void> wait_for(std::uint32_t id, tiering::patience wait, std::uint64_t began_ns);
  [[nodiscard]] result<void> wait_out(std::uint32_t id, std::uint32_t slot);
  result<void> complete(std::uint32_t id);
  void complete_ready();
  void begin_due(std::uint32_t except);
  void begin_writing_all();
  void mark_due(std::uint32_t slot) noexcept;
  void want_first(std::uint32_t slot) noexcept;

  table_type& chunks_;
  stack_type& stack_;
  engine_type& engine_;
  slot_queue wanted_;  // prefetches
  slot_queue due_;     // writes through
  tiering::step_blocker step_blocker_ = tiering::step_blocker::none;
};

/// Copies that cannot leave for now, and the reason of the first. While this list lives, the eviction policy
/// does not offer them again.
template <class Traits, class... Tiers>
template <std::size_t Index>
class chunk_mover<Traits, Tiers...>::skip_reason {
 public:
  explicit skip_reason(stack_type& stack) noexcept : stack_(stack) {}
  skip_reason(const skip_reason&) = delete;
  skip_reason& operator=(const skip_reason&) = delete;
  ~skip_reason() {
    while (count_ != 0)
      stack_.unpin(nth<Index>, slots_[--count_]);
  }
  /// Returns false if there are too many to continue.
  [[nodiscard]] bool add(std::uint32_t slot, const failure& why) noexcept {
    if (count_ == slots_.size()) return false;
    if (count_ == 0) why_ = why;
    slots_[count_++] = slot;
    stack_.pin(nth<Index>, slot);
    return true;
  }
  [[nodiscard]] failure why(const failure& otherwise) const noexcept {
    return count_ == 0 ? otherwise : why_;
  }

 private:
  stack_type& stack_;
  std::array<std::uint32_t, 8> slots_{};
  std::size_t count_ = 0;
  failure why_;
};

/// Gives `into` a place in tier Index: drops clean copies there and begins to write back dirty ones.
///
/// If a copy's write cannot begin, the next copy takes its turn, so no other chunk's lease fails for it.
///
/// A prefetch waits rather than take the space of prefetched, unused chunks or the places that other
/// prefetches keep.
template <class Traits, class... Tiers>
template <std::size_t Index>
attempt chunk_mover<Traits, Tiers...>::make_room(tier_copy& into, std::uint64_t bytes,
                                                 transfer::urgency how) {
  constexpr auto tier = nth<Index>;
  skip_reason<Index> unable(stack_);
  for (;;) {
    const result<void> had = stack_.take(tier, into, bytes);
    if (had) {
      into.at = Index == last ? residence::absent : residence::reserved;
      return {};
    }
    if constexpr (Index == last) {
      return attempt::failed(had.error());
    } else {
      const bool can_be_had = had.code() == errc::out_of_bytes || had.code() == errc::table_full;
      if (!can_be_had || stack_.granted_for(tier, bytes) > stack_.most_bytes(tier))
        return attempt::failed(had.error());
      const std::optional<slot_id> victim = stack_.victim(tier);
      const bool enough_leaves = stack_.leaving(Index) >= bytes;
      if (!victim || enough_leaves) {
        if (const std::uint32_t on = engine_.touching(Index); on != no_index) return attempt::blocked(on);
        if (how == transfer::urgency::prefetch) return attempt::blocked(no_index);
        if (cancel_reservations()) continue;
        return attempt::failed(unable.why(had.error()));
      }
      const std::uint32_t slot = to_index(*victim);
      if (how == transfer::urgency::prefetch && chunks_[slot].copies[Index].awaited)
        return attempt::blocked(no_index);
      if (is_clean(chunks_[slot], Index)) {
        let_go<Index>(slot, how);
        continue;
      }
      const attempt left = begin_store<Index>(slot, true, how);
      if (left.how == attempt::kind::failed && unable.add(slot, left.why)) continue;
      if (!left.is_done()) return left;
    }
  }
}

/// Frees places that prefetches keep and to which no transfer is on its way. Returns whether there were any.
template <class Traits, class... Tiers>
bool chunk_mover<Traits, Tiers...>::cancel_reservations() noexcept {
  bool any = false;
  for (std::uint32_t i = 0; i < wanted_.size(); ++i)
    any = stack_.release_reservations(chunks_[wanted_[i]]) || any;
  return any;
}

/// Begins to copy a chunk's dirty bytes from tier Index to the one below.
template <class Traits, class... Tiers>
template <std::size_t Index>
attempt chunk_mover<Traits, Tiers...>::begin_store(std::uint32_t slot, bool then_drops,
                                                   transfer::urgency how) {
  const attempt ready = engine_.can_begin(nth<Index>);
  if (!ready.is_done()) return ready;
  record_type& c = chunks_[slot];
  tier_copy& beneath = c.copies[Index + 1];
  // A transfer of this chunk between lower tiers may have begun, and a chunk has one at a time.
  if (c.transfer != no_index) return attempt::blocked(c.transfer);
  if (beneath.granted == 0) {
    const attempt room = make_room<Index + 1>(beneath, stack_.place_bytes(nth<Index + 1>, c.bytes), how);
    if (!room.is_done()) return room;
    // The space may come from a write-back that took the last transfer, or that was the chunk's own.
    const attempt still =
        c.transfer == no_index ? engine_.can_begin(nth<Index>) : attempt::blocked(c.transfer);
    if (!still.is_done()) {
      if constexpr (Index + 1 != last) stack_.give_back(nth<Index + 1>, beneath);
      return still;
    }
  }
  return engine_.begin_store(nth<Index>, slot, then_drops, how);
}

/// As above, for any tier except the last; the copy above stays.
template <class Traits, class... Tiers>
attempt chunk_mover<Traits, Tiers...>::begin_store(std::size_t tier, std::uint32_t slot,
                                                   transfer::urgency how) {
  attempt begun;
  with_index<last>(tier,
                   [&](auto index) { begun = this->template begin_store<index.value>(slot, false, how); });
  return begun;
}

/// Removes a clean copy: at once, or, if the copy is demoted, when the tier below has it. @pre the copy is
/// not pinned.
template <class Traits, class... Tiers>
template <std::size_t Index>
void chunk_mover<Traits, Tiers...>::let_go(std::uint32_t slot, transfer::urgency how) {
  using write_type = typename stack_type::template tier_type<Index>::write_type;
  if constexpr (Index + 1 < last && demotes<write_type>()) {
    record_type& c = chunks_[slot];
    tier_copy& beneath = c.copies[Index + 1];
    if (c.transfer == no_index && beneath.at == residence::absent &&
        engine_.can_begin(nth<Index>).is_done() && stack_.is_admitted(nth<Index + 1>, slot, passage::down) &&
        stack_.take_clean_place(nth<Index + 1>, beneath, c.bytes)) {
      c.admitted[Index + 1] = true;  // so that its arrival does not ask the policy again
      if (begin_store<Index>(slot, true, how).is_done()) return;
    }
    if (!c.copies[Index].is_valid()) return;  // the store has already ended, with a failure
  }
  stack_.drop_clean(nth<Index>, slot);
}

/// Moves a chunk one hop up to tier Index from the one below. @param has_moved the copy below left for
/// another tier.
template <class Traits, class... Tiers>
template <std::size_t Index>
attempt chunk_mover<Traits, Tiers...>::hop(std::uint32_t slot, transfer::urgency how, bool& has_moved) {
  record_type& c = chunks_[slot];
  tier_copy& to = c.copies[Index];
  if (to.at == residence::absent) {
    attempt room;
    {
      // Keeps the copy below from being dropped while space is made above it.
      const pinned_copy kept(stack_, nth<Index + 1>, slot);
      room = make_room<Index>(to, c.bytes, how);
    }
    if (!room.is_done() && room.on == no_index) {
      // The space may have to come from that copy.
      room = make_room<Index>(to, c.bytes, how);
      has_moved = room.is_done() && newest(c) != Index + 1;
    }
    if (!room.is_done() || has_moved) return room;
  }
  return engine_.begin_fetch(nth<Index>, slot, how);
}

/// Notes a transfer's end, and acts on it. Waits if it has not ended.
template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::complete(std::uint32_t id) {
  const tier_transfer done = engine_[id];
  const result<void> outcome = engine_.complete(id);
  if (outcome && done.stores) {
    if (stack_.is_due(chunks_[done.chunk], done.edge + 1)) mark_due(done.chunk);
  } else if (!outcome && !done.stores) {
    // A failed prefetch is repeated only when a caller asks for the chunk.
    unqueue_prefetch(done.chunk);
  }
  return outcome;
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::complete_ready() {
  engine_.poll();
  for (std::uint32_t id = 0; id < engine_.capacity() && !engine_.is_idle(); ++id) {
    if (!engine_.is_under_way(id) || !engine_.is_ready(id)) continue;
    if (const result<void> outcome = complete(id); !outcome) engine_.note(outcome.error());
  }
}

/// Waits for a transfer until patience ends, then notes its end.
template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::wait_for(std::uint32_t id, tiering::patience wait,
                                                     std::uint64_t began_ns) {
  const detail::named_range range("tiered_buffer wait");
  const auto stalled = engine_.waiting_for(id);
  if (const result<void> ready = engine_.await_ready(id, wait, began_ns); !ready) return ready;
  return complete(id);
}

/// Waits for the transfer that keeps a chunk from moving down. Fails if that transfer failed and is still in
/// the way.
template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::wait_out(std::uint32_t id, std::uint32_t slot) {
  const tier_transfer awaited = engine_[id];
  const result<void> waited = wait_for(id, tiering::wait_complete, engine_.now_ns());
  if (waited || is_in_the_way(awaited, slot, true)) return waited;
  engine_.note(waited.error());
  return {};
}

/// Brings a chunk as far up as possible without waiting.
template <class Traits, class... Tiers>
attempt chunk_mover<Traits, Tiers...>::advance(std::uint32_t slot, bool needs_contents,
                                               transfer::urgency how) {
  record_type& c = chunks_[slot];
  if (c.transfer != no_index) {
    engine_.find_under_way(c.transfer);
    return attempt::blocked(c.transfer);
  }
  tier_copy& top = c.copies[0];
  if (top.is_valid()) return {};
  if (top.at == residence::absent) {
    // The place in tier 0 comes first, because getting one may need the tiers below.
    const attempt room = make_room<0>(top, c.bytes, how);
    if (!room.is_done()) return room;
    // The chunk's own copy below may have had to leave for a victim, and a chunk has one transfer at a time.
    if (c.transfer != no_index) return attempt::blocked(c.transfer);
  }
  if (!needs_contents) {
    stack_.become_valid(nth<0>, slot);
    return {};
  }
  for (;;) {
    const std::size_t source = newest(c);
    if (source == tiers) return attempt::failed(chunks_.at_chunk(errc::no_contents, slot));
    attempt hopped;
    bool has_moved = false;
    with_index<last>(source - 1,
                     [&](auto to) { hopped = this->template hop<to.value>(slot, how, has_moved); });
    if (!has_moved) return hopped;
  }
}

template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::make_resident(std::uint32_t slot, bool needs_contents,
                                                          tiering::patience wait) {
  const std::uint64_t began = engine_.now_ns();
  const auto end = [&](const result<void>& how) {
    if (!chunks_[slot].wanted) stack_.release_reservations(chunks_[slot]);
    return how;
  };
  for (;;) {
    attempt tried;
    tier_transfer awaited;
    result<void> waited;
    try {
      tried = advance(slot, needs_contents, transfer::urgency::demand);
      if (tried.is_done()) return {};
      if (tried.how == attempt::kind::failed) return end(tried.why);
      awaited = engine_[tried.on];
      waited = wait_for(tried.on, wait, began);
    } catch (...) {
      static_cast<void>(end({}));
      throw;
    }
    if (waited) continue;
    if (waited.code() == errc::timed_out) {
      if (needs_contents) want_first(slot);
      return end(chunks_.at_chunk(errc::timed_out, slot, chunks_[slot].bytes, waited.error().found));
    }
    if (is_in_the_way(awaited, slot, needs_contents)) return end(waited.error());
    engine_.note(waited.error());
  }
}

/// Puts the chunk before all prefetches, because a caller has asked for it.
template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::want_first(std::uint32_t slot) noexcept {
  if (!std::exchange(chunks_[slot].wanted, true)) wanted_.push_front(slot);
}

template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::await_top_place(tier_copy& fresh, std::uint64_t bytes,
                                                            std::uint32_t held, tiering::patience wait,
                                                            std::uint64_t began_ns) {
  for (;;) {
    const attempt room = make_room<0>(fresh, bytes, transfer::urgency::demand);
    if (room.is_done()) return {};
    if (room.how == attempt::kind::failed) return room.why;
    const tier_transfer awaited = engine_[room.on];
    const result<void> waited = wait_for(room.on, wait, began_ns);
    if (waited) continue;
    if (waited.code() == errc::timed_out || is_in_the_way(awaited, held, true)) return waited;
    engine_.note(waited.error());
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/chunk_mover_body.hpp>
