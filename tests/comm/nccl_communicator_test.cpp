/// The life of a communicator, on an NCCL that answers as it was told.
#include <doctest/doctest.h>

#if defined(LLMMEM_TESTS_NCCL)
#include <llmmem/comm/detail/nccl_communicator.hpp>
#include <llmmem/comm/endpoint.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/scripted_nccl.hpp"

using namespace llmmem;
using llmmem_tests::nccl_script;
using llmmem_tests::scripted_nccl;

namespace {

using calls = std::vector<std::string>;

/// A clock that goes on by as much as NCCL was paused.
struct pause_clock {
  const nccl_script* script;
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return {script->paused_ns + ns}; }
};

template <bool Revoke = true>
struct one_rank {
  using api_type = scripted_nccl<Revoke, true>;

  nccl_script script;
  api_type api{&script};
  nccl_options options{.poll_ns = 10, .stop_ns = 100};
  nccl_stats stats;
  detail::stream_marker<api_type> marker{api, nullptr, "test"};
  detail::nccl_communicator<api_type> comm{api, marker, options, stats};
  ncclUniqueId id{};
  std::array<std::byte, 8> memory{};

  /// Has communicator 1, with a window, and an empty log.
  one_rank() {
    REQUIRE(comm.begin_fresh(3, id, 1) == ncclInProgress);
    REQUIRE(comm.look_at_child() == ncclSuccess);
    comm.adopt_child();
    static_cast<void>(comm.windows().add(memory));
    script.log.clear();
  }
  void stop() { comm.stop(pause_clock{&script}); }
};

}  // namespace

TEST_CASE("a fresh communicator replaces the previous one, which is aborted first") {
  one_rank on;
  CHECK(on.comm.handle() == nccl_script::comm(1));
  CHECK_FALSE(on.comm.is_stopped());
  CHECK(on.comm.begin_fresh(2, on.id, 0) == ncclInProgress);
  CHECK_FALSE(on.comm.is_there());
  CHECK(on.comm.windows().size() == 0);
  on.script.statuses[2] = {ncclInProgress, ncclInProgress};
  CHECK(on.comm.look_at_child() == ncclInProgress);
  CHECK(on.comm.look_at_child() == ncclInProgress);
  CHECK(on.comm.look_at_child() == ncclSuccess);
  on.comm.adopt_child();
  CHECK(on.comm.handle() == nccl_script::comm(2));
  CHECK(on.script.log == calls{"abort 1", "init "});
  CHECK(on.stats.fresh == 2);
  CHECK(on.stats.aborted == 1);
}

TEST_CASE("a shrunk communicator is made from the previous one, which is aborted afterwards") {
  one_rank on;
  on.script.is_child_shown = false;
  std::vector<int> excluded{0, 2};
  CHECK(on.comm.begin_shrunk(excluded) == ncclInProgress);
  CHECK(on.script.excluded == excluded);
  on.script.statuses[1] = {ncclInProgress, ncclSuccess};
  CHECK(on.comm.look_at_child() == ncclInProgress);
  CHECK(on.comm.look_at_child() == ncclInProgress);  // it is made, and not shown as yet
  on.script.show_child();
  CHECK(on.comm.is_there());
  CHECK(on.comm.look_at_child() == ncclSuccess);
  CHECK_FALSE(on.comm.is_there());
  on.comm.adopt_child();
  CHECK(on.comm.handle() == nccl_script::comm(2));
  CHECK(on.script.log == calls{"shrink 1", "abort 1"});
  CHECK(on.stats.shrunk == 1);
  CHECK(on.stats.fresh == 1);
}

TEST_CASE(
    "a grown communicator replaces the previous one when it is adopted, and only some ranks give the id") {
  one_rank on;
  CHECK(on.comm.begin_grown(4, on.id, 1) == ncclInProgress);
  CHECK_FALSE(on.script.has_given_id);
  CHECK(on.script.grown_as == -1);
  CHECK(on.comm.look_at_child() == ncclSuccess);
  CHECK(on.comm.handle() == nccl_script::comm(1));
  on.comm.adopt_child();
  CHECK(on.comm.handle() == nccl_script::comm(2));
  CHECK(on.script.log == calls{"grow 1", "abort 1"});
  CHECK(on.stats.grown == 1);

  CHECK(on.comm.begin_grown(5, on.id, 0) == ncclInProgress);
  CHECK(on.script.has_given_id);
  on.comm.abort();
  CHECK(on.comm.begin_grown(5, on.id, 4) == ncclInProgress);  // joins: it has none
  CHECK(on.script.has_given_id);
  CHECK(on.script.grown_as == 4);
}

TEST_CASE("a refusal or failure of NCCL is reported, and an abort ends both communicators") {
  one_rank on;
  on.script.begun = ncclInvalidUsage;
  CHECK(on.comm.begin_grown(4, on.id, 1) == ncclInvalidUsage);
  CHECK(on.comm.look_at_child() == ncclInProgress);  // there is no child
  on.script.begun = ncclInProgress;
  std::vector<int> excluded{0};
  CHECK(on.comm.begin_shrunk(excluded) == ncclInProgress);
  on.script.statuses[1] = {ncclRemoteError};
  CHECK(on.comm.look_at_child() == ncclRemoteError);
  on.script.log.clear();
  on.comm.abort();
  CHECK(on.script.log == calls{"abort 1", "abort 2"});  // the parent first
  CHECK(on.comm.windows().size() == 0);
  on.script.log.clear();
  on.comm.abort();
  CHECK(on.script.log.empty());
  CHECK(on.stats.aborted == 2);
}

TEST_CASE(
    "a grown child that NCCL has not returned when it is given up may still be written, and is never used") {
  one_rank on;
  on.script.is_child_shown = false;
  CHECK(on.comm.begin_grown(4, on.id, 1) == ncclInProgress);
  on.comm.abort();
  on.script.show_child();  // NCCL's thread is late: the place is still there
  ncclComm_t* const late = on.script.child_at;
  on.script.is_child_shown = true;
  CHECK(on.comm.begin_fresh(3, on.id, 1) == ncclInProgress);
  CHECK(on.script.child_at != late);
  CHECK(on.comm.look_at_child() == ncclSuccess);
  on.comm.adopt_child();
  CHECK(on.comm.handle() == nccl_script::comm(3));
  delete late;  // by hand: nothing owns it any more
}

TEST_CASE("a stop revokes, and waits for NCCL and for the work on the stream") {
  one_rank on;
  on.marker.will_put();
  on.script.statuses[1] = {ncclSuccess, ncclInProgress, ncclSuccess, ncclSuccess};
  on.script.revoked = ncclInProgress;
  on.script.queries = {cudaErrorNotReady, cudaErrorNotReady, cudaErrorNotReady};
  on.stop();
  CHECK(on.script.log == calls{"record", "revoke 1"});
  CHECK(on.script.paused_ns == 30);
  CHECK(on.comm.is_there());
  CHECK(on.comm.is_stopped());
  CHECK(on.comm.windows().size() == 1);
  CHECK(on.stats.revoked == 1);
  on.stop();  // once
  CHECK(on.script.log.size() == 2);
  std::vector<int> excluded{0};
  CHECK(on.comm.begin_shrunk(excluded) == ncclInProgress);
  CHECK(on.comm.look_at_child() == ncclSuccess);
  on.comm.adopt_child();
  CHECK_FALSE(on.comm.is_stopped());
}

TEST_CASE("a stop aborts if NCCL cannot revoke, or not in time") {
  SUBCASE("it is still launching") {
    one_rank on;
    on.script.statuses[1] = {ncclInProgress};
    on.stop();
    CHECK(on.script.log == calls{"abort 1"});
  }
  SUBCASE("CUDA refuses the event") {
    one_rank on;
    on.marker.will_put();
    on.script.recorded = cudaErrorInvalidValue;
    on.stop();
    CHECK(on.script.log == calls{"record", "abort 1"});
  }
  SUBCASE("the revoke fails") {
    one_rank on;
    on.script.revoked = ncclInternalError;
    on.stop();
    CHECK(on.script.log == calls{"revoke 1", "abort 1"});
  }
  SUBCASE("the stream never ends") {
    one_rank on;
    on.marker.will_put();
    on.script.queries.assign(1'000, cudaErrorNotReady);
    on.stop();
    CHECK(on.script.log == calls{"record", "revoke 1", "abort 1"});
    CHECK(on.script.paused_ns == 100);
    CHECK(on.marker.is_idle());
  }
  SUBCASE("NCCL has no revoke") {
    one_rank<false> on;
    on.stop();
    CHECK(on.script.log == calls{"abort 1"});
    CHECK(on.stats.revoked == 0);
  }
}

TEST_CASE("a communicator ends its windows first and then itself, or its destructor aborts it") {
  {
    one_rank on;
    on.script.finalized = ncclInProgress;
    CHECK(on.comm.begin_finalize() == ncclInProgress);
    on.script.statuses[1] = {ncclInProgress};
    CHECK(on.comm.status() == ncclInProgress);
    CHECK(on.comm.status() == ncclSuccess);
    on.comm.destroy();
    CHECK_FALSE(on.comm.is_there());
    CHECK(on.script.log == calls{"deregister 0 of 1", "finalize 1", "destroy 1"});
    CHECK(on.stats.aborted == 0);
  }
  nccl_script script;
  scripted_nccl<> api{&script};
  const nccl_options options;
  nccl_stats stats;
  detail::stream_marker<scripted_nccl<>> marker(api, nullptr, "test");
  {
    detail::nccl_communicator<scripted_nccl<>> comm(api, marker, options, stats);
    CHECK(comm.begin_fresh(1, {}, 0) == ncclInProgress);
  }
  CHECK(stats.aborted == 1);
  CHECK(script.log.back() == "abort 1");
}
#else
TEST_CASE("NCCL or the CUDA Toolkit is not here: nccl_communicator was not tested" *
          doctest::description("skipped")) {
  MESSAGE("llmmem::nccl was not found");
}
#endif
