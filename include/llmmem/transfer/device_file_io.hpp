/// @file
/// `device_file_io`: file I/O whose requests may name device memory, over a library for it: cuFile (GPUDirect
/// Storage, transfer/cufile_library.hpp) or one of your own.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/io_engine.hpp>

#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A request of a batch. @tparam File  the library's handle of a file
template <class File>
struct device_file_request {
  File file{};
  io_direction way = io_direction::read;
  std::byte* data = nullptr;  ///< in device or host memory
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;
  std::uint64_t tag = 0;
};

/// A library that moves bytes between files and device memory, in batches: the part of cuFile's interface
/// that `device_file_io` needs. Numbers are error numbers of the system (`EIO`), 0 for success.
///
/// - `why_not()`: null if the library works here; else the reason, a text that lives on.
/// - `open(file, descriptor)`, `close(file)`: a handle for requests with a descriptor.
/// - `make(batch, depth)`, `end(batch)`: a batch holds at most `depth` requests, of one `submit`. It ends
///   when all of them are complete, or after an error of `poll`.
/// - `submit(batch, requests)`: begins them all, or none.
/// - `poll(batch, out, least, timeout_ns, count)`: waits for `least` completions of the batch, at most for
///   `timeout_ns`, and writes those that are there, each once; `count` is their number. A completion has the
///   bytes moved, or minus an error number.
/// - `keep_registered(data, bytes)`: maps memory once for all requests in it.
template <class L>
concept device_file_library =
    std::movable<L> && requires(L& library, typename L::file& file, typename L::batch& batch, int descriptor,
                                std::uint32_t depth, std::uint64_t n, std::byte* data,
                                std::span<const device_file_request<typename L::file>> requests,
                                std::span<io_completion> out, std::uint32_t& count) {
      { library.why_not() } noexcept -> std::same_as<const char*>;
      { library.open(file, descriptor) } noexcept -> std::same_as<int>;
      { library.close(file) } noexcept;
      { library.make(batch, depth) } noexcept -> std::same_as<int>;
      { library.end(batch) } noexcept;
      { library.submit(batch, requests) } noexcept -> std::same_as<int>;
      { library.poll(batch, out, depth, n, count) } noexcept -> std::same_as<int>;
      { library.keep_registered(data, n) } noexcept -> std::same_as<int>;
    };

/// The construction parameters of a `device_file_io`.
struct device_file_io_options {
  std::uint32_t depth = 32;   ///< requests of a batch, at most 128, as cuFile's own limit is by default
  std::uint32_t batches = 4;  ///< in flight at once, 1 to 8
  std::uint32_t files = 64;   ///< descriptors that are registered at once
};

/// Requests between files and device memory, in batches that a library runs. What is queued between two calls
/// of `reap` becomes one batch; up to `batches` of them are in flight.
///
///     using engine = device_file_io<cufile_library>;
///     if (const char* why = cufile_library{}.why_not()) ...      // then tiers take a ring:
///     file_space<uring_io> device_file_space<device_space, engine> disk("/nvme/tier", {.budget = bytes});
///
/// Requests whose descriptor has no handle (`register_file`) share one that closes after the last of them,
/// which costs two calls of the library. Memory may be of the host, too.
///
/// @par Complexity      `reap` O(batches + completions), and one call of the library for each batch in
/// flight.
///   It waits for completions in slices of a millisecond when several batches are in flight. No allocation
///   after construction.
/// @par Thread safety   one thread at a time; `wake` from any.
/// @par Errors          the constructor throws `argument_error` for numbers out of range, and `system_error`
///   with the library's reason if it does not work here. A refused file or request is a completion with an
///   error number, a refused batch a completion of each of its requests.
template <device_file_library Library>
class device_file_io {
 public:
  static constexpr bool takes_device_memory = true;
  static constexpr std::uint32_t max_depth = 128;
  static constexpr std::uint32_t max_batches = 8;

  explicit device_file_io(const device_file_io_options& options = {}, Library library = {});
  device_file_io(const device_file_io&) = delete;
  device_file_io& operator=(const device_file_io&) = delete;
  /// Waits until the library has completed all requests, or reports that it no longer can.
  ~device_file_io();

  [[nodiscard]] io_caps caps() const noexcept {
    return {.name = "device_file_io",
            .depth = options_.depth * options_.batches,
            .overlaps = true,
            .registers_memory = true,
            .registers_files = true,
            .takes_device_memory = true,
            .device_reason = {}};
  }
  [[nodiscard]] std::uint32_t in_flight() const noexcept { return in_flight_; }

  [[nodiscard]] bool try_queue(const io_request& request) noexcept;
  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait& wait) noexcept;
  void wake() noexcept { woken_.store(true, std::memory_order_release); }

  /// Maps ranges of device or host memory, so that the library need not copy through memory of its own.
  /// @return `errc::engine_failed`: index = the error number
  result<void> register_memory(std::span<const std::span<std::byte>> ranges) noexcept;

  /// @name Files   see `registers_files`
  /// @{
  [[nodiscard]] bool register_file(int descriptor) noexcept;
  void forget_file(int descriptor) noexcept;
  void forget_files() noexcept;
  /// @}

 private:
  /// A handle of the library. A descriptor has at most one that takes requests: cuFile refuses a second one.
  struct opened_file {
    int descriptor = -1;  // -1: of no further requests
    std::uint32_t uses = 0;
    bool is_open = false;
    bool is_registered = false;  // stays open without requests
    typename Library::file handle{};
  };
  struct request {
    io_request of{};
    std::uint32_t file = 0;  // its entry of `files_`
    int error = 0;           // why it cannot begin
    bool is_used = false;
  };
  struct batch {
    typename Library::batch handle{};
    std::uint32_t left = 0;  // completions to come; 0: free
  };
  static constexpr std::uint64_t slice_ns = 1'000'000;  // until `woken_` is read again

  /// Finds the entry of a descriptor, or opens one until its last request has ended. Returns an error number.
  [[nodiscard]] int use_file(int descriptor, std::uint32_t& entry) noexcept;
  [[nodiscard]] std::uint32_t entry_of(int descriptor) const noexcept;
  [[nodiscard]] std::uint32_t empty_entry() const noexcept;
  void close_unused(opened_file& file) noexcept;
  [[nodiscard]] io_completion finish(std::uint32_t slot, std::int32_t outcome) noexcept;
  /// Writes the completions of queued requests that cannot begin, and returns their number.
  [[nodiscard]] std::size_t report_errors(std::span<io_completion> out) noexcept;
  void begin_batches() noexcept;
  void begin(batch& by) noexcept;
  /// Adds the completions that are there after at most `timeout_ns` to `count`.
  [[nodiscard]] int collect(std::span<io_completion> out, std::size_t& count,
                            std::uint64_t timeout_ns) noexcept;

  device_file_io_options options_;
  Library library_;
  detail::fixed_array<opened_file> files_;
  detail::fixed_array<request> requests_;      // a slot's number is its tag for the library
  detail::fixed_array<std::uint32_t> queued_;  // slots in no batch, in order
  detail::fixed_array<device_file_request<typename Library::file>> starting_;
  std::uint32_t queued_count_ = 0;
  std::array<batch, max_batches> batches_{};
  std::uint32_t in_flight_ = 0;
  bool takes_files_ = true;
  std::atomic<bool> woken_{false};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/transfer/detail/device_file_io_body.hpp>
