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

/// Elements that a lane takes at once, and their bits: 16 bytes of values, so that neighbouring lanes read
/// and write neighbouring packets, and at least a byte of codes.
inline constexpr std::uint32_t int_unit = 4;
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
    return scale_at(group) + int_scale::bytes(form.scale) + std::uint64_t{unit} * (form.bits / 2);
  }
};

/// Reads the bits of up to four floats, zeros past their end.
[[nodiscard]] LLMMEM_HD inline int_unit_words load_int_unit(const std::byte* from, std::uint32_t count,
                                                            std::uint32_t width) noexcept {
  int_unit_words out{};
  if (count >= int_unit) {
    const packet<16> in = load_aligned<16, cache_hint::streaming, group_access::pieces>(from, width);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < int_unit; ++i)
      out.of[i] = in.words[i];
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

/// A group, for up to 32 lanes: each takes every so many-th unit, and holds its first ones.
template <unsigned Bits>
class encode_int_work {
  using rounding = int_rounding<Bits>;

 public:
  static constexpr std::uint32_t held_units = 2;
  struct held {
    int_unit_words first[held_units];
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
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < held_units; ++i) {
      const std::uint32_t unit = lane.lane + i * lane.lanes;
      if (unit * int_unit < count) mine.first[i] = load(item, unit, count);
    }
    LLMMEM_UNROLL
    for (const int_unit_words& each : mine.first)
      mine.largest = combine(mine.largest, largest_of(each));
    for (std::uint32_t unit = lane.lane + held_units * lane.lanes; unit * int_unit < count;
         unit += lane.lanes)
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
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < held_units; ++i) {
      const std::uint32_t unit = lane.lane + i * lane.lanes;
      if (unit * int_unit < count) store(item, unit, count, mine.first[i], is_empty, factor, key);
    }
    for (std::uint32_t unit = lane.lane + held_units * lane.lanes; unit * int_unit < count;
         unit += lane.lanes)
      store(item, unit, count, load(item, unit, count), is_empty, factor, key);
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
    packet<Bits / 2> out{};  // half as many bytes as an element has bits, because a unit has four
    using word = typename packet<Bits / 2>::word;
    if (!is_empty) {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < int_unit; ++i) {
        const std::uint32_t bits = words.of[i];
        const std::int32_t steps = rounding::steps(float_of_bits(bits & 0x7FFF'FFFFU), factor);
        const std::int32_t size =
            rounding::rounded(steps, random_bits(std::uint64_t{unit} * int_unit + i, key));
        // Past a group's end there are zeros, which nothing rounds up.
        const auto code = static_cast<std::uint32_t>(bits >> 31U != 0 ? -size : size) & ((1U << Bits) - 1U);
        out.words[0] = static_cast<word>(out.words[0] | code << (i * Bits));
      }
    }
    std::byte* const to = ends_.codes_at(item, unit);
    const std::uint32_t left = count - unit * int_unit;
    if (left >= int_unit) return store_aligned<group_access::pieces>(to, out, ends_.code_width);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < Bits / 2; ++i) {
      if (i * 8 < left * Bits) store_packet<1>(to + i, {{element_of<std::uint8_t>(out, i)}});
    }
  }

  int_group_ends<const std::byte, std::byte> ends_;
  std::uint32_t lanes_;
};
static_assert(group_work<encode_int_work<8>>);

/// An item for two units of a group, which share its scale: up to 32 neighbouring items take neighbouring
/// first units, then neighbouring second ones.
template <unsigned Bits>
class decode_int_work {
  using rounding = int_rounding<Bits>;
  static constexpr std::uint32_t mask = (1U << Bits) - 1;
  static constexpr std::uint32_t unused = 1U << (Bits - 1);  // no encoder writes it

 public:
  decode_int_work(const int_group_ends<std::byte, const std::byte>& ends, std::uint64_t* damaged) noexcept
      : ends_(ends),
        side_bits_(std::min(static_cast<std::uint32_t>(std::bit_width(ends.form.group / int_unit)) - 2U, 5U)),
        a_group_(turns_of(ends.form.group / int_unit, side_bits_) << side_bits_),
        damaged_(damaged) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return ends_.groups * a_group_.by(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t group = a_group_.quotient(item);
    const std::uint32_t number = a_group_.remainder(item);
    const std::uint32_t side = 1U << side_bits_;
    const std::uint32_t first = (number >> side_bits_) * 2 * side + (number & (side - 1));
    const std::uint32_t count = ends_.elements_of(group);
    if (first * int_unit >= count) return;
    const std::uint32_t scale = load_scale(group);
    const bool is_broken = scale >= int_scale::infinity && scale != int_scale::no_number;
    const bool is_empty = scale == 0 || scale == int_scale::no_number;
    // A broken scale takes part in no conversion: a host's could differ.
    const double step =
        is_empty || is_broken ? 0 : static_cast<double>(float_of_bits(scale)) / rounding::largest;
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t unit = first + i * side;
      if (unit * int_unit < count)
        decode(group, unit, count - unit * int_unit, {scale, step, is_empty, is_broken});
    }
  }

 private:
  struct group_scale {
    std::uint32_t bits;
    double step;
    bool is_empty;
    bool is_broken;
  };

  /// Turns of two sides of units, as many as a group has.
  [[nodiscard]] static constexpr std::uint32_t turns_of(std::uint32_t units,
                                                        std::uint32_t side_bits) noexcept {
    return (units + (2U << side_bits) - 1) >> (side_bits + 1);
  }
  LLMMEM_HD void decode(std::uint64_t group, std::uint32_t unit, std::uint32_t left,
                        const group_scale& scale) const noexcept {
    const packet<Bits / 2> codes = load_codes(ends_.codes_at(group, unit), left);
    bool is_damaged = scale.is_broken;
    int_unit_words out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < int_unit; ++i) {
      const std::uint32_t code = std::uint32_t{codes.words[0]} >> (i * Bits) & mask;
      is_damaged = is_damaged || code == unused || ((i >= left || scale.is_empty) && code != 0);
      const auto number = static_cast<std::int32_t>(code ^ unused) - static_cast<std::int32_t>(unused);
      out.of[i] = scale.is_empty ? scale.bits : bits_of_float(rounding::restored(number, scale.step));
    }
    if (is_damaged) {
      if (damaged_ != nullptr) lower_to(*damaged_, group);
      LLMMEM_UNROLL
      for (std::uint32_t& each : out.of)
        each = int_scale::no_number;
    }
    store(ends_.values_at(group, unit), left, out);
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t load_scale(std::uint64_t group) const noexcept {
    const std::byte* const from = ends_.scale_at(group);
    constexpr auto how = cache_hint::kept;
    if (ends_.form.scale == dtype::f32)
      return load_aligned<4, how, group_access::pieces>(from, ends_.scale_width).words[0];
    return std::uint32_t{load_aligned<2, how, group_access::pieces>(from, ends_.scale_width).words[0]} << 16U;
  }
  [[nodiscard]] LLMMEM_HD packet<Bits / 2> load_codes(const std::byte* from,
                                                      std::uint32_t left) const noexcept {
    if (left >= int_unit)
      return load_aligned<Bits / 2, cache_hint::streaming, group_access::pieces>(from, ends_.code_width);
    packet<Bits / 2> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < Bits / 2; ++i) {
      if (i * 8 < left * Bits)
        set_element(out, i, static_cast<std::uint8_t>(load_packet<1>(from + i).words[0]));
    }
    return out;
  }
  LLMMEM_HD void store(std::byte* to, std::uint32_t left, const int_unit_words& out) const noexcept {
    if (left >= int_unit) {
      store_aligned<group_access::pieces>(to, packet<16>{{out.of[0], out.of[1], out.of[2], out.of[3]}},
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
  std::uint32_t side_bits_;
  divider a_group_;  ///< items of a group
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
  constexpr std::uint32_t granularity = 8;  // whole bytes of codes, of any number of bits
  if (form.group % granularity != 0) return failure{errc::bad_granularity, 0, form.group, granularity, what};
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
  out.code_width = std::min(alignment_of(address, stride, scale), form.bits / 2);
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
