/// @file
/// `kv_bins`: a lossy codec for cold blocks of keys and values: few bins a vector, Huffman codes for them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/offload/block_codec.hpp>
#include <llmmem/offload/detail/kv_bins_coder.hpp>
#include <llmmem/offload/kv_bins_types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// The codec of one group's blocks: `bins` for each layer, in a `kv_tier` whose blocks have this layout.
///
///     offload::kv_bins cold({.layout = layout, .layers = {{.keys = 33, .values = 17}}});
///     kv_tiers tiers(cache, mover, {}, offload::kv_tier(host, bytes, write_through{}),
///                    offload::kv_tier(disk, bytes, {}, cold));
///
/// A token's vector of all heads in one layer has a scale, and each element one of `bins` codes, at equal
/// distances from the vector's largest negative size to its largest positive one. A block's keys in all
/// layers with the same bins share a Huffman table, and so do its values. With differences, tokens are taken
/// in groups, as CacheGen's paper describes: the first keeps `anchor_bins`, and the others code their
/// difference to what the first comes back as.
///
/// | bound of an element | |
/// |---|---|
/// | without differences | (1/2 + 2^-8) / C of its vector's largest size, C = (bins - 1) / 2 |
/// | with differences | the same of the largest difference; for a group's first token, with `anchor_bins` |
///
/// and the rounding to the layout's element type on top, and 2^-134 for subnormal scales. Bytes that are not
/// all finite, such as those of tokens that were never written, and blocks whose form would be longer are
/// stored as they are. **All side data is in the form**: scales (2 bytes a vector), tables and lengths.
///
/// @par Complexity   linear. Memory: a byte for each element of a block, and tables of 32 KiB.
/// @par Errors       the constructor throws `argument_error` for codes, scales or planes apart from K and V,
///                   and for bins outside 3 to 255 or even; `make` for blocks of other bytes.
/// @par Source       scales by token, bins by layer, entropy coding by channel: CacheGen (Liu et al., 2024)
///                   and LMCache's encoder. Tables shared by layers: a table for each channel costs
///                   2 bits a value there.
class kv_bins {
 public:
  using coder_type = detail::kv_bins_coder;
  static constexpr bool is_lossless = false;

  /// @param groups  one for each group of layers of the cache.
  explicit kv_bins(std::vector<kv_bins_options> groups) : groups_(std::move(groups)) {
    for (kv_bins_options& each : groups_)
      detail::check_bins(each);
  }
  explicit kv_bins(kv_bins_options group) : kv_bins(std::vector{std::move(group)}) {}

  /// @throws argument_error  for a group without options, or blocks that its layout does not have.
  [[nodiscard]] detail::kv_bins_coder make(std::size_t group, std::uint64_t block_bytes,
                                           const metadata_source& source) const {
    if (group >= groups_.size()) {
      throw argument_error("kv_bins: the cache has a group " + std::to_string(group) +
                           ", and there are options for " + std::to_string(groups_.size()) +
                           "; give each group of layers its own");
    }
    const std::uint64_t expected = groups_[group].layout.block_bytes();
    if (expected != block_bytes) {
      throw argument_error("kv_bins: blocks of group " + std::to_string(group) + " have " +
                           std::to_string(block_bytes) + " bytes, and the layout's have " +
                           std::to_string(expected) + "; give the layout that the mover copies");
    }
    return detail::kv_bins_coder(groups_[group], source);
  }
  [[nodiscard]] std::uint64_t worst_case_bytes(std::size_t, std::uint64_t block_bytes) const noexcept {
    return 1 + block_bytes;
  }
  [[nodiscard]] std::uint64_t format_id(std::size_t group) const noexcept {
    return group < groups_.size() ? detail::bins_digest(groups_[group]) : 0;
  }
  /// Returns the bound of an element's error as a share of the largest size in its vector, or of the largest
  /// difference.
  [[nodiscard]] static constexpr double bound(std::uint32_t bins) noexcept {
    const std::uint32_t on_a_side = (bins - 1) / 2;
    return (0.5 + 1.0 / 256) / on_a_side;
  }

 private:
  std::vector<kv_bins_options> groups_;
};
static_assert(block_codec<kv_bins>);

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
