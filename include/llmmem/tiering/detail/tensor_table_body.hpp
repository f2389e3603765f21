/// @file
/// How a `tensor_table` is encoded, read and compared. Private to tiering/.
#pragma once

#include <llmmem/hash/crc32c.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/space/folder.hpp>
#include <llmmem/tiering/chunk_index.hpp>
#include <llmmem/tiering/tensor_table.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::uint64_t tensor_table_mark = 0x6C62'7474'6D6C'6C6D;
inline constexpr std::uint64_t tensor_table_version = 1;
inline constexpr std::size_t tensor_table_header = 48;
inline constexpr std::size_t tensor_table_part = 21;

/// Reads numbers from untrusted bytes.
class table_reader {
 public:
  explicit table_reader(std::span<const std::byte> bytes) noexcept : left_(bytes) {}

  [[nodiscard]] std::uint64_t number(std::size_t count) noexcept {
    if (count > left_.size()) {
      ended_ = true;
      return 0;
    }
    const std::uint64_t value = get_number(left_.data(), count);
    left_ = left_.subspan(count);
    return value;
  }
  [[nodiscard]] std::string text(std::size_t count) {
    if (count > left_.size()) {
      ended_ = true;
      return {};
    }
    std::string made(count, '\0');
    for (std::size_t i = 0; i < count; ++i)
      made[i] = static_cast<char>(std::to_integer<unsigned char>(left_[i]));
    left_ = left_.subspan(count);
    return made;
  }
  [[nodiscard]] std::size_t left() const noexcept { return left_.size(); }
  [[nodiscard]] bool ended() const noexcept { return ended_; }

 private:
  std::span<const std::byte> left_;
  bool ended_ = false;
};

inline void append_number(std::vector<std::byte>& to, std::uint64_t value, std::size_t count) {
  to.resize(to.size() + count);
  put_number(to.data() + (to.size() - count), value, count);
}

/// Encodes a header of 48 bytes (CRC-32C of all bytes after it, mark, version, the file's id, number of
/// tensors), then the name and the parts of each tensor. Little-endian.
[[nodiscard]] inline std::vector<std::byte> encoded(const tensor_table& table) {
  std::vector<std::byte> made(4);
  append_number(made, tensor_table_mark, 8);
  append_number(made, tensor_table_version, 4);
  append_number(made, table.file_id.low, 8);
  append_number(made, table.file_id.high, 8);
  append_number(made, table.tensors(), 4);
  made.resize(tensor_table_header);
  for (std::uint32_t i = 0; i < table.tensors(); ++i) {
    append_number(made, table.names[i].size(), 4);
    for (const char each : table.names[i])
      made.push_back(static_cast<std::byte>(each));
    append_number(made, table.first_part[i + 1] - table.first_part[i], 4);
    for (std::uint32_t part = table.first_part[i]; part < table.first_part[i + 1]; ++part) {
      append_number(made, to_index(table.parts[part].chunk), 4);
      append_number(made, table.parts[part].offset, 8);
      append_number(made, table.parts[part].bytes, 8);
      append_number(made, table.filled[part], 1);
    }
  }
  put_number(made.data(), crc32c(0, std::span(made).subspan(4)), 4);
  return made;
}

/// Returns false if the bytes are not a table. @pre the header was checked.
[[nodiscard]] inline bool decode(std::span<const std::byte> bytes, tensor_table& into) {
  into = {};
  into.file_id = {.low = get_number(bytes.data() + 16, 8), .high = get_number(bytes.data() + 24, 8)};
  const std::uint64_t tensors = get_number(bytes.data() + 32, 4);
  table_reader reader(bytes.subspan(tensor_table_header));
  into.first_part.push_back(0);
  for (std::uint64_t i = 0; i < tensors && !reader.ended(); ++i) {
    into.names.push_back(reader.text(static_cast<std::size_t>(reader.number(4))));
    const std::uint64_t parts = reader.number(4);
    if (parts == 0 || parts > reader.left() / tensor_table_part) return false;
    std::uint64_t begin = 0;
    for (std::uint64_t k = 0; k < parts; ++k) {
      tensor_part one;
      one.chunk = chunk_id{static_cast<std::uint32_t>(reader.number(4))};
      one.offset = reader.number(8);
      one.begin = begin;
      one.bytes = reader.number(8);
      const std::uint64_t filled = reader.number(1);
      if (one.bytes == 0 || one.bytes > max_bytes - begin || filled > 1) return false;
      begin += one.bytes;
      into.parts.push_back(one);
      into.filled.push_back(static_cast<std::uint8_t>(filled));
    }
    into.first_part.push_back(static_cast<std::uint32_t>(into.parts.size()));
  }
  return !reader.ended() && reader.left() == 0;
}

[[nodiscard]] inline std::string in_quotes(const std::string& name) {
  return "\"" + name + "\"";
}

}  // namespace detail

inline tensor_table tensor_table::of(const chunk_key& file_id, const tensor_names& names,
                                     const chunk_mapping& mapping) {
  tensor_table made;
  made.file_id = file_id;
  for (std::uint32_t i = 0; i < mapping.tensors(); ++i) {
    made.names.push_back(names[tensor_id{i}]);
    made.first_part.push_back(mapping.first_part(tensor_id{i}));
  }
  made.parts.assign(mapping.parts().begin(), mapping.parts().end());
  made.first_part.push_back(static_cast<std::uint32_t>(made.parts.size()));
  made.filled.assign(made.parts.size(), 0);
  return made;
}

inline std::string first_difference(const tensor_table& kept, const tensor_table& now) {
  using detail::in_quotes;
  const std::uint32_t both = kept.tensors() < now.tensors() ? kept.tensors() : now.tensors();
  for (std::uint32_t i = 0; i < both; ++i) {
    const std::string which = "tensor " + std::to_string(i);
    if (kept.names[i] != now.names[i])
      return which + " is " + in_quotes(now.names[i]) + ", kept was " + in_quotes(kept.names[i]);
    const std::string called = which + ", " + in_quotes(now.names[i]) + ", ";
    if (kept.bytes(i) != now.bytes(i)) {
      return called + "has " + std::to_string(now.bytes(i)) + " bytes, kept were " +
             std::to_string(kept.bytes(i));
    }
    const std::uint32_t had = kept.first_part[i + 1] - kept.first_part[i];
    const std::uint32_t has = now.first_part[i + 1] - now.first_part[i];
    if (had != has) {
      return called + "is in " + std::to_string(has) + " parts, kept was in " + std::to_string(had) +
             ": the mapping's options differ";
    }
    for (std::uint32_t part = 0; part < has; ++part) {
      const tensor_part& was = kept.parts[kept.first_part[i] + part];
      const tensor_part& is = now.parts[now.first_part[i] + part];
      if (was == is) continue;
      const auto place = [](const tensor_part& at) {
        return "chunk " + std::to_string(to_index(at.chunk)) + " from byte " + std::to_string(at.offset) +
               " on";
      };
      return called + "is in " + place(is) + ", kept in " + place(was) + ": the mapping's options differ";
    }
  }
  if (kept.tensors() == now.tensors()) return {};
  const bool more = now.tensors() > kept.tensors();
  return std::to_string(now.tensors()) + " tensors, kept were " + std::to_string(kept.tensors()) + ": " +
         in_quotes(more ? now.names[both] : kept.names[both]) + (more ? " is new" : " is missing");
}

inline tiering::table_state read_tensor_table(const std::string& path, tensor_table& into) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0 && errno == ENOENT) return tiering::table_state::absent;
  const io_file file(path, {.mode = open_mode::read, .direct = direct_io::never});
  std::vector<std::byte> bytes(static_cast<std::size_t>(file.size().value()));
  if (detail::read_whole(file, bytes, 0).value() != bytes.size()) return tiering::table_state::damaged;
  const std::string what = path + ": cannot be taken as a table of tensors: ";
  if (bytes.size() >= 12 && detail::get_number(bytes.data() + 4, 8) != detail::tensor_table_mark)
    throw io_error(what + "it is another kind of file; move it away, or take another name for the tensors");
  if (bytes.size() < detail::tensor_table_header ||
      detail::get_number(bytes.data(), 4) != crc32c(0, std::span(bytes).subspan(4))) {
    return tiering::table_state::damaged;
  }
  if (const std::uint64_t version = detail::get_number(bytes.data() + 12, 4);
      version != detail::tensor_table_version) {
    throw io_error(what + "it is of version " + std::to_string(version) + ", this is version " +
                   std::to_string(detail::tensor_table_version) + "; remove it to start empty");
  }
  return detail::decode(bytes, into) ? tiering::table_state::read : tiering::table_state::damaged;
}

inline result<void> write_tensor_table(const std::string& path, const tensor_table& table) {
  const std::vector<std::byte> bytes = detail::encoded(table);
  const std::string beside = path + ".new";
  const auto failed = [&](error_code code, int error) {
    return failure{code, static_cast<std::uint32_t>(error), bytes.size(), 0, path.c_str()};
  };
  // A crash may have left this file, or it may be a link to another program's file: this function writes to
  // neither.
  ::unlink(beside.c_str());
  const int made = detail::open_again(beside.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made < 0) return failed(errc::not_opened, errno);
  result<void> done = detail::write_whole(made, bytes, 0, path.c_str());
  if (done && ::fdatasync(made) != 0) done = failed(errc::sync_failed, errno);
  ::close(made);
  if (done) return replace_file(beside, path);
  ::unlink(beside.c_str());
  return done;
}

}  // namespace v0
}  // namespace llmmem
