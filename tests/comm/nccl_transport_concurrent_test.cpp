#include <doctest/doctest.h>

#if defined(LLMMEM_TESTS_NCCL)
#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/nccl_memory.hpp>
#include <llmmem/comm/nccl_transport.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/comm_job.hpp"
#include "support/fake_nccl.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::fake_nccl;
using llmmem_tests::fake_world;

using side_of = communicator<sim_endpoint>;
template <bool Revoke = true, bool Grow = false>
using ranks_of = nccl_transport<side_of, fake_nccl<Revoke, Grow>>;
constexpr std::uint64_t second = 1'000'000'000;
constexpr std::uint64_t hour = 3600 * second;

static_assert(nccl_side<side_of>);
static_assert(nccl_side<communicator<thread_endpoint>>);
static_assert(transport<ranks_of<>>);
static_assert(transport<nccl_transport<communicator<thread_endpoint>>>);

/// All ranks of a world, joined on both channels; they leave in good order, having kept to NCCL's rules.
template <class Body>
void in_world(std::uint32_t world, std::uint64_t seed, Body body) {
  sim_network net({.seats = world, .seed = seed, .max_calls = 400'000});
  fake_world fake;
  net.run([&](sim_endpoint& end) {
    side_of side(end);
    side.join(side.after(second)).value();
    ranks_of<> ranks(side, nullptr, {}, {fake, end});
    ranks.join(ranks.after(second)).value();
    body(ranks, to_index(ranks.rank()));
    ranks.agree(0, ranks.after(second)).value();
    ranks.leave(ranks.after(second)).value();
    CHECK(ranks.stats().aborted == 0);
  });
  CHECK(fake.broken_rules == std::vector<std::string>{});
  CHECK(fake.left() == 0);
  CHECK(fake.is_tidy());
}

/// A side channel for whose next agreement but `more` there is no memory.
struct side_without_memory : side_of {
  using side_of::side_of;
  int more = -1;

  result<comm::agreed> agree(std::uint64_t bits, deadline by) {
    if (more >= 0 && more-- == 0) throw std::bad_alloc();
    return side_of::agree(bits, by);
  }
};
static_assert(nccl_side<side_without_memory>);

std::span<std::byte> bytes_in(std::vector<float>& values) {
  return std::as_writable_bytes(std::span(values));
}

/// What is the sum of `rank + i` over all ranks.
bool is_sum(const std::vector<float>& values, std::uint32_t world) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto n = static_cast<float>(world);
    if (values[i] != n * static_cast<float>(i) + n * (n - 1) / 2) return false;
  }
  return true;
}

template <class Ranks>
result<void> add_up(Ranks& ranks, deadline by) {
  std::vector<float> values(300);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(to_index(ranks.rank()) + i);
  const std::vector<float> before = values;
  const result<void> done = ranks.all_reduce(bytes_in(values), bytes_in(values), ncclFloat, ncclSum, by);
  if (done) CHECK(is_sum(values, to_number(ranks.world())));
  return done;
}

/// Agrees, and forms anew until that is done. How often it had to.
template <class Ranks>
std::uint32_t recover(Ranks& ranks) {
  for (std::uint32_t times = 1;; ++times) {
    REQUIRE(times < 20);
    ranks.revoke();
    const comm::agreed outcome = ranks.agree(1, ranks.after(hour)).value();
    if (ranks.shrink(outcome, ranks.after(hour))) return times;
  }
}

}  // namespace

TEST_SUITE("nccl_transport") {
  TEST_CASE("a missing device and an NCCL that is too old are reported at construction") {
    sim_network net({.seats = 1, .max_calls = 400'000});
    net.run([](sim_endpoint& end) {
      side_of side(end);
      fake_world fake;
      fake.device = "there is no CUDA driver";
      CHECK_THROWS_WITH_AS(ranks_of<>(side, nullptr, {}, {fake, end}),
                           "nccl_transport: no device: there is no CUDA driver", system_error);
      fake.device = "";
      fake.version = 22703;
      CHECK_THROWS_WITH_AS(ranks_of<>(side, nullptr, {.name = "gradients"}, {fake, end}),
                           "gradients: the loaded NCCL has version code 22703, but at least 22807 is needed; "
                           "check which libnccl.so.2 the loader finds",
                           system_error);
      fake.version = 29900;
      fake.fails_at = {{"make_event", 1}, {"allocate", 1}};
      CHECK_THROWS_WITH_AS(ranks_of<>(side, nullptr, {}, {fake, end}),
                           "nccl_transport: cudaEventCreate: a CUDA failure of the fake", system_error);
      CHECK_THROWS_WITH_AS(ranks_of<>(side, nullptr, {}, {fake, end}),
                           "nccl_transport: cudaMallocAsync of 2 bytes: a CUDA failure of the fake",
                           system_error);
      CHECK(fake.is_tidy());
    });
    // The real one, here or where there is a device.
    thread_network one(1);
    thread_endpoint end(one, seat_id{0});
    communicator<thread_endpoint> side(end);
    if (const char* const why = nccl_library{}.why_no_device()) {
      CHECK_THROWS_WITH_AS((nccl_transport<communicator<thread_endpoint>>(side, nullptr)),
                           (std::string("nccl_transport: no device: ") + why).c_str(), system_error);
    }
  }

  TEST_CASE("all ranks make windows, use them and end them in order, and windows end with their epoch") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      sim_network net({.seats = 4, .seed = seed, .max_calls = 400'000});
      fake_world fake;
      net.run([&](sim_endpoint& end) {
        side_of side(end);
        side.join(side.after(second)).value();
        ranks_of<> ranks(side, nullptr, {}, {fake, end});
        ranks.join(ranks.after(second)).value();
        nccl_memory<fake_nccl<>> memory(3 * 4096, {fake, end});
        const std::span<std::byte> first = memory.bytes().first(4096);
        const std::span<std::byte> second_page = memory.bytes().subspan(4096, 4096);
        CHECK(ranks.register_window(first, ranks.after(second)).value());
        CHECK(ranks.register_window(second_page, ranks.after(second), nccl_window::any_offset).value());
        CHECK(ranks.windows() == 2);
        CHECK(fake.windows.size() >= 2);
        CHECK(ranks.deregister_window(second_page));
        CHECK(ranks.deregister_window(second_page));  // there is none any more
        CHECK(ranks.windows() == 1);
        CHECK(ranks.all_gather(first.first(16), first.first(64), ranks.after(second)));
        recover(ranks);
        CHECK(ranks.windows() == 0);
        CHECK(ranks.register_window(first, ranks.after(second)).value());
        CHECK(ranks.all_gather(first.first(16), first.first(64), ranks.after(second)));
        ranks.agree(0, ranks.after(second)).value();
        CHECK(ranks.leave(ranks.after(second)));
        CHECK(ranks.windows() == 0);
      });
      CHECK(fake.broken_rules == std::vector<std::string>{});
      CHECK(fake.windows.empty());
      CHECK(fake.memory.empty());
    }
  }

  TEST_CASE("an impossible window is refused before NCCL is called, and a failure to make one is reported") {
    sim_network net({.seats = 2, .max_calls = 400'000});
    fake_world fake;
    net.run([&](sim_endpoint& end) {
      side_of side(end);
      side.join(side.after(second)).value();
      ranks_of<> ranks(side, nullptr, {}, {fake, end});
      ranks.join(ranks.after(second)).value();
      nccl_memory<fake_nccl<>> memory(4 * 4096, {fake, end});
      const std::span<std::byte> bytes = memory.bytes();
      const deadline by = ranks.after(second);
      CHECK(ranks.register_window(bytes.first(0), by).code() == errc::size_mismatch);
      CHECK(ranks.register_window(bytes.subspan(64), by).code() == errc::bad_granularity);
      CHECK(ranks.register_window(bytes.subspan(4096, 8192), by).value());
      for (const auto& [from, count, shared] :
           {std::array<std::size_t, 3>{0, 4097, 1}, {8192, 8192, 4096}, {4096, 1, 1}, {0, 16384, 8192}}) {
        const auto refused = ranks.register_window(bytes.subspan(from, count), by);
        REQUIRE(refused.code() == errc::overlapping_ranges);
        CHECK(refused.error().wanted == count);
        CHECK(refused.error().found == shared);
      }
      CHECK(ranks.register_window(bytes.first(4096), by).value());
      CHECK(ranks.windows() == 2);
      side.agree(0, by).value();
      fake.makes_no_windows = true;
      CHECK_FALSE(ranks.register_window(bytes.subspan(12288), by).value());
      CHECK(ranks.windows() == 2);
      side.agree(0, by).value();
      fake.fails_at["put"] = fake.calls["put"] + 1;
      const auto failed = ranks.register_window(bytes.subspan(12288), by);
      CHECK_FALSE(failed.has_value());
      CHECK(side.is_revoked());
      CHECK(ranks.deregister_window(bytes.subspan(12288)).code() == errc::epoch_revoked);
      CHECK(ranks.deregister_window(bytes.first(4096)).code() == errc::epoch_revoked);
      recover(ranks);
      CHECK(ranks.windows() == 0);
      CHECK_FALSE(ranks.register_window(bytes, ranks.after(second)).value());
      ranks.agree(0, ranks.after(second)).value();
      ranks.leave(ranks.after(second)).value();
    });
    CHECK(fake.broken_rules == std::vector<std::string>{});
    CHECK(fake.memory.empty());
  }

  TEST_CASE("memory from NCCL is taken and returned, or the reason is reported") {
    sim_network net({.seats = 1, .max_calls = 400'000});
    fake_world fake;
    net.run([&](sim_endpoint& end) {
      using memory_of = nccl_memory<fake_nccl<>>;
      const fake_nccl<> api(fake, end);
      {
        memory_of one(100, api);
        memory_of other(std::move(one));
        CHECK(one.bytes().empty());
        CHECK(other.bytes().size() == 100);
        memory_of third(200, api);
        const std::byte* const data = other.bytes().data();
        third = std::move(other);
        CHECK(third.bytes().data() == data);
        CHECK(third.bytes().size() == 100);
        CHECK(fake.memory.size() == 2);
      }
      CHECK(fake.memory.empty());
      CHECK_THROWS_WITH_AS(memory_of(0, api), "nccl_memory: 0 bytes; at least 1 is needed", length_error);
      fake.fails_at["take_memory"] = fake.calls["take_memory"] + 1;
      CHECK_THROWS_WITH_AS(memory_of(7, api), "nccl_memory: ncclMemAlloc of 7 bytes: a failure of the fake",
                           system_error);
      fake.device = "there is no CUDA driver";
      CHECK_THROWS_WITH_AS(memory_of(7, api), "nccl_memory: no device: there is no CUDA driver",
                           system_error);
    });
    CHECK(fake.broken_rules == std::vector<std::string>{});
  }

  TEST_CASE("messages arrive in the order of sending, also those without bytes") {
    in_world(3, 1, [](ranks_of<>& ranks, std::uint32_t self) {
      const deadline by = ranks.after(second);
      if (self == 0) {
        ranks.send(bytes_of_seed(1000, 1), rank_id{1}, 7, by).value();
        ranks.send({}, rank_id{1}, 7, by).value();
        ranks.send(bytes_of_seed(10, 2), rank_id{1}, 8, by).value();
      }
      if (self == 1) {
        std::vector<std::byte> got(1000);
        ranks.recv(got, rank_id{0}, 7, by).value();
        CHECK(got == bytes_of_seed(1000, 1));
        ranks.recv({}, rank_id{0}, 7, by).value();
        got.resize(10);
        ranks.recv(got, rank_id{0}, 8, by).value();
        CHECK(got == bytes_of_seed(10, 2));
      }
      std::vector<std::byte> into(500);
      ranks.exchange(bytes_of_seed(500, self), rank_id{(self + 1) % 3}, into, rank_id{(self + 2) % 3}, 0, by)
          .value();
      CHECK(into == bytes_of_seed(500, (self + 2) % 3));
      ranks.exchange(bytes_of_seed(500, 9), rank_id{self}, into, rank_id{self}, 0, by).value();
      CHECK(into == bytes_of_seed(500, 9));
    });
  }

  TEST_CASE("the collectives made of sends run over NCCL, and NCCL's own give the same results") {
    for (std::uint32_t world = 1; world <= 5; ++world) {
      CAPTURE(world);
      in_world(world, world, [&](ranks_of<>& ranks, std::uint32_t self) {
        const deadline by = ranks.after(second);
        for (std::uint32_t root = 0; root < world; ++root) {
          auto data = bytes_of_seed(900, self);
          broadcast(ranks, data, rank_id{root}, {.by = by}).value();
          CHECK(data == bytes_of_seed(900, root));
          data = bytes_of_seed(900, self + 50);
          ranks.broadcast(data, rank_id{root}, by).value();
          CHECK(data == bytes_of_seed(900, root + 50));
        }
        std::vector<std::byte> all(100 * std::size_t{world});
        std::vector<std::byte> expected;
        for (std::uint32_t r = 0; r < world; ++r) {
          const auto its = bytes_of_seed(100, r);
          expected.insert(expected.end(), its.begin(), its.end());
        }
        ranks.all_gather(bytes_of_seed(100, self), all, by).value();
        CHECK(all == expected);
        std::vector<std::byte> other(all.size());
        const auto own = bytes_of_seed(100, self);
        std::copy(own.begin(), own.end(), other.begin() + 100 * static_cast<std::ptrdiff_t>(self));
        all_gather(ranks, other, even_blocks(other.size(), ranks.world()), {.by = by}).value();
        CHECK(other == expected);
        barrier(ranks, {.by = by}).value();

        add_up(ranks, by).value();
        std::vector<float> parts(std::size_t{world} * 20);
        for (std::size_t i = 0; i < parts.size(); ++i)
          parts[i] = static_cast<float>(self + i);
        std::vector<float> sum(20);
        ranks.reduce_scatter(bytes_in(parts), bytes_in(sum), ncclFloat, ncclSum, by).value();
        for (std::size_t i = 0; i < sum.size(); ++i) {
          const auto n = static_cast<float>(world);
          CHECK(sum[i] == n * static_cast<float>(self * 20 + i) + n * (n - 1) / 2);
        }
        ranks.all_reduce({}, {}, ncclFloat, ncclSum, by).value();
      });
    }
  }

  // Its pieces and messages are of one space: pinned memory, which both the host, which adds, and NCCL use.
  // Of a state in device memory: device_state_concurrent_test.cpp.
  TEST_CASE("a sharded state gathers, sums and refreshes its tensors over NCCL") {
    for (std::uint32_t world = 1; world <= 4; ++world) {
      CAPTURE(world);
      const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(37), 4},
                                              {"b", tensor_shape::matrix(3, 5), 4}};
      in_world(world, world, [&](ranks_of<>& ranks, std::uint32_t self) {
        host_space pinned({.budget = 1 << 20, .name = "pinned"});
        const auto floats = [](std::span<std::byte> bytes) {
          return std::span<float>(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
        };
        const zero_partition sharded(tensors, rank_count{world}, zero_stage::weights, state_kind::weights);
        sharded_state weights(sharded, tensors, ranks, pinned);
        sharded_state gradients(sharded, tensors, ranks, pinned);
        const zero_partition whole(tensors, rank_count{world}, zero_stage::gradients, state_kind::weights);
        sharded_state copies(whole, tensors, ranks, pinned);
        const std::array scope{tensor_id{0}, tensor_id{1}};
        for (const tensor_id each : scope) {
          const std::uint64_t begin = weights.layout().local(each, ranks.rank()).begin;
          const std::span<float> mine = floats(weights.local(each));
          for (std::size_t i = 0; i < mine.size(); ++i)
            mine[i] = static_cast<float>(100 * to_index(each) + begin + i);
        }
        {
          const auto gathered = weights.gather(scope).value();
          const auto sums = gradients.allocate_whole(scope).value();
          for (const tensor_id each : scope) {
            const std::span<float> all = floats(gathered.tensor(to_index(each)));
            const std::span<float> sum = floats(sums.tensor(to_index(each)));
            for (std::size_t i = 0; i < all.size(); ++i) {
              CHECK(all[i] == static_cast<float>(100 * to_index(each) + i));
              sum[i] = static_cast<float>(self + i);
            }
          }
          gradients.reduce_scatter(sums, sum_f32).value();
        }
        const auto n = static_cast<float>(world);
        for (const tensor_id each : scope) {
          const std::uint64_t begin = gradients.layout().local(each, ranks.rank()).begin;
          const std::span<float> mine = floats(gradients.local(each));
          for (std::size_t i = 0; i < mine.size(); ++i)
            CHECK(mine[i] == n * static_cast<float>(begin + i) + n * (n - 1) / 2);
          for (float& of : floats(copies.owned(each)))
            of = static_cast<float>(to_index(each) + 7);
        }
        copies.refresh(scope).value();
        for (const tensor_id each : scope) {
          for (const float of : floats(copies.local(each)))
            CHECK(of == static_cast<float>(to_index(each) + 7));
        }
      });
    }
  }

  TEST_CASE("mismatched sizes and ranks are refused before any rank sends, and revoke nothing") {
    in_world(2, 1, [](ranks_of<>& ranks, std::uint32_t self) {
      const deadline by = ranks.after(second);
      std::vector<std::byte> ten(10);
      std::vector<std::byte> five(5);
      const std::uint32_t none = 0;
      CHECK(ranks.send(ten, rank_id{2}, 0, by).error() == failure{errc::out_of_range, 2, 2, 1});
      CHECK(ranks.send(ten, rank_id{self}, 0, by).error() == failure{errc::size_mismatch, none, 10, 0});
      CHECK(ranks.recv(ten, rank_id{self}, 0, by).error() == failure{errc::size_mismatch, none, 10, 0});
      CHECK(ranks.exchange(ten, rank_id{self}, five, rank_id{self}, 0, by).error() ==
            failure{errc::size_mismatch, none, 10, 5});
      CHECK(ranks.exchange(ten, rank_id{self}, five, rank_id{1 - self}, 0, by).error() ==
            failure{errc::size_mismatch, none, 10, 0});
      CHECK(ranks.all_reduce(ten, five, ncclUint8, ncclSum, by).error() ==
            failure{errc::size_mismatch, none, 10, 5});
      CHECK(ranks.all_reduce(ten, ten, ncclFloat, ncclSum, by).error() ==
            failure{errc::size_mismatch, none, 4, 10});
      CHECK(ranks.reduce_scatter(ten, ten, ncclUint8, ncclSum, by).error() ==
            failure{errc::size_mismatch, none, 20, 10});
      CHECK(ranks.reduce_scatter(ten, five, ncclBfloat16, ncclSum, by).error() ==
            failure{errc::size_mismatch, none, 2, 5});
      CHECK(ranks.all_gather(five, five, by).error() == failure{errc::size_mismatch, none, 10, 5});
      CHECK(ranks.broadcast(ten, rank_id{2}, by).error() == failure{errc::out_of_range, 2, 2, 1});
      CHECK_FALSE(ranks.side().is_revoked());
    });
  }

  TEST_CASE_TEMPLATE(
      "regardless of which rank dies at any time, no call waits for long, and those left continue by NCCL's "
      "rules",
      ranks_type, ranks_of<true>, ranks_of<false>) {
    std::uint64_t recovered = 0;
    std::uint64_t shrunk = 0;
    for (const auto seed : llmmem_tests::seeds(150)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(2 + random() % 4);
      sim_network net({.seats = world, .seed = seed, .max_calls = 400'000});
      fake_world fake;
      for (std::uint32_t victims = 1 + static_cast<std::uint32_t>(random() % 2); victims > 0; --victims)
        net.kill_at(seat_id{static_cast<std::uint32_t>(random() % world)}, 200'000 + random() % 5'000'000);
      net.run([&](sim_endpoint& end) {
        side_of side(end);
        if (!side.join(side.after(second))) return;
        ranks_type ranks(side, nullptr, {.poll_ns = 100'000}, {fake, end});
        if (!ranks.join(ranks.after(hour))) recovered += recover(ranks);
        for (std::uint32_t round = 0; round < 12; ++round) {
          result<void> done;
          if (round % 3 == 0) {
            done = barrier(ranks, {.by = ranks.after(hour)});
          } else {
            done = add_up(ranks, ranks.after(hour));
          }
          if (!done) CHECK((done.code() == errc::peer_failed || done.code() == errc::epoch_revoked));
          const comm::agreed outcome = ranks.agree(done ? 1 : 0, ranks.after(hour)).value();
          if (outcome.bits == 1 && outcome.failed.empty()) continue;
          if (!ranks.shrink(outcome, ranks.after(hour))) recovered += recover(ranks);
          ++recovered;
          shrunk += ranks.stats().shrunk;
        }
        static_cast<void>(ranks.leave(ranks.after(hour)));
        CHECK(end.now_ns() < 60 * second);
      });
      CHECK(fake.broken_rules == std::vector<std::string>{});
      CHECK(fake.left() == 0);
    }
    CHECK(recovered > 50);
    // Without ncclCommRevoke there is nothing left to shrink.
    const bool can_shrink = std::is_same_v<ranks_type, ranks_of<true>>;
    CHECK((shrunk > 20) == can_shrink);
  }

  TEST_CASE("a refusal by NCCL or CUDA ends the epoch for all, and all continue") {
    const std::vector<std::string> calls{"unique_id", "init",   "async_error", "put",
                                         "group_end", "record", "query",       "revoke"};
    std::set<std::string> texts;
    for (const std::string& call : calls) {
      for (std::uint32_t number = 1; number <= (call == "async_error" ? 60 : 9); ++number) {
        CAPTURE(call);
        CAPTURE(number);
        sim_network net({.seats = 3, .seed = number, .max_calls = 400'000});
        fake_world fake;
        fake.fails_at[call] = number;
        if (call == "revoke") fake.fails_at["put"] = 1;
        net.run([&](sim_endpoint& end) {
          side_of side(end);
          side.join(side.after(second)).value();
          ranks_of<> ranks(side, nullptr, {}, {fake, end});
          if (const auto joined = ranks.join(ranks.after(hour)); !joined) {
            if (joined.code() == errc::library_failed) texts.insert(joined.error().message());
            recover(ranks);
          }
          for (std::uint32_t round = 0; round < 4; ++round) {
            const auto done = add_up(ranks, ranks.after(hour));
            if (!done) {
              CHECK((done.code() == errc::library_failed || done.code() == errc::epoch_revoked));
              if (done.code() == errc::library_failed) texts.insert(done.error().message());
              CHECK(side.is_revoked());
              CHECK_FALSE(ranks.is_ready());
            }
            const comm::agreed outcome = ranks.agree(done ? 1 : 0, ranks.after(hour)).value();
            CHECK(outcome.failed.empty());
            if (outcome.bits != 1 && !ranks.shrink(outcome, ranks.after(hour))) recover(ranks);
          }
          if (const auto left = ranks.leave(ranks.after(hour)); !left)
            CHECK((left.code() == errc::library_failed || left.code() == errc::epoch_revoked ||
                   left.code() == errc::peer_failed));
          CHECK(end.now_ns() < 60 * second);
        });
        CHECK(fake.broken_rules == std::vector<std::string>{});
        CHECK(fake.left() == 0);
      }
    }
    const std::string then = "; revoke(), agree() and continue with the ranks that are left";
    CHECK(
        texts.contains("nccl_transport: ncclAllReduce: remote process exited: the underlying library failed "
                       "with its status 6" +
                       then));
    CHECK(
        texts.contains("nccl_transport: ncclGetUniqueId: a failure of the fake: the underlying library "
                       "failed with its status 2" +
                       then));
    CHECK(
        texts.contains("nccl_transport: cudaEventRecord: a CUDA failure of the fake: the underlying library "
                       "failed with its status 1" +
                       then));
  }

  TEST_CASE("a process that does not answer in time is named, and its memory is left alone from then on") {
    for (const bool hangs : {false, true}) {
      CAPTURE(hangs);
      sim_network net({.seats = 2, .seed = 1, .max_calls = 400'000});
      fake_world fake;
      fake.revoke_hangs = hangs;
      net.run([&](sim_endpoint& end) {
        side_of side(end);
        side.join(side.after(second)).value();
        ranks_of<> ranks(side, nullptr, {.stop_ns = second / 10}, {fake, end});
        ranks.join(ranks.after(second)).value();
        if (to_index(ranks.rank()) == 0) {
          std::vector<std::byte> bytes(100);
          const auto late = ranks.recv(bytes, rank_id{1}, 0, ranks.after(second / 100));
          CHECK(late.error() == failure{errc::peer_timed_out, 1, 100, 0});
          for (const auto& each : fake.all) {
            if (each->rank == 0) CHECK(each->queue.empty());
          }
          CHECK(ranks.stats().revoked == (hangs ? 0 : 1));
          CHECK(ranks.stats().aborted == (hangs ? 1 : 0));
          CHECK(ranks.recv(bytes, rank_id{1}, 0, ranks.after(second)).code() == errc::epoch_revoked);
        } else {
          end.work(second / 20);
          CHECK(ranks.send(bytes_of_seed(100, 1), rank_id{0}, 0, ranks.after(second)).code() ==
                errc::epoch_revoked);
        }
        // Nobody is excluded, which NCCL does not take: a fresh one.
        ranks.shrink(ranks.agree(1, ranks.after(second)).value(), ranks.after(second)).value();
        CHECK(ranks.stats().fresh == 2);
        add_up(ranks, ranks.after(second)).value();
        ranks.agree(1, ranks.after(second)).value();
        ranks.leave(ranks.after(second)).value();
      });
      CHECK(fake.broken_rules == std::vector<std::string>{});
      CHECK(fake.left() == 0);
    }
  }

  TEST_CASE("a call that ends while NCCL still launches it is aborted, because NCCL cannot revoke a launch") {
    sim_network net({.seats = 2, .seed = 1, .max_calls = 400'000});
    fake_world fake;
    net.run([&](sim_endpoint& end) {
      side_of side(end);
      side.join(side.after(second)).value();
      ranks_of<> ranks(side, nullptr, {}, {fake, end});
      ranks.join(ranks.after(second)).value();
      if (to_index(ranks.rank()) == 0) {
        std::vector<std::byte> bytes(100);
        CHECK(ranks.recv(bytes, rank_id{1}, 0, ranks.after(0)).code() == errc::peer_timed_out);
        CHECK(ranks.stats().revoked == 0);
        CHECK(ranks.stats().aborted == 1);
      }
      recover(ranks);
      CHECK(ranks.stats().fresh == 2);
      add_up(ranks, ranks.after(second)).value();
      ranks.agree(1, ranks.after(second)).value();
      ranks.leave(ranks.after(second)).value();
    });
    CHECK(fake.broken_rules == std::vector<std::string>{});
    CHECK(fake.left() == 0);
  }

  TEST_CASE("the next agreement settles an interrupted setup") {
    for (const auto seed : llmmem_tests::seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(2 + random() % 3);
      sim_network net({.seats = world, .seed = seed, .max_calls = 400'000});
      fake_world fake;
      const std::uint64_t given = random() % 2'000'000;
      const auto hasty = static_cast<std::uint32_t>(random() % world);
      net.run([&](sim_endpoint& end) {
        side_of side(end);
        side.join(side.after(second)).value();
        ranks_of<> ranks(side, nullptr, {}, {fake, end});
        const bool is_hasty = to_index(side.rank()) == hasty;
        const auto joined = ranks.join(ranks.after(is_hasty ? given : hour));
        if (!joined) ranks.revoke();
        const comm::agreed outcome = ranks.agree(joined ? 3 : 1, ranks.after(hour)).value();
        CHECK((outcome.bits & 1) == 1);  // a user's bits, not a vote
        if ((outcome.bits & 2) == 0 && !ranks.shrink(outcome, ranks.after(hour))) recover(ranks);
        add_up(ranks, ranks.after(hour)).value();
        ranks.agree(1, ranks.after(hour)).value();
        ranks.leave(ranks.after(hour)).value();
        CHECK(end.now_ns() < 60 * second);
      });
      CHECK(fake.broken_rules == std::vector<std::string>{});
      CHECK(fake.left() == 0);
    }
  }

  TEST_CASE("a newcomer is admitted by a fresh communicator, or by growth if its seat is the highest") {
    for (const std::uint32_t died : {0U, 1U, 2U}) {
      CAPTURE(died);
      sim_network net({.seats = 3, .seed = died, .max_calls = 400'000});
      fake_world fake;
      net.kill_at(seat_id{died}, 40'000'000);
      net.restart_after(seat_id{died}, 100'000'000);
      net.run([&](sim_endpoint& end) {
        side_of side(end);
        side.join(side.after(hour)).value();
        ranks_of<true, true> ranks(side, nullptr, {.poll_ns = 500'000}, {fake, end});
        ranks.join(ranks.after(hour)).value();
        if (end.incarnation() == 0) {
          while (add_up(ranks, ranks.after(hour))) {
          }
          recover(ranks);
          CHECK(ranks.stats().shrunk == 1);
          while (side.waiting().empty())
            add_up(ranks, ranks.after(hour)).value(), end.work(1'000'000), side.poll();
          comm::agreed outcome = ranks.agree(1, ranks.after(hour)).value();
          while (outcome.joining.empty())
            outcome = ranks.agree(1, ranks.after(hour)).value();
          ranks.admit(outcome, ranks.after(hour)).value();
          CHECK(ranks.stats().grown == (died == 2 ? 1 : 0));
          CHECK(ranks.stats().fresh == (died == 2 ? 1 : 2));
        }
        CHECK(ranks.world() == rank_count{3});
        add_up(ranks, ranks.after(hour)).value();
        ranks.agree(1, ranks.after(hour)).value();
        ranks.leave(ranks.after(hour)).value();
      });
      CHECK(fake.broken_rules == std::vector<std::string>{});
      CHECK(fake.left() == 0);
    }
  }

  TEST_CASE("without memory for an agreement there is no communicator to use, and all ranks continue") {
    for (const int vote : {0, 1}) {
      CAPTURE(vote);
      sim_network net({.seats = 3, .seed = 5, .max_calls = 400'000});
      fake_world fake;
      net.kill_at(seat_id{2}, 40'000'000);
      net.restart_after(seat_id{2}, 100'000'000);
      std::uint32_t thrown = 0;
      net.run([&](sim_endpoint& end) {
        side_without_memory side(end);
        side.join(side.after(hour)).value();
        nccl_transport<side_without_memory, fake_nccl<true, true>> ranks(side, nullptr, {.poll_ns = 500'000},
                                                                         {fake, end});
        if (!ranks.join(ranks.after(hour))) recover(ranks);
        if (end.incarnation() == 0) {
          while (add_up(ranks, ranks.after(hour))) {
          }
          recover(ranks);
          while (side.waiting().empty())
            add_up(ranks, ranks.after(hour)).value(), end.work(1'000'000), side.poll();
          comm::agreed outcome = ranks.agree(1, ranks.after(hour)).value();
          while (outcome.joining.empty())
            outcome = ranks.agree(1, ranks.after(hour)).value();
          CHECK(ranks.is_ready());
          if (to_index(ranks.rank()) == 0) side.more = vote;
          bool is_admitted = false;
          try {
            is_admitted = ranks.admit(outcome, ranks.after(hour)).has_value();
          } catch (const std::bad_alloc&) {
            ++thrown;
          }
          CHECK_FALSE(is_admitted);
          CHECK_FALSE(ranks.is_ready());
          recover(ranks);
        }
        CHECK(ranks.world() == rank_count{3});
        add_up(ranks, ranks.after(hour)).value();
        ranks.agree(1, ranks.after(hour)).value();
        ranks.leave(ranks.after(hour)).value();
      });
      CHECK(thrown == 1);
      CHECK(fake.broken_rules == std::vector<std::string>{});
      CHECK(fake.left() == 0);
    }
  }

  TEST_CASE("no rank waits for a rank that does not leave with the others") {
    sim_network net({.seats = 2, .seed = 3, .max_calls = 400'000});
    fake_world fake;
    net.run([&](sim_endpoint& end) {
      side_of side(end);
      side.join(side.after(second)).value();
      ranks_of<> ranks(side, nullptr, {}, {fake, end});
      ranks.join(ranks.after(second)).value();
      if (to_index(ranks.rank()) == 0) {
        CHECK(ranks.leave(ranks.after(second / 10)).code() == errc::peer_timed_out);
        CHECK(ranks.stats().aborted == 1);
        CHECK(ranks.leave(ranks.after(second / 10)));
      } else {
        end.work(second);
      }
    });
    CHECK(fake.broken_rules == std::vector<std::string>{});
    CHECK(fake.left() == 0);
  }

  TEST_CASE("a rank that leaves after a failed call aborts: NCCL finalises nothing that was revoked") {
    sim_network net({.seats = 1});
    fake_world fake;
    fake.fails_at["put"] = 1;
    net.run([&](sim_endpoint& end) {
      side_of side(end);
      side.join(side.after(second)).value();
      ranks_of<> ranks(side, nullptr, {}, {fake, end});
      ranks.join(ranks.after(second)).value();
      CHECK(add_up(ranks, ranks.after(second)).code() == errc::library_failed);
      ranks.leave(ranks.after(second)).value();
      CHECK(ranks.stats().aborted == 1);
    });
    CHECK(fake.broken_rules == std::vector<std::string>{});
    CHECK(fake.left() == 0);
  }
}
#else
TEST_CASE("NCCL or the CUDA Toolkit is not here: nccl_transport was not tested" *
          doctest::description("skipped")) {
  MESSAGE("llmmem::nccl was not found");
}
#endif
