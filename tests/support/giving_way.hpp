/// @file
/// Lets other threads come in between the atomic steps of a lock-free operation.
#pragma once

#include <cstdint>
#include <thread>

#include "support/random.hpp"

namespace llmmem_tests {

/// An `interleaving` that gives way now and then. Each thread seeds its own sequence first.
struct giving_way {
  static void seed(std::uint64_t with) noexcept { random() = random_numbers(with); }
  static void point() noexcept {
    const std::uint64_t choice = random().below(std::uint64_t{64});
    if (choice == 0) {
      std::this_thread::yield();
    } else if (choice <= 4) {
      // A little later than the others: two threads on two cores meet in other places.
      for (std::uint64_t i = random().below(std::uint64_t{64}); i > 0; --i)
        static_cast<void>(random().next());
    }
  }

 private:
  static random_numbers& random() noexcept {
    thread_local random_numbers numbers(0);
    return numbers;
  }
};

}  // namespace llmmem_tests
