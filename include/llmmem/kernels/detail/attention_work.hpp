/// @file
/// The work of `paged_attention`: shares of rows, and the joining of what they come to.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cstddef>
#include <cstdint>
#include <numbers>

namespace llmmem::inline v0::detail {

/// What both kernels know. Distances in bytes.
struct attention_shape {
  std::uint64_t rows = 0;
  const std::int32_t* sequences = nullptr;  // [rows], or null, as in attention_rows
  const std::int32_t* lengths = nullptr;    // the same
  batch_vectors queries{};
  batch_room out{};
  kv_plane keys{};
  kv_plane values{};
  std::uint64_t blocks = 0;
  std::uint32_t layer = 0;
  divider by{};      // tokens a block
  divider shares{};  // of a row
  divider share_tokens{};
  std::uint32_t key_packs = 0;  // of a vector
  std::uint32_t value_packs = 0;
  std::uint32_t heads = 0;  // of the cache
  std::uint32_t group = 0;  // query heads for each
  std::uint32_t window = 0;
  dtype element = dtype::bf16;
  float scale = 1;  // times log2(e)
  kv_scales scales{};
  float* sums = nullptr;    // [rows][query heads][shares][value_packs x 8]
  float* states = nullptr;  // [rows][query heads][shares]: the largest product and the sum of exponentials
  float* log_sum_exp = nullptr;
  std::uint32_t* out_of_range = nullptr;

  [[nodiscard]] LLMMEM_HD std::uint32_t query_heads() const noexcept { return heads * group; }
  [[nodiscard]] LLMMEM_HD float scale_of(const float* of, std::uint32_t head) const noexcept {
    return of == nullptr ? 1.0F : of[scales.is_by_head ? head : 0];
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t element_bytes() const noexcept {
    return element == dtype::f32 ? 4 : 2;
  }
  LLMMEM_HD void flag() const noexcept {
    if (out_of_range != nullptr) raise_flag(*out_of_range);
  }
};

/// A query head of a row, and which of the cache's it reads.
struct attention_output {
  std::uint64_t row = 0;
  std::uint32_t query = 0;
  std::uint32_t head = 0;
};

/// What eight elements of weighted values came to, with the largest product and the sum of exponentials.
struct attention_total {
  attention_floats sum{};
  float most = 0;
  float total = 0;
};

/// Writes a lane's or a thread's eight elements of an output.
LLMMEM_HD inline void write_output(const attention_shape& shape, const attention_output& at,
                                   std::uint32_t pack, const attention_total& of) noexcept {
  if (pack == 0 && shape.log_sum_exp != nullptr) {
    constexpr float ln2 = std::numbers::ln2_v<float>;
    // Of nothing the largest product is -infinity, and so is this; what is no number stays none.
    const float told =
        of.total == of.total ? fused(of.most, ln2, logarithm_of(of.total)) : float_of_bits(0x7FFF'FFFFU);
    store_packet<4>(reinterpret_cast<std::byte*>(shape.log_sum_exp + at.row * shape.query_heads() + at.query),
                    {{bits_of_float(told)}});
  }
  if (pack >= shape.value_packs) return;
  const float factor =
      of.total == 0 ? 0.0F : quotient_of(shape.scale_of(shape.scales.values, at.head), of.total);
  attention_floats values{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i)
    values.of[i] = product_of(of.sum.of[i], factor);
  write_floats(shape.out.data + at.row * shape.out.token_stride + at.query * shape.out.head_stride +
                   std::uint64_t{pack} * attention_pack * shape.element_bytes(),
               shape.element, values);
}

/// Of a row: a multiple of a tile that 31 bits count.
inline constexpr std::uint64_t most_attended_tokens = 0x7FFF'FFF0;

/// The tokens of a row: it attends to those from `first` to `end`. Tiles begin at multiples of eight, and
/// shares at `begin`.
struct attention_span {
  std::int32_t sequence = -1;  // negative: padding
  std::uint32_t first = 0;
  std::uint32_t end = 0;
  std::uint32_t begin = 0;
  std::uint32_t shares = 0;  // that have tokens
};

template <class Tables>
[[nodiscard]] LLMMEM_HD inline attention_span span_of(const attention_shape& shape, const Tables& tables,
                                                      std::uint64_t row) noexcept {
  attention_span out;
  const std::int64_t sequence =
      shape.sequences != nullptr ? shape.sequences[row] : static_cast<std::int64_t>(row);
  if (sequence < 0) return out;
  if (sequence >= tables.num_sequences) {
    shape.flag();
    return out;
  }
  out.sequence = static_cast<std::int32_t>(sequence);
  const std::int64_t tokens = shape.lengths != nullptr ? shape.lengths[row] : tables.tokens(out.sequence);
  if (tokens <= 0) {
    if (tokens < 0) shape.flag();
    return out;
  }
  // A length that no table has room for would be gone through token by token, to no end.
  const std::uint64_t room = blocks_in(tables, out.sequence) * shape.by.by();
  const std::uint64_t most = room < most_attended_tokens ? room : most_attended_tokens;
  const bool is_beyond = static_cast<std::uint64_t>(tokens) > most;
  if (is_beyond) shape.flag();
  if (most == 0) return out;
  out.end = static_cast<std::uint32_t>(is_beyond ? most : static_cast<std::uint64_t>(tokens));
  out.first = shape.window != 0 && out.end > shape.window ? out.end - shape.window : 0;
  out.begin = out.first / attention_tile * attention_tile;
  const std::uint64_t needed = shape.share_tokens.quotient(out.end - out.begin - 1) + 1;
  out.shares = static_cast<std::uint32_t>(needed < shape.shares.by() ? needed : shape.shares.by());
  return out;
}

/// What a lane keeps while its group goes through a share.
template <unsigned Heads>
struct attention_state {
  attention_floats query[Heads];
  attention_floats sum[Heads];
  float most[Heads];   // of the products so far, the same in all lanes
  float total[Heads];  // of the exponentials of the lane's own tokens
};

/// A share of a row, for up to `Heads` of the query heads that share one of the cache's. The heads that read
/// the same keys and values are items beside each other, and so are neighbours in a cache whose tokens' heads
/// lie side by side.
template <dtype Element, unsigned Heads, class Tables>
class attention_work {
 public:
  static constexpr std::uint32_t threads = 128;  // of a block: of more, fewer fit beside each other
  static constexpr std::uint32_t blocks = Element == dtype::f32 ? 1 : Heads == 1 ? 4 : 3;

  attention_work(const attention_shape& shape, const Tables& tables, std::uint32_t lanes) noexcept
      : shape_(shape),
        tables_(tables),
        chunks_((shape.group + Heads - 1) / Heads),
        units_(shape.heads * chunks_.by()),
        lanes_(lanes),
        tiles_in_block_(shape.by.by() % attention_tile == 0) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return shape_.rows * shape_.shares.by() * units_.by();
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return lanes_; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const std::uint64_t of_row = units_.quotient(item);
    const std::uint32_t unit = units_.remainder(item);
    place at;
    at.row = shape_.shares.quotient(of_row);
    at.share = shape_.shares.remainder(of_row);
    if (at.row < shape_.rows) at.span = span_of(shape_, tables_, at.row);
    at.head = static_cast<std::uint32_t>(chunks_.quotient(unit));
    const std::uint32_t chunk = unit - at.head * chunks_.by();
    at.first_query = at.head * shape_.group + chunk * Heads;
    take_share(at, shape_.group - chunk * Heads);
    typename Group::template held<attention_state<Heads>> own;
    group.each([&](std::uint32_t lane) { begin(at, lane, own[lane]); });
    // Past the end there are turns of others, in which nothing counts; 32 bits hold these as well.
    const std::uint32_t own_tiles = (at.to - at.from + attention_tile - 1) / attention_tile;
    std::uint32_t tile = at.from;
    for (std::uint32_t left = group.turns(own_tiles); left != 0; --left, tile += attention_tile) {
      typename Group::template held<attention_read<Element>> read;
      token_place first;
      if (tiles_in_block_ && tile >= at.span.first && tile < at.to && tile + attention_tile <= at.span.end)
        first = place_within(tables_, shape_.by, shape_.blocks, at.span.sequence, tile);
      if (first.what == token_place::kind::there) {
        group.each([&](std::uint32_t lane) { read_tile(at, first, lane, read[lane]); });
      } else {
        group.each([&](std::uint32_t lane) { read_tokens(at, tile, lane, read[lane]); });
      }
      take_tile(group, read, own);
    }
    finish(group, at, own);
  }

 private:
  /// Which item it is.
  struct place {
    std::uint64_t row = 0;
    std::uint32_t share = 0;
    std::uint32_t head = 0;           // of the cache
    std::uint32_t first_query = 0;    // head
    std::uint32_t queries = 0;        // heads: none where there is nothing to do
    const std::byte* keys = nullptr;  // of the head in the layer
    const std::byte* values = nullptr;
    attention_span span{};
    std::uint32_t from = 0;  // the tokens of the share
    std::uint32_t to = 0;
  };

  /// What of its row the item has, if there are such an item and such a share.
  LLMMEM_HD void take_share(place& at, std::uint32_t queries) const noexcept {
    if (at.span.sequence < 0 || (at.share != 0 && at.share >= at.span.shares)) return;
    at.queries = queries < Heads ? queries : Heads;
    at.keys = plane_base(shape_.keys, shape_.layer) + at.head * shape_.keys.strides.head;
    at.values = plane_base(shape_.values, shape_.layer) + at.head * shape_.values.strides.head;
    // Neither is past the end, which 31 bits can count.
    at.from = at.share == 0 ? at.span.begin : at.span.begin + at.share * shape_.share_tokens.by();
    const bool is_last = at.share + 1 >= at.span.shares;
    at.to = is_last ? at.span.end : at.from + shape_.share_tokens.by();
  }

  LLMMEM_HD void begin(const place& at, std::uint32_t lane, attention_state<Heads>& own) const noexcept {
    const float scale = product_of(shape_.scale, shape_.scale_of(shape_.scales.keys, at.head));
    LLMMEM_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      own.query[h] = {};
      own.sum[h] = {};
      own.most[h] = lowest();
      own.total[h] = 0;
      if (h >= at.queries || lane >= shape_.key_packs) continue;
      own.query[h] = read_floats(shape_.queries.data + at.row * shape_.queries.token_stride +
                                     std::uint64_t{at.first_query + h} * shape_.queries.head_stride +
                                     std::uint64_t{lane} * attention_pack * shape_.element_bytes(),
                                 shape_.element);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < attention_pack; ++i)
        own.query[h].of[i] = product_of(own.query[h].of[i], scale);
    }
  }

  /// Where a lane's part of a token's key or value lies.
  [[nodiscard]] LLMMEM_HD static const std::byte* part_of(const std::byte* plane,
                                                          const plane_strides& strides,
                                                          const token_place& token,
                                                          std::uint32_t lane) noexcept {
    return plane + token.block * strides.block + token.token * strides.token +
           std::uint64_t{lane} * attention_raw<Element>::bytes;
  }

  /// A whole tile in one block. All of it is asked for before any of it is used; lanes behind a vector's end
  /// have zeros.
  LLMMEM_HD void read_tile(const place& at, const token_place& first, std::uint32_t lane,
                           attention_read<Element>& read) const noexcept {
    read.counts = 0xFF;
    const std::byte* const key = part_of(at.keys, shape_.keys.strides, first, lane);
    const std::byte* const value = part_of(at.values, shape_.values.strides, first, lane);
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

  /// A tile of which some tokens may not count, or that lies in several blocks.
  LLMMEM_HD void read_tokens(const place& at, std::uint32_t tile, std::uint32_t lane,
                             attention_read<Element>& read) const noexcept {
    read.counts = 0;
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < attention_tile; ++i) {
      read.key[i].clear();
      read.value[i].clear();
      const std::uint32_t position = tile + i;
      if (position < at.span.first || position >= at.to) continue;
      const token_place token = place_within(tables_, shape_.by, shape_.blocks, at.span.sequence, position);
      if (token.what != token_place::kind::there) {
        shape_.flag();
        continue;
      }
      read.counts |= 1U << i;
      if (lane < shape_.key_packs) read.key[i].load(part_of(at.keys, shape_.keys.strides, token, lane));
      if (lane < shape_.value_packs)
        read.value[i].load(part_of(at.values, shape_.values.strides, token, lane));
    }
  }

  template <class Group>
  LLMMEM_HD static void take_tile(const Group& group,
                                  typename Group::template held<attention_read<Element>>& read,
                                  typename Group::template held<attention_state<Heads>>& own) noexcept {
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
        attention_state<Heads>& mine = own[lane];
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
  LLMMEM_HD void finish(const Group& group, const place& at,
                        typename Group::template held<attention_state<Heads>>& own) const noexcept {
    typename Group::template held<float> total;
    LLMMEM_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      group.each([&](std::uint32_t lane) { total[lane] = own[lane].total[h]; });
      join_eight(group, total, [](float a, float b) { return a + b; });
      if (h >= at.queries) continue;
      group.each([&](std::uint32_t lane) {
        const attention_output output{at.row, at.first_query + h, at.head};
        const attention_total of{own[lane].sum[h], own[lane].most[h], total[lane]};
        if (at.span.shares > 1) {
          keep(output, at.share, lane, of);
        } else {
          write_output(shape_, output, lane, of);
        }
      });
    }
  }

  /// What a share came to, for `attention_merge_work`.
  LLMMEM_HD void keep(const attention_output& at, std::uint32_t share, std::uint32_t lane,
                      const attention_total& of) const noexcept {
    const std::uint64_t part = (at.row * shape_.query_heads() + at.query) * shape_.shares.by() + share;
    if (lane < shape_.value_packs) {
      raw_of<dtype::f32>(of.sum).store(
          reinterpret_cast<std::byte*>(shape_.sums + (part * shape_.value_packs + lane) * attention_pack));
    }
    if (lane == 0) {
      store_packet<8>(reinterpret_cast<std::byte*>(shape_.states + 2 * part),
                      {{bits_of_float(of.most), bits_of_float(of.total)}});
    }
  }

  attention_shape shape_;
  Tables tables_;
  divider chunks_;  // of a head's query heads
  divider units_;   // of a share: heads x chunks
  std::uint32_t lanes_;
  bool tiles_in_block_;
};

/// Eight elements of an output of a row with several shares, for a group of lanes: each joins every so
/// many-th share in their order, and what they come to is joined by pairs of lanes.
template <class Tables>
class attention_merge_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 8;

  attention_merge_work(const attention_shape& shape, const Tables& tables, std::uint32_t lanes) noexcept
      : shape_(shape),
        tables_(tables),
        packs_(shape.value_packs),
        query_heads_(shape.query_heads()),
        group_(shape.group),
        lanes_(lanes) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return shape_.rows * query_heads_.by() * packs_.by();
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return lanes_; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const std::uint64_t output = packs_.quotient(item);
    const std::uint32_t pack = packs_.remainder(item);
    attention_output at;
    at.row = query_heads_.quotient(output);
    at.query = query_heads_.remainder(output);
    at.head = static_cast<std::uint32_t>(group_.quotient(at.query));
    attention_span span;
    if (at.row < shape_.rows) span = span_of(shape_, tables_, at.row);
    // One share alone has written what it came to.
    const std::uint32_t shares = span.sequence < 0 || span.shares < 2 ? 0 : span.shares;
    const std::uint64_t first = output * shape_.shares.by();
    typename Group::template held<float> most;
    group.each([&](std::uint32_t lane) { most[lane] = most_of(first, lane, shares); });
    join_lanes(group, most, [](float a, float b) { return larger_of(a, b); });
    typename Group::template held<attention_total> own;
    group.each([&](std::uint32_t lane) { own[lane] = joined(first, lane, shares, pack, most[lane]); });
    typename Group::template held<float> number;
    LLMMEM_UNROLL
    for (unsigned e = 0; e <= attention_pack; ++e) {
      group.each([&](std::uint32_t lane) { number[lane] = number_of(own[lane], e); });
      join_lanes(group, number, [](float a, float b) { return a + b; });
      group.each([&](std::uint32_t lane) { number_of(own[lane], e) = number[lane]; });
    }
    if (shares == 0) return;
    group.each([&](std::uint32_t lane) {
      if (lane == 0) write_output(shape_, at, pack, own[lane]);
    });
  }

 private:
  /// Shares whose numbers are on their way together.
  static constexpr std::uint32_t at_once = 4;

  struct part {
    packet<8> state;
    attention_raw<dtype::f32> sum;
  };

  /// The eight sums and, behind them, the sum of exponentials.
  [[nodiscard]] LLMMEM_HD static float& number_of(attention_total& of, unsigned e) noexcept {
    return e < attention_pack ? of.sum.of[e] : of.total;
  }
  [[nodiscard]] LLMMEM_HD packet<8> state(std::uint64_t of) const noexcept {
    return load_packet<8>(reinterpret_cast<const std::byte*>(shape_.states + 2 * of));
  }
  [[nodiscard]] LLMMEM_HD float most_of(std::uint64_t first, std::uint32_t lane,
                                        std::uint32_t shares) const noexcept {
    float most = lowest();
    for (std::uint32_t i = lane; i < shares; i += lanes_)
      most = larger_of(most, float_of_bits(state(first + i).words[0]));
    return most;
  }
  [[nodiscard]] LLMMEM_HD part read(std::uint64_t of, std::uint32_t pack) const noexcept {
    part out{state(of), {}};
    out.sum.load(
        reinterpret_cast<const std::byte*>(shape_.sums + (of * packs_.by() + pack) * attention_pack));
    return out;
  }
  LLMMEM_HD static void add(attention_total& to, const part& of, float base) noexcept {
    const float weight = power_of_two(float_of_bits(of.state.words[0]) - base);
    to.total = fused(weight, float_of_bits(of.state.words[1]), to.total);
    const attention_floats sum = floats_of(of.sum);
    LLMMEM_UNROLL
    for (unsigned e = 0; e < attention_pack; ++e)
      to.sum.of[e] = fused(weight, sum.of[e], to.sum.of[e]);
  }
  /// What a lane's shares come to, beside the largest product of all.
  [[nodiscard]] LLMMEM_HD attention_total joined(std::uint64_t first, std::uint32_t lane,
                                                 std::uint32_t shares, std::uint32_t pack,
                                                 float most) const noexcept {
    attention_total out{{}, most, 0};
    const float base = most == lowest() ? 0.0F : most;
    std::uint32_t i = lane;
    for (; i + (at_once - 1) * lanes_ < shares; i += at_once * lanes_) {
      part in[at_once];
      LLMMEM_UNROLL
      for (std::uint32_t k = 0; k < at_once; ++k)
        in[k] = read(first + i + k * lanes_, pack);
      LLMMEM_UNROLL
      for (std::uint32_t k = 0; k < at_once; ++k)
        add(out, in[k], base);
    }
    for (; i < shares; i += lanes_)
      add(out, read(first + i, pack), base);
    return out;
  }

  attention_shape shape_;
  Tables tables_;
  divider packs_;
  divider query_heads_;
  divider group_;
  std::uint32_t lanes_;
};

}  // namespace llmmem::inline v0::detail
