/// @file
/// Chunks of a `tiered_buffer` that have keys, and outlive the process in its last tier.
#pragma once

#include <llmmem/codec/errors.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits, class... Tiers>
result<chunk_handle> basic_tiered_buffer<Traits, Tiers...>::create(std::uint64_t bytes, const chunk_key& key)
  requires(keeps_chunks)
{
  if (const std::optional<block_id> taken = keys_.find(key)) {
    return failure{.code = errc::key_taken, .index = to_index(*taken) - 1, .where = options_.name.c_str()};
  }
  if (const std::uint64_t most = tier_at<last>().space->index().capacity(); keys_.size() >= most) {
    return failure{errc::table_full, static_cast<std::uint32_t>(full_table::keyed_chunks), 1, 0,
                   tier_at<last>().space->index().path().c_str()};
  }
  const result<chunk_handle> made = create(bytes);
  if (made) set_key(made->slot, key);
  return made;
}

template <class Traits, class... Tiers>
result<chunk_handle> basic_tiered_buffer<Traits, Tiers...>::find(const chunk_key& key) const noexcept
  requires(keeps_chunks)
{
  const std::optional<block_id> found = keys_.find(key);
  if (!found) return failure{.code = errc::no_such_key, .where = options_.name.c_str()};
  return names_.handle(to_index(*found) - 1);
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::persist()
  requires(keeps_chunks)
{
  result<void> first = flush();
  for (std::uint32_t slot = 0; slot < chunks_.touched(); ++slot) {
    if (!chunks_.is_live(slot) || chunks_[slot].kept.indexed) continue;
    if (const result<void> one = reindex(slot); !one && first) first = one;
  }
  const result<void> durable = tier_at<last>().space->sync();
  return first ? durable : first;
}

template <class Traits, class... Tiers>
result<std::uint64_t> basic_tiered_buffer<Traits, Tiers...>::check_kept()
  requires(keeps_chunks)
{
  constexpr std::uint32_t ahead = 4;
  auto& found = tier_at<last>().space->recovery();
  std::uint64_t dropped = 0;
  failure first;
  const auto rests = [&](std::uint32_t name) {
    return names_.is_live(name) && owns_key(name) && newest(chunks_[names_[name].record]) == last;
  };
  for (std::uint32_t name = 0; name < names_.touched(); ++name) {
    if (!rests(name)) continue;
    for (std::uint32_t next = name + 1; next < names_.touched() && next <= name + ahead; ++next) {
      if (rests(next)) static_cast<void>(prefetch(names_.handle(next)));
    }
    const chunk_handle chunk = names_.handle(name);
    const failure seen = read(chunk).error();
    if (seen.code == errc::checksum_differs || seen.code == errc::damaged_encoding) {
      const bool was_there = chunks_[names_[name].record].kept.was_there;
      if (const result<void> gone = remove(chunk); !gone) return gone.error();
      ++dropped;
      ++found.damaged;
      if (was_there) --found.kept;
    } else if (first.code == errc::ok) {
      first = seen;
    }
  }
  if (first.code != errc::ok) return first;
  return dropped;
}

template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::set_key(std::uint32_t name, const chunk_key& key) noexcept
  requires(keeps_chunks)
{
  chunks_[names_[name].record].kept = {.key = key, .name = name};
  const block_id id{name + 1};
  keys_.stage(key, id);
  keys_.insert(id, 1);
}

template <class Traits, class... Tiers>
bool basic_tiered_buffer<Traits, Tiers...>::owns_key(std::uint32_t name) const noexcept {
  if constexpr (keeps_chunks) return chunks_[names_[name].record].kept.name == name;
  return false;
}

/// The name has no key any more, if it had one, and its bytes are nobody's in the index.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::give_up_key(std::uint32_t name) {
  if constexpr (keeps_chunks) {
    if (!owns_key(name)) return {};
    const std::uint32_t slot = names_[name].record;
    if (const result<void> gone = unindex(slot); !gone) return gone;
    keys_.erase(block_id{name + 1});
    chunks_[slot].kept = {};
  }
  return {};
}

/// The index says no more that the chunk rests in the last tier: what is there will change.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::unindex(std::uint32_t slot) {
  if constexpr (keeps_chunks) {
    detail::kept_chunk& kept = chunks_[slot].kept;
    if (!kept.indexed) return {};
    if (const result<void> gone = tier_at<last>().space->index().drop(kept.key); !gone) return gone;
    kept.indexed = false;
  }
  return {};
}

/// The index says where the chunk rests in the last tier, if it has a key and does.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::reindex(std::uint32_t slot) {
  if constexpr (keeps_chunks) {
    chunk_record& c = chunks_[slot];
    const copy& rests = c.copies[last];
    if (c.kept.name == none || !rests.is_valid() || c.transfer != none) return {};
    const result<void> done =
        tier_at<last>().space->index().keep({.key = c.kept.key,
                                             .offset = space_type<last>::offset_of(rests.data),
                                             .bytes = c.bytes,
                                             .stored = rests.stored,
                                             .format = tier_at<last>().codec.format_id,
                                             .checksum = rests.checksum});
    if (!done) return done;
    c.kept.indexed = true;
  }
  return {};
}

/// Takes over the chunks that the last tier's space has from before.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::adopt_kept() {
  if constexpr (keeps_chunks) {
    auto& home = *tier_at<last>().space;
    home.recovery().kept = 0;  // not what a buffer before this one found
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
}

/// Makes a chunk of what rests there. What it is to be counted as.
template <class Traits, class... Tiers>
std::uint64_t& basic_tiered_buffer<Traits, Tiers...>::adopt(const chunk_extent& extent)
  requires(keeps_chunks)
{
  auto& home = tier_at<last>();
  auto& found = home.space->recovery();
  using codec_type = typename std::tuple_element_t<last, std::tuple<Tiers...>>::codec_type;
  if (extent.format != codec_type::format_id || check_size(extent.bytes).code != errc::ok) {
    return found.other_form;
  }
  const std::uint64_t place_bytes = extent.bytes > max_bytes ? 0 : home.place_bytes(extent.bytes);
  if (extent.bytes == 0 || extent.stored == 0 || extent.stored > place_bytes) return found.misplaced;
  copy place;
  if (!home.room.take_at(place, space_type<last>::address_of(extent.offset), place_bytes))
    return found.misplaced;
  place.at = detail::residence::valid;
  place.stored = extent.stored;
  place.checksum = extent.checksum;
  place.has_checksum = true;
  const result<chunk_handle> made = enter(place, extent.bytes);
  if (!made) return found.unplaced;
  set_key(made->slot, extent.key);
  detail::kept_chunk& kept = chunks_[names_[made->slot].record].kept;
  kept.indexed = kept.was_there = true;
  return found.kept;
}

}  // namespace v0
}  // namespace llmmem
