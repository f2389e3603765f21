/// @file
/// The calls of NCCL and CUDA that the parts of a transport make, one rank's alone: it notes each, and
/// answers as a test has told it. `fake_nccl.hpp` has whole worlds.
#pragma once

#include <llmmem/comm/detail/nccl_library.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace llmmem_tests {

/// What has happened, and what is to happen. Communicators are numbers, from 1 on.
struct nccl_script {
  std::vector<std::string> log{};  ///< calls and the communicators they are of: "abort 1"
  /// What NCCL says of a communicator when it is next asked; none left: `ncclSuccess`.
  std::map<std::uintptr_t, std::deque<ncclResult_t>> statuses{};
  ncclResult_t begun = ncclInProgress;  ///< of calls that make a communicator
  bool is_child_shown = true;           ///< whether these show it at once
  ncclComm_t* child_at = nullptr;       ///< where the last one is to be shown
  ncclResult_t revoked = ncclSuccess;
  ncclResult_t finalized = ncclSuccess;
  std::deque<cudaError_t> queries{};  ///< of the event; none left: `cudaSuccess`
  cudaError_t recorded = cudaSuccess;
  cudaError_t event_made = cudaSuccess;
  cudaError_t allocated = cudaSuccess;
  std::uint64_t paused_ns = 0;
  std::uintptr_t made = 0;  ///< communicators so far
  std::vector<int> excluded{};
  bool has_given_id = false;  ///< to the last `grow`
  int grown_as = 0;           ///< the rank given to it
  std::byte device[2]{};

  [[nodiscard]] static ncclComm_t comm(std::uintptr_t number) { return reinterpret_cast<ncclComm_t>(number); }
  void show_child() { *child_at = comm(made); }
};

template <bool Revoke = true, bool Grow = true>
struct scripted_nccl {
  static constexpr bool has_revoke = Revoke;
  static constexpr bool has_grow = Grow;
  static constexpr bool has_windows = true;

  nccl_script* script;

  ncclResult_t unique_id(ncclUniqueId* id) { return write_id(id, "fresh"); }
  ncclResult_t grow_id(ncclComm_t comm, ncclUniqueId* id) {
    note("grow_id", comm);
    return write_id(id, "grown");
  }
  ncclResult_t init(ncclComm_t* made, int, const ncclUniqueId& id, int, ncclConfig_t* config) {
    script->log.push_back("init " + std::string(id.internal));
    return make(made, config);
  }
  ncclResult_t shrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* made, ncclConfig_t* config,
                      int) {
    note("shrink", comm);
    script->excluded.assign(excluded, excluded + count);
    return make(made, config);
  }
  ncclResult_t grow(ncclComm_t comm, int, const ncclUniqueId* id, int rank, ncclComm_t* made,
                    ncclConfig_t* config) {
    note("grow", comm);
    script->has_given_id = id != nullptr;
    script->grown_as = rank;
    return make(made, config);
  }
  ncclResult_t revoke(ncclComm_t comm) {
    note("revoke", comm);
    return script->revoked;
  }
  ncclResult_t finalize(ncclComm_t comm) {
    note("finalize", comm);
    return script->finalized;
  }
  ncclResult_t destroy(ncclComm_t comm) {
    note("destroy", comm);
    return ncclSuccess;
  }
  ncclResult_t abort(ncclComm_t comm) noexcept {
    note("abort", comm);
    return ncclSuccess;
  }
  ncclResult_t async_error(ncclComm_t comm, ncclResult_t* status) {
    auto& left = script->statuses[reinterpret_cast<std::uintptr_t>(comm)];
    *status = left.empty() ? ncclSuccess : left.front();
    if (!left.empty()) left.pop_front();
    return ncclSuccess;
  }
  ncclResult_t deregister_window(ncclComm_t comm, ncclWindow_t window) {
    note("deregister " + std::to_string(reinterpret_cast<std::uintptr_t>(window)) + " of", comm);
    return ncclSuccess;
  }
  [[nodiscard]] const char* text(ncclResult_t) const noexcept { return "a failure of NCCL"; }
  [[nodiscard]] const char* text(cudaError_t) const noexcept { return "a failure of CUDA"; }

  cudaError_t make_event(cudaEvent_t* event) {
    *event = reinterpret_cast<cudaEvent_t>(script);
    if (script->event_made == cudaSuccess) script->log.emplace_back("make_event");
    return script->event_made;
  }
  cudaError_t end_event(cudaEvent_t) noexcept {
    script->log.emplace_back("end_event");
    return cudaSuccess;
  }
  cudaError_t record(cudaEvent_t, cudaStream_t) {
    script->log.emplace_back("record");
    return script->recorded;
  }
  cudaError_t query(cudaEvent_t) {
    if (script->queries.empty()) return cudaSuccess;
    const cudaError_t answer = script->queries.front();
    script->queries.pop_front();
    return answer;
  }
  cudaError_t allocate(void** bytes, std::size_t, cudaStream_t) {
    *bytes = script->device;
    if (script->allocated == cudaSuccess) script->log.emplace_back("allocate");
    return script->allocated;
  }
  cudaError_t release(void*, cudaStream_t) noexcept {
    script->log.emplace_back("release");
    return cudaSuccess;
  }
  void pause(std::uint64_t ns) { script->paused_ns += ns; }

 private:
  void note(const std::string& call, ncclComm_t comm) {
    script->log.push_back(call + " " + std::to_string(reinterpret_cast<std::uintptr_t>(comm)));
  }
  ncclResult_t make(ncclComm_t* made, const ncclConfig_t* config) {
    if (config->blocking != 0) script->log.emplace_back("a communicator that blocks");
    if (script->begun != ncclSuccess && script->begun != ncclInProgress) return script->begun;
    ++script->made;
    script->child_at = made;
    if (script->is_child_shown) script->show_child();
    return script->begun;
  }
  static ncclResult_t write_id(ncclUniqueId* id, const char* text) {
    *id = {};
    std::memcpy(id->internal, text, std::strlen(text));
    return ncclSuccess;
  }
};

}  // namespace llmmem_tests
