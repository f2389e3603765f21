/// @file
/// NCCL without a device, for the ranks of a simulated network: data are host memory, everything is
/// asynchronous, and a call that breaks one of NCCL's rules is written down.
#pragma once

#include <llmmem/comm/detail/nccl_library.hpp>

#include <llmmem/testing/sim_network.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

namespace llmmem_tests {

/// What a rank has put on its stream.
struct fake_operation {
  enum class what { send, recv, reduce, scatter, gather, broadcast, window } kind{};
  const std::byte* from = nullptr;
  std::byte* into = nullptr;
  std::size_t count = 0;  // of floats, or bytes
  int peer = 0;
};

struct fake_group;

/// What stands behind an `ncclComm_t`.
struct fake_comm {
  enum class state { making, ready, failed, revoking, revoked, finalizing, finalized, aborted, destroyed };

  std::shared_ptr<fake_group> group{};
  int rank = 0;
  int ranks = 0;
  state now = state::making;
  ncclResult_t error = ncclSuccess;
  std::uint32_t looks = 0;         // that still find it in progress
  std::uint32_t launch_looks = 0;  // likewise, before what was put reaches the stream
  std::deque<fake_operation> launching{};
  std::deque<fake_operation> queue{};  // of the stream
  std::uint64_t launched = 0;          // operations that have reached it so far
  std::uint32_t quiet_looks = 0;       // at an event, before what was revoked is off the stream
  bool was_shrunk = false;
  ncclComm_t* shown_at = nullptr;  // where a child is shown when it is made
  fake_comm* parent = nullptr;
  bool is_waiting_child = false;  // a parent whose child is being made
};

/// The communicators of the ranks that talk to each other.
struct fake_group {
  int ranks = 0;
  std::vector<int> excluded{};
  std::map<int, fake_comm*> members{};
};

/// A point of a stream: behind what has reached it, not behind what is still to.
struct fake_event {
  const fake_comm* of = nullptr;
  std::uint64_t launched = 0;
};

/// All that is there: one process.
struct fake_world {
  bool revoke_hangs = false;  // never quiet: must be aborted
  bool init_hangs = false;
  std::map<std::string, std::uint32_t> fails_at{};  // call: the how-manieth, from 1, fails
  std::string device{};                             // why there is none
  int version = 29900;                              // of what is loaded: has all calls that are pretended

  std::vector<std::string> broken_rules{};
  std::vector<std::string> log{};
  std::map<std::string, std::uint32_t> calls{};
  std::vector<std::unique_ptr<fake_comm>> all{};
  std::map<std::string, std::shared_ptr<fake_group>> groups{};
  std::uint64_t next_id = 1;
  struct window {
    const fake_comm* of = nullptr;
    const std::byte* memory = nullptr;
    std::size_t bytes = 0;
    int flags = 0;
  };
  bool makes_no_windows = false;  // devices that do not reach each other
  std::map<std::uintptr_t, window> windows{};
  std::map<const std::byte*, std::size_t> memory{};  // of NCCL's own allocator
  std::set<fake_event*> events{};
  std::set<void*> device_memory{};

  fake_world() = default;
  fake_world(const fake_world&) = delete;
  fake_world& operator=(const fake_world&) = delete;
  /// What who was killed has left.
  ~fake_world() {
    for (fake_event* const each : events)
      delete each;
    for (void* const each : device_memory)
      ::operator delete(each);
  }

  void end_windows(const fake_comm& of) {
    std::erase_if(windows, [&](const auto& each) { return each.second.of == &of; });
  }

  void rule(bool is_kept, const std::string& text) {
    if (!is_kept) broken_rules.push_back(text);
  }
  /// Communicators that nobody has ended, but for those of who was killed.
  [[nodiscard]] std::size_t left() const {
    return static_cast<std::size_t>(std::count_if(all.begin(), all.end(), [](const auto& each) {
      return each->now != fake_comm::state::aborted && each->now != fake_comm::state::destroyed;
    }));
  }
  /// Whether all that was taken of CUDA is given back.
  [[nodiscard]] bool is_tidy() const { return events.empty() && device_memory.empty() && memory.empty(); }
  [[nodiscard]] bool fails(const std::string& call) {
    const std::uint32_t number = ++calls[call];
    const auto at = fails_at.find(call);
    return at != fails_at.end() && at->second == number;
  }
};

/// The calls of `nccl_library`. `has_revoke` and `has_grow` as of the version that is pretended.
template <bool Revoke = true, bool Grow = false>
class fake_nccl {
 public:
  static constexpr bool has_revoke = Revoke;
  static constexpr bool has_grow = Grow;
  static constexpr bool has_windows = true;
  using state = fake_comm::state;
  using what = fake_operation::what;

  fake_nccl(fake_world& world, llmmem::testing::sim_endpoint& end) : world_(&world), end_(&end) {}

  [[nodiscard]] const char* why_no_device() const noexcept {
    return world_->device.empty() ? nullptr : world_->device.c_str();
  }
  ncclResult_t version(int* code) const {
    *code = world_->version;
    return ncclSuccess;
  }
  ncclResult_t unique_id(ncclUniqueId* id) {
    if (world_->fails("unique_id")) return ncclSystemError;
    write_id(id, "fresh");
    return ncclSuccess;
  }
  ncclResult_t init(ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank, ncclConfig_t* config) {
    if (world_->fails("init")) return ncclSystemError;
    check_config(config);
    fake_comm* one = enter(std::string(id.internal), ranks, rank, config);
    *made = handle(one);  // shown at once
    return ncclInProgress;
  }
  ncclResult_t shrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* made, ncclConfig_t* config,
                      int flags) {
    if (world_->fails("shrink")) return ncclInternalError;
    fake_comm& parent = use(comm, "shrink");
    check_config(config);
    world_->rule(count > 0, "ncclCommShrink excludes nobody");
    world_->rule(flags == NCCL_SHRINK_ABORT, "ncclCommShrink without NCCL_SHRINK_ABORT");
    world_->rule(std::find(excluded, excluded + count, parent.rank) == excluded + count,
                 "ncclCommShrink by one who is excluded");
    world_->rule(parent.now == state::ready || parent.now == state::revoked,
                 "ncclCommShrink of one that is busy");
    world_->rule(parent.queue.empty() && parent.launching.empty(), "ncclCommShrink of one that still runs");
    parent.was_shrunk = true;
    std::vector<int> out(excluded, excluded + count);
    std::sort(out.begin(), out.end());
    const int self = parent.rank - static_cast<int>(std::count_if(
                                       out.begin(), out.end(), [&](int each) { return each < parent.rank; }));
    std::string key = "shrunk of " + std::to_string(reinterpret_cast<std::uintptr_t>(parent.group.get()));
    for (const int each : out)
      key += " " + std::to_string(each);
    fake_comm* one = enter(key, parent.ranks - count, self, config);
    one->parent = &parent;
    one->shown_at = made;
    parent.is_waiting_child = true;
    *made = nullptr;
    return ncclInProgress;
  }
  ncclResult_t revoke(ncclComm_t comm) {
    if (world_->fails("revoke")) return ncclInternalError;
    fake_comm& one = use(comm, "revoke");
    world_->rule(one.now == state::ready, "ncclCommRevoke twice, or of one that is busy or has failed");
    // 2.28.9 frees the job of a group that is still being launched, and goes on to use it.
    world_->rule(one.launching.empty() && !one.is_waiting_child,
                 "ncclCommRevoke while something is being launched");
    one.now = state::revoking;
    one.looks = world_->revoke_hangs ? ~0U : 3;
    return ncclInProgress;
  }
  ncclResult_t grow_id(ncclComm_t comm, ncclUniqueId* id) {
    fake_comm& one = use(comm, "grow_id");
    world_->rule(one.now == state::ready, "ncclCommGetUniqueId of one that is not ready");
    write_id(id, "grown");
    return ncclSuccess;
  }
  ncclResult_t grow(ncclComm_t comm, int ranks, const ncclUniqueId* id, int rank, ncclComm_t* made,
                    ncclConfig_t* config) {
    if (world_->fails("grow")) return ncclSystemError;
    check_config(config);
    int self = rank;
    if (comm != nullptr) {
      fake_comm& parent = use(comm, "grow");
      world_->rule(rank == -1, "ncclCommGrow of a member gives a rank");
      world_->rule((id != nullptr) == (parent.rank == 0), "ncclCommGrow: the id is the first rank's");
      world_->rule(parent.now == state::ready && parent.queue.empty(), "ncclCommGrow of one that is busy");
      world_->rule(ranks > parent.ranks, "ncclCommGrow does not grow");
      self = parent.rank;
    } else {
      world_->rule(id != nullptr && rank >= 0, "ncclCommGrow of who joins needs id and rank");
    }
    // The members' root hands the id to them.
    fake_comm* one =
        enter(id != nullptr ? std::string(id->internal) : world_->log.back(), ranks, self, config);
    if (id != nullptr && comm != nullptr) world_->log.push_back(id->internal);
    one->shown_at = made;
    *made = nullptr;
    return ncclInProgress;
  }
  ncclResult_t finalize(ncclComm_t comm) {
    if (world_->fails("finalize")) return ncclInternalError;
    fake_comm& one = use(comm, "finalize");
    world_->rule(one.now == state::ready, "ncclCommFinalize of one that is busy or was revoked");
    world_->rule(!one.was_shrunk, "ncclCommFinalize after an abortive shrink");
    one.now = state::finalizing;
    return ncclInProgress;
  }
  ncclResult_t destroy(ncclComm_t comm) {
    fake_comm& one = use(comm, "destroy");
    world_->rule(one.now == state::finalized,
                 "ncclCommDestroy of one that was not finalized: waits for others");
    one.now = state::destroyed;
    world_->rule(
        std::ranges::none_of(world_->windows, [&](const auto& each) { return each.second.of == &one; }),
        "ncclCommDestroy before ncclCommWindowDeregister");
    return ncclSuccess;
  }
  ncclResult_t abort(ncclComm_t comm) {
    fake_comm& one = use(comm, "abort");
    one.queue.clear();
    one.launching.clear();
    one.now = state::aborted;
    world_->end_windows(one);
    if (one.is_waiting_child) {
      // Its child's making ends with it.
      for (const auto& each : world_->all) {
        if (each->parent == &one && each->now == state::making) each->now = state::aborted;
      }
    }
    ++world_->calls["abort"];
    return ncclSuccess;
  }
  ncclResult_t async_error(ncclComm_t comm, ncclResult_t* status) {
    fake_comm& one = use(comm, "async_error");
    if (world_->fails("async_error")) {
      one.now = state::failed;
      one.error = ncclRemoteError;
    }
    advance(one);
    const bool is_busy = one.now == state::making || one.now == state::revoking ||
                         one.now == state::finalizing || (one.now == state::ready && !one.launching.empty());
    *status = is_busy || (one.is_waiting_child && one.error == ncclSuccess) ? ncclInProgress : one.error;
    return ncclSuccess;
  }
  [[nodiscard]] const char* text(ncclResult_t status) const noexcept {
    return status == ncclRemoteError ? "remote process exited" : "a failure of the fake";
  }

  ncclResult_t group_start() {
    world_->rule(!in_group_, "a group within a group");
    in_group_ = true;
    return ncclSuccess;
  }
  ncclResult_t group_end() {
    world_->rule(in_group_, "ncclGroupEnd without its beginning");
    in_group_ = false;
    for (const auto& [one, op] : grouped_) {
      const bool is_to_self = op.peer == one->rank && op.kind <= what::recv;
      world_->rule(!is_to_self || grouped_.size() == 2, "a message to itself without its other half");
      one->launching.push_back(op);
      one->launch_looks = 3;  // it sets up its connections first, on a thread of its own
    }
    grouped_.clear();
    return world_->fails("group_end") ? ncclUnhandledCudaError : ncclInProgress;
  }
  ncclResult_t send(const void* bytes, std::size_t count, int to, ncclComm_t comm, cudaStream_t) {
    return put(comm, {what::send, static_cast<const std::byte*>(bytes), nullptr, count, to});
  }
  ncclResult_t recv(void* bytes, std::size_t count, int from, ncclComm_t comm, cudaStream_t) {
    return put(comm, {what::recv, nullptr, static_cast<std::byte*>(bytes), count, from});
  }
  ncclResult_t all_reduce(const void* from, void* into, std::size_t count, ncclDataType_t, ncclRedOp_t,
                          ncclComm_t comm, cudaStream_t) {
    return put(comm,
               {what::reduce, static_cast<const std::byte*>(from), static_cast<std::byte*>(into), count, 0});
  }
  ncclResult_t reduce_scatter(const void* from, void* into, std::size_t count, ncclDataType_t, ncclRedOp_t,
                              ncclComm_t comm, cudaStream_t) {
    return put(comm,
               {what::scatter, static_cast<const std::byte*>(from), static_cast<std::byte*>(into), count, 0});
  }
  ncclResult_t all_gather(const void* from, void* into, std::size_t count, ncclComm_t comm, cudaStream_t) {
    return put(comm,
               {what::gather, static_cast<const std::byte*>(from), static_cast<std::byte*>(into), count, 0});
  }
  ncclResult_t broadcast(void* bytes, std::size_t count, int root, ncclComm_t comm, cudaStream_t) {
    return put(comm, {what::broadcast, static_cast<const std::byte*>(bytes), static_cast<std::byte*>(bytes),
                      count, root});
  }

  ncclResult_t register_window(ncclComm_t comm, void* memory, std::size_t bytes, ncclWindow_t* made,
                               int flags) {
    const auto* const from = static_cast<const std::byte*>(memory);
    const auto* const one = reinterpret_cast<const fake_comm*>(comm);
    for (const auto& [handle, each] : world_->windows) {
      const bool is_apart = from >= each.memory + each.bytes || each.memory >= from + bytes;
      world_->rule(each.of != one || is_apart, "a window over another");
    }
    return put(comm, {what::window, from, reinterpret_cast<std::byte*>(made), bytes, flags});
  }
  ncclResult_t deregister_window(ncclComm_t comm, ncclWindow_t handle) {
    fake_comm& one = use(comm, "deregister_window");
    const auto found = world_->windows.find(reinterpret_cast<std::uintptr_t>(handle));
    const bool is_its = found != world_->windows.end() && found->second.of == &one;
    world_->rule(is_its, "ncclCommWindowDeregister of what is no window of the communicator");
    world_->rule(one.now == state::ready, "ncclCommWindowDeregister of one that is not ready");
    if (is_its) world_->windows.erase(found);
    return world_->fails("deregister_window") ? ncclInternalError : ncclSuccess;
  }
  ncclResult_t take_memory(void** made, std::size_t bytes) {
    if (world_->fails("take_memory")) return ncclSystemError;
    *made = ::operator new(bytes, std::align_val_t{NCCL_WIN_REQUIRED_ALIGNMENT});
    world_->memory[static_cast<const std::byte*>(*made)] = bytes;
    return ncclSuccess;
  }
  ncclResult_t give_memory_back(void* memory) {
    const auto* const from = static_cast<const std::byte*>(memory);
    for (const auto& [handle, each] : world_->windows)
      world_->rule(each.memory < from || each.memory >= from + world_->memory[from],
                   "memory given back below a window");
    world_->rule(world_->memory.erase(from) == 1, "memory given back that was not taken");
    ::operator delete(memory, std::align_val_t{NCCL_WIN_REQUIRED_ALIGNMENT});
    return ncclSuccess;
  }

  cudaError_t make_event(cudaEvent_t* event) {
    if (world_->fails("make_event")) return cudaErrorMemoryAllocation;
    auto* const made = new fake_event;
    world_->events.insert(made);
    *event = reinterpret_cast<cudaEvent_t>(made);
    return cudaSuccess;
  }
  cudaError_t end_event(cudaEvent_t event) {
    auto* const its = reinterpret_cast<fake_event*>(event);
    world_->rule(world_->events.erase(its) == 1, "cudaEventDestroy of what is no event");
    delete its;
    return cudaSuccess;
  }
  cudaError_t record(cudaEvent_t event, cudaStream_t) {
    if (world_->fails("record")) return cudaErrorInvalidValue;
    *reinterpret_cast<fake_event*>(event) = {last_, last_ == nullptr ? 0 : last_->launched};
    return cudaSuccess;
  }
  cudaError_t query(cudaEvent_t event) {
    if (world_->fails("query")) return cudaErrorIllegalAddress;
    const fake_event& its = *reinterpret_cast<const fake_event*>(event);
    if (its.of == nullptr) return cudaSuccess;
    if (last_ == its.of && last_->now == state::revoked && last_->quiet_looks > 0 &&
        --last_->quiet_looks == 0)
      last_->queue.clear();
    const std::uint64_t done = its.of->launched - its.of->queue.size();
    return done >= its.launched ? cudaSuccess : cudaErrorNotReady;
  }
  cudaError_t allocate(void** bytes, std::size_t count, cudaStream_t) {
    if (world_->fails("allocate")) return cudaErrorMemoryAllocation;
    *bytes = ::operator new(count);
    world_->device_memory.insert(*bytes);
    return cudaSuccess;
  }
  cudaError_t release(void* bytes, cudaStream_t) {
    world_->rule(world_->device_memory.erase(bytes) == 1, "cudaFreeAsync of what was not taken");
    ::operator delete(bytes);
    return cudaSuccess;
  }
  [[nodiscard]] const char* text(cudaError_t) const noexcept { return "a CUDA failure of the fake"; }
  void pause(std::uint64_t ns) {
    // What has grown is shown by a thread of NCCL's, and nothing tells of it before.
    for (const auto& each : world_->all) {
      if (each->parent != nullptr || each->shown_at == nullptr || each->now != state::making) continue;
      advance(*each);
      if (each->now == state::ready) *each->shown_at = handle(each.get());
    }
    end_->work(ns == 0 ? 1 : ns);
  }

 private:
  static ncclComm_t handle(fake_comm* one) { return reinterpret_cast<ncclComm_t>(one); }
  void write_id(ncclUniqueId* id, const char* kind) {
    *id = {};
    const std::string text = std::string(kind) + " " + std::to_string(world_->next_id++);
    std::memcpy(id->internal, text.data(), text.size());
    if (kind[0] == 'g') world_->log.push_back(text);
  }
  void check_config(const ncclConfig_t* config) {
    world_->rule(config != nullptr && config->blocking == 0, "a communicator that blocks");
  }
  fake_comm& use(ncclComm_t comm, const char* call) {
    auto* one = reinterpret_cast<fake_comm*>(comm);
    world_->rule(one->now != state::aborted && one->now != state::destroyed,
                 std::string(call) + " of a communicator that is no more");
    return *one;
  }
  fake_comm* enter(const std::string& key, int ranks, int rank, const ncclConfig_t*) {
    std::shared_ptr<fake_group>& group = world_->groups[key];
    if (!group) {
      group = std::make_shared<fake_group>();
      group->ranks = ranks;
    }
    world_->rule(group->ranks == ranks, "ranks do not agree on how many they are: " + key);
    world_->rule(rank >= 0 && rank < ranks && !group->members.contains(rank),
                 "a rank twice or too high: " + key);
    world_->all.push_back(std::make_unique<fake_comm>());
    fake_comm* one = world_->all.back().get();
    one->group = group;
    one->rank = rank;
    one->ranks = ranks;
    one->looks = 2;
    group->members[rank] = one;
    return one;
  }
  ncclResult_t put(ncclComm_t comm, const fake_operation& op) {
    if (world_->fails("put")) return ncclInvalidArgument;
    fake_comm& one = use(comm, "an operation");
    world_->rule(in_group_, "an operation outside of a group");
    world_->rule(one.now == state::ready && !one.was_shrunk,
                 "an operation on a communicator that is not ready");
    grouped_.emplace_back(&one, op);
    last_ = &one;
    return ncclSuccess;
  }
  void advance(fake_comm& one) {
    switch (one.now) {
      case state::making:
        if (world_->init_hangs) return;
        if (static_cast<int>(one.group->members.size()) == one.ranks &&
            (one.looks == 0 || --one.looks == 0)) {
          one.now = state::ready;
        }
        return;
      case state::revoking:
        one.launching.clear();
        if (one.looks != ~0U && --one.looks == 0) {
          // Its kernels see that a little later.
          one.quiet_looks = one.queue.empty() ? 0 : 2;
          one.now = state::revoked;
          one.error = ncclSuccess;
        }
        return;
      case state::finalizing: {
        bool all_are = static_cast<int>(one.group->members.size()) == one.ranks;
        for (const auto& [rank, each] : one.group->members) {
          all_are = all_are && (each->now == state::finalizing || each->now == state::finalized ||
                                each->now == state::destroyed);
        }
        if (all_are) one.now = state::finalized;
        return;
      }
      case state::ready:
        for (const auto& child : world_->all) {
          if (child->parent == &one) show(one, *child);
        }
        if (!one.launching.empty() && (one.launch_looks == 0 || --one.launch_looks == 0)) {
          one.launched += one.launching.size();
          one.queue.insert(one.queue.end(), one.launching.begin(), one.launching.end());
          one.launching.clear();
        }
        if (!one.is_waiting_child) move(*one.group);
        return;
      case state::revoked:
        for (const auto& child : world_->all) {
          if (child->parent == &one) show(one, *child);
        }
        return;
      default:
        return;
    }
  }
  void show(fake_comm& parent, fake_comm& child) {
    if (child.now == state::making) advance(child);
    if (child.now != state::ready || !parent.is_waiting_child) return;
    parent.is_waiting_child = false;
    *child.shown_at = handle(&child);
  }
  /// Does what has all that it needs.
  void move(fake_group& group) {
    for (bool is_moving = true; is_moving;) {
      is_moving = false;
      for (const auto& [rank, one] : group.members)
        is_moving = move_messages(group, *one) || is_moving;
      is_moving = move_collective(group) || is_moving;
    }
  }
  static bool is_alive(const fake_comm& one) { return one.now == state::ready; }
  /// A rank's operations of one group go at the same time: those before the first collective.
  static std::size_t find(const fake_comm& one, what kind, int peer) {
    for (std::size_t i = 0; i < one.queue.size() && one.queue[i].kind <= what::recv; ++i) {
      if (one.queue[i].kind == kind && one.queue[i].peer == peer) return i;
    }
    return one.queue.size();
  }
  bool move_messages(fake_group& group, fake_comm& from) {
    if (!is_alive(from)) return false;
    for (const auto& [rank, to] : group.members) {
      if (!is_alive(*to)) continue;
      const std::size_t sent = find(from, what::send, rank);
      const std::size_t received = find(*to, what::recv, from.rank);
      if (sent == from.queue.size() || received == to->queue.size()) continue;
      const fake_operation out = from.queue[sent];
      const fake_operation in = to->queue[received];
      world_->rule(out.count == in.count, "a message of another size than is expected");
      std::memcpy(in.into, out.from, std::min(out.count, in.count));
      from.queue.erase(from.queue.begin() + static_cast<std::ptrdiff_t>(sent));
      const std::size_t again = find(*to, what::recv, from.rank);
      to->queue.erase(to->queue.begin() + static_cast<std::ptrdiff_t>(again));
      return true;
    }
    return false;
  }
  bool move_collective(fake_group& group) {
    std::vector<fake_operation> all;
    for (const auto& [rank, one] : group.members) {
      if (!is_alive(*one) || one->queue.empty() || one->queue.front().kind <= what::recv) return false;
      all.push_back(one->queue.front());
    }
    const fake_operation& first = all.front();
    if (static_cast<int>(all.size()) != group.ranks) return false;
    for (const fake_operation& each : all) {
      world_->rule(each.kind == first.kind && each.count == first.count && each.peer == first.peer,
                   "ranks call different collectives");
    }
    const auto floats_at = [](const std::byte* bytes, std::size_t at) {
      float value = 0;
      std::memcpy(&value, bytes + 4 * at, 4);
      return value;
    };
    const std::size_t ranks = all.size();
    std::vector<std::vector<std::byte>> out(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      const bool adds = first.kind == what::reduce || first.kind == what::scatter;
      const std::size_t offset = first.kind == what::scatter ? r * first.count : 0;
      for (std::size_t i = 0; adds && i < first.count; ++i) {
        float sum = 0;
        for (const fake_operation& each : all)
          sum += floats_at(each.from, offset + i);
        out[r].insert(out[r].end(), reinterpret_cast<std::byte*>(&sum),
                      reinterpret_cast<std::byte*>(&sum) + 4);
      }
      for (std::size_t s = 0; first.kind == what::gather && s < ranks; ++s)
        out[r].insert(out[r].end(), all[s].from, all[s].from + first.count);
      if (first.kind == what::broadcast) {
        const std::byte* root = all[static_cast<std::size_t>(first.peer)].from;
        out[r].assign(root, root + first.count);
      }
    }
    if (first.kind == what::window) open_windows(group, out);
    std::size_t r = 0;
    for (const auto& [rank, one] : group.members) {
      std::memcpy(all[r].into, out[r].data(), out[r].size());
      one->queue.pop_front();
      ++r;
    }
    return true;
  }

  /// The handles that ranks are told, or null ones.
  void open_windows(const fake_group& group, std::vector<std::vector<std::byte>>& handles) {
    std::size_t r = 0;
    for (const auto& [rank, one] : group.members) {
      const fake_operation& asked = one->queue.front();
      std::uintptr_t handle = 0;
      if (!world_->makes_no_windows) {
        handle = 4096 * world_->next_id++;
        world_->windows[handle] = {one, asked.from, asked.count, asked.peer};
      }
      const auto* const bytes = reinterpret_cast<const std::byte*>(&handle);
      handles[r++].assign(bytes, bytes + sizeof handle);
    }
  }

  fake_world* world_;
  llmmem::testing::sim_endpoint* end_;
  bool in_group_ = false;
  std::vector<std::pair<fake_comm*, fake_operation>> grouped_{};
  fake_comm* last_ = nullptr;
};

}  // namespace llmmem_tests
