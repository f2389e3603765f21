/// @file
/// Keys and values in codes as tensor cores take them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/tensor_code_packs.hpp>
#include <llmmem/kernels/detail/tensor_forms.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Codes whose numbers halves hold, with a scale for each token's vector. Products of codes are exact as in
/// floats: the scales of keys multiply them afterwards, and those of values the weights before.
///
/// With `Runs`, a plane of e2m1 may have scales of e4m3 by run: these multiply the numbers where they are
/// read, without rounding.
///
/// With `Zeros`, planes may have zeros next to their scales, for integers. With a vector's zero z, scale s
/// and codes c, q (s c + z) = s (q c) + z sum(q), where the sum is of the query as tensor cores take it; and
/// of weighted values the sum of w z is the same for all elements. Both are sums of floats.
///
/// Packs of a lane are neighbours, so that it reads up to 16 bytes at once.
template <std::uint32_t Dim, bool Runs, bool Zeros = false>
class tensor_codes : public tensor_held<Dim> {
  struct no_runs {};
  template <std::uint32_t Packs>
  using runs_of = std::conditional_t<Runs, run_scales<Packs>, no_runs>;

 public:
  static constexpr dtype type = dtype::f16;
  static constexpr std::uint32_t key_dim = Dim;
  static constexpr std::uint32_t value_dim = Dim;
  static constexpr std::uint32_t columns = 1;
  static constexpr std::uint32_t blocks = (Dim == 64 && !Zeros ? 5 : 3) - (Runs ? 1 : 0);
  static constexpr bool is_streamed = false;
  static constexpr bool has_token_scales = true;
  static constexpr bool has_zeros = Zeros;
  static constexpr bool has_codes = true;
  static constexpr bool exchanges_keys = false;

  using keys = tensor_keys<Dim>;
  using values = tensor_values<Dim>;

  // Registers, which the loads fill.
  struct read {  // NOLINT(cppcoreguidelines-pro-type-member-init)
    code_run<2> key[2][Dim / 64];
    code_run<Dim / 64> value[2][2];
    runs_of<2> key_runs[2][Dim / 64];
    runs_of<Dim / 64> value_runs[2][2];
    float key_scale[2];    // of tokens g and g + 8
    float value_scale[2];  // of the same
    float key_zero[2];     // with `Zeros`
    float value_zero[2];
    bool counts[2] = {false, false};
  };

  tensor_codes() noexcept = default;
  explicit tensor_codes(const attention_codes& codes) noexcept
      : codes_(codes),
        key_width_(std::min(plane_width(codes.keys.codes), 2 * codes.keys.pack_bytes())),
        value_width_(std::min(plane_width(codes.values.codes), Dim / 64 * codes.values.pack_bytes())) {}

  [[nodiscard]] LLMMEM_HD static std::uint32_t key_pack(std::uint32_t c, std::uint32_t lane) noexcept {
    return c / 2 * 8 + lane % 4 * 2 + c % 2;
  }
  [[nodiscard]] LLMMEM_HD static std::uint32_t value_pack(std::uint32_t s, std::uint32_t lane) noexcept {
    return lane / 4 * (Dim / 64) + s;
  }
  [[nodiscard]] LLMMEM_HD bool splits_keys() const noexcept { return is_half_byte(codes_.keys.code); }
  [[nodiscard]] LLMMEM_HD bool splits_values() const noexcept { return is_half_byte(codes_.values.code); }
  [[nodiscard]] LLMMEM_HD float key_factor() const noexcept { return factor_of(codes_.keys); }
  [[nodiscard]] LLMMEM_HD float value_factor() const noexcept { return factor_of(codes_.values); }
  [[nodiscard]] LLMMEM_HD bool is_rotated() const noexcept { return codes_.keys.rotated_packs != 0; }
  [[nodiscard]] LLMMEM_HD float rotation() const noexcept { return codes_.keys.rotation; }

  LLMMEM_HD void load_key(const attention_shape& shape, const attention_place& at, const token_place& token,
                          std::uint32_t half, std::uint32_t lane, read& into) const noexcept {
    const std::byte* const from = at.keys + token.block * shape.keys.strides.block +
                                  token.token * shape.keys.strides.token +
                                  std::uint64_t{key_pack(0, lane)} * codes_.keys.pack_bytes();
    LLMMEM_UNROLL
    for (std::uint32_t r = 0; r < Dim / 64; ++r)
      into.key[half][r].load(codes_.keys.code, from + std::uint64_t{r} * 8 * codes_.keys.pack_bytes(),
                             key_width_);
    if constexpr (Runs) {
      if (key_has_runs()) {
        LLMMEM_UNROLL
        for (std::uint32_t r = 0; r < Dim / 64; ++r)
          into.key_runs[half][r].load(codes_.keys, scales_at(codes_.keys, at.head, token),
                                      key_pack(2 * r, lane));
      }
    }
    if constexpr (Zeros) {
      const group_numbers of_key = numbers_at(codes_.keys, at.head, token);
      const group_numbers of_value = numbers_at(codes_.values, at.head, token);
      into.key_scale[half] = of_key.scale;
      into.key_zero[half] = of_key.zero;
      into.value_scale[half] = of_value.scale;
      into.value_zero[half] = of_value.zero;
    } else {
      into.key_scale[half] = scale_at(codes_.keys, at.head, token);
      into.value_scale[half] = scale_at(codes_.values, at.head, token);
    }
  }
  LLMMEM_HD void load_value(const attention_shape& shape, const attention_place& at, const token_place& token,
                            std::uint32_t half, std::uint32_t which, std::uint32_t lane,
                            read& into) const noexcept {
    into.value[half][which].load(codes_.values.code,
                                 at.values + token.block * shape.values.strides.block +
                                     token.token * shape.values.strides.token +
                                     std::uint64_t{value_pack(0, lane)} * codes_.values.pack_bytes(),
                                 value_width_);
    if constexpr (Runs) {
      if (value_has_runs())
        into.value_runs[half][which].load(codes_.values, scales_at(codes_.values, at.head, token),
                                          value_pack(0, lane));
    }
  }
  LLMMEM_HD static void clear_key(std::uint32_t half, read& into) noexcept {
    LLMMEM_UNROLL
    for (auto& each : into.key[half])
      each = {};
    LLMMEM_UNROLL
    for (auto& each : into.key_runs[half])
      each = {};
    into.key_scale[half] = into.value_scale[half] = 0;
    if constexpr (Zeros) into.key_zero[half] = into.value_zero[half] = 0;
  }
  LLMMEM_HD static void clear_value(std::uint32_t half, std::uint32_t which, read& into) noexcept {
    into.value[half][which] = {};
    into.value_runs[half][which] = {};
  }

  [[nodiscard]] LLMMEM_HD tensor_keys<Dim> keys_of(const read& from) const noexcept {
    tensor_keys<Dim> out;
    with_code(codes_.keys.code, [&](dtype code) {
      LLMMEM_UNROLL
      for (std::uint32_t half = 0; half < 2; ++half) {
        LLMMEM_UNROLL
        for (std::uint32_t c = 0; c < Dim / 32; ++c)
          out.of[half][c] = from.key[half][c / 2].halves(code, c % 2);
      }
    });
    if constexpr (Runs) {
      if (key_has_runs()) {
        LLMMEM_UNROLL
        for (std::uint32_t half = 0; half < 2; ++half) {
          LLMMEM_UNROLL
          for (std::uint32_t c = 0; c < Dim / 32; ++c)
            out.of[half][c] = from.key_runs[half][c / 2].times(out.of[half][c], c % 2);
        }
      }
    }
    return out;
  }
  [[nodiscard]] LLMMEM_HD tensor_values<Dim> values_of(const read& from) const noexcept {
    tensor_values<Dim> out;
    with_code(codes_.values.code, [&](dtype code) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        LLMMEM_UNROLL
        for (std::uint32_t s = 0; s < Dim / 64; ++s)
          out.of[i / 2][i % 2][s] = from.value[i / 2][i % 2].halves(code, s);
      }
    });
    if constexpr (Runs) {
      if (value_has_runs()) {
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < 4; ++i) {
          LLMMEM_UNROLL
          for (std::uint32_t s = 0; s < Dim / 64; ++s)
            out.of[i / 2][i % 2][s] = from.value_runs[i / 2][i % 2].times(out.of[i / 2][i % 2][s], s);
        }
      }
    }
    return out;
  }

 private:
  [[nodiscard]] LLMMEM_HD bool key_has_runs() const noexcept {
    return has_exact_runs(codes_.keys, Dim / attention_pack);
  }
  [[nodiscard]] LLMMEM_HD bool value_has_runs() const noexcept {
    return has_exact_runs(codes_.values, Dim / attention_pack);
  }
  [[nodiscard]] LLMMEM_HD const std::byte* scales_at(const coded_plane& plane, std::uint32_t head,
                                                     const token_place& token) const noexcept {
    return head_of(plane, codes_.layer, head).scales + token.block * plane.scales.strides.block +
           token.token * plane.scales.strides.token;
  }
  /// One branch for all of a lane's codes: within it the code is a constant.
  template <class Act>
  LLMMEM_HD static void with_code(dtype code, const Act& act) noexcept {
    if (code == dtype::int8) return act(dtype::int8);
    if (code == dtype::int4) return act(dtype::int4);
    if (code == dtype::fp4_e2m1) return act(dtype::fp4_e2m1);
    act(dtype::fp8_e4m3);
  }
  [[nodiscard]] LLMMEM_HD static float factor_of(const coded_plane& plane) noexcept {
    return plane.code == dtype::fp4_e2m1 ? e2m1_factor : 1.0F;
  }
  [[nodiscard]] LLMMEM_HD float scale_at(const coded_plane& plane, std::uint32_t head,
                                         const token_place& token) const noexcept {
    const float global = global_of(plane, head_of(plane, codes_.layer, head), token.block);
    if constexpr (Runs) {
      if (has_exact_runs(plane, Dim / attention_pack)) return global;
    }
    return whole_scale(load_scale(plane.scale, scales_at(plane, head, token)), global);
  }
  /// Those of a plane without zeros have -0.
  [[nodiscard]] LLMMEM_HD group_numbers numbers_at(const coded_plane& plane, std::uint32_t head,
                                                   const token_place& token) const noexcept {
    const coded_head of = head_of(plane, codes_.layer, head);
    return token_numbers(plane, of, token.block, token.token, 0, global_of(plane, of, token.block));
  }

  attention_codes codes_{};
  std::uint32_t key_width_ = 1;
  std::uint32_t value_width_ = 1;
};

/// Codes of any scales: each value, code x scale, is rounded to bf16, and the rest is that of a cache of
/// bf16.
template <std::uint32_t Dim>
class tensor_rounded_codes : public tensor_elements<dtype::bf16, Dim> {
  using base = tensor_elements<dtype::bf16, Dim>;

 public:
  using typename base::read;
  static constexpr bool has_codes = true;
  static constexpr bool exchanges_keys = true;
  static constexpr std::uint32_t blocks = Dim == 64 ? 3 : 2;

  tensor_rounded_codes() noexcept = default;
  explicit tensor_rounded_codes(const attention_codes& codes) noexcept
      : codes_(codes), key_width_(std::min(plane_width(codes.keys.codes), 8U)) {}

  [[nodiscard]] LLMMEM_HD bool is_rotated() const noexcept { return codes_.keys.rotated_packs != 0; }
  [[nodiscard]] LLMMEM_HD float rotation() const noexcept { return codes_.keys.rotation; }

  LLMMEM_HD void load_key(const attention_shape& /*shape*/, const attention_place& at,
                          const token_place& token, std::uint32_t half, std::uint32_t lane,
                          read& into) const noexcept {
    load_packs<Dim / 32>(codes_.keys, at.head, token, into.key[half],
                         [&](std::uint32_t c) { return base::key_pack(c, lane); });
  }
  LLMMEM_HD void load_value(const attention_shape& /*shape*/, const attention_place& at,
                            const token_place& token, std::uint32_t half, std::uint32_t which,
                            std::uint32_t lane, read& into) const noexcept {
    load_packs<Dim / 64>(codes_.values, at.head, token, into.value[half][which],
                         [&](std::uint32_t s) { return base::value_pack(s, lane); });
  }
  /// The keys of eight tokens in one block. Four lanes would read 16 bytes of a token's codes of four bits at
  /// once, half of a sector; so each reads two neighbouring packs, and then they exchange them. Scales by
  /// channel are four times as long, and of these lanes read neighbouring packs.
  template <class Group>
  LLMMEM_HD void load_keys(const Group& group, const attention_shape& shape, const attention_place& at,
                           const token_place& first, std::uint32_t half,
                           typename Group::template held<read>& into) const noexcept {
    const coded_plane& plane = codes_.keys;
    const auto token_of = [&](std::uint32_t lane) {
      token_place out = first;
      out.token += lane / 4;
      return out;
    };
    if (!is_half_byte(plane.code)) {
      group.each([&](std::uint32_t lane) { load_key(shape, at, token_of(lane), half, lane, into[lane]); });
      return;
    }
    const coded_head of = head_of(plane, codes_.layer, at.head);
    typename Group::template held<std::uint32_t> pair[Dim / 64][2];
    group.each([&](std::uint32_t lane) {
      const std::byte* const from = codes_at(plane, of, first.block, token_of(lane).token, lane % 4 * 2);
      LLMMEM_UNROLL
      for (std::uint32_t r = 0; r < Dim / 64; ++r) {
        const packet<8> in = load_aligned<8, cache_hint::streaming, group_access::pieces>(
            from + std::size_t{8} * r * plane.pack_bytes(), key_width_);
        pair[r][0][lane] = in.words[0];
        pair[r][1][lane] = in.words[1];
      }
    });
    typename Group::template held<std::uint32_t> words[Dim / 32];
    LLMMEM_UNROLL
    for (std::uint32_t c = 0; c < Dim / 32; ++c) {
      const auto from = [&](std::uint32_t lane) { return (lane & ~3U) + c % 2 * 2 + lane % 4 / 2; };
      typename Group::template held<std::uint32_t> second;
      group.take_from(words[c], pair[c / 2][0], from);
      group.take_from(second, pair[c / 2][1], from);
      group.each([&](std::uint32_t lane) {
        if (lane % 2 != 0) words[c][lane] = second[lane];
      });
    }
    group.each([&](std::uint32_t lane) {
      make_values<Dim / 32>(
          plane, of, token_of(lane), into[lane].key[half],
          [&](std::uint32_t c) { return base::key_pack(c, lane); },
          [&](std::uint32_t c) { return code_words{{words[c][lane], 0}}; });
    });
  }

 private:
  template <std::uint32_t Packs, class Pack>
  LLMMEM_HD void load_packs(const coded_plane& plane, std::uint32_t head, const token_place& token,
                            attention_raw<dtype::bf16> (&into)[Packs], const Pack& pack_of) const noexcept {
    const coded_head of = head_of(plane, codes_.layer, head);
    make_values<Packs>(plane, of, token, into, pack_of, [&](std::uint32_t i) {
      return load_codes(plane.code, codes_at(plane, of, token.block, token.token, pack_of(i)),
                        plane.code_width);
    });
  }
  template <std::uint32_t Packs, class Pack, class Words>
  LLMMEM_HD static void make_values(const coded_plane& plane, const coded_head& of, const token_place& token,
                                    attention_raw<dtype::bf16> (&into)[Packs], const Pack& pack_of,
                                    const Words& words_of) noexcept {
    const float global = global_of(plane, of, token.block);
    const bool is_whole = !plane.is_by_channel && plane.run.by() >= Dim / attention_pack;
    group_numbers whole = no_numbers;
    if (is_whole) whole = token_numbers(plane, of, token.block, token.token, 0, global);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < Packs; ++i) {
      attention_floats floats = floats_of_codes(plane.code, words_of(i));
      if (plane.is_by_channel) {
        floats = scaled_by(scales_of_channels(plane, of, token.block, pack_of(i)), floats);
      } else {
        const group_numbers by =
            is_whole ? whole : token_numbers(plane, of, token.block, token.token, pack_of(i), global);
        floats = scaled_by(by, plane.has_zero, floats);
      }
      LLMMEM_UNROLL
      for (unsigned w = 0; w < 4; ++w)
        into[i].part[0].words[w] =
            nearest_pair<dtype::bf16>(floats.of[std::size_t{2} * w], floats.of[std::size_t{2} * w + 1]);
    }
  }

  attention_codes codes_{};
  std::uint32_t key_width_ = 1;
};

/// How tensor cores take both planes of a layout in codes.
enum class tensor_exactness : std::uint8_t { by_token, by_token_and_zero, by_run, rounded };
[[nodiscard]] constexpr tensor_exactness tensor_exactness_of(const kv_layout& layout) noexcept {
  auto out = tensor_exactness::by_token;
  bool has_zeros = false;
  for (std::uint32_t p = 0; p < 2; ++p) {
    const paging::scale_form& scales = scales_of_plane(layout, p);
    const bool is_whole =
        scales.group == paging::scale_group::vector ||
        (scales.group == paging::scale_group::run && scales.run >= layout.vector_elements(p));
    has_zeros = has_zeros || scales.numbers == 2;
    if (is_whole) continue;
    const bool is_exact = scales.group == paging::scale_group::run && scales.element == dtype::fp8_e4m3 &&
                          layout.element_of(p) == dtype::fp4_e2m1;
    out = std::max(out, is_exact ? tensor_exactness::by_run : tensor_exactness::rounded);
  }
  if (!has_zeros) return out;
  return out == tensor_exactness::by_token ? tensor_exactness::by_token_and_zero : tensor_exactness::rounded;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
