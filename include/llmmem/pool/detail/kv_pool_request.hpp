/// @file
/// Bodies of kv_pool.hpp: the request that an engine holds. Only that file includes this one.
#pragma once

#include <llmmem/pool/kv_pool.hpp>

#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A request for blocks of other nodes. Movable; its destructor ends it.
///
/// @par Thread safety   that of its pool, which outlives it.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
class kv_pool<Tiers, Endpoint, Directory, Mover>::request {
 public:
  request() noexcept = default;
  request(request&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), slot_(other.slot_), result_(other.result_) {}
  request& operator=(request&& other) noexcept {
    if (this == &other) return *this;
    end();
    pool_ = std::exchange(other.pool_, nullptr);
    slot_ = other.slot_;
    result_ = other.result_;
    return *this;
  }
  ~request() { end(); }

  /// How much of the chain this node's tiers and others' have: `next` is `pending` until the directory has
  /// answered for what comes next, and `unknown` where it has not within the patience. Moves nothing.
  [[nodiscard]] offload::kv_lookup_result where() const noexcept;
  /// Begins to fetch the blocks that other nodes have, up to token `upto` of the chain. Does not wait. Call
  /// it once.
  void fetch(std::uint64_t upto = unlimited) {
    if (pool_ != nullptr) pool_->begin_fetch(slot_, upto);
  }
  /// Returns how much of the chain, up to token `upto`, is cheaper to bring from this node's tiers and from
  /// other nodes than to compute, and how long all of it takes; `waits()` if it pays to await blocks that
  /// other requests bring. Counts the bytes that this node awaits and its tiers still move. Of several
  /// holders of a block it takes the one with which the last block arrives first. Moves nothing; call it when
  /// the directory has answered.
  ///
  /// Exact for its model if all blocks have one size: no length and no choice of holders takes less.
  ///
  /// @par Complexity   O(keys x (tiers + holders)), and O(blocks that requests await).
  [[nodiscard]] offload::load_choice choose(const pool::fetch_costs& costs,
                                            std::uint64_t upto = unlimited) const {
    if (pool_ == nullptr) return {.tokens = result_.tokens, .waiting_tokens = result_.tokens};
    return pool_->choose(pool_->requests_[slot_], costs, upto);
  }
  /// Begins to fetch what `choose` returns, from the nodes that it took, and awaits the blocks of other
  /// requests if that `waits()`. The engine then loads up to `fetched_upto` and computes the rest.
  offload::load_choice fetch(const pool::fetch_costs& costs, std::uint64_t upto = unlimited) {
    const offload::load_choice out = choose(costs, upto);
    if (pool_ != nullptr) pool_->begin_fetch(slot_, fetched_upto(out), &costs, out.waits());
    return out;
  }
  /// Returns the token up to which a fetch with costs brings blocks.
  [[nodiscard]] static constexpr std::uint64_t fetched_upto(const offload::load_choice& choice) noexcept {
    return choice.waits() ? choice.waiting_tokens : choice.tokens;
  }
  /// Whether each fetched block has arrived in the first tier, or will not arrive. Blocks that arrived stay
  /// there until `end`.
  [[nodiscard]] bool has_arrived() const noexcept;
  /// Returns when the directory has answered, or the patience has ended. Serves other nodes meanwhile.
  void wait_for_answers();
  /// Returns when `has_arrived`, at the latest when the patience has ended. Serves other nodes meanwhile.
  void wait();
  /// Gives up blocks that have not arrived, and lets the first tier evict those that have: prepare the load
  /// first.
  pool::fetch_result end() noexcept {
    if (pool_ == nullptr) return result_;
    return result_ = std::exchange(pool_, nullptr)->finish(slot_);
  }

 private:
  friend kv_pool;
  request(kv_pool& of, std::uint32_t slot) noexcept : pool_(&of), slot_(slot) {}

  kv_pool* pool_ = nullptr;
  std::uint32_t slot_ = 0;
  pool::fetch_result result_{};
};

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
offload::kv_lookup_result kv_pool<Tiers, Endpoint, Directory, Mover>::request::where() const noexcept {
  if (pool_ == nullptr) return {.first = result_.first, .tokens = result_.tokens};
  const record& of = pool_->requests_[slot_];
  open_answers open;
  offload::kv_lookup_result out = pool_->where(of, unlimited, open);
  if (open.is_pending) {
    out.next = of.is_late ? offload::answer::unknown : offload::answer::pending;
  } else if (open.is_unknown && out.next == offload::answer::miss) {
    out.next = offload::answer::unknown;
  }
  return out;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::request::has_arrived() const noexcept {
  if (pool_ == nullptr) return true;
  const record& of = pool_->requests_[slot_];
  for (std::size_t i = of.first_open; i < of.parts.size(); ++i) {
    if (!is_over(of.parts[i])) return false;
  }
  return true;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::request::wait_for_answers() {
  open_answers open{
      .is_pending = pool_ != nullptr};  // blocks that are `pending` in this node's tiers have no answer yet
  while (open.is_pending) {
    const record& of = pool_->requests_[slot_];
    static_cast<void>(pool_->where(of, unlimited, open));
    if (of.is_late || !open.is_pending) return;
    pool_->wait_once(of);
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::request::wait() {
  while (!has_arrived())
    pool_->wait_once(pool_->requests_[slot_]);
}

}  // namespace v0
}  // namespace llmmem
