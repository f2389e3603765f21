/// @file
/// When a chunk's next use is expected, by how often iterations have used it: for programs that draw what
/// they use.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/tiering/access.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Counts uses by iteration, and forecasts each chunk's next one. A plan cannot know this for routed experts:
/// their draw differs in every batch, although the same ones are popular.
///
/// A chunk's *rate* is its uses per iteration, averaged over the last `memory` iterations with weights that
/// fall off exponentially, over all of them while they are fewer. In an iteration of L uses, a chunk of rate
/// r is expected L / r uses after its last one. At the beginning of an iteration that did not use it, it is
/// expected as much after its place in that iteration as it is likely to be passed over (draws are
/// independent of the past: the time waited counts for nothing). For equal sizes, dropping the chunk expected
/// last thus keeps those used most often, and forgets those that were once popular after about `memory`
/// iterations. Positions count uses, from 0: hints for `min_eviction`.
///
/// @par Complexity      `used` and `next_use` O(1), `begin_iteration` O(chunks); 24 bytes a chunk, allocated
///                      in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
class use_forecast {
 public:
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  /// @param memory  iterations that count, 1 to 2^16: a smaller value follows a change sooner, a larger one
  ///                estimates better while there is none.
  explicit use_forecast(std::size_t chunks, std::uint32_t memory = 16)
      : memory_(std::clamp<std::uint32_t>(memory, 1, 1U << 16)), chunks_(chunks) {}

  /// Begins another iteration, to which the next uses belong.
  void begin_iteration() noexcept {
    if (position_ == began_) return;  // nothing happened in the one before
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

  /// Notes that the program uses `chunk` now.
  void used(chunk_id chunk) noexcept {
    chunk_uses& own = chunks_[to_index(chunk)];
    if (own.uses != ~std::uint32_t{0}) ++own.uses;
    own.last = position_++;
  }

  /// Returns the position at which `chunk` is expected next; `never` if it was not used yet.
  [[nodiscard]] std::uint64_t next_use(chunk_id chunk) const noexcept {
    const chunk_uses& own = chunks_[to_index(chunk)];
    if (own.last == never) return never;
    const std::uint64_t length = std::max<std::uint64_t>(length_ != 0 ? length_ : position_, 1);
    // What this iteration has used will be in the rate when it ends.
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
  static constexpr std::uint64_t one = std::uint64_t{1} << 24;  // a rate of one use an iteration
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
