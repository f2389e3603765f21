// unknown_test.cu: the machine reports what it does not know, and executes nothing else in its place; it
// counts the instructions that have no exact bits.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "ptx_machine/checks.cuh"

namespace {

using std::uint32_t;

// nvcc checks PTX, so each statement is one that an architecture has.
#define LLMMEM_UNKNOWN(STATEMENT)                                                                           \
  STATEMENT(0, 80, "cvt.pack.sat.u8.s32.b32 %0, %0, %0, %0;")                                               \
  STATEMENT(1, 80, "cvt.rna.tf32.f32 %0, %0;")                                                              \
  STATEMENT(2, 80, "atom.global.add.noftz.f16x2 %0, [%1], %0;")                                             \
  STATEMENT(3, 80, "cp.async.ca.shared.global [%1], [%1], 4;")                                              \
  STATEMENT(4, 80, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];")                                  \
  STATEMENT(6, 80, "bar.sync 0, 64;")                                                                       \
  STATEMENT(7, 80, "bar.arrive 0, 64;")                                                                     \
  STATEMENT(8, 80, "mad.hi.sat.s32 %0, %0, %0, %0;")                                                        \
  STATEMENT(9, 80, "fma.rn.relu.bf16x2 %0, %0, %0, %0; tanh.approx.f16x2 %0, %0;")                          \
  STATEMENT(                                                                                                \
      10, 80,                                                                                               \
      "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%0,%0,%0}, {%0,%0}, {%0}, {%0,%0,%0,%0};")    \
  STATEMENT(11, 80,                                                                                         \
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%0}, {%0,%0,%0,%0}, {%0,%0}, {%0,%0};")  \
  STATEMENT(12, 80,                                                                                         \
            "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%0,%0,%0}, {%0,%0}, {%0}, {%0,%0,%0,%0};") \
  STATEMENT(13, 80, "{ .reg .pred p; setp.eq.u32 p, %0, 1; lop3.and.b32 %0|p, %0, %0, %0, 0x80, p; }")      \
  STATEMENT(14, 80, "mov.u32 %0, %%clock;")                                                                 \
  STATEMENT(15, 80, "{ .reg .b64 t; mov.u64 t, %%globaltimer; }")                                           \
  STATEMENT(16, 80, "{ .reg .b64 t; createpolicy.fractional.L2::evict_first.b64 t, 1.0; }")                 \
  STATEMENT(17, 80, "{ .reg .pred p; isspacep.shared p, %1; }")                                             \
  STATEMENT(18, 80, "set.eq.f16x2.f16x2 %0, %0, %0;")                                                       \
  STATEMENT(19, 80, "vadd.u32.u32.u32 %0, %0, %0;")                                                         \
  STATEMENT(20, 80, "szext.wrap.u32 %0, %0, 5;")                                                            \
  STATEMENT(21, 80, "brkpt;")                                                                               \
  STATEMENT(22, 90, "min.xorsign.abs.f32 %0, %0, %0;")                                                      \
  STATEMENT(23, 90, "red.global.add.v2.f32 [%1], {%0, %0};")                                                \
  STATEMENT(24, 90, "ld.shared::cluster.u32 %0, [%1];")                                                     \
  STATEMENT(25, 90, "fence.proxy.async;")                                                                   \
  STATEMENT(26, 90, "max.relu.s32 %0, %0, %0;")                                                             \
  STATEMENT(27, 90, "ex2.approx.ftz.bf16x2 %0, %0;")                                                        \
  STATEMENT(28, 90, "multimem.red.global.add.u32 [%1], %0;")                                                \
  STATEMENT(29, 90, "mov.u32 %0, %%cluster_ctaid.x;")                                                       \
  STATEMENT(30, 90, "{ .reg .pred p; elect.sync _|p, 0xffffffff; }")                                        \
  STATEMENT(31, 90, "barrier.cluster.arrive;")

#define LLMMEM_KERNEL(id, first, text)                                                                   \
  __global__ void unknown_##id(uint32_t* to) {                                                           \
    uint32_t value = threadIdx.x;                                                                        \
    LLMMEM_FROM_##first(asm volatile(text : "+r"(value) : "l"(to) : "memory");) to[threadIdx.x] = value; \
  }
LLMMEM_UNKNOWN(LLMMEM_KERNEL)

struct statement {
  const char* text;
  int architecture;  // the first that has it
  void (*run)(uint32_t*);
};
#define LLMMEM_ENTRY(id, first, text) {text, first, unknown_##id},
const statement statements[] = {LLMMEM_UNKNOWN(LLMMEM_ENTRY)};

__global__ void approximate(float* to, int is_exact) {
  float x = static_cast<float>(threadIdx.x);
  if (is_exact != 0)
    x = __fadd_rz(__frcp_rn(x + 1), __fsqrt_rn(x));
  else if (threadIdx.x < 20)
    asm volatile("ex2.approx.ftz.f32 %0, %0; rsqrt.approx.f32 %0, %0; div.full.f32 %0, %0, %0;" : "+f"(x));
  to[threadIdx.x] = x;
}

}  // namespace

int main() {
  llmmem_tests::require_device();
  llmmem_tests::counted_checks checks;
  const int architecture = llmmem_tests::architecture_of_device();
  int tested = 0;
  for (const statement& each : statements) {
    if (each.architecture > architecture) continue;
    uint32_t* to = nullptr;
    cudaMalloc(reinterpret_cast<void**>(&to), 256);
    cudaMemset(to, 0, 256);
    each.run<<<1, 32>>>(to);
    const cudaError_t status = cudaDeviceSynchronize();
    const std::string told = ptx_machine_last_fault();
    checks.require(status != cudaSuccess && told.find("an instruction that the machine does not know") == 0,
                   std::string(each.text) + " is executed: " + told);
    ptx_machine_forget_fault();
    cudaFree(to);
    ++tested;
  }
  float* to = nullptr;
  cudaMalloc(reinterpret_cast<void**>(&to), 128);
  approximate<<<1, 32>>>(to, 1);
  llmmem_tests::check(cudaDeviceSynchronize(), "exact instructions");
  checks.require(ptx_machine_approximate() == 0, "rcp.rn, sqrt.rn and add.rz count as approximate");
  approximate<<<1, 32>>>(to, 0);
  llmmem_tests::check(cudaDeviceSynchronize(), "approximate instructions");
  checks.require(ptx_machine_approximate() == 60,
                 "20 lanes of 3 approximate instructions are " + std::to_string(ptx_machine_approximate()));
  cudaFree(to);
  std::printf("%d statements that the machine does not know, %d failed\n", tested, checks.failed());
  return checks.status();
}
