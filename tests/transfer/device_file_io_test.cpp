#include <llmmem/transfer/device_file_io.hpp>

#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "support/fake_file_library.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using engine = device_file_io<fake_library>;
static_assert(io_engine<engine> && registers_memory<engine> && registers_files<engine>);

std::vector<std::byte> drawn_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> out(count);
  for (std::byte& each : out)
    each = static_cast<std::byte>(random());
  return out;
}

}  // namespace

TEST_SUITE("transfer/device_file_io") {
  TEST_CASE("requests of many batches complete once each, with the file's bytes") {
    const temporary_folder folder;
    const int file = ::open(folder.file("f").c_str(), O_CREAT | O_RDWR, 0600);
    const auto bytes = drawn_bytes(64 * 512, 1);
    REQUIRE(::pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    library_state state;
    for (const bool is_registered : {false, true}) {
      CAPTURE(is_registered);
      engine io({.depth = 3, .batches = 2, .files = 1}, fake_library(state));
      CHECK(io.caps().depth == 6);
      if (is_registered) CHECK(io.register_file(file));
      std::vector<std::byte> read(bytes.size());
      std::vector<int> seen(64);
      std::uint64_t next = 0;
      std::size_t done = 0;
      while (done < 64) {
        while (next < 64 && io.try_queue({.file = file,
                                          .bytes = 512,
                                          .offset = next * 512,
                                          .data = read.data() + next * 512,
                                          .tag = next}))
          ++next;
        std::array<io_completion, 4> out;
        const std::size_t count = io.reap(out, {.least = 1}).value();
        REQUIRE(count >= 1);
        for (std::size_t i = 0; i < count; ++i) {
          CHECK(out[i].outcome == 512);
          ++seen[out[i].tag];
        }
        done += count;
      }
      CHECK(std::ranges::count(seen, 1) == 64);
      CHECK(read == bytes);
      CHECK(io.in_flight() == 0);
      CHECK(state.open_files == (is_registered ? 1 : 0));
      CHECK(io.reap(std::span<io_completion>{}, {.least = 1}).value() == 0);
    }
    CHECK(state.most_in_batch == 3);
    CHECK(state.open_files == 0);
    CHECK(state.batches == 0);
    CHECK(state.misuses.empty());
    ::close(file);
  }

  TEST_CASE("a file that is forgotten stays open for its requests in flight, and for no others") {
    const temporary_folder folder;
    const int file = ::open(folder.file("f").c_str(), O_CREAT | O_RDWR, 0600);
    library_state state;
    engine io({.depth = 2, .batches = 1, .files = 1}, fake_library(state));
    CHECK(io.register_file(file));
    CHECK(io.register_file(file));
    CHECK_FALSE(io.register_file(file + 100));  // the table is full
    std::array<std::byte, 16> bytes{};
    REQUIRE(io.try_queue(
        {.file = file, .way = io_direction::write, .bytes = 16, .data = bytes.data(), .tag = 7}));
    state.is_late = true;
    std::array<io_completion, 2> out;
    CHECK(io.reap(out, {}).value() == 0);
    io.forget_file(file);
    io.forget_file(file);
    CHECK(state.open_files == 1);
    state.is_late = false;
    CHECK(io.reap(out, {.least = 1}).value() == 1);
    CHECK(out[0].tag == 7);
    CHECK(state.open_files == 0);
    CHECK(io.register_file(file));
    io.forget_files();
    CHECK(state.open_files == 0);
    CHECK_FALSE(io.register_file(file));
    CHECK(state.misuses.empty());
    ::close(file);
  }

  TEST_CASE("requests of one descriptor share a handle, which a registration in between keeps open") {
    const temporary_folder folder;
    const int file = ::open(folder.file("f").c_str(), O_CREAT | O_RDWR, 0600);
    library_state state;
    engine io({.depth = 4, .batches = 2, .files = 1}, fake_library(state));
    std::array<std::byte, 16> bytes{};
    std::array<io_completion, 4> out;
    const auto write_twice = [&] {
      for (std::uint64_t tag = 0; tag < 2; ++tag)
        REQUIRE(io.try_queue(
            {.file = file, .way = io_direction::write, .bytes = 16, .data = bytes.data(), .tag = tag}));
    };
    const auto reap_both = [&] {
      std::size_t done = 0;
      while (done != 2) {
        const std::size_t count = io.reap(out, {.least = 1}).value();
        for (std::size_t i = 0; i < count; ++i)
          CHECK(out[i].outcome == 16);
        done += count;
      }
    };
    write_twice();
    CHECK(state.open_files == 1);
    CHECK(io.register_file(file));
    reap_both();
    CHECK(state.open_files == 1);  // registered
    write_twice();
    io.forget_file(file);
    CHECK(state.open_files == 1);
    reap_both();
    CHECK(state.open_files == 0);
    write_twice();
    io.forget_files();  // its requests keep the handle
    CHECK(state.open_files == 1);
    reap_both();
    CHECK(state.open_files == 0);
    CHECK(state.misuses.empty());
    ::close(file);
  }

  TEST_CASE("files and batches that the library refuses are completions, and the next requests go on") {
    const temporary_folder folder;
    const int file = ::open(folder.file("f").c_str(), O_CREAT | O_RDWR, 0600);
    library_state state;
    engine io({.depth = 4, .batches = 1, .files = 4}, fake_library(state));
    std::array<std::byte, 16> bytes{};
    const auto write = [&](int descriptor, std::uint64_t tag) {
      REQUIRE(io.try_queue(
          {.file = descriptor, .way = io_direction::write, .bytes = 16, .data = bytes.data(), .tag = tag}));
    };
    std::array<io_completion, 4> out;
    state.refuse_open = ENOTSUP;
    write(file, 1);
    state.refuse_open = 0;
    write(-1, 2);
    write(file, 3);
    REQUIRE(io.reap(std::span(out).first(1), {.least = 1}).value() == 1);  // one place for two errors
    CHECK(out[0].tag == 1);
    CHECK(out[0].outcome == -ENOTSUP);
    std::map<std::uint64_t, std::int32_t> rest;
    while (rest.size() < 2) {
      const std::size_t count = io.reap(out, {.least = 1}).value();
      for (std::size_t i = 0; i < count; ++i)
        rest[out[i].tag] = out[i].outcome;
    }
    CHECK(rest == std::map<std::uint64_t, std::int32_t>{{2, -EBADF}, {3, 16}});

    state.refuse_submit = EIO;
    write(file, 4);
    write(file, 5);
    CHECK(io.reap(out, {.least = 2}).value() == 2);
    CHECK(out[0].outcome == -EIO);
    CHECK(out[1].outcome == -EIO);
    write(file, 6);
    CHECK(io.reap(out, {.least = 1}).value() == 1);
    CHECK(out[0].outcome == 16);
    CHECK(state.open_files == 0);
    CHECK(io.in_flight() == 0);

    state.is_late = true;
    write(file, 7);
    CHECK(io.reap(out, {.least = 1, .timeout_ns = 3'000'000}).value() == 0);
    io.wake();
    CHECK(io.reap(out, {.least = 1}).value() == 0);  // waits for nothing
    state.is_late = false;
    std::array<std::span<std::byte>, 1> memory{std::span<std::byte>(bytes)};
    CHECK(io.register_memory(memory).has_value());
    memory[0] = {};
    CHECK(io.register_memory(memory).error().code == errc::engine_failed);
    ::close(file);
  }

  TEST_CASE("what cannot work is refused at construction, with the library's reason") {
    library_state state;
    CHECK_THROWS_WITH_AS(engine({.depth = 129}, fake_library(state)),
                         "device_file_io: depth is 129; it must be 1 to 128", argument_error);
    CHECK_THROWS_WITH_AS(engine({.batches = 0}, fake_library(state)),
                         "device_file_io: batches is 0; it must be 1 to 8", argument_error);
    state.why_not = "no nvidia-fs driver";
    CHECK_THROWS_WITH_AS(engine({}, fake_library(state)), "device_file_io: no nvidia-fs driver",
                         system_error);
    CHECK(state.batches == 0);
  }
}
