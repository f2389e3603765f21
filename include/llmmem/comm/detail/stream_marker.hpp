/// @file
/// Reports when a stream has done the work that was put on it. Private to comm/.
#pragma once

#include <llmmem/comm/detail/nccl_library.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// An event of a stream that follows work, and two bytes of device memory that represent empty messages.
///
/// Work is *unmarked* from `will_put` to `mark`, and *marked* from then until the event is reached. `forget`
/// declares that none of it runs now.
///
/// @par Complexity      as the calls of CUDA; nothing waits.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor throws `system_error` for refusals of CUDA.
template <class Api>
class stream_marker {
 public:
  /// @param name  for error texts.
  stream_marker(Api& api, cudaStream_t stream, const char* name) : api_(api), stream_(stream) {
    const std::string who = name;
    if (const cudaError_t status = api_.make_event(&event_); status != cudaSuccess) {
      throw system_error(who + ": cudaEventCreate: " + api_.text(status));
    }
    if (const cudaError_t status = api_.allocate(&bytes_, 2, stream_); status != cudaSuccess) {
      static_cast<void>(api_.end_event(event_));
      throw system_error(who + ": cudaMallocAsync of 2 bytes: " + api_.text(status));
    }
  }
  stream_marker(const stream_marker&) = delete;
  stream_marker& operator=(const stream_marker&) = delete;
  ~stream_marker() {
    static_cast<void>(api_.release(bytes_, stream_));
    static_cast<void>(api_.end_event(event_));
  }

  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
  /// The byte sent for an empty message; the next one is the byte received.
  [[nodiscard]] std::byte* byte_out() const noexcept { return static_cast<std::byte*>(bytes_); }
  [[nodiscard]] std::byte* byte_in() const noexcept { return static_cast<std::byte*>(bytes_) + 1; }

  /// From here on work may reach the stream.
  void will_put() noexcept { is_unmarked_ = true; }
  /// Puts the event after the work that has reached the stream.
  [[nodiscard]] cudaError_t mark() noexcept {
    const cudaError_t status = api_.record(event_, stream_);
    if (status != cudaSuccess) return status;
    is_marked_ = true;
    is_unmarked_ = false;
    return status;
  }
  /// Marks unmarked work, if any. False if CUDA refuses.
  [[nodiscard]] bool mark_the_rest() noexcept { return !is_unmarked_ || mark() == cudaSuccess; }
  /// Returns `cudaSuccess` when the marked work is done, `cudaErrorNotReady` before.
  [[nodiscard]] cudaError_t query() noexcept {
    const cudaError_t status = api_.query(event_);
    if (status == cudaSuccess) is_marked_ = false;
    return status;
  }
  /// Whether no marked work is running: it is done, or has failed.
  [[nodiscard]] bool is_idle() noexcept { return !is_marked_ || query() != cudaErrorNotReady; }
  void forget() noexcept { is_marked_ = is_unmarked_ = false; }

 private:
  Api& api_;
  cudaStream_t stream_;
  cudaEvent_t event_ = nullptr;
  void* bytes_ = nullptr;  // two bytes of device memory
  bool is_unmarked_ = false;
  bool is_marked_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
