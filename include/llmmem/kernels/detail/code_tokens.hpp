/// @file
/// The work that turns vectors into codes, and codes into vectors, token by token: of a batch, or of blocks
/// of another memory.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/aligned_access.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Reads eight elements whose address is a multiple of `width`.
[[nodiscard]] LLMMEM_HD inline attention_floats load_values(dtype element, const std::byte* from,
                                                            std::uint32_t width) noexcept {
  attention_floats out{};
  const auto load = [&](unsigned half) {
    return load_aligned<16, cache_hint::streaming, group_access::pieces>(from + std::size_t{16} * half,
                                                                         width);
  };
  const packet<16> first = load(0);
  if (element == dtype::f32) {
    const packet<16> second = load(1);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      out.of[i] = float_of_bits(first.words[i]);
      out.of[i + 4] = float_of_bits(second.words[i]);
    }
  } else if (element == dtype::f16) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = float_of<dtype::f16>(element_of<std::uint16_t>(first, i));
  } else {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = float_of<dtype::bf16>(element_of<std::uint16_t>(first, i));
  }
  return out;
}

LLMMEM_HD inline void store_values(dtype element, std::byte* to, const attention_floats& values,
                                   std::uint32_t width) noexcept {
  packet<16> first{};
  if (element == dtype::f32) {
    packet<16> second{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      first.words[i] = bits_of_float(values.of[i]);
      second.words[i] = bits_of_float(values.of[i + 4]);
    }
    store_aligned<group_access::pieces>(to + 16, second, width);
  } else if (element == dtype::f16) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      set_element(first, i, nearest_of<dtype::f16>(values.of[i]));
  } else {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      set_element(first, i, nearest_of<dtype::bf16>(held_below_infinity(values.of[i])));
  }
  store_aligned<group_access::pieces>(to, first, width);
}

/// Vectors of values: where they are, and the token of the cache that each is for.
struct value_spot {
  token_place place{};
  std::uint64_t layer = 0;
  std::uint64_t values_block = 0;  // of blocks in another memory
};

/// Tokens of a batch, in one layer of the cache.
template <token_front Front>
class batch_values {
 public:
  batch_values(const Front& front, const token_vectors<std::byte> (&batch)[2], std::uint64_t layer) noexcept
      : front_(front), layer_(layer) {
    batch_[0] = batch[0];
    batch_[1] = batch[1];
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t tokens() const noexcept { return front_.tokens(); }
  [[nodiscard]] LLMMEM_HD value_spot at(std::uint64_t token) const noexcept {
    return {front_.at(token), layer_};
  }
  [[nodiscard]] LLMMEM_HD std::byte* vector(std::uint64_t token, const value_spot& /*at*/, std::uint32_t p,
                                            std::uint64_t head) const noexcept {
    const token_vectors<std::byte>& of = batch_[p];
    return of.data + token * of.token_stride + head * of.head_stride;
  }

 private:
  Front front_;
  token_vectors<std::byte> batch_[2]{};
  std::uint64_t layer_;
};

/// All tokens of blocks of a plane, in some layers: pairs of a block of values and a block of codes.
template <class Pair>
class block_values {
 public:
  struct request {
    kv_plane values{};
    const Pair* pairs = nullptr;  // from, to
    std::uint64_t pair_count = 0;
    std::uint64_t from_blocks = 0;
    std::uint64_t to_blocks = 0;
    std::uint32_t first_layer = 0;
    divider layers{};
    divider tokens{};  // of a block
    bool is_from_values = true;
  };
  explicit block_values(const request& of) noexcept : of_(of) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t tokens() const noexcept {
    return of_.pair_count * of_.layers.by() * of_.tokens.by();
  }
  [[nodiscard]] LLMMEM_HD value_spot at(std::uint64_t token) const noexcept {
    const std::uint64_t outer = of_.tokens.quotient(token);
    const std::uint64_t number = of_.layers.quotient(outer);
    const Pair pair = of_.pairs[number];
    value_spot out;
    if (pair.from < 0 || pair.to < 0) return out;
    const auto from = static_cast<std::uint64_t>(pair.from);
    const auto to = static_cast<std::uint64_t>(pair.to);
    out.place.what = token_place::kind::out_of_range;
    if (from >= of_.from_blocks || to >= of_.to_blocks) return out;
    out.place = {token_place::kind::in_cache, of_.is_from_values ? to : from,
                 token - outer * of_.tokens.by()};
    out.layer = of_.first_layer + (outer - number * of_.layers.by());
    out.values_block = of_.is_from_values ? from : to;
    return out;
  }
  [[nodiscard]] LLMMEM_HD std::byte* vector(std::uint64_t /*token*/, const value_spot& at,
                                            std::uint32_t /*p*/, std::uint64_t head) const noexcept {
    return plane_base(of_.values, at.layer) +
           of_.values.strides.offset(0, at.values_block, at.place.token, head);
  }

 private:
  request of_;
};

/// All planes of codes of the tokens of `Values`. An item is a head's key or value of a token: each lane has
/// eight elements of it. Keys and values are neighbours in a warp, so what differs between them, runs and
/// rotations, changes what a lane keeps, and not which lanes exchange.
template <kv_direction Direction, class Values>
class code_tokens_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 4;

  struct request {
    coded_plane planes[2]{};
    std::uint32_t packs[2]{};        // of a vector
    std::uint32_t value_width[2]{};  // the alignment of eight values
    std::uint32_t plane_count = 1;
    std::uint32_t heads = 1;
    std::uint32_t lanes = 8;
    dtype element = dtype::f32;  // of the values
    std::uint32_t* out_of_range = nullptr;
  };

  code_tokens_work(const Values& values, const request& of) noexcept
      : values_(values), of_(of), heads_(of.heads), units_(of.heads * of.plane_count) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return values_.tokens() * units_.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return of_.lanes; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const std::uint64_t token = units_.quotient(item);
    const std::uint32_t unit = units_.remainder(item);
    const auto p = static_cast<std::uint32_t>(heads_.quotient(unit));
    const std::uint32_t head = unit - p * heads_.by();
    value_spot at{};
    if (token < values_.tokens()) at = values_.at(token);
    if (at.place.what == token_place::kind::out_of_range && of_.out_of_range != nullptr)
      raise_flag(*of_.out_of_range);
    const bool is_there = at.place.what == token_place::kind::in_cache;
    // Lanes past a vector's end have zeros.
    const std::uint32_t packs = !is_there ? 0 : p == 0 ? of_.packs[0] : of_.packs[1];
    const coded_plane& plane = of_.planes[p == 0 ? 0 : 1];
    std::byte* const values = is_there ? values_.vector(token, at, p, head) : nullptr;
    coded_head codes{};
    if (is_there) codes = head_of(plane, at.layer, head);
    const std::uint32_t width = p == 0 ? of_.value_width[0] : of_.value_width[1];
    typename Group::template held<attention_floats> x;
    group.each([&](std::uint32_t lane) {
      x[lane] = {};
      if (lane >= packs) return;
      if constexpr (Direction == kv_direction::append) {
        x[lane] = load_values(of_.element, values + std::uint64_t{lane} * value_bytes(), width);
      } else {
        const code_words words = load_codes(
            plane.code, codes_at(plane, codes, at.place.block, at.place.token, lane), plane.code_width);
        x[lane] = pack_scales(plane, codes, at.place.block, lane)
                      .scaled(plane, at.place.token, floats_of_codes(plane.code, words));
      }
    });
    turn_keys(group, p, x);
    if constexpr (Direction == kv_direction::append) {
      encode(group, plane, codes, at, head, packs, x);
    } else {
      group.each([&](std::uint32_t lane) {
        if (lane < packs)
          store_values(of_.element, values + std::uint64_t{lane} * value_bytes(), x[lane], width);
      });
    }
  }

 private:
  [[nodiscard]] LLMMEM_HD std::uint32_t value_bytes() const noexcept {
    return attention_pack * (of_.element == dtype::f32 ? 4 : 2);
  }

  template <class Group>
  LLMMEM_HD void turn_keys(const Group& group, std::uint32_t p,
                           typename Group::template held<attention_floats>& x) const noexcept {
    const coded_plane& keys = of_.planes[0];
    if (keys.rotated_packs == 0) return;
    typename Group::template held<attention_floats> turned;
    group.each([&](std::uint32_t lane) { turned[lane] = x[lane]; });
    rotate_lanes(group, turned, keys.rotated_packs, keys.rotation);
    group.each([&](std::uint32_t lane) {
      if (p == 0) x[lane] = turned[lane];
    });
  }

  template <class Group>
  LLMMEM_HD void encode(const Group& group, const coded_plane& plane, const coded_head& head,
                        const value_spot& at, std::uint32_t head_number, std::uint32_t packs,
                        typename Group::template held<attention_floats>& x) const noexcept {
    typename Group::template held<float> largest;
    group.each([&](std::uint32_t lane) {
      std::uint32_t most = 0;
      LLMMEM_UNROLL
      for (unsigned i = 0; i < attention_pack; ++i) {
        const std::uint32_t size = bits_of_float(x[lane].of[i]) & 0x7FFF'FFFFU;
        most = size > most ? size : most;
      }
      largest[lane] = float_of_bits(most);
    });
    const std::uint32_t in_run = plane.run.by();
    typename Group::template held<float> other;
    // Of values with a zero point: the least and the largest. All lanes of a warp exchange them, or none.
    const bool has_zeros = of_.planes[0].has_zero || (of_.plane_count > 1 && of_.planes[1].has_zero);
    typename Group::template held<float> least;
    typename Group::template held<float> most;
    if (has_zeros) {
      group.each([&](std::uint32_t lane) {
        least[lane] = -lowest();
        most[lane] = lowest();
        if (lane >= packs) return;  // zeros past a vector's end are none of its values
        LLMMEM_UNROLL
        for (unsigned i = 0; i < attention_pack; ++i) {
          const float each = x[lane].of[i];
          least[lane] = each < least[lane] ? each : least[lane];
          most[lane] = each > most[lane] ? each : most[lane];
        }
      });
      for (std::uint32_t step = 1; step < group.count(); step *= 2) {
        group.each([&](std::uint32_t lane) { other[lane] = least[lane]; });
        group.swap(other, step);
        group.each([&](std::uint32_t lane) {
          if (step < in_run && other[lane] < least[lane]) least[lane] = other[lane];
        });
        group.each([&](std::uint32_t lane) { other[lane] = most[lane]; });
        group.swap(other, step);
        group.each([&](std::uint32_t lane) {
          if (step < in_run && other[lane] > most[lane]) most[lane] = other[lane];
        });
      }
    }
    for (std::uint32_t step = 1; step < group.count(); step *= 2) {
      group.each([&](std::uint32_t lane) { other[lane] = largest[lane]; });
      group.swap(other, step);
      group.each([&](std::uint32_t lane) {
        // Infinities and NaNs are the largest as bits.
        if (step < in_run && bits_of_float(other[lane]) > bits_of_float(largest[lane]))
          largest[lane] = other[lane];
      });
    }
    group.each([&](std::uint32_t lane) {
      if (lane >= packs) return;
      const float global = plane.global == nullptr
                               ? 1.0F
                               : plane.global[plane.is_global_by_head && !plane.has_global ? head_number : 0];
      const auto run = static_cast<std::uint32_t>(plane.run.quotient(lane));
      std::byte* const numbers = head.scales + at.place.block * plane.scales.strides.block +
                                 at.place.token * plane.scales.strides.token +
                                 std::uint64_t{run} * plane.group_bytes();
      coded_scale scale;
      code_words codes{};
      if (plane.has_zero) {
        const coded_range range = coded_range_of(plane.code, plane.scale, least[lane], most[lane],
                                                 bits_of_float(largest[lane]), global);
        scale = range.of;
        codes = codes_of_floats<true>(plane.code, x[lane], scale.inverse, range.zero);
        if (lane == run * in_run)
          store_scale(plane.scale, numbers + scale_bytes_of(plane.scale), range.stored_zero);
      } else {
        scale = coded_scale_of(plane.code, plane.scale, bits_of_float(largest[lane]), global);
        codes = codes_of_floats(plane.code, x[lane], scale.inverse);
      }
      detail::store_codes(plane.code, codes_at(plane, head, at.place.block, at.place.token, lane), codes,
                          plane.code_width);
      if (lane == run * in_run) store_scale(plane.scale, numbers, scale.stored);
      // A block's first token says the scale of all.
      if (plane.has_global && lane == 0 && head_number == 0 && at.place.token == 0)
        store_packet<4>(head.globals + at.place.block * plane.globals.strides.block,
                        packet<4>{{bits_of_float(global)}});
    });
  }

  Values values_;
  request of_;
  divider heads_;
  divider units_;  // of a token: planes x heads
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
