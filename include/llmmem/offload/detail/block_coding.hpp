/// @file
/// The coders of one tier, and the buffers in which stored forms are made and read.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/offload/block_codec.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/tier.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The number of a coding buffer; `no_coding_buffer`: the copy uses the first tier's slot itself.
inline constexpr std::uint32_t no_coding_buffer = ~std::uint32_t{0};

/// Before a stored form: the codec's `format_id`, and how many bytes after the form fill it up. A stored form
/// never has the block's own number of bytes, so that no tier takes it for a plain block.
struct form_head {
  static constexpr std::uint64_t bytes = 9;
  static constexpr std::uint64_t most_filling = 1;
};

/// Encodes and decodes blocks in buffers, each of which one copy uses until it ends.
///
/// @par Thread safety   one thread at a time.
template <class Codec>
class block_coding {
 public:
  static_assert(offload::block_codec<Codec>, "the codec of a kv_tier must be an offload::block_codec");
  static constexpr bool is_plain = false;

  /// @throws length_error  for blocks of 2^31 bytes or more, and for no buffers.
  block_coding(const Codec& codec, std::span<const std::uint64_t> block_bytes, std::uint32_t buffers,
               const metadata_source& source, const std::string& who)
      : buffers_(buffers) {
    if (buffers == 0) throw length_error(who + ": coding_buffers is 0; at least 1 is needed");
    for (std::size_t g = 0; g < block_bytes.size(); ++g) {
      const std::uint64_t most = worst_case(codec, g, block_bytes[g]);
      if (most >= std::uint64_t{1} << 31U) {
        throw length_error(who + ": stored forms of group " + std::to_string(g) + " may have " +
                           std::to_string(most) + " bytes; a codec takes forms below 2^31, so give this " +
                           "tier no codec");
      }
      coders_.push_back(codec.make(g, block_bytes[g], source));
      formats_.push_back(codec.format_id(g));
      each_ = most > each_ ? most : each_;
    }
    each_ = (each_ + page - 1) / page * page;
    bytes_ = fixed_array<std::byte>(each_ * buffers + page, source, "kv_tiers: coding buffers");
    free_.reserve(buffers);
    for (std::uint32_t i = buffers; i > 0; --i)
      free_.push_back(i - 1);
  }

  /// Returns what a stored form of a group's block takes at most, with its head.
  [[nodiscard]] static std::uint64_t worst_case(const Codec& codec, std::size_t group,
                                                std::uint64_t block_bytes) noexcept {
    return form_head::bytes + codec.worst_case_bytes(group, block_bytes) + form_head::most_filling;
  }

  /// Takes a buffer, or returns `no_coding_buffer` if copies use all of them.
  [[nodiscard]] std::uint32_t take() noexcept {
    if (free_.empty()) return no_coding_buffer;
    const std::uint32_t out = free_.back();
    free_.pop_back();
    return out;
  }
  void give(std::uint32_t buffer) noexcept {
    if (buffer != no_coding_buffer) free_.push_back(buffer);
  }
  [[nodiscard]] std::span<std::byte> buffer(std::uint32_t which) noexcept {
    const std::size_t to_page = (page - reinterpret_cast<std::uintptr_t>(bytes_.data()) % page) % page;
    return {bytes_.data() + to_page + which * each_, static_cast<std::size_t>(each_)};
  }

  /// Returns the bytes of the stored form at the beginning of the buffer.
  result<std::uint32_t> encode(std::size_t group, std::span<const std::byte> block,
                               std::uint32_t which) noexcept {
    const std::span<std::byte> out = buffer(which);
    const auto form = coders_[group].encode(block, out.subspan(form_head::bytes));
    if (!form) return form.error();
    const std::uint64_t most = out.size() - form_head::bytes - form_head::most_filling;
    if (*form > most) return failure{errc::out_of_range, 0, *form, most, "kv_tier: codec"};
    std::uint64_t bytes = form_head::bytes + *form;
    const bool is_filled = bytes == block.size();
    if (is_filled) out[bytes++] = std::byte{0};
    std::memcpy(out.data(), &formats_[group], sizeof(formats_[group]));
    out[sizeof(formats_[group])] = static_cast<std::byte>(is_filled ? 1 : 0);
    return static_cast<std::uint32_t>(bytes);
  }
  /// Restores a block of the first `stored` bytes of the buffer.
  result<void> decode(std::size_t group, std::uint32_t which, std::uint32_t stored,
                      std::span<std::byte> block) noexcept {
    const std::span<const std::byte> in = buffer(which).first(stored);
    std::uint64_t format = 0;
    const auto refuse = [&](error_code code, std::uint64_t wanted, std::uint64_t found) {
      return failure{.code = code, .index = 0, .wanted = wanted, .found = found, .where = "kv_tier: codec"};
    };
    if (stored < form_head::bytes) return refuse(errc::damaged_encoding, form_head::bytes, stored);
    std::memcpy(&format, in.data(), sizeof(format));
    if (format != formats_[group]) return refuse(errc::layout_mismatch, formats_[group], format);
    const auto filling = static_cast<std::uint64_t>(in[sizeof(format)]);
    if (filling > form_head::most_filling || form_head::bytes + filling > stored)
      return refuse(errc::damaged_encoding, form_head::most_filling, filling);
    return coders_[group].decode(in.subspan(form_head::bytes).first(stored - form_head::bytes - filling),
                                 block);
  }

  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    std::uint64_t out = bytes_.bytes();
    for (const auto& each : coders_)
      out += each.metadata_bytes();
    return out;
  }
  [[nodiscard]] bool is_idle() const noexcept { return free_.size() == buffers_; }

 private:
  static constexpr std::uint64_t page = 4096;  // files then copy without the page cache

  std::vector<typename Codec::coder_type> coders_;  // of each group
  std::vector<std::uint64_t> formats_;
  std::uint64_t each_ = 0;
  std::uint32_t buffers_;
  fixed_array<std::byte> bytes_;
  std::vector<std::uint32_t> free_;
};

/// Returns whether no tier but the last is lossy, and none above a lossy one persists.
template <class... Tiers>
[[nodiscard]] consteval bool is_sound_above_lossy() noexcept {
  std::size_t i = 0;
  bool is_sound = true;
  const bool are_all_lossless = (Tiers::codec_type::is_lossless && ...);
  ((is_sound = is_sound &&
               (++i == sizeof...(Tiers) || are_all_lossless ||
                (Tiers::codec_type::is_lossless && !detail::persists_chunks<typename Tiers::space_type>()))),
   ...);
  return is_sound;
}

/// Returns 64 bits of the forms of lossy tiers; 0 if there are none.
template <class... Tiers>
[[nodiscard]] std::uint64_t lossy_form(std::size_t groups, const Tiers&... tiers) noexcept {
  std::uint64_t out = 0;
  const auto add = [&](const auto& tier) {
    if constexpr (!std::remove_cvref_t<decltype(tier)>::codec_type::is_lossless) {
      for (std::size_t g = 0; g < groups; ++g)
        out = (out ^ tier.codec.format_id(g)) * 0x9E37'79B9'7F4A'7C15ULL | 1U;
    }
  };
  (add(tiers), ...);
  return out;
}

/// Of blocks that are stored as they are: nothing.
template <>
class block_coding<offload::plain_blocks> {
 public:
  static constexpr bool is_plain = true;

  block_coding(const offload::plain_blocks&, std::span<const std::uint64_t>, std::uint32_t,
               const metadata_source&, const std::string&) noexcept {}
  [[nodiscard]] static std::uint64_t worst_case(const offload::plain_blocks&, std::size_t,
                                                std::uint64_t block_bytes) noexcept {
    return block_bytes;
  }
  void give(std::uint32_t) noexcept {}
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept { return 0; }
  [[nodiscard]] bool is_idle() const noexcept { return true; }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
