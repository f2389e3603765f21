/// @file
/// The properties of a tensor that a partition needs: its rows and columns, its name and the width of an
/// element.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// A row-major tensor as rows x columns: the first dimension, and the product of all others.
///
/// A tensor of no dimensions is one row of one element; one of a single dimension has one column, so that its
/// elements are its rows. A dimension of 0 is legal: the tensor has no elements.
///
/// @par Thread safety   a plain value.
class tensor_shape {
 public:
  /// No dimensions: one element.
  constexpr tensor_shape() noexcept = default;

  /// @param dimensions  row-major, the slowest first; none: a scalar.
  /// @throws length_error  when the elements, or those of one row, pass 2^63 - 1.
  [[nodiscard]] static constexpr tensor_shape of(std::span<const std::uint64_t> dimensions) {
    tensor_shape shape;
    shape.dimensions_ = dimensions.size();
    if (dimensions.empty()) return shape;
    shape.rows_ = dimensions[0];
    for (const std::uint64_t each : dimensions.subspan(1)) {
      if (each == 0) shape.columns_ = 0;
    }
    if (shape.columns_ != 0) {
      for (const std::uint64_t each : dimensions.subspan(1))
        shape.columns_ = checked_multiply(shape.columns_, each, "tensor_shape: elements of a row");
    }
    shape.elements_ = checked_multiply(shape.rows_, shape.columns_, "tensor_shape: rows x columns");
    static_cast<void>(checked_add(shape.rows_, 0, "tensor_shape: rows"));
    return shape;
  }
  [[nodiscard]] static constexpr tensor_shape scalar() noexcept { return {}; }
  /// @throws length_error  as `of` does.
  [[nodiscard]] static constexpr tensor_shape vector(std::uint64_t elements) { return of({&elements, 1}); }
  /// @throws length_error  as `of` does.
  [[nodiscard]] static constexpr tensor_shape matrix(std::uint64_t rows, std::uint64_t columns) {
    const std::uint64_t both[] = {rows, columns};
    return of(both);
  }

  [[nodiscard]] constexpr std::uint64_t rows() const noexcept { return rows_; }
  [[nodiscard]] constexpr std::uint64_t columns() const noexcept { return columns_; }
  [[nodiscard]] constexpr std::uint64_t elements() const noexcept { return elements_; }
  [[nodiscard]] constexpr std::uint64_t dimensions() const noexcept { return dimensions_; }

  friend constexpr bool operator==(const tensor_shape&, const tensor_shape&) noexcept = default;

 private:
  std::uint64_t rows_ = 1;
  std::uint64_t columns_ = 1;
  std::uint64_t elements_ = 1;
  std::uint64_t dimensions_ = 0;
};

/// A tensor of a catalogue: all ranks, and all code that saves and loads, identify it by one `tensor_id`, its
/// index.
///
/// Elements are the unit that is never cut. For types under 8 bits, several elements packed in one byte count
/// as one.
struct tensor_facts {
  std::string name;  ///< the name in error texts
  tensor_shape shape{};
  std::uint32_t element_bytes = 1;

  /// @throws length_error  when they pass 2^63 - 1.
  [[nodiscard]] constexpr std::uint64_t bytes() const {
    return checked_multiply(shape.elements(), element_bytes, "tensor_facts: elements x bytes per element");
  }
};

}  // namespace v0
}  // namespace llmmem
