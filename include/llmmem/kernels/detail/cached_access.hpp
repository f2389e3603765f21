/// @file
/// Reads and writes of a device's global memory with a cache hint, by nvcc and by clang++. Empty for the
/// host's compilers.
#pragma once

#include <llmmem/config.hpp>

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(__CUDACC__) && defined(__clang__)

// clang++ has no `__ldcs`, `__ldca`, `__stcs` and `__stwb`: the instructions of the PTX ISA by name, `cs` for
// streaming, `ca` and `wb` for kept.
template <bool Streaming>
__device__ __forceinline__ std::uint8_t cached_read(const std::uint8_t* from) noexcept {
  std::uint32_t out;
  if constexpr (Streaming) {
    asm volatile("ld.global.cs.u8 %0, [%1];" : "=r"(out) : "l"(from));
  } else {
    asm volatile("ld.global.ca.u8 %0, [%1];" : "=r"(out) : "l"(from));
  }
  return static_cast<std::uint8_t>(out);
}
template <bool Streaming>
__device__ __forceinline__ void cached_write(std::uint8_t* to, std::uint8_t in) noexcept {
  if constexpr (Streaming) {
    asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(to), "r"(std::uint32_t{in}) : "memory");
  } else {
    asm volatile("st.global.wb.u8 [%0], %1;" ::"l"(to), "r"(std::uint32_t{in}) : "memory");
  }
}
template <bool Streaming>
__device__ __forceinline__ std::uint16_t cached_read(const std::uint16_t* from) noexcept {
  std::uint16_t out;
  if constexpr (Streaming) {
    asm volatile("ld.global.cs.u16 %0, [%1];" : "=h"(out) : "l"(from));
  } else {
    asm volatile("ld.global.ca.u16 %0, [%1];" : "=h"(out) : "l"(from));
  }
  return out;
}
template <bool Streaming>
__device__ __forceinline__ void cached_write(std::uint16_t* to, std::uint16_t in) noexcept {
  if constexpr (Streaming) {
    asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(to), "h"(in) : "memory");
  } else {
    asm volatile("st.global.wb.u16 [%0], %1;" ::"l"(to), "h"(in) : "memory");
  }
}
template <bool Streaming>
__device__ __forceinline__ std::uint32_t cached_read(const std::uint32_t* from) noexcept {
  std::uint32_t out;
  if constexpr (Streaming) {
    asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(out) : "l"(from));
  } else {
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(out) : "l"(from));
  }
  return out;
}
template <bool Streaming>
__device__ __forceinline__ void cached_write(std::uint32_t* to, std::uint32_t in) noexcept {
  if constexpr (Streaming) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(in) : "memory");
  } else {
    asm volatile("st.global.wb.u32 [%0], %1;" ::"l"(to), "r"(in) : "memory");
  }
}
template <bool Streaming>
__device__ __forceinline__ uint2 cached_read(const uint2* from) noexcept {
  uint2 out;
  if constexpr (Streaming) {
    asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
  } else {
    asm volatile("ld.global.ca.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
  }
  return out;
}
template <bool Streaming>
__device__ __forceinline__ void cached_write(uint2* to, uint2 in) noexcept {
  if constexpr (Streaming) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(in.x), "r"(in.y) : "memory");
  } else {
    asm volatile("st.global.wb.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(in.x), "r"(in.y) : "memory");
  }
}
template <bool Streaming>
__device__ __forceinline__ uint4 cached_read(const uint4* from) noexcept {
  uint4 out;
  if constexpr (Streaming) {
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(from));
  } else {
    asm volatile("ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(from));
  }
  return out;
}
template <bool Streaming>
__device__ __forceinline__ void cached_write(uint4* to, uint4 in) noexcept {
  if constexpr (Streaming) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(in.x), "r"(in.y), "r"(in.z),
                 "r"(in.w)
                 : "memory");
  } else {
    asm volatile("st.global.wb.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(in.x), "r"(in.y), "r"(in.z),
                 "r"(in.w)
                 : "memory");
  }
}

#elif defined(__CUDA_ARCH__)

template <bool Streaming, class Word>
__device__ __forceinline__ Word cached_read(const Word* from) noexcept {
  return Streaming ? __ldcs(from) : __ldca(from);
}
template <bool Streaming, class Word>
__device__ __forceinline__ void cached_write(Word* to, const Word& in) noexcept {
  Streaming ? __stcs(to, in) : __stwb(to, in);
}

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
