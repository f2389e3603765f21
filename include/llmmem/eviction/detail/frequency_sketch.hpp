/// @file
/// Counts recent uses of contents in a few bits: the sketch of TinyLFU.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/mix.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A count-min sketch of four 4-bit counters for each content (Cormode and Muthukrishnan 2005), halved as it
/// ages (Einziger, Friedman and Manes, "TinyLFU", 2017). Apart from the halving it never counts too few uses;
/// it counts too many when other contents share all four counters.
///
/// The four counters share one cache line. Every counter is halved once per 10 x capacity additions, word by
/// word with the additions, so no addition pays for the whole table. 8 to 16 bytes for each entry of the
/// capacity, at least 64.
class frequency_sketch {
 public:
  static constexpr std::uint64_t most = 15;

  frequency_sketch(slot_count capacity, const metadata_source& source, const char* who)
      : words_(std::bit_ceil(std::max(checked_capacity(capacity, who), line)), 0, source, who),
        period_(10 * to_number(capacity)) {}

  /// Counts a use. Ignores unnamed contents, 0.
  void add(std::uint64_t content) noexcept {
    if (content == 0) return;
    for (const counter each : counters(content)) {
      if ((words_[each.word] >> each.shift & most) != most)
        words_[each.word] += std::uint64_t{1} << each.shift;
    }
    for (due_ += words_.size(); due_ >= period_; due_ -= period_) {
      words_[aged_] = words_[aged_] >> 1 & 0x7777'7777'7777'7777ULL;
      aged_ = (aged_ + 1) & (words_.size() - 1);
    }
  }

  /// Returns the uses counted recently, at most `most`; 0 for unnamed contents.
  [[nodiscard]] std::uint64_t estimate(std::uint64_t content) const noexcept {
    if (content == 0) return 0;
    std::uint64_t least = most;
    for (const counter each : counters(content))
      least = std::min(least, words_[each.word] >> each.shift & most);
    return least;
  }

  [[nodiscard]] std::size_t bytes() const noexcept { return words_.bytes(); }

 private:
  static constexpr std::uint64_t line = 8;  // words in a cache line

  struct counter {
    std::size_t word;
    std::uint32_t shift;
  };

  /// Counter i is one of 32 in words 2i and 2i + 1 of the content's line.
  [[nodiscard]] std::array<counter, 4> counters(std::uint64_t content) const noexcept {
    const std::uint64_t hash = mix(content);
    const std::size_t first = hash & (words_.size() - 1) & ~(line - 1);
    std::uint64_t bits = hash >> 44;
    std::array<counter, 4> out{};
    for (std::size_t i = 0; i < out.size(); ++i, bits >>= 5)
      out[i] = {.word = first + 2 * i + (bits >> 4 & 1), .shift = static_cast<std::uint32_t>(bits & 15) * 4};
    return out;
  }

  fixed_array<std::uint64_t> words_;  // 16 counters each
  std::uint64_t period_;              // additions during which every word is halved once
  std::uint64_t due_ = 0;
  std::size_t aged_ = 0;  // the word that is halved next
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
