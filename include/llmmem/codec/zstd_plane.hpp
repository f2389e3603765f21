/// @file
/// zstd as the compressor of byte planes. Needs zstd (1.4 or newer).
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<zstd.h>)
#error "llmmem/codec/zstd_plane.hpp needs zstd: install libzstd-dev and link llmmem::zstd."
#endif

#include <llmmem/codec/concepts.hpp>
#include <llmmem/detail/fixed_array.hpp>

#ifndef ZSTD_STATIC_LINKING_ONLY
#define ZSTD_STATIC_LINKING_ONLY  // for contexts in given memory, and the literal mode
#endif
#include <zstd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Planes as zstd frames, made with a stride that leaves nearly all bytes to zstd's Huffman coder, because
/// exponents hardly repeat in sequences, and at level 1 the search for repetitions takes most of the time. It
/// still finds long runs.
///
/// The constructor takes all memory that zstd uses from the source; `metadata_bytes()` returns its size.
///
/// @par Thread safety   one call at a time.
/// @par Errors   the constructor throws `out_of_memory`; nothing else fails.
class zstd_plane {
 public:
  static constexpr std::uint64_t format_id = format_digest("zstd frame");

  explicit zstd_plane(std::uint64_t max_plane_bytes, const metadata_source& source = {})
      : encoder_memory_(encoder_bytes(max_plane_bytes), source, "zstd_plane: encoder"),
        decoder_memory_(ZSTD_estimateDCtxSize(), source, "zstd_plane: decoder"),
        encoder_(ZSTD_initStaticCCtx(encoder_memory_.data(), encoder_memory_.size())),
        decoder_(ZSTD_initStaticDCtx(decoder_memory_.data(), decoder_memory_.size())) {
    const ZSTD_compressionParameters chosen = parameters(max_plane_bytes);
    const auto set = [&](ZSTD_cParameter what, int value) {
      if (ZSTD_isError(ZSTD_CCtx_setParameter(encoder_, what, value)) != 0)
        throw argument_error(
            "zstd_plane: this zstd lacks a parameter of version 1.4; link version 1.4 or later");
    };
    set(ZSTD_c_strategy, static_cast<int>(chosen.strategy));
    set(ZSTD_c_windowLog, static_cast<int>(chosen.windowLog));
    set(ZSTD_c_hashLog, static_cast<int>(chosen.hashLog));
    set(ZSTD_c_chainLog, static_cast<int>(chosen.chainLog));
    set(ZSTD_c_searchLog, static_cast<int>(chosen.searchLog));
    set(ZSTD_c_minMatch, static_cast<int>(chosen.minMatch));
    set(ZSTD_c_targetLength, static_cast<int>(chosen.targetLength));
    // Always compresses literals, because zstd would store them uncompressed with a stride.
    set(ZSTD_c_literalCompressionMode, 1);
  }

  [[nodiscard]] std::optional<std::uint64_t> compress(std::span<const std::byte> in,
                                                      std::span<std::byte> out) noexcept {
    const std::size_t written = ZSTD_compress2(encoder_, out.data(), out.size(), in.data(), in.size());
    if (ZSTD_isError(written) != 0) return std::nullopt;
    return std::uint64_t{written};
  }

  [[nodiscard]] bool decompress(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    return ZSTD_decompressDCtx(decoder_, out.data(), out.size(), in.data(), in.size()) == out.size();
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return encoder_memory_.bytes() + decoder_memory_.bytes();
  }

 private:
  [[nodiscard]] static ZSTD_compressionParameters parameters(std::uint64_t max_plane_bytes) noexcept {
    unsigned window = 10;
    while (window < 18 && (std::uint64_t{1} << window) < max_plane_bytes)
      ++window;
    return {.windowLog = window,
            .chainLog = 6,
            .hashLog = 12,
            .searchLog = 1,
            .minMatch = 7,
            .targetLength = stride,
            .strategy = ZSTD_fast};
  }

  [[nodiscard]] static std::size_t encoder_bytes(std::uint64_t max_plane_bytes) noexcept {
    return ZSTD_estimateCCtxSize_usingCParams(parameters(max_plane_bytes));
  }

  static constexpr unsigned stride = 64;  // bytes between two searches for a repetition

  detail::fixed_array<std::byte> encoder_memory_;
  detail::fixed_array<std::byte> decoder_memory_;
  ZSTD_CCtx* encoder_;  // in the memory above, which stays in place when this object moves
  ZSTD_DCtx* decoder_;
};

static_assert(plane_compressor<zstd_plane>);

}  // namespace v0
}  // namespace llmmem
