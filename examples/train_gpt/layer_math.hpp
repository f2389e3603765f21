/// @file
/// Products, norms, GELU and causal attention, forward and backward, in one fixed order.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>

#include "train_gpt/exact_math.hpp"
#include "train_gpt/matrix.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// The operations of a `gpt`'s layers on matrices. One worker computes each element of a result in one order,
/// so that the bits do not depend on the number of workers.
///
/// @par Thread safety   one caller; the team does the work.
template <std::floating_point T>
class layer_math {
 protected:
  layer_math(const gpt_shape& shape, worker_team& team) noexcept : shape_(shape), team_(&team) {}

  /// @param values  `scratch_elements(shape)` for each worker; they outlive this.
  void set_scratch(std::span<T> values) noexcept { scratch_ = values; }

  /// For products, followed by a matrix of context by context.
  [[nodiscard]] static constexpr std::size_t scratch_elements(const gpt_shape& shape) noexcept {
    return product_scratch_elements + shape.context * shape.context;
  }

  /// @name Products
  /// @{

  /// y = a b.
  void product(matrix<T> y, matrix<const T> a, matrix<const T> b) noexcept {
    team_->slices(y.rows, detail::tile_rows, [&](std::size_t first, std::size_t end, std::size_t worker) {
      for (std::size_t i = first; i < end; ++i)
        std::fill_n(y.row(i), y.columns, T{0});
      multiply_add(y.from_row(first, end), a.from_row(first, end), b, scratch(worker));
    });
  }

  /// y += a b.
  void add_product(matrix<T> y, matrix<const T> a, matrix<const T> b) noexcept {
    team_->slices(y.rows, detail::tile_rows, [&](std::size_t first, std::size_t end, std::size_t worker) {
      multiply_add(y.from_row(first, end), a.from_row(first, end), b, scratch(worker));
    });
  }

  /// Sets each row to added + bias, or to the bias if `added` is omitted.
  void set_rows(matrix<T> y, const T* bias, matrix<const T> added = {}) noexcept {
    team_->slices(y.rows, detail::tile_rows, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t i = first; i < end; ++i) {
        T* const row = y.row(i);
        if (added.data == nullptr) {
          std::copy_n(bias, y.columns, row);
        } else {
          for (std::size_t j = 0; j < y.columns; ++j)
            row[j] = added.row(i)[j] + bias[j];
        }
      }
    });
  }

  /// sums[j] = the sum of column j, in the order of the rows.
  void column_sums(T* sums, matrix<const T> of) noexcept {
    team_->slices(of.columns, 16, [&](std::size_t first, std::size_t end, std::size_t) {
      std::fill(sums + first, sums + end, T{0});
      for (std::size_t i = 0; i < of.rows; ++i) {
        for (std::size_t j = first; j < end; ++j)
          sums[j] += of.row(i)[j];
      }
    });
  }

  void fill_zero(matrix<T> y) noexcept {
    for (std::size_t i = 0; i < y.rows; ++i)
      std::fill_n(y.row(i), y.columns, T{0});
  }
  /// @}

  /// @name Layer norm
  /// `statistics` has each row's mean and the inverse of its standard deviation.
  /// @{
  void norm(matrix<T> y, matrix<T> statistics, matrix<const T> x, const T* scale, const T* shift) noexcept {
    team_->slices(x.rows, 1, [&](std::size_t first, std::size_t end, std::size_t) {
      const T share = 1 / static_cast<T>(x.columns);
      for (std::size_t i = first; i < end; ++i) {
        const T* const from = x.row(i);
        T* const to = y.row(i);
        const T mean = ordered_sum<T>(x.columns, [&](std::size_t c) { return from[c]; }) * share;
        const T variance =
            ordered_sum<T>(x.columns, [&](std::size_t c) { return (from[c] - mean) * (from[c] - mean); }) *
            share;
        const T inverse = 1 / std::sqrt(variance + norm_epsilon);
        for (std::size_t c = 0; c < x.columns; ++c)
          to[c] = (from[c] - mean) * inverse * scale[c] + shift[c];
        statistics.row(i)[0] = mean;
        statistics.row(i)[1] = inverse;
      }
    });
  }

  /// Adds the gradient of the norm's input to `to`, and writes those of its scale and shift.
  void norm_backward(matrix<T> to, matrix<const T> out, matrix<const T> x, matrix<const T> statistics,
                     const T* scale, T* to_scale, T* to_shift) noexcept {
    team_->slices(x.columns, 16, [&](std::size_t first, std::size_t end, std::size_t) {
      std::fill(to_scale + first, to_scale + end, T{0});
      std::fill(to_shift + first, to_shift + end, T{0});
      for (std::size_t i = 0; i < x.rows; ++i) {
        const T mean = statistics.row(i)[0];
        const T inverse = statistics.row(i)[1];
        for (std::size_t c = first; c < end; ++c) {
          to_scale[c] += out.row(i)[c] * ((x.row(i)[c] - mean) * inverse);
          to_shift[c] += out.row(i)[c];
        }
      }
    });
    team_->slices(x.rows, 1, [&](std::size_t first, std::size_t end, std::size_t) {
      const T share = 1 / static_cast<T>(x.columns);
      for (std::size_t i = first; i < end; ++i) {
        const T mean = statistics.row(i)[0];
        const T inverse = statistics.row(i)[1];
        const T* const from = x.row(i);
        const T* const dy = out.row(i);
        T* const dx = to.row(i);
        const T sum = ordered_sum<T>(x.columns, [&](std::size_t c) { return dy[c] * scale[c]; }) * share;
        const T along =
            ordered_sum<T>(x.columns,
                           [&](std::size_t c) { return dy[c] * scale[c] * ((from[c] - mean) * inverse); }) *
            share;
        for (std::size_t c = 0; c < x.columns; ++c)
          dx[c] += (dy[c] * scale[c] - sum - (from[c] - mean) * inverse * along) * inverse;
      }
    });
  }
  /// @}

  /// @name GELU
  /// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
  /// @{
  static constexpr T gelu_rate = T(0.7978845608028654);
  static constexpr T gelu_cubic = T(0.044715);

  void gelu(matrix<T> y, matrix<const T> x) noexcept {
    team_->slices(x.rows, 1, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t i = first * x.columns; i < end * x.columns; ++i) {
        const T v = x.data[i];
        y.data[i] = T(0.5) * v * (1 + exact_tanh(gelu_rate * (v + gelu_cubic * v * v * v)));
      }
    });
  }

  /// Turns the gradient of GELU's output into that of its input `x`.
  void gelu_backward(matrix<T> gradient, matrix<const T> x) noexcept {
    team_->slices(x.rows, 1, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t i = first * x.columns; i < end * x.columns; ++i) {
        const T v = x.data[i];
        const T t = exact_tanh(gelu_rate * (v + gelu_cubic * v * v * v));
        const T slope = (1 - t * t) * gelu_rate * (1 + 3 * gelu_cubic * v * v);
        gradient.data[i] *= T(0.5) * (1 + t) + T(0.5) * v * slope;
      }
    });
  }
  /// @}

  /// @name Causal attention Query, key and value of a token are side by side in its row of `qkv`, and the
  /// heads side by side in each. One worker computes a head of a sequence: `context` rows of `probabilities`.
  /// @{

  /// row[j] = exp(scale row[j]) over the sum of these, for j from 0 to `count`.
  static void softmax(T* row, std::size_t count, T scale) noexcept {
    T most = row[0];
    for (std::size_t j = 1; j < count; ++j)
      most = row[j] > most ? row[j] : most;
    for (std::size_t j = 0; j < count; ++j)
      row[j] = exact_exp((row[j] - most) * scale);
    const T inverse = 1 / ordered_sum<T>(count, [&](std::size_t j) { return row[j]; });
    for (std::size_t j = 0; j < count; ++j)
      row[j] *= inverse;
  }

  [[nodiscard]] T attention_scale() const noexcept {
    return 1 / std::sqrt(static_cast<T>(shape_.head_width()));
  }

  /// The rows of sequence and head number `pair`, in a matrix with `parts` times the width, of part `part`.
  template <class U>
  [[nodiscard]] matrix<U> head_of(matrix<U> all, std::size_t pair, std::size_t part) const noexcept {
    return all.part(pair / shape_.heads * shape_.context, shape_.context,
                    part * shape_.width + pair % shape_.heads * shape_.head_width(), shape_.head_width());
  }

  /// Calls `work(pair, scratch)` for every head of every sequence, each on one worker.
  template <class Work>
  void for_each_head(Work&& work) {
    team_->slices(shape_.batch * shape_.heads, 1,
                  [&](std::size_t first, std::size_t end, std::size_t worker) {
                    for (std::size_t pair = first; pair < end; ++pair)
                      work(pair, scratch(worker));
                  });
  }

  void attend(matrix<T> y, matrix<T> probabilities, matrix<const T> qkv) noexcept {
    const std::size_t context = shape_.context;
    for_each_head([&](std::size_t pair, std::span<T> room) {
      const matrix<T> p = probabilities.from_row(pair * context, (pair + 1) * context);
      fill_zero(p);
      multiply_add(p, head_of(qkv, pair, 0), head_of(qkv, pair, 1).transposed(), room);
      for (std::size_t i = 0; i < context; ++i) {
        softmax(p.row(i), i + 1, attention_scale());
        std::fill(p.row(i) + i + 1, p.row(i) + context, T{0});
      }
      const matrix<T> out = head_of(y, pair, 0);
      fill_zero(out);
      multiply_add<T>(out, p, head_of(qkv, pair, 2), room);
    });
  }

  void attention_backward(matrix<T> to_qkv, matrix<const T> out, matrix<const T> qkv,
                          matrix<const T> probabilities) noexcept {
    const std::size_t context = shape_.context;
    fill_zero(to_qkv);
    for_each_head([&](std::size_t pair, std::span<T> room) {
      const matrix<T> scores = as_matrix(room.subspan(product_scratch_elements), context);
      const matrix<const T> p = probabilities.from_row(pair * context, (pair + 1) * context);
      const matrix<const T> dy = head_of(out, pair, 0);
      fill_zero(scores);
      multiply_add(scores, dy, head_of(qkv, pair, 2).transposed(), room);
      multiply_add(head_of(to_qkv, pair, 2), p.transposed(), dy, room);
      for (std::size_t i = 0; i < context; ++i) {
        T* const row = scores.row(i);
        const T* const likely = p.row(i);
        const T sum = ordered_sum<T>(i + 1, [&](std::size_t j) { return likely[j] * row[j]; });
        for (std::size_t j = 0; j <= i; ++j)
          row[j] = likely[j] * (row[j] - sum) * attention_scale();
        std::fill(row + i + 1, row + context, T{0});
      }
      multiply_add<T>(head_of(to_qkv, pair, 0), scores, head_of(qkv, pair, 1), room);
      multiply_add<T>(head_of(to_qkv, pair, 1), scores.transposed(), head_of(qkv, pair, 0), room);
    });
  }
  /// @}

  gpt_shape shape_;
  worker_team* team_;

 private:
  static constexpr T norm_epsilon = T(1e-5);

  [[nodiscard]] std::span<T> scratch(std::size_t worker) const noexcept {
    const std::size_t each = scratch_elements(shape_);
    return scratch_.subspan(worker * each, each);
  }

  std::span<T> scratch_{};
};

}  // namespace train_gpt
