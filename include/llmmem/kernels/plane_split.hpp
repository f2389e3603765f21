/// @file
/// Splits exponents of bfloat16 from their signs and mantissas, and merges them: the step before lossless
/// compression.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/packet_frame.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The two planes of bf16 elements, a byte per element in each. The same bytes as with
/// `byte_plane<dtype::bf16>`: an element's bits rotated left by one, upper and lower byte.
template <class Byte>
  requires std::same_as<std::remove_const_t<Byte>, std::byte>
struct bf16_planes {
  Byte* exponents = nullptr;            ///< [elements]
  Byte* mantissas_and_signs = nullptr;  ///< [elements], mantissa x 2 + sign
};

/// The direction of a conversion of planes.
enum class plane_direction : std::uint8_t { split, merge };

namespace detail {

/// Two bf16 of a word, each rotated left by one bit, and back.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t rotated_left(std::uint32_t pair) noexcept {
  return (pair << 1U & 0xFFFE'FFFEU) | (pair >> 15U & 0x0001'0001U);
}
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t rotated_right(std::uint32_t pair) noexcept {
  return (pair >> 1U & 0x7FFF'7FFFU) | (pair << 15U & 0x8000'8000U);
}

/// The bytes 0 and 2 of two words, those of the first lowest.
[[nodiscard]] LLMMEM_HD inline std::uint32_t even_bytes(std::uint32_t first, std::uint32_t second) noexcept {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x6420);
#else
  return (first & 0xFFU) | (first >> 8U & 0xFF00U) | (second & 0xFFU) << 16U | (second << 8U & 0xFF00'0000U);
#endif
}

/// Bytes `first` and `first` + 1 of `even`, each below that of `odd`.
[[nodiscard]] LLMMEM_HD inline std::uint32_t interleaved(std::uint32_t even, std::uint32_t odd,
                                                         unsigned first) noexcept {
#if defined(__CUDA_ARCH__)
  return __byte_perm(even, odd, first == 0 ? 0x5140 : 0x7362);
#else
  const std::uint32_t low = even >> 8U * first;
  const std::uint32_t high = odd >> 8U * first;
  return (low & 0xFFU) | (high & 0xFFU) << 8U | (low & 0xFF00U) << 8U | (high & 0xFF00U) << 16U;
#endif
}

/// Eight elements, and their bytes of both planes.
struct plane_bytes {
  packet<8> exponents;
  packet<8> others;
};
[[nodiscard]] LLMMEM_HD inline plane_bytes planes_of(const packet<16>& elements) noexcept {
  plane_bytes out{};
  LLMMEM_UNROLL
  for (std::size_t i = 0; i < 2; ++i) {
    const std::uint32_t first = rotated_left(elements.words[2 * i]);
    const std::uint32_t second = rotated_left(elements.words[2 * i + 1]);
    out.exponents.words[i] = even_bytes(first >> 8U, second >> 8U);
    out.others.words[i] = even_bytes(first, second);
  }
  return out;
}
[[nodiscard]] LLMMEM_HD inline packet<16> elements_of(const plane_bytes& in) noexcept {
  packet<16> out{};
  LLMMEM_UNROLL
  for (std::size_t i = 0; i < 2; ++i) {
    out.words[2 * i] = rotated_right(interleaved(in.others.words[i], in.exponents.words[i], 0));
    out.words[2 * i + 1] = rotated_right(interleaved(in.others.words[i], in.exponents.words[i], 2));
  }
  return out;
}

/// The two conversions of one element, read a byte at a time: its address may be odd.
[[nodiscard]] LLMMEM_HD inline std::uint32_t rotated_single(const std::byte* elements,
                                                            std::uint64_t at) noexcept {
  const std::uint32_t low = load_packet<1>(elements + 2 * at).words[0];
  return rotated_left(low | std::uint32_t{load_packet<1>(elements + 2 * at + 1).words[0]} << 8U);
}
[[nodiscard]] LLMMEM_HD inline std::uint32_t merged_single(const bf16_planes<const std::byte>& planes,
                                                           std::uint64_t at) noexcept {
  const std::uint32_t low = load_packet<1>(planes.mantissas_and_signs + at).words[0];
  const std::uint32_t high = load_packet<1>(planes.exponents + at).words[0];
  return rotated_right(low | high << 8U);
}

/// Eight elements an item, so that neighbouring threads read and write neighbouring packets; after the last
/// whole item single elements. @pre elements are aligned to 16, planes to 8
template <plane_direction Direction, unsigned Elements>
  requires(Elements == 8)
class plane_work {
 public:
  using element_byte = std::conditional_t<Direction == plane_direction::split, const std::byte, std::byte>;
  using plane_byte = std::conditional_t<Direction == plane_direction::split, std::byte, const std::byte>;

  plane_work(element_byte* elements, const bf16_planes<plane_byte>& planes, std::uint64_t count) noexcept
      : elements_(elements), planes_(planes), packets_(count / Elements), count_(count) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return packets_ + (count_ - packets_ * Elements);
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    if (item >= packets_) return run_single(packets_ * Elements + (item - packets_));
    const std::uint64_t at = item * Elements;
    if constexpr (Direction == plane_direction::split) {
      const plane_bytes out = planes_of(load_packet<16, cache_hint::streaming>(elements_ + 2 * at));
      store_packet<Elements>(planes_.exponents + at, out.exponents);
      store_packet<Elements>(planes_.mantissas_and_signs + at, out.others);
    } else {
      store_packet<16>(
          elements_ + 2 * at,
          elements_of({load_packet<Elements, cache_hint::streaming>(planes_.exponents + at),
                       load_packet<Elements, cache_hint::streaming>(planes_.mantissas_and_signs + at)}));
    }
  }

 private:
  LLMMEM_HD void run_single(std::uint64_t at) const noexcept {
    if constexpr (Direction == plane_direction::split) {
      const std::uint32_t bits = rotated_single(elements_, at);
      store_packet<1>(planes_.exponents + at, {{static_cast<std::uint8_t>(bits >> 8U)}});
      store_packet<1>(planes_.mantissas_and_signs + at, {{static_cast<std::uint8_t>(bits)}});
    } else {
      const std::uint32_t bits = merged_single(planes_, at);
      store_packet<1>(elements_ + 2 * at, {{static_cast<std::uint8_t>(bits)}});
      store_packet<1>(elements_ + 2 * at + 1, {{static_cast<std::uint8_t>(bits >> 8U)}});
    }
  }

  element_byte* elements_;
  bf16_planes<plane_byte> planes_;
  std::uint64_t packets_;
  std::uint64_t count_;
};
static_assert(item_work<plane_work<plane_direction::split, 8>>);

/// Splits at any addresses: an item is eight elements whose bytes are an aligned packet of a plane. If the
/// planes have other offsets from a multiple of 8, each has items of its own.
class shifted_split_work {
 public:
  shifted_split_work(const std::byte* elements, const bf16_planes<std::byte>& planes,
                     std::uint64_t count) noexcept
      : elements_(elements),
        planes_(planes),
        count_(count),
        first_skew_(skew_of(planes.exponents) % 8),
        second_skew_(skew_of(planes.mantissas_and_signs) % 8),
        first_items_((count + first_skew_ + 7) / 8) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return first_items_ + (is_apart() ? (count_ + second_skew_ + 7) / 8 : 0);
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const bool is_second = item >= first_items_;
    const std::uint64_t number = is_second ? item - first_items_ : item;
    const std::uint32_t skew = is_second ? second_skew_ : first_skew_;
    const std::uint64_t begin = number * 8 < skew ? 0 : number * 8 - skew;
    const std::uint64_t past = number * 8 + 8 - skew;
    const std::uint64_t end = past < count_ ? past : count_;
    const bool has_exponents = !is_second;
    const bool has_others = is_second || !is_apart();
    if (end - begin != 8) {
      for (std::uint64_t at = begin; at < end; ++at) {
        const std::uint32_t bits = rotated_single(elements_, at);
        if (has_exponents) store_packet<1>(planes_.exponents + at, {{static_cast<std::uint8_t>(bits >> 8U)}});
        if (has_others)
          store_packet<1>(planes_.mantissas_and_signs + at, {{static_cast<std::uint8_t>(bits)}});
      }
      return;
    }
    const plane_bytes out =
        planes_of(read_across<1, cache_hint::streaming>(elements_, 2 * begin, 2 * count_));
    if (has_exponents) store_packet<8>(planes_.exponents + begin, out.exponents);
    if (has_others) store_packet<8>(planes_.mantissas_and_signs + begin, out.others);
  }

 private:
  [[nodiscard]] LLMMEM_HD bool is_apart() const noexcept { return first_skew_ != second_skew_; }

  const std::byte* elements_;
  bf16_planes<std::byte> planes_;
  std::uint64_t count_;
  std::uint32_t first_skew_;
  std::uint32_t second_skew_;
  std::uint64_t first_items_;
};
static_assert(item_work<shifted_split_work>);

/// Merges at any addresses: an item is an aligned packet of elements. At an odd address it begins with the
/// upper byte of an element.
class shifted_merge_work {
 public:
  shifted_merge_work(std::byte* elements, const bf16_planes<const std::byte>& planes,
                     std::uint64_t count) noexcept
      : elements_(elements), planes_(planes), count_(count), frame_(elements, 2 * count) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (frame_.extent() + 15) / 16; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const auto here = frame_.at(item * 16);
    const auto first = static_cast<std::uint64_t>(here.at) / 2;
    // Of a plane: the two aligned packets that contain 9 bytes.
    if (!here.is_whole() || !holds_nine(planes_.exponents, first) ||
        !holds_nine(planes_.mantissas_and_signs, first))
      return run_bytes(here);
    const bool is_odd = here.at % 2 != 0;
    const nine_bytes exponents = read_nine(planes_.exponents + first, is_odd);
    const nine_bytes others = read_nine(planes_.mantissas_and_signs + first, is_odd);
    packet<16> out = elements_of({exponents.first, others.first});
    if (is_odd) out = between_packets<16>(out, {{rotated_right(others.last | exponents.last << 8U)}}, 1);
    store_packet<16>(elements_ + here.at, out);
  }

 private:
  struct nine_bytes {
    packet<8> first;
    std::uint32_t last;
  };
  [[nodiscard]] LLMMEM_HD bool holds_nine(const std::byte* plane, std::uint64_t at) const noexcept {
    const std::uint32_t skew = skew_of(plane + at) % 8;
    return at >= skew && count_ - at >= 16 - skew;
  }
  [[nodiscard]] static LLMMEM_HD nine_bytes read_nine(const std::byte* at, bool is_ninth_used) noexcept {
    const std::uint32_t skew = skew_of(at) % 8;
    if (skew == 0 && !is_ninth_used) return {load_packet<8, cache_hint::streaming>(at), 0};
    const auto low = load_packet<8, cache_hint::streaming>(at - skew);
    const auto high = load_packet<8, cache_hint::streaming>(at - skew + 8);
    return {between_packets<8>(low, high, skew),
            (skew < 4 ? high.words[0] : high.words[1]) >> (skew % 4 * 8) & 0xFFU};
  }
  LLMMEM_HD void run_bytes(const packet_frame<1>::piece& of) const noexcept {
    LLMMEM_ROLLED
    for (std::uint32_t i = of.first; i < of.end; ++i) {
      const auto at = static_cast<std::uint64_t>(of.at + i);
      const std::uint32_t bits = merged_single(planes_, at / 2);
      store_packet<1>(elements_ + at, {{static_cast<std::uint8_t>(bits >> (at % 2 * 8))}});
    }
  }

  std::byte* elements_;
  bf16_planes<const std::byte> planes_;
  std::uint64_t count_;
  packet_frame<1> frame_;
};
static_assert(item_work<shifted_merge_work>);

/// Runs with aligned packets, or with what makes them.
template <plane_direction Direction, class Run, class ElementByte, class PlaneByte>
result<void> run_planes(const Run& run, ElementByte* elements, const bf16_planes<PlaneByte>& planes,
                        std::uint64_t count, const char* who) {
  if (count == 0) return {};
  if (elements == nullptr || planes.exponents == nullptr || planes.mantissas_and_signs == nullptr)
    return failure{errc::too_short, 0, count, 0, who};
  const std::uint32_t of_planes = alignment_of(reinterpret_cast<std::uintptr_t>(planes.exponents),
                                               reinterpret_cast<std::uintptr_t>(planes.mantissas_and_signs));
  const std::uint32_t of_elements = alignment_of(reinterpret_cast<std::uintptr_t>(elements));
  if (of_planes >= 8 && of_elements >= 16) return run.each(plane_work<Direction, 8>(elements, planes, count));
  if constexpr (Direction == plane_direction::split) {
    return run.each(shifted_split_work(elements, planes, count));
  } else {
    return run.each(shifted_merge_work(elements, planes, count));
  }
}

}  // namespace detail

/// Splits bf16 elements into two planes, exactly: exponents, 8 bits each with some 2.6 bits of information in
/// trained weights, and the rest, which hardly compresses. `merge_planes` restores the same bits, for any
/// bits.
///
/// @param run       `host_executor` or `device_executor`; all pointers are of its memory.
/// @param elements  [count], 2 bytes each, lowest first.
/// @pre the outputs overlap no other memory of the call
/// @return `errc::too_short` for a null pointer. Then nothing has begun. Otherwise the result of `run`.
/// @par Complexity   2 bytes per element are read and as many written, 16 at once but at the ends. Elements
///      are read twice if the planes have different offsets from a multiple of 8.
/// @par Thread safety   any number at once, on different bytes.
/// @par Source   Hershcovitch et al., "ZipNN: Lossless Compression for AI Models", 2024 (arXiv 2411.05239);
///      Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression via Dynamic-Length Float", 2025
///      (arXiv 2504.11651).
template <class Run>
result<void> split_planes(const Run& run, const std::byte* elements, std::uint64_t count,
                          const bf16_planes<std::byte>& planes) {
  return detail::run_planes<plane_direction::split>(run, elements, planes, count, "split_planes");
}

/// Merges the planes of `split_planes` into the original elements. Otherwise as `split_planes`.
template <class Run>
result<void> merge_planes(const Run& run, const bf16_planes<const std::byte>& planes, std::uint64_t count,
                          std::byte* elements) {
  return detail::run_planes<plane_direction::merge>(run, elements, planes, count, "merge_planes");
}

}  // namespace v0
}  // namespace llmmem
