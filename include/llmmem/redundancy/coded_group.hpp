/// @file
/// `coded_group`: the codeword of each stripe of each rank, and the ranks that keep its parity.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/rebuild_plan.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Stripes of a state consist of whole units of this many bytes, so that all but the last begin on a cache
/// line.
inline constexpr std::uint64_t stripe_unit = 64;

/// Returns the bytes of a stripe when a state of `bytes` is divided into `stripes`: all stripes are equal,
/// although the state may end inside one of them. @pre stripes != 0, bytes <= 2^63 - 1
[[nodiscard]] constexpr std::uint64_t stripe_bytes(std::uint64_t bytes, std::uint32_t stripes) noexcept {
  const std::uint64_t share = bytes / stripes + (bytes % stripes != 0 ? 1 : 0);
  return (share + stripe_unit - 1) / stripe_unit * stripe_unit;
}

namespace redundancy {

/// A range of bytes of a state.
struct byte_range {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  friend constexpr bool operator==(const byte_range&, const byte_range&) noexcept = default;
};

}  // namespace redundancy

using byte_range [[deprecated("its name is redundancy::byte_range")]] = redundancy::byte_range;

/// Returns the range of a state of `bytes` that stripe `stripe` covers: the last ranges may be short, or
/// empty.
[[nodiscard]] constexpr redundancy::byte_range stripe_of(std::uint64_t bytes, std::uint32_t stripes,
                                                         std::uint32_t stripe) noexcept {
  const std::uint64_t each = stripe_bytes(bytes, stripes);
  const std::uint64_t first = each * stripe < bytes ? each * stripe : bytes;
  return {first, bytes - first < each ? bytes - first : each};
}

/// The layout of one group of k + m ranks, its *members* 0 to k + m - 1, each with its own state.
///
/// Every member's state is divided into k stripes. There are k + m *codewords*, each of k stripes of
/// different members and m parities on the m other members: codeword c has its parities on members c, c + 1,
/// ... c + m - 1 (modulo k + m) and its data on the k members after them. So a member contributes data to k
/// codewords and keeps parity of the m others: m/k of a state, the same for all members. Each member has
/// exactly one piece of each codeword, so the loss of any m members loses m pieces of each codeword, which
/// the code restores. RAID-5 rotates its parity in the same way.
///
///     member      0    1    2    3        parity:3, stripe s of member i as i.s
///     codeword 0  P    1.2  2.1  3.0
///     codeword 1  0.0  P    2.2  3.1
///     codeword 2  0.1  1.0  P    3.2
///     codeword 3  0.2  1.1  2.0  P
///
/// @par Complexity   every operation O(1).
/// @pre members and codewords are less than `members()`, stripes less than k.
/// @par Source       Patterson, Gibson and Katz, SIGMOD 1988; the parity of processes' memory in their peers'
///                   memory: Plank and Li, "Faster Checkpointing with N + 1 Parity", FTCS 1994.
class coded_group {
 public:
  constexpr explicit coded_group(const code_shape& shape) noexcept : shape_(shape) {}

  [[nodiscard]] constexpr const code_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] constexpr std::uint32_t members() const noexcept { return shape_.pieces(); }
  [[nodiscard]] constexpr std::uint32_t codewords() const noexcept { return shape_.pieces(); }

  /// Returns which piece of `codeword` `member` has.
  [[nodiscard]] constexpr piece_id piece_of(std::uint32_t member, std::uint32_t codeword) const noexcept {
    const std::uint32_t behind = turned(member, members() - codeword);
    return piece_id{behind < shape_.parity ? shape_.data + behind : behind - shape_.parity};
  }
  /// Returns the member that has the piece.
  [[nodiscard]] constexpr std::uint32_t member_of(piece_id piece, std::uint32_t codeword) const noexcept {
    const std::uint32_t index = to_index(piece);
    return turned(codeword, index < shape_.data ? index + shape_.parity : index - shape_.data);
  }
  /// Returns the codeword that contains `stripe` of a member's state.
  [[nodiscard]] constexpr std::uint32_t codeword_of(std::uint32_t member,
                                                    std::uint32_t stripe) const noexcept {
    return turned(member, 1 + stripe);
  }
  /// Returns the stripe of its state that a member contributes to `codeword`. @pre the member contributes
  /// one: its `piece_of` is a data piece
  [[nodiscard]] constexpr std::uint32_t stripe_in(std::uint32_t member,
                                                  std::uint32_t codeword) const noexcept {
    return turned(codeword, members() - member) - 1;
  }

 private:
  [[nodiscard]] constexpr std::uint32_t turned(std::uint32_t from, std::uint32_t by) const noexcept {
    return (from + by) % members();
  }

  code_shape shape_;
};

}  // namespace v0
}  // namespace llmmem
