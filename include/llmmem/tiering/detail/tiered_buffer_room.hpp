/// @file
/// Room in the tiers of a `tiered_buffer`: who keeps a copy there, who makes place for another.
#pragma once

#include <llmmem/tiering/tiered_buffer.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::pin(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[Index];
  if constexpr (Index != last) {
    if (held.pins == 0 && held.is_valid()) tier_at<Index>().eviction.pin(slot_id{slot});
  }
  ++held.pins;
}

template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::unpin(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[Index];
  --held.pins;
  if constexpr (Index != last) {
    if (held.pins == 0 && held.is_valid()) tier_at<Index>().eviction.unpin(slot_id{slot});
  }
}

/// Keeps a copy from leaving for as long as it lives.
template <class Traits, class... Tiers>
template <std::size_t Index>
class basic_tiered_buffer<Traits, Tiers...>::hold {
 public:
  hold(basic_tiered_buffer& buffer, std::uint32_t slot) noexcept : buffer_(buffer), slot_(slot) {
    buffer_.template pin<Index>(slot_);
  }
  hold(const hold&) = delete;
  hold& operator=(const hold&) = delete;
  ~hold() { buffer_.template unpin<Index>(slot_); }

 private:
  basic_tiered_buffer& buffer_;
  std::uint32_t slot_;
};

template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::become_valid(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[Index];
  held.at = detail::residence::valid;
  if constexpr (Index != last) {
    tier_at<Index>().eviction.insert(slot_id{slot}, hint_of(slot));
    if (held.pins == 0) tier_at<Index>().eviction.unpin(slot_id{slot});
  }
}

/// Frees a valid copy because its room is needed. @pre it is not pinned, and clean.
template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::drop(std::uint32_t slot) noexcept {
  static_assert(Index != last, "in the last tier every chunk keeps its place");
  auto& tier = tier_at<Index>();
  detail::evict(tier.eviction, slot_id{slot});
  if constexpr (Index == 0) observer_.on_left(chunk_id{slot}, chunks_[slot].copies[0].granted);
  tier.room.give_back(chunks_[slot].copies[Index]);
}

/// Frees a valid copy of which a tier beneath has all. @pre it is not pinned.
template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::drop_clean(std::uint32_t slot) noexcept {
  ++tier_at<Index>().drops;
  if constexpr (Index == 0) chunks_[slot].admitted = {};  // what came up does not go down again
  drop<Index>(slot);
}

/// Frees a valid copy that is worth nothing any more. @pre it is not pinned.
template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::forget(std::uint32_t slot) noexcept {
  auto& tier = tier_at<Index>();
  tier.eviction.erase(slot_id{slot});
  if constexpr (Index == 0) observer_.on_left(chunk_id{slot}, chunks_[slot].copies[0].granted);
  tier.room.give_back(chunks_[slot].copies[Index]);
}

/// The most that copies may take of tier Index.
template <class Traits, class... Tiers>
template <std::size_t Index>
std::uint64_t basic_tiered_buffer<Traits, Tiers...>::most_room() const noexcept {
  const detail::room_stats room = tier_at<Index>().room.stats();
  const std::uint64_t staging =
      Index + 1 == last ? placed_stages() * tier_at<Index>().room.granted_for(stage_size()) : 0;
  return room.capacity - room.lost - staging;
}

/// Copies that cannot leave for now, and why the first of them cannot: not asked again for as long as it
/// lives.
template <class Traits, class... Tiers>
template <std::size_t Index>
class basic_tiered_buffer<Traits, Tiers...>::passed_over {
 public:
  explicit passed_over(basic_tiered_buffer& buffer) noexcept : buffer_(buffer) {}
  passed_over(const passed_over&) = delete;
  passed_over& operator=(const passed_over&) = delete;
  ~passed_over() {
    while (count_ != 0)
      buffer_.template unpin<Index>(slots_[--count_]);
  }
  /// False when there are too many to go on.
  [[nodiscard]] bool add(std::uint32_t slot, const failure& why) noexcept {
    if (count_ == slots_.size()) return false;
    if (count_ == 0) why_ = why;
    slots_[count_++] = slot;
    buffer_.template pin<Index>(slot);
    return true;
  }
  [[nodiscard]] failure why(const failure& otherwise) const noexcept {
    return count_ == 0 ? otherwise : why_;
  }

 private:
  basic_tiered_buffer& buffer_;
  std::array<std::uint32_t, 8> slots_{};
  std::size_t count_ = 0;
  failure why_;
};

/// Gives `into` a place in tier Index, of which it drops what is clean and begins to write back what is not.
///
/// One that cannot begin to be written is passed over for the next, and costs nobody else its lease.
///
/// A prefetch takes no room from what was itself asked for in advance and is still to be used, nor places
/// that other prefetches keep: it waits.
template <class Traits, class... Tiers>
template <std::size_t Index>
auto basic_tiered_buffer<Traits, Tiers...>::make_room(copy& into, std::uint64_t bytes, urgency how)
    -> attempt {
  auto& tier = tier_at<Index>();
  passed_over<Index> unable(*this);
  for (;;) {
    const result<void> had = tier.room.take(into, bytes);
    if (had) {
      into.at = Index == last ? detail::residence::absent : detail::residence::reserved;
      return {};
    }
    if constexpr (Index == last) {
      return attempt::failed(had.error());
    } else {
      const bool can_be_had = had.code() == errc::out_of_bytes || had.code() == errc::table_full;
      if (!can_be_had || tier.room.granted_for(bytes) > most_room<Index>())
        return attempt::failed(had.error());
      const std::optional<slot_id> victim = tier.eviction.victim();
      const bool enough_leaves = leaving_[Index] >= bytes;
      if (!victim || enough_leaves) {
        if (const std::uint32_t on = transfer_touching(Index); on != none) return attempt::blocked(on);
        if (how == urgency::prefetch) return attempt::blocked(none);
        if (cancel_reservations()) continue;
        return attempt::failed(unable.why(had.error()));
      }
      const std::uint32_t slot = to_index(*victim);
      if (how == urgency::prefetch && chunks_[slot].copies[Index].awaited) return attempt::blocked(none);
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

/// Gives back places that prefetches keep and nothing is on its way to. Whether there were any.
template <class Traits, class... Tiers>
bool basic_tiered_buffer<Traits, Tiers...>::cancel_reservations() noexcept {
  bool any = false;
  for (std::uint32_t i = 0; i < wanted_count_; ++i) {
    chunk_record& c = chunks_[wanted_[i]];
    for (std::size_t tier = 0; tier < last; ++tier) {
      if (c.copies[tier].at != detail::residence::reserved) continue;
      with_index<last>(
          tier, [&]<class Index>(Index) { tier_at<Index::value>().room.give_back(c.copies[Index::value]); });
      any = true;
    }
  }
  return any;
}

}  // namespace v0
}  // namespace llmmem
