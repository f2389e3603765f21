/// @file
/// Appends new keys and values to a paged cache: the place of each token, and its form.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Places by a slot mapping, as in vLLM: slot = block x block_tokens + token; a negative one is padding.
class slot_front {
 public:
  /// @param slots   [tokens], in the executor's memory. Their number is the batch's: keys and values may have
  ///      more rows, which are not read.
  /// @param blocks  of the cache.
  slot_front(std::span<const std::int64_t> slots, std::uint32_t block_tokens, std::uint64_t blocks) noexcept
      : slots_(slots.data()), tokens_(slots.size()), blocks_(blocks), by_(block_tokens) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return by_.tokens(); }
  /// Returns the name of a required pointer that is null; null if there is none.
  [[nodiscard]] const char* missing() const noexcept {
    return tokens_ != 0 && slots_ == nullptr ? "slots" : nullptr;
  }

  [[nodiscard]] LLMMEM_HD token_place at(std::uint64_t token) const noexcept {
    const std::int64_t slot = slots_[token];
    if (slot < 0) return {};
    const auto place = static_cast<std::uint64_t>(slot);
    const std::uint64_t block = by_.by().quotient(place);
    if (block >= blocks_) return {.what = token_place::kind::out_of_range};
    return {token_place::kind::in_cache, block, place - block * by_.by().by()};
  }

 private:
  const std::int64_t* slots_;
  std::uint64_t tokens_;
  std::uint64_t blocks_;
  block_divider by_;
};
static_assert(token_front<slot_front>);

/// Places by block tables, as in FlashInfer: token `i` is at `positions[i]` of sequence `batch_indices[i]`; a
/// negative sequence is padding. The tables are those after the append.
template <class Tables>
  requires bounded_table<Tables>
class position_front {
 public:
  /// @param batch_indices, positions  [tokens], in the executor's memory, as the tables.
  /// @param blocks                    of the cache.
  /// @pre both have the same length
  position_front(const Tables& tables, std::span<const std::int32_t> batch_indices,
                 std::span<const std::int32_t> positions, std::uint64_t blocks) noexcept
      : tables_(tables),
        batch_indices_(batch_indices.data()),
        positions_(positions.data()),
        tokens_(batch_indices.size()),
        blocks_(blocks),
        by_(tables.block_tokens) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return by_.tokens(); }

  /// Returns the name of a required pointer that is null; null if there is none.
  [[nodiscard]] const char* missing() const noexcept {
    if (tokens_ == 0) return nullptr;
    if (batch_indices_ == nullptr) return "batch_indices";
    return positions_ == nullptr ? "positions" : detail::missing_table(tables_);
  }

  [[nodiscard]] LLMMEM_HD token_place at(std::uint64_t token) const noexcept {
    const std::int32_t sequence = batch_indices_[token];
    if (sequence < 0) return {};
    return place_in(tables_, by_.by(), blocks_, sequence, positions_[token]);
  }

 private:
  Tables tables_;
  const std::int32_t* batch_indices_;
  const std::int32_t* positions_;
  std::uint64_t tokens_;
  std::uint64_t blocks_;
  block_divider by_;
};
static_assert(token_front<position_front<csr_table_view>> && token_front<position_front<padded_table_view>>);

/// Appends keys and values of a batch to one layer of a cache (vLLM's `reshape_and_cache_flash`, FlashInfer's
/// `append_paged_kv_cache`). Skips the tokens that the front marks as padding; the rest of the cache is
/// unchanged.
///
/// If the cache is of codes with scales in its blocks, each vector gets its scales: with amax the largest
/// size of a group's values, qmax the largest number of a code (127, 7, 448 of e4m3, 6 of e2m1), and global
/// the caller's scale (`options.scales`; null: 1), which a block with `has_global` keeps from its first token
/// on:
///
///     scale = amax / qmax / global, rounded to the scales' type; at least 2^-126 (2^-9 in e4m3); 0 for zeros
///     code  = nearest(x * (1 / (scale * global))), of two equally near the even one
///
/// With a zero next to each scale (`scale_form::numbers` 2; int8 and int4), the codes -8 to 7 (-128 to 127)
/// take the whole distance from a group's least to its largest value:
///
///     zero  = (least * 7 + largest * 8) / 15 / global, rounded to the scales' type
///     scale = the larger of (largest - zero) / 7 and (zero - least) / 8, as above, with that zero x global
///     code  = nearest((x - zero) * (1 / scale))
///
/// so that code x scale + zero, rounded once, is within scale / 2 of x and a rounding. Equal values have the
/// scale 0 if the scales' type holds them.
///
/// Keys with `is_rotated` are turned by Hadamard's matrix before; runs are a power of two there. A group with
/// an infinity or a NaN gets a NaN scale, and a NaN zero. Host and device have the same bits.
///
/// If several tokens go to one place, it afterwards holds one of them, or a mixture: name each place once.
///
/// @param run     `host_executor` or `device_executor`; all pointers are of its memory.
/// @param values  `data` null if the layout has no values.
/// @pre the batch, the cache and the front's tables share no byte
/// @return `errc::out_of_range` for a layer outside the cache; `errc::no_such_block` for a front of more
///      blocks than it has; `errc::block_tokens_differ`, also for none; `errc::no_conversion` if these
///      elements cannot become the cache's; `errc::unsupported_layout` for scales by channel, which are known
///      only when a block is full, for other forms of codes or scales than `paged_attention` reads, a rotary
///      part, or a `value_element` of its own without scales; `errc::out_of_range` for vectors of codes of 0
///      or more than 256 elements; `errc::past_the_bytes` for a token of 2 GiB and more in one plane; if
///      there are tokens, `errc::too_short` for null `data` of the batch or the cache or a null table, and
///      for a token's or head's stride that is shorter than a vector if there are several,
///      `errc::bad_granularity` for addresses and strides that are not a multiple of a converted element, and
///      `errc::bad_alignment` for a `plane_alignment` that is not a power of two. Then nothing has begun.
///      Otherwise the result of `run`.
/// @par Complexity   tokens x heads x dimension, read and written once; the front's tables once for each row.
template <class Run, token_front Front>
result<void> append_kv(const Run& run, const Front& front, const batch_vectors& keys,
                       const batch_vectors& values, const kv_memory& cache, std::uint32_t layer,
                       const token_options& options = {});

/// Appends the latent vectors and rotary keys of MLA, which a cache of one plane and one head holds next to
/// each other (vLLM's `concat_and_cache_mla`). Otherwise as `append_kv`; one scale is for both.
///
/// @param latent_elements  of the latent vector; the rest of the cache's vector is the rotary key.
/// @return in addition, `errc::size_mismatch` for a layout of several heads or with values, or for vectors at
///      most as long as the latent: wanted = `latent_elements`, found = elements of a vector; and for
///      elements of four bits that would be cut inside a byte.
template <class Run, token_front Front>
result<void> append_mla(const Run& run, const Front& front, const batch_vectors& latent,
                        const batch_vectors& rotary, std::uint32_t latent_elements, const kv_memory& cache,
                        std::uint32_t layer, const token_options& options = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/kv_append_body.hpp>
