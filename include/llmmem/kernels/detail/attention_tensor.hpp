/// @file
/// The work of `paged_attention` with tensor cores.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/tensor_forms.hpp>
#include <llmmem/kernels/detail/tensor_tiles.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Query heads and tokens of a step: the columns and the rows of a product.
inline constexpr std::uint32_t tensor_heads = 8;
inline constexpr std::uint32_t tensor_tokens = 16;

/// What a lane keeps while its warp goes through a share. Of its own query heads, 2t and 2t + 1:
template <class Form>
struct tensor_state {
  tensor_right query[Form::key_dim / 16];  // of head g, not of these
  tensor_sum sum[Form::value_dim / 16];    // of elements 8g + 2m and the next of each 64, both heads
  float scale[2];                          // of a product
  float most[2];
  float total[2];  // of the exponentials of the lane's own tokens
  // With scales of tokens: the largest weight times scale so far. Sums are in units of the power of two
  // below.
  float largest[2];
  // With zeros of tokens: the sum of the query's elements, and that of the lane's own tokens' weighted zeros.
  float query_sum[2];
  float zeros[2];
};

/// A share for up to eight query heads that share one of the cache's, by a whole warp: keys times queries, 16
/// tokens by 8 heads, and values times weights. Bits depend on the split and on the device's kind, not on the
/// places of blocks.
///
/// @par Source   Dao et al., "FlashAttention", 2022, for weights that are multiplied as they come; the order
///      of elements within a product is free, which avoids shared memory.
template <class Form, class Tables>
class attention_tensor_work {
  static constexpr std::uint32_t key_packs = Form::key_dim / 32;  // of a lane
  static constexpr std::uint32_t value_packs = Form::value_dim / 64;
  static constexpr dtype type = Form::type;
  // Halves have all digits from 2^-14 on. With the largest query element, or weight times scale, between 2^13
  // and 2^14, others keep their digits down to 2^-27 of it.
  static constexpr std::uint32_t raise = type == dtype::f16 ? 13 : 0;
  using read_type = typename Form::read;

 public:
  static constexpr int compute_capability = 80;
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = Form::blocks;

  attention_tensor_work(const attention_shape& shape, const Tables& tables, const Form& form = {}) noexcept
      : shape_(shape), tables_(tables), shares_(shape), form_(form) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return shares_.items(shape_) * Form::columns;
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const attention_place at = shares_.at(item / Form::columns, shape_, tables_);
    const std::uint32_t first_pack = static_cast<std::uint32_t>(item % Form::columns) * value_packs;
    typename Group::template held<tensor_state<Form>> own;
    begin(group, at, own);
    const std::uint32_t own_steps = (at.to - at.from + tensor_tokens - 1) / tensor_tokens;
    std::uint32_t tile = at.from;
    for (std::uint32_t left = group.turns(own_steps); left != 0; --left, tile += tensor_tokens) {
      typename Group::template held<read_type> read;
      LLMMEM_UNROLL
      for (std::uint32_t half = 0; half < 2; ++half) {
        const token_place first = whole_tile(shape_, tables_, at, tile + half * attention_tile);
        if (first.what == token_place::kind::in_cache) {
          if constexpr (Form::exchanges_keys) form_.load_keys(group, shape_, at, first, half, read);
          group.each([&](std::uint32_t lane) { read_tile(at, first, half, lane, read[lane]); });
        } else {
          const std::uint32_t begins = tile + half * attention_tile;
          group.each([&](std::uint32_t lane) { read_tokens(at, begins, half, lane, read[lane]); });
        }
      }
      take_step(group, first_pack, read, own);
    }
    finish(group, at, first_pack, own);
  }

 private:
  struct four_packs {
    tensor_pack of[4];
  };
  struct query_part {
    attention_floats of[key_packs];
  };

  [[nodiscard]] LLMMEM_HD attention_floats query_of(const attention_place& at, std::uint32_t c,
                                                    std::uint32_t lane) const noexcept {
    if (lane / 4 >= at.queries) return {};
    return read_floats(query_at(shape_, at, lane / 4, Form::key_pack(c, lane)), shape_.element);
  }

  /// To the basis of rotated keys, by Hadamard's matrix: a lane's own elements first, then its neighbours'.
  template <class Group>
  LLMMEM_HD void turn_queries(const Group& group,
                              typename Group::template held<query_part>& query) const noexcept {
    typename Group::template held<float> other;
    LLMMEM_UNROLL
    for (std::uint32_t step = 1; step < 4; step *= 2) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < key_packs * attention_pack; ++i) {
        group.each([&](std::uint32_t lane) { other[lane] = query[lane].of[i / 8].of[i % 8]; });
        group.swap(other, step);
        group.each([&](std::uint32_t lane) {
          float& mine = query[lane].of[i / 8].of[i % 8];
          mine = (lane & step) != 0 ? other[lane] - mine : mine + other[lane];
        });
      }
    }
    group.each([&](std::uint32_t lane) {
      LLMMEM_UNROLL
      for (std::uint32_t step = 1; step < key_packs * attention_pack; step *= 2) {
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < key_packs * attention_pack; ++i) {
          if ((i & step) != 0) continue;
          const std::uint32_t j = i | step;
          float& first = query[lane].of[i / 8].of[i % 8];
          float& second = query[lane].of[j / 8].of[j % 8];
          const float a = first;
          first = a + second;
          second = a - second;
        }
      }
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < key_packs * attention_pack; ++i) {
        float& each = query[lane].of[i / 8].of[i % 8];
        each = product_of(each, form_.rotation());
      }
    });
  }

  /// Reads the queries. Scales them to one size by a power of two, so that halves can hold bf16 and floats;
  /// the scores are scaled back.
  template <class Group>
  LLMMEM_HD void begin(const Group& group, const attention_place& at,
                       typename Group::template held<tensor_state<Form>>& own) const noexcept {
    typename Group::template held<query_part> query;
    typename Group::template held<float> largest;
    group.each([&](std::uint32_t lane) {
      largest[lane] = 0;
      LLMMEM_UNROLL
      for (std::uint32_t c = 0; c < key_packs; ++c) {
        const attention_floats some = query_of(at, c, lane);
        if constexpr (!Form::is_streamed) query[lane].of[c] = some;
        LLMMEM_UNROLL
        for (const float each : some.of)
          largest[lane] = larger_of(largest[lane], size_of(each));
      }
    });
    if constexpr (Form::has_codes) {
      if (form_.is_rotated()) {
        turn_queries(group, query);
        group.each([&](std::uint32_t lane) {
          largest[lane] = 0;
          LLMMEM_UNROLL
          for (std::uint32_t i = 0; i < key_packs * attention_pack; ++i)
            largest[lane] = larger_of(largest[lane], size_of(query[lane].of[i / 8].of[i % 8]));
        });
      }
    }
    const auto larger = [](float a, float b) { return larger_of(a, b); };
    join_pairs(group, largest, 1, larger);
    join_pairs(group, largest, 2, larger);
    float scale = product_of(shape_.scale, shape_.scale_of(shape_.scales.keys, at.head));
    if constexpr (Form::has_token_scales) scale = product_of(scale, form_.key_factor());
    group.each([&](std::uint32_t lane) {
      const float down = power_of_two_below(largest[lane], raise).inverse;
      LLMMEM_UNROLL
      for (std::uint32_t c = 0; c < key_packs; ++c) {
        attention_floats some{};
        if constexpr (Form::is_streamed) {
          some = query_of(at, c, lane);  // read again: all of them do not fit the registers
        } else {
          some = query[lane].of[c];
        }
        LLMMEM_UNROLL
        for (std::uint32_t word = 0; word < 4; ++word) {
          const std::size_t pair = std::size_t{2} * word;
          float first = some.of[pair];
          float second = some.of[pair + 1];
          if (form_.splits_keys()) {
            first = some.of[word];
            second = some.of[word + 4];
          }
          own[lane].query[c * 2 + word / 2].word[word % 2] =
              nearest_pair<type>(product_of(first, down), product_of(second, down));
        }
      }
    });
    typename Group::template held<float> elements;
    if constexpr (Form::has_zeros) sum_queries(group, own, elements);
    LLMMEM_UNROLL
    for (std::uint32_t h = 0; h < 2; ++h) {
      typename Group::template held<float> of_head;
      group.take_from(of_head, largest, [&](std::uint32_t lane) { return (lane % 4 * 2 + h) * 4; });
      group.each([&](std::uint32_t lane) {
        own[lane].scale[h] = product_of(scale, power_of_two_below(of_head[lane], raise).power);
        own[lane].most[h] = lowest();
        own[lane].total[h] = 0;
        own[lane].largest[h] = 0;
      });
      if constexpr (Form::has_zeros) {
        group.take_from(of_head, elements, [&](std::uint32_t lane) { return (lane % 4 * 2 + h) * 4; });
        group.each([&](std::uint32_t lane) {
          own[lane].query_sum[h] = of_head[lane];
          own[lane].zeros[h] = 0;
        });
      }
    }
    group.each([&](std::uint32_t lane) {
      LLMMEM_UNROLL
      for (tensor_sum& each : own[lane].sum)
        each = {};
    });
  }

  /// The sum of a query's elements as the products take them, in all four lanes that have some of them.
  template <class Group>
  LLMMEM_HD static void sum_queries(const Group& group,
                                    typename Group::template held<tensor_state<Form>>& own,
                                    typename Group::template held<float>& elements) noexcept {
    group.each([&](std::uint32_t lane) {
      float sum = 0;
      LLMMEM_UNROLL
      for (std::uint32_t k = 0; k < Form::key_dim / 16; ++k) {
        LLMMEM_UNROLL
        for (std::uint32_t w = 0; w < 2; ++w) {
          const float_pair both =
              floats_of_pair<type>(static_cast<pair_bits<type>>(own[lane].query[k].word[w]));
          sum = sum + both.first + both.second;
        }
      }
      elements[lane] = sum;
    });
    join_pairs(group, elements, 1, [](float a, float b) { return a + b; });
    join_pairs(group, elements, 2, [](float a, float b) { return a + b; });
  }

  /// Half of a step, eight tokens in one block.
  LLMMEM_HD void read_tile(const attention_place& at, token_place first, std::uint32_t half,
                           std::uint32_t lane, read_type& read) const noexcept {
    const std::uint64_t begins = first.token;
    read.counts[half] = true;
    first.token = begins + lane / 4;
    if constexpr (!Form::exchanges_keys) form_.load_key(shape_, at, first, half, lane, read);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      first.token = begins + std::uint64_t{lane % 4} * 2 + i;
      form_.load_value(shape_, at, first, half, i, lane, read);
    }
  }

  /// Half of a step in which some tokens may not count, or that spans several blocks. Elements that are not
  /// read become zero, because a NaN times a weight of zero is still a NaN.
  LLMMEM_HD void read_tokens(const attention_place& at, std::uint32_t begins, std::uint32_t half,
                             std::uint32_t lane, read_type& read) const noexcept {
    Form::clear_key(half, read);
    const token_place key = counted_place(shape_, tables_, at, begins + lane / 4);
    read.counts[half] = key.what == token_place::kind::in_cache;
    if (read.counts[half]) form_.load_key(shape_, at, key, half, lane, read);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      Form::clear_value(half, i, read);
      const token_place value = counted_place(shape_, tables_, at, begins + lane % 4 * 2 + i);
      if (value.what == token_place::kind::in_cache) form_.load_value(shape_, at, value, half, i, lane, read);
    }
  }

  template <class Group>
  LLMMEM_HD void take_step(const Group& group, std::uint32_t first_pack,
                           typename Group::template held<read_type>& read,
                           typename Group::template held<tensor_state<Form>>& own) const noexcept {
    typename Group::template held<tensor_sum> scores;
    group.each([&](std::uint32_t lane) { scores[lane] = {}; });
    group.meet();
    typename Group::template held<typename Form::keys> all_keys;
    group.each([&](std::uint32_t lane) { all_keys[lane] = form_.keys_of(read[lane]); });
    LLMMEM_UNROLL
    for (std::uint32_t c = 0; c < key_packs; ++c) {
      typename Group::template held<tensor_pack> first;
      typename Group::template held<tensor_pack> second;
      group.each([&](std::uint32_t lane) {
        first[lane] = form_.key(all_keys[lane], 0, c, lane);
        second[lane] = form_.key(all_keys[lane], 1, c, lane);
      });
      if constexpr (Form::is_streamed) group.meet();
      LLMMEM_UNROLL
      for (std::uint32_t k = 0; k < 2; ++k) {
        typename Group::template held<tensor_left> keys;
        typename Group::template held<tensor_right> queries;
        group.each([&](std::uint32_t lane) {
          const std::uint32_t* const a = first[lane].word + k * 2;
          const std::uint32_t* const b = second[lane].word + k * 2;
          keys[lane] = {{a[0], b[0], a[1], b[1]}};
          queries[lane] = own[lane].query[c * 2 + k];
        });
        multiply_add<type>(group, scores, keys, queries);
      }
    }
    typename Group::template held<tensor_right> weights;
    weigh(group, read, scores, own, weights);
    typename Group::template held<typename Form::values> all_values;
    group.each([&](std::uint32_t lane) { all_values[lane] = form_.values_of(read[lane]); });
    LLMMEM_UNROLL
    for (std::uint32_t s = 0; s < value_packs; ++s) {
      typename Group::template held<four_packs> four;
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < 4; ++i)
          four[lane].of[i] = form_.value(all_values[lane], i / 2, i % 2, first_pack + s, lane);
      });
      if constexpr (Form::is_streamed) group.meet();
      LLMMEM_UNROLL
      for (std::uint32_t w = 0; w < 4; ++w) {
        typename Group::template held<tensor_left> values;
        typename Group::template held<tensor_sum> sum;
        group.each([&](std::uint32_t lane) {
          LLMMEM_UNROLL
          for (std::uint32_t half = 0; half < 2; ++half) {
            // A word holds two elements of a token; the product needs two tokens of an element.
            const std::uint32_t a = four[lane].of[half * 2].word[w];
            const std::uint32_t b = four[lane].of[half * 2 + 1].word[w];
            values[lane].word[half * 2] = (a & 0xFFFFU) | b << 16;
            values[lane].word[half * 2 + 1] = a >> 16 | (b & 0xFFFF'0000U);
          }
          sum[lane] = own[lane].sum[s * 4 + w];
        });
        multiply_add<type>(group, sum, values, weights);
        group.each([&](std::uint32_t lane) { own[lane].sum[s * 4 + w] = sum[lane]; });
      }
    }
  }

  /// Turns scores into weights, relative to the largest score so far, and rescales the previous sums to it.
  template <class Group>
  LLMMEM_HD static void weigh(const Group& group, typename Group::template held<read_type>& read,
                              typename Group::template held<tensor_sum>& scores,
                              typename Group::template held<tensor_state<Form>>& own,
                              typename Group::template held<tensor_right>& weights) noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t h = 0; h < 2; ++h) {
      typename Group::template held<float> most;
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (std::uint32_t half = 0; half < 2; ++half) {
          float& score = scores[lane].of[half * 2 + h];
          if constexpr (Form::has_zeros) {
            score = fused(score, read[lane].key_scale[half],
                          product_of(read[lane].key_zero[half], own[lane].query_sum[h]));
          } else if constexpr (Form::has_token_scales) {
            score = product_of(score, read[lane].key_scale[half]);
          }
          score = read[lane].counts[half] ? product_of(score, own[lane].scale[h]) : lowest();
        }
        most[lane] = larger_of(scores[lane].of[h], scores[lane].of[2 + h]);
      });
      LLMMEM_UNROLL
      for (std::uint32_t step = 4; step < 32; step *= 2)
        join_pairs(group, most, step, [](float a, float b) { return larger_of(a, b); });
      typename Group::template held<float> rescale;
      group.each([&](std::uint32_t lane) {
        tensor_state<Form>& mine = own[lane];
        const float now = larger_of(mine.most[h], most[lane]);
        const float base = now == lowest() ? 0.0F : now;  // nothing counts so far
        const float factor = power_of_two(mine.most[h] - base);
        mine.most[h] = now;
        float& first = scores[lane].of[h];
        float& second = scores[lane].of[2 + h];
        first = power_of_two(first - base);
        second = power_of_two(second - base);
        mine.total[h] = fused(mine.total[h], factor, first + second);
        if constexpr (Form::has_zeros) {
          const float zeros =
              fused(first, read[lane].value_zero[0], product_of(second, read[lane].value_zero[1]));
          mine.zeros[h] = fused(mine.zeros[h], factor, zeros);
        }
        rescale[lane] = factor;
      });
      if constexpr (Form::has_token_scales) scale_weights(group, read, scores, own, h, rescale);
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (tensor_sum& each : own[lane].sum) {
          each.of[h] = product_of(each.of[h], rescale[lane]);
          each.of[2 + h] = product_of(each.of[2 + h], rescale[lane]);
        }
      });
    }
    group.meet();
    LLMMEM_UNROLL
    for (std::uint32_t half = 0; half < 2; ++half) {
      typename Group::template held<std::uint32_t> pair;
      group.each([&](std::uint32_t lane) {
        pair[lane] = nearest_pair<type>(scores[lane].of[half * 2], scores[lane].of[half * 2 + 1]);
      });
      transpose(group, pair);
      group.each([&](std::uint32_t lane) { weights[lane].word[half] = pair[lane]; });
    }
  }

  /// Multiplies weights by their values' scales, and brings the largest product so far to one size by a power
  /// of two, so that halves can hold the products for scales of any size. The sums follow.
  template <class Group>
  LLMMEM_HD static void scale_weights(const Group& group, typename Group::template held<read_type>& read,
                                      typename Group::template held<tensor_sum>& scores,
                                      typename Group::template held<tensor_state<Form>>& own, std::uint32_t h,
                                      typename Group::template held<float>& rescale) noexcept {
    typename Group::template held<float> largest;
    group.each([&](std::uint32_t lane) {
      float& first = scores[lane].of[h];
      float& second = scores[lane].of[2 + h];
      first = product_of(first, read[lane].value_scale[0]);
      second = product_of(second, read[lane].value_scale[1]);
      largest[lane] = larger_of(size_of(first), size_of(second));
    });
    LLMMEM_UNROLL
    for (std::uint32_t step = 4; step < 32; step *= 2)
      join_pairs(group, largest, step, [](float a, float b) { return larger_of(a, b); });
    group.each([&](std::uint32_t lane) {
      float& kept = own[lane].largest[h];
      const float before = power_of_two_below(kept, raise).power;
      kept = larger_of(product_of(kept, rescale[lane]), largest[lane]);
      const float down = power_of_two_below(kept, raise).inverse;
      rescale[lane] = product_of(product_of(rescale[lane], before), down);
      scores[lane].of[h] = product_of(scores[lane].of[h], down);
      scores[lane].of[2 + h] = product_of(scores[lane].of[2 + h], down);
    });
  }

  /// Element `i` of a lane's values of head `h`, of each 64 the `s`-th.
  [[nodiscard]] LLMMEM_HD float sum_of(const tensor_state<Form>& own, std::uint32_t s, std::uint32_t i,
                                       std::uint32_t h) const noexcept {
    const float whole = own.sum[s * 4 + i / 2].of[i % 2 * 2 + h];
    const float split = own.sum[s * 4 + i % 4].of[i / 4 * 2 + h];
    return form_.splits_values() ? split : whole;
  }

  template <class Group>
  LLMMEM_HD void finish(const Group& group, const attention_place& at, std::uint32_t first_pack,
                        typename Group::template held<tensor_state<Form>>& own) const noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t h = 0; h < 2; ++h) {
      typename Group::template held<float> total;
      group.each([&](std::uint32_t lane) { total[lane] = own[lane].total[h]; });
      LLMMEM_UNROLL
      for (std::uint32_t step = 4; step < 32; step *= 2)
        join_pairs(group, total, step, [](float a, float b) { return a + b; });
      typename Group::template held<float> zeros;
      if constexpr (Form::has_zeros) {
        group.each([&](std::uint32_t lane) { zeros[lane] = own[lane].zeros[h]; });
        LLMMEM_UNROLL
        for (std::uint32_t step = 4; step < 32; step *= 2)
          join_pairs(group, zeros, step, [](float a, float b) { return a + b; });
      }
      group.each([&](std::uint32_t lane) {
        const std::uint32_t query = lane % 4 * 2 + h;
        if (query >= at.queries) return;
        const attention_output output{at.row, at.first_query + query, at.head};
        LLMMEM_UNROLL
        for (std::uint32_t s = 0; s < value_packs; ++s) {
          attention_total of{{}, own[lane].most[h], total[lane]};
          LLMMEM_UNROLL
          for (std::uint32_t e = 0; e < attention_pack; ++e) {
            of.sum.of[e] = sum_of(own[lane], s, e, h);
            if constexpr (Form::has_token_scales)
              of.sum.of[e] = product_of(
                  of.sum.of[e],
                  product_of(power_of_two_below(own[lane].largest[h], raise).power, form_.value_factor()));
            if constexpr (Form::has_zeros) of.sum.of[e] = of.sum.of[e] + zeros[lane];
          }
          finish_share(shape_, output, at.share, at.span.shares, Form::value_pack(first_pack + s, lane), of);
        }
      });
    }
  }

  attention_shape shape_;
  Tables tables_;
  attention_shares<tensor_heads> shares_;
  Form form_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
