/// @file
/// The bodies of `append_mla` and `gather_mla` over records.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/code_tokens.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/detail/latent_rows.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/latent_tokens.hpp>
#include <llmmem/paging/errors.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// What a lane has of a token, and the largest sizes of the groups that its packs belong to.
struct latent_lane_values {
  attention_floats of[latent_key_slots];
  float largest[latent_key_slots];
};

/// A token of a batch and its record, for 32 lanes.
template <kv_direction Direction, token_front Front>
class latent_tokens_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 4;

  struct request {
    latent_plane plane{};
    token_vectors<std::byte> batch[2]{};  // latents, rotary keys
    std::uint32_t width[2]{};             // the alignment of eight elements of each
    std::uint32_t layer = 0;
    dtype element = dtype::f32;
    std::uint32_t* out_of_range = nullptr;
  };

  latent_tokens_work(const Front& front, const request& of) noexcept : front_(front), of_(of) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return front_.tokens(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return latent_lanes; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t token, const Group& group) const noexcept {
    token_place place{};
    if (token < front_.tokens()) place = front_.at(token);
    if (place.what == token_place::kind::out_of_range && of_.out_of_range != nullptr)
      raise_flag(*of_.out_of_range);
    const bool is_there = place.what == token_place::kind::in_cache;
    const std::uint32_t packs = is_there ? of_.plane.packs : 0;
    const latent_base base = base_of(of_.plane, of_.layer);
    const latent_row row = is_there ? row_at(of_.plane, base, place) : latent_row{};
    if constexpr (Direction == kv_direction::gather) {
      group.each([&](std::uint32_t lane) {
        for (std::uint32_t pack = lane; pack < packs; pack += latent_lanes)
          store_values(of_.element, vector_of(token, pack), read_pack(of_.plane, row, base.outer, pack),
                       width_of(pack));
      });
    } else {
      append(token, group, packs, base, row);
    }
  }

 private:
  /// Eight elements of the batch.
  [[nodiscard]] LLMMEM_HD std::byte* vector_of(std::uint64_t token, std::uint32_t pack) const noexcept {
    const std::uint32_t bytes = attention_pack * (of_.element == dtype::f32 ? 4 : 2);
    if (pack < of_.plane.latent_packs)
      return of_.batch[0].data + token * of_.batch[0].token_stride + std::uint64_t{pack} * bytes;
    return of_.batch[1].data + token * of_.batch[1].token_stride +
           std::uint64_t{pack - of_.plane.latent_packs} * bytes;
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t width_of(std::uint32_t pack) const noexcept {
    return pack < of_.plane.latent_packs ? of_.width[0] : of_.width[1];
  }

  template <class Group>
  LLMMEM_HD void append(std::uint64_t token, const Group& group, std::uint32_t packs, const latent_base& base,
                        const latent_row& row) const noexcept {
    const latent_plane& plane = of_.plane;
    typename Group::template held<latent_lane_values> own;
    group.each([&](std::uint32_t lane) {
      LLMMEM_UNROLL
      for (std::uint32_t slot = 0; slot < latent_key_slots; ++slot) {
        const std::uint32_t pack = lane + slot * latent_lanes;
        own[lane].of[slot] = {};
        if (pack < packs)
          own[lane].of[slot] = load_values(of_.element, vector_of(token, pack), width_of(pack));
        own[lane].largest[slot] = largest_of(own[lane].of[slot]);
      }
    });
    // Groups begin at multiples of their length, so none is in two slots; 32 lanes hold one of 256
    // elements.
    LLMMEM_UNROLL
    for (std::uint32_t slot = 0; slot < latent_key_slots; ++slot)
      join_largest(group, own, slot, 1U << plane.group_bits);
    typename Group::template held<float> outer;
    group.each([&](std::uint32_t lane) { outer[lane] = base.outer; });
    if (plane.record.has_outer_scale) find_outer(group, own, outer);
    typename Group::template held<float> rotary;
    group.each([&](std::uint32_t lane) { rotary[lane] = 1.0F; });
    if (plane.record.has_rotary_scale) find_rotary(group, own, rotary);
    group.each([&](std::uint32_t lane) {
      if (packs == 0) return;
      LLMMEM_UNROLL
      for (std::uint32_t slot = 0; slot < latent_key_slots; ++slot) {
        const std::uint32_t pack = lane + slot * latent_lanes;
        if (pack >= packs) continue;
        const bool has_callers =
            plane.record.group == 0 && (pack < plane.latent_packs || !plane.record.has_rotary_scale);
        float factor = has_callers ? outer[lane] : rotary[lane];
        if (pack < plane.latent_packs && plane.record.group != 0)
          factor = put_scale(row, pack, own[lane].largest[slot], outer[lane]);
        write_pack(plane, row, pack, own[lane].of[slot], factor);
      }
      if (lane == 0 && plane.record.has_outer_scale)
        store_packet<4>(row.row + plane.record.outer_scale_at, packet<4>{{bits_of_float(outer[lane])}});
      if (lane == 0 && plane.record.has_rotary_scale)
        store_packet<4>(row.row + plane.record.rotary_scale_at, packet<4>{{bits_of_float(rotary[lane])}});
      std::byte* const padded = plane.record.after_rows == 0 ? row.row : row.scales - plane.record.scales_at;
      for (std::uint32_t i = lane; i < plane.record.pad_bytes; i += latent_lanes)
        store_packet<1>(padded + plane.record.pad_at + i, packet<1>{{0}});
    });
  }

  /// The largest size as bits: infinities and NaNs are above all numbers.
  [[nodiscard]] LLMMEM_HD static float largest_of(const attention_floats& values) noexcept {
    std::uint32_t most = 0;
    LLMMEM_UNROLL
    for (const float value : values.of) {
      const std::uint32_t size = bits_of_float(value) & 0x7FFF'FFFFU;
      most = size > most ? size : most;
    }
    return float_of_bits(most);
  }
  [[nodiscard]] LLMMEM_HD static float larger_bits(float a, float b) noexcept {
    return bits_of_float(b) > bits_of_float(a) ? b : a;
  }
  template <class Group>
  LLMMEM_HD static void join_largest(const Group& group,
                                     typename Group::template held<latent_lane_values>& own,
                                     std::uint32_t slot, std::uint32_t lanes) noexcept {
    typename Group::template held<float> most;
    group.each([&](std::uint32_t lane) { most[lane] = own[lane].largest[slot]; });
    for (std::uint32_t step = 1; step < lanes; step *= 2)
      join_pairs(group, most, step, [](float a, float b) { return larger_bits(a, b); });
    group.each([&](std::uint32_t lane) { own[lane].largest[slot] = most[lane]; });
  }

  /// max(amax of some packs / by, 2^-126), the same in all lanes.
  template <class Group, class Counts>
  LLMMEM_HD void find_scale(const Group& group, const typename Group::template held<latent_lane_values>& own,
                            typename Group::template held<float>& scale, float by,
                            const Counts& counts) const noexcept {
    group.each([&](std::uint32_t lane) {
      scale[lane] = 0;
      LLMMEM_UNROLL
      for (std::uint32_t slot = 0; slot < latent_key_slots; ++slot) {
        if (counts(lane + slot * latent_lanes, own[lane].largest[slot]))
          scale[lane] = larger_bits(scale[lane], own[lane].largest[slot]);
      }
    });
    join_lanes(group, scale, [](float a, float b) { return larger_bits(a, b); });
    group.each([&](std::uint32_t lane) {
      if (bits_of_float(scale[lane]) >= 0x7F80'0000U) {
        scale[lane] = float_of_bits(0x7FFF'FFFFU);
        return;
      }
      const float wanted = quotient_of(scale[lane], by);
      scale[lane] = wanted < 0x1p-126F ? 0x1p-126F : wanted;
    });
  }
  template <class Group>
  LLMMEM_HD void find_outer(const Group& group, const typename Group::template held<latent_lane_values>& own,
                            typename Group::template held<float>& outer) const noexcept {
    find_scale(group, own, outer,
               largest_number(of_.plane.record.latent_element) * largest_code<dtype::fp8_e4m3>,
               [&](std::uint32_t pack, float largest) {
                 return pack < of_.plane.latent_packs && bits_of_float(largest) < 0x7F80'0000U;
               });
  }
  template <class Group>
  LLMMEM_HD void find_rotary(const Group& group, const typename Group::template held<latent_lane_values>& own,
                             typename Group::template held<float>& rotary) const noexcept {
    // Rotary packs were joined with their neighbours as groups, of latents with latents alone.
    find_scale(group, own, rotary, largest_code<dtype::fp8_e4m3>,
               [&](std::uint32_t pack, float /*largest*/) { return pack >= of_.plane.latent_packs; });
  }

  /// Writes the scale of a pack's group, by the lane of its first pack. @return what its codes are multiplied
  /// by
  [[nodiscard]] LLMMEM_HD float put_scale(const latent_row& row, std::uint32_t pack, float largest,
                                          float outer) const noexcept {
    const paging::latent_record& of = of_.plane.record;
    const latent_factor out = factor_of_group(of, bits_of_float(largest), outer);
    const std::uint32_t group = pack >> of_.plane.group_bits;
    if (group << of_.plane.group_bits != pack) return out.factor;
    const std::uint32_t place = of.place_of_scale(group);
    if (of.scale == paging::latent_scale::f32) {
      store_packet<4>(row.scales + std::size_t{4} * place, packet<4>{{out.stored}});
    } else {
      store_packet<1>(row.scales + place, packet<1>{{static_cast<std::uint8_t>(out.stored)}});
    }
    return out.factor;
  }

  Front front_;
  request of_;
};

/// Moves tokens between a batch and records.
template <kv_direction Direction, class Run, token_front Front>
result<void> move_latents(const Run& run, const Front& front, const token_vectors<std::byte>& latent,
                          const token_vectors<std::byte>& rotary, const paging::latent_record& record,
                          const kv_memory& cache, std::uint32_t layer, const token_options& options) {
  constexpr bool is_append = Direction == kv_direction::append;
  const token_names& names = is_append ? append_mla_names : gather_mla_names;
  const kv_layout& layout = cache.layout;
  if (auto fits = check_latent_layout(cache, record, names.who); !fits) return fits;
  if (options.element != dtype::f32 && options.element != dtype::bf16 && options.element != dtype::f16)
    return failure{errc::no_conversion, 0,
                   static_cast<std::uint64_t>(is_append ? record.latent_element : options.element),
                   static_cast<std::uint64_t>(is_append ? options.element : record.latent_element),
                   names.who};
  if (layout.layers == 0 || layer >= layout.layers)
    return failure{errc::out_of_range, 0, layer, layout.layers == 0 ? 0 : layout.layers - 1, names.layer};
  if (front.blocks() > cache.blocks)
    return failure{errc::no_such_block, 0, front.blocks() - 1, cache.blocks, names.who};
  if (front.block_tokens() == 0 || front.block_tokens() != layout.block_tokens)
    return failure{errc::block_tokens_differ, 0, front.block_tokens(), layout.block_tokens, names.who};
  if constexpr (telling_front<Front>) {
    if (const char* const what = front.missing(); what != nullptr)
      return failure{errc::too_short, 0, front.tokens(), 0, what};
  }
  const std::uint64_t tokens = front.tokens();
  if (tokens == 0) return {};
  if (auto fits = check_memory(cache, names.cache); !fits) return fits;
  using work = latent_tokens_work<Direction, Front>;
  typename work::request to;
  to.plane = latent_plane_of(cache, record, options.scales.keys);
  to.batch[0] = latent;
  to.batch[1] = rotary;
  const std::uint64_t element = bits_of(options.element) / 8;
  const std::uint32_t elements[] = {record.latents, record.rotary};
  for (std::size_t i = 0; i < 2; ++i) {
    if (elements[i] == 0) continue;
    const vector_array vectors{.data = to.batch[i].data,
                               .tokens = tokens,
                               .token_stride = to.batch[i].token_stride,
                               .heads = 1,
                               .vector_bytes = elements[i] * element};
    if (auto fits = check_vectors(vectors, !is_append, names.batch[i]); !fits) return fits;
    const auto at = std::uint64_t{reinterpret_cast<std::uintptr_t>(to.batch[i].data)};
    if (auto fits = whole(at, element, names.batch[i].data); !fits) return fits;
    if (tokens <= 1) to.batch[i].token_stride = 0;
    if (auto fits = whole(to.batch[i].token_stride, element, names.batch[i].token_stride); !fits) return fits;
    to.width[i] = std::min<std::uint32_t>(alignment_of(at, to.batch[i].token_stride), 16);
  }
  to.layer = layer;
  to.element = options.element;
  to.out_of_range = options.out_of_range;
  return run.each(work(front, to));
}

}  // namespace detail

template <class Run, token_front Front>
result<void> append_mla(const Run& run, const Front& front, const batch_vectors& latent,
                        const batch_vectors& rotary, const paging::latent_record& record,
                        const kv_memory& cache, std::uint32_t layer, const token_options& options) {
  // An append only reads them.
  const auto read = [](const batch_vectors& of) {
    return token_vectors<std::byte>{const_cast<std::byte*>(of.data), of.token_stride, of.head_stride};
  };
  return detail::move_latents<kv_direction::append>(run, front, read(latent), read(rotary), record, cache,
                                                    layer, options);
}

template <class Run, token_front Front>
result<void> gather_mla(const Run& run, const Front& front, const batch_output& latent,
                        const batch_output& rotary, const paging::latent_record& record,
                        const kv_memory& cache, std::uint32_t layer, const token_options& options) {
  return detail::move_latents<kv_direction::gather>(run, front, latent, rotary, record, cache, layer,
                                                    options);
}

}  // namespace v0
}  // namespace llmmem
