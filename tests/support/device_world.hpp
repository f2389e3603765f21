/// @file
/// Ranks with devices of their own, whose streams do their work later and in any order, over an imitation of
/// NCCL.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/nccl_transport.hpp>
#include <llmmem/device/device.hpp>
#include <llmmem/device/device_queue.hpp>
#include <llmmem/kernels/kernel_space.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/model/f16.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "support/fake_device.hpp"
#include "support/fake_executor.hpp"
#include "support/random.hpp"
#include "support/state_world.hpp"
#include "support/stream_nccl.hpp"

namespace llmmem_tests {

using namespace llmmem;  // NOLINT(google-build-using-namespace): of tests alone
using testing::sim_endpoint;

using side_of = communicator<sim_endpoint>;
inline constexpr std::uint64_t hour = 3600 * one_second;

/// Ranks whose messages are on a stream of a fake device, which counts its streams.
class stream_ranks : public nccl_transport<side_of, stream_nccl> {
 public:
  using base = nccl_transport<side_of, stream_nccl>;
  stream_ranks(side_of& side, fake_runtime::stream stream, const stream_nccl& api)
      : base(side, reinterpret_cast<cudaStream_t>(stream), {}, api) {}
  [[nodiscard]] fake_runtime::stream stream() const noexcept {
    return reinterpret_cast<fake_runtime::stream>(base::stream());
  }
};

using device_memory = basic_device_space<device_pool_source<fake_runtime>>;
using stream_queue = basic_device_queue<device_memory, fake_runtime>;
using worked_memory = kernel_space<device_memory, stream_queue, fake_executor>;
static_assert(working_space<worked_memory>);
static_assert(messages_after_work_of<stream_ranks, worked_memory>);
static_assert(messages_after_work_of<rank_group<stream_ranks>, worked_memory>);
static_assert(!messages_after_work_of<side_of, worked_memory>);

/// What a rank has of its device: memory and two streams.
struct rank_device {
  rank_device(fake_device& of, bool has_one_stream)
      : device(of),
        memory(device_pool_source<fake_runtime>(device_id{0}, device), {.budget = 1 << 24}),
        queue(memory, device_id{0}, {.depth = 2}, device),
        messages(memory, device_id{0}, {.depth = 2}, device),
        compute(memory, device_id{0}, {.depth = 2}, device),
        space(memory, queue, fake_executor(device, queue.stream())),
        stream(has_one_stream ? queue.stream() : messages.stream()) {}

  fake_device& device;
  device_memory memory;
  stream_queue queue;
  stream_queue messages;
  stream_queue compute;  // of the caller's kernels
  worked_memory space;
  fake_runtime::stream stream;  // of messages
};

/// All ranks of a world with their devices, joined on both channels.
/// @tparam Device  what a rank has, made of its fake device and of whether messages are on the state's
/// stream.
template <class Device = rank_device, class Body>
void in_device_world(std::uint32_t world, std::uint64_t seed, Body body) {
  testing::sim_network net({.seats = world, .seed = seed, .max_calls = 4'000'000});
  fake_world fake;
  net.run([&](sim_endpoint& end) {
    side_of side(end);
    side.join(side.after(one_second)).value();
    fake_device device(seed * 8 + to_index(side.rank()));
    {
      Device mine(device, (seed + to_index(side.rank())) % 2 == 0);
      stream_ranks ranks(side, mine.stream, stream_nccl(fake, end, mine.device));
      ranks.join(ranks.after(one_second)).value();
      body(ranks, mine, fake);
      ranks.agree(0, ranks.after(hour)).value();
      ranks.leave(ranks.after(hour)).value();
    }
    CHECK(device.live() == 0);
    CHECK(device.objects() == 0);
    CHECK(device.wrong == std::vector<std::string>{});
  });
  CHECK(fake.broken_rules == std::vector<std::string>{});
  CHECK(fake.left() == 0);
  CHECK(fake.is_tidy());
}

/// Catalogues of one type that devices add.
struct summed_tensors {
  std::vector<tensor_facts> facts{};
  reduce_op op = sum_f32;
};

inline summed_tensors random_summed(random_numbers& random) {
  summed_tensors made{random_tensors(random, 6)};
  const reduce_op ops[] = {sum_f32, sum_f32, sum_bf16, sum_f16};
  made.op = ops[random.below(4U)];
  for (tensor_facts& each : made.facts)
    each.element_bytes = made.op.element_bytes;
  return made;
}

inline std::vector<tensor_id> some_of(random_numbers& random, std::uint32_t tensors) {
  std::vector<tensor_id> scope;
  for (std::uint32_t t = 0; t < tensors; ++t) {
    if (!random.once_in(4)) scope.push_back(tensor_id{t});
  }
  return scope;
}

/// Finite numbers of either sign and many sizes: the order in which they are added shows.
inline void fill_numbers(std::span<std::byte> to, const reduce_op& op, std::uint64_t seed) {
  random_numbers random(seed);
  for (std::size_t at = 0; at < to.size(); at += op.element_bytes) {
    const float value = (random.once_in(2) ? -1.0F : 1.0F) * static_cast<float>(random.below(2001U)) /
                        static_cast<float>(1U << random.below(8U));
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint16_t half =
        op.elements == dtype::bf16 ? bf16_from_f32_bits(bits) : f16_from_f32_bits(bits);
    if (op.element_bytes == 4) std::memcpy(to.data() + at, &bits, 4);
    if (op.element_bytes == 2) std::memcpy(to.data() + at, &half, 2);
  }
}

/// A kernel of the caller's that writes bytes later; the state's stream waits for it, the host does not.
template <class Device>
void write_later(Device& mine, std::span<std::byte> to, std::span<const std::byte> from) {
  const std::vector<std::byte> bytes = copy_of(from);
  const auto kernel = [bytes, to] { std::copy(bytes.begin(), bytes.end(), to.begin()); };
  REQUIRE(fake_runtime(mine.device).launch(kernel, mine.compute.stream()) == 0);
  const auto written = mine.compute.mark().value();
  mine.queue.follow({&written, 1}).value();
}

}  // namespace llmmem_tests
