/// @file
/// `key_servers`: key ranges over the servers of a parameter server, with chains of replicas.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace sharding {

/// The change of one key range when servers are lost, or return.
struct range_change {
  tensor_id range{};
  rank_id owner_before{};
  rank_id owner_after{};
  std::vector<rank_id> copy_to{};    ///< servers that join the chain, and must receive the range
  std::vector<rank_id> drop_from{};  ///< leave the chain alive; may drop the range once all have it
  rank_id copy_from{};               ///< the sender: the first living server of the old chain, if any

  friend bool operator==(const range_change&, const range_change&) = default;
};

}  // namespace sharding

using range_change [[deprecated("its name is sharding::range_change")]] = sharding::range_change;

/// The steps that restore the number of copies of every range, as far as enough servers live.
struct server_change {
  std::vector<sharding::range_change> changes{};  ///< ranges whose chain has changed, in order
  std::vector<tensor_id> lost_ranges{};           ///< without a living copy: read them from a checkpoint
  std::uint64_t copied_keys = 0;                  ///< each counted as often as it is sent

  friend bool operator==(const server_change&, const server_change&) = default;
};

/// The keys 0 to K - 1 of a parameter server (Li et al., OSDI '14, sections 4.3 and 4.4), cut into ranges. Of
/// n servers, range i belongs to server s = i mod n; the servers after s on the ring follow, in the order s +
/// 1, s + 2, ..., and the first `followers` of them hold copies (chain replication). A lost server's ranges
/// fall to the next living one, which has them already.
///
/// With several ranges per server (the paper's virtual servers), the followers of round j = i / n begin j
/// places further on the ring, which skips s. So the ranges of a lost server fall to as many other servers as
/// it had ranges.
///
/// As a partition its catalogue is the list of ranges: tensor i is range i, a vector of its keys, held
/// completely by its chain and owned by the head.
///
/// @par Complexity      `owner` O(1) while all live, and O(dead servers) otherwise; `local` O(followers +
///                      dead); `lose` and `rejoin` O(ranges x (followers + dead)).
/// @par Thread safety   as a plain value.
class key_servers {
 public:
  /// @param followers          copies of each range in addition to the owner's.
  /// @param ranges_per_server  all ranges are as even as possible.
  /// @throws argument_error  when there are no servers or ranges, or not more servers than followers.
  /// @throws length_error    when keys pass 2^63 - 1, or ranges 2^32 - 1.
  key_servers(std::uint64_t keys, rank_count servers, std::uint32_t followers,
              std::uint32_t ranges_per_server = 1)
      : keys_(keys), followers_(followers) {
    detail::check_world(servers, 0, "key_servers");
    static_cast<void>(checked_add(keys, 0, "key_servers: keys"));
    if (ranges_per_server == 0)
      throw argument_error("key_servers: 0 ranges per server; each has at least one");
    if (followers >= to_number(servers)) {
      throw argument_error("key_servers: " + std::to_string(followers) + " followers of each of " +
                           std::to_string(to_number(servers)) + " servers; a chain has no server twice");
    }
    const std::uint64_t ranges = std::uint64_t{to_number(servers)} * ranges_per_server;
    if (ranges > 0xFFFF'FFFFU) {
      throw length_error("key_servers: " + std::to_string(to_number(servers)) + " servers x " +
                         std::to_string(ranges_per_server) + " ranges; their ids are 32 bits wide");
    }
    ranges_ = static_cast<std::uint32_t>(ranges);
    alive_.assign(to_number(servers), 1);
    living_ = to_number(servers);
  }

  /// Returns the number of servers, including lost ones, which hold nothing.
  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(alive_.size())};
  }
  /// Returns the number of ranges.
  [[nodiscard]] std::uint32_t tensors() const noexcept { return ranges_; }
  [[nodiscard]] tensor_shape shape(tensor_id range) const noexcept {
    return tensor_shape::vector(keys_of(range).count);
  }
  [[nodiscard]] element_runs local(tensor_id range, rank_id server) const noexcept {
    return holds(range, server) ? element_runs::all_of(keys_of(range).count) : element_runs{};
  }
  [[nodiscard]] element_runs owned(tensor_id range, rank_id server) const noexcept {
    return owner(range) == server ? element_runs::all_of(keys_of(range).count) : element_runs{};
  }
  [[nodiscard]] rank_id owner(tensor_id range, std::uint64_t /*element*/) const noexcept {
    return owner(range);
  }
  /// True if all servers live and follow each other.
  [[nodiscard]] bool is_replicated(tensor_id /*range*/) const noexcept {
    return living_ == alive_.size() && followers_ + 1 == living_;
  }

  /// Returns the number of keys.
  [[nodiscard]] std::uint64_t keys() const noexcept { return keys_; }
  /// Returns the number of living servers.
  [[nodiscard]] std::uint32_t live_servers() const noexcept { return living_; }
  [[nodiscard, deprecated("call live_servers()")]] std::uint32_t living() const noexcept { return living_; }
  /// Returns whether a server lives.
  [[nodiscard]] bool is_alive(rank_id server) const noexcept { return alive_[to_index(server)] != 0; }
  /// Returns the keys of a range.
  [[nodiscard]] index_range keys_of(tensor_id range) const noexcept {
    return even_share(keys_, to_index(range), ranges_);
  }
  /// Returns the range of a key. @pre key < keys()
  [[nodiscard]] tensor_id range_of(std::uint64_t key) const noexcept {
    return tensor_id{static_cast<std::uint32_t>(even_share_of(keys_, key, ranges_))};
  }
  /// Returns the server that a key is pushed to and pulled from. @pre key < keys()
  [[nodiscard]] rank_id owner(std::uint64_t key) const noexcept { return owner(range_of(key)); }
  /// Returns the head of a range's chain: its own server, or the next living one.
  [[nodiscard]] rank_id owner(tensor_id range) const noexcept {
    std::uint32_t place = 0;
    while (!is_alive(candidate(range, place)))
      ++place;
    return candidate(range, place);
  }
  /// Returns the chain of a range, the owner first. It is shorter if fewer servers live than it needs.
  [[nodiscard]] std::vector<rank_id> replicas(tensor_id range) const;
  /// Returns the chain of a key's range.
  [[nodiscard]] std::vector<rank_id> replicas_of(std::uint64_t key) const { return replicas(range_of(key)); }

  /// Marks servers as lost, all at once, and returns what to do. Ranges that lose more servers than followers
  /// at once have no copy left, and are listed.
  /// @throws argument_error  when one does not exist or is already lost, or none would be left: nothing has
  ///                         changed.
  server_change lose(std::span<const rank_id> lost);
  /// Marks a lost server as living and empty, and returns what to send it.
  /// @throws argument_error  when it does not exist or lives.
  server_change rejoin(rank_id server);

 private:
  /// Returns the server at `place` of a range's chain while all live: each server is at one place.
  [[nodiscard]] rank_id candidate(tensor_id range, std::uint32_t place) const noexcept {
    const std::uint64_t servers = alive_.size();
    const std::uint64_t own = to_index(range) % servers;
    if (place == 0) return rank_id{static_cast<std::uint32_t>(own)};
    const std::uint64_t behind = 1 + (to_index(range) / servers + place - 1) % (servers - 1);
    return rank_id{static_cast<std::uint32_t>((own + behind) % servers)};
  }
  [[nodiscard]] bool holds(tensor_id range, rank_id server) const noexcept;
  void check_server(rank_id server, const char* name) const;
  [[nodiscard]] server_change change_from(const key_servers& before) const;

  std::uint64_t keys_ = 0;
  std::uint32_t followers_ = 0;
  std::uint32_t ranges_ = 0;
  std::vector<std::uint8_t> alive_;
  std::uint32_t living_ = 0;
};

static_assert(partition<key_servers>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/sharding/detail/server_body.hpp>
