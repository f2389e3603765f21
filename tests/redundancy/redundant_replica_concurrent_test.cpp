#include <llmmem/comm/communicator.hpp>
#include <llmmem/redundant_replica.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/comm_job.hpp"
#include "support/replica_damage.hpp"
#include "support/seeds.hpp"

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
  bool has_destinations = false;  ///< what comes back is to lie in the rank's own memory
};

/// A rank of a job: each version, all its parts become something else, are kept, and committed.
void run(sim_endpoint& end, const job& plan, job_record& record) {
  ranks_of ranks(end);
  if (!ranks.join(ranks.after(10 * second))) return;
  replica_of replica(ranks, plan.scheme, plan.sizes, plan.homes);
  std::vector<std::vector<std::byte>> destinations;  // by part, with bytes of no use
  for (std::size_t part = 0; part < plan.sizes.size(); ++part)
    destinations.push_back(bytes_of_seed(plan.sizes[part], 77));
  std::uint64_t version = 0;
  bool is_settled = false;
  bool has_lost = false;
  while (true) {
    const deadline by = ranks.after(60 * second);
    bool well = true;
    if (!is_settled) {
      std::vector<part_id> asked;
      const auto into = [&](part_id part) {
        asked.push_back(part);
        return std::span(destinations[to_index(part)]);
      };
      const auto state = plan.has_destinations ? replica.recover(by, into) : replica.recover(by);
      if (state)
        CHECK(asked ==
              (plan.has_destinations && state->is_recovered ? replica.own_parts() : std::vector<part_id>()));
      if (state.code() == errc::state_lost) {
        has_lost = true;
        break;
      }
      well = state.has_value();
      if (well) {
        version = state->is_recovered ? state->version : 0;
        for (const part_id part : replica.own_parts()) {
          if (!state->is_recovered) continue;
          const auto bytes = replica.recovered(part);
          const auto expected = part_at(to_index(part), version, plan.sizes[to_index(part)]);
          CHECK(std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end()));
          if (plan.has_destinations) CHECK(bytes.data() == destinations[to_index(part)].data());
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
      for (const part_id part : replica.own_parts())
        bytes.push_back(part_at(to_index(part), next, plan.sizes[to_index(part)]));
      if (plan.scheme.kind() == redundancy_kind::compute) {
        for (const part_id part : replica.wards())
          bytes.push_back(part_at(to_index(part), next, plan.sizes[to_index(part)]));
      }
      std::size_t at = 0;
      for (const part_id part : replica.own_parts())
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

/// A rank of a job in which each has one part, at home with it.
struct member {
  sim_endpoint& end;
  std::vector<std::uint64_t> sizes;
  ranks_of ranks;
  replica_of replica;
  std::uint32_t self;

  member(sim_endpoint& at, const redundancy_scheme& scheme, std::vector<std::uint64_t> bytes_of_parts)
      : end(at),
        sizes(std::move(bytes_of_parts)),
        ranks(at),
        replica(
            (ranks.join(ranks.after(second)).value(), ranks), scheme, sizes,
            own_seats(static_cast<std::uint32_t>(sizes.size()), static_cast<std::uint32_t>(sizes.size()))),
        self(to_index(ranks.rank())) {}

  /// What its part is in a version.
  [[nodiscard]] std::vector<std::byte> bytes(std::uint64_t version) const {
    return part_at(self, version, sizes[self]);
  }
  [[nodiscard]] auto keep(std::uint64_t version) {
    const std::vector<std::byte> own = bytes(version);
    const std::vector<part_bytes> parts{{part_id{self}, own}};
    return replica.keep(version, parts, ranks.after(second));
  }
  [[nodiscard]] auto recover() { return replica.recover(ranks.after(second)); }
  llmmem::comm::agreed agree(std::uint64_t bits = 0) {
    return ranks.agree(bits, ranks.after(second)).value();
  }
  /// Whether its own part was given back as it was in a version.
  [[nodiscard]] bool has(std::uint64_t version) const {
    return std::ranges::equal(replica.recovered(part_id{self}), bytes(version));
  }
  /// Whether all parts that it owns now were.
  [[nodiscard]] bool has_all(std::uint64_t version) const {
    return std::ranges::all_of(replica.own_parts(), [&](part_id part) {
      const std::uint32_t i = to_index(part);
      return std::ranges::equal(replica.recovered(part), part_at(i, version, sizes[i]));
    });
  }
};

}  // namespace

TEST_SUITE("redundant_replica") {
  TEST_CASE(
      "if as many ranks as the scheme tolerates die at any time, the others have every byte of one version") {
    std::uint64_t recovered = 0;
    for (const char* const text :
         {"mirror:2", "mirror:3", "parity:2", "parity:3", "rs:2+2", "rs:1+2", "compute"}) {
      const redundancy_scheme scheme = redundancy_scheme::parse(text);
      for (const auto seed : llmmem_tests::seeds(40, 10)) {
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
        const job plan{.scheme = scheme,
                       .sizes = some_sizes(seats + 1),
                       .homes = own_seats(seats + 1, seats),
                       .has_destinations = seed % 2 == 0};
        net.run([&](sim_endpoint& end) { run(end, plan, record); });
        CHECK(record.lost == 0);
        CHECK(record.through >= seats - victims);
        recovered += record.recovered;
      }
    }
    CHECK(recovered > (llmmem_tests::is_watched ? 100 : 500));
  }

  TEST_CASE(
      "if more ranks die than the scheme tolerates, all remaining ranks report lost state, or have it "
      "nevertheless") {
    std::uint64_t lost = 0;
    for (const char* const text : {"mirror:2", "parity:2", "rs:2+1"}) {
      const redundancy_scheme scheme = redundancy_scheme::parse(text);
      for (const auto seed : llmmem_tests::seeds(40, 10)) {
        CAPTURE(text);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        sim_network net({.seats = 5, .seed = seed, .max_notice_ns = 100'000});
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
    CHECK(lost > (llmmem_tests::is_watched ? 5 : 20));
  }

  TEST_CASE(
      "a world that shrinks to one rank and grows again keeps its state, and its redundancy comes back") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed, .max_notice_ns = 100'000});
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

  TEST_CASE(
      "copies are one hop away and hold the kept bytes, and wards are the parts whose copies a rank keeps") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const deadline by = ranks.after(second);
      const std::vector<std::uint64_t> sizes{100, 200, 300};
      const std::vector<seat_id> homes = own_seats(3, 3);
      replica_of replica(ranks, redundancy_scheme::mirror(2), sizes, homes);
      CHECK_FALSE(replica.recover(by).value().is_recovered);
      const std::uint32_t self = to_index(ranks.rank());
      CHECK(replica.own_parts() == std::vector{part_id{self}});
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
      CHECK(sent == 2 * (sizes[self] + 2 * 8) + 2 * 40);
      const auto back = replica.recover(ranks.after(second)).value();
      CHECK(back.is_recovered);
      CHECK(back.version == 7);
      CHECK(back.moved_bytes == 0);
      CHECK(back.rebuilt_bytes == 0);
      replica.forget();
      CHECK_FALSE(replica.recover(ranks.after(second)).value().is_recovered);
      ranks.agree(0, by).value();
    });
  }

  TEST_CASE("missing, foreign and wrongly sized parts are refused, and nothing is sent") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const std::vector<std::uint64_t> sizes{10, 10, 10, 10};
      const std::vector<seat_id> homes = own_seats(4, 2);
      const std::vector<seat_id> three(3);
      CHECK_THROWS_WITH_AS(replica_of(ranks, redundancy_scheme::mirror(2), sizes, three),
                           "redundant_replica: 4 parts and 3 homes; give one home for each part",
                           argument_error);
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

  TEST_CASE("if ranks are set up differently, all learn it, and which rank is the first") {
    struct given {
      const char* scheme = "mirror:2";
      std::vector<std::uint64_t> sizes{500, 600, 700};
      std::vector<seat_id> homes{seat_id{0}, seat_id{1}, seat_id{2}};
      seat_domains domains{{domain_id{0}, domain_id{1}, domain_id{2}}};
    };
    const given others[] = {
        {},
        {.scheme = "mirror:3"},
        {.scheme = "compute"},
        {.scheme = "parity:2"},
        {.sizes = {500, 700, 600}},
        {.sizes = {500, 600}, .homes = {seat_id{0}, seat_id{1}}},
        {.homes = {seat_id{0}, seat_id{2}, seat_id{1}}},
        {.domains = seat_domains({domain_id{0}, domain_id{0}, domain_id{1}})},
    };
    for (const given& other : others) {
      for (const std::uint32_t odd : {0U, 1U, 2U}) {
        const auto which = &other - &others[0];
        CAPTURE(which);
        CAPTURE(odd);
        sim_network net({.seats = 3});
        net.run([&](sim_endpoint& end) {
          ranks_of ranks(end);
          ranks.join(ranks.after(second)).value();
          const given mine = to_index(ranks.rank()) == odd ? other : given{};
          redundant_replica<ranks_of, seat_domains> replica(ranks, redundancy_scheme::parse(mine.scheme),
                                                            mine.sizes, mine.homes, mine.domains);
          const auto found = replica.recover(ranks.after(second));
          if (which == 0) {
            CHECK(found.has_value());
          } else {
            CHECK(found.code() == errc::setup_differs);
            CHECK(found.error().index == (odd == 2 ? 2 : 1));
            CHECK(found.error().wanted != found.error().found);
          }
          ranks.agree(0, ranks.after(second)).value();
        });
      }
    }
  }

  TEST_CASE("a home outside the job's seats is refused with these seats") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      const std::vector<std::uint64_t> sizes{10, 10};
      const std::vector<seat_id> homes{seat_id{1}, seat_id{2}};
      CHECK_THROWS_WITH_AS(
          replica_of(ranks, redundancy_scheme::mirror(2), sizes, homes),
          "redundant_replica: part 1 has its home in seat 2, but the job has seats 0 to 1; name one of these",
          argument_error);
    });
  }

  TEST_CASE("if there is nothing to restore, all ranks learn why, including late ones") {
    // Seat 2 dies at a moment of its own, and comes back; seat 0 dies in the last act, so that none is left.
    enum class act : std::uint8_t { before_commit, after_commit, after_forget, all_fresh };
    for (const act what : {act::before_commit, act::after_commit, act::after_forget, act::all_fresh}) {
      CAPTURE(static_cast<int>(what));
      sim_network net({.seats = 3, .max_notice_ns = 100'000});
      for (const std::uint32_t seat : {1U, 2U}) {
        if (seat == 1 && what != act::all_fresh) continue;
        net.kill_at(seat_id{seat}, second);
        net.restart_after(seat_id{seat}, 1'000'000);
      }
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(60 * second)).value();
        const std::vector<std::uint64_t> sizes{500, 600, 700};
        const std::vector<seat_id> homes = own_seats(3, 3);
        replica_of replica(ranks, redundancy_scheme::mirror(2), sizes, homes);
        const std::uint32_t self = to_index(end.self());
        if (ranks.epoch() == 1) {
          const auto first = replica.recover(ranks.after(60 * second)).value();
          CHECK_FALSE(first.is_recovered);
          CHECK(first.reason == llmmem::redundancy::absence::never_kept);
          const auto bytes = part_at(self, 1, sizes[self]);
          const std::vector<part_bytes> parts{{part_id{self}, bytes}};
          replica.keep(1, parts, ranks.after(60 * second)).value();
          if (what != act::before_commit) replica.commit();
          if (what == act::after_forget) replica.forget();
          ranks.agree(0, ranks.after(60 * second)).value();
          if (self == 2 || (self == 1 && what == act::all_fresh))
            end.work(60 * second);  // until it is killed
          while (ranks.waiting().size() < (what == act::all_fresh ? 2U : 1U)) {
            end.work(100'000);
            ranks.poll();
          }
          ranks.admit(ranks.agree(0, ranks.after(60 * second)).value());
          if (what == act::all_fresh) end.work(second);  // so that they hear of it
          if (what == act::all_fresh) throw process_killed{};
        } else if (what == act::all_fresh) {
          CHECK_FALSE(replica.recover(ranks.after(60 * second)));  // the one that knew is dead
          ranks.revoke();
          ranks.shrink(ranks.agree(0, ranks.after(60 * second)).value());
        }
        const auto found = replica.recover(ranks.after(60 * second)).value();
        CHECK(found.is_recovered == (what == act::after_commit));
        const llmmem::redundancy::absence expected =
            what == act::before_commit  ? llmmem::redundancy::absence::never_kept
            : what == act::after_commit ? llmmem::redundancy::absence::none
            : what == act::after_forget ? llmmem::redundancy::absence::forgotten
                                        : llmmem::redundancy::absence::lost;
        CHECK(found.reason == expected);
        ranks.agree(0, ranks.after(60 * second)).value();
      });
    }
  }

  TEST_CASE(
      "a version that no rank knows any longer is absence::lost, one that is complete nowhere is "
      "state_lost") {
    for (const bool is_word : {true, false}) {
      CAPTURE(is_word);
      sim_network net({.seats = 2});
      net.run([&](sim_endpoint& end) {
        member at(end, redundancy_scheme::mirror(2), {500, 600});
        at.recover().value();
        at.keep(1).value();
        at.replica.commit();
        testing_access::damage(at.replica, 1);
        at.recover().value();  // what is damaged is not needed
        CHECK(at.recover().value().is_recovered);
        if (is_word) {
          testing_access::damage_word(at.replica, 0);
          const auto back = at.recover().value();
          CHECK_FALSE(back.is_recovered);
          CHECK(back.reason == llmmem::redundancy::absence::lost);
        } else {
          testing_access::damage(at.replica, 0);
          const auto back = at.recover();
          CHECK(back.error() == failure{errc::state_lost, 0, 2, 2});
          CHECK(at.replica.lost() == rank_set{rank_id{0}, rank_id{1}});
        }
        at.agree();
      });
    }
  }

  TEST_CASE(
      "a rank cannot keep a version before recover has had a result in the epoch, and the refusal says so") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      member at(end, redundancy_scheme::mirror(2), {50, 60});
      CHECK(at.keep(1).error() == failure{errc::not_recovered, 0, 1, 0});
      at.recover().value();
      at.keep(1).value();
      at.ranks.admit(at.agree());
      CHECK(at.keep(1).error() == failure{errc::not_recovered, 0, 2, 1});
      at.agree();
      at.ranks.revoke();
      CHECK_FALSE(at.recover());
      CHECK(at.keep(1).error() == failure{errc::not_recovered, 0, 2, 0});
      at.agree();
    });
  }

  TEST_CASE("a part that two ranks computed differently is named, and neither result is used") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      member at(end, redundancy_scheme::compute(), {64, 64, 64});
      at.recover().value();
      const std::uint32_t ward = to_index(at.replica.wards().at(0));
      CHECK(ward == (at.self + 2) % 3);
      for (const std::uint64_t version : {1U, 2U}) {
        auto own = part_at(at.self, version, 64);
        if (version == 2 && at.self == 1) own[63] ^= std::byte{1};  // a bit turned in rank 1
        const auto shadow = part_at(ward, version, 64);
        const std::vector<part_bytes> parts{{part_id{at.self}, own}, {part_id{ward}, shadow}};
        const auto kept = at.replica.keep(version, parts, at.ranks.after(second));
        CHECK(kept.has_value() == !(version == 2 && at.self == 2));
        if (!kept) CHECK(kept.code() == errc::checksum_differs);
        if (!kept) CHECK(kept.error().index == 1);
        const llmmem::comm::agreed outcome = at.agree(kept ? 1 : 0);
        if (outcome.bits == 1) at.replica.commit();
        if (outcome.bits == 0) at.replica.drop();
      }
      CHECK(at.replica.version() == 1);
      // Nothing of the state was sent.
      std::uint64_t sent = 0;
      for (const seat_id seat : at.ranks.seats())
        sent += at.ranks.traffic(seat).sent_bytes;
      CHECK(sent == 2 * 2 * 8 + 2 * 40);
    });
  }

  TEST_CASE("copies are in different failure domains, also among the remaining ones") {
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
          "seat_domains: seat 4 has no domain, but 4 seats have one; give one for each seat of the job",
          argument_error);
      ranks.agree(0, ranks.after(second)).value();
    });
  }

  TEST_CASE("a rank that was left out of the last commit counts as lost") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      member at(end, redundancy_scheme::parity(2), {500, 600, 700});
      at.recover().value();
      for (std::uint64_t version = 1; version <= 2; ++version) {
        at.keep(version).value();
        if (version == 1 || at.self != 1) at.replica.commit();
      }
      const auto back = at.recover().value();
      CHECK(back.version == 2);
      CHECK(back.rebuilt_bytes == (at.self == 1 ? 600 : 0));
      CHECK(at.has(2));
      at.agree();
    });
  }

  TEST_CASE("after a return to a checkpoint, a rank that was away has a higher number, and does not win") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      member at(end, redundancy_scheme::mirror(2), {500, 600});
      for (const std::uint64_t version : {100U, 51U}) {
        at.recover().value();
        at.keep(version).value();
        if (version == 100 || at.self == 0) at.replica.commit();  // rank 1 sleeps while the others go back
        at.ranks.admit(at.agree());
      }
      const auto back = at.recover().value();
      CHECK(back.version == 51);
      CHECK(back.rebuilt_bytes == (at.self == 1 ? 600 : 0));
      CHECK(at.has(51));
      at.agree();
    });
  }

  TEST_CASE("in the second recovery other ranks restore the damaged bytes, and only these") {
    for (const int what : {0, 1, 2}) {
      CAPTURE(what);
      sim_network net({.seats = 3});
      net.run([&](sim_endpoint& end) {
        const auto scheme = what == 1 ? redundancy_scheme::mirror(2) : redundancy_scheme::parity(2);
        member at(end, scheme, {500, 600, 700});
        at.recover().value();
        for (const std::uint64_t version : {1U, 2U}) {
          at.keep(version).value();
          at.replica.commit();
        }
        if (at.self == 1) testing_access::damage(at.replica, what);
        const auto first = at.recover();
        // Only what is given back is looked at; copies and parity of others' are not needed here.
        if (what == 0 && at.self == 1) CHECK(first.code() == errc::message_damaged);
        if (what == 0 && at.self == 1) CHECK(at.ranks.is_revoked());
        if (what != 0) CHECK(first.value().rebuilt_bytes == 0);
        at.ranks.admit(at.agree());
        const auto back = at.recover().value();
        CHECK(back.version == 2);
        CHECK(back.rebuilt_bytes == (what == 0 && at.self == 1 ? 600 : 0));
        CHECK(at.has(2));
        at.agree();
      });
    }
  }

  TEST_CASE("a rank with damage still provides its intact data, even if another has lost everything") {
    // What is damaged at rank 1, and whether the rest gives back what rank 0 had, under each scheme.
    struct damaged_case {
      const char* scheme;
      int what;
      bool is_enough;
    };
    const auto cases = std::to_array<damaged_case>({{"mirror:3", 0, true},
                                                    {"mirror:3", 1, true},
                                                    {"mirror:2", 0, true},
                                                    {"mirror:2", 1, false},
                                                    {"parity:2", 0, false},
                                                    {"parity:2", 2, false},
                                                    {"rs:1+2", 0, true},
                                                    {"rs:1+2", 2, true}});
    for (const damaged_case& each : cases) {
      CAPTURE(each.scheme);
      CAPTURE(each.what);
      sim_network net({.seats = 3});
      net.run([&](sim_endpoint& end) {
        const auto scheme = redundancy_scheme::parse(each.scheme);
        member at(end, scheme, {500, 600, 700});
        at.recover().value();
        at.keep(1).value();
        at.replica.commit();
        at.recover().value();
        at.ranks.admit(at.agree());
        if (at.self == 1) testing_access::damage(at.replica, each.what);
        if (at.self == 0) at.replica.forget();  // as a fresh process
        const auto back = at.recover();
        CHECK(back.has_value() == each.is_enough);
        if (back) {
          CHECK(at.has(1));
          CHECK(back->rebuilt_bytes == (at.self == 0 ? 500 : at.self == 1 && each.what == 0 ? 600 : 0));
        } else {
          const std::uint64_t gone = each.what == 0 ? 2 : 1;
          CHECK(back.error() == failure{errc::state_lost, 0, gone, gone});
          CHECK(at.replica.own_parts() == std::vector{part_id{at.self}});
        }
        at.agree();
      });
    }
  }

  TEST_CASE("a damaged copy is an error for the rank that receives it, and another is used afterwards") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      member at(end, redundancy_scheme::mirror(3), {500, 600, 700});
      at.recover().value();
      at.keep(1).value();
      at.replica.commit();
      if (at.self == 0) at.replica.forget();  // as a fresh process
      if (at.self == 1) testing_access::damage(at.replica, 1);
      const auto first = at.recover();
      if (at.self == 0) CHECK(first.code() == errc::message_damaged);
      if (at.self == 0) CHECK(at.replica.recovered(part_id{0}).empty());
      at.ranks.admit(at.agree());
      const auto back = at.recover().value();
      CHECK(back.rebuilt_bytes == (at.self == 0 ? 500 : 0));
      CHECK(at.has(1));
      at.agree();
    });
  }

  TEST_CASE("a process with damaged common facts counts as lost at once, and another provides them") {
    for (const int what : {0, 1, 2, 3}) {
      CAPTURE(what);
      sim_network net({.seats = 3});
      net.run([&](sim_endpoint& end) {
        member at(end, redundancy_scheme::mirror(2), {500, 600, 700});
        at.recover().value();
        at.keep(1).value();
        at.replica.commit();
        if (at.self == 0)
          testing_access::damage_word(at.replica, what);  // the first of those that could tell
        const auto back = at.recover();
        CHECK(back.has_value());
        if (back) CHECK(back->version == 1);
        if (back) CHECK(back->rebuilt_bytes == (at.self == 0 ? 500 : 0));
        if (back) CHECK(at.has(1));
        at.agree();
      });
    }
  }

  TEST_CASE(
      "parts of several pieces are restored completely, by copies and by sums, with and without "
      "destinations") {
    for (const char* const text : {"mirror:2", "parity:2", "rs:2+2"}) {
      for (const bool has_destinations : {false, true}) {
        CAPTURE(text);
        CAPTURE(has_destinations);
        sim_network net({.seats = 4});
        net.run([&](sim_endpoint& end) {
          member at(end, redundancy_scheme::parse(text), {3'000'001, 1'048'576, 2'500'000, 4'000'003});
          at.recover().value();
          at.keep(1).value();
          at.replica.commit();
          if (at.self == 3) at.replica.forget();
          std::vector<std::byte> destination = bytes_of_seed(at.sizes[at.self], 5);
          const auto into = [&](part_id) { return std::span(destination); };
          const auto back = has_destinations ? at.replica.recover(at.ranks.after(second), into).value()
                                             : at.recover().value();
          CHECK(back.rebuilt_bytes == (at.self == 3 ? at.sizes[3] : 0));
          CHECK(at.has(1));
          if (has_destinations) CHECK(destination == at.bytes(1));
          at.agree();
        });
      }
    }
  }

  TEST_CASE(
      "if a process dies between two pieces of a part that it sends, no rank waits for it, and another sends "
      "the part") {
    // The first run counts: in which of its calls rank 1 gives rank 0 what that has lost.
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    std::uint64_t halves = 0;
    const auto run_with_death_in = [&](std::optional<std::uint64_t> call) {
      sim_network net({.seats = 3, .max_notice_ns = 100'000});
      if (call) net.kill_in_call(seat_id{1}, *call);
      net.run([&](sim_endpoint& end) {
        member at(end, redundancy_scheme::mirror(3), {2'500'000, 10, 10});
        at.recover().value();
        at.keep(1).value();
        at.agree();
        at.replica.commit();
        if (at.self == 0) at.replica.forget();  // as a fresh process
        if (at.self == 1 && !call) first = net.calls(seat_id{1}) + 1;
        std::vector<std::byte> destination(at.sizes[at.self]);
        const auto into = [&](part_id) { return std::span(destination); };
        const auto back = at.replica.recover(at.ranks.after(60 * second), into);
        if (at.self == 1 && !call) last = net.calls(seat_id{1});
        if (!back) CHECK(at.ranks.is_revoked());
        const auto outcome = at.agree();
        if (!call) return;
        if (at.self == 0 && !back && destination.front() == at.bytes(1).front() && destination != at.bytes(1))
          ++halves;
        at.ranks.shrink(outcome);
        const auto again = at.recover().value();
        CHECK(again.is_recovered);
        CHECK(at.has_all(1));
        at.agree();
      });
    };
    run_with_death_in(std::nullopt);
    REQUIRE(last > first + 24);
    const std::uint64_t stride = (last - first) / 24;
    for (std::uint64_t call = first; call <= last; call += stride) {
      CAPTURE(call);
      run_with_death_in(call);
    }
    CHECK(halves > 1);
  }

  TEST_CASE(
      "without destinations, parts that this rank has complete are not copied, and only others' parts take "
      "memory") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      member at(end, redundancy_scheme::mirror(2), {5'000'000, 6'000'000});
      at.recover().value();
      at.keep(1).value();
      at.replica.commit();
      at.recover().value();
      CHECK(testing_access::memory_bytes(at.replica) == 0);
      CHECK(at.has(1));
      if (at.self == 1) at.replica.forget();
      at.recover().value();
      CHECK(testing_access::memory_bytes(at.replica) == (at.self == 1 ? 6'000'000 : 0));
      at.keep(2).value();
      CHECK(at.has(1));
      at.replica.commit();
      CHECK(testing_access::memory_bytes(at.replica) == 0);
      CHECK(at.replica.recovered(part_id{at.self}).empty());
      at.agree();
    });
  }

  TEST_CASE(
      "a destination of the wrong size, and an exception of the callback, reach the caller, and no rank "
      "waits for it") {
    for (const bool is_thrown : {false, true}) {
      CAPTURE(is_thrown);
      sim_network net({.seats = 2});
      net.run([&](sim_endpoint& end) {
        member at(end, redundancy_scheme::mirror(2), {500, 600});
        at.recover().value();
        at.keep(1).value();
        at.replica.commit();
        if (at.self == 0) at.replica.forget();
        std::vector<std::byte> destination(at.sizes[at.self]);
        const auto into = [&](part_id part) {
          CHECK(part == part_id{at.self});
          if (at.self == 0 && is_thrown) throw 7;
          return std::span(destination).first(at.sizes[at.self] - (at.self == 0 ? 1U : 0U));
        };
        const std::uint64_t began = end.now_ns();
        if (at.self == 0 && is_thrown) {
          CHECK_THROWS_AS(static_cast<void>(at.replica.recover(at.ranks.after(60 * second), into)), int);
        } else {
          const auto refused = at.replica.recover(at.ranks.after(60 * second), into);
          if (at.self == 0) CHECK(refused.error() == failure{errc::size_mismatch, 0, 500, 499});
        }
        if (at.self == 0) CHECK(at.ranks.is_revoked());
        // Whether the other has sent all before it heard of it or not, what comes next ends for it, too.
        at.ranks.admit(at.ranks.agree(0, at.ranks.after(60 * second)).value());
        CHECK(end.now_ns() - began < 10 * second);
        at.recover().value();
        CHECK(at.has(1));
        at.agree();
      });
    }
  }

  TEST_CASE("a version that all ranks have kept is right, for any flipped bit on its way") {
    std::uint64_t refused = 0;
    for (const auto seed : llmmem_tests::seeds(60, 20)) {
      CAPTURE(seed);
      sim_network net({.seats = 4, .seed = seed, .corrupts_one_in = 60, .corrupts_until_ns = second});
      net.run([&](sim_endpoint& end) {
        const char* const schemes[] = {"mirror:2", "parity:3", "rs:2+2"};
        member at(end, redundancy_scheme::parse(schemes[seed % 3]), {20'000, 20'001, 0, 20'003});
        bool well = at.recover().has_value();
        if (well) well = at.keep(1).has_value();
        if (!well) CHECK(at.ranks.is_revoked());
        const bool is_kept = at.ranks.agree(well ? 1 : 0, at.ranks.after(10 * second)).value().bits == 1;
        refused += is_kept ? 0U : 1U;
        if (!is_kept) return;
        at.replica.commit();
        while (end.now_ns() < second)
          end.work(100'000'000);  // from now on nothing is turned
        if (at.self == seed / 3 % 4) at.replica.forget();
        const auto back = at.replica.recover(at.ranks.after(10 * second));
        CHECK(back.has_value());
        CHECK(at.has_all(1));
        at.ranks.agree(0, at.ranks.after(10 * second)).value();
      });
    }
    CHECK(refused > (llmmem_tests::is_watched ? 6 : 20));
    CHECK(refused < 4 * llmmem_tests::seeds(50, 17).size());
  }

  TEST_CASE("bytes that change on their way are an error and never become a part") {
    std::uint64_t damaged = 0;
    for (const auto seed : llmmem_tests::seeds(60, 20)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed, .frame_bytes = 4096, .corrupts_one_in = 12});
      net.run([&](sim_endpoint& end) {
        const auto scheme = seed % 2 == 0 ? redundancy_scheme::mirror(2) : redundancy_scheme::parity(2);
        member at(end, scheme, {30'000, 30'000, 30'000});
        bool well = at.recover().has_value();
        well = well && at.keep(1).has_value();
        if (at.agree(well ? 1 : 0).bits == 0) return;
        at.replica.commit();
        if (at.self == 1) at.replica.forget();  // as a fresh process
        const auto back = at.recover();
        if (back && back->is_recovered) {
          CHECK(at.has_all(1));
        }
        damaged += back ? 0U : 1U;
        if (!back) at.ranks.revoke();
        at.agree();
      });
    }
    CHECK(damaged > (llmmem_tests::is_watched ? 0 : 3));
  }

  TEST_CASE("reports of damage count only if they arrive unchanged") {
    std::uint64_t damaged = 0;
    for (const auto seed : llmmem_tests::seeds(60, 20)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed, .corrupts_one_in = 12});
      net.run([&](sim_endpoint& end) {
        member at(end, redundancy_scheme::mirror(3), {5, 6, 7});
        bool well = at.recover().has_value();
        well = well && at.keep(1).has_value();
        if (at.agree(well ? 1 : 0).bits == 0) return;
        at.replica.commit();
        testing_access::damage(at.replica, 1);  // on all three, of different copies
        for (int i = 0; i < 4; ++i) {
          const auto back = at.recover();
          if (back) CHECK(at.has(1));
          if (!back) CHECK((back.code() == errc::message_damaged || back.code() == errc::epoch_revoked));
          damaged += back.code() == errc::message_damaged ? 1U : 0U;
          if (!back) at.ranks.revoke();
          at.ranks.admit(at.agree());
        }
      });
    }
    CHECK(damaged > (llmmem_tests::is_watched ? 6 : 20));
  }
}
