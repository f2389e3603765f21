/// @file
/// `chunk_index`: which chunks rest where in the file of a tier, kept in a journal beside it.
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

/// What was found in a journal when it was opened.
struct index_recovery {
  std::uint64_t records = 0;    ///< read well
  std::uint64_t damaged = 0;    ///< not read, with others behind them that were
  std::uint64_t torn = 0;       ///< bytes at the end that are no whole record: what a crash cut off
  std::uint64_t lost = 0;       ///< records at the end that were durable once: cut off, or damaged since
  std::uint64_t overtaken = 0;  ///< chunks given up: what a damaged record behind them said is not known
  std::uint64_t surplus = 0;    ///< chunks given up because there were more than `max_chunks`
};

/// How a chunk index is set up.
struct chunk_index_options {
  chunk_key file_id{};              ///< of the file that the index is of; another one's is refused
  std::uint32_t max_chunks = 4096;  ///< kept at once
  std::uint32_t slack = 4096;       ///< records that may be out of date before the journal is written anew
  std::string name = "chunk_index";
  metadata_source metadata{};
};

/// A map from keys to extents that outlives the process: every change is one record of 72 bytes at the end of
/// a journal.
///
/// - **A record is there or not.** Each has a CRC-32C, its number, and the journal's salt, drawn anew when it
///   is written anew, under that CRC: what a file system gives back of an older journal is no record. What a
///   crash cut off at the end is dropped when the journal is next opened: the map is then as it was some
///   changes ago, but not before the last `sync`. A process that is killed loses no record that `keep` or
///   `drop` returned for.
/// - **Damage is not trusted around.** A record that cannot be read may have been of any chunk: with good
///   ones behind it, all that was recorded before and not again since is given up, and `recovery()` says how
///   much. A record near the beginning says how many were durable at the last `sync`; with fewer to be read,
///   the end was not cut off by a crash, and everything is given up.
/// - **Bounded.** With more than `slack` records out of date the journal is written anew, beside the old one,
///   and takes its name: at most `2 x max_chunks + slack + 2` records.
///
/// Opening takes memory by the chunks that the journal names, however long its file is.
///
/// What the extents hold is not its business: whoever reads them holds them to their checksum.
///
/// @par Complexity      `find`, `keep`, `drop` O(1), and one write of 72 bytes to the page cache for the
///                      latter two; now and then O(chunks) to write the journal anew.
/// @par Thread safety   one thread at a time. One process: whoever has the file locks it.
/// @par Errors          the constructor throws `io_error` for a file that cannot be had, is no chunk index or
///                      one of another file, and `argument_error` for `max_chunks` of 0. Everything else is a
///                      value: `errc::table_full`, `errc::write_failed` and `errc::sync_failed`. After a
///                      refusal the map is as it was.
class chunk_index {
 public:
  chunk_index(std::string path, chunk_index_options options);
  chunk_index(const chunk_index&) = delete;
  chunk_index& operator=(const chunk_index&) = delete;

  [[nodiscard]] const chunk_extent* find(const chunk_key& key) const noexcept {
    const std::optional<block_id> found = names_.find(key);
    return found ? &entries_[to_index(*found) - 1].extent : nullptr;
  }

  /// From now on the chunk rests there, and nowhere else.
  result<void> keep(const chunk_extent& extent);
  /// From now on it rests nowhere. No change for a key that is not there.
  result<void> drop(const chunk_key& key);
  /// Returns once the device has all changes.
  result<void> sync();

  /// Calls `f(extent)` for each chunk, in no order. `f` changes nothing here.
  template <class F>
  void for_each(F f) const {
    for (std::uint64_t slot = 0; slot < entries_.size(); ++slot) {
      if (entries_[slot].record != 0) f(entries_[slot].extent);
    }
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return live_; }
  /// Chunks that it can keep at once.
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
  static constexpr std::uint64_t first_change = 2;  // behind the header and what was durable

  struct entry {
    chunk_extent extent;
    std::uint64_t record = 0;  // number of the record that says so; 0: no chunk
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
  std::string beside_;  // what the file that replaces it is called first, in the folder
  prefix_index names_;  // key -> entry + 1
  detail::fixed_array<entry> entries_;
  detail::fixed_array<std::uint32_t> free_;
  std::uint64_t live_ = 0;
  std::uint64_t records_ = 0;  // in the journal, its header among them
  std::uint64_t durable_ = 0;  // of these, as the journal says
  std::uint64_t salt_ = 0;
  bool is_name_durable_ = false;
  bool is_name_unsure_ = false;  // the folder could not be synced
  std::uint64_t next_rewrite_ = 0;
  index_recovery recovery_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/chunk_index_body.hpp>
