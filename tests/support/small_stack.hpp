/// @file
/// A team of one thread, whose stack is as small as musl's.
#pragma once

#include <doctest/doctest.h>

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace llmmem_tests {

/// Runs all parts in a thread with a stack of so many bytes.
template <std::size_t Bytes>
struct small_stack_team {
  template <class Run>
  void operator()(std::uint64_t parts, const Run& run) const {
    struct job {
      std::uint64_t parts;
      const Run& run;
    } all{parts, run};
    pthread_attr_t attributes;
    REQUIRE(pthread_attr_init(&attributes) == 0);
    REQUIRE(pthread_attr_setstacksize(&attributes, Bytes) == 0);
    pthread_t thread{};
    const auto work = [](void* of) -> void* {
      const job& mine = *static_cast<const job*>(of);
      for (std::uint64_t part = 0; part < mine.parts; ++part)
        mine.run(part);
      return nullptr;
    };
    REQUIRE(pthread_create(&thread, &attributes, work, &all) == 0);
    REQUIRE(pthread_join(thread, nullptr) == 0);
    pthread_attr_destroy(&attributes);
  }
};

}  // namespace llmmem_tests
