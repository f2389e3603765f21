/// @file
/// The journal of `chunk_index`: its records, and how it is read, grown and rewritten.
#pragma once

#include <llmmem/detail/write_signals.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/folder.hpp>
#include <llmmem/tiering/chunk_index.hpp>

#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::uint64_t chunk_index_version = 2;

inline void put_number(std::byte* to, std::uint64_t value, std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; ++i)
    to[i] = static_cast<std::byte>(value >> (8 * i));
}

[[nodiscard]] inline std::uint64_t get_number(const std::byte* from, std::size_t bytes) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i)
    value |= std::uint64_t{std::to_integer<std::uint8_t>(from[i])} << (8 * i);
  return value;
}

/// Returns the CRC of a record after its first four bytes. The header's CRC has no salt, because the header
/// contains the salt.
[[nodiscard]] inline std::uint32_t record_crc(std::span<const std::byte> bytes, std::uint64_t number,
                                              std::uint64_t salt) noexcept {
  if (number == 0) return crc32c(0, bytes);
  std::array<std::byte, 8> first{};
  put_number(first.data(), salt, 8);
  return crc32c(crc32c(0, first), bytes);
}

/// Draws unpredictable bytes; returns the system's error number if it cannot.
[[nodiscard]] inline int draw(std::span<std::byte> into) noexcept {
  while (::getrandom(into.data(), into.size(), 0) != static_cast<ssize_t>(into.size())) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

/// Reads until `into` is full; returns fewer bytes only at the end of the file.
[[nodiscard]] inline result<std::size_t> read_whole(const io_file& file, std::span<std::byte> into,
                                                    std::uint64_t offset) noexcept {
  std::size_t had = 0;
  while (had < into.size()) {
    const ssize_t got =
        ::pread(file.buffered(), into.data() + had, into.size() - had, static_cast<off_t>(offset + had));
    if (got == 0) break;
    if (got > 0) {
      had += static_cast<std::size_t>(got);
    } else if (errno != EINTR) {
      return failure{errc::read_failed, static_cast<std::uint32_t>(errno), into.size(), offset,
                     file.path().c_str()};
    }
  }
  return had;
}

/// Writes all bytes, or returns the failure.
[[nodiscard]] inline result<void> write_whole(int file, std::span<const std::byte> bytes,
                                              std::uint64_t offset, const char* where) noexcept {
  write_signals_held held;
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (put > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(put));
      offset += static_cast<std::uint64_t>(put);
    } else if (put == 0 || errno != EINTR) {
      const int error = put == 0 ? 0 : errno;
      held.raised(error);
      return failure{errc::write_failed, static_cast<std::uint32_t>(error), bytes.size(), offset, where};
    }
  }
  return {};
}

}  // namespace detail

inline chunk_index_options chunk_index::checked(chunk_index_options options) {
  if (options.max_chunks == 0) {
    throw argument_error(options.name + ": max_chunks is 0; it must be at least 1");
  }
  return options;
}

inline chunk_index::chunk_index(std::string path, chunk_index_options options)
    : options_(checked(std::move(options))),
      file_(std::move(path), {.mode = open_mode::create, .direct = direct_io::never}),
      folder_(file_.path()),
      beside_(folder_.name() + ".new"),
      names_(options_.max_chunks, options_.metadata),
      entries_(options_.max_chunks, entry{}, options_.metadata, "chunk_index: entries"),
      free_(options_.max_chunks, options_.metadata, "chunk_index: free entries") {
  for (std::uint32_t i = 0; i < options_.max_chunks; ++i)
    free_[i] = options_.max_chunks - 1 - i;
  recover();
}

/// A record consists of its CRC-32C, its kind, its number, the extent, and half of the salt; all
/// little-endian. The CRC covers the salt and the rest, so that a record of one salt never passes for one of
/// another. The header's own salt is 0.
inline chunk_index::record chunk_index::encoded(kind what, std::uint64_t number, const chunk_extent& extent,
                                                std::uint64_t salt) noexcept {
  record made{};
  std::byte* const to = made.data();
  detail::put_number(to + 4, static_cast<std::uint32_t>(what), 4);
  detail::put_number(to + 8, number, 8);
  detail::put_number(to + 16, extent.key.low, 8);
  detail::put_number(to + 24, extent.key.high, 8);
  detail::put_number(to + 32, extent.offset, 8);
  detail::put_number(to + 40, extent.bytes, 8);
  detail::put_number(to + 48, extent.stored, 8);
  detail::put_number(to + 56, extent.format, 8);
  detail::put_number(to + 64, extent.checksum, 4);
  detail::put_number(to + 68, salt, 4);
  detail::put_number(to, detail::record_crc(std::span(made).subspan(4), number, salt), 4);
  return made;
}

/// Returns the contents of a record, if it is intact and is where it was written.
inline auto chunk_index::decode(const record& from, std::uint64_t number, std::uint64_t salt,
                                chunk_extent& into) noexcept -> std::optional<kind> {
  const std::byte* const at = from.data();
  if (detail::get_number(at + 68, 4) != (salt & 0xFFFF'FFFF)) return std::nullopt;
  if (detail::get_number(at, 4) != detail::record_crc(std::span(from).subspan(4), number, salt))
    return std::nullopt;
  if (detail::get_number(at + 8, 8) != number) return std::nullopt;
  const auto what = static_cast<kind>(detail::get_number(at + 4, 4));
  const bool is_change = what == kind::kept || what == kind::gone;
  const bool is_known = number == 0 ? what == kind::header : number == 1 ? what == kind::durable : is_change;
  if (!is_known) return std::nullopt;
  into.key = {.low = detail::get_number(at + 16, 8), .high = detail::get_number(at + 24, 8)};
  into.offset = detail::get_number(at + 32, 8);
  into.bytes = detail::get_number(at + 40, 8);
  into.stored = detail::get_number(at + 48, 8);
  into.format = detail::get_number(at + 56, 8);
  into.checksum = static_cast<std::uint32_t>(detail::get_number(at + 64, 4));
  return what;
}

/// Refuses a file that the index must not read or replace. Returns whether the header, which has the salt,
/// was readable.
inline bool chunk_index::check_header() {
  record first{};
  const std::size_t had = detail::read_whole(file_, first, 0).value();
  const std::string what = file_.path() + ": cannot be taken as the index of a tier: ";
  const auto mark = static_cast<kind>(detail::get_number(first.data() + 4, 4));
  if (had >= 8 && mark != kind::header) {
    throw io_error(what + "it is another kind of file; take another path, or move it away");
  }
  chunk_extent header;
  // The first version's header has the same form.
  if (had < record_bytes || !decode(first, 0, 0, header)) return false;
  if (header.offset != detail::chunk_index_version) {
    throw io_error(what + "it is of version " + std::to_string(header.offset) + ", this is version " +
                   std::to_string(detail::chunk_index_version) + "; remove it to start empty");
  }
  if (header.key != options_.file_id) {
    throw io_error(what + "it belongs to another file; bring its own back, or remove it to start empty");
  }
  salt_ = header.bytes;
  return true;
}

/// Collects the last record of each key while a journal is read. Memory grows with the keys that the journal
/// names, and not with its length, which is untrusted.
class chunk_index::said_chunks {
 public:
  explicit said_chunks(metadata_source metadata) : metadata_(metadata) { fold(); }

  void add(const chunk_extent& extent, std::uint64_t record, bool is_gone) {
    if (const std::optional<block_id> before = latest_->find(extent.key)) {
      latest_->erase(*before);
      said_[to_index(*before) - 1].record = 0;
    }
    if (is_gone) return;
    if (said_.size() == most_) fold();
    note(said_.size(), extent.key);
    said_.push_back({extent, record});
  }
  /// Entries that have a record are present chunks; they are in the order of their records.
  [[nodiscard]] const std::vector<entry>& all() const noexcept { return said_; }

 private:
  void note(std::size_t at, const chunk_key& key) {
    const block_id id{static_cast<std::uint32_t>(at + 1)};  // an index has no block 0
    latest_->stage(key, id);
    latest_->insert(id, 1);
  }
  /// Removes entries that a later record has replaced.
  void fold() {
    std::erase_if(said_, [](const entry& each) { return each.record == 0; });
    most_ = 2 * said_.size() + 4096;
    latest_.emplace(most_, metadata_);
    for (std::size_t i = 0; i < said_.size(); ++i)
      note(i, said_[i].extent.key);
  }

  metadata_source metadata_;
  std::size_t most_ = 0;
  std::vector<entry> said_{};
  std::optional<prefix_index> latest_{};
};

/// Returns the first record from `number` on that has any bytes on the device; `end` if none has. Records
/// before it were never written: an extended file may have gigabytes of holes.
inline std::uint64_t chunk_index::next_written(std::uint64_t number, std::uint64_t end) const noexcept {
  const ::off_t at = ::lseek(file_.buffered(), static_cast<::off_t>(number * record_bytes), SEEK_DATA);
  if (at < 0) return errno == ENXIO ? end : number;  // some file systems do not report holes
  const std::uint64_t next = static_cast<std::uint64_t>(at) / record_bytes;
  return next < number ? number : next < end ? next : end;
}

inline void chunk_index::recover() {
  const std::uint64_t size = file_.size().value();
  const bool has_header = size != 0 && check_header();
  records_ = size / record_bytes;
  std::uint64_t good_end = 0;  // number after the last readable record
  std::uint64_t doubt = 0;     // records before this number are not trusted
  std::uint64_t unread = 0;    // records since the last good one
  said_chunks said(options_.metadata);
  std::vector<std::byte> part(record_bytes * 1024);
  // Without the header, a record of this journal cannot be distinguished from one of another.
  for (std::uint64_t number = 0; has_header && number < records_;) {
    const std::uint64_t next = next_written(number, records_);
    unread += next - number;
    number = next;
    if (number == records_) break;
    const std::size_t had = detail::read_whole(file_, part, number * record_bytes).value() / record_bytes;
    if (had == 0) break;
    for (std::size_t i = 0; i < had; ++i, ++number) {
      record one;
      std::memcpy(one.data(), part.data() + i * record_bytes, record_bytes);
      chunk_extent extent;
      const std::optional<kind> what = decode(one, number, number == 0 ? 0 : salt_, extent);
      if (!what) {
        ++unread;
        continue;
      }
      if (unread != 0) {
        doubt = number;
        recovery_.damaged += unread;
        unread = 0;
      }
      good_end = number + 1;
      ++recovery_.records;
      if (*what == kind::durable) durable_ = extent.offset;
      if (number >= first_change) said.add(extent, number, *what == kind::gone);
    }
  }
  if (!has_header) {
    recovery_.damaged = records_;
    good_end = records_;
  }
  recovery_.torn = size - good_end * record_bytes;
  if (durable_ > good_end) {
    recovery_.lost = durable_ - good_end;
    doubt = records_;
  }
  // The journal may have more chunks than the present `max_chunks`.
  for (const entry& each : said.all()) {
    if (each.record == 0) continue;
    if (each.record < doubt) {
      ++recovery_.overtaken;
    } else if (live_ != entries_.size()) {
      set(each.extent, each.record);
    } else {
      ++recovery_.surplus;
    }
  }
  records_ = good_end;
  if (good_end < first_change || recovery_.damaged + recovery_.lost + recovery_.surplus != 0) {
    rewrite().value();
  } else if (recovery_.torn != 0) {
    file_.resize(good_end * record_bytes).value();
  }
}

/// @pre there is space for an entry, or the key has one.
inline void chunk_index::set(const chunk_extent& extent, std::uint64_t number) noexcept {
  if (const std::optional<block_id> known = names_.find(extent.key)) {
    entries_[to_index(*known) - 1] = {extent, number};
    return;
  }
  const std::uint32_t slot = free_[entries_.size() - ++live_];
  entries_[slot] = {extent, number};
  const block_id id{slot + 1};
  names_.stage(extent.key, id);
  names_.insert(id, 1);
}

inline void chunk_index::unset(block_id id) noexcept {
  names_.erase(id);
  const std::uint32_t slot = to_index(id) - 1;
  entries_[slot].record = 0;
  free_[entries_.size() - live_--] = slot;
}

inline result<void> chunk_index::keep(const chunk_extent& extent) {
  if (live_ == entries_.size() && !names_.find(extent.key)) {
    return failure{errc::table_full, static_cast<std::uint32_t>(full_table::keyed_chunks), 1, 0,
                   file_.path().c_str()};
  }
  if (const result<void> written = append(kind::kept, extent); !written) return written;
  set(extent, records_ - 1);
  rewrite_when_due();
  return {};
}

inline result<void> chunk_index::drop(const chunk_key& key) {
  const std::optional<block_id> known = names_.find(key);
  if (!known) return {};
  if (const result<void> written = append(kind::gone, {.key = key}); !written) return written;
  unset(*known);
  rewrite_when_due();
  return {};
}

inline result<void> chunk_index::append(kind what, const chunk_extent& extent) {
  const record made = encoded(what, records_, extent, salt_);
  const result<void> written =
      detail::write_whole(file_.buffered(), made, records_ * record_bytes, file_.path().c_str());
  if (written) ++records_;
  return written;
}

inline result<void> chunk_index::sync() {
  // After a failed sync of the folder, a later success would prove nothing about the earlier rename, so the
  // journal is renamed again.
  if (is_name_unsure_) return rewrite();
  // The device may have any of the records since the last success, so the index relies on none of them.
  if (!file_.sync()) return rewrite();
  note_durable();
  return is_name_durable_ ? result<void>{} : sync_name();
}

/// Writes in place, and becomes durable with the next sync. Its number was true before it was written.
inline void chunk_index::note_durable() noexcept {
  if (durable_ == records_) return;
  const record made = encoded(kind::durable, 1, {.offset = records_}, salt_);
  // The next sync tries again; until then the previous record is valid, or unreadable.
  if (detail::write_whole(file_.buffered(), made, record_bytes, file_.path().c_str())) durable_ = records_;
}

inline result<void> chunk_index::sync_name() noexcept {
  const int error = folder_.sync();
  is_name_durable_ = error == 0;
  is_name_unsure_ = error != 0;
  return error == 0 ? result<void>{} : result<void>(failed(errc::sync_failed, error, 0, 0));
}

/// Rewrites the journal if it is due. If there is no space for a new one, the journal grows further, and a
/// later call tries again.
inline void chunk_index::rewrite_when_due() {
  if (records_ <= 2 * live_ + options_.slack || records_ < next_rewrite_) return;
  if (!rewrite()) next_rewrite_ = records_ + options_.slack / 4 + 1;
}

/// Writes a new journal from the map, next to the old one. Once durable, the new one takes the old one's
/// name.
inline result<void> chunk_index::rewrite() {
  const int folder = folder_.descriptor();
  // A crash may have left this file, or it may be a link to another program's file: the index writes to
  // neither.
  ::unlinkat(folder, beside_.c_str(), 0);
  const int made =
      ::openat(folder, beside_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, static_cast<mode_t>(0600));
  if (made < 0) return failed(errc::not_opened, errno, 0, 0);
  std::array<std::byte, 8> drawn{};
  const int error = detail::draw(drawn);
  result<void> done = error == 0 ? result<void>{} : result<void>(failed(errc::write_failed, error, 0, 0));
  const std::uint64_t salt = detail::get_number(drawn.data(), drawn.size());
  if (done) done = write_anew(made, salt);
  if (done) {
    if (const int lost = detail::sync_data(made); lost != 0) done = failed(errc::sync_failed, lost, 0, 0);
  }
  if (done && ::renameat(folder, beside_.c_str(), folder, folder_.name().c_str()) != 0)
    done = failed(errc::write_failed, errno, 0, 0);
  if (!done) {
    ::unlinkat(folder, beside_.c_str(), 0);
    ::close(made);
    return done;
  }
  file_.replace(made);
  salt_ = salt;
  records_ = durable_ = live_ + first_change;
  next_rewrite_ = 0;
  return sync_name();
}

/// Writes the header, the number of records, and one record of each chunk.
inline result<void> chunk_index::write_anew(int file, std::uint64_t salt) {
  // On the stack, because an open index allocates nothing.
  std::array<std::byte, record_bytes * 56> part{};
  std::size_t filled = 0;
  std::uint64_t number = 0;
  std::uint64_t written = 0;
  result<void> done;
  const auto flush = [&] {
    if (done) done = detail::write_whole(file, std::span(part).first(filled), written, file_.path().c_str());
    written += filled;
    filled = 0;
  };
  const auto add = [&](kind what, const chunk_extent& extent) {
    const record made = encoded(what, number, extent, number == 0 ? 0 : salt);
    ++number;
    std::memcpy(part.data() + filled, made.data(), record_bytes);
    filled += record_bytes;
    if (filled == part.size()) flush();
  };
  add(kind::header, {.key = options_.file_id, .offset = detail::chunk_index_version, .bytes = salt});
  add(kind::durable, {.offset = live_ + first_change});
  for_each([&](const chunk_extent& extent) { add(kind::kept, extent); });
  flush();
  return done;
}

}  // namespace v0
}  // namespace llmmem
