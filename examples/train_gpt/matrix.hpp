/// @file
/// Views of matrices and their blocked product, which sums every element in one fixed order.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

namespace train_gpt {

/// A matrix somewhere in memory: element (i, j) is at `data[i * row_step + j * column_step]`.
template <class T>
struct matrix {
  T* data = nullptr;
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t row_step = 0;
  std::size_t column_step = 1;

  /// Row `i` as contiguous values. @pre `column_step` is 1.
  [[nodiscard]] T* row(std::size_t i) const noexcept { return data + i * row_step; }

  /// `row_count` rows and `column_count` columns from (i, j) on.
  [[nodiscard]] matrix part(std::size_t i, std::size_t row_count, std::size_t j,
                            std::size_t column_count) const noexcept {
    return {data + i * row_step + j * column_step, row_count, column_count, row_step, column_step};
  }
  [[nodiscard]] matrix from_row(std::size_t first, std::size_t end) const noexcept {
    return part(first, end - first, 0, columns);
  }
  [[nodiscard]] matrix transposed() const noexcept { return {data, columns, rows, column_step, row_step}; }

  operator matrix<const T>() const noexcept
    requires(!std::is_const_v<T>)
  {
    return {data, rows, columns, row_step, column_step};
  }
};

/// `values` as rows of `columns` each.
template <class T>
[[nodiscard]] matrix<T> as_matrix(std::span<T> values, std::size_t columns) noexcept {
  return {values.data(), values.size() / columns, columns, columns};
}

namespace detail {

// A tile of C stays in registers: eight of the sixteen of every x86-64, with two for B and one for A. The
// code uses the target's registers: wider ones compute more elements at once, each with the same result.
#if defined(__AVX512F__)
inline constexpr std::size_t register_bytes = 64;
#elif defined(__AVX__)
inline constexpr std::size_t register_bytes = 32;
#else
inline constexpr std::size_t register_bytes = 16;
#endif

template <class T>
struct register_of {
  typedef T type __attribute__((vector_size(register_bytes)));  // g++'s and clang++'s vector extension
  static constexpr std::size_t lanes = register_bytes / sizeof(T);
};

inline constexpr std::size_t tile_rows = 4;
template <class T>
inline constexpr std::size_t tile_columns = 2 * register_of<T>::lanes;

// Blocks of A and B are packed so that tiles read them in order; they fit the second-level cache.
inline constexpr std::size_t block_rows = 64;
inline constexpr std::size_t block_depth = 256;
inline constexpr std::size_t block_columns = 512;

/// Copies `from`, whose rows are summed over, into strips of `Width` columns, the last padded with zeros.
template <std::size_t Width, class T>
void pack_strips(matrix<const T> from, T* to) noexcept {
  for (std::size_t strip = 0; strip < from.columns; strip += Width) {
    const std::size_t width = std::min(Width, from.columns - strip);
    for (std::size_t k = 0; k < from.rows; ++k, to += Width) {
      const T* const row = from.data + k * from.row_step + strip * from.column_step;
      for (std::size_t j = 0; j < width; ++j)
        to[j] = row[j * from.column_step];
      for (std::size_t j = width; j < Width; ++j)
        to[j] = 0;
    }
  }
}

/// C += A B for one tile: `a` holds `depth` columns of `tile_rows`, `b` as many rows of `tile_columns`.
template <class T>
void multiply_tile(std::size_t depth, const T* a, const T* b, T* c, std::size_t row_step) noexcept {
  using values = typename register_of<T>::type;
  constexpr std::size_t lanes = register_of<T>::lanes;
  values left[tile_rows];
  values right[tile_rows];
  for (std::size_t i = 0; i < tile_rows; ++i) {
    std::memcpy(&left[i], c + i * row_step, sizeof(values));
    std::memcpy(&right[i], c + i * row_step + lanes, sizeof(values));
  }
  for (std::size_t k = 0; k < depth; ++k, a += tile_rows, b += 2 * lanes) {
    values b_left;
    values b_right;
    std::memcpy(&b_left, b, sizeof(values));
    std::memcpy(&b_right, b + lanes, sizeof(values));
    for (std::size_t i = 0; i < tile_rows; ++i) {
      left[i] += a[i] * b_left;
      right[i] += a[i] * b_right;
    }
  }
  for (std::size_t i = 0; i < tile_rows; ++i) {
    std::memcpy(c + i * row_step, &left[i], sizeof(values));
    std::memcpy(c + i * row_step + lanes, &right[i], sizeof(values));
  }
}

/// The same where C ends inside the tile.
template <class T>
void multiply_edge(std::size_t depth, const T* a, const T* b, matrix<T> c) noexcept {
  constexpr std::size_t columns = tile_columns<T>;
  T tile[tile_rows * columns] = {};
  for (std::size_t i = 0; i < c.rows; ++i)
    std::copy_n(c.row(i), c.columns, tile + i * columns);
  multiply_tile(depth, a, b, tile, columns);
  for (std::size_t i = 0; i < c.rows; ++i)
    std::copy_n(tile + i * columns, c.columns, c.row(i));
}

}  // namespace detail

/// Elements of the scratch memory that one thread's `multiply_add` needs.
inline constexpr std::size_t product_scratch_elements =
    detail::block_depth * (detail::block_rows + detail::block_columns);

/// C += A B on the calling thread.
///
/// Element (i, j) becomes ((c + a_i0 b_0j) + a_i1 b_1j) + ..., each operation rounded (compile with
/// -ffp-contract=off): the bits depend neither on the division of C into parts nor on the width of registers.
///
/// @pre C's `column_step` is 1, it does not overlap A, B or `scratch`, and shapes agree.
/// @param scratch  `product_scratch_elements` of the thread's own.
template <std::floating_point T>
void multiply_add(matrix<T> c, matrix<const T> a, matrix<const T> b, std::span<T> scratch) noexcept {
  using namespace detail;
  T* const packed_a = scratch.data();
  T* const packed_b = packed_a + block_rows * block_depth;
  for (std::size_t j = 0; j < c.columns; j += block_columns) {
    const std::size_t columns = std::min(block_columns, c.columns - j);
    for (std::size_t k = 0; k < a.columns; k += block_depth) {
      const std::size_t depth = std::min(block_depth, a.columns - k);
      pack_strips<tile_columns<T>>(b.part(k, depth, j, columns), packed_b);
      for (std::size_t i = 0; i < c.rows; i += block_rows) {
        const std::size_t rows = std::min(block_rows, c.rows - i);
        pack_strips<tile_rows>(a.part(i, rows, k, depth).transposed(), packed_a);
        for (std::size_t jj = 0; jj < columns; jj += tile_columns<T>) {
          for (std::size_t ii = 0; ii < rows; ii += tile_rows) {
            const matrix<T> tile = c.part(i + ii, std::min(tile_rows, rows - ii), j + jj,
                                          std::min(tile_columns<T>, columns - jj));
            const T* const strip_a = packed_a + ii * depth;
            const T* const strip_b = packed_b + jj * depth;
            if (tile.rows == tile_rows && tile.columns == tile_columns<T>) {
              multiply_tile(depth, strip_a, strip_b, tile.data, tile.row_step);
            } else {
              multiply_edge(depth, strip_a, strip_b, tile);
            }
          }
        }
      }
    }
  }
}

/// The sum of `term(i)` for i from 0 to `count`: sixteen partial sums, each in order, added up in order. A
/// fixed order that vectorises.
template <class T, class Term>
[[nodiscard]] T ordered_sum(std::size_t count, Term&& term) noexcept {
  constexpr std::size_t lanes = 16;
  T partial[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane)
      partial[lane] += term(i + lane);
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane)
    partial[lane] += term(i);
  T sum = 0;
  for (const T each : partial)
    sum += each;
  return sum;
}

}  // namespace train_gpt
