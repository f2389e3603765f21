/// @file
/// The first page of a persistent file space, and the text of its recovery report.
#pragma once

#include <llmmem/tiering/persistent_file_space.hpp>

namespace llmmem {
inline namespace v0 {

/// A header consists of its CRC-32C, a mark, a version, the layout and the file's id; little-endian.
template <io_engine Engine>
void persistent_file_space<Engine>::open_header() {
  const io_file& file = this->file();
  const std::string what = file.path() + ": cannot be taken as a tier: ";
  const std::uint64_t size = file.size().value();
  if (size == 0) {
    recovery_.is_new = true;
    return begin_anew();
  }
  header found{};
  const std::size_t had = detail::read_whole(file, found, 0).value();
  const std::byte* const at = found.data();
  if (had < 12 || detail::get_number(at + 4, 8) != mark) {
    throw io_error(what + "it is another kind of file; take another path, or move it away");
  }
  if (had < header_bytes || detail::get_number(at, 4) != crc32c(0, std::span(found).subspan(4))) {
    recovery_.header_damaged = true;
    return begin_anew();
  }
  if (detail::get_number(at + 12, 4) != version) {
    throw io_error(what + "it is of version " + std::to_string(detail::get_number(at + 12, 4)) +
                   ", this is version " + std::to_string(version) + "; remove it to start empty");
  }
  const std::uint64_t layout = detail::get_number(at + 16, 8);
  if (layout != options_.layout) {
    if (options_.on_other_layout == tiering::other_layout::refuse) {
      throw io_error(what + "its chunks are of layout " + std::to_string(layout) + ", expected is " +
                     std::to_string(options_.layout) +
                     "; take another path, or other_layout::start_over to drop them");
    }
    recovery_.started_over = true;
    return begin_anew();
  }
  file_id_ = {.low = detail::get_number(at + 24, 8), .high = detail::get_number(at + 32, 8)};
  struct stat index{};
  recovery_.index_missing = ::stat(index_path().c_str(), &index) != 0 || index.st_size == 0;
}

/// Removes the index first, because a new header with an old index would be a file with another file's index.
template <io_engine Engine>
void persistent_file_space<Engine>::begin_anew() {
  const std::string index = index_path();
  if (::unlink(index.c_str()) != 0 && errno != ENOENT) {
    throw io_error(index + ": cannot be removed to start empty: " + std::generic_category().message(errno) +
                   " (errno " + std::to_string(errno) + ")");
  }
  std::array<std::byte, 16> id{};
  if (const int error = detail::draw(id); error != 0) {
    throw system_error("getrandom: errno " + std::to_string(error));
  }
  file_id_ = {.low = detail::get_number(id.data(), 8), .high = detail::get_number(id.data() + 8, 8)};
  write_header();
}

template <io_engine Engine>
void persistent_file_space<Engine>::write_header() {
  header made{};
  std::byte* const to = made.data();
  detail::put_number(to + 4, mark, 8);
  detail::put_number(to + 12, version, 4);
  detail::put_number(to + 16, options_.layout, 8);
  detail::put_number(to + 24, file_id_.low, 8);
  detail::put_number(to + 32, file_id_.high, 8);
  detail::put_number(to, crc32c(0, std::span(made).subspan(4)), 4);
  detail::write_whole(this->file().buffered(), made, 0, this->file().path().c_str()).value();
  this->file().sync().value();
  sync_folder_of(this->file().path()).value();
}

/// Takes the space of the budget on the device. If there is too little, the file's contents stay untouched,
/// and the space taken after them is returned.
template <io_engine Engine>
void persistent_file_space<Engine>::take_whole() {
  io_file& file = this->file();
  const std::uint64_t size = file.size().value();
  whole_ = base::take(options_.space.budget, range_alignment).value();
  const std::uint64_t begin = base::offset_of(whole_.data);
  if (const result<void> had = file.reserve(begin, whole_.bytes); !had) {
    static_cast<void>(file.resize(size));
    had.value();
  }
  file.resize(begin + whole_.bytes).value();
}

inline std::string tier_recovery::message() const {
  std::string text = std::to_string(kept) + " chunks were restored";
  if (is_new) text += "; the file is new";
  if (started_over) text += "; it held another layout, which was given up";
  if (header_damaged) text += "; its first page was damaged, all chunks were given up";
  if (index_missing) text += "; its index was missing, all chunks were given up";
  const auto say = [&](std::uint64_t count, const char* what) {
    if (count != 0) text += "; " + std::to_string(count) + what;
  };
  if (index.lost != 0) {
    text += "; the end of the index was damaged: " + std::to_string(index.lost) +
            " records that had been durable could not be read, " + std::to_string(index.torn) +
            " bytes there are not records";
  } else {
    say(index.torn, " bytes at the end of the index were an incomplete record");
  }
  say(index.damaged, " records of the index were damaged");
  say(index.overtaken, " chunks were dropped, because a damaged record may have been theirs");
  say(index.surplus, " chunks were dropped: more than max_chunks of the space");
  say(other_form, " chunks were dropped: written with another codec, or too large for this buffer");
  say(misplaced, " chunks were dropped: past the budget, or overlapping others");
  say(unplaced, " chunks were dropped: more than max_chunks of the buffer");
  say(damaged, " chunks were dropped: their bytes were damaged");
  return text;
}

}  // namespace v0
}  // namespace llmmem
