#pragma once

#include <llmmem/space/concepts.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

/// A space over memory that another object owns (a static array, a shared-memory segment): ranges are
/// stacked, and the last one given out is the first to come back. One thread.
class arena_space {
 public:
  using range_type = llmmem::memory_range<arena_space>;
  using fence_type = llmmem::host_fence;
  static constexpr bool is_host_accessible = true;

  arena_space(std::span<std::byte> memory, const char* name) noexcept : memory_(memory), name_(name) {}

  llmmem::result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    namespace errc = llmmem::errc;
    using llmmem::failure;
    const std::uint64_t left = capacity() - top_;
    if (bytes == 0) return failure{.code = errc::zero_bytes, .where = name_};
    if (!std::has_single_bit(alignment)) {
      return failure{.code = errc::bad_alignment, .wanted = alignment, .where = name_};
    }
    const std::uint64_t past = (reinterpret_cast<std::uintptr_t>(memory_.data()) + top_) & (alignment - 1);
    const std::uint64_t gap = past == 0 ? 0 : alignment - past;
    if (bytes > left || gap > left - bytes) {
      return failure{.code = errc::out_of_bytes, .wanted = bytes, .found = left, .where = name_};
    }
    std::byte* const data = memory_.data() + top_ + gap;
    top_ += gap + bytes;
    ++live_;
    return range_type{data, bytes};
  }

  void deallocate(range_type range) noexcept {
    if (range.bytes != 0 && --live_ == 0) top_ = 0;
  }

  std::uint64_t capacity() const noexcept { return memory_.size(); }
  std::uint64_t used() const noexcept { return top_; }
  std::string_view name() const noexcept { return name_; }
  using fences = std::span<const fence_type>;
  using result = llmmem::result<fence_type>;
  result copy_in_async(range_type to, std::span<const std::byte> from, fences after) {
    return copy(to.span(), from, after);
  }
  result copy_out_async(std::span<std::byte> to, range_type from, fences after) {
    return copy(to, from.span(), after);
  }
  result copy_within_async(range_type to, range_type from, fences after) {
    return copy(to.span(), from.span(), after);
  }

 private:
  result copy(std::span<std::byte> to, std::span<const std::byte> from, fences after) const {
    namespace errc = llmmem::errc;
    if (to.size() != from.size()) {
      return llmmem::failure{
          .code = errc::size_mismatch, .wanted = to.size(), .found = from.size(), .where = name_};
    }
    llmmem::wait_all(after);  // copies run on the calling thread, so they wait here
    if (!to.empty()) std::memmove(to.data(), from.data(), to.size());
    return fence_type{};  // and have passed when they return
  }

  std::span<std::byte> memory_;
  const char* name_;
  std::uint64_t top_ = 0;
  std::uint64_t live_ = 0;
};

static_assert(llmmem::memory_space<arena_space>);
static_assert(llmmem::copy_queue<arena_space, arena_space>);
