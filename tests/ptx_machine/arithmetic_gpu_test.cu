// arithmetic_gpu_test.cu: integer and floating-point instructions by the rules of the PTX ISA, on edges and
// random operands. reference_arithmetic.hpp has what they must come to. The program also runs on a device,
// which it then checks.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "ptx_machine/checks.cuh"
#include "ptx_machine/reference_arithmetic.hpp"

namespace {

using llmmem_tests::check;
using llmmem_tests::device_array;
using reference::float_result;
using reference::half_result;
using reference::integer_result;
using reference::operands;
using reference::predicate;
using reference::request;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// ---- kernels: LETTER tells the register of a result or an operand ----

#define LLMMEM_TYPE_H u16
#define LLMMEM_TYPE_R u32
#define LLMMEM_TYPE_L u64
#define LLMMEM_IN_H "h"
#define LLMMEM_IN_R "r"
#define LLMMEM_IN_L "l"
#define LLMMEM_OUT_H "=h"
#define LLMMEM_OUT_R "=r"
#define LLMMEM_OUT_L "=l"

// clang-format off
#define LLMMEM_OPERATIONS(KERNEL) \
  KERNEL(0, "add.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(1, "add.rz.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(2, "add.rm.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(3, "add.rp.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(4, "add.ftz.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(5, "add.sat.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(6, "sub.rn.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(7, "sub.rz.ftz.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(8, "mul.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(9, "mul.rz.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(10, "mul.rm.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(11, "mul.rp.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(12, "mul.ftz.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(13, "mul.ftz.sat.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(14, "fma.rn.f32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(15, "fma.rz.f32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(16, "fma.rm.f32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(17, "fma.rp.f32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(18, "fma.rn.ftz.f32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(19, "fma.rn.sat.f32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(20, "div.rn.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(21, "div.rz.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(22, "div.rp.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(23, "div.rn.ftz.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(24, "rcp.rn.f32 %0, %1;", 80, R, R, R, R) KERNEL(25, "rcp.rz.f32 %0, %1;", 80, R, R, R, R) \
  KERNEL(26, "rcp.rn.ftz.f32 %0, %1;", 80, R, R, R, R) KERNEL(27, "sqrt.rn.f32 %0, %1;", 80, R, R, R, R) \
  KERNEL(28, "sqrt.rm.f32 %0, %1;", 80, R, R, R, R) KERNEL(29, "sqrt.rn.ftz.f32 %0, %1;", 80, R, R, R, R) \
  KERNEL(30, "add.rz.f64 %0, %1, %2;", 80, L, L, L, L) KERNEL(31, "mul.rp.f64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(32, "add.f64 %0, %1, %2;", 80, L, L, L, L) KERNEL(33, "div.rn.f64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(34, "sqrt.rz.f64 %0, %1;", 80, L, L, L, L) KERNEL(35, "mul.rn.f64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(40, "min.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(41, "max.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(42, "min.NaN.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(43, "max.ftz.NaN.f32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(44, "min.ftz.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(45, "max.f64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(46, "abs.f32 %0, %1;", 80, R, R, R, R) KERNEL(47, "neg.ftz.f32 %0, %1;", 80, R, R, R, R) \
  KERNEL(48, "copysign.f32 %0, %1, %2;", 80, R, R, R, R) KERNEL(49, "copysign.f64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(60, "add.f16 %0, %1, %2;", 80, H, H, H, H) KERNEL(61, "sub.rn.f16 %0, %1, %2;", 80, H, H, H, H) \
  KERNEL(62, "mul.f16 %0, %1, %2;", 80, H, H, H, H) KERNEL(63, "fma.rn.f16 %0, %1, %2, %3;", 80, H, H, H, H) \
  KERNEL(64, "add.ftz.f16 %0, %1, %2;", 80, H, H, H, H) KERNEL(65, "fma.rn.sat.f16 %0, %1, %2, %3;", 80, H, H, H, H) \
  KERNEL(66, "fma.rn.relu.f16 %0, %1, %2, %3;", 80, H, H, H, H) KERNEL(67, "min.f16 %0, %1, %2;", 80, H, H, H, H) \
  KERNEL(68, "max.NaN.f16 %0, %1, %2;", 80, H, H, H, H) KERNEL(69, "fma.rn.bf16 %0, %1, %2, %3;", 80, H, H, H, H) \
  KERNEL(70, "max.bf16 %0, %1, %2;", 80, H, H, H, H) KERNEL(71, "add.bf16 %0, %1, %2;", 90, H, H, H, H) \
  KERNEL(72, "mul.bf16 %0, %1, %2;", 90, H, H, H, H) KERNEL(73, "neg.f16 %0, %1;", 80, H, H, H, H) \
  KERNEL(74, "abs.bf16 %0, %1;", 80, H, H, H, H) \
  KERNEL(75, "add.f16x2 %0, %1, %2;", 80, R, R, R, R) KERNEL(76, "mul.f16x2 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(77, "fma.rn.f16x2 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(78, "fma.rn.bf16x2 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(79, "max.f16x2 %0, %1, %2;", 80, R, R, R, R) KERNEL(80, "min.NaN.bf16x2 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(81, "sub.bf16x2 %0, %1, %2;", 90, R, R, R, R) KERNEL(82, "neg.bf16x2 %0, %1;", 80, R, R, R, R) \
  KERNEL(100, "shl.b16 %0, %1, %2;", 80, H, H, R, R) KERNEL(101, "shl.b32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(102, "shl.b64 %0, %1, %2;", 80, L, L, R, R) KERNEL(103, "shr.u16 %0, %1, %2;", 80, H, H, R, R) \
  KERNEL(104, "shr.s16 %0, %1, %2;", 80, H, H, R, R) KERNEL(105, "shr.u32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(106, "shr.s32 %0, %1, %2;", 80, R, R, R, R) KERNEL(107, "shr.u64 %0, %1, %2;", 80, L, L, R, R) \
  KERNEL(108, "shr.s64 %0, %1, %2;", 80, L, L, R, R) KERNEL(109, "shr.b32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(110, "bfe.u32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(111, "bfe.s32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(112, "bfe.u64 %0, %1, %2, %3;", 80, L, L, R, R) KERNEL(113, "bfe.s64 %0, %1, %2, %3;", 80, L, L, R, R) \
  KERNEL(114, "bfi.b32 %0, %1, %4, %2, %3;", 80, R, R, R, R) KERNEL(115, "bfi.b64 %0, %1, %4, %2, %3;", 80, L, L, R, R) \
  KERNEL(116, "bfi.b32 %0, %1, %4, 7, 30;", 80, R, R, R, R) KERNEL(117, "bfi.b32 %0, %1, %4, 31, 8;", 80, R, R, R, R) \
  KERNEL(120, "prmt.b32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(121, "prmt.b32.f4e %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(122, "prmt.b32.b4e %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(123, "prmt.b32.rc8 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(124, "prmt.b32.ecl %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(125, "prmt.b32.ecr %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(126, "prmt.b32.rc16 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(130, "shf.l.clamp.b32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(131, "shf.l.wrap.b32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(132, "shf.r.clamp.b32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(133, "shf.r.wrap.b32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(140, "div.u32 %0, %1, %2;", 80, R, R, R, R) KERNEL(141, "div.s32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(142, "rem.s64 %0, %1, %2;", 80, L, L, L, L) KERNEL(143, "div.u64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(144, "rem.u16 %0, %1, %2;", 80, H, H, H, H) KERNEL(145, "div.s16 %0, %1, %2;", 80, H, H, H, H) \
  KERNEL(150, "mul.hi.u32 %0, %1, %2;", 80, R, R, R, R) KERNEL(151, "mul.hi.s32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(152, "mul.hi.u64 %0, %1, %2;", 80, L, L, L, L) KERNEL(153, "mul.hi.s64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(154, "mul.hi.s16 %0, %1, %2;", 80, H, H, H, H) KERNEL(155, "mul.hi.u16 %0, %1, %2;", 80, H, H, H, H) \
  KERNEL(156, "mul.wide.s16 %0, %1, %2;", 80, R, H, H, H) KERNEL(157, "mul.wide.u32 %0, %1, %2;", 80, L, R, R, R) \
  KERNEL(158, "mul.wide.s32 %0, %1, %2;", 80, L, R, R, R) KERNEL(159, "mul.lo.s64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(160, "mad.hi.s32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(161, "mad.hi.u64 %0, %1, %2, %3;", 80, L, L, L, L) \
  KERNEL(162, "mad.lo.u16 %0, %1, %2, %3;", 80, H, H, H, H) KERNEL(163, "mul24.lo.u32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(164, "mul24.hi.s32 %0, %1, %2;", 80, R, R, R, R) KERNEL(165, "sad.s32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(166, "sad.u16 %0, %1, %2, %3;", 80, H, H, H, H) KERNEL(167, "add.sat.s32 %0, %1, %2;", 80, R, R, R, R) \
  KERNEL(168, "sub.sat.s32 %0, %1, %2;", 80, R, R, R, R) KERNEL(169, "min.s64 %0, %1, %2;", 80, L, L, L, L) \
  KERNEL(170, "max.u16 %0, %1, %2;", 80, H, H, H, H) KERNEL(171, "abs.s32 %0, %1;", 80, R, R, R, R) \
  KERNEL(172, "dp4a.u32.u32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(173, "dp4a.s32.u32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(174, "dp4a.s32.s32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(175, "dp2a.lo.s32.s32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(176, "dp2a.hi.u32.s32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(177, "min.s16x2 %0, %1, %2;", 90, R, R, R, R) \
  KERNEL(178, "add.u16x2 %0, %1, %2;", 90, R, R, R, R) \
  KERNEL(180, "bfind.u32 %0, %1;", 80, R, R, R, R) KERNEL(181, "bfind.s32 %0, %1;", 80, R, R, R, R) \
  KERNEL(182, "bfind.shiftamt.u64 %0, %1;", 80, R, L, L, L) KERNEL(183, "bfind.shiftamt.s64 %0, %1;", 80, R, L, L, L) \
  KERNEL(184, "{ .reg .u32 t; and.b32 t, %2, 31; fns.b32 %0, %1, t, %3; }", 80, R, R, R, R) \
  KERNEL(185, "popc.b64 %0, %1;", 80, R, L, L, L) KERNEL(186, "clz.b64 %0, %1;", 80, R, L, L, L) \
  KERNEL(187, "clz.b32 %0, %1;", 80, R, R, R, R) KERNEL(188, "brev.b32 %0, %1;", 80, R, R, R, R) \
  KERNEL(189, "brev.b64 %0, %1;", 80, L, L, L, L) KERNEL(190, "lop3.b32 %0, %1, %2, %3, 0x1e;", 80, R, R, R, R) \
  KERNEL(191, "lop3.b32 %0, %1, %2, %3, 0xca;", 80, R, R, R, R) KERNEL(192, "cnot.b32 %0, %1;", 80, R, R, R, R) \
  KERNEL(193, "slct.u32.s32 %0, %1, %2, %3;", 80, R, R, R, R) KERNEL(194, "slct.u32.f32 %0, %1, %2, %3;", 80, R, R, R, R) \
  KERNEL(200, "{ .reg .u64 t; add.cc.u64 t, %1, %2; addc.u64 %0, %3, %4; }", 80, L, L, L, L) \
  KERNEL(201, "{ .reg .u64 t; sub.cc.u64 t, %1, %2; subc.u64 %0, %3, %4; }", 80, L, L, L, L) \
  KERNEL(202, "{ .reg .u32 t; add.cc.u32 t, %1, %2; addc.cc.u32 t, %3, %4; addc.u32 %0, 0, 0; }", 80, R, R, R, R) \
  KERNEL(203, "{ .reg .u32 t; mad.lo.cc.u32 t, %1, %2, %3; madc.hi.u32 %0, %1, %2, %4; }", 80, R, R, R, R) \
  KERNEL(204, "{ .reg .u32 t; sub.cc.u32 t, %1, %2; subc.cc.u32 t, %3, %4; subc.u32 %0, 0, 0; }", 80, R, R, R, R) \
  KERNEL(205, "{ .reg .u64 t; mad.lo.cc.u64 t, %1, %2, %3; madc.hi.u64 %0, %1, %2, %4; }", 80, L, L, L, L)

#define LLMMEM_TEST(id, kind, word) \
  KERNEL_PREDICATE(id, "{ .reg .pred p; " kind " p, %1" word "; selp.u32 %0, 1, 0, p; }")
#define LLMMEM_PREDICATES \
  LLMMEM_TEST(300, "setp.eq.f32", ", %2") LLMMEM_TEST(301, "setp.ne.f32", ", %2") LLMMEM_TEST(302, "setp.lt.f32", ", %2") \
  LLMMEM_TEST(303, "setp.le.f32", ", %2") LLMMEM_TEST(304, "setp.gt.f32", ", %2") LLMMEM_TEST(305, "setp.ge.f32", ", %2") \
  LLMMEM_TEST(306, "setp.equ.f32", ", %2") LLMMEM_TEST(307, "setp.neu.f32", ", %2") LLMMEM_TEST(308, "setp.ltu.f32", ", %2") \
  LLMMEM_TEST(309, "setp.leu.f32", ", %2") LLMMEM_TEST(310, "setp.gtu.f32", ", %2") LLMMEM_TEST(311, "setp.geu.f32", ", %2") \
  LLMMEM_TEST(312, "setp.num.f32", ", %2") LLMMEM_TEST(313, "setp.nan.f32", ", %2") LLMMEM_TEST(314, "setp.eq.ftz.f32", ", %2") \
  LLMMEM_TEST(315, "setp.lt.ftz.f32", ", %2") LLMMEM_TEST(316, "setp.lo.u32", ", %2") LLMMEM_TEST(317, "setp.hs.u32", ", %2") \
  LLMMEM_TEST(318, "setp.lt.s32", ", %2") LLMMEM_TEST(319, "setp.ge.s32", ", %2") \
  LLMMEM_TEST(320, "testp.finite.f32", "") LLMMEM_TEST(321, "testp.infinite.f32", "") LLMMEM_TEST(322, "testp.number.f32", "") \
  LLMMEM_TEST(323, "testp.notanumber.f32", "") LLMMEM_TEST(324, "testp.normal.f32", "") LLMMEM_TEST(325, "testp.subnormal.f32", "")
// clang-format on

#define LLMMEM_KERNEL(id, text, first, D, A, B, C)                                                     \
  __global__ void operate_##id(const operands* from, u64* to, u32 count) {                             \
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;                                              \
    if (at >= count) return;                                                                           \
    [[maybe_unused]] const auto a = static_cast<LLMMEM_TYPE_##A>(from[at].a);                          \
    [[maybe_unused]] const auto b = static_cast<LLMMEM_TYPE_##B>(from[at].b);                          \
    [[maybe_unused]] const auto c = static_cast<LLMMEM_TYPE_##C>(from[at].c);                          \
    [[maybe_unused]] const auto d = static_cast<LLMMEM_TYPE_##A>(from[at].d);                          \
    LLMMEM_TYPE_##D made = 0;                                                                          \
    LLMMEM_FROM_##first(asm volatile(text : LLMMEM_OUT_##D(made) : LLMMEM_IN_##A(a), LLMMEM_IN_##B(b), \
                                     LLMMEM_IN_##C(c), LLMMEM_IN_##A(d));) to[at] = made;              \
  }
#define KERNEL_PREDICATE(id, text) LLMMEM_KERNEL(id, text, 80, R, R, R, R)
LLMMEM_OPERATIONS(LLMMEM_KERNEL)
LLMMEM_PREDICATES
#undef KERNEL_PREDICATE

// ---- the test ----

struct operation {
  std::string text;
  int architecture;
  void (*run)(const operands*, u64*, u32);
  unsigned bits;
};
constexpr unsigned bits_of(char letter) {
  return letter == 'H' ? 16 : letter == 'R' ? 32 : 64;
}
#define LLMMEM_ENTRY(id, text, first, D, A, B, C) {text, first, operate_##id, bits_of(#D[0])},
#define KERNEL_PREDICATE(id, text) {text, 80, operate_##id, 32},
const operation operations[] = {LLMMEM_OPERATIONS(LLMMEM_ENTRY) LLMMEM_PREDICATES};

std::vector<operands> inputs(const request& of, std::mt19937_64& random) {
  std::vector<u64> edges;
  const bool is_half = of.has("f16") || of.has("bf16") || of.has("f16x2") || of.has("bf16x2");
  if (is_half) {
    for (const u64 each :
         {0x0000, 0x0001, 0x0002, 0x03FF, 0x0400, 0x0401, 0x007F, 0x0080, 0x0081, 0x3C00, 0x3C01, 0x3BFF,
          0x3F80, 0x3F81, 0x7BFF, 0x7C00, 0x7E00, 0x7F7F, 0x7F80, 0x7FC0, 0x6400, 0x1400, 0x3800})
      edges.insert(edges.end(), {each, each | 0x8000});
  } else if (of.has("f64")) {
    for (const double each : {0.0, 1.0, 1.5, 1 + 0x1p-52, 1 - 0x1p-53, 0x1p-1022, 0x1p-1074, 3.0,
                              0x1.fffffffffffffp1023, HUGE_VAL, std::nan("")})
      edges.insert(edges.end(), {std::bit_cast<u64>(each), std::bit_cast<u64>(-each)});
  } else if (of.has("f32")) {
    for (const u64 each : {0x00000000U, 0x00000001U, 0x007FFFFFU, 0x00800000U, 0x00800001U, 0x01000000U,
                           0x3F800000U, 0x3F800001U, 0x3F7FFFFFU, 0x40400000U, 0x33800000U, 0x34000000U,
                           0x7F7FFFFFU, 0x7F800000U, 0x7FC00000U, 0x7F800001U})
      edges.insert(edges.end(), {each, each | 0x80000000U});
  } else {
    for (const u64 each : {0ULL,
                           1ULL,
                           2ULL,
                           7ULL,
                           8ULL,
                           15ULL,
                           16ULL,
                           31ULL,
                           32ULL,
                           33ULL,
                           63ULL,
                           64ULL,
                           65ULL,
                           127ULL,
                           255ULL,
                           256ULL,
                           0x7FFFULL,
                           0x8000ULL,
                           0xFFFFULL,
                           0x10000ULL,
                           0x7FFFFFFFULL,
                           0x80000000ULL,
                           0xFFFFFFFFULL,
                           0x100000000ULL,
                           0x7FFFFFFFFFFFFFFFULL,
                           0x8000000000000000ULL,
                           0xFFFFFFFFFFFFFFFFULL,
                           0x0123456789ABCDEFULL,
                           0xFEDCBA9876543210ULL})
      edges.push_back(each);
  }
  std::vector<operands> made;
  const auto other = [&] { return random() % 2 == 0 ? edges[random() % edges.size()] : random(); };
  for (const u64 a : edges)
    for (const u64 b : edges)
      for (int n = 0; n < 3; ++n)
        made.push_back({a, b, n == 0 ? edges[random() % edges.size()] : other(), other()});
  for (int n = 0; n < 20000; ++n) {
    operands x{random(), random(), random(), random()};
    if (of.has("f32") && n % 2 == 0) {
      // Operands of like exponents, so that sums cancel and products of three meet.
      for (u64* each : {&x.a, &x.b, &x.c})
        *each = (*each & 0x807FFFFF) | (127 - 12 + random() % 24) << 23;
    }
    if (!of.has("f32") && !is_half && n % 2 == 0) x.b >>= random() % 64, x.c >>= random() % 64;
    made.push_back(x);
  }
  if (of.has("f16x2") || of.has("bf16x2"))
    for (operands& x : made)
      for (u64* each : {&x.a, &x.b, &x.c})
        *each = (*each & 0xFFFF) | (random() % 2 == 0 ? random() & 0xFFFF : edges[random() % edges.size()])
                                       << 16;
  return made;
}

}  // namespace

int main() {
  llmmem_tests::require_device();
  const int architecture = llmmem_tests::architecture_of_device();
  std::mt19937_64 random(7);
  int failures = 0, tested = 0;
  u64 compared = 0;
  for (const operation& each : operations) {
    if (each.architecture > architecture) continue;
    const request of(each.text);
    const std::vector<operands> from = inputs(of, random);
    const auto count = static_cast<u32>(from.size());
    const device_array<operands> on_device(from);
    const device_array<u64> results(std::vector<u64>(count, 0));
    each.run<<<(count + 127) / 128, 128>>>(on_device.data(), results.data(), count);
    check(cudaGetLastError(), each.text.c_str());
    const std::vector<u64> made = results.host();
    const bool is_pair = of.has("f16x2") || of.has("bf16x2");
    const u64 mask = each.bits == 64 ? ~u64{0} : (u64{1} << each.bits) - 1;
    int wrong = 0;
    for (u32 n = 0; n < count; ++n) {
      const operands& x = from[n];
      u64 wanted = 0;
      bool is_open = false;
      if (each.text.find("testp") != std::string::npos || each.text.find("setp") != std::string::npos)
        wanted = predicate(of, x);
      else if (is_pair)
        wanted = half_result(of, x) | half_result(of, {x.a >> 16, x.b >> 16, x.c >> 16, 0}) << 16;
      else if (of.has("f16") || of.has("bf16"))
        wanted = half_result(of, x);
      else if (of.name() != "slct" && of.has("f32"))
        wanted = float_result<float>(of, x);
      else if (of.has("f64"))
        wanted = float_result<double>(of, x);
      else
        is_open = !integer_result(each.text, of, x, wanted);
      ++compared;
      const u64 has = made[n] & mask;
      wanted &= mask;
      // Which NaN an f64 is, and whether abs, neg and copysign keep the one of an f32, is open.
      if (of.has("f64") && std::isnan(std::bit_cast<double>(wanted)) &&
          std::isnan(std::bit_cast<double>(has)))
        continue;
      if (of.has("f32") && each.bits == 32 && (has & 0x7FFFFFFF) > 0x7F800000 &&
          (wanted & 0x7FFFFFFF) > 0x7F800000)
        continue;
      if (is_open || has == wanted) continue;
      ++failures;
      if (++wrong <= 4)
        std::printf("FAILED: %s of 0x%llx, 0x%llx, 0x%llx, 0x%llx: 0x%llx instead of 0x%llx\n",
                    each.text.c_str(), static_cast<unsigned long long>(x.a),
                    static_cast<unsigned long long>(x.b), static_cast<unsigned long long>(x.c),
                    static_cast<unsigned long long>(x.d), static_cast<unsigned long long>(has),
                    static_cast<unsigned long long>(wanted));
    }
    ++tested;
  }
  std::printf("%d operations, %llu results: %d failed\n", tested, static_cast<unsigned long long>(compared),
              failures);
  return failures == 0 ? 0 : 1;
}
