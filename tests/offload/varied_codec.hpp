/// @file
/// A lossless codec whose stored forms have many lengths, for tests of tiers.
#pragma once

#include <llmmem/codec/concepts.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem_tests {

/// Bytes that ascend by 1 take two; all others are inverted, with 1 to 8 bytes before them, so that many
/// forms are longer than their block, and some have its length.
/// @tparam Kind  another one cannot decode it
template <std::uint64_t Kind>
class varied_codec {
 public:
  static constexpr const char* name = "varied";
  static constexpr std::uint64_t format_id = llmmem::format_digest("varied") + Kind;
  static constexpr std::uint64_t element_bytes = 1;
  static constexpr bool is_lossless = true;
  static constexpr llmmem::codec_error error_bound{};

  explicit varied_codec(std::uint64_t most, const llmmem::metadata_source& = {}) : most_(most) {}
  static constexpr std::uint64_t worst_case_bytes(std::uint64_t bytes) noexcept { return bytes + 8; }
  std::uint64_t max_chunk_bytes() const noexcept { return most_; }
  std::size_t metadata_bytes() const noexcept { return 0; }

  llmmem::result<std::uint64_t> encode(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    const bool ascends =
        std::adjacent_find(in.begin(), in.end(), [](std::byte a, std::byte b) {
          return static_cast<std::uint8_t>(static_cast<unsigned>(a) + 1) != static_cast<std::uint8_t>(b);
        }) == in.end();
    if (ascends) {
      out[0] = std::byte{0};
      out[1] = in[0];
      return std::uint64_t{2};
    }
    const std::size_t ahead = 1 + (static_cast<std::size_t>(in[in.size() / 2]) & 7U);
    std::fill_n(out.begin(), ahead, static_cast<std::byte>(ahead));
    std::transform(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(ahead),
                   [](std::byte b) { return ~b; });
    return std::uint64_t{ahead + in.size()};
  }
  llmmem::result<void> decode(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    if (in.size() == 2 && in[0] == std::byte{0}) {
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = static_cast<std::byte>(static_cast<std::size_t>(in[1]) + i);
      return {};
    }
    const std::size_t ahead = in.empty() ? 0 : static_cast<std::size_t>(in[0]);
    if (ahead == 0 || in.size() != ahead + out.size())
      return llmmem::failure{llmmem::errc::damaged_encoding, 0, out.size(), in.size(), name};
    std::transform(in.begin() + static_cast<std::ptrdiff_t>(ahead), in.end(), out.begin(),
                   [](std::byte b) { return ~b; });
    return {};
  }

 private:
  std::uint64_t most_;
};
static_assert(llmmem::codec<varied_codec<1>>);

}  // namespace llmmem_tests
