/// @file
/// What a program accesses, and how: the two types that schedules and tiered buffers share.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The index of a chunk, from 0: a piece of model state that moves between tiers as a whole.
enum class chunk_id : std::uint32_t {};

/// What an access does to a chunk's contents.
enum class access_mode : std::uint8_t {
  read,        ///< the contents stay unchanged: nothing is written back
  write,       ///< all of the contents are overwritten: nothing is brought in
  read_write,  ///< the contents are needed, and some or all of them change
};

/// The number in a strong type, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(chunk_id chunk) noexcept {
  return static_cast<std::uint32_t>(chunk);
}

namespace tiering {

/// Whether an access of this kind needs the contents, and whether it changes them.
[[nodiscard]] constexpr bool reads(access_mode mode) noexcept {
  return mode != access_mode::write;
}
[[nodiscard]] constexpr bool writes(access_mode mode) noexcept {
  return mode != access_mode::read;
}

}  // namespace tiering

/// Is notified of what a tier 0 holds and which accesses use it, in the order of the events: see
/// `access_window`. It must not call the buffer.
template <class O>
concept access_observer =
    std::movable<O> && requires(O& observer, chunk_id chunk, std::uint64_t bytes, access_mode mode) {
      { observer.on_leased(chunk, bytes, mode) } noexcept;
      { observer.on_released(chunk, bytes) } noexcept;
      { observer.on_arrived(chunk, bytes) } noexcept;
      { observer.on_made(chunk, bytes) } noexcept;
      { observer.on_left(chunk, bytes) } noexcept;
    };

/// The observer that ignores every event, at no cost.
struct ignore_accesses {
  void on_leased(chunk_id, std::uint64_t, access_mode) const noexcept {}
  void on_released(chunk_id, std::uint64_t) const noexcept {}
  void on_arrived(chunk_id, std::uint64_t) const noexcept {}
  void on_made(chunk_id, std::uint64_t) const noexcept {}
  void on_left(chunk_id, std::uint64_t) const noexcept {}
};
static_assert(access_observer<ignore_accesses>);

}  // namespace v0
}  // namespace llmmem
