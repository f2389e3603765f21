/// @file
/// `element_runs`: a regular set of a tensor's elements, as four numbers. It describes what one rank holds.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// `count` indices from `first`.
struct index_range {
  std::uint64_t first = 0;
  std::uint64_t count = 0;

  friend constexpr bool operator==(const index_range&, const index_range&) noexcept = default;
};

/// The elements { begin + i x stride + j : i < count, j < run } of a row-major tensor, by their index in it.
///
/// One form for all sets that common partitions cut out: a whole tensor, a range of its flat elements (ZeRO),
/// rows, columns, a box of both. A *piece* is such a set stored densely, in the order of its elements: the
/// element at `position` p of the set is the p-th of the storage. An irregular set (the queries, keys and
/// values of one rank in a fused matrix, with fewer heads of the latter) is described as several tensors.
///
/// Canonical form, which makes equal sets equal values: the empty set is {0, 0, 0, 0}; runs that touch are
/// one; the stride of a single run is its length. Factories return it. For a set from another source, call
/// `validate` first: the other functions assume it.
///
/// @par Complexity      O(1) for all; `intersect` documents its own.
/// @par Thread safety   a plain value.
/// @par Errors          factories throw argument_error for elements outside the shape.
struct element_runs {
  std::uint64_t begin = 0;   ///< the first element
  std::uint64_t run = 0;     ///< elements of one run
  std::uint64_t stride = 0;  ///< from the beginning of a run to that of the next
  std::uint64_t count = 0;   ///< runs

  /// All elements of a tensor of `elements`.
  [[nodiscard]] static constexpr element_runs all_of(std::uint64_t elements) noexcept {
    return canonical({0, elements, elements, 1});
  }
  /// Elements `first` to `first + count - 1`, for any shape.
  /// @throws length_error  when they pass 2^63 - 1.
  [[nodiscard]] static constexpr element_runs flat_range(std::uint64_t first, std::uint64_t count) {
    static_cast<void>(checked_add(first, count, "element_runs: first element + elements"));
    return canonical({first, count, count, 1});
  }
  [[nodiscard]] static constexpr element_runs rows(const tensor_shape& shape, index_range rows) {
    return box(shape, rows, {0, shape.columns()});
  }
  [[nodiscard]] static constexpr element_runs columns(const tensor_shape& shape, index_range columns) {
    return box(shape, {0, shape.rows()}, columns);
  }
  /// The elements in both `rows` and `columns`.
  [[nodiscard]] static constexpr element_runs box(const tensor_shape& shape, index_range rows,
                                                  index_range columns) {
    check_within(rows, shape.rows(), "rows");
    check_within(columns, shape.columns(), "columns");
    if (rows.count == 0 || columns.count == 0) return {};
    return canonical(
        {rows.first * shape.columns() + columns.first, columns.count, shape.columns(), rows.count});
  }

  [[nodiscard]] constexpr bool empty() const noexcept { return count == 0; }
  [[nodiscard]] constexpr std::uint64_t elements() const noexcept { return run * count; }
  /// One past the last element.
  [[nodiscard]] constexpr std::uint64_t end() const noexcept {
    return empty() ? begin : begin + (count - 1) * stride + run;
  }
  [[nodiscard]] constexpr bool contains(std::uint64_t element) const noexcept {
    if (empty() || element < begin) return false;
    const std::uint64_t from_begin = element - begin;
    return from_begin / stride < count && from_begin % stride < run;
  }
  /// Returns how many elements of the set come before `element`: its position in the piece's storage.
  /// @pre `contains(element)`
  [[nodiscard]] constexpr std::uint64_t position_of(std::uint64_t element) const noexcept {
    const std::uint64_t from_begin = element - begin;
    return from_begin / stride * run + from_begin % stride;
  }
  /// @pre `position < elements()`
  [[nodiscard]] constexpr std::uint64_t element_at(std::uint64_t position) const noexcept {
    return begin + position / run * stride + position % run;
  }
  /// Returns the first run that ends after `element`; `count` or more if none does. @pre not `empty()`
  [[nodiscard]] constexpr std::uint64_t first_run_after(std::uint64_t element) const noexcept {
    return element < begin + run ? 0 : (element - begin - run) / stride + 1;
  }
  [[nodiscard, deprecated("call first_run_after()")]] constexpr std::uint64_t first_run_behind(
      std::uint64_t element) const noexcept {
    return first_run_after(element);
  }

  /// Returns whether this is a set of elements of a tensor of `tensor_elements`, in canonical form.
  [[nodiscard]] constexpr bool is_valid(std::uint64_t tensor_elements) const noexcept {
    if (run == 0 || count == 0) return begin == 0 && run == 0 && stride == 0 && count == 0;
    return is_form_canonical() && lies_within(tensor_elements);
  }
  /// Throws an error that says what is wrong if the set is not valid. No values of the four numbers cause an
  /// overflow.
  /// @param where  precedes the text: the file and tensor the numbers were read from.
  /// @throws argument_error  when the form is not canonical, or runs overlap.
  /// @throws length_error    when it passes the tensor, or the tensor 2^63 - 1.
  constexpr void validate(std::uint64_t tensor_elements, std::string_view where) const;

  friend constexpr bool operator==(const element_runs&, const element_runs&) noexcept = default;

 private:
  static constexpr element_runs canonical(element_runs set) noexcept {
    if (set.run == 0 || set.count == 0) return {};
    if (set.count == 1 || set.run == set.stride)
      return {set.begin, set.run * set.count, set.run * set.count, 1};
    return set;
  }
  static constexpr void check_within(index_range range, std::uint64_t limit, const char* what) {
    if (range.first <= limit && range.count <= limit - range.first) return;
    throw argument_error("element_runs: " + std::to_string(range.count) + " " + what + " from " +
                         std::to_string(range.first) + " on, of a tensor that has " + std::to_string(limit));
  }
  [[nodiscard]] constexpr bool is_form_canonical() const noexcept {
    return count == 1 ? stride == run : stride > run;
  }
  [[nodiscard]] constexpr bool lies_within(std::uint64_t tensor_elements) const noexcept {
    if (tensor_elements > max_bytes || begin > tensor_elements || run > tensor_elements - begin) return false;
    return count == 1 || count - 1 <= (tensor_elements - begin - run) / stride;
  }
};

constexpr void element_runs::validate(std::uint64_t tensor_elements, std::string_view where) const {
  if (is_valid(tensor_elements)) return;
  const std::string text = std::string(where) + ": elements {begin " + std::to_string(begin) + ", run " +
                           std::to_string(run) + ", stride " + std::to_string(stride) + ", count " +
                           std::to_string(count) + "}: ";
  if (run == 0 || count == 0) throw argument_error(text + "no elements are written as four zeros");
  if (count == 1 && stride != run)
    throw argument_error(text + "the stride of a single run must be its length");
  if (stride < run) throw argument_error(text + "runs overlap: the stride is less than the run");
  if (count > 1 && stride == run) throw argument_error(text + "runs that touch are written as one");
  if (tensor_elements > max_bytes) {
    throw length_error(text + "a tensor of " + std::to_string(tensor_elements) +
                       " elements passes the limit of 2^63 - 1");
  }
  throw length_error(text + "they pass the end of the tensor, which has " + std::to_string(tensor_elements) +
                     " elements");
}

/// Calls `visit(element, count)` for each range of elements in both sets, in increasing order. The ranges are
/// maximal: between any two there is an element that is not in both.
///
/// @par Complexity   O(ranges) and O(1) for each run of the set with fewer of them, regardless of their
///                   length.
template <class Visit>
constexpr void intersect(const element_runs& a, const element_runs& b, Visit&& visit) {
  if (a.empty() || b.empty()) return;
  std::uint64_t i = 0;
  std::uint64_t j = 0;
  while (i < a.count && j < b.count) {
    const std::uint64_t a_begin = a.begin + i * a.stride;
    const std::uint64_t b_begin = b.begin + j * b.stride;
    const std::uint64_t a_end = a_begin + a.run;
    const std::uint64_t b_end = b_begin + b.run;
    if (a_end <= b_begin) {
      i = a.first_run_after(b_begin);
    } else if (b_end <= a_begin) {
      j = b.first_run_after(a_begin);
    } else {
      const std::uint64_t first = a_begin < b_begin ? b_begin : a_begin;
      const std::uint64_t last = a_end < b_end ? a_end : b_end;
      visit(first, last - first);
      ++(a_end <= b_end ? i : j);
    }
  }
}

}  // namespace v0
}  // namespace llmmem
