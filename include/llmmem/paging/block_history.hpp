/// @file
/// Records which sequence last did what to a block, so that an audit can report it with a faulty block.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/block_record.hpp>
#include <llmmem/paging/ids.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// Remembers transitions of blocks.
///
///     set_actor(actor)    sets the current actor: a sequence's slot, or `no_actor`
///     note(block, what)   records that the current actor has just caused this transition of the block
///     history_of(block)   returns what is remembered of one block, for an audit's text; empty: nothing
template <class H>
concept block_history =
    std::default_initializable<H> && std::movable<H> &&
    requires(H history, const H& read, std::uint32_t actor, block_id block, paging::transition what) {
      { history.set_actor(actor) } noexcept;
      { history.note(block, what) } noexcept;
      { read.history_of(block) } -> std::same_as<std::string>;
    };

namespace paging {

/// The actor for the allocator itself: collecting, resizing, compacting.
inline constexpr std::uint32_t no_actor = 0xFFFF'FFFF;
[[deprecated("its name is no_actor")]] inline constexpr std::uint32_t nobody = no_actor;

/// The default: audits report only the last transition. Costs nothing.
struct no_history {
  void set_actor(std::uint32_t) const noexcept {}
  void note(block_id, transition) const noexcept {}
  [[nodiscard]] std::string history_of(block_id) const { return {}; }
};

}  // namespace paging

using no_history [[deprecated("its name is paging::no_history")]] = paging::no_history;

static_assert(block_history<paging::no_history>);

/// Keeps the last `Entries` transitions of all blocks together in a ring. For debug builds: shows which
/// sequence released a block twice and which held it before.
///
/// @par Complexity   `note` O(1), 16 bytes per entry inside the object; `history_of` O(Entries).
template <std::size_t Entries = 1'024>
class owner_ring {
 public:
  static_assert(Entries > 0);

  void set_actor(std::uint32_t actor) noexcept { actor_ = actor; }

  void note(block_id block, paging::transition what) noexcept {
    entries_[count_ % Entries] = {static_cast<std::uint32_t>(count_), block, actor_, what};
    ++count_;
  }

  /// Returns the transitions oldest first: "#12 allocated by sequence 3, #15 freed by sequence 3".
  [[nodiscard]] std::string history_of(block_id block) const {
    std::string out;
    const std::uint64_t first = count_ < Entries ? 0 : count_ - Entries;
    for (std::uint64_t i = first; i < count_; ++i) {
      const entry& each = entries_[i % Entries];
      if (each.block != block) continue;
      out +=
          (out.empty() ? "#" : ", #") + std::to_string(each.number) + " " + std::string(to_string(each.what));
      if (each.actor != paging::no_actor) out += " by sequence " + std::to_string(each.actor);
    }
    return out;
  }

 private:
  struct entry {
    std::uint32_t number = 0;
    block_id block = null_block;
    std::uint32_t actor = paging::no_actor;
    paging::transition what = paging::transition::never_used;
  };

  std::array<entry, Entries> entries_{};
  std::uint64_t count_ = 0;
  std::uint32_t actor_ = paging::no_actor;
};

static_assert(block_history<owner_ring<>>);

}  // namespace v0
}  // namespace llmmem
