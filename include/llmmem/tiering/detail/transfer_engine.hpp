/// @file
/// Transfers that move the chunks of a `tiered_buffer` from one tier to the next, from beginning to end.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/detail/chunk_keys.hpp>
#include <llmmem/tiering/detail/tier_edge.hpp>
#include <llmmem/tiering/detail/tier_stack.hpp>
#include <llmmem/tiering/detail/tier_steps.hpp>
#include <llmmem/tiering/detail/transfer_table.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_types.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/meter.hpp>

#include <time.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Transfers between neighbouring tiers. Both copies have their places before a transfer begins, and are
/// pinned until it ends. The call that notes a transfer's end also records the results: valid copies,
/// checksums, entries of the index. The mover decides which chunks move, and when.
///
/// @par Complexity      `can_begin` O(staging slots), `poll` and `audit` O(transfers), the others O(1) plus
///                      the copy of the bytes. No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor's. A transfer that fails leaves its source copy as it was. Exceptions
///                      of a space pass through once nothing of that transfer is in flight.
template <class Traits, class... Tiers>
class transfer_engine {
 public:
  using stack_type = tier_stack<typename Traits::observer, Tiers...>;
  using table_type = typename stack_type::table_type;
  using record_type = typename stack_type::record_type;
  static constexpr std::size_t tiers = stack_type::tiers;
  static constexpr std::size_t last = stack_type::last;
  using lowest_type = typename stack_type::template tier_type<last>;
  using keys_type = chunk_keys<table_type, typename lowest_type::space_type, typename lowest_type::codec_type,
                               table_type::persists_chunks>;
  using clock_type = typename Traits::clock;
  using meter_type = transfer::meter<last, clock_type>;

  transfer_engine(table_type& chunks, stack_type& stack, keys_type& keys, clock_type clock,
                  const tiered_options& options);
  transfer_engine(const transfer_engine&) = delete;
  transfer_engine& operator=(const transfer_engine&) = delete;

  [[nodiscard]] std::uint64_t now_ns() const noexcept { return clock_.now_ns(); }

  /// @name Transfers, by number
  /// @{
  [[nodiscard]] bool is_idle() const noexcept { return transfers_.is_idle(); }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return transfers_.capacity(); }
  [[nodiscard]] bool is_under_way(std::uint32_t id) const noexcept { return transfers_.is_under_way(id); }
  /// @pre it is in flight.
  [[nodiscard]] const tier_transfer& operator[](std::uint32_t id) const noexcept { return transfers_[id]; }
  /// Returns a transfer in flight to or from `tier`, or `no_index`; prefers one that makes space there.
  [[nodiscard]] std::uint32_t touching(std::size_t tier) const noexcept { return transfers_.touching(tier); }
  /// Notes that a lease waits for a transfer that began before it.
  void find_under_way(std::uint32_t id) noexcept { transfers_[id].found_under_way = true; }
  /// Lets the copy above leave when the store ends.
  void let_drop(std::uint32_t id) noexcept;
  /// @}

  /// @name Beginning
  /// @{ Returns whether a transfer over edge Index can begin, or the transfer that it must wait for.
  template <std::size_t Index>
  [[nodiscard]] attempt can_begin(tier_number<Index>) noexcept;
  /// Begins to copy a chunk's dirty bytes from tier Index to its place in the one below. @pre `can_begin` is
  /// done, and the chunk has no transfer.
  template <std::size_t Index>
  [[nodiscard]] attempt begin_store(tier_number<Index>, std::uint32_t slot, bool then_drops,
                                    transfer::urgency how);
  /// Begins to copy a chunk to its place in tier Index from the one below; the attempt is then blocked on
  /// that transfer.
  template <std::size_t Index>
  [[nodiscard]] attempt begin_fetch(tier_number<Index>, std::uint32_t slot, transfer::urgency how);
  /// @}

  /// @name Ending
  /// @{
  /// Advances queues that move only inside calls.
  void poll() noexcept;
  [[nodiscard]] bool is_ready(std::uint32_t id) const;
  /// Counts the time until the returned object ends as a wait for that transfer, and raises its urgency.
  [[nodiscard]] typename meter_type::stall waiting_for(std::uint32_t id) noexcept;
  /// Waits until the transfer can be completed or patience ends: then `errc::timed_out`.
  [[nodiscard]] result<void> await_ready(std::uint32_t id, tiering::patience wait, std::uint64_t began_ns);
  /// Notes a transfer's end: both of its copies are then at rest. Waits if it has not ended.
  result<void> complete(std::uint32_t id);
  /// @}

  /// @name Accounts
  /// @{
  /// Notes a failure that no call waited for.
  void note(const failure& why) noexcept {
    ++background_failures_;
    background_failure_ = why;
  }
  [[nodiscard]] const failure& background_failure() const noexcept { return background_failure_; }
  void add_to(tiered_stats<tiers>& now) const noexcept;
  void audit(std::vector<std::string>& found) const;
  /// @}

 private:
  using edges = tier_edges<Traits, std::make_index_sequence<last>, typename Tiers::space_type...>;
  template <std::size_t Index>
  struct below;

  template <std::size_t Index>
  [[nodiscard]] auto& edge() noexcept {
    return std::get<Index>(edges_);
  }
  [[nodiscard]] std::uint32_t claim(const tier_transfer& fresh) noexcept;
  [[nodiscard]] std::uint32_t claim_stage(std::uint32_t id) noexcept;
  template <std::size_t Index>
  [[nodiscard]] std::span<std::byte> stage_bytes(std::uint32_t stage, std::uint64_t bytes) noexcept;
  [[nodiscard]] attempt refused(const failure& why) const noexcept;
  [[nodiscard]] failure not_moved() const noexcept {
    return {.code = errc::dependency_failed, .where = chunks_.where()};
  }
  template <std::size_t Index>
  [[nodiscard]] result<std::uint64_t> store_parts(std::uint32_t id, std::uint32_t slot,
                                                  transfer::urgency how);
  template <std::size_t Index>
  result<void> finish(std::uint32_t id, const result<void>& outcome) noexcept;
  template <std::size_t Index>
  void finish_store(std::uint32_t id, const tier_transfer& done, const result<void>& outcome) noexcept;
  template <std::size_t Index>
  void sum_stored(std::uint32_t id, const tier_transfer& done) noexcept;
  template <std::size_t Index>
  result<void> finish_fetch(std::uint32_t id, const tier_transfer& done, result<void> outcome) noexcept;
  [[nodiscard]] result<void> verify(std::uint32_t slot, const tier_copy& beneath,
                                    std::uint32_t found) const noexcept;

  table_type& chunks_;
  stack_type& stack_;
  keys_type& keys_;
  meter_type meter_;
  clock_type clock_;
  typename edges::type edges_;
  transfer_table transfers_;
  std::uint64_t background_failures_ = 0;
  failure background_failure_;
};

/// How bytes change between tier Index and the one below.
template <class Traits, class... Tiers>
template <std::size_t Index>
struct transfer_engine<Traits, Tiers...>::below {
  template <std::size_t At>
  using space_type = typename stack_type::template space_type<At>;
  /// Whether a codec changes their form.
  static constexpr bool encodes = stack_type::encodes && Index + 1 == last;
  /// Whether the bytes go through a ring.
  static constexpr bool bounces = edges::template edge<Index>::bounces;
  static constexpr bool leaves_memory = detail::leaves_memory<space_type<Index + 1>>();
  static constexpr bool host_above = space_type<Index>::is_host_accessible;
  /// Whether a copy above keeps its source's checksum, because no lease changes the copy there.
  static constexpr bool keeps_checksum = Index != 0 && detail::leaves_memory<space_type<Index>>();
  /// Returns whether the ring computes the checksum of bytes on their way down; all of the chunk must then
  /// move.
  [[nodiscard]] static constexpr bool sums(const tier_copy& above) noexcept {
    return bounces && leaves_memory && !(keeps_checksum && above.has_checksum);
  }
};

template <class Traits, class... Tiers>
std::uint32_t transfer_engine<Traits, Tiers...>::claim(const tier_transfer& fresh) noexcept {
  const std::uint32_t id = transfers_.claim(fresh);
  chunks_[fresh.chunk].transfer = id;
  return id;
}

/// Takes a staging slot for a transfer. @pre `can_begin` is done.
template <class Traits, class... Tiers>
std::uint32_t transfer_engine<Traits, Tiers...>::claim_stage(std::uint32_t id) noexcept {
  const std::uint32_t at = stack_.staging().free();
  transfers_[id].stage = at;
  stack_.staging().claim(at, id);
  return at;
}

template <class Traits, class... Tiers>
template <std::size_t Index>
std::span<std::byte> transfer_engine<Traits, Tiers...>::stage_bytes(std::uint32_t stage,
                                                                    std::uint64_t bytes) noexcept {
  return stack_.range(nth<Index>, stack_.staging().place(stage), bytes).span();
}

template <class Traits, class... Tiers>
void transfer_engine<Traits, Tiers...>::let_drop(std::uint32_t id) noexcept {
  tier_transfer& under_way = transfers_[id];
  under_way.then_drops = true;
  stack_.begin_leaving(under_way.edge, chunks_[under_way.chunk].copies[under_way.edge].granted);
}

template <class Traits, class... Tiers>
template <std::size_t Index>
attempt transfer_engine<Traits, Tiers...>::can_begin(tier_number<Index>) noexcept {
  if (transfers_.is_full()) return attempt::blocked(touching(transfer_table::any_tier));
  if constexpr (below<Index>::encodes) {
    if (stack_.staging().free() != no_index) return {};
    if (const std::uint32_t on = stack_.staging().any_user(); on != no_index) return attempt::blocked(on);
    return attempt::failed({.code = errc::out_of_bytes,
                            .wanted = stack_.staging().each_bytes(),
                            .found = 0,
                            .where = chunks_.where()});
  }
  return {};
}

template <class Traits, class... Tiers>
template <std::size_t Index>
attempt transfer_engine<Traits, Tiers...>::begin_store(tier_number<Index>, std::uint32_t slot,
                                                       bool then_drops, transfer::urgency how) {
  record_type& c = chunks_[slot];
  tier_copy& above = c.copies[Index];
  tier_copy& beneath = c.copies[Index + 1];
  if constexpr (Index + 1 == last) {
    if (const result<void> gone = keys_.unindex(slot); !gone) return attempt::failed(gone.error());
  }
  const std::uint32_t id = claim({.chunk = slot,
                                  .edge = static_cast<std::uint32_t>(Index),
                                  .stores = true,
                                  .then_drops = then_drops,
                                  .demotes = then_drops && is_clean(c, Index)});
  stack_.pin(nth<Index>, slot);
  stack_.pin(nth<Index + 1>, slot);
  if (Index + 1 != last && !beneath.is_valid()) beneath.at = residence::arriving;
  if (then_drops) stack_.begin_leaving(Index, above.granted);
  const auto began = clock_.now_ns();
  result<std::uint64_t> begun = std::uint64_t{0};
  try {
    begun = store_parts<Index>(id, slot, how);
  } catch (...) {
    static_cast<void>(finish<Index>(id, not_moved()));
    throw;
  }
  meter_.stalled(stall_cause::write_back, clock_.now_ns() - began);
  if (!begun) {
    static_cast<void>(finish<Index>(id, begun.error()));
    return refused(begun.error());
  }
  meter_.moved(Index, link_direction::offload, *begun);
  return {};
}

/// Interprets a transfer that could not begin: if other transfers fill a table, the caller waits for one of
/// them.
template <class Traits, class... Tiers>
attempt transfer_engine<Traits, Tiers...>::refused(const failure& why) const noexcept {
  if (why.code == errc::table_full) {
    if (const std::uint32_t on = touching(transfer_table::any_tier); on != no_index)
      return attempt::blocked(on);
  }
  return attempt::failed(why);
}

/// Passes to the edge the bytes that must move down, and returns their number.
template <class Traits, class... Tiers>
template <std::size_t Index>
result<std::uint64_t> transfer_engine<Traits, Tiers...>::store_parts(std::uint32_t id, std::uint32_t slot,
                                                                     transfer::urgency how) {
  const record_type& c = chunks_[slot];
  const tier_copy& above = c.copies[Index];
  const tier_copy& beneath = c.copies[Index + 1];
  dirty_ranges parts;
  auto source =
      stack_.range(nth<Index>, above, above.granted < beneath.granted ? above.granted : beneath.granted);
  if constexpr (below<Index>::encodes) {
    const std::uint32_t at = claim_stage(id);
    const auto out = stage_bytes<Index>(at, stack_.place_bytes(nth<Index + 1>, c.bytes));
    const result<std::uint64_t> encoded =
        encode_at(stack_.codec(nth<Index + 1>), stack_.range(nth<Index>, above, c.bytes).span(), out,
                  {.chunk = slot, .version = c.changed});
    if (!encoded) return encoded.error();
    stack_.staging().set_encoded_bytes(at, *encoded);
    source = stack_.range(nth<Index>, stack_.staging().place(at), stack_.rounded(nth<Index + 1>, *encoded));
    parts.add({0, source.bytes});
  } else if (beneath.is_valid() && !below<Index>::sums(above)) {
    parts = above.dirty.aligned(stack_.granularity(nth<Index + 1>), source.bytes);
  } else {
    parts.add({0, source.bytes});
  }
  const result<void> begun =
      edge<Index>().store(id, source, stack_.range(nth<Index + 1>, beneath, source.bytes), parts.intervals(),
                          how, below<Index>::sums(above) ? c.bytes : 0);
  if (!begun) return begun.error();
  return parts.bytes();
}

/// Ends a transfer: both of its copies are then at rest.
template <class Traits, class... Tiers>
template <std::size_t Index>
result<void> transfer_engine<Traits, Tiers...>::finish(std::uint32_t id,
                                                       const result<void>& outcome) noexcept {
  const tier_transfer done = transfers_.release(id);
  chunks_[done.chunk].transfer = no_index;
  if (done.stage != no_index) stack_.staging().release(done.stage);
  if (!done.stores) return finish_fetch<Index>(id, done, outcome);
  finish_store<Index>(id, done, outcome);
  return outcome;
}

template <class Traits, class... Tiers>
template <std::size_t Index>
void transfer_engine<Traits, Tiers...>::finish_store(std::uint32_t id, const tier_transfer& done,
                                                     const result<void>& outcome) noexcept {
  const std::uint32_t slot = done.chunk;
  tier_copy& above = chunks_[slot].copies[Index];
  tier_copy& beneath = chunks_[slot].copies[Index + 1];
  if (done.then_drops) stack_.end_leaving(Index, above.granted);
  stack_.unpin(nth<Index>, slot);
  stack_.unpin(nth<Index + 1>, slot);
  if (outcome.code() == errc::completion_lost) {
    // The device may write to that place at any later time.
    above.dirty.add(beneath.dirty);
    stack_.lose(nth<Index + 1>, slot);
    if (done.demotes && above.pins == 0) stack_.drop_clean(nth<Index>, slot);
    return;
  }
  if (!outcome) {
    // The copy above is still the newest, and dirty; the one below holds its old bytes, or a mix of both.
    if (Index + 1 != last && !beneath.is_valid()) stack_.give_back(nth<Index + 1>, beneath);
    if (done.demotes && above.pins == 0) stack_.drop_clean(nth<Index>, slot);
    return;
  }
  sum_stored<Index>(id, done);
  if (beneath.is_valid()) {
    beneath.dirty.add(above.dirty);
  } else {
    beneath.dirty = above.dirty;
    stack_.settle(nth<Index + 1>, slot);
  }
  above.dirty.clear();
  if constexpr (Index + 1 == last) {
    if (const result<void> kept = keys_.reindex(slot); !kept) note(kept.error());  // `persist` tries again
  }
  if (done.then_drops && above.pins == 0) stack_.drop_stored(nth<Index>, slot, done.demotes);
  stack_.leave_when_passed(nth<Index>, slot);
}

/// Sets the size of the copy below, and its checksum if it needs one.
template <class Traits, class... Tiers>
template <std::size_t Index>
void transfer_engine<Traits, Tiers...>::sum_stored([[maybe_unused]] std::uint32_t id,
                                                   const tier_transfer& done) noexcept {
  const record_type& c = chunks_[done.chunk];
  [[maybe_unused]] const tier_copy& above = c.copies[Index];
  tier_copy& beneath = chunks_[done.chunk].copies[Index + 1];
  beneath.stored = c.bytes;
  if constexpr (below<Index>::encodes) beneath.stored = stack_.staging().encoded_bytes(done.stage);
  if constexpr (below<Index>::leaves_memory && below<Index>::host_above) {
    if constexpr (below<Index>::encodes) {
      beneath.checksum = crc32c(0, stage_bytes<Index>(done.stage, beneath.stored));
    } else {
      beneath.checksum = crc32c(0, stack_.range(nth<Index>, above, c.bytes).span());
    }
    beneath.has_checksum = true;
  } else if constexpr (below<Index>::bounces && below<Index>::leaves_memory) {
    // A chunk that passes between two tiers outside memory keeps its checksum.
    const std::optional<std::uint32_t> taken = edge<Index>().checksum(id);
    beneath.checksum = taken.value_or(above.checksum);
    beneath.has_checksum = true;
  } else if constexpr (below<Index>::leaves_memory) {
    // The host did not see the bytes, and an earlier copy's checksum is of other bytes.
    beneath.has_checksum = false;
  }
}

template <class Traits, class... Tiers>
template <std::size_t Index>
attempt transfer_engine<Traits, Tiers...>::begin_fetch(tier_number<Index> tier, std::uint32_t slot,
                                                       transfer::urgency how) {
  const attempt ready = can_begin(tier);
  if (!ready.is_done()) return ready;
  record_type& c = chunks_[slot];
  // Making space has already begun to move the chunk.
  if (c.transfer != no_index) return attempt::blocked(c.transfer);
  tier_copy& above = c.copies[Index];
  tier_copy& beneath = c.copies[Index + 1];
  const std::uint32_t id = claim({.chunk = slot,
                                  .edge = static_cast<std::uint32_t>(Index),
                                  .in_advance = how == transfer::urgency::prefetch});
  stack_.pin(nth<Index + 1>, slot);
  above.at = residence::arriving;
  auto destination =
      stack_.range(tier, above, above.granted < beneath.granted ? above.granted : beneath.granted);
  if constexpr (below<Index>::encodes) {
    destination = stack_.range(tier, stack_.staging().place(claim_stage(id)),
                               stack_.rounded(nth<Index + 1>, beneath.stored));
  }
  const auto began = clock_.now_ns();
  result<void> begun;
  try {
    begun = edge<Index>().fetch(id, destination, stack_.range(nth<Index + 1>, beneath, destination.bytes),
                                how, beneath.has_checksum ? c.bytes : 0);
  } catch (...) {
    static_cast<void>(finish<Index>(id, not_moved()));
    throw;
  }
  meter_.stalled(how == transfer::urgency::prefetch ? stall_cause::prefetch_late : stall_cause::demand_fetch,
                 clock_.now_ns() - began);
  if (!begun) return refused(finish<Index>(id, begun).error());
  meter_.moved(Index, link_direction::onboard, destination.bytes);
  return attempt::blocked(id);
}

template <class Traits, class... Tiers>
template <std::size_t Index>
result<void> transfer_engine<Traits, Tiers...>::finish_fetch([[maybe_unused]] std::uint32_t id,
                                                             const tier_transfer& done,
                                                             result<void> outcome) noexcept {
  const std::uint32_t slot = done.chunk;
  record_type& c = chunks_[slot];
  tier_copy& above = c.copies[Index];
  const tier_copy& beneath = c.copies[Index + 1];
  stack_.unpin(nth<Index + 1>, slot);
  if constexpr (below<Index>::host_above) {
    if (outcome) {
      const std::span<std::byte> into = stack_.range(nth<Index>, above, c.bytes).span();
      std::span<std::byte> came = into;
      if constexpr (below<Index>::encodes) came = stage_bytes<Index>(done.stage, beneath.stored);
      if constexpr (below<Index>::leaves_memory) {
        if (beneath.has_checksum) outcome = verify(slot, beneath, crc32c(0, came));
      }
      if constexpr (below<Index>::encodes) {
        const auto decoding = meter_.stalling(stall_cause::codec);
        if (outcome) outcome = stack_.codec(nth<Index + 1>).decode(came, into);
      }
    }
  }
  if constexpr (below<Index>::bounces) {
    if (const std::optional<std::uint32_t> came = edge<Index>().checksum(id); outcome && came)
      outcome = verify(slot, beneath, *came);
  }
  if (outcome) {
    if constexpr (below<Index>::keeps_checksum) {
      above.checksum = beneath.checksum;
      above.has_checksum = beneath.has_checksum;
    }
    stack_.arrive(nth<Index>, slot, done.in_advance);
    stack_.leave_when_passed(nth<Index + 1>, slot);
  } else if (outcome.code() != errc::completion_lost) {
    stack_.give_back(nth<Index>, above);
  } else if constexpr (below<Index>::encodes) {
    // The device may write to the staging memory at any later time.
    stack_.staging().retire(done.stage);
    stack_.give_back(nth<Index>, above);
  } else {
    stack_.retire(nth<Index>, above);
  }
  return outcome;
}

/// Returns whether the bytes that came back are those that left.
template <class Traits, class... Tiers>
result<void> transfer_engine<Traits, Tiers...>::verify(std::uint32_t slot, const tier_copy& beneath,
                                                       std::uint32_t found) const noexcept {
  if (found == beneath.checksum) return {};
  return chunks_.at_chunk(errc::checksum_differs, slot, beneath.checksum, found);
}

template <class Traits, class... Tiers>
void transfer_engine<Traits, Tiers...>::poll() noexcept {
  for_each_index<last>([&](auto index) { std::get<index.value>(edges_).poll(); });
}

template <class Traits, class... Tiers>
bool transfer_engine<Traits, Tiers...>::is_ready(std::uint32_t id) const {
  bool ready = false;
  with_index<last>(transfers_[id].edge, [&](auto index) { ready = std::get<index.value>(edges_).ready(id); });
  return ready;
}

template <class Traits, class... Tiers>
auto transfer_engine<Traits, Tiers...>::waiting_for(std::uint32_t id) noexcept -> typename meter_type::stall {
  const tier_transfer& waited = transfers_[id];
  with_index<last>(waited.edge, [&](auto index) { std::get<index.value>(edges_).hurry(id); });
  return meter_.stalling(waited.stores            ? stall_cause::write_back
                         : waited.found_under_way ? stall_cause::prefetch_late
                                                  : stall_cause::demand_fetch);
}

template <class Traits, class... Tiers>
result<void> transfer_engine<Traits, Tiers...>::await_ready(std::uint32_t id, tiering::patience wait,
                                                            std::uint64_t began_ns) {
  if (wait.ns == tiering::wait_complete.ns) return {};
  // If the clock is not the machine's, possibly no code advances it meanwhile, so sleeping counts as well.
  constexpr std::uint64_t nap_ns = 20'000;
  constexpr std::uint64_t least_sleep_ns = 1'000'000;
  const tier_transfer& waited = transfers_[id];
  for (std::uint64_t slept_ns = 0; !is_ready(id); slept_ns += nap_ns) {
    const std::uint64_t waited_ns = clock_.now_ns() - began_ns;
    if (waited_ns >= wait.ns || (slept_ns >= wait.ns && slept_ns >= least_sleep_ns)) {
      return chunks_.at_chunk(errc::timed_out, waited.chunk, chunks_[waited.chunk].bytes, waited_ns);
    }
    with_index<last>(waited.edge, [&](auto index) { std::get<index.value>(edges_).poll(); });
    const timespec little{0, nap_ns};
    ::nanosleep(&little, nullptr);
  }
  return {};
}

template <class Traits, class... Tiers>
result<void> transfer_engine<Traits, Tiers...>::complete(std::uint32_t id) {
  result<void> outcome;
  with_index<last>(transfers_[id].edge, [&](auto index) {
    result<void> moved;
    try {
      moved = std::get<index.value>(edges_).settled(id);
    } catch (...) {
      static_cast<void>(this->template finish<index.value>(id, not_moved()));
      throw;
    }
    outcome = this->template finish<index.value>(id, moved);
  });
  return outcome;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/transfer_engine_body.hpp>
