/// @file
/// `redundant_replica`: the data of a version that one rank holds.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/detail/kept_damage.hpp>
#include <llmmem/redundancy/gf256.hpp>
#include <llmmem/redundancy/part_ownership.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

struct testing_access;

namespace detail {

/// The facts of a version that all ranks know.
struct version_facts {
  std::uint64_t version = 0;
  std::uint64_t epoch = 0;            // the epoch in which it was kept
  std::vector<seat_id> seats{};       // the members of that epoch
  kept_layout layout{};               // the parts and their owners in that epoch
  std::vector<std::uint32_t> sums{};  // CRC-32C by part
};

/// Two checksums that should be equal.
struct sum_mismatch {
  std::uint32_t wanted = 0;
  std::uint32_t found = 0;
};

/// The data of a version that one rank holds: its own parts, concatenated (the *blob*), copies of other
/// ranks' blobs, parities of its group's codewords, and the facts that all ranks know of the version.
/// Checksums cover every byte, so the rank can verify all of it.
///
/// The owner fills it between `begin` and `seal`, and only reads it afterwards. A new version reuses the
/// memory of the previous one.
///
/// @par Complexity      one pass over the bytes that a function is given or verifies.
/// @par Thread safety   one thread at a time. @par Errors   std::bad_alloc; the version is then invalid.
class kept_version {
 public:
  /// @name Filling it
  /// @{ Begins an empty version. The checksums of `facts` are added part by part.
  /// @param self  this rank, in the version's epoch.
  void begin(version_facts facts, rank_id self);
  /// Adds the next own part, with its checksum. @pre parts come in order
  void add_own(part_id part, std::span<const std::byte> bytes);
  /// Sets another rank's checksum of one of its parts.
  void set_sum(part_id part, std::uint32_t sum) noexcept { facts_.sums[to_index(part)] = sum; }
  /// Returns memory for a copy of a rank's blob, for the caller to write.
  [[nodiscard]] std::span<std::byte> make_copy(rank_id of);
  /// Adds the next part of a rank's blob.
  void add_to_copy(rank_id of, std::span<const std::byte> bytes);
  /// Prepares for parities of that many codewords, without making any.
  void begin_parities(std::uint32_t codewords);
  /// Makes the parity of one codeword, initially zero.
  void make_parity(std::uint32_t codeword, std::uint64_t bytes) {
    parities_[codeword].assign(bytes, std::byte{0});
  }
  /// Adds the stripe's product to the parity. @pre the parity exists, and is at least as long as the stripe
  void add_to_parity(std::uint32_t codeword, std::span<const std::byte> stripe,
                     std::uint8_t coefficient) noexcept;
  /// Completes the version: computes the checksums of parities, and of the facts reported to others.
  void seal() noexcept;
  /// @}

  /// @name Reading it
  /// @{
  [[nodiscard]] const version_facts& facts() const noexcept { return facts_; }
  [[nodiscard]] rank_id self() const noexcept { return self_; }
  [[nodiscard]] std::span<const std::byte> own() const noexcept { return own_; }
  /// Returns all bytes held in that place; empty if there are none.
  [[nodiscard]] std::span<const std::byte> at(kept_place place, rank_id of,
                                              std::uint32_t codeword) const noexcept;
  /// Returns the bytes of memory that the own blob uses.
  [[nodiscard]] std::uint64_t own_capacity() const noexcept { return own_.capacity(); }
  /// Returns the bytes of memory of all data held for others.
  [[nodiscard]] std::uint64_t kept_capacity() const noexcept;
  /// @}

  /// @name Proving it
  /// @{ Returns the first part of a rank's blob whose checksum differs from the version's. @pre the blob has
  /// the size of that rank's blob
  [[nodiscard]] std::optional<sum_mismatch> mismatch_in(rank_id owner,
                                                        std::span<const std::byte> blob) const noexcept;
  /// Returns whether the facts reported to others are unchanged since the version was sealed.
  [[nodiscard]] bool tells_the_truth() const noexcept { return sum_of_facts() == facts_sum_; }
  /// Reads all of the version, and returns its damaged places.
  [[nodiscard]] kept_damage damage() const;
  /// @}

 private:
  friend struct llmmem::testing_access;
  [[nodiscard]] std::uint32_t sum_of_facts() const noexcept;

  version_facts facts_{};
  rank_id self_{};
  std::vector<std::byte> own_{};
  std::vector<std::vector<std::byte>> copies_{};    // by rank; empty if none is held
  std::vector<std::vector<std::byte>> parities_{};  // by codeword of the own group; empty if none is held
  std::vector<std::uint32_t> parity_sums_{};
  std::uint32_t facts_sum_ = 0;
};

inline void kept_version::begin(version_facts facts, rank_id self) {
  facts_ = std::move(facts);
  facts_.sums.assign(facts_.layout.part_bytes.size(), 0);
  self_ = self;
  own_.clear();
  copies_.resize(facts_.layout.world);
  for (std::vector<std::byte>& each : copies_)
    each.clear();
  for (std::vector<std::byte>& each : parities_)
    each.clear();
}

inline void kept_version::add_own(part_id part, std::span<const std::byte> bytes) {
  own_.insert(own_.end(), bytes.begin(), bytes.end());
  set_sum(part, crc32c(0, bytes));
}

inline std::span<std::byte> kept_version::make_copy(rank_id of) {
  std::vector<std::byte>& copy = copies_[to_index(of)];
  copy.resize(facts_.layout.blob_bytes(of));
  return copy;
}

inline void kept_version::add_to_copy(rank_id of, std::span<const std::byte> bytes) {
  std::vector<std::byte>& copy = copies_[to_index(of)];
  copy.insert(copy.end(), bytes.begin(), bytes.end());
}

inline void kept_version::begin_parities(std::uint32_t codewords) {
  parities_.resize(codewords);
  parity_sums_.assign(codewords, 0);
}

inline void kept_version::add_to_parity(std::uint32_t codeword, std::span<const std::byte> stripe,
                                        std::uint8_t coefficient) noexcept {
  static_cast<void>(gf256_multiply_add(parities_[codeword], stripe, coefficient));
}

inline void kept_version::seal() noexcept {
  for (std::size_t codeword = 0; codeword < parities_.size(); ++codeword) {
    if (!parities_[codeword].empty()) parity_sums_[codeword] = crc32c(0, parities_[codeword]);
  }
  facts_sum_ = sum_of_facts();
}

inline std::span<const std::byte> kept_version::at(kept_place place, rank_id of,
                                                   std::uint32_t codeword) const noexcept {
  if (place == kept_place::copy) return copies_[to_index(of)];
  if (place == kept_place::parity) return parities_[codeword];
  return own_;
}

inline std::uint64_t kept_version::kept_capacity() const noexcept {
  std::uint64_t bytes = 0;
  for (const std::vector<std::byte>& copy : copies_)
    bytes += copy.capacity();
  for (const std::vector<std::byte>& parity : parities_)
    bytes += parity.capacity();
  return bytes;
}

inline std::optional<sum_mismatch> kept_version::mismatch_in(rank_id owner,
                                                             std::span<const std::byte> blob) const noexcept {
  const kept_layout& layout = facts_.layout;
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < layout.part_bytes.size(); ++i) {
    if (layout.owners[i] != owner) continue;
    const std::uint32_t sum = crc32c(0, blob.subspan(at, layout.part_bytes[i]));
    if (sum != facts_.sums[i]) return sum_mismatch{.wanted = facts_.sums[i], .found = sum};
    at += layout.part_bytes[i];
  }
  return std::nullopt;
}

inline kept_damage kept_version::damage() const {
  kept_damage found(facts_.layout.world);
  if (mismatch_in(self_, own_)) found.note_own();
  for (std::uint32_t rank = 0; rank < copies_.size(); ++rank) {
    if (!copies_[rank].empty() && mismatch_in(rank_id{rank}, copies_[rank])) found.note_copy(rank);
  }
  for (std::uint32_t codeword = 0; codeword < parities_.size(); ++codeword) {
    const std::vector<std::byte>& parity = parities_[codeword];
    if (!parity.empty() && crc32c(0, parity) != parity_sums_[codeword]) found.note_parity(codeword);
  }
  return found;
}

/// The sum is the same on all ranks that hold the version.
inline std::uint32_t kept_version::sum_of_facts() const noexcept {
  const std::uint64_t numbers[] = {facts_.version, facts_.epoch, to_index(self_), facts_.layout.world};
  std::uint32_t sum = crc32c(0, std::as_bytes(std::span(numbers)));
  sum = crc32c(sum, std::as_bytes(std::span(facts_.seats)));
  sum = crc32c(sum, std::as_bytes(std::span(facts_.layout.owners)));
  return crc32c(sum, std::as_bytes(std::span(facts_.sums)));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
