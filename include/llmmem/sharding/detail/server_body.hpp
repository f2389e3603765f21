/// @file
/// The bodies of server.hpp.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/server.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

inline std::vector<rank_id> key_servers::replicas(tensor_id range) const {
  std::vector<rank_id> chain;
  const std::uint32_t length = std::min(followers_ + 1, living_);
  chain.reserve(length);
  for (std::uint32_t place = 0; chain.size() < length; ++place) {
    if (is_alive(candidate(range, place))) chain.push_back(candidate(range, place));
  }
  return chain;
}

inline bool key_servers::holds(tensor_id range, rank_id server) const noexcept {
  if (!is_alive(server)) return false;
  std::uint32_t ahead = 0;  // living servers of the chain, ahead of this one
  for (std::uint32_t place = 0; ahead <= followers_; ++place) {
    const rank_id at = candidate(range, place);
    if (at == server) return true;
    ahead += alive_[to_index(at)];
  }
  return false;
}

inline void key_servers::check_server(rank_id server, const char* name) const {
  if (to_index(server) < alive_.size()) return;
  throw argument_error(std::string(name) + ": server " + std::to_string(to_index(server)) +
                       ", and there are " + std::to_string(alive_.size()));
}

/// Chains lose servers only by a loss and gain them only by their return, so the difference of the two is
/// complete.
inline server_change key_servers::change_from(const key_servers& before) const {
  server_change result;
  for (std::uint32_t i = 0; i < ranges_; ++i) {
    const tensor_id range{i};
    const std::vector<rank_id> old_chain = before.replicas(range);
    const std::vector<rank_id> new_chain = replicas(range);
    if (old_chain == new_chain) continue;
    sharding::range_change change{.range = range,
                                  .owner_before = old_chain.front(),
                                  .owner_after = new_chain.front(),
                                  .copy_to = {},
                                  .drop_from = {},
                                  .copy_from = {}};
    const auto has = [](const std::vector<rank_id>& chain, rank_id server) {
      return std::ranges::find(chain, server) != chain.end();
    };
    const auto source = std::ranges::find_if(old_chain, [&](rank_id server) { return is_alive(server); });
    for (const rank_id server : new_chain) {
      if (!has(old_chain, server)) change.copy_to.push_back(server);
    }
    if (source == old_chain.end()) {
      result.lost_ranges.push_back(range);
      change.copy_from = change.owner_after;  // once it has read the range from elsewhere
      std::erase(change.copy_to, change.owner_after);
    } else {
      change.copy_from = *source;
      for (const rank_id server : old_chain) {
        if (is_alive(server) && !has(new_chain, server)) change.drop_from.push_back(server);
      }
    }
    result.copied_keys += change.copy_to.size() * keys_of(range).count;
    result.changes.push_back(std::move(change));
  }
  return result;
}

inline server_change key_servers::lose(std::span<const rank_id> lost) {
  key_servers after = *this;
  for (const rank_id server : lost) {
    check_server(server, "key_servers::lose");
    if (!after.is_alive(server)) {
      throw argument_error("key_servers::lose: server " + std::to_string(to_index(server)) +
                           " is lost already");
    }
    if (after.living_ == 1) {
      throw argument_error("key_servers::lose: server " + std::to_string(to_index(server)) +
                           " is the last one alive; restart from a checkpoint");
    }
    after.alive_[to_index(server)] = 0;
    --after.living_;
  }
  server_change change = after.change_from(*this);
  std::swap(*this, after);
  return change;
}

inline server_change key_servers::rejoin(rank_id server) {
  check_server(server, "key_servers::rejoin");
  if (is_alive(server)) {
    throw argument_error("key_servers::rejoin: server " + std::to_string(to_index(server)) + " is alive");
  }
  key_servers after = *this;
  after.alive_[to_index(server)] = 1;
  ++after.living_;
  server_change change = after.change_from(*this);
  std::swap(*this, after);
  return change;
}

}  // namespace v0
}  // namespace llmmem
