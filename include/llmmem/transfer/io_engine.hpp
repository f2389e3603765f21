/// @file
/// What a file I/O engine is: `io_engine`, the thing that takes single reads and writes to the system and
/// brings back what became of them.
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

/// Which way bytes go: out of a file, or into it.
enum class io_direction : std::uint8_t { read, write };

/// One read or write, as the system takes it: it may come back short.
struct io_request {
  int file = -1;  ///< descriptor
  io_direction way = io_direction::read;
  std::uint32_t bytes = 0;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;  ///< not written by a write
  std::uint64_t tag = 0;      ///< comes back with the completion; an engine may keep some for itself
};

/// What became of a request.
struct io_completion {
  std::uint64_t tag = 0;
  std::int32_t outcome = 0;  ///< bytes moved, as few as 0, or minus an error number
};

/// What an engine can do.
struct io_caps {
  std::string_view name;
  std::uint32_t depth = 1;             ///< requests that it can have under way
  bool overlaps = false;               ///< whether requests go on while nobody calls the engine
  bool registers_memory = false;       ///< whether `register_memory` saves the system work
  bool registers_files = false;        ///< whether `register_file` does
  std::string_view files_reason{};     ///< why it does not, where an engine could; empty when it does
  std::string_view fallback_reason{};  ///< why it is not what was asked for; empty when it is
  bool takes_device_memory = false;    ///< whether requests may name memory of a device
  /// Why they may not; empty where they may.
  std::string_view device_reason{"GPUDirect Storage: not built"};
};

/// How long `reap` waits.
struct io_wait {
  static constexpr std::uint64_t forever = ~std::uint64_t{0};

  std::uint32_t least = 0;             ///< completions to wait for; fewer when fewer are under way
  std::uint64_t timeout_ns = forever;  ///< and not longer than this
};

/// Takes requests to the system. One thread at a time calls it, all but `wake`, which anyone may.
///
/// - `try_queue(request)`: false when as many are under way as `caps().depth`; then nothing has changed.
/// - `reap(out, wait)`: hands over what was queued, then waits as told, and for nothing when nothing is under
///   way. Gives completions in any order, each request exactly once, and how many it wrote to `out`: none
///   means none yet, not an end. It may return before `least` are there. A failure is the engine's own, not a
///   request's: whatever is queued stays queued, and nothing is lost.
/// - `wake()`: makes a `reap` that waits, or the next one, return early.
/// - `in_flight()`: requests queued or under way whose completion was not reaped.
///
/// Memory and descriptor of a request belong to it until its completion is reaped. Destroying an engine waits
/// until the system is done with all of them.
///
/// A request that the system refuses is a completion with an error number. What to do about one that fails or
/// falls short is not decided here but in `file_queue`, so that engines stay small and faults can be put
/// between (`testing::faulty_io`).
template <class E>
concept io_engine = requires(E& engine, const E& read, const io_request& request,
                             std::span<io_completion> out, const io_wait& wait) {
  { read.caps() } noexcept -> std::same_as<io_caps>;
  { read.in_flight() } noexcept -> std::same_as<std::uint32_t>;
  { engine.try_queue(request) } noexcept -> std::same_as<bool>;
  { engine.reap(out, wait) } noexcept -> std::same_as<result<std::size_t>>;
  { engine.wake() } noexcept;
};

/// An engine that does better with memory it was told of: `register_memory` before requests touch it; it
/// stays as it is until the engine is gone. A refusal costs speed only.
template <class E>
concept registers_memory = requires(E& engine, std::span<const std::span<std::byte>> ranges) {
  { engine.register_memory(ranges) } noexcept -> std::same_as<result<void>>;
};

/// An engine that does better with files it was told of: it keeps them in a table, and requests name an
/// entry.
///
/// - `register_file(descriptor)`: whether requests with that descriptor go by the table from here on. If not,
///   as where the table is full, they go as before: that costs speed only.
/// - `forget_file(descriptor)`: they do not any more. Called before the descriptor is closed, as the table
///   holds the file itself: it stays open (and locked), and requests would go to it when another file has its
///   number by then. What is under way is in nobody's way. Of a descriptor that is not there: no change.
/// - `forget_files()`: all, and for good. The files are not held any more when it returns.
///
/// One thread at a time calls them, as all the rest.
template <class E>
concept registers_files = requires(E& engine, int descriptor) {
  { engine.register_file(descriptor) } noexcept -> std::same_as<bool>;
  { engine.forget_file(descriptor) } noexcept;
  { engine.forget_files() } noexcept;
};

}  // namespace v0
}  // namespace llmmem
