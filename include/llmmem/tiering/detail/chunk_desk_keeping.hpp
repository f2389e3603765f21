/// @file
/// Chunks of a `tiered_buffer` with keys, which outlive the process in its last tier.
#pragma once

#include <llmmem/tiering/detail/chunk_desk.hpp>

#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <class Traits, class... Tiers>
result<chunk_handle> chunk_desk<Traits, Tiers...>::create(std::uint64_t bytes, const chunk_key& key) {
  if (const result<void> free = keys_.check_free(key); !free) return free.error();
  const result<chunk_handle> made = create(bytes);
  if (made) keys_.set(made->slot, key);
  return made;
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::persist() {
  const result<void> flushed = mover_.flush();
  const result<void> indexed = keys_.reindex_all();
  const result<void> durable = stack_.space(nth<last>).sync();
  if (!flushed) return flushed;
  return indexed ? durable : indexed;
}

template <class Traits, class... Tiers>
result<std::uint64_t> chunk_desk<Traits, Tiers...>::check_kept() {
  constexpr std::uint32_t ahead = 4;
  auto& found = stack_.space(nth<last>).recovery();
  std::uint64_t dropped = 0;
  failure first;
  const auto rests = [&](std::uint32_t name) {
    return chunks_.is_named(name) && keys_.owns(name) && newest(chunks_[chunks_.slot_of(name)]) == last;
  };
  for (std::uint32_t name = 0; name < chunks_.names(); ++name) {
    if (!rests(name)) continue;
    for (std::uint32_t next = name + 1; next < chunks_.names() && next <= name + ahead; ++next) {
      if (rests(next)) mover_.prefetch(chunks_.record_of(chunks_.handle(next)));
    }
    const chunk_handle chunk = chunks_.handle(name);
    const result<range_type> seen = begin_lease(chunk, access_mode::read, {}, tiering::wait_complete);
    if (seen) end_lease(name, access_mode::read);
    if (seen.code() == errc::checksum_differs || seen.code() == errc::damaged_encoding) {
      const bool was_there = chunks_[chunks_.slot_of(name)].kept.was_there;
      if (const result<void> gone = remove(chunk); !gone) return gone.error();
      ++dropped;
      ++found.damaged;
      if (was_there) --found.kept;
    } else if (!seen && first.code == errc::ok) {
      first = seen.error();
    }
  }
  if (first.code != errc::ok) return first;
  return dropped;
}

template <class Traits, class... Tiers>
void chunk_desk<Traits, Tiers...>::adopt_kept() {
  auto& home = stack_.space(nth<last>);
  home.recovery().kept = 0;  // drops the count of an earlier buffer
  std::vector<chunk_extent> extents;
  extents.reserve(home.index().size());
  home.index().for_each([&](const chunk_extent& each) { extents.push_back(each); });
  for (const chunk_extent& each : extents) {
    std::uint64_t& count = adopt(each);
    ++count;
    if (&count == &home.recovery().kept) continue;
    home.index().drop(each.key).value();
  }
}

/// Makes a chunk of a stored extent. Returns the counter that the outcome belongs to.
template <class Traits, class... Tiers>
std::uint64_t& chunk_desk<Traits, Tiers...>::adopt(const chunk_extent& extent) {
  using space_type = typename stack_type::template space_type<last>;
  using codec_type = typename stack_type::template tier_type<last>::codec_type;
  auto& found = stack_.space(nth<last>).recovery();
  if (extent.format != codec_type::format_id || stack_.check_size(extent.bytes).code != errc::ok) {
    return found.other_form;
  }
  const std::uint64_t place_bytes =
      extent.bytes > max_bytes ? 0 : stack_.place_bytes(nth<last>, extent.bytes);
  if (extent.bytes == 0 || extent.stored == 0 || extent.stored > place_bytes) return found.misplaced;
  tier_copy place;
  if (!stack_.take_at(nth<last>, place, space_type::address_of(extent.offset), place_bytes))
    return found.misplaced;
  place.at = residence::valid;
  place.stored = extent.stored;
  place.checksum = extent.checksum;
  place.has_checksum = true;
  const result<chunk_handle> made = enter(place, extent.bytes);
  if (!made) return found.unplaced;
  keys_.set_found(made->slot, extent.key);
  return found.kept;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
