/// @file
/// The concept of a `kv_tier`'s codec: the form in which a tier stores blocks.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// Blocks are stored as they are in the first tier: the codec of a `kv_tier` by default.
struct plain_blocks {
  static constexpr bool is_lossless = true;
};

/// A value from which `kv_tiers` makes a coder for each group of layers.
///
/// - `make(group, block_bytes, source)`: the coder of a group, with all its scratch memory; throws for blocks
///   that the codec cannot take.
/// - `worst_case_bytes(group, block_bytes)`: no stored form is longer.
/// - `format_id(group)`: 64 bits of the form; equal if one coder may decode what the other encoded.
/// - `is_lossless`: whether a block comes back bit for bit. Of several tiers only the last may be lossy.
/// - The coder has `encode(in, out)`, `decode(in, out)` and `metadata_bytes()`, as in `llmmem::codec`: `in`
///   of `decode` has passed its checksum, and may still be any bytes.
template <class R>
concept block_codec =
    std::copy_constructible<R> &&
    requires(const R& read, typename R::coder_type& coder, const typename R::coder_type& seen,
             std::size_t group, std::uint64_t bytes, std::span<const std::byte> in, std::span<std::byte> out,
             const metadata_source& source) {
      { read.make(group, bytes, source) } -> std::same_as<typename R::coder_type>;
      { read.worst_case_bytes(group, bytes) } noexcept -> std::same_as<std::uint64_t>;
      { read.format_id(group) } noexcept -> std::same_as<std::uint64_t>;
      { coder.encode(in, out) } noexcept -> std::same_as<result<std::uint64_t>>;
      { coder.decode(in, out) } noexcept -> std::same_as<result<void>>;
      { seen.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
      { R::is_lossless } -> std::convertible_to<bool>;
    };

/// Any `llmmem::codec` for the blocks of all groups:
///
///     offload::kv_tier(disk, bytes, {}, offload::coded<byte_plane<dtype::bf16>>{});
template <codec Codec>
struct coded {
  using coder_type = Codec;
  static constexpr bool is_lossless = Codec::is_lossless;

  /// @throws argument_error  for blocks that are not a multiple of the codec's elements; what `Codec` throws.
  [[nodiscard]] Codec make(std::size_t group, std::uint64_t block_bytes,
                           const metadata_source& source) const {
    if (block_bytes % Codec::element_bytes != 0) {
      throw argument_error(std::string(Codec::name) + ": blocks of group " + std::to_string(group) +
                           " have " + std::to_string(block_bytes) + " bytes, which is not a multiple of " +
                           std::to_string(Codec::element_bytes) + "; give this tier a codec of the blocks'" +
                           " elements");
    }
    return Codec(block_bytes, source);
  }
  [[nodiscard]] std::uint64_t worst_case_bytes(std::size_t, std::uint64_t block_bytes) const noexcept {
    return Codec::worst_case_bytes(block_bytes);
  }
  [[nodiscard]] std::uint64_t format_id(std::size_t) const noexcept { return Codec::format_id; }
};

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
