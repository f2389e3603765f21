/// @file
/// The rows of `select_tokens`, and its checks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/kernels/detail/select_top_work.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/select_tokens.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The keys of the tokens of a sequence and KV head. Those of sinks and recent tokens are above all scores.
struct scored_tokens {
  const float* scores = nullptr;  // of the first query head
  std::uint64_t stride = 0;
  std::uint32_t heads = 0;
  score_join join = score_join::sum;
  std::uint32_t count = 0;
  std::uint32_t sinks = 0;
  std::uint32_t recent_from = 0;

  [[nodiscard]] LLMMEM_HD float score(std::uint32_t place) const noexcept {
    float joined = scores[place];
    for (std::uint32_t head = 1; head < heads; ++head) {
      const float next = scores[head * stride + place];
      if (join == score_join::sum) {
        joined += next;
      } else if (next > joined || joined != joined) {  // NOLINT(misc-redundant-expression): a NaN
        joined = next;
      }
    }
    return joined;
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t key(std::uint32_t place) const noexcept {
    constexpr std::uint32_t above_scores = 0xFFFF'FFFFU;
    constexpr std::uint32_t nan = 1;  // -infinity is 0x7F'FFFF
    if (place >= count) return 0;
    std::uint32_t rising = above_scores;
    if (place >= sinks && place < recent_from) {
      const float joined = score(place);
      rising = joined == joined ? rising_bits(joined) : nan;  // NOLINT(misc-redundant-expression)
    }
    return std::uint64_t{rising} << 32U | (0xFFFF'FFFFU - place);
  }
};

/// A row for each sequence and KV head.
class scored_rows {
 public:
  using row = scored_tokens;

  scored_rows(const token_scores& of, const token_budget& budget) noexcept
      : of_(of), budget_(budget), by_(of.kv_heads), group_(of.query_heads / of.kv_heads) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t rows() const noexcept { return of_.sequences * of_.kv_heads; }
  [[nodiscard]] LLMMEM_HD scored_tokens at(std::uint64_t number) const noexcept {
    const std::uint64_t sequence = by_.quotient(number);
    scored_tokens out;
    // Query heads of a group are adjacent, and so are groups.
    out.scores = of_.scores + number * group_ * of_.stride;
    out.stride = of_.stride;
    out.heads = group_;
    out.join = of_.join;
    out.count = of_.tokens;
    if (of_.lengths != nullptr) {
      const std::int32_t length = of_.lengths[sequence];
      if (length < 0) {
        out.count = 0;
      } else if (static_cast<std::uint32_t>(length) < out.count) {
        out.count = static_cast<std::uint32_t>(length);
      }
    }
    out.sinks = budget_.sinks;
    out.recent_from = out.count > budget_.recent ? out.count - budget_.recent : 0;
    return out;
  }

 private:
  token_scores of_;
  token_budget budget_;
  divider by_;
  std::uint32_t group_;
};

}  // namespace detail

template <class Run>
result<void> select_tokens(const Run& run, const token_scores& of, const token_budget& budget,
                           std::int32_t* out, std::uint64_t out_stride) {
  constexpr std::uint32_t most = std::uint32_t{1} << 20U;
  if (of.tokens > most) return failure{errc::out_of_range, 0, of.tokens, most, "select_tokens: tokens"};
  if (of.kv_heads == 0 || of.query_heads % of.kv_heads != 0 || of.query_heads == 0)
    return failure{errc::bad_granularity, 0, of.query_heads, of.kv_heads,
                   "select_tokens: query_heads, by kv_heads"};
  const std::uint64_t certain = std::uint64_t{budget.sinks} + budget.recent;
  if (certain > budget.budget)
    return failure{errc::out_of_range, 0, certain, budget.budget,
                   "select_tokens: sinks + recent, which the budget contains"};
  if (of.sequences == 0 || budget.budget == 0) return {};
  const bool has_several = of.sequences > 1 || of.query_heads > 1;
  if (of.tokens > of.stride && has_several)
    return failure{errc::size_mismatch, 0, of.tokens, of.stride, "select_tokens: tokens and stride"};
  if (budget.budget > out_stride && (of.sequences > 1 || of.kv_heads > 1))
    return failure{errc::size_mismatch, 0, budget.budget, out_stride, "select_tokens: budget and out_stride"};
  if (of.scores == nullptr && of.tokens != 0)
    return failure{errc::too_short, 0, of.tokens, 0, "select_tokens: scores"};
  if (out == nullptr) return failure{errc::too_short, 0, budget.budget, 0, "select_tokens: out"};
  return run.each(detail::choose_top_work(detail::scored_rows(of, budget), budget.budget, out, out_stride));
}

}  // namespace v0
}  // namespace llmmem
