#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/transfer/posix_io.hpp>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem_tests::temporary_folder;

namespace {

/// A file of 16 KiB, each byte its page's number, and an engine over it that misbehaves as planned.
struct bench {
  explicit bench(std::vector<planned_fault> plan) : engine(std::move(plan)) {
    std::array<std::byte, 16384> pages{};
    for (std::size_t i = 0; i < pages.size(); ++i)
      pages[i] = static_cast<std::byte>(1 + i / 4096);
    REQUIRE(::pwrite(file, pages.data(), pages.size(), 0) == 16384);
  }
  bench(const bench&) = delete;
  bench& operator=(const bench&) = delete;
  ~bench() { ::close(file); }

  /// What a request is answered with, and after how many reaps.
  struct answer {
    std::int32_t outcome = 0;
    int reaps = 0;
  };
  answer ask(io_direction way, std::uint32_t bytes) {
    data.assign(16384, std::byte{99});
    REQUIRE(engine.try_queue({.file = file, .way = way, .bytes = bytes, .data = data.data(), .tag = ++tag}));
    std::array<io_completion, 2> done{};
    for (int reaps = 1; reaps <= 20; ++reaps) {
      const std::size_t count = engine.reap(done, {.least = 1}).value();
      if (count == 0) continue;
      REQUIRE(count == 1);
      REQUIRE(done[0].tag == tag);
      return {done[0].outcome, reaps};
    }
    return {-ETIME, 0};
  }

  temporary_folder folder;
  int file = ::open(folder.file("data").c_str(), O_RDWR | O_CREAT, 0600);
  faulty_io<posix_io> engine;
  std::vector<std::byte> data;
  std::uint64_t tag = 0;
};

}  // namespace

TEST_CASE("without a plan a faulty engine behaves as the engine beneath it") {
  bench b({});
  CHECK(b.engine.caps().name == "posix");
  CHECK(b.ask(io_direction::read, 16384).outcome == 16384);
  CHECK(b.data[0] == std::byte{1});
  CHECK(b.data[16383] == std::byte{4});
  CHECK(b.engine.counts().requests == 1);
  CHECK(b.engine.counts().faults == 0);
}

TEST_CASE("an error is reported as its number, and moves nothing") {
  bench b({{.what = io_fault::error, .first = 2, .number = ENOSPC}});
  CHECK(b.ask(io_direction::read, 4096).outcome == 4096);
  CHECK(b.ask(io_direction::read, 4096).outcome == -ENOSPC);
  CHECK(b.data[0] == std::byte{99});
  CHECK(b.ask(io_direction::read, 4096).outcome == 4096);
  CHECK(b.engine.counts().faults == 1);
}

TEST_CASE("a short transfer moves about half, in whole pages if there are several") {
  bench b({{.what = io_fault::short_move, .every = 1, .count = 100}});
  CHECK(b.ask(io_direction::read, 16384).outcome == 8192);
  CHECK(b.data[8191] == std::byte{2});
  CHECK(b.data[8192] == std::byte{99});
  CHECK(b.ask(io_direction::read, 12288).outcome == 4096);
  CHECK(b.ask(io_direction::read, 8192).outcome == 4096);
  CHECK(b.ask(io_direction::read, 4096).outcome == 4096);
  CHECK(b.ask(io_direction::read, 100).outcome == 50);
  CHECK(b.ask(io_direction::read, 1).outcome == 1);
}

TEST_CASE("a transfer of nothing is reported as a success of 0 bytes") {
  bench b({{.what = io_fault::nothing}});
  CHECK(b.ask(io_direction::write, 4096).outcome == 0);
  CHECK(b.ask(io_direction::read, 4096).outcome == 4096);
  CHECK(b.data[0] == std::byte{1});
}

TEST_CASE("a late answer comes the planned number of reaps later, and is right") {
  bench b({{.what = io_fault::late, .number = 3}});
  const auto late = b.ask(io_direction::read, 4096);
  CHECK(late.outcome == 4096);
  CHECK(late.reaps == 5);  // one that moves the bytes, three that are silent
  CHECK(b.ask(io_direction::read, 4096).reaps == 1);
}

TEST_CASE("a lost request gets no answer, moves nothing, and keeps its place") {
  bench b({{.what = io_fault::lost}});
  CHECK(b.ask(io_direction::read, 4096).outcome == -ETIME);
  CHECK(b.data[0] == std::byte{99});
  CHECK(b.engine.in_flight() == 0);
  CHECK_FALSE(b.engine.try_queue({.file = b.file, .bytes = 1, .data = b.data.data()}));  // depth 1
}

TEST_CASE("a flip changes one bit of a read, and no bit of a write") {
  bench b({{.what = io_fault::bit_flip, .every = 1, .count = 100}});
  CHECK(b.ask(io_direction::read, 4096).outcome == 4096);
  int wrong = 0;
  for (std::size_t i = 0; i < 4096; ++i)
    wrong += b.data[i] == std::byte{1} ? 0 : b.data[i] == std::byte{0} ? 1 : 100;
  CHECK(wrong == 1);
  CHECK(b.ask(io_direction::write, 4096).outcome == 4096);
  std::byte back{};
  REQUIRE(::pread(b.file, &back, 1, 2048) == 1);
  CHECK(back == std::byte{99});
}

TEST_CASE(
    "faults hit the requests that the plan counts: by number, alternately, by side, the planned number of "
    "times") {
  bench b({{.what = io_fault::error,
            .first = 2,
            .every = 2,
            .count = 2,
            .number = EIO,
            .way = planned_fault::side::reads},
           {.what = io_fault::error, .first = 1, .number = EROFS, .way = planned_fault::side::writes}});
  std::string seen;
  for (int i = 0; i < 8; ++i)
    seen += b.ask(io_direction::read, 4096).outcome == -EIO ? 'x' : '.';
  CHECK(seen == ".x.x....");
  CHECK(b.ask(io_direction::write, 4096).outcome == -EROFS);
  CHECK(b.ask(io_direction::write, 4096).outcome == 4096);
  CHECK(b.engine.counts().requests == 10);
  CHECK(b.engine.counts().faults == 3);
}
