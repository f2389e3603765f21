/// @file
/// `persistent_file_space`: a file space whose chunks survive a restart.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/folder.hpp>
#include <llmmem/tiering/chunk_index.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace tiering {

/// What to do with a file that holds chunks of another layout.
enum class other_layout : std::uint8_t {
  refuse,      ///< an error; the file stays as it is
  start_over,  ///< its contents are given up
};

}  // namespace tiering

using other_layout [[deprecated("its name is tiering::other_layout")]] = tiering::other_layout;

/// How a persistent file space is set up.
struct persistent_file_options {
  file_space_options space{};  ///< its budget is taken on the device at once
  /// Fingerprint of the meaning of the chunks' bytes: of model, element type and shapes
  /// (`kv_layout::fingerprint`).
  std::uint64_t layout = 0;
  tiering::other_layout on_other_layout = tiering::other_layout::refuse;
  /// Chunks with a key at once. Set it to at least the buffer's `max_chunks`: a buffer accepts more chunks,
  /// but the index does not keep those, and `persist` is refused.
  std::uint32_t max_chunks = 4096;
};

/// The outcome for the contents that an earlier process left.
struct tier_recovery {
  bool is_new = false;          ///< no file existed
  bool started_over = false;    ///< the file was of another layout, and starts again empty
  bool header_damaged = false;  ///< the header is unreadable; the file starts again empty
  bool index_missing = false;   ///< its index was absent, or empty; the file starts again empty
  index_recovery index{};
  std::uint64_t kept = 0;        ///< chunks restored
  std::uint64_t other_form = 0;  ///< chunks given up: another codec encoded them, or they are too large
  std::uint64_t misplaced = 0;   ///< chunks given up: past the budget, or overlapping others
  std::uint64_t unplaced = 0;    ///< chunks given up: more than the buffer's `max_chunks`
  std::uint64_t damaged = 0;     ///< chunks given up: their bytes differ from those written

  /// Returns all of it in one sentence.
  [[nodiscard]] std::string message() const;
};

/// A `file_space` for the last tier of a `tiered_buffer` that survives a restart: next to the file is an
/// index (`path` + ".index") of the chunks in it that have a key.
///
///     using kv_file = persistent_file_space<uring_io>;
///     kv_file disk("kv.tier", {.space = {.budget = 1 << 30}, .layout = fingerprint});
///     tiered_buffer<host_space, kv_file> buffer({}, {host, 1 << 28}, {disk, 1 << 30});
///     log(disk.recovery().message());
///     if (auto block = buffer.find(key)) ...  // written by an earlier process
///
/// - **Bounded.** The file is 64 KiB longer than the budget; `chunk_index` bounds the index.
/// - **Refused**: a file that another process has open as a tier, another kind of file, and one of another
///   layout.
/// - **Given up, and reported** (`recovery()`): chunks that the index cannot prove, and chunks that no longer
///   fit. Reads verify the checksum of the bytes.
/// - **After the process was killed**, the next one finds every chunk whose store had ended and been noted by
///   a call of the buffer (`progress`, `flush`), and no chunk that was being overwritten. A loss of power may
///   lose writes since the last `sync`; `tiered_buffer::persist` ends with one.
///
/// The space is one range, for one tier.
///
/// @par Thread safety   copies as `file_space`; the index, and everything else, one thread at a time.
/// @par Errors          the constructor throws `io_error` with the reason, and what `file_space` throws.
/// @tparam Engine  an `io_engine`.
template <io_engine Engine = posix_io>
class persistent_file_space : public file_space<Engine> {
 public:
  using base = file_space<Engine>;
  using range_type = typename base::range_type;
  /// A tiered buffer keeps an index of its chunks here.
  static constexpr bool persists_chunks = true;
  [[deprecated("its name is persists_chunks")]] static constexpr bool keeps_chunks = persists_chunks;

  template <class... Args>
  persistent_file_space(std::string path, persistent_file_options options, Args&&... engine)
      : base(std::move(path), options.space, std::forward<Args>(engine)...), options_(std::move(options)) {
    open_header();
    index_.emplace(index_path(), chunk_index_options{.file_id = file_id_,
                                                     .max_chunks = options_.max_chunks,
                                                     .name = this->file().path() + ": index",
                                                     .metadata = options_.space.queue.metadata});
    recovery_.index = index_->recovery();
    take_whole();
  }

  persistent_file_space(const persistent_file_space&) = delete;
  persistent_file_space& operator=(const persistent_file_space&) = delete;
  /// Unlocks the file for the next process at once, unless the engine never completed a request.
  ~persistent_file_space() {
    if (this->queue().stats().lost == 0) this->file().unlock_at_end();
  }

  /// Returns the beginning of the only range; its bytes are unchanged.
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const std::uint64_t left = is_given_ ? 0 : whole_.bytes;
    const char* const where = this->file().path().c_str();
    if (bytes == 0) return failure{.code = errc::zero_bytes, .where = where};
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
      return failure{.code = errc::bad_alignment, .wanted = alignment, .where = where};
    }
    if (const std::uint64_t begin = base::offset_of(whole_.data); begin % alignment != 0) {
      return failure{.code = errc::bad_granularity, .wanted = begin, .found = alignment, .where = where};
    }
    if (bytes > left) return failure{errc::out_of_bytes, 0, bytes, left, where};
    is_given_ = true;
    return range_type{whole_.data, bytes};
  }
  /// Keeps the contents.
  void deallocate(range_type) noexcept { is_given_ = false; }

  /// A number drawn when the file was created, by which files next to it show that they belong to it.
  [[nodiscard]] const chunk_key& file_id() const noexcept { return file_id_; }
  [[nodiscard]] chunk_index& index() noexcept { return *index_; }
  [[nodiscard]] const chunk_index& index() const noexcept { return *index_; }
  [[nodiscard]] const tier_recovery& recovery() const noexcept { return recovery_; }
  [[nodiscard]] tier_recovery& recovery() noexcept { return recovery_; }

  /// Returns when the device has the chunks' bytes, and then their index. After one failed sync of the bytes,
  /// every later call is refused, because the system may have dropped any of those bytes and reports this
  /// only once.
  result<void> sync() {
    const result<void> data = this->file().sync();
    return data ? index_->sync() : data;
  }

 private:
  static constexpr std::size_t header_bytes = 48;
  static constexpr std::uint64_t range_alignment =
      65536;  // the range's offset in the file, aligned for tiers of coarse granularity
  static constexpr std::uint64_t mark = 0x7265'6974'6D6C'6C6D;
  static constexpr std::uint64_t version = 1;
  using header = std::array<std::byte, header_bytes>;

  [[nodiscard]] std::string index_path() const { return this->file().path() + ".index"; }
  void open_header();
  void begin_anew();
  void write_header();
  void take_whole();

  persistent_file_options options_;
  chunk_key file_id_{};
  std::optional<chunk_index> index_;
  range_type whole_{};
  bool is_given_ = false;
  tier_recovery recovery_;
};

static_assert(memory_space<persistent_file_space<>>);
static_assert(copy_queue<persistent_file_space<>, persistent_file_space<>>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/persistent_file_space_body.hpp>
