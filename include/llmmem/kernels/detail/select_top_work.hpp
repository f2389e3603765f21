/// @file
/// The work of choosing the highest scores.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/top_scores.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Adds up the values of all lanes: numbers below 2^24, whose sum does not depend on the order.
template <class Group>
LLMMEM_HD inline void add_lanes(const Group& group, typename Group::template held<float>& values) noexcept {
  typename Group::template held<float> other;
  for (std::uint32_t step = 1; step < group.count(); step *= 2) {
    group.each([&](std::uint32_t lane) { other[lane] = values[lane]; });
    group.swap(other, step);
    group.each([&](std::uint32_t lane) { values[lane] += other[lane]; });
  }
}

/// Adds to each lane's number those of the lanes below it.
template <class Group>
LLMMEM_HD inline void add_lanes_below(const Group& group,
                                      typename Group::template held<float>& values) noexcept {
  typename Group::template held<float> below;
  for (std::uint32_t step = 1; step < group.count(); step *= 2) {
    group.take_from(below, values, [&](std::uint32_t lane) { return lane >= step ? lane - step : lane; });
    group.each([&](std::uint32_t lane) { values[lane] += lane >= step ? below[lane] : 0.0F; });
  }
}

/// Bits that rise with a number, and are above 0 for all but NaNs.
[[nodiscard]] LLMMEM_HD inline std::uint32_t rising_bits(float score) noexcept {
  const float clean = score == 0 ? 0.0F : score;  // -0 is 0
  const std::uint32_t bits = bits_of_float(clean);
  return bits ^ ((bits >> 31U) != 0 ? 0xFFFF'FFFFU : 0x8000'0000U);
}

/// The first in the order has the largest key: by score, and among equal scores by lowest number. 0: does not
/// count.
[[nodiscard]] LLMMEM_HD inline std::uint64_t top_key(float score, std::int32_t number) noexcept {
  const std::uint32_t bits = bits_of_float(score);
  const std::uint32_t rising = rising_bits(score);
  const bool counts = score == score && bits != 0xFF80'0000U && number >= 0;
  if (!counts) return 0;
  return std::uint64_t{rising} << 32U | static_cast<std::uint32_t>(~number);
}

/// The keys of a row's candidates.
struct top_row {
  const float* scores = nullptr;
  const std::int32_t* numbers = nullptr;
  std::uint32_t count = 0;

  [[nodiscard]] LLMMEM_HD std::int32_t number(std::uint32_t place) const noexcept {
    return numbers == nullptr ? static_cast<std::int32_t>(place) : numbers[place];
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t key(std::uint32_t place) const noexcept {
    return place < count ? top_key(scores[place], number(place)) : 0;
  }
};
[[nodiscard]] LLMMEM_HD inline top_row row_of(const top_scores& of, std::uint64_t row) noexcept {
  top_row out{of.scores + row * of.stride, of.numbers == nullptr ? nullptr : of.numbers + row * of.stride,
              of.candidates};
  if (of.counts == nullptr) return out;
  const std::int32_t count = of.counts[row];
  if (count < 0) {
    out.count = 0;
  } else if (static_cast<std::uint32_t>(count) < out.count) {
    out.count = static_cast<std::uint32_t>(count);
  }
  return out;
}

/// The rows of `select_top`.
struct top_rows {
  using row = top_row;

  top_scores of{};

  [[nodiscard]] LLMMEM_HD std::uint64_t rows() const noexcept { return of.rows; }
  [[nodiscard]] LLMMEM_HD top_row at(std::uint64_t number) const noexcept { return row_of(of, number); }
};

/// Chooses the candidates of a row whose key's upper bits are at least some number, found digit by digit;
/// writes their places, ascending, then -1.
///
/// @tparam Rows  a row's `count` candidates have a `key` each, unique among those that are not 0.
template <class Rows>
class choose_top_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 4;

  choose_top_work(const Rows& of, std::uint32_t k, std::int32_t* out, std::uint64_t stride) noexcept
      : of_(of), k_(k), out_(out), stride_(stride) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return of_.rows(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    typename Rows::row row{};
    if (item < of_.rows()) row = of_.at(item);
    const least_key least = find(group, row);
    write(group, row, least, item);
  }

 private:
  static constexpr unsigned digits = 16;  // of a key, four bits each
  static constexpr unsigned words = 4;    // of counts, four in each: a lane has below 2^16 candidates

  /// Candidates are chosen whose key >> shift is at least `from`.
  struct least_key {
    std::uint64_t from = 1;
    std::uint32_t shift = 32;
  };
  struct digit_counts {
    std::uint64_t word[words];
  };

  template <class Group>
  [[nodiscard]] LLMMEM_HD least_key find(const Group& group, const typename Rows::row& row) const noexcept {
    std::uint64_t prefix = 0;  // of the keys that are still undecided
    std::uint32_t above = 0;   // chosen for certain
    for (unsigned digit = 0; digit < digits; ++digit) {
      const std::uint32_t shift = 60 - 4 * digit;
      typename Group::template held<digit_counts> counts;
      group.each([&](std::uint32_t lane) {
        counts[lane] = {};
        for (std::uint32_t place = lane; place < row.count; place += 32)
          count(row.key(place), prefix, digit, shift, counts[lane]);
      });
      std::uint32_t chosen = 0;  // undecided keys with this digit
      std::uint64_t value = 0;
      std::uint32_t beyond = above;
      bool is_found = false;
      LLMMEM_UNROLL
      for (unsigned down = 0; down < 16; ++down) {
        const unsigned of = 15 - down;
        typename Group::template held<float> each;
        group.each([&](std::uint32_t lane) {
          each[lane] = static_cast<float>(counts[lane].word[of / 4] >> (of % 4 * 16) & 0xFFFFU);
        });
        add_lanes(group, each);
        const auto found = static_cast<std::uint32_t>(each[0]);
        if (!is_found && beyond + found >= k_) {
          is_found = true;
          chosen = found;
          value = of;
          above = beyond;
        }
        if (!is_found) beyond += found;
      }
      if (!is_found) return {};  // fewer count than `k`
      prefix = prefix << 4U | value;
      if (above + chosen == k_) return {prefix, shift};
    }
    return {prefix, 0};
  }

  /// Every candidate that counts has a unique key; other candidates are in no digit.
  LLMMEM_HD static void count(std::uint64_t key, std::uint64_t prefix, unsigned digit, std::uint32_t shift,
                              digit_counts& to) noexcept {
    const bool is_in_question = key != 0 && (digit == 0 || key >> (shift + 4) == prefix);
    const auto value = static_cast<std::uint32_t>(key >> shift & 15U);
    const std::uint64_t one = is_in_question ? std::uint64_t{1} << (value % 4 * 16) : 0;
    LLMMEM_UNROLL
    for (unsigned w = 0; w < words; ++w)
      to.word[w] += value / 4 == w ? one : 0;
  }

  template <class Group>
  LLMMEM_HD void write(const Group& group, const typename Rows::row& row, const least_key& least,
                       std::uint64_t item) const noexcept {
    std::int32_t* const out = out_ + item * stride_;
    std::uint32_t before = 0;
    for (std::uint32_t first = 0; first < row.count; first += 32) {
      typename Group::template held<float> chosen;
      typename Group::template held<float> up_to;
      group.each([&](std::uint32_t lane) {
        const std::uint64_t key = row.key(first + lane);
        chosen[lane] = key != 0 && key >> least.shift >= least.from ? 1.0F : 0.0F;
        up_to[lane] = chosen[lane];
      });
      add_lanes_below(group, up_to);
      group.each([&](std::uint32_t lane) {
        if (chosen[lane] == 0) return;
        const std::uint32_t at = before + static_cast<std::uint32_t>(up_to[lane]) - 1;
        if (at < k_) out[at] = static_cast<std::int32_t>(first + lane);
      });
      add_lanes(group, chosen);
      before += static_cast<std::uint32_t>(chosen[0]);
    }
    if (item >= of_.rows()) return;
    group.each([&](std::uint32_t lane) {
      for (std::uint32_t at = before + lane; at < k_; at += 32)
        out[at] = -1;
    });
  }

  Rows of_;
  std::uint32_t k_;
  std::int32_t* out_;
  std::uint64_t stride_;
};
static_assert(lane_work<choose_top_work<top_rows>>);

/// Moves each chosen candidate to its place in the order: after all that come before it.
class order_top_work {
 public:
  order_top_work(const top_scores& of, std::uint32_t k, const std::int32_t* chosen, std::int32_t* out,
                 std::uint64_t stride, bool is_by_score) noexcept
      : of_(of), by_(k), chosen_(chosen), out_(out), stride_(stride), is_by_score_(is_by_score) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return of_.rows * by_.by(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t row = by_.quotient(item);
    const std::uint32_t k = by_.by();
    const std::int32_t* const chosen = chosen_ + row * k;
    std::int32_t* const out = out_ + row * stride_;
    const std::uint32_t at = by_.remainder(item);
    const std::int32_t place = chosen[at];
    if (place < 0) {
      out[at] = -1;
      return;
    }
    const top_row scores = row_of(of_, row);
    const std::uint64_t own = order_of(scores, place);
    std::uint32_t before = 0;
    for (std::uint32_t i = 0; i < k && chosen[i] >= 0; ++i)
      before += order_of(scores, chosen[i]) > own ? 1U : 0U;
    out[before] = scores.number(static_cast<std::uint32_t>(place));
  }

 private:
  /// The largest comes first.
  [[nodiscard]] LLMMEM_HD std::uint64_t order_of(const top_row& row, std::int32_t place) const noexcept {
    const std::uint64_t key = row.key(static_cast<std::uint32_t>(place));
    return is_by_score_ ? key : key & 0xFFFF'FFFFU;
  }

  top_scores of_;
  divider by_;
  const std::int32_t* chosen_;
  std::int32_t* out_;
  std::uint64_t stride_;
  bool is_by_score_;
};
static_assert(item_work<order_top_work>);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
