/// @file
/// Copies from a checkpoint's file to the memory of its loader.
#pragma once

#include <llmmem/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Runs of bytes of a file that become runs of a wanted part.
struct load_copy {
  std::uint64_t begin = 0;  // position of the first run in the file
  std::uint64_t run = 0;    // bytes
  std::uint64_t count = 0;
  std::uint64_t stride = 0;  // in the file
  std::uint32_t wanted = 0;
  std::uint64_t to = 0;  // position of the first run in the part
  std::uint64_t to_stride = 0;

  [[nodiscard]] std::uint64_t end() const noexcept { return begin + (count - 1) * stride + run; }

  /// Calls `visit(begin in the file, bytes, offset in the part)` for the runs in `[first, last)`.
  template <class Visit>
  void each_within(std::uint64_t first, std::uint64_t last, Visit visit) const {
    std::uint64_t i = first <= begin + run - 1 ? 0 : (first - begin - run) / stride + 1;
    for (; i < count && begin + i * stride < last; ++i) {
      const std::uint64_t run_begin = begin + i * stride;
      const std::uint64_t from = std::max(run_begin, first);
      const std::uint64_t until = std::min(run_begin + run, last);
      if (from < until) visit(from, until - from, to + i * to_stride + (from - run_begin));
    }
  }
};

/// Receives the loaded bytes, for a sink of any type: one call for all runs of a copy in a chunk, so that
/// short runs stay cheap.
struct load_sink {
  void* sink;
  /// @param bytes  bytes of the file from byte `first` on
  void (*give)(void* sink, const load_copy& copy, std::uint64_t first, std::span<const std::byte> bytes);

  template <class Sink>
  [[nodiscard]] static load_sink of(Sink& sink) noexcept {
    return {const_cast<void*>(static_cast<const volatile void*>(std::addressof(sink))),
            [](void* self, const load_copy& copy, std::uint64_t first, std::span<const std::byte> bytes) {
              copy.each_within(
                  first, first + bytes.size(), [&](std::uint64_t at, std::uint64_t count, std::uint64_t to) {
                    (*static_cast<Sink*>(self))(
                        copy.wanted, to,
                        bytes.subspan(static_cast<std::size_t>(at - first), static_cast<std::size_t>(count)));
                  });
            }};
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
