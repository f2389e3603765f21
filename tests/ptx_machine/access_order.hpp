/// @file
/// Which accesses of a launch are ordered: the race check asks this of each byte.
#pragma once

#include <string>
#include <vector>

#include "ptx_machine/parse.hpp"

namespace ptx_machine {

/// The order of the accesses of one launch. A warp has one stamp from one meeting of its lanes to the next. A
/// record of an access is a stamp, a lane, and whether the access is relaxed (atomic or volatile); where
/// several lanes, warps or blocks read, the record says so in the place of the lane.
class access_order {
 public:
  static constexpr u32 several_lanes = 32, several_warps = 33, several_blocks = 34;

  /// Begins a launch: earlier records no longer count. Returns true when the numbers have run out and the
  /// caller must erase every record.
  bool begin() {
    first_ = next_;
    stamps_.clear();
    if (next_ < (u32{1} << 24)) return false;
    first_ = next_ = 1;
    return true;
  }
  u32 stamp(u32 block, u32 epoch, u32 warp) {
    if (next_ >= (u32{1} << 25))
      throw fault(fault_kind::unsupported, "a launch of too many warps for the race check");
    stamps_.push_back({block, epoch, warp});
    return next_++;
  }
  [[nodiscard]] u32 first_record() const { return first_ << 7; }
  [[nodiscard]] static u32 record(u32 stamp, u32 lane, bool is_relaxed) {
    return stamp << 7 | lane << 1 | static_cast<u32>(is_relaxed);
  }

  /// Whether the recorded access is ordered before the access `now`.
  [[nodiscard]] bool is_before(u32 recorded, u32 now) const {
    if (recorded < first_record() || recorded == now) return true;
    const u32 lane = recorded >> 1 & 63;
    const stamped& then = stamps_[(recorded >> 7) - first_];
    const stamped& here = stamps_[(now >> 7) - first_];
    if (lane == several_blocks || then.block != here.block) return false;
    if (then.epoch != here.epoch) return true;
    if (lane == several_warps || then.warp != here.warp) return false;
    return recorded >> 7 != now >> 7 || lane == (now >> 1 & 63);
  }
  [[nodiscard]] bool collide(u32 recorded, u32 now) const {
    return (recorded & now & 1) == 0 && !is_before(recorded, now);
  }
  /// The record of two readers: `now` where it is ordered after the other, else a record of several.
  [[nodiscard]] u32 both(u32 recorded, u32 now) const {
    if (is_before(recorded, now)) return now;
    const u32 lane = recorded >> 1 & 63;
    const stamped& then = stamps_[(recorded >> 7) - first_];
    const stamped& here = stamps_[(now >> 7) - first_];
    const u32 who = then.block != here.block || lane == several_blocks ? several_blocks
                    : then.warp != here.warp || lane == several_warps  ? several_warps
                                                                       : several_lanes;
    return record(now >> 7, who, (recorded & now & 1) != 0);
  }
  [[nodiscard]] std::string describe(u32 recorded) const {
    const stamped& of = stamps_[(recorded >> 7) - first_];
    const u32 lane = recorded >> 1 & 63;
    return "block " + std::to_string(of.block) + ", warp " + std::to_string(of.warp) +
           (lane < 32 ? ", lane " + std::to_string(lane) : " and others");
  }

 private:
  struct stamped {
    u32 block, epoch, warp;
  };
  std::vector<stamped> stamps_{};
  u32 first_ = 1;
  u32 next_ = 1;
};

}  // namespace ptx_machine
