/// @file
/// The needs of a group of layers as a sequence grows: which blocks it still reads, and which must be cached
/// for a prefix to be a hit.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/model_shape.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// The most groups that an allocator may have.
inline constexpr std::size_t max_layer_groups = 16;

/// How far back the layers of a group read.
enum class layer_kind : std::uint8_t {
  full_attention,   ///< every earlier token; also latent attention (MLA), whose blocks are smaller
  sliding_window,   ///< the token at position p reads positions p - reach + 1 to p
  chunked_local,    ///< the token at position p reads from the last multiple of reach to p
  state_snapshots,  ///< the state after the previous token: SSM, Mamba, linear attention
};

/// Which states of a step the kernels of a `state_snapshots` group write.
enum class snapshot_times : std::uint8_t {
  every_block,  ///< the state at the end of each block that the step passes, and the last one
  end_of_step,  ///< only the last one: lengths inside the step are not hits, and their states need no memory
};

/// Blocks `first` to `end` of a sequence, `end` excluded.
struct block_range {
  std::uint64_t first = 0;
  std::uint64_t end = 0;

  [[nodiscard]] constexpr std::uint64_t count() const noexcept { return end - first; }
  friend constexpr bool operator==(const block_range&, const block_range&) noexcept = default;
};

/// Layers that read equally far back and share their blocks: a block holds `block_tokens` tokens of every
/// layer.
///
/// For state layers a block holds not tokens but the state after them: block i is updated in place while
/// tokens i * block_tokens to (i + 1) * block_tokens - 1 arrive, and then is the snapshot of position
/// (i + 1) * block_tokens, from which block i + 1 continues. Kernels read only the last block, so the blocks
/// before it need no memory: their entries stay in the table as placeholders. If kernels write the state only
/// at the end of a step (`snapshot_times::end_of_step`), a step of any length takes one block, and only
/// lengths at which a step ended are hits.
///
/// A window may keep the first `sinks` tokens in view: every token reads those too, and their blocks stay
/// (attention sinks: Xiao et al., StreamingLLM, ICLR 2024).
///
/// All functions are pure. Positions count from 0; "at length n" means that n tokens exist and the next one
/// has position n.
///
/// @par Complexity   O(1).
struct layer_group {
  std::string_view name = "unnamed";  ///< refers to a literal, or to a string that outlives the group
  layer_kind kind = layer_kind::full_attention;
  std::uint64_t reach = 0;          ///< tokens of the window or chunk
  std::uint32_t block_tokens = 16;  ///< tokens per block; for states, between snapshots
  std::uint64_t block_bytes = 0;    ///< of all layers of the group together
  std::uint64_t sinks = 0;          ///< of a window: tokens at the start that every token reads
  snapshot_times writes = snapshot_times::every_block;  ///< of states

  /// The number of leading blocks that hold sinks.
  [[nodiscard]] constexpr std::uint64_t sink_blocks() const noexcept { return blocks_for(sinks); }

  /// Whether a step needs no memory for the blocks inside it.
  [[nodiscard]] constexpr bool skips_blocks() const noexcept {
    return kind == layer_kind::state_snapshots && writes == snapshot_times::end_of_step;
  }

  /// Returns how many tokens at the start the token after length `n` does not read, except sinks.
  [[nodiscard]] constexpr std::uint64_t skipped_tokens(std::uint64_t n) const noexcept {
    switch (kind) {
      case layer_kind::sliding_window:
        return n < reach ? 0 : n + 1 - reach;
      case layer_kind::chunked_local:
        return n - n % reach;
      case layer_kind::state_snapshots:
        return n == 0 ? 0 : n - 1;
      case layer_kind::full_attention:
        break;
    }
    return 0;
  }

  /// Returns the number of blocks that `n` tokens fill or begin.
  [[nodiscard]] constexpr std::uint64_t blocks_for(std::uint64_t n) const noexcept {
    return n / block_tokens + (n % block_tokens != 0 ? 1 : 0);
  }

  /// Returns the number of leading blocks that no token after length `n` reads, except those of sinks: their
  /// memory may be released.
  [[nodiscard]] constexpr std::uint64_t dead_blocks(std::uint64_t n) const noexcept {
    return skipped_tokens(n) / block_tokens;
  }

  /// Returns the blocks that are still read at length `n`.
  [[nodiscard]] constexpr block_range live_blocks(std::uint64_t n) const noexcept {
    return {dead_blocks(n), blocks_for(n)};
  }

  /// Returns the number of new table entries for `more` tokens after `n`.
  [[nodiscard]] constexpr std::uint64_t places_to_append(std::uint64_t n, std::uint64_t more) const noexcept {
    return blocks_for(n + more) - blocks_for(n);
  }

  /// Returns the number of new blocks for `more` tokens after `n`, appended in one step.
  [[nodiscard]] constexpr std::uint64_t blocks_to_append(std::uint64_t n, std::uint64_t more) const noexcept {
    const std::uint64_t places = places_to_append(n, more);
    return skips_blocks() && places > 1 ? 1 : places;
  }

  /// Whether a hit may end after `length` tokens: only at the end of a block, because the next block will be
  /// written.
  [[nodiscard]] constexpr bool may_end_hit(std::uint64_t length) const noexcept {
    return length % block_tokens == 0;
  }

  /// Returns the blocks that must be cached for a hit of `length` tokens, in addition to those of sinks; none
  /// where a new chunk begins.
  /// @pre `may_end_hit(length)`
  [[nodiscard]] constexpr block_range hit_blocks(std::uint64_t length) const noexcept {
    return live_blocks(length);
  }

  /// Whether a sequence of `length` tokens, whose first `gone` blocks were released, can be cut to `n`.
  /// Attention can if the blocks that the token at `n` reads still exist, or if it reads none. States can at
  /// the end of a block whose snapshot still exists, because a later state overwrote each state inside a
  /// block. Cutting nothing, or everything, is always possible. @pre n <= length; gone <= dead_blocks(length)
  [[nodiscard]] constexpr bool can_cut(std::uint64_t n, std::uint64_t length,
                                       std::uint64_t gone) const noexcept {
    if (n == length) return true;
    if (kind == layer_kind::state_snapshots && n % block_tokens != 0) return false;
    const block_range needed = live_blocks(n);
    return needed.count() == 0 || needed.first >= gone || needed.end <= sink_blocks();
  }

  /// Rejects an impossible group.
  /// @throws argument_error  naming the group, the field and its value.
  constexpr void validate() const {
    const auto refuse = [this](const char* why) {
      throw argument_error("layer_group " + std::string(name) + ": " + why);
    };
    if (block_tokens == 0) refuse("block_tokens is 0; a block holds at least 1 token");
    if (block_bytes == 0) refuse("block_bytes is 0; give the bytes that its layers keep");
    const bool looks_back = kind == layer_kind::sliding_window || kind == layer_kind::chunked_local;
    if (looks_back && reach == 0) refuse("reach is 0; a window or chunk has at least 1 token");
    if (sinks != 0 && kind != layer_kind::sliding_window)
      refuse("sinks are given, but only windows have them; leave them out");
    if (writes != snapshot_times::every_block && kind != layer_kind::state_snapshots)
      refuse("writes is given, but only states are written at the ends of steps; leave it out");
  }
};

/// Attention layers of one kind.
struct attention_layers {
  std::string_view name = "attention";
  std::uint64_t layers = 0;
  std::uint64_t token_bytes = 0;  ///< that one token takes in one layer
  std::uint32_t block_tokens = 16;

  [[nodiscard]] constexpr std::uint64_t block_bytes() const {
    return checked_multiply(checked_multiply(layers, token_bytes, "attention_layers: layers x bytes a token"),
                            block_tokens, "attention_layers: bytes a token x tokens a block");
  }
};

/// Makes a group in which every token reads all earlier tokens.
[[nodiscard]] constexpr layer_group full_attention(const attention_layers& of) {
  return {of.name, layer_kind::full_attention, 0, of.block_tokens, of.block_bytes()};
}

/// @param tokens  number of tokens that a token reads, including itself.
/// @param sinks  tokens at the start that every token reads as well.
[[nodiscard]] constexpr layer_group sliding_window(const attention_layers& of, std::uint64_t tokens,
                                                   std::uint64_t sinks = 0) {
  return {of.name, layer_kind::sliding_window, tokens, of.block_tokens, of.block_bytes(), sinks};
}

/// @param tokens  per chunk.
[[nodiscard]] constexpr layer_group chunked_local(const attention_layers& of, std::uint64_t tokens) {
  return {of.name, layer_kind::chunked_local, tokens, of.block_tokens, of.block_bytes()};
}

/// Makes a group of latent attention, which reads every token and keeps one compressed vector and one rotary
/// key per token.
[[nodiscard]] constexpr layer_group mla(const model_shape& model, std::uint32_t block_tokens,
                                        dtype type = dtype::bf16) {
  return {model.name, layer_kind::full_attention, 0, block_tokens,
          model.kv_bytes_per_block(block_tokens, type)};
}

/// Makes a group of recurrent layers.
/// @param state_bytes  of one layer's whole state, including its convolution window.
/// @param every  tokens between snapshots.
/// @param writes  which of a step's states the kernels write.
[[nodiscard]] constexpr layer_group state_snapshots(std::string_view name, std::uint64_t layers,
                                                    std::uint64_t state_bytes, std::uint32_t every,
                                                    snapshot_times writes = snapshot_times::every_block) {
  return {name,
          layer_kind::state_snapshots,
          0,
          every,
          checked_multiply(layers, state_bytes, "state_snapshots: layers x bytes of a state"),
          0,
          writes};
}

namespace paging {

/// Finds the longest hit of several groups in one walk over their blocks.
///
/// For a hit of L tokens, a group needs only the blocks that the next token reads: the last blocks of a
/// window, the last snapshot of states. They are consecutive, so the scan counts for each group how many
/// blocks up to here are cached without a gap. Sinks must be cached from the start.
///
/// @par Complexity   `add` O(1); `has_hit` O(groups).
class hit_scan {
 public:
  /// @param groups  at most `max_layer_groups`; must outlive the scan.
  constexpr explicit hit_scan(std::span<const layer_group> groups) noexcept : groups_(groups) {}

  /// Records whether the next block of `group` is cached.
  constexpr void add(std::size_t group, bool cached) noexcept {
    run_[group] = cached ? run_[group] + 1 : 0;
    const bool is_sink = seen_[group]++ < groups_[group].sink_blocks();
    if (!cached && (is_sink || groups_[group].kind == layer_kind::full_attention)) is_exhausted_ = true;
  }
  [[deprecated("call add()")]] constexpr void see(std::size_t group, bool cached) noexcept {
    add(group, cached);
  }

  /// Whether every group has a hit of `length` tokens. A length that needs no block of any group (all of them
  /// begin a new chunk) is not a hit, because nothing would be found. @pre all full blocks up to there were
  /// added, and none after.
  [[nodiscard]] constexpr bool has_hit(std::uint64_t length) const noexcept {
    if (is_exhausted_) return false;
    std::uint64_t needed = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (!groups_[g].may_end_hit(length)) return false;
      const std::uint64_t blocks = groups_[g].hit_blocks(length).count();
      if (blocks > run_[g]) return false;
      needed += blocks + groups_[g].sink_blocks();
    }
    return needed != 0;
  }
  [[nodiscard, deprecated("call has_hit()")]] constexpr bool serves(std::uint64_t length) const noexcept {
    return has_hit(length);
  }

  /// Whether no longer prefix can be a hit, regardless of what follows.
  [[nodiscard]] constexpr bool is_exhausted() const noexcept { return is_exhausted_; }
  [[nodiscard, deprecated("call is_exhausted()")]] constexpr bool hopeless() const noexcept {
    return is_exhausted();
  }

 private:
  std::span<const layer_group> groups_;
  std::array<std::uint64_t, max_layer_groups> run_{};
  std::array<std::uint64_t, max_layer_groups> seen_{};
  bool is_exhausted_ = false;
};
}  // namespace paging

using hit_scan [[deprecated("its name is paging::hit_scan")]] = paging::hit_scan;

}  // namespace v0
}  // namespace llmmem
