/// @file
/// The bodies of the functions in <llmmem/kernels/xor_blocks.hpp>.
#pragma once

#include <llmmem/kernels/detail/packet_frame.hpp>
#include <llmmem/kernels/detail/xor_works.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/xor_blocks.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns an address as a number, because two addresses may be of different objects, or of a device.
[[nodiscard]] inline std::uint64_t place_of(const void* at) noexcept {
  return reinterpret_cast<std::uintptr_t>(at);
}

/// Returns how many bytes two ranges share, if they begin at different bytes.
[[nodiscard]] inline std::uint64_t shared_bytes(const void* a, std::uint64_t a_bytes, const void* b,
                                                std::uint64_t b_bytes) noexcept {
  const std::uint64_t one = place_of(a);
  const std::uint64_t other = place_of(b);
  if (one < other) return other - one < a_bytes ? std::min(a_bytes - (other - one), b_bytes) : 0;
  return one - other < b_bytes ? std::min(b_bytes - (one - other), a_bytes) : 0;
}

/// The common arguments of the functions on pages.
struct page_question {
  const std::byte* ends[3];  ///< null pointers come last
  std::uint32_t end_count;
  const std::byte* written;  ///< may be one of the ends; null: only the bitmap is
  std::uint64_t bytes;
  std::span<const std::uint32_t> dirty;
  bool is_dirty_written;
};

[[nodiscard]] inline result<void> answerable(const page_question& asked, const dirty_page_options& options,
                                             const char* where) noexcept {
  if (!std::has_single_bit(options.page_bytes))
    return failure{errc::bad_alignment, 0, options.page_bytes, 0, where};
  if (options.page_bytes < xor_unit::stretch_bytes)
    return failure{errc::bad_granularity, 0, options.page_bytes, xor_unit::stretch_bytes, where};
  if (asked.bytes == 0) return {};
  const std::uint64_t words = dirty_words(asked.bytes, options);
  if (asked.dirty.size() < words) return failure{errc::too_short, 0, words, asked.dirty.size(), where};
  for (std::uint32_t i = 0; i < asked.end_count; ++i) {
    if (asked.ends[i] == nullptr) return failure{errc::null_handle, i, 0, 0, where};
    const std::uint64_t both = shared_bytes(asked.ends[i], asked.bytes, asked.written, asked.bytes);
    if (asked.written != nullptr && asked.ends[i] != asked.written && both != 0)
      return failure{errc::overlapping_ranges, i, asked.bytes, both, where};
  }
  if (asked.dirty.data() == nullptr) return failure{errc::null_handle, 3, 0, 0, where};
  for (std::uint32_t i = 0; i < asked.end_count; ++i) {
    const bool is_any_written = asked.is_dirty_written || asked.ends[i] == asked.written;
    const std::uint64_t both = shared_bytes(asked.ends[i], asked.bytes, asked.dirty.data(), 4 * words);
    if (is_any_written && both != 0) return failure{errc::overlapping_ranges, 3, asked.bytes, both, where};
  }
  return {};
}

[[nodiscard]] inline std::uint32_t stretch_shift_of(const dirty_page_options& options) noexcept {
  return static_cast<std::uint32_t>(std::countr_zero(options.page_bytes)) - xor_unit::stretch_bits;
}

/// Runs `xor_delta` and `compare_dirty` on checked arguments.
template <delta_use Use, class Run>
result<void> run_delta(const Run& run, const std::byte* old_bytes, const std::byte* new_bytes,
                       std::byte* delta, std::uint64_t bytes, std::span<std::uint32_t> dirty_bits,
                       const dirty_page_options& options) {
  if (options.mark == dirty_mark::overwrite) {
    const clear_words_work clear{dirty_bits.data(), dirty_words(bytes, options)};
    if (auto done = run.each(clear); !done) return done;
  }
  return at_width(alignment_of(place_of(old_bytes), place_of(new_bytes), place_of(delta)), [&](auto width) {
    const packet_frame<width()> frame(Use == delta_use::written ? delta : old_bytes, bytes);
    return run.each(xor_delta_work<width(), Use>{old_bytes, new_bytes, delta, dirty_bits.data(), frame,
                                                 stretch_shift_of(options)});
  });
}

}  // namespace detail

template <class Run>
result<void> xor_parity(const Run& run, std::span<const std::byte* const> shards, std::byte* parity,
                        std::uint64_t bytes) {
  const auto count = static_cast<std::uint32_t>(shards.size());
  if (shards.size() > most_parity_shards)
    return failure{errc::out_of_range, 0, shards.size(), most_parity_shards, "xor_parity: shards"};
  if (bytes == 0) return {};
  if (parity == nullptr) return failure{errc::null_handle, count, 0, 0, "xor_parity: parity"};
  std::uint32_t aligned = alignment_of(detail::place_of(parity));
  for (std::uint32_t i = 0; i < count; ++i) {
    if (shards[i] == nullptr) return failure{errc::null_handle, i, 0, 0, "xor_parity: shards"};
    const std::uint64_t both = detail::shared_bytes(shards[i], bytes, parity, bytes);
    if (shards[i] != parity && both != 0)
      return failure{errc::overlapping_ranges, i, bytes, both, "xor_parity"};
    aligned = std::min(aligned, alignment_of(detail::place_of(shards[i])));
  }
  return detail::at_width(aligned, [&](auto width) {
    detail::xor_parity_work<width()> work{
        .shard = {}, .parity = parity, .frame = {parity, bytes}, .shards = count};
    for (std::uint32_t i = 0; i < count; ++i)
      work.shard[i] = shards[i];
    return run.each(work);
  });
}

template <class Run>
result<void> xor_delta(const Run& run, const std::byte* old_bytes, const std::byte* new_bytes,
                       std::byte* delta, std::uint64_t bytes, std::span<std::uint32_t> dirty_bits,
                       const dirty_page_options& options) {
  const detail::page_question asked{{old_bytes, new_bytes, delta}, 3, delta, bytes, dirty_bits, true};
  if (auto well = detail::answerable(asked, options, "xor_delta"); !well || bytes == 0) return well;
  return detail::run_delta<detail::delta_use::written>(run, old_bytes, new_bytes, delta, bytes, dirty_bits,
                                                       options);
}

template <class Run>
result<void> compare_dirty(const Run& run, const std::byte* old_bytes, const std::byte* new_bytes,
                           std::uint64_t bytes, std::span<std::uint32_t> dirty_bits,
                           const dirty_page_options& options) {
  const detail::page_question asked{{old_bytes, new_bytes, nullptr}, 2, nullptr, bytes, dirty_bits, true};
  if (auto well = detail::answerable(asked, options, "compare_dirty"); !well || bytes == 0) return well;
  return detail::run_delta<detail::delta_use::looked_at>(run, old_bytes, new_bytes, nullptr, bytes,
                                                         dirty_bits, options);
}

template <class Run>
result<void> apply_delta(const Run& run, std::byte* target, const std::byte* delta, std::uint64_t bytes,
                         std::span<const std::uint32_t> dirty_bits, const dirty_page_options& options) {
  const detail::page_question asked{{target, delta, nullptr}, 2, target, bytes, dirty_bits, false};
  if (auto well = detail::answerable(asked, options, "apply_delta"); !well || bytes == 0) return well;
  const std::uint32_t aligned = alignment_of(detail::place_of(target), detail::place_of(delta));
  return detail::at_width(aligned, [&](auto width) {
    return run.each(detail::apply_delta_work<width()>{
        target, delta, dirty_bits.data(), {target, bytes}, detail::stretch_shift_of(options)});
  });
}

}  // namespace v0
}  // namespace llmmem
