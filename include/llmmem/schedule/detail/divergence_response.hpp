/// @file
/// Decides whether a plan that the program has left is dropped, and forecasts uses without a plan. Private to
/// schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/cursor.hpp>
#include <llmmem/schedule/use_forecast.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Executes `on_divergence`: counts consecutive iterations that left the plan, and with
/// `on_divergence::by_frequency` the uses of each chunk.
///
/// After `fell_back` is true, the schedule follows no plan until `forget`.
///
/// @par Complexity      as `use_forecast`.
/// @par Thread safety   one thread at a time.
/// @par Errors          `know_chunks` throws `std::bad_alloc`; nothing else throws.
class divergence_response {
 public:
  /// @param re_record_after  with `on_divergence::repair`: as in `prefetch_options`.
  divergence_response(on_divergence what, std::uint32_t re_record_after) noexcept
      : what_(what), re_record_after_(re_record_after) {}

  /// Sets the number of the trace's chunks. Counted uses stay if the number is the same.
  void know_chunks(std::size_t chunks) {
    if (what_ != on_divergence::by_frequency || (forecast_ && chunks_ == chunks)) return;
    forecast_.emplace(chunks);
    chunks_ = chunks;
  }
  void begin_iteration() noexcept {
    if (forecast_) forecast_->begin_iteration();
  }
  /// Records that the program uses `chunk`.
  void used(chunk_id chunk) noexcept {
    if (forecast_) forecast_->used(chunk);
  }

  /// Records that the program has left the plan. Returns whether the caller must drop the plan.
  [[nodiscard]] bool plan_left() noexcept {
    if (what_ == on_divergence::fall_back || what_ == on_divergence::by_frequency) fell_back_ = true;
    const bool for_good = ++left_in_a_row_ >= re_record_after_;
    const bool drop = what_ == on_divergence::re_record || (what_ == on_divergence::repair && for_good);
    if (drop) left_in_a_row_ = 0;
    return drop;
  }
  /// Records that the program has followed the plan for an iteration.
  void plan_kept() noexcept { left_in_a_row_ = 0; }
  /// Drops the counts, because the chunks have changed; the schedule records later iterations again.
  void forget() noexcept {
    forecast_.reset();
    fell_back_ = false;
  }

  /// Returns whether the plan was given up permanently.
  [[nodiscard]] bool fell_back() const noexcept { return fell_back_; }
  /// Returns whether uses are counted, so that `next_use` has a forecast.
  [[nodiscard]] bool has_forecast() const noexcept { return forecast_.has_value(); }
  /// As `use_forecast::next_use`. @pre `has_forecast()`.
  [[nodiscard]] std::uint64_t next_use(chunk_id chunk) const noexcept { return forecast_->next_use(chunk); }

 private:
  on_divergence what_;
  std::uint32_t re_record_after_;
  std::uint32_t left_in_a_row_ = 0;  // consecutive iterations that left the plan
  bool fell_back_ = false;
  std::optional<use_forecast> forecast_;  // with `on_divergence::by_frequency`
  std::size_t chunks_ = 0;                // of `forecast_`
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
