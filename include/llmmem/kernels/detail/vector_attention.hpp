/// @file
/// The work of `attention_arithmetic::host_vectors`: a share of a row, for all query heads of a head of the
/// cache.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/amx_elements.hpp>
#include <llmmem/kernels/detail/amx_floats.hpp>
#include <llmmem/kernels/detail/amx_tiles.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/subnormal_guard.hpp>
#include <llmmem/kernels/detail/vector_output.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the path that attends to elements of a type.
template <dtype Element>
[[nodiscard]] vector_path float_path_of(vector_path path) noexcept {
  return path == vector_path::amx && is_amx_element<Element> && has_amx_floats() ? path : float_path(path);
}

/// Each key and value is read once for up to `vector_heads` query heads of its head. Tokens go through tiles:
/// while one is converted, the next one is requested, line by line: a burst would wait, because the processor
/// keeps only a few dozen requests in flight.
template <dtype Element, class Tables>
class vector_attention_work {
 public:
  vector_attention_work(const attention_shape& shape, const Tables& tables, vector_path path) noexcept
      : shape_(shape), tables_(tables), shares_(shape), path_(float_path_of<Element>(path)) {
    const auto are_neighbours = [](const plane_strides& strides) { return strides.head < strides.token; };
    if (are_neighbours(shape.keys.strides) && are_neighbours(shape.values.strides))
      walked_ = walked_heads(shape.heads, shape.group,
                             std::size_t{std::max(shape.key_packs, shape.value_packs)} * attention_pack);
    // A few threads should not wait for one.
    constexpr std::uint64_t least_items = 8;
    while (walked_ > 1 && items() < least_items)
      walked_ = (walked_ + 1) / 2;
  }

  [[nodiscard]] std::uint64_t items() const noexcept {
    if (walked_ == 1) return shares_.items(shape_);
    return shape_.rows * shape_.shares.by() * units();
  }

  void run(std::uint64_t item) const noexcept {
    const attention_place at = shares_.at(first_share(item), shape_, tables_);
    if (at.queries == 0) return;
    // The smallest elements of half and fp8 are subnormal floats on their way to be floats.
    const subnormal_guard exact;
#if defined(__x86_64__)
    if constexpr (is_amx_element<Element>) {
      if (path_ == vector_path::amx) return run_tiles(at);
    }
#endif
    run_vectors(at);
  }

 private:
  /// The same by vectors. It is outlined, so that the frame of `run` leaves a thread's stack to the tiles.
  LLMMEM_OUTLINED void run_vectors(const attention_place& at) const noexcept {
    walked_sums sums;  // NOLINT(*-member-init): begin() writes what is read
    begin(at, sums);
    vector_tokens tokens[2];  // NOLINT(*-member-init): gather() does
    vector_tokens ahead;      // NOLINT(*-member-init): next_head() does
    std::uint32_t position = gather(at, at.from, tokens[0]);
    for (unsigned turn = 0; tokens[turn].count != 0; turn ^= 1U) {
      position = gather(at, position, tokens[turn ^ 1U]);
      for (std::uint32_t w = 0; w < sums.walked; ++w) {
        vector_sums_view of = sums.head(w);
        if (w + 1 == sums.walked) {
          attend_tile<Element>(path_, tokens[turn], tokens[turn ^ 1U], of);
          continue;
        }
        next_head(tokens[turn], ahead);
        attend_tile<Element>(path_, tokens[turn], ahead, of);
        std::swap(tokens[turn], ahead);
      }
    }
    for (std::uint32_t w = 0; w < sums.walked; ++w)
      finish_vectors(shape_, place_of_head(at, w), sums.head(w),
                     [&](std::uint32_t pack, std::uint32_t i) { return place(pack, i); });
  }

  [[nodiscard]] static std::uint32_t chunks_of(const attention_shape& shape) noexcept {
    return (shape.group - 1) / vector_heads + 1;
  }
  /// Returns the items of a share.
  [[nodiscard]] std::uint64_t units() const noexcept {
    return std::uint64_t{(shape_.heads - 1) / walked_ + 1} * chunks_of(shape_);
  }
  /// Returns the item of the first head that an item reads, if each read one.
  [[nodiscard]] std::uint64_t first_share(std::uint64_t item) const noexcept {
    if (walked_ == 1) return item;
    const std::uint64_t chunks = chunks_of(shape_);
    const std::uint64_t unit = item % units();
    return (item / units() * shape_.heads + unit / chunks * walked_) * chunks + unit % chunks;
  }

#if defined(__x86_64__)
  /// The same by tiles of AMX.
  LLMMEM_OUTLINED void run_tiles(const attention_place& at) const noexcept {
    amx_float_sums sums;        // NOLINT(*-member-init): begin() writes what is read
    amx_float_scratch scratch;  // NOLINT(*-member-init): each step writes what the next one reads
    sums.begin<Element>(std::min(walked_, shape_.heads - at.head), at.queries,
                        std::size_t{shape_.key_packs} * attention_pack,
                        std::size_t{shape_.value_packs} * attention_pack);
    for (std::uint32_t w = 0; w < sums.walked; ++w) {
      each_query(place_of_head(at, w), [&](std::uint32_t h, std::uint32_t element, float x) {
        sums.template set_query<Element>(w, h, element, x);
      });
    }
    const tile_use tiles(sums.shapes());
    vector_tokens tokens[2];  // NOLINT(*-member-init): gather() does
    std::uint32_t position = gather(at, at.from, tokens[0]);
    for (unsigned turn = 0; tokens[turn].count != 0; turn ^= 1U) {
      position = gather(at, position, tokens[turn ^ 1U]);
      attend_amx_floats<Element>(tokens[turn], tokens[turn ^ 1U], shape_.keys.strides.head,
                                 shape_.values.strides.head, sums, scratch);
    }
    for (std::uint32_t w = 0; w < sums.walked; ++w) {
      finish_vectors(shape_, place_of_head(at, w), sums.head(w), [](std::uint32_t pack, std::uint32_t i) {
        return amx_pair_place(amx_place<Element>(std::size_t{pack} * attention_pack + i));
      });
    }
  }
#endif

  [[nodiscard]] attention_place place_of_head(attention_place at, std::uint32_t w) const noexcept {
    at.head += w;
    at.first_query += w * shape_.group;
    return at;
  }
  /// The same tokens of the next head of the cache.
  void next_head(const vector_tokens& of, vector_tokens& next) const noexcept {
    for (std::size_t t = 0; t < max_tile_tokens; ++t) {
      next.keys[t] = of.keys[t] + shape_.keys.strides.head;
      next.values[t] = of.values[t] + shape_.values.strides.head;
    }
    next.count = of.count;
  }

  /// Calls `put(head, element, x)` with each element of each query, scaled.
  template <class Put>
  void each_query(const attention_place& at, const Put& put) const noexcept {
    const float scale = product_of(shape_.scale, shape_.scale_of(shape_.scales.keys, at.head));
    for (std::uint32_t h = 0; h < at.queries; ++h) {
      for (std::uint32_t pack = 0; pack < shape_.key_packs; ++pack) {
        const attention_floats query = read_floats(query_at(shape_, at, h, pack), shape_.element);
        for (std::uint32_t i = 0; i < attention_pack; ++i)
          put(h, pack * attention_pack + i, query.of[i] * scale);
      }
    }
  }

  void begin(const attention_place& at, walked_sums& sums) const noexcept {
    sums.begin<Element>(std::min(walked_, shape_.heads - at.head), at.queries,
                        std::size_t{shape_.key_packs} * attention_pack,
                        std::size_t{shape_.value_packs} * attention_pack);
    for (std::uint32_t w = 0; w < sums.walked; ++w) {
      const vector_sums_view of = sums.head(w);
      each_query(place_of_head(at, w), [&](std::uint32_t h, std::uint32_t element, float x) {
        of.query[h * of.key_stride + lane_place<Element>(element, lanes_in(path_))] = x;
      });
    }
  }

  [[nodiscard]] std::size_t place(std::uint32_t pack, std::uint32_t i) const noexcept {
    return lane_place<Element>(pack * attention_pack + i, lanes_in(path_));
  }

  /// Finds the next tokens that count, from a position on. Returns the position after them. Tokens that are
  /// in one block follow each other, so the table is asked once for them.
  std::uint32_t gather(const attention_place& at, std::uint32_t position,
                       vector_tokens& tokens) const noexcept {
    const std::size_t elements = std::size_t{std::max(shape_.key_packs, shape_.value_packs)} * attention_pack;
    const auto most = static_cast<std::uint32_t>(
        path_ == vector_path::amx ? max_tile_tokens : tile_tokens(lane_stride<Element>(elements)));
    tokens.count = 0;
    position = std::max(position, at.span.first);
    while (position < at.to && tokens.count < most) {
      const token_place first = counted_place(shape_, tables_, at, position);
      std::uint32_t run = 1;
      if constexpr (!token_tables<Tables>)
        run = std::min(shape_.by.by() - shape_.by.remainder(position), at.to - position);
      if (first.what == token_place::kind::in_cache) {
        run = std::min(run, most - tokens.count);
        add_run(at, first, run, tokens);
      }
      position += run;
    }
    // The rest of a tile is read or requested as its first token, and does not count.
    std::fill(tokens.keys + tokens.count, tokens.keys + max_tile_tokens,
              tokens.count == 0 ? at.keys : tokens.keys[0]);
    std::fill(tokens.values + tokens.count, tokens.values + max_tile_tokens,
              tokens.count == 0 ? at.values : tokens.values[0]);
    return position;
  }

  void add_run(const attention_place& at, const token_place& first, std::uint32_t run,
               vector_tokens& tokens) const noexcept {
    const std::byte* key = pack_at<Element>(at.keys, shape_.keys.strides, first, 0);
    const std::byte* value = pack_at<Element>(at.values, shape_.values.strides, first, 0);
    for (std::uint32_t i = 0; i < run; ++i) {
      tokens.keys[tokens.count] = key;
      tokens.values[tokens.count] = value;
      ++tokens.count;
      key += shape_.keys.strides.token;
      value += shape_.values.strides.token;
    }
  }

  attention_shape shape_;
  Tables tables_;
  attention_shares<vector_heads> shares_;
  vector_path path_;
  std::uint32_t walked_ = 1;  // heads of the cache that an item reads together
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
