/// @file
/// Random pieces of bytes at any alignment, for the tests of erasure codes.
#pragma once

#include <llmmem/redundancy/simd_path.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace llmmem_tests {

using byte_vector = std::vector<std::byte>;

inline byte_vector random_bytes(std::mt19937_64& random, std::size_t count) {
  byte_vector bytes(count);
  for (std::byte& each : bytes)
    each = static_cast<std::byte>(random());
  return bytes;
}

/// Bytes at a chosen distance from an aligned address, between canaries that must stay.
class guarded_piece {
 public:
  guarded_piece(const byte_vector& contents, std::size_t offset)
      : memory_(contents.size() + offset + 2 * guard, canary),
        first_(guard + offset),
        count_(contents.size()) {
    for (std::size_t i = 0; i < count_; ++i)
      memory_[first_ + i] = contents[i];
  }

  [[nodiscard]] std::span<std::byte> bytes() { return std::span(memory_).subspan(first_, count_); }
  [[nodiscard]] byte_vector contents() { return {bytes().begin(), bytes().end()}; }
  [[nodiscard]] bool guards_stand() const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if ((i < first_ || i >= first_ + count_) && memory_[i] != canary) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t guard = 64;
  static constexpr std::byte canary{0xA5};
  byte_vector memory_;
  std::size_t first_;
  std::size_t count_;
};

/// The paths that this machine has.
inline std::vector<llmmem::simd_path> paths_here() {
  std::vector<llmmem::simd_path> here;
  for (const llmmem::simd_path path : llmmem::simd_paths) {
    if (llmmem::has_simd_path(path)) here.push_back(path);
  }
  return here;
}

template <class Byte, class Pieces>
std::vector<std::span<Byte>> spans_of(Pieces& pieces) {
  return {pieces.begin(), pieces.end()};
}

}  // namespace llmmem_tests
