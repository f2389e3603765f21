/// @file
/// The elements of a link in their order, and conversions between their forms.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/f16.hpp>
#include <llmmem/refit/refit_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] constexpr std::uint64_t width_of(dtype type) noexcept {
  return bits_of(type) / 8;
}

/// Converts `count` elements one by one, so that no cut of them changes a bit. Neither side needs alignment.
/// @pre the types are equal, or one is f32 and the other bf16 or f16
inline void convert_elements(dtype from, const std::byte* in, dtype to, std::byte* out,
                             std::uint64_t count) noexcept {
  if (from == to) {
    std::memcpy(out, in, count * width_of(from));
    return;
  }
  const auto each = [&]<class In, class Out>(In, Out, auto&& convert) {
    for (std::uint64_t i = 0; i < count; ++i) {
      In value;
      std::memcpy(&value, in + i * sizeof(In), sizeof(In));
      const Out made = convert(value);
      std::memcpy(out + i * sizeof(Out), &made, sizeof(Out));
    }
  };
  constexpr std::uint16_t narrow{};
  constexpr std::uint32_t wide{};
  if (to == dtype::bf16)
    return each(wide, narrow, [](std::uint32_t bits) { return bf16_from_f32_bits(bits); });
  if (to == dtype::f16) return each(wide, narrow, [](std::uint32_t bits) { return f16_from_f32_bits(bits); });
  if (from == dtype::bf16)
    return each(narrow, wide, [](std::uint16_t bits) { return f32_from_bf16_bits(bits); });
  each(narrow, wide, [](std::uint16_t bits) { return f32_from_f16_bits(bits); });
}

/// A place in the elements of a link. Sender and receiver advance by the same bytes, and so agree on what
/// each message has without a word about it.
class refit_cursor {
 public:
  refit_cursor(const refit_plan& plan, std::span<const refit_copy> copies) noexcept
      : plan_(&plan), copies_(copies) {}

  [[nodiscard]] bool is_at_end() const noexcept { return at_ == copies_.size(); }

  /// Visits the next elements, of `bytes` at most in the form in which they travel: `visit(part, source
  /// element, target element, count)`.
  /// @return their bytes. @pre `bytes` has space for an element
  template <class Visit>
  std::uint64_t take(std::uint64_t bytes, Visit&& visit) {
    std::uint64_t taken = 0;
    while (at_ < copies_.size()) {
      const refit_copy& copy = copies_[at_];
      const refit_part& part = plan_->part_of(copy);
      const std::uint64_t width = width_of(part.wire);
      const std::uint64_t count = std::min((bytes - taken) / width, copy.moves.run - done_);
      if (count == 0) break;
      plan_->each_piece_run(
          copy, copy.moves.source_offset + run_ * copy.moves.source_stride + done_,
          copy.moves.destination_offset + run_ * copy.moves.destination_stride + done_, count,
          [&](std::uint64_t from, std::uint64_t to, std::uint64_t now) { visit(part, from, to, now); });
      taken += count * width;
      done_ += count;
      if (done_ < copy.moves.run) continue;
      done_ = 0;
      if (++run_ < copy.moves.count) continue;
      run_ = 0;
      ++at_;
    }
    return taken;
  }

 private:
  const refit_plan* plan_;
  std::span<const refit_copy> copies_;
  std::size_t at_ = 0;
  std::uint64_t run_ = 0;
  std::uint64_t done_ = 0;
};

/// How the bytes of a message are written.
enum class refit_form : std::uint32_t {
  whole,    ///< the elements
  changes,  ///< `encode_changes` of their exclusive or with the base
  planes    ///< `byte_plane` of the same
};

/// Precedes the bytes of a message.
struct refit_header {
  static constexpr std::uint64_t right_magic = 0x4654'4552'6D65'6D6CULL;  // "lmemREFT"

  std::uint64_t magic = right_magic;
  std::uint64_t plan = 0;
  std::uint64_t number = 0;
  std::uint64_t base = 0;  ///< number of the weights that changes refer to
  std::uint32_t scope = 0;
  std::uint32_t index = 0;
  refit_form form{};
  std::uint32_t elements_bytes = 0;  ///< of the elements in the form in which they travel
  std::uint32_t bytes = 0;           ///< that follow
  std::uint32_t unused = 0;
  std::uint32_t result = 0;  ///< checksum of the elements
  std::uint32_t header = 0;  ///< checksum of all before it
};
static_assert(sizeof(refit_header) == 64);

/// What a receiver says of the weights that it serves, to each rank that sends to it.
struct refit_base {
  std::uint64_t plan = 0;
  std::uint64_t number = 0;    ///< 0: none
  std::uint32_t elements = 0;  ///< the checksum of what it has of the link's elements
  std::uint32_t crc = 0;       ///< of all before it
};
static_assert(sizeof(refit_base) == 24);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
