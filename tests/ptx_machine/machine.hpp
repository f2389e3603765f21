/// @file
/// Runs launches. Blocks run one after another; the warps of a block run each until it ends or waits at a
/// barrier.
#pragma once

#include "ptx_machine/warp.hpp"

namespace ptx_machine {

/// Runs each launch to its end, or throws the fault that ended it. Not thread-safe.
class machine {
 public:
  device_memory memory{};
  machine_options options{};
  u64 lane_instructions = 0, warp_instructions = 0, launches = 0, approximate = 0;
  u64 asked_bytes = 0, sectors = 0;  // of accesses to global memory, where it profiles
  double seconds = 0;

  void run(code& of, triple grid, triple block, u64 dynamic_shared, const std::vector<u8>& params) {
    const auto began = std::chrono::steady_clock::now();
    if (of.generation != memory.generation()) {
      for (inst& each : of.insts)
        each.near = nullptr;
      of.generation = memory.generation();
    }
    for (inst& each : of.insts)
      if (each.where != space::global && each.where != space::constant) each.near = nullptr;
    if (order_.begin()) memory.forget_accesses();
    launch_state launch{memory, order_, options, of, grid, block};
    std::vector<u8> param_bytes = params;
    param_bytes.resize(std::max<u64>(params.size(), 16));
    launch.params.size = params.size();
    launch.params.host = param_bytes.data();
    launch.params.is_allowed = true;
    const u64 shared_bytes = (of.of->shared_bytes + 15) / 16 * 16 + dynamic_shared;
    zeroed shared(shared_bytes), written(shared_bytes), writer(4 * shared_bytes), reader(4 * shared_bytes);
    launch.shared.size = dynamic_shared == 0 ? of.of->shared_bytes : shared_bytes;
    launch.shared.host = shared.data();
    launch.shared.written = written.data();
    if (of.has_barrier || shared_bytes != 0) {
      launch.shared.writer = reinterpret_cast<u32*>(writer.data());
      launch.shared.reader = reinterpret_cast<u32*>(reader.data());
    }
    const auto threads = static_cast<u32>(block.count());
    const u32 warps = (threads + 31) / 32;
    // Without barriers warps run one after another, so one object serves all.
    std::vector<warp> all;
    all.reserve(warps);
    for (u32 w = 0; w < (of.has_barrier ? warps : 1); ++w)
      prepare(all.emplace_back(launch));
    for (u32 z = 0; z < grid.z; ++z) {
      for (u32 y = 0; y < grid.y; ++y) {
        for (u32 x = 0; x < grid.x; ++x) {
          launch.block_index = {x, y, z};
          launch.epoch = 0;
          if (shared_bytes != 0) {  // each block has its own
            std::memset(written.data(), 0, shared_bytes);
            std::memset(writer.data(), 0, 4 * shared_bytes);
            std::memset(reader.data(), 0, 4 * shared_bytes);
          }
          for (u32 w = 0; w < warps; ++w) {
            warp& each = all[of.has_barrier ? w : 0];
            start(each, w, threads);
            each.run();
          }
          while (of.has_barrier && meet(all)) {
            ++launch.epoch;
            u32 count = 0, arrived = 0;
            for (warp& each : all) {
              if (!each.is_waiting) continue;
              count += static_cast<u32>(std::popcount(each.votes_at_barrier()));
              arrived += static_cast<u32>(std::popcount(each.parked[0].mask));
            }
            for (warp& each : all)
              if (each.is_waiting) each.pass_barrier(count, arrived), each.run();
          }
          ++launch.block_number;
        }
      }
    }
    of.launches += 1;
    of.lane_instructions += launch.lane_instructions;
    lane_instructions += launch.lane_instructions;
    warp_instructions += launch.warp_instructions;
    approximate += launch.approximate;
    asked_bytes += launch.asked_bytes;
    sectors += launch.sectors;
    launches += 1;
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

 private:
  static void prepare(warp& made) {
    const code& of = made.in.of;
    made.file_room.resize(of.file_bytes + 64);
    made.file = made.file_room.data() + (64 - reinterpret_cast<u64>(made.file_room.data()) % 64) % 64;
    std::memcpy(made.file + of.constants_at, of.constants.data(), of.constants.size());
    if (of.of->local_bytes != 0) {
      made.local_bytes = zeroed(32 * of.of->local_bytes);
      made.local_written = zeroed(32 * of.of->local_bytes);
      made.local.size = of.of->local_bytes;
    }
  }
  void start(warp& made, u32 number, u32 threads) {
    const launch_state& in = made.in;
    made.number = number;
    const auto set = [&](special_row which, auto value) {
      u32* const to = made.row<u32>(in.of.special_at + 128 * which);
      for (u32 k = 0; k < 32; ++k)
        to[k] = static_cast<u32>(value(k));
    };
    const auto thread = [&](u32 k) { return number * 32 + k; };
    set(tid_x, [&](u32 k) { return thread(k) % in.block.x; });
    set(tid_y, [&](u32 k) { return thread(k) / in.block.x % in.block.y; });
    set(tid_z, [&](u32 k) { return thread(k) / in.block.x / in.block.y; });
    set(lane_id, [](u32 k) { return k; });
    set(warp_id, [&](u32) { return number; });
    set(mask_eq, [](u32 k) { return 1U << k; });
    set(mask_lt, [](u32 k) { return (1U << k) - 1; });
    set(mask_le, [](u32 k) { return (2ULL << k) - 1; });
    set(mask_gt, [](u32 k) { return ~((2ULL << k) - 1); });
    set(mask_ge, [](u32 k) { return ~((1U << k) - 1); });
    const u32 values[] = {in.block_index.x, in.block_index.y, in.block_index.z, in.block.x, in.block.y,
                          in.block.z,       in.grid.x,        in.grid.y,        in.grid.z};
    for (u32 r = 0; r < 9; ++r)
      set(static_cast<special_row>(ctaid_x + r), [&](u32) { return values[r]; });
    const u32 lanes = std::min(32U, threads - number * 32);
    made.begin(lanes == 32 ? ~u32{0} : (1U << lanes) - 1, order_.stamp(in.block_number, in.epoch, number));
    if (in.of.of->local_bytes != 0) std::memset(made.local_written.data(), 0, 32 * in.of.of->local_bytes);
  }
  /// Whether any warp waits at a barrier. Throws when two wait at different ones.
  static bool meet(std::vector<warp>& all) {
    const warp* first = nullptr;
    for (warp& each : all) {
      if (!each.is_waiting) continue;
      if (first == nullptr) first = &each;
      const inst& here = each.in.of.insts[each.parked[0].pc];
      const inst& there = each.in.of.insts[first->parked[0].pc];
      if (here.form != there.form || here.size != there.size)
        each.wrong(here, fault_kind::divergence, 0,
                   "divergence: warps of a block wait at different barriers");
    }
    return first != nullptr;
  }

  access_order order_{};
};

}  // namespace ptx_machine
