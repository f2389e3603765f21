#include "support/heap_counter.hpp"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

// Unlike in the tests, not atomic, because a locked instruction would slow the peers that allocate.
// Benchmarks run on one thread.
std::uint64_t calls = 0;

void* counted(void* memory) {
  ++calls;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

std::uint64_t llmmem_benchmarks::heap_allocations() noexcept {
  return calls;
}

// The array, sized and nothrow forms of the standard library all end in these.
void* operator new(std::size_t bytes) {
  return counted(std::malloc(bytes == 0 ? 1 : bytes));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(align, (bytes + align - 1) / align * align));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
