/// @file
/// Bodies of virtual_memory.hpp. Only virtual_memory.hpp includes it.
#pragma once

#include <llmmem/space/errors.hpp>
#include <llmmem/space/virtual_memory.hpp>

namespace llmmem {
inline namespace v0 {

template <page_mapper Mapper>
result<virtual_range> basic_virtual_memory<Mapper>::try_reserve(std::uint64_t bytes) noexcept {
  if (const failure wrong = check_size(bytes); wrong.code != errc::ok) return refuse(wrong);
  if (ranges_.left() == 0) return refuse(why_not(errc::table_full, 1, 0));
  const mapper_answer answer = mapper_.reserve(bytes);
  if (answer.error != 0) return refuse(why_not(errc::reserve_refused, bytes, 0, answer.error));
  std::byte* const data = pointer(answer.value);
  const std::uint32_t slot = ranges_.acquire({data, bytes, 0});
  stats_.reserved_bytes += bytes;
  const range_key key = ranges_.handle(slot);
  return virtual_range{data, bytes, key.slot, key.generation, key.owner};
}

template <page_mapper Mapper>
result<void> basic_virtual_memory<Mapper>::release(const virtual_range& range) noexcept {
  if (const failure wrong = check_piece(range, 0, 0); wrong.code != errc::ok) return refuse(wrong);
  const range_record& r = ranges_[range.slot];
  if (r.mappings != 0) return refuse(why_not(errc::still_mapped, 0, r.mappings));
  mapper_.release(r.data, r.bytes);
  stats_.reserved_bytes -= r.bytes;
  ranges_.release(range.slot);
  return {};
}

template <page_mapper Mapper>
result<physical_handle> basic_virtual_memory<Mapper>::try_create(std::uint64_t bytes) noexcept {
  if (const failure wrong = check_size(bytes); wrong.code != errc::ok) return refuse(wrong);
  const std::uint64_t left = options_.budget - stats_.used;
  if (bytes > left) return refuse(why_not(errc::out_of_bytes, bytes, left));
  if (handles_.left() == 0) return refuse(why_not(errc::table_full, 1, 0));
  const mapper_answer answer = mapper_.create(bytes);
  if (answer.error != 0) return refuse(why_not(errc::system_refused, bytes, left, answer.error));
  stats_.used += bytes;
  if (stats_.used > stats_.peak) stats_.peak = stats_.used;
  ++stats_.create_calls;
  return handles_.handle(handles_.acquire({answer.value, bytes, 0}));
}

template <page_mapper Mapper>
result<void> basic_virtual_memory<Mapper>::destroy(const physical_handle& handle) noexcept {
  const failure wrong = handles_.check(handle, options_.name.c_str());
  if (wrong.code != errc::ok) return refuse(wrong);
  const std::uint64_t mappings = handles_[handle.slot].mappings;
  if (mappings != 0) return refuse(why_not(errc::still_mapped, 0, mappings));
  destroy_slot(handle.slot);
  return {};
}

template <page_mapper Mapper>
result<void> basic_virtual_memory<Mapper>::map(const virtual_range& range, std::uint64_t offset,
                                               std::span<const physical_handle> handles) noexcept {
  std::uint64_t bytes = 0;
  for (const physical_handle& each : handles) {
    const failure wrong = handles_.check(each, options_.name.c_str());
    if (wrong.code != errc::ok) return refuse(wrong);
    const std::uint64_t more = handles_[each.slot].bytes;
    bytes = more > max_bytes - bytes ? max_bytes : bytes + more;
  }
  if (const failure wrong = check_piece(range, offset, bytes); wrong.code != errc::ok) return refuse(wrong);
  if (bytes == 0) return refuse(why_not(errc::zero_bytes, 0, 0));
  if (mappings_.left() < handles.size()) {
    return refuse(why_not(errc::table_full, handles.size(), mappings_.left()));
  }
  const std::uint64_t base = address(ranges_[range.slot].data);
  const std::uint64_t start = base + offset;
  // The last mapping that begins before the piece's end is in the way if it reaches past the piece's start.
  if (const std::uint32_t last = by_address_.below(start + bytes); last != none) {
    const std::uint64_t begins = by_address_.key(last);
    if (begins + mappings_[last].bytes > start) {
      return refuse(why_not(errc::already_mapped, offset, begins - base));
    }
  }

  std::uint64_t done = 0;
  std::uint32_t error = 0;
  for (const physical_handle& each : handles) {
    const handle_record& h = handles_[each.slot];
    error = mapper_.map(pointer(start + done), h.token, h.bytes);
    if (error != 0) break;
    done += h.bytes;
    ++stats_.map_calls;
  }
  if (error == 0) error = mapper_.allow(pointer(start), bytes);
  bool undone = true;
  if (error != 0 && done != 0) {
    undone = mapper_.unmap(pointer(start), done) == 0;
    if (undone) ++stats_.unmap_calls;
  }
  if (error == 0 || !undone) {
    std::uint64_t entered = 0;
    for (const physical_handle& each : handles) {
      if (entered == done) break;
      enter(range.slot, start + entered, each.slot);
      entered += handles_[each.slot].bytes;
      if (error != 0) ++stats_.stuck_mappings;
    }
  }
  if (error != 0) return refuse(why_not(errc::map_refused, bytes, by_address_.size(), error));
  return {};
}

template <page_mapper Mapper>
result<void> basic_virtual_memory<Mapper>::take_away(const virtual_range& range, std::uint64_t offset,
                                                     std::uint64_t bytes, bool destroy_too) noexcept {
  if (const failure wrong = check_piece(range, offset, bytes); wrong.code != errc::ok) return refuse(wrong);
  if (const failure wrong = check_size(bytes); wrong.code != errc::ok) return refuse(wrong);
  const std::uint64_t base = address(ranges_[range.slot].data);
  const std::uint64_t start = base + offset;
  const std::uint64_t end = start + bytes;
  const std::uint32_t first = by_address_.at_least(start);
  std::uint64_t covered = start;
  for (std::uint32_t at = first; covered < end; at = by_address_.next(at)) {
    if (at == none || by_address_.key(at) != covered || mappings_[at].bytes > end - covered) {
      const bool cut = at != none && by_address_.key(at) == covered;
      return refuse(why_not(errc::not_mapped, (cut ? end : covered) - base, 0));
    }
    covered += mappings_[at].bytes;
  }
  if (const std::uint32_t error = mapper_.unmap(pointer(start), bytes); error != 0) {
    return refuse(why_not(errc::map_refused, bytes, by_address_.size(), error));
  }
  ++stats_.unmap_calls;
  for (std::uint32_t at = first; at != none && by_address_.key(at) < end;) {
    const std::uint32_t following = by_address_.next(at);
    const std::uint32_t handle = mappings_[at].handle;
    forget(at);
    if (destroy_too && handles_[handle].mappings == 0) destroy_slot(handle);
    at = following;
  }
  return {};
}

template <page_mapper Mapper>
result<physical_handle> basic_virtual_memory<Mapper>::mapped_at(const virtual_range& range,
                                                                std::uint64_t offset) const noexcept {
  if (const failure wrong = check_piece(range, offset, 0); wrong.code != errc::ok) return wrong;
  const std::uint64_t at = address(ranges_[range.slot].data) + offset;
  const std::uint32_t found = offset == ranges_[range.slot].bytes ? none : by_address_.at_least(at);
  if (found == none || by_address_.key(found) != at) return why_not(errc::not_mapped, offset, 0);
  return handles_.handle(mappings_[found].handle);
}

template <page_mapper Mapper>
void basic_virtual_memory<Mapper>::enter(std::uint32_t range, std::uint64_t at,
                                         std::uint32_t handle) noexcept {
  const std::uint64_t bytes = handles_[handle].bytes;
  by_address_.insert(mappings_.acquire({bytes, handle, range}), at);
  ++handles_[handle].mappings;
  ++ranges_[range].mappings;
  stats_.mapped_bytes += bytes;
  if (by_address_.size() > stats_.peak_mappings) stats_.peak_mappings = by_address_.size();
}

template <page_mapper Mapper>
void basic_virtual_memory<Mapper>::forget(std::uint32_t mapping) noexcept {
  const mapping_record& gone = mappings_[mapping];
  --handles_[gone.handle].mappings;
  --ranges_[gone.range].mappings;
  stats_.mapped_bytes -= gone.bytes;
  by_address_.erase(mapping);
  mappings_.release(mapping);
}

template <page_mapper Mapper>
std::vector<std::string> basic_virtual_memory<Mapper>::audit() const {
  std::vector<std::string> found;
  const auto say = [&](const std::string& what) { found.push_back(options_.name + ": " + what); };
  std::vector<std::uint64_t> of_range(ranges_.touched()), of_handle(handles_.touched());
  std::uint64_t mapped = 0;
  std::uint64_t end = 0;
  for (std::uint32_t at = by_address_.first(); at != none; at = by_address_.next(at)) {
    const mapping_record& m = mappings_[at];
    const std::string who = "mapping " + std::to_string(at);
    const std::uint64_t begins = by_address_.key(at);
    if (begins < end) say(who + " overlaps the one before it");
    end = begins + m.bytes;
    mapped += m.bytes;
    if (!ranges_.is_live(m.range) || begins < address(ranges_[m.range].data) ||
        end > address(ranges_[m.range].data) + ranges_[m.range].bytes) {
      say(who + " is outside its range " + std::to_string(m.range));
    }
    if (!handles_.is_live(m.handle) || handles_[m.handle].bytes != m.bytes) {
      say(who + " does not map all of handle " + std::to_string(m.handle));
    }
    ++of_range[m.range];
    ++of_handle[m.handle];
  }
  std::uint64_t reserved = 0;
  for (std::uint32_t slot = 0; slot < ranges_.touched(); ++slot) {
    if (!ranges_.is_live(slot)) continue;
    reserved += ranges_[slot].bytes;
    if (ranges_[slot].mappings != of_range[slot])
      say("range " + std::to_string(slot) + " miscounts mappings");
  }
  std::uint64_t used = 0;
  for (std::uint32_t slot = 0; slot < handles_.touched(); ++slot) {
    if (!handles_.is_live(slot)) continue;
    used += handles_[slot].bytes;
    if (handles_[slot].mappings != of_handle[slot]) {
      say("handle " + std::to_string(slot) + " miscounts mappings");
    }
  }
  const auto sum = [&](const char* what, std::uint64_t counted, std::uint64_t added) {
    if (counted != added) {
      say(std::string(what) + " have the count " + std::to_string(counted) + ", but add up to " +
          std::to_string(added));
    }
  };
  sum("physical bytes", stats_.used, used);
  sum("reserved bytes", stats_.reserved_bytes, reserved);
  sum("mapped bytes", stats_.mapped_bytes, mapped);
  if (used > options_.budget) say("more is used than the budget allows");
  return found;
}

}  // namespace v0
}  // namespace llmmem
