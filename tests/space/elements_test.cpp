#include <llmmem/space/elements.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>

#include <doctest/doctest.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

using namespace llmmem;

TEST_CASE("bytes are read as the elements that were written to them") {
  alignas(float) std::array<std::byte, 12> bytes{};
  const std::span<float> floats = as_elements<float>(std::span<std::byte>(bytes));
  REQUIRE(floats.size() == 3);
  floats[2] = 1.5F;
  const std::span<const float> seen = as_elements<float>(std::span<const std::byte>(bytes));
  CHECK(seen[2] == 1.5F);
  CHECK(as_elements<float>(std::span<std::byte>()).empty());
}

TEST_CASE(
    "bytes that are not a whole number of elements, or misaligned for them, are refused with the number") {
  alignas(double) std::array<std::byte, 24> bytes{};
  const std::span<std::byte> all(bytes);
  CHECK_THROWS_WITH_AS(
      as_elements<float>(all.first(10)),
      "as_elements: 10 bytes are not a whole number of elements of 4; use the type that was stored",
      length_error);
  CHECK_THROWS_WITH_AS(
      as_elements<double>(all.subspan(4, 8), "weights"),
      "weights: the bytes are not aligned to 8, as elements must be; allocate them with that alignment",
      argument_error);
  CHECK(as_elements<float>(all.subspan(4, 8)).size() == 2);
}

TEST_CASE("a write lease gives mutable elements, and a read lease const ones") {
  host_space memory({.budget = 1 << 16});
  host_space below({.budget = 1 << 16});
  tiered_buffer<host_space, host_space> buffer({}, {memory, 1 << 14}, {below, 1 << 16});
  const chunk_handle chunk = buffer.create(64).value();
  {
    auto lease = buffer.write(chunk).value();
    static_assert(std::same_as<decltype(lease.as<float>()), std::span<float>>);
    for (float& each : lease.as<float>())
      each = 2;
  }
  auto lease = buffer.read(chunk).value();
  static_assert(std::same_as<decltype(lease.as<float>()), std::span<const float>>);
  REQUIRE(lease.as<float>().size() == 16);
  CHECK(lease.as<float>()[15] == 2);
  CHECK_THROWS_AS(static_cast<void>(lease.as<std::array<float, 3>>()), length_error);
  lease.end();
  CHECK(lease.as<float>().empty());
}

TEST_CASE("a lease of a tensor gives only its elements, and none of its chunk's neighbours") {
  host_space memory({.budget = 1 << 16});
  host_space below({.budget = 1 << 16});
  tiered_buffer<host_space, host_space> buffer({}, {memory, 1 << 14}, {below, 1 << 16});
  const std::vector<tensor_size> sizes{{.bytes = 16}, {.bytes = 32}};
  tiered_tensors tensors(buffer, map_to_chunks(sizes));
  {
    auto first = tensors.write(tensor_id{0}).value();
    REQUIRE(first.as<std::uint32_t>().size() == 4);
    first.as<std::uint32_t>()[3] = 7;
  }
  CHECK(std::as_const(tensors).bytes(tensor_id{0}).value() == 16);
  CHECK(tensors.read(tensor_id{0}).value().as<std::uint32_t>()[3] == 7);
}
