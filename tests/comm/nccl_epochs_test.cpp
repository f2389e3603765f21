/// How a rank forms communicators, beside a side channel and an NCCL that answer as they were told.
#include <doctest/doctest.h>

#if defined(LLMMEM_TESTS_NCCL)
#include <llmmem/comm/detail/nccl_epochs.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/scripted_nccl.hpp"
#include "support/scripted_side.hpp"

using namespace llmmem;
using llmmem_tests::nccl_script;
using llmmem_tests::scripted_nccl;
using llmmem_tests::scripted_side;

namespace {

using calls = std::vector<std::string>;
constexpr deadline late{1'000};

struct one_rank {
  using api_type = scripted_nccl<>;

  nccl_script script;
  api_type api{&script};
  scripted_side side;
  nccl_options options{.poll_ns = 10, .stop_ns = 100};
  nccl_stats stats;
  detail::nccl_report report{"test"};
  detail::side_channel<scripted_side> channel{side, report, 9};
  detail::stream_marker<api_type> marker{api, nullptr, "test"};
  detail::nccl_communicator<api_type> comm{api, marker, options, stats};
  detail::nccl_epochs<scripted_side, api_type> epochs{channel, comm, api, report, options};

  one_rank() { script.log.clear(); }
  /// Has joined, with nothing in the logs.
  void join() {
    REQUIRE(epochs.join(late));
    script.log.clear();
    side.said.clear();
    side.sent.clear();
  }
  /// What rank 0 sends: the way, and an id.
  [[nodiscard]] static scripted_side::bytes_type plan(std::uint8_t way, const char* id) {
    scripted_side::bytes_type bytes(1 + sizeof(ncclUniqueId));
    bytes[0] = std::byte{way};
    std::memcpy(&bytes[1], id, std::strlen(id));
    return bytes;
  }
};

}  // namespace

TEST_CASE("rank 0 joins by its own id, which it sends to all ranks") {
  one_rank on;
  CHECK(on.epochs.join(late));
  CHECK(on.side.said == std::vector<std::uint64_t>{3, 1});  // it is new, and has nothing to abort
  CHECK(on.script.log == calls{"init fresh"});
  REQUIRE(on.side.sent.size() == 2);
  CHECK(on.side.sent[1].second == one_rank::plan(1, "fresh"));
  CHECK(on.comm.is_there());
  CHECK_FALSE(on.side.revoked);
}

TEST_CASE(
    "other ranks follow rank 0's choice, also if they do not know that they join a grown communicator") {
  for (const std::uint8_t way : {std::uint8_t{1}, std::uint8_t{2}}) {
    one_rank on;
    on.side.self = rank_id{2};
    on.side.coming = {one_rank::plan(way, "its")};
    CHECK(on.epochs.join(late));
    CHECK(on.script.log == (way == 1 ? calls{"init its"} : calls{"grow 0"}));
    CHECK(on.stats.grown == (way == 1 ? 0 : 1));
  }
}

TEST_CASE("a communicator is shrunk if all ranks have one, and made again if one rank has none") {
  for (const bool all_keep : {true, false}) {
    one_rank on;
    on.join();
    const comm::agreed outcome{.failed = {seat_id{1}}};
    on.side.answers = {comm::agreed{.bits = all_keep ? 1U : 0U}, comm::agreed{.bits = 1}};
    CHECK(on.epochs.shrink(outcome, late));
    CHECK(on.side.epochs == std::vector<comm::agreed>{outcome});
    CHECK(on.side.said == std::vector<std::uint64_t>{1, 1});
    if (all_keep) {
      CHECK(on.script.excluded == std::vector<int>{1});  // by the ranks of the epoch before
      CHECK(on.script.log == calls{"revoke 1", "shrink 1", "abort 1"});
    } else {
      CHECK(on.script.log == calls{"revoke 1", "abort 1", "init fresh"});
    }
    CHECK(on.comm.handle() == nccl_script::comm(2));
    CHECK_FALSE(on.comm.is_stopped());
  }
}

TEST_CASE("a communicator grows if all joining seats are higher, no rank has failed, and the epoch lives") {
  const auto admit = [](seat_id joining, seat_set failed, bool revoked) {
    one_rank on;
    on.side.members = {seat_id{2}, seat_id{4}};
    on.join();
    on.side.revoked = revoked;
    CHECK(on.epochs.admit({.failed = failed, .joining = {joining}}, late));
    return on.stats.grown == 1;
  };
  CHECK(admit(seat_id{5}, {}, false));
  CHECK_FALSE(admit(seat_id{3}, {}, false));
  CHECK_FALSE(admit(seat_id{5}, {seat_id{4}}, false));
  CHECK_FALSE(admit(seat_id{5}, {}, true));
}

TEST_CASE("a rank that cannot make its communicator votes no in the second vote, and ends the epoch") {
  one_rank on;
  on.script.begun = ncclSystemError;
  const result<void> joined = on.epochs.join(late);
  CHECK(joined.code() == errc::library_failed);
  CHECK(joined.error().where.view() == "test: ncclCommInitRankConfig: a failure of NCCL");
  CHECK(on.side.said == std::vector<std::uint64_t>{3, 0});
  CHECK(on.side.revoked);
  CHECK_FALSE(on.comm.is_there());
}

TEST_CASE("a communicator that another rank could not make is aborted") {
  one_rank on;
  on.side.answers = {comm::agreed{.bits = 3}, comm::agreed{.bits = 0}};
  CHECK(on.epochs.join(late).error() == failure{errc::epoch_revoked, 0, 0, 7});
  CHECK(on.side.revoked);
  CHECK(on.script.log == calls{"init fresh", "abort 1"});
  CHECK_FALSE(on.comm.is_there());
}

TEST_CASE("a communicator that takes too long to make, or that NCCL gives up, is aborted") {
  one_rank slow;
  slow.script.is_child_shown = false;
  CHECK(slow.epochs.join(deadline{20}).code() == errc::peer_timed_out);
  CHECK(slow.script.paused_ns > 0);
  CHECK(slow.side.said == std::vector<std::uint64_t>{3, 0});
  one_rank lost;
  lost.script.statuses[1] = {ncclInProgress, ncclRemoteError};
  CHECK(lost.epochs.join(late).code() == errc::library_failed);
  CHECK(lost.script.log == calls{"init fresh", "abort 1"});
}

TEST_CASE("an exception of the side channel passes through after all that calls could use has ended") {
  for (const std::size_t vote : {0U, 1U}) {
    one_rank on;
    on.join();
    on.side.answers.assign(vote, comm::agreed{.bits = 1});
    on.side.answers.emplace_back(std::nullopt);
    CHECK_THROWS_AS(static_cast<void>(on.epochs.shrink({.failed = {seat_id{1}}}, late)), std::runtime_error);
    CHECK(on.side.revoked);
    CHECK_FALSE(on.comm.is_there());
    CHECK(on.script.log.back() == (vote == 0 ? "abort 1" : "abort 2"));
  }
}

TEST_CASE("a rank that leaves waits for the others until its deadline, and aborts stopped communicators") {
  one_rank on;
  CHECK(on.epochs.leave(late));  // there is nothing as yet
  on.join();
  on.script.finalized = ncclInProgress;
  on.script.statuses[1] = {ncclInProgress, ncclInProgress};
  CHECK(on.epochs.leave(late));
  CHECK(on.script.log == calls{"finalize 1", "destroy 1"});

  one_rank alone;
  alone.join();
  alone.script.finalized = ncclInProgress;
  alone.script.statuses[1].assign(1'000, ncclInProgress);
  CHECK(alone.epochs.leave(late).code() == errc::peer_timed_out);
  CHECK(alone.side.revoked);
  CHECK(alone.script.log == calls{"finalize 1", "abort 1"});

  one_rank failing;
  failing.join();
  failing.script.finalized = ncclInternalError;
  CHECK(failing.epochs.leave(late).error().where.view() == "test: ncclCommFinalize: a failure of NCCL");

  one_rank stopped;
  stopped.join();
  stopped.comm.stop(stopped.side);
  CHECK(stopped.epochs.leave(late));
  CHECK(stopped.script.log == calls{"revoke 1", "abort 1"});
}
#else
TEST_CASE("NCCL or the CUDA Toolkit is not here: nccl_epochs was not tested" *
          doctest::description("skipped")) {
  MESSAGE("llmmem::nccl was not found");
}
#endif
