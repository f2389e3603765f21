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
      typename Group::template held<attention_read<Element>> read;
      const token_place first = whole_tile(shape_, tables_, at, tile);
      if (first.what == token_place::kind::in_cache) {
        group.each([&](std::uint32_t lane) { read_tile(at, first, lane, read[lane]); });
      } else {
        group.each([&](std::uint32_t lane) { read_tokens(at, tile, lane, read[lane]); });
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
                           attention_read<Element>& read) const noexcept {
    read.counts = 0xFF;
    if constexpr (is_coded) {
      read_codes(codes_.keys, at.head, first, lane, shape_.key_packs, read.key);
      read_codes(codes_.values, at.head, first, lane, shape_.value_packs, read.value);
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

  /// A plane of a whole tile in one block.
  LLMMEM_HD void read_codes(const coded_plane& plane, std::uint32_t head, const token_place& first,
                            std::uint32_t lane, std::uint32_t packs,
                            attention_raw<Element> (&read)[attention_tile]) const noexcept {
    if (lane >= packs) {
      LLMMEM_UNROLL
      for (attention_raw<Element>& each : read)
        each.clear();
      return;
    }
    const coded_head of = head_of(plane, codes_.layer, head);
    const pack_scales scales(plane, of, first.block, lane);
    const std::byte* const codes = codes_at(plane, of, first.block, first.token, lane);
    code_words words[attention_tile];
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i)
      words[i] = load_codes(plane.code, codes + i * plane.codes.strides.token, plane.code_width);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i)
      read[i] =
          raw_of<dtype::f32>(scales.scaled(plane, first.token + i, floats_of_codes(plane.code, words[i])));
  }
  /// A plane of one token.
  LLMMEM_HD void read_code(const coded_plane& plane, std::uint32_t head, const token_place& token,
                           std::uint32_t lane, attention_raw<Element>& read) const noexcept {
    const coded_head of = head_of(plane, codes_.layer, head);
    const pack_scales scales(plane, of, token.block, lane);
    const code_words words =
        load_codes(plane.code, codes_at(plane, of, token.block, token.token, lane), plane.code_width);
    read = raw_of<dtype::f32>(scales.scaled(plane, token.token, floats_of_codes(plane.code, words)));
  }

  /// A tile in which some tokens may not count, or that spans several blocks.
  LLMMEM_HD void read_tokens(const attention_place& at, std::uint32_t tile, std::uint32_t lane,
                             attention_read<Element>& read) const noexcept {
    read.counts = 0;
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i) {
      read.key[i].clear();
      read.value[i].clear();
      const std::uint32_t position = tile + i;
      const token_place token = counted_place(shape_, tables_, at, position);
      if (token.what != token_place::kind::in_cache) continue;
      read.counts |= 1U << i;
      if constexpr (is_coded) {
        if (lane < shape_.key_packs) read_code(codes_.keys, at.head, token, lane, read.key[i]);
        if (lane < shape_.value_packs) read_code(codes_.values, at.head, token, lane, read.value[i]);
        continue;
      }
      if (lane < shape_.key_packs)
        read.key[i].load(pack_at<Element>(at.keys, shape_.keys.strides, token, lane));
      if (lane < shape_.value_packs)
        read.value[i].load(pack_at<Element>(at.values, shape_.values.strides, token, lane));
    }
  }

  template <class Group>
  LLMMEM_HD static void take_tile(const Group& group,
                                  typename Group::template held<attention_read<Element>>& read,
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
