/// @file
/// The bodies of `encode_int_groups` and `decode_int_groups`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/aligned_access.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/int_groups.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/int_rounding.hpp>
#include <llmmem/model/random_bits.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Elements whose codes a lane writes at once, and their bits.
inline constexpr std::uint32_t int_unit = 8;
struct int_unit_words {
  std::uint32_t of[int_unit];
};

/// Groups of elements and their form in memory.
template <class Value, class Code>
struct int_group_ends {
  Value* values = nullptr;
  Code* codes = nullptr;
  std::uint64_t elements = 0;
  std::uint64_t groups = 0;  // counted once: a device would divide by many instructions
  int_group_form form{};
  std::uint64_t key = 0;          // of random bits
  std::uint64_t first_group = 0;  // the number of the first one
  std::uint32_t value_width = 1;  // the alignment of every unit of values, of codes and of every scale
  std::uint32_t code_width = 1;
  std::uint32_t scale_width = 1;

  [[nodiscard]] LLMMEM_HD std::uint32_t elements_of(std::uint64_t group) const noexcept {
    const std::uint64_t left = elements - group * form.group;
    return left < form.group ? static_cast<std::uint32_t>(left) : form.group;
  }
  [[nodiscard]] LLMMEM_HD Value* values_at(std::uint64_t group, std::uint32_t unit) const noexcept {
    return values + (group * form.group + std::uint64_t{unit} * int_unit) * 4;
  }
  [[nodiscard]] LLMMEM_HD Code* scale_at(std::uint64_t group) const noexcept {
    return codes + group * form.group_bytes(form.group);
  }
  [[nodiscard]] LLMMEM_HD Code* codes_at(std::uint64_t group, std::uint32_t unit) const noexcept {
    return scale_at(group) + int_scale::bytes(form.scale) + std::uint64_t{unit} * form.bits;
  }
};

/// Reads the bits of up to eight floats, zeros past their end.
[[nodiscard]] LLMMEM_HD inline int_unit_words load_int_unit(const std::byte* from, std::uint32_t count,
                                                            std::uint32_t width) noexcept {
  int_unit_words out{};
  if (count >= int_unit) {
    LLMMEM_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      const packet<16> in =
          load_aligned<16, cache_hint::streaming, group_access::pieces>(from + std::size_t{16} * half, width);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < 4; ++i)
        out.of[half * 4 + i] = in.words[i];
    }
    return out;
  }
  LLMMEM_UNROLL
  for (unsigned i = 0; i < int_unit; ++i) {
    if (i < count)
      out.of[i] =
          load_aligned<4, cache_hint::streaming, group_access::pieces>(from + std::size_t{4} * i, width)
              .words[0];
  }
  return out;
}

/// A group, for up to 32 lanes: each takes every so many-th unit, and holds its first one.
template <unsigned Bits>
class encode_int_work {
  using rounding = int_rounding<Bits>;

 public:
  struct held {
    int_unit_words first;
    std::uint32_t largest;
  };
  using partial = std::uint32_t;

  encode_int_work(const int_group_ends<const std::byte, std::byte>& ends, std::uint32_t lanes) noexcept
      : ends_(ends), lanes_(lanes) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return ends_.groups; }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return lanes_; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    const std::uint32_t count = ends_.elements_of(item);
    held mine{};
    if (lane.lane * int_unit < count) mine.first = load(item, lane.lane, count);
    mine.largest = largest_of(mine.first);
    for (std::uint32_t unit = lane.lane + lane.lanes; unit * int_unit < count; unit += lane.lanes)
      mine.largest = combine(mine.largest, largest_of(load(item, unit, count)));
    return mine;
  }
  [[nodiscard]] static LLMMEM_HD partial measure(const held& mine) noexcept { return mine.largest; }
  [[nodiscard]] static LLMMEM_HD partial combine(partial a, partial b) noexcept { return a > b ? a : b; }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& mine, partial largest) const noexcept {
    const std::uint32_t scale = int_scale::of(ends_.form.scale, largest);
    if (lane.lane == 0) {
      std::byte* const to = ends_.scale_at(item);
      if (ends_.form.scale == dtype::f32) {
        store_aligned<group_access::pieces>(to, packet<4>{{scale}}, ends_.scale_width);
      } else {
        store_aligned<group_access::pieces>(to, packet<2>{{static_cast<std::uint16_t>(scale >> 16U)}},
                                            ends_.scale_width);
      }
    }
    const std::uint32_t count = ends_.elements_of(item);
    const std::uint64_t key = int_rounding_key::of_group(ends_.key, ends_.first_group + item);
    const bool is_empty = scale == 0 || scale == int_scale::no_number;
    const double factor = is_empty ? 0 : rounding::factor(float_of_bits(scale));
    int_unit_words words = mine.first;
    for (std::uint32_t unit = lane.lane; unit * int_unit < count; unit += lane.lanes) {
      if (unit != lane.lane) words = load(item, unit, count);
      store(item, unit, count, words, is_empty, factor, key);
    }
  }

 private:
  [[nodiscard]] LLMMEM_HD int_unit_words load(std::uint64_t item, std::uint32_t unit,
                                              std::uint32_t count) const noexcept {
    return load_int_unit(ends_.values_at(item, unit), count - unit * int_unit, ends_.value_width);
  }
  [[nodiscard]] static LLMMEM_HD std::uint32_t largest_of(const int_unit_words& of) noexcept {
    std::uint32_t out = 0;
    LLMMEM_UNROLL
    for (const std::uint32_t each : of.of)
      out = combine(out, each & 0x7FFF'FFFFU);
    return out;
  }
  LLMMEM_HD void store(std::uint64_t item, std::uint32_t unit, std::uint32_t count,
                       const int_unit_words& words, bool is_empty, double factor,
                       std::uint64_t key) const noexcept {
    packet<Bits> out{};  // as many bytes as an element has bits, because a unit has eight
    using word = typename packet<Bits>::word;
    constexpr unsigned per_word = 8 * sizeof(word) / Bits;
    if (!is_empty) {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < int_unit; ++i) {
        const std::uint32_t bits = words.of[i];
        const std::int32_t steps = rounding::steps(float_of_bits(bits & 0x7FFF'FFFFU), factor);
        const std::int32_t size =
            rounding::rounded(steps, random_bits(std::uint64_t{unit} * int_unit + i, key));
        // Past a group's end there are zeros, which nothing rounds up.
        const auto code = static_cast<std::uint32_t>(bits >> 31U != 0 ? -size : size) & ((1U << Bits) - 1U);
        out.words[i / per_word] = static_cast<word>(out.words[i / per_word] | code << (i % per_word * Bits));
      }
    }
    std::byte* const to = ends_.codes_at(item, unit);
    const std::uint32_t left = count - unit * int_unit;
    if (left >= int_unit) return store_aligned<group_access::pieces>(to, out, ends_.code_width);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < Bits; ++i) {
      if (i * 8 < left * Bits) store_packet<1>(to + i, {{element_of<std::uint8_t>(out, i)}});
    }
  }

  int_group_ends<const std::byte, std::byte> ends_;
  std::uint32_t lanes_;
};
static_assert(group_work<encode_int_work<8>>);

/// An item for each eight elements.
template <unsigned Bits>
class decode_int_work {
  using rounding = int_rounding<Bits>;
  static constexpr std::uint32_t mask = (1U << Bits) - 1;
  static constexpr std::uint32_t unused = 1U << (Bits - 1);  // no encoder writes it

 public:
  decode_int_work(const int_group_ends<std::byte, const std::byte>& ends, std::uint64_t* damaged) noexcept
      : ends_(ends), units_((ends.form.group + int_unit - 1) / int_unit), damaged_(damaged) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    const std::uint64_t groups = ends_.groups;
    if (groups == 0) return 0;
    return (groups - 1) * units_.by() + (ends_.elements_of(groups - 1) + int_unit - 1) / int_unit;
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t group = units_.quotient(item);
    const std::uint32_t unit = units_.remainder(item);
    const std::uint32_t left = ends_.elements_of(group) - unit * int_unit;
    const std::uint32_t scale = load_scale(group);
    const bool is_empty = scale == 0 || scale == int_scale::no_number;
    const packet<Bits> codes = load_codes(ends_.codes_at(group, unit), left);
    using word = typename packet<Bits>::word;
    constexpr unsigned per_word = 8 * sizeof(word) / Bits;
    bool is_damaged = scale >= int_scale::infinity && scale != int_scale::no_number;
    // A broken scale takes part in no conversion: a host's could differ.
    const double step =
        is_empty || is_damaged ? 0 : static_cast<double>(float_of_bits(scale)) / rounding::largest;
    int_unit_words out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < int_unit; ++i) {
      const std::uint32_t code = std::uint32_t{codes.words[i / per_word]} >> (i % per_word * Bits) & mask;
      is_damaged = is_damaged || code == unused || ((i >= left || is_empty) && code != 0);
      const auto number = static_cast<std::int32_t>(code ^ unused) - static_cast<std::int32_t>(unused);
      out.of[i] = is_empty ? scale : bits_of_float(rounding::restored(number, step));
    }
    if (is_damaged) {
      if (damaged_ != nullptr) lower_to(*damaged_, group);
      LLMMEM_UNROLL
      for (std::uint32_t& each : out.of)
        each = int_scale::no_number;
    }
    store(ends_.values_at(group, unit), left, out);
  }

 private:
  [[nodiscard]] LLMMEM_HD std::uint32_t load_scale(std::uint64_t group) const noexcept {
    const std::byte* const from = ends_.scale_at(group);
    constexpr auto how = cache_hint::kept;
    if (ends_.form.scale == dtype::f32)
      return load_aligned<4, how, group_access::pieces>(from, ends_.scale_width).words[0];
    return std::uint32_t{load_aligned<2, how, group_access::pieces>(from, ends_.scale_width).words[0]} << 16U;
  }
  [[nodiscard]] LLMMEM_HD packet<Bits> load_codes(const std::byte* from, std::uint32_t left) const noexcept {
    if (left >= int_unit)
      return load_aligned<Bits, cache_hint::streaming, group_access::pieces>(from, ends_.code_width);
    packet<Bits> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < Bits; ++i) {
      if (i * 8 < left * Bits)
        set_element(out, i, static_cast<std::uint8_t>(load_packet<1>(from + i).words[0]));
    }
    return out;
  }
  LLMMEM_HD void store(std::byte* to, std::uint32_t left, const int_unit_words& out) const noexcept {
    if (left >= int_unit) {
      LLMMEM_UNROLL
      for (std::size_t first = 0; first < 8; first += 4)
        store_aligned<group_access::pieces>(
            to + 4 * first,
            packet<16>{{out.of[first], out.of[first + 1], out.of[first + 2], out.of[first + 3]}},
            ends_.value_width);
      return;
    }
    LLMMEM_UNROLL
    for (unsigned i = 0; i < int_unit; ++i) {
      if (i < left)
        store_aligned<group_access::pieces>(to + std::size_t{4} * i, packet<4>{{out.of[i]}},
                                            ends_.value_width);
    }
  }

  int_group_ends<std::byte, const std::byte> ends_;
  divider units_;
  std::uint64_t* damaged_;
};
static_assert(item_work<decode_int_work<8>>);

/// Checks a form, and finds the alignments.
template <class Value, class Code>
[[nodiscard]] result<int_group_ends<Value, Code>> int_ends_of(const int_group_form& form,
                                                              std::span<Value> values, std::span<Code> codes,
                                                              const char* what) noexcept {
  if (form.bits != 8 && form.bits != 4 && form.bits != 2)
    return failure{errc::out_of_range, 0, form.bits, 8, what};
  constexpr std::uint32_t most = 65536;
  if (form.group == 0 || form.group > most) return failure{errc::out_of_range, 1, form.group, most, what};
  if (form.group % int_unit != 0) return failure{errc::bad_granularity, 0, form.group, int_unit, what};
  if (form.scale != dtype::f32 && form.scale != dtype::bf16)
    return failure{errc::out_of_range, 2, static_cast<std::uint64_t>(form.scale),
                   static_cast<std::uint64_t>(dtype::bf16), what};
  if (values.size() % 4 != 0) return failure{errc::bad_granularity, 0, values.size(), 4, what};
  int_group_ends<Value, Code> out;
  out.values = values.data();
  out.codes = codes.data();
  out.elements = values.size() / 4;
  out.groups = (out.elements + form.group - 1) / form.group;
  out.form = form;
  const std::uint64_t scale = int_scale::bytes(form.scale);
  const std::uint64_t stride = form.group_bytes(form.group);
  const auto address = reinterpret_cast<std::uintptr_t>(codes.data());
  out.value_width = alignment_of(reinterpret_cast<std::uintptr_t>(values.data()), std::uint64_t{16});
  out.scale_width = std::min<std::uint32_t>(alignment_of(address, stride), static_cast<std::uint32_t>(scale));
  out.code_width = std::min(alignment_of(address, stride, scale), form.bits);
  return out;
}

/// Calls `act` with the number of bits as a constant.
template <class Act>
[[nodiscard]] result<void> with_int_bits(std::uint32_t bits, const Act& act) {
  if (bits == 8) return act.template operator()<8>();
  if (bits == 4) return act.template operator()<4>();
  return act.template operator()<2>();
}

}  // namespace detail

template <class Run>
result<void> encode_int_groups(const Run& run, const int_group_form& form, std::span<const std::byte> values,
                               std::span<std::byte> out, const int_group_position& at) {
  auto ends = detail::int_ends_of(form, values, out, "encode_int_groups");
  if (!ends) return ends.error();
  if (const std::uint64_t needed = form.bytes(ends->elements); out.size() < needed)
    return failure{errc::too_short, 0, needed, out.size(), "encode_int_groups: out"};
  if (ends->elements == 0) return {};
  ends->key = detail::int_rounding_key::of_chunk(at.chunk, at.version);
  ends->first_group = at.group;
  const std::uint32_t lanes = std::min(std::bit_floor(std::max(form.group / detail::int_unit, 1U)), 32U);
  return detail::with_int_bits(
      form.bits, [&]<unsigned Bits>() { return run.each(detail::encode_int_work<Bits>(*ends, lanes)); });
}

template <class Run>
result<void> decode_int_groups(const Run& run, const int_group_form& form, std::span<const std::byte> in,
                               std::span<std::byte> values, std::uint64_t* damaged) {
  const auto ends = detail::int_ends_of(form, values, in, "decode_int_groups");
  if (!ends) return ends.error();
  if (const std::uint64_t needed = form.bytes(ends->elements); in.size() != needed)
    return failure{errc::too_short, 0, needed, in.size(), "decode_int_groups: in"};
  if (ends->elements == 0) return {};
  return detail::with_int_bits(
      form.bits, [&]<unsigned Bits>() { return run.each(detail::decode_int_work<Bits>(*ends, damaged)); });
}

}  // namespace v0
}  // namespace llmmem
