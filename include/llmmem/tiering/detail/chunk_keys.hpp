/// @file
/// The keys of chunks of a `tiered_buffer`, and their entries in the last tier's index.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/detail/chunk_record.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

class prefix_index;  // complete if a space persists chunks, because its index has one

namespace detail {

/// For tiers without an index: no chunk has a key, and every query says so.
template <class Table, class Space, class Codec, bool PersistsChunks>
class chunk_keys {
 public:
  chunk_keys(Table&, Space&, const tiered_options&) noexcept {}

  [[nodiscard]] static constexpr std::size_t metadata_bytes() noexcept { return 0; }
  [[nodiscard]] static constexpr bool owns(std::uint32_t) noexcept { return false; }
  [[nodiscard]] static constexpr result<void> give_up(std::uint32_t) noexcept { return {}; }
  [[nodiscard]] static constexpr result<void> unindex(std::uint32_t) noexcept { return {}; }
  [[nodiscard]] static constexpr result<void> reindex(std::uint32_t) noexcept { return {}; }
};

/// Keys of chunks, and their entries in the index of a `persistent_file_space`. An entry says that a chunk is
/// stored in the last tier as the entry describes. The entry is removed before those bytes change, and added
/// again after they are complete. A crash between the two loses a chunk, and never damages one.
///
/// @par Complexity      O(1), plus the journal of the index. No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          values: `errc::key_taken`, `errc::no_such_key`, `errc::table_full`, and the index's
///                      failures.
template <class Table, class Space, class Codec>
class chunk_keys<Table, Space, Codec, true> {
 public:
  chunk_keys(Table& chunks, Space& space, const tiered_options& options)
      : chunks_(chunks), space_(space), keys_(options.max_chunks, options.metadata) {}

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return keys_.metadata_bytes(); }

  /// Returns a refusal unless one more chunk may have `key`.
  [[nodiscard]] result<void> check_free(const chunk_key& key) const noexcept {
    if (const std::optional<block_id> taken = keys_.find(key)) {
      return failure{.code = errc::key_taken, .index = to_index(*taken) - 1, .where = chunks_.where()};
    }
    if (const std::uint64_t most = space_.index().capacity(); keys_.size() >= most) {
      return failure{errc::table_full, static_cast<std::uint32_t>(full_table::keyed_chunks), 1, 0,
                     space_.index().path().c_str()};
    }
    return {};
  }
  [[nodiscard]] result<chunk_handle> find(const chunk_key& key) const noexcept {
    const std::optional<block_id> found = keys_.find(key);
    if (!found) return failure{.code = errc::no_such_key, .where = chunks_.where()};
    return chunks_.handle(to_index(*found) - 1);
  }

  /// Returns whether that name has the key of its record.
  [[nodiscard]] bool owns(std::uint32_t name) const noexcept { return kept_of(name).name == name; }
  /// @pre `check_free` found nothing wrong, and the name has no key.
  void set(std::uint32_t name, const chunk_key& key) noexcept {
    kept_of(name) = {.key = key, .name = name};
    const block_id id{name + 1};
    keys_.stage(key, id);
    keys_.insert(id, 1);
  }
  /// As `set`, for a chunk that the index has from an earlier process.
  void set_found(std::uint32_t name, const chunk_key& key) noexcept {
    set(name, key);
    kept_chunk& kept = kept_of(name);
    kept.indexed = kept.was_there = true;
  }
  /// Removes the name's key, if it has one, and the entry of its bytes from the index.
  [[nodiscard]] result<void> give_up(std::uint32_t name) {
    if (!owns(name)) return {};
    if (const result<void> gone = unindex(chunks_.slot_of(name)); !gone) return gone;
    keys_.erase(block_id{name + 1});
    kept_of(name) = {};
    return {};
  }

  /// Removes the chunk's entry from the index, because its bytes in the last tier will change.
  [[nodiscard]] result<void> unindex(std::uint32_t slot) {
    kept_chunk& kept = chunks_[slot].kept;
    if (!kept.indexed) return {};
    if (const result<void> gone = space_.index().drop(kept.key); !gone) return gone;
    kept.indexed = false;
    return {};
  }
  /// Adds an entry for the chunk to the index, if it has a key and is stored in the last tier.
  [[nodiscard]] result<void> reindex(std::uint32_t slot) {
    auto& c = chunks_[slot];
    const tier_copy& rests = c.copies.back();
    if (c.kept.name == no_index || !rests.is_valid() || c.transfer != no_index) return {};
    const result<void> done = space_.index().keep({.key = c.kept.key,
                                                   .offset = Space::offset_of(rests.data),
                                                   .bytes = c.bytes,
                                                   .stored = rests.stored,
                                                   .format = Codec::format_id,
                                                   .checksum = rests.checksum});
    if (!done) return done;
    c.kept.indexed = true;
    return {};
  }
  /// The same for all chunks without an entry; continues after a failure, and returns the first.
  [[nodiscard]] result<void> reindex_all() {
    result<void> first;
    for (std::uint32_t slot = 0; slot < chunks_.slots(); ++slot) {
      if (!chunks_.is_live(slot) || chunks_[slot].kept.indexed) continue;
      if (const result<void> one = reindex(slot); !one && first) first = one;
    }
    return first;
  }

 private:
  [[nodiscard]] kept_chunk& kept_of(std::uint32_t name) noexcept {
    return chunks_[chunks_.slot_of(name)].kept;
  }
  [[nodiscard]] const kept_chunk& kept_of(std::uint32_t name) const noexcept {
    return std::as_const(chunks_)[chunks_.slot_of(name)].kept;
  }

  Table& chunks_;
  Space& space_;
  std::conditional_t<Table::persists_chunks, prefix_index, nothing_kept> keys_;  // from keys to names + 1
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
