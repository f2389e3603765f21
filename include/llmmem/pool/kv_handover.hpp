/// @file
/// `kv_handover`: keys and values of sequences from prefill ranks to decode ranks, layer by layer, between
/// any two splits of the model.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/named_range.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/kv_split.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
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
/// @par Complexity   O(bytes): one copy on each side, in addition to those of the transport. The staging
///   memory holds the largest share of `max_tokens` and is allocated once.
/// @par Thread safety   one thread at a time, which owns the transport.
/// @par Waits    `send` and `receive` wait for the other side until `by`; `revoke` of the transport ends
/// waits.
/// @par Errors   those of the transport, and of `kv_split_plan::pack`; `errc::message_damaged` for bytes that
///   differ from those sent; `errc::unexpected_part` for another request, layer, range or plan than
///   expected; `errc::out_of_range` for more than `max_tokens`. The shares before the failed one have been
///   written: receive the layer again, or compute it.
template <transport T>
class kv_handover {
 public:
  /// @param senders    the transport's rank of each layout in the plan's `from`, in order; `receivers` of its
  ///   `to`.
  /// @throws argument_error  for lists of other lengths than the plan's, ranks that the transport lacks, and
  ///   a rank on both sides, which copies its own shares with `pack` and `unpack`.
  kv_handover(T& ranks, paging::kv_split_plan plan, std::span<const rank_id> senders,
              std::span<const rank_id> receivers, kv_handover_options options = {});

  /// Sends this rank's shares of a part, in the plan's order.
  result<void> send(const kv_handover_part& part, const kv_memory& memory, std::span<const block_id> blocks,
                    deadline by);
  /// Receives this rank's shares of a part, in the plan's order.
  result<void> receive(const kv_handover_part& part, const kv_memory& memory,
                       std::span<const block_id> blocks, deadline by);

  [[nodiscard]] const paging::kv_split_plan& plan() const noexcept LLMMEM_LIFETIMEBOUND { return plan_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return staging_.size(); }

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

  T* ranks_;
  paging::kv_split_plan plan_;
  std::vector<rank_id> senders_;
  std::vector<rank_id> receivers_;
  kv_handover_options options_;
  detail::fixed_array<std::byte> staging_;
};

template <transport T>
kv_handover<T>::kv_handover(T& ranks, paging::kv_split_plan plan, std::span<const rank_id> senders,
                            std::span<const rank_id> receivers, kv_handover_options options)
    : ranks_(&ranks),
      plan_(std::move(plan)),
      senders_(senders.begin(), senders.end()),
      receivers_(receivers.begin(), receivers.end()),
      options_(std::move(options)) {
  check_side(senders_, plan_.senders(), "senders");
  check_side(receivers_, plan_.receivers(), "receivers");
  for (const rank_id each : senders_) {
    if (std::ranges::find(receivers_, each) != receivers_.end())
      throw argument_error(
          options_.name + ": rank " + std::to_string(to_index(each)) +
          " is on both sides; copy its own shares with pack() and unpack(), and leave it out");
  }
  std::uint64_t largest = 0;
  for (const paging::kv_share& each : plan_.shares())
    largest = std::max(largest, plan_.token_bytes(each));
  const std::uint64_t bytes =
      checked_add(checked_multiply(largest, options_.max_tokens, "kv_handover: staging"), sizeof(trailer),
                  "kv_handover: staging");
  staging_ = {bytes, options_.metadata, "kv_handover: staging"};
}

template <transport T>
void kv_handover<T>::check_side(std::span<const rank_id> side, std::size_t layouts, const char* name) const {
  if (side.size() != layouts)
    throw argument_error(options_.name + ": " + std::to_string(side.size()) + " " + name +
                         ", but the plan has " + std::to_string(layouts) + "; give the rank of each layout");
  for (const rank_id each : side) {
    if (to_index(each) >= to_number(ranks_->world()))
      throw argument_error(options_.name + ": rank " + std::to_string(to_index(each)) + " of " + name +
                           ", but the transport has " + std::to_string(to_number(ranks_->world())) +
                           " ranks");
  }
}

/// Calls `act(share number, message)` for the shares of this rank on a side.
template <transport T>
template <class Act>
result<void> kv_handover<T>::each_share(std::span<const rank_id> side,
                                        std::uint32_t paging::kv_share::* place, const kv_handover_part& part,
                                        Act&& act) {
  if (part.range.first > part.range.end || part.range.end - part.range.first > options_.max_tokens)
    return refusal(errc::out_of_range, 0, part.range.end - part.range.first, options_.max_tokens);
  const std::span<const paging::kv_share> shares = plan_.shares();
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (side[shares[i].*place] != ranks_->rank()) continue;
    const std::uint64_t bytes = plan_.bytes(shares[i], part.range);
    if (bytes == 0) continue;
    const std::span<std::byte> message(staging_.data(), static_cast<std::size_t>(bytes + sizeof(trailer)));
    if (auto done = act(i, message); !done) return done;
  }
  return {};
}

template <transport T>
result<void> kv_handover<T>::send(const kv_handover_part& part, const kv_memory& memory,
                                  std::span<const block_id> blocks, deadline by) {
  const detail::named_range range("kv_handover send");
  return each_share(
      senders_, &paging::kv_share::from, part, [&](std::size_t i, std::span<std::byte> message) {
        const paging::kv_share& share = plan_.shares()[i];
        const std::size_t bytes = message.size() - sizeof(trailer);
        if (auto done = plan_.pack(share, part.layer, part.range, memory, blocks, message.first(bytes));
            !done)
          return done;
        trailer end = expected(i, part);
        std::memcpy(message.data() + bytes, &end, sizeof(end));
        end.crc = crc32c(0, message.first(message.size() - sizeof(end.crc)));
        std::memcpy(message.data() + bytes, &end, sizeof(end));
        return ranks_->send(message, receivers_[share.to], options_.tag, by);
      });
}

template <transport T>
result<void> kv_handover<T>::receive(const kv_handover_part& part, const kv_memory& memory,
                                     std::span<const block_id> blocks, deadline by) {
  const detail::named_range range("kv_handover receive");
  return each_share(receivers_, &paging::kv_share::to, part,
                    [&](std::size_t i, std::span<std::byte> message) {
                      const paging::kv_share& share = plan_.shares()[i];
                      const rank_id sender = senders_[share.from];
                      if (auto done = ranks_->recv(message, sender, options_.tag, by); !done) return done;
                      if (auto right = check(message, expected(i, part), sender); !right) return right;
                      return plan_.unpack(share, part.layer, part.range, memory, blocks,
                                          message.first(message.size() - sizeof(trailer)));
                    });
}

template <transport T>
result<void> kv_handover<T>::check(std::span<const std::byte> message, const trailer& here,
                                   rank_id sender) const noexcept {
  trailer there;
  std::memcpy(&there, message.data() + message.size() - sizeof(there), sizeof(there));
  const std::uint32_t crc = crc32c(0, message.first(message.size() - sizeof(there.crc)));
  if (crc != there.crc) return refusal(errc::message_damaged, to_index(sender), there.crc, crc);
  const auto differs = [&](std::uint64_t theirs, std::uint64_t ours) {
    return refusal(errc::unexpected_part, to_index(sender), theirs, ours);
  };
  if (there.plan != here.plan) return differs(there.plan, here.plan);
  if (there.request != here.request) return differs(there.request, here.request);
  if (there.layer != here.layer) return differs(there.layer, here.layer);
  if (there.first != here.first) return differs(there.first, here.first);
  if (there.end != here.end) return differs(there.end, here.end);
  if (there.share != here.share) return differs(there.share, here.share);
  return {};
}

}  // namespace v0
}  // namespace llmmem
