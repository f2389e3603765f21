/// @file
/// The memory in which a `tiered_buffer` encodes and decodes chunks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/tiering/detail/chunk_record.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Places of one size in the tier above the last; one transfer at a time uses each. If a device may still
/// write to a place, the place is retired, and its slot gets another one when there is space.
///
/// @tparam Places  a `chunk_places`, which outlives the slots; `release_places` returns the remaining places
///                 to it.
/// @par Complexity      O(slots). No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor's; `take_places` throws if the tier has too little space for them.
template <class Places>
class staging_slots {
 public:
  /// @param each_bytes  bytes of a place: the longest encoded chunk, in whole units of the last tier.
  staging_slots(Places& places, std::uint32_t slots, std::uint64_t each_bytes, const metadata_source& source)
      : places_(places), slots_(slots, slot{}, source, "tiered_buffer: staging"), each_bytes_(each_bytes) {}
  staging_slots(const staging_slots&) = delete;
  staging_slots& operator=(const staging_slots&) = delete;

  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }
  [[nodiscard]] std::uint64_t each_bytes() const noexcept { return each_bytes_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return slots_.bytes(); }

  void take_places() {
    for (std::uint32_t i = 0; i < size(); ++i)
      places_.take(slots_[i].place, each_bytes_).value();
  }
  void release_places() noexcept {
    for (std::uint32_t i = 0; i < size(); ++i) {
      if (slots_[i].place.granted != 0) places_.give_back(slots_[i].place);
    }
  }
  /// Returns how many slots have a place.
  [[nodiscard]] std::uint64_t placed() const noexcept {
    std::uint64_t placed = 0;
    for (std::uint32_t i = 0; i < size(); ++i) {
      if (slots_[i].place.granted != 0) ++placed;
    }
    return placed;
  }
  /// Returns the bytes of the tier that the places take.
  [[nodiscard]] std::uint64_t granted() const noexcept {
    return size() == 0 ? 0 : placed() * places_.granted_for(each_bytes_);
  }

  /// Returns an unused slot with a place; `no_index` if there is none.
  [[nodiscard]] std::uint32_t free() noexcept {
    for (std::uint32_t i = 0; i < size(); ++i) {
      slot& each = slots_[i];
      if (each.user != no_index) continue;
      if (each.place.granted != 0 || places_.take(each.place, each_bytes_)) return i;
    }
    return no_index;
  }
  /// Returns a transfer that uses a slot, or `no_index`.
  [[nodiscard]] std::uint32_t any_user() const noexcept {
    for (std::uint32_t i = 0; i < size(); ++i) {
      if (slots_[i].user != no_index) return slots_[i].user;
    }
    return no_index;
  }
  /// @pre `at` is free.
  void claim(std::uint32_t at, std::uint32_t transfer) noexcept { slots_[at].user = transfer; }
  void release(std::uint32_t at) noexcept { slots_[at].user = no_index; }
  /// Retires the place, which is never used again.
  void retire(std::uint32_t at) noexcept { places_.retire(slots_[at].place); }

  [[nodiscard]] const tier_copy& place(std::uint32_t at) const noexcept { return slots_[at].place; }
  /// Returns the length of the encoded form in that slot.
  [[nodiscard]] std::uint64_t encoded_bytes(std::uint32_t at) const noexcept { return slots_[at].bytes; }
  void set_encoded_bytes(std::uint32_t at, std::uint64_t bytes) noexcept { slots_[at].bytes = bytes; }

 private:
  struct slot {
    tier_copy place;
    std::uint64_t bytes = 0;
    std::uint32_t user = no_index;
  };

  Places& places_;
  fixed_array<slot> slots_;
  std::uint64_t each_bytes_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
