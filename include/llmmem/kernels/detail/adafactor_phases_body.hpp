/// @file
/// The bodies of Adafactor's phases on an executor.
#pragma once

#include <llmmem/kernels/adafactor_phases.hpp>
#include <llmmem/kernels/detail/adafactor_body.hpp>
#include <llmmem/kernels/detail/adafactor_sum_works.hpp>
#include <llmmem/kernels/detail/exact_sum_work.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/model/dtype.hpp>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The next state.
class adafactor_factor_work {
 public:
  adafactor_factor_work(const adafactor_extent& of, const adafactor_arrays& arrays, std::uint64_t count,
                        const adafactor_constants& by) noexcept
      : of_(of), arrays_(arrays), count_(count), by_(by) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return count_; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t squares = !of_.is_factored ? 1 : item < of_.rows ? of_.columns : of_.rows;
    arrays_.factors[item] = adafactor_factor(arrays_.factors[item], arrays_.sums[item], squares, by_);
  }

 private:
  adafactor_extent of_;
  adafactor_arrays arrays_;
  std::uint64_t count_;
  adafactor_constants by_;
};

/// The terms of a tensor, of which the rows' factors are added.
class adafactor_terms_work : public exact_sum_work {
 public:
  /// @param weights  the sum of their squares
  adafactor_terms_work(const adafactor_shape& shape, const adafactor_arrays& arrays,
                       const adafactor_constants& by) noexcept
      : rows_(shape.rows),
        added_(shape.is_factored() ? shape.rows : 0),
        elements_(shape.elements()),
        weights_(arrays.sums + (shape.sums() - 1)),
        arrays_(arrays),
        by_(by) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return 1; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t /*item*/, group_lane lane) const noexcept {
    unordered_sum sum;
    for (std::uint64_t i = lane.lane; i < added_; i += lane.lanes)
      sum.add(arrays_.factors[i]);
    return sum;
  }
  LLMMEM_HD void give(std::uint64_t /*item*/, group_lane lane, const held& /*mine*/,
                      const partial& all) const noexcept {
    if (lane.lane == 0) *arrays_.terms = adafactor_terms_of(all, rows_, *weights_, elements_, by_);
  }

 private:
  std::uint64_t rows_;
  std::uint64_t added_;
  std::uint64_t elements_;
  const unordered_sum* weights_;
  adafactor_arrays arrays_;
  adafactor_constants by_;
};

/// The factor of a segment's row, and the state of its columns from an element on.
class adafactor_segment_state {
 public:
  adafactor_segment_state(const adafactor_extent& of, const adafactor_arrays& arrays) noexcept
      : of_(of), arrays_(arrays) {}
  [[nodiscard]] LLMMEM_HD float row(std::uint64_t segment) const noexcept {
    return of_.is_factored ? row_factor(arrays_.factors[segment], arrays_.terms->row_mean) : 1.0F;
  }
  /// @param at  the element's index in the tensor
  [[nodiscard]] LLMMEM_HD const float* columns(std::uint64_t segment, std::uint64_t at) const noexcept {
    return arrays_.factors + (of_.is_factored ? of_.rows + at - segment * of_.columns : at);
  }
  /// Whether four columns of a segment are at an aligned address.
  [[nodiscard]] bool is_wide() const noexcept {
    return (!of_.is_factored || of_.rows % 4 == 0) &&
           reinterpret_cast<std::uintptr_t>(arrays_.factors) % 16 == 0;
  }

 private:
  adafactor_extent of_;
  adafactor_arrays arrays_;
};

/// The squares of a segment's updates.
template <dtype Gradient>
class adafactor_update_work : public exact_sum_work {
 public:
  adafactor_update_work(const adafactor_part& part, const adafactor_arrays& arrays, float floor,
                        unordered_sum* to) noexcept
      : part_(part),
        segments_(adafactor_segments::of(part)),
        state_(part.of, arrays),
        is_wide_(state_.is_wide()),
        floor_(floor),
        to_(to) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return segments_.count; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    unordered_sum sum;
    const std::uint64_t segment = segments_.first + item;
    const float row = state_.row(segment);
    each_packet<Gradient>(
        part_, segment, lane, [&](float(&g)[4], std::uint64_t at, std::uint64_t count, bool is_complete) {
          adafactor_updates(g, row, state_.columns(segment, at), count, floor_, is_complete && is_wide_);
          LLMMEM_UNROLL
          for (unsigned i = 0; i < 4; ++i) {
            if (i < count) sum.add_square(g[i]);
          }
        });
    return sum;
  }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& /*mine*/,
                      const partial& all) const noexcept {
    if (lane.lane == 0) to_[item] = all;
  }

 private:
  adafactor_part part_;
  adafactor_segments segments_;
  adafactor_segment_state state_;
  bool is_wide_;
  float floor_;
  unordered_sum* to_;
};

/// The size of the step, once for all lanes.
class adafactor_clip_work {
 public:
  adafactor_clip_work(const adafactor_arrays& arrays, const unordered_sum* updates, std::uint64_t elements,
                      const adafactor_constants& by) noexcept
      : terms_(arrays.terms), updates_(updates), elements_(elements), by_(by) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return 1; }
  LLMMEM_HD void run(std::uint64_t /*item*/) const noexcept {
    terms_->clipped = clipped_size(*terms_, *updates_, elements_, by_);
  }

 private:
  adafactor_terms* terms_;
  const unordered_sum* updates_;
  std::uint64_t elements_;
  adafactor_constants by_;
};

/// The weights of a segment.
template <dtype Gradient>
class adafactor_apply_work {
 public:
  using partial = std::uint32_t;  // nothing is joined
  using held = std::uint32_t;

  adafactor_apply_work(const adafactor_part& part, const adafactor_arrays& arrays,
                       const adafactor_constants& by) noexcept
      : part_(part),
        segments_(adafactor_segments::of(part)),
        state_(part.of, arrays),
        terms_(arrays.terms),
        is_wide_(state_.is_wide()),
        by_(by) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return segments_.count; }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return warp_threads; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    const std::uint64_t segment = segments_.first + item;
    const float row = state_.row(segment);
    const auto size = static_cast<float>(terms_->clipped);
    each_packet<Gradient>(
        part_, segment, lane, [&](float(&g)[4], std::uint64_t at, std::uint64_t count, bool is_complete) {
          adafactor_updates(g, row, state_.columns(segment, at), count, by_.floor, is_complete && is_wide_);
          std::byte* const weights = part_.weights + (at - part_.first) * 4;
          float w[4];
          load_elements(w, weights, count, is_complete);
          adafactor_weights(w, g, by_.keep, size);
          store_elements(w, weights, count, is_complete);
        });
    return 0;
  }
  [[nodiscard]] static LLMMEM_HD partial measure(const held& mine) noexcept { return mine; }
  [[nodiscard]] static LLMMEM_HD partial combine(const partial& a, const partial& /*b*/) noexcept {
    return a;
  }
  LLMMEM_HD void give(std::uint64_t /*item*/, group_lane /*lane*/, const held& /*mine*/,
                      const partial& /*all*/) const noexcept {}

 private:
  adafactor_part part_;
  adafactor_segments segments_;
  adafactor_segment_state state_;
  const adafactor_terms* terms_;
  bool is_wide_;
  adafactor_constants by_;
};

[[nodiscard]] constexpr std::uint64_t adafactor_bands(std::uint64_t rows) noexcept {
  return std::min((rows + adafactor_band_rows - 1) / adafactor_band_rows, most_adafactor_bands);
}

[[nodiscard]] inline result<void> check_arrays(const adafactor_shape& shape, const adafactor_arrays& arrays,
                                               const char* who) noexcept {
  if (arrays.factors == nullptr && shape.factors() != 0)
    return failure{errc::too_short, 0, shape.factors(), 0, who};
  if (arrays.sums == nullptr) return failure{errc::too_short, 1, adafactor_sums(shape), 0, who};
  if (arrays.terms == nullptr) return failure{errc::too_short, 2, 1, 0, who};
  return {};
}

/// A checked piece as kernels use it.
[[nodiscard]] inline adafactor_part adafactor_part_of(const adafactor_shape& shape,
                                                      const optimizer_piece& piece,
                                                      const gradient_piece& gradients, float scale) noexcept {
  const std::uint64_t width = gradients.element == dtype::f32 ? 4 : 2;
  adafactor_part made{
      adafactor_extent::of(shape), piece.first, piece.count, piece.weights, gradients.data, scale};
  made.is_wide = piece.first % 4 == 0 && made.of.segment % 4 == 0 &&
                 reinterpret_cast<std::uintptr_t>(piece.weights) % 16 == 0 &&
                 reinterpret_cast<std::uintptr_t>(gradients.data) % (4 * width) == 0;
  return made;
}

/// Checks a piece's phase, and calls `act<Gradient>(part)` if the piece has elements.
template <class Act>
result<void> in_adafactor_phase(const char* who, const adafactor_shape& shape, const optimizer_piece& piece,
                                const gradient_piece& gradients, const adafactor_hyper& hyper,
                                const adafactor_arrays& arrays, const Act& act) {
  if (auto fits = check_adafactor(shape, piece, gradients, hyper, who); !fits) return fits;
  if (auto fits = check_arrays(shape, arrays, who); !fits) return fits;
  if (piece.count == 0) return {};
  const adafactor_part part = adafactor_part_of(shape, piece, gradients, hyper.gradient_scale);
  return gradients.element == dtype::f32 ? act.template operator()<dtype::f32>(part)
                                         : act.template operator()<dtype::bf16>(part);
}

}  // namespace detail

constexpr std::uint64_t adafactor_sums(const adafactor_shape& shape) noexcept {
  const auto of = detail::adafactor_extent::of(shape);
  const std::uint64_t segments = (shape.elements() + of.segment - 1) / (of.segment == 0 ? 1 : of.segment);
  return shape.sums() + 1 + std::max(segments, detail::adafactor_bands(of.rows) * of.columns);
}

template <class Run>
result<void> adafactor_begin(const Run& run, const adafactor_shape& shape, const adafactor_arrays& arrays) {
  if (auto fits = detail::check_adafactor(shape, {}, "adafactor_begin"); !fits) return fits;
  if (auto fits = detail::check_arrays(shape, arrays, "adafactor_begin"); !fits) return fits;
  return run.each(detail::adafactor_clear_work(arrays.sums, shape.sums() + 1));
}

template <class Run>
result<void> adafactor_add(const Run& run, const adafactor_shape& shape, const optimizer_piece& piece,
                           const gradient_piece& gradients, const adafactor_hyper& hyper,
                           const adafactor_arrays& arrays) {
  return detail::in_adafactor_phase(
      "adafactor_add", shape, piece, gradients, hyper, arrays,
      [&]<dtype Gradient>(const detail::adafactor_part& part) -> result<void> {
        unordered_sum* const columns = arrays.sums + (shape.is_factored() ? shape.rows : 0);
        unordered_sum* const scratch = arrays.sums + shape.sums() + 1;
        const std::uint64_t bands = detail::adafactor_bands(part.of.rows);
        const detail::adafactor_column_work<Gradient> of_columns(part, bands, scratch);
        if (auto done = run.each(of_columns); !done) return done;
        const detail::adafactor_band_work of_bands(columns, scratch, part.of.columns, bands);
        if (auto done = run.each(of_bands); !done) return done;
        unordered_sum* const rows = shape.is_factored() ? arrays.sums : nullptr;
        const detail::adafactor_segment_work<Gradient> of_segments(part, rows, scratch);
        if (auto done = run.each(of_segments); !done) return done;
        return run.each(
            detail::adafactor_merge_work(arrays.sums + shape.sums() - 1, scratch, of_segments.items()));
      });
}

template <class Run>
result<void> adafactor_factors(const Run& run, const adafactor_shape& shape, const adafactor_hyper& hyper,
                               const adafactor_arrays& arrays) {
  if (auto fits = detail::check_adafactor(shape, hyper, "adafactor_factors"); !fits) return fits;
  if (auto fits = detail::check_arrays(shape, arrays, "adafactor_factors"); !fits) return fits;
  if (shape.elements() == 0) return {};
  const auto by = detail::adafactor_constants::of(hyper);
  const detail::adafactor_factor_work next(detail::adafactor_extent::of(shape), arrays, shape.factors(), by);
  if (auto done = run.each(next); !done) return done;
  return run.each(detail::adafactor_terms_work(shape, arrays, by));
}

template <class Run>
result<void> adafactor_add_updates(const Run& run, const adafactor_shape& shape, const optimizer_piece& piece,
                                   const gradient_piece& gradients, const adafactor_hyper& hyper,
                                   const adafactor_arrays& arrays) {
  return detail::in_adafactor_phase(
      "adafactor_add_updates", shape, piece, gradients, hyper, arrays,
      [&]<dtype Gradient>(const detail::adafactor_part& part) -> result<void> {
        unordered_sum* const updates = arrays.sums + shape.sums();
        const detail::adafactor_update_work<Gradient> work(part, arrays, detail::adafactor_floor(hyper),
                                                           updates + 1);
        if (auto done = run.each(work); !done) return done;
        return run.each(detail::adafactor_merge_work(updates, updates + 1, work.items()));
      });
}

template <class Run>
result<void> adafactor_apply(const Run& run, const adafactor_shape& shape, const optimizer_piece& piece,
                             const gradient_piece& gradients, const adafactor_hyper& hyper,
                             const adafactor_arrays& arrays) {
  return detail::in_adafactor_phase(
      "adafactor_apply", shape, piece, gradients, hyper, arrays,
      [&]<dtype Gradient>(const detail::adafactor_part& part) -> result<void> {
        const auto by = detail::adafactor_constants::of(hyper);
        const detail::adafactor_clip_work clip(arrays, arrays.sums + shape.sums(), shape.elements(), by);
        if (auto done = run.each(clip); !done) return done;
        return run.each(detail::adafactor_apply_work<Gradient>(part, arrays, by));
      });
}

}  // namespace v0
}  // namespace llmmem
