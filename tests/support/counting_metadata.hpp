/// @file
/// A metadata source that counts, and fails when told to.
#pragma once

#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>
#include <new>

namespace llmmem_tests {

/// Counts what a structure allocates; the call numbered `fail_at` (from 1) throws `std::bad_alloc`.
class counting_metadata {
 public:
  explicit counting_metadata(std::uint64_t fail_at = 0) noexcept : fail_at_(fail_at) {}
  counting_metadata(const counting_metadata&) = delete;
  counting_metadata& operator=(const counting_metadata&) = delete;

  [[nodiscard]] llmmem::metadata_source source() noexcept {
    return {.allocate = [](void* context, std::size_t bytes, std::size_t alignment) -> void* {
              auto& self = *static_cast<counting_metadata*>(context);
              if (++self.allocations_ == self.fail_at_) throw std::bad_alloc();
              self.live_bytes_ += bytes;
              return ::operator new(bytes, std::align_val_t{alignment});
            },
            .deallocate =
                [](void* context, void* memory, std::size_t bytes, std::size_t alignment) noexcept {
                  static_cast<counting_metadata*>(context)->live_bytes_ -= bytes;
                  // Without the size: clang++ before 19 declares no such function unless asked.
                  ::operator delete(memory, std::align_val_t{alignment});
                },
            .context = this};
  }

  [[nodiscard]] std::uint64_t allocations() const noexcept { return allocations_; }
  [[nodiscard]] std::size_t live_bytes() const noexcept { return live_bytes_; }

 private:
  std::uint64_t fail_at_;
  std::uint64_t allocations_ = 0;
  std::size_t live_bytes_ = 0;
};

/// Runs `make(source)` with the first, second, third... allocation failing until it succeeds; each failure
/// must be an `out_of_memory` that gives everything back. Says how many failures there were, or -1 when a
/// rule was broken.
template <class Make>
std::int64_t fail_each_allocation(Make&& make) {
  for (std::uint64_t n = 1;; ++n) {
    counting_metadata failing(n);
    try {
      make(failing.source());
      return failing.live_bytes() == 0 ? static_cast<std::int64_t>(n) - 1 : -1;
    } catch (const llmmem::out_of_memory&) {
      if (failing.live_bytes() != 0) return -1;
    }
  }
}

}  // namespace llmmem_tests
