#include <llmmem/redundancy/detail/held_versions.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "redundancy/kept_world.hpp"
#include "support/random.hpp"
#include "support/replica_damage.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::held_versions;
using llmmem::detail::kept_version;
using llmmem::detail::known_past;
using namespace llmmem_tests;

/// Fills a version, and does not finish it.
void fill(held_versions& held, std::uint64_t version) {
  kept_version& made = held.begin();
  made.begin(some_facts(1, version, {50}, {rank_id{0}}, 1), rank_id{0});
  made.add_own(part_id{0}, part_in(version, 0, 50));
}

void keep(held_versions& held, std::uint64_t version) {
  fill(held, version);
  held.finish();
}

}  // namespace

TEST_SUITE("held_versions") {
  TEST_CASE("the valid version is the last one that was finished and then committed") {
    for (const auto seed : seeds(200)) {
      CAPTURE(seed);
      random_numbers random(seed);
      held_versions held;
      std::optional<std::uint64_t> committed;
      std::optional<std::uint64_t> pending;
      known_past past = known_past::unknown;
      for (std::uint64_t version = 1; version < 60; ++version) {
        const std::uint32_t choice = random.below(8U);
        if (choice <= 1) {
          keep(held, version);
          pending = version;
        } else if (choice == 2) {
          fill(held, version);
          pending = std::nullopt;
        } else if (choice <= 4) {
          CHECK(held.commit() == pending.has_value());
          if (pending) committed = pending;
          if (pending) past = known_past::kept;
          pending = std::nullopt;
        } else if (choice == 5) {
          held.drop();
          pending = std::nullopt;
        } else if (choice == 6) {
          const std::uint64_t epoch = 1 + random.below(3U);
          CHECK(held.begin_recovery(epoch).places() == 0);
          if (epoch == 1 && past == known_past::unknown) past = known_past::never_kept;
          pending = std::nullopt;
        } else if (random.once_in(3)) {
          held.forget();
          committed = std::nullopt;
          pending = std::nullopt;
          past = known_past::forgotten;
        } else {
          held.discard_committed();
          committed = std::nullopt;
        }
        CHECK(held.version() == committed);
        CHECK((held.committed() != nullptr) == committed.has_value());
        CHECK(held.past() == past);
        if (committed) CHECK(std::ranges::equal(held.committed()->own(), part_in(*committed, 0, 50)));
      }
    }
  }

  TEST_CASE("the highest knowledge of the past among the ranks is true") {
    held_versions held;
    held.learn(known_past::forgotten);
    held.learn(known_past::never_kept);
    CHECK(held.past() == known_past::forgotten);
    held.learn(known_past::kept);
    CHECK(held.past() == known_past::kept);
    held_versions fresh;
    static_cast<void>(fresh.begin_recovery(2));
    CHECK(fresh.past() == known_past::unknown);  // it came too late to see the first epoch
  }

  TEST_CASE("bytes are verified from the second recovery of a version on, until another is committed") {
    held_versions held;
    const auto damage = [&] {
      testing_access::bytes_at(testing_access::committed(held), kept_place::own, 0)[7] ^= std::byte{1};
    };
    keep(held, 1);
    CHECK(held.commit());
    damage();
    CHECK(held.begin_recovery(1).places() == 0);
    CHECK(held.begin_recovery(2).places() == 1);
    CHECK(held.begin_recovery(3).places() == 1);
    CHECK(held.version() == 1U);
    keep(held, 2);
    CHECK(held.commit());
    damage();
    CHECK(held.begin_recovery(4).places() == 0);
    CHECK(held.begin_recovery(5).places() == 1);
  }

  TEST_CASE("a version with damaged facts does not count") {
    held_versions held;
    keep(held, 1);
    CHECK(held.commit());
    testing_access::facts(testing_access::committed(held)).sums[0] ^= 1;
    static_cast<void>(held.begin_recovery(1));
    CHECK_FALSE(held.version());
    CHECK(held.past() == known_past::kept);
  }

  TEST_CASE("the memory of both versions is counted, and reused until all is forgotten") {
    held_versions held;
    keep(held, 1);
    CHECK(held.commit());
    keep(held, 2);
    replica_stats two;
    held.count(two);
    CHECK(two.own_bytes == 100);
    CHECK(two.kept_bytes == 0);
    held.drop();
    held.discard_committed();
    keep(held, 3);
    replica_stats still;
    held.count(still);
    CHECK(still.own_bytes == 100);
    held.forget();
    replica_stats none;
    held.count(none);
    CHECK(none.own_bytes == 0);
  }
}
