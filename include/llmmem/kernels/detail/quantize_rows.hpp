/// @file
/// Quantised groups whose values or codes are not aligned to packets: a warp has a stretch of a row, and
/// reads and writes packets that are aligned.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/group_codes.hpp>
#include <llmmem/kernels/detail/group_ends.hpp>
#include <llmmem/kernels/detail/lane_packets.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Stretches of rows: whole groups, each of packets of values, a packet a lane.
class group_stretches {
 public:
  /// The packets of a stretch of whole turns of 32, of which a group has 4 to 32.
  static constexpr std::uint32_t most = 256;

  group_stretches(const group_shape& shape, std::uint32_t group_packets) noexcept
      : rows_(shape.rows),
        row_packets_(std::uint64_t{shape.groups} * group_packets),
        group_bits_(static_cast<std::uint32_t>(std::countr_zero(group_packets))),
        by_(static_cast<std::uint32_t>((row_packets_ + most - 1) / most)) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return rows_ * by_.by(); }

  struct stretch {
    std::uint64_t row = 0;
    std::uint64_t first = 0;   ///< packet of the row
    std::uint32_t count = 0;   ///< packets
    std::uint64_t behind = 0;  ///< packets of the row from the first on
  };
  [[nodiscard]] LLMMEM_HD stretch at(std::uint64_t item) const noexcept {
    stretch out;
    out.row = by_.quotient(item);
    out.first = (item - out.row * by_.by()) * most;
    out.behind = row_packets_ - out.first;
    out.count = out.behind < most ? static_cast<std::uint32_t>(out.behind) : most;
    return out;
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t group_packets() const noexcept { return 1U << group_bits_; }
  [[nodiscard]] LLMMEM_HD std::uint64_t group_of(std::uint64_t packet) const noexcept {
    return packet >> group_bits_;
  }

  /// A reader of the packets of a stretch, that may read a little of the row around it.
  template <unsigned Bytes, class Group>
  [[nodiscard]] static LLMMEM_HD packet_reader<Bytes, Group> reader(const std::byte* row, const stretch& of,
                                                                    const Group& group) noexcept {
    const std::uint32_t readable = of.behind > of.count ? of.count + 1 : of.count;
    return {row + of.first * Bytes, of.count, of.first == 0 ? 0 : static_cast<std::int32_t>(Bytes),
            static_cast<std::int32_t>(readable * Bytes), group};
  }
  template <unsigned Bytes, class Group>
  [[nodiscard]] static LLMMEM_HD packet_writer<Bytes, Group> writer(std::byte* row,
                                                                    const stretch& of) noexcept {
    return {row + of.first * Bytes, of.count};
  }

 private:
  std::uint64_t rows_;
  std::uint64_t row_packets_;
  std::uint32_t group_bits_;
  divider by_;
};

/// An item is a stretch.
template <dtype Value, dtype Code>
class quantize_rows_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 8;

  quantize_rows_work(const group_shape& shape, const group_ends<const std::byte, std::byte>& ends) noexcept
      : ends_(ends), stretches_(shape, ends.values.group_bytes / 16) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return stretches_.items(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }
  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    if (item >= items()) return;
    constexpr unsigned bytes = code_bytes<Value, Code>;
    const group_stretches::stretch of = stretches_.at(item);
    auto values = group_stretches::reader<16>(ends_.values.at(of.row, 0, 0), of, group);
    auto codes = group_stretches::writer<bytes, Group>(ends_.codes.at(of.row, 0, 0), of);
    for (std::uint32_t first = 0; first < codes.turns(); first += 32) {
      const auto own = values.take(first, group);
      typename Group::template held<std::uint32_t> largest{};
      group.each([&](std::uint32_t lane) {
        largest[lane] = first + lane < of.count ? largest_size<Value>(own[lane]) : 0U;
      });
      for (std::uint32_t step = stretches_.group_packets() / 2; step != 0; step /= 2) {
        auto other = largest;
        group.swap(other, step);
        group.each([&](std::uint32_t lane) {
          largest[lane] = other[lane] > largest[lane] ? other[lane] : largest[lane];
        });
      }
      typename Group::template held<packet<bytes>> out{};
      group.each([&](std::uint32_t lane) {
        const group_factors factors = factors_of<Value, Code>(largest[lane]);
        const std::uint64_t number = of.first + first + lane;
        if (first + lane < of.count && lane % stretches_.group_packets() == 0)
          store_packet<4>(ends_.scales.at(of.row, stretches_.group_of(number), 0),
                          {{bits_of_float(factors.scale)}});
        out[lane] = codes_of<Value, Code>(own[lane], factors.inverse);
      });
      codes.give(first, out, group);
    }
  }

 private:
  group_ends<const std::byte, std::byte> ends_;
  group_stretches stretches_;
};
static_assert(lane_work<quantize_rows_work<dtype::bf16, dtype::int8>>);

/// An item is a stretch.
template <dtype Value, dtype Code>
class dequantize_rows_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 8;

  dequantize_rows_work(const group_shape& shape, const group_ends<std::byte, const std::byte>& ends) noexcept
      : ends_(ends), stretches_(shape, ends.values.group_bytes / 16) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return stretches_.items(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }
  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    if (item >= items()) return;
    constexpr unsigned bytes = code_bytes<Value, Code>;
    const group_stretches::stretch of = stretches_.at(item);
    auto codes = group_stretches::reader<bytes>(ends_.codes.at(of.row, 0, 0), of, group);
    auto values = group_stretches::writer<16, Group>(ends_.values.at(of.row, 0, 0), of);
    for (std::uint32_t first = 0; first < values.turns(); first += 32) {
      const auto own = codes.take(first, group);
      typename Group::template held<packet<16>> out{};
      group.each([&](std::uint32_t lane) {
        if (first + lane >= of.count) return;
        const std::uint64_t number = of.first + first + lane;
        const float scale =
            float_of_bits(load_packet<4>(ends_.scales.at(of.row, stretches_.group_of(number), 0)).words[0]);
        out[lane] = values_of<Value, Code>(own[lane], scale);
      });
      values.give(first, out, group);
    }
  }

 private:
  group_ends<std::byte, const std::byte> ends_;
  group_stretches stretches_;
};
static_assert(lane_work<dequantize_rows_work<dtype::bf16, dtype::int8>>);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
