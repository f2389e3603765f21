#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/model_file_space.hpp>
#include <llmmem/transfer/safetensors_file.hpp>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// A file of two tensors, and what is in them.
struct written_file {
  explicit written_file(std::uint64_t alignment = 4096)
      : path(folder.file("model.safetensors")),
        layout(lay_out_safetensors({{"h.0.weight", safetensors_type::bf16, {300, 7}},
                                    {"h.0.bias", safetensors_type::f32, {33}},
                                    {"none", safetensors_type::i8, {0}}},
                                   {{"format", "pt"}}, alignment)) {
    random_numbers random(3);
    data.resize(layout.header.data_bytes);
    for (char& each : data)
      each = static_cast<char>(random.below(256U));
    std::ofstream(path, std::ios::binary) << layout.head << data;
  }
  [[nodiscard]] std::span<const std::byte> contents(const safetensors_entry& entry) const {
    return std::as_bytes(std::span(data)).subspan(entry.begin, entry.bytes());
  }

  temporary_folder folder;
  std::string path;
  safetensors_layout layout;
  std::string data;
};

template <class Error>
[[nodiscard]] std::string refusal(const std::string& path) {
  try {
    const safetensors_file file(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "taken";
}

}  // namespace

TEST_CASE("tensors are found by name, at their place in the file") {
  const written_file written;
  safetensors_file file(written.path);
  CHECK(file.header() == written.layout.header);
  for (const safetensors_entry& each : written.layout.header.entries) {
    const safetensors_entry* const found = file.find(each.name);
    REQUIRE(found != nullptr);
    CHECK(*found == each);
    CHECK(std::ranges::equal(file.bytes(*found), written.contents(each)));
    CHECK(file.is_aligned(*found));
  }
  CHECK(file.find("h.0") == nullptr);
  CHECK(file.find("zzz") == nullptr);
  CHECK(file.offset(*file.find("h.0.bias")) == 4096);

  const std::byte* const where = file.bytes(*file.find("h.0.weight")).data();
  safetensors_file moved(std::move(file));
  CHECK(moved.bytes(*moved.find("h.0.weight")).data() == where);
  safetensors_file other(written.path);
  other = std::move(moved);
  CHECK(other.bytes(*other.find("h.0.weight")).data() == where);
}

TEST_CASE("elements after a header of odd length are misaligned, and the file reports it") {
  const temporary_folder folder;
  const std::string path = folder.file("odd.safetensors");
  const std::string json = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )";
  std::string length(8, '\0');
  length[0] = static_cast<char>(json.size());
  std::ofstream(path, std::ios::binary) << length << json << "1234";
  const safetensors_file file(path);
  CHECK(file.is_aligned(*file.find("a")) == ((8 + json.size()) % 4 == 0));
  CHECK_FALSE(file.is_aligned(*file.find("a")));
}

TEST_CASE("a file that cannot be opened, or is not a safetensors file, is refused by its path") {
  const written_file written;
  CHECK(refusal<io_error>(written.folder.file("absent")).find("absent: cannot be opened: No such file") !=
        std::string::npos);
  CHECK(refusal<io_error>(written.folder.path().string()).find("not a regular file") != std::string::npos);
  CHECK(refusal<io_error>(written.path + std::string("\0x", 2)).find("zero byte") != std::string::npos);
  const std::string pipe = written.folder.file("pipe");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(refusal<io_error>(pipe).find("not a regular file") != std::string::npos);
  const std::string empty = written.folder.file("empty");
  std::ofstream(empty, std::ios::binary).flush();
  CHECK(refusal<format_error>(empty).find("empty: 0 bytes, too few for the 8 that hold") !=
        std::string::npos);
  std::filesystem::resize_file(written.path, written.layout.file_bytes() - 1);
  CHECK(refusal<format_error>(written.path).find("the tensors end at byte") != std::string::npos);
}

TEST_CASE("tiers lease a tensor of the file in place") {
  const written_file written;
  const safetensors_file file(written.path);
  host_space memory({.budget = 1 << 20});
  model_file_space<> model(written.path);
  tiered_buffer<host_space, model_file_space<>> buffer({}, {memory, 1 << 19}, {model, model.capacity(), 1});
  for (const safetensors_entry& each : file.header().entries) {
    if (each.bytes() == 0) continue;
    const chunk_handle chunk = buffer.adopt(file.offset(each), each.bytes()).value();
    CHECK(std::ranges::equal(buffer.read(chunk).value().span(), written.contents(each)));
  }
}

TEST_CASE("without a mapping, a tensor's bytes are read in any parts") {
  const written_file written;
  for (const tensor_access how : {tensor_access::map, tensor_access::read}) {
    safetensors_file opened(written.path, how);
    const safetensors_file file(std::move(opened));
    CHECK(file.header() == written.layout.header);
    CHECK(file.is_mapped() == (how == tensor_access::map));
    for (const safetensors_entry& each : written.layout.header.entries) {
      CHECK(file.bytes(each).size() == (file.is_mapped() ? each.bytes() : 0));
      std::vector<std::byte> all(each.bytes());
      file.read(each, all);
      CHECK(std::ranges::equal(all, written.contents(each)));
      if (all.size() < 9) continue;
      std::vector<std::byte> part(4);
      file.read(each, part, 5);
      CHECK(std::ranges::equal(part, written.contents(each).subspan(5, 4)));
      CHECK_THROWS_AS(file.read(each, part, each.bytes() - 3), argument_error);
      CHECK_THROWS_AS(file.read(each, part, ~std::uint64_t{0}), argument_error);
    }
  }
}

TEST_CASE("a truncation by another program is an error of the reader, and the process continues") {
  const written_file written;
  const safetensors_file read(written.path, tensor_access::read);
  const safetensors_file mapped(written.path);
  std::filesystem::resize_file(written.path, 4300);
  for (const safetensors_file* const file : {&read, &mapped}) {
    std::vector<std::byte> bytes(file->find("h.0.weight")->bytes());
    try {
      file->read(*file->find("h.0.weight"), bytes);
      FAIL("it was read");
    } catch (const io_error& error) {
      CHECK(std::string(error.what())
                .starts_with(written.path + ": it has no byte 4300, and had " +
                             std::to_string(written.layout.header.file_bytes()) +
                             " bytes when it was opened"));
    }
  }
}

TEST_CASE("a Git LFS pointer in place of a file is reported as one") {
  const temporary_folder folder;
  const std::string path = folder.file("model.safetensors");
  std::ofstream(path) << "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n";
  CHECK(refusal<format_error>(path) ==
        path +
            ": it begins as a Git LFS pointer does, a short text in the place of the file; fetch the file "
            "itself: git lfs pull");
}
