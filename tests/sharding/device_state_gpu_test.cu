// A sharded state on a device: ranks whose messages are copies on streams of the device have the bits of the
// same ranks' states in host memory, in any order of the streams.
#define DOCTEST_CONFIG_DISABLE  // which headers of worlds include
#include <llmmem/comm/communicator.hpp>
#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/kernel_space.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/background_sums.hpp>
#include <llmmem/sharding/gather_schedule.hpp>
#include <llmmem/sharding/split_2d.hpp>
#include <llmmem/testing/sim_network.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "support/device.cuh"
#include "support/seeds.hpp"
#include "support/state_world.hpp"

namespace device_state_tests {  // named: nvcc warns of unused members of a type without linkage

using namespace llmmem;
/// Messages between ranks of one device: the receiver's stream copies them behind the sender's stream, as
/// NCCL's kernels do. A call returns when its copies are done.
template <class Side>
class stream_ranks {
 public:
  stream_ranks(Side& side, cudaStream_t stream) : side_(&side), stream_(stream) {
    for (cudaEvent_t* const each : {&sent_, &received_})
      llmmem_tests::check(cudaEventCreateWithFlags(each, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~stream_ranks() {
    for (const cudaEvent_t each : {sent_, received_})
      static_cast<void>(cudaEventDestroy(each));
  }
  stream_ranks(const stream_ranks&) = delete;
  stream_ranks& operator=(const stream_ranks&) = delete;

  [[nodiscard]] rank_id rank() const noexcept { return side_->rank(); }
  [[nodiscard]] rank_count world() const noexcept { return side_->world(); }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return side_->after(ns); }
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
  void revoke() noexcept { side_->revoke(); }

  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by) {
    const message mine = offer(bytes);
    if (auto done = side_->send(bytes_of(mine), to, tag, by); !done) return done;
    message taken{};
    return side_->recv(bytes_in(taken), to, tag, by);
  }
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by) {
    message theirs{};
    if (auto done = side_->recv(bytes_in(theirs), from, tag, by); !done) return done;
    take(theirs, bytes);
    return side_->send(bytes_of(theirs), from, tag, by);
  }
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by) {
    const message mine = offer(out);
    message theirs{};
    if (auto done = side_->exchange(bytes_of(mine), to, bytes_in(theirs), from, tag, by); !done) return done;
    take(theirs, into);
    message taken{};
    return side_->exchange(bytes_of(theirs), from, bytes_in(taken), to, tag, by);
  }

 private:
  /// Where a message is, and behind what.
  struct message {
    const std::byte* bytes = nullptr;
    std::uint64_t size = 0;
    cudaEvent_t sent = nullptr;
  };
  static std::span<const std::byte> bytes_of(const message& of) { return std::as_bytes(std::span(&of, 1)); }
  static std::span<std::byte> bytes_in(message& of) { return std::as_writable_bytes(std::span(&of, 1)); }

  message offer(std::span<const std::byte> bytes) const {
    llmmem_tests::check(cudaEventRecord(sent_, stream_), "cudaEventRecord");
    return {bytes.data(), bytes.size(), sent_};
  }
  void take(const message& from, std::span<std::byte> into) const {
    llmmem_tests::require(from.size == into.size(), "a message has the length that is expected", 0);
    llmmem_tests::check(cudaStreamWaitEvent(stream_, from.sent, 0), "cudaStreamWaitEvent");
    llmmem_tests::check(
        cudaMemcpyAsync(into.data(), from.bytes, from.size, cudaMemcpyDeviceToDevice, stream_),
        "cudaMemcpyAsync");
    llmmem_tests::check(cudaEventRecord(received_, stream_), "cudaEventRecord");
    llmmem_tests::check(cudaEventSynchronize(received_), "cudaEventSynchronize");
  }

  Side* side_;
  cudaStream_t stream_;
  cudaEvent_t sent_ = nullptr;
  cudaEvent_t received_ = nullptr;
};

}  // namespace device_state_tests

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using device_state_tests::stream_ranks;
using side_of = communicator<testing::sim_endpoint>;
static_assert(transport<stream_ranks<side_of>>);

using worked_memory = kernel_space<device_space, device_queue, device_executor>;
static_assert(working_space<worked_memory>);
static_assert(messages_after_work_of<stream_ranks<side_of>, worked_memory>);
using device_state = sharded_state<table_partition, stream_ranks<side_of>, worked_memory>;
using host_state = sharded_state<table_partition, side_of, host_space>;

constexpr device_id first{0};

/// What all ranks have in common.
struct state_case {
  std::uint64_t seed = 0;
  std::vector<tensor_facts> tensors{};
  table_partition who{};
  reduce_op op = sum_f32;
  std::uint32_t segment_bytes = 0;
};

state_case random_case(std::uint64_t seed) {
  random_numbers random(seed);
  state_case made{.seed = seed, .tensors = random_tensors(random, 5)};
  const reduce_op ops[] = {sum_f32, sum_bf16, sum_f16};
  made.op = ops[random.below(3U)];
  for (tensor_facts& each : made.tensors)
    each.element_bytes = made.op.element_bytes;
  const std::uint32_t world = 1 + random.below(4U);
  made.who = partition_of_kind(random, made.tensors, static_cast<std::uint32_t>(seed % state_kinds), world);
  made.segment_bytes = 1 + random.below(random.once_in(2) ? 60U : 4000U);
  return made;
}

/// Finite numbers of either sign and many sizes, in any of the types: bits without the largest exponents.
void fill_numbers(std::span<std::byte> to, std::uint64_t seed, std::uint32_t width) {
  const auto bytes = bytes_of_seed(to.size(), seed);
  std::copy(bytes.begin(), bytes.end(), to.begin());
  for (std::size_t at = width - 1; at < to.size(); at += width)
    to[at] &= std::byte{0xBB};
}

/// One rank with its memory on the device, and its streams: of its kernels, of messages, of the state's work.
class rank_on_device {
 public:
  rank_on_device(const state_case& of, side_of& side)
      : of_(&of),
        memory_(device_pool_source<cuda_runtime>(first), {.budget = 1 << 22}),
        queue_(memory_, first, {.depth = 2}),
        messages_(memory_, first, {.depth = 2}),
        compute_(memory_, first, {.depth = 2}),
        space_(memory_, queue_, device_executor(queue_.stream())),
        ranks_(side, (of.seed + to_index(side.rank())) % 2 == 0 ? queue_.stream() : messages_.stream()),
        there_(of.who, of.tensors, ranks_, space_, {.segment_bytes = of.segment_bytes}),
        here_(of.who, of.tensors, side, host_, {.segment_bytes = of.segment_bytes}) {
    for (std::uint32_t t = 0; t < of.tensors.size(); ++t)
      scope_.push_back(tensor_id{t});
  }

  void run() {
    const std::uint64_t self = to_index(ranks_.rank());
    for (const tensor_id each : scope_) {
      fill_numbers(here_.local(each), 100 * self + to_index(each), of_->op.element_bytes);
      write(there_.local(each), here_.local(each));
    }
    here_.refresh(scope_).value();
    there_.refresh(scope_).value();
    compare_pieces("refresh");
    compare_wholes(here_.gather(scope_).value(), there_.gather(scope_).value(), "gather");
    sum(self);
    compare_pieces("a sum");
    compare_wholes(here_.gather(scope_).value(), there_.gather(scope_).value(), "gather of a sum");
    const sharded_stats host = here_.stats();
    const sharded_stats device = there_.stats();
    require(host.gathers == device.gathers && host.reduces == device.reduces &&
                host.refreshes == device.refreshes,
            "messages of a device are those of the host", of_->seed);
  }

 private:
  void sum(std::uint64_t self) {
    const auto here = here_.allocate_whole(scope_).value();
    const auto there = there_.allocate_whole(scope_).value();
    for (std::size_t i = 0; i < here.size(); ++i) {
      fill_numbers(here.tensor(i), 1000 + 100 * self + i, of_->op.element_bytes);
      write(there.tensor(i), here.tensor(i));
    }
    const bool is_all = of_->seed % 3 != 0;
    (is_all ? here_.all_reduce(here, of_->op) : here_.reduce_scatter(here, of_->op)).value();
    (is_all ? there_.all_reduce(there, of_->op) : there_.reduce_scatter(there, of_->op)).value();
  }
  /// Writes on a stream of its own, for which the state's stream waits.
  void write(std::span<std::byte> to, std::span<const std::byte> from) {
    if (to.empty()) return;
    const auto written = compute_.copy_in_async({to.data(), to.size()}, from, {}).value();
    queue_.follow({&written, 1}).value();
  }
  /// Reads on a stream that waits for no other.
  std::vector<std::byte> read(std::span<const std::byte> from) {
    std::vector<std::byte> bytes(from.size());
    if (bytes.empty()) return bytes;
    auto* const at = const_cast<std::byte*>(from.data());
    compute_.copy_out_async(bytes, {at, from.size()}, {}).value().wait();
    return bytes;
  }
  void compare_pieces(const char* what) {
    for (const tensor_id each : scope_)
      require(read(there_.local(each)) == copy_of(here_.local(each)), what, of_->seed);
  }
  template <class Here, class There>
  void compare_wholes(const Here& here, const There& there, const char* what) {
    for (std::size_t i = 0; i < here.size(); ++i)
      require(read(there.tensor(i)) == copy_of(here.tensor(i)), what, of_->seed);
  }

  const state_case* of_;
  device_space memory_;
  device_queue queue_;
  device_queue messages_;
  device_queue compute_;
  worked_memory space_;
  stream_ranks<side_of> ranks_;
  host_space host_{{.budget = 1 << 22, .name = "rank"}};
  device_state there_;
  host_state here_;
  std::vector<tensor_id> scope_{};
};

/// One rank whose pieces leave the device for pinned memory: tier 0 has space for one of them.
class rank_in_tiers {
 public:
  rank_in_tiers(const state_case& of, side_of& side)
      : of_(&of),
        memory_(first, {.budget = 1 << 22}, {.depth = 2}),
        queue_(memory_, first, {.depth = 2}),
        compute_(memory_, first, {.depth = 2}),
        space_(memory_, queue_, device_executor(queue_.stream())),
        ranks_(side, queue_.stream()),
        buffer_({}, {memory_, largest_piece(of), 64}, {pinned_, 1 << 20, 64}),
        there_(of.who, of.tensors, ranks_, space_, buffer_, {.segment_bytes = of.segment_bytes}),
        here_(of.who, of.tensors, side, host_, {.segment_bytes = of.segment_bytes}) {}

  void run() {
    const std::uint64_t self = to_index(ranks_.rank());
    for (std::uint32_t t = 0; t < of_->tensors.size(); ++t) {
      fill_numbers(here_.local(tensor_id{t}), 100 * self + t, of_->op.element_bytes);
      const auto lease = there_.lease(tensor_id{t}, access_mode::write).value();
      write(lease.local(), here_.local(tensor_id{t}));
    }
    for (std::uint32_t t = 0; t < of_->tensors.size(); ++t) {
      const std::array scope{tensor_id{t}};
      here_.refresh(scope).value();
      there_.refresh(scope).value();
      sum(scope, 1000 + 100 * self + t);
      const auto here = here_.gather(scope).value();
      const auto there = there_.gather(scope).value();
      require(read(there.tensor(0)) == copy_of(here.tensor(0)), "gather from tiers", of_->seed);
    }
    for (std::uint32_t t = 0; t < of_->tensors.size(); ++t) {
      const auto lease = there_.lease(tensor_id{t}, access_mode::read).value();
      require(read(lease.local()) == copy_of(here_.local(tensor_id{t})), "a piece in tiers", of_->seed);
    }
  }

 private:
  static std::uint64_t largest_piece(const state_case& of) {
    std::uint64_t most = 64;
    for (const tensor_facts& each : of.tensors)
      most = each.bytes() > most ? (each.bytes() + 63) / 64 * 64 : most;
    return most;
  }
  void sum(std::span<const tensor_id> scope, std::uint64_t seed) {
    const auto here = here_.allocate_whole(scope).value();
    const auto there = there_.allocate_whole(scope).value();
    fill_numbers(here.tensor(0), seed, of_->op.element_bytes);
    write(there.tensor(0), here.tensor(0));
    here_.all_reduce(here, of_->op).value();
    there_.all_reduce(there, of_->op).value();
  }
  /// Writes on a stream of its own, behind the state's, which then waits for it, as do the copies of tier 0.
  void write(std::span<std::byte> to, std::span<const std::byte> from) {
    if (to.empty()) return;
    const auto there = queue_.mark().value();
    const auto written = compute_.copy_in_async({to.data(), to.size()}, from, {&there, 1}).value();
    queue_.follow({&written, 1}).value();
    memory_.queue().follow({&written, 1}).value();
  }
  std::vector<std::byte> read(std::span<std::byte> from) {
    std::vector<std::byte> bytes(from.size());
    if (bytes.empty()) return bytes;
    const auto there = queue_.mark().value();
    compute_.copy_out_async(bytes, {from.data(), from.size()}, {&there, 1}).value().wait();
    return bytes;
  }

  using buffer_type = tiered_buffer<streamed_device_space, pinned_space>;
  using tiered_memory = kernel_space<streamed_device_space, device_queue, device_executor>;

  const state_case* of_;
  pinned_space pinned_{{.budget = 1 << 20}};
  streamed_device_space memory_;
  device_queue queue_;
  device_queue compute_;
  tiered_memory space_;
  stream_ranks<side_of> ranks_;
  host_space host_{{.budget = 1 << 22, .name = "rank"}};
  buffer_type buffer_;
  sharded_state<table_partition, stream_ranks<side_of>, tiered_memory,
                leased_pieces<buffer_type, tiered_memory>>
      there_;
  host_state here_;
};

/// @tparam Rank  what lives on each rank.
template <class Rank>
void check_state(std::uint64_t seed) {
  const state_case one = random_case(seed);
  testing::sim_network net({.seats = to_number(one.who.world()), .seed = seed});
  net.run([&](testing::sim_endpoint& end) {
    side_of side(end);
    side.join(side.after(one_second)).value();
    Rank(one, side).run();
    side.agree(0, side.after(60 * one_second)).value();
  });
}

/// Layers whose gradients are summed and gathered in a step.
struct step_case {
  static constexpr std::uint32_t world = 3;
  static constexpr std::uint32_t layers = 4;

  explicit step_case(std::uint64_t of) : seed(of) {
    for (std::uint32_t i = 0; i < layers; ++i)
      tensors.push_back({"layer", tensor_shape::matrix(3 + i, 50), 4});
  }
  [[nodiscard]] std::vector<std::byte> contribution(std::uint32_t rank, std::uint32_t layer) const {
    std::vector<std::byte> made(static_cast<std::size_t>(tensors[layer].bytes()));
    fill_numbers(made, seed + 100 * rank + layer, 4);
    return made;
  }

  std::uint64_t seed;
  std::vector<tensor_facts> tensors{};
};

/// Two passes of sums behind kernels, and the sums gathered ahead, by the thread of a queue: the calls of a
/// training step, in which the host waits only for results.
/// @param work     the queue of the state's space. @param compute  of the program's kernels.
/// @param budget   bytes of layers that are gathered ahead.
template <class State>
void live_a_step(const step_case& of, State& state, device_queue& work, device_queue& compute,
                 std::uint64_t budget) {
  operation_queue queue;
  {
    background_sums sums(state, queue, 2);
    const auto done = [](std::span<const tensor_id>) {};
    for (std::uint32_t layer = step_case::layers; layer-- > 0;) {
      auto whole = state.allocate_whole(std::array{tensor_id{layer}}).value();
      const auto mine = of.contribution(to_index(state.rank()), layer);
      const std::span<std::byte> to = whole.tensor(0);
      const auto written = compute.copy_in_async({to.data(), to.size()}, mine, {}).value();
      work.follow({&written, 1}).value();
      sums.begin(std::move(whole), sum_f32, done).value();
    }
    sums.finish(done).value();
  }
  std::vector<std::vector<tensor_id>> scopes;
  std::vector<std::uint64_t> bytes;
  std::vector<std::uint32_t> order;
  std::vector<gather_use> uses;
  for (std::uint32_t layer = 0; layer < step_case::layers; ++layer) {
    scopes.push_back({tensor_id{layer}});
    bytes.push_back(of.tensors[layer].bytes());
    order.push_back(layer);
    uses.push_back({layer, 1000});
  }
  gather_schedule ahead(state, queue, scopes, order,
                        plan_gathers(bytes, uses, budget, {.bytes_per_second = 1'000'000'000}));
  ahead.begin_iteration();
  for (std::uint32_t layer = 0; layer < step_case::layers; ++layer) {
    const auto lease = ahead.next().value();
    std::vector<std::byte> expected = of.contribution(0, layer);
    for (std::uint32_t rank = 1; rank < step_case::world; ++rank)
      sum_f32.combine(expected.data(), of.contribution(rank, layer).data(), expected.size());
    std::vector<std::byte> got(expected.size());
    const std::span<std::byte> from = lease.whole().tensor(0);
    compute.copy_out_async(got, {from.data(), from.size()}, {}).value().wait();
    require(got == expected, "a sum behind kernels, gathered ahead", of.seed);
  }
  ahead.end_iteration().value();
}

void check_step(std::uint64_t seed) {
  const step_case of(seed);
  const table_partition who(flat_uneven::even(of.tensors, rank_count{step_case::world}));
  in_thread_world(step_case::world, [&](communicator<thread_endpoint>& side, host_space&, std::uint32_t) {
    device_space memory(device_pool_source<cuda_runtime>(first), {.budget = 1 << 22});
    device_queue work(memory, first, {.depth = 4});
    device_queue messages(memory, first, {.depth = 4});
    device_queue compute(memory, first, {.depth = 4});
    worked_memory space(memory, work, device_executor(work.stream()));
    stream_ranks<communicator<thread_endpoint>> ranks(side, messages.stream());
    sharded_state state(who, of.tensors, ranks, space, {.segment_bytes = 256});
    live_a_step(of, state, work, compute, 1 << 14);
  });
}

/// The same with pieces in tiers, of which tier 0 has space for three of four: the program's thread leases
/// them, the queue's thread works on them.
void check_step_in_tiers(std::uint64_t seed) {
  const step_case of(seed);
  const table_partition who(
      split_2d(of.tensors, std::vector(step_case::layers, split_axis::rows), rank_count{step_case::world}));
  in_thread_world(step_case::world, [&](communicator<thread_endpoint>& side, host_space&, std::uint32_t) {
    pinned_space pinned({.budget = 1 << 16});
    streamed_device_space memory(first, {.budget = 1 << 22}, {.depth = 4});
    device_queue work(memory, first, {.depth = 4});
    device_queue messages(memory, first, {.depth = 4});
    device_queue compute(memory, first, {.depth = 4});
    kernel_space space(memory, work, device_executor(work.stream()));
    stream_ranks<communicator<thread_endpoint>> ranks(side, messages.stream());
    tiered_buffer<streamed_device_space, pinned_space> buffer({}, {memory, 1344, 64}, {pinned, 1 << 14, 64});
    sharded_state state(who, of.tensors, ranks, space, buffer, {.segment_bytes = 256});
    live_a_step(of, state, work, compute, 1 << 11);
  });
}

}  // namespace

int main() {
  require_device();
  for (const auto seed : seeds(44, 6))
    check_state<rank_on_device>(seed);
  for (const auto seed : seeds(22, 4))
    check_state<rank_in_tiers>(seed);
  for (const auto seed : seeds(8, 2))
    check_step(seed);
  for (const auto seed : seeds(8, 2))
    check_step_in_tiers(seed);
  std::printf("sharded_state: bits on a device equal to the host's\n");
  return 0;
}
