/// The marks of a stream, on a CUDA that answers as it was told.
#include <doctest/doctest.h>

#if defined(LLMMEM_TESTS_NCCL)
#include <llmmem/comm/detail/stream_marker.hpp>
#include <llmmem/error.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "support/scripted_nccl.hpp"

using namespace llmmem;
using llmmem_tests::nccl_script;
using llmmem_tests::scripted_nccl;

namespace {

using calls = std::vector<std::string>;

struct on_stream {
  nccl_script script;
  scripted_nccl<> api{&script};
  detail::stream_marker<scripted_nccl<>> marker{api, nullptr, "test"};
};

}  // namespace

TEST_CASE("all CUDA objects are returned, and a refusal leaves none behind") {
  nccl_script script;
  scripted_nccl<> api{&script};
  {
    const detail::stream_marker<scripted_nccl<>> marker(api, nullptr, "test");
    CHECK(marker.byte_out() == script.device);
    CHECK(marker.byte_in() == script.device + 1);
  }
  CHECK(script.log == calls{"make_event", "allocate", "release", "end_event"});
  script.log.clear();
  const auto make = [&] { detail::stream_marker<scripted_nccl<>>(api, nullptr, "test"); };
  script.allocated = cudaErrorMemoryAllocation;
  CHECK_THROWS_WITH_AS(make(), "test: cudaMallocAsync of 2 bytes: a failure of CUDA", system_error);
  CHECK(script.log == calls{"make_event", "end_event"});
  script.log.clear();
  script.event_made = cudaErrorMemoryAllocation;
  CHECK_THROWS_WITH_AS(make(), "test: cudaEventCreate: a failure of CUDA", system_error);
  CHECK(script.log.empty());
}

TEST_CASE("a stream is idle except for marked, unfinished work") {
  on_stream on;
  on.script.queries = {cudaErrorNotReady};
  CHECK(on.marker.is_idle());  // nothing is marked: the event is not asked
  CHECK(on.script.queries.size() == 1);
  on.marker.will_put();
  CHECK(on.marker.mark() == cudaSuccess);
  CHECK_FALSE(on.marker.is_idle());
  CHECK(on.marker.query() == cudaSuccess);
  on.script.queries = {cudaErrorNotReady};
  CHECK(on.marker.is_idle());  // done once is done
  CHECK(on.marker.mark() == cudaSuccess);
  on.script.queries = {cudaErrorIllegalAddress};
  CHECK(on.marker.is_idle());  // what has failed does not run
  on.script.queries = {cudaErrorNotReady};
  CHECK_FALSE(on.marker.is_idle());
  on.marker.forget();
  on.script.queries = {cudaErrorNotReady};
  CHECK(on.marker.is_idle());
}

TEST_CASE("remaining work is marked if there is some, and a refusal is reported") {
  on_stream on;
  const auto marks = [&] { return std::ranges::count(on.script.log, "record"); };
  CHECK(on.marker.mark_the_rest());
  CHECK(marks() == 0);
  on.marker.will_put();
  on.script.recorded = cudaErrorInvalidValue;
  CHECK_FALSE(on.marker.mark_the_rest());
  on.script.recorded = cudaSuccess;
  CHECK(on.marker.mark_the_rest());  // it is still to be marked
  CHECK(marks() == 2);
  CHECK(on.marker.mark_the_rest());
  CHECK(marks() == 2);
  on.marker.will_put();
  on.marker.forget();
  CHECK(on.marker.mark_the_rest());
  CHECK(marks() == 2);
}
#else
TEST_CASE("NCCL or the CUDA Toolkit is not here: stream_marker was not tested" *
          doctest::description("skipped")) {
  MESSAGE("llmmem::nccl was not found");
}
#endif
