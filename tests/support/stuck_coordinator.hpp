/// @file
/// A disk that hangs.
#pragma once

#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <atomic>
#include <cstdint>

namespace llmmem_tests {

/// One rank, each of whose checkpoints hangs at its beginning while this is closed. It is open at first.
class stuck_coordinator : public llmmem::solo_coordinator<llmmem::testing::simulated_storage> {
 public:
  using llmmem::solo_coordinator<llmmem::testing::simulated_storage>::solo_coordinator;

  void close() { is_open_ = false; }
  /// Lets go of what hangs.
  void open() {
    is_open_ = true;
    is_open_.notify_all();
  }
  [[nodiscard]] llmmem::checkpoint_draft begin(std::uint64_t step) {
    is_open_.wait(false);
    return solo_coordinator::begin(step);
  }

 private:
  std::atomic<bool> is_open_{true};
};

}  // namespace llmmem_tests
