/// @file
/// The requests to a `file_queue`, and its options and counters: copies, urgencies.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/transfer/io_engine.hpp>
#include <llmmem/transfer/io_tuner.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// A run of bytes between a file and host memory. Any offset, any length, any address; whole pages at aligned
/// offsets and addresses bypass the page cache if the file can.
struct file_copy {
  const io_file* file = nullptr;
  io_direction way = io_direction::read;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;  ///< a write only reads it
  std::uint64_t bytes = 0;    ///< 0 moves nothing
};

/// Returns a copy of `file`'s bytes from `offset` on, into memory.
[[nodiscard]] inline file_copy read_from(const io_file& file, std::uint64_t offset,
                                         std::span<std::byte> into) noexcept {
  return {&file, io_direction::read, offset, into.data(), into.size()};
}

/// Returns a copy of memory into `file` from `offset` on.
[[nodiscard]] inline file_copy write_to(const io_file& file, std::uint64_t offset,
                                        std::span<const std::byte> from) noexcept {
  return {&file, io_direction::write, offset, const_cast<std::byte*>(from.data()), from.size()};
}

namespace transfer {

/// The priority when a device has more to do than it can at once.
enum class urgency : std::uint8_t {
  demand,      ///< a thread waits for it
  prefetch,    ///< a thread will wait for it
  write_back,  ///< no thread waits, unless space runs out
};

/// Which thread makes progress with a queue's operations.
enum class driven_by : std::uint8_t {
  own_thread,  ///< the queue's own thread
  waiters,     ///< the threads that start, poll or wait: without them there is no progress
};

using drive_by [[deprecated("its name is transfer::driven_by")]] = driven_by;

}  // namespace transfer

using urgency [[deprecated("its name is transfer::urgency")]] = transfer::urgency;
using drive_by [[deprecated("its name is transfer::driven_by")]] = transfer::driven_by;

/// Whether a queue searches for its best depth and block size while it works.
enum class io_tuning : std::uint8_t {
  off,
  on,  ///< see `io_tuner`; only while there is more to do than is in flight
};

/// The construction parameters of a file queue.
struct file_queue_options {
  transfer::driven_by driver = transfer::driven_by::own_thread;
  std::uint64_t block_bytes = std::uint64_t{1} << 20;  ///< most bytes of one request, at least a page
  std::uint32_t depth = 0;              ///< most requests in flight; 0: as many as the engine accepts
  std::uint32_t max_operations = 1024;  ///< the most operations in flight or waiting
  std::uint32_t max_copies = 4096;      ///< the most copies of all operations
  std::uint32_t max_failures = 64;      ///< kept until `clear_failures`; at the limit it accepts nothing more
  std::uint32_t max_attempts = 64;      ///< attempts for a request that the system asks to try again
  std::uint64_t give_up_ns = io_wait::forever;  ///< after this time an unanswered request counts as lost
  io_tuning tuning = io_tuning::off;
  io_tuner_options tuner{};         ///< `depth` bounds its depths; it starts at `depth` and `block_bytes`
  std::string name = "file_queue";  ///< the name in error texts
  metadata_source metadata{};
};

/// The counters of a file queue.
struct file_queue_stats {
  std::uint64_t bytes_read = 0;        ///< moved, regardless of the outcome of their operation
  std::uint64_t bytes_written = 0;     ///< as `bytes_read`
  std::uint64_t bytes_buffered = 0;    ///< bytes of both through the page cache
  std::uint64_t requests = 0;          ///< completed
  std::uint64_t short_transfers = 0;   ///< requests that moved less than requested, and were continued
  std::uint64_t retries = 0;           ///< requests repeated because the system asked for it
  std::uint64_t rejected = 0;          ///< direct requests refused, and repeated through the page cache
  std::uint64_t lost = 0;              ///< requests that were never answered
  std::uint64_t operations = 0;        ///< completed, successful or not
  std::uint64_t failures = 0;          ///< completed, and failed
  std::uint64_t cancelled = 0;         ///< failures because of `cancel`
  std::uint64_t busy_ns = 0;           ///< while at least one request was in flight
  std::uint64_t files_registered = 0;  ///< descriptors in the engine's table: see `register_file`
  std::uint64_t files_plain = 0;       ///< descriptors that did not fit
  io_setting setting{};                ///< the present depth and block size
  io_setting best{};                   ///< with `io_tuning::on`, the best setting found so far
  bool is_at_rest = false;             ///< whether the tuner rests there
  std::uint64_t metadata_bytes = 0;
};

}  // namespace v0
}  // namespace llmmem
