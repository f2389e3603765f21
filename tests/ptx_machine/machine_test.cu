// What the machine must find and what it must compute: each planted fault is reported as what it is, and each
// kernel without one comes to the host's results.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ptx_machine/checks.cuh"

namespace {

llmmem_tests::counted_checks checks;
void require(bool is, const std::string& what) {
  checks.require(is, what);
}
/// Checks that `act` ends in a fault whose text has all of `parts`, which are separated by |.
void faults(const char* what, const char* parts, cudaError_t code, const std::function<void()>& act) {
  ptx_machine_forget_fault();
  std::fflush(stdout);
  act();
  const cudaError_t status = cudaDeviceSynchronize();
  const std::string told = ptx_machine_last_fault();
  bool is_told = status == code;
  std::string wanted(parts);
  for (std::size_t at = 0; at <= wanted.size();) {
    const std::size_t end = std::min(wanted.find('|', at), wanted.size());
    is_told = is_told && told.find(wanted.substr(at, end - at)) != std::string::npos;
    at = end + 1;
  }
  require(is_told, std::string(what) + ": " + cudaGetErrorName(status) + ": " + told);
  ptx_machine_forget_fault();
}
void runs(const char* what, const std::function<void()>& act) {
  ptx_machine_forget_fault();
  act();
  const cudaError_t status = cudaDeviceSynchronize();
  require(status == cudaSuccess,
          std::string(what) + ": " + cudaGetErrorName(status) + ": " + ptx_machine_last_fault());
  ptx_machine_forget_fault();
}

using llmmem_tests::device_array;

/// Memory of the device that nothing has written.
template <class T>
struct unwritten_array {
  T* at = nullptr;
  explicit unwritten_array(std::size_t count) {
    cudaMalloc(reinterpret_cast<void**>(&at), count * sizeof(T));
  }
  unwritten_array(const unwritten_array&) = delete;
  ~unwritten_array() { cudaFree(at); }
};

// ---- planted faults ----

__global__ void read_at(const std::uint32_t* from, std::uint32_t* to, std::int64_t step) {
  *to = from[threadIdx.x + step];
}
__global__ void write_byte(std::uint8_t* to, std::int64_t at) {
  to[at] = 1;
}
__global__ void read_word(const std::uint8_t* from, std::uint32_t* to, int at) {
  *to = *reinterpret_cast<const std::uint32_t*>(from + at);
}
__global__ void shared_sum(std::uint32_t* to, int writes, int waits) {
  __shared__ std::uint32_t words[64];
  if (waits == 0) {
    words[threadIdx.x] = 0;
    __syncthreads();
  }
  if (threadIdx.x < writes) words[threadIdx.x] = threadIdx.x + blockIdx.x;
  if (waits != 0) __syncthreads();
  to[blockIdx.x * 64 + threadIdx.x] = words[63 - threadIdx.x];
}
__global__ void shared_past(std::uint32_t* to, int at) {
  __shared__ std::uint32_t words[64];
  words[threadIdx.x + at] = 1;
  __syncthreads();
  to[threadIdx.x] = words[threadIdx.x];
}
__global__ void one_word(std::uint32_t* to, int is_atomic) {
  if (is_atomic != 0)
    atomicAdd(to, blockIdx.x + 1);
  else
    *to = blockIdx.x + 1;
}
__global__ void read_of_another_block(std::uint32_t* words) {
  if (blockIdx.x == 0)
    words[threadIdx.x] = 5;
  else
    words[64 + threadIdx.x] = words[threadIdx.x];
}
__global__ void lanes_of_a_warp(std::uint32_t* words, int waits) {
  words[threadIdx.x] = threadIdx.x;
  if (waits != 0) __syncwarp();
  words[32 + threadIdx.x] = words[31 - threadIdx.x];
}
__global__ void lanes_of_a_store(std::uint32_t* words) {
  words[threadIdx.x / 2] = threadIdx.x;
}
__global__ void read_then_written(std::uint32_t* words) {
  const std::uint32_t first = *reinterpret_cast<volatile std::uint32_t*>(words);
  if (threadIdx.x == 40) words[0] = first + 1;
  words[1 + threadIdx.x] = first;
}
__global__ void divergent_product(float* to, int lanes) {
  float c[4] = {0, 0, 0, 0};
  if (threadIdx.x < lanes) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(0x3F803F80));
  }
  to[threadIdx.x] = c[0];
}
__global__ void product_behind_a_branch(float* to, int meets) {
  float c[4] = {0, 0, 0, 0};
  if (to[threadIdx.x] > 15) to[threadIdx.x] = atomicAdd(to + 32, 1.0F);  // a branch, not a selection
  if (meets != 0) __syncwarp();
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(0x3C003C00));
  to[threadIdx.x] = c[0];
}
__global__ void divergent_barrier(std::uint32_t* to, int some) {
  if (threadIdx.x < some) {
    to[threadIdx.x] = 1;
    __syncthreads();
    to[threadIdx.x] += 1;
  } else {
    to[threadIdx.x] = 2;
    __syncthreads();
    to[threadIdx.x] += 3;
  }
}
/// What all threads say together: bit 0 any, bit 1 all, above them how many.
__global__ void votes_of_a_block(std::uint32_t* to) {
  const int any = __syncthreads_or(threadIdx.x == 40);
  const int all = __syncthreads_and(threadIdx.x != 50);
  const int some = __syncthreads_count(threadIdx.x % 3 == 0);
  to[threadIdx.x] = static_cast<std::uint32_t>((any != 0 ? 1 : 0) | (all != 0 ? 2 : 0) | some << 2);
}
__global__ void unlike_barriers(std::uint32_t* to) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    to[0] = static_cast<std::uint32_t>(__syncthreads_count(1));
}
__global__ void divergent_shuffle(std::uint32_t* to, int some) {
  std::uint32_t got = 0;
  if (threadIdx.x < some)
    got = __shfl_xor_sync(0xFFFFFFFF, threadIdx.x, 1);
  else
    got = __shfl_xor_sync(0xFFFFFFFF, threadIdx.x, 2) + 1;
  to[threadIdx.x] = got;
}
__global__ void foreign_mask(std::uint32_t* to, unsigned mask) {
  to[threadIdx.x] = __shfl_xor_sync(mask, threadIdx.x, 1);
}
__global__ void unknown(std::uint32_t* to) {
  asm volatile("mov.u32 %0, %%smid;" : "=r"(*to));
}
__global__ void traps(std::uint32_t* to) {
  if (*to != 0) __trap();
}
__global__ void __launch_bounds__(64) bounded(std::uint32_t* to) {
  to[threadIdx.x] = 1;
}

void check_faults() {
  const std::vector<std::uint32_t> zeros(256, 0);
  device_array<std::uint32_t> in(zeros), out(zeros);
  device_array<std::uint8_t> bytes(std::vector<std::uint8_t>(13, 7));
  const cudaError_t illegal = cudaErrorIllegalAddress, failed = cudaErrorLaunchFailure;
  const char* const place = "of block (0,0,0), line |ld.global";
  faults("a read past the end",
         "out of bounds: 1024 bytes into an allocation of 1024|thread (31,0,0) of block", illegal,
         [&] { read_at<<<1, 32>>>(in.data(), out.data(), 225); });
  faults("a read before the beginning", "out of bounds: 4 bytes before", illegal,
         [&] { read_at<<<1, 1>>>(in.data(), out.data(), -1); });
  faults("its place", place, illegal, [&] { read_at<<<1, 1>>>(in.data(), out.data(), 256); });
  faults("a byte past the end", "13 bytes into an allocation of 13|st.global.u8", illegal,
         [&] { write_byte<<<1, 1>>>(bytes.data(), 13); });
  faults("half past the end", "out of bounds", illegal,
         [&] { read_word<<<1, 1>>>(bytes.data(), out.data(), 12); });
  faults("no pointer", "near no allocation", illegal, [&] { read_at<<<1, 1>>>(nullptr, out.data(), 0); });
  std::uint32_t* const freed = device_array<std::uint32_t>(zeros).data();
  faults("freed memory", "inside memory that was freed", illegal,
         [&] { read_at<<<1, 1>>>(freed, out.data(), 0); });
  std::vector<std::uint32_t> of_host(8, 9);
  faults("pageable memory", "near no allocation", illegal,
         [&] { read_at<<<1, 1>>>(of_host.data(), out.data(), 0); });
  cudaHostRegister(of_host.data(), 32, 0);
  runs("pinned memory", [&] { read_at<<<1, 1>>>(of_host.data(), out.data(), 7); });
  faults("past pinned memory", "out of bounds", illegal,
         [&] { read_at<<<1, 1>>>(of_host.data(), out.data(), 8); });
  cudaHostUnregister(of_host.data());
  faults("past shared memory", "out of bounds|which has 256|shared", illegal,
         [&] { shared_past<<<1, 64>>>(out.data(), 1); });
  faults("a misaligned read", "0x|not a multiple of that", cudaErrorMisalignedAddress,
         [&] { read_word<<<1, 1>>>(bytes.data(), out.data(), 2); });
  unwritten_array<std::uint32_t> never(8);
  faults("an uninitialised read", "never written; 0 bytes into an allocation of 32", failed,
         [&] { read_at<<<1, 1>>>(never.at, out.data(), 0); });
  unwritten_array<std::uint32_t> copied(8);
  cudaMemcpy(copied.at, never.at, 32, cudaMemcpyDeviceToDevice);
  faults("a copy of what was never written", "never written", failed,
         [&] { read_at<<<1, 1>>>(copied.at, out.data(), 0); });
  cudaMemset(never.at, 0, 32);
  runs("memory that was set", [&] { read_at<<<1, 8>>>(never.at, out.data(), 0); });
  faults("an uninitialised read of shared memory", "never written|ld.shared", failed,
         [&] { shared_sum<<<1, 64>>>(out.data(), 60, 1); });
  faults("a missing barrier", "a race: a|warp 0|warp 1", failed,
         [&] { shared_sum<<<1, 64>>>(out.data(), 64, 0); });
  runs("a barrier", [&] { shared_sum<<<4, 64>>>(out.data(), 64, 1); });
  faults("blocks that write a word", "a race: a write|block 0|block 1", failed,
         [&] { one_word<<<2, 1>>>(out.data(), 0); });
  runs("blocks that add to a word", [&] { one_word<<<9, 33>>>(out.data(), 1); });
  faults("a read of what another block writes", "a race: a read", failed,
         [&] { read_of_another_block<<<2, 64>>>(out.data()); });
  faults("lanes without __syncwarp", "a race: a read|lane 31", failed,
         [&] { lanes_of_a_warp<<<1, 32>>>(out.data(), 0); });
  runs("lanes with it", [&] { lanes_of_a_warp<<<1, 32>>>(out.data(), 1); });
  faults("lanes that store to one place", "a race: a write", failed,
         [&] { lanes_of_a_store<<<1, 32>>>(out.data()); });
  faults("a write of what several read", "a race: a write|and others has read", failed,
         [&] { read_then_written<<<1, 64>>>(out.data()); });
  device_array<float> floats(std::vector<float>(32));
  faults("half a product", "lanes 0xffff at line|mma.sync|lanes 0xffff0000 have ended", failed,
         [&] { divergent_product<<<1, 32>>>(floats.data(), 16); });
  runs("a product", [&] { divergent_product<<<1, 32>>>(floats.data(), 32); });
  require(floats.host()[0] == 16, "a product of ones");
  std::vector<float> numbers(33);
  for (int i = 0; i < 33; ++i)
    numbers[i] = static_cast<float>(i);
  for (int meets = 0; meets < 2; ++meets) {
    device_array<float> some(numbers), others(numbers);
    runs("a product behind a branch", [&] { product_behind_a_branch<<<1, 32>>>(some.data(), meets); });
    ptx_machine_keep_apart(1);
    if (meets == 0) {
      faults("one to which lanes come apart", "nothing has brought all lanes together|mma.sync", failed,
             [&] { product_behind_a_branch<<<1, 32>>>(others.data(), 0); });
    } else {
      runs("one to which they come together", [&] { product_behind_a_branch<<<1, 32>>>(others.data(), 1); });
    }
    ptx_machine_keep_apart(0);
  }
  faults("barriers apart", "lanes wait for others|lanes 0xff at|lanes 0xffffff00 at", failed,
         [&] { divergent_barrier<<<1, 64>>>(out.data(), 8); });
  runs("barriers of whole warps", [&] { divergent_barrier<<<1, 64>>>(out.data(), 32); });
  for (const std::uint32_t threads : {40U, 41U, 64U}) {
    runs("votes of a block", [&] { votes_of_a_block<<<1, threads>>>(out.data()); });
    const std::uint32_t wanted = (threads > 40 ? 1U : 0U) | (threads > 50 ? 0U : 2U) | (threads + 2) / 3 << 2;
    for (std::uint32_t t = 0; t < threads; ++t)
      require(out.host()[t] == wanted, "each thread hears what all said");
  }
  faults("a vote and a barrier", "wait at different barriers", failed,
         [&] { unlike_barriers<<<1, 64>>>(out.data()); });
  faults("shuffles apart", "lanes wait for others|shfl.sync", failed,
         [&] { divergent_shuffle<<<1, 32>>>(out.data(), 16); });
  faults("a mask without oneself", "not in the mask", failed,
         [&] { foreign_mask<<<1, 32>>>(out.data(), 0xFFFF); });
  faults("a lane that takes no part", "from lane 17, which takes no part", failed,
         [&] { foreign_mask<<<1, 17>>>(out.data(), 0xFFFFFFFF); });
  faults("an unknown instruction", "does not know|%smid|line ", cudaErrorIllegalInstruction,
         [&] { unknown<<<1, 1>>>(out.data()); });
  faults("a trap", "a trap", failed, [&] {
    cudaMemset(out.data(), 1, 4);
    traps<<<1, 1>>>(out.data());
  });
  runs("few threads", [&] { bounded<<<1, 64>>>(out.data()); });
  bounded<<<1, 65>>>(out.data());
  require(cudaGetLastError() == cudaErrorInvalidConfiguration, "more threads than launch bounds");
  require(cudaMemcpy(out.data() + 250, in.data(), 28, cudaMemcpyDefault) == cudaErrorInvalidValue,
          "a copy past the end");
  cudaGetLastError();
}

// ---- results ----

__global__ void convert(std::uint32_t* to, std::uint32_t first) {
  const std::uint32_t i = first + blockIdx.x * blockDim.x + threadIdx.x;
  const float x = __uint_as_float(i << 16 | (i * 40503U & 0xFFFF));  // all signs and exponents
  const auto bits = static_cast<std::uint16_t>(i);
  const std::uint32_t made[] = {
      __half_as_ushort(__float2half_rn(x)),
      __bfloat16_as_ushort(__float2bfloat16_rn(x)),
      static_cast<std::uint32_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)),
      static_cast<std::uint32_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)),
      __float_as_uint(__half2float(__ushort_as_half(bits))),
      __float_as_uint(__bfloat162float(__ushort_as_bfloat16(bits))),
      __nv_cvt_fp8_to_halfraw(static_cast<std::uint8_t>(i), __NV_E4M3).x,
      __nv_cvt_fp8_to_halfraw(static_cast<std::uint8_t>(i), __NV_E5M2).x,
      static_cast<std::uint32_t>(__float2int_rn(x)),
      static_cast<std::uint32_t>(__float2int_rd(x)),
      __float2uint_rz(x),
      __float_as_uint(__int2float_rn(static_cast<int>(i * 2654435761U))),
      __float_as_uint(x + 1),
      __float_as_uint(x / 3)};
  for (int n = 0; n < 14; ++n)
    to[n * 65536 + i] = made[n];
}
void check_conversions() {
  device_array<std::uint32_t> out(std::vector<std::uint32_t>(14 * 65536));
  runs("conversions", [&] { convert<<<256, 256>>>(out.data(), 0); });
  const std::vector<std::uint32_t> got = out.host();
  const auto bits_of = [](float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x == x ? bits : 0x7FFFFFFFU;
  };
  int wrong[14] = {};
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const std::uint32_t raw = i << 16 | (i * 40503U & 0xFFFF);
    float x;
    std::memcpy(&x, &raw, 4);
    const __half_raw h{static_cast<unsigned short>(i)};
    const __nv_bfloat16_raw b{static_cast<unsigned short>(i)};
    const auto whole = [&](double v, double least, double most) {
      return static_cast<std::int64_t>(x != x ? 0 : std::fmin(std::fmax(v, least), most));
    };
    const auto half_bits = [](const __half& of) { return static_cast<std::uint32_t>(__half_raw(of).x); };
    std::uint32_t e4_half = __nv_cvt_fp8_to_halfraw(static_cast<std::uint8_t>(i), __NV_E4M3).x;
    std::uint32_t e5_half = __nv_cvt_fp8_to_halfraw(static_cast<std::uint8_t>(i), __NV_E5M2).x;
    if ((e5_half & 0x7FFF) > 0x7C00) e5_half = 0x7FFF;
    const std::uint32_t want[] = {half_bits(__float2half_rn(x)),
                                  static_cast<std::uint32_t>(__nv_bfloat16_raw(__float2bfloat16_rn(x)).x),
                                  __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3),
                                  __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2),
                                  bits_of(__half2float(__half(h))),
                                  bits_of(__bfloat162float(__nv_bfloat16(b))),
                                  e4_half,
                                  e5_half,
                                  static_cast<std::uint32_t>(whole(std::nearbyint(x), -0x1p31, 0x1p31 - 1)),
                                  static_cast<std::uint32_t>(whole(std::floor(x), -0x1p31, 0x1p31 - 1)),
                                  static_cast<std::uint32_t>(whole(std::trunc(x), 0, 0x1p32 - 1)),
                                  bits_of(static_cast<float>(static_cast<int>(i * 2654435761U))),
                                  bits_of(x + 1),
                                  bits_of(x / 3)};
    for (int n = 0; n < 14; ++n) {
      std::uint32_t is = got[n * 65536 + i];
      if (n == 5) is = (is & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFFFFFF : is;  // a shift keeps what a NaN carries
      if (n == 7 && (is & 0x7FFF) > 0x7C00) is = 0x7FFF;
      if (is != want[n] && wrong[n]++ == 0)
        std::printf("conversion %d of %08x: %08x, expected %08x\n", n, n < 4 || n > 7 ? raw : i, is, want[n]);
    }
  }
  for (int n = 0; n < 14; ++n)
    require(wrong[n] == 0, "conversion " + std::to_string(n));
}

__device__ const std::uint16_t table[5] = {3, 1, 4, 1, 5};
__constant__ std::uint32_t factor = 7;
/// Memory of a thread, of a block by an address of any space and of a size that the launch tells, and of the
/// module.
__global__ void spaces(std::uint32_t* to, int step) {
  extern __shared__ std::uint32_t dynamic[];
  __shared__ std::uint32_t fixed[32];
  std::uint32_t own[16];
  for (int i = 0; i < 16; ++i)
    own[i] = threadIdx.x * i;
  fixed[threadIdx.x] = own[(threadIdx.x * step) % 16];
  dynamic[threadIdx.x] = table[(threadIdx.x + step) % 5] * factor;
  __syncthreads();
  std::uint32_t* const some = step % 2 == 0 ? fixed : threadIdx.x % 2 == 0 ? dynamic : fixed;
  const bool is_any = __any_sync(0xFFFFFFFF, threadIdx.x == 9),
             is_all = __all_sync(0xFFFFFFFF, threadIdx.x < step);
  to[threadIdx.x] = some[31 - threadIdx.x] + (is_any ? 100000 : 0) + (is_all ? 1000000 : 0);
}
__global__ void past_dynamic(std::uint32_t* to, int at) {
  extern __shared__ std::uint32_t dynamic[];
  dynamic[at] = 1;
  *to = dynamic[at];
}
__global__ void own_unwritten(std::uint32_t* to, int step) {
  std::uint32_t own[16];
  for (int i = 0; i < 16; i += step)
    own[i] = i;
  *to = own[step / 2 + *to];
}
void check_spaces() {
  device_array<std::uint32_t> out(std::vector<std::uint32_t>(32, 0));
  const std::uint32_t digits[5] = {3, 1, 4, 1, 5};
  for (int step : {3, 4, 33}) {
    runs("spaces", [&] { spaces<<<1, 32, 128>>>(out.data(), step); });
    const std::vector<std::uint32_t> got = out.host();
    bool is_well = true;
    for (int t = 0; t < 32; ++t) {
      const int other = 31 - t;
      const std::uint32_t fixed = other * ((other * step) % 16), dynamic = digits[(other + step) % 5] * 7;
      is_well = is_well && got[t] == (step % 2 != 0 && t % 2 == 0 ? dynamic : fixed) + 100000 +
                                         (step >= 32 ? 1000000 : 0);
    }
    require(is_well, "spaces: step " + std::to_string(step));
  }
  runs("the last of dynamic shared memory", [&] { past_dynamic<<<1, 1, 64>>>(out.data(), 15); });
  faults("past dynamic shared memory", "out of bounds|st.shared", cudaErrorIllegalAddress,
         [&] { past_dynamic<<<1, 1, 64>>>(out.data(), 16); });
  cudaMemset(out.data(), 0, 4);
  faults("a thread's own that it never wrote", "never written|ld.local", cudaErrorLaunchFailure,
         [&] { own_unwritten<<<1, 1>>>(out.data(), 2); });
}

/// As the ISA lays fragments out, from matrices whose rows follow one another.
template <bool Bfloat>
__global__ void product(const std::uint16_t* a, const std::uint16_t* b, float* c) {
  const int group = threadIdx.x / 4, part = threadIdx.x % 4 * 2;
  const auto pair = [](std::uint16_t low, std::uint16_t high) {
    return low | static_cast<std::uint32_t>(high) << 16;
  };
  const auto left = [&](int row, int column) { return pair(a[row * 16 + column], a[row * 16 + column + 1]); };
  const std::uint32_t a0 = left(group, part), a1 = left(group + 8, part), a2 = left(group, part + 8),
                      a3 = left(group + 8, part + 8);
  const std::uint32_t b0 = pair(b[part * 8 + group], b[(part + 1) * 8 + group]),
                      b1 = pair(b[(part + 8) * 8 + group], b[(part + 9) * 8 + group]);
  float d[4] = {1, 2, 3, 4};
  if constexpr (Bfloat) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  for (int n = 0; n < 4; ++n)
    c[(group + n / 2 * 8) * 8 + part + n % 2] = d[n] - n;
}
__global__ void lanes(std::uint32_t* to, const std::uint32_t* from) {
  __shared__ std::uint32_t words[256];
  const unsigned t = threadIdx.x, lane = t % 32;
  const std::uint32_t x = from[t];
  std::uint32_t sum = x;
  for (int step = 16; step > 0; step /= 2)
    sum += __shfl_down_sync(0xFFFFFFFF, sum, step);
  words[t] = __shfl_sync(0xFFFFFFFF, sum, 0) + __shfl_up_sync(0xFFFFFFFF, x, 1, 8);
  __syncthreads();
  std::uint32_t made =
      words[255 - t] ^ __ballot_sync(0xFFFFFFFF, x & 1) ^ __match_any_sync(0xFFFFFFFF, x % 3);
  if (lane < 7) made += __popc(__activemask());  // the lanes of this branch
  for (unsigned turn = 0; turn < lane % 5; ++turn)
    made = made * 3 + __brev(made) + __clz(made);
  made += __reduce_max_sync(0xFFFFFFFF, x) + __byte_perm(x, made, 0x5140) + __funnelshift_l(x, made, lane) +
          __umulhi(x, made);
  to[t] = made + (x % (lane + 1)) + (static_cast<int>(x) / -7);
  atomicAdd(to + 256, x);
  atomicMax(to + 257, x);
  atomicInc(to + 258, 99);
  atomicCAS(to + 259, t, t + 1);
  atomicAdd(reinterpret_cast<float*>(to + 260), 1.0F);
}
void check_lanes() {
  std::vector<std::uint32_t> x(256);
  for (std::uint32_t i = 0; i < 256; ++i)
    x[i] = i * 2654435761U ^ i << 7;
  device_array<std::uint32_t> in(x), out(std::vector<std::uint32_t>(261, 0));
  runs("lanes", [&] { lanes<<<1, 256>>>(out.data(), in.data()); });
  const std::vector<std::uint32_t> got = out.host();
  std::vector<std::uint32_t> words(256);
  for (unsigned t = 0; t < 256; ++t) {
    std::uint32_t sum = 0;
    for (unsigned k = 0; k < 32; ++k)
      sum += x[t / 32 * 32 + k];
    words[t] = sum + x[t % 8 == 0 ? t : t - 1];
  }
  bool is_well = true;
  std::uint32_t total = 0, most = 0;
  for (unsigned t = 0; t < 256; ++t) {
    const unsigned lane = t % 32, base = t / 32 * 32;
    std::uint32_t ballot = 0, same = 0, top = 0;
    for (unsigned k = 0; k < 32; ++k) {
      ballot |= (x[base + k] & 1) << k;
      same |= static_cast<std::uint32_t>(x[base + k] % 3 == x[t] % 3) << k;
      top = std::max(top, x[base + k]);
    }
    std::uint32_t made = words[255 - t] ^ ballot ^ same;
    if (lane < 7) made += 7;
    for (unsigned turn = 0; turn < lane % 5; ++turn) {
      std::uint32_t mirrored = 0, zeros = 0;
      for (unsigned b = 0; b < 32; ++b)
        mirrored |= (made >> b & 1) << (31 - b);
      while (zeros < 32 && (made >> (31 - zeros) & 1) == 0)
        ++zeros;
      made = made * 3 + mirrored + zeros;
    }
    const std::uint32_t a = x[t];
    const std::uint32_t permuted =
        (a & 0xFF) | (made & 0xFF) << 8 | (a >> 8 & 0xFF) << 16 | (made >> 8 & 0xFF) << 24;
    const std::uint32_t shifted = lane == 0 ? made : made << lane | a >> (32 - lane);
    const auto high = static_cast<std::uint32_t>((static_cast<std::uint64_t>(a) * made) >> 32);
    made += top + permuted + shifted + high;
    is_well =
        is_well && got[t] == made + a % (lane + 1) + static_cast<std::uint32_t>(static_cast<int>(a) / -7);
    total += a;
    most = std::max(most, a);
  }
  float count = 0;
  std::memcpy(&count, &got[260], 4);
  require(is_well, "what lanes tell each other");
  require(got[256] == total && got[257] == most && got[258] == 56 && got[259] == 256 && count == 256,
          "atomics");
  std::vector<std::uint16_t> left[2], right[2];
  std::vector<double> a(16 * 16), b(16 * 8);
  for (std::size_t i = 0; i < a.size(); ++i)
    a[i] = static_cast<int>(i * 7 % 17) - 8;
  for (std::size_t i = 0; i < b.size(); ++i)
    b[i] = static_cast<int>(i * 5 % 13) - 6;
  for (const auto* of : {&a, &b}) {
    for (const double v : *of) {
      (of == &a ? left : right)[0].push_back(__half_raw(__float2half_rn(static_cast<float>(v))).x);
      (of == &a ? left : right)[1].push_back(__nv_bfloat16_raw(__float2bfloat16_rn(static_cast<float>(v))).x);
    }
  }
  for (int type = 0; type < 2; ++type) {
    device_array<std::uint16_t> there(left[type]), there_too(right[type]);
    device_array<float> sums(std::vector<float>(128));
    runs("a product", [&] {
      if (type == 0)
        product<false><<<1, 32>>>(there.data(), there_too.data(), sums.data());
      else
        product<true><<<1, 32>>>(there.data(), there_too.data(), sums.data());
    });
    const std::vector<float> made = sums.host();
    bool is_product = true;
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        double sum = 1;
        for (int k = 0; k < 16; ++k)
          sum += a[row * 16 + k] * b[k * 8 + column];
        is_product = is_product && made[row * 8 + column] == sum;
      }
    }
    require(is_product, type == 0 ? "a product of f16" : "a product of bf16");
  }
}

/// The machine finds a host that does not wait.
void check_late() {
  ptx_machine_be_late(1);
  cudaStream_t stream{};
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  std::vector<std::uint32_t> pinned(8, 3);
  cudaHostRegister(pinned.data(), 32, 0);
  device_array<std::uint32_t> out(std::vector<std::uint32_t>(8, 5));
  cudaMemcpyAsync(pinned.data(), out.data(), 32, cudaMemcpyDefault, stream);
  require(pinned[0] == 3, "late: nothing came before the wait");
  cudaStreamSynchronize(stream);
  require(pinned[0] == 5, "late: all came with it");
  // A stream waits for the work that preceded an event in another.
  cudaStream_t other{};
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  cudaEvent_t event{};
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaMemsetAsync(out.data(), 7, 32, stream);
  cudaEventRecord(event, stream);
  require(cudaEventQuery(event) == cudaErrorNotReady, "late: an event is not ready at once");
  cudaStreamWaitEvent(other, event, 0);
  cudaMemcpyAsync(pinned.data(), out.data(), 32, cudaMemcpyDefault, other);
  cudaEventDestroy(event);
  cudaStreamSynchronize(other);
  require(pinned[0] == 0x07070707, "late: a stream waits for an event");
  // A capture executes nothing; each replay executes all of it.
  cudaGraph_t graph{};
  cudaGraphExec_t replay{};
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  one_word<<<3, 1, 0, stream>>>(out.data(), 1);
  std::uint32_t* refused = nullptr;
  std::thread([&] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    require(cudaMalloc(reinterpret_cast<void**>(&refused), 4) == cudaSuccess,
            "a thread that is relaxed ends no capture");
  }).join();
  require(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "a capture");
  cudaGraphInstantiate(&replay, graph, 0);
  for (int i = 0; i < 2; ++i)
    cudaGraphLaunch(replay, stream);
  cudaDeviceSynchronize();
  require(out.host()[0] == 0x07070707 + 2 * 6, "two replays");
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  require(cudaMalloc(reinterpret_cast<void**>(&refused), 4) == cudaErrorStreamCaptureUnsupported,
          "a call that a capture forbids");
  require(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated, "the capture it ended");
  ptx_machine_forget_fault();
  cudaStreamDestroy(other);
  cudaHostUnregister(pinned.data());
  cudaStreamDestroy(stream);
  ptx_machine_be_late(0);
}

}  // namespace

int main() {
  check_faults();
  check_conversions();
  check_spaces();
  check_lanes();
  check_late();
  std::printf("%llu checks of the machine, %d failed\n", checks.made(), checks.failed());
  return checks.status();
}
