/// @file
/// The runtime's state: how it begins, how it loses the device, how streams are given operations; and the
/// hooks that tests of the machine have.
#include "ptx_machine/runtime/state.hpp"

#include "ptx_machine/hooks.hpp"

#include <cstdio>
#include <cstdlib>

namespace ptx_machine {

namespace {

void perform(const task& what) {
  attempt([&] {
    if (what.act) what.act();
    for (const move_of_bytes& each : what.moves) {
      device_memory& memory = now().device.memory;
      const bool is_well = each.value < 0 ? memory.copy(each.to, each.from, each.bytes)
                                          : memory.fill(each.to, each.value, each.bytes);
      if (is_well) continue;
      const auto is_gone = [&](u64 at) { return !memory.pieces(at, each.bytes, [](u8*, u8*, u64) {}); };
      const u64 at = is_gone(each.to) ? each.to : each.from;
      throw fault(fault_kind::bounds,
                  what.call + ": when it was done, " + hex(at) + " was " + memory.whereabouts(at));
    }
  });
}

[[nodiscard]] bool is_set(const char* name) {
  return std::getenv(name) != nullptr && *std::getenv(name) != '0';
}

}  // namespace

runtime::runtime() : operations(perform) {
  device.options.checks_races = !is_set("PTX_MACHINE_NO_RACES");
  device.options.checks_uninitialised = !is_set("PTX_MACHINE_NO_UNINITIALISED");
  device.options.profiles = is_set("PTX_MACHINE_PROFILE");
  device.options.keeps_apart = is_set("PTX_MACHINE_APART");
  if (is_set("PTX_MACHINE_LATE")) {
    operations.use(timing::late, 0);
  } else if (is_set("PTX_MACHINE_SEED")) {
    operations.use(timing::seeded, std::strtoull(std::getenv("PTX_MACHINE_SEED"), nullptr, 10));
  }
  if (is_set("PTX_MACHINE_ARCHITECTURE")) wanted_arch = std::atoi(std::getenv("PTX_MACHINE_ARCHITECTURE"));
}

/// Never ended: programs free memory while they end.
runtime& now() {
  static runtime* const made = new runtime;
  return *made;
}

cudaError_t told(cudaError_t status) {
  if (status == cudaSuccess && now().sticky != cudaSuccess) status = now().sticky;
  if (status != cudaSuccess) last_error = status;
  return status;
}
void say(const std::string& text) {
  std::fprintf(stderr, "ptx machine: %s\n", text.c_str());
}
cudaError_t not_offered(const std::string& what) {
  say(what + ": not offered by the machine");
  return cudaErrorNotSupported;
}
std::string hex(u64 at) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(at));
  return text;
}

void lose(cudaError_t status, const std::string& why) {
  if (now().sticky != cudaSuccess) return;
  now().sticky = status;
  now().last_fault = why;
  const bool is_seeded = now().operations.when() == timing::seeded;
  say(why + (is_seeded ? "\n  with PTX_MACHINE_SEED=" + std::to_string(now().operations.seed()) : ""));
}
void attempt(const std::function<void()>& act) {
  if (now().sticky != cudaSuccess) return;
  try {
    act();
  } catch (const fault& wrong) {
    constexpr cudaError_t codes[] = {cudaErrorIllegalInstruction, cudaErrorIllegalAddress,
                                     cudaErrorMisalignedAddress,  cudaErrorLaunchFailure,
                                     cudaErrorLaunchFailure,      cudaErrorLaunchFailure,
                                     cudaErrorLaunchFailure};
    lose(codes[static_cast<int>(wrong.kind)], wrong.what());
  }
}

std::vector<operation_pointer> before_next(const stream_state& of) {
  std::vector<operation_pointer> all{of.last};
  if (&of == &now().default_stream) {
    for (const auto& [handle, each] : now().streams)
      if (each->is_blocking) all.push_back(each->last);
  } else if (of.is_blocking) {
    all.push_back(now().default_stream.last);
  }
  return all;
}

cudaError_t check_implicit(const stream_state& of) {
  if (&of != &now().default_stream) return cudaSuccess;
  bool is_well = true;
  each_stream([&](stream_state& each) {
    if (!each.into || !each.is_blocking) return;
    each.into->is_valid = false;
    is_well = false;
  });
  return is_well ? cudaSuccess : cudaErrorStreamCaptureImplicit;
}

cudaError_t submit(stream_state& of, task what, operation_pointer* made) {
  if (made != nullptr) *made = nullptr;
  if (of.into) {
    if (!of.into->is_valid) return cudaErrorStreamCaptureInvalidated;
    of.into->nodes.push_back({std::move(what), of.tips});
    of.tips.assign(1, of.into->nodes.size() - 1);
    return cudaSuccess;
  }
  if (const cudaError_t status = check_implicit(of); status != cudaSuccess) return status;
  of.last = now().operations.add(std::move(what), of.number, before_next(of));
  if (made != nullptr) *made = of.last;
  return cudaSuccess;
}

std::optional<named_bytes> memory_at(u64 at) {
  if (const region* const of = now().device.memory.find(at); of != nullptr)
    return named_bytes{of->base, of->size};
  auto next = now().from_pools.upper_bound(at);
  if (next == now().from_pools.begin()) return std::nullopt;
  --next;
  if (at - next->first >= next->second.bytes) return std::nullopt;
  return named_bytes{next->first, next->second.bytes};
}

bool nothing_uses(named_bytes gone, const std::string& call, const std::vector<operation_pointer>& behind) {
  const operation* found = nullptr;
  const named_bytes* what = nullptr;
  now().operations.each_pending([&](const operation& each) {
    if (found != nullptr) return;
    for (const named_bytes& name : each.what.names) {
      if (!name.meets(gone) || now().operations.is_ordered(each, behind)) continue;
      found = &each;
      what = &name;
      return;
    }
  });
  if (found == nullptr) return true;
  lose(cudaErrorIllegalAddress, call + " takes " + std::to_string(gone.bytes) + " bytes at " + hex(gone.at) +
                                    ", which " + found->what.call + " in stream " +
                                    std::to_string(found->stream) + " may still use (at " + hex(what->at) +
                                    "): nothing orders the two");
  return false;
}

}  // namespace ptx_machine

using namespace ptx_machine;

namespace {
void use(timing when, u64 seed) {
  const std::lock_guard alone(now().operations.lock);
  now().operations.use(when, seed);
}
}  // namespace

extern "C" {

const char* ptx_machine_last_fault() {
  return now().last_fault.c_str();
}
unsigned long long ptx_machine_approximate() {
  const std::lock_guard alone(now().operations.lock);
  return now().device.approximate;
}
void ptx_machine_forget_fault() {
  now().sticky = cudaSuccess;
  last_error = cudaSuccess;
  now().last_fault.clear();
}
void ptx_machine_be_late(int is_late) {
  use(is_late != 0 ? timing::late : timing::at_once, 0);
}
void ptx_machine_use_seed(unsigned long long seed) {
  use(seed != 0 ? timing::seeded : timing::at_once, seed);
}
void ptx_machine_keep_apart(int is_apart) {
  now().device.options.keeps_apart = is_apart != 0;
}
void ptx_machine_profile(int is_profiled) {
  now().device.options.profiles = is_profiled != 0;
}
ptx_machine_counts ptx_machine_counted() {
  const std::lock_guard alone(now().operations.lock);
  const machine& of = now().device;
  return {of.launches, of.lane_instructions, of.asked_bytes, of.sectors};
}
int ptx_machine_architecture() {
  return now().arch;
}

}  // extern "C"
