#include <llmmem/comm/agreement.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <random>
#include <vector>

#include "support/seeds.hpp"

namespace {

using namespace llmmem;

seat_id at(std::size_t i) {
  return seat_id{static_cast<std::uint32_t>(i)};
}

seat_set set_of(std::initializer_list<std::uint32_t> seats) {
  seat_set made;
  for (const std::uint32_t each : seats)
    made.insert(seat_id{each});
  return made;
}

/// Members that agree, their messages in queues by pair, and the order in which all happens drawn by a seed.
class members_at_work {
 public:
  members_at_work(std::uint32_t count, std::uint64_t seed)
      : random_(seed), wire_(count, std::vector<std::deque<agree_message>>(count)), is_alive_(count, true) {
    for (std::uint32_t i = 0; i < count; ++i)
      parts_.emplace_back(seat_id{i}, seat_set::first(rank_count{count}));
    dies_after_.resize(count, ~0U);
    sent_.resize(count, 0);
    knows_.resize(count, std::vector<bool>(count, false));
    outcomes_.resize(count);
  }

  [[nodiscard]] std::size_t size() const { return parts_.size(); }
  [[nodiscard]] agreement& part(std::size_t who) { return parts_[who]; }
  [[nodiscard]] bool is_alive(std::size_t who) const { return is_alive_[who]; }
  [[nodiscard]] const std::vector<llmmem::comm::agreed>& outcomes(std::size_t who) const {
    return outcomes_[who];
  }
  [[nodiscard]] std::uint32_t sent(std::size_t who) const { return sent_[who]; }

  /// `who` sends that many messages more, and dies in the middle of what it does then.
  void kill_after(std::size_t who, std::uint32_t messages) { dies_after_[who] = sent_[who] + messages; }

  void begin(std::size_t who, std::uint64_t bits, const seat_set& joining = {}) {
    if (!is_alive_[who]) return;
    auto send = post(who);
    parts_[who].begin(bits, joining, send);
    take(who);
  }

  void suspect(std::size_t who, std::size_t whom) {
    auto send = post(who);
    parts_[who].on_death(at(whom), comm::death::suspected, send);
    take(who);
  }

  /// One thing that can happen happens. Nothing could: false.
  bool step() {
    struct event {
      std::size_t from, to;
      bool is_notice;
    };
    std::vector<event> can;
    for (std::size_t from = 0; from < size(); ++from) {
      for (std::size_t to = 0; to < size(); ++to) {
        if (!is_alive_[to]) continue;
        if (!wire_[from][to].empty() && !is_cut_[from][to]) can.push_back({from, to, false});
        if (wire_[from][to].empty() && !is_alive_[from] && !knows_[to][from]) can.push_back({from, to, true});
      }
    }
    if (can.empty()) return false;
    const event now = can[random_() % can.size()];
    auto send = post(now.to);
    if (now.is_notice) {
      knows_[now.to][now.from] = true;
      parts_[now.to].on_death(at(now.from), comm::death::certain, send);
    } else {
      const agree_message message = wire_[now.from][now.to].front();
      wire_[now.from][now.to].pop_front();
      parts_[now.to].on_message(at(now.from), message, send);
    }
    take(now.to);
    return true;
  }
  void run() {
    while (step()) {
    }
  }

  /// Nothing gets through between the two, until `heal`.
  void cut(const seat_set& one) {
    for (std::size_t a = 0; a < size(); ++a) {
      for (std::size_t b = 0; b < size(); ++b)
        is_cut_[a][b] = one.contains(at(a)) != one.contains(at(b));
    }
  }
  void heal() { cut({}); }

 private:
  struct poster {
    members_at_work* all;
    std::size_t from;
    void operator()(seat_id to, const agree_message& message) const noexcept {
      all->send(from, to_index(to), message);
    }
  };
  [[nodiscard]] poster post(std::size_t who) { return {this, who}; }

  void send(std::size_t from, std::size_t to, const agree_message& message) {
    if (sent_[from] == dies_after_[from]) is_alive_[from] = false;
    if (!is_alive_[from]) return;
    ++sent_[from];
    wire_[from][to].push_back(message);
  }
  void take(std::size_t who) {
    if (sent_[who] == dies_after_[who]) is_alive_[who] = false;
    const auto outcome = parts_[who].take_outcome();
    if (outcome && is_alive_[who]) outcomes_[who].push_back(*outcome);
  }

  std::mt19937_64 random_;
  std::vector<agreement> parts_;
  std::vector<std::vector<std::deque<agree_message>>> wire_;
  std::vector<bool> is_alive_;
  std::vector<std::uint32_t> dies_after_, sent_;
  std::vector<std::vector<bool>> knows_;
  std::vector<std::vector<comm::agreed>> outcomes_;
  bool is_cut_[8][8] = {};
};

/// All that live and are through have the same outcomes, and those fit what was said.
void check_same(members_at_work& all, std::size_t instances, const std::vector<std::uint64_t>& said) {
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all.is_alive(i)) continue;
    CAPTURE(i);
    REQUIRE(all.outcomes(i).size() == instances);
    if (first) CHECK(all.outcomes(i) == all.outcomes(*first));
    if (!first) first = i;
    for (const llmmem::comm::agreed& each : all.outcomes(i)) {
      CHECK((each.bits & ~said[i]) == 0);  // nobody's say is left out who lives
      for (const seat_id seat : each.failed)
        CHECK_FALSE(all.is_alive(to_index(seat)));
    }
  }
}

std::vector<std::uint64_t> sayings(std::size_t count) {
  std::vector<std::uint64_t> said;
  for (std::size_t i = 0; i < count; ++i)
    said.push_back(~(std::uint64_t{1} << i));
  return said;
}

/// What one member has told others.
struct letters {
  std::vector<agree_message> all{};

  [[nodiscard]] auto post() {
    return [this](seat_id, const agree_message& message) noexcept { all.push_back(message); };
  }
  [[nodiscard]] std::vector<agree_message> of(agree_kind kind) const {
    std::vector<agree_message> some;
    for (const agree_message& each : all) {
      if (each.kind == kind) some.push_back(each);
    }
    return some;
  }
};

}  // namespace

TEST_SUITE("agreement") {
  TEST_CASE("without failures all members agree on the AND of their votes, by 4 messages per member") {
    for (const std::uint32_t count : {1U, 2U, 3U, 8U}) {
      CAPTURE(count);
      members_at_work all(count, 1);
      std::uint64_t expected = ~std::uint64_t{0};
      for (std::size_t i = 0; i < count; ++i) {
        expected &= sayings(count)[i];
        all.begin(i, sayings(count)[i], i == 0 ? set_of({4, 7, 9}) : set_of({4, 9}));
      }
      all.run();
      std::uint32_t messages = 0;
      for (std::size_t i = 0; i < count; ++i) {
        messages += all.sent(i);
        REQUIRE(all.outcomes(i).size() == 1);
        CHECK(all.outcomes(i)[0].bits == expected);
        CHECK(all.outcomes(i)[0].failed.empty());
        CHECK(all.outcomes(i)[0].joining == (count == 1 ? set_of({4, 7, 9}) : set_of({4, 9})));
      }
      CHECK(messages == 4 * (count - 1));
    }
  }

  TEST_CASE("if up to 3 of 4 members die in any order, at any message they send, the others agree") {
    const std::vector<std::uint64_t> said = sayings(4);
    constexpr std::uint32_t most_messages = 9;
    std::uint64_t runs = 0;
    std::uint32_t max_sent = 0;
    std::vector<std::size_t> order{0, 1, 2, 3};
    do {
      for (std::size_t victims = 1; victims <= 3; ++victims) {
        // Those that do not die come in order: each set of victims once.
        if (!std::is_sorted(order.begin() + static_cast<std::ptrdiff_t>(victims), order.end())) continue;
        std::uint32_t points = 1;
        for (std::size_t i = 0; i < victims; ++i)
          points *= most_messages;
        for (std::uint32_t point = 0; point < points; ++point) {
          members_at_work all(4, llmmem_tests::seeds(1)[0] + point);
          std::uint32_t rest = point;
          for (std::size_t i = 0; i < victims; ++i, rest /= most_messages)
            all.kill_after(order[i], rest % most_messages);
          for (const std::size_t who : order)
            all.begin(who, said[who]);
          all.run();
          check_same(all, 1, said);
          for (std::size_t i = 0; i < 4; ++i)
            max_sent = std::max(max_sent, all.sent(i));
          ++runs;
        }
      }
    } while (std::next_permutation(order.begin(), order.end()));
    CHECK(runs == 4 * 9 + 12 * 81 + 24 * 729);
    CHECK(max_sent == most_messages);  // each of them was the last of somebody
  }

  TEST_CASE("agreements one after another stay the same for all, regardless of which rank dies between") {
    for (const auto seed : llmmem_tests::seeds(3000)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto count = static_cast<std::uint32_t>(2 + random() % 5);
      const std::vector<std::uint64_t> said = sayings(count);
      members_at_work all(count, seed);
      for (std::uint32_t i = 0; i + 1 < count; ++i) {
        if (random() % 2 == 0) all.kill_after(random() % count, static_cast<std::uint32_t>(random() % 20));
      }
      std::vector<std::size_t> begun(count, 0);
      // Members go on to the next as soon as they have one.
      for (bool more = true; more;) {
        more = false;
        for (std::size_t i = 0; i < count; ++i) {
          if (all.is_alive(i) && begun[i] < 3 && begun[i] == all.outcomes(i).size() && random() % 3 == 0) {
            all.begin(i, said[i]);
            ++begun[i];
          }
          if (all.is_alive(i) && begun[i] < 3) more = true;
        }
        if (all.step()) more = true;
      }
      check_same(all, 3, said);
    }
  }

  TEST_CASE(
      "if two halves cannot reach each other, at most one decides; if one half has died, the other decides") {
    for (const auto seed : llmmem_tests::seeds(3000)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto count = static_cast<std::uint32_t>(2 + random() % 5);
      const std::vector<std::uint64_t> said = sayings(count);
      members_at_work all(count, seed);
      seat_set one;
      for (std::uint32_t i = 0; i < count; ++i) {
        if (random() % 2 == 0) one.insert(seat_id{i});
      }
      for (std::size_t i = 0; i < count; ++i)
        all.begin(i, said[i]);
      for (std::uint64_t early = random() % (4 * count); early > 0; --early)
        all.step();
      all.cut(one);
      if (random() % 2 == 0) all.kill_after(random() % count, static_cast<std::uint32_t>(random() % 4));
      for (std::size_t a = 0; a < count; ++a) {
        for (std::size_t b = 0; b < count; ++b) {
          if (one.contains(at(a)) == one.contains(at(b)) || !all.is_alive(a)) continue;
          for (std::uint64_t between = random() % 3; between > 0; --between)
            all.step();
          if (all.is_alive(a)) all.suspect(a, b);
        }
      }
      all.run();
      if (random() % 2 == 0) all.heal();  // late words of the others change nothing
      all.run();
      std::optional<llmmem::comm::agreed> decided;
      std::uint32_t through = 0;
      for (std::size_t i = 0; i < count; ++i) {
        if (!all.is_alive(i)) continue;
        REQUIRE(all.outcomes(i).size() <= 1);
        if (all.outcomes(i).empty()) {
          if (all.part(i).is_begun() && all.part(i).has_quorum()) {
            CHECK_MESSAGE(false, "could decide, and did not: member ", i);
          }
          continue;
        }
        ++through;
        if (decided) CHECK(all.outcomes(i)[0] == *decided);
        if (!decided) decided = all.outcomes(i)[0];
        CHECK((decided->bits & ~said[i]) == 0);
      }
      if (one.empty() || one.size() == count) CHECK(through > 0);
    }
  }

  TEST_CASE(
      "a quorum is more than half, or the half with the lowest member; if the others are certainly dead, any "
      "remainder") {
    const auto none = [](seat_id, const agree_message&) noexcept {};
    const auto of = [&](std::uint32_t count, std::uint32_t self,
                        std::initializer_list<std::uint32_t> suspected,
                        std::initializer_list<std::uint32_t> certain) {
      agreement part(seat_id{self}, seat_set::first(rank_count{count}));
      for (const std::uint32_t each : suspected)
        part.on_death(seat_id{each}, comm::death::suspected, none);
      for (const std::uint32_t each : certain)
        part.on_death(seat_id{each}, comm::death::certain, none);
      return part;
    };
    CHECK(of(4, 0, {}, {1, 2, 3}).has_quorum());
    CHECK(of(4, 0, {2, 3}, {}).has_quorum());
    CHECK_FALSE(of(4, 1, {0, 3}, {}).has_quorum());
    CHECK(of(5, 1, {0, 3}, {}).has_quorum());
    CHECK(of(5, 1, {0, 3}, {}).quorum() == 3);
    CHECK_FALSE(of(5, 1, {0, 3}, {4}).has_quorum());  // 0, 3 and the dead one may have gone on before it died
    CHECK_FALSE(of(3, 0, {1, 2}, {}).has_quorum());
    CHECK(of(3, 0, {}, {1, 2}).has_quorum());
    CHECK_FALSE(of(3, 0, {1, 2}, {1, 2}).has_quorum());  // suspected first: they may have gone on, and ended
    CHECK(of(2, 0, {1}, {}).has_quorum());
    CHECK_FALSE(of(2, 1, {0}, {}).has_quorum());
    CHECK_FALSE(of(4, 2, {1}, {0}).has_quorum());  // two of four, and the lowest is not among them
  }

  TEST_CASE(
      "a process that is reported as failed makes no other process fail, and considers the reporter "
      "estranged") {
    members_at_work all(5, 1);
    for (std::size_t other = 0; other < 4; ++other)
      all.suspect(4, other);
    for (std::size_t i = 0; i < 5; ++i)
      all.begin(i, ~std::uint64_t{0});
    all.run();
    CHECK(all.outcomes(4).empty());
    CHECK_FALSE(all.part(4).has_quorum());
    for (std::size_t i = 0; i < 4; ++i) {
      REQUIRE(all.outcomes(i).size() == 1);
      CHECK(all.outcomes(i)[0].failed == all.outcomes(0)[0].failed);
      CHECK(all.part(i).failed() == set_of({4}));
    }
  }

  TEST_CASE(
      "a process that is wrongly reported dead leaves alone, without the processes that have not received "
      "the report") {
    members_at_work all(5, 1);
    all.suspect(4, 1);
    for (std::size_t i = 0; i < 5; ++i)
      all.begin(i, ~std::uint64_t{0});
    all.run();
    for (const std::size_t i : {0U, 2U, 3U, 4U}) {
      CAPTURE(i);
      REQUIRE(all.outcomes(i).size() == 1);
      CHECK(all.outcomes(i)[0].failed == set_of({1}));
    }
    CHECK(all.outcomes(1).empty());
    CHECK_FALSE(all.part(1).has_quorum());
    CHECK(all.part(1).suspected().empty());  // it tells nobody
  }

  TEST_CASE("messages from non-members are ignored") {
    const auto none = [](seat_id, const agree_message&) noexcept { CHECK(false); };
    agreement part(seat_id{1}, set_of({1, 2, 5}));
    agree_message decides{.kind = agree_kind::decide};
    part.on_message(seat_id{3}, decides, none);
    part.on_message(seat_id{1}, decides, none);
    part.on_death(seat_id{3}, comm::death::certain, none);
    CHECK(part.failed().empty());
    CHECK_FALSE(part.take_outcome());
    part.on_message(seat_id{2}, decides, none);
    CHECK(part.take_outcome());
    CHECK_FALSE(part.take_outcome());
  }

  TEST_CASE("a process that died before it began an agreement counts as failed") {
    members_at_work all(4, 1);
    all.kill_after(2, 0);
    for (std::size_t i = 0; i < 4; ++i)
      all.begin(i, 1);
    all.run();
    for (const std::size_t i : {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {
      REQUIRE(all.outcomes(i).size() == 1);
      CHECK(all.outcomes(i)[0].failed == set_of({2}));
    }
  }

  TEST_CASE("a new coordinator proposes the latest of the earlier proposals, in any order of the reports") {
    for (const bool latest_first : {false, true}) {
      CAPTURE(latest_first);
      letters sent;
      agreement part(seat_id{2}, seat_set::first(rank_count{5}));
      part.begin(7, {}, sent.post());
      part.on_death(seat_id{0}, comm::death::certain, sent.post());
      part.on_death(seat_id{1}, comm::death::certain, sent.post());
      const agree_message of_0{.accepted_by = seat_id{0}, .value = {.bits = 100}};
      const agree_message of_1{.accepted_by = seat_id{1}, .value = {.bits = 101}};
      part.on_message(seat_id{3}, latest_first ? of_1 : of_0, sent.post());
      part.on_message(seat_id{4}, latest_first ? of_0 : of_1, sent.post());
      REQUIRE(sent.of(agree_kind::propose).size() == 2);
      CHECK(sent.of(agree_kind::propose)[0].value.bits == 101);
    }
  }

  TEST_CASE("a process that accepted a value and is then alone decides that value, not its own") {
    letters sent;
    agreement part(seat_id{1}, seat_set::first(rank_count{2}));
    part.begin(7, {}, sent.post());
    part.on_message(seat_id{0}, {.kind = agree_kind::propose, .value = {.bits = 3}}, sent.post());
    CHECK(sent.of(agree_kind::accept).size() == 1);
    part.on_death(seat_id{0}, comm::death::certain,
                  sent.post());  // which may have decided, and acted upon it
    CHECK(part.take_outcome().value() == comm::agreed{.bits = 3});  // in which 0 had not failed yet
  }

  TEST_CASE("a member learns of a decision that counts it among the failed") {
    letters sent;
    agreement part(seat_id{3}, seat_set::first(rank_count{4}));
    part.begin(1, {}, sent.post());
    // Who tells it suspects nobody: a coordinator left it out that was not heard any more itself.
    const llmmem::comm::agreed without_it{.bits = 1, .failed = set_of({3})};
    part.on_message(seat_id{0}, {.kind = agree_kind::decide, .value = without_it}, sent.post());
    CHECK_FALSE(part.take_outcome().has_value());
    CHECK_FALSE(part.has_quorum());
    // What it knows, it tells.
    part.on_message(seat_id{1}, {.kind = agree_kind::query}, sent.post());
    REQUIRE(sent.of(agree_kind::decide).size() == 1);
    CHECK(sent.of(agree_kind::decide)[0].value == without_it);
  }

  TEST_CASE("only a proposal from the coordinator that received the report is accepted") {
    letters sent;
    agreement part(seat_id{2}, seat_set::first(rank_count{3}));
    const agree_message proposal{.kind = agree_kind::propose, .value = {.bits = 3}};
    part.on_message(seat_id{0}, proposal, sent.post());  // it has not said anything yet
    part.begin(7, {}, sent.post());
    part.on_message(seat_id{1}, proposal, sent.post());
    CHECK(sent.of(agree_kind::accept).empty());
    part.on_message(seat_id{0}, proposal, sent.post());
    CHECK(sent.of(agree_kind::accept).size() == 1);
  }

  TEST_CASE("an ignored process is informed each time it speaks") {
    letters sent;
    agreement part(seat_id{0}, seat_set::first(rank_count{3}));
    part.on_death(seat_id{2}, comm::death::suspected, sent.post());
    CHECK(sent.of(agree_kind::estranged).size() == 1);
    part.on_message(seat_id{2}, {.kind = agree_kind::report}, sent.post());
    part.on_message(seat_id{2}, {.kind = agree_kind::report}, sent.post());
    CHECK(sent.of(agree_kind::estranged).size() == 3);
  }
}
