/// @file
/// The work of summaries of keys, of bounds by them, and of lists of blocks' tokens.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/block_choice.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/model/dtype.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the bf16 at or below a float, as its bits. A NaN is unbounded.
[[nodiscard]] LLMMEM_HD inline std::uint16_t bf16_below(float x) noexcept {
  if (!(x == x)) return 0xFF80U;  // -infinity
  const std::uint32_t bits = bits_of_float(x);
  const bool is_away = (bits >> 31U) != 0 && (bits & 0xFFFFU) != 0;  // down is away from zero
  return static_cast<std::uint16_t>((bits >> 16U) + (is_away ? 1U : 0U));
}
/// The same, at or above the float.
[[nodiscard]] LLMMEM_HD inline std::uint16_t bf16_above(float x) noexcept {
  if (!(x == x)) return 0x7F80U;
  const std::uint32_t bits = bits_of_float(x);
  const bool is_away = (bits >> 31U) == 0 && (bits & 0xFFFFU) != 0;
  return static_cast<std::uint16_t>((bits >> 16U) + (is_away ? 1U : 0U));
}

/// The addresses of summaries.
struct summary_place {
  std::uint32_t heads = 0;
  std::uint32_t packs = 0;  // of a vector

  [[nodiscard]] LLMMEM_HD std::uint64_t of(std::uint64_t block, std::uint32_t head, std::uint32_t which,
                                           std::uint32_t pack) const noexcept {
    return (((block * heads + head) * 2 + which) * packs + pack) * attention_raw<dtype::bf16>::bytes;
  }
};

/// Keys in codes: one plane.
struct summary_codes {
  coded_plane keys{};
};

/// Eight channels of a head of a block.
template <dtype Element, class Codes = no_codes>
class summarize_work {
 public:
  summarize_work(const changed_blocks& changed, const kv_memory& cache, std::uint32_t layer,
                 std::byte* summaries, std::uint32_t* out_of_range, const Codes& codes = {}) noexcept
      : changed_(changed),
        codes_(codes),
        keys_(kv_plane_of(cache, 0)),
        blocks_(cache.blocks),
        layer_(layer),
        block_tokens_(cache.layout.block_tokens),
        place_{cache.layout.heads,
               static_cast<std::uint32_t>(cache.layout.vector_elements(0) / attention_pack)},
        packs_(place_.packs),
        heads_(place_.heads),
        summaries_(summaries),
        out_of_range_(out_of_range) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return changed_.count * heads_.by() * packs_.by();
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t vector = packs_.quotient(item);
    const std::uint64_t entry = heads_.quotient(vector);
    const std::int32_t block = changed_.blocks[entry];
    if (block < 0) return;
    const std::int32_t begin = changed_.begins == nullptr ? 0 : changed_.begins[entry];
    const std::int32_t end = changed_.ends[entry];
    const bool is_there = static_cast<std::uint64_t>(block) < blocks_ && begin >= 0 && end >= 0 &&
                          static_cast<std::uint32_t>(end) <= block_tokens_;
    if (!is_there) {
      if (out_of_range_ != nullptr) raise_flag(*out_of_range_);
      return;
    }
    if (end <= begin) return;
    const auto at = static_cast<std::uint64_t>(block);
    update(at, heads_.remainder(vector), packs_.remainder(item), static_cast<std::uint32_t>(begin),
           static_cast<std::uint32_t>(end));
  }

 private:
  LLMMEM_HD void update(std::uint64_t block, std::uint32_t head, std::uint32_t pack, std::uint32_t begin,
                        std::uint32_t end) const noexcept {
    std::byte* const least_at = summaries_ + place_.of(block, head, 0, pack);
    std::byte* const largest_at = summaries_ + place_.of(block, head, 1, pack);
    attention_floats least{};
    attention_floats largest{};
    bool has_any = begin != 0;
    if (has_any) {
      least = read_floats(least_at, dtype::bf16);
      largest = read_floats(largest_at, dtype::bf16);
    }
    const std::byte* const keys = plane_base(keys_, layer_) + keys_.strides.offset(0, block, 0, head) +
                                  std::uint64_t{pack} * attention_raw<Element>::bytes;
    for (std::uint32_t token = begin; token < end; ++token) {
      attention_floats key{};
      if constexpr (std::same_as<Codes, no_codes>) {
        attention_raw<Element> raw{};
        raw.load(keys + token * keys_.strides.token);
        key = floats_of(raw);
      } else {
        const coded_head of = head_of(codes_.keys, layer_, head);
        const code_words words = load_codes(codes_.keys.code, codes_at(codes_.keys, of, block, token, pack),
                                            codes_.keys.code_width);
        key = pack_scales(codes_.keys, of, block, pack)
                  .scaled(codes_.keys, token, floats_of_codes(codes_.keys.code, words));
      }
      LLMMEM_UNROLL
      for (unsigned e = 0; e < attention_pack; ++e) {
        // A NaN compares with nothing, and stays.
        const float x = key.of[e];
        least.of[e] = !has_any || x < least.of[e] || x != x ? x : least.of[e];
        largest.of[e] = !has_any || x > largest.of[e] || x != x ? x : largest.of[e];
      }
      has_any = true;
    }
    attention_raw<dtype::bf16> down{};
    attention_raw<dtype::bf16> up{};
    LLMMEM_UNROLL
    for (unsigned e = 0; e < attention_pack; ++e) {
      set_element(down.part[0], e, bf16_below(least.of[e]));
      set_element(up.part[0], e, bf16_above(largest.of[e]));
    }
    down.store(least_at);
    up.store(largest_at);
  }

  changed_blocks changed_;
  Codes codes_;
  kv_plane keys_;
  std::uint64_t blocks_;
  std::uint32_t layer_;
  std::uint32_t block_tokens_;
  summary_place place_;
  divider packs_;
  divider heads_;
  std::byte* summaries_;
  std::uint32_t* out_of_range_;
};
static_assert(item_work<summarize_work<dtype::bf16>>);

/// The input of bounds.
struct bound_request {
  attention_rows rows{};
  batch_vectors queries{};
  const std::byte* summaries = nullptr;
  std::uint64_t blocks = 0;
  std::uint32_t columns = 0;
  std::uint32_t block_tokens = 0;
  std::uint32_t query_heads = 0;
  std::uint32_t group = 0;
  std::uint32_t window = 0;
  dtype element = dtype::bf16;
  float scale = 1;
  kv_scales scales{};
  float* scores = nullptr;
  std::uint32_t* out_of_range = nullptr;
};

/// The bound of a block for a row. Neighbouring lanes read neighbouring packs of a head's summary, once for
/// up to four query heads, and of these; then the lanes' sums are added up.
template <class Tables>
class bound_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 4;

  bound_work(const bound_request& of, const summary_place& place, const Tables& tables) noexcept
      : of_(of),
        place_(place),
        tables_(tables),
        columns_(of.columns),
        by_(of.block_tokens),
        chunks_((of.group - 1) / at_once + 1) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return of_.rows.rows * columns_.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return attention_tile; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const spot at = spot_of(item);
    typename Group::template held<float> bound;
    group.each([&](std::uint32_t lane) { bound[lane] = lowest_bound(); });
    const std::uint32_t own = at.is_bounded ? place_.heads * chunks_.by() : 0;
    std::uint32_t head = 0;
    std::uint32_t chunk = 0;
    for (std::uint32_t left = group.turns(own); left != 0; --left) {
      // Other groups' turns may be left.
      take_chunk(group, at, at.is_bounded && head < place_.heads, head, chunk * at_once, bound);
      if (++chunk == chunks_.by()) {
        chunk = 0;
        ++head;
      }
    }
    join_eight(group, bound, [](float a, float b) { return larger_of(a, b); });
    group.each([&](std::uint32_t lane) {
      if (lane == 0 && at.is_written) of_.scores[item] = bound[lane];
    });
  }

 private:
  static constexpr std::uint32_t at_once = attention_tile / 2;  // query heads: each has two sums

  struct spot {
    std::uint64_t row = 0;
    std::uint64_t block = 0;
    bool is_written = false;
    bool is_bounded = false;  // by its block's summary
  };

  [[nodiscard]] static LLMMEM_HD float lowest_bound() noexcept { return float_of_bits(0xFF80'0000U); }

  LLMMEM_HD void flag() const noexcept {
    if (of_.out_of_range != nullptr) raise_flag(*of_.out_of_range);
  }

  [[nodiscard]] LLMMEM_HD spot spot_of(std::uint64_t item) const noexcept {
    spot out;
    if (item >= items()) return out;
    out.row = columns_.quotient(item);
    const std::uint32_t column = columns_.remainder(item);
    const std::int64_t sequence =
        of_.rows.sequences != nullptr ? of_.rows.sequences[out.row] : static_cast<std::int64_t>(out.row);
    if (sequence < 0) return out;
    if (sequence >= tables_.num_sequences) {
      flag();
      return out;
    }
    out.is_written = true;
    const auto at = static_cast<std::int32_t>(sequence);
    const std::int64_t tokens = of_.rows.lengths != nullptr ? of_.rows.lengths[out.row] : tables_.tokens(at);
    const std::int64_t begin = std::int64_t{column} * by_.by();
    if (begin >= tokens) return out;
    if (of_.window != 0 && begin + by_.by() + of_.window <= tokens) return out;
    const std::int32_t block = block_in(tables_, at, column);
    if (block < 0 || static_cast<std::uint64_t>(block) >= of_.blocks) {
      flag();
      return out;
    }
    out.block = static_cast<std::uint64_t>(block);
    out.is_bounded = true;
    return out;
  }

  /// Raises the bounds to those of up to four query heads of a head, from number `first` of its own on.
  template <class Group>
  LLMMEM_HD void take_chunk(const Group& group, const spot& at, bool counts, std::uint32_t head,
                            std::uint32_t first, typename Group::template held<float>& bound) const noexcept {
    const std::uint32_t queries = of_.group - first < at_once ? of_.group - first : at_once;
    typename Group::template held<attention_scores> sums;
    group.each([&](std::uint32_t lane) {
      sums[lane] = {};
      if (counts) add_packs(at, head, first, queries, lane, sums[lane]);
    });
    add_up(group, sums);
    // Lane i has the sum of query head i, and lane i + 4 that of its sizes.
    typename Group::template held<float> sizes;
    group.each([&](std::uint32_t lane) { sizes[lane] = sums[lane].of[0]; });
    group.swap(sizes, at_once);
    group.each([&](std::uint32_t lane) {
      if (!counts || lane >= queries) return;
      bound[lane] = larger_of(bound[lane], bound_of(sums[lane].of[0], sizes[lane]));
    });
  }

  /// Adds each channel's larger product, and the larger size of both, of a lane's packs.
  LLMMEM_HD void add_packs(const spot& at, std::uint32_t head, std::uint32_t first, std::uint32_t queries,
                           std::uint32_t lane, attention_scores& sums) const noexcept {
    const float key_scale =
        of_.scales.keys == nullptr ? 1.0F : of_.scales.keys[of_.scales.is_by_head ? head : 0];
    const float scale = product_of(of_.scale, key_scale);
    const std::uint64_t element_bytes = of_.element == dtype::f32 ? 4 : 2;
    const std::byte* const query = of_.queries.data + at.row * of_.queries.token_stride +
                                   (head * std::uint64_t{of_.group} + first) * of_.queries.head_stride;
    for (std::uint32_t pack = lane; pack < place_.packs; pack += attention_tile) {
      const attention_floats least =
          read_floats(of_.summaries + place_.of(at.block, head, 0, pack), dtype::bf16);
      const attention_floats largest =
          read_floats(of_.summaries + place_.of(at.block, head, 1, pack), dtype::bf16);
      LLMMEM_UNROLL
      for (unsigned q = 0; q < at_once; ++q) {
        if (q >= queries) break;
        const attention_floats asked = read_floats(
            query + q * of_.queries.head_stride + std::uint64_t{pack} * attention_pack * element_bytes,
            of_.element);
        LLMMEM_UNROLL
        for (unsigned e = 0; e < attention_pack; ++e) {
          const float scaled = product_of(asked.of[e], scale);
          const float a = product_of(scaled, least.of[e]);
          const float b = product_of(scaled, largest.of[e]);
          sums.of[q] += a > b ? a : b;
          sums.of[q + at_once] += size_of(a) > size_of(b) ? size_of(a) : size_of(b);
        }
      }
    }
  }

  /// With a margin for all roundings on the way, here and in attention.
  [[nodiscard]] LLMMEM_HD float bound_of(float sum, float sizes) const noexcept {
    const auto steps = static_cast<float>(place_.packs * attention_pack + 16);
    const float bound = sum + (product_of(sizes, product_of(steps, 0x1p-22F)) + 0x1p-120F);
    return bound == bound ? bound : float_of_bits(0x7F80'0000U);  // a block with a NaN is not skipped
  }

  bound_request of_;
  summary_place place_;
  Tables tables_;
  divider columns_;
  divider by_;
  divider chunks_;  // of a head's query heads
};

/// A token of a chosen block.
class list_tokens_work {
 public:
  list_tokens_work(const chosen_blocks& of, std::int32_t* listed) noexcept
      : of_(of), by_(of.block_tokens), k_(of.k), listed_(listed) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return of_.rows * k_.by() * by_.by(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t entry = by_.quotient(item);
    const std::int64_t block = of_.blocks[entry];
    const std::int64_t token = block * by_.by() + by_.remainder(item);
    const bool is_there = block >= 0 && token < of_.lengths[k_.quotient(entry)];
    listed_[item] = is_there ? static_cast<std::int32_t>(token) : -1;
  }

 private:
  chosen_blocks of_;
  divider by_;
  divider k_;
  std::int32_t* listed_;
};
static_assert(item_work<list_tokens_work>);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
