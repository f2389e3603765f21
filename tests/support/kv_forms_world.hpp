/// @file
/// Layouts with scales, rotary parts, index keys and values of another type, in any order and place.
#pragma once

#include <llmmem/paging/kv_layout.hpp>

#include <array>
#include <cstdint>

#include "support/random.hpp"

namespace llmmem_tests {

/// @param can_be_behind  whether they may lie behind vectors.
inline llmmem::paging::scale_place any_place(random_numbers& random, bool can_be_behind) {
  using llmmem::paging::scale_place;
  constexpr std::array places{scale_place::in_block, scale_place::separate, scale_place::after_vector,
                              scale_place::after_rotary};
  return places[random.below(std::uint64_t{can_be_behind ? 4U : 2U})];
}

/// The same values in another order, with scales elsewhere.
inline llmmem::kv_layout rearranged(llmmem::kv_layout of, random_numbers& random) {
  of.heads_in_block = llmmem::paging::head_order(random.below(std::uint32_t{2}));
  of.order = llmmem::block_order(random.below(llmmem::block_order_count));
  for (llmmem::paging::scale_form* each : {&of.key_scales, &of.value_scales, &of.index_scales})
    each->place = any_place(random, each->group != llmmem::paging::scale_group::channel);
  return of;
}

inline llmmem::paging::scale_form any_scales(random_numbers& random, std::uint32_t run) {
  using llmmem::dtype;
  llmmem::paging::scale_form out{.group = llmmem::paging::scale_group(random.below(std::uint32_t{4}))};
  constexpr std::array types{dtype::f32, dtype::f16, dtype::fp8_e4m3};
  out.element = types[random.below(std::uint64_t{types.size()})];
  out.run = run;
  out.numbers = 1 + random.below(std::uint32_t{2});
  out.has_global = out.group != llmmem::paging::scale_group::none && random.once_in(2);
  return out;
}

/// Any forms, small enough to be looked at byte by byte.
inline llmmem::kv_layout any_forms(random_numbers& random) {
  using llmmem::dtype;
  llmmem::kv_layout out{.layers = 1 + random.below(std::uint32_t{3}),
                        .heads = 1 + random.below(std::uint32_t{3}),
                        .head_dim = 2 * (1 + random.below(std::uint32_t{3})),
                        .block_tokens = 1 + random.below(std::uint32_t{4}),
                        .has_values = !random.once_in(4),
                        .element = random.once_in(2) ? dtype::int8 : dtype::bf16};
  out.key_scales = any_scales(random, 2);
  if (out.has_values) {
    out.value_dim = random.once_in(2) ? 0 : 4;
    if (random.once_in(2)) out.value_element = dtype::int4;
    out.value_scales = any_scales(random, 2);
  }
  if (random.once_in(2)) out.rotary_dim = 1 + random.below(std::uint32_t{2});
  if (random.once_in(2)) {
    out.index_dim = 4;
    out.index_scales = any_scales(random, 4);
  }
  return rearranged(out, random).checked();
}

}  // namespace llmmem_tests
