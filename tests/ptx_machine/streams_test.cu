// What the machine's scheduler must allow, and what it must find. Each rule of streams has a program that
// keeps it, which must come out right at once, late, and with every seed, and one that breaks it, which some
// seed must find: by a wrong byte or by a fault. Then what CUDA says of captures, pools and errors.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ptx_machine/checks.cuh"
#include "support/seeds.hpp"

namespace {

llmmem_tests::counted_checks checks;
void require(bool is, const std::string& what) {
  checks.require(is, what);
}
/// Whether the last fault has both texts; forgets it.
bool told_of(const char* one, const char* other) {
  const std::string last = ptx_machine_last_fault();
  ptx_machine_forget_fault();
  return last.find(one) != std::string::npos && last.find(other) != std::string::npos;
}

__global__ void add(std::uint8_t* to, const std::uint8_t* from, int what) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  to[at] = static_cast<std::uint8_t>(from[at] + what);
}

constexpr std::size_t size = 1024;

/// Two streams that the legacy default stream does not wait for, an event each, and memory of every kind.
struct world {
  cudaStream_t a{}, b{};
  cudaEvent_t of_a{}, of_b{};
  std::uint8_t* one = nullptr;     // of the device, all 1
  std::uint8_t* two = nullptr;     // all 2
  std::uint8_t* pinned = nullptr;  // all 3
  std::uint8_t* result = nullptr;  // pinned, all 4
  std::vector<std::uint8_t> paged = std::vector<std::uint8_t>(size, 5);

  world() {
    cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&of_a, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&of_b, cudaEventDisableTiming);
    cudaMalloc(reinterpret_cast<void**>(&one), size);
    cudaMalloc(reinterpret_cast<void**>(&two), size);
    cudaMallocHost(reinterpret_cast<void**>(&pinned), size);
    cudaMallocHost(reinterpret_cast<void**>(&result), size);
    cudaMemset(one, 1, size);
    cudaMemset(two, 2, size);
    std::memset(pinned, 3, size);
    std::memset(result, 4, size);
    cudaDeviceSynchronize();
  }
  world(const world&) = delete;
  ~world() {
    cudaDeviceSynchronize();
    ptx_machine_forget_fault();
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    cudaEventDestroy(of_a);
    cudaEventDestroy(of_b);
    cudaFree(one);
    cudaFree(two);
    cudaFreeHost(pinned);
    cudaFreeHost(result);
  }
  void up(std::uint8_t* to, const std::uint8_t* from, cudaStream_t on) {
    cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, on);
  }
  void b_waits_for_a() {
    cudaEventRecord(of_a, a);
    cudaStreamWaitEvent(b, of_a, 0);
  }
  /// Whether all bytes of memory of the host are `value`.
  static bool are(const std::uint8_t* at, int value) {
    for (std::size_t i = 0; i < size; ++i)
      if (at[i] != value) return false;
    return true;
  }
  /// The same of the device, once all is done.
  bool are_there(const std::uint8_t* at, int value) {
    if (cudaDeviceSynchronize() != cudaSuccess) return false;
    std::vector<std::uint8_t> here(size);
    return cudaMemcpy(here.data(), at, size, cudaMemcpyDeviceToHost) == cudaSuccess &&
           are(here.data(), value);
  }
};

enum class keeps { yes, no };

/// A rule, and a program that keeps it or does not. It tells whether all came out as the program wants it.
struct rule {
  const char* name;
  bool (*run)(world&, keeps);
};

cudaError_t pool_memory(std::uint8_t** to, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(to), size, stream);
}

struct flagged {
  std::uint8_t* at;
  int value;
};
void set_flag(void* of) {
  std::memset(static_cast<flagged*>(of)->at, static_cast<flagged*>(of)->value, size);
}

const rule rules[] = {
    {"a stream waits for an event of another before it reads what that writes",
     [](world& w, keeps how) {
       w.up(w.one, w.pinned, w.a);
       if (how == keeps::yes) w.b_waits_for_a();
       w.up(w.result, w.one, w.b);
       cudaStreamSynchronize(w.b);
       return w.are(w.result, 3);
     }},
    {"a stream waits for an event of another before it writes what that reads",
     [](world& w, keeps how) {
       w.up(w.result, w.one, w.a);
       if (how == keeps::yes) w.b_waits_for_a();
       cudaMemsetAsync(w.one, 7, size, w.b);
       return cudaDeviceSynchronize() == cudaSuccess && w.are(w.result, 1);
     }},
    {"a kernel waits for the copies of another stream",
     [](world& w, keeps how) {
       w.up(w.one, w.pinned, w.a);
       if (how == keeps::yes) w.b_waits_for_a();
       add<<<size / 128, 128, 0, w.b>>>(w.two, w.one, 10);
       return w.are_there(w.two, 13);
     }},
    {"an event is waited for behind its record, not before",
     [](world& w, keeps how) {
       cudaEventRecord(w.of_a, w.a);
       if (how == keeps::no) cudaStreamWaitEvent(w.b, w.of_a, 0);
       w.up(w.one, w.pinned, w.a);
       cudaEventRecord(w.of_a, w.a);
       if (how == keeps::yes) cudaStreamWaitEvent(w.b, w.of_a, 0);
       w.up(w.result, w.one, w.b);
       cudaStreamSynchronize(w.b);
       return w.are(w.result, 3);
     }},
    {"the host waits before it reads pinned memory",
     [](world& w, keeps how) {
       w.up(w.result, w.one, w.a);
       if (how == keeps::yes) cudaStreamSynchronize(w.a);
       return w.are(w.result, 1);
     }},
    {"the host waits for the stream that has the work, not for another",
     [](world& w, keeps how) {
       w.up(w.result, w.one, w.a);
       cudaMemsetAsync(w.two, 7, size, w.b);
       cudaStreamSynchronize(how == keeps::yes ? w.a : w.b);
       return w.are(w.result, 1);
     }},
    {"the host polls an event that is recorded behind the copy, not before it",
     [](world& w, keeps how) {
       cudaMemsetAsync(w.one, 8, size, w.a);
       if (how == keeps::no) cudaEventRecord(w.of_a, w.a);
       w.up(w.result, w.one, w.a);
       if (how == keeps::yes) cudaEventRecord(w.of_a, w.a);
       while (cudaEventQuery(w.of_a) == cudaErrorNotReady) {
       }
       return w.are(w.result, 8);
     }},
    {"a stream that is polled until it has nothing left has done all",
     [](world& w, keeps how) {
       w.up(w.result, w.one, w.a);
       while (cudaStreamQuery(how == keeps::yes ? w.a : w.b) == cudaErrorNotReady) {
       }
       return w.are(w.result, 1);
     }},
    {"a staging buffer is written again behind the copy that reads it",
     [](world& w, keeps how) {
       w.up(w.one, w.pinned, w.a);
       cudaEventRecord(w.of_a, w.a);
       if (how == keeps::yes) cudaEventSynchronize(w.of_a);
       std::memset(w.pinned, 9, size);
       return w.are_there(w.one, 3);
     }},
    {"a slot of a ring is written again behind its own event, not that of the slot before",
     [](world& w, keeps how) {
       w.up(w.one, w.pinned, w.a);
       cudaEventRecord(w.of_a, w.a);
       w.up(w.two, w.result, w.a);
       cudaEventRecord(w.of_b, w.a);
       cudaEventSynchronize(how == keeps::yes ? w.of_b : w.of_a);
       std::memset(w.result, 9, size);
       return w.are_there(w.two, 4) && w.are_there(w.one, 3);
     }},
    {"a kernel has read pinned memory before the host writes there",
     [](world& w, keeps how) {
       add<<<size / 128, 128, 0, w.a>>>(w.one, w.pinned, 1);
       if (how == keeps::yes) cudaStreamSynchronize(w.a);
       std::memset(w.pinned, 9, size);
       return w.are_there(w.one, 4);
     }},
    {"work of the legacy default stream comes before what a blocking stream is given behind it",
     [](world& w, keeps how) {
       cudaStream_t stream{};
       cudaStreamCreateWithFlags(&stream, how == keeps::yes ? cudaStreamDefault : cudaStreamNonBlocking);
       cudaMemcpyAsync(w.one, w.pinned, size, cudaMemcpyDefault, nullptr);
       w.up(w.result, w.one, stream);
       cudaStreamSynchronize(stream);
       const bool is_well = w.are(w.result, 3);
       cudaStreamDestroy(stream);
       return is_well;
     }},
    {"work of a blocking stream comes before what the legacy default stream is given behind it",
     [](world& w, keeps how) {
       cudaStream_t stream{};
       cudaStreamCreateWithFlags(&stream, how == keeps::yes ? cudaStreamDefault : cudaStreamNonBlocking);
       w.up(w.one, w.pinned, stream);
       cudaMemcpyAsync(w.result, w.one, size, cudaMemcpyDefault, nullptr);
       cudaStreamDestroy(stream);
       cudaStreamSynchronize(nullptr);
       return w.are(w.result, 3);
     }},
    {"blocking streams wait for the legacy default stream, and not for each other",
     [](world& w, keeps how) {
       cudaStream_t streams[2]{};
       for (cudaStream_t& each : streams)
         cudaStreamCreate(&each);
       w.up(w.one, w.pinned, streams[0]);
       if (how == keeps::yes) cudaMemsetAsync(w.two, 6, size, nullptr);
       w.up(w.result, w.one, streams[1]);
       cudaStreamSynchronize(streams[1]);
       const bool is_well = w.are(w.result, 3);
       for (cudaStream_t each : streams)
         cudaStreamDestroy(each);
       return is_well;
     }},
    {"a copy from pageable memory has read it, and may not have written, when it returns",
     [](world& w, keeps how) {
       w.up(w.one, w.paged.data(), w.a);
       std::fill(w.paged.begin(), w.paged.end(), std::uint8_t{9});
       if (how == keeps::yes) w.b_waits_for_a();
       w.up(w.result, w.one, w.b);
       cudaStreamSynchronize(w.b);
       return w.are(w.result, 5);
     }},
    {"cudaMemcpy from pageable memory may return before another stream finds it there",
     [](world& w, keeps how) {
       cudaMemcpy(w.one, w.paged.data(), size, cudaMemcpyHostToDevice);
       if (how == keeps::yes) cudaStreamSynchronize(nullptr);
       w.up(w.result, w.one, w.b);
       cudaStreamSynchronize(w.b);
       return w.are(w.result, 5);
     }},
    {"a copy into pageable memory is over when it returns, one into pinned memory is not",
     [](world& w, keeps how) {
       std::uint8_t* const to = how == keeps::yes ? w.paged.data() : w.result;
       w.up(to, w.one, w.a);
       return w.are(to, 1);
     }},
    {"cudaMemcpy between two places of the device does not wait",
     [](world& w, keeps how) {
       cudaMemcpy(w.one, w.two, size, cudaMemcpyDeviceToDevice);
       if (how == keeps::yes) cudaDeviceSynchronize();
       w.up(w.result, w.one, w.b);
       cudaStreamSynchronize(w.b);
       return w.are(w.result, 2);
     }},
    {"memory of a pool is used behind the operation that allocates it",
     [](world& w, keeps how) {
       std::uint8_t* made = nullptr;
       pool_memory(&made, w.a);
       if (how == keeps::yes) w.b_waits_for_a();
       add<<<size / 128, 128, 0, w.b>>>(made, w.one, 1);
       w.up(w.result, made, w.b);
       const bool is_well = cudaStreamSynchronize(w.b) == cudaSuccess && w.are(w.result, 2);
       if (is_well) cudaFreeAsync(made, w.b);
       return is_well;
     }},
    {"memory of a pool is freed behind the kernels that use it",
     [](world& w, keeps how) {
       std::uint8_t* made = nullptr;
       pool_memory(&made, w.a);
       add<<<size / 128, 128, 0, w.a>>>(made, w.one, 1);
       if (how == keeps::yes) w.b_waits_for_a();
       const bool is_taken = cudaFreeAsync(made, w.b) == cudaSuccess;
       return cudaDeviceSynchronize() == cudaSuccess && is_taken;
     }},
    {"memory of a pool is not used behind its free",
     [](world& w, keeps how) {
       std::uint8_t* made = nullptr;
       pool_memory(&made, w.a);
       cudaMemsetAsync(made, 6, size, w.a);
       cudaEventRecord(w.of_a, w.a);
       cudaStreamWaitEvent(w.b, w.of_a, 0);
       if (how == keeps::no) cudaFreeAsync(made, w.a);
       add<<<size / 128, 128, 0, w.b>>>(w.one, made, 1);
       if (how == keeps::yes) cudaFreeAsync(made, w.b);
       return w.are_there(w.one, 7);
     }},
    {"what a pool gives again is not what another stream still reads",
     [](world& w, keeps how) {
       std::uint8_t* first = nullptr;
       std::uint8_t* second = nullptr;
       pool_memory(&first, w.a);
       w.up(first, w.pinned, w.a);
       w.b_waits_for_a();
       w.up(w.result, first, w.b);
       if (how == keeps::yes) {
         cudaEventRecord(w.of_b, w.b);
         cudaStreamWaitEvent(w.a, w.of_b, 0);
       }
       cudaFreeAsync(first, w.a);
       pool_memory(&second, w.a);
       cudaMemsetAsync(second, 6, size, w.a);
       cudaFreeAsync(second, w.a);
       return cudaDeviceSynchronize() == cudaSuccess && first != second && w.are(w.result, 3);
     }},
    {"cudaFree waits for the device",
     [](world& w, keeps how) {
       std::uint8_t* made = nullptr;
       cudaMalloc(reinterpret_cast<void**>(&made), size);
       w.up(made, w.pinned, w.a);
       w.up(w.result, made, w.a);
       how == keeps::yes ? cudaFree(made) : cudaFreeAsync(made, w.b);
       return cudaDeviceSynchronize() == cudaSuccess && w.are(w.result, 3);
     }},
    {"memory of the host is registered as long as a copy may use it",
     [](world& w, keeps how) {
       std::vector<std::uint8_t> host(size, 8);
       cudaHostRegister(host.data(), size, cudaHostRegisterDefault);
       w.up(w.one, host.data(), w.a);
       if (how == keeps::yes) cudaStreamSynchronize(w.a);
       const bool is_taken = cudaHostUnregister(host.data()) == cudaSuccess;
       cudaDeviceSynchronize();
       if (!is_taken) {
         ptx_machine_forget_fault();
         cudaHostUnregister(host.data());
       }
       return is_taken && w.are_there(w.one, 8);
     }},
    {"pinned memory is freed behind the kernels that read it",
     [](world& w, keeps how) {
       std::uint8_t* host = nullptr;
       cudaMallocHost(reinterpret_cast<void**>(&host), size);
       std::memset(host, 8, size);
       add<<<size / 128, 128, 0, w.a>>>(w.one, host, 1);
       if (how == keeps::yes) cudaStreamSynchronize(w.a);
       const bool is_taken = cudaFreeHost(host) == cudaSuccess;
       cudaDeviceSynchronize();
       if (!is_taken) {
         ptx_machine_forget_fault();
         cudaFreeHost(host);
       }
       return is_taken && w.are_there(w.one, 9);
     }},
    {"a host function is called in the order of its stream",
     [](world& w, keeps how) {
       flagged to{w.pinned, 6};
       w.up(w.one, w.pinned, w.a);
       cudaLaunchHostFunc(w.a, set_flag, &to);
       w.up(w.two, w.pinned, w.a);
       if (how == keeps::yes) cudaStreamSynchronize(w.a);
       const bool is_well = w.are(w.pinned, 6);
       return w.are_there(w.one, 3) && w.are_there(w.two, 6) && is_well;
     }},
    {"a stream that is destroyed does its work all the same, whenever",
     [](world& w, keeps how) {
       cudaStream_t stream{};
       cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
       w.up(w.result, w.one, stream);
       cudaStreamDestroy(stream);
       if (how == keeps::yes) cudaDeviceSynchronize();
       return w.are(w.result, 1);
     }},
    {"the branches of a graph are joined by events",
     [](world& w, keeps how) {
       cudaGraph_t graph{};
       cudaGraphExec_t replay{};
       cudaStreamBeginCapture(w.a, cudaStreamCaptureModeGlobal);
       w.up(w.one, w.pinned, w.a);
       w.b_waits_for_a();
       add<<<size / 128, 128, 0, w.a>>>(w.two, w.one, 1);
       cudaEventRecord(w.of_a, w.a);
       // Of b: right only behind the kernel, which is in a branch of its own.
       if (how == keeps::yes) cudaStreamWaitEvent(w.b, w.of_a, 0);
       w.up(w.result, w.two, w.b);
       cudaEventRecord(w.of_b, w.b);
       cudaStreamWaitEvent(w.a, w.of_b, 0);
       if (cudaStreamEndCapture(w.a, &graph) != cudaSuccess) return false;
       cudaGraphInstantiate(&replay, graph, 0);
       cudaGraphLaunch(replay, w.a);
       cudaStreamSynchronize(w.a);
       cudaGraphExecDestroy(replay);
       cudaGraphDestroy(graph);
       return w.are(w.result, 4);
     }},
    {"a graph reads pinned memory when it is launched, not when it is captured",
     [](world& w, keeps how) {
       cudaGraph_t graph{};
       cudaGraphExec_t replay{};
       cudaStreamBeginCapture(w.a, cudaStreamCaptureModeGlobal);
       w.up(w.one, w.pinned, w.a);
       add<<<size / 128, 128, 0, w.a>>>(w.two, w.one, 1);
       if (cudaStreamEndCapture(w.a, &graph) != cudaSuccess) return false;
       cudaGraphInstantiate(&replay, graph, 0);
       std::memset(w.pinned, 7, size);
       cudaGraphLaunch(replay, w.a);
       if (how == keeps::yes) cudaStreamSynchronize(w.a);
       std::memset(w.pinned, 20, size);
       const bool is_well = w.are_there(w.two, 8);
       cudaGraphLaunch(replay, w.a);
       cudaGraphLaunch(replay, w.b);  // behind the launch before, of whatever stream
       const bool is_again = w.are_there(w.two, 21);
       cudaGraphExecDestroy(replay);
       cudaGraphDestroy(graph);
       return is_well && is_again;
     }},
    {"pieces of a batch are in no order among themselves",
     [](world& w, keeps how) {
       // The second piece reads what the first writes.
       void* to[] = {w.one, w.two};
       const void* from[] = {w.pinned, w.one};
       std::size_t bytes[] = {size, size};
       cudaMemcpyAttributes attributes{};
       attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
       std::size_t first = 0;
       if (how == keeps::no) {
         if (cudaMemcpyBatchAsync(to, from, bytes, 2, &attributes, &first, 1, w.a) != cudaSuccess)
           return true;
       } else {
         for (int i = 0; i < 2; ++i)
           cudaMemcpyBatchAsync(to + i, from + i, bytes + i, 1, &attributes, &first, 1, w.a);
       }
       return w.are_there(w.two, 3);
     }},
};

enum class outcome { right, wrong };
outcome run(const rule& which, keeps how) {
  world w;
  const bool is_well = which.run(w, how);
  return is_well && cudaDeviceSynchronize() == cudaSuccess ? outcome::right : outcome::wrong;
}

void check_rules() {
  const std::uint64_t most = llmmem_tests::number_from_environment("LLMMEM_TEST_WORLDS", 1000);
  for (const rule& each : rules) {
    ptx_machine_use_seed(0);
    require(run(each, keeps::yes) == outcome::right, std::string(each.name) + ": at once");
    ptx_machine_be_late(1);
    require(run(each, keeps::yes) == outcome::right, std::string(each.name) + ": late");
    std::uint64_t wrong = 0;
    for (std::uint64_t seed = 1; seed <= most && wrong == 0; ++seed) {
      ptx_machine_use_seed(seed);
      if (run(each, keeps::yes) == outcome::wrong) wrong = seed;
    }
    require(wrong == 0, std::string(each.name) + ": right, but not with seed " + std::to_string(wrong));
    int found = 0;
    std::uint64_t first = 0;
    for (std::uint64_t seed = 1; seed <= 50; ++seed) {
      ptx_machine_use_seed(seed);
      if (run(each, keeps::no) == outcome::right) continue;
      ++found;
      if (first == 0) first = seed;
    }
    require(found != 0, std::string(each.name) + ": no seed finds a program that breaks it");
    std::printf("%2d of 50 seeds, the first %llu: %s\n", found, static_cast<unsigned long long>(first),
                each.name);
  }
  ptx_machine_use_seed(0);
}

/// Without order a copy of 1,024 bytes is found half done.
void check_halves() {
  int halves = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    ptx_machine_use_seed(seed);
    world w;
    w.up(w.one, w.pinned, w.a);
    w.up(w.result, w.one, w.b);
    cudaStreamSynchronize(w.b);
    int come = 0;
    for (std::size_t i = 0; i < size; ++i)
      come += w.result[i] == 3 ? 1 : 0;
    halves += come != 0 && come != static_cast<int>(size) ? 1 : 0;
  }
  require(halves != 0, "no seed finds a copy half done");
  std::printf("%d of 200 seeds find a copy half done\n", halves);
  ptx_machine_use_seed(0);
}

/// How often the host asks until all is done, and what it finds on the way.
std::vector<std::uint32_t> trace(std::uint64_t seed) {
  ptx_machine_use_seed(seed);
  world w;
  std::vector<std::uint32_t> all;
  for (int i = 0; i < 8; ++i) {
    add<<<size / 128, 128, 0, i % 2 == 0 ? w.a : w.b>>>(w.one, w.two, i);
    w.up(w.result, w.one, i % 3 == 0 ? w.a : w.b);
    all.push_back(w.result[0] + 256U * w.result[size - 1]);
  }
  cudaEventRecord(w.of_b, w.b);
  std::uint32_t asked = 0;
  while (cudaEventQuery(w.of_b) == cudaErrorNotReady)
    ++asked;
  all.push_back(asked);
  return all;
}
void check_seeds() {
  std::size_t differ = 0;
  bool is_same = true, is_bounded = true;
  const std::vector<std::uint32_t> one = trace(1);
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const std::vector<std::uint32_t> first = trace(seed);
    is_same = is_same && first == trace(seed);
    is_bounded = is_bounded && first.back() <= 200;
    differ += first == one ? 0 : 1;
  }
  require(is_same, "one seed decides alike each time");
  require(is_bounded, "a host that polls gets on");
  require(differ > 100, "seeds differ");
  ptx_machine_use_seed(0);
}

/// Both calls are named.
void check_faults() {
  ptx_machine_be_late(1);
  {
    world w;
    std::uint8_t* made = nullptr;
    pool_memory(&made, w.a);
    w.up(made, w.pinned, w.a);
    require(
        cudaFreeAsync(made, w.b) == cudaErrorIllegalAddress && told_of("cudaFreeAsync", "cudaMemcpyAsync"),
        "a free on a stream that nothing orders behind a copy");
    cudaDeviceSynchronize();
    cudaFreeAsync(made, w.a);
    cudaMemsetAsync(made, 1, size, w.a);
    require(told_of("cudaMemsetAsync", "cudaFreeAsync"), "a fill of what was given to cudaFreeAsync");
    require(cudaFreeAsync(made, w.a) == cudaErrorInvalidValue, "memory is freed once");
    cudaGetLastError();
  }
  {
    world w;
    w.up(w.one, w.pinned, w.a);
    require(cudaFreeHost(w.pinned) == cudaErrorIllegalAddress && told_of("cudaFreeHost", "cudaMemcpyAsync"),
            "pinned memory that a copy reads is freed");
    std::vector<std::uint8_t> host(size);
    cudaHostRegister(host.data(), size, 0);
    add<<<1, 32, 0, w.a>>>(w.one, host.data(), 1);
    require(
        cudaHostUnregister(host.data()) == cudaErrorIllegalAddress && told_of("cudaHostUnregister", "kernel"),
        "memory that a kernel reads is unregistered");
    cudaDeviceSynchronize();
    require(cudaHostUnregister(host.data()) == cudaSuccess, "behind the kernel it is not a fault");
  }
  {
    using granularity_call = CUresult(size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags);
    const auto find = [](const char* name) {
      void* entry = nullptr;
      cudaDriverEntryPointQueryResult how{};
      cudaGetDriverEntryPointByVersion(name, &entry, 10020, cudaEnableDefault, &how);
      return entry;
    };
    world w;
    size_t unit = 0;
    CUdeviceptr at = 0;
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp what{};
    CUmemAccessDesc how{};
    how.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    reinterpret_cast<granularity_call*>(find("cuMemGetAllocationGranularity"))(
        &unit, &what, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    reinterpret_cast<decltype(&cuMemAddressReserve)>(find("cuMemAddressReserve"))(&at, unit, 0, 0, 0);
    reinterpret_cast<decltype(&cuMemCreate)>(find("cuMemCreate"))(&handle, unit, &what, 0);
    reinterpret_cast<decltype(&cuMemMap)>(find("cuMemMap"))(at, unit, 0, handle, 0);
    reinterpret_cast<decltype(&cuMemSetAccess)>(find("cuMemSetAccess"))(at, unit, &how, 1);
    const auto unmap = reinterpret_cast<decltype(&cuMemUnmap)>(find("cuMemUnmap"));
    cudaMemsetAsync(reinterpret_cast<void*>(at), 1, size, w.a);
    require(unmap(at, unit) != CUDA_SUCCESS && told_of("cuMemUnmap", "cudaMemsetAsync"),
            "memory that a fill writes is unmapped");
    cudaDeviceSynchronize();
    require(unmap(at, unit) == CUDA_SUCCESS, "behind the fill it is not a fault");
    const auto share =
        reinterpret_cast<decltype(&cuMemExportToShareableHandle)>(find("cuMemExportToShareableHandle"));
    int file = 0;
    require(share(&file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_ERROR_NOT_SUPPORTED,
            "handles are not exported");
    reinterpret_cast<decltype(&cuMemRelease)>(find("cuMemRelease"))(handle);
    reinterpret_cast<decltype(&cuMemAddressFree)>(find("cuMemAddressFree"))(at, unit);
  }
  ptx_machine_be_late(0);
}

void check_captures() {
  world w;
  cudaGraph_t graph{};
  const auto begin = [&](cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    return cudaStreamBeginCapture(stream, mode);
  };
  const auto end = [&](cudaStream_t stream) {
    const cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (status == cudaSuccess) cudaGraphDestroy(graph);
    cudaGetLastError();
    return status;
  };
  const auto status_of = [](cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    cudaStreamIsCapturing(stream, &status);
    return status;
  };

  require(begin(nullptr) == cudaErrorStreamCaptureUnsupported, "the legacy default stream is not captured");
  require(end(w.a) == cudaErrorIllegalState, "no capture ends that did not begin");
  // A stream joins by an event, and has to be joined again.
  begin(w.a);
  require(begin(w.a) == cudaErrorIllegalState, "a capture begins once");
  w.up(w.one, w.pinned, w.a);
  w.b_waits_for_a();
  require(status_of(w.b) == cudaStreamCaptureStatusActive,
          "a stream that waits for an event of a capture is of it");
  w.up(w.two, w.one, w.b);
  require(end(w.a) == cudaErrorStreamCaptureUnjoined, "a branch that is not joined");
  require(status_of(w.b) == cudaStreamCaptureStatusNone, "it ends for all of its streams");
  begin(w.a);
  w.b_waits_for_a();
  require(end(w.a) == cudaSuccess, "a branch of nothing is joined");
  begin(w.a);
  w.b_waits_for_a();
  require(end(w.b) == cudaErrorStreamCaptureUnmatched, "a capture ends at the stream that it began with");
  require(end(w.a) == cudaErrorStreamCaptureInvalidated, "and is lost by that");
  // What crosses the capture's bounds.
  cudaMemsetAsync(w.two, 2, size, w.b);
  cudaEventRecord(w.of_b, w.b);
  begin(w.a);
  require(cudaStreamWaitEvent(w.a, w.of_b, 0) == cudaErrorStreamCaptureIsolation, "an event from outside");
  require(status_of(w.a) == cudaStreamCaptureStatusInvalidated, "it is lost by that");
  require(cudaMemsetAsync(w.one, 1, size, w.a) == cudaErrorStreamCaptureInvalidated, "and takes no more");
  require(end(w.a) == cudaErrorStreamCaptureInvalidated, "as its end tells");
  begin(w.a);
  cudaEventRecord(w.of_a, w.a);
  require(cudaEventQuery(w.of_a) == cudaErrorStreamCaptureUnsupported,
          "to ask an event ends the thread's capture");
  end(w.a);
  begin(w.a, cudaStreamCaptureModeRelaxed);
  cudaEventRecord(w.of_a, w.a);
  require(cudaEventQuery(w.of_a) == cudaErrorCapturedEvent, "an event of a capture cannot be asked");
  require(cudaEventSynchronize(w.of_a) == cudaErrorCapturedEvent, "nor waited for");
  require(cudaStreamSynchronize(w.a) == cudaErrorStreamCaptureUnsupported, "nor the stream");
  end(w.a);
  require(cudaStreamWaitEvent(w.b, w.of_a, 0) == cudaErrorCapturedEvent, "nor behind the capture's end");
  begin(w.a);
  begin(w.b);
  cudaEventRecord(w.of_a, w.a);
  require(cudaStreamWaitEvent(w.b, w.of_a, 0) == cudaErrorStreamCaptureMerge, "two captures are not joined");
  end(w.a);
  end(w.b);
  // Threads, and the legacy default stream.
  begin(w.a);
  std::thread([&] {
    require(end(w.a) == cudaErrorStreamCaptureWrongThread, "a capture ends in the thread that began it");
  }).join();
  end(w.a);
  void* bytes = nullptr;
  begin(w.a, cudaStreamCaptureModeThreadLocal);
  std::thread([&] {
    require(cudaMalloc(&bytes, 4) == cudaSuccess, "of thread-local captures other threads are not kept");
  }).join();
  require(cudaFree(bytes) == cudaErrorStreamCaptureUnsupported, "the thread itself is");
  end(w.a);
  cudaFree(bytes);
  begin(w.a);
  std::thread([&] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    cudaThreadExchangeStreamCaptureMode(&mode);
    require(mode == cudaStreamCaptureModeGlobal && cudaMalloc(&bytes, 4) == cudaSuccess,
            "a thread of the thread-local mode heeds its own captures alone");
    cudaFree(bytes);
  }).join();
  require(end(w.a) == cudaSuccess, "which ends no other's");
  cudaStream_t blocking{};
  cudaStreamCreate(&blocking);
  begin(blocking);
  cudaStreamCaptureStatus status{};
  require(cudaStreamIsCapturing(nullptr, &status) == cudaErrorStreamCaptureImplicit,
          "the legacy default stream cannot be asked beside a blocking stream's capture");
  require(status_of(blocking) == cudaStreamCaptureStatusActive, "which ends nothing");
  require(cudaMemsetAsync(w.one, 1, size, nullptr) == cudaErrorStreamCaptureImplicit,
          "nor be given anything");
  require(end(blocking) == cudaErrorStreamCaptureInvalidated, "which does");
  cudaStreamDestroy(blocking);
  // Each has its number.
  unsigned long long first = 0, second = 0;
  begin(w.a);
  begin(w.b);
#if CUDART_VERSION >= 13000
  cudaStreamGetCaptureInfo(w.a, &status, &first, nullptr, nullptr, nullptr, nullptr);
  cudaStreamGetCaptureInfo(w.b, &status, &second, nullptr, nullptr, nullptr, nullptr);
#else
  cudaStreamGetCaptureInfo_v2(w.a, &status, &first, nullptr, nullptr, nullptr);
  cudaStreamGetCaptureInfo_v2(w.b, &status, &second, nullptr, nullptr, nullptr);
#endif
  require(status == cudaStreamCaptureStatusActive && first != 0 && second != 0 && first != second,
          "captures have numbers");
  // A batch is refused; the graph goes on without it.
  void* to[] = {w.one};
  const void* from[] = {w.two};
  std::size_t count = size, at = 0;
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  require(cudaMemcpyBatchAsync(to, from, &count, 1, &attributes, &at, 1, w.a) ==
              cudaErrorStreamCaptureUnsupported,
          "a batch is not captured");
  require(status_of(w.a) == cudaStreamCaptureStatusActive, "the capture goes on");
  require(end(w.a) == cudaSuccess && end(w.b) == cudaSuccess, "without it");
  require(cudaMemcpyBatchAsync(to, from, &count, 1, &attributes, &at, 1, cudaStreamLegacy) ==
              cudaErrorInvalidValue,
          "nor given to the legacy default stream");
  cudaGetLastError();
}

void call_cuda(void* status) {
  void* bytes = nullptr;
  *static_cast<cudaError_t*>(status) = cudaMalloc(&bytes, 4);
}
void after(cudaStream_t, cudaError_t status, void* to) {
  *static_cast<cudaError_t*>(to) = status;
}

void check_calls() {
  world w;
  size_t free = 0, free_now = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  cudaMemPool_t pool{};
  cudaMemPoolProps properties{};
  cudaMemPoolCreate(&pool, &properties);
  std::uint64_t all = ~std::uint64_t{0}, value = 0;
  cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all);
  const auto get = [&](cudaMemPoolAttr which) {
    return cudaMemPoolGetAttribute(pool, which, &value) == cudaSuccess ? value : 7;
  };
  require(get(cudaMemPoolAttrReleaseThreshold) == all, "a pool keeps its threshold");
  void* bytes = nullptr;
  ptx_machine_be_late(1);
  cudaMallocFromPoolAsync(&bytes, 3 << 20, pool, w.a);
  cudaMemGetInfo(&free_now, &total);
  require(free - free_now == 3 << 20, "memory is taken before its stream gets there");
  require(get(cudaMemPoolAttrUsedMemCurrent) == 3 << 20 && get(cudaMemPoolAttrReservedMemCurrent) == 4 << 20,
          "a pool counts what it gave out, and what it holds");
  cudaFreeAsync(bytes, w.a);
  require(get(cudaMemPoolAttrUsedMemCurrent) == 3 << 20, "until its stream has freed it");
  cudaStreamSynchronize(w.a);
  require(get(cudaMemPoolAttrUsedMemCurrent) == 0 && get(cudaMemPoolAttrUsedMemHigh) == 3 << 20, "then not");
  require(get(cudaMemPoolAttrReservedMemCurrent) == 4 << 20, "a pool keeps what it holds");
  cudaMemPoolTrimTo(pool, 0);
  require(get(cudaMemPoolAttrReservedMemCurrent) == 0, "until it is trimmed");
  ptx_machine_be_late(0);
  require(cudaMemPoolDestroy(pool) == cudaSuccess && cudaMemPoolDestroy(pool) == cudaErrorInvalidValue,
          "a pool ends once");
  require(cudaMallocFromPoolAsync(&bytes, 4, pool, w.a) == cudaErrorInvalidValue,
          "and gives out nothing then");

  cudaPointerAttributes what{};
  cudaPointerGetAttributes(&what, w.one + 3);
  require(what.type == cudaMemoryTypeDevice, "memory of the device");
  cudaPointerGetAttributes(&what, w.pinned);
  require(what.type == cudaMemoryTypeHost, "pinned memory");
  cudaPointerGetAttributes(&what, w.paged.data());
  require(what.type == cudaMemoryTypeUnregistered, "other memory of the host");
  require(cudaMallocManaged(&bytes, 4, cudaMemAttachGlobal) == cudaErrorNotSupported, "no managed memory");
  require(cudaMemcpyPeerAsync(w.one, 0, w.two, 0, size, w.a) == cudaSuccess && w.are_there(w.one, 2),
          "a copy to the only peer there is");
  require(cudaHostRegister(w.pinned + 100, 8, 0) == cudaErrorHostMemoryAlreadyRegistered,
          "memory is registered once");
  require(cudaMemcpy(w.one, w.pinned, size + 1, cudaMemcpyDefault) == cudaErrorInvalidValue,
          "a copy past a registration");
  cudaError_t inside = cudaSuccess, behind = cudaErrorUnknown;
  cudaLaunchHostFunc(w.a, call_cuda, &inside);
  cudaStreamAddCallback(w.a, after, &behind, 0);
  cudaStreamSynchronize(w.a);
  require(inside == cudaErrorNotPermitted && behind == cudaSuccess, "a host function calls nothing of CUDA");
  require(std::string(cudaGetErrorName(cudaErrorIllegalState)) == "cudaErrorIllegalState",
          "errors have names");
  cudaStream_t gone{};
  cudaStreamCreate(&gone);
  cudaStreamDestroy(gone);
  require(cudaStreamSynchronize(gone) == cudaErrorInvalidResourceHandle, "a stream that was destroyed");
  cudaEvent_t began{}, ended{};
  cudaEventCreate(&began);
  cudaEventCreate(&ended);
  float ms = -1;
  require(cudaEventElapsedTime(&ms, began, ended) == cudaErrorInvalidResourceHandle, "events never recorded");
  ptx_machine_be_late(1);
  cudaEventRecord(began, w.a);
  cudaEventRecord(ended, w.a);
  require(cudaEventElapsedTime(&ms, began, ended) == cudaErrorNotReady, "events that have not passed");
  cudaEventSynchronize(ended);
  require(cudaEventElapsedTime(&ms, began, ended) == cudaSuccess && ms >= 0, "events that have");
  ptx_machine_be_late(0);
  require(cudaEventElapsedTime(&ms, began, w.of_a) == cudaErrorInvalidResourceHandle,
          "an event without time");
  cudaEventDestroy(began);
  cudaEventDestroy(ended);
  cudaGetLastError();
}

}  // namespace

int main() {
  check_rules();
  check_halves();
  check_seeds();
  check_faults();
  check_captures();
  check_calls();
  std::printf("%llu checks of streams, %d failed\n", checks.made(), checks.failed());
  return checks.status();
}
