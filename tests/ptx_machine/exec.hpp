// ptx_exec.hpp: executes kernels. A warp is 32 lanes that share an instruction; its registers are rows of 32
// values, so that an instruction is a loop over lanes that the compiler vectorises. Lanes that branch apart
// are groups, of which the one that is furthest behind runs, until they are at the same instruction again.
// Blocks run one after another, and warps of a block until each ends or waits at a barrier.
#pragma once

#include "ptx_machine/memory.hpp"

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace ptx_machine {

struct triple {
  u32 x = 1, y = 1, z = 1;
  [[nodiscard]] u64 count() const { return u64{x} * y * z; }
};

struct warp;
struct inst;
using handler = void (*)(warp&, inst&);

enum class flow : u8 { plain, branch, end, meet, meet_all, barrier };

/// A statement as it is executed. Rows are offsets into the register file.
struct inst {
  handler run = nullptr;
  std::array<u32, 4> row{};
  flow how = flow::plain;
  space where = space::generic;
  bool is_relaxed = false;
  bool is_narrow_address = false;
  bool is_approximate = false;  // has no exact bits: ex2.approx and its like
  u8 size = 0;    // of what each lane accesses, or a detail of the operation
  u8 form = 0;    // another detail
  u32 guard = 0;  // row of a predicate
  u32 guard_flip = 0;
  u32 target = 0;
  u64 offset = 0;
  u64 used_bytes = ~u64{0};
  region* near = nullptr;
  std::vector<u32> more{};  // rows of tuples
  const statement* from = nullptr;
  u64 runs = 0, lanes = 0, sectors = 0, bytes = 0;  // for the profile
};

constexpr u32 no_guard = ~u32{0};
constexpr u64 shared_window = u64{0xF1} << 56, local_window = u64{0xF2} << 56, param_window = u64{0xF3} << 56;

enum special_row : u32 {
  tid_x,
  tid_y,
  tid_z,
  lane_id,
  warp_id,
  mask_eq,
  mask_lt,
  mask_le,
  mask_gt,
  mask_ge,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  special_rows
};
constexpr const char* special_names[] = {
    "%tid.x",       "%tid.y",       "%tid.z",       "%laneid",   "%warpid",  "%lanemask_eq", "%lanemask_lt",
    "%lanemask_le", "%lanemask_gt", "%lanemask_ge", "%ctaid.x",  "%ctaid.y", "%ctaid.z",     "%ntid.x",
    "%ntid.y",      "%ntid.z",      "%nctaid.x",    "%nctaid.y", "%nctaid.z"};

/// A kernel, ready to run. Behind the registers of its file lie special registers, then constants.
struct code {
  kernel* of = nullptr;
  std::vector<inst> insts{};
  std::vector<u8> constants{};
  u32 special_at = 0;
  u32 constants_at = 0;
  u32 file_bytes = 0;
  bool has_barrier = false;
  u64 generation = 0;
  u64 launches = 0, lane_instructions = 0;
};

struct machine_options {
  bool checks_races = true;
  bool checks_uninitialised = true;
  bool profiles = false;
  bool keeps_apart = false;  // lanes that branched apart meet only where an instruction has them meet
};

/// What a launch shares.
struct launch_state {
  device_memory& memory;
  access_order& order;
  const machine_options& options;
  code& of;
  triple grid{}, block{};
  u32 block_number = 0, epoch = 0;
  triple block_index{};
  region params{}, shared{};
  u64 lane_instructions = 0, warp_instructions = 0;
  u64 approximate = 0;  // lanes that executed an instruction without exact bits
};

struct group {
  u32 pc = 0, mask = 0;
};

struct warp {
  launch_state& in;
  u8* file = nullptr;
  u32 number = 0;
  u32 exists = 0, live = 0;
  u32 now = 0;  // the lanes that execute
  u32 stamp = 0;
  bool is_waiting = false;
  bool met = false;             // the instruction ordered accesses of the lanes
  std::vector<group> groups{};  // those that may run, the lowest last
  std::vector<group> parked{};  // those that wait for others
  zeroed local_bytes{}, local_written{};
  region local{};
  std::vector<u8> file_room{};

  explicit warp(launch_state& launch) : in(launch) {}

  template <class T>
  [[nodiscard]] T* row(u32 at) const {
    return reinterpret_cast<T*>(file + at);
  }

  [[noreturn]] void wrong(const inst& at, fault_kind kind, u32 lane, const std::string& what) const {
    const u32 thread = number * 32 + lane;
    const triple& b = in.block_index;
    throw fault(kind, what + "\n  thread (" + std::to_string(thread % in.block.x) + "," +
                          std::to_string(thread / in.block.x % in.block.y) + "," +
                          std::to_string(thread / in.block.x / in.block.y) + ") of block (" +
                          std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) +
                          "), line " + std::to_string(at.from->line) +
                          " of the PTX: " + std::string(at.from->text) + "\n  kernel " + in.of.of->name);
  }

  [[nodiscard]] region* resolve(space where, u64& at, u32 lane) {
    if (where == space::generic && at >= shared_window) {
      const u64 window = at >> 56 << 56;
      where = window == shared_window ? space::shared : window == local_window ? space::local : space::param;
      at -= window;
    }
    if (where == space::shared) return &in.shared;
    if (where == space::param) return &in.params;
    if (where == space::local) {
      local.host = local_bytes.data() + lane * local.size;
      local.written = local_written.data() + lane * local.size;
      return &local;
    }
    return in.memory.find(at);
  }

  /// Where an access of a lane goes, which is one that it may make.
  template <bool Writes, unsigned Bytes>
  [[nodiscard]] u8* go(inst& i, u32 lane, u64 at, const u8* value = nullptr) {
    region* to = i.near;
    if (to == nullptr || at - to->base >= to->size) {
      const bool is_window = i.where == space::generic && at >= shared_window;
      to = resolve(i.where, at, lane);
      if (to != &local && !is_window) i.near = to;
    }
    const u64 off = to == nullptr ? 0 : at - to->base;
    if (to == nullptr || off > to->size || Bytes > to->size - off || !to->is_allowed) [[unlikely]]
      out_of_bounds(i, lane, at, Bytes, to);
    if (at % Bytes != 0) [[unlikely]]
      wrong(i, fault_kind::alignment, lane,
            "an access of " + std::to_string(Bytes) + " bytes at " + hex(at) +
                ", which is no multiple of that");
    if (to->written != nullptr) {
      u8* const written = to->written + off;
      if constexpr (Writes) {
        std::memset(written, 0xFF, Bytes);
      } else {
        u8 all = 0xFF;
        for (unsigned b = 0; b < Bytes; ++b)
          all &= (i.used_bytes >> b & 1) != 0 ? written[b] : 0xFF;
        if (all != 0xFF && in.options.checks_uninitialised) [[unlikely]]
          wrong(i, fault_kind::uninitialised, lane,
                "a read of " + std::to_string(Bytes) + " bytes at " + hex(at) +
                    ", of which some were never written; " + near_what(i, at));
      }
    }
    if (to->writer != nullptr && in.options.checks_races) note<Writes, Bytes>(i, lane, at, *to, off, value);
    return to->host + off;
  }

  template <bool Writes, unsigned Bytes>
  void note(inst& i, u32 lane, u64 at, region& to, u64 off, const u8* value) {
    u32* const writer = to.writer + off;
    u32* const reader = to.reader + off;
    const u32 mine = access_order::record(stamp, lane, i.is_relaxed);
    const u32 first = in.order.first_record();
    bool is_new = true;
    for (unsigned b = 0; b < Bytes; ++b)
      is_new = is_new & (writer[b] < first) & (reader[b] < first);
    u32* const kept = Writes ? writer : reader;
    if (is_new) [[likely]] {
      for (unsigned b = 0; b < Bytes; ++b)
        kept[b] = mine;
      return;
    }
    for (unsigned b = 0; b < Bytes; ++b) {
      // A store that leaves a byte as it was disturbs nobody.
      const bool is_same = Writes && value != nullptr && value[b] == to.host[off + b];
      if (!is_same && in.order.collide(writer[b], mine)) raced(i, lane, at + b, Writes, "written", writer[b]);
      if (Writes && !is_same && in.order.collide(reader[b], mine))
        raced(i, lane, at + b, Writes, "read", reader[b]);
      kept[b] = Writes ? mine : in.order.both(reader[b], mine);
    }
  }
  [[noreturn]] void raced(const inst& i, u32 lane, u64 at, bool writes, const char* did, u32 record) const {
    wrong(i, fault_kind::race, lane,
          std::string("a race: a ") + (writes ? "write" : "read") + " at " + hex(at) + " of what " +
              in.order.describe(record) + " has " + did +
              ", with nothing between them that orders the two; here is block " +
              std::to_string(in.block_number) + ", warp " + std::to_string(number) + ", lane " +
              std::to_string(lane));
  }
  [[nodiscard]] static std::string hex(u64 at) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(at));
    return text;
  }
  [[nodiscard]] std::string near_what(const inst& i, u64 at) const {
    if (i.where == space::shared || i.where == space::local || i.where == space::param)
      return "address of its space";
    return in.memory.whereabouts(at);
  }
  [[noreturn]] void out_of_bounds(const inst& i, u32 lane, u64 at, unsigned bytes, const region* to) const {
    const std::string size =
        to == nullptr || to->keeps != nullptr ? "" : ", which has " + std::to_string(to->size);
    wrong(i, fault_kind::bounds, lane,
          "an access of " + std::to_string(bytes) + " bytes at " + hex(at) +
              ", out of bounds: " + near_what(i, at) + size);
  }

  /// Addresses of all lanes.
  void addresses(const inst& i, u32 of, u64 (&at)[32]) const {
    if (i.is_narrow_address)
      for (u32 k = 0; k < 32; ++k)
        at[k] = row<u32>(of)[k] + i.offset;
    else
      for (u32 k = 0; k < 32; ++k)
        at[k] = row<u64>(of)[k] + i.offset;
  }
  void profile(inst& i, const u64 (&at)[32], unsigned bytes) {
    if (i.where != space::global && i.where != space::generic) return;
    std::array<u64, 64> sectors;
    u32 count = 0;
    for (u32 m = now; m != 0; m &= m - 1) {
      const u64 a = at[std::countr_zero(m)];
      sectors[count++] = a / 32;
      if ((a + bytes - 1) / 32 != a / 32) sectors[count++] = (a + bytes - 1) / 32;
    }
    std::sort(sectors.begin(), sectors.begin() + count);
    i.sectors += static_cast<u64>(std::unique(sectors.begin(), sectors.begin() + count) - sectors.begin());
    i.runs += 1;
    i.lanes += static_cast<u64>(std::popcount(now));
    i.bytes += static_cast<u64>(std::popcount(now)) * bytes;
  }

  // ---- which lanes run ----

  void begin(u32 lanes, u32 first_stamp) {
    exists = live = lanes;
    stamp = first_stamp;
    is_waiting = false;
    parked.clear();
    groups.assign(1, {0, lanes});
  }
  void add(u32 pc, u32 mask) {
    if (mask == 0) return;
    auto at = groups.end();
    while (at != groups.begin() && std::prev(at)->pc < pc)
      --at;
    if (at != groups.begin() && std::prev(at)->pc == pc && !in.options.keeps_apart)
      std::prev(at)->mask |= mask;
    else
      groups.insert(at, {pc, mask});
  }
  /// The lanes that an instruction wants there.
  [[nodiscard]] u32 wanted(inst& i, u32 lanes) {
    if (i.how == flow::meet_all) return ~u32{0};
    if (i.how == flow::barrier) return live;
    const u32* const masks = row<u32>(i.target);
    const u32 mask = masks[std::countr_zero(lanes)];
    for (u32 m = lanes; m != 0; m &= m - 1) {
      const auto lane = static_cast<u32>(std::countr_zero(m));
      if (masks[lane] != mask) wrong(i, fault_kind::divergence, lane, "lanes that meet name different masks");
      if ((mask >> lane & 1) == 0)
        wrong(i, fault_kind::divergence, lane, "a lane that is not in the mask it names");
    }
    return mask & live;
  }
  [[noreturn]] void stuck() {
    std::string text = "divergence: lanes wait for others that do not come";
    for (const group& each : parked) {
      const statement& at = *in.of.insts[each.pc].from;
      text +=
          "\n  lanes " + hex(each.mask) + " at line " + std::to_string(at.line) + ": " + std::string(at.text);
    }
    if (live != exists) text += "\n  lanes " + hex(exists & ~live) + " have ended";
    wrong(in.of.insts[parked[0].pc], fault_kind::divergence,
          static_cast<u32>(std::countr_zero(parked[0].mask)), text);
  }

  /// Until all lanes have ended, or all wait at a barrier.
  void run() {
    inst* const insts = in.of.insts.data();
    u64 lanes = 0, steps = 0;
    for (;;) {
      u32 pc, mask;
      if (!groups.empty()) {
        pc = groups.back().pc;
        mask = groups.back().mask;
        groups.pop_back();
      } else {
        if (parked.empty()) break;
        const auto ready = std::find_if(parked.begin(), parked.end(), [&](const group& each) {
          inst& i = insts[each.pc];
          return i.how != flow::barrier && (wanted(i, each.mask) & ~each.mask) == 0;
        });
        if (ready == parked.end()) {
          if (parked.size() != 1 || insts[parked[0].pc].how != flow::barrier || parked[0].mask != live)
            stuck();
          is_waiting = true;
          break;
        }
        pc = ready->pc;
        mask = ready->mask;
        parked.erase(ready);
      }
      u32 next = groups.empty() || in.options.keeps_apart ? ~u32{0} : groups.back().pc;
      for (;;) {
        inst& i = insts[pc];
        u32 act = mask;
        if (i.guard != no_guard) act &= *row<u32>(i.guard) ^ i.guard_flip;
        lanes += static_cast<u64>(std::popcount(act));
        ++steps;
        if (i.how == flow::plain) [[likely]] {
          now = act;
          if (act != 0) i.run(*this, i);
          ++pc;
        } else if (i.how == flow::branch) {
          if (act == mask)
            pc = i.target;
          else if (act == 0)
            ++pc;
          else {
            add(i.target, act);
            add(pc + 1, mask & ~act);
            break;
          }
        } else if (i.how == flow::end) {
          live &= ~act;
          add(pc + 1, mask & ~act);
          break;
        } else if (i.how == flow::meet && act == live && (wanted(i, act) & ~act) == 0) {
          now = act;
          i.run(*this, i);
          if (std::exchange(met, false)) stamp = in.order.stamp(in.block_number, in.epoch, number);
          ++pc;
        } else {
          if (act != mask) add(pc + 1, mask & ~act);
          if (act == 0) break;
          if (in.options.keeps_apart && i.how == flow::meet_all && act != ~u32{0})
            wrong(i, fault_kind::divergence, static_cast<u32>(std::countr_zero(act)),
                  "divergence: nothing has brought all lanes together here; these are lanes " + hex(act));
          const auto others =
              std::find_if(parked.begin(), parked.end(), [&](const group& each) { return each.pc == pc; });
          if (others != parked.end()) {
            act |= others->mask;
            parked.erase(others);
          }
          if (i.how == flow::barrier || (wanted(i, act) & ~act) != 0) {
            parked.push_back({pc, act});
            break;
          }
          now = act;
          i.run(*this, i);
          if (std::exchange(met, false)) stamp = in.order.stamp(in.block_number, in.epoch, number);
          add(pc + 1, act);
          break;
        }
        if (pc >= next) {
          if (pc == next) {
            mask |= groups.back().mask;
            groups.pop_back();
            next = groups.empty() ? ~u32{0} : groups.back().pc;
          } else {
            add(pc, mask);
            break;
          }
        }
      }
    }
    in.lane_instructions += lanes;
    in.warp_instructions += steps;
  }
  /// What it waited for came.
  void pass_barrier() {
    is_waiting = false;
    groups.assign(1, {parked[0].pc + 1, parked[0].mask});
    parked.clear();
    stamp = in.order.stamp(in.block_number, in.epoch, number);
  }
};

/// Runs a launch to its end, or throws what went wrong in it.
class machine {
 public:
  device_memory memory{};
  machine_options options{};
  u64 lane_instructions = 0, warp_instructions = 0, launches = 0, approximate = 0;
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
    // Without barriers one warp can be every warp.
    std::vector<warp> all;
    all.reserve(warps);
    for (u32 w = 0; w < (of.has_barrier ? warps : 1); ++w)
      prepare(all.emplace_back(launch));
    for (u32 z = 0; z < grid.z; ++z) {
      for (u32 y = 0; y < grid.y; ++y) {
        for (u32 x = 0; x < grid.x; ++x) {
          launch.block_index = {x, y, z};
          launch.epoch = 0;
          if (shared_bytes != 0) {  // of each block its own
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
            for (warp& each : all)
              if (each.is_waiting) each.pass_barrier(), each.run();
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
  /// Whether any wait at a barrier, which must be the same for all.
  static bool meet(std::vector<warp>& all) {
    const warp* first = nullptr;
    for (warp& each : all) {
      if (!each.is_waiting) continue;
      if (first == nullptr) first = &each;
      const inst& here = each.in.of.insts[each.parked[0].pc];
      const inst& there = each.in.of.insts[first->parked[0].pc];
      if (here.form != there.form)
        each.wrong(here, fault_kind::divergence, 0,
                   "divergence: warps of a block wait at different barriers");
    }
    return first != nullptr;
  }

  access_order order_{};
};

}  // namespace ptx_machine
