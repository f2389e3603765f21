/// @file
/// Bodies of kv_handover.hpp. Only kv_handover.hpp includes it.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/detail/named_range.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/pool/kv_handover.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <transport T, offload::share_packer Packer>
kv_handover<T, Packer>::kv_handover(T& ranks, paging::kv_split_plan plan, std::span<const rank_id> senders,
                                    std::span<const rank_id> receivers, kv_handover_options options,
                                    Packer packer)
    : ranks_(&ranks),
      plan_(std::move(plan)),
      senders_(senders.begin(), senders.end()),
      receivers_(receivers.begin(), receivers.end()),
      options_(std::move(options)),
      packer_(std::move(packer)) {
  check_side(senders_, plan_.senders(), "senders");
  check_side(receivers_, plan_.receivers(), "receivers");
  for (const rank_id each : senders_) {
    if (std::ranges::find(receivers_, each) != receivers_.end())
      throw argument_error(
          options_.name + ": rank " + std::to_string(to_index(each)) +
          " is on both sides; copy its own shares with pack() and unpack(), and leave it out");
  }
  std::uint64_t largest = 0;
  std::uint64_t vectors = 0;
  for (const paging::kv_share& each : plan_.shares()) {
    largest = std::max(largest, plan_.token_bytes(each));
    vectors = std::max(vectors, plan_.token_vectors(each));
  }
  packer_.reserve(
      {.message_bytes = checked_add(checked_multiply(largest, options_.max_tokens, "kv_handover: staging"),
                                    sizeof(trailer), "kv_handover: staging"),
       .vectors = checked_multiply(vectors, options_.max_tokens, "kv_handover: list"),
       .metadata = options_.metadata,
       .name = options_.name});
  slots_.resize(packer_.slots());
}

template <transport T, offload::share_packer Packer>
void kv_handover<T, Packer>::check_side(std::span<const rank_id> side, std::size_t layouts,
                                        const char* name) const {
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

/// Calls `act(share number, bytes)` for the shares of this rank on a side.
template <transport T, offload::share_packer Packer>
template <class Act>
result<void> kv_handover<T, Packer>::each_share(std::span<const rank_id> side,
                                                std::uint32_t paging::kv_share::* place,
                                                const kv_handover_part& part, Act&& act) {
  if (part.range.first > part.range.end || part.range.end - part.range.first > options_.max_tokens)
    return refusal(errc::out_of_range, 0, part.range.end - part.range.first, options_.max_tokens);
  const std::span<const paging::kv_share> shares = plan_.shares();
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (side[shares[i].*place] != ranks_->rank()) continue;
    const std::uint64_t bytes = plan_.bytes(shares[i], part.range);
    if (bytes == 0) continue;
    if (auto done = act(i, bytes); !done) {
      settle();
      return done;
    }
  }
  return {};
}

template <transport T, offload::share_packer Packer>
result<void> kv_handover<T, Packer>::send(const kv_handover_part& part, const kv_memory& memory,
                                          std::span<const block_id> blocks, deadline by,
                                          const fence_type& after) {
  const detail::named_range range("kv_handover send");
  auto begun = each_share(
      senders_, &paging::kv_share::from, part, [&](std::size_t i, std::uint64_t bytes) -> result<void> {
        const std::uint32_t slot = take_slot();
        slot_use& use = slots_[slot];
        if (use.is_to_send) {  // the oldest share of this call
          if (auto sent = send_packed(slot, part, by); !sent) return sent;
        } else if (auto free = packer_.wait(use.fence); !free) {
          return free;
        }
        const auto fence =
            packer_.pack({plan_, plan_.shares()[i], part.layer, part.range, memory, blocks}, slot, after);
        if (!fence) return fence.error();
        use = {.fence = *fence, .share = i, .bytes = bytes, .is_to_send = true};
        return {};
      });
  for (std::size_t k = 0; begun && k < slots_.size(); ++k) {
    const std::uint32_t slot = take_slot();  // from the oldest one on
    if (slots_[slot].is_to_send) begun = send_packed(slot, part, by);
  }
  if (!begun) settle();
  return begun;
}

template <transport T, offload::share_packer Packer>
result<void> kv_handover<T, Packer>::send_packed(std::uint32_t slot, const kv_handover_part& part,
                                                 deadline by) {
  slot_use& use = slots_[slot];
  if (auto packed = packer_.wait(use.fence); !packed) return packed;
  const std::span<std::byte> message =
      packer_.slot(slot).first(static_cast<std::size_t>(use.bytes + sizeof(trailer)));
  trailer end = expected(use.share, part);
  std::byte* const at = message.data() + use.bytes;
  std::memcpy(at, &end, sizeof(end));
  end.crc = crc32c(0, message.first(message.size() - sizeof(end.crc)));
  std::memcpy(at, &end, sizeof(end));
  use.is_to_send = false;
  return ranks_->send(message, receivers_[plan_.shares()[use.share].to], options_.tag, by);
}

template <transport T, offload::share_packer Packer>
result<typename Packer::fence_type> kv_handover<T, Packer>::receive_async(const kv_handover_part& part,
                                                                          const kv_memory& memory,
                                                                          std::span<const block_id> blocks,
                                                                          deadline by) {
  const detail::named_range range("kv_handover receive");
  auto done = each_share(
      receivers_, &paging::kv_share::to, part, [&](std::size_t i, std::uint64_t bytes) -> result<void> {
        const std::uint32_t slot = take_slot();
        if (auto free = packer_.wait(slots_[slot].fence); !free) return free;
        const std::span<std::byte> message =
            packer_.slot(slot).first(static_cast<std::size_t>(bytes + sizeof(trailer)));
        const paging::kv_share& share = plan_.shares()[i];
        const rank_id sender = senders_[share.from];
        if (auto received = ranks_->recv(message, sender, options_.tag, by); !received) return received;
        if (auto right = check(message, expected(i, part), sender); !right) return right;
        const auto fence = packer_.unpack({plan_, share, part.layer, part.range, memory, blocks}, slot);
        if (!fence) return fence.error();
        slots_[slot].fence = last_ = *fence;
        return {};
      });
  if (!done) return done.error();
  return last_;
}

template <transport T, offload::share_packer Packer>
result<void> kv_handover<T, Packer>::receive(const kv_handover_part& part, const kv_memory& memory,
                                             std::span<const block_id> blocks, deadline by) {
  const auto fence = receive_async(part, memory, blocks, by);
  if (!fence) return fence.error();
  return packer_.wait(*fence);
}

template <transport T, offload::share_packer Packer>
result<void> kv_handover<T, Packer>::check(std::span<const std::byte> message, const trailer& here,
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
