/// @file
/// The codec that changes nothing.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/errors.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Bytes travel and are stored unchanged: the default of a tier, and the right choice if the link is faster
/// than a codec (docs/codecs.md shows the computation).
///
/// @par Complexity   a copy; no scratch memory.
/// @par Thread safety   const calls only: any number of threads.
/// @par Errors   as of `codec`; encoded bytes of another length are damaged.
class identity_codec {
 public:
  static constexpr const char* name = "identity_codec";
  static constexpr std::uint64_t format_id = format_digest("identity 1");
  static constexpr std::uint64_t element_bytes = 1;
  static constexpr bool is_lossless = true;
  static constexpr codec_error error_bound{};

  explicit identity_codec(std::uint64_t max_chunk_bytes, const metadata_source& = {})
      : max_chunk_bytes_(checked_chunk_bytes(max_chunk_bytes, name)) {}

  [[nodiscard]] static constexpr std::uint64_t worst_case_bytes(std::uint64_t bytes) noexcept {
    return bytes;
  }

  [[nodiscard]] result<std::uint64_t> encode(std::span<const std::byte> in,
                                             std::span<std::byte> out) const noexcept {
    const failure refused = encode_refusal(*this, in.size(), out.size());
    if (refused.code != errc::ok) return refused;
    if (!in.empty()) std::memcpy(out.data(), in.data(), in.size());
    return std::uint64_t{in.size()};
  }

  [[nodiscard]] result<void> decode(std::span<const std::byte> in, std::span<std::byte> out) const noexcept {
    const failure refused = chunk_refusal(*this, out.size());
    if (refused.code != errc::ok) return refused;
    if (in.size() != out.size()) {
      return failure{.code = errc::damaged_encoding, .wanted = out.size(), .found = in.size(), .where = name};
    }
    if (!in.empty()) std::memcpy(out.data(), in.data(), in.size());
    return {};
  }

  [[nodiscard]] std::uint64_t max_chunk_bytes() const noexcept { return max_chunk_bytes_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }

 private:
  std::uint64_t max_chunk_bytes_;
};

static_assert(codec<identity_codec>);

}  // namespace v0
}  // namespace llmmem
