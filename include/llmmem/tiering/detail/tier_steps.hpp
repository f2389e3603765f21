/// @file
/// What the steps of a `tiered_buffer` work with: transfers and staging slots, how far an attempt got, and a
/// walk through a queue of slots.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/detail/tier_state.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Bytes under way over one edge.
struct tier_transfer {
  std::uint32_t chunk = no_index;
  std::uint32_t edge = 0;
  bool stores = false;
  bool then_drops = false;
  bool demotes = false;            // what beneath has, too: it may fail
  bool in_advance = false;         // a prefetch
  bool found_under_way = false;    // a lease came to wait for it after it had begun
  std::uint32_t stage = no_index;  // staging slot
};

/// Whether that transfer's failure is what keeps a chunk from where it should go: its own bytes did not come,
/// or what was to make room for it could not leave.
[[nodiscard]] constexpr bool is_in_the_way(const tier_transfer& failed, std::uint32_t slot,
                                           bool needs_contents) noexcept {
  const bool is_own = failed.chunk == slot;
  if (!failed.stores) return is_own && needs_contents;
  return failed.then_drops && !failed.demotes && !(is_own && failed.edge == 0);
}

/// Memory in which a chunk is encoded or decoded.
struct staging_slot {
  tier_copy place;
  std::uint64_t bytes = 0;        // of the encoded form
  std::uint32_t user = no_index;  // transfer
};

/// Which way a chunk passes a tier.
enum class passage : std::uint8_t { up, down };

/// What a chunk that parts from its clones begins with.
enum class parting : std::uint8_t {
  empty,  ///< a place in the last tier
  anew,   ///< one in tier 0 as well, for what will be written
  copied  ///< and there what was shared
};

/// Goes through a queue of slots once, taking out some; the rest stays in order, whatever is thrown.
class slot_sieve {
 public:
  slot_sieve(fixed_array<std::uint32_t>& queue, std::uint32_t& count) noexcept
      : queue_(queue), count_(count), end_(count) {}
  slot_sieve(const slot_sieve&) = delete;
  slot_sieve& operator=(const slot_sieve&) = delete;
  ~slot_sieve() {
    while (next_ != end_)
      static_cast<void>(next());
    count_ = kept_;
  }
  [[nodiscard]] bool has_next() const noexcept { return next_ != end_; }
  std::uint32_t next() noexcept { return queue_[kept_++] = queue_[next_++]; }
  /// The last `next` leaves the queue.
  void take_out() noexcept { --kept_; }

 private:
  fixed_array<std::uint32_t>& queue_;
  std::uint32_t& count_;
  std::uint32_t end_;
  std::uint32_t next_ = 0;
  std::uint32_t kept_ = 0;
};

/// What became of an attempt: done, not before transfer `on` has ended, or not at all. A prefetch may also
/// be blocked by no transfer: until a lease ends, say.
struct attempt {
  enum class kind : std::uint8_t { done, blocked, failed };
  kind how = kind::done;
  std::uint32_t on = no_index;
  failure why;

  [[nodiscard]] static attempt blocked(std::uint32_t on) noexcept { return {kind::blocked, on, {}}; }
  [[nodiscard]] static attempt failed(const failure& why) noexcept { return {kind::failed, no_index, why}; }
  [[nodiscard]] bool is_done() const noexcept { return how == kind::done; }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
