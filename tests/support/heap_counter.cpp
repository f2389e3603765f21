#include "support/heap_counter.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::uint64_t> calls{0};

std::atomic<bool> is_short{false};
std::atomic<std::uint64_t> requests{0};  // while it is
std::atomic<std::uint64_t> refusals{0};
std::uint64_t first_refused = 0;
bool refuses_for_ever = false;
thread_local bool is_spared = false;

bool is_refused() {
  if (!is_short.load(std::memory_order_acquire) || is_spared) return false;
  const std::uint64_t request = requests.fetch_add(1, std::memory_order_relaxed) + 1;
  if (request != first_refused && !(refuses_for_ever && request > first_refused)) return false;
  refusals.fetch_add(1, std::memory_order_relaxed);
  return true;
}

// Asks for just the bytes wanted, so that the address sanitizer sees the first one past them.
void* counted(std::size_t bytes, std::size_t alignment) {
  calls.fetch_add(1, std::memory_order_relaxed);
  if (is_refused()) throw std::bad_alloc();
  if (bytes == 0) bytes = 1;
  void* memory = nullptr;
  if (alignment <= alignof(std::max_align_t)) {
    memory = std::malloc(bytes);
  } else if (posix_memalign(&memory, alignment, bytes) != 0) {
    memory = nullptr;
  }
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

std::uint64_t llmmem_tests::heap_allocations() noexcept {
  return calls.load(std::memory_order_relaxed);
}

llmmem_tests::short_heap::short_heap(std::uint64_t first, heap_refusal how) noexcept {
  first_refused = first;
  refuses_for_ever = how == heap_refusal::forever;
  requests = 0;
  refusals = 0;
  is_spared = true;
  is_short.store(true, std::memory_order_release);
}
llmmem_tests::short_heap::~short_heap() {
  is_short.store(false, std::memory_order_release);
  is_spared = false;
}
std::uint64_t llmmem_tests::short_heap::refused() noexcept {
  return refusals.load(std::memory_order_relaxed);
}

// Every form, though the standard library's others end in the first two: a sanitizer's runtime brings its
// own, and memory from there must not reach our delete.
void* operator new(std::size_t bytes) {
  return counted(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes, alignment);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](std::size_t bytes) {
  return operator new(bytes);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return operator new(bytes, alignment);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& nothrow) noexcept {
  return operator new(bytes, nothrow);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment, const std::nothrow_t& nothrow) noexcept {
  return operator new(bytes, alignment, nothrow);
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
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(memory);
}
