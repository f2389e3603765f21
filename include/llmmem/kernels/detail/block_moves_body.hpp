/// @file
/// The body of `plan_block_moves`.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/block_moves.hpp>

#include <string>
#include <vector>

namespace llmmem::inline v0 {

namespace detail {

/// Moves that are not done yet, by the block that they go to, and how many read each block.
class pending_moves {
 public:
  explicit pending_moves(std::uint64_t blocks)
      : comes_from_(static_cast<std::size_t>(blocks), -1), readers_(static_cast<std::size_t>(blocks), 0) {}

  [[nodiscard]] bool has(std::int64_t to) const noexcept { return comes_from_[at(to)] >= 0; }
  void add(const block_pair& move) {
    comes_from_[at(move.to)] = move.from;
    ++readers_[at(move.from)];
    left_.push_back(move.to);
  }
  [[nodiscard]] bool empty() const noexcept { return left_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return left_.size(); }

  [[nodiscard]] std::int64_t first() const noexcept { return left_.front(); }
  /// A block that goes to itself need not.
  void drop_those_that_stay() {
    std::erase_if(left_, [&](std::int64_t to) { return comes_from_[at(to)] == to; });
  }

  /// All that may go now go, as a wave: nobody that waits reads their places.
  bool take_ready(block_move_plan& into) {
    const std::size_t before = into.pairs.size();
    std::size_t kept = 0;
    for (const std::int64_t to : left_) {
      if (readers_[at(to)] == 0) {
        into.pairs.push_back({comes_from_[at(to)], to});
      } else {
        left_[kept++] = to;
      }
    }
    left_.resize(kept);
    for (std::size_t i = before; i < into.pairs.size(); ++i) {
      --readers_[at(into.pairs[i].from)];
      comes_from_[at(into.pairs[i].to)] = -1;
    }
    return end_wave(into, before);
  }
  /// All that is left goes to scratch blocks, and from there to its places.
  void take_all_by(std::span<const std::int64_t> scratch, block_move_plan& into) {
    const std::size_t before = into.pairs.size();
    for (std::size_t i = 0; i < left_.size(); ++i)
      into.pairs.push_back({comes_from_[at(left_[i])], scratch[i]});
    end_wave(into, before);
    for (std::size_t i = 0; i < left_.size(); ++i)
      into.pairs.push_back({scratch[i], left_[i]});
    end_wave(into, before + left_.size());
    left_.clear();
  }
  /// @pre nothing is ready: what is left are cycles. One block of each goes to a scratch block, as many
  /// cycles as there are such, and is read there from then on.
  void open_cycles(std::span<const std::int64_t> scratch, block_move_plan& into) {
    const std::size_t before = into.pairs.size();
    std::vector<bool> is_seen(comes_from_.size(), false);
    std::size_t used = 0;
    for (std::size_t i = 0; i < left_.size() && used < scratch.size(); ++i) {
      if (is_seen[at(left_[i])]) continue;
      // Round the cycle, against the moves, to the one that reads where this one goes.
      std::int64_t reader = left_[i];
      is_seen[at(reader)] = true;
      while (comes_from_[at(reader)] != left_[i]) {
        reader = comes_from_[at(reader)];
        is_seen[at(reader)] = true;
      }
      into.pairs.push_back({left_[i], scratch[used]});
      --readers_[at(left_[i])];
      ++readers_[at(scratch[used])];
      comes_from_[at(reader)] = scratch[used];
      ++used;
    }
    end_wave(into, before);
  }

 private:
  [[nodiscard]] static std::size_t at(std::int64_t block) noexcept { return static_cast<std::size_t>(block); }
  static bool end_wave(block_move_plan& into, std::size_t before) {
    if (into.pairs.size() == before) return false;
    into.wave_ends.push_back(into.pairs.size());
    return true;
  }

  std::vector<std::int64_t> comes_from_;  // by the block that a move goes to; -1: none does
  std::vector<std::uint64_t> readers_;    // moves that are not done yet, by the block that they come from
  std::vector<std::int64_t> left_{};      // where they go
};

}  // namespace detail

inline block_move_plan plan_block_moves(std::span<const block_pair> moves, std::uint64_t blocks,
                                        std::span<const std::int64_t> scratch) {
  const auto refuse = [](const std::string& what) { throw argument_error("plan_block_moves: " + what); };
  std::vector<bool> is_named(static_cast<std::size_t>(blocks), false);
  const auto name = [&](std::int64_t block, const std::string& who) {
    if (block < 0 || static_cast<std::uint64_t>(block) >= blocks) {
      refuse(who + " names block " + std::to_string(block) + ", there are " + std::to_string(blocks) +
             " from 0 on");
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
      refuse(who + " goes to block " + std::to_string(move.to) +
             ", as another does; have one move for each place");
    }
    pending.add(move);
  }
  for (std::size_t i = 0; i < scratch.size(); ++i) {
    const std::int64_t block = scratch[i];
    const bool is_block = block >= 0 && static_cast<std::uint64_t>(block) < blocks;
    if (is_block && is_named[static_cast<std::size_t>(block)]) {
      refuse("scratch block " + std::to_string(block) + " is named elsewhere; give one that holds nothing");
    }
    name(block, "scratch entry " + std::to_string(i));
  }
  block_move_plan plan;
  pending.drop_those_that_stay();
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

}  // namespace llmmem::inline v0
