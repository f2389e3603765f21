/// @file
/// Choices for a world, from a fuzzer's bytes.
#pragma once

#include <cstdint>
#include <span>

namespace llmmem_tests {

/// A byte a choice; when they have run out, always the first.
class choice_bytes {
 public:
  explicit choice_bytes(std::span<const std::uint8_t> bytes) noexcept : bytes_(bytes) {}

  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }

  std::uint64_t below(std::uint64_t bound) noexcept {
    if (bytes_.empty()) return 0;
    const std::uint64_t byte = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return byte % bound;
  }
  std::uint32_t below(std::uint32_t bound) noexcept {
    return static_cast<std::uint32_t>(below(std::uint64_t{bound}));
  }
  bool once_in(std::uint64_t times) noexcept { return below(times) == 0; }

 private:
  std::span<const std::uint8_t> bytes_;
};

/// Lives in a world of type `World` until the choices have run out.
template <class World>
void live(choice_bytes choices) {
  World world(choices);
  while (!world.choices().empty())
    world.step();
  world.end();
}

}  // namespace llmmem_tests
