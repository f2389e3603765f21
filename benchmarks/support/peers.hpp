/// @file
/// The general-purpose allocators that a C++ author would use, each behind the same two calls.
///
/// None replaces `malloc` in the process: mimalloc is loaded with its symbols kept to itself, jemalloc is
/// linked under other names (benchmarks/CMakeLists.txt says why), so the glibc row is glibc.
#pragma once

#include <malloc.h>

#include <climits>
#include <cstddef>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#ifdef LLMMEM_BENCH_MIMALLOC
#include <dlfcn.h>
#endif

#ifdef LLMMEM_BENCH_JEMALLOC
extern "C" void* bench_jemalloc_malloc(std::size_t bytes);
extern "C" void bench_jemalloc_free(void* memory);
#endif

namespace llmmem_benchmarks {

/// An allocator for comparison. Both calls go through a pointer for every peer.
struct peer {
  const char* name;
  void* (*allocate)(std::size_t bytes);
  void (*free)(void* memory);
};

#ifdef LLMMEM_BENCH_MIMALLOC
namespace detail {

template <class Function>
Function symbol(void* library, const char* name) {
  void* const address = dlsym(library, name);
  if (address == nullptr) throw std::runtime_error(dlerror());
  return reinterpret_cast<Function>(address);
}

inline peer load_mimalloc() {
  // Never closed, because its blocks may live until the process ends.
  void* const library = dlopen(LLMMEM_BENCH_MIMALLOC, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (library == nullptr) throw std::runtime_error(dlerror());
  return {"mimalloc", symbol<void* (*)(std::size_t)>(library, "mi_malloc"),
          symbol<void (*)(void*)>(library, "mi_free")};
}

}  // namespace detail
#endif

/// Stops glibc from returning memory to the system, so that blocks of 64 KiB come from its heap as with the
/// other peers, and rebuilt data does not fault its pages in again. Call it before any timing.
inline void keep_freed_memory() {
  if (mallopt(M_MMAP_THRESHOLD, 1 << 30) != 1 || mallopt(M_TRIM_THRESHOLD, INT_MAX) != 1) {
    throw std::runtime_error("mallopt refused to turn trimming off");
  }
}

/// The peers of this build, glibc first, set to keep freed memory.
inline std::vector<peer> peers() {
  keep_freed_memory();
  std::vector<peer> all{{"glibc", std::malloc, std::free}};
#ifdef LLMMEM_BENCH_MIMALLOC
  all.push_back(detail::load_mimalloc());
#endif
#ifdef LLMMEM_BENCH_JEMALLOC
  all.push_back({"jemalloc", bench_jemalloc_malloc, bench_jemalloc_free});
#endif
  return all;
}

}  // namespace llmmem_benchmarks
