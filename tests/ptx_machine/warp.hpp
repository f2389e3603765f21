/// @file
/// Warps: 32 lanes that share an instruction. A warp's registers are rows of 32 values, so that an
/// instruction is a loop over lanes that the compiler vectorises. Lanes that branch apart form groups; the
/// group with the lowest program counter runs until it reaches the next one's.
#pragma once

#include "ptx_machine/access_order.hpp"
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

/// What a barrier makes of the predicates of its threads (inst::size).
enum barrier_combination : u8 { combine_nothing, combine_and, combine_or, combine_count };

/// A statement, ready to execute. Rows are offsets into the register file.
struct inst {
  handler run = nullptr;
  std::array<u32, 4> row{};
  flow how = flow::plain;
  space where = space::generic;
  bool is_relaxed = false;
  bool is_narrow_address = false;
  bool is_approximate = false;  // has no exact bits: ex2.approx and its like
  u8 size = 0;                  // of what each lane accesses, or a detail of the operation
  u8 form = 0;                  // another detail
  u32 guard = 0;                // row of a predicate
  u32 guard_flip = 0;
  u32 target = 0;
  u64 offset = 0;
  u64 used_bytes = ~u64{0};
  region* near = nullptr;
  std::vector<u32> more{};  // rows of tuples
  const statement* from = nullptr;
  u64 runs = 0;  // how often a warp executed it
  u64 lanes = 0, accesses = 0, sectors = 0,
      bytes = 0;  // of accesses to global memory, where the machine profiles
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

/// A kernel, ready to run. Its file holds the registers, then special registers, then constants.
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
  bool keeps_apart = false;  // lanes that branched apart join only at an instruction that joins them
};

/// What all warps of a launch share.
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
  u64 approximate = 0;               // lanes that executed an instruction without exact bits
  u64 asked_bytes = 0, sectors = 0;  // of accesses to global memory, where the machine profiles
};

struct group {
  u32 pc = 0, mask = 0;
};

struct warp {
  launch_state& in;
  u8* file = nullptr;
  u32 number = 0;
  u32 exists = 0, live = 0;
  u32 now = 0;  // the lanes that execute the current instruction
  u32 stamp = 0;
  bool is_waiting = false;
  bool met = false;             // the instruction orders the accesses of its lanes
  std::vector<group> groups{};  // may run; the lowest program counter last
  std::vector<group> parked{};  // wait for other lanes
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
                          "), line " + std::to_string(at.from->line) + " of the PTX: " +
                          std::string(at.from->text) + source_of(at) + "\n  kernel " + in.of.of->name);
  }
  [[nodiscard]] std::string source_of(const inst& at) const {
    const std::string place = in.of.of->source_of(*at.from);
    return place.empty() ? place : "\n  from " + place;
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

  /// The host bytes that a lane's access goes to. Throws `fault` unless the lane may make this access.
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
                ", which is not a multiple of that");
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
      // A store of the value that a byte already has disturbs no other lane.
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

  /// The addresses of all lanes.
  void addresses(const inst& i, u32 of, u64 (&at)[32]) const {
    if (i.is_narrow_address)
      for (u32 k = 0; k < 32; ++k)
        at[k] = row<u32>(of)[k] + static_cast<u32>(i.offset);  // wraps at 32 bits, as the address does
    else
      for (u32 k = 0; k < 32; ++k)
        at[k] = row<u64>(of)[k] + i.offset;
  }
  /// Counts an access to global memory: bytes that several lanes ask for count once.
  void profile(inst& i, const u64 (&at)[32], unsigned bytes) {
    if (i.where != space::global && i.where != space::generic) return;
    std::array<u64, 32> starts;
    u32 count = 0;
    for (u32 m = now; m != 0; m &= m - 1)
      starts[count++] = at[std::countr_zero(m)];
    std::sort(starts.begin(), starts.begin() + count);
    u64 asked = 0, sectors = 0, end = 0, next_sector = 0;
    for (u32 n = 0; n < count; ++n) {
      const u64 begin = std::max(starts[n], end), sector = std::max(starts[n] / 32, next_sector);
      end = starts[n] + bytes;
      next_sector = (end + 31) / 32;
      asked += end - begin;
      sectors += next_sector - sector;
    }
    i.accesses += 1;
    i.lanes += count;
    i.sectors += sectors;
    i.bytes += asked;
    in.sectors += sectors;
    in.asked_bytes += asked;
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
  /// The lanes that must arrive at `i` before `lanes` may execute it.
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

  /// Takes the group of lanes that runs next. False: all lanes have ended, or all wait at a barrier.
  [[nodiscard]] bool take_group(group& next) {
    if (!groups.empty()) {
      next = groups.back();
      groups.pop_back();
      return true;
    }
    if (parked.empty()) return false;
    const auto ready = std::find_if(parked.begin(), parked.end(), [&](const group& each) {
      inst& i = in.of.insts[each.pc];
      return i.how != flow::barrier && (wanted(i, each.mask) & ~each.mask) == 0;
    });
    if (ready == parked.end()) {
      const bool is_at_barrier =
          parked.size() == 1 && in.of.insts[parked[0].pc].how == flow::barrier && parked[0].mask == live;
      if (!is_at_barrier) stuck();
      is_waiting = true;
      return false;
    }
    next = *ready;
    parked.erase(ready);
    return true;
  }
  /// Executes `i` for the lanes in `act`, at least one of which there is.
  void execute(inst& i, u32 act) {
    now = act;
    ++i.runs;
    i.run(*this, i);
  }
  void execute_together(inst& i, u32 act) {
    execute(i, act);
    if (std::exchange(met, false)) stamp = in.order.stamp(in.block_number, in.epoch, number);
  }
  /// Lanes come to an instruction that joins lanes: they execute it once all that it names are there.
  void arrive(inst& i, u32 pc, u32 act) {
    if (in.options.keeps_apart && i.how == flow::meet_all && act != ~u32{0})
      wrong(i, fault_kind::divergence, static_cast<u32>(std::countr_zero(act)),
            "divergence: nothing has brought all lanes together here; these are lanes " + hex(act));
    const auto others =
        std::find_if(parked.begin(), parked.end(), [&](const group& each) { return each.pc == pc; });
    if (others != parked.end()) {
      act |= others->mask;
      parked.erase(others);
    }
    if (i.how == flow::barrier) {
      ++i.runs;
      parked.push_back({pc, act});
    } else if ((wanted(i, act) & ~act) != 0) {
      parked.push_back({pc, act});
    } else {
      execute_together(i, act);
      add(pc + 1, act);
    }
  }
  /// Moves `at` over its instruction. False: its lanes are in `groups` or `parked` now, or have ended.
  [[nodiscard]] bool step(group& at) {
    inst& i = in.of.insts[at.pc];
    u32 act = at.mask;
    if (i.guard != no_guard) act &= *row<u32>(i.guard) ^ i.guard_flip;
    in.lane_instructions += static_cast<u64>(std::popcount(act));
    ++in.warp_instructions;
    if (i.how == flow::plain) [[likely]] {
      if (act != 0) execute(i, act);
    } else if (i.how == flow::branch) {
      ++i.runs;
      if (act == at.mask) {
        at.pc = i.target;
        return true;
      }
      if (act != 0) {
        add(i.target, act);
        add(at.pc + 1, at.mask & ~act);
        return false;
      }
    } else if (i.how == flow::end) {
      ++i.runs;
      live &= ~act;
      add(at.pc + 1, at.mask & ~act);
      return false;
    } else if (i.how == flow::meet && act == live && (wanted(i, act) & ~act) == 0) {
      execute_together(i, act);
    } else {
      add(at.pc + 1, at.mask & ~act);
      if (act != 0) arrive(i, at.pc, act);
      return false;
    }
    ++at.pc;
    return true;
  }
  /// Runs until all lanes have ended, or all wait at a barrier. The group that is furthest behind runs until
  /// it reaches the next one's instruction, where both go on as one.
  void run() {
    for (group at; take_group(at);) {
      u32 next = groups.empty() || in.options.keeps_apart ? ~u32{0} : groups.back().pc;
      while (step(at)) {
        if (at.pc < next) continue;
        if (at.pc > next) {
          add(at.pc, at.mask);
          break;
        }
        at.mask |= groups.back().mask;
        groups.pop_back();
        next = groups.empty() ? ~u32{0} : groups.back().pc;
      }
    }
  }
  /// The lanes that wait at a barrier and whose predicate there is true.
  [[nodiscard]] u32 votes_at_barrier() {
    const inst& i = in.of.insts[parked[0].pc];
    return (*row<u32>(i.row[1]) ^ static_cast<u32>(i.offset)) & parked[0].mask;
  }
  /// Goes on behind the barrier at which it waits, where `count` of `threads` predicates were true.
  void pass_barrier(u32 count, u32 threads) {
    is_waiting = false;
    const inst& i = in.of.insts[parked[0].pc];
    if (i.size == combine_count) {
      for (u32 lane = 0; lane < 32; ++lane)
        if ((parked[0].mask >> lane & 1) != 0) row<u32>(i.row[0])[lane] = count;
    } else if (i.size != combine_nothing) {
      const bool is_true = i.size == combine_or ? count != 0 : count == threads;
      u32& to = *row<u32>(i.row[0]);
      to = is_true ? to | parked[0].mask : to & ~parked[0].mask;
    }
    groups.assign(1, {parked[0].pc + 1, parked[0].mask});
    parked.clear();
    stamp = in.order.stamp(in.block_number, in.epoch, number);
  }
};

}  // namespace ptx_machine
