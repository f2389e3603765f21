/// @file
/// What a group of layers needs of its KV cache as a sequence grows: which blocks are looked at again, and
/// which must be cached for a prefix to be a hit.
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

/// The most groups an allocator may serve.
inline constexpr std::size_t max_layer_groups = 16;

/// How far back the layers of a group look.
enum class layer_kind : std::uint8_t {
  full_attention,   ///< at every token before; latent attention (MLA) does too, its blocks are only smaller
  sliding_window,   ///< the token at position p at positions p - reach + 1 to p
  chunked_local,    ///< the token at position p at those from the last multiple of reach on
  state_snapshots,  ///< at the state after the token before: SSM, Mamba, linear attention
};

/// Which states of a step the kernels of a `state_snapshots` group write.
enum class snapshot_times : std::uint8_t {
  every_block,  ///< that at the end of each block the step passes, and the last
  end_of_step,  ///< the last alone: no length inside the step is a hit, and its states need no memory
};

/// Blocks `first` to `end` of a sequence, the latter not included.
struct block_range {
  std::uint64_t first = 0;
  std::uint64_t end = 0;

  [[nodiscard]] constexpr std::uint64_t count() const noexcept { return end - first; }
  friend constexpr bool operator==(const block_range&, const block_range&) noexcept = default;
};

/// Layers that look back equally far and keep their caches together: a block holds `block_tokens` tokens of
/// all of them.
///
/// For state layers a block holds no tokens but the state after them: block i is updated in place while
/// tokens i * block_tokens to (i + 1) * block_tokens - 1 arrive, and is then the snapshot of position
/// (i + 1) * block_tokens, from which block i + 1 goes on. Only the last is ever looked at, so that the
/// blocks before it need no memory: their places in the table stay, as placeholders. Where kernels write the
/// state at the end of a step alone (`snapshot_times::end_of_step`), a step takes one block, however long it
/// is, and only lengths at which a step ended are hits.
///
/// A window may keep the first `sinks` tokens in view: every token looks at those too, and their blocks stay
/// (attention sinks: Xiao et al., StreamingLLM, ICLR 2024).
///
/// All functions are pure; positions count from 0, "at length n" means that n tokens are there and the next
/// one has position n.
///
/// @par Complexity   O(1).
struct layer_group {
  std::string_view name = "unnamed";  ///< refers to a literal, or outlives the group
  layer_kind kind = layer_kind::full_attention;
  std::uint64_t reach = 0;          ///< tokens of the window or chunk
  std::uint32_t block_tokens = 16;  ///< of a block; for states, from one snapshot to the next
  std::uint64_t block_bytes = 0;    ///< of all layers of the group together
  std::uint64_t sinks = 0;          ///< of a window: tokens at the start that every token looks at
  snapshot_times writes = snapshot_times::every_block;  ///< of states

  /// Leading blocks that hold sinks.
  [[nodiscard]] constexpr std::uint64_t sink_blocks() const noexcept { return blocks_for(sinks); }

  /// Whether a step passes over the places of the blocks inside it.
  [[nodiscard]] constexpr bool skips_blocks() const noexcept {
    return kind == layer_kind::state_snapshots && writes == snapshot_times::end_of_step;
  }

  /// How many tokens at the start the next token does not look at, at length `n`, sinks apart.
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

  /// Blocks that `n` tokens fill or begin.
  [[nodiscard]] constexpr std::uint64_t blocks_for(std::uint64_t n) const noexcept {
    return n / block_tokens + (n % block_tokens != 0 ? 1 : 0);
  }

  /// Leading blocks that nobody looks at from length `n` on, those of sinks apart: their memory may go.
  [[nodiscard]] constexpr std::uint64_t dead_blocks(std::uint64_t n) const noexcept {
    return skipped_tokens(n) / block_tokens;
  }

  /// The blocks that are still looked at, at length `n`.
  [[nodiscard]] constexpr block_range live_blocks(std::uint64_t n) const noexcept {
    return {dead_blocks(n), blocks_for(n)};
  }

  /// New places in the table for `more` tokens behind `n`.
  [[nodiscard]] constexpr std::uint64_t places_to_append(std::uint64_t n, std::uint64_t more) const noexcept {
    return blocks_for(n + more) - blocks_for(n);
  }

  /// New blocks for `more` tokens behind `n`, appended in one step.
  [[nodiscard]] constexpr std::uint64_t blocks_to_append(std::uint64_t n, std::uint64_t more) const noexcept {
    const std::uint64_t places = places_to_append(n, more);
    return skips_blocks() && places > 1 ? 1 : places;
  }

  /// Whether a hit may end behind `length` tokens: at the end of a block, since the next one is written.
  [[nodiscard]] constexpr bool may_end_hit(std::uint64_t length) const noexcept {
    return length % block_tokens == 0;
  }

  /// The blocks that must be cached for a hit of `length` tokens, beside those of sinks; none where a new
  /// chunk begins.
  /// @pre `may_end_hit(length)`
  [[nodiscard]] constexpr block_range hit_blocks(std::uint64_t length) const noexcept {
    return live_blocks(length);
  }

  /// Whether a sequence of `length` tokens, of whose blocks the first `gone` were given back, can be cut to
  /// `n`: attention, where the blocks that the token at `n` looks at are still there, or it looks at none;
  /// states, at the end of a block whose snapshot is still there, since every other state was overwritten by
  /// the next. Cutting nothing, or everything, is always possible. @pre n <= length; gone <=
  /// dead_blocks(length)
  [[nodiscard]] constexpr bool can_cut(std::uint64_t n, std::uint64_t length,
                                       std::uint64_t gone) const noexcept {
    if (n == length) return true;
    if (kind == layer_kind::state_snapshots && n % block_tokens != 0) return false;
    const block_range needed = live_blocks(n);
    return needed.count() == 0 || needed.first >= gone || needed.end <= sink_blocks();
  }

  /// Refuses a group that no model has.
  /// @throws argument_error  naming the group, the field and its value.
  constexpr void validate() const {
    const auto refuse = [this](const char* why) {
      throw argument_error("layer_group " + std::string(name) + ": " + why);
    };
    if (block_tokens == 0) refuse("block_tokens is 0; a block holds at least 1 token");
    if (block_bytes == 0) refuse("block_bytes is 0; its layers keep nothing");
    const bool looks_back = kind == layer_kind::sliding_window || kind == layer_kind::chunked_local;
    if (looks_back && reach == 0) refuse("reach is 0; a window or chunk has at least 1 token");
    if (sinks != 0 && kind != layer_kind::sliding_window) refuse("sinks are given; only windows have them");
    if (writes != snapshot_times::every_block && kind != layer_kind::state_snapshots)
      refuse("writes is given; only states are written at the ends of steps");
  }
};

/// Attention layers of one kind.
struct attention_layers {
  std::string_view name = "attention";
  std::uint64_t layers = 0;
  std::uint64_t token_bytes = 0;  ///< that one token leaves in one layer
  std::uint32_t block_tokens = 16;

  [[nodiscard]] constexpr std::uint64_t block_bytes() const {
    return checked_multiply(checked_multiply(layers, token_bytes, "attention_layers: layers x bytes a token"),
                            block_tokens, "attention_layers: bytes a token x tokens a block");
  }
};

/// Every token looks at all before it.
[[nodiscard]] constexpr layer_group full_attention(const attention_layers& of) {
  return {of.name, layer_kind::full_attention, 0, of.block_tokens, of.block_bytes()};
}

/// @param tokens  that a token looks at, itself included.
/// @param sinks  tokens at the start that every token looks at as well.
[[nodiscard]] constexpr layer_group sliding_window(const attention_layers& of, std::uint64_t tokens,
                                                   std::uint64_t sinks = 0) {
  return {of.name, layer_kind::sliding_window, tokens, of.block_tokens, of.block_bytes(), sinks};
}

/// @param tokens  of a chunk.
[[nodiscard]] constexpr layer_group chunked_local(const attention_layers& of, std::uint64_t tokens) {
  return {of.name, layer_kind::chunked_local, tokens, of.block_tokens, of.block_bytes()};
}

/// Latent attention: looks at everything, keeps one compressed vector and one rotary key a token.
[[nodiscard]] constexpr layer_group mla(const model_shape& model, std::uint32_t block_tokens,
                                        dtype type = dtype::bf16) {
  return {model.name, layer_kind::full_attention, 0, block_tokens,
          model.kv_bytes_per_block(block_tokens, type)};
}

/// Recurrent layers.
/// @param state_bytes  of one layer's whole state, its convolution's window included.
/// @param every  tokens from one snapshot to the next.
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
/// A hit of L tokens needs of each group the blocks that the next token looks at, no more: of a window only
/// the last blocks, of states only the last snapshot. Those are consecutive, so that for each group the
/// number of cached blocks up to here without a gap tells it all. Sinks must be cached from the start on.
///
/// @par Complexity   `see` O(1); `serves` O(groups).
class hit_scan {
 public:
  /// @param groups  at most `max_layer_groups`; outlive the scan.
  constexpr explicit hit_scan(std::span<const layer_group> groups) noexcept : groups_(groups) {}

  /// The next block of `group` is cached, or is not.
  constexpr void see(std::size_t group, bool cached) noexcept {
    run_[group] = cached ? run_[group] + 1 : 0;
    const bool is_sink = seen_[group]++ < groups_[group].sink_blocks();
    if (!cached && (is_sink || groups_[group].kind == layer_kind::full_attention)) hopeless_ = true;
  }

  /// Whether a hit of `length` tokens is one for every group. A length that needs no block of any group (all
  /// of them begin a new chunk) is none: nothing would be found. @pre all full blocks up to there were seen,
  /// and none behind.
  [[nodiscard]] constexpr bool serves(std::uint64_t length) const noexcept {
    if (hopeless_) return false;
    std::uint64_t needed = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (!groups_[g].may_end_hit(length)) return false;
      const std::uint64_t blocks = groups_[g].hit_blocks(length).count();
      if (blocks > run_[g]) return false;
      needed += blocks + groups_[g].sink_blocks();
    }
    return needed != 0;
  }

  /// No longer prefix is a hit, whatever comes.
  [[nodiscard]] constexpr bool hopeless() const noexcept { return hopeless_; }

 private:
  std::span<const layer_group> groups_;
  std::array<std::uint64_t, max_layer_groups> run_{};
  std::array<std::uint64_t, max_layer_groups> seen_{};
  bool hopeless_ = false;
};
}  // namespace paging

using hit_scan [[deprecated("its name is paging::hit_scan")]] = paging::hit_scan;

}  // namespace v0
}  // namespace llmmem
