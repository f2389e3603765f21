/// @file
/// libCacheSim (Yang et al., 2021) as a peer: the simulator that cache research compares by. Only where
/// LLMMEM_LIBCACHESIM_DIR names a checkout that was built in its folder `build`, or an installation.
#pragma once

#include <cstdint>
#include <memory>

namespace llmmem_benchmarks {

enum class libcachesim_policy { lru, arc, s3fifo };

/// One of its caches, of objects of size 1. Its headers stay out of this one: they define macros of one
/// letter.
class libcachesim_cache {
 public:
  /// Its hash table has as many chains as the cache has objects, or up to twice that.
  libcachesim_cache(libcachesim_policy policy, std::uint64_t capacity);

  /// Returns whether `key` is there; afterwards it is, as the policy places it.
  bool access(std::uint64_t key);

  struct parts;

 private:
  struct discard {
    void operator()(parts* gone) const noexcept;
  };
  std::unique_ptr<parts, discard> parts_;
};

}  // namespace llmmem_benchmarks
