/// @file
/// Splits exponents of bfloat16 from their signs and mantissas, and merges them: the step before lossless
/// compression.
#pragma once

#include <llmmem/config.hpp>
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

/// Elements per item, at most 16 bytes, so that neighbouring threads read and write neighbouring bytes; after
/// the last whole item single elements. With one element per item any address is valid.
template <plane_direction Direction, unsigned Elements>
  requires(Elements == 8 || Elements == 4 || Elements == 1)
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
    if constexpr (Elements == 1) {
      run_single(item);
    } else if constexpr (Direction == plane_direction::split) {
      split(item * Elements);
    } else {
      merge(item * Elements);
    }
  }

 private:
  static constexpr unsigned packet_bytes = 2 * Elements;

  LLMMEM_HD void split(std::uint64_t at) const noexcept {
    const auto in = load_packet<packet_bytes, cache_hint::streaming>(elements_ + 2 * at);
    packet<Elements> exponents;
    packet<Elements> others;
    for (unsigned i = 0; i < Elements / 4; ++i) {
      const std::uint32_t first = rotated_left(in.words[2 * i]);
      const std::uint32_t second = rotated_left(in.words[2 * i + 1]);
      exponents.words[i] = even_bytes(first >> 8U, second >> 8U);
      others.words[i] = even_bytes(first, second);
    }
    store_packet<Elements>(planes_.exponents + at, exponents);
    store_packet<Elements>(planes_.mantissas_and_signs + at, others);
  }

  LLMMEM_HD void merge(std::uint64_t at) const noexcept {
    const auto exponents = load_packet<Elements, cache_hint::streaming>(planes_.exponents + at);
    const auto others = load_packet<Elements, cache_hint::streaming>(planes_.mantissas_and_signs + at);
    packet<packet_bytes> out;
    for (unsigned i = 0; i < Elements / 4; ++i) {
      out.words[2 * i] = rotated_right(interleaved(others.words[i], exponents.words[i], 0));
      out.words[2 * i + 1] = rotated_right(interleaved(others.words[i], exponents.words[i], 2));
    }
    store_packet<packet_bytes>(elements_ + 2 * at, out);
  }

  /// One element, a byte at a time: its address may be odd.
  LLMMEM_HD void run_single(std::uint64_t at) const noexcept {
    element_byte* const element = elements_ + 2 * at;
    if constexpr (Direction == plane_direction::split) {
      const std::uint32_t low = load_packet<1>(element).words[0];
      const std::uint32_t bits =
          rotated_left(low | std::uint32_t{load_packet<1>(element + 1).words[0]} << 8U);
      store_packet<1>(planes_.exponents + at, {{static_cast<std::uint8_t>(bits >> 8U)}});
      store_packet<1>(planes_.mantissas_and_signs + at, {{static_cast<std::uint8_t>(bits)}});
    } else {
      const std::uint32_t low = load_packet<1>(planes_.mantissas_and_signs + at).words[0];
      const std::uint32_t high = load_packet<1>(planes_.exponents + at).words[0];
      const std::uint32_t bits = rotated_right(low | high << 8U);
      store_packet<1>(element, {{static_cast<std::uint8_t>(bits)}});
      store_packet<1>(element + 1, {{static_cast<std::uint8_t>(bits >> 8U)}});
    }
  }

  element_byte* elements_;
  bf16_planes<plane_byte> planes_;
  std::uint64_t packets_;
  std::uint64_t count_;
};
static_assert(item_work<plane_work<plane_direction::split, 8>>);

/// Runs with as many elements per item as all alignments allow.
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
  if (of_planes >= 4 && of_elements >= 8) return run.each(plane_work<Direction, 4>(elements, planes, count));
  return run.each(plane_work<Direction, 1>(elements, planes, count));
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
/// @par Complexity   2 bytes per element are read and as many written, 16 at once if elements are at a
///      multiple of that and planes at multiples of 8; else 4 or 1 of a plane at once.
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
