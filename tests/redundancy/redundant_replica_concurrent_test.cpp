#include <llmmem/comm/communicator.hpp>
#include <llmmem/redundant_replica.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace llmmem::inline v0 {

/// The one definition of the friend that the library's types declare, for this program.
struct testing_access {
  /// Turns a bit of what is held: of the own blob, of a copy, or of a parity.
  template <class Replica>
  static void damage(Replica& replica, int what) {
    if (what == 0) turn(replica.committed_.own);
    for (std::vector<std::byte>& each : replica.committed_.copies) {
      if (what == 1 && turn(each)) return;
    }
    for (std::vector<std::byte>& each : replica.committed_.parities) {
      if (what == 2 && turn(each)) return;
    }
  }

 private:
  static bool turn(std::vector<std::byte>& bytes) {
    if (bytes.empty()) return false;
    bytes[bytes.size() / 2] ^= std::byte{4};
    return true;
  }
};

}  // namespace llmmem::inline v0

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using llmmem_tests::bytes_of_seed;

using ranks_of = communicator<sim_endpoint>;
using replica_of = redundant_replica<ranks_of>;
constexpr std::uint64_t second = 1'000'000'000;

/// Sizes that do not divide, one of them nothing.
std::vector<std::uint64_t> some_sizes(std::uint32_t seats) {
  std::vector<std::uint64_t> sizes;
  for (std::uint32_t i = 0; i < seats; ++i)
    sizes.push_back(i == 1 ? 0 : 700 + 131 * i);
  return sizes;
}

std::vector<seat_id> own_seats(std::uint32_t parts, std::uint32_t seats) {
  std::vector<seat_id> homes;
  for (std::uint32_t i = 0; i < parts; ++i)
    homes.push_back(seat_id{i % seats});
  return homes;
}

/// What a part is at a version, so that bytes of two versions are never taken for one.
std::vector<std::byte> part_at(std::uint32_t part, std::uint64_t version, std::uint64_t bytes) {
  return bytes_of_seed(bytes, version * 1000 + part + 1);
}

/// What all ranks of a job have seen.
struct job_record {
  std::mutex mutex{};
  std::map<std::uint64_t, int> committed{};  // versions
  std::uint64_t repeated = 0;
  std::uint64_t lost = 0;
  std::uint64_t recovered = 0;
  std::uint64_t through = 0;
};

struct job {
  redundancy_scheme scheme = redundancy_scheme::mirror(2);
  std::vector<std::uint64_t> sizes{};
  std::vector<seat_id> homes{};
  std::uint64_t versions = 5;
};

/// A rank of a job: each version, all its parts become something else, are kept, and committed.
void run(sim_endpoint& end, const job& plan, job_record& record) {
  ranks_of ranks(end);
  if (!ranks.join(ranks.after(10 * second))) return;
  replica_of replica(ranks, plan.scheme, plan.sizes, plan.homes);
  std::uint64_t version = 0;
  bool is_settled = false;
  bool has_lost = false;
  while (true) {
    const deadline by = ranks.after(60 * second);
    bool well = true;
    if (!is_settled) {
      const auto state = replica.recover(by);
      if (state.code() == errc::state_lost) {
        has_lost = true;
        break;
      }
      well = state.has_value();
      if (well) {
        version = state->is_there ? state->version : 0;
        for (const part_id part : replica.mine()) {
          if (!state->is_there) continue;
          const auto bytes = replica.recovered(part);
          const auto expected = part_at(to_index(part), version, plan.sizes[to_index(part)]);
          CHECK(std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end()));
        }
      }
    }
    const bool is_last = well && version == plan.versions;
    std::uint64_t next = version;
    if (well) {
      // After a change of members the version is kept once more, by those of now.
      next = is_settled && !is_last ? version + 1 : version;
      std::vector<std::vector<std::byte>> bytes;
      std::vector<part_bytes> parts;
      for (const part_id part : replica.mine())
        bytes.push_back(part_at(to_index(part), next, plan.sizes[to_index(part)]));
      if (plan.scheme.kind() == redundancy_kind::compute) {
        for (const part_id part : replica.wards())
          bytes.push_back(part_at(to_index(part), next, plan.sizes[to_index(part)]));
      }
      std::size_t at = 0;
      for (const part_id part : replica.mine())
        parts.push_back({part, bytes[at++]});
      if (plan.scheme.kind() == redundancy_kind::compute) {
        for (const part_id part : replica.wards())
          parts.push_back({part, bytes[at++]});
      }
      well = replica.keep(next, parts, by).has_value();
    }
    if (!well) CHECK(ranks.is_revoked());  // who could not go on lets nobody wait
    const auto outcome = ranks.agree(!well ? 0 : is_last && is_settled ? 3 : 1, ranks.after(60 * second));
    if (!outcome) return;
    if (outcome->bits == 3) break;
    const std::lock_guard held(record.mutex);
    if (outcome->bits == 1) {
      replica.commit();
      version = next;
      ++record.committed[version];
    } else {
      replica.drop();
    }
    const bool stays = outcome->bits == 1 && outcome->failed.empty() && outcome->joining.empty();
    if (!stays) ranks.admit(*outcome);
    if (!stays) ++record.recovered;
    is_settled = stays;
  }
  const std::lock_guard held(record.mutex);
  record.lost += has_lost ? 1U : 0U;
  record.through += has_lost ? 0U : 1U;
}

}  // namespace

TEST_SUITE("redundant_replica") {
  TEST_CASE(
      "up to as many as the scheme bears die at any time, and those left have every byte of one version") {
    std::uint64_t recovered = 0;
    for (const char* const text :
         {"mirror:2", "mirror:3", "parity:2", "parity:3", "rs:2+2", "rs:1+2", "compute"}) {
      const redundancy_scheme scheme = redundancy_scheme::parse(text);
      for (const auto seed : llmmem_tests::seeds(40)) {
        CAPTURE(text);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const auto seats = static_cast<std::uint32_t>(scheme.group_ranks() + random() % 3);
        sim_network net({.seats = seats, .seed = seed});
        std::vector<std::uint32_t> order(seats);
        for (std::uint32_t i = 0; i < seats; ++i)
          order[i] = i;
        std::shuffle(order.begin(), order.end(), random);
        std::uint32_t victims = std::min(scheme.tolerates(), seats - 1);
        for (std::uint32_t i = 0; i < victims; ++i) {
          net.kill_in_call(seat_id{order[i]}, 20 + random() % 250);
          if (random() % 2 == 0) net.restart_after(seat_id{order[i]}, random() % 20'000'000);
        }
        job_record record;
        const job plan{
            .scheme = scheme, .sizes = some_sizes(seats + 1), .homes = own_seats(seats + 1, seats)};
        net.run([&](sim_endpoint& end) { run(end, plan, record); });
        CHECK(record.lost == 0);
        CHECK(record.through >= seats - victims);
        recovered += record.recovered;
      }
    }
    CHECK(recovered > 500);
  }

  TEST_CASE("beyond what the scheme bears all that are left say that state is lost, or have it after all") {
    std::uint64_t lost = 0;
    for (const char* const text : {"mirror:2", "parity:2", "rs:2+1"}) {
      const redundancy_scheme scheme = redundancy_scheme::parse(text);
      for (const auto seed : llmmem_tests::seeds(40)) {
        CAPTURE(text);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        sim_network net({.seats = 5, .seed = seed, .most_notice_ns = 100'000});
        const auto first = static_cast<std::uint32_t>(random() % 5);
        const std::uint64_t at = 3'000'000 + random() % 3'000'000;
        for (std::uint32_t i = 0; i < 3; ++i)
          net.kill_at(seat_id{(first + i) % 5}, at);
        job_record record;
        const job plan{.scheme = scheme, .sizes = some_sizes(5), .homes = own_seats(5, 5), .versions = 50};
        net.run([&](sim_endpoint& end) { run(end, plan, record); });
        CHECK((record.lost == 0 || record.lost == 2));  // both, or none
        CHECK(record.lost + record.through == 2);
        lost += record.lost;
      }
    }
    CHECK(lost > 20);
  }

  TEST_CASE(
      "a world that shrinks to one rank and grows again keeps its state, and its redundancy comes back") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed, .most_notice_ns = 100'000});
      for (std::uint32_t i = 1; i < 3; ++i) {
        net.kill_at(seat_id{i},
                    3'000'000 * i);  // one after the other, so that the rest is kept again between
        net.restart_after(seat_id{i}, 2'000'000);
      }
      job_record record;
      const job plan{.scheme = redundancy_scheme::parity(2),
                     .sizes = some_sizes(7),
                     .homes = own_seats(7, 3),
                     .versions = 60};
      net.run([&](sim_endpoint& end) { run(end, plan, record); });
      CHECK(record.lost == 0);
      CHECK(record.through == 3);
    }
  }

  TEST_CASE("copies are one hop away and hold what was kept, and wards are whose copies one keeps") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const deadline by = ranks.after(second);
      const std::vector<std::uint64_t> sizes{100, 200, 300};
      const std::vector<seat_id> homes = own_seats(3, 3);
      replica_of replica(ranks, redundancy_scheme::mirror(2), sizes, homes);
      CHECK_FALSE(replica.recover(by).value().is_there);
      const std::uint32_t self = to_index(ranks.rank());
      CHECK(replica.mine() == std::vector{part_id{self}});
      CHECK(replica.wards() == std::vector{part_id{(self + 2) % 3}});
      CHECK(replica.tolerates() == 1);
      CHECK_FALSE(replica.version());
      const auto bytes = part_at(self, 7, sizes[self]);
      const std::vector<part_bytes> parts{{part_id{self}, bytes}};
      replica.keep(7, parts, by).value();
      CHECK_FALSE(replica.version());
      replica.drop();
      replica.commit();  // of nothing
      CHECK_FALSE(replica.version());
      replica.keep(7, parts, by).value();
      replica.commit();
      CHECK(replica.version() == 7);
      CHECK(replica.stats().own_bytes == sizes[self]);
      CHECK(replica.stats().kept_bytes == sizes[(self + 2) % 3]);
      CHECK(replica.stats().keeps == 2);
      // Bytes sent: its blob once, a checksum to each other, twice.
      std::uint64_t sent = 0;
      for (const seat_id seat : ranks.seats())
        sent += ranks.traffic(seat).sent_bytes;
      CHECK(sent == 2 * (sizes[self] + 2 * 8) + 2 * 32);
      const auto back = replica.recover(ranks.after(second)).value();
      CHECK(back.is_there);
      CHECK(back.version == 7);
      CHECK(back.moved_bytes == 0);
      CHECK(back.rebuilt_bytes == 0);
      replica.forget();
      CHECK_FALSE(replica.recover(ranks.after(second)).value().is_there);
      ranks.agree(0, by).value();
    });
  }

  TEST_CASE("parts that are missing, another's or of another size are refused, and nothing is sent") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const std::vector<std::uint64_t> sizes{10, 10, 10, 10};
      const std::vector<seat_id> homes = own_seats(4, 2);
      const std::vector<seat_id> three(3);
      CHECK_THROWS_WITH_AS(replica_of(ranks, redundancy_scheme::mirror(2), sizes, three),
                           "redundant_replica: 4 parts and 3 homes; each part has one", argument_error);
      replica_of replica(ranks, redundancy_scheme::mirror(2), sizes, homes);
      replica.recover(ranks.after(second)).value();
      const std::uint32_t self = to_index(ranks.rank());
      const std::vector<std::byte> ten(10);
      const std::vector<std::byte> nine(9);
      const auto refused = [&](std::vector<part_bytes> parts) {
        return replica.keep(1, parts, ranks.after(second)).error();
      };
      const part_id first{self};
      const part_id last{self + 2};
      const part_id other{1 - self};
      CHECK(refused({{first, ten}}) == failure{errc::size_mismatch, to_index(last), 10, 0});
      CHECK(refused({{first, ten}, {last, nine}}) == failure{errc::size_mismatch, to_index(last), 10, 9});
      CHECK(refused({{first, ten}, {last, ten}, {other, ten}}) ==
            failure{errc::size_mismatch, to_index(other), 0, 10});
      CHECK(refused({{first, ten}, {first, ten}, {last, ten}}) ==
            failure{errc::size_mismatch, to_index(first), 0, 10});
      CHECK_FALSE(ranks.is_revoked());
      ranks.agree(0, ranks.after(second)).value();
    });
  }

  TEST_CASE("a part that two ranks computed differently is named, and neither is taken") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const std::vector<std::uint64_t> sizes{64, 64, 64};
      const std::vector<seat_id> homes = own_seats(3, 3);
      replica_of replica(ranks, redundancy_scheme::compute(), sizes, homes);
      replica.recover(ranks.after(second)).value();
      const std::uint32_t self = to_index(ranks.rank());
      const std::uint32_t ward = to_index(replica.wards().at(0));
      CHECK(ward == (self + 2) % 3);
      for (const std::uint64_t version : {1U, 2U}) {
        auto own = part_at(self, version, 64);
        if (version == 2 && self == 1) own[63] ^= std::byte{1};  // a bit turned in rank 1
        const auto shadow = part_at(ward, version, 64);
        const std::vector<part_bytes> parts{{part_id{self}, own}, {part_id{ward}, shadow}};
        const auto kept = replica.keep(version, parts, ranks.after(second));
        CHECK(kept.has_value() == !(version == 2 && self == 2));
        if (!kept) CHECK(kept.code() == errc::checksum_differs);
        if (!kept) CHECK(kept.error().index == 1);
        const agreed outcome = ranks.agree(kept ? 1 : 0, ranks.after(second)).value();
        if (outcome.bits == 1) replica.commit();
        if (outcome.bits == 0) replica.drop();
      }
      CHECK(replica.version() == 1);
      // Nothing of the state was sent.
      std::uint64_t sent = 0;
      for (const seat_id seat : ranks.seats())
        sent += ranks.traffic(seat).sent_bytes;
      CHECK(sent == 2 * 2 * 8 + 2 * 32);
    });
  }

  TEST_CASE("copies lie in other failure domains, of those that are left as well") {
    sim_network net({.seats = 4});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const std::vector<std::uint64_t> sizes{10, 10, 10, 10};
      const std::vector<seat_id> homes = own_seats(4, 4);
      // Seats 0 and 1 on one host, 2 and 3 on another.
      const seat_domains hosts({domain_id{0}, domain_id{0}, domain_id{1}, domain_id{1}});
      redundant_replica<ranks_of, seat_domains> replica(ranks, redundancy_scheme::mirror(2), sizes, homes,
                                                        hosts);
      replica.recover(ranks.after(second)).value();
      for (std::uint32_t rank = 0; rank < 4; ++rank) {
        for (const rank_id holder : replica.map()->holders(rank_id{rank}))
          CHECK(to_index(holder) / 2 != rank / 2);
      }
      const std::vector<seat_id> beyond{seat_id{0}, seat_id{4}};
      CHECK_THROWS_WITH_AS(
          static_cast<void>(hosts(beyond)),
          "seat_domains: seat 4 has no domain, 4 seats have; give one for each seat of the job",
          argument_error);
      ranks.agree(0, ranks.after(second)).value();
    });
  }

  TEST_CASE("what is damaged where it is held counts as lost, and is given back by the others") {
    for (const int what : {0, 1, 2, 3}) {
      CAPTURE(what);
      sim_network net({.seats = 3});
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(second)).value();
        const std::vector<std::uint64_t> sizes{500, 600, 700};
        const std::vector<seat_id> homes = own_seats(3, 3);
        const auto scheme = what == 1 ? redundancy_scheme::mirror(2) : redundancy_scheme::parity(2);
        replica_of replica(ranks, scheme, sizes, homes);
        replica.recover(ranks.after(second)).value();
        const std::uint32_t self = to_index(ranks.rank());
        for (std::uint64_t version = 1; version <= 2; ++version) {
          const auto bytes = part_at(self, version, sizes[self]);
          const std::vector<part_bytes> parts{{part_id{self}, bytes}};
          replica.keep(version, parts, ranks.after(second)).value();
          // In the last run rank 1 is left out of the second commit: what it holds is stale.
          if (what == 3 && version == 2 && self == 1) continue;
          replica.commit();
        }
        if (self == 1 && what < 3) testing_access::damage(replica, what);
        const auto back = replica.recover(ranks.after(second)).value();
        CHECK(back.version == 2);
        CHECK(back.rebuilt_bytes == (self == 1 ? 600 : 0));
        const auto bytes = replica.recovered(part_id{self});
        const auto expected = part_at(self, 2, sizes[self]);
        CHECK(std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end()));
        ranks.agree(0, ranks.after(second)).value();
      });
    }
  }

  TEST_CASE("a version that all have kept was kept right, whatever was turned on its way") {
    std::uint64_t refused = 0;
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      sim_network net({.seats = 4, .seed = seed, .corrupts_one_in = 60, .corrupts_until_ns = second});
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(second)).value();
        const std::vector<std::uint64_t> sizes{20'000, 20'001, 0, 20'003};
        const std::vector<seat_id> homes = own_seats(4, 4);
        const char* const schemes[] = {"mirror:2", "parity:3", "rs:2+2"};
        replica_of replica(ranks, redundancy_scheme::parse(schemes[seed % 3]), sizes, homes);
        const std::uint32_t self = to_index(ranks.rank());
        bool well = replica.recover(ranks.after(second)).has_value();
        const auto bytes = part_at(self, 1, sizes[self]);
        const std::vector<part_bytes> parts{{part_id{self}, bytes}};
        if (well) well = replica.keep(1, parts, ranks.after(second)).has_value();
        if (!well) CHECK(ranks.is_revoked());
        const bool is_kept = ranks.agree(well ? 1 : 0, ranks.after(10 * second)).value().bits == 1;
        refused += is_kept ? 0U : 1U;
        if (!is_kept) return;
        replica.commit();
        while (end.now_ns() < second)
          end.work(100'000'000);  // from now on nothing is turned
        if (self == seed / 3 % 4) replica.forget();
        const auto back = replica.recover(ranks.after(10 * second));
        CHECK(back.has_value());
        for (const part_id part : replica.mine()) {
          const auto whole = replica.recovered(part);
          const auto expected = part_at(to_index(part), 1, sizes[to_index(part)]);
          CHECK(std::equal(whole.begin(), whole.end(), expected.begin(), expected.end()));
        }
        ranks.agree(0, ranks.after(10 * second)).value();
      });
    }
    CHECK(refused > 20);
    CHECK(refused < 4 * 50);
  }

  TEST_CASE("bytes that change on their way are an error, never a part") {
    std::uint64_t damaged = 0;
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed, .frame_bytes = 4096, .corrupts_one_in = 12});
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(second)).value();
        const std::vector<std::uint64_t> sizes{30'000, 30'000, 30'000};
        const std::vector<seat_id> homes = own_seats(3, 3);
        const auto scheme = seed % 2 == 0 ? redundancy_scheme::mirror(2) : redundancy_scheme::parity(2);
        replica_of replica(ranks, scheme, sizes, homes);
        const std::uint32_t self = to_index(ranks.rank());
        bool well = replica.recover(ranks.after(second)).has_value();
        const auto bytes = part_at(self, 1, sizes[self]);
        const std::vector<part_bytes> parts{{part_id{self}, bytes}};
        well = well && replica.keep(1, parts, ranks.after(second)).has_value();
        if (ranks.agree(well ? 1 : 0, ranks.after(second)).value().bits == 0) return;
        replica.commit();
        if (self == 1) replica.forget();  // as a fresh process
        const auto back = replica.recover(ranks.after(second));
        if (back && back->is_there) {
          for (const part_id part : replica.mine()) {
            const auto whole = replica.recovered(part);
            const auto expected = part_at(to_index(part), 1, sizes[to_index(part)]);
            CHECK(std::equal(whole.begin(), whole.end(), expected.begin(), expected.end()));
          }
        }
        damaged += back ? 0U : 1U;
        if (!back) ranks.revoke();
        ranks.agree(0, ranks.after(second)).value();
      });
    }
    CHECK(damaged > 3);
  }
}
