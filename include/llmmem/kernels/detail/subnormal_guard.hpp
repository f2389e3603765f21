/// @file
/// `subnormal_guard`: a thread that reads subnormal floats as they are.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Keeps the calling thread from taking subnormal floats for zeros while it lives: a program may have asked
/// its threads for that, and a library that was linked with `-ffast-math` asks for it where it is loaded.
class subnormal_guard {
 public:
  subnormal_guard() noexcept : before_(read()) {
    if ((before_ & flushes) != 0) write(before_ & ~flushes);
  }
  subnormal_guard(const subnormal_guard&) = delete;
  subnormal_guard& operator=(const subnormal_guard&) = delete;
  ~subnormal_guard() {
    if ((before_ & flushes) != 0) write(before_);
  }

 private:
  // "memory": what is read after a write of the register is computed after it.
#if defined(__x86_64__)
  using word = std::uint32_t;
  static constexpr word flushes = 0x8040;  // MXCSR.FTZ and DAZ
  static word read() noexcept {
    word is = 0;
    asm volatile("stmxcsr %0" : "=m"(is));
    return is;
  }
  static void write(word to) noexcept { asm volatile("ldmxcsr %0" : : "m"(to) : "memory"); }
#elif defined(__aarch64__)
  using word = std::uint64_t;
  static constexpr word flushes = 0x0100'0001;  // FPCR.FZ and FIZ
  static word read() noexcept {
    word is = 0;
    asm volatile("mrs %0, fpcr" : "=r"(is));
    return is;
  }
  static void write(word to) noexcept { asm volatile("msr fpcr, %0" : : "r"(to) : "memory"); }
#else
  using word = std::uint32_t;
  static constexpr word flushes = 0;
  static word read() noexcept { return 0; }
  static void write(word /*to*/) noexcept {}
#endif

  word before_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
