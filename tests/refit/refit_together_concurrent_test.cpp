#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/refit/refit_device.hpp>
#include <llmmem/refit/refit_together.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/stash.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sim_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t second = 1'000'000'000;

/// A queue that refuses a copy, or fails the wait for one, as a device that is lost does.
struct failing_copies {
  struct fence_type {
    bool fails = false;
    void wait() const {
      if (fails) throw system_error("the device has failed");
    }
  };

  std::size_t copies = 0;
  std::size_t refused = ~std::size_t{0};
  std::size_t failed = ~std::size_t{0};

  result<fence_type> copy_in_async(host_space::range_type to, std::span<const std::byte> from,
                                   std::span<const fence_type>) {
    const std::size_t copy = copies++;
    if (copy == refused) return failure{.code = errc::dead_range};
    std::memcpy(to.data, from.data(), from.size());
    return fence_type{copy == failed};
  }
};

using device_weights = versioned<refit_device_image<host_space>, double_buffer>;

/// An engine's rank with its stand-in for a device.
struct device_rank {
  static constexpr std::uint64_t piece = 64;

  device_rank() {
    for (std::size_t i = 0; i < 2; ++i)
      memory.emplace_back(layout.bytes());
  }

  static refit_plan plan_of_one() {
    static const std::vector<refit_tensor> tensors{{.name = "a", .shape = tensor_shape::matrix(7, 32)},
                                                   {.name = "b", .shape = tensor_shape::vector(129)}};
    static const std::array one{rank_id{0}};
    static const sharding::replicated all(facts_of(tensors), rank_count{1});
    return make_refit(refit_side<sharding::replicated>{tensors, all, one},
                      refit_side<sharding::replicated>{tensors, all, one});
  }
  static std::byte byte_of(std::size_t i, std::uint64_t number, std::uint32_t rank) {
    return static_cast<std::byte>(i * (2 * number + 1) + number + 31 * rank);
  }
  /// What a refit has published on the host.
  refit_image image(std::uint64_t number, std::uint32_t rank) {
    auto& bytes = memory[number % 2];
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = byte_of(i, number, rank);
    refit_image made(layout, bytes);
    made.set_number(number);
    return made;
  }
  [[nodiscard]] static bool is_sound(const refit_device_image<host_space>& of, std::uint32_t rank) {
    const auto has = of.memory().span();
    for (std::size_t i = 0; i < has.size(); ++i) {
      if (has[i] != byte_of(i, of.number(), rank)) return false;
    }
    return true;
  }
  /// The number that it serves; 0: none.
  [[nodiscard]] std::uint64_t served(std::uint32_t rank) {
    const auto newest = weights.snapshot();
    if (!newest) return 0;
    CHECK(is_sound(**newest, rank));
    return (*newest)->number();
  }
  [[nodiscard]] std::uint64_t pieces() const { return (layout.bytes() + piece - 1) / piece; }

  refit_plan plan = plan_of_one();
  refit_layout layout{plan, rank_id{0}};
  std::vector<std::vector<std::byte>> memory{};
  host_space device{{.budget = 1 << 20, .name = "device"}};
  host_space pinned{{.budget = 1 << 10, .name = "pinned"}};
  device_weights weights{{}, [this](std::size_t) { return refit_device_image(layout, device); }};
  failing_copies queue{};
  refit_upload<host_space, failing_copies> upload{queue, pinned, piece};
};

}  // namespace

TEST_CASE("devices of all ranks take a version together, or each keeps the one before it") {
  enum class trouble : std::uint8_t { none, refused_copy, failed_device, pinned, other_number };
  std::array<std::uint64_t, 5> met{};
  for (const auto seed : seeds(60, 12)) {
    CAPTURE(seed);
    const std::uint32_t world = 1 + static_cast<std::uint32_t>(seed % 4);
    in_world(world, seed, [&](sim_ranks& ranks, std::uint32_t rank) {
      random_numbers random(seed);  // the same on all ranks
      device_rank mine;
      joint_upload together(ranks, mine.upload);
      std::uint64_t served = 0;
      for (std::uint64_t number = 1; number <= 8; ++number) {
        CAPTURE(number);
        const std::uint32_t victim = random.below(world);
        auto what = static_cast<trouble>(random.below(5U));
        const std::uint64_t at = random.below(mine.pieces());
        if (what == trouble::pinned && served == 0) what = trouble::none;
        if (what == trouble::other_number && world == 1) what = trouble::none;
        const bool is_victim = rank == victim;
        if (is_victim) ++met[static_cast<std::size_t>(what)];
        const refit_image image =
            mine.image(number + (what == trouble::other_number && is_victim ? 100 : 0), rank);
        if (is_victim && what == trouble::refused_copy) mine.queue.refused = mine.queue.copies + at;
        if (is_victim && what == trouble::failed_device) mine.queue.failed = mine.queue.copies + at;
        // A step that still reads the version before the newest: two publishes pin both slots.
        device_weights::pinned reader;
        if (what == trouble::pinned) {
          if (is_victim) reader = mine.weights.snapshot().value();
          const refit_image next = mine.image(number, rank);
          REQUIRE(together.publish(next, mine.weights, ranks.after(second)).has_value());
          served = number++;
        }
        const refit_image& given = what == trouble::pinned ? mine.image(number, rank) : image;
        if (is_victim && what == trouble::failed_device) {
          CHECK_THROWS_AS(static_cast<void>(together.publish(given, mine.weights, ranks.after(second))),
                          system_error);
        } else {
          const auto done = together.publish(given, mine.weights, ranks.after(second));
          if (what == trouble::none) {
            REQUIRE(done.has_value());
            CHECK(*done == mine.weights.newest());
            served = number;
          } else if (is_victim && what == trouble::refused_copy) {
            CHECK(done.code() == errc::dead_range);
          } else if (is_victim && what == trouble::pinned) {
            CHECK(done.code() == errc::version_pinned);
          } else {
            const std::uint64_t said = given.number();
            CHECK(done.error() == failure{errc::refit_abandoned, 0, said, 0});
          }
        }
        CHECK(mine.served(rank) == served);
        reader.release();
        // The same call again, without the trouble.
        const refit_image again = mine.image(number, rank);
        const std::size_t copies = mine.queue.copies;
        CHECK(together.publish(again, mine.weights, ranks.after(second)).has_value());
        CHECK(mine.queue.copies - copies == (what == trouble::none ? 0 : mine.pieces()));
        served = number;
        CHECK(mine.served(rank) == served);
      }
    });
  }
  for (const std::uint64_t each : met)
    CHECK(each > 3);
}

TEST_CASE("a rank that dies at any call leaves one version on the devices of the others") {
  std::uint64_t kept = 0;
  std::uint64_t changed = 0;
  for (std::uint64_t n = 0; n < 240; ++n) {
    CAPTURE(n);
    const std::uint32_t world = 2 + static_cast<std::uint32_t>(n % 3);
    const auto victim = static_cast<std::uint32_t>(n / 9 % world);
    std::array<std::uint64_t, 4> served{};
    std::array<bool, 4> is_done{};
    llmmem::testing::sim_network net({.seats = world, .seed = n});
    net.kill_in_call(seat_id{victim}, 4 + n / 3);
    net.run([&](llmmem::testing::sim_endpoint& end) {
      sim_ranks ranks(end);
      if (!ranks.join(ranks.after(second))) return;
      const std::uint32_t rank = to_index(ranks.rank());
      device_rank mine;
      joint_upload together(ranks, mine.upload);
      std::uint64_t number = 1;
      for (; number <= 4; ++number) {
        const auto done = together.publish(mine.image(number, rank), mine.weights, ranks.after(second));
        if (!done) {
          CHECK((done.code() == errc::refit_abandoned || done.code() == errc::no_quorum));
          break;
        }
      }
      served[rank] = mine.served(rank);
      CHECK(served[rank] == number - 1);
      is_done[rank] = true;
      if (!together.last_vote() || together.last_vote()->failed.empty()) return;
      // The living continue from there.
      CHECK(together.last_vote()->failed.size() == 1);
      ranks.shrink(*together.last_vote());
      CHECK(together.publish(mine.image(9, rank), mine.weights, ranks.after(second)).has_value());
      CHECK(mine.served(rank) == 9);
    });
    if (!net.was_killed(seat_id{victim})) continue;
    std::optional<std::uint64_t> one;
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      if (rank == victim || !is_done[rank]) continue;
      CHECK(one.value_or(served[rank]) == served[rank]);
      one = served[rank];
    }
    if (one == 0) ++kept;
    if (one.value_or(0) > 0) ++changed;
  }
  CHECK(kept > 5);
  CHECK(changed > 5);
}

TEST_CASE("a rank whose deadline passes in the vote publishes when it calls again") {
  std::uint64_t late = 0;
  for (const auto seed : seeds(20, 6)) {
    CAPTURE(seed);
    in_world(3, seed, [&](sim_ranks& ranks, std::uint32_t rank) {
      device_rank mine;
      joint_upload together(ranks, mine.upload);
      weights_in_use served(mine.weights);
      REQUIRE(together.publish(mine.image(1, rank), mine.weights, ranks.after(second)).has_value());
      REQUIRE(served.at(1).has_value());
      const refit_image image = mine.image(2, rank);
      auto done = together.publish(image, mine.weights, ranks.after(rank == 2 ? 1 : second));
      if (!done) {
        CHECK(rank == 2);
        CHECK(done.code() == errc::peer_timed_out);
        ++late;
        // A step of the new version is not run with the old one.
        CHECK(served.at(2).error() == failure{errc::no_such_version, 0, 2, 1});
        CHECK((*served.at(1))->number() == 1);
        done = together.publish(image, mine.weights, ranks.after(second));
      }
      REQUIRE(done.has_value());
      CHECK((*served.at(2))->number() == 2);
      CHECK(mine.served(rank) == 2);
    });
  }
  CHECK(late > 3);
}

TEST_CASE("a rank that missed the answer publishes although its next calls fail before the upload ends") {
  std::uint64_t late = 0;
  for (const auto seed : seeds(20, 6)) {
    CAPTURE(seed);
    in_world(3, seed, [&](sim_ranks& ranks, std::uint32_t rank) {
      device_rank mine;
      joint_upload together(ranks, mine.upload);
      for (std::uint64_t number = 1; number <= 2; ++number)
        REQUIRE(together.publish(mine.image(number, rank), mine.weights, ranks.after(second)).has_value());
      const refit_image image = mine.image(3, rank);
      auto done = together.publish(image, mine.weights, ranks.after(rank == 2 ? 1 : second));
      if (!done) {
        CHECK(rank == 2);
        CHECK(done.code() == errc::peer_timed_out);
        ++late;
        // The others have the answer. Here the first such call takes it, and the second needs no other.
        for (int failing = 0; failing < 2; ++failing) {
          mine.queue.refused = mine.queue.copies + 1;
          CHECK(together.publish(image, mine.weights, ranks.after(second)).code() == errc::dead_range);
          mine.queue.failed = mine.queue.copies;
          CHECK_THROWS_AS(static_cast<void>(together.publish(image, mine.weights, ranks.after(second))),
                          system_error);
          CHECK(mine.served(rank) == 2);
        }
        done = together.publish(image, mine.weights, ranks.after(second));
      }
      REQUIRE(done.has_value());
      CHECK(mine.served(rank) == 3);
      // All ranks are at the same vote.
      CHECK(together.publish(mine.image(4, rank), mine.weights, ranks.after(second)).has_value());
      CHECK(mine.served(rank) == 4);
    });
  }
  CHECK(late > 3);
}

TEST_CASE("a step reads the version that its batch names on all ranks, while a newer one is published") {
  constexpr std::uint32_t world = 4;
  constexpr std::uint64_t last = 30;
  thread_network net(world);
  std::array<std::vector<std::uint64_t>, world> read{};
  std::array<std::uint64_t, world> unsound{};
  std::vector<std::thread> threads;
  // What the rank that schedules has said for each step; 0: not yet.
  std::array<std::atomic<std::uint64_t>, 4096> batches{};
  std::atomic<bool> is_over{false};
  std::array<std::atomic<std::uint64_t>, world> steps{};
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      thread_endpoint end(net, seat_id{rank});
      communicator ranks(end);
      ranks.join(ranks.after(60 * second)).value();
      device_rank mine;
      joint_upload together(ranks, mine.upload);
      together.publish(mine.image(1, rank), mine.weights, ranks.after(60 * second)).value();
      weights_in_use served(mine.weights);
      std::thread engine([&] {
        for (std::size_t step = 0; step < batches.size(); ++step) {
          if (rank == 0) {
            const bool ends = is_over.load() || step + 1 == batches.size();
            batches[step] = ends ? ~std::uint64_t{0} : served.newest();
          }
          std::uint64_t number = 0;
          while ((number = batches[step].load()) == 0)
            std::this_thread::yield();
          if (number == ~std::uint64_t{0}) break;
          auto weights = served.at(number);
          while (weights.code() == errc::no_such_version) {
            std::this_thread::yield();
            weights = served.at(number);
          }
          if (!weights || !device_rank::is_sound(**weights, rank)) ++unsound[rank];
          read[rank].push_back(weights ? (*weights)->number() : 0);
          steps[rank] = step + 1;
          // Steps of a model are collective: a rank does not run ahead.
          for (const auto& each : steps) {
            while (each.load() < step + 1)
              std::this_thread::yield();
          }
        }
        served.release();
      });
      for (std::uint64_t number = 2; number <= last;) {
        const auto done = together.publish(mine.image(number, rank), mine.weights, ranks.after(60 * second));
        if (done) ++number;
      }
      if (rank == 0) is_over = true;
      engine.join();
      ranks.agree(0, ranks.after(60 * second)).value();
    });
  }
  for (auto& each : threads)
    each.join();
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    CHECK(read[rank] == read[0]);
    CHECK(unsound[rank] == 0);
    CHECK(std::ranges::is_sorted(read[rank]));
    CHECK(read[rank].back() >= 20);  // of 30
  }
}

TEST_CASE("a step's weights stay while it names them, and a number that is not here is refused") {
  device_rank mine;
  weights_in_use served(mine.weights);
  CHECK(served.newest() == 0);
  CHECK(served.at(1).error() == failure{errc::no_such_version, 0, 1, 0});
  CHECK(served.at(0).error() == failure{errc::no_such_version, 0, 0, 0});
  {  // the first weights may have the number 0
    device_rank from_zero;
    weights_in_use any(from_zero.weights);
    from_zero.upload.publish(from_zero.image(0, 0), from_zero.weights).value();
    CHECK(any.at(0).value()->number() == 0);
    from_zero.upload.publish(from_zero.image(1, 0), from_zero.weights).value();
    CHECK(any.at(0).value()->number() == 0);
  }
  mine.upload.publish(mine.image(1, 0), mine.weights).value();
  const auto* const first = served.at(1).value();
  mine.upload.publish(mine.image(2, 0), mine.weights).value();
  CHECK(served.newest() == 2);
  CHECK(served.at(1).value() == first);
  CHECK(mine.upload.publish(mine.image(3, 0), mine.weights).code() == errc::version_pinned);
  CHECK(served.at(3).error() == failure{errc::no_such_version, 0, 3, 2});
  CHECK(served.at(1).value() == first);
  CHECK(served.at(2).value() != first);
  CHECK(served.at(1).error() == failure{errc::version_expired, 0, 1, 2});
  mine.upload.publish(mine.image(3, 0), mine.weights).value();
  served.release();
  mine.upload.publish(mine.image(4, 0), mine.weights).value();
  CHECK(served.at(4).value()->number() == 4);
  {  // made after the first weights, it pins them
    weights_in_use later(mine.weights);
    mine.upload.publish(mine.image(5, 0), mine.weights).value();
    CHECK(later.at(4).value()->number() == 4);
    CHECK(later.at(5).value()->number() == 5);
  }
  // Of several versions that are kept, each is found by its number.
  versioned<refit_device_image<host_space>, stash<3>> kept(
      {}, [&](std::size_t) { return refit_device_image(mine.layout, mine.device); });
  for (const std::uint64_t number : {3U, 5U, 8U})
    mine.upload.publish(mine.image(number, 0), kept).value();
  weights_in_use any(kept);
  for (const std::uint64_t number : {5U, 3U, 8U})
    CHECK(any.at(number).value()->number() == number);
  CHECK(any.at(4).error() == failure{errc::version_expired, 0, 4, 8});
}
