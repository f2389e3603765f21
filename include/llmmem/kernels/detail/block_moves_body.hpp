/// @file
/// The body of `plan_block_moves`.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/block_moves.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Pending moves, by the block that they go to, and how many read each block.
class pending_moves {
 public:
  explicit pending_moves(std::uint64_t blocks)
      : comes_from_(static_cast<std::size_t>(blocks), none),
        readers_(static_cast<std::size_t>(blocks), 0),
        is_opened_(static_cast<std::size_t>(blocks), false) {}

  [[nodiscard]] bool has(std::int64_t to) const noexcept { return comes_from_[at(to)] != none; }
  void add(const block_pair& move) {
    comes_from_[at(move.to)] = move.from;
    ++readers_[at(move.from)];
    places_.push_back(move.to);
    ++left_;
  }
  /// Ends the additions. A block that goes to itself need not be added.
  void begin() {
    for (const std::int64_t to : places_) {
      if (comes_from_[at(to)] == to) {
        done(to);
      } else if (readers_[at(to)] == 0) {
        ready_.push_back(to);
      }
    }
  }
  [[nodiscard]] bool empty() const noexcept { return left_ == 0; }
  [[nodiscard]] std::size_t size() const noexcept { return left_; }
  [[nodiscard]] std::int64_t first() const noexcept {
    return *std::ranges::find_if(places_, [&](std::int64_t to) { return has(to); });
  }

  /// Takes all moves that are possible now, as a wave: no pending move reads their destinations. Returns
  /// whether there are any.
  bool take_ready(block_move_plan& into) {
    if (ready_.empty()) return false;
    std::vector<std::int64_t> next;
    for (const std::int64_t to : ready_) {
      const std::int64_t from = comes_from_[at(to)];
      into.pairs.push_back({from, to});
      done(to);
      if (--readers_[at(from)] == 0 && has(from)) next.push_back(from);
    }
    ready_ = std::move(next);
    into.wave_ends.push_back(into.pairs.size());
    return true;
  }
  /// Moves everything left to scratch blocks, and from there to its destinations.
  void take_all_by(std::span<const std::int64_t> scratch, block_move_plan& into) {
    std::vector<block_pair> to_places;
    for (const std::int64_t to : places_) {
      if (!has(to)) continue;
      into.pairs.push_back({comes_from_[at(to)], scratch[to_places.size()]});
      to_places.push_back({scratch[to_places.size()], to});
      done(to);
    }
    into.wave_ends.push_back(into.pairs.size());
    into.pairs.insert(into.pairs.end(), to_places.begin(), to_places.end());
    into.wave_ends.push_back(into.pairs.size());
  }
  /// @pre nothing is ready: only cycles are left. One block of each goes to a scratch block, for as many
  ///      cycles as there are scratch blocks, and is read there from then on.
  void open_cycles(std::span<const std::int64_t> scratch, block_move_plan& into) {
    for (std::size_t used = 0; looked_at_ < places_.size() && used < scratch.size(); ++looked_at_) {
      const std::int64_t block = places_[looked_at_];
      if (!has(block) || is_opened_[at(block)]) continue;
      // Follows the cycle against the moves, to the move that reads this one's destination.
      std::int64_t reader = block;
      is_opened_[at(reader)] = true;
      while (comes_from_[at(reader)] != block) {
        reader = comes_from_[at(reader)];
        is_opened_[at(reader)] = true;
      }
      into.pairs.push_back({block, scratch[used]});
      comes_from_[at(reader)] = scratch[used];
      ++readers_[at(scratch[used])];
      --readers_[at(block)];
      ready_.push_back(block);
      ++used;
    }
    into.wave_ends.push_back(into.pairs.size());
  }

 private:
  static constexpr std::int64_t none = -1;
  [[nodiscard]] static std::size_t at(std::int64_t block) noexcept { return static_cast<std::size_t>(block); }
  void done(std::int64_t to) noexcept {
    comes_from_[at(to)] = none;
    --left_;
  }

  std::vector<std::int64_t> comes_from_;  // by the block that a move goes to
  std::vector<std::uint64_t> readers_;    // moves that are not done yet, by the block that they come from
  std::vector<bool> is_opened_;           // by block: in a cycle that is open
  std::vector<std::int64_t> places_{};    // where all moves go
  std::vector<std::int64_t> ready_{};     // those of the next wave
  std::size_t left_ = 0;
  std::size_t looked_at_ = 0;  // of `places_`, for cycles
};

}  // namespace detail

inline block_move_plan plan_block_moves(std::span<const block_pair> moves, std::uint64_t blocks,
                                        std::span<const std::int64_t> scratch) {
  const auto refuse = [](const std::string& what) { throw argument_error("plan_block_moves: " + what); };
  std::vector<bool> is_named(static_cast<std::size_t>(blocks), false);
  const auto name = [&](std::int64_t block, const std::string& who) {
    if (block < 0 || static_cast<std::uint64_t>(block) >= blocks) {
      refuse(who + " names block " + std::to_string(block) + ", but there are " + std::to_string(blocks) +
             ", numbered from 0");
    }
    is_named[static_cast<std::size_t>(block)] = true;
  };
  detail::pending_moves pending(blocks);
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const block_pair& move = moves[i];
    if (move.from < 0 || move.to < 0) continue;
    const std::string who = "move " + std::to_string(i);
    name(move.from, who);
    name(move.to, who);
    if (pending.has(move.to)) {
      refuse(who + " writes block " + std::to_string(move.to) +
             ", which another move writes; give each block at most one move");
    }
    pending.add(move);
  }
  for (std::size_t i = 0; i < scratch.size(); ++i) {
    const std::int64_t block = scratch[i];
    const bool is_block = block >= 0 && static_cast<std::uint64_t>(block) < blocks;
    if (is_block && is_named[static_cast<std::size_t>(block)]) {
      refuse("scratch block " + std::to_string(block) +
             " is named by a move; give a block that no move names");
    }
    name(block, "scratch entry " + std::to_string(i));
  }
  block_move_plan plan;
  pending.begin();
  pending.take_ready(plan);
  if (!pending.empty() && pending.size() <= scratch.size()) {
    pending.take_all_by(scratch, plan);
    return plan;
  }
  while (!pending.empty()) {
    if (pending.take_ready(plan)) continue;
    if (scratch.empty()) {
      refuse("block " + std::to_string(pending.first()) +
             " is in a cycle of moves, and there is no scratch block; give one that no move names");
    }
    pending.open_cycles(scratch, plan);
  }
  return plan;
}

}  // namespace v0
}  // namespace llmmem
