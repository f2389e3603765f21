/// The table of tensors in a file: what is read is what was written, or nothing.
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/tiering/tensor_table.hpp>

#include <doctest/doctest.h>

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

[[nodiscard]] tensor_table any_table(random_numbers& random) {
  std::vector<std::string> names;
  std::vector<tensor_size> sizes;
  const std::uint64_t count = random.below(12U);
  for (std::uint64_t i = 0; i < count; ++i) {
    names.push_back(std::string(random.below(9U), 'x') + std::to_string(i));
    sizes.push_back({.bytes = 1 + random.below(5000U)});
  }
  tensor_table made =
      tensor_table::of({.low = random.next(), .high = random.next()}, tensor_names(names),
                       map_to_chunks(sizes, {.group_bytes = 512, .split_bytes = 1024, .unit = 64}));
  for (std::uint8_t& each : made.filled)
    each = random.once_in(2) ? 1 : 0;
  return made;
}

[[nodiscard]] bool same(const tensor_table& a, const tensor_table& b) {
  return a.file_id == b.file_id && a.filled == b.filled && first_difference(a, b).empty();
}

void write(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (const std::byte each : bytes)
    file.put(static_cast<char>(each));
}

/// With the checksum that the bytes should have.
[[nodiscard]] std::vector<std::byte> signed_anew(std::vector<std::byte> bytes) {
  detail::put_number(bytes.data(), crc32c(0, std::span(bytes).subspan(4)), 4);
  return bytes;
}

}  // namespace

TEST_CASE("a table is read as it was written, also over an older one") {
  const temporary_folder folder;
  const std::string path = folder.file("table");
  tensor_table read;
  CHECK(read_tensor_table(path, read) == llmmem::tiering::table_state::absent);
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const tensor_table made = any_table(random);
    REQUIRE(write_tensor_table(path, made));
    REQUIRE(read_tensor_table(path, read) == llmmem::tiering::table_state::read);
    CHECK(same(read, made));
    CHECK(std::filesystem::exists(path + ".new") == false);
  }
}

TEST_CASE("changed bytes are not a table even with a right checksum, or they are another complete one") {
  const temporary_folder folder;
  const std::string path = folder.file("table");
  std::uint64_t taken = 0;
  std::uint64_t refused = 0;
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const tensor_table made = any_table(random);
    std::vector<std::byte> bytes = detail::encoded(made);
    for (std::uint64_t changes = 1 + random.below(3U); changes != 0; --changes) {
      const std::uint64_t at = 16 + random.below(bytes.size() - 16);
      switch (random.below(3U)) {
        case 0:
          bytes[at] = static_cast<std::byte>(random.next());
          break;
        case 1:
          bytes.resize(at < 48 ? 48 : at);
          break;
        default:
          for (std::uint64_t i = at; i < bytes.size() && i < at + 8; ++i)
            bytes[i] = std::byte{0xFF};
      }
    }
    write(path, bytes);
    tensor_table read;
    const llmmem::tiering::table_state state = read_tensor_table(path, read);
    CHECK((state == llmmem::tiering::table_state::damaged || same(read, made)));
    write(path, signed_anew(bytes));
    if (read_tensor_table(path, read) == llmmem::tiering::table_state::damaged) {
      ++refused;
      continue;
    }
    // Whatever it says, it says it again.
    ++taken;
    CHECK(detail::encoded(read).size() == bytes.size());
    REQUIRE(read.first_part.size() == read.names.size() + 1);
    REQUIRE(read.first_part.back() == read.parts.size());
    for (std::uint32_t i = 0; i < read.tensors(); ++i)
      CHECK(read.bytes(i) <= max_bytes);
  }
  CHECK(taken > 20);
  CHECK(refused > 20);
}

TEST_CASE("impossible numbers of a table are refused one by one") {
  const temporary_folder folder;
  const std::string path = folder.file("table");
  const tensor_table made = tensor_table::of(
      {1, 2}, tensor_names({"a"}),
      map_to_chunks(std::vector<tensor_size>{{.bytes = 9000}}, {.group_bytes = 0, .split_bytes = 4096}));
  const std::vector<std::byte> bytes = detail::encoded(made);
  const auto state_with = [&](std::size_t at, std::uint64_t value, std::size_t count, std::size_t more = 0) {
    std::vector<std::byte> changed = bytes;
    detail::put_number(changed.data() + at, value, count);
    changed.resize(changed.size() + more);
    write(path, signed_anew(changed));
    tensor_table read;
    return read_tensor_table(path, read);
  };
  constexpr std::size_t parts = 48 + 4 + 1;  // behind the name
  CHECK(state_with(parts, 3, 4) == llmmem::tiering::table_state::read);
  CHECK(state_with(parts, 0, 4) == llmmem::tiering::table_state::damaged);
  CHECK(state_with(parts, 0xFFFF'FFFF, 4) == llmmem::tiering::table_state::damaged);
  CHECK(state_with(48, 0xFFFF'FFFF, 4) == llmmem::tiering::table_state::damaged);  // a name's length
  CHECK(state_with(32, 2, 4) == llmmem::tiering::table_state::damaged);            // tensors
  CHECK(state_with(parts + 16, 0, 8) == llmmem::tiering::table_state::damaged);    // bytes of the first part
  CHECK(state_with(parts + 16, max_bytes, 8) == llmmem::tiering::table_state::damaged);
  CHECK(state_with(parts + 24, 2, 1) == llmmem::tiering::table_state::damaged);  // filled
  CHECK(state_with(parts, 3, 4, 1) == llmmem::tiering::table_state::damaged);    // a byte too many
  CHECK_THROWS_WITH_AS(
      static_cast<void>(state_with(12, 9, 4)),
      (path + ": cannot be taken as a table of tensors: it is of version 9, this is version 1; "
              "remove it to start empty")
          .c_str(),
      io_error);
}
