#pragma once

// Damage to what a replica holds, beyond what any caller can reach.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <llmmem/redundant_replica.hpp>

namespace llmmem {
inline namespace v0 {

/// The one definition of the friend that the library's types declare, for this program.
struct testing_access {
  /// Turns a bit of what is held: of the own blob, of a copy, or of a parity.
  template <class Replica>
  static void damage(Replica& replica, int what) {
    if (what == 0) turn(replica.committed_.own);
    for (std::vector<std::byte>& each : replica.committed_.copies) {
      if (what == 1 && turn(each)) return;
    }
    for (std::vector<std::byte>& each : replica.committed_.parities) {
      if (what == 2 && turn(each)) return;
    }
  }
  /// Turns a bit of what others are told of a version: of a part's checksum, its owner, a seat or the number.
  template <class Replica>
  static void damage_word(Replica& replica, int what) {
    auto& held = replica.committed_;
    if (what == 0) held.sums[1] ^= 4;
    if (what == 1) held.layout.owners[1] = rank_id{2};
    if (what == 2) held.seats[1] = seat_id{2};
    if (what == 3) held.version ^= 4;
  }
  /// Of memory for parts that were given back.
  template <class Replica>
  static std::uint64_t room_bytes(const Replica& replica) {
    std::uint64_t bytes = 0;
    for (const detail::part_room& each : replica.rooms_)
      bytes += each.bytes().size();
    return bytes;
  }

 private:
  static bool turn(std::vector<std::byte>& bytes) {
    if (bytes.empty()) return false;
    bytes[bytes.size() / 2] ^= std::byte{4};
    return true;
  }
};

}  // namespace v0
}  // namespace llmmem
