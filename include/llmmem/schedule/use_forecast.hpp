/// @file
/// Forecasts a chunk's next use from how often iterations have used it, for programs whose iterations use
/// different chunks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/tiering/access.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Counts uses by iteration, and forecasts each chunk's next use. A plan cannot foresee the uses of routed
/// experts: every batch chooses other experts, although the same ones stay popular.
///
/// A chunk's *rate* is its uses per iteration, averaged over about the last `memory` iterations with
/// exponentially falling weights, or over all iterations while there are fewer. In an iteration of L uses,
/// the forecast for a chunk of rate r is L / r uses after its last use. If the present iteration has not used
/// the chunk yet, the forecast is the chunk's place in this iteration plus the part of L / r above L: draws
/// are independent of the past, so the time already waited has no effect. So with equal sizes, dropping the
/// chunk with the latest forecast keeps the chunks used most often, and forgets formerly popular ones after
/// about `memory` iterations. Positions count uses, from 0: hints for `min_eviction`.
///
/// @par Complexity      `used` and `next_use` O(1), `begin_iteration` O(chunks); 24 bytes a chunk, allocated
///                      in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
class use_forecast {
 public:
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  /// @param memory  iterations that count, 1 to 2^16: a smaller value follows a change sooner, a larger value
  ///                estimates better without changes.
  explicit use_forecast(std::size_t chunks, std::uint32_t memory = 16)
      : memory_(std::clamp<std::uint32_t>(memory, 1, 1U << 16)), chunks_(chunks) {}

  /// Begins the next iteration, to which later uses belong.
  void begin_iteration() noexcept {
    if (position_ == began_) return;  // the iteration before had no uses
    length_ = position_ - began_;
    began_ = position_;
    ++iterations_;
    const std::uint64_t share = std::min<std::uint64_t>(iterations_, memory_);
    for (chunk_uses& each : chunks_) {
      const std::uint64_t fresh = std::uint64_t{each.uses} * one;
      each.rate = each.rate >= fresh ? each.rate - (each.rate - fresh) / share
                                     : each.rate + (fresh - each.rate) / share;
      each.uses = 0;
    }
  }

  /// Records that the program uses `chunk` now.
  void used(chunk_id chunk) noexcept {
    chunk_uses& own = chunks_[to_index(chunk)];
    if (own.uses != ~std::uint32_t{0}) ++own.uses;
    own.last = position_++;
  }

  /// Returns the forecast position of the next use of `chunk`; `never` if it was not used yet.
  [[nodiscard]] std::uint64_t next_use(chunk_id chunk) const noexcept {
    const chunk_uses& own = chunks_[to_index(chunk)];
    if (own.last == never) return never;
    const std::uint64_t length = std::max<std::uint64_t>(length_ != 0 ? length_ : position_, 1);
    // Counts the uses of this iteration as they will count in the rate when it ends.
    const std::uint64_t share = std::min<std::uint64_t>(iterations_ + 1, memory_);
    const std::uint64_t rate = std::max<std::uint64_t>(own.rate + std::uint64_t{own.uses} * one / share, 1);
    const std::uint64_t gap = std::min(length, most_length) * one / rate;
    if (own.last >= began_) return own.last + gap;
    const std::uint64_t rounds = (began_ - own.last + length - 1) / length;
    return own.last + rounds * length + gap - std::min(gap, length);
  }

  /// Returns the number of counted uses.
  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }

 private:
  static constexpr std::uint64_t one = std::uint64_t{1} << 24;  // a rate of one use per iteration
  static constexpr std::uint64_t most_length = ~std::uint64_t{0} / one;

  struct chunk_uses {
    std::uint64_t rate = 0;
    std::uint64_t last = never;
    std::uint32_t uses = 0;  // in this iteration
  };

  std::uint32_t memory_;
  std::vector<chunk_uses> chunks_;
  std::uint64_t position_ = 0;
  std::uint64_t began_ = 0;   // position at which this iteration began
  std::uint64_t length_ = 0;  // uses in the previous iteration
  std::uint64_t iterations_ = 0;
};

}  // namespace v0
}  // namespace llmmem
