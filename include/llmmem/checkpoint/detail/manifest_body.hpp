/// @file
/// Converts manifests to and from JSON.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/hex.hpp>
#include <llmmem/checkpoint/detail/manifest_check.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/detail/json_reader.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::string_view manifest_format = "llmmem-checkpoint-1";

/// A manifest's last line: `"crc32c":"01234567"}`, the checksum of everything before it.
inline constexpr std::string_view manifest_key = R"("crc32c":")";
inline constexpr std::string_view manifest_tail = "\"}\n";

inline void append_runs(std::string& text, const std::vector<chunk_run>& runs) {
  text += ",\"runs\":[";
  for (const chunk_run& each : runs) {
    text.append(&each == runs.data() ? "[" : ",[");
    text.append(std::to_string(each.first)).append(",").append(std::to_string(each.count));
    text.append(",").append(std::to_string(each.stored)).append(",").append(std::to_string(each.place));
    text += ']';
  }
  text += ']';
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY std::string to_json(const checkpoint_manifest& manifest) {
  check_manifest(manifest, "manifest");
  std::string text = R"({"format":")";
  text += detail::manifest_format;
  const auto number = [&](const char* name, std::uint64_t value) {
    text += ",\"" + std::string(name) + "\":" + std::to_string(value);
  };
  text += '"';
  number("generation", manifest.generation);
  number("step", manifest.step);
  number("world", manifest.world);
  number("chunk_bytes", manifest.chunk_bytes);
  text += ",\"files\":[";
  for (const checkpoint_file& each : manifest.files) {
    text += &each == manifest.files.data() ? "\n{\"name\":" : ",\n{\"name\":";
    detail::append_json_string(text, each.name);
    number("bytes", each.bytes);
    number("rank", each.rank);
    text += R"(,"crc32c":")";
    detail::append_hex(text, each.crc32c);
    text += R"(","chunks":")";
    for (const std::uint32_t chunk : each.chunks)
      detail::append_hex(text, chunk);
    text += '"';
    if (!each.runs.empty()) detail::append_runs(text, each.runs);
    text += '}';
  }
  if (!manifest.stored.empty()) {
    text += "],\"stored\":[";
    for (const stored_chunks& each : manifest.stored) {
      text += &each == manifest.stored.data() ? "\n{\"name\":" : ",\n{\"name\":";
      detail::append_json_string(text, each.name);
      number("generation", each.generation);
      number("step", each.step);
      number("bytes", each.bytes);
      text += '}';
    }
  }
  text += "],\"tensors\":[";
  for (const checkpoint_tensor& each : manifest.tensors) {
    text += &each == manifest.tensors.data() ? "\n{\"name\":" : ",\n{\"name\":";
    detail::append_json_string(text, each.name);
    text += R"(,"type":")" + std::string(name_of(each.type)) + R"(","shape":[)";
    for (std::size_t i = 0; i < each.shape.size(); ++i)
      text.append(i == 0 ? "" : ",").append(std::to_string(each.shape[i]));
    text += "],\"pieces\":[";
    for (std::size_t i = 0; i < each.pieces.size(); ++i) {
      const checkpoint_piece& piece = each.pieces[i];
      text += (i == 0 ? "{\"file\":" : ",{\"file\":") + std::to_string(piece.file) + ",\"entry\":";
      detail::append_json_string(text, piece.entry);
      text += ",\"runs\":[" + std::to_string(piece.runs.begin) + "," + std::to_string(piece.runs.run) + "," +
              std::to_string(piece.runs.stride) + "," + std::to_string(piece.runs.count) + "]}";
    }
    text += "]}";
  }
  text += "],\n";
  const std::uint32_t sum = detail::crc32c_of(text);
  text += detail::manifest_key;
  detail::append_hex(text, sum);
  text += detail::manifest_tail;
  return text;
}

namespace detail {

/// Reads the members of an object, each at most once.
class manifest_members {
 public:
  explicit manifest_members(json_reader& json) noexcept : json_(&json) {}

  /// Returns whether `key` is `name`, the `bit`th member. Refuses a second one.
  [[nodiscard]] bool is(const std::string& key, std::string_view name, unsigned bit) {
    if (key != name) return false;
    if ((seen_ & 1U << bit) != 0) json_->refuse("'" + std::string(name) + "' occurs twice");
    seen_ |= 1U << bit;
    return true;
  }
  /// Requires the first `count` members; the later ones are optional.
  void need(unsigned count) const {
    const unsigned all = (1U << count) - 1;
    if ((seen_ & all) != all) json_->refuse("the object that ends here lacks a member");
  }

 private:
  json_reader* json_;
  unsigned seen_ = 0;
};

[[nodiscard]] inline std::uint32_t read_crc(json_reader& json) {
  const std::optional<std::uint32_t> sum = read_hex(json.string());
  if (!sum) json.refuse("a checksum has eight lower-case hexadecimal digits");
  return *sum;
}

[[nodiscard]] inline std::uint32_t read_number32(json_reader& json) {
  const std::uint64_t value = json.number();
  if (value > ~std::uint32_t{0}) json.refuse("a number of more than 32 bits");
  return static_cast<std::uint32_t>(value);
}

/// Reads an array of exactly that many numbers.
template <std::size_t Count>
[[nodiscard]] std::array<std::uint64_t, Count> read_numbers(json_reader& json, const std::string& what) {
  std::array<std::uint64_t, Count> all{};
  std::size_t count = 0;
  const auto wrong = [&] { json.refuse(what + " are " + std::to_string(Count) + " numbers"); };
  json.array([&] {
    const std::uint64_t value = json.number();
    if (count == Count) wrong();
    all[count++] = value;
  });
  if (count != Count) wrong();
  return all;
}

[[nodiscard]] inline chunk_run read_chunk_run(json_reader& json) {
  const auto numbers = read_numbers<4>(json, "runs");
  if (numbers[2] > ~std::uint32_t{0}) json.refuse("a number of more than 32 bits");
  return {numbers[0], numbers[1], static_cast<std::uint32_t>(numbers[2]), numbers[3]};
}

[[nodiscard]] inline stored_chunks read_stored_chunks(json_reader& json) {
  stored_chunks stored;
  manifest_members members(json);
  json.object([&](const std::string& key) {
    if (members.is(key, "name", 0)) {
      stored.name = json.string();
    } else if (members.is(key, "generation", 1)) {
      stored.generation = json.number();
    } else if (members.is(key, "step", 2)) {
      stored.step = json.number();
    } else if (members.is(key, "bytes", 3)) {
      stored.bytes = json.number();
    } else {
      json.skip(8);
    }
  });
  members.need(4);
  return stored;
}

[[nodiscard]] inline checkpoint_file read_checkpoint_file(json_reader& json) {
  checkpoint_file file;
  manifest_members members(json);
  json.object([&](const std::string& key) {
    if (members.is(key, "name", 0)) {
      file.name = json.string();
    } else if (members.is(key, "bytes", 1)) {
      file.bytes = json.number();
    } else if (members.is(key, "rank", 2)) {
      file.rank = read_number32(json);
    } else if (members.is(key, "crc32c", 3)) {
      file.crc32c = read_crc(json);
    } else if (members.is(key, "chunks", 4)) {
      const std::string all = json.string();
      for (std::size_t at = 0; at < all.size(); at += 8) {
        const std::optional<std::uint32_t> sum = read_hex(std::string_view(all).substr(at, 8));
        if (!sum) json.refuse("checksums of chunks have eight lower-case hexadecimal digits each");
        file.chunks.push_back(*sum);
      }
    } else if (members.is(key, "runs", 5)) {
      json.array([&] { file.runs.push_back(read_chunk_run(json)); });
    } else {
      json.skip(8);
    }
  });
  members.need(5);
  return file;
}

[[nodiscard]] inline checkpoint_piece read_checkpoint_piece(json_reader& json) {
  checkpoint_piece piece;
  manifest_members members(json);
  json.object([&](const std::string& key) {
    if (members.is(key, "file", 0)) {
      piece.file = read_number32(json);
    } else if (members.is(key, "entry", 1)) {
      piece.entry = json.string();
    } else if (members.is(key, "runs", 2)) {
      const auto runs = read_numbers<4>(json, "runs");
      piece.runs = {runs[0], runs[1], runs[2], runs[3]};
    } else {
      json.skip(8);
    }
  });
  members.need(3);
  return piece;
}

[[nodiscard]] inline checkpoint_tensor read_checkpoint_tensor(json_reader& json) {
  checkpoint_tensor tensor;
  manifest_members members(json);
  json.object([&](const std::string& key) {
    if (members.is(key, "name", 0)) {
      tensor.name = json.string();
    } else if (members.is(key, "type", 1)) {
      const std::string name = json.string();
      const std::optional<safetensors_type> type = safetensors_type_of(name);
      if (!type) json.refuse("no type is called " + json_quoted(name));
      tensor.type = *type;
    } else if (members.is(key, "shape", 2)) {
      json.array([&] {
        if (tensor.shape.size() == max_checkpoint_dimensions) json.refuse("too many dimensions");
        tensor.shape.push_back(json.number());
      });
    } else if (members.is(key, "pieces", 3)) {
      json.array([&] {
        if (tensor.pieces.size() == max_checkpoint_pieces) json.refuse("too many pieces of a tensor");
        tensor.pieces.push_back(read_checkpoint_piece(json));
      });
    } else {
      json.skip(8);
    }
  });
  members.need(4);
  return tensor;
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY checkpoint_manifest read_manifest(std::string_view text, const std::string& what) {
  constexpr std::size_t tail = detail::manifest_key.size() + 8 + detail::manifest_tail.size();
  if (text.size() > max_manifest_bytes) {
    throw format_error(what + ": " + std::to_string(text.size()) + " bytes, but a manifest has at most " +
                       std::to_string(max_manifest_bytes));
  }
  if (text.size() < tail || !text.ends_with(detail::manifest_tail) ||
      text.substr(text.size() - tail, detail::manifest_key.size()) != detail::manifest_key)
    throw format_error(what + ": it does not end like a manifest: it was truncated, or is something else");
  const std::string_view body = text.substr(0, text.size() - tail);
  const std::optional<std::uint32_t> told =
      detail::read_hex(text.substr(body.size() + detail::manifest_key.size(), 8));
  if (!told || *told != detail::crc32c_of(body))
    throw format_error(what + ": its checksum is wrong: it is damaged");
  detail::json_reader json(text, 0, what);
  checkpoint_manifest manifest;
  detail::manifest_members members(json);
  json.object([&](const std::string& key) {
    if (members.is(key, "format", 0)) {
      if (const std::string format = json.string(); format != detail::manifest_format)
        json.refuse("its format is " + detail::json_quoted(format) + ", which this version does not know");
    } else if (members.is(key, "generation", 1)) {
      manifest.generation = json.number();
    } else if (members.is(key, "step", 2)) {
      manifest.step = json.number();
    } else if (members.is(key, "world", 3)) {
      manifest.world = detail::read_number32(json);
    } else if (members.is(key, "chunk_bytes", 4)) {
      manifest.chunk_bytes = json.number();
    } else if (members.is(key, "files", 5)) {
      json.array([&] { manifest.files.push_back(detail::read_checkpoint_file(json)); });
    } else if (members.is(key, "tensors", 6)) {
      json.array([&] { manifest.tensors.push_back(detail::read_checkpoint_tensor(json)); });
    } else if (members.is(key, "crc32c", 7)) {
      static_cast<void>(json.string());
    } else if (members.is(key, "stored", 8)) {
      json.array([&] { manifest.stored.push_back(detail::read_stored_chunks(json)); });
    } else {
      json.skip(8);
    }
  });
  json.expect_end();
  members.need(8);
  try {
    check_manifest(manifest, what);
  } catch (const argument_error& error) {
    throw format_error(error.what());
  }
  return manifest;
}

}  // namespace v0
}  // namespace llmmem
