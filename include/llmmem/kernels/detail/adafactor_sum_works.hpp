/// @file
/// The kernels that add Adafactor's squares.
#pragma once

#include <llmmem/kernels/adafactor.hpp>
#include <llmmem/kernels/detail/exact_sum_work.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Rows of a band whose columns are added by one thread each, unless there are too many bands.
inline constexpr std::uint64_t adafactor_band_rows = 64;
inline constexpr std::uint64_t most_adafactor_bands = 16;
/// Elements of a vector that a warp adds; of a matrix it adds a row.
inline constexpr std::uint64_t adafactor_segment = 1024;

/// A tensor's size as kernels use it.
struct adafactor_extent {
  std::uint64_t rows = 0;  ///< 1 of a vector
  std::uint64_t columns = 0;
  std::uint64_t segment = 0;  ///< elements that a warp adds
  bool is_factored = false;

  [[nodiscard]] static constexpr adafactor_extent of(const adafactor_shape& shape) noexcept {
    if (shape.is_factored()) return {shape.rows, shape.columns, shape.columns, true};
    return {1, shape.elements(), adafactor_segment, false};
  }
};

/// A piece of a tensor, and its gradients.
struct adafactor_part {
  adafactor_extent of{};
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::byte* weights = nullptr;
  const std::byte* gradients = nullptr;
  float scale = 1;
  bool is_wide = false;  ///< four elements of a segment are at an aligned address

  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t end() const noexcept { return first + count; }
};

/// Where the segments of a piece begin.
struct adafactor_segments {
  std::uint64_t first = 0;  ///< segment of the tensor
  std::uint64_t count = 0;

  [[nodiscard]] static constexpr adafactor_segments of(const adafactor_part& part) noexcept {
    const std::uint64_t begin = part.first / part.of.segment;
    return {begin, (part.end() - 1) / part.of.segment - begin + 1};
  }
};

/// Calls `act(g, at, count, is_complete)` for a lane's packets of up to 4 elements of a segment: with their
/// scaled gradients and the first one's index in the tensor.
template <dtype Gradient, class Act>
LLMMEM_HD inline void each_packet(const adafactor_part& part, std::uint64_t segment, group_lane lane,
                                  const Act& act) noexcept {
  const std::uint64_t begin = segment * part.of.segment;
  const std::uint64_t first = begin < part.first ? part.first : begin;
  const std::uint64_t whole = begin + part.of.segment;
  const std::uint64_t end = whole < part.end() ? whole : part.end();
  for (std::uint64_t at = first + std::uint64_t{lane.lane} * 4; at < end;
       at += std::uint64_t{lane.lanes} * 4) {
    const std::uint64_t count = end - at < 4 ? end - at : 4;
    const bool is_complete = part.is_wide && count == 4;
    float g[4];
    load_gradients<Gradient>(g, part.gradients, at - part.first, count, is_complete);
    LLMMEM_UNROLL
    for (float& each : g)
      each = unfused(each, part.scale);
    act(g, at, count, is_complete);
  }
}

class adafactor_clear_work {
 public:
  adafactor_clear_work(unordered_sum* sums, std::uint64_t count) noexcept : sums_(sums), count_(count) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return count_; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept { sums_[item] = unordered_sum{}; }

 private:
  unordered_sum* sums_;
  std::uint64_t count_;
};

/// The squares of a column's gradients in a band of rows.
template <dtype Gradient>
class adafactor_column_work {
 public:
  adafactor_column_work(const adafactor_part& part, std::uint64_t bands, unordered_sum* to) noexcept
      : part_(part),
        first_row_(part.first / part.of.columns),
        end_row_((part.end() - 1) / part.of.columns + 1),
        items_(bands * part.of.columns),
        band_rows_((end_row_ - first_row_ + bands - 1) / bands),
        to_(to) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return items_; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const auto columns = static_cast<std::uint32_t>(part_.of.columns);
    const std::uint32_t band = static_cast<std::uint32_t>(item) / columns;
    const std::uint64_t column = static_cast<std::uint32_t>(item) - band * columns;
    const std::uint64_t row = first_row_ + band * band_rows_;
    const std::uint64_t end = row + band_rows_ < end_row_ ? row + band_rows_ : end_row_;
    unordered_sum sum;
    std::uint64_t at = row * part_.of.columns + column;
    for (std::uint64_t each = row; each < end; ++each, at += part_.of.columns) {
      if (at < part_.first || at >= part_.end()) continue;
      float g[1];
      load_gradients<Gradient>(g, part_.gradients, at - part_.first, 1, false);
      sum.add_square(unfused(g[0], part_.scale));
    }
    to_[item] = sum;
  }

 private:
  adafactor_part part_;
  std::uint64_t first_row_;
  std::uint64_t end_row_;
  std::uint64_t items_;
  std::uint64_t band_rows_;
  unordered_sum* to_;
};

/// Merges the bands of columns.
class adafactor_band_work {
 public:
  adafactor_band_work(unordered_sum* to, const unordered_sum* from, std::uint64_t columns,
                      std::uint64_t bands) noexcept
      : to_(to), from_(from), columns_(columns), bands_(bands) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return columns_; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    unordered_sum sum = to_[item];
    for (std::uint64_t band = 0; band < bands_; ++band)
      sum.merge(from_[band * columns_ + item]);
    to_[item] = sum;
  }

 private:
  unordered_sum* to_;
  const unordered_sum* from_;
  std::uint64_t columns_;
  std::uint64_t bands_;
};

/// The squares of gradients and weights in a segment.
template <dtype Gradient>
class adafactor_segment_work {
 public:
  struct partial {
    unordered_sum gradients;
    unordered_sum weights;
  };
  using held = partial;

  /// @param rows  the sums of rows; null of a vector
  adafactor_segment_work(const adafactor_part& part, unordered_sum* rows, unordered_sum* weights) noexcept
      : part_(part), segments_(adafactor_segments::of(part)), rows_(rows), weights_(weights) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return segments_.count; }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return warp_threads; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    partial sums;
    each_packet<Gradient>(part_, segments_.first + item, lane,
                          [&](const float(&g)[4], std::uint64_t at, std::uint64_t count, bool is_complete) {
                            float w[4];
                            load_elements(w, part_.weights + (at - part_.first) * 4, count, is_complete);
                            LLMMEM_UNROLL
                            for (unsigned i = 0; i < 4; ++i) {
                              if (i >= count) break;
                              if (rows_ != nullptr) sums.gradients.add_square(g[i]);
                              sums.weights.add_square(w[i]);
                            }
                          });
    return sums;
  }
  [[nodiscard]] static LLMMEM_HD partial measure(const held& mine) noexcept { return mine; }
  [[nodiscard]] static LLMMEM_HD partial combine(const partial& a, const partial& b) noexcept {
    partial both = a;
    both.gradients.merge(b.gradients);
    both.weights.merge(b.weights);
    return both;
  }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& /*mine*/,
                      const partial& all) const noexcept {
    if (lane.lane != 0) return;
    if (rows_ != nullptr) {
      unordered_sum row = rows_[segments_.first + item];
      row.merge(all.gradients);
      rows_[segments_.first + item] = row;
    }
    weights_[item] = all.weights;
  }

 private:
  adafactor_part part_;
  adafactor_segments segments_;
  unordered_sum* rows_;
  unordered_sum* weights_;
};

/// One sum of many.
class adafactor_merge_work : public exact_sum_work {
 public:
  adafactor_merge_work(unordered_sum* to, const unordered_sum* from, std::uint64_t count) noexcept
      : to_(to), from_(from), count_(count) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return 1; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t /*item*/, group_lane lane) const noexcept {
    unordered_sum sum;
    for (std::uint64_t i = lane.lane; i < count_; i += lane.lanes)
      sum.merge(from_[i]);
    return sum;
  }
  LLMMEM_HD void give(std::uint64_t /*item*/, group_lane lane, const held& /*mine*/,
                      const partial& all) const noexcept {
    if (lane.lane != 0) return;
    unordered_sum sum = *to_;
    sum.merge(all);
    *to_ = sum;
  }

 private:
  unordered_sum* to_;
  const unordered_sum* from_;
  std::uint64_t count_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
