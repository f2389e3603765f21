/// @file
/// The operations on chunks of a `tiered_buffer`: create, lease, clone, resize, discard and remove.
#pragma once

#include <llmmem/codec/errors.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/chunk_lease.hpp>
#include <llmmem/tiering/detail/chunk_mover.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_types.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/version/dirty_ranges.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Operations on one chunk; each completes or leaves the chunk as it was. The desk holds the rules: which
/// leases exclude each other, how clones part, and in which order places, keys and bytes change. Table,
/// stack, keys and mover store the state of the chunks; the desk stores none.
///
/// @par Complexity      as of the functions of `basic_tiered_buffer` that forward here.
/// @par Thread safety   one thread at a time.
/// @par Errors          values; exceptions of a space pass through.
template <class Traits, class... Tiers>
class chunk_desk {
 public:
  using mover_type = chunk_mover<Traits, Tiers...>;
  using engine_type = typename mover_type::engine_type;
  using stack_type = typename mover_type::stack_type;
  using table_type = typename mover_type::table_type;
  using record_type = typename mover_type::record_type;
  using keys_type = typename engine_type::keys_type;
  static constexpr std::size_t tiers = mover_type::tiers;
  static constexpr std::size_t last = mover_type::last;
  using range_type = typename stack_type::template range_type<0>;
  /// Whether the host can access leased bytes.
  static constexpr bool host_can_touch = stack_type::template space_type<0>::is_host_accessible;

  /// Adopts the chunks that the last tier's space has from an earlier process.
  chunk_desk(table_type& chunks, stack_type& stack, keys_type& keys, engine_type& engine, mover_type& mover)
      : chunks_(chunks), stack_(stack), keys_(keys), engine_(engine), mover_(mover) {
    if constexpr (table_type::persists_chunks) adopt_kept();
  }
  chunk_desk(const chunk_desk&) = delete;
  chunk_desk& operator=(const chunk_desk&) = delete;

  /// @name Chunks
  /// @{
  [[nodiscard]] result<chunk_handle> create(std::uint64_t bytes);
  [[nodiscard]] result<chunk_handle> adopt(std::uint64_t offset, std::uint64_t bytes,
                                           std::optional<std::uint32_t> checksum);
  [[nodiscard]] result<chunk_handle> clone(chunk_handle chunk);
  [[nodiscard]] result<void> remove(chunk_handle chunk);
  [[nodiscard]] result<void> resize(chunk_handle chunk, std::uint64_t bytes);
  [[nodiscard]] result<void> discard(chunk_handle chunk);
  [[nodiscard]] result<std::uint64_t> bytes(chunk_handle chunk) const noexcept;
  [[nodiscard]] result<std::uint64_t> last_change(chunk_handle chunk) const noexcept;
  [[nodiscard]] result<std::size_t> tier_of(chunk_handle chunk) const noexcept;
  /// @}

  /// @name Leases
  /// @{
  template <access_mode Mode>
  using lease_type = chunk_lease<chunk_desk, Mode>;
  template <access_mode Mode>
  [[nodiscard]] result<lease_type<Mode>> lease(chunk_handle chunk, byte_interval changed,
                                               tiering::patience wait) {
    const result<range_type> range = begin_lease(chunk, Mode, changed, wait);
    if (!range) return range.error();
    return lease_type<Mode>(*this, chunk.slot, *range);
  }
  [[nodiscard]] result<lease_type<access_mode::read_write>> update(chunk_handle chunk,
                                                                   tiering::patience wait);
  [[nodiscard]] result<lease_type<access_mode::read_write>> update(chunk_handle chunk, std::uint64_t offset,
                                                                   std::uint64_t count,
                                                                   tiering::patience wait);
  /// @param changed  the bytes that change under a lease that reads and writes.
  [[nodiscard]] result<range_type> begin_lease(chunk_handle chunk, access_mode mode, byte_interval changed,
                                               tiering::patience wait);
  void end_lease(std::uint32_t name, access_mode mode) noexcept;
  /// Marks more of a chunk's bytes as changed. @pre it is written under a lease.
  [[nodiscard]] result<void> add_dirty(std::uint32_t name, std::uint64_t offset,
                                       std::uint64_t count) noexcept;
  /// @}

  /// @name Movement
  /// @{
  [[nodiscard]] result<void> prefetch(chunk_handle chunk);
  [[nodiscard]] result<void> evict(chunk_handle chunk);
  [[nodiscard]] result<void> flush(chunk_handle chunk);
  [[nodiscard]] tiering::step_outcome execute(chunk_handle chunk, plan_operation operation, std::size_t tier);
  [[nodiscard]] result<void> expect(chunk_handle chunk, std::uint64_t next_use) noexcept;
  /// @}

  /// @name Keys, where the last tier's space keeps chunks
  /// @{
  [[nodiscard]] result<chunk_handle> create(std::uint64_t bytes, const chunk_key& key);
  [[nodiscard]] result<void> persist();
  /// Reads the chunks that only the last tier has, removes the damaged ones and returns how many.
  [[nodiscard]] result<std::uint64_t> check_kept();
  /// @}

  void add_to(tiered_stats<tiers>& now) const noexcept {
    now.leases = leases_;
    now.parted_bytes = parted_bytes_;
  }

 private:
  [[nodiscard]] result<chunk_handle> enter(tier_copy& place, std::uint64_t bytes);
  [[nodiscard]] failure refuse_leased(std::uint32_t name, std::uint32_t slot) const noexcept;
  [[nodiscard]] result<void> part(std::uint32_t name, std::uint64_t bytes, parting how,
                                  tiering::patience wait);
  [[nodiscard]] result<void> resize_top(std::uint32_t slot, std::uint64_t bytes);
  [[nodiscard]] result<void> copy_top(const tier_copy& to, const tier_copy& from, std::uint64_t bytes);
  void adopt_kept();
  [[nodiscard]] std::uint64_t& adopt(const chunk_extent& extent);

  table_type& chunks_;
  stack_type& stack_;
  keys_type& keys_;
  engine_type& engine_;
  mover_type& mover_;
  std::uint64_t leases_ = 0;
  std::uint64_t parted_bytes_ = 0;
};

template <class Traits, class... Tiers>
auto chunk_desk<Traits, Tiers...>::begin_lease(chunk_handle chunk, access_mode mode, byte_interval changed,
                                               tiering::patience wait) -> result<range_type> {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  std::uint32_t slot = chunks_.record_of(chunk);
  const std::uint64_t bytes = chunks_[slot].bytes;
  if (changed.end > bytes || changed.begin > changed.end) {
    return failure{
        .code = errc::past_the_bytes, .wanted = changed.end, .found = bytes, .where = chunks_.where()};
  }
  const bool changes = tiering::writes(mode);
  const std::uint32_t leases = chunks_.leases_of(chunk.slot);
  if (chunks_[slot].writing || (changes && leases != 0))
    return chunks_.at_chunk(errc::chunk_leased, slot, 0, leases);
  const bool parts = changes && chunks_[slot].sharers > 1;
  mover_.note_ended();
  mover_.write_through_due(changes && !parts ? slot : no_index);
  const std::size_t found = newest(chunks_[slot]);
  if (found == tiers && tiering::reads(mode)) return chunks_.at_chunk(errc::no_contents, slot);
  if (parts) {
    const parting how = tiering::reads(mode) ? parting::copied : parting::fresh;
    if (const result<void> parted = part(chunk.slot, bytes, how, wait); !parted) return parted.error();
    slot = chunks_.slot_of(chunk.slot);
  } else if (found != 0 && found < last) {
    with_index<last>(found, [&](auto tier) { stack_.touch(tier, slot); });
  }
  // A transfer that reads the copy blocks only a writer.
  record_type& c = chunks_[slot];
  if (!parts && (found != 0 || (changes && c.transfer != no_index))) {
    if (const result<void> there = mover_.make_resident(slot, tiering::reads(mode), wait); !there)
      return there.error();
  }
  if (found != tiers) stack_.count_hit(found);
  // The copy below is outdated and will be overwritten in full, so it does not keep its space.
  if (mode == access_mode::write) stack_.forget_middle(slot);
  tier_copy& top = c.copies[0];
  if (changes) top.dirty.add(mode == access_mode::write ? byte_interval{0, c.bytes} : changed);
  c.writing = changes;
  if (changes) chunks_.mark_changed(c);
  chunks_.begin_lease(chunk.slot, c);
  if (c.leases == 1) stack_.observer().on_leased(chunk_id{slot}, top.granted, mode);
  ++leases_;
  stack_.pin(nth<0>, slot);
  // The first lease after a prefetch is the use that it was made for; it does not count as another.
  if (!std::exchange(top.awaited, false) && found == 0 && !parts) stack_.touch(nth<0>, slot);
  return stack_.range(nth<0>, top, c.bytes);
}

template <class Traits, class... Tiers>
auto chunk_desk<Traits, Tiers...>::update(chunk_handle chunk, tiering::patience wait)
    -> result<lease_type<access_mode::read_write>> {
  const result<std::uint64_t> all = bytes(chunk);
  if (!all) return all.error();
  return update(chunk, 0, *all, wait);
}

template <class Traits, class... Tiers>
auto chunk_desk<Traits, Tiers...>::update(chunk_handle chunk, std::uint64_t offset, std::uint64_t count,
                                          tiering::patience wait)
    -> result<lease_type<access_mode::read_write>> {
  const std::uint64_t end = count > max_bytes || offset > max_bytes - count ? max_bytes : offset + count;
  return lease<access_mode::read_write>(chunk, {offset, end}, wait);
}

template <class Traits, class... Tiers>
void chunk_desk<Traits, Tiers...>::end_lease(std::uint32_t name, access_mode mode) noexcept {
  const std::uint32_t slot = chunks_.slot_of(name);
  record_type& c = chunks_[slot];
  chunks_.end_lease(name, c);
  if (c.leases == 0) stack_.observer().on_released(chunk_id{slot}, c.copies[0].granted);
  stack_.unpin(nth<0>, slot);
  if (!tiering::writes(mode)) return;
  c.writing = false;
  mover_.written(slot);
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::add_dirty(std::uint32_t name, std::uint64_t offset,
                                                     std::uint64_t count) noexcept {
  record_type& c = chunks_[chunks_.slot_of(name)];
  const std::uint64_t end = count > max_bytes || offset > max_bytes - count ? max_bytes : offset + count;
  if (end > c.bytes) {
    return failure{.code = errc::past_the_bytes, .wanted = end, .found = c.bytes, .where = chunks_.where()};
  }
  c.copies[0].dirty.add({offset, end});
  return {};
}

/// Gives a name its own record, of `bytes`. Changes nothing if it cannot. @pre other names share the record,
/// and it has contents to copy.
template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::part(std::uint32_t name, std::uint64_t bytes, parting how,
                                                tiering::patience wait) {
  const std::uint64_t began = engine_.now_ns();
  const std::uint32_t shared = chunks_.slot_of(name);
  auto beneath = stack_.spare(nth<last>);
  auto top = stack_.spare(nth<0>);
  const result<void> had = stack_.take(nth<last>, beneath.place(), stack_.place_bytes(nth<last>, bytes));
  if (!had) return had;
  const auto refusal = [&](const result<void>& why) -> failure {
    if (why.code() != errc::timed_out) return why.error();
    return chunks_.at_chunk(errc::timed_out, shared, bytes, why.error().found);
  };
  if (how == parting::fresh) {
    if (const result<void> room = mover_.await_top_place(top.place(), bytes, no_index, wait, began); !room)
      return refusal(room);
  }
  if (how == parting::copied) {
    if (!chunks_[shared].copies[0].is_valid()) {
      if (const result<void> there = mover_.make_resident(shared, true, wait); !there) return there;
    }
    const pinned_copy kept(stack_, nth<0>, shared);
    if (const result<void> room = mover_.await_top_place(top.place(), bytes, shared, wait, began); !room)
      return refusal(room);
    const std::uint64_t old = chunks_[shared].bytes;
    const std::uint64_t copied = bytes < old ? bytes : old;
    if (const result<void> moved = copy_top(top.place(), chunks_[shared].copies[0], copied); !moved) {
      if (moved.code() == errc::completion_lost) top.retire();
      return moved;
    }
    parted_bytes_ += copied;
  }
  const bool has_key = keys_.owns(name);
  if (has_key) {
    if (const result<void> gone = keys_.unindex(shared); !gone) return gone;
  }
  record_type fresh;
  if (has_key) fresh.kept = std::exchange(chunks_[shared].kept, {});
  fresh.bytes = bytes;
  fresh.uses = chunks_[shared].uses;
  fresh.next_use = chunks_[shared].next_use;
  fresh.copies[0] = top.release();
  fresh.copies[last] = beneath.release();
  const std::uint32_t own = chunks_.part(name, fresh);
  if (how != parting::empty) stack_.become_valid(nth<0>, own);
  if (how == parting::copied) stack_.observer().on_made(chunk_id{own}, chunks_[own].copies[0].granted);
  return {};
}

/// Copies within tier 0, and waits for the copy.
template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::copy_top(const tier_copy& to, const tier_copy& from,
                                                    std::uint64_t bytes) {
  const auto copied = stack_.space(nth<0>).copy_within_async(stack_.range(nth<0>, to, bytes),
                                                             stack_.range(nth<0>, from, bytes), {});
  if (!copied) return copied.error();
  return settle(*copied);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/chunk_desk_body.hpp>
#include <llmmem/tiering/detail/chunk_desk_keeping.hpp>
