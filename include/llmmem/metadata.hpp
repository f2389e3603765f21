/// @file
/// The source of memory for the library's own bookkeeping: one small handle instead of an allocator template
/// parameter.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <new>
#include <string>

namespace llmmem {
inline namespace v0 {

/// A source of metadata memory: for the arrays of pools, tables and policies, never for the bytes they
/// manage.
///
/// Every structure that takes a source allocates once, in its constructor, and deallocates in its destructor,
/// so a source may be slow. It must not fail silently: `allocate` either returns memory or throws
/// (`std::bad_alloc` becomes `out_of_memory` naming the structure). The default is the global `operator new`;
/// `metadata_pmr.hpp` adapts any `std::pmr::memory_resource`. A user-defined policy calls both functions with
/// `context` first, and keeps a copy of the source for deallocation:
///
///     void* links = source.allocate(source.context, bytes, alignof(link));
///     source.deallocate(source.context, links, bytes, alignof(link));
///
/// @par Thread safety   that of the source itself; structures call it only from constructors and destructors.
struct metadata_source {
  using allocate_function = void* (*)(void* context, std::size_t bytes, std::size_t alignment);
  using deallocate_function = void (*)(void* context, void* memory, std::size_t bytes,
                                       std::size_t alignment) noexcept;

  allocate_function allocate = [](void*, std::size_t bytes, std::size_t alignment) -> void* {
    return ::operator new(bytes, std::align_val_t{alignment});
  };
  deallocate_function deallocate = [](void*, void* memory, std::size_t, std::size_t alignment) noexcept {
    ::operator delete(memory, std::align_val_t{alignment});
  };
  void* context = nullptr;  ///< passed to both; must outlive every structure built with this source
};

namespace detail {

/// Returns `bytes` from `source`, or throws `out_of_memory` naming their purpose.
[[nodiscard]] inline void* allocate_metadata(const metadata_source& source, std::size_t bytes,
                                             std::size_t alignment, const char* what) {
  void* memory = nullptr;
  try {
    memory = source.allocate(source.context, bytes, alignment);
  } catch (const std::bad_alloc&) {
    // Reported below, together with a source that returns null.
  }
  if (memory == nullptr) {
    throw out_of_memory(std::string(what) + ": no memory for " + std::to_string(bytes) +
                        " bytes of metadata; lower the option that sizes it");
  }
  return memory;
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
