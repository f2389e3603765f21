/// @file
/// The work of `attention_arithmetic::host_integers` by AMX: shares of rows, for heads of the cache whose
/// codes are neighbours.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/amx_integers.hpp>
#include <llmmem/kernels/detail/amx_sums.hpp>
#include <llmmem/kernels/detail/amx_tiles.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/code_tiles.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/subnormal_guard.hpp>
#include <llmmem/kernels/detail/vector_heads.hpp>
#include <llmmem/kernels/detail/vector_output.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(__x86_64__)

// NOLINTBEGIN(cppcoreguidelines-pro-type-member-init): tiles are large, and written before they are read

/// Where a token's heads are neighbours, an item attends with up to 16 of them: memory is read in its order,
/// at nearly twice the rate of reading one head of each token. Outputs do not depend on how many.
template <class Tables>
class amx_integers_work {
 public:
  amx_integers_work(const attention_shape& shape, const attention_codes& codes, const Tables& tables) noexcept
      : shape_(shape), codes_(codes), tables_(tables), shares_(shape) {
    chunks_ = (shape.group - 1) / vector_heads + 1;
    if (are_neighbours(codes.keys) && are_neighbours(codes.values))
      walked_ = walked_heads(shape.heads, shape.group,
                             std::size_t{std::max(shape.key_packs, shape.value_packs)} * attention_pack);
    // A few threads should not wait for one.
    constexpr std::uint64_t least_items = 8;
    while (walked_ > 1 && items() < least_items)
      walked_ = (walked_ + 1) / 2;
  }

  [[nodiscard]] std::uint64_t items() const noexcept { return shape_.rows * shape_.shares.by() * units(); }

  void run(std::uint64_t item) const noexcept {
    const std::uint64_t of_row = item / units();
    const std::uint64_t unit = item % units();
    const std::uint64_t head = unit / chunks_ * walked_;
    const attention_place at =
        shares_.at((of_row * shape_.heads + head) * chunks_ + unit % chunks_, shape_, tables_);
    if (at.queries == 0) return;
    const subnormal_guard exact;
    amx_sums of;
    begin(at, of);
    const tile_use tiles(of.shapes());
    attend(at, of);
    for (std::size_t w = 0; w < of.walked; ++w) {
      finish_vectors(shape_, place_of_head(at, w), of.head(w), [&](std::uint32_t pack, std::uint32_t i) {
        return integer_place(codes_.values.code, std::size_t{pack} * attention_pack + i, widest_lanes);
      });
    }
  }

 private:
  [[nodiscard]] static bool are_neighbours(const coded_plane& plane) noexcept {
    return plane.codes.strides.head < plane.codes.strides.token;
  }
  [[nodiscard]] std::uint64_t units() const noexcept {
    return std::uint64_t{(shape_.heads - 1) / walked_ + 1} * chunks_;
  }
  [[nodiscard]] attention_place place_of_head(attention_place at, std::size_t w) const noexcept {
    at.head += static_cast<std::uint32_t>(w);
    at.first_query += static_cast<std::uint32_t>(w) * shape_.group;
    return at;
  }

  void begin(const attention_place& at, amx_sums& of) const noexcept {
    const std::size_t keys = std::size_t{shape_.key_packs} * attention_pack;
    const std::size_t values = std::size_t{shape_.value_packs} * attention_pack;
    of.begin(std::min(walked_, shape_.heads - at.head), at.queries, codes_.keys.code, codes_.values.code,
             keys, values);
    for (std::size_t w = 0; w < of.walked; ++w) {
      // Lanes without a query head count nothing.
      std::fill_n(of.heads[w].scales, widest_lanes, 0.0F);
      std::fill_n(of.heads[w].query_sums, widest_lanes, 0.0F);
      for (std::uint32_t h = 0; h < at.queries; ++h) {
        float query[vector_elements];
        read_query(shape_, codes_, place_of_head(at, w), h, query);
        of.set_query(w, h, integer_query_of(query, keys, shape_.scale));
      }
    }
  }

  [[nodiscard]] amx_plane plane_of(const coded_plane& plane, std::uint64_t head,
                                   std::size_t w) const noexcept {
    return {&plane, w * plane.codes.strides.head, w * plane.scales.strides.head,
            head_of(plane, codes_.layer, head + w).global};
  }

  void attend(const attention_place& at, amx_sums& of) const noexcept {
    const code_heads heads{head_of(codes_.keys, codes_.layer, at.head),
                           head_of(codes_.values, codes_.layer, at.head)};
    const auto gather_next = [&](std::uint32_t position, amx_tile& tile) {
      const std::uint32_t end = gather_codes(shape_, codes_, tables_, at, heads, position,
                                             std::uint32_t{integer_tile_tokens}, tile.of);
      find_steps(tile);
      return end;
    };
    amx_planes planes;
    for (std::size_t w = 0; w < of.walked; ++w) {
      planes.keys[w] = plane_of(codes_.keys, at.head, w);
      planes.values[w] = plane_of(codes_.values, at.head, w);
    }
    amx_scratch scratch;
    amx_tile tiles[2];
    std::uint32_t position = gather_next(at.from, tiles[0]);
    const std::size_t last = of.walked - 1;
    for (unsigned turn = 0; tiles[turn].of.count != 0; turn ^= 1U) {
      const integer_tile& next = tiles[turn ^ 1U].of;
      position = gather_next(position, tiles[turn ^ 1U]);
      const auto lines = [&](const plane_strides& strides, std::size_t bytes) {
        return amx_requests::lines_in(last * strides.head + bytes);
      };
      amx_requests requests{&next,
                            lines(codes_.keys.codes.strides, of.key_bytes),
                            lines(codes_.values.codes.strides, of.value_bytes),
                            lines(codes_.keys.scales.strides, codes_.keys.group_bytes()),
                            lines(codes_.values.scales.strides, codes_.values.group_bytes()),
                            of.walked * requests_a_head};
      attend_amx(codes_, tiles[turn], of, planes, requests, scratch);
    }
  }

  /// Finds the groups of tokens that are equally far apart.
  static void find_steps(amx_tile& tile) noexcept {
    for (std::size_t t = 0; t < integer_tile_tokens; t += tile_rows) {
      const std::byte* const* const rows = tile.of.keys.codes + t;
      const auto distance = [&](std::size_t i) {
        return reinterpret_cast<std::uintptr_t>(rows[i + 1]) - reinterpret_cast<std::uintptr_t>(rows[i]);
      };
      std::size_t step = distance(0);
      for (std::size_t i = 1; i + 1 < tile_rows; ++i) {
        if (distance(i) != step) step = 0;
      }
      tile.key_steps[t / tile_rows] = step;
    }
  }

  attention_shape shape_;
  attention_codes codes_;
  Tables tables_;
  attention_shares<vector_heads> shares_;
  std::uint32_t chunks_ = 1;  // of a head's query heads
  std::uint32_t walked_ = 1;  // heads of the cache
};

// NOLINTEND(cppcoreguidelines-pro-type-member-init)

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
