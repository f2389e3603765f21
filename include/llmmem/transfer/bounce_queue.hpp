/// @file
/// `bounce_queue`: copies between two spaces that the host cannot access, through a staging ring of host
/// memory.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/transfer/file_copy.hpp>
#include <llmmem/transfer/transfer_fence.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The construction parameters of a bounce queue.
struct bounce_options {
  std::uint64_t budget_bytes = std::uint64_t{8} << 20;  ///< host memory of the ring, allocated at once; never
                                                        ///< more
  std::uint64_t slot_bytes = std::uint64_t{1} << 20;    ///< most bytes of a piece; the budget determines the
                                                        ///< number of slots
  std::uint64_t alignment = 4096;                       ///< of each slot: a page lets files be read directly
  std::uint32_t max_operations = 64;                    ///< the most operations in flight or waiting
  std::uint32_t max_failures = 64;                      ///< kept until concluded; at the limit it accepts
                                                        ///< nothing more
  std::string name = "bounce_queue";                    ///< the name in error texts
  metadata_source metadata{};
};

/// The counters of a bounce queue.
struct bounce_stats {
  std::uint64_t budget_bytes = 0;  ///< bytes of the ring, in whole slots
  std::uint64_t used_bytes = 0;    ///< bytes of slots with a piece in them
  std::uint64_t peak_bytes = 0;    ///< the maximum so far
  std::uint64_t lost_bytes = 0;    ///< bytes of slots never reused, because a device may still write there
  std::uint64_t bytes_down = 0;    ///< moved, regardless of the outcome of their operation
  std::uint64_t bytes_up = 0;      ///< as `bytes_down`
  std::uint64_t operations = 0;    ///< completed, successful or not
  std::uint64_t failures = 0;      ///< completed, and failed
  std::uint64_t metadata_bytes = 0;
};

/// The checksum of the bytes that an operation moves, computed while they are in host memory. Must live until
/// the operation is complete.
struct bounce_checksum {
  std::uint64_t bytes = 0;  ///< how many bytes count, from the first on; at most those moved
  std::uint32_t crc = 0;    ///< CRC-32C of these, once the operation has succeeded
};

/// Copies between two spaces, neither of which the host can access or that can copy directly to the other: a
/// device and a file, two files, two devices without a link. Each copy is divided into pieces, and each piece
/// takes two hops: from its source into a slot of the ring, and from there to its destination. As many pieces
/// are in flight as there are slots, so with two or more of them both links work at once.
///
///     file_space<uring_io> disk("nvme", {.budget = 1 << 30});
///     file_space<> share("nfs", {.budget = 1 << 30});
///     bounce_queue between(disk, share, host, {.budget_bytes = 8 << 20});
///     const auto sent = between.copy_down_async(there, here).value();
///     ...                                             // between.poll() now and then
///     sent.wait();
///
/// - **The budget is hard**: the constructor allocates the whole ring, and pieces that do not fit wait.
/// - **Order**: pieces of urgent operations first; with equal urgency, in the order of the requests.
/// - **Progress**: hops that have begun continue by themselves. The next hop of a piece, and the next piece,
///   begin in `copy_*_async`, `poll`, and while a thread waits for a fence.
/// - **Failures**: when a piece fails, no further piece of its operation begins; the operation is complete
///   when its pieces in flight are. Its destination then has a mix of old and new bytes.
///   `errc::completion_lost` only if a device may still write to the destination; a slot that it may still
///   write to is never reused.
///
/// @tparam Upper, Lower  spaces that are their own queues. "Down" is from the first to the second.
/// @tparam Staging       the space of the ring: host memory, or pinned memory that devices read at full
///   speed.
/// @par Complexity      a poll O(slots), and O(max_operations) for each piece that begins. No allocation
///   after construction.
/// @par Thread safety   one thread at a time, including waits for its fences.
/// @par Errors          the constructor throws `argument_error` for a budget smaller than one slot or an
///   alignment that is not a power of two, `out_of_memory` when `staging` lacks the memory. Everything else
///   is a value; exceptions of a space's copies become `errc::dependency_failed`.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
class bounce_queue {
 public:
  using fence_type = transfer_fence;
  using upper_range = typename Upper::range_type;
  using lower_range = typename Lower::range_type;
  static constexpr std::size_t max_after = 4;

  /// The spaces must outlive it, and `staging` must outlive the other two: a device may write to a lost slot
  /// until they are destroyed.
  bounce_queue(Upper& upper, Lower& lower, Staging& staging, bounce_options options = {});
  bounce_queue(const bounce_queue&) = delete;
  bounce_queue& operator=(const bounce_queue&) = delete;

  /// Waits for hops in flight, and begins no others.
  ~bounce_queue();

  /// Begins to copy `from` to `to`, when all of `after` have passed: fences of this queue or another, at most
  /// `max_after`. If one of them failed, the copy fails with `errc::dependency_failed`.
  ///
  /// Until it is complete both ranges belong to the copy. `errc::size_mismatch`, `errc::out_of_range` for
  /// more in `after`, `errc::table_full` beyond `max_operations`, `errc::failures_kept`, and
  /// `errc::out_of_bytes` when every slot is lost.
  /// @param checksum  of the bytes moved, optional.
  [[nodiscard]] result<transfer_fence> copy_down_async(lower_range to, upper_range from,
                                                       std::span<const transfer_fence> after = {},
                                                       transfer::urgency how = transfer::urgency::write_back,
                                                       bounce_checksum* checksum = nullptr) {
    return start(way::down, from, to, after, how, checksum);
  }
  [[nodiscard]] result<transfer_fence> copy_up_async(upper_range to, lower_range from,
                                                     std::span<const transfer_fence> after = {},
                                                     transfer::urgency how = transfer::urgency::demand,
                                                     bounce_checksum* checksum = nullptr) {
    return start(way::up, to, from, after, how, checksum);
  }

  /// Makes all possible progress. Never waits, except for an entry that another thread takes at the same time
  /// in a shared device queue.
  void poll() noexcept;
  /// Makes an operation more urgent. No effect once it is complete.
  void promote(const transfer_fence& of, transfer::urgency how) noexcept {
    if (!board_.gave(of) || of.ready()) return;
    transfer::urgency& had = operations_[transfer_board::slot_of(of)].how;
    if (how < had) had = how;
  }
  [[nodiscard]] bounce_stats stats() const noexcept;

 private:
  static constexpr std::uint32_t none = 0xFFFF'FFFFU;

  enum class way : std::uint8_t { down, up };

  /// The progress of a slot's piece.
  enum class hop : std::uint8_t {
    idle,     ///< no piece
    filling,  ///< being copied from the source
    filled,   ///< in the slot, and the destination's queue had no space yet
    leaving,  ///< being copied to the destination
    lost      ///< permanently unused
  };

  struct slot {
    hop at = hop::idle;
    std::uint32_t owner = none;
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
    std::uint64_t number = 0;  // the order in which hops began
    typename Upper::fence_type upper{};
    typename Lower::fence_type lower{};
  };

  struct operation {
    bool runs = false;
    way direction = way::down;
    transfer::urgency how = transfer::urgency::demand;
    std::uint32_t flying = 0;  // slots
    std::uint32_t after_count = 0;
    std::uint64_t number = 0;  // the order of the requests
    std::uint64_t begun = 0;   // bytes
    upper_range upper{};
    lower_range lower{};
    bounce_checksum* checksum = nullptr;
    failure why;
    std::array<transfer_fence, max_after> after{};
  };

  [[nodiscard]] static bounce_options checked(bounce_options options);
  [[nodiscard]] std::span<std::byte> bytes_of(std::uint32_t index) const noexcept {
    return ring_.range().span().subspan(static_cast<std::size_t>(index * options_.slot_bytes),
                                        static_cast<std::size_t>(slots_[index].bytes));
  }
  template <class Range>
  [[nodiscard]] static Range part(const Range& range, const slot& s) noexcept {
    return {range.data + s.begin, s.bytes};
  }

  [[nodiscard]] result<transfer_fence> start(way direction, upper_range upper, lower_range lower,
                                             std::span<const transfer_fence> after, transfer::urgency how,
                                             bounce_checksum* checksum);
  [[nodiscard]] bool has_begun_all(const operation& o) const noexcept { return o.begun == o.upper.bytes; }
  void begin_pieces() noexcept;
  [[nodiscard]] std::uint32_t next_operation() noexcept;
  [[nodiscard]] result<void> begin_hop(std::uint32_t index, bool at_upper) noexcept;
  [[nodiscard]] bool is_ready(const slot& s) const noexcept;
  [[nodiscard]] result<void> land(slot& s) noexcept;
  void step(std::uint32_t index, bool waits) noexcept;
  void arrived(std::uint32_t index) noexcept;
  void leave(std::uint32_t index) noexcept;
  void release(std::uint32_t index, hop now) noexcept;
  void fail(std::uint32_t owner, const failure& why) noexcept;
  void finish_if_over(std::uint32_t owner) noexcept;
  void await(const transfer_fence& awaited) noexcept;
  [[nodiscard]] bool is_at_upper(const slot& s) const noexcept {
    return (operations_[s.owner].direction == way::down) == (s.at == hop::filling);
  }

  bounce_options options_;
  Upper* upper_;
  Lower* lower_;
  space_buffer<Staging> ring_;
  transfer_board board_;
  std::vector<slot> slots_;
  detail::fixed_array<operation> operations_;
  std::uint64_t started_ = 0;
  std::uint64_t hops_ = 0;
  bounce_stats stats_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/transfer/detail/bounce_queue_body.hpp>
