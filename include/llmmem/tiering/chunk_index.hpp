/// @file
/// `chunk_index`: which chunks are stored where in the file of a tier, kept in a journal next to it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/prefix_index.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/space/folder.hpp>
#include <llmmem/tiering/chunk_key.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The contents of a journal when it was opened.
struct index_recovery {
  std::uint64_t records = 0;  ///< valid
  std::uint64_t damaged = 0;  ///< unreadable, with valid ones after them
  std::uint64_t torn = 0;     ///< bytes of an incomplete record at the end, cut off by a crash
  std::uint64_t lost = 0;     ///< records at the end that were durable once, and are now cut off or damaged
  /// Chunks given up because a damaged record after theirs may have changed them.
  std::uint64_t overtaken = 0;
  std::uint64_t surplus = 0;  ///< chunks given up because there were more than `max_chunks`
};

/// How a chunk index is set up.
struct chunk_index_options {
  chunk_key file_id{};              ///< the id of the file that the index belongs to; others are refused
  std::uint32_t max_chunks = 4096;  ///< kept at once
  std::uint32_t slack = 4096;       ///< outdated records that the journal may have before it is rewritten
  std::string name = "chunk_index";
  metadata_source metadata{};
};

/// A map from keys to extents that outlives the process: every change is one record of 72 bytes at the end of
/// a journal.
///
/// - **A record is valid or absent.** Each has a number, and a CRC-32C that also covers the journal's salt,
///   which is drawn again at each rewrite. So bytes of an older journal that a file system returns do not
///   count as records. When the journal is next opened, an incomplete record at the end, cut off by a crash,
///   is dropped. The map may then lack changes after the last `sync`, and no earlier ones. A killed process
///   loses no record of a `keep` or `drop` that returned.
/// - **Damage voids earlier records.** An unreadable record may be of any chunk. If valid records follow it,
///   the index gives up every chunk whose last record is older, and `recovery()` reports how many. A record
///   near the beginning says how many records were durable at the last `sync`. If fewer are readable, no
///   crash cut off the end, and the index gives up everything.
/// - **Bounded.** With more than `slack` outdated records, the index writes a new journal next to the old one
///   and renames it over the old one. A journal has at most `2 x max_chunks + slack + 2` records.
///
/// Opening takes memory in proportion to the chunks that the journal names, regardless of the file's length.
///
/// The index does not verify the contents of extents: the reader of an extent verifies its checksum.
///
/// @par Complexity      `find`, `keep`, `drop` O(1), and one write of 72 bytes to the page cache for the
///                      latter two; occasionally O(chunks) to rewrite the journal.
/// @par Thread safety   one thread at a time. One process at a time, because the index locks its file.
/// @par Errors          the constructor throws `io_error` for a file that cannot be opened, is not a chunk
///                      index or is the index of another file, and `argument_error` for `max_chunks` of 0.
///                      All other errors are values: `errc::table_full`, `errc::write_failed` and
///                      `errc::sync_failed`. After a refusal the map is as it was.
class chunk_index {
 public:
  chunk_index(std::string path, chunk_index_options options);
  chunk_index(const chunk_index&) = delete;
  chunk_index& operator=(const chunk_index&) = delete;

  [[nodiscard]] const chunk_extent* find(const chunk_key& key) const noexcept {
    const std::optional<block_id> found = names_.find(key);
    return found ? &entries_[to_index(*found) - 1].extent : nullptr;
  }

  /// Records that the chunk is stored at `extent`, and nowhere else.
  result<void> keep(const chunk_extent& extent);
  /// Records that the chunk is stored nowhere. A key that is absent changes nothing.
  result<void> drop(const chunk_key& key);
  /// Returns when the device has all changes.
  result<void> sync();

  /// Calls `f(extent)` for each chunk, in no order. `f` does not change the index.
  template <class F>
  void for_each(F f) const {
    for (std::uint64_t slot = 0; slot < entries_.size(); ++slot) {
      if (entries_[slot].record != 0) f(entries_[slot].extent);
    }
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return live_; }
  /// Returns how many chunks the index can keep at once.
  [[nodiscard]] std::uint64_t capacity() const noexcept { return entries_.size(); }
  [[nodiscard]] const index_recovery& recovery() const noexcept { return recovery_; }
  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
  /// Bytes of the journal.
  [[nodiscard]] std::uint64_t journal_bytes() const noexcept { return records_ * record_bytes; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return names_.metadata_bytes() + entries_.bytes() + free_.bytes();
  }

 private:
  static constexpr std::size_t record_bytes = 72;
  using record = std::array<std::byte, record_bytes>;
  enum class kind : std::uint32_t { header = 0x696D'6C6C, kept = 1, gone = 2, durable = 3 };
  static constexpr std::uint64_t first_change = 2;  // after the header and the record of what was durable

  struct entry {
    chunk_extent extent;
    std::uint64_t record = 0;  // number of the record of this extent; 0: no chunk
  };
  [[nodiscard]] static record encoded(kind what, std::uint64_t number, const chunk_extent& extent,
                                      std::uint64_t salt) noexcept;
  [[nodiscard]] static std::optional<kind> decode(const record& from, std::uint64_t number,
                                                  std::uint64_t salt, chunk_extent& into) noexcept;
  class said_chunks;

  void recover();
  [[nodiscard]] std::uint64_t next_written(std::uint64_t number, std::uint64_t end) const noexcept;
  [[nodiscard]] bool check_header();
  void set(const chunk_extent& extent, std::uint64_t number) noexcept;
  void unset(block_id id) noexcept;
  result<void> append(kind what, const chunk_extent& extent);
  result<void> rewrite();
  result<void> write_anew(int file, std::uint64_t salt);
  void note_durable() noexcept;
  result<void> sync_name() noexcept;
  void rewrite_when_due();
  [[nodiscard]] failure failed(error_code code, int error, std::uint64_t bytes,
                               std::uint64_t offset) const noexcept {
    return {code, static_cast<std::uint32_t>(error), bytes, offset, file_.path().c_str()};
  }
  [[nodiscard]] static chunk_index_options checked(chunk_index_options options);

  chunk_index_options options_;
  io_file file_;
  open_folder folder_;
  std::string beside_;  // the temporary name, in the folder, of a journal that will replace this one
  prefix_index names_;  // key -> entry + 1
  detail::fixed_array<entry> entries_;
  detail::fixed_array<std::uint32_t> free_;
  std::uint64_t live_ = 0;
  std::uint64_t records_ = 0;  // in the journal, including its header
  std::uint64_t durable_ = 0;  // how many of these are durable, according to the journal
  std::uint64_t salt_ = 0;
  bool is_name_durable_ = false;
  bool is_name_unsure_ = false;  // the folder could not be synced
  std::uint64_t next_rewrite_ = 0;
  index_recovery recovery_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/chunk_index_body.hpp>
