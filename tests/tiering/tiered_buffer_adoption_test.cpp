/// Contents that lie in the last tier already: weights in a file that somebody else wrote.
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/model_file_space.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using bytes = std::vector<std::byte>;
constexpr std::uint64_t kib = 1024;

/// A file of random bytes, and what they are.
[[nodiscard]] bytes written(const std::string& path, random_numbers& random, std::size_t count) {
  bytes made(count);
  for (std::byte& each : made)
    each = static_cast<std::byte>(random.next());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(made.data()), static_cast<std::streamsize>(made.size()));
  return made;
}

[[nodiscard]] model_file_options without_thread() {
  model_file_options options;
  options.queue.driver = llmmem::transfer::driven_by::waiters;
  return options;
}

[[nodiscard]] bool is_part(std::span<const std::byte> seen, const bytes& whole, std::uint64_t offset) {
  return std::ranges::equal(seen, std::span(whole).subspan(offset, seen.size()));
}

}  // namespace

TEST_CASE("tensors are read in place from a model's file, at any position") {
  for (const std::uint64_t seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const temporary_folder folder;
    const std::string path = folder.file("model");
    const bytes whole = written(path, random, 1 + random.below(200 * kib));
    host_space host({.budget = 1 << 20});
    model_file_space<> model(path, without_thread());
    tiered_buffer<host_space, host_space, model_file_space<>> buffer(
        {.name = "weights"}, {host, 64 * kib}, {host, 96 * kib}, {model, model.capacity(), 1});
    struct tensor {
      chunk_handle chunk;
      std::uint64_t offset;
    };
    std::vector<tensor> tensors;
    for (std::uint64_t at = 0; at < whole.size();) {
      const std::uint64_t left = whole.size() - at;
      const std::uint64_t size = 1 + random.below(std::min<std::uint64_t>(left, 20 * kib));
      const bool is_known = random.once_in(2);
      const std::uint32_t crc = crc32c(0, std::span(whole).subspan(at, size));
      const auto made = is_known ? buffer.adopt(at, size, crc) : buffer.adopt(at, size);
      tensors.push_back({made.value(), at});
      CHECK(buffer.tier_of(*made).value() == 2);
      CHECK(buffer.adopt(at, 1).error() == failure{errc::place_taken, 0, at, at + 1});
      at += size + random.below(3U);
    }
    for (int step = 0; step < 200; ++step) {
      const tensor& one = tensors[random.below(tensors.size())];
      if (random.once_in(3)) {
        REQUIRE(buffer.prefetch(one.chunk));
      } else {
        const auto seen = buffer.read(one.chunk).value();
        REQUIRE(is_part(seen.span(), whole, one.offset));
      }
    }
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
}

TEST_CASE("a model's file is never written: changed chunks stay above it") {
  random_numbers random(4);
  const temporary_folder folder;
  const std::string path = folder.file("model");
  const bytes whole = written(path, random, 8 * kib);
  {
    host_space host({.budget = 1 << 20});
    model_file_space<> model(path, without_thread());
    tiered_buffer<host_space, model_file_space<>> buffer({}, {host, 64 * kib}, {model, model.capacity(), 1});
    const chunk_handle chunk = buffer.adopt(100, 1000).value();
    buffer.update(chunk, 5, 1).value().span()[5] = std::byte{42};
    CHECK(buffer.flush(chunk).code() == errc::not_opened);
    CHECK(buffer.evict(chunk).code() == errc::not_opened);
    CHECK(buffer.read(chunk).value().span()[5] == std::byte{42});
    REQUIRE(buffer.discard(chunk));
    // A clone that is written needs room of its own in the last tier, which is all there but of no use.
    const auto within = model.copy_within_async({}, {}, {});
    CHECK(within.code() == errc::not_opened);
  }
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> now{std::istreambuf_iterator<char>(in), {}};
  CHECK(is_part(std::as_bytes(std::span(now)), whole, 0));
}

TEST_CASE("a changed chunk over a model's file takes space from others, and no lease fails for it") {
  random_numbers random(4);
  const temporary_folder folder;
  const std::string path = folder.file("model");
  const bytes whole = written(path, random, 32 * kib);
  host_space host({.budget = 1 << 20});
  model_file_space<> model(path, without_thread());
  tiered_buffer<host_space, model_file_space<>> buffer({}, {host, 8 * kib, 1024},
                                                       {model, model.capacity(), 1});
  std::vector<chunk_handle> chunks;
  for (std::uint64_t at = 0; at < 32; ++at)
    chunks.push_back(buffer.adopt(at * kib, kib).value());
  for (const std::size_t changed : {0U, 9U, 20U})
    buffer.update(chunks[changed], 5, 1).value().span()[5] = std::byte{42};
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      CAPTURE(i);
      const auto seen = buffer.read(chunks[i]);
      REQUIRE_MESSAGE(seen, seen.error().message());
      if (i != 0 && i != 9 && i != 20) CHECK(is_part(seen->span(), whole, i * kib));
    }
  }
  for (const std::string& broken : buffer.audit())
    FAIL_CHECK(broken);
  // Where only such chunks are left, that is why.
  for (std::size_t i = 1; i < 8; ++i)
    static_cast<void>(buffer.update(chunks[i], 5, 1));
  CHECK(buffer.read(chunks[30]).code() == errc::not_opened);
  CHECK(buffer.audit().empty());
}

TEST_CASE("an adopted chunk is verified by its given checksum") {
  random_numbers random(9);
  const temporary_folder folder;
  const std::string path = folder.file("model");
  const bytes whole = written(path, random, 8 * kib);
  host_space host({.budget = 1 << 20});
  model_file_space<> model(path, without_thread());
  tiered_buffer<host_space, model_file_space<>> buffer({}, {host, 64 * kib}, {model, model.capacity(), 1});
  const std::uint32_t right = crc32c(0, std::span(whole).subspan(10, 500));
  CHECK(buffer.read(buffer.adopt(10, 500, right).value()));
  CHECK(buffer.read(buffer.adopt(1000, 500, right).value()).code() == errc::checksum_differs);
}

TEST_CASE("an impossible adoption is refused, and takes nothing") {
  random_numbers random(2);
  const temporary_folder folder;
  const std::string path = folder.file("model");
  static_cast<void>(written(path, random, 8 * kib));
  host_space host({.budget = 1 << 20});
  model_file_space<> model(path, without_thread());
  tiered_options options;
  options.max_chunks = 1;
  tiered_buffer<host_space, model_file_space<>> buffer(options, {host, 64 * kib}, {model, 8 * kib, 512});
  CHECK(buffer.adopt(0, 0).code() == errc::zero_bytes);
  CHECK(buffer.adopt(100, 100).error() == failure{errc::bad_granularity, 0, 100, 512});
  CHECK(buffer.create(100).code() == errc::not_opened);
  CHECK(buffer.adopt(7 * kib, 2 * kib).error() == failure{errc::past_the_bytes, 0, 9 * kib, 8 * kib});
  CHECK(buffer.adopt(~std::uint64_t{0}, 1).code() == errc::past_the_bytes);
  CHECK(buffer.adopt(0, ~std::uint64_t{0}).code() == errc::past_the_bytes);
  CHECK(buffer.stats().tiers[1].used == 0);
  const chunk_handle only = buffer.adopt(512, 100).value();
  CHECK(buffer.adopt(2048, 100).code() == errc::table_full);
  CHECK(buffer.stats().tiers[1].used == 512);
  REQUIRE(buffer.remove(only));
  CHECK(buffer.adopt(512, 200));
  CHECK_THROWS_AS(model_file_space<>(folder.file("none")), io_error);
  std::ofstream(folder.file("empty")).flush();
  CHECK_THROWS_WITH_AS(model_file_space<>(folder.file("empty")),
                       (folder.file("empty") + ": the file is empty; name one with weights in it").c_str(),
                       length_error);
}

TEST_CASE("a truncated model file is reported, and not read past its end") {
  random_numbers random(3);
  const temporary_folder folder;
  const std::string path = folder.file("model");
  const bytes whole = written(path, random, 64 * kib);
  host_space host({.budget = 1 << 20});
  model_file_space<> model(path, without_thread());
  tiered_buffer<host_space, model_file_space<>> buffer({}, {host, 64 * kib}, {model, model.capacity(), 1});
  const chunk_handle low = buffer.adopt(0, 1000).value();
  const chunk_handle high = buffer.adopt(40 * kib, 1000).value();
  std::filesystem::resize_file(path, 20 * kib);
  CHECK(buffer.read(high).code() == errc::file_ends);
  CHECK(is_part(buffer.read(low).value().span(), whole, 0));
}
