/// @file
/// From the sums of vectors to the outputs of a share.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Stores what a share says for each of its query heads.
/// @param place  (pack, i): where the sums of a head have element `i` of a pack.
template <class Sums, class Place>
void finish_vectors(const attention_shape& shape, const attention_place& at, const Sums& sums,
                    Place place) noexcept {
  for (std::uint32_t h = 0; h < at.queries; ++h) {
    const attention_output output{at.row, at.first_query + h, at.head};
    const float total = sums.total(h);
    for (std::uint32_t pack = 0; pack < shape.value_packs; ++pack) {
      attention_total of{{}, sums.most[h], total};
      for (std::uint32_t i = 0; i < attention_pack; ++i)
        of.sum.of[i] = sums.sum[h * sums.value_stride + place(pack, i)];
      finish_share(shape, output, at.share, at.span.shares, pack, of);
    }
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
