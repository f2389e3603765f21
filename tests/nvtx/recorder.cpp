// Linked into the program in the place of a profiler's library: NVTX finds it by a weak symbol.
#define NVTX_NO_IMPL  // its types alone
#include <nvtx3/nvToolsExt.h>

#include "nvtx/recorder.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace llmmem_tests {
namespace {

struct record {
  std::mutex lock;
  std::vector<std::string> domains;
  std::vector<recorded_range> ranges;
  std::map<std::thread::id, std::vector<std::size_t>> open;
};

record& all() {
  static record one;
  return one;
}

nvtxDomainHandle_t create_domain(const char* name) {
  const std::scoped_lock held(all().lock);
  all().domains.emplace_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(all().domains.size());  // its number; no address
}
int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  const std::scoped_lock held(all().lock);
  std::vector<std::size_t>& open = all().open[std::this_thread::get_id()];
  open.push_back(all().ranges.size());
  const auto number = reinterpret_cast<std::uintptr_t>(domain);
  all().ranges.push_back(
      {.domain = all().domains.at(number - 1),
       .name = event->message.ascii,
       .bytes = event->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64 ? event->payload.ullValue : 0});
  return static_cast<int>(open.size()) - 1;
}
int pop(nvtxDomainHandle_t) {
  const std::scoped_lock held(all().lock);
  std::vector<std::size_t>& open = all().open[std::this_thread::get_id()];
  if (open.back() < all().ranges.size()) all().ranges[open.back()].has_ended = true;
  open.pop_back();
  return static_cast<int>(open.size());
}

int initialize(NvtxGetExportTableFunc_t get_table) {
  const auto* const tables = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (tables == nullptr || tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count) == 0)
    return 0;
  const auto set = [&](unsigned int id, auto* function) {
    if (id < count) *functions[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CBID_CORE2_DomainCreateA, &create_domain);
  set(NVTX_CBID_CORE2_DomainRangePushEx, &push);
  set(NVTX_CBID_CORE2_DomainRangePop, &pop);
  return 1;
}

}  // namespace

std::vector<recorded_range> take_ranges() {
  const std::scoped_lock held(all().lock);
  return std::exchange(all().ranges, {});
}

}  // namespace llmmem_tests

extern "C" {
// NVTX declares its weak twin without a declaration of its own.
extern NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr;
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = llmmem_tests::initialize;
}
