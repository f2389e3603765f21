/// @file
/// A model whose keys and values can be checked: each is a digest of all tokens before it.
#pragma once

#include <llmmem/offload/kv_mover.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "support/manual_transfers.hpp"

namespace llmmem_tests {

/// The memory behind a cache's blocks: for each group, block and layer one number a token; of states, the
/// last.
class kv_contents {
 public:
  static constexpr std::uint32_t layers = 2;

  kv_contents(std::span<const llmmem::layer_group> groups, std::uint64_t blocks)
      : groups_(groups.begin(), groups.end()), memory_(groups.size()) {
    for (std::size_t g = 0; g < groups.size(); ++g)
      memory_[g].resize(blocks * layers * groups[g].block_tokens);
  }

  void wipe() {
    for (auto& group : memory_)
      std::fill(group.begin(), group.end(), 0);
  }
  [[nodiscard]] std::span<const llmmem::layer_group> groups() const { return groups_; }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t g) const {
    return std::uint64_t{layers} * groups_[g].block_tokens * sizeof(std::uint64_t);
  }
  [[nodiscard]] std::byte* block(std::size_t g, llmmem::block_id block) {
    return reinterpret_cast<std::byte*>(&at(g, block, 0, 0));
  }
  std::uint64_t& at(std::size_t g, llmmem::block_id block, std::uint32_t layer, std::uint64_t token) {
    return memory_[g][(llmmem::to_index(block) * std::uint64_t{layers} + layer) * groups_[g].block_tokens +
                      token];
  }

  /// What the digest of a prefix becomes by one more token.
  [[nodiscard]] static std::uint64_t next(std::uint64_t digest, std::uint64_t token) {
    std::uint64_t x = digest ^ (token + 0x9E37'79B9'7F4A'7C15ULL);
    x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
    return x ^ (x >> 31);
  }
  [[nodiscard]] static std::uint64_t value(std::uint64_t digest, std::size_t g, std::uint32_t layer) {
    return next(digest, g * 64 + layer);
  }

 private:
  std::vector<llmmem::layer_group> groups_;
  std::vector<std::vector<std::uint64_t>> memory_;
};

/// Copies blocks of a `kv_contents` as a stream does: in order, when the test says.
class manual_mover {
 public:
  using fence_type = manual_fence;
  static constexpr bool runs_on_caller = false;

  manual_mover(kv_contents& contents, transfer_list& stream) : contents_(&contents), stream_(&stream) {}

  [[nodiscard]] std::size_t groups() const noexcept { return contents_->groups().size(); }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t g) const noexcept { return contents_->block_bytes(g); }
  [[nodiscard]] std::uint32_t layers(std::size_t) const noexcept { return kv_contents::layers; }

  llmmem::result<manual_fence> save(std::size_t g, const llmmem::offload::slot_memory& slots,
                                    std::span<const llmmem::offload::slot_pair> pairs,
                                    const manual_fence& after) {
    return begin(g, slots, pairs, {0, kv_contents::layers}, true, after);
  }
  llmmem::result<manual_fence> restore(std::size_t g, const llmmem::offload::slot_memory& slots,
                                       std::span<const llmmem::offload::slot_pair> pairs,
                                       const llmmem::layer_range& part) {
    return begin(g, slots, pairs, part, false, {});
  }

 private:
  llmmem::result<manual_fence> begin(std::size_t g, const llmmem::offload::slot_memory& slots,
                                     std::span<const llmmem::offload::slot_pair> pairs,
                                     llmmem::layer_range part, bool saves, const manual_fence& after) {
    const auto bytes = static_cast<std::size_t>(contents_->block_bytes(g) / kv_contents::layers);
    const std::vector<llmmem::offload::slot_pair> all(pairs.begin(), pairs.end());
    const auto each = [=, contents = contents_](auto&& f) {
      for (const auto& pair : all) {
        for (std::uint32_t l = part.first; l < part.first + part.count; ++l)
          f(contents->block(g, pair.block) + l * bytes, slots.data + pair.slot * slots.stride + l * bytes);
      }
    };
    // A block may still be the source of an earlier copy on the stream: then it is not filled.
    if (saves || stream_->under_way() == 0)
      each([&](std::byte* block, std::byte* slot) { std::memset(saves ? slot : block, 0xDD, bytes); });
    return stream_->begin(
        [=](ending) {
          each([&](std::byte* block, std::byte* slot) {
            std::memcpy(saves ? slot : block, saves ? block : slot, bytes);
          });
        },
        after);
  }

  kv_contents* contents_;
  transfer_list* stream_;
};

static_assert(llmmem::offload::kv_mover<manual_mover>);

/// A sequence and what its tokens' keys and values must be.
struct kv_sequence {
  llmmem::sequence_id id{};
  std::vector<llmmem::token_id> tokens;
  std::vector<std::uint64_t> digests;  ///< behind each token
  std::uint64_t epoch = 0;
  std::uint64_t computed = 0;

  void push(llmmem::token_id token) {
    tokens.push_back(token);
    digests.push_back(
        kv_contents::next(digests.empty() ? epoch * 77 : digests.back(), static_cast<std::uint64_t>(token)));
  }
};

/// What is wrong with what the next token of a sequence of `length` tokens looks at; empty: nothing.
/// @param table  called with a group.
template <class Table>
std::string wrong_contents(kv_contents& contents, const kv_sequence& sequence, std::uint64_t length,
                           Table&& table) {
  for (std::size_t g = 0; g < contents.groups().size(); ++g) {
    const llmmem::layer_group& group = contents.groups()[g];
    const auto blocks = table(g);
    const bool is_state = group.kind == llmmem::layer_kind::state_snapshots;
    for (std::uint64_t p = 0; p < length; ++p) {
      if (is_state && p + 1 != length) continue;
      if (!is_state && p < group.skipped_tokens(length) && p >= group.sinks) continue;
      const llmmem::block_id block = blocks[static_cast<std::size_t>(p / group.block_tokens)];
      if (block == llmmem::null_block)
        return "group " + std::to_string(g) + " has no block for token " + std::to_string(p);
      for (std::uint32_t l = 0; l < kv_contents::layers; ++l) {
        const std::uint64_t found = contents.at(g, block, l, is_state ? 0 : p % group.block_tokens);
        if (found == kv_contents::value(sequence.digests[static_cast<std::size_t>(p)], g, l)) continue;
        return "group " + std::to_string(g) + " layer " + std::to_string(l) + " token " + std::to_string(p) +
               " of " + std::to_string(length) + " has wrong contents";
      }
    }
  }
  return {};
}

/// Computes the keys and values of tokens `first` to `end`.
template <class Table>
void compute(kv_contents& contents, const kv_sequence& sequence, std::uint64_t first, std::uint64_t end,
             Table&& table) {
  for (std::size_t g = 0; g < contents.groups().size(); ++g) {
    const llmmem::layer_group& group = contents.groups()[g];
    const auto blocks = table(g);
    const bool is_state = group.kind == llmmem::layer_kind::state_snapshots;
    for (std::uint64_t p = first; p < end; ++p) {
      const llmmem::block_id block = blocks[static_cast<std::size_t>(p / group.block_tokens)];
      if (block == llmmem::null_block) continue;
      for (std::uint32_t l = 0; l < kv_contents::layers; ++l) {
        contents.at(g, block, l, is_state ? 0 : p % group.block_tokens) =
            kv_contents::value(sequence.digests[static_cast<std::size_t>(p)], g, l);
      }
    }
  }
}

}  // namespace llmmem_tests
