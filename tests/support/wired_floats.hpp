/// @file
/// Floats, and what a wire restores of them.
#pragma once

#include <llmmem/comm/wire_form.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace llmmem_tests {

using floats = std::vector<float>;

/// Numbers of both signs and of sizes that differ by up to 2^20.
inline floats floats_of(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  floats made(count);
  for (float& each : made) {
    each = static_cast<float>(static_cast<double>(random() % 2'000'001) - 1e6) *
           static_cast<float>(1 << (random() % 20));
  }
  return made;
}

inline floats restored(const llmmem::wire_form& wire, std::span<const float> values) {
  std::vector<std::byte> bytes(wire.bytes(values.size()));
  wire.encode(values, bytes.data());
  floats out(values.size());
  wire.decode(bytes.data(), out);
  return out;
}

/// The sum of what each message restores, one after the other.
inline floats sum_of(const std::vector<floats>& parts, const llmmem::wire_form& wire) {
  floats sum = restored(wire, parts[0]);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const floats more = restored(wire, parts[i]);
    for (std::size_t k = 0; k < sum.size(); ++k)
      sum[k] += more[k];
  }
  return sum;
}

}  // namespace llmmem_tests
