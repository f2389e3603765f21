/// @file
/// Copies chosen tokens of a paged cache into fresh blocks, in the form they are in.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The tokens to keep: the result of `select_tokens`, or any other lists. Pointers are of the executor's
/// memory.
struct kept_tokens {
  const std::int32_t* listed = nullptr;  ///< [sequences][heads][stride], positions; a negative one is padding
  std::uint64_t sequences = 0;
  std::uint32_t heads = 1;   ///< lists of a sequence: 1 for all heads, or one for each head of the cache
  std::uint32_t budget = 0;  ///< entries of a list that are read
  std::uint64_t stride = 0;  ///< entries from one list to the next
};

/// The rows of tokens to copy: for each entry of the lists what each plane has of the token, a row for each
/// head, or one for all heads if they are contiguous at both ends and have one list.
template <class To, class From>
  requires bounded_table<To> && bounded_table<From>
class kept_token_map {
 public:
  /// @param parts  of `detail::copy_parts_of`, each with vectors for each token
  kept_token_map(const kv_memory& to, const To& to_tables, const kv_memory& from, const From& from_tables,
                 const kept_tokens& kept, std::uint32_t layer, std::uint32_t* out_of_range,
                 std::span<const detail::kv_copy_part> parts) noexcept;

  [[nodiscard]] LLMMEM_HD std::uint64_t rows() const noexcept { return kept_.sequences * kept_.budget; }
  [[nodiscard]] LLMMEM_HD std::uint32_t parts() const noexcept { return parts_; }
  [[nodiscard]] LLMMEM_HD row_move at(std::uint64_t row, std::uint32_t part) const noexcept {
    std::uint32_t head = part;
    std::uint32_t p = 0;
    while (head >= plane_[p].heads) {
      head -= plane_[p].heads;
      ++p;
    }
    const std::uint64_t sequence = by_budget_.quotient(row);
    const std::uint64_t entry = row - sequence * kept_.budget;
    const std::uint64_t list = sequence * kept_.heads + (kept_.heads == 1 ? 0 : head);
    const std::int32_t position = kept_.listed[list * kept_.stride + entry];
    if (position < 0) return {};
    const auto number = static_cast<std::int32_t>(sequence);
    const token_place source = place_in(from_tables_, by_block_, from_blocks_, number, position);
    const token_place target =
        place_in(to_tables_, by_block_, to_blocks_, number, static_cast<std::int64_t>(entry));
    if (source.what != token_place::kind::in_cache || target.what != token_place::kind::in_cache) {
      if (out_of_range_ != nullptr) raise_flag(*out_of_range_);
      return {};
    }
    const plane& of = plane_[p];
    return {
        plane_base(of.from, layer_) + of.from.strides.offset(0, source.block, source.token, head),
        plane_base(of.to, layer_) + of.to.strides.offset(0, target.block, target.token, head),
        of.bytes,
    };
  }
  [[nodiscard]] std::uint32_t longest_row() const noexcept {
    std::uint32_t longest = 0;
    for (const plane& each : plane_)
      longest = std::max(longest, each.bytes);
    return longest;
  }
  [[nodiscard]] row_alignment alignment() const noexcept;

 private:
  struct plane {
    kv_plane from{};
    kv_plane to{};
    std::uint32_t heads = 0;
    std::uint32_t bytes = 0;
  };

  plane plane_[paging::plane_role_count]{};
  std::uint32_t parts_ = 0;
  std::uint32_t planes_ = 0;
  kept_tokens kept_;
  To to_tables_;
  From from_tables_;
  std::uint64_t to_blocks_;
  std::uint64_t from_blocks_;
  divider by_budget_;
  divider by_block_;
  std::uint32_t layer_;
  std::uint32_t* out_of_range_;
};

/// Copies the listed tokens of a layer: entry i of a sequence's list becomes token i of the same sequence in
/// `to_tables`. Bytes are copied, so nothing is rounded again: elements, codes with their scales by token or
/// run, records of latents, indexer keys. Attention over the new blocks has the bits of attention to the list
/// in the old ones.
///
/// Scales by channel, and scales of the block (`has_global`), belong to all tokens of a block: such a cache
/// is refused. `gather_kv` makes values of one list's tokens (by a `position_front` over the list), and
/// `append_kv` rounds them again: into an open block in bf16 where scales are by channel.
///
/// Each layer has its own call, because each has its own scores. If a layer's heads keep different tokens,
/// the engine keeps each head's list for rotary embeddings that are applied late; keys that were rotated
/// before they were stored keep their positions. Layers of a window, and states, of a hybrid model are
/// bounded already: choose in the layers with full attention alone. A block of the old cache may be shared:
/// it is only read. The new sequence must not be found by the keys of the old one's tokens.
///
/// @param run           `host_executor` or `device_executor`; all pointers are of its memory.
/// @param to_tables     fresh blocks of each sequence, for min(budget, length) tokens; not the old ones.
/// @param out_of_range  set to 1 when a token has no place in either cache, and is left out; not cleared.
/// @pre no byte that is written is one that is read
/// @return `errc::layout_mismatch` for layouts of other values; `errc::out_of_range` for a layer outside the
///      cache; `errc::size_mismatch` for lists that are neither one nor one for each head, a budget of more
///      than the stride, or tables of other sequences; `errc::unsupported_layout` for scales of a block, for
///      lists by head where heads share an indexer key, and for the parts of context-parallel ranks;
///      `errc::block_tokens_differ` for tables of other blocks; `errc::too_short` for null pointers. Then
///      nothing has begun. Otherwise the result of `run`.
/// @par Complexity   tokens x planes x heads rows, each read and written once. One launch.
template <class Run, class To, class From>
  requires bounded_table<To> && bounded_table<From>
result<void> copy_kept_tokens(const Run& run, const kv_memory& to, const To& to_tables, const kv_memory& from,
                              const From& from_tables, const kept_tokens& kept, std::uint32_t layer,
                              std::uint32_t* out_of_range = nullptr);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/kept_tokens_body.hpp>
