// A sharded state whose pieces are on a device: over an imitation of NCCL, on streams that do their work
// later and in any order. Its oracle is a state in host memory of the same ranks.
#include <doctest/doctest.h>

#if defined(LLMMEM_TESTS_NCCL)
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/device_world.hpp"
#include "support/error_text.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using namespace llmmem_tests;

using device_state = sharded_state<table_partition, stream_ranks, worked_memory>;
using host_state = sharded_state<table_partition, side_of, host_space>;

/// The same contents in the pieces of both.
template <class Host, class Device>
void fill_pieces(Host& host, Device& device, rank_device& mine, const summed_tensors& of,
                 std::span<const tensor_id> later, std::uint64_t seed) {
  for (std::uint32_t t = 0; t < of.facts.size(); ++t) {
    const std::span<std::byte> piece = host.local(tensor_id{t});
    fill_numbers(piece, of.op, seed + t);
    const std::span<std::byte> to = device.local(tensor_id{t});
    const bool is_later = std::ranges::find(later, tensor_id{t}) != later.end();
    if (is_later) write_later(mine, to, piece);
    if (!is_later) std::copy(piece.begin(), piece.end(), to.begin());
  }
}

template <class Host, class Device>
void check_pieces(Host& host, Device& device) {
  for (std::uint32_t t = 0; t < host.tensors().size(); ++t)
    CHECK(copy_of(host.local(tensor_id{t})) == copy_of(device.local(tensor_id{t})));
}

template <class A, class B>
void check_wholes(const A& a, const B& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    CHECK(copy_of(a.tensor(i)) == copy_of(b.tensor(i)));
  CHECK(a.buffer_bytes() == b.buffer_bytes());
}

void check_moved(const moved_bytes& host, const moved_bytes& device) {
  CHECK(host == device);
}

}  // namespace

TEST_SUITE("device_state") {
  TEST_CASE("a state on a device has the bits, the messages and the memory of a state on the host") {
    for (const auto seed : seeds(88, 44)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(4U);
      const summed_tensors of = random_summed(random);
      const table_partition who = partition_of_kind(random, of.facts, kind, world);
      const sharded_options options{.segment_bytes = 1 + random.below(random.once_in(2) ? 40U : 4000U)};
      const auto scope = some_of(random, who.tensors());
      const bool is_all = random.once_in(2);
      in_device_world(world, seed, [&](stream_ranks& ranks, rank_device& mine, fake_world&) {
        host_space space({.budget = 1 << 24, .name = "rank"});
        host_state host(who, of.facts, ranks.side(), space, options);
        device_state device(who, of.facts, ranks, mine.space, options);
        check_pieces(host, device);  // zeros
        const std::uint64_t own = to_index(ranks.rank());
        fill_pieces(host, device, mine, of, scope, 1000 * own);
        host.refresh(scope).value();
        device.refresh(scope).value();
        check_pieces(host, device);
        check_wholes(host.gather(scope).value(), device.gather(scope).value());
        {
          const auto there = host.allocate_whole(scope).value();
          const auto here = device.allocate_whole(scope).value();
          for (std::size_t i = 0; i < there.size(); ++i) {
            fill_numbers(there.tensor(i), of.op, 77 * own + i);
            write_later(mine, here.tensor(i), there.tensor(i));
          }
          (is_all ? host.all_reduce(there, of.op) : host.reduce_scatter(there, of.op)).value();
          (is_all ? device.all_reduce(here, of.op) : device.reduce_scatter(here, of.op)).value();
        }
        check_pieces(host, device);
        check_wholes(host.gather(scope).value(), device.gather(scope).value());
        const sharded_stats a = host.stats();
        const sharded_stats b = device.stats();
        check_moved(a.gathers, b.gathers);
        check_moved(a.reduces, b.reduces);
        check_moved(a.refreshes, b.refreshes);
        CHECK(a.local_bytes == b.local_bytes);
        CHECK(a.peak_whole_bytes == b.peak_whole_bytes);
        CHECK(b.peak_stage_bytes >= a.peak_stage_bytes);
        CHECK(b.peak_stage_bytes < a.peak_stage_bytes + 16 * (world + 2));  // parts are 16 bytes apart
      });
    }
  }

  TEST_CASE("a state on a device gathers within a node, and reshards to another partition") {
    for (const auto seed : seeds(24, 12)) {
      CAPTURE(seed);
      random_numbers random(seed + 500);
      const summed_tensors of = random_summed(random);
      const table_partition nodes(hierarchical_zero(of.facts, rank_count{4}, rank_count{2}));
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const table_partition other = partition_of_kind(random, of.facts, kind, 3);
      const auto scope = some_of(random, nodes.tensors());
      in_device_world(4, seed, [&](stream_ranks& ranks, rank_device& mine, fake_world&) {
        host_space space({.budget = 1 << 24, .name = "rank"});
        host_state host(nodes, of.facts, ranks.side(), space, {.segment_bytes = 100});
        device_state device(nodes, of.facts, ranks, mine.space, {.segment_bytes = 100});
        fill_pieces(host, device, mine, of, scope, to_index(ranks.rank()));
        const std::uint32_t first = to_index(ranks.rank()) / 2 * 2;
        const std::vector<rank_id> members{rank_id{first}, rank_id{first + 1}};
        rank_group<side_of> there(ranks.side(), members);
        rank_group<stream_ranks> here(ranks, members);
        check_wholes(host.gather_within(there, scope).value(), device.gather_within(here, scope).value());
        host_state next_host(other, of.facts, ranks.side(), space, {.segment_bytes = 100});
        device_state next(other, of.facts, ranks, mine.space, {.segment_bytes = 100});
        host.reshard_to(next_host).value();
        device.reshard_to(next).value();
        check_pieces(next_host, next);
        CHECK(next_host.stats().reshards == next.stats().reshards);
      });
    }
  }

  TEST_CASE("wires, and sums that a device has no kernel for, are refused with the reason") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(37), 4}};
    in_device_world(2, 1, [&](stream_ranks& ranks, rank_device& mine, fake_world&) {
      const table_partition who(
          zero_partition(tensors, rank_count{2}, zero_stage::weights, state_kind::weights));
      CHECK_THROWS_WITH_AS(
          device_state(who, tensors, ranks, mine.space, {.wires = {.node_ranks = 2}}),
          "sharded_state: wires encode and decode on the host, which cannot access this space; use plain "
          "wires, the default",
          argument_error);
      device_state state(who, tensors, ranks, mine.space);
      const std::vector scope{tensor_id{0}};
      const auto whole = state.allocate_whole(scope).value();
      const reduce_op largest{.combine = sum_f32.combine, .element_bytes = 4};
      CHECK_THROWS_WITH_AS(
          static_cast<void>(state.reduce_scatter(whole, largest)),
          "sharded_state: a device sums floats, bfloat16s and halves; pass sum_f32, sum_bf16 or sum_f16",
          argument_error);
    });
  }

  TEST_CASE("a sum that is refused returns after the kernels that write its contribution") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(37), 4}};
    const table_partition who(
        zero_partition(tensors, rank_count{2}, zero_stage::weights, state_kind::weights));
    in_device_world(2, 1, [&](stream_ranks& ranks, rank_device& mine, fake_world&) {
      device_state state(who, tensors, ranks, mine.space);
      const auto computed = bytes_of_seed(37 * 4, 5);
      const auto refused_after = [&](const auto& sum) {
        const auto whole = state.allocate_whole(std::vector{tensor_id{0}}).value();
        write_later(mine, whole.tensor(0), computed);
        sum(whole);
        CHECK(copy_of(whole.tensor(0)) == computed);
      };
      refused_after([&](const auto& whole) {
        CHECK(state.reduce_scatter(whole, sum_bf16).code() == errc::size_mismatch);
      });
      refused_after([&](const auto& whole) {
        const reduce_op largest{.combine = sum_f32.combine, .element_bytes = 4};
        CHECK_THROWS_AS(static_cast<void>(state.reduce_scatter(whole, largest)), argument_error);
      });
    });
  }

  TEST_CASE("a reshard comes after what the streams of both spaces wait for") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(37), 4}};
    const table_partition who(
        zero_partition(tensors, rank_count{2}, zero_stage::weights, state_kind::weights));
    in_device_world(2, 1, [&](stream_ranks& ranks, rank_device& mine, fake_world&) {
      stream_queue queue(mine.memory, device_id{0}, {}, mine.device);
      worked_memory space(mine.memory, queue, fake_executor(mine.device, queue.stream()));
      device_state state(who, tensors, ranks, mine.space);
      device_state next(who, tensors, ranks, space);
      const auto computed = bytes_of_seed(state.local(tensor_id{0}).size(), to_index(ranks.rank()));
      for (int i = 0; i < 50; ++i)  // kernels before the one that writes
        REQUIRE(fake_runtime(mine.device).launch([] {}, mine.compute.stream()) == 0);
      write_later(mine, state.local(tensor_id{0}), computed);
      state.reshard_to(next).value();
      CHECK(copy_of(next.local(tensor_id{0})) == computed);
    });
  }

  TEST_CASE("a state whose construction is refused returns its memory") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(37), 4}};
    const table_partition who(
        zero_partition(tensors, rank_count{1}, zero_stage::weights, state_kind::weights));
    in_device_world(1, 1, [&](stream_ranks& ranks, rank_device& mine, fake_world&) {
      std::uint32_t refused = 0;
      for (std::uint64_t number = 0; number < 8; ++number) {
        CAPTURE(number);
        mine.device.refusals = 2;
        mine.device.refuse_at = mine.device.calls + number;
        try {
          const device_state state(who, tensors, ranks, mine.space);
          mine.device.refuse_at = ~0ULL;
          for (const std::byte each : state.local(tensor_id{0}))
            CHECK(each == std::byte{0});
        } catch (const llmmem::error& why) {
          ++refused;
        }
        mine.device.refuse_at = ~0ULL;
        mine.queue.finish().value();
        CHECK(mine.memory.used() == mine.memory.stats().kept_bytes);
      }
      CHECK(refused >= 4);
      CHECK(refused < 8);
    });
  }

  TEST_CASE("a refused call of the device or of NCCL ends an operation for all ranks, and nothing is lost") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::matrix(8, 12), 4},
                                            {"b", tensor_shape::vector(50), 4}};
    const std::vector scope{tensor_id{0}, tensor_id{1}};
    const std::vector<std::string> nccl_calls{"async_error", "put", "group_end", "record", "query"};
    std::uint32_t failures = 0;
    std::set<std::string> texts;
    // Of the device: its n-th call from here on. Of NCCL: the n-th call of one name.
    const auto check = [&](std::uint64_t number, const std::string& call) {
      CAPTURE(number);
      CAPTURE(call);
      in_device_world(3, number, [&](stream_ranks& ranks, rank_device& mine, fake_world& fake) {
        // Columns: their parts are packed.
        const table_partition who(
            split_2d(tensors, std::vector{split_axis::columns, split_axis::rows}, rank_count{3}));
        const auto use = [&](device_state& state) -> result<void> {
          for (std::uint32_t t = 0; t < tensors.size(); ++t) {
            const auto owned = dense(contents(tensors[t], t), who.owned(tensor_id{t}, ranks.rank()), 4);
            std::copy(owned.begin(), owned.end(), state.owned(tensor_id{t}).begin());
          }
          if (auto done = state.refresh(scope); !done) return done;
          const auto whole = state.gather(scope);
          if (!whole) return whole.error();
          for (std::uint32_t t = 0; t < tensors.size(); ++t)
            CHECK(copy_of(whole->tensor(t)) == contents(tensors[t], t));
          const auto sums = state.allocate_whole(scope);
          if (!sums) {
            ranks.revoke();
            return sums.error();
          }
          for (std::uint32_t t = 0; t < tensors.size(); ++t)
            fill_numbers(sums->tensor(t), sum_f32, t);
          return state.reduce_scatter(*sums, sum_f32);
        };
        bool has_failed = false;
        {
          device_state state(who, tensors, ranks, mine.space, {.segment_bytes = 64});
          ranks.agree(0, ranks.after(hour)).value();  // all are ready
          if (to_index(ranks.rank()) == 0) {
            if (call.empty()) mine.device.refuse_at = mine.device.calls + number / 2;
            mine.device.refusals = 1 + number % 2;
            if (!call.empty()) fake.fails_at[call] = fake.calls[call] + static_cast<std::uint32_t>(number);
          }
          const auto done = use(state);
          has_failed = !done;
          if (!done) {
            const bool is_known = done.code() == errc::device_failed || done.code() == errc::library_failed ||
                                  done.code() == errc::epoch_revoked || done.code() == errc::system_refused;
            if (!is_known) CHECK(done.error().message() == "");
            if (done.code() == errc::device_failed) texts.insert(done.error().message());
          }
        }
        mine.device.refuse_at = ~0ULL;
        failures += has_failed ? 1 : 0;
        const comm::agreed outcome = ranks.agree(has_failed ? 0 : 1, ranks.after(hour)).value();
        CHECK(outcome.failed.empty());
        if (outcome.bits == 1) return;
        ranks.shrink(outcome, ranks.after(hour)).value();
        // A queue that has lost a wait is unusable for good.
        stream_queue queue(mine.memory, device_id{0}, {}, mine.device);
        worked_memory space(mine.memory, queue, fake_executor(mine.device, queue.stream()));
        device_state again(who, tensors, ranks, space, {.segment_bytes = 64});
        use(again).value();
      });
    };
    for (std::uint64_t number = 0; number < 200;
         ++number)  // two for each call: the rank makes fewer than 100
      check(number, "");
    CHECK(failures > 100);
    for (const std::string& call : nccl_calls) {
      for (std::uint64_t number = 1; number <= 6; ++number)
        check(number, call);
    }
    const auto has_text = [&](const char* what) {
      return std::ranges::any_of(texts, [&](const std::string& each) { return each.starts_with(what); });
    };
    CHECK(has_text("fake_executor: launch: the device's runtime refused with status 2"));
    CHECK(has_text("device_events: record: the device's runtime refused with status 2"));
    CHECK(has_text("device_fence: a stream is to wait: the device's runtime refused with status 2"));
    CHECK(has_text("device_queue: the device's runtime refused with status 2"));
  }
}
#endif
