#pragma once

// Damage to what a replica holds, beyond what any caller can reach.

#include <llmmem/redundancy/detail/held_versions.hpp>
#include <llmmem/redundant_replica.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The one definition of the friend that the library's types declare, for this program.
struct testing_access {
  /// Turns a bit of what is held: of the own blob, of a copy, or of a parity.
  template <class Replica>
  static void damage(Replica& replica, int what) {
    if (what == 0) turn(replica.held_.committed_.own_);
    for (std::vector<std::byte>& each : replica.held_.committed_.copies_) {
      if (what == 1 && turn(each)) return;
    }
    for (std::vector<std::byte>& each : replica.held_.committed_.parities_) {
      if (what == 2 && turn(each)) return;
    }
  }
  /// Turns a bit of what others are told of a version: of a part's checksum, its owner, a seat or the number.
  template <class Replica>
  static void damage_word(Replica& replica, int what) {
    detail::version_facts& facts = replica.held_.committed_.facts_;
    if (what == 0) facts.sums[1] ^= 4;
    if (what == 1) facts.layout.owners[1] = rank_id{2};
    if (what == 2) facts.seats[1] = seat_id{2};
    if (what == 3) facts.version ^= 4;
  }
  /// Of memory for parts that were given back.
  template <class Replica>
  static std::uint64_t memory_bytes(const Replica& replica) {
    return replica.restorer_.memory_bytes();
  }

  /// What a rank holds in such a place, to be changed.
  static std::vector<std::byte>& bytes_at(detail::kept_version& held, kept_place place,
                                          std::uint32_t number) {
    if (place == kept_place::copy) return held.copies_[number];
    if (place == kept_place::parity) return held.parities_[number];
    return held.own_;
  }
  /// What others are told of it.
  static detail::version_facts& facts(detail::kept_version& held) { return held.facts_; }
  static detail::kept_version& committed(detail::held_versions& held) { return held.committed_; }

 private:
  static bool turn(std::vector<std::byte>& bytes) {
    if (bytes.empty()) return false;
    bytes[bytes.size() / 2] ^= std::byte{4};
    return true;
  }
};

}  // namespace v0
}  // namespace llmmem
