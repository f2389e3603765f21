/// @file
/// Records of latents as tensor cores take them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/latent_rows.hpp>
#include <llmmem/kernels/detail/tensor_forms.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/latent_record.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// 512 latents and 64 rotary elements of bf16. Latents in `Element`: bf16, or e4m3 with a float for each 128,
/// whose product is rounded to bf16. A token's value is the latents of its key, so a lane reads them once for
/// products and again, from the nearest cache, for sums: 16 tokens of them do not fit its registers, which
/// hold the queries and the sums. Sums of all latents do not fit either: two neighbouring warps make the same
/// products, and each sums half of the latents. That is half as many products again, and no spilled register.
template <dtype Element>
  requires(Element == dtype::bf16 || Element == dtype::fp8_e4m3)
class tensor_latents {
 public:
  static constexpr dtype type = dtype::bf16;
  static constexpr std::uint32_t latents = 512;
  static constexpr std::uint32_t key_dim = 576;
  static constexpr std::uint32_t value_dim = latents / 2;
  static constexpr std::uint32_t columns = 2;
  static constexpr std::uint32_t blocks = 2;
  static constexpr std::uint32_t group = 128;
  static constexpr bool has_token_scales = false;
  static constexpr bool has_zeros = false;
  static constexpr bool has_codes = false;
  static constexpr bool exchanges_keys = false;
  static constexpr bool is_streamed = true;

  /// Rows of the tokens; null: the token does not count.
  struct read {
    const std::byte* key[2]{};
    const std::byte* value[2][2]{};
    bool counts[2] = {false, false};
  };
  using keys = read;
  using values = read;

  tensor_latents() noexcept = default;
  explicit tensor_latents(const latent_plane& plane) noexcept
      : latents_at_(plane.record.latents_at),
        rotary_at_(plane.record.rotary_at),
        scales_at_(plane.record.scales_at),
        outer_(plane.outer) {}

  [[nodiscard]] LLMMEM_HD static std::uint32_t key_pack(std::uint32_t c, std::uint32_t lane) noexcept {
    return c * 4 + lane % 4;
  }
  [[nodiscard]] LLMMEM_HD static std::uint32_t value_pack(std::uint32_t s, std::uint32_t lane) noexcept {
    return s * 8 + lane / 4;
  }
  [[nodiscard]] LLMMEM_HD static constexpr bool splits_keys() noexcept { return false; }
  [[nodiscard]] LLMMEM_HD static constexpr bool splits_values() noexcept { return false; }

  LLMMEM_HD static void load_key(const attention_shape& shape, const attention_place& at,
                                 const token_place& token, std::uint32_t half, std::uint32_t /*lane*/,
                                 read& into) noexcept {
    into.key[half] = row_of(shape, at, token);
  }
  LLMMEM_HD static void load_value(const attention_shape& shape, const attention_place& at,
                                   const token_place& token, std::uint32_t half, std::uint32_t which,
                                   std::uint32_t /*lane*/, read& into) noexcept {
    into.value[half][which] = row_of(shape, at, token);
  }
  LLMMEM_HD static void clear_key(std::uint32_t half, read& into) noexcept { into.key[half] = nullptr; }
  LLMMEM_HD static void clear_value(std::uint32_t half, std::uint32_t which, read& into) noexcept {
    into.value[half][which] = nullptr;
  }
  // The caller holds what it passes.
  // NOLINTBEGIN(bugprone-return-const-ref-from-parameter)
  [[nodiscard]] LLMMEM_HD static const read& keys_of(const read& from) noexcept { return from; }
  [[nodiscard]] LLMMEM_HD static const read& values_of(const read& from) noexcept { return from; }
  // NOLINTEND(bugprone-return-const-ref-from-parameter)

  [[nodiscard]] LLMMEM_HD tensor_pack key(const read& from, std::uint32_t half, std::uint32_t c,
                                          std::uint32_t lane) const noexcept {
    if (from.key[half] == nullptr) return {};
    if (c * 32 >= latents)
      return elements_at(from.key[half] + rotary_at_ + std::uint64_t{key_pack(c, lane) - latents / 8} * 16);
    return latents_at(from.key[half], key_pack(c, lane), c * 32 / group);
  }
  [[nodiscard]] LLMMEM_HD tensor_pack value(const read& from, std::uint32_t half, std::uint32_t which,
                                            std::uint32_t s, std::uint32_t lane) const noexcept {
    if (from.value[half][which] == nullptr) return {};
    return latents_at(from.value[half][which], value_pack(s, lane), s * 64 / group);
  }

 private:
  [[nodiscard]] LLMMEM_HD static const std::byte* row_of(const attention_shape& shape,
                                                         const attention_place& at,
                                                         const token_place& token) noexcept {
    return at.keys + token.block * shape.keys.strides.block + token.token * shape.keys.strides.token;
  }
  [[nodiscard]] LLMMEM_HD static tensor_pack elements_at(const std::byte* from) noexcept {
    const packet<16> in = load_packet<16>(from);
    return {{in.words[0], in.words[1], in.words[2], in.words[3]}};
  }
  [[nodiscard]] LLMMEM_HD tensor_pack latents_at(const std::byte* row, std::uint32_t pack,
                                                 std::uint32_t of_group) const noexcept {
    if constexpr (Element == dtype::bf16) {
      return elements_at(row + latents_at_ + std::uint64_t{pack} * 16);
    } else {
      const packet<8> in = load_packet<8>(row + latents_at_ + std::uint64_t{pack} * 8);
      float scale = float_of_bits(load_packet<4>(row + scales_at_ + std::uint64_t{of_group} * 4).words[0]);
      if (outer_ != nullptr) scale = product_of(scale, *outer_);
      tensor_pack out{};
      LLMMEM_UNROLL
      for (unsigned w = 0; w < 4; ++w) {
        const float_pair both = pair_of<dtype::fp8_e4m3>(in, w);
        out.word[w] =
            nearest_pair<dtype::bf16>(product_of(both.first, scale), product_of(both.second, scale));
      }
      return out;
    }
  }

  std::uint32_t latents_at_ = 0;
  std::uint32_t rotary_at_ = 0;
  std::uint32_t scales_at_ = 0;
  const float* outer_ = nullptr;
};

/// Whether tensor cores take a record: `bf16_mla`, `fp8_ds_mla` and those with the same places.
[[nodiscard]] constexpr bool is_tensor_record(const paging::latent_record& of) noexcept {
  const bool has_parts = of.latents == tensor_latents<dtype::bf16>::latents &&
                         of.key_elements() == tensor_latents<dtype::bf16>::key_dim &&
                         of.rotary_element == dtype::bf16 && !of.rotary_in_values && of.after_rows == 0;
  const bool is_plain = of.latent_element == dtype::bf16;
  const bool is_scaled =
      of.latent_element == dtype::fp8_e4m3 && of.group == tensor_latents<dtype::fp8_e4m3>::group &&
      of.scale == paging::latent_scale::f32 && of.order == paging::scale_order::linear && !of.has_outer_scale;
  return has_parts && (is_plain || is_scaled);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
