/// @file
/// `kv_handover`: keys and values of sequences from prefill ranks to decode ranks, layer by layer, between
/// any two splits of the model.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/offload/share_packer.hpp>
#include <llmmem/paging/kv_split.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How a `kv_handover` is set up.
struct kv_handover_options {
  std::uint64_t max_tokens = 8192;   ///< the most tokens of one call; decides the staging memory
  std::uint32_t tag = 0x6B76'0000;   ///< the tag of its messages: nothing else uses it at the same time
  std::string name = "kv_handover";  ///< the name in error texts
  metadata_source metadata{};        ///< source of its staging memory
};

/// The tokens of one layer of one sequence that a call sends or receives.
struct kv_handover_part {
  std::uint64_t request = 0;  ///< the engine's number of the sequence, the same on both sides
  std::uint32_t layer = 0;
  token_range range{};
};

/// Runs a `kv_split_plan` over a transport. Prefill ranks call `send` for each layer as soon as its kernels
/// are done, decode ranks call `receive` in the same order: a receiver can attend with a layer while the next
/// ones are still computed.
///
///     kv_handover handover(ranks, plan, prefill_ranks, decode_ranks);
///     for (layer ...) handover.send({request, layer, {0, tokens}}, memory, blocks, ranks.after(one_second));
///
/// Blocks are the sequence's table on this rank. A receiver takes them from its allocator (`extend`), limits
/// its commits (`limit_commits`), and commits when all layers have arrived.
///
/// Each message carries the request, layer, tokens, share and plan, and a CRC-32C. `receive` verifies a
/// message before it writes any of it.
///
/// Memory is the host's, or a device's with an `offload::executor_packer`: `send` packs a share on the stream
/// behind the layer's fence while the one before is sent, and `receive_async` returns the fence behind which
/// the layer is in the blocks. Kernels that read the blocks follow the last layer's fence, and so does the
/// `commit`; blocks that are given up before it go back by `release_after`.
///
/// @tparam Packer  moves shares between memory and staging.
/// @par Complexity   O(bytes): one copy on each side, in addition to those of the transport. The staging
///   memory of a `host_packer` holds the largest share of `max_tokens` and is allocated once.
/// @par Thread safety   one thread at a time, which owns the transport.
/// @par Waits    `send` and `receive` wait for the other side until `by`; `revoke` of the transport ends
///   waits. They also wait for the packer's copies of the slots that they use. A call that fails, and the
///   destructor, wait for the copies under way.
/// @par Errors   those of the transport, of the packer, and of `kv_split_plan::pack`;
///   `errc::message_damaged` for bytes that differ from those sent; `errc::unexpected_part` for another
///   request, layer, range or plan than expected; `errc::out_of_range` for more than `max_tokens`. The shares
///   before the failed one have been written: receive the layer again, or compute it.
template <transport T, offload::share_packer Packer = offload::host_packer>
class kv_handover {
 public:
  using fence_type = typename Packer::fence_type;

  /// @param senders    the transport's rank of each layout in the plan's `from`, in order; `receivers` of its
  ///   `to`.
  /// @throws argument_error  for lists of other lengths than the plan's, ranks that the transport lacks, and
  ///   a rank on both sides, which copies its own shares with `pack` and `unpack`.
  kv_handover(T& ranks, paging::kv_split_plan plan, std::span<const rank_id> senders,
              std::span<const rank_id> receivers, kv_handover_options options = {}, Packer packer = {});
  kv_handover(kv_handover&&) noexcept = default;
  kv_handover& operator=(kv_handover&&) = delete;
  ~kv_handover() { settle(); }

  /// Sends this rank's shares of a part, in the plan's order.
  /// @param after  the layer is computed when it has passed.
  result<void> send(const kv_handover_part& part, const kv_memory& memory, std::span<const block_id> blocks,
                    deadline by, const fence_type& after = {});
  /// Receives this rank's shares of a part, in the plan's order.
  result<void> receive(const kv_handover_part& part, const kv_memory& memory,
                       std::span<const block_id> blocks, deadline by);
  /// Receives them, and returns the fence behind which they are in the blocks, and all parts received before.
  result<fence_type> receive_async(const kv_handover_part& part, const kv_memory& memory,
                                   std::span<const block_id> blocks, deadline by);

  [[nodiscard]] const paging::kv_split_plan& plan() const noexcept LLMMEM_LIFETIMEBOUND { return plan_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return packer_.staging_bytes(); }

 private:
  /// What follows a share's bytes in a message.
  struct trailer {
    std::uint64_t plan = 0;
    std::uint64_t request = 0;
    std::uint64_t first = 0;
    std::uint64_t end = 0;
    std::uint32_t layer = 0;
    std::uint32_t share = 0;
    std::uint32_t unused = 0;
    std::uint32_t crc = 0;  // of all before it
  };
  static_assert(sizeof(trailer) == 48);
  /// What a slot of the packer is in use for.
  struct slot_use {
    fence_type fence{};     // of the last copy
    std::size_t share = 0;  // that is packed into it, to be sent
    std::uint64_t bytes = 0;
    bool is_to_send = false;
  };

  [[nodiscard]] trailer expected(std::size_t share, const kv_handover_part& part) const noexcept {
    return {.plan = plan_.fingerprint(),
            .request = part.request,
            .first = part.range.first,
            .end = part.range.end,
            .layer = part.layer,
            .share = static_cast<std::uint32_t>(share)};
  }
  [[nodiscard]] result<void> check(std::span<const std::byte> message, const trailer& here,
                                   rank_id sender) const noexcept;
  void check_side(std::span<const rank_id> side, std::size_t layouts, const char* name) const;
  [[nodiscard]] failure refusal(error_code code, std::uint64_t index, std::uint64_t wanted,
                                std::uint64_t found) const noexcept {
    return {code, static_cast<std::uint32_t>(index), wanted, found, options_.name.c_str()};
  }
  template <class Act>
  result<void> each_share(std::span<const rank_id> side, std::uint32_t paging::kv_share::* place,
                          const kv_handover_part& part, Act&& act);
  [[nodiscard]] std::uint32_t take_slot() noexcept {
    const std::uint32_t slot = next_;
    next_ = (next_ + 1) % static_cast<std::uint32_t>(slots_.size());
    return slot;
  }
  result<void> send_packed(std::uint32_t slot, const kv_handover_part& part, deadline by);
  void settle() noexcept {
    for (slot_use& each : slots_) {
      static_cast<void>(packer_.wait(each.fence));
      each = {};
    }
  }

  T* ranks_;
  paging::kv_split_plan plan_;
  std::vector<rank_id> senders_;
  std::vector<rank_id> receivers_;
  kv_handover_options options_;
  Packer packer_;
  std::vector<slot_use> slots_;
  std::uint32_t next_ = 0;  // the slot of the next share
  fence_type last_{};       // of the last share that was received
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/pool/detail/kv_handover_body.hpp>
