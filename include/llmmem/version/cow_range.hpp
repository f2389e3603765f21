/// @file
/// `cow_range`: snapshots of bytes while they are written in place, page by page.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/history.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/version/concepts.hpp>
#include <llmmem/version/detail/cow_pages.hpp>
#include <llmmem/version/errors.hpp>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

class cow_range;

/// Keeps snapshots of bytes: the first write to a page after a snapshot copies the page's old bytes.
/// `versioned<std::byte, copy_on_write>` is `cow_range`.
struct copy_on_write {
  static constexpr const char* default_name = "copy_on_write";
  [[deprecated("its name is default_name")]] static constexpr const char* usual_name = default_name;

  /// Bytes per page, a power of two of at least 64. From 16 KiB on, the bookkeeping of a first write, about
  /// 0.3 us with its release, is small compared with the copy; at 4 KiB it adds half (docs/versions.md). 64
  /// KiB leaves a margin, and a reader in the page delays its writer by only some microseconds. Smaller pages
  /// pay off if writes are sparse.
  std::uint64_t page_bytes = 65'536;
  std::uint32_t max_snapshots = 8;  ///< live at once; pins of one version count once
  metadata_source metadata{};       ///< 16 bytes per page of the range, 24 per page of the pool

  template <std::same_as<std::byte> T>
  using state = cow_range;
};

/// Statistics of a `cow_range`.
struct cow_stats {
  std::uint64_t snapshots = 0;
  std::uint64_t live = 0;            ///< snapshots held now
  std::uint64_t copied_pages = 0;    ///< into the pool
  std::uint64_t refused_writes = 0;  ///< because the pool had too few pages
  std::uint64_t reader_waits = 0;    ///< first writes that waited for a reader to leave the page
  std::uint64_t pool_pages = 0;      ///< pages in the pool
  std::uint64_t used_pages = 0;      ///< pages of the pool in use now
  std::uint64_t max_used_pages = 0;

  friend constexpr bool operator==(const cow_stats&, const cow_stats&) noexcept = default;
};

/// The bytes of a range at one moment, while writes to the range continue. Empty when default constructed or
/// moved from; must end before its range.
///
/// @par Thread safety   one thread at a time per object; any thread, also while the range is written.
class cow_snapshot {
 public:
  cow_snapshot() noexcept = default;
  cow_snapshot(cow_snapshot&& other) noexcept
      : range_(std::exchange(other.range_, nullptr)), version_(other.version_) {}
  cow_snapshot& operator=(cow_snapshot&& other) noexcept {
    if (this != &other) {
      release();
      range_ = std::exchange(other.range_, nullptr);
      version_ = other.version_;
    }
    return *this;
  }
  ~cow_snapshot() { release(); }

  [[nodiscard]] explicit operator bool() const noexcept { return range_ != nullptr; }
  [[nodiscard]] version_id version() const noexcept {
    return range_ == nullptr ? no_version : version_id{version_};
  }
  /// Returns the pages of the range; 0 when empty.
  [[nodiscard]] std::uint64_t pages() const noexcept;
  [[nodiscard]] std::uint64_t bytes() const noexcept;
  [[nodiscard]] std::uint64_t page_bytes() const noexcept;

  /// Calls `see(std::span<const std::byte>)` once with the bytes of page `page` in this snapshot; the last
  /// page may be short. The span ends with the call. During the call a first write to this page waits, so
  /// copy and return. Passes on exceptions of `see`. `errc::out_of_range` for a page outside the range,
  /// `errc::null_handle` when empty.
  ///
  /// @par Complexity   O(1) if no write to the page followed, otherwise O(snapshots).
  template <class See>
  result<void> visit(std::uint64_t page, See&& see) const;

  /// Copies the bytes from `offset` on into `into`; `errc::past_the_bytes` if they reach past the end.
  result<void> read(std::uint64_t offset, std::span<std::byte> into) const noexcept;

  /// Calls `visit(first_page, count)` for the runs of pages whose bytes in this snapshot may differ from
  /// those in version `before`, in order: the pages that an incremental save after a save of `before` writes.
  /// Excludes all writes after this snapshot. All pages for `no_version`. `before` may have ended.
  ///
  /// @par Complexity   O(pages), and O(snapshots) for each page written since.
  template <class Visit>
  void changed_since(version_id before, Visit&& visit) const;

  /// Frees the pages that only this snapshot needed. Does nothing when empty. O(pages copied for it).
  void release() noexcept;

 private:
  friend cow_range;
  cow_snapshot(cow_range* range, std::uint64_t version) noexcept : range_(range), version_(version) {}

  cow_range* range_ = nullptr;
  std::uint64_t version_ = 0;
};

/// Takes snapshots of a range of host bytes without copying it: the first write to a page after a snapshot
/// moves the page's old bytes to a pool, whose page becomes free when no snapshot needs it.
///
/// For saving state while the next step already changes it, with less memory than a second copy. It uses
/// neither `fork` nor memory protection, so it works on pinned and shared memory; instead, a writer first
/// requests its bytes by `write(offset, bytes)`. If every byte changes every step (dense Adam), each snapshot
/// copies all bytes once, at the speed of memory; `double_buffer` then costs the same.
///
///     cow_range state(weights_bytes, spare_bytes);
///     cow_snapshot saved = state.snapshot().value();
///     auto changed = state.write(offset, 4096).value();  // copies the page's old bytes, once
///     saved.read(0, buffer).value();                     // the old bytes; in any thread
///
/// Range and pool belong to the caller and outlive this object. The pool's whole pages are a hard budget: a
/// write that needs more is refused and changes nothing, or asks `reclaim` for some.
///
/// @par Complexity   `snapshot` O(1). A first write to a page after a snapshot O(page bytes), with one
///      uncontended mutex taken twice; without a live snapshot O(1); the next write to the page one load.
///      `release` O(pages copied for that snapshot). Nothing allocates after construction.
/// @par Thread safety   `write`, `snapshot` and `changed_since` belong to one writer (or several that
///      alternate under their own lock). The writer writes only the bytes that `write` returned. All other
///      calls are safe from any thread meanwhile. Each page has two atomics: the number of the version that
///      wrote it last, and the count of its readers. A reader enters the count, then reads the number; a
///      first write copies the page, changes the number, then waits until the count is 0. Both atomics are
///      sequentially consistent. One mutex for the range guards the lists of copied pages and snapshots; no
///      page is copied or read under it.
/// @par Errors   the constructor throws; writes and pins return failures.
class cow_range {
 public:
  using value_type = std::byte;
  using pinned = cow_snapshot;

  /// @param range  the bytes; their last page may be short.
  /// @param pool   holds copied pages, as many whole pages as fit.
  /// @throws length_error    for an empty range, a bad page size, or at least 2^32 - 1 pages.
  /// @throws argument_error  for a range and a pool that overlap, or 0 snapshots.
  /// @throws out_of_memory   if the source has no memory for the metadata.
  cow_range(std::span<std::byte> range, std::span<std::byte> pool, const copy_on_write& options = {},
            const char* name = copy_on_write::default_name)
      : name_(name),
        range_(range),
        pool_(pool),
        page_bytes_(detail::checked_page_bytes(options.page_bytes, name)),
        pages_(detail::cow_pages_of(range, pool, page_bytes_, name)),
        copies_(pages_, pool.size() / page_bytes_, options.metadata, name),
        snapshots_(detail::checked_snapshots(options.max_snapshots, name), detail::live_snapshot{},
                   options.metadata, name),
        written_(pages_, std::uint64_t{1}, options.metadata, name),
        readers_(pages_, 0U, options.metadata, name) {
    while ((std::uint64_t{1} << shift_) < page_bytes_)
      ++shift_;
  }

  cow_range(const cow_range&) = delete;
  cow_range& operator=(const cow_range&) = delete;

  /// Returns the bytes `[offset, offset + bytes)` for writing until the next snapshot, after it has saved
  /// their pages for the snapshots that see them. Refuses and changes nothing with `errc::past_the_bytes`, or
  /// with `errc::out_of_bytes` if the pool has too few free pages (both numbers in bytes).
  result<std::span<std::byte>> write(std::uint64_t offset, std::uint64_t bytes) noexcept {
    return write(offset, bytes, [](std::uint64_t) noexcept { return false; });
  }

  /// The same; if the pool is short, calls `reclaim(missing_bytes)` until there is space or `reclaim` returns
  /// false. `reclaim` may release snapshots, and must make no other call on this range.
  template <class Reclaim>
    requires std::is_invocable_r_v<bool, Reclaim&, std::uint64_t>
  result<std::span<std::byte>> write(std::uint64_t offset, std::uint64_t bytes, Reclaim&& reclaim) noexcept(
      std::is_nothrow_invocable_v<Reclaim&, std::uint64_t>) {
    if (const failure why = check_range(offset, bytes); why.code != errc::ok) return why;
    const std::span<std::byte> given =
        range_.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(bytes));
    if (bytes == 0) return given;
    const std::uint64_t first = offset >> shift_;
    const std::uint64_t last = (offset + bytes - 1) >> shift_;
    const std::uint64_t epoch = epoch_.load(std::memory_order_relaxed);
    for (std::uint64_t page = first; page <= last; ++page) {
      if (written_[page].load(std::memory_order_relaxed) == epoch) continue;
      if (const failure why = make_room(page, last, reclaim); why.code != errc::ok) return why;
      for (; page <= last; ++page)
        first_write(page, epoch);
    }
    return given;
  }

  /// Makes the present bytes a version. `errc::table_full` past `max_snapshots`.
  [[nodiscard]] result<cow_snapshot> snapshot() noexcept {
    const std::lock_guard lock(mutex_);
    if (live_ == snapshots_.size()) {
      return failure{.code = errc::table_full, .wanted = 1, .found = 0, .where = name_.c_str()};
    }
    const std::uint64_t version = epoch_.load(std::memory_order_relaxed);
    snapshots_[live_++] = {.version = version, .pins = 1, .first = detail::no_copy};
    ++stats_.snapshots;
    epoch_.store(version + 1, std::memory_order_relaxed);
    newest_live_.store(version, std::memory_order_release);
    return cow_snapshot(this, version);
  }

  /// Returns another view of a live snapshot; `errc::version_expired`, `errc::no_such_version`.
  [[nodiscard]] result<cow_snapshot> pin(version_id version) noexcept {
    const std::lock_guard lock(mutex_);
    const std::uint64_t wanted = to_number(version);
    for (std::uint32_t i = 0; i < live_; ++i) {
      if (snapshots_[i].version != wanted) continue;
      ++snapshots_[i].pins;
      return cow_snapshot(this, wanted);
    }
    const std::uint64_t newest = epoch_.load(std::memory_order_relaxed) - 1;
    if (wanted == 0 || wanted > newest) {
      return failure{
          .code = errc::no_such_version, .wanted = wanted, .found = newest, .where = name_.c_str()};
    }
    return failure{.code = errc::version_expired,
                   .wanted = wanted,
                   .found = live_ == 0 ? 0 : snapshots_[0].version,
                   .where = name_.c_str()};
  }

  /// Returns the version of the last snapshot, live or not; `no_version` before the first.
  [[nodiscard]] version_id newest() const noexcept {
    return version_id{epoch_.load(std::memory_order_relaxed) - 1};
  }
  /// Returns the oldest live snapshot; `no_version` if there is none.
  [[nodiscard]] version_id oldest() const noexcept {
    const std::lock_guard lock(mutex_);
    return live_ == 0 ? no_version : version_id{snapshots_[0].version};
  }
  /// Returns the number of live snapshots.
  [[nodiscard]] std::uint64_t live() const noexcept {
    const std::lock_guard lock(mutex_);
    return live_;
  }

  /// Calls `visit(first_page, count)` for the runs of pages that `write` returned after version `before` was
  /// taken, in order; all pages for `no_version`. For the writer only: other threads call it on a snapshot.
  /// O(pages).
  template <class Visit>
  void changed_since(version_id before, Visit&& visit) const {
    detail::runs_of(
        pages_,
        [&](std::uint64_t page) {
          return written_[page].load(std::memory_order_relaxed) > to_number(before);
        },
        visit);
  }

  [[nodiscard]] std::uint64_t page_bytes() const noexcept { return page_bytes_; }
  [[nodiscard]] std::uint64_t pages() const noexcept { return pages_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return range_.size(); }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }
  /// Returns a number that no other range of the process has, except with probability 2^-64. It distinguishes
  /// this range's versions from those of another range that takes its place.
  [[nodiscard]] std::uint64_t identity() const noexcept { return identity_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return copies_.metadata_bytes() + snapshots_.bytes() + written_.bytes() + readers_.bytes();
  }

  [[nodiscard]] cow_stats stats() const noexcept {
    const std::lock_guard lock(mutex_);
    cow_stats now = stats_;
    now.live = live_;
    now.pool_pages = copies_.capacity();
    now.used_pages = copies_.capacity() - copies_.free();
    return now;
  }

  /// Returns one line for each fault of the lists. Call it between calls of the writer.
  [[nodiscard]] std::vector<std::string> audit() const {
    const std::lock_guard lock(mutex_);
    return copies_.audit(name_, {snapshots_.data(), live_}, epoch_.load(std::memory_order_relaxed));
  }

 private:
  friend cow_snapshot;
  static constexpr std::uint32_t waiting = 0x8000'0000;  // a bit of a page's count of readers: the writer
                                                         // waits for them

  [[nodiscard]] failure check_range(std::uint64_t offset, std::uint64_t bytes) const noexcept {
    if (offset <= range_.size() && bytes <= range_.size() - offset) return {};
    const std::uint64_t end = bytes > max_bytes || offset > max_bytes - bytes ? max_bytes : offset + bytes;
    return {.code = errc::past_the_bytes, .wanted = end, .found = range_.size(), .where = name_.c_str()};
  }

  [[nodiscard]] std::span<std::byte> page_of(std::uint64_t page) const noexcept {
    const std::uint64_t begin = page << shift_;
    const std::uint64_t left = range_.size() - begin;
    return range_.subspan(static_cast<std::size_t>(begin),
                          static_cast<std::size_t>(left < page_bytes_ ? left : page_bytes_));
  }
  [[nodiscard]] std::byte* copy_of(std::uint32_t copy) const noexcept {
    return pool_.data() + (std::uint64_t{copy} << shift_);
  }

  // Whether a live snapshot sees a page written in epoch `written`. Meanwhile snapshots may end, but not
  // begin.
  [[nodiscard]] static bool seen(std::uint64_t written, std::uint64_t newest_live) noexcept {
    return newest_live != 0 && written <= newest_live;
  }

  // Only the writer takes pool pages, so pages that are free here are still free when they are taken.
  template <class Reclaim>
  [[nodiscard]] LLMMEM_OUTLINED failure make_room(std::uint64_t first, std::uint64_t last, Reclaim& reclaim) {
    for (;;) {
      const std::uint64_t newest = newest_live_.load(std::memory_order_acquire);
      std::uint64_t need = 0;
      for (std::uint64_t page = first; newest != 0 && page <= last; ++page)
        need += seen(written_[page].load(std::memory_order_relaxed), newest) ? 1U : 0U;
      if (need == 0) return {};
      std::uint64_t free = 0;
      {
        const std::lock_guard lock(mutex_);
        free = copies_.free();
      }
      if (need <= free) return {};
      if (reclaim((need - free) << shift_)) continue;
      const std::lock_guard lock(mutex_);
      ++stats_.refused_writes;
      return {.code = errc::out_of_bytes,
              .index = need > copies_.capacity() ? 1U : 0U,
              .wanted = need << shift_,
              .found = (need > copies_.capacity() ? copies_.capacity() : free) << shift_,
              .where = name_.c_str()};
    }
  }

  LLMMEM_OUTLINED void first_write(std::uint64_t page, std::uint64_t epoch) noexcept {
    const std::uint64_t before = written_[page].load(std::memory_order_relaxed);
    if (before == epoch) return;
    if (!seen(before, newest_live_.load(std::memory_order_acquire))) {
      // Readers in snapshots that saw this page have left it, because they left before the snapshots'
      // release.
      written_[page].store(epoch, std::memory_order_seq_cst);
      return;
    }
    std::uint32_t copy = detail::no_copy;
    {
      const std::lock_guard lock(mutex_);
      copy = copies_.take();
      const std::uint64_t used = copies_.capacity() - copies_.free();
      if (used > stats_.max_used_pages) stats_.max_used_pages = used;
    }
    const std::span<const std::byte> old = page_of(page);
    std::memcpy(copy_of(copy), old.data(), old.size());
    {
      const std::lock_guard lock(mutex_);
      ++stats_.copied_pages;
      if (live_ != 0 && before <= snapshots_[live_ - 1].version) {
        copies_.link(copy, page, before, snapshots_[live_ - 1]);
      } else {
        copies_.give_back(copy);  // the snapshot was released meanwhile
      }
    }
    written_[page].store(epoch, std::memory_order_seq_cst);
    wait_for_readers(page);
  }

  void wait_for_readers(std::uint64_t page) noexcept {
    const auto readers = readers_[page];
    if (readers.load(std::memory_order_seq_cst) == 0) return;
    std::uint32_t now = readers.fetch_or(waiting, std::memory_order_acq_rel) | waiting;
    if (now != waiting) {
      const std::lock_guard lock(mutex_);
      ++stats_.reader_waits;
    }
    while (now != waiting) {
      readers.wait(now, std::memory_order_acquire);
      now = readers.load(std::memory_order_acquire);
    }
    readers.fetch_and(~waiting, std::memory_order_relaxed);
  }

  void leave(std::uint64_t page) noexcept {
    const auto readers = readers_[page];
    // No wake-up is lost, because the writer waits for a change of the count.
    if ((readers.fetch_sub(1, std::memory_order_acq_rel) & waiting) != 0) readers.notify_all();
  }

  template <class See>
  void see_page(std::uint64_t version, std::uint64_t page, See& see) {
    readers_[page].fetch_add(1, std::memory_order_seq_cst);
    if (written_[page].load(std::memory_order_seq_cst) <= version) {
      const inside guard{this, page};
      see(std::span<const std::byte>(page_of(page)));
      return;
    }
    leave(page);
    // The copy lives as long as the snapshot.
    see(std::span<const std::byte>(copy_of(find(version, page).copy), page_of(page).size()));
  }
  struct inside {
    cow_range* range;
    std::uint64_t page;
    ~inside() { range->leave(page); }
  };

  [[nodiscard]] detail::found_copy find(std::uint64_t version, std::uint64_t page) const noexcept {
    const std::lock_guard lock(mutex_);
    return copies_.find(version, page);
  }

  /// Returns the version that last wrote `page` as snapshot `version` sees it.
  [[nodiscard]] std::uint64_t written_before(std::uint64_t version, std::uint64_t page) const noexcept {
    const std::uint64_t written = written_[page].load(std::memory_order_seq_cst);
    return written <= version ? written : find(version, page).written;
  }

  void unpin(std::uint64_t version) noexcept {
    const std::lock_guard lock(mutex_);
    std::uint32_t at = 0;
    while (snapshots_[at].version != version)
      ++at;
    if (--snapshots_[at].pins != 0) return;
    copies_.release(snapshots_[at], at == 0 ? nullptr : &snapshots_[at - 1]);
    for (std::uint32_t i = at; i + 1 < live_; ++i)
      snapshots_[i] = snapshots_[i + 1];
    --live_;
    newest_live_.store(live_ == 0 ? 0 : snapshots_[live_ - 1].version, std::memory_order_release);
  }

  std::string name_;
  std::uint64_t identity_ = detail::number_of_its_own(this);
  std::span<std::byte> range_;
  std::span<std::byte> pool_;
  std::uint64_t page_bytes_;
  std::uint64_t pages_;
  unsigned shift_ = 0;

  mutable std::mutex mutex_{};  // guards the members up to the atomics
  detail::cow_copies copies_;
  detail::fixed_array<detail::live_snapshot> snapshots_;  // the first `live_`, oldest first
  std::uint32_t live_ = 0;
  cow_stats stats_{};

  std::atomic<std::uint64_t> epoch_{1};          // the version that the next snapshot makes
  std::atomic<std::uint64_t> newest_live_{0};    // 0: no snapshot is live
  detail::atomic_array<std::uint64_t> written_;  // of each page: the epoch of its last `write`
  detail::atomic_array<std::uint32_t> readers_;  // of each page: readers in the range itself
};

static_assert(retain_policy<copy_on_write, std::byte>);

inline std::uint64_t cow_snapshot::pages() const noexcept {
  return range_ == nullptr ? 0 : range_->pages();
}
inline std::uint64_t cow_snapshot::bytes() const noexcept {
  return range_ == nullptr ? 0 : range_->bytes();
}

inline std::uint64_t cow_snapshot::page_bytes() const noexcept {
  return range_ == nullptr ? 0 : range_->page_bytes();
}

template <class See>
result<void> cow_snapshot::visit(std::uint64_t page, See&& see) const {
  if (range_ == nullptr) return failure{.code = errc::null_handle, .where = copy_on_write::default_name};
  if (page >= range_->pages_) {
    return failure{.code = errc::out_of_range,
                   .wanted = page,
                   .found = range_->pages_ - 1,
                   .where = range_->name_.c_str()};
  }
  range_->see_page(version_, page, see);
  return {};
}

inline result<void> cow_snapshot::read(std::uint64_t offset, std::span<std::byte> into) const noexcept {
  if (range_ == nullptr) return failure{.code = errc::null_handle, .where = copy_on_write::default_name};
  if (const failure why = range_->check_range(offset, into.size()); why.code != errc::ok) return why;
  while (!into.empty()) {
    const std::uint64_t skip = offset & (range_->page_bytes_ - 1);
    std::size_t copied = 0;
    const auto copy = [&](std::span<const std::byte> page) noexcept {
      const std::span<const std::byte> rest = page.subspan(static_cast<std::size_t>(skip));
      copied = rest.size() < into.size() ? rest.size() : into.size();
      std::memcpy(into.data(), rest.data(), copied);
    };
    range_->see_page(version_, offset >> range_->shift_, copy);
    offset += copied;
    into = into.subspan(copied);
  }
  return {};
}

template <class Visit>
void cow_snapshot::changed_since(version_id before, Visit&& visit) const {
  if (range_ == nullptr) return;
  detail::runs_of(
      range_->pages_,
      [&](std::uint64_t page) { return range_->written_before(version_, page) > to_number(before); }, visit);
}

inline void cow_snapshot::release() noexcept {
  if (range_ != nullptr) std::exchange(range_, nullptr)->unpin(version_);
}

}  // namespace v0
}  // namespace llmmem
