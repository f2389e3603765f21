#include <llmmem/checkpoint/manifest.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/manifests.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using nlohmann::ordered_json;

namespace {

/// Two ranks' halves of a tensor.
checkpoint_manifest two_halves() {
  random_numbers random(7);
  checkpoint_manifest made{
      .generation = 7, .step = 1200, .world = 2, .chunk_bytes = 8, .files = {}, .tensors = {}};
  made.files.push_back(described("a.safetensors", random_bytes(random, 20), 8, 0));
  made.files.push_back(described("b.safetensors", random_bytes(random, 16), 8, 1));
  made.tensors.push_back(
      {"w",
       safetensors_type::f32,
       {2, 4},
       {{0, "w", element_runs::flat_range(0, 4)}, {1, "w", element_runs::flat_range(4, 4)}}});
  made.tensors.push_back({"b", safetensors_type::u8, {3}, {{0, "b", element_runs::all_of(3)}}});
  return made;
}

/// What reading says; "taken" when it says nothing.
std::string refusal(const std::string& text) {
  try {
    static_cast<void>(read_manifest(text, "M"));
  } catch (const format_error& error) {
    return error.what();
  }
  return "taken";
}

/// What `check_manifest` says, which is what reading the same, sealed, must say as well.
std::string refusal_of(const checkpoint_manifest& manifest) {
  std::string said = "taken";
  try {
    check_manifest(manifest, "M");
  } catch (const argument_error& error) {
    said = error.what();
  }
  CHECK(refusal(sealed(json_of(manifest))) == said);
  if (said != "taken") CHECK_THROWS_AS(static_cast<void>(to_json(manifest)), argument_error);
  return said;
}

template <class Change>
std::string refusal_with(Change change) {
  checkpoint_manifest manifest = two_halves();
  change(manifest);
  return refusal_of(manifest);
}

template <class Change>
std::string refusal_of_json(Change change) {
  ordered_json json = json_of(two_halves());
  change(json);
  return refusal(sealed(json));
}

/// All values in a JSON value, by path.
void all_paths(const ordered_json& value, const std::string& path, std::vector<std::string>& paths) {
  if (!path.empty()) paths.push_back(path);
  if (value.is_object()) {
    for (const auto& [key, below] : value.items())
      all_paths(below, path + "/" + key, paths);
  } else if (value.is_array()) {
    for (std::size_t i = 0; i < value.size(); ++i)
      all_paths(value[i], path + "/" + std::to_string(i), paths);
  }
}

/// `text` with `"@@"` replaced by what no JSON library would write.
std::string with_raw(std::string text, const std::string& raw) {
  const std::size_t at = text.find("\"@@\"");
  REQUIRE(at != std::string::npos);
  return text.replace(at, 4, raw);
}

std::string body_of(const ordered_json& json) {
  std::string body = json.dump();
  body.back() = ',';
  return body + "\n";
}

std::string merge_refusal(const checkpoint_manifest& part) {
  checkpoint_manifest into = two_halves();
  const checkpoint_manifest before = into;
  std::string said = "taken";
  try {
    merge_manifest(into, part, "rank 1");
  } catch (const argument_error& error) {
    said = error.what();
    CHECK(into == before);
  }
  return said;
}

}  // namespace

TEST_SUITE("checkpoint manifest") {
  TEST_CASE("a manifest survives a round trip, and is the documented JSON") {
    for (const auto seed : seeds(300)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const checkpoint_manifest manifest = random_manifest(random);
      const std::string text = to_json(manifest);
      REQUIRE(read_manifest(text, "M") == manifest);
      // Another reader finds the same, and another writer is understood.
      ordered_json seen = ordered_json::parse(text);
      CHECK(seen["crc32c"].get<std::string>() == text.substr(text.size() - 11, 8));
      seen.erase("crc32c");
      CHECK(seen == json_of(manifest));
      CHECK(read_manifest(sealed(json_of(manifest)), "M") == manifest);
    }
  }

  TEST_CASE("the text has not changed by a byte") {
    CHECK(
        to_json(two_halves()) ==
        R"({"format":"llmmem-checkpoint-1","generation":7,"step":1200,"world":2,"chunk_bytes":8,"files":[)"
        "\n"
        R"({"name":"a.safetensors","bytes":20,"rank":0,"crc32c":"97d4641f","chunks":"5a5aa2742d780cc37ec5023e"},)"
        "\n"
        R"({"name":"b.safetensors","bytes":16,"rank":1,"crc32c":"a939b517","chunks":"744f9e6bde6db28c"}],"tensors":[)"
        "\n"
        R"({"name":"w","type":"F32","shape":[2,4],"pieces":[{"file":0,"entry":"w","runs":[0,4,4,1]},)"
        R"({"file":1,"entry":"w","runs":[4,4,4,1]}]},)"
        "\n"
        R"({"name":"b","type":"U8","shape":[3],"pieces":[{"file":0,"entry":"b","runs":[0,3,3,1]}]}],)"
        "\n"
        R"("crc32c":"9c5f5e1d"})"
        "\n");
  }

  TEST_CASE("any change of any byte is detected, and so is any truncation") {
    for (const auto seed : seeds(3)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::string text = to_json(seed == 1 ? two_halves() : random_manifest(random));
      std::uint64_t taken = 0;
      for (std::size_t at = 0; at < text.size(); ++at) {
        std::string damaged = text;
        for (unsigned value = 0; value < 256; ++value) {
          if (static_cast<char>(value) == text[at]) continue;
          // All values where the checksum does not reach, eight flips and some white space before that.
          const bool is_flip = ((value ^ static_cast<unsigned char>(text[at])) &
                                ((value ^ static_cast<unsigned char>(text[at])) - 1)) == 0;
          if (at + 30 < text.size() && !is_flip && value != ' ' && value != '\n') continue;
          damaged[at] = static_cast<char>(value);
          taken += refusal(damaged) == "taken" ? 1U : 0U;
        }
        taken += refusal(text.substr(0, at)) == "taken" ? 1U : 0U;
        taken += refusal(text.substr(at)) == "taken" && at != 0 ? 1U : 0U;
      }
      CHECK(taken == 0);
      CHECK(refusal(text + "\n") ==
            "M: it does not end like a manifest: it was truncated, or is something else");
      CHECK(refusal(text + text) != "taken");
    }
  }

  TEST_CASE("damage is reported in complete sentences") {
    std::string text = to_json(two_halves());
    CHECK(refusal("") == "M: it does not end like a manifest: it was truncated, or is something else");
    CHECK(refusal("{}") == "M: it does not end like a manifest: it was truncated, or is something else");
    text[20] = 'X';
    CHECK(refusal(text) == "M: its checksum is wrong: it is damaged");
    CHECK(refusal(sealed(std::string())) == "M: byte 0: '{' must be here");
    CHECK(refusal(sealed(std::string("{"))) == "M: byte 22: the object that ends here lacks a member");
    CHECK(refusal(sealed(std::string("[{"))) == "M: byte 0: '{' must be here");
    CHECK(refusal(sealed(std::string("{\"x\":{"))) == "M: byte 27: '}' must be here");
    CHECK(refusal(std::string(static_cast<std::size_t>(max_manifest_bytes) + 1, ' ')) ==
          "M: 268435457 bytes, but a manifest has at most 268435456");
  }

  TEST_CASE("another format is reported by its name") {
    CHECK(refusal_of_json([](ordered_json& json) { json["format"] = "llmmem-checkpoint-2"; }) ==
          "M: byte 31: its format is \"llmmem-checkpoint-2\", which this version does not know");
  }

  TEST_CASE("additions of a later version are harmless, unless they are nested too deep") {
    ordered_json json = json_of(two_halves());
    json["later"] = {1, -2.5e3, true, nullptr, {{"a", {}}}};
    json["files"][0]["later"] = "x";
    json["tensors"][0]["later"] = ordered_json::object();
    json["tensors"][0]["pieces"][0]["later"] = false;
    CHECK(read_manifest(sealed(json), "M") == two_halves());
    ordered_json deep = 1;
    for (int i = 0; i < 8; ++i)
      deep = ordered_json::array({deep});
    json["later"] = deep;
    CHECK(refusal(sealed(json)).ends_with(": the JSON is nested too deep"));
  }

  // The checksum is no signature: all that follows has the right one.
  TEST_CASE("a manifest with a missing or repeated member is refused, and other orders are read") {
    const ordered_json whole = json_of(two_halves());
    std::vector<std::string> paths{""};
    all_paths(whole, "", paths);
    std::uint64_t objects = 0;
    for (const std::string& path : paths) {
      const ordered_json::json_pointer pointer(path);
      if (!whole[pointer].is_object()) continue;
      ++objects;
      ordered_json reversed = whole;
      reversed[pointer] = ordered_json::object();
      std::vector<std::string> keys;
      for (const auto& [key, value] : whole[pointer].items())
        keys.insert(keys.begin(), key);
      for (const std::string& key : keys) {
        CAPTURE(path);
        CAPTURE(key);
        reversed[pointer][key] = whole[pointer][key];
        ordered_json without = whole;
        without[pointer].erase(key);
        CHECK(refusal(sealed(without)).ends_with(": the object that ends here lacks a member"));
        ordered_json twice = whole;
        twice[pointer]["@@"] = whole[pointer][key];
        CHECK(refusal(sealed(with_raw(body_of(twice), "\"" + key + "\"")))
                  .ends_with(": '" + key + "' occurs twice"));
      }
      CHECK(read_manifest(sealed(reversed), "M") == two_halves());
    }
    CHECK(objects == 8);
    CHECK(refusal(sealed(with_raw(body_of([&] {
                                    ordered_json twice = whole;
                                    twice["@@"] = "00000000";
                                    return twice;
                                  }()),
                                  "\"crc32c\"")))
              .ends_with(": 'crc32c' occurs twice"));
  }

  TEST_CASE("a value of another kind is refused in any place") {
    const ordered_json whole = json_of(two_halves());
    std::vector<std::string> paths;
    all_paths(whole, "", paths);
    CHECK(paths.size() == 56);
    for (const std::string& path : paths) {
      const ordered_json::json_pointer pointer(path);
      const char kind = whole[pointer].dump().front();  // '"', '[', '{' or a digit
      for (const std::string& raw : std::vector<std::string>{"null",  "true",      "-1",
                                                             "1.5",   "1e3",       "01",
                                                             "+1",    "0x1",       "18446744073709551616",
                                                             "nan",   "",          "'1'",
                                                             "\"1\"", "\"\xFF\"",  "\"\\u12\"",
                                                             "[]",    "[0]",       "[0,0,0,0,0]",
                                                             "{}",    "{\"a\":1}", "["}) {
        CAPTURE(path);
        CAPTURE(raw);
        ordered_json changed = whole;
        changed[pointer] = "@@";
        // The only ones that are of the right kind, and right: a name, and a list that may be of any length.
        if (raw == "\"1\"" && kind == '"' && (path.ends_with("/name") || path.ends_with("/entry"))) continue;
        if (raw.empty() && path == "/tensors/1/pieces/0") continue;  // the only one: none is left
        if (raw == "[]" && (path.ends_with("/pieces") || path == "/tensors")) continue;
        const std::string said = refusal(sealed(with_raw(body_of(changed), raw)));
        CHECK(said != "taken");
        CHECK(said.starts_with("M: "));
      }
    }
  }

  TEST_CASE("numbers that are too large are refused, for any quantity") {
    CHECK(refusal_with([](auto& m) { m.world = 0; }) == "M: the world has 0 ranks");
    CHECK(refusal_with([](auto& m) { m.world = 1; }) == "M: file \"b.safetensors\": rank 1 of 1");
    CHECK(refusal_of_json([](auto& j) {
            j["world"] = 4294967296;
          }).ends_with(": a number of more than 32 bits"));
    CHECK(refusal_of_json([](auto& j) {
            j["files"][0]["rank"] = 4294967296;
          }).ends_with(": a number of more than 32 bits"));
    CHECK(refusal_of_json([](auto& j) {
            j["tensors"][0]["pieces"][0]["file"] = 4294967296;
          }).ends_with(": a number of more than 32 bits"));
    CHECK(refusal_with([](auto& m) { m.chunk_bytes = 0; }) ==
          "M: chunks of 0 bytes; they have 1 to 1073741824");
    CHECK(refusal_with([](auto& m) { m.chunk_bytes = max_checkpoint_chunk + 1; }) ==
          "M: chunks of 1073741825 bytes; they have 1 to 1073741824");
    CHECK(refusal_with([](auto& m) { m.chunk_bytes = ~std::uint64_t{0}; }) ==
          "M: chunks of 18446744073709551615 bytes; they have 1 to 1073741824");
    CHECK(refusal_with([](auto& m) { m.files[0].bytes = ~std::uint64_t{0}; }) ==
          "M: file \"a.safetensors\": more than 2^63 - 1 bytes");
    CHECK(refusal_with([](auto& m) { m.files[0].bytes = max_bytes; }) ==
          "M: file \"a.safetensors\": 3 checksums for 1152921504606846976 chunks");
    CHECK(refusal_with([](auto& m) {
            m.tensors[1].shape = {std::uint64_t{1} << 63};
          }).starts_with("M: tensor \"b\": tensor_shape: rows x columns: 9223372036854775808 x 1 exceeds"));
    CHECK(refusal_with([](auto& m) {
            m.tensors[1].shape = {std::uint64_t{1} << 32, std::uint64_t{1} << 31};
          }).starts_with("M: tensor \"b\": tensor_shape: rows x columns: 4294967296 x 2147483648 exceeds"));
    // No elements, by a row that could not be: no reader would take it.
    CHECK(refusal_with([](auto& m) {
            m.tensors[1].shape = {0, std::uint64_t{1} << 62, 4};
          }).starts_with("M: tensor \"b\": tensor_shape: elements of a row: "));
    CHECK(refusal_with([](auto& m) {
            m.tensors[0].shape = {std::uint64_t{1} << 62};
          }).starts_with("M: tensor \"w\": bytes of it: 4611686018427387904 x 4 exceeds"));
  }

  TEST_CASE("a list of checksums must be valid, as long as the file requires, and give the file's checksum") {
    const std::string file = "M: file \"a.safetensors\": ";
    CHECK(refusal_with([](auto& m) { m.files[0].chunks.pop_back(); }) == file + "2 checksums for 3 chunks");
    CHECK(refusal_with([](auto& m) { m.files[0].chunks.push_back(0); }) == file + "4 checksums for 3 chunks");
    CHECK(refusal_with([](auto& m) { m.files[0].bytes = 0; }) == file + "3 checksums for 0 chunks");
    CHECK(refusal_with([](auto& m) { m.files[0].chunks.resize(1'000'000); }) ==
          file + "1000000 checksums for 3 chunks");
    CHECK(refusal_with([](auto& m) { ++m.files[0].crc32c; }) ==
          file + "its checksum does not match those of its chunks");
    CHECK(refusal_with([](auto& m) { ++m.files[0].chunks[1]; }) ==
          file + "its checksum does not match those of its chunks");
    CHECK(refusal_with([](auto& m) { m.files[0].bytes = 19; }) ==
          file + "its checksum does not match those of its chunks");
    CHECK(refusal_with([](auto& m) { m.chunk_bytes = 9; }) ==
          file + "its checksum does not match those of its chunks");
    CHECK(refusal_with([](auto& m) {
            m.tensors.clear();
            m.files[0] = {"a.safetensors", 0, 0, 1, {}};
          }) == file + "its checksum does not match those of its chunks");
    for (const char* chunks : {"0", "0123456", "012345678", "0123456G", "0123456A", " 1234567", "0x123456"}) {
      CHECK(refusal_of_json([&](auto& j) {
              j["files"][0]["chunks"] = chunks;
            }).ends_with(": checksums of chunks have eight lower-case hexadecimal digits each"));
      if (std::string_view(chunks).size() > 8) continue;
      CHECK(refusal_of_json([&](auto& j) {
              j["files"][0]["crc32c"] = chunks;
            }).ends_with(": a checksum has eight lower-case hexadecimal digits"));
    }
  }

  TEST_CASE("runs cover all chunks of their file, in order, and each is in a file that has it") {
    const auto refused = [](auto change) {
      return refusal_with([&](auto& m) {  // 20 bytes in three chunks, of which the last has four
        m.stored = {{3, 800, "old", 24}, {7, 1200, "new", 4}};
        m.files[0].runs = {{0, 2, 0, 1}, {2, 1, 1, 0}};
        change(m);
      });
    };
    const std::string run = "M: file \"a.safetensors\": the run of chunks from ";
    CHECK(refused([](auto&) {}) == "taken");
    CHECK(refused([](auto& m) { m.files[0].runs.pop_back(); }) ==
          "M: file \"a.safetensors\": its runs are of 2 chunks, but it has 3");
    CHECK(refused([](auto& m) { m.files[0].runs[0].first = 1; }) ==
          run + "1 on does not begin where the one before ends, at 0");
    CHECK(refused([](auto& m) { m.files[0].runs[1].first = 1; }) ==
          run + "1 on does not begin where the one before ends, at 2");
    CHECK(refused([](auto& m) { m.files[0].runs[1].count = 0; }) == run + "2 on has 0 of the file's 3");
    CHECK(refused([](auto& m) { m.files[0].runs[1].count = 2; }) == run + "2 on has 2 of the file's 3");
    CHECK(refused([](auto& m) { m.files[0].runs[0].count = ~std::uint64_t{0}; }) ==
          run + "0 on has 18446744073709551615 of the file's 3");
    CHECK(refused([](auto& m) { m.files[0].runs[1].stored = 2; }) == run + "2 on is in stored file 2 of 2");
    CHECK(refused([](auto& m) { m.stored[0].bytes = 23; }) ==
          run + R"(0 on is past the end of "old", which has 23 bytes)");
    CHECK(refused([](auto& m) { m.stored[1].bytes = 3; }) ==
          run + R"(2 on is past the end of "new", which has 3 bytes)");
    CHECK(refused([](auto& m) { m.files[0].runs[0].place = ~std::uint64_t{0}; }) ==
          run + R"(0 on is past the end of "old", which has 24 bytes)");
    CHECK(refused([](auto& m) { m.stored[1].bytes = 24; }) == "taken");
    CHECK(refused([](auto& m) {
            m.stored[0] = {3, 800, "old", 8};
            m.files[0].runs = {{0, 1, 0, 0}, {1, 1, 0, 0}, {2, 1, 1, 0}};
          }) == "M: file \"a.safetensors\": its chunks are in stored files of 12 bytes, but it has 20");
    CHECK(refused([](auto& m) {  // one file by two numbers
            m.stored = {{3, 800, "old", 8}, {7, 1200, "new", 4}, {3, 800, "old", 8}};
            m.files[0].runs = {{0, 1, 0, 0}, {1, 1, 2, 0}, {2, 1, 1, 0}};
          }) == "M: file \"a.safetensors\": its chunks are in stored files of 12 bytes, but it has 20");
    const std::string stored = "M: stored file ";
    CHECK(refused([](auto& m) { m.stored[0].name = "../old"; }) ==
          stored + R"("../old": the name must be plain: UTF-8, without '/', not beginning with '.')");
    CHECK(refused([](auto& m) { m.stored[0].bytes = max_bytes + 1; }) ==
          stored + R"("old": more than 2^63 - 1 bytes)");
    CHECK(refused([](auto& m) { m.stored[0].generation = 8; }) ==
          stored + R"("old": it is of generation 8, a later one)");
    CHECK(refused([](auto& m) { m.stored[1].step = 800; }) ==
          stored + R"("new": it is of this generation, and of step 800)");
    const auto with_runs = [](ordered_json runs) {
      return refusal_of_json([&](auto& j) { j["files"][0]["runs"].push_back(std::move(runs)); });
    };
    CHECK(with_runs({0, 3, 0}).ends_with(": runs are 4 numbers"));
    CHECK(with_runs({0, 3, 0, 0, 0}).ends_with(": runs are 4 numbers"));
    CHECK(with_runs({0, 3, 4294967296, 0}).ends_with(": a number of more than 32 bits"));
  }

  TEST_CASE("unchanged chunks stay in their files when the ranks' parts are merged") {
    checkpoint_manifest into = two_halves();
    checkpoint_manifest part = into;
    into.files.pop_back();
    into.tensors.clear();
    into.stored = {{3, 800, "a.old", 24}};
    into.files[0].runs = {{0, 3, 0, 0}};
    part.files.erase(part.files.begin());
    part.tensors.clear();
    part.stored = {{4, 900, "b.old", 8}, {7, 1200, "b.new", 8}};
    part.files[0].runs = {{0, 1, 1, 0}, {1, 1, 0, 0}};
    merge_manifest(into, part, "rank 1");
    CHECK(into.stored ==
          std::vector<stored_chunks>{{3, 800, "a.old", 24}, {4, 900, "b.old", 8}, {7, 1200, "b.new", 8}});
    CHECK(into.files[0].runs == std::vector<chunk_run>{{0, 3, 0, 0}});
    CHECK(into.files[1].runs == std::vector<chunk_run>{{0, 1, 2, 0}, {1, 1, 1, 0}});
  }

  TEST_CASE("a file's name that leads out of the folder, or is repeated, is refused") {
    for (const std::string& name : std::vector<std::string>{
             "", ".", "..", "../x", "a/b", "/etc/passwd", "a/../../b", ".tmp-1", ".hidden", "MANIFEST.json",
             std::string("a\0b", 3), std::string("\0", 1), std::string(256, 'x'), "x/"}) {
      CAPTURE(name);
      const std::string said = refusal_with([&](auto& m) { m.files[1].name = name; });
      CHECK(said.starts_with("M: file "));
      CHECK(said.ends_with(": the name must be plain: UTF-8, without '/', not beginning with '.'"));
    }
    CHECK(refusal_with([](auto& m) { m.files[1].name = std::string(255, 'x'); }) == "taken");
    CHECK(refusal_with([](auto& m) { m.files[1].name = "manifest.json\\"; }) == "taken");
    CHECK(refusal_with([](auto& m) { m.files[1].name = "a.safetensors"; }) ==
          "M: file \"a.safetensors\" occurs twice");
    checkpoint_manifest manifest = two_halves();
    manifest.files[1].name = "\xC0\xAF";  // an overlong '/'
    CHECK_THROWS_WITH_AS(check_manifest(manifest, "M"),
                         "M: file (a name that is not UTF-8): the name must be plain: UTF-8, without '/', "
                         "not beginning with '.'",
                         argument_error);
    CHECK(refusal_of_json([](auto& j) { j["files"][1]["name"] = "MANIFEST.jso\x6E"; }) ==
          "M: file \"MANIFEST.json\": the name must be plain: UTF-8, without '/', not beginning with '.'");
    ordered_json escaped = json_of(two_halves());
    escaped["files"][1]["name"] = "@@";
    CHECK(refusal(sealed(with_raw(body_of(escaped), "\"\\u002e\\u002e\\u002fx\""))) ==
          "M: file \"../x\": the name must be plain: UTF-8, without '/', not beginning with '.'");
    CHECK(refusal(sealed(with_raw(body_of(escaped), "\"a\xC0\xAF\""))).ends_with(": a string is not UTF-8"));
    CHECK(refusal(sealed(with_raw(body_of(escaped), "\"\\ud800\""))).ends_with(": half of a surrogate pair"));
    CHECK(refusal(sealed(with_raw(body_of(escaped), "\"a\nb\"")))
              .ends_with(": a string contains a control character"));
  }

  TEST_CASE("tensors and their pieces refer to existing files and elements") {
    const std::string w = "M: tensor \"w\": ";
    CHECK(refusal_with([](auto& m) { m.tensors[1].name = "w"; }) == "M: tensor \"w\" occurs twice");
    CHECK(refusal_with([](auto& m) { m.tensors[0].pieces[1].file = 2; }) == w + "a piece in file 2 of 2");
    CHECK(refusal_with([](auto& m) { m.tensors[0].pieces[1].file = 0xFFFF'FFFF; }) ==
          w + "a piece in file 4294967295 of 2");
    CHECK(refusal_of_json([](auto& j) {
            j["tensors"][0]["type"] = "f32";
          }).ends_with(": no type is called \"f32\""));
    const auto with_runs = [&](element_runs runs) {
      return refusal_with([&](auto& m) { m.tensors[0].pieces[1].runs = runs; });
    };
    const std::string piece = w + "a piece in file 1: elements ";
    CHECK(with_runs({4, 5, 5, 1}) ==
          piece +
              "{begin 4, run 5, stride 5, count 1}: they pass the end of the tensor, which has 8 elements");
    CHECK(with_runs({8, 1, 1, 1}) ==
          piece +
              "{begin 8, run 1, stride 1, count 1}: they pass the end of the tensor, which has 8 elements");
    CHECK(with_runs({0, 2, 1, 2}) ==
          piece + "{begin 0, run 2, stride 1, count 2}: runs overlap: the stride is less than the run");
    CHECK(with_runs({0, 2, 2, 2}) ==
          piece + "{begin 0, run 2, stride 2, count 2}: runs that touch are written as one");
    CHECK(with_runs({0, 2, 4, 1}) ==
          piece + "{begin 0, run 2, stride 4, count 1}: the stride of a single run must be its length");
    CHECK(with_runs({1, 0, 0, 0}) ==
          piece + "{begin 1, run 0, stride 0, count 0}: no elements are written as four zeros");
    CHECK(with_runs({0, 1, std::uint64_t{1} << 63, 3}).ends_with("which has 8 elements"));
    CHECK(with_runs({~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0}})
              .ends_with("runs that touch are written as one"));
    CHECK(with_runs({0, 1, 2, ~std::uint64_t{0}}).ends_with("which has 8 elements"));
    CHECK(with_runs({0, 8, 8, 1}) == w + "a piece in file 1 of 32 bytes, more than the file has, 16");
    CHECK(with_runs({0, 0, 0, 0}) == "taken");
    CHECK(with_runs({0, 1, 4, 2}) == "taken");
    checkpoint_manifest manifest = two_halves();
    manifest.tensors[0].name = "\xFF";
    CHECK_THROWS_WITH_AS(check_manifest(manifest, "M"),
                         "M: tensor (a name that is not UTF-8): the name must be UTF-8", argument_error);
    manifest = two_halves();
    manifest.tensors[0].pieces[0].entry = "\xFF";
    CHECK_THROWS_WITH_AS(check_manifest(manifest, "M"), "M: tensor \"w\": the name of a piece must be UTF-8",
                         argument_error);
  }

  TEST_CASE("types of less than a byte fill whole bytes, as tensors and as pieces") {
    const auto with_f4 = [&](std::uint64_t elements, element_runs runs) {
      return refusal_with(
          [&](auto& m) { m.tensors[0] = {"w", safetensors_type::f4, {elements}, {{0, "w", runs}}}; });
    };
    CHECK(with_f4(4, element_runs::flat_range(2, 2)) == "taken");
    CHECK(with_f4(3, {}) == "M: tensor \"w\": bytes of it: 3 elements of 4 bits do not fill whole bytes");
    CHECK(with_f4(4, element_runs::flat_range(0, 3)) ==
          "M: tensor \"w\": a piece in file 0: 3 elements of 4 bits do not fill whole bytes");
    CHECK(with_f4(42, element_runs::flat_range(0, 42)) ==
          "M: tensor \"w\": a piece in file 0 of 21 bytes, more than the file has, 20");
  }

  TEST_CASE("the pieces and dimensions of a tensor are limited") {
    checkpoint_manifest most = two_halves();
    most.tensors[1].pieces.assign(static_cast<std::size_t>(max_checkpoint_pieces), most.tensors[1].pieces[0]);
    most.tensors[1].shape.assign(static_cast<std::size_t>(max_checkpoint_dimensions), 1);
    most.tensors[1].shape[0] = 3;
    CHECK(read_manifest(to_json(most), "M") == most);
    checkpoint_manifest more = most;
    more.tensors[1].pieces.push_back(most.tensors[1].pieces[0]);
    CHECK_THROWS_WITH_AS(check_manifest(more, "M"),
                         "M: tensor \"b\": 65537 pieces, at most 65536 are allowed", argument_error);
    CHECK(refusal(sealed(json_of(more))).ends_with(": too many pieces of a tensor"));
    more = most;
    more.tensors[1].shape.push_back(1);
    CHECK_THROWS_WITH_AS(check_manifest(more, "M"), "M: tensor \"b\": 65 dimensions, at most 64 are allowed",
                         argument_error);
    CHECK(refusal(sealed(json_of(more))).ends_with(": too many dimensions"));
  }

  TEST_CASE("the ranks' parts merge into the manifest of all ranks") {
    for (const auto seed : seeds(200)) {
      CAPTURE(seed);
      random_numbers random(seed);
      checkpoint_manifest whole = random_manifest(random);
      whole.world = 3;
      // Each file to a rank, and each piece to the rank that has its file.
      std::vector<checkpoint_manifest> parts(
          3, {whole.generation, whole.step, 3, whole.chunk_bytes, {}, {}, whole.stored});
      std::vector<std::pair<std::uint32_t, std::uint32_t>> places;
      for (checkpoint_file& file : whole.files) {
        file.rank = static_cast<std::uint32_t>(random.below(3U));
        places.emplace_back(file.rank, static_cast<std::uint32_t>(parts[file.rank].files.size()));
        parts[file.rank].files.push_back(file);
      }
      for (const checkpoint_tensor& tensor : whole.tensors) {
        for (std::uint32_t rank = 0; rank < 3; ++rank) {
          checkpoint_tensor mine{tensor.name, tensor.type, tensor.shape, {}};
          for (checkpoint_piece piece : tensor.pieces) {
            if (places[piece.file].first != rank) continue;
            piece.file = places[piece.file].second;
            mine.pieces.push_back(piece);
          }
          if (rank == 0 || !mine.pieces.empty()) parts[rank].tensors.push_back(mine);
        }
      }
      checkpoint_manifest merged = parts[0];
      merge_manifest(merged, parts[1], "rank 1");
      merge_manifest(merged, parts[2], "rank 2");
      manifest_merger merger;
      for (std::size_t rank = 0; rank < 3; ++rank)
        merger.add(parts[rank], "rank " + std::to_string(rank));
      CHECK(std::move(merger).finish("all") == merged);
      // The same but for the order of files and pieces: each piece by its file's name.
      const auto facts = [](const checkpoint_manifest& of) {
        std::vector<std::string> all;
        for (const checkpoint_file& each : of.files)
          all.push_back(each.name + " " + std::to_string(each.bytes) + " " + std::to_string(each.crc32c));
        for (const checkpoint_file& each : of.files) {
          for (const chunk_run& run : each.runs)
            all.push_back(each.name + " " + std::to_string(run.first) + " in " + of.stored[run.stored].name +
                          " at " + std::to_string(run.place));
        }
        for (const checkpoint_tensor& tensor : of.tensors) {
          all.push_back(tensor.name);
          for (const checkpoint_piece& each : tensor.pieces)
            all.push_back(tensor.name + " " + of.files[each.file].name + " " + each.entry + " " +
                          std::to_string(each.runs.begin) + " " + std::to_string(each.runs.run) + " " +
                          std::to_string(each.runs.stride) + " " + std::to_string(each.runs.count));
        }
        std::sort(all.begin(), all.end());
        return all;
      };
      CHECK(facts(merged) == facts(whole));
      CHECK(read_manifest(to_json(merged), "M") == merged);
    }
  }

  TEST_CASE("a part of another checkpoint is refused, and nothing is changed") {
    const auto other = [](auto change) {
      checkpoint_manifest part = two_halves();
      part.files[0].name = "c.safetensors";
      part.files[1].name = "d.safetensors";
      change(part);
      return merge_refusal(part);
    };
    CHECK(other([](auto&) {}) == "taken");
    CHECK(other([](auto& m) { m.generation = 8; }) == "rank 1: its generation is 8, but the others' is 7");
    CHECK(other([](auto& m) { m.step = 1201; }) == "rank 1: its step is 1201, but the others' is 1200");
    CHECK(other([](auto& m) { m.world = 3; }) == "rank 1: its world is 3, but the others' is 2");
    CHECK(other([](auto& m) { m = {m.generation, m.step, m.world, 16, {}, {}}; }) ==
          "rank 1: its chunk size is 16, but the others' is 8");
    CHECK(other([](auto& m) { m.tensors[0].type = safetensors_type::i32; }) ==
          "rank 1: tensor \"w\" has a type or shape other than on other ranks");
    CHECK(other([](auto& m) { m.tensors[0].shape = {4, 2}; }) ==
          "rank 1: tensor \"w\" has a type or shape other than on other ranks");
    CHECK(other([](auto& m) { m.files[0].name = "b.safetensors"; }) ==
          "rank 1: file \"b.safetensors\" occurs twice");
    CHECK(other([](auto& m) { m.tensors[1].name = "w"; }) == "rank 1: tensor \"w\" occurs twice");
    CHECK(other([](auto& m) { m.files[0].rank = 2; }) == "rank 1: file \"c.safetensors\": rank 2 of 2");
    CHECK(other([](auto& m) { m.tensors[0].pieces[0].file = 2; }) ==
          "rank 1: tensor \"w\": a piece in file 2 of 2");
    // With the other's two files before it, it would be file 0, which is another's.
    CHECK(other([](auto& m) { m.tensors[1].pieces[0].file = 0xFFFF'FFFE; }) ==
          "rank 1: tensor \"b\": a piece in file 4294967294 of 2");
  }

  TEST_CASE("the total of the ranks' pieces of a tensor is also limited") {
    checkpoint_manifest into = two_halves();
    into.tensors[1].pieces.assign(static_cast<std::size_t>(max_checkpoint_pieces), into.tensors[1].pieces[0]);
    checkpoint_manifest part = two_halves();
    part.files[0].name = "c.safetensors";
    part.files[1].name = "d.safetensors";
    CHECK_THROWS_WITH_AS(merge_manifest(into, part, "rank 1"),
                         "rank 1: tensor \"b\": 65537 pieces, at most 65536 are allowed", argument_error);
  }
}
