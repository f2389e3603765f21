/// @file
/// Checks of `merge_attention` and `import_attention`.
#pragma once

#include <llmmem/kernels/detail/attention_part_checks.hpp>
#include <llmmem/kernels/detail/attention_parts_work.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/merge_attention.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline constexpr part_names merged_part_names{
    {"merge_attention: a part's sums", "merge_attention: a part's sums.token_stride",
     "merge_attention: a part's sums.head_stride"},
    {"merge_attention: a part's states", "merge_attention: a part's states.token_stride",
     "merge_attention: a part's states.head_stride"}};
inline constexpr part_names merge_output_names{
    {"merge_attention: out.sums", "merge_attention: out.sums.token_stride",
     "merge_attention: out.sums.head_stride"},
    {"merge_attention: out.states", "merge_attention: out.states.token_stride",
     "merge_attention: out.states.head_stride"}};
inline constexpr part_names import_output_names{
    {"import_attention: out.sums", "import_attention: out.sums.token_stride",
     "import_attention: out.sums.head_stride"},
    {"import_attention: out.states", "import_attention: out.states.token_stride",
     "import_attention: out.states.head_stride"}};

/// The names of a shape's numbers.
struct shape_names {
  const char* query_heads = "";
  const char* value_dim = "";
};

[[nodiscard]] inline result<void> check_shape(const attention_part_shape& shape,
                                              const shape_names& names) noexcept {
  if (shape.query_heads == 0) return failure{errc::size_mismatch, 0, 0, 1, names.query_heads};
  if (shape.value_dim == 0) return failure{errc::size_mismatch, 0, 0, attention_pack, names.value_dim};
  return whole(shape.value_dim, attention_pack, names.value_dim);
}

/// Vectors of a batch, of a type that attention has.
template <class Byte>
[[nodiscard]] result<void> check_batch(const token_vectors<Byte>& of, dtype element,
                                       const attention_part_shape& shape, bool is_written,
                                       const vector_names& names) noexcept {
  if (element != dtype::f32 && element != dtype::bf16 && element != dtype::f16)
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::f32),
                   static_cast<std::uint64_t>(element), names.data};
  if (auto fits = whole(of, 16, names.data); !fits) return fits;
  const std::uint64_t bytes = std::uint64_t{shape.value_dim} * bits_of(element) / 8;
  return check_vectors({of.data, shape.rows, of.token_stride, shape.query_heads, of.head_stride, bytes},
                       is_written, names);
}

template <log_base Base, class Float>
[[nodiscard]] result<void> check_logarithms(const log_sums<Base, Float>& of,
                                            const attention_part_shape& shape, bool is_written,
                                            const vector_names& names) noexcept {
  for (const std::uint64_t each :
       {std::uint64_t{reinterpret_cast<std::uintptr_t>(of.data)}, of.row_stride, of.head_stride}) {
    if (auto fits = whole(each, sizeof(float), names.data); !fits) return fits;
  }
  return check_vectors({of.data, shape.rows, of.row_stride, shape.query_heads, of.head_stride, sizeof(float)},
                       is_written, names);
}

/// Checks the parts to merge; the output has its own checks.
[[nodiscard]] inline result<void> check_parts(const attention_part_shape& shape,
                                              std::span<const attention_part> parts) noexcept {
  if (parts.size() > max_merged_parts)
    return failure{errc::out_of_range, 0, parts.size(), max_merged_parts,
                   "merge_attention: parts of one call; merge some of them to a part before"};
  if (auto fits = check_shape(shape, {"merge_attention: query_heads", "merge_attention: value_dim"}); !fits)
    return fits;
  for (const attention_part& each : parts) {
    if (auto fits = check_part_units(each, merged_part_names); !fits) return fits;
    if (shape.rows == 0) continue;
    if (auto fits = check_part(each, shape, false, merged_part_names); !fits) return fits;
  }
  return {};
}

[[nodiscard]] inline merge_request merge_of(std::span<const attention_part> parts) noexcept {
  merge_request out;
  for (const attention_part& each : parts)
    out.part[out.parts++] = each;
  return out;
}

}  // namespace detail

template <class Run, log_base Base>
result<void> merge_attention(const Run& run, const attention_part_shape& shape,
                             std::span<const attention_part> parts, const merged_attention<Base>& out) {
  if (auto fits = detail::check_parts(shape, parts); !fits) return fits;
  if (shape.rows == 0) return {};
  constexpr detail::vector_names names{"merge_attention: out", "merge_attention: out.token_stride",
                                       "merge_attention: out.head_stride"};
  if (auto fits = detail::check_batch(out.out, out.element, shape, true, names); !fits) return fits;
  if (out.log_sum_exp.data != nullptr) {
    constexpr detail::vector_names logarithms{"merge_attention: log_sum_exp",
                                              "merge_attention: log_sum_exp.row_stride",
                                              "merge_attention: log_sum_exp.head_stride"};
    if (auto fits = detail::check_logarithms(out.log_sum_exp, shape, true, logarithms); !fits) return fits;
  }
  detail::merge_request of = detail::merge_of(parts);
  of.is_base_two = Base == log_base::two;
  of.element = out.element;
  of.out = out.out;
  of.log_sum_exp = {out.log_sum_exp.data, out.log_sum_exp.row_stride, out.log_sum_exp.head_stride};
  of.sequences = out.sequences;
  of.sinks = out.sinks;
  return run.each(detail::merge_parts_work(shape, of));
}

template <class Run>
result<void> merge_attention(const Run& run, const attention_part_shape& shape,
                             std::span<const attention_part> parts, const attention_part_output& out) {
  if (auto fits = detail::check_parts(shape, parts); !fits) return fits;
  if (auto fits = detail::check_part_units(out, detail::merge_output_names); !fits) return fits;
  if (shape.rows == 0) return {};
  if (auto fits = detail::check_part(out, shape, true, detail::merge_output_names); !fits) return fits;
  detail::merge_request of = detail::merge_of(parts);
  of.merged = out;
  return run.each(detail::merge_parts_work(shape, of));
}

template <class Run, log_base Base>
result<void> import_attention(const Run& run, const attention_part_shape& shape,
                              const foreign_attention<Base>& of, const attention_part_output& out) {
  if (auto fits =
          detail::check_shape(shape, {"import_attention: query_heads", "import_attention: value_dim"});
      !fits)
    return fits;
  if (auto fits = detail::check_part_units(out, detail::import_output_names); !fits) return fits;
  if (shape.rows == 0) return {};
  const bool is_in_place = out.sums.data == nullptr;
  if (is_in_place && of.element != dtype::f32)
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::f32),
                   static_cast<std::uint64_t>(of.element), "import_attention: of.element, without out.sums"};
  constexpr detail::vector_names names{"import_attention: of.out", "import_attention: of.out.token_stride",
                                       "import_attention: of.out.head_stride"};
  if (auto fits = detail::check_batch(of.out, of.element, shape, false, names); !fits) return fits;
  constexpr detail::vector_names logarithms{"import_attention: of.log_sum_exp",
                                            "import_attention: of.log_sum_exp.row_stride",
                                            "import_attention: of.log_sum_exp.head_stride"};
  if (auto fits = detail::check_logarithms(of.log_sum_exp, shape, false, logarithms); !fits) return fits;
  attention_part_output checked = out;
  if (is_in_place) checked.sums = {nullptr, 0, 0};
  if (auto fits = is_in_place ? detail::check_vectors(
                                    {out.states.data, shape.rows, out.states.token_stride, shape.query_heads,
                                     out.states.head_stride, sizeof(attention_state)},
                                    true, detail::import_output_names.states)
                              : detail::check_part(out, shape, true, detail::import_output_names);
      !fits)
    return fits;
  const detail::import_request request{
      of.out,
      of.element,
      Base == log_base::two,
      {of.log_sum_exp.data, of.log_sum_exp.row_stride, of.log_sum_exp.head_stride},
      of.tokens,
      checked};
  return run.each(detail::import_part_work(shape, request));
}

}  // namespace v0
}  // namespace llmmem
