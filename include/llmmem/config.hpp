/// @file
/// What every header of the library includes: the compilers it accepts and the macros it may use.
#pragma once

#include <llmmem/version.hpp>

#if defined(__CUDACC__) && __cplusplus < 202002L
#error \
    "llmmem needs C++20 of nvcc too: compile .cu files with -std=c++20; linking asks for it of C++ files alone."
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
    "llmmem needs clang 16 or newer (19 is tested): older ones fail on the standard library's C++20 headers."
#endif
#elif defined(__GNUC__) && __GNUC__ < 12
#error "llmmem needs g++ 12 or newer."
#endif

#if !defined(__cpp_exceptions) && !defined(__CUDACC_RTC__)
#error "llmmem needs exceptions: its constructors and value() throw. Compile without -fno-exceptions."
#endif

/// Marks a function that both the host and the device may call; empty unless a CUDA compiler reads it.
#if defined(__CUDACC__)
#define LLMMEM_HD __host__ __device__
#else
#define LLMMEM_HD
#endif

/// Before a loop whose turns are to stand one behind the other in device code, so that arrays which they
/// index lie in registers.
#if defined(__CUDA_ARCH__)
#define LLMMEM_UNROLL _Pragma("unroll")
#else
#define LLMMEM_UNROLL
#endif

/// Lets a member of an empty policy type take no room.
#if defined(_MSC_VER)
#define LLMMEM_NO_UNIQUE_ADDRESS [[msvc::no_unique_address]]
#else
#define LLMMEM_NO_UNIQUE_ADDRESS [[no_unique_address]]
#endif

/// Behind a member function: what it returns dies with the object, so that clang warns (-Wdangling) where the
/// object is a temporary: `for (auto b : buffer.read(chunk).value().span())`.
#if defined(__clang__) && !defined(__CUDACC__)
#define LLMMEM_LIFETIMEBOUND [[clang::lifetimebound]]
#else
#define LLMMEM_LIFETIMEBOUND
#endif

/// Warns where a value of the type is ignored. nvcc 13 takes an assignment for such a place, so it is not
/// told.
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

/// Keeps a function that callers reach seldom, but then for real work, out of their code.
#if defined(__GNUC__)
#define LLMMEM_OUTLINED [[gnu::noinline]]
#else
#define LLMMEM_OUTLINED
#endif

/// Asks for the cache line at `address`; where the compiler cannot, nothing happens.
#if defined(__GNUC__)
#define LLMMEM_PREFETCH(address) __builtin_prefetch(address)
#else
#define LLMMEM_PREFETCH(address) static_cast<void>(address)
#endif
