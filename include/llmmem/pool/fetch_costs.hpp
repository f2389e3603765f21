/// @file
/// `pool::fetch_costs`: what it costs a node of a pool to bring blocks of other nodes.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/offload/load_choice.hpp>
#include <llmmem/transfer/link_model.hpp>

namespace llmmem {
inline namespace v0 {
namespace pool {

/// What moving and computing cost at this moment. A link of 0 bytes per second costs nothing.
///
/// A fetch takes as long as its slowest link. All links work at the same time: one from each node that sends,
/// `inward`, which carries what all of them send, and those of this node's tiers.
struct fetch_costs {
  /// This node's tiers, the time to compute a token, and whether layers are computed while others arrive.
  offload::load_costs load{};
  link_model message{};  ///< from a node that sends its blocks; the latency is that of a request
  link_model read{};     ///< from a node whose memory the pool's mover reads
  link_model inward{};   ///< from all nodes together into this one: its network card
  /// Null, or returns the link from one node, in place of `message` and `read`: for racks and sites.
  link_model (*link_from)(void* context, seat_id seat, bool is_read) noexcept = nullptr;
  void* context = nullptr;

  [[nodiscard]] link_model link_of(seat_id seat, bool is_read) const noexcept {
    if (link_from != nullptr) return link_from(context, seat, is_read);
    return is_read ? read : message;
  }
};

}  // namespace pool
}  // namespace v0
}  // namespace llmmem
