/// @file
/// The bodies of `quantize_groups` and `dequantize_groups`.
#pragma once

#include <llmmem/kernels/detail/group_codes.hpp>
#include <llmmem/kernels/detail/group_ends.hpp>
#include <llmmem/kernels/detail/quantize_rows.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/quantize_groups.hpp>

#include <bit>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// A group, for as many lanes as give each lane `Each` packets of values. Finding the group and its scale
/// costs a lane equally many instructions for any number of packets: with one packet they take longer than
/// the move of the bytes.
template <dtype Value, dtype Code, std::uint32_t Each>
class quantize_work {
 public:
  struct held {
    packet<16> own[Each];
    std::uint32_t largest;
  };
  using partial = std::uint32_t;

  quantize_work(const group_shape& shape, const group_ends<const std::byte, std::byte>& ends) noexcept
      : ends_(ends), by_(shape.groups), rows_(shape.rows), packets_(ends.values.group_bytes / 16) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return rows_ * by_.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return packets_ / Each; }
  /// A host's one lane has all packets, and reads again the packets that it does not hold. A device's lanes
  /// have at most `Each`: a loop for more would take registers that keep threads from running.
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    held mine{};
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < Each; ++i)
      mine.own[i] = load(item, lane.lane + i * lane.lanes);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < Each; ++i)
      mine.largest = combine(mine.largest, largest_size<Value>(mine.own[i]));
#if !defined(__CUDA_ARCH__)
    for (std::uint32_t p = lane.lane + Each * lane.lanes; p < packets_; p += lane.lanes)
      mine.largest = combine(mine.largest, largest_size<Value>(load(item, p)));
#endif
    return mine;
  }
  [[nodiscard]] static LLMMEM_HD partial measure(const held& mine) noexcept { return mine.largest; }
  [[nodiscard]] static LLMMEM_HD partial combine(partial a, partial b) noexcept { return a > b ? a : b; }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& mine, partial largest) const noexcept {
    const group_factors factors = factors_of<Value, Code>(largest);
    const std::uint64_t row = by_.quotient(item);
    if (lane.lane == 0)
      store_packet<4>(ends_.scales.at(row, item - row * by_.by(), 0), {{bits_of_float(factors.scale)}});
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < Each; ++i)
      store(item, lane.lane + i * lane.lanes, codes_of<Value, Code>(mine.own[i], factors.inverse));
#if !defined(__CUDA_ARCH__)
    for (std::uint32_t p = lane.lane + Each * lane.lanes; p < packets_; p += lane.lanes)
      store(item, p, codes_of<Value, Code>(load(item, p), factors.inverse));
#endif
  }

 private:
  static constexpr unsigned bytes = code_bytes<Value, Code>;

  [[nodiscard]] LLMMEM_HD packet<16> load(std::uint64_t item, std::uint64_t p) const noexcept {
    const std::uint64_t row = by_.quotient(item);
    return load_packet<16, cache_hint::streaming>(
        ends_.values.at(row, item - row * by_.by(), p * std::uint64_t{16}));
  }
  LLMMEM_HD void store(std::uint64_t item, std::uint64_t p, const packet<bytes>& codes) const noexcept {
    const std::uint64_t row = by_.quotient(item);
    store_packet<bytes>(ends_.codes.at(row, item - row * by_.by(), p * bytes), codes);
  }

  group_ends<const std::byte, std::byte> ends_;
  divider by_;
  std::uint64_t rows_;
  std::uint32_t packets_;
};
static_assert(group_work<quantize_work<dtype::bf16, dtype::int8, 4>>);

/// An item for each packet of values.
template <dtype Value, dtype Code>
class dequantize_work {
 public:
  dequantize_work(const group_shape& shape, const group_ends<std::byte, const std::byte>& ends) noexcept
      : ends_(ends),
        by_(shape.groups),
        rows_(shape.rows),
        packet_bits_(static_cast<std::uint32_t>(std::countr_zero(ends.values.group_bytes / 16))) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (rows_ * by_.by()) << packet_bits_; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    constexpr unsigned bytes = code_bytes<Value, Code>;
    const std::uint64_t number = item >> packet_bits_;
    const std::uint64_t p = item - (number << packet_bits_);
    const std::uint64_t row = by_.quotient(number);
    const std::uint64_t group = number - row * by_.by();
    const float scale = float_of_bits(load_packet<4>(ends_.scales.at(row, group, 0)).words[0]);
    const auto codes = load_packet<bytes, cache_hint::streaming>(ends_.codes.at(row, group, p * bytes));
    store_packet<16>(ends_.values.at(row, group, p * std::uint64_t{16}),
                     values_of<Value, Code>(codes, scale));
  }

 private:
  group_ends<std::byte, const std::byte> ends_;
  divider by_;
  std::uint64_t rows_;
  std::uint32_t packet_bits_;
};
static_assert(item_work<dequantize_work<dtype::bf16, dtype::int8>>);

/// The works that quantise: of packets that are aligned, and of others.
struct quantize_works {
  template <dtype Value, dtype Code, class Run>
  static result<void> start(const Run& run, const group_shape& shape,
                            const group_ends<const std::byte, std::byte>& ends) {
    // As many packets per lane as keep adjacent codes of a group's lanes in one sector of memory.
    const std::uint32_t packets = ends.values.group_bytes / 16;
    const auto is_sector = [&](std::uint32_t each) { return packets / each * code_bytes<Value, Code> >= 32; };
    if (is_sector(4)) return run.each(quantize_work<Value, Code, 4>(shape, ends));
    if (is_sector(2)) return run.each(quantize_work<Value, Code, 2>(shape, ends));
    return run.each(quantize_work<Value, Code, 1>(shape, ends));
  }
  template <dtype Value, dtype Code, class Run>
  static result<void> start_pieces(const Run& run, const group_shape& shape,
                                   const group_ends<const std::byte, std::byte>& ends) {
    return run.each(quantize_rows_work<Value, Code>(shape, ends));
  }
};
/// The works that convert back.
struct dequantize_works {
  template <dtype Value, dtype Code, class Run>
  static result<void> start(const Run& run, const group_shape& shape,
                            const group_ends<std::byte, const std::byte>& ends) {
    return run.each(dequantize_work<Value, Code>(shape, ends));
  }
  template <dtype Value, dtype Code, class Run>
  static result<void> start_pieces(const Run& run, const group_shape& shape,
                                   const group_ends<std::byte, const std::byte>& ends) {
    return run.each(dequantize_rows_work<Value, Code>(shape, ends));
  }
};

/// Returns one end, with accesses of `packet_bytes`, or its error.
template <class Byte>
[[nodiscard]] result<group_end<Byte>> end_of(Byte* data, std::uint64_t row_stride, const group_shape& shape,
                                             std::uint64_t group_bytes, std::uint32_t packet_bytes,
                                             std::uint32_t element_bytes, const char* who) noexcept {
  const std::uint64_t row_bytes = shape.groups * group_bytes;
  if (data == nullptr) return failure{errc::too_short, 0, row_bytes, 0, who};
  if (shape.rows <= 1) row_stride = 0;  // unused: there is no next row
  if (shape.rows > 1 && row_stride < row_bytes)
    return failure{errc::too_short, 0, row_bytes, row_stride, who};
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (address % element_bytes != 0) return failure{errc::bad_granularity, 0, address, element_bytes, who};
  if (row_stride % element_bytes != 0)
    return failure{errc::bad_granularity, 0, row_stride, element_bytes, who};
  const std::uint32_t aligned = alignment_of(address, row_stride);
  return group_end<Byte>{data, row_stride, static_cast<std::uint32_t>(group_bytes),
                         aligned < packet_bytes ? aligned : packet_bytes};
}

/// The names of the arguments, for errors.
struct group_names {
  const char* groups;
  const char* types;
  const char* values;
  const char* codes;
  const char* scales;
};

/// Runs one of `Works` for these elements.
template <class Works, dtype Value, dtype Code, class Run, class ValueByte, class CodeByte>
result<void> run_groups_as(const Run& run, const group_shape& shape, const group_rows<ValueByte>& values,
                           const group_rows<CodeByte>& codes, const group_scales<CodeByte>& scales,
                           const group_names& names) {
  constexpr std::uint32_t element = sizeof(element_bits<Value>);
  constexpr unsigned bytes = code_bytes<Value, Code>;
  const std::uint64_t value_bytes = std::uint64_t{shape.elements} * element;
  const auto in = end_of(values.data, values.row_stride, shape, value_bytes, 16, element, names.values);
  if (!in) return in.error();
  const auto out =
      end_of(codes.data, codes.row_stride, shape, value_bytes / 16 * bytes, bytes, 1, names.codes);
  if (!out) return out.error();
  const auto by = end_of(scales.data, scales.row_stride, shape, 4, 4, 4, names.scales);
  if (!by) return by.error();
  const group_ends<ValueByte, CodeByte> ends{*in, *out, *by};
  if (in->width == 16 && out->width == bytes) return Works::template start<Value, Code>(run, shape, ends);
  return Works::template start_pieces<Value, Code>(run, shape, ends);
}

template <class Works, dtype Value, class Run, class ValueByte, class CodeByte>
result<void> run_groups_of(const Run& run, const group_shape& shape, const group_rows<ValueByte>& values,
                           const group_rows<CodeByte>& codes, const group_scales<CodeByte>& scales,
                           const group_names& names) {
  if (codes.element == dtype::int8)
    return run_groups_as<Works, Value, dtype::int8>(run, shape, values, codes, scales, names);
  if (codes.element == dtype::fp8_e4m3)
    return run_groups_as<Works, Value, dtype::fp8_e4m3>(run, shape, values, codes, scales, names);
  return run_groups_as<Works, Value, dtype::int4>(run, shape, values, codes, scales, names);
}

/// Runs one of `Works` for the given elements, if there is a kernel for them.
template <class Works, class Run, class ValueByte, class CodeByte>
result<void> run_all_groups(const Run& run, const group_shape& shape, const group_rows<ValueByte>& values,
                            const group_rows<CodeByte>& codes, const group_scales<CodeByte>& scales,
                            const group_names& names) {
  const bool has_code =
      codes.element == dtype::int8 || codes.element == dtype::fp8_e4m3 || codes.element == dtype::int4;
  const bool has_value =
      values.element == dtype::f32 || values.element == dtype::bf16 || values.element == dtype::f16;
  if (!has_code || !has_value) {
    constexpr bool is_quantize = std::is_const_v<ValueByte>;
    const auto code = static_cast<std::uint64_t>(codes.element);
    const auto value = static_cast<std::uint64_t>(values.element);
    return failure{errc::no_conversion, 0, is_quantize ? code : value, is_quantize ? value : code,
                   names.types};
  }
  if (shape.elements != 32 && shape.elements != 64 && shape.elements != 128)
    return failure{errc::out_of_range, 0, shape.elements, 128, names.groups};
  if (shape.rows == 0 || shape.groups == 0) return {};
  if (values.element == dtype::f32)
    return run_groups_of<Works, dtype::f32>(run, shape, values, codes, scales, names);
  if (values.element == dtype::bf16)
    return run_groups_of<Works, dtype::bf16>(run, shape, values, codes, scales, names);
  return run_groups_of<Works, dtype::f16>(run, shape, values, codes, scales, names);
}

}  // namespace detail

template <class Run>
result<void> quantize_groups(const Run& run, const group_shape& shape,
                             const group_rows<const std::byte>& values, const group_rows<std::byte>& codes,
                             const group_scales<std::byte>& scales) {
  return detail::run_all_groups<detail::quantize_works>(
      run, shape, values, codes, scales,
      {.groups = "quantize_groups: elements per group, 32, 64 or 128",
       .types = "quantize_groups",
       .values = "quantize_groups: values",
       .codes = "quantize_groups: codes",
       .scales = "quantize_groups: scales"});
}

template <class Run>
result<void> dequantize_groups(const Run& run, const group_shape& shape,
                               const group_rows<const std::byte>& codes,
                               const group_scales<const std::byte>& scales,
                               const group_rows<std::byte>& values) {
  return detail::run_all_groups<detail::dequantize_works>(
      run, shape, values, codes, scales,
      {.groups = "dequantize_groups: elements per group, 32, 64 or 128",
       .types = "dequantize_groups",
       .values = "dequantize_groups: values",
       .codes = "dequantize_groups: codes",
       .scales = "dequantize_groups: scales"});
}

}  // namespace v0
}  // namespace llmmem
