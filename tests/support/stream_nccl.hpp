/// @file
/// NCCL of a simulated network on the streams of a fake device: what a group has put runs when its stream has
/// done everything that it was given before.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "support/fake_device.hpp"
#include "support/fake_nccl.hpp"

namespace llmmem_tests {

class stream_nccl : public fake_nccl<> {
 public:
  stream_nccl(fake_world& world, llmmem::testing::sim_endpoint& end, fake_runtime runtime)
      : fake_nccl<>(world, end), runtime_(runtime) {}

  ncclResult_t send(const void* bytes, std::size_t count, int to, ncclComm_t comm, cudaStream_t stream) {
    on_ = reinterpret_cast<std::uintptr_t>(stream);
    return fake_nccl<>::send(bytes, count, to, comm, stream);
  }
  ncclResult_t recv(void* bytes, std::size_t count, int from, ncclComm_t comm, cudaStream_t stream) {
    on_ = reinterpret_cast<std::uintptr_t>(stream);
    return fake_nccl<>::recv(bytes, count, from, comm, stream);
  }
  ncclResult_t group_end() {
    const ncclResult_t status = fake_nccl<>::group_end();
    if (on_ == 0) return status;
    has_come_ = std::make_shared<bool>(false);
    if (runtime_.launch([come = has_come_] { *come = true; }, on_) == 0) return status;
    has_come_.reset();
    return ncclUnhandledCudaError;
  }
  ncclResult_t async_error(ncclComm_t comm, ncclResult_t* status) {
    runtime_.proceed(2);
    if (has_come_ && !*has_come_) {
      *status = ncclInProgress;
      return ncclSuccess;
    }
    has_come_.reset();
    return fake_nccl<>::async_error(comm, status);
  }

 private:
  fake_runtime runtime_;
  std::uintptr_t on_ = 0;
  std::shared_ptr<bool> has_come_{};
};

}  // namespace llmmem_tests
