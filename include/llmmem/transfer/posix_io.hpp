/// @file
/// `posix_io`: file I/O by pread and pwrite on the calling thread. Works everywhere.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/io_engine.hpp>

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Calls pread or pwrite, and repeats it while a signal interrupts it.
[[nodiscard]] inline std::int32_t run_request(const io_request& request) noexcept {
  const auto offset = static_cast<off_t>(request.offset);
  for (;;) {
    const ssize_t moved = request.way == io_direction::read
                              ? ::pread(request.file, request.data, request.bytes, offset)
                              : ::pwrite(request.file, request.data, request.bytes, offset);
    if (moved >= 0) return static_cast<std::int32_t>(moved);
    if (errno != EINTR) return -errno;
  }
}

}  // namespace detail

/// Runs one request at a time, when it is reaped: the engine that is always available, and the reference for
/// the others. With the page cache or a fast device, one thread at depth 1 is hard to beat; a device that
/// needs many requests in flight is better served by `uring_io`.
///
/// @par Complexity      a system call for each request.
/// @par Thread safety   one thread at a time.
/// @par Errors          nothing throws, nothing is refused.
class posix_io {
 public:
  [[nodiscard]] io_caps caps() const noexcept { return {.name = "posix"}; }
  [[nodiscard]] std::uint32_t in_flight() const noexcept { return waiting_ ? 1 : 0; }

  [[nodiscard]] bool try_queue(const io_request& request) noexcept {
    if (waiting_) return false;
    request_ = request;
    waiting_ = true;
    return true;
  }

  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait&) noexcept {
    if (!waiting_ || out.empty()) return std::size_t{0};
    out[0] = {request_.tag, detail::run_request(request_)};
    waiting_ = false;
    return std::size_t{1};
  }

  void wake() noexcept {}

 private:
  io_request request_;
  bool waiting_ = false;
};

static_assert(io_engine<posix_io>);

}  // namespace v0
}  // namespace llmmem
