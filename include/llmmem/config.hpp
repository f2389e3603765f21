/// @file
/// The macros of the library, and checks of the compiler. Every header includes this one.
#pragma once

#include <llmmem/version.hpp>

#if defined(__CUDACC__) && __cplusplus < 202002L
#error \
    "llmmem needs C++20 from nvcc too: compile .cu files with -std=c++20; the link interface requests it for C++ files only."
#endif
#if defined(_MSVC_LANG) ? _MSVC_LANG < 202002L : __cplusplus < 202002L
#error "llmmem needs C++20: compile with -std=c++20, or link llmmem::llmmem, which asks for it."
#endif

#if defined(__CUDACC__) && defined(__CUDACC_VER_MAJOR__)
#if __CUDACC_VER_MAJOR__ < 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 8)
#error "llmmem needs nvcc 12.8 or newer (13.0 is tested): an older one fails on C++20 concepts."
#endif
#endif

#if defined(__clang__)
#if __clang_major__ < 16
#error \
    "llmmem needs clang 16 or newer (19 is tested), because older versions fail on the standard library's C++20 headers."
#endif
#elif defined(__GNUC__) && __GNUC__ < 12
#error "llmmem needs g++ 12 or newer."
#endif

#if !defined(__cpp_exceptions) && !defined(__CUDACC_RTC__)
#error "llmmem needs exceptions: its constructors and value() throw. Compile without -fno-exceptions."
#endif

/// Marks a function that both the host and the device may call; empty for other compilers than CUDA's.
#if defined(__CUDACC__)
#define LLMMEM_HD __host__ __device__
#else
#define LLMMEM_HD
#endif

/// Unrolls the loop after it in device code, so that arrays indexed by the loop stay in registers.
#if defined(__CUDA_ARCH__)
#define LLMMEM_UNROLL _Pragma("unroll")
#else
#define LLMMEM_UNROLL
#endif

/// Keeps the loop after it rolled in device code, where its body needs all registers.
#if defined(__CUDA_ARCH__)
#define LLMMEM_ROLLED _Pragma("unroll 1")
#else
#define LLMMEM_ROLLED
#endif

/// Lets a member of an empty policy type take no space.
#if defined(_MSC_VER)
#define LLMMEM_NO_UNIQUE_ADDRESS [[msvc::no_unique_address]]
#else
#define LLMMEM_NO_UNIQUE_ADDRESS [[no_unique_address]]
#endif

/// Placed after a member function whose result depends on the object's lifetime: clang then warns
/// (-Wdangling) if the object is a temporary, as in `for (auto b : buffer.read(chunk).value().span())`.
#if defined(__clang__) && !defined(__CUDACC__)
#define LLMMEM_LIFETIMEBOUND [[clang::lifetimebound]]
#else
#define LLMMEM_LIFETIMEBOUND
#endif

/// Warns if a value of the type is ignored. Empty for nvcc 13, which warns about assignments.
#if defined(__CUDACC__)
#define LLMMEM_NODISCARD_TYPE
#else
#define LLMMEM_NODISCARD_TYPE [[nodiscard]]
#endif

/// Keeps a function that only reports errors out of the caller's hot code.
#if defined(__GNUC__)
#define LLMMEM_COLD [[gnu::cold]]
#else
#define LLMMEM_COLD
#endif

/// Keeps a function with real work that is rarely called out of its callers' code.
#if defined(__GNUC__)
#define LLMMEM_OUTLINED [[gnu::noinline]]
#else
#define LLMMEM_OUTLINED
#endif

/// Inlines a function into its callers in every build: into functions for processors with wider vectors,
/// whose instructions it then uses.
#if defined(__CUDACC__)
#define LLMMEM_ALWAYS_INLINE __forceinline__
#elif defined(__GNUC__)
#define LLMMEM_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define LLMMEM_ALWAYS_INLINE inline
#endif

/// Prefetches the cache line at `address`; does nothing if the compiler cannot.
#if defined(__GNUC__)
#define LLMMEM_PREFETCH(address) __builtin_prefetch(address)
#else
#define LLMMEM_PREFETCH(address) static_cast<void>(address)
#endif
