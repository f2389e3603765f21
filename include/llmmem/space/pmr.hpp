/// @file
/// Host memory from any `std::pmr::memory_resource`. Separate from host.hpp, so that only its users pay for
/// `<memory_resource>`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/space/host.hpp>

#include <cstddef>
#include <cstdint>
#include <memory_resource>

namespace llmmem {
inline namespace v0 {

/// A `byte_source` over a memory resource, which it does not own and which must outlive it. An exception of
/// the resource counts as a refusal; none escapes.
///
/// @par Thread safety   the space holds its lock around every call; a resource that is also used elsewhere at
///   the same time must synchronise itself.
/// @par Errors          the constructor throws `argument_error` on null.
class pmr_source {
 public:
  explicit pmr_source(std::pmr::memory_resource* upstream) : upstream_(upstream) {
    if (upstream == nullptr) throw argument_error("pmr_source: the upstream resource is null");
  }

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t) const noexcept { return bytes; }

  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    try {
      return static_cast<std::byte*>(
          upstream_->allocate(static_cast<std::size_t>(bytes), static_cast<std::size_t>(alignment)));
    } catch (...) {
      return nullptr;
    }
  }

  void give_back(std::byte* data, std::uint64_t bytes, std::uint64_t alignment) noexcept {
    upstream_->deallocate(data, static_cast<std::size_t>(bytes), static_cast<std::size_t>(alignment));
  }

 private:
  std::pmr::memory_resource* upstream_;
};

static_assert(byte_source<pmr_source>);

/// Host memory from a memory resource: `pmr_space space{pmr_source{&pool}, {.budget = bytes}}`.
using pmr_space = basic_host_space<pmr_source>;

static_assert(memory_space<pmr_space>);
static_assert(copy_queue<pmr_space, pmr_space>);

}  // namespace v0
}  // namespace llmmem
