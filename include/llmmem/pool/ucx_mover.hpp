/// @file
/// `ucx_mover`: the nodes of a pool read each other's first tier through UCX. Needs UCX (1.13 or newer).
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<ucp/api/ucp.h>)
#error "llmmem/pool/ucx_mover.hpp needs UCX: install libucx-dev and link llmmem::ucx."
#endif

#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/pool/detail/block_export.hpp>
#include <llmmem/pool/detail/region_source.hpp>
#include <llmmem/pool/detail/ucx_objects.hpp>
#include <llmmem/pool/errors.hpp>
#include <llmmem/pool/mover.hpp>
#include <llmmem/pool/ucx_types.hpp>
#include <llmmem/space/host.hpp>

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Reads blocks of other nodes by UCX, over the lane that its options claim, and over no other.
///
///     ucx_mover mover({.bytes = budget, .blocks = slots, .block_bytes = bytes, .lane =
///     ucx_lane::shared_memory}); kv_tiers tiers(cache, layout_mover(...), {...},
///     offload::kv_tier(mover.space(), budget)); kv_pool pool(tiers, end, mover, {.model =
///     layout.content_fingerprint()});
///
/// UCX chooses transports by itself, and falls back to slower ones without a word. So the mover allows UCX
/// those of the claimed lane alone, reads after each introduction which ones UCX uses (`lanes_of`), and
/// refuses a node over others: `errc::mover_lane_differs` in `why`. Its blocks come by message then.
///
/// | lane | how | declares |
/// |---|---|---|
/// | `shared_memory` | gathers by `ucp_rkey_ptr` in memory that UCX allocated | one-sided, no owner progress
/// | | `tcp` | `ucp_get_nbx`, which UCX 1.13 emulates by messages to the owner | not one-sided | | `rdma` |
/// `ucp_get_nbx` by the network card | one-sided; never measured by this project |
///
/// Over `tcp` a read ends only while its owner calls `progress`, and is slower than `pool::message_mover`:
/// take it where UCX is the only way between the nodes.
///
/// **A peer that dies** fails its reads: endpoints are in UCX's peer error mode, shared memory with
/// `MM_ERROR_HANDLING`, and the pool's own death report closes the connection. Reads by `get` arrive in
/// landing buffers of the mover, so that a read that was given up writes to no slot; the buffer is used again
/// when UCX has ended the read.
///
/// **Trust.** The pool's sizes, offsets and contents are checked as by any mover. The address and the key in
/// an introduction are UCX's own, and its parser trusts them: the mover checks their lengths and a CRC-32C.
/// Segments of shared memory are not sealed. Use it between processes that trust each other's UCX.
///
/// @par Complexity      over shared memory as `shared_memory_mover`; by `get` three round trips a block.
/// @par Thread safety   its space any number of threads; the rest one thread, that of its pool.
/// @par Errors          the constructor throws `length_error` for sizes of 0, and `comm_error` when UCX
///                      refuses the lane or the memory.
/// @par Source          UCX 1.13: select.c (no RMA lane over tcp), mm_iface.c (errors of shared memory);
///                      openucx/ucx#8477, #10016 (shared memory leaves silently in peer error mode).
class ucx_mover {
 public:
  static constexpr bool moves_by_message = false;
  using space_type = basic_host_space<detail::region_source>;

  explicit ucx_mover(const ucx_options& options);
  ~ucx_mover();
  ucx_mover(const ucx_mover&) = delete;
  ucx_mover& operator=(const ucx_mover&) = delete;

  /// The memory that other nodes can read: for the first tier. Its ranges end before the mover.
  [[nodiscard]] space_type& space() noexcept LLMMEM_LIFETIMEBOUND { return *space_; }
  /// Returns the last refusal of another node's memory.
  [[nodiscard]] failure why() const noexcept { return why_; }
  /// Returns the transports that UCX uses to a node, as `posix` or `tcp`; empty if there is no connection.
  [[nodiscard]] std::string lanes_of(seat_id seat) const {
    return reaches(seat) ? others_[to_index(seat)]->by.lanes() : std::string();
  }
  /// Returns the reads whose landing buffers are in use, given-up ones included.
  [[nodiscard]] std::size_t open_reads() const noexcept;

  /// @name What a `pool_mover` has
  /// @{
  [[nodiscard]] pool::mover_limits limits() const noexcept {
    const bool is_direct = options_.lane == ucx_lane::shared_memory;
    const bool is_tcp = options_.lane == ucx_lane::tcp;
    return {.one_sided = !is_tcp,
            .needs_owner_progress = is_tcp,
            .max_piece = is_direct ? max_bytes : options_.block_bytes};
  }
  [[nodiscard]] bool can_offer(std::span<const std::byte> bytes) const noexcept {
    return index_.holds(bytes);
  }
  [[nodiscard]] std::span<const std::byte> introduction() const noexcept LLMMEM_LIFETIMEBOUND {
    return introduction_;
  }
  result<void> attach(seat_id seat, std::span<const std::byte> bytes) noexcept;
  void detach(seat_id seat) noexcept;
  [[nodiscard]] bool reaches(seat_id seat) const noexcept {
    if (to_index(seat) >= others_.size() || !others_[to_index(seat)]) return false;
    const other& of = *others_[to_index(seat)];
    return of.base != nullptr || !of.by.is_broken();
  }
  bool offer(const block_key& name, std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
    if (!index_.holds(bytes)) return false;
    index_.put(name, bytes, crc);
    return true;
  }
  [[nodiscard]] bool is_offered(const block_key& name) const noexcept { return index_.has(name); }
  void withdraw(const block_key& name) noexcept { index_.remove(name); }
  void withdraw_all() noexcept { index_.clear(); }
  pool::moved fetch(seat_id seat, const block_key& name, std::span<std::byte> into,
                    const pool::move_ticket& ticket) noexcept;
  void drop(const pool::move_ticket& ticket) noexcept;
  template <class F>
  void progress(F&& on_end) noexcept;
  /// @}

 private:
  /// Another node's memory.
  struct other {
    detail::ucx_peer by{};
    std::vector<std::byte> what{};  // its introduction
    detail::export_shape shape{};
    std::uint64_t remote = 0;   // where its memory begins, in its own addresses
    std::byte* base = nullptr;  // and in this process, if UCX maps it
    std::uint32_t readers = 0;  // landing buffers of reads that have not ended
  };
  /// The part of an introduction before the address and the key.
  struct introduced {
    std::uint64_t kind = 0x7563'786D'6F76'6572;  // of this mover
    std::uint64_t nonce_low = 0;
    std::uint64_t nonce_high = 0;
    std::uint64_t remote = 0;
    detail::export_shape shape{};
    std::uint32_t address_bytes = 0;
    std::uint32_t key_bytes = 0;
    std::uint32_t crc = 0;  // of the address and the key
    std::uint32_t unused = 0;
  };
  /// A read by `get`: the bucket, the block, the bucket's entry again.
  struct reading {
    enum class stage : std::uint8_t { none, bucket, block, entry };
    stage at = stage::none;
    bool is_dropped = false;
    std::uint8_t choice = 0;  // of the two buckets
    std::uint8_t place = 0;   // of the entry in its bucket
    void* request = nullptr;  // UCX's, null when it has ended
    other* of = nullptr;
    std::span<std::byte> into{};
    pool::move_ticket ticket{};
    block_key name{};
    detail::export_bucket bucket{};
    detail::export_entry again{};
    std::vector<std::byte> landing{};
  };

  [[nodiscard]] failure refused(seat_id seat, error_code code, std::uint64_t wanted, int error,
                                const std::string& where) noexcept {
    why_ = {.code = code,
            .index = to_index(seat),
            .wanted = wanted,
            .found = static_cast<std::uint64_t>(error),
            .where = where};
    return why_;
  }
  [[nodiscard]] bool is_claimed(const std::string& lanes) const noexcept;
  [[nodiscard]] bool begin(reading& of, reading::stage at) noexcept;
  [[nodiscard]] std::optional<pool::moved> proceed(reading& of) noexcept;
  [[nodiscard]] std::optional<pool::moved> take(reading& of) noexcept;
  void end_closed() noexcept;

  ucx_options options_;
  detail::ucx_worker worker_;
  std::optional<detail::ucx_memory> memory_;
  std::optional<space_type> space_;
  detail::export_index index_;
  std::vector<std::byte> introduction_;
  std::vector<reading> readings_;
  std::vector<std::unique_ptr<other>> others_;   // by seat
  std::vector<std::unique_ptr<other>> closing_;  // until UCX has ended what was open
  failure why_{};
};

static_assert(pool_mover<ucx_mover>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/pool/detail/ucx_mover_body.hpp>
