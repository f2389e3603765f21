/// @file
/// `io_engine`: passes single reads and writes to the system and returns their outcomes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// The direction of a transfer: from a file, or to it.
enum class io_direction : std::uint8_t { read, write };

/// One read or write for the system: it may be short.
struct io_request {
  int file = -1;  ///< descriptor
  io_direction way = io_direction::read;
  std::uint32_t bytes = 0;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;  ///< a write only reads it
  std::uint64_t tag = 0;      ///< returned with the completion; an engine may reserve some
};

/// The outcome of a request.
struct io_completion {
  std::uint64_t tag = 0;
  std::int32_t outcome = 0;  ///< bytes moved, as few as 0, or minus an error number
};

/// The capabilities of an engine.
struct io_caps {
  std::string_view name;
  std::uint32_t depth = 1;             ///< requests that it can have in flight
  bool overlaps = false;               ///< whether requests continue without calls of the engine
  bool registers_memory = false;       ///< whether `register_memory` saves the system work
  bool registers_files = false;        ///< whether `register_file` saves the system work
  std::string_view files_reason{};     ///< why it does not, although the engine could; empty if it does
  std::string_view fallback_reason{};  ///< why the engine is not the requested one; empty if it is
  bool takes_device_memory = false;    ///< whether requests may name device memory
  /// Why requests may not name device memory; empty if they may.
  std::string_view device_reason{"the engine copies host memory; device_file_io takes both"};
};

/// How long `reap` waits.
struct io_wait {
  static constexpr std::uint64_t forever = ~std::uint64_t{0};

  std::uint32_t least = 0;             ///< completions to wait for; fewer when fewer are in flight
  std::uint64_t timeout_ns = forever;  ///< the longest wait
};

/// Passes requests to the system. One thread at a time calls it, except `wake`, which any thread may call.
///
/// - `try_queue(request)`: false when `caps().depth` requests are in flight; then nothing has changed.
/// - `reap(out, wait)`: submits queued requests, then waits as requested, and not at all when nothing is in
///   flight. Writes completions to `out` in any order, each request exactly once, and returns their number: 0
///   means none yet, not an end. It may return before `least` are there. A failure concerns the engine, not a
///   request: queued requests stay queued, and nothing is lost.
/// - `wake()`: makes a waiting `reap`, or the next one, return early.
/// - `in_flight()`: requests queued or in flight whose completion was not reaped.
///
/// Memory and descriptor of a request belong to it until its completion is reaped. Destroying an engine waits
/// until the system has finished with all of them.
///
/// A refused request is a completion with an error number. `file_queue`, not the engine, decides what to do
/// about failed and short requests, so that engines stay small and faults can be injected in between
/// (`testing::faulty_io`).
template <class E>
concept io_engine = requires(E& engine, const E& read, const io_request& request,
                             std::span<io_completion> out, const io_wait& wait) {
  { read.caps() } noexcept -> std::same_as<io_caps>;
  { read.in_flight() } noexcept -> std::same_as<std::uint32_t>;
  { engine.try_queue(request) } noexcept -> std::same_as<bool>;
  { engine.reap(out, wait) } noexcept -> std::same_as<result<std::size_t>>;
  { engine.wake() } noexcept;
};

/// An engine that is faster with registered memory: call `register_memory` before requests use it; it must
/// stay in place until the engine is destroyed. A refusal costs only speed.
template <class E>
concept registers_memory = requires(E& engine, std::span<const std::span<std::byte>> ranges) {
  { engine.register_memory(ranges) } noexcept -> std::same_as<result<void>>;
};

/// An engine that is faster with registered files: it keeps them in a table, and requests name an entry.
///
/// - `register_file(descriptor)`: whether requests with that descriptor use the table from here on. If not,
///   for example because the table is full, they continue as before, which costs only speed.
/// - `forget_file(descriptor)`: requests no longer use its entry. Called before the descriptor is closed,
///   because the table holds the file itself: it would stay open (and locked), and requests would go to it
///   when another file has its number. Requests in flight do not matter. No effect for an unknown descriptor.
/// - `forget_files()`: the same for all files, permanently. The files are released when it returns.
///
/// One thread at a time calls them, like the other calls.
template <class E>
concept registers_files = requires(E& engine, int descriptor) {
  { engine.register_file(descriptor) } noexcept -> std::same_as<bool>;
  { engine.forget_file(descriptor) } noexcept;
  { engine.forget_files() } noexcept;
};

}  // namespace v0
}  // namespace llmmem
