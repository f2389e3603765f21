/// @file
/// Names what a thread does for a profiler: NVTX ranges in the domain "llmmem", if `LLMMEM_NVTX` is defined.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

#if defined(LLMMEM_NVTX)
#include <nvtx3/nvToolsExt.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(LLMMEM_NVTX)

/// The domain of every range. NVTX makes it once a process, before anything uses it; it never changes.
inline const nvtxDomainHandle_t named_ranges = nvtxDomainCreateA("llmmem");

/// A range from its construction to its destruction, on the thread that makes it.
class named_range {
 public:
  /// @param name   a literal.
  /// @param bytes  what the range moves, shown with it; 0: nothing is shown.
  explicit named_range(const char* name, std::uint64_t bytes = 0) noexcept {
    nvtxEventAttributes_t event{};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = name;
    if (bytes != 0) {
      event.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
      event.payload.ullValue = bytes;
    }
    nvtxDomainRangePushEx(named_ranges, &event);
  }
  named_range(const named_range&) = delete;
  named_range& operator=(const named_range&) = delete;
  ~named_range() { nvtxDomainRangePop(named_ranges); }
};

#else

/// Nothing: no code, and no header of NVTX.
class named_range {
 public:
  explicit named_range(const char* /*name*/, std::uint64_t /*bytes*/ = 0) noexcept {}
  named_range(const named_range&) = delete;
  named_range& operator=(const named_range&) = delete;
  // Not trivial, so that compilers take an object of it for used.
  ~named_range() {}  // NOLINT(modernize-use-equals-default)
};

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
