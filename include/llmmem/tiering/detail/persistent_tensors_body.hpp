/// @file
/// How `persistent_tensors` are opened, persisted and checked.
#pragma once

#include <llmmem/codec/errors.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/persistent_tensors.hpp>

namespace llmmem {
inline namespace v0 {

inline std::string persistent_recovery::message() const {
  std::string text = std::to_string(kept) + " tensors were restored";
  if (is_new) text += "; nothing was kept before";
  if (started_over) text += "; other tensors were kept, which were given up";
  if (table_damaged) text += "; their table was damaged, all were given up";
  if (other_file) text += "; their table was of another file, all were given up";
  if (!missing.empty()) {
    text += "; " + std::to_string(missing.size()) + " are missing, the first of them \"" + first_missing +
            "\": compute them again";
  }
  if (empty != 0) text += "; " + std::to_string(empty) + " were never persisted";
  if (removed != 0)
    text += "; " + std::to_string(removed) + " chunks were dropped because no call had persisted them";
  return text;
}

template <class Buffer>
std::string persistent_tensors<Buffer>::checked(std::string set) {
  bool fits = !set.empty() && set.size() <= 64 && set.front() != '.';
  for (const char c : set) {
    fits = fits && ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
                    c == '-' || c == '.');
  }
  if (fits) return set;
  throw argument_error("persistent_tensors: \"" + set +
                       "\" cannot name a set: use 1 to 64 letters, digits, '_', '-' and '.', no '.' first");
}

template <class Buffer>
persistent_tensors<Buffer>::persistent_tensors(Buffer& buffer, const std::string& file,
                                               const chunk_key& file_id, std::uint64_t most_chunks,
                                               std::string set, tensor_names called, chunk_mapping placed,
                                               tiering::other_layout on_other)
    : base(typename base::without_chunks{}, buffer, std::move(placed), set),
      set_(checked(std::move(set))),
      path_(file + "." + set_ + ".tensors"),
      names_(std::move(called)) {
  if (names_.size() != this->mapping_.tensors()) {
    throw argument_error(set_ + ": " + std::to_string(names_.size()) + " names for " +
                         std::to_string(this->mapping_.tensors()) +
                         " tensors; give one name for each tensor");
  }
  table_ = tensor_table::of(file_id, names_, this->mapping_);
  try {
    open(on_other, most_chunks);
  } catch (...) {
    for (auto& each : this->chunks_) {
      if (each.handle != chunk_handle{} && !this->buffer_->tier_of(each.handle))
        static_cast<void>(this->buffer_->remove(each.handle));
    }
    leave_chunks();
    throw;
  }
}

template <class Buffer>
void persistent_tensors<Buffer>::open(tiering::other_layout on_other, std::uint64_t most_chunks) {
  tensor_table kept;
  const tiering::table_state state = read_tensor_table(path_, kept);
  recovery_.is_new = state == tiering::table_state::absent;
  recovery_.table_damaged = state == tiering::table_state::damaged;
  bool holds = state == tiering::table_state::read;
  if (holds && kept.file_id != table_.file_id) {
    recovery_.other_file = true;
    holds = false;
  }
  std::string differs = holds ? first_difference(kept, table_) : std::string();
  if (holds && differs.empty()) differs = first_other_chunk(kept);
  if (!differs.empty()) {
    if (on_other == tiering::other_layout::refuse) {
      throw argument_error(set_ + ": other tensors are kept in " + path_ + ": " + differs +
                           "; take another name for these, or other_layout::start_over to drop those");
    }
    recovery_.started_over = true;
    holds = false;
    // The chunks go before their table, because the table says where the rest is if the process ends half
    // way.
    for (const tensor_part& each : kept.parts) {
      if (const auto found = this->buffer_->find(key_of(to_index(each.chunk))))
        this->buffer_->remove(*found).value();
    }
    save(table_).value();
  }
  if (holds) table_.filled = std::move(kept.filled);
  is_saved_ = holds || recovery_.started_over;
  if (!is_saved_) remove_others(most_chunks);
  std::vector<bool> vouched_for(this->chunks_.size());
  for (std::size_t part = 0; part < table_.parts.size(); ++part) {
    if (table_.filled[part] != 0) vouched_for[to_index(table_.parts[part].chunk)] = true;
  }
  for (std::uint32_t i = 0; i < this->chunks_.size(); ++i)
    take_chunk(i, vouched_for[i]);
  count_tensors();
}

/// As `first_difference`, for the sizes of the chunks that have contents. Tables do not have these sizes: a
/// mapping's `unit` may change them while every part keeps its place.
template <class Buffer>
std::string persistent_tensors<Buffer>::first_other_chunk(const tensor_table& kept) const {
  for (std::uint32_t i = 0; i < kept.tensors(); ++i) {
    for (std::uint32_t part = kept.first_part[i]; part < kept.first_part[i + 1]; ++part) {
      if (kept.filled[part] == 0) continue;
      const std::uint32_t number = to_index(kept.parts[part].chunk);
      const result<chunk_handle> found = this->buffer_->find(key_of(number));
      if (!found) continue;
      const std::uint64_t was = this->buffer_->bytes(*found).value();
      const std::uint64_t is = this->mapping_.chunks()[number];
      if (was == is) continue;
      return "tensor " + std::to_string(i) + ", " + detail::in_quotes(kept.names[i]) + ", is in a chunk of " +
             std::to_string(is) + " bytes, kept in one of " + std::to_string(was) +
             ": the mapping's options differ";
    }
  }
  return {};
}

/// Finds the chunk, or creates it again; contents that the table does not cover belong to no tensor.
template <class Buffer>
void persistent_tensors<Buffer>::take_chunk(std::uint32_t number, bool is_vouched_for) {
  auto& state = this->chunks_[number];
  const std::uint64_t size = this->mapping_.chunks()[number];
  if (const result<chunk_handle> found = this->buffer_->find(key_of(number))) {
    const bool has_any = this->buffer_->tier_of(*found).has_value();
    if (this->buffer_->bytes(*found).value() == size && (is_vouched_for || !has_any)) {
      state.handle = *found;
      return;
    }
    this->buffer_->remove(*found).value();
    if (has_any) ++recovery_.removed;
  }
  state.handle = this->buffer_->create(size, key_of(number)).value();
}

/// Removes chunks of an earlier set. If no table says how many there were, it looks for them by their keys,
/// because no other code would ever free their space.
template <class Buffer>
void persistent_tensors<Buffer>::remove_others(std::uint64_t most_chunks) {
  for (std::uint64_t i = this->chunks_.size(); i < most_chunks; ++i) {
    const result<chunk_handle> found = this->buffer_->find(key_of(static_cast<std::uint32_t>(i)));
    if (!found) continue;
    if (this->buffer_->tier_of(*found)) ++recovery_.removed;
    this->buffer_->remove(*found).value();
  }
}

/// Finds which tensors are present, by the table and by their chunks. The table records the missing ones
/// first, before a write puts bytes into parts that it would cover.
template <class Buffer>
void persistent_tensors<Buffer>::count_tensors() {
  bool differs = false;
  for (std::uint32_t i = 0; i < this->mapping_.tensors(); ++i) {
    bool is_complete = true;
    bool is_missing = false;
    for (std::uint32_t part = table_.first_part[i]; part < table_.first_part[i + 1]; ++part) {
      if (table_.filled[part] == 0) {
        is_complete = false;
      } else if (this->buffer_->tier_of(this->chunk_of(part).handle)) {
        this->fill(part);
      } else {
        table_.filled[part] = 0;
        is_missing = differs = true;
      }
    }
    if (is_missing) {
      if (recovery_.missing.empty()) recovery_.first_missing = names_[tensor_id{i}];
      recovery_.missing.push_back(tensor_id{i});
    } else {
      ++(is_complete ? recovery_.kept : recovery_.empty);
    }
  }
  if (differs) save(table_).value();
}

template <class Buffer>
std::vector<tensor_id> persistent_tensors<Buffer>::without_contents() const {
  std::vector<tensor_id> found;
  for (std::uint32_t i = 0; i < this->mapping_.tensors(); ++i) {
    if (!this->has_contents(tensor_id{i}).value()) found.push_back(tensor_id{i});
  }
  return found;
}

template <class Buffer>
result<void> persistent_tensors<Buffer>::discard(tensor_id tensor) {
  if (const result<void> free = this->check_free(tensor); !free) return free;
  const std::uint32_t index = to_index(tensor);
  bool differs = false;
  tensor_table without = table_;
  for (std::uint32_t part = table_.first_part[index]; part < table_.first_part[index + 1]; ++part)
    differs = std::exchange(without.filled[part], std::uint8_t{0}) != 0 || differs;
  if (differs || is_unsure_) {
    // The table comes first, because a neighbour's next `write` would leave unspecified bytes in place of
    // this tensor.
    if (const result<void> written = save(std::move(without)); !written) return written;
  }
  return base::discard(tensor);
}

template <class Buffer>
result<void> persistent_tensors<Buffer>::persist() {
  if (const result<void> there = this->buffer_->persist(); !there) return there;
  tensor_table now = table_;
  for (std::size_t part = 0; part < now.filled.size(); ++part)
    now.filled[part] = this->parts_[part].filled ? 1 : 0;
  if (is_saved_ && !is_unsure_ && now.filled == table_.filled) return {};
  return save(std::move(now));
}

/// Writes a table to the file. If a new table has the file's name and may not survive a crash, a later
/// process may find either table. Each call then writes the table, even an equal one, until a sync succeeds.
template <class Buffer>
result<void> persistent_tensors<Buffer>::save(tensor_table now) {
  const result<void> written = write_tensor_table(path_, now);
  if (written.code() == errc::sync_failed) is_unsure_ = true;
  if (!written) return written;
  table_ = std::move(now);
  is_saved_ = true;
  is_unsure_ = false;
  return {};
}

template <class Buffer>
result<std::uint64_t> persistent_tensors<Buffer>::check_kept() {
  std::vector<bool> damaged(this->chunks_.size());
  failure first;
  bool any = false;
  const auto rests = [&](std::size_t number) {
    const result<std::size_t> tier = this->buffer_->tier_of(this->chunks_[number].handle);
    return tier && *tier + 1 == Buffer::tiers;
  };
  for (std::uint32_t i = 0; i < this->chunks_.size(); ++i) {
    auto& held = this->chunks_[i];
    if (!this->buffer_->bytes(held.handle)) {
      // The buffer's own check has removed the chunk.
      const result<chunk_handle> fresh = this->buffer_->create(this->mapping_.chunks()[i], key_of(i));
      if (!fresh) return fresh.error();
      held.handle = *fresh;
    }
    if (held.filled != 0 && !this->buffer_->tier_of(held.handle)) damaged[i] = any = true;
    if (!rests(i)) continue;
    if (i + 1 < this->chunks_.size() && rests(i + 1))
      static_cast<void>(this->buffer_->prefetch(this->chunks_[i + 1].handle));
    const failure seen = this->buffer_->read(this->chunks_[i].handle).error();
    if (seen.code == errc::checksum_differs || seen.code == errc::damaged_encoding) {
      damaged[i] = any = true;
    } else if (first.code == errc::ok) {
      first = seen;
    }
  }
  std::uint64_t lost = 0;
  for (std::uint32_t i = 0; any && i < this->mapping_.tensors(); ++i) {
    bool is_lost = false;
    for (std::uint32_t part = table_.first_part[i]; part < table_.first_part[i + 1]; ++part)
      is_lost = is_lost || (this->parts_[part].filled && damaged[to_index(table_.parts[part].chunk)]);
    if (!is_lost) continue;
    if (const result<void> gone = discard(tensor_id{i}); !gone) return gone.error();
    ++lost;
    bool is_known = false;
    for (const tensor_id each : recovery_.missing)
      is_known = is_known || each == tensor_id{i};
    if (is_known) continue;
    if (recovery_.missing.empty()) recovery_.first_missing = names_[tensor_id{i}];
    recovery_.missing.push_back(tensor_id{i});
  }
  if (first.code != errc::ok) return first;
  return lost;
}

template <class Buffer>
std::vector<std::string> persistent_tensors<Buffer>::audit() const {
  std::vector<std::string> found = base::audit();
  for (std::size_t part = 0; part < table_.filled.size(); ++part) {
    if (is_saved_ && table_.filled[part] != 0 && !this->parts_[part].filled)
      found.push_back(set_ + ": the table has contents of part " + std::to_string(part) + ", which has none");
  }
  return found;
}

}  // namespace v0
}  // namespace llmmem
