/// @file
/// Leases of a `tiered_buffer`'s chunks: how they begin, and what they leave when they end.
#pragma once

#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits, class... Tiers>
result<typename basic_tiered_buffer<Traits, Tiers...>::top_range>
basic_tiered_buffer<Traits, Tiers...>::begin_lease(chunk_handle chunk, access_mode mode,
                                                   byte_interval changed, patience wait) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  chunk_name& n = names_[chunk.slot];
  std::uint32_t slot = record_of(chunk);
  const std::uint64_t bytes = chunks_[slot].bytes;
  if (changed.end > bytes || changed.begin > changed.end) {
    return failure{
        .code = errc::past_the_bytes, .wanted = changed.end, .found = bytes, .where = options_.name.c_str()};
  }
  const bool changes = writes(mode);
  if (chunks_[slot].writing || (changes && n.leases != 0))
    return at_chunk(errc::chunk_leased, slot, 0, n.leases);
  const bool parts = changes && chunks_[slot].sharers > 1;
  note_ended();
  if (due_count_ != 0) write_through_due(changes && !parts ? slot : none);
  const std::size_t found = newest(chunks_[slot]);
  if (found == tiers && reads(mode)) return at_chunk(errc::no_contents, slot);
  if (parts) {
    const parting how = reads(mode) ? parting::copied : parting::anew;
    if (const result<void> parted = part(chunk.slot, bytes, how, wait); !parted) return parted.error();
    slot = n.record;
  } else if (found != 0 && found < last) {
    with_index<last>(found, [&]<class Index>(Index) {
      tier_at<Index::value>().eviction.touch(slot_id{slot}, hint_of(slot));
    });
  }
  // A transfer that reads the copy is in nobody's way but a writer's.
  chunk_record& c = chunks_[slot];
  if (!parts && (found != 0 || (changes && c.transfer != none))) {
    if (const result<void> there = make_resident(slot, reads(mode), wait); !there) return there.error();
  }
  if (found != tiers) ++hits_[found];
  if (mode == access_mode::write) {
    // What lies beneath is overtaken, and will be overwritten whole: it need not keep its room.
    for (std::size_t i = 1; i < last; ++i) {
      with_index<last>(i, [&]<class Index>(Index) {
        if (c.copies[Index::value].is_valid()) forget<Index::value>(slot);
      });
    }
  }
  copy& top = c.copies[0];
  if (changes) top.dirty.add(mode == access_mode::write ? byte_interval{0, c.bytes} : changed);
  c.writing = changes;
  if (changes) c.changed = ++changes_;
  ++n.leases;
  if (++c.leases == 1) observer_.on_leased(chunk_id{slot}, top.granted, mode);
  ++c.uses;
  ++leases_;
  pin<0>(slot);
  // The lease for which it was brought in is no use beyond that.
  if (!std::exchange(top.awaited, false) && found == 0 && !parts)
    tier_at<0>().eviction.touch(slot_id{slot}, hint_of(slot));
  return tier_at<0>().range(top, c.bytes);
}

template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::end_lease(std::uint32_t name, access_mode mode) noexcept {
  const std::uint32_t slot = names_[name].record;
  chunk_record& c = chunks_[slot];
  --names_[name].leases;
  if (--c.leases == 0) observer_.on_released(chunk_id{slot}, c.copies[0].granted);
  unpin<0>(slot);
  if (!writes(mode)) return;
  c.writing = false;
  if (is_due(c, 0)) mark_due(slot);
}

/// More of a chunk's bytes change. @pre it is written under a lease.
template <class Traits, class... Tiers>
inline result<void> basic_tiered_buffer<Traits, Tiers...>::add_dirty(std::uint32_t name, std::uint64_t offset,
                                                                     std::uint64_t count) noexcept {
  chunk_record& c = chunks_[names_[name].record];
  const std::uint64_t end = count > max_bytes || offset > max_bytes - count ? max_bytes : offset + count;
  if (end > c.bytes) {
    return failure{
        .code = errc::past_the_bytes, .wanted = end, .found = c.bytes, .where = options_.name.c_str()};
  }
  c.copies[0].dirty.add({offset, end});
  return {};
}

template <class Traits, class... Tiers>
auto basic_tiered_buffer<Traits, Tiers...>::read(chunk_handle chunk, patience wait) -> result<read_lease> {
  const result<top_range> range = begin_lease(chunk, access_mode::read, {}, wait);
  if (!range) return range.error();
  return read_lease(*this, chunk.slot, *range);
}

template <class Traits, class... Tiers>
auto basic_tiered_buffer<Traits, Tiers...>::write(chunk_handle chunk, patience wait) -> result<write_lease> {
  const result<top_range> range = begin_lease(chunk, access_mode::write, {}, wait);
  if (!range) return range.error();
  return write_lease(*this, chunk.slot, *range);
}

template <class Traits, class... Tiers>
auto basic_tiered_buffer<Traits, Tiers...>::update(chunk_handle chunk, patience wait)
    -> result<update_lease> {
  const result<std::uint64_t> all = bytes(chunk);
  if (!all) return all.error();
  return update(chunk, 0, *all, wait);
}

template <class Traits, class... Tiers>
auto basic_tiered_buffer<Traits, Tiers...>::update(chunk_handle chunk, std::uint64_t offset,
                                                   std::uint64_t count, patience wait)
    -> result<update_lease> {
  const std::uint64_t end = count > max_bytes || offset > max_bytes - count ? max_bytes : offset + count;
  const result<top_range> range = begin_lease(chunk, access_mode::read_write, {offset, end}, wait);
  if (!range) return range.error();
  return update_lease(*this, chunk.slot, *range);
}

}  // namespace v0
}  // namespace llmmem
