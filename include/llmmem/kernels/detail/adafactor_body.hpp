/// @file
/// The bodies of Adafactor's phases.
#pragma once

#include <llmmem/kernels/adafactor.hpp>
#include <llmmem/kernels/detail/optimizer_arithmetic.hpp>
#include <llmmem/kernels/detail/optimizer_step_body.hpp>
#include <llmmem/kernels/errors.hpp>

#include <algorithm>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Elements that are handled at once.
inline constexpr unsigned adafactor_width = 64;
/// As many numbers as an `unordered_sum` adds.
inline constexpr std::uint64_t most_adafactor_elements = std::uint64_t{1} << 31U;

/// t^-0.8 by operations that IEEE 754 rounds one way only. The fifth root is found by bisection, because
/// Newton's method may end between two neighbours.
[[nodiscard]] constexpr double adafactor_share(std::uint64_t step) noexcept {
  const auto t = static_cast<double>(step);
  double low = 1;
  double high = 8192;  // above 2^(64 / 5)
  for (int i = 0; i < 66; ++i) {
    const double middle = 0.5 * (low + high);
    const double square = unfused(middle, middle);
    (unfused(unfused(square, square), middle) <= t ? low : high) = middle;
  }
  const double square = unfused(low, low);
  return 1 / unfused(square, square);
}

[[nodiscard]] inline result<void> check_adafactor(const adafactor_shape& shape, const adafactor_hyper& hyper,
                                                  const char* who) noexcept {
  if (shape.rows > most_adafactor_elements || shape.columns > most_adafactor_elements ||
      shape.elements() > most_adafactor_elements)
    return failure{errc::out_of_range, 0, std::max(shape.rows, shape.columns), most_adafactor_elements, who};
  if (hyper.step == 0) return failure{errc::out_of_range, 0, 0, ~std::uint64_t{0}, who};
  return {};
}
[[nodiscard]] inline result<void> check_adafactor(const adafactor_shape& shape, const optimizer_piece& piece,
                                                  const gradient_piece& gradients,
                                                  const adafactor_hyper& hyper, const char* who) noexcept {
  if (auto fits = check_adafactor(shape, hyper, who); !fits) return fits;
  if (gradients.count != piece.count)
    return failure{errc::size_mismatch, 0, piece.count, gradients.count, who};
  if (gradients.element != dtype::f32 && gradients.element != dtype::bf16)
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::f32),
                   static_cast<std::uint64_t>(gradients.element), who};
  if (piece.count > shape.elements() || piece.first > shape.elements() - piece.count)
    return failure{errc::out_of_range, 0, std::max(piece.first, piece.count), shape.elements(), who};
  if (piece.count == 0) return {};
  const struct {
    const std::byte* data;
    std::uint32_t width;
  } arrays[] = {{piece.weights, 4}, {gradients.data, gradients.element == dtype::f32 ? 4U : 2U}};
  std::uint32_t index = 0;
  for (const auto& array : arrays) {
    const auto address = reinterpret_cast<std::uintptr_t>(array.data);
    if (array.data == nullptr) return failure{errc::too_short, index, piece.count, 0, who};
    if (address % array.width != 0) return failure{errc::bad_granularity, index, address, array.width, who};
    ++index;
  }
  return {};
}
[[nodiscard]] inline result<void> check_count(std::uint64_t wanted, std::uint64_t found,
                                              const char* who) noexcept {
  if (wanted == found) return {};
  return failure{errc::size_mismatch, 0, wanted, found, who};
}

/// Calls `act(g, row, column, at, count)` for runs of up to 64 elements of a piece that are in one row: with
/// their scaled gradients, their place in the tensor and their index in the piece. A vector is one row.
template <class Act>
void each_adafactor_run(const adafactor_shape& shape, const optimizer_piece& piece,
                        const gradient_piece& gradients, float scale, const Act& act) noexcept {
  const std::uint64_t columns = shape.is_factored() ? shape.columns : shape.elements();
  for (std::uint64_t at = 0; at < piece.count;) {
    const std::uint64_t row = (piece.first + at) / columns;
    const std::uint64_t column = (piece.first + at) % columns;
    const std::uint64_t count =
        std::min({piece.count - at, columns - column, std::uint64_t{adafactor_width}});
    float g[adafactor_width];
    if (gradients.element == dtype::f32) {
      load_gradients<dtype::f32>(g, gradients.data, at, count, false);
    } else {
      load_gradients<dtype::bf16>(g, gradients.data, at, count, false);
    }
    for (float& each : g)
      each = unfused(each, scale);
    act(g, row, column, at, count);
    at += count;
  }
}

/// The factor of a row in V.
[[nodiscard]] LLMMEM_HD inline float row_factor(float factor, double row_mean) noexcept {
  return static_cast<float>(static_cast<double>(factor) / row_mean);
}
[[nodiscard]] inline float row_factor(const adafactor_shape& shape, std::span<const float> factors,
                                      const adafactor_terms& terms, std::uint64_t row) noexcept {
  return shape.is_factored() ? row_factor(factors[row], terms.row_mean) : 1;
}

/// Replaces gradients by their updates.
/// @param columns  the state of these columns, or of these elements of a vector
template <unsigned N>
LLMMEM_HD inline void adafactor_updates(float (&g)[N], float row, const float* columns, std::uint64_t count,
                                        float floor, bool is_complete = false) noexcept {
  float v[N];
  load_elements(v, reinterpret_cast<const std::byte*>(columns), count, is_complete);
  LLMMEM_UNROLL
  for (unsigned i = 0; i < N; ++i) {
    const float variance = unfused(row, v[i]);
    v[i] = variance < floor ? floor : variance;  // a NaN stays one
  }
  take_roots(v);
  LLMMEM_UNROLL
  for (unsigned i = 0; i < N; ++i)
    g[i] = settled(quotient_of(g[i], v[i]));
}
/// Changes weights by their updates.
template <unsigned N>
LLMMEM_HD inline void adafactor_weights(float (&w)[N], const float (&u)[N], float keep, float size) noexcept {
  LLMMEM_UNROLL
  for (unsigned i = 0; i < N; ++i)
    w[i] = settled(unfused(keep, w[i]) - unfused(size, u[i]));
}

[[nodiscard]] inline float adafactor_floor(const adafactor_hyper& hyper) noexcept {
  return static_cast<float>(std::max(hyper.least_square * hyper.least_square, 0x1p-126));
}

/// The root of the mean of `count` squares.
[[nodiscard]] LLMMEM_HD inline double root_mean(const unordered_sum& squares, std::uint64_t count) noexcept {
  return root_of(squares.value() / static_cast<double>(count));
}

/// The constants of a step.
struct adafactor_constants {
  double share, kept_share, least_mean, least_size, largest_size, clip;
  float floor, keep, scale;

  [[nodiscard]] static adafactor_constants of(const adafactor_hyper& by) noexcept {
    const double share = adafactor_share(by.step);
    return {.share = share,
            .kept_share = 1 - share,
            .least_mean = std::max(by.least_square, 0x1p-126),
            .least_size = by.least_size,
            .largest_size = std::min(by.rate, 1 / root_of(static_cast<double>(by.step))),
            .clip = by.clip,
            .floor = adafactor_floor(by),
            .keep = static_cast<float>(1 - unfused(by.rate, by.weight_decay)),
            .scale = by.gradient_scale};
  }
};
/// The next state of a row, of a column or of an element. @param count  of the squares in the sum
[[nodiscard]] LLMMEM_HD inline float adafactor_factor(float factor, const unordered_sum& squares,
                                                      std::uint64_t count,
                                                      const adafactor_constants& by) noexcept {
  const double mean = squares.value() / static_cast<double>(count);
  const double next = unfused(by.kept_share, static_cast<double>(factor)) + unfused(by.share, mean);
  // Not greater: a NaN stays one. An infinite state would hide the gradient that caused it.
  return next <= 0x1.fffffep+127 ? static_cast<float>(next) : float_of_bits(0x7FC0'0000U);
}
/// @param of_rows  the sum of the rows' factors
[[nodiscard]] LLMMEM_HD inline adafactor_terms adafactor_terms_of(const unordered_sum& of_rows,
                                                                  std::uint64_t rows,
                                                                  const unordered_sum& weights,
                                                                  std::uint64_t elements,
                                                                  const adafactor_constants& by) noexcept {
  const double row_mean = of_rows.value() / static_cast<double>(rows);
  const double size = root_mean(weights, elements);
  adafactor_terms made;
  made.row_mean = row_mean < by.least_mean ? by.least_mean : row_mean;  // a NaN stays one
  made.size = (size < by.least_size ? by.least_size : size) * by.largest_size;
  return made;
}
/// The size of a step whose updates are clipped; of a NaN, NaN.
[[nodiscard]] LLMMEM_HD inline double clipped_size(const adafactor_terms& terms, const unordered_sum& updates,
                                                   std::uint64_t elements,
                                                   const adafactor_constants& by) noexcept {
  const double excess = root_mean(updates, elements) / by.clip;
  return terms.size / (excess < 1 ? 1 : excess);
}

}  // namespace detail

inline result<void> adafactor_add(const adafactor_shape& shape, const optimizer_piece& piece,
                                  const gradient_piece& gradients, const adafactor_hyper& hyper,
                                  std::span<unordered_sum> sums) noexcept {
  constexpr const char* who = "adafactor_add";
  if (auto fits = detail::check_adafactor(shape, piece, gradients, hyper, who); !fits) return fits;
  if (auto fits = detail::check_count(shape.sums(), sums.size(), who); !fits) return fits;
  const std::uint64_t first_column = shape.is_factored() ? shape.rows : 0;
  detail::each_adafactor_run(shape, piece, gradients, hyper.gradient_scale,
                             [&](const float(&g)[detail::adafactor_width], std::uint64_t row,
                                 std::uint64_t column, std::uint64_t at, std::uint64_t count) {
                               float w[detail::adafactor_width];
                               detail::load_elements(w, piece.weights + at * 4, count, false);
                               unordered_sum* const columns = sums.data() + first_column + column;
                               unordered_sum& weights = sums.back();
                               for (std::uint64_t i = 0; i < count; ++i) {
                                 columns[i].add_square(g[i]);
                                 weights.add_square(w[i]);
                               }
                               for (std::uint64_t i = 0; i < count && shape.is_factored(); ++i)
                                 sums[row].add_square(g[i]);
                             });
  return {};
}

inline result<adafactor_terms> adafactor_factors(const adafactor_shape& shape,
                                                 std::span<const unordered_sum> sums,
                                                 const adafactor_hyper& hyper,
                                                 std::span<float> factors) noexcept {
  constexpr const char* who = "adafactor_factors";
  if (auto fits = detail::check_adafactor(shape, hyper, who); !fits) return fits.error();
  if (auto fits = detail::check_count(shape.sums(), sums.size(), who); !fits) return fits.error();
  if (auto fits = detail::check_count(shape.factors(), factors.size(), who); !fits) return fits.error();
  if (shape.elements() == 0) return adafactor_terms{};
  const auto by = detail::adafactor_constants::of(hyper);
  unordered_sum of_rows;
  for (std::uint64_t i = 0; i < factors.size(); ++i) {
    const bool is_row = shape.is_factored() && i < shape.rows;
    const std::uint64_t count = !shape.is_factored() ? 1 : is_row ? shape.columns : shape.rows;
    factors[i] = detail::adafactor_factor(factors[i], sums[i], count, by);
    if (is_row) of_rows.add(factors[i]);
  }
  return detail::adafactor_terms_of(of_rows, shape.rows, sums.back(), shape.elements(), by);
}

inline result<void> adafactor_add_updates(const adafactor_shape& shape, const optimizer_piece& piece,
                                          const gradient_piece& gradients, const adafactor_hyper& hyper,
                                          std::span<const float> factors, const adafactor_terms& terms,
                                          unordered_sum& updates) noexcept {
  constexpr const char* who = "adafactor_add_updates";
  if (auto fits = detail::check_adafactor(shape, piece, gradients, hyper, who); !fits) return fits;
  if (auto fits = detail::check_count(shape.factors(), factors.size(), who); !fits) return fits;
  const float floor = detail::adafactor_floor(hyper);
  const float* const columns = factors.data() + (shape.is_factored() ? shape.rows : 0);
  detail::each_adafactor_run(shape, piece, gradients, hyper.gradient_scale,
                             [&](float(&g)[detail::adafactor_width], std::uint64_t row, std::uint64_t column,
                                 std::uint64_t, std::uint64_t count) {
                               detail::adafactor_updates(g, detail::row_factor(shape, factors, terms, row),
                                                         columns + column, count, floor);
                               for (std::uint64_t i = 0; i < count; ++i)
                                 updates.add_square(g[i]);
                             });
  return {};
}

inline result<void> adafactor_apply(const adafactor_shape& shape, const optimizer_piece& piece,
                                    const gradient_piece& gradients, const adafactor_hyper& hyper,
                                    std::span<const float> factors, const adafactor_terms& terms,
                                    const unordered_sum& updates) noexcept {
  constexpr const char* who = "adafactor_apply";
  if (auto fits = detail::check_adafactor(shape, piece, gradients, hyper, who); !fits) return fits;
  if (auto fits = detail::check_count(shape.factors(), factors.size(), who); !fits) return fits;
  if (piece.count == 0) return {};
  const float floor = detail::adafactor_floor(hyper);
  const float* const columns = factors.data() + (shape.is_factored() ? shape.rows : 0);
  const auto by = detail::adafactor_constants::of(hyper);
  const auto size = static_cast<float>(detail::clipped_size(terms, updates, shape.elements(), by));
  detail::each_adafactor_run(shape, piece, gradients, hyper.gradient_scale,
                             [&](float(&g)[detail::adafactor_width], std::uint64_t row, std::uint64_t column,
                                 std::uint64_t at, std::uint64_t count) {
                               detail::adafactor_updates(g, detail::row_factor(shape, factors, terms, row),
                                                         columns + column, count, floor);
                               float w[detail::adafactor_width];
                               detail::load_elements(w, piece.weights + at * 4, count, false);
                               detail::adafactor_weights(w, g, by.keep, size);
                               detail::store_elements(w, piece.weights + at * 4, count, false);
                             });
  return {};
}

}  // namespace v0
}  // namespace llmmem
