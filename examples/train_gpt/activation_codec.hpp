/// @file
/// The form of activations between their passes, chosen at run time.
#pragma once

#include <llmmem/codec/block_int.hpp>
#include <llmmem/result.hpp>
#include <llmmem/training/kept_records.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace train_gpt {

/// Activations as floats, or as integers of 8, 4 or 2 bits in groups of 256 with a scale.
class activation_codec {
 public:
  /// @param bits   0: floats.
  /// @param rank   that keeps them: ranks draw other random bits.
  explicit activation_codec(std::uint32_t bits = 0, std::uint32_t rank = 0) noexcept
      : bits_(bits), rank_(rank) {}

  [[nodiscard]] std::uint64_t worst_case_bytes(std::uint64_t bytes) const noexcept {
    switch (bits_) {
      case 8:
        return llmmem::block_int<8>::worst_case_bytes(bytes);
      case 4:
        return llmmem::block_int<4>::worst_case_bytes(bytes);
      case 2:
        return llmmem::block_int<2>::worst_case_bytes(bytes);
      default:
        return 0;
    }
  }
  [[nodiscard]] llmmem::result<std::uint64_t> encode(std::span<const std::byte> in, std::span<std::byte> out,
                                                     llmmem::encode_position at) const noexcept {
    at.chunk |= std::uint64_t{rank_} << 32U;
    if (bits_ == 8) return llmmem::block_int<8>(llmmem::max_bytes).encode(in, out, at);
    if (bits_ == 4) return llmmem::block_int<4>(llmmem::max_bytes).encode(in, out, at);
    return llmmem::block_int<2>(llmmem::max_bytes).encode(in, out, at);
  }
  [[nodiscard]] llmmem::result<void> decode(std::span<const std::byte> in,
                                            std::span<std::byte> out) const noexcept {
    if (bits_ == 8) return llmmem::block_int<8>(llmmem::max_bytes).decode(in, out);
    if (bits_ == 4) return llmmem::block_int<4>(llmmem::max_bytes).decode(in, out);
    return llmmem::block_int<2>(llmmem::max_bytes).decode(in, out);
  }

 private:
  std::uint32_t bits_;
  std::uint32_t rank_;
};

static_assert(llmmem::record_codec<activation_codec>);

}  // namespace train_gpt
