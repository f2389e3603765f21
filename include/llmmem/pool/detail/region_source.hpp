/// @file
/// `region_source`: ranges of memory that is there already, for a space over it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/space/pages.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Divides one range, first fit, into at most 32 pieces: tiers take one each.
class region_source {
 public:
  region_source(std::byte* data, std::uint64_t bytes) noexcept : data_(data), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t) const noexcept { return bytes; }
  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (count_ == taken_.size()) return nullptr;
    std::uint64_t at = 0;
    for (std::size_t i = 0; i <= count_; ++i) {
      const auto address = reinterpret_cast<std::uintptr_t>(data_) + at;
      const std::uint64_t begin = at + (alignment - address % alignment) % alignment;
      const std::uint64_t end = i == count_ ? bytes_ : taken_[i].begin;
      if (begin <= end && bytes <= end - begin) {
        for (std::size_t k = count_++; k > i; --k)
          taken_[k] = taken_[k - 1];
        taken_[i] = {begin, begin + bytes};
        return data_ + begin;
      }
      if (i != count_) at = taken_[i].end;
    }
    return nullptr;
  }
  void give_back(std::byte* data, std::uint64_t, std::uint64_t) noexcept {
    const auto begin = static_cast<std::uint64_t>(data - data_);
    for (std::size_t i = 0; i < count_; ++i) {
      if (taken_[i].begin != begin) continue;
      --count_;
      for (; i < count_; ++i)
        taken_[i] = taken_[i + 1];
      return;
    }
  }

 private:
  struct piece {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  std::byte* data_;
  std::uint64_t bytes_;
  std::array<piece, 32> taken_{};  // in order
  std::size_t count_ = 0;
};

static_assert(byte_source<region_source>);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
