/// @file
/// Sums of products over pieces whose lengths differ.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/xor_parity.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline constexpr std::size_t code_block = 2048;
inline constexpr std::size_t code_spans = 256;

/// The bytes that replace those after the end of a piece.
// Not a std::array, because nvcc 13 rejects one of this size.
inline constexpr std::byte code_zeros[code_block] = {};

/// Returns the bytes of a piece from `at` on: at most `bytes`, and none after the piece's end.
[[nodiscard]] inline std::span<const std::byte> code_part(std::span<const std::byte> piece, std::size_t at,
                                                          std::size_t bytes) noexcept {
  const std::size_t skipped = std::min(at, piece.size());
  return piece.subspan(skipped, std::min(bytes, piece.size() - skipped));
}

/// Computes `targets = matrix * sources`: at once up to the end of the shortest, then block by block, with
/// zeros for ended pieces and a spill buffer for ended targets.
template <class Engine>
inline void code_product(const Engine& engine, const typename Engine::matrix& matrix,
                         std::span<const std::span<const std::byte>> sources,
                         std::span<const std::span<std::byte>> targets) noexcept {
  const std::byte* from[code_spans];
  std::byte* to[code_spans];
  std::size_t common = targets[0].size();
  std::size_t end = 0;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    common = std::min(common, targets[t].size());
    end = std::max(end, targets[t].size());
    to[t] = targets[t].data();
  }
  for (std::size_t s = 0; s < sources.size(); ++s) {
    common = std::min(common, sources[s].size());
    from[s] = sources[s].data();
  }
  if (common != 0) engine.multiply(matrix, from, to, common);

  std::byte spill[code_block];  // for all ended targets
  for (std::size_t at = common; at < end;) {
    std::size_t until = std::min(end, at + code_block);
    for (const std::span<const std::byte> source : sources) {
      if (source.size() > at) until = std::min(until, source.size());
    }
    for (const std::span<std::byte> target : targets) {
      if (target.size() > at) until = std::min(until, target.size());
    }
    for (std::size_t s = 0; s < sources.size(); ++s)
      from[s] = sources[s].size() > at ? sources[s].data() + at : code_zeros;
    for (std::size_t t = 0; t < targets.size(); ++t)
      to[t] = targets[t].size() > at ? targets[t].data() + at : spill;
    engine.multiply(matrix, from, to, until - at);
    at = until;
  }
}

/// Computes `parity += matrix's column * (before ^ after)`.
template <class Engine>
inline void code_update(const Engine& engine, const typename Engine::matrix& matrix, std::uint32_t column,
                        std::span<const std::byte> before, std::span<const std::byte> after,
                        std::span<const std::span<std::byte>> parity) noexcept {
  const std::size_t end = std::max(before.size(), after.size());
  const simd_path path = best_simd_path();
  std::byte* to[code_spans];
  std::byte delta[xor_block];
  for (std::size_t at = 0; at < end; at += xor_block) {
    const std::span<std::byte> block = std::span(delta).first(std::min(xor_block, end - at));
    const std::span<const std::byte> both[] = {code_part(before, at, block.size()),
                                               code_part(after, at, block.size())};
    static_cast<void>(xor_all(block, both, path));
    for (std::size_t p = 0; p < parity.size(); ++p)
      to[p] = parity[p].data() + at;
    engine.add(matrix, column, block.data(), to, block.size());
  }
}

/// Returns the index of the first parity that differs from `matrix * data`, or `parity.size()`.
template <class Engine>
inline std::size_t code_verify(const Engine& engine, const typename Engine::matrix& matrix,
                               std::span<const std::span<const std::byte>> data,
                               std::span<const std::span<const std::byte>> parity) noexcept {
  // Computes all parities of one block at a time, in at most 64 KiB of the stack.
  std::byte made[65536];
  const std::size_t block = std::min(std::size_t{8192}, sizeof(made) / parity.size() / 64 * 64);
  std::array<std::span<const std::byte>, code_spans> from{};
  std::array<std::span<std::byte>, code_spans> to{};
  std::size_t end = 0;
  for (const std::span<const std::byte> each : parity)
    end = std::max(end, each.size());
  std::size_t first = parity.size();
  for (std::size_t at = 0; at < end; at += block) {
    for (std::size_t d = 0; d < data.size(); ++d)
      from[d] = code_part(data[d], at, block);
    for (std::size_t p = 0; p < parity.size(); ++p)
      to[p] = std::span(made).subspan(p * block, code_part(parity[p], at, block).size());
    code_product(engine, matrix, std::span<const std::span<const std::byte>>(from).first(data.size()),
                 std::span<const std::span<std::byte>>(to).first(parity.size()));
    for (std::size_t p = 0; p < first; ++p) {
      if (!to[p].empty() && std::memcmp(to[p].data(), parity[p].data() + at, to[p].size()) != 0) first = p;
    }
  }
  return first;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
