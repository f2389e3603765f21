/// @file
/// The bodies of Muon's phases.
#pragma once

#include <llmmem/kernels/detail/optimizer_arithmetic.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/muon.hpp>
#include <llmmem/kernels/unordered_sum.hpp>

#include <algorithm>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline constexpr std::uint64_t most_muon_elements = std::uint64_t{1} << 31U;
inline constexpr int newton_schulz_steps = 5;

[[nodiscard]] inline result<void> check_muon(const muon_shape& shape, const char* who) noexcept {
  if (shape.rows < 2 || shape.columns < 2) return failure{errc::out_of_range, 0, shape.shorter(), 2, who};
  if (shape.rows > most_muon_elements || shape.columns > most_muon_elements ||
      shape.elements() > most_muon_elements)
    return failure{errc::out_of_range, 0, std::max(shape.rows, shape.columns), most_muon_elements, who};
  return {};
}
[[nodiscard]] inline result<void> check_lengths(std::uint64_t wanted, std::uint64_t found,
                                                const char* who) noexcept {
  if (wanted == found) return {};
  return failure{errc::size_mismatch, 0, wanted, found, who};
}

/// Changes the momentum of an element, and makes its update.
LLMMEM_HD inline void muon_rule(float& momentum, float& update, float gradient, float keep, float share,
                                float scale) noexcept {
  const float g = unfused(share, unfused(gradient, scale));
  momentum = settled(unfused(keep, momentum) + g);
  update = settled(unfused(keep, momentum) + g);
}
/// What a matrix is divided by. Not greater: a NaN stays one, and a norm that no float holds becomes one,
/// because it would clear the matrix.
[[nodiscard]] LLMMEM_HD inline float muon_divisor(const unordered_sum& squares, double epsilon) noexcept {
  const double norm = root_of(squares.value());
  const double divisor = norm < epsilon ? epsilon : norm;
  return norm <= 0x1.fffffep+127 ? static_cast<float>(divisor) : float_of_bits(0x7FC0'0000U);
}
[[nodiscard]] inline float muon_size(const muon_shape& shape, const muon_hyper& hyper) noexcept {
  const double ratio = static_cast<double>(shape.rows) / static_cast<double>(shape.columns);
  return static_cast<float>(unfused(hyper.rate, root_of(ratio < 1 ? 1.0 : ratio)));
}
[[nodiscard]] inline float muon_keep(const muon_hyper& hyper) noexcept {
  return static_cast<float>(1 - unfused(hyper.rate, hyper.weight_decay));
}

/// to[i] = (start of row i) + row i of `left` times `right`, whose rows have `columns` floats.
/// @param from  times `scale`: the start, or null for zeros
inline void add_product(std::span<float> to, const float* from, float scale, const float* left,
                        const float* right, std::uint64_t inner, std::uint64_t columns, std::uint64_t first,
                        std::uint64_t end) noexcept {
  for (std::uint64_t i = first; i < end; ++i) {
    float* const row = to.data() + i * columns;
    for (std::uint64_t j = 0; j < columns; ++j)
      row[j] = 0;
    for (std::uint64_t k = 0; k < inner; ++k) {
      const float by = left[i * inner + k];
      const float* const add = right + k * columns;
      for (std::uint64_t j = 0; j < columns; ++j)
        row[j] += unfused(by, add[j]);
    }
    for (std::uint64_t j = 0; j < columns && from != nullptr; ++j)
      row[j] = unfused(scale, from[i * columns + j]) + row[j];
  }
}
/// to = transpose of from, which has `rows` rows.
inline void transpose(float* to, const float* from, std::uint64_t rows, std::uint64_t columns,
                      std::uint64_t first, std::uint64_t end) noexcept {
  for (std::uint64_t j = first; j < end; ++j) {
    for (std::uint64_t i = 0; i < rows; ++i)
      to[j * rows + i] = from[i * columns + j];
  }
}

/// What `orthogonalize` refuses, on hosts and devices.
[[nodiscard]] inline result<void> check_orthogonalize(const muon_shape& shape, std::uint64_t matrix,
                                                      std::uint64_t scratch) noexcept {
  constexpr const char* where = "orthogonalize";
  if (auto fits = check_muon(shape, where); !fits) return fits;
  if (auto fits = check_lengths(shape.elements(), matrix, where); !fits) return fits;
  return check_lengths(shape.scratch(), scratch, where);
}

}  // namespace detail

inline result<void> muon_momentum(std::span<const float> gradients, std::span<float> momentum,
                                  std::span<float> updates, const muon_hyper& hyper) noexcept {
  constexpr const char* who = "muon_momentum";
  if (auto fits = detail::check_lengths(gradients.size(), momentum.size(), who); !fits) return fits;
  if (auto fits = detail::check_lengths(gradients.size(), updates.size(), who); !fits) return fits;
  const auto keep = static_cast<float>(hyper.momentum);
  const auto share = static_cast<float>(1 - hyper.momentum);
  for (std::size_t i = 0; i < gradients.size(); ++i)
    detail::muon_rule(momentum[i], updates[i], gradients[i], keep, share, hyper.gradient_scale);
  return {};
}

template <class InRows>
result<void> orthogonalize(const muon_shape& shape, std::span<float> matrix, std::span<float> scratch,
                           const muon_hyper& hyper, const InRows& in_rows) noexcept {
  if (auto fits = detail::check_orthogonalize(shape, matrix.size(), scratch.size()); !fits) return fits;
  const std::uint64_t m = shape.shorter();
  const std::uint64_t n = shape.elements() / m;
  const bool is_tall = shape.rows > shape.columns;
  std::span<float> x = scratch.first(m * n);
  std::span<float> next = scratch.subspan(m * n, m * n);
  const std::span<float> turned = scratch.subspan(2 * m * n, m * n);
  const std::span<float> gram = scratch.subspan(3 * m * n, m * m);
  const std::span<float> both = scratch.subspan(3 * m * n + m * m, m * m);

  unordered_sum squares;
  for (const float each : matrix)
    squares.add_square(each);
  const float divisor = detail::muon_divisor(squares, hyper.epsilon);
  for (float& each : matrix)
    each = detail::quotient_of(each, divisor);
  if (is_tall) {
    in_rows(m, [&](std::uint64_t first, std::uint64_t end) noexcept {
      detail::transpose(x.data(), matrix.data(), n, m, first, end);
    });
  } else {
    std::ranges::copy(matrix, x.begin());
  }
  for (int step = 0; step < detail::newton_schulz_steps; ++step) {
    in_rows(n, [&](std::uint64_t first, std::uint64_t end) noexcept {
      detail::transpose(turned.data(), x.data(), m, n, first, end);
    });
    in_rows(m, [&](std::uint64_t first, std::uint64_t end) noexcept {
      detail::add_product(gram, nullptr, 0, x.data(), turned.data(), n, m, first, end);
    });
    in_rows(m, [&](std::uint64_t first, std::uint64_t end) noexcept {
      detail::add_product(both, nullptr, 0, gram.data(), gram.data(), m, m, first, end);
      for (std::uint64_t i = first * m; i < end * m; ++i)
        both[i] = detail::unfused(-4.775F, gram[i]) + detail::unfused(2.0315F, both[i]);
    });
    in_rows(m, [&](std::uint64_t first, std::uint64_t end) noexcept {
      detail::add_product(next, x.data(), 3.4445F, both.data(), x.data(), m, n, first, end);
    });
    std::swap(x, next);
  }
  if (is_tall) {
    in_rows(n, [&](std::uint64_t first, std::uint64_t end) noexcept {
      detail::transpose(matrix.data(), x.data(), m, n, first, end);
    });
  } else {
    std::ranges::copy(x, matrix.begin());
  }
  for (float& each : matrix)
    each = detail::settled(each);
  return {};
}

inline result<void> muon_apply(const muon_shape& shape, std::span<float> weights,
                               std::span<const float> updates, const muon_hyper& hyper) noexcept {
  constexpr const char* who = "muon_apply";
  if (auto fits = detail::check_muon(shape, who); !fits) return fits;
  if (auto fits = detail::check_lengths(weights.size(), updates.size(), who); !fits) return fits;
  const float size = detail::muon_size(shape, hyper);
  const float keep = detail::muon_keep(hyper);
  for (std::size_t i = 0; i < weights.size(); ++i)
    weights[i] = detail::settled(detail::unfused(keep, weights[i]) - detail::unfused(size, updates[i]));
  return {};
}

}  // namespace v0
}  // namespace llmmem
