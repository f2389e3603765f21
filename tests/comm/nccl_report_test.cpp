/// The failures of a transport over NCCL.
#include <llmmem/comm/detail/nccl_report.hpp>

#include <doctest/doctest.h>

#include <string>

using namespace llmmem;

TEST_CASE("a failure names its transport, the rank and both numbers") {
  const detail::nccl_report report("gradients");
  const failure refused = report.refuse(errc::peer_failed, rank_id{3}, 10, 4);
  CHECK(refused == failure{errc::peer_failed, 3, 10, 4});
  CHECK(refused.where.view() == "gradients");
  CHECK(report.misfit(8, 9) == failure{errc::size_mismatch, 0, 8, 9});
  CHECK(report.misfit(8, 9).where.view() == "gradients");
}

TEST_CASE("a library's failure keeps its call, its text and its number") {
  const detail::nccl_report report("gradients");
  const failure first = report.trouble("ncclSend", "out of order", 5);
  CHECK(first.code == errc::library_failed);
  CHECK(first.index == 5);
  CHECK(report.trouble("ncclRecv", "too late", 6).where.view() == "gradients: ncclRecv: too late");
  CHECK(first.where.view() == "gradients: ncclSend: out of order");
}

TEST_CASE("a text that is too long keeps its beginning") {
  const detail::nccl_report report("gradients");
  const failure told = report.trouble("ncclSend", std::string(1'000, 'x').c_str(), 1);
  CHECK(told.where.view().size() == failure_name::max_size);
  CHECK(told.where.view().starts_with("gradients: ncclSend: xxx"));
}
