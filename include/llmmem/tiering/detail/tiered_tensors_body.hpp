/// @file
/// How leases of tensors become leases of chunks.
#pragma once

#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>

namespace llmmem {
inline namespace v0 {

template <class Buffer>
tiered_tensors<Buffer>::tiered_tensors(without_chunks, Buffer& buffer, chunk_mapping mapping,
                                       std::string name)
    : buffer_(&buffer),
      mapping_(std::move(mapping)),
      name_(std::move(name)),
      parts_(mapping_.parts().size()),
      chunks_(mapping_.chunks().size()) {
  std::uint32_t shared = 0;
  for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
    if (mapping_.sharers(chunk_id{i}) > 1) chunks_[i].shared = shared++;
  }
  shared_ = std::vector<shared_chunk>(shared);
}

template <class Buffer>
void tiered_tensors<Buffer>::create_chunks() {
  try {
    for (std::size_t i = 0; i < chunks_.size(); ++i)
      chunks_[i].handle = buffer_->create(mapping_.chunks()[i]).value();
  } catch (...) {
    remove_chunks();
    throw;
  }
}

template <class Buffer>
void tiered_tensors<Buffer>::remove_chunks() noexcept {
  for (const chunk_state& each : chunks_) {
    try {
      if (each.handle != chunk_handle{}) static_cast<void>(buffer_->remove(each.handle));
    } catch (...) {
      // A copy of the chunk was in flight: no caller is left to receive its outcome.
    }
  }
}

template <class Buffer>
failure tiered_tensors<Buffer>::check(tensor_id tensor) const noexcept {
  if (to_index(tensor) < mapping_.tensors()) return {};
  return about(errc::no_such_tensor, tensor, 0, mapping_.tensors());
}

template <class Buffer>
result<std::uint64_t> tiered_tensors<Buffer>::bytes(tensor_id tensor) const noexcept {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  return mapping_.bytes(tensor);
}

template <class Buffer>
result<std::span<const tensor_part>> tiered_tensors<Buffer>::parts(tensor_id tensor) const noexcept {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  return mapping_.parts(tensor);
}

template <class Buffer>
result<bool> tiered_tensors<Buffer>::has_contents(tensor_id tensor) const noexcept {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  const std::uint32_t first = mapping_.first_part(tensor);
  bool all = true;
  for (std::size_t i = 0; i < mapping_.parts(tensor).size(); ++i)
    all = all && parts_[first + i].filled;
  return all;
}

template <class Buffer>
result<bool> tiered_tensors<Buffer>::has_contents(tensor_id tensor, std::uint32_t part) const noexcept {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  const std::size_t count = mapping_.parts(tensor).size();
  if (part >= count) return about(errc::no_such_part, tensor, part, count);
  return parts_[mapping_.first_part(tensor) + part].filled;
}

template <class Buffer>
result<chunk_handle> tiered_tensors<Buffer>::chunk(tensor_id tensor, std::uint32_t part) const noexcept {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  const std::size_t count = mapping_.parts(tensor).size();
  if (part >= count) return about(errc::no_such_part, tensor, part, count);
  return chunk_of(mapping_.first_part(tensor) + part).handle;
}

template <class Buffer>
template <class F>
result<void> tiered_tensors<Buffer>::each_part(tensor_id tensor, F&& f) {
  result<void> first;
  const std::uint32_t begin = mapping_.first_part(tensor);
  const auto end = begin + static_cast<std::uint32_t>(mapping_.parts(tensor).size());
  for (std::uint32_t part = begin; part < end; ++part) {
    if (const result<void> one = f(part); !one && first) first = one;
  }
  return first;
}

/// Refuses if the tensor does not exist or a part of it is leased.
template <class Buffer>
result<void> tiered_tensors<Buffer>::check_free(tensor_id tensor) {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  return each_part(tensor, [&](std::uint32_t part) -> result<void> {
    if (parts_[part].leases == 0) return {};
    return about(errc::chunk_leased, tensor, 1, parts_[part].leases);
  });
}

template <class Buffer>
result<void> tiered_tensors<Buffer>::discard(tensor_id tensor) {
  if (const result<void> free = check_free(tensor); !free) return free;
  return each_part(tensor, [&](std::uint32_t part) -> result<void> {
    if (!parts_[part].filled) return {};
    chunk_state& c = chunk_of(part);
    if (c.filled == 1) {
      if (const result<void> gone = buffer_->discard(c.handle); !gone) return gone;
    }
    --c.filled;
    parts_[part].filled = false;
    return {};
  });
}

template <class Buffer>
template <access_mode Mode>
auto tiered_tensors<Buffer>::whole(tensor_id tensor, tiering::patience wait) -> result<lease<Mode>> {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  if (const std::size_t count = mapping_.parts(tensor).size(); count != 1)
    return about(errc::tensor_in_parts, tensor, 0, count);
  return begin_lease<Mode>(tensor, mapping_.first_part(tensor), {0, mapping_.bytes(tensor)}, wait);
}

template <class Buffer>
template <access_mode Mode>
auto tiered_tensors<Buffer>::lease_part(tensor_id tensor, std::uint32_t part, tiering::patience wait)
    -> result<lease<Mode>> {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  const auto all = mapping_.parts(tensor);
  if (part >= all.size()) return about(errc::no_such_part, tensor, part, all.size());
  return begin_lease<Mode>(tensor, mapping_.first_part(tensor) + part, {0, all[part].bytes}, wait);
}

template <class Buffer>
auto tiered_tensors<Buffer>::update(tensor_id tensor, std::uint32_t part, byte_interval changed,
                                    tiering::patience wait) -> result<update_lease> {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  const auto all = mapping_.parts(tensor);
  if (part >= all.size()) return about(errc::no_such_part, tensor, part, all.size());
  if (changed.begin > changed.end || changed.end > all[part].bytes)
    return about(errc::past_the_bytes, tensor, changed.end, all[part].bytes);
  return begin_lease<access_mode::read_write>(tensor, mapping_.first_part(tensor) + part, changed, wait);
}

/// @param part     its number among the parts of all tensors.
/// @param changed  the changed bytes of the part, if the mode writes.
template <class Buffer>
template <access_mode Mode>
auto tiered_tensors<Buffer>::begin_lease(tensor_id tensor, std::uint32_t part, byte_interval changed,
                                         tiering::patience wait) -> result<lease<Mode>> {
  part_state& state = parts_[part];
  const tensor_part& place = mapping_.parts()[part];
  if (state.writing || (tiering::writes(Mode) && state.leases != 0))
    return about(errc::chunk_leased, tensor, 1, state.leases);
  if (tiering::reads(Mode) && !state.filled) return about(errc::no_contents, tensor, 1, 0);
  chunk_state& c = chunk_of(part);
  lease<Mode> made;
  top_range whole_chunk;
  if (c.shared == none) {
    auto taken = take<Mode>(c.handle, changed, wait);
    if (!taken) return taken.error();
    made.alone_ = std::move(*taken);
    whole_chunk = made.alone_.range();
    ++chunk_leases_;
  } else {
    if (const result<void> joined = join(part, Mode, changed, wait); !joined) return joined.error();
    whole_chunk = shared_[c.shared].range();
  }
  ++state.leases;
  ++leases_;
  state.writing = tiering::writes(Mode);
  fill(part);
  made.owner_ = this;
  made.part_ = part;
  made.range_ = whole_chunk;
  made.range_.data += place.offset;
  made.range_.bytes = place.bytes;
  return result<lease<Mode>>(std::move(made));  // nvcc 13 does not move it by itself
}

/// Leases a chunk for the only tensor in it.
template <class Buffer>
template <access_mode Mode>
auto tiered_tensors<Buffer>::take(chunk_handle chunk, byte_interval changed, tiering::patience wait)
    -> result<typename Buffer::template lease<Mode>> {
  if constexpr (Mode == access_mode::read) {
    return buffer_->read(chunk, wait);
  } else if constexpr (Mode == access_mode::write) {
    return buffer_->write(chunk, wait);
  } else {
    return buffer_->update(chunk, changed.begin, changed.end - changed.begin, wait);
  }
}

/// Takes a share in the lease of a chunk that holds several tensors.
template <class Buffer>
result<void> tiered_tensors<Buffer>::join(std::uint32_t part, access_mode mode, byte_interval changed,
                                          tiering::patience wait) {
  const tensor_part& place = mapping_.parts()[part];
  const chunk_state& c = chunk_of(part);
  shared_chunk& s = shared_[c.shared];
  const std::uint64_t offset = place.offset + changed.begin;
  const std::uint64_t count = tiering::writes(mode) ? changed.end - changed.begin : 0;
  const std::uint32_t neighbours = c.filled - (parts_[part].filled ? 1 : 0);
  if (s.leases == 0 && mode == access_mode::write && neighbours == 0) {
    auto taken = buffer_->write(c.handle, wait);
    if (!taken) return taken.error();
    s.fresh = std::move(*taken);
    ++chunk_leases_;
  } else if (s.leases == 0) {
    auto taken = buffer_->update(c.handle, offset, count, wait);
    if (!taken) return taken.error();
    s.kept = std::move(*taken);
    ++chunk_leases_;
  } else if (s.kept) {
    if (const result<void> more = s.kept.also_changes(offset, count); !more) return more;
  }
  ++s.leases;
  return {};
}

template <class Buffer>
void tiered_tensors<Buffer>::end_lease(std::uint32_t part, access_mode mode) noexcept {
  part_state& state = parts_[part];
  --state.leases;
  if (tiering::writes(mode)) state.writing = false;
  const std::uint32_t shared = chunk_of(part).shared;
  if (shared == none) return;
  shared_chunk& s = shared_[shared];
  if (--s.leases != 0) return;
  s.fresh.end();
  s.kept.end();
}

template <class Buffer>
template <access_mode Mode, class F>
result<void> tiered_tensors<Buffer>::for_each_part(tensor_id tensor, F&& f, tiering::patience wait) {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  const auto all = mapping_.parts(tensor);
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    result<lease<Mode>> held = lease_part<Mode>(tensor, i, wait);
    if (!held) return held.error();
    const std::uint32_t next = mapping_.first_part(tensor) + i + 1;
    // The lease of that part reports the outcome.
    if (tiering::reads(Mode) && i + 1 < all.size() && parts_[next].filled)
      static_cast<void>(buffer_->prefetch(chunk_of(next).handle));
    f(*held, all[i]);
  }
  return {};
}

template <class Buffer>
result<void> tiered_tensors<Buffer>::prefetch(tensor_id tensor) {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  bool any = false;
  const result<void> begun = each_part(tensor, [&](std::uint32_t part) -> result<void> {
    if (!parts_[part].filled) return {};
    any = true;
    return buffer_->prefetch(chunk_of(part).handle);
  });
  if (!any) return about(errc::no_contents, tensor, 1, 0);
  return begun;
}

template <class Buffer>
result<void> tiered_tensors<Buffer>::evict(tensor_id tensor) {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  return each_part(tensor, [&](std::uint32_t part) -> result<void> {
    const chunk_state& c = chunk_of(part);
    const std::uint32_t leases = c.shared == none ? parts_[part].leases : shared_[c.shared].leases;
    if (leases != 0) return about(errc::chunk_leased, tensor, 1, leases);
    return buffer_->evict(c.handle);
  });
}

template <class Buffer>
result<void> tiered_tensors<Buffer>::flush(tensor_id tensor) {
  if (const failure wrong = check(tensor); wrong.code != errc::ok) return wrong;
  return each_part(tensor, [&](std::uint32_t part) -> result<void> {
    const chunk_state& c = chunk_of(part);
    const std::uint32_t leases = c.shared != none       ? shared_[c.shared].leases
                                 : parts_[part].writing ? parts_[part].leases
                                                        : 0;
    if (leases != 0) return about(errc::chunk_leased, tensor, 1, leases);
    return buffer_->flush(c.handle);
  });
}

template <class Buffer>
tiered_tensors_stats tiered_tensors<Buffer>::stats() const noexcept {
  return {.tensors = mapping_.tensors(),
          .parts = parts_.size(),
          .chunks = chunks_.size(),
          .shared_chunks = shared_.size(),
          .tensor_bytes = mapping_.tensor_bytes(),
          .padding_bytes = mapping_.padding_bytes(),
          .leases = leases_,
          .chunk_leases = chunk_leases_,
          .metadata_bytes = mapping_.memory_bytes() + parts_.capacity() * sizeof(part_state) +
                            chunks_.capacity() * sizeof(chunk_state) +
                            shared_.capacity() * sizeof(shared_chunk)};
}

template <class Buffer>
std::vector<std::string> tiered_tensors<Buffer>::audit() const {
  std::vector<std::string> found;
  std::vector<std::uint32_t> filled(chunks_.size());
  std::vector<std::uint32_t> leases(chunks_.size());
  for (std::uint32_t part = 0; part < parts_.size(); ++part) {
    const part_state& state = parts_[part];
    const std::uint32_t chunk = to_index(mapping_.parts()[part].chunk);
    if (state.filled) ++filled[chunk];
    leases[chunk] += state.leases;
    if (state.writing && state.leases != 1) {
      found.push_back(name_ + ": part " + std::to_string(part) + " is written under " +
                      std::to_string(state.leases) + " leases");
    }
  }
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const chunk_state& c = chunks_[i];
    const auto say = [&](const std::string& what) {
      found.push_back(name_ + ": chunk " + std::to_string(i) + " " + what);
    };
    if (c.filled != filled[i]) {
      say("counts " + std::to_string(c.filled) + " tensors with contents, there are " +
          std::to_string(filled[i]));
    }
    if (buffer_->tier_of(c.handle).has_value() != (filled[i] != 0))
      say(filled[i] != 0 ? "lost its contents" : "has contents of no tensor");
    if (c.shared == none) continue;
    const shared_chunk& s = shared_[c.shared];
    if (s.leases != leases[i]) {
      say("is shared by " + std::to_string(s.leases) + " leases, its tensors have " +
          std::to_string(leases[i]));
    }
    const bool held = static_cast<bool>(s.fresh) || static_cast<bool>(s.kept);
    if (held != (s.leases != 0)) say(held ? "is held without a lease" : "is not held for its leases");
  }
  return found;
}

}  // namespace v0
}  // namespace llmmem
