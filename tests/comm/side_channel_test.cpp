/// What a transport over NCCL hears and votes, on a side channel that answers as it was told.
#include <llmmem/comm/detail/side_channel.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "support/scripted_side.hpp"

using namespace llmmem;
using llmmem_tests::scripted_side;

namespace {

constexpr deadline late{1'000};

struct on_side {
  scripted_side side;
  detail::nccl_report report{"test"};
  detail::side_channel<scripted_side> channel{side, report, 9};
};

}  // namespace

TEST_CASE(
    "a rank listens until its peer has died, the epoch is over, or the deadline has passed, in this order") {
  on_side on;
  CHECK(on.channel.listen(rank_id{1}, 50, late));
  CHECK(on.channel.listen({}, 50, late));
  CHECK(on.side.clock_ns == 2);  // it polls each time
  CHECK(on.channel.listen({}, 50, deadline{3}).error() == failure{errc::peer_timed_out, 0, 50, 0});
  CHECK(on.channel.listen(rank_id{1}, 50, deadline{3}).error() == failure{errc::peer_timed_out, 1, 50, 0});
  on.side.revoked = true;
  CHECK(on.channel.listen(rank_id{1}, 50, deadline{3}).error() == failure{errc::epoch_revoked, 1, 0, 7});
  on.side.dead = {seat_id{2}};
  CHECK(on.channel.listen(rank_id{1}, 50, late).code() == errc::epoch_revoked);  // another rank has died
  CHECK(on.channel.listen(rank_id{2}, 50, late).error() == failure{errc::peer_failed, 2, 50, 0});
  CHECK(on.channel.listen({}, 50, late).error() == failure{errc::peer_failed, 2, 50, 0});
}

TEST_CASE("both votes give the AND of all ranks, and leave no vote owed") {
  on_side on;
  on.side.answers = {comm::agreed{.bits = 1}, comm::agreed{.bits = 0}, comm::agreed{.bits = 5}};
  CHECK(on.channel.first_vote(3, late).value() == 1);
  CHECK_FALSE(on.channel.second_vote(true, late).value());
  CHECK(on.channel.agree(5, late).value().bits == 5);
  CHECK(on.side.said == std::vector<std::uint64_t>{3, 1, 5});
}

TEST_CASE("a rank first votes no in each vote that it owes, before it agrees on anything else") {
  const failure too_late{errc::peer_timed_out, 0, 0, 0};
  SUBCASE("both") {
    on_side on;
    on.side.answers = {too_late};
    CHECK(on.channel.first_vote(3, late).code() == errc::peer_timed_out);
    CHECK(on.channel.agree(8, late));
    CHECK(on.side.said == std::vector<std::uint64_t>{3, 0, 0, 8});
  }
  SUBCASE("the second") {
    on_side on;
    CHECK(on.channel.first_vote(3, late));
    on.side.answers = {too_late};
    CHECK(on.channel.second_vote(true, late).code() == errc::peer_timed_out);
    CHECK(on.channel.agree(8, late));
    CHECK(on.side.said == std::vector<std::uint64_t>{3, 1, 0, 8});
  }
  SUBCASE("votes stay owed if time runs out") {
    on_side on;
    on.side.answers = {too_late, too_late};
    CHECK_FALSE(on.channel.first_vote(3, late));
    CHECK(on.channel.agree(8, late).code() == errc::peer_timed_out);
    CHECK(on.channel.agree(8, late));
    CHECK(on.side.said == std::vector<std::uint64_t>{3, 0, 0, 0, 8});
  }
  SUBCASE("votes stay owed after an exception of the side channel") {
    on_side on;
    on.side.answers = {std::nullopt};
    CHECK_THROWS_AS(static_cast<void>(on.channel.first_vote(3, late)), std::runtime_error);
    CHECK(on.channel.agree(8, late));
    CHECK(on.side.said == std::vector<std::uint64_t>{3, 0, 0, 8});
  }
}

TEST_CASE("when a member has died, the votes end, because all members learn it") {
  on_side on;
  on.side.answers = {comm::agreed{.bits = 1, .failed = {seat_id{2}}}};
  CHECK(on.channel.first_vote(3, late).error() == failure{errc::peer_failed, 2, 0, 0});
  CHECK(on.channel.agree(8, late));
  CHECK(on.side.said == std::vector<std::uint64_t>{3, 8});
  on.side.answers = {comm::agreed{}, comm::agreed{.failed = {seat_id{9}}}};
  CHECK(on.channel.first_vote(3, late));
  CHECK(on.channel.second_vote(true, late).error() == failure{errc::peer_failed, 0, 0, 0});  // of no rank
}

TEST_CASE("rank 0 sends its bytes to all others, and they receive them") {
  std::vector<std::byte> bytes{std::byte{1}, std::byte{2}};
  on_side first;
  CHECK(first.channel.share(bytes, late));
  REQUIRE(first.side.sent.size() == 2);
  for (std::uint32_t i = 0; i < 2; ++i) {
    CHECK(first.side.sent[i].first == i + 1);
    CHECK(first.side.sent[i].second == bytes);
  }
  on_side other;
  other.side.self = rank_id{1};
  other.side.coming = {bytes};
  std::vector<std::byte> into(2);
  CHECK(other.channel.share(into, late));
  CHECK(into == bytes);
  CHECK(other.channel.share(into, late).code() == errc::peer_timed_out);
  CHECK(other.side.sent.empty());
}

TEST_CASE("seats are ranks as long as they are members") {
  on_side on;
  on.side.members = {seat_id{1}, seat_id{4}, seat_id{6}};
  CHECK(on.channel.ranks_of({seat_id{6}, seat_id{1}, seat_id{5}}) == std::vector<int>{0, 2});
  CHECK(on.channel.ranks_of({}).empty());
}
