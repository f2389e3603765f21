/// @file
/// A grid whose blocks run beside each other: for the thread sanitizer, which tells what on a device would be
/// a race between blocks.
#pragma once

#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <cstdint>
#include <thread>
#include <vector>

namespace llmmem_tests {

/// Each launch is walked by several threads, and ends when all have: the next one comes after it, as in a
/// stream.
class threaded_grid {
 public:
  explicit threaded_grid(const llmmem::launch_limits& limits = {}, std::uint32_t threads = 4)
      : limits_(limits), threads_(threads) {}

  template <llmmem::cache_hint Read = llmmem::cache_hint::streaming,
            llmmem::cache_hint Write = llmmem::cache_hint::kept, llmmem::row_map Map, llmmem::row_op Op>
  llmmem::result<void> move(const Map& map, const Op& op) const {
    return beside([&](const auto& part) { return part.template move<Read, Write>(map, op); });
  }
  template <class Work>
  llmmem::result<void> each(const Work& work) const {
    return beside([&](const auto& part) { return part.each(work); });
  }

 private:
  template <class Run>
  llmmem::result<void> beside(const Run& run) const {
    std::vector<llmmem::result<void>> done(threads_);
    std::vector<std::thread> all;
    for (std::uint32_t t = 0; t < threads_; ++t)
      all.emplace_back([&, t] { done[t] = run(llmmem::testing::grid_executor(limits_, {t, threads_})); });
    for (std::thread& each : all)
      each.join();
    for (const llmmem::result<void>& each : done) {
      if (!each) return each;
    }
    return {};
  }

  llmmem::launch_limits limits_;
  std::uint32_t threads_;
};

}  // namespace llmmem_tests
