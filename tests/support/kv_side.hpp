/// @file
/// A cache of keys and values with its memory, whose bytes follow from the tokens; and streams to carry them.
#pragma once

#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/kv_transfer.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

using namespace llmmem;

/// An allocator with the memory behind it, on one side of the wire.
template <class Traits = paged_traits>
struct side {
  side(const paged_options& options, const kv_layout& shape)
      : cache(options), layout(shape), bytes(layout.total_bytes(cache.max_physical_blocks())) {}

  [[nodiscard]] kv_memory memory() { return {bytes.data(), cache.max_physical_blocks(), layout}; }

  /// Each vector's bytes are a function of the tokens up to its own, its layer, its head and its plane.
  template <class Visit>
  void each_byte(sequence_id sequence, std::span<const token_id> tokens, Visit&& visit) {
    std::uint64_t history = 1;
    for (std::uint64_t t = 0; t < tokens.size(); ++t) {
      history = random_numbers(history * 31 + static_cast<std::uint64_t>(tokens[t])).next();
      if (layout.part.cp_rank_of(t) != layout.part.cp_rank) continue;  // another rank's
      const std::uint64_t block = to_index(cache.blocks(sequence)[t / cache.block_tokens()]);
      const std::uint64_t in_block = layout.part.local_of(t) % layout.block_tokens;
      for (std::uint32_t p = 0; p < layout.planes(); ++p) {
        if (in_block >= layout.tokens_of(p)) continue;  // what a block's tokens share follows from the first
        const plane_strides strides = layout.strides(p, cache.max_physical_blocks());
        for (std::uint64_t layer = 0; layer < layout.layers; ++layer)
          for (std::uint64_t head = 0; head < layout.heads_of(p); ++head)
            for (std::uint64_t i = 0; i < strides.vector_bytes; ++i) {
              const auto value = static_cast<std::uint8_t>(
                  random_numbers(history + layer * 3 + head * 5 + p * 7 + i).next());
              visit(bytes[strides.offset(layer, block, in_block, head) + i], std::byte{value});
            }
      }
    }
  }
  sequence_id write(const std::vector<token_id>& tokens, const prefix_context& context = {}) {
    const sequence_id sequence = cache.create(context).value();
    cache.append(sequence, tokens).value();
    each_byte(sequence, tokens, [](std::byte& at, std::byte value) { at = value; });
    cache.commit(sequence).value();
    return sequence;
  }
  [[nodiscard]] bool holds(sequence_id sequence, const std::vector<token_id>& tokens) {
    bool all = true;
    each_byte(sequence, tokens, [&](std::byte& at, std::byte value) { all = all && at == value; });
    return all;
  }

  paged_allocator<Traits> cache;
  kv_layout layout;
  std::vector<std::byte> bytes;
};

/// What a sequence is as bytes, between a sink and a source.
struct wire {
  std::vector<std::byte> bytes{};
  std::size_t at = 0;

  [[nodiscard]] auto sink() {
    return [this](std::span<const std::byte> part) noexcept {
      bytes.insert(bytes.end(), part.begin(), part.end());
      return true;
    };
  }
  [[nodiscard]] auto source() {
    at = 0;
    return [this](std::span<std::byte> part) noexcept {
      if (part.size() > bytes.size() - at) return false;
      if (!part.empty()) std::memcpy(part.data(), bytes.data() + at, part.size());
      at += part.size();
      return true;
    };
  }
};

}  // namespace llmmem_tests
