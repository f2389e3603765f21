/// @file
/// The work of `paged_attention` over records of latents: absorbed multi-head latent attention (MLA).
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/latent_rows.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Query heads of an item. With the eight tokens of a tile there is one product for each lane: lane l has
/// that of head l / 8 and token l mod 8.
inline constexpr std::uint32_t latent_heads = 4;
static_assert(latent_heads * attention_tile == latent_lanes);

/// What a lane keeps while its group goes through a share.
struct latent_lane_state {
  attention_floats query[latent_heads][latent_key_slots];
  attention_floats sum[latent_heads][latent_value_slots];
  float most;   // of the products of the lane's head so far, the same in its eight lanes
  float total;  // of the exponentials of the lane's own tokens
};

/// Computes shares with sums of floats in one order, so the bits are the same everywhere.
///
/// A token's value is the beginning of its key, or all of it: what the lanes read for the products, they read
/// again for the sums, from the nearest cache. A tile's floats would not fit the registers, nor would loops
/// over tokens that are unrolled.
template <class Tables>
class latent_attention_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 2;

  latent_attention_work(const attention_shape& shape, const Tables& tables,
                        const latent_plane& plane) noexcept
      : shape_(shape), tables_(tables), shares_(shape), plane_(plane) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return shares_.items(shape_); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return latent_lanes; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const attention_place at = shares_.at(item, shape_, tables_);
    const latent_base base = base_of(plane_, shape_.layer);
    typename Group::template held<latent_lane_state> own;
    group.each([&](std::uint32_t lane) { begin(at, lane, own[lane]); });
    const std::uint32_t own_tiles = (at.to - at.from + attention_tile - 1) / attention_tile;
    std::uint32_t tile = at.from;
    for (std::uint32_t left = group.turns(own_tiles); left != 0; --left, tile += attention_tile)
      take_tile(group, at, base, tile, own);
    finish(group, at, own);
  }

 private:
  /// Calls `act(slot, pack)` for each of a lane's packs below `packs`.
  template <std::uint32_t Slots, class Act>
  LLMMEM_HD static void each_pack(std::uint32_t lane, std::uint32_t packs, const Act& act) noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t slot = 0; slot < Slots; ++slot) {
      const std::uint32_t pack = lane + slot * latent_lanes;
      if (pack < packs) act(slot, pack);
    }
  }

  LLMMEM_HD void begin(const attention_place& at, std::uint32_t lane, latent_lane_state& own) const noexcept {
    own.most = lowest();
    own.total = 0;
    LLMMEM_UNROLL
    for (std::uint32_t h = 0; h < latent_heads; ++h) {
      LLMMEM_UNROLL
      for (attention_floats& each : own.query[h])
        each = {};
      LLMMEM_UNROLL
      for (attention_floats& each : own.sum[h])
        each = {};
      if (h >= at.queries) continue;
      each_pack<latent_key_slots>(lane, shape_.key_packs, [&](std::uint32_t slot, std::uint32_t pack) {
        const attention_floats in = read_floats(query_at(shape_, at, h, pack), shape_.element);
        LLMMEM_UNROLL
        for (unsigned i = 0; i < attention_pack; ++i)
          own.query[h][slot].of[i] = product_of(in.of[i], shape_.scale);
      });
    }
  }

  /// Returns the place of a token of a tile, none if it does not count.
  [[nodiscard]] LLMMEM_HD token_place place_in_tile(const attention_place& at, const token_place& first,
                                                    std::uint32_t tile, std::uint32_t i) const noexcept {
    if (first.what == token_place::kind::in_cache) return {first.what, first.block, first.token + i};
    return counted_place(shape_, tables_, at, tile + i);
  }

  template <class Group>
  LLMMEM_HD void take_tile(const Group& group, const attention_place& at, const latent_base& base,
                           std::uint32_t tile,
                           typename Group::template held<latent_lane_state>& own) const noexcept {
    const token_place first = whole_tile(shape_, tables_, at, tile);
    std::uint32_t counts = 0;  // the same in all lanes
    typename Group::template held<float> weights;
    group.each([&](std::uint32_t lane) { weights[lane] = lowest(); });
    LLMMEM_ROLLED
    for (std::uint32_t i = 0; i < attention_tile; ++i) {
      const token_place token = place_in_tile(at, first, tile, i);
      const bool is_there = token.what == token_place::kind::in_cache;
      if (is_there) counts |= 1U << i;
      const latent_row row = is_there ? row_at(plane_, base, token) : latent_row{};
      typename Group::template held<float> products[latent_heads];
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (auto& each : products)
          each[lane] = 0;
        if (!is_there) return;
        each_pack<latent_key_slots>(lane, shape_.key_packs, [&](std::uint32_t slot, std::uint32_t pack) {
          const attention_floats key = read_pack(plane_, row, base.outer, pack);
          LLMMEM_UNROLL
          for (std::uint32_t h = 0; h < latent_heads; ++h) {
            LLMMEM_UNROLL
            for (unsigned e = 0; e < attention_pack; ++e)
              products[h][lane] = fused(own[lane].query[h][slot].of[e], key.of[e], products[h][lane]);
          }
        });
      });
      add_heads(group, products);
      group.each([&](std::uint32_t lane) {
        if (is_there && lane % attention_tile == i) weights[lane] = products[0][lane];
      });
    }
    weigh(group, weights, own);
    LLMMEM_ROLLED
    for (std::uint32_t i = 0; i < attention_tile; ++i) {
      const bool is_there = (counts >> i & 1U) != 0;
      const latent_row row =
          is_there ? row_at(plane_, base, place_in_tile(at, first, tile, i)) : latent_row{};
      typename Group::template held<float> weight[latent_heads];
      LLMMEM_UNROLL
      for (std::uint32_t h = 0; h < latent_heads; ++h)
        group.take_from(weight[h], weights, [&](std::uint32_t /*lane*/) { return h * attention_tile + i; });
      group.each([&](std::uint32_t lane) {
        if (!is_there) return;
        each_pack<latent_value_slots>(lane, shape_.value_packs, [&](std::uint32_t slot, std::uint32_t pack) {
          const attention_floats value = read_pack(plane_, row, base.outer, pack);
          LLMMEM_UNROLL
          for (std::uint32_t h = 0; h < latent_heads; ++h) {
            LLMMEM_UNROLL
            for (unsigned e = 0; e < attention_pack; ++e)
              own[lane].sum[h][slot].of[e] =
                  fused(weight[h][lane], value.of[e], own[lane].sum[h][slot].of[e]);
          }
        });
      });
    }
  }

  /// Adds up the lanes' parts of four heads' products: afterwards lane l has the product of head l / 8 in
  /// `parts[0]`. Each of the first two steps exchanges half of the heads.
  template <class Group>
  LLMMEM_HD static void add_heads(const Group& group,
                                  typename Group::template held<float> (&parts)[latent_heads]) noexcept {
    typename Group::template held<float> sent;
    LLMMEM_UNROLL
    for (std::uint32_t step = latent_heads / 2; step != 0; step /= 2) {
      const std::uint32_t bit = step * attention_tile;
      LLMMEM_UNROLL
      for (std::uint32_t h = 0; h < step; ++h) {
        group.each([&](std::uint32_t lane) {
          const bool is_upper = (lane & bit) != 0;
          sent[lane] = is_upper ? parts[h][lane] : parts[h + step][lane];
          parts[h][lane] = is_upper ? parts[h + step][lane] : parts[h][lane];
        });
        group.swap(sent, bit);
        group.each([&](std::uint32_t lane) { parts[h][lane] += sent[lane]; });
      }
    }
    join_eight(group, parts[0], [](float a, float b) { return a + b; });
  }

  /// Turns a tile's products into weights relative to the largest product so far, and brings the sums so far
  /// to the same.
  template <class Group>
  LLMMEM_HD static void weigh(const Group& group, typename Group::template held<float>& weights,
                              typename Group::template held<latent_lane_state>& own) noexcept {
    typename Group::template held<float> most;
    group.each([&](std::uint32_t lane) { most[lane] = weights[lane]; });
    join_eight(group, most, [](float a, float b) { return larger_of(a, b); });
    typename Group::template held<float> factors;
    group.each([&](std::uint32_t lane) {
      latent_lane_state& mine = own[lane];
      const float now = larger_of(mine.most, most[lane]);
      const float base = now == lowest() ? 0.0F : now;  // nothing counts so far
      factors[lane] = power_of_two(mine.most - base);
      weights[lane] = power_of_two(weights[lane] - base);
      mine.most = now;
      mine.total = fused(mine.total, factors[lane], weights[lane]);
    });
    typename Group::template held<float> factor;
    LLMMEM_UNROLL
    for (std::uint32_t h = 0; h < latent_heads; ++h) {
      group.take_from(factor, factors, [&](std::uint32_t /*lane*/) { return h * attention_tile; });
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (attention_floats& each : own[lane].sum[h]) {
          LLMMEM_UNROLL
          for (float& value : each.of)
            value = product_of(value, factor[lane]);
        }
      });
    }
  }

  template <class Group>
  LLMMEM_HD void finish(const Group& group, const attention_place& at,
                        typename Group::template held<latent_lane_state>& own) const noexcept {
    typename Group::template held<float> mosts;
    typename Group::template held<float> totals;
    group.each([&](std::uint32_t lane) {
      mosts[lane] = own[lane].most;
      totals[lane] = own[lane].total;
    });
    join_eight(group, totals, [](float a, float b) { return a + b; });
    typename Group::template held<float> most;
    typename Group::template held<float> total;
    LLMMEM_UNROLL
    for (std::uint32_t h = 0; h < latent_heads; ++h) {
      const auto of_head = [&](std::uint32_t /*lane*/) { return h * attention_tile; };
      group.take_from(most, mosts, of_head);
      group.take_from(total, totals, of_head);
      if (h >= at.queries) continue;
      group.each([&](std::uint32_t lane) {
        const attention_output output{at.row, at.first_query + h, at.head};
        LLMMEM_UNROLL
        for (std::uint32_t slot = 0; slot < latent_value_slots; ++slot) {
          const attention_total of{own[lane].sum[h][slot], most[lane], total[lane]};
          finish_share(shape_, output, at.share, at.span.shares, lane + slot * latent_lanes, of);
        }
      });
    }
  }

  attention_shape shape_;
  Tables tables_;
  attention_shares<latent_heads> shares_;
  latent_plane plane_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
