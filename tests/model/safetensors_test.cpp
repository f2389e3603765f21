#include <llmmem/model/safetensors.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

[[nodiscard]] std::span<const std::byte> bytes_of_text(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// A file's beginning: the length of `json`, and `json`.
[[nodiscard]] std::string file_of(std::string_view json) {
  std::string text;
  for (std::uint64_t i = 0, length = json.size(); i < 8; ++i, length >>= 8)
    text += static_cast<char>(static_cast<unsigned char>(length & 0xFF));
  return text + std::string(json);
}

[[nodiscard]] safetensors_header read(std::string_view json, std::uint64_t data_bytes) {
  const std::string text = file_of(json);
  return read_safetensors(bytes_of_text(text), text.size() + data_bytes, "model.safetensors");
}

/// What the refusal of such a header says.
[[nodiscard]] std::string refusal(std::string_view json, std::uint64_t data_bytes) {
  try {
    static_cast<void>(read(json, data_bytes));
  } catch (const format_error& error) {
    CHECK(std::string(error.what()).starts_with("model.safetensors: "));
    return error.what();
  }
  return "taken";
}

[[nodiscard]] bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a header equals the reference writer's to the byte") {
  // The files of the reference's own tests: lengths, JSON and padding.
  const safetensors_layout aligned =
      lay_out_safetensors({{"attn.0", safetensors_type::f32, {1, 2, 3}}}, {}, 8);
  CHECK(aligned.head == file_of(R"({"attn.0":{"dtype":"F32","shape":[1,2,3],"data_offsets":[0,24]}})"));
  CHECK(aligned.head.size() == 72);
  const safetensors_layout padded =
      lay_out_safetensors({{"attn0", safetensors_type::f32, {1, 1, 2, 3}}}, {}, 8);
  CHECK(padded.head ==
        file_of(R"({"attn0":{"dtype":"F32","shape":[1,1,2,3],"data_offsets":[0,24]}}       )"));
  CHECK(padded.head.size() == 80);
  CHECK(padded.file_bytes() == 104);
}

TEST_CASE("wide types come first, then names in order, and metadata before all") {
  const safetensors_layout made = lay_out_safetensors({{"b", safetensors_type::f16, {3}},
                                                       {"a", safetensors_type::bf16, {1}},
                                                       {"z", safetensors_type::u64, {}},
                                                       {"c", safetensors_type::f16, {0, 7}},
                                                       {"d", safetensors_type::f4, {2}},
                                                       {"e", safetensors_type::boolean, {5}}},
                                                      {{"format", "pt"}, {"a\"\\\n\x01", "\xC3\xBC"}}, 8);
  CHECK(has(made.head, R"({"__metadata__":{"a\"\\\n\u0001":")"
                       "\xC3\xBC"
                       R"(","format":"pt"},"z":{"dtype":"U64","shape":[],"data_offsets":[0,8]},)"
                       R"("a":{"dtype":"BF16","shape":[1],"data_offsets":[8,10]},)"
                       R"("b":{"dtype":"F16","shape":[3],"data_offsets":[10,16]},)"
                       R"("c":{"dtype":"F16","shape":[0,7],"data_offsets":[16,16]},)"
                       R"("d":{"dtype":"F4","shape":[2],"data_offsets":[16,17]},)"
                       R"("e":{"dtype":"BOOL","shape":[5],"data_offsets":[17,22]}})"));
  CHECK(read_safetensors(bytes_of_text(made.head), made.file_bytes(), "x") == made.header);
}

TEST_CASE("data begins at the requested alignment") {
  constexpr std::string_view json = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  for (const std::uint64_t alignment : {8U, 16U, 24U, 4096U, 65536U}) {
    CAPTURE(alignment);
    const safetensors_layout made = lay_out_safetensors({{"w", safetensors_type::f32, {2}}}, {}, alignment);
    CHECK(made.head.size() == alignment * ((8 + json.size() + alignment - 1) / alignment));
    CHECK(made.header.data_begin == made.head.size());
    CHECK(read_safetensors(bytes_of_text(made.head), made.file_bytes(), "x") == made.header);
  }
}

TEST_CASE("every type has the name and the bits of the format") {
  const std::vector<std::pair<std::string_view, std::uint64_t>> all{
      {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
      {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
  REQUIRE(all.size() == safetensors_types);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto type = static_cast<safetensors_type>(i);
    CHECK(name_of(type) == all[i].first);
    CHECK(bits_of(type) == all[i].second);
    CHECK(safetensors_type_of(all[i].first) == type);
  }
  CHECK_FALSE(safetensors_type_of("f32"));
  CHECK_FALSE(safetensors_type_of("F128"));
}

TEST_CASE("random files are read as laid out, for any order of the JSON") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<safetensors_tensor> tensors;
    const std::uint64_t count = random.below(12U);
    for (std::uint64_t i = 0; i < count; ++i) {
      safetensors_tensor t;
      t.name = "t" + std::to_string(i);
      while (random.once_in(2))
        t.name += std::string(1, static_cast<char>(random.below(0x7FU) + 1));
      t.type = static_cast<safetensors_type>(random.below(safetensors_types));
      for (std::uint64_t k = random.below(4U); k > 0; --k)
        t.shape.push_back(random.once_in(9) ? 0 : random.below(9U) + 1);
      if (bits_of(t.type) < 8) t.shape.push_back(4);
      tensors.push_back(std::move(t));
    }
    safetensors_metadata metadata;
    if (random.once_in(2)) metadata.emplace_back("format", "pt");
    const safetensors_layout made = lay_out_safetensors(tensors, metadata, 8);
    CHECK(read_safetensors(bytes_of_text(made.head), made.file_bytes(), "x") == made.header);
    CHECK(made.header.entries.size() == tensors.size());
    // One byte more or less of the file is noticed.
    CHECK_THROWS_AS(read_safetensors(bytes_of_text(made.head), made.file_bytes() + 1, "x"), format_error);
  }
}

TEST_CASE("additions of other writers are harmless") {
  CHECK(read("{}", 0).entries.empty());
  CHECK(read("\r\n\t {} \n ", 0).entries.empty());
  CHECK(read(R"( { "a" : { "data_offsets" : [ 0 , 4 ] , "shape" : [ ] , "dtype" : "F32" } } )", 4)
            .entries.front()
            .name == "a");
  CHECK(
      read(
          R"({"a":{"dtype":"U8","x":{"y":[1,-2.5e+3,null,true,false,"z",{}]},"shape":[1],"data_offsets":[0,1]}})",
          1)
          .entries.size() == 1);
  CHECK(read(R"({"\u00e9\ud83d\ude00\/":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0)
            .entries.front()
            .name == "\xC3\xA9\xF0\x9F\x98\x80/");
  // Empty tensors may begin where others do.
  CHECK(
      read(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
          2)
          .entries.front()
          .name == "b");
  const safetensors_header described = read(R"({"__metadata__":{"z":"1","a":"2"}})", 0);
  CHECK(described.metadata == safetensors_metadata{{"z", "1"}, {"a", "2"}});
  CHECK(read(R"({"__metadata__":null})", 0).metadata.empty());
  CHECK(read(R"({"__metadata__": null ,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4)
            .entries.size() == 1);
}

TEST_CASE("contradictory sizes and offsets are refused by name") {
  const auto entry = [](const char* shape, const char* offsets) {
    return std::string(R"({"w":{"dtype":"F32","shape":)") + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  CHECK(has(refusal(entry("[2]", "[0,4]"), 4),
            "tensor \"w\" has data_offsets [0, 4], its shape takes 8 bytes"));
  CHECK(has(refusal(entry("[1]", "[4,8]"), 8), "after a gap: it must begin at 0"));
  CHECK(has(refusal(entry("[1]", "[4,0]"), 4), "its shape takes 4 bytes"));
  CHECK(has(refusal(entry("[1]", "[0,4]"), 5), "the tensors end at byte 4 of the data, the file at 5"));
  CHECK(has(refusal(entry("[1]", "[0,4]"), 3), "the file at 3"));
  CHECK(has(refusal(entry("[4294967296,4294967296]", "[0,0]"), 0), "pass 2^63 - 1"));
  CHECK(has(refusal(entry("[18446744073709551615,2,0]", "[0,0]"), 0), "pass 2^63 - 1"));
  CHECK(has(refusal(R"({"w":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2), "not a whole number"));
  CHECK(has(
      refusal(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
          3),
      "tensor \"b\" has data_offsets [1, 3], which overlaps another tensor"));
}

TEST_CASE("invalid or unexpected JSON is refused with the byte") {
  CHECK(has(refusal("", 0), "byte 8: '{' must be here"));
  CHECK(has(refusal("[]", 0), "byte 8: '{' must be here"));
  CHECK(has(refusal("{} x", 0), "byte 11: the JSON must end here"));
  CHECK(has(refusal(std::string_view("{}\0", 3), 0), "byte 10: the JSON must end here"));
  CHECK(has(refusal("{\"a\":1}", 0), "byte 13: '{' must be here"));
  CHECK(has(refusal("{\"a\"", 0), "':' must be here"));
  CHECK(has(refusal("{\"a", 0), "a string has no end"));
  CHECK(has(refusal("{\"a\n\":{}}", 0), "a string contains a control character"));
  CHECK(has(refusal("{\"\xFF\":{}}", 0), "not UTF-8"));
  CHECK(has(refusal("{\"\xC0\x80\":{}}", 0), "not UTF-8"));
  CHECK(has(refusal("{\"\xED\xA0\x80\":{}}", 0), "not UTF-8"));
  CHECK(has(refusal("{\"\xF4\x90\x80\x80\":{}}", 0), "not UTF-8"));
  CHECK(has(refusal(R"({"\ud800":{}})", 0), "half of a surrogate pair"));
  CHECK(has(refusal(R"({"\udc00":{}})", 0), "half of a surrogate pair"));
  CHECK(has(refusal(R"({"\ud800\u0041":{}})", 0), "half of a surrogate pair"));
  CHECK(has(refusal(R"({"\x":{}})", 0), "an unknown escape"));
  CHECK(has(refusal(R"({"\u12g4":{}})", 0), "four hexadecimal digits"));
  CHECK(has(refusal(R"({"a":{}})", 0), "lacks dtype, shape or data_offsets"));
  CHECK(has(refusal(R"({"a":{"dtype":"F31"}})", 0), "unknown dtype \"F31\""));
  CHECK(has(refusal(R"({"a":{"dtype":"F32","dtype":"F32"}})", 0), "has dtype twice"));
  CHECK(has(refusal(R"({"a":{"shape":[-1]}})", 0), "a whole number that is not negative"));
  CHECK(has(refusal(R"({"a":{"shape":[1.0]}})", 0), "a whole number is expected here"));
  CHECK(has(refusal(R"({"a":{"shape":[1e3]}})", 0), "a whole number is expected here"));
  CHECK(has(refusal(R"({"a":{"shape":[01]}})", 0), "leading zeros"));
  CHECK(has(refusal(R"({"a":{"shape":[18446744073709551616]}})", 0), "more than 64 bits"));
  CHECK(has(refusal(R"({"a":{"shape":[1,]}})", 0), "a whole number"));
  CHECK(has(refusal(R"({"a":{"data_offsets":[0]}})", 0), "two data_offsets"));
  CHECK(has(refusal(R"({"a":{"data_offsets":[0,1,2]}})", 0), "two data_offsets"));
  CHECK(has(refusal(R"({"a":{"x":tru}})", 0), "not a JSON value"));
  CHECK(has(refusal(R"({"a":{"x":-}})", 0), "not a JSON value"));
  CHECK(has(refusal(R"({"a":{"x":1.}})", 0), "not a JSON value"));
  CHECK(has(refusal(R"({"a":{"x":)" + std::string(100'000, '['), 0), "the JSON is nested too deep"));
  CHECK(has(refusal(R"({"__metadata__":{"a":1}})", 0), "'\"' must be here"));
  CHECK(has(refusal(R"({"__metadata__":nul})", 0), "not a JSON value"));
  CHECK(has(refusal(R"({"__metadata__":null,"__metadata__":{}})", 0), "occurs twice"));
  CHECK(has(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0), "occurs twice"));
  CHECK(has(refusal(R"({"__metadata__":{"a":"1","a":"1"}})", 0), "metadata \"a\" occurs twice"));
  const std::string twice = R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  CHECK(has(refusal("{" + twice + "," + twice + "}", 0), "tensor \"a\" occurs twice"));
}

TEST_CASE("a length that is too short, too long or past the file's end is refused") {
  const auto refused = [](const std::string& text, std::uint64_t file_bytes) -> std::string {
    try {
      static_cast<void>(read_safetensors(bytes_of_text(text), file_bytes, "f"));
    } catch (const format_error& error) {
      return error.what();
    }
    return "taken";
  };
  CHECK(has(refused("1234567", 7), "7 bytes, too few for the 8 that hold"));
  CHECK(has(refused(file_of("{}").substr(0, 9), 9), "takes 10 bytes, there are 9"));
  CHECK(has(refused(file_of("{}").substr(0, 9), 20), "takes 10 bytes, there are 9"));
  CHECK(has(refused(file_of("{}"), 9), "takes 10 bytes, there are 9"));
  const std::string huge("\x01\xE1\xF5\x05\0\0\0\0", 8);  // 100,000,001
  CHECK(has(refused(huge, ~std::uint64_t{0}), "a header of 100000001 bytes, at most 100000000"));
  CHECK(has(refused(std::string(8, '\xFF'), ~std::uint64_t{0}), "at most 100000000"));
}

TEST_CASE("contents that a file cannot have are refused") {
  using tensors = std::vector<safetensors_tensor>;
  const auto refused = [](tensors all, safetensors_metadata metadata,
                          std::uint64_t alignment) -> std::string {
    try {
      static_cast<void>(lay_out_safetensors(std::move(all), std::move(metadata), alignment));
    } catch (const argument_error& error) {
      return error.what();
    } catch (const length_error& error) {
      return error.what();
    }
    return "taken";
  };
  const auto f32 = safetensors_type::f32;
  CHECK(
      has(refused({{"a", f32, {1}}, {"a", safetensors_type::f16, {1}}}, {}, 8), "tensor \"a\" occurs twice"));
  CHECK(has(refused({{"__metadata__", f32, {1}}}, {}, 8), "readers take for something else"));
  CHECK(has(refused({{"\xFF", f32, {1}}}, {}, 8), "not UTF-8"));
  CHECK(has(refused({{"a", safetensors_type::f6_e2m3, {3}}}, {}, 8), "not a whole number"));
  CHECK(has(refused({{"a", f32, {std::uint64_t{1} << 62}}}, {}, 8), "pass 2^63 - 1"));
  CHECK(has(refused({{"a", f32, {std::uint64_t{1} << 58}},
                     {"b", f32, {std::uint64_t{1} << 58}},
                     {"c", safetensors_type::u8, {max_bytes / 8}},
                     {"d", safetensors_type::u8, {max_bytes / 8}},
                     {"e", safetensors_type::u8, {max_bytes / 8}},
                     {"f", safetensors_type::u8, {max_bytes / 8}},
                     {"g", safetensors_type::u8, {max_bytes / 8}},
                     {"h", safetensors_type::u8, {max_bytes / 8}},
                     {"i", safetensors_type::u8, {max_bytes / 8}}},
                    {}, 8),
            "2^63 - 1"));
  CHECK(has(refused({}, {{"a", "1"}, {"a", "2"}}, 8), "metadata \"a\" occurs twice"));
  CHECK(has(refused({}, {{"a", "\xFF"}}, 8), "not UTF-8"));
  CHECK(has(refused({}, {}, 12), "multiple of 8"));
  CHECK(has(refused({}, {}, 0), "multiple of 8"));
  CHECK(has(refused({}, {{"a", std::string(max_safetensors_header, 'x')}}, 8),
            "put fewer tensors into a file"));
}
