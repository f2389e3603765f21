/// @file
/// The work of `paged_attention` with the same bits on hosts and devices.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// What a lane keeps while its group goes through a share.
template <unsigned Heads>
struct attention_lane_state {
  attention_floats query[Heads];
  attention_floats sum[Heads];
  float most[Heads];   // of the products so far, the same in all lanes
  float total[Heads];  // of the exponentials of the lane's own tokens
};

/// Computes shares with sums of floats in one order, so the bits are the same everywhere.
///
/// Codes become the floats of their dequantisation when they are read. From then on all steps are those of a
/// cache of floats, so the bits are, too.
template <dtype Element, unsigned Heads, class Tables, class Codes = no_codes>
class attention_work {
  static constexpr bool is_coded = !std::same_as<Codes, no_codes>;
  static_assert(!is_coded || Element == dtype::f32);

  /// Of a tile's tokens. Where a vector has one group, lane i of eight has read those of token i, until lanes
  /// exchange them.
  struct tile_numbers {
    group_numbers of[attention_tile];

    LLMMEM_HD void clear() noexcept {
      LLMMEM_UNROLL
      for (group_numbers& each : of)
        each = no_numbers;
    }
  };
  struct coded_read : attention_read<Element> {
    tile_numbers key_numbers;
    tile_numbers value_numbers;
  };
  using tile_read = std::conditional_t<is_coded, coded_read, attention_read<Element>>;

 public:
  static constexpr std::uint32_t threads = 128;  // of a block: with more, fewer blocks fit at once
  static constexpr std::uint32_t blocks = Element == dtype::f32 ? 1 : Heads == 1 ? 4 : 3;

  attention_work(const attention_shape& shape, const Tables& tables, std::uint32_t lanes,
                 const Codes& codes = {}) noexcept
      : shape_(shape), tables_(tables), shares_(shape), lanes_(lanes), codes_(codes) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return shares_.items(shape_); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return lanes_; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const attention_place at = shares_.at(item, shape_, tables_);
    typename Group::template held<attention_lane_state<Heads>> own;
    group.each([&](std::uint32_t lane) { begin(at, lane, own[lane]); });
    turn_queries(group, own);
    group.each([&](std::uint32_t lane) { scale_queries(at, own[lane]); });
    // Past the end, other groups may have turns, in which nothing counts; 32 bits can count these as well.
    const std::uint32_t own_tiles = (at.to - at.from + attention_tile - 1) / attention_tile;
    std::uint32_t tile = at.from;
    for (std::uint32_t left = group.turns(own_tiles); left != 0; --left, tile += attention_tile) {
      typename Group::template held<tile_read> read;
      const token_place first = whole_tile(shape_, tables_, at, tile);
      if (first.what == token_place::kind::in_cache) {
        group.each([&](std::uint32_t lane) { read_tile(at, first, lane, read[lane]); });
      } else {
        group.each([&](std::uint32_t lane) { read_tokens(at, tile, lane, read[lane]); });
      }
      if constexpr (is_coded) {
        scale_tile(group, codes_.keys, shape_.key_packs, &tile_read::key, &tile_read::key_numbers, read);
        scale_tile(group, codes_.values, shape_.value_packs, &tile_read::value, &tile_read::value_numbers,
                   read);
      }
      take_tile(group, read, own);
    }
    finish(group, at, own);
  }

 private:
  LLMMEM_HD void begin(const attention_place& at, std::uint32_t lane,
                       attention_lane_state<Heads>& own) const noexcept {
    LLMMEM_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      own.query[h] = {};
      own.sum[h] = {};
      own.most[h] = lowest();
      own.total[h] = 0;
      if (h >= at.queries || lane >= shape_.key_packs) continue;
      own.query[h] = read_floats(query_at(shape_, at, h, lane), shape_.element);
    }
  }
  /// To the basis of rotated keys.
  template <class Group>
  LLMMEM_HD void turn_queries(
      const Group& group, typename Group::template held<attention_lane_state<Heads>>& own) const noexcept {
    if constexpr (is_coded) {
      if (codes_.keys.rotated_packs == 0) return;
      typename Group::template held<attention_floats> query;
      for (unsigned h = 0; h < Heads; ++h) {
        group.each([&](std::uint32_t lane) { query[lane] = own[lane].query[h]; });
        rotate_lanes(group, query, codes_.keys.rotated_packs, codes_.keys.rotation);
        group.each([&](std::uint32_t lane) { own[lane].query[h] = query[lane]; });
      }
    }
  }
  LLMMEM_HD void scale_queries(const attention_place& at, attention_lane_state<Heads>& own) const noexcept {
    const float scale = product_of(shape_.scale, shape_.scale_of(shape_.scales.keys, at.head));
    LLMMEM_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < attention_pack; ++i)
        own.query[h].of[i] = product_of(own.query[h].of[i], scale);
    }
  }

  /// A whole tile in one block. All of it is requested before any of it is used; lanes past a vector's end
  /// have zeros.
  LLMMEM_HD void read_tile(const attention_place& at, const token_place& first, std::uint32_t lane,
                           tile_read& read) const noexcept {
    read.counts = 0xFF;
    if constexpr (is_coded) {
      read_codes(codes_.keys, at.head, first, lane, shape_.key_packs, read.key, read.key_numbers);
      read_codes(codes_.values, at.head, first, lane, shape_.value_packs, read.value, read.value_numbers);
      return;
    }
    const std::byte* const key = pack_at<Element>(at.keys, shape_.keys.strides, first, lane);
    const std::byte* const value = pack_at<Element>(at.values, shape_.values.strides, first, lane);
    if (lane < shape_.key_packs) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i)
        read.key[i].load(key + i * shape_.keys.strides.token);
    } else {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i)
        read.key[i].clear();
    }
    if (lane < shape_.value_packs) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i)
        read.value[i].load(value + i * shape_.values.strides.token);
    } else {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i)
        read.value[i].clear();
    }
  }

  /// A plane of a whole tile in one block: its codes as floats, by channel with their scales.
  LLMMEM_HD void read_codes(const coded_plane& plane, std::uint32_t head, const token_place& first,
                            std::uint32_t lane, std::uint32_t packs,
                            attention_raw<Element> (&read)[attention_tile],
                            tile_numbers& numbers) const noexcept {
    const coded_head of = head_of(plane, codes_.layer, head);
    numbers.clear();
    if (shares_numbers(plane, packs)) {
      const std::uint32_t own = lane % attention_tile;  // whose numbers this lane reads
      const group_numbers of_own =
          token_numbers(plane, of, first.block, first.token + own, 0, global_of(plane, of, first.block));
      LLMMEM_UNROLL
      for (group_numbers& each : numbers.of)
        each = of_own;
    }
    if (lane >= packs) {
      LLMMEM_UNROLL
      for (attention_raw<Element>& each : read)
        each.clear();
      return;
    }
    const std::byte* const codes = codes_at(plane, of, first.block, first.token, lane);
    code_words words[attention_tile];
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i)
      words[i] = load_codes(plane.code, codes + i * plane.codes.strides.token, plane.code_width);
    if (plane.is_by_channel) {
      const attention_floats scales = scales_of_channels(plane, of, first.block, lane);
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i)
        read[i] = raw_of<dtype::f32>(scaled_by(scales, floats_of_codes(plane.code, words[i])));
      return;
    }
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i)
      read[i] = raw_of<dtype::f32>(floats_of_codes(plane.code, words[i]));
    if (plane.run.by() >= packs) return;
    const float global = global_of(plane, of, first.block);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i)
      numbers.of[i] = token_numbers(plane, of, first.block, first.token + i, lane, global);
  }
  /// A plane of token `i` of a tile.
  LLMMEM_HD void read_code(const coded_plane& plane, std::uint32_t head, const token_place& token,
                           std::uint32_t i, std::uint32_t lane, std::uint32_t packs,
                           attention_raw<Element>& read, tile_numbers& numbers) const noexcept {
    const coded_head of = head_of(plane, codes_.layer, head);
    const bool is_shared = shares_numbers(plane, packs);
    if (is_shared ? lane % attention_tile == i : !plane.is_by_channel && lane < packs)
      numbers.of[i] = token_numbers(plane, of, token.block, token.token, is_shared ? 0 : lane,
                                    global_of(plane, of, token.block));
    if (lane >= packs) return;
    const code_words words =
        load_codes(plane.code, codes_at(plane, of, token.block, token.token, lane), plane.code_width);
    attention_floats values = floats_of_codes(plane.code, words);
    if (plane.is_by_channel) values = scaled_by(scales_of_channels(plane, of, token.block, lane), values);
    read = raw_of<dtype::f32>(values);
  }

  /// Whether all of a vector has the same numbers: lane i of eight reads those of a tile's token i.
  [[nodiscard]] LLMMEM_HD static bool shares_numbers(const coded_plane& plane, std::uint32_t packs) noexcept {
    return !plane.is_by_channel && plane.run.by() >= packs;
  }
  /// Makes a tile's codes values by numbers that the lane or another one has read. Elements of lanes past a
  /// vector's end and of tokens that do not count stay -0: their numbers are 1 and -0.
  template <class Group>
  LLMMEM_HD static void scale_tile(const Group& group, const coded_plane& plane, std::uint32_t packs,
                                   attention_raw<Element> (tile_read::*vectors)[attention_tile],
                                   tile_numbers tile_read::* numbers,
                                   typename Group::template held<tile_read>& read) noexcept {
    if (shares_numbers(plane, packs)) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i) {
        typename Group::template held<float> sent;
        typename Group::template held<float> zeros;
        group.each([&](std::uint32_t lane) {
          sent[lane] = (read[lane].*numbers).of[i].scale;
          zeros[lane] = (read[lane].*numbers).of[i].zero;
        });
        group.each([&](std::uint32_t lane) {
          group_numbers& of = (read[lane].*numbers).of[i];
          of.scale = group.of_eight(sent, lane, i);
          if (plane.has_zero) of.zero = group.of_eight(zeros, lane, i);
          if (lane >= packs) of = no_numbers;
        });
      }
    }
    group.each([&](std::uint32_t lane) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i) {
        attention_raw<Element>& each = (read[lane].*vectors)[i];
        each = raw_of<dtype::f32>(scaled_by((read[lane].*numbers).of[i], plane.has_zero, floats_of(each)));
      }
    });
  }

  /// A tile in which some tokens may not count, or that spans several blocks.
  LLMMEM_HD void read_tokens(const attention_place& at, std::uint32_t tile, std::uint32_t lane,
                             tile_read& read) const noexcept {
    read.counts = 0;
    if constexpr (is_coded) {
      read.key_numbers.clear();
      read.value_numbers.clear();
    }
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i) {
      read.key[i].clear();
      read.value[i].clear();
      const std::uint32_t position = tile + i;
      const token_place token = counted_place(shape_, tables_, at, position);
      if (token.what != token_place::kind::in_cache) continue;
      read.counts |= 1U << i;
      if constexpr (is_coded) {
        read_code(codes_.keys, at.head, token, i, lane, shape_.key_packs, read.key[i], read.key_numbers);
        read_code(codes_.values, at.head, token, i, lane, shape_.value_packs, read.value[i],
                  read.value_numbers);
        continue;
      }
      if (lane < shape_.key_packs)
        read.key[i].load(pack_at<Element>(at.keys, shape_.keys.strides, token, lane));
      if (lane < shape_.value_packs)
        read.value[i].load(pack_at<Element>(at.values, shape_.values.strides, token, lane));
    }
  }

  template <class Group>
  LLMMEM_HD static void take_tile(const Group& group, typename Group::template held<tile_read>& read,
                                  typename Group::template held<attention_lane_state<Heads>>& own) noexcept {
    typename Group::template held<attention_scores> scores[Heads];
    group.each([&](std::uint32_t lane) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < attention_tile; ++i) {
        const attention_floats key = floats_of(read[lane].key[i]);
        LLMMEM_UNROLL
        for (unsigned h = 0; h < Heads; ++h)
          scores[h][lane].of[i] = dot(own[lane].query[h], key);
      }
    });
    typename Group::template held<float> weights[Heads];
    LLMMEM_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      add_up(group, scores[h]);
      group.each([&](std::uint32_t lane) {
        const bool counts = (read[lane].counts >> (lane % attention_tile) & 1U) != 0;
        scores[h][lane].of[0] = counts ? scores[h][lane].of[0] : lowest();
        weights[h][lane] = scores[h][lane].of[0];
      });
      join_eight(group, weights[h], [](float a, float b) { return larger_of(a, b); });
      group.each([&](std::uint32_t lane) {
        attention_lane_state<Heads>& mine = own[lane];
        const float most = larger_of(mine.most[h], weights[h][lane]);
        const float base = most == lowest() ? 0.0F : most;  // nothing counts so far
        const float factor = power_of_two(mine.most[h] - base);
        weights[h][lane] = power_of_two(scores[h][lane].of[0] - base);
        mine.most[h] = most;
        mine.total[h] = fused(mine.total[h], factor, weights[h][lane]);
        LLMMEM_UNROLL
        for (unsigned i = 0; i < attention_pack; ++i)
          mine.sum[h].of[i] = product_of(mine.sum[h].of[i], factor);
      });
    }
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i) {
      group.each([&](std::uint32_t lane) {
        const attention_floats value = floats_of(read[lane].value[i]);
        LLMMEM_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
          const float weight = group.of_eight(weights[h], lane, i);
          LLMMEM_UNROLL
          for (unsigned e = 0; e < attention_pack; ++e)
            own[lane].sum[h].of[e] = fused(weight, value.of[e], own[lane].sum[h].of[e]);
        }
      });
    }
  }

  template <class Group>
  LLMMEM_HD void finish(const Group& group, const attention_place& at,
                        typename Group::template held<attention_lane_state<Heads>>& own) const noexcept {
    typename Group::template held<float> total;
    LLMMEM_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      group.each([&](std::uint32_t lane) { total[lane] = own[lane].total[h]; });
      join_eight(group, total, [](float a, float b) { return a + b; });
      if (h >= at.queries) continue;
      group.each([&](std::uint32_t lane) {
        const attention_output output{at.row, at.first_query + h, at.head};
        const attention_total of{own[lane].sum[h], own[lane].most[h], total[lane]};
        finish_share(shape_, output, at.share, at.span.shares, lane, of);
      });
    }
  }

  attention_shape shape_;
  Tables tables_;
  attention_shares<Heads> shares_;
  std::uint32_t lanes_;
  Codes codes_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
