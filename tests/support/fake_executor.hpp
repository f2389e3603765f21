/// @file
/// Kernels on the streams of a `fake_device`: the host executor runs their work when the stream comes to it.
#pragma once

#include <llmmem/device/errors.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/result.hpp>

#include <cstdint>

#include "support/fake_device.hpp"

namespace llmmem_tests {

class fake_executor {
 public:
  fake_executor(fake_runtime runtime, fake_runtime::stream stream) : runtime_(runtime), stream_(stream) {}

  template <llmmem::cache_hint Read = llmmem::cache_hint::streaming,
            llmmem::cache_hint Write = llmmem::cache_hint::kept, class Map, class Op>
  llmmem::result<void> move(const Map& map, const Op& op) const {
    return launch([map, op] { static_cast<void>(llmmem::host_executor{}.move<Read, Write>(map, op)); });
  }
  template <class Work>
  llmmem::result<void> each(const Work& work) const {
    return launch([work] { static_cast<void>(llmmem::host_executor{}.each(work)); });
  }

 private:
  template <class Kernel>
  llmmem::result<void> launch(Kernel kernel) const {
    const llmmem::device_status status = runtime_.launch(kernel, stream_);
    if (status == 0) return {};
    return llmmem::failure{llmmem::errc::device_failed, status, 0, 0, "fake_executor: launch"};
  }

  fake_runtime runtime_;
  fake_runtime::stream stream_;
};

}  // namespace llmmem_tests
