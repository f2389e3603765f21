// A sharded state on a device whose pieces are in tiers: they leave the device for pinned memory, and come up
// again, by copies on a stream of their own. Its oracle is a state in host memory of the same ranks.
#include <doctest/doctest.h>

#if defined(LLMMEM_TESTS_NCCL)
#include <llmmem/device/pinned.hpp>
#include <llmmem/device/streamed_space.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/split_2d.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/device_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

using fake_gpu = basic_streamed_space<device_pool_source<fake_runtime>, fake_runtime>;
using fake_pinned = basic_host_space<pinned_source<fake_runtime>>;
using buffer_type = tiered_buffer<fake_gpu, fake_pinned>;
using scheduled = prefetch_schedule<buffer_type>;
using tiered_memory = kernel_space<fake_gpu, stream_queue, fake_executor>;
template <class Store>
using tiered_state =
    sharded_state<table_partition, stream_ranks, tiered_memory, leased_pieces<Store, tiered_memory>>;
using host_state = sharded_state<table_partition, side_of, host_space>;

/// What a rank has: its device's memory with a stream of copies, streams of the state, of messages and of the
/// caller's kernels, and pinned memory.
struct tiered_device {
  tiered_device(fake_device& of, bool has_one_stream)
      : device(of),
        pinned(pinned_source<fake_runtime>({}, device), {.budget = 1 << 24}),
        gpu(device_pool_source<fake_runtime>(device_id{0}, device), device_id{0}, {.budget = 1 << 24},
            {.depth = 2}, device),
        queue(gpu, device_id{0}, {.depth = 2}, device),
        messages(gpu, device_id{0}, {.depth = 2}, device),
        compute(gpu, device_id{0}, {.depth = 2}, device),
        space(gpu, queue, fake_executor(device, queue.stream())),
        stream(has_one_stream ? queue.stream() : messages.stream()) {}

  fake_device& device;
  fake_pinned pinned;  // outlives the copies of a device that has failed
  fake_gpu gpu;
  stream_queue queue;
  stream_queue messages;
  stream_queue compute;
  tiered_memory space;
  fake_runtime::stream stream;  // of messages
};

/// A kernel of the caller's that writes a piece under a lease, on a stream of its own.
template <class State>
void write_piece(State& state, tiered_device& mine, tensor_id tensor, std::span<const std::byte> bytes,
                 access_mode mode) {
  const auto lease = state.lease(tensor, mode).value();
  const std::span<std::byte> to = lease.local();
  REQUIRE(to.size() == bytes.size());
  if (to.empty()) return;
  mine.queue.mark().value().hold(mine.compute.stream()).value();
  const std::vector<std::byte> from = copy_of(bytes);
  const auto kernel = [from, to] { std::copy(from.begin(), from.end(), to.begin()); };
  REQUIRE(fake_runtime(mine.device).launch(kernel, mine.compute.stream()) == 0);
  const auto written = mine.compute.mark().value();
  mine.gpu.queue().follow({&written, 1}).value();  // then the lease may end
}

/// Reads on a stream that waits for no other.
std::vector<std::byte> read(tiered_device& mine, std::span<std::byte> from) {
  std::vector<std::byte> bytes(from.size());
  if (!bytes.empty()) mine.compute.copy_out_async(bytes, {from.data(), from.size()}, {}).value().wait();
  return bytes;
}

template <class State>
void check_pieces(host_state& host, State& state, tiered_device& mine) {
  for (std::uint32_t t = 0; t < host.tensors().size(); ++t) {
    const auto lease = state.lease(tensor_id{t}, access_mode::read).value();
    mine.queue.mark().value().hold(mine.compute.stream()).value();
    CHECK(copy_of(host.local(tensor_id{t})) == read(mine, lease.local()));
    CHECK(lease.owned().size() == host.owned(tensor_id{t}).size());
  }
}

template <class There>
void check_wholes(const host_state::whole& host, const There& there, tiered_device& mine) {
  REQUIRE(host.size() == there.size());
  for (std::size_t i = 0; i < host.size(); ++i)
    CHECK(copy_of(host.tensor(i)) == read(mine, there.tensor(i)));
}

/// Both states go through every operation, one scope after the other.
template <class State>
void live(host_state& host, State& state, tiered_device& mine, const summed_tensors& of,
          std::span<const std::vector<tensor_id>> scopes, std::uint64_t seed, bool is_all) {
  const std::uint64_t self = to_index(host.rank());
  for (std::uint32_t t = 0; t < of.facts.size(); ++t) {
    const tensor_id tensor{t};
    fill_numbers(host.local(tensor), of.op, seed + 1000 * self + t);
    write_piece(state, mine, tensor, host.local(tensor),
                t % 2 == 0 ? access_mode::write : access_mode::read_write);
  }
  for (const std::vector<tensor_id>& scope : scopes) {
    host.refresh(scope).value();
    state.refresh(scope).value();
    {
      const auto here = host.gather(scope).value();
      auto there = state.gather(scope).value();
      check_wholes(here, there, mine);
      state.let_go(there);
      state.hold_again(there).value();
      check_wholes(here, there, mine);
    }
    {
      const auto here = host.allocate_whole(scope).value();
      const auto there = state.allocate_whole(scope).value();
      for (std::size_t i = 0; i < here.size(); ++i) {
        fill_numbers(here.tensor(i), of.op, seed + 77 * self + i);
        write_later(mine, there.tensor(i), here.tensor(i));
      }
      (is_all ? host.all_reduce(here, of.op) : host.reduce_scatter(here, of.op)).value();
      (is_all ? state.all_reduce(there, of.op) : state.reduce_scatter(there, of.op)).value();
    }
  }
  check_pieces(host, state, mine);
}

/// One tensor after the other, or some together.
std::vector<std::vector<tensor_id>> random_scopes(random_numbers& random, std::uint32_t tensors) {
  std::vector<std::vector<tensor_id>> scopes{{}};
  for (std::uint32_t t = 0; t < tensors; ++t) {
    if (random.once_in(4)) continue;
    if (!scopes.back().empty() && !random.once_in(3)) scopes.emplace_back();
    scopes.back().push_back(tensor_id{t});
  }
  return scopes;
}

/// The least bytes of tier 0 for which every scope has its pieces at once.
std::uint64_t least_bytes(const summed_tensors& of, std::span<const std::vector<tensor_id>> scopes) {
  std::uint64_t most = 64;
  for (const auto& scope : scopes) {
    std::uint64_t bytes = 0;
    for (const tensor_id each : scope)
      bytes += (of.facts[to_index(each)].bytes() + 63) / 64 * 64;
    most = std::max(most, bytes);
  }
  for (const tensor_facts& each : of.facts)
    most = std::max(most, (each.bytes() + 63) / 64 * 64);
  return most;
}

}  // namespace

TEST_SUITE("device_tiers") {
  TEST_CASE("pieces that leave a device and come up again have the bits of a state on the host") {
    std::uint64_t moved = 0;
    for (const auto seed : seeds(88, 44)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(4U);
      const summed_tensors of = random_summed(random);
      const table_partition who = partition_of_kind(random, of.facts, kind, world);
      const sharded_options options{.segment_bytes = 1 + random.below(random.once_in(2) ? 40U : 4000U)};
      const auto scopes = random_scopes(random, who.tensors());
      const bool is_all = random.once_in(2);
      const std::uint64_t above = least_bytes(of, scopes);
      in_device_world<tiered_device>(world, seed, [&](stream_ranks& ranks, tiered_device& mine, fake_world&) {
        buffer_type buffer({}, {mine.gpu, above, 64}, {mine.pinned, 1 << 20, 64});
        host_space space({.budget = 1 << 24, .name = "rank"});
        host_state host(who, of.facts, ranks.side(), space, options);
        tiered_state<buffer_type> state(who, of.facts, ranks, mine.space, buffer, options);
        check_pieces(host, state, mine);  // zeros
        live(host, state, mine, of, scopes, seed, is_all);
        const sharded_stats a = host.stats();
        const sharded_stats b = state.stats();
        CHECK(a.gathers == b.gathers);
        CHECK(a.reduces == b.reduces);
        CHECK(a.refreshes == b.refreshes);
        CHECK(buffer.audit() == std::vector<std::string>{});
        moved += buffer.stats().moved.links[0].offload.operations;
      });
    }
    CHECK(moved > 100);
  }

  TEST_CASE("a sum comes after the copy that leaves the place of its piece") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(512), 4},
                                            {"b", tensor_shape::vector(512), 4}};
    const table_partition who(split_2d(tensors, std::vector(2, split_axis::rows), rank_count{2}));
    const tensor_id a{0};
    const std::vector scope{tensor_id{1}};
    in_device_world<tiered_device>(2, 1, [&](stream_ranks& ranks, tiered_device& mine, fake_world&) {
      buffer_type buffer({}, {mine.gpu, 1024, 64}, {mine.pinned, 1 << 20, 64});
      tiered_state<buffer_type> state(who, tensors, ranks, mine.space, buffer);
      const auto kept = bytes_of_seed(1024, to_index(ranks.rank()));
      write_piece(state, mine, a, kept, access_mode::write);
      const auto whole = state.allocate_whole(scope).value();
      const auto contribution = bytes_of_seed(2048, 9);
      write_later(mine, whole.tensor(0), contribution);
      for (int i = 0; i < 2000; ++i)  // copies before the one that takes the first piece away
        REQUIRE(fake_runtime(mine.device).launch([] {}, mine.gpu.queue().stream()) == 0);
      state.reduce_scatter(whole, sum_f32).value();
      const auto lease = state.lease(a, access_mode::read).value();
      CHECK(read(mine, lease.local()) == kept);
    });
  }

  TEST_CASE("a reshard between tiers of a device gives every rank the bits of a reshard on the host") {
    for (const auto seed : seeds(24, 12)) {
      CAPTURE(seed);
      random_numbers random(seed + 900);
      const summed_tensors of = random_summed(random);
      const table_partition from(zero3(of.facts, rank_count{3}).of(state_kind::weights));
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const table_partition to = partition_of_kind(random, of.facts, kind, 3);
      const std::uint64_t above = least_bytes(of, {});
      in_device_world<tiered_device>(3, seed, [&](stream_ranks& ranks, tiered_device& mine, fake_world&) {
        buffer_type buffer({}, {mine.gpu, 2 * above, 64}, {mine.pinned, 1 << 20, 64});
        stream_queue queue(mine.gpu, device_id{0}, {.depth = 2}, mine.device);
        tiered_memory other(mine.gpu, queue, fake_executor(mine.device, queue.stream()));
        host_space space({.budget = 1 << 24, .name = "rank"});
        host_state host(from, of.facts, ranks.side(), space, {.segment_bytes = 100});
        host_state next_host(to, of.facts, ranks.side(), space, {.segment_bytes = 100});
        tiered_state<buffer_type> state(from, of.facts, ranks, mine.space, buffer, {.segment_bytes = 100});
        tiered_state<buffer_type> next(to, of.facts, ranks, other, buffer, {.segment_bytes = 100});
        for (std::uint32_t t = 0; t < of.facts.size(); ++t) {
          const tensor_id tensor{t};
          fill_numbers(host.local(tensor), of.op, 50 * seed + 10 * to_index(ranks.rank()) + t);
          write_piece(state, mine, tensor, host.local(tensor), access_mode::write);
        }
        host.reshard_to(next_host).value();
        state.reshard_to(next).value();
        queue.finish().value();
        check_pieces(next_host, next, mine);
        CHECK(next_host.stats().reshards == next.stats().reshards);
        CHECK(buffer.audit() == std::vector<std::string>{});
      });
    }
  }

  TEST_CASE("a replayed schedule brings the pieces of a state on a device up before they are used") {
    const std::vector<tensor_facts> tensors(4, {"layer", tensor_shape::vector(300), 4});
    const table_partition who(split_2d(tensors, std::vector(4, split_axis::rows), rank_count{2}));
    const std::vector scopes{std::vector{tensor_id{0}}, std::vector{tensor_id{1}}, std::vector{tensor_id{2}},
                             std::vector{tensor_id{3}}};
    in_device_world<tiered_device>(2, 3, [&](stream_ranks& ranks, tiered_device& mine, fake_world&) {
      buffer_type buffer({}, {mine.gpu, 1280, 64}, {mine.pinned, 1 << 20, 64});  // two pieces of four
      scheduled store(buffer, {.links = {{.bytes_per_second = 1'000'000'000}}});
      host_space space({.budget = 1 << 24, .name = "rank"});
      host_state host(who, tensors, ranks.side(), space);
      tiered_state<scheduled> state(who, tensors, ranks, mine.space, store);
      const summed_tensors of{tensors, sum_f32};
      for (std::uint64_t iteration = 0; iteration < 4; ++iteration) {
        store.begin_iteration();
        live(host, state, mine, of, scopes, 10 * iteration, true);
        store.end_iteration();
      }
      CHECK(store.stats().steps > 0);
      CHECK(store.stats().diverged == 0);
      CHECK(buffer.audit() == std::vector<std::string>{});
    });
  }

  TEST_CASE(
      "a refused call of the device ends an operation on pieces in tiers for all ranks, and leaks nothing") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(120), 4},
                                            {"b", tensor_shape::vector(200), 4}};
    const table_partition who(split_2d(tensors, std::vector(2, split_axis::rows), rank_count{2}));
    std::uint32_t failures = 0;
    for (std::uint64_t number = 0; number < 160; ++number) {
      CAPTURE(number);
      in_device_world<tiered_device>(2, number, [&](stream_ranks& ranks, tiered_device& mine, fake_world&) {
        const auto use = [&](tiered_state<buffer_type>& state) -> result<void> {
          for (std::uint32_t t = 0; t < tensors.size(); ++t) {
            const std::vector scope{tensor_id{t}};
            auto sums = state.allocate_whole(scope);
            if (!sums) {
              ranks.revoke();
              return sums.error();
            }
            fill_numbers(sums->tensor(0), sum_f32, t);
            if (auto done = state.all_reduce(*sums, sum_f32); !done) return done;
            const auto whole = state.gather(scope);
            if (!whole) return whole.error();
            std::vector<std::byte> twice = copy_of(sums->tensor(0));
            sum_f32.combine(twice.data(), copy_of(sums->tensor(0)).data(), twice.size());
            CHECK(copy_of(whole->tensor(0)) == twice);
          }
          return {};
        };
        bool has_failed = false;
        {
          buffer_type buffer({}, {mine.gpu, 448, 64}, {mine.pinned, 1 << 16, 64});
          tiered_state<buffer_type> state(who, tensors, ranks, mine.space, buffer, {.segment_bytes = 64});
          ranks.agree(0, ranks.after(hour)).value();  // all are ready
          if (to_index(ranks.rank()) == 0) mine.device.refuse_at = mine.device.calls + number;
          mine.device.refusals = 1;
          try {
            has_failed = !use(state);
          } catch (const system_error&) {  // of a fence of tier 0, whose wait was refused
            has_failed = true;
            ranks.revoke();
          }
          mine.device.refuse_at = ~0ULL;
          static_cast<void>(mine.gpu.queue().finish());  // the copies of a lost fence, before memory goes
          CHECK(mine.gpu.queue().finish().has_value());
        }
        failures += has_failed ? 1 : 0;
        const comm::agreed outcome = ranks.agree(has_failed ? 0 : 1, ranks.after(hour)).value();
        CHECK(outcome.failed.empty());
        if (outcome.bits == 1) return;
        ranks.shrink(outcome, ranks.after(hour)).value();
        // A queue that has lost a wait is unusable for good; that of tier 0 too.
        stream_queue queue(mine.gpu, device_id{0}, {}, mine.device);
        fake_gpu gpu(device_pool_source<fake_runtime>(device_id{0}, mine.device), device_id{0},
                     {.budget = 1 << 24}, {}, mine.device);
        tiered_memory space(gpu, queue, fake_executor(mine.device, queue.stream()));
        buffer_type buffer({}, {gpu, 448, 64}, {mine.pinned, 1 << 16, 64});
        tiered_state<buffer_type> again(who, tensors, ranks, space, buffer, {.segment_bytes = 64});
        use(again).value();
      });
    }
    CHECK(failures > 60);
  }
}
#endif
