/// @file
/// Metadata from a `std::pmr::memory_resource`. Separate from metadata.hpp because `<memory_resource>` is a
/// heavy include.
#pragma once

#include <llmmem/metadata.hpp>

#include <memory_resource>

namespace llmmem {
inline namespace v0 {

/// A metadata source over `upstream`, which must outlive every structure built with it.
[[nodiscard]] inline metadata_source metadata_from(std::pmr::memory_resource& upstream) noexcept {
  return {.allocate = [](void* context, std::size_t bytes, std::size_t alignment) -> void* {
            return static_cast<std::pmr::memory_resource*>(context)->allocate(bytes, alignment);
          },
          .deallocate =
              [](void* context, void* memory, std::size_t bytes, std::size_t alignment) noexcept {
                static_cast<std::pmr::memory_resource*>(context)->deallocate(memory, bytes, alignment);
              },
          .context = &upstream};
}

}  // namespace v0
}  // namespace llmmem
