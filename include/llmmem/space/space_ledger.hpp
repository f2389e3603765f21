/// @file
/// `space_ledger`: the record that every space keeps of its ranges.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/space/space_stats.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A byte source under a hard budget, with every range recorded. Bytes that a source keeps because they could
/// not be returned yet are charged too, because they take memory. Any number of threads; one mutex.
/// @tparam Options  has `budget`, `name`, `on_misuse` and `misuse_context`.
template <class Source, class Options>
class space_ledger {
 public:
  space_ledger(Source source, Options options) : source_(std::move(source)), options_(std::move(options)) {
    if (options_.budget == 0) {
      throw length_error(options_.name + ": the budget is 0 bytes; set the bytes that it may hold");
    }
    if (options_.budget > max_bytes) {
      throw length_error(options_.name + ": a budget of " + std::to_string(options_.budget) +
                         " bytes exceeds the limit of 2^63 - 1");
    }
  }
  space_ledger(const space_ledger&) = delete;
  space_ledger& operator=(const space_ledger&) = delete;
  ~space_ledger() {
    for (const auto& live : live_) {
      source_.give_back(to_mutable(live.data), live.bytes, live.payload);
    }
  }

  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const char* name() const noexcept { return options_.name.c_str(); }
  [[nodiscard]] const Source& source() const noexcept { return source_; }

  [[nodiscard]] result<std::byte*> take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const std::lock_guard lock(mutex_);
    const auto refuse = [&](error_code code, std::uint64_t wanted, std::uint32_t error = 0) {
      ++stats_.refusals;
      return failure{.code = code,
                     .index = error,
                     .wanted = wanted,
                     .found = options_.budget - charged(),
                     .where = options_.name.c_str()};
    };
    if (bytes == 0) return refuse(errc::zero_bytes, 0);
    if (!std::has_single_bit(alignment)) return refuse(errc::bad_alignment, alignment);
    if constexpr (keeps) source_.give_back_kept();
    const std::uint64_t left = options_.budget - charged();
    if (bytes > left) return refuse(errc::out_of_bytes, bytes);
    const std::uint64_t charge = source_.footprint(bytes, alignment);
    if (charge > left) return refuse(errc::out_of_bytes, charge);
    if constexpr (requires { source_.refusal(bytes, alignment); }) {
      if (const auto never = source_.refusal(bytes, alignment)) {
        ++stats_.refusals;
        return *never;
      }
    }
    if (!live_.reserve_one()) return refuse(errc::system_refused, bytes);
    std::byte* const data = source_.take(bytes, alignment);
    if (data == nullptr) return refuse(errc::system_refused, bytes, why(source_));
    if ((reinterpret_cast<std::uintptr_t>(data) & (alignment - 1)) != 0) {
      source_.give_back(data, bytes, alignment);
      return refuse(errc::system_refused, bytes);
    }
    live_.insert(data, bytes, alignment);
    stats_.used += charge;
    if (charged() > stats_.peak) stats_.peak = charged();
    ++stats_.allocations;
    return data;
  }

  void give_back(const std::byte* data, std::uint64_t bytes) noexcept {
    if (data == nullptr && bytes == 0) return;
    misuse wrong;
    {
      const std::lock_guard lock(mutex_);
      wrong = live_.check(options_.name.c_str(), data, bytes);
      if (wrong.what == misuse::kind::none) {
        const auto removed = live_.remove(data);
        stats_.used -= source_.footprint(removed.bytes, removed.payload);
        source_.give_back(to_mutable(removed.data), removed.bytes, removed.payload);
        return;
      }
      ++stats_.misuses;
    }
    options_.on_misuse(wrong, options_.misuse_context);
  }

  /// Whether all of it is inside one live range.
  [[nodiscard]] bool holds(const std::byte* data, std::uint64_t bytes) const noexcept {
    const std::lock_guard lock(mutex_);
    return live_.holding(data, bytes) != nullptr;
  }
  [[nodiscard]] std::uint64_t used() const noexcept {
    const std::lock_guard lock(mutex_);
    return charged();
  }
  [[nodiscard]] space_stats stats() const noexcept {
    const std::lock_guard lock(mutex_);
    space_stats now = stats_;
    now.ranges = live_.size();
    now.metadata_bytes = live_.metadata_bytes();
    now.kept_bytes = kept();
    now.used = charged();
    return now;
  }
  /// Calls an optional function of the source, under the lock.
  template <class Call>
  auto with_source(Call call) noexcept {
    const std::lock_guard lock(mutex_);
    return call(source_);
  }
  [[nodiscard]] std::vector<std::string> audit() {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> found = live_.audit(options_.name.c_str());
    std::uint64_t taken = 0;
    for (const auto& live : live_) {
      taken += source_.footprint(live.bytes, live.payload);
    }
    if (taken != stats_.used || charged() > options_.budget) {
      found.push_back(options_.name + ": live ranges take " + std::to_string(taken) +
                      " bytes, but the budget of " + std::to_string(options_.budget) + " was charged with " +
                      std::to_string(charged()));
    }
    return found;
  }

 private:
  [[nodiscard]] static std::byte* to_mutable(const std::byte* data) noexcept {
    return const_cast<std::byte*>(data);
  }
  /// Returns the error number of a refusal, for a source that records one.
  [[nodiscard]] static std::uint32_t why(const Source& source) noexcept {
    if constexpr (requires { source.last_error(); }) {
      return source.last_error();
    } else {
      return 0;
    }
  }

  static constexpr bool keeps = requires(Source& source) {
    { source.kept_bytes() } noexcept -> std::same_as<std::uint64_t>;
    { source.give_back_kept() } noexcept;
  };
  [[nodiscard]] std::uint64_t kept() const noexcept {
    if constexpr (keeps) {
      return source_.kept_bytes();
    } else {
      return 0;
    }
  }
  [[nodiscard]] std::uint64_t charged() const noexcept { return stats_.used + kept(); }

  mutable std::mutex mutex_;
  Source source_;
  Options options_;
  live_ranges<std::uint64_t> live_;  // payload: the requested alignment
  space_stats stats_;
};

/// Returns why a copy between a range of a space and bytes elsewhere is impossible, before it begins.
template <class Space>
[[nodiscard]] result<void> check_copy(const Space& space, const char* where, typename Space::range_type ours,
                                      const std::byte* to, std::uint64_t to_bytes, const std::byte* from,
                                      std::uint64_t from_bytes) noexcept {
  if (to_bytes != from_bytes)
    return failure{.code = errc::size_mismatch, .wanted = to_bytes, .found = from_bytes, .where = where};
  if (ours.bytes != 0 && !space.holds(ours))
    return failure{.code = errc::dead_range, .wanted = ours.bytes, .where = where};
  const auto a = reinterpret_cast<std::uintptr_t>(to);
  const auto b = reinterpret_cast<std::uintptr_t>(from);
  const std::uint64_t apart = a > b ? a - b : b - a;
  if (apart >= to_bytes) return {};
  return failure{
      .code = errc::overlapping_ranges, .wanted = to_bytes, .found = to_bytes - apart, .where = where};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
