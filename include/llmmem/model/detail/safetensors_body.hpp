/// @file
/// How headers of safetensors files are read, checked and written.
#pragma once

#include <llmmem/detail/json_reader.hpp>
#include <llmmem/model/safetensors.hpp>

#include <algorithm>
#include <tuple>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr unsigned safetensors_depth = 32;

/// Returns the bytes of a tensor; nothing if they pass 2^63 - 1, or fill no whole bytes.
[[nodiscard]] inline std::optional<std::uint64_t> safetensors_bytes(safetensors_type type,
                                                                    const std::vector<std::uint64_t>& shape) {
  std::uint64_t bits = bits_of(type);
  // A 0 anywhere means no bytes, but only if nothing before it overflows, as in the reference reader.
  for (const std::uint64_t each : shape) {
    if (each != 0 && bits > max_bytes / each) return std::nullopt;
    bits *= each;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

/// Reads the header's entry of one tensor.
inline safetensors_entry read_safetensors_entry(json_reader& json, std::string name) {
  safetensors_entry entry;
  bool has_type = false;
  bool has_shape = false;
  bool has_offsets = false;
  const auto first = [&](bool& seen, const char* key) {
    if (std::exchange(seen, true)) json.refuse("tensor \"" + name + "\" has " + key + " twice");
  };
  json.object([&](const std::string& key) {
    if (key == "dtype") {
      first(has_type, "dtype");
      const std::string called = json.string();
      const auto type = safetensors_type_of(called);
      if (!type) json.refuse("tensor \"" + name + "\" has the unknown dtype \"" + called + "\"");
      entry.type = *type;
    } else if (key == "shape") {
      first(has_shape, "shape");
      json.array([&] { entry.shape.push_back(json.number()); });
    } else if (key == "data_offsets") {
      first(has_offsets, "data_offsets");
      std::size_t count = 0;
      json.array([&] {
        const std::uint64_t offset = json.number();
        if (count < 2) (count == 0 ? entry.begin : entry.end) = offset;
        ++count;
      });
      if (count != 2) json.refuse("tensor \"" + name + "\" must have two data_offsets");
    } else {
      json.skip(safetensors_depth);
    }
  });
  if (!has_type || !has_shape || !has_offsets)
    json.refuse("tensor \"" + name + "\" lacks dtype, shape or data_offsets");
  entry.name = std::move(name);
  return entry;
}

/// Refuses keys that occur twice.
template <class Entries, class NameOf>
void refuse_twice(const Entries& entries, NameOf name_of_entry, const char* kind, const std::string& what) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const auto& each : entries)
    names.push_back(name_of_entry(each));
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end())
    throw format_error(what + ": " + kind + " \"" + std::string(*twice) + "\" occurs twice");
}

/// Sorts by the order of the file; tensors without bytes at the same place keep the order of the header.
inline void sort_by_offset(std::vector<safetensors_entry>& entries) {
  std::vector<std::size_t> order(entries.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    order[i] = i;
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
    const auto place = [&](std::size_t i) { return std::tuple(entries[i].begin, entries[i].end, i); };
    return place(a) < place(b);
  });
  std::vector<safetensors_entry> sorted;
  sorted.reserve(entries.size());
  for (const std::size_t each : order)
    sorted.push_back(std::move(entries[each]));
  entries = std::move(sorted);
}

/// Checks that sizes and offsets fit each other and the file.
inline void check_safetensors(const safetensors_header& header, const std::string& what) {
  std::uint64_t at = 0;
  for (const safetensors_entry& each : header.entries) {
    const auto refuse = [&](const std::string& why) {
      std::string text = what;
      text.append(": tensor \"").append(each.name).append("\" has ").append(why);
      throw format_error(text);
    };
    const auto wanted = safetensors_bytes(each.type, each.shape);
    if (!wanted) refuse("a shape whose bytes pass 2^63 - 1, or are not a whole number");
    std::string offsets =
        "data_offsets [" + std::to_string(each.begin) + ", " + std::to_string(each.end) + "], ";
    if (each.end < each.begin || each.end - each.begin != *wanted) {
      offsets += "its shape takes " + std::to_string(*wanted) + " bytes";
      refuse(offsets);
    }
    if (each.begin != at) {
      offsets += each.begin < at ? "which overlaps another tensor" : "after a gap";
      offsets += ": it must begin at " + std::to_string(at);
      refuse(offsets);
    }
    at = each.end;
  }
  if (at != header.data_bytes) {
    throw format_error(what + ": the tensors end at byte " + std::to_string(at) +
                       " of the data, the file at " + std::to_string(header.data_bytes));
  }
}

}  // namespace detail

inline std::uint64_t safetensors_header_bytes(std::span<const std::byte> begin, const std::string& what) {
  if (begin.size() < 8) {
    throw format_error(what + ": " + std::to_string(begin.size()) +
                       " bytes, too few for the 8 that hold the header's length");
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i)
    length |= static_cast<std::uint64_t>(begin[i]) << (8 * i);
  if (length == 0x206E'6F69'7372'6576) {  // "version "
    throw format_error(what +
                       ": it begins as a Git LFS pointer does, a short text in the place of the file; "
                       "fetch the file itself: git lfs pull");
  }
  if (length > max_safetensors_header) {
    throw format_error(what + ": a header of " + std::to_string(length) + " bytes, at most " +
                       std::to_string(max_safetensors_header) + " are allowed");
  }
  return 8 + length;
}

inline safetensors_header read_safetensors(std::span<const std::byte> begin, std::uint64_t file_bytes,
                                           const std::string& what) {
  safetensors_header header;
  header.data_begin = safetensors_header_bytes(begin, what);
  if (header.data_begin > file_bytes || header.data_begin > begin.size()) {
    throw format_error(what + ": its header takes " + std::to_string(header.data_begin) +
                       " bytes, there are " +
                       std::to_string(file_bytes < begin.size() ? file_bytes : begin.size()));
  }
  header.data_bytes = file_bytes - header.data_begin;
  const auto text = begin.subspan(8, static_cast<std::size_t>(header.data_begin - 8));
  detail::json_reader json(std::string_view(reinterpret_cast<const char*>(text.data()), text.size()), 8,
                           what);
  bool has_metadata = false;
  json.object([&](std::string key) {
    if (key != "__metadata__") {
      header.entries.push_back(detail::read_safetensors_entry(json, std::move(key)));
      return;
    }
    if (std::exchange(has_metadata, true)) json.refuse("\"__metadata__\" occurs twice");
    if (json.next() == 'n') return json.skip(1);  // null: no metadata, as in the reference reader
    json.object([&](std::string name) {
      std::string value = json.string();
      header.metadata.emplace_back(std::move(name), std::move(value));
    });
  });
  json.expect_end();
  detail::refuse_twice(
      header.entries, [](const safetensors_entry& each) -> std::string_view { return each.name; }, "tensor",
      what);
  detail::refuse_twice(
      header.metadata, [](const auto& each) -> std::string_view { return each.first; }, "metadata", what);
  detail::sort_by_offset(header.entries);
  detail::check_safetensors(header, what);
  return header;
}

inline safetensors_layout lay_out_safetensors(std::vector<safetensors_tensor> tensors,
                                              safetensors_metadata metadata, std::uint64_t data_alignment) {
  const std::string what = "safetensors";
  if (data_alignment == 0 || data_alignment % 8 != 0) {
    throw argument_error(what + ": a data alignment of " + std::to_string(data_alignment) +
                         "; it must be a multiple of 8");
  }
  std::ranges::sort(tensors, [](const safetensors_tensor& a, const safetensors_tensor& b) {
    return a.type != b.type ? a.type > b.type : a.name < b.name;
  });
  std::ranges::sort(metadata);
  safetensors_layout made;
  for (safetensors_tensor& each : tensors) {
    if (each.name == "__metadata__")
      throw argument_error(what +
                           ": a tensor called \"__metadata__\", which readers take for something else");
    if (!detail::is_utf8(each.name)) throw argument_error(what + ": a tensor's name that is not UTF-8");
    const auto bytes = detail::safetensors_bytes(each.type, each.shape);
    if (!bytes) {
      throw length_error(what + ": tensor \"" + each.name +
                         "\" has a shape whose bytes pass 2^63 - 1, or are not a whole number");
    }
    const std::uint64_t end =
        checked_add(made.header.data_bytes, *bytes, "safetensors: bytes of all tensors");
    made.header.entries.push_back(
        {std::move(each.name), each.type, std::move(each.shape), made.header.data_bytes, end});
    made.header.data_bytes = end;
  }
  made.header.metadata = std::move(metadata);
  try {
    detail::refuse_twice(
        made.header.entries, [](const safetensors_entry& each) -> std::string_view { return each.name; },
        "tensor", what);
    detail::refuse_twice(
        made.header.metadata, [](const auto& each) -> std::string_view { return each.first; }, "metadata",
        what);
  } catch (const format_error& twice) {
    throw argument_error(twice.what());
  }
  std::string json = "{";
  if (!made.header.metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : made.header.metadata) {
      if (!detail::is_utf8(key) || !detail::is_utf8(value))
        throw argument_error(what + ": metadata that is not UTF-8");
      if (json.back() != '{') json += ',';
      detail::append_json_string(json, key);
      json += ':';
      detail::append_json_string(json, value);
    }
    json += '}';
  }
  for (const safetensors_entry& each : made.header.entries) {
    if (json.size() > 1) json += ',';
    detail::append_json_string(json, each.name);
    json += R"(:{"dtype":")";
    json += name_of(each.type);
    json += R"(","shape":[)";
    for (std::size_t i = 0; i < each.shape.size(); ++i) {
      if (i != 0) json += ',';
      json += std::to_string(each.shape[i]);
    }
    json += "],\"data_offsets\":[" + std::to_string(each.begin) + "," + std::to_string(each.end) + "]}";
  }
  json += '}';
  const std::uint64_t units = (8 + json.size() + data_alignment - 1) / data_alignment;
  made.header.data_begin = units * data_alignment;
  if (made.header.data_begin - 8 > max_safetensors_header) {
    throw length_error(what + ": a header of " + std::to_string(made.header.data_begin - 8) +
                       " bytes, at most " + std::to_string(max_safetensors_header) +
                       " are allowed; put fewer tensors into a file");
  }
  json.resize(static_cast<std::size_t>(made.header.data_begin - 8), ' ');
  std::uint64_t length = json.size();
  for (int i = 0; i < 8; ++i, length >>= 8)
    made.head += static_cast<char>(static_cast<unsigned char>(length & 0xFFU));
  made.head += json;
  return made;
}

}  // namespace v0
}  // namespace llmmem
