/// @file
/// Where the library's own bookkeeping comes from: one small handle instead of an allocator template
/// parameter.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <new>
#include <string>

namespace llmmem {
inline namespace v0 {

/// Source of metadata memory: the arrays of pools, tables and policies, never the bytes they manage.
///
/// Every structure that takes one allocates once, in its constructor, and gives back in its destructor, so a
/// source may be slow; it must not fail silently: `allocate` either returns memory or throws
/// (`std::bad_alloc` becomes `out_of_memory` naming the structure). The default is the global `operator new`;
/// `metadata_pmr.hpp` adapts any `std::pmr::memory_resource`. A policy of yours calls both functions with
/// `context` first, and keeps a copy of the source to give back with:
///
///     void* links = source.allocate(source.context, bytes, alignof(link));
///     source.deallocate(source.context, links, bytes, alignof(link));
///
/// @par Thread safety   as the source's own; structures call it only from constructors and destructors.
struct metadata_source {
  using allocate_function = void* (*)(void* context, std::size_t bytes, std::size_t alignment);
  using deallocate_function = void (*)(void* context, void* memory, std::size_t bytes,
                                       std::size_t alignment) noexcept;

  allocate_function allocate = [](void*, std::size_t bytes, std::size_t alignment) -> void* {
    return ::operator new(bytes, std::align_val_t{alignment});
  };
  deallocate_function deallocate = [](void*, void* memory, std::size_t bytes,
                                      std::size_t alignment) noexcept {
    ::operator delete(memory, bytes, std::align_val_t{alignment});
  };
  void* context = nullptr;  ///< handed to both; must outlive every structure built with this source
};

namespace detail {

/// `bytes` from `source`, or `out_of_memory` naming what they were for.
[[nodiscard]] inline void* allocate_metadata(const metadata_source& source, std::size_t bytes,
                                             std::size_t alignment, const char* what) {
  void* memory = nullptr;
  try {
    memory = source.allocate(source.context, bytes, alignment);
  } catch (const std::bad_alloc&) {
    // Told below, together with a source that returns null.
  }
  if (memory == nullptr) {
    throw out_of_memory(std::string(what) + ": no memory for " + std::to_string(bytes) +
                        " bytes of metadata; make what it is sized by smaller");
  }
  return memory;
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
