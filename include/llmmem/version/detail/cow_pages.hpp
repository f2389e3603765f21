/// @file
/// The lists of a `cow_range`, which assign copied pages to pages and to snapshots.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/atomic_array.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The value for "no copied page".
inline constexpr std::uint32_t no_copy = 0xFFFF'FFFF;

/// A live snapshot, and the copies that it is the newest to see.
struct live_snapshot {
  std::uint64_t version = 0;
  std::uint64_t pins = 0;
  std::uint32_t first = no_copy;
};

struct found_copy {
  std::uint32_t copy = no_copy;
  std::uint64_t written = 0;  // the version that had written its contents
};

/// Copied pages, each in two lists: its page's, newest first, and that of the newest live snapshot that sees
/// it. A copy of contents that version w wrote, made for snapshots up to n, is seen by the live snapshots
/// from w to n. When the newest of these ends, the copy passes to the next one, or becomes free.
class cow_copies {
 public:
  cow_copies(std::uint64_t pages, std::uint64_t copies, const metadata_source& source, const char* what)
      : records_(copies, record{}, source, what), heads_(pages, no_copy, source, what) {
    for (std::uint32_t i = 0; i < records_.size(); ++i)
      records_[i].next_owned = i + 1 < records_.size() ? i + 1 : no_copy;
    free_list_ = records_.size() == 0 ? no_copy : 0;
    free_ = records_.size();
  }

  [[nodiscard]] std::uint64_t capacity() const noexcept { return records_.size(); }
  [[nodiscard]] std::uint64_t free() const noexcept { return free_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return records_.bytes() + heads_.bytes(); }

  /// @pre `free() != 0`.
  [[nodiscard]] std::uint32_t take() noexcept {
    const std::uint32_t copy = free_list_;
    free_list_ = records_[copy].next_owned;
    --free_;
    return copy;
  }

  void give_back(std::uint32_t copy) noexcept {
    records_[copy] = {.next_owned = free_list_};
    free_list_ = copy;
    ++free_;
  }

  void link(std::uint32_t copy, std::uint64_t page, std::uint64_t written, live_snapshot& owner) noexcept {
    records_[copy] = {
        .page = page, .written = written, .next_of_page = heads_[page], .next_owned = owner.first};
    heads_[page] = copy;
    owner.first = copy;
  }

  /// Returns the copy of `page` that the live snapshot `version` sees. @pre there is one.
  [[nodiscard]] found_copy find(std::uint64_t version, std::uint64_t page) const noexcept {
    std::uint32_t copy = heads_[page];
    while (records_[copy].written > version)
      copy = records_[copy].next_of_page;
    return {copy, records_[copy].written};
  }

  /// Passes the copies of `gone` that `next` sees to `next`, the newest live snapshot before it; frees the
  /// others.
  void release(const live_snapshot& gone, live_snapshot* next) noexcept {
    for (std::uint32_t copy = gone.first; copy != no_copy;) {
      record& each = records_[copy];
      const std::uint32_t following = each.next_owned;
      if (next != nullptr && each.written <= next->version) {
        each.next_owned = next->first;
        next->first = copy;
      } else {
        std::uint32_t* link = &heads_[each.page];
        while (*link != copy)
          link = &records_[*link].next_of_page;
        *link = each.next_of_page;
        give_back(copy);
      }
      copy = following;
    }
  }

  [[nodiscard]] std::vector<std::string> audit(const std::string& name, std::span<const live_snapshot> live,
                                               std::uint64_t epoch) const {
    std::vector<std::string> found;
    const auto blame = [&](const std::string& what) { found.push_back(name + ": " + what); };
    std::vector<std::uint64_t> owner(records_.size(), 0);
    std::uint64_t owned = 0;
    for (std::size_t i = 0; i < live.size(); ++i) {
      const std::string who = "snapshot " + std::to_string(live[i].version);
      if (live[i].version >= epoch || (i != 0 && live[i].version <= live[i - 1].version)) {
        blame(who + " is out of order");
      }
      if (live[i].pins == 0) blame(who + " is held by no reader");
      for (std::uint32_t copy = live[i].first; copy != no_copy; copy = records_[copy].next_owned) {
        if (owner[copy] != 0) {
          blame("copy " + std::to_string(copy) + " is owned twice");
          return found;
        }
        owner[copy] = live[i].version;
        ++owned;
        if (records_[copy].written > live[i].version) {
          blame("copy " + std::to_string(copy) + " is newer than " + who + ", which owns it");
        }
      }
    }
    if (owned + free_ != capacity()) {
      blame(std::to_string(owned) + " copies are owned and " + std::to_string(free_) + " free, there are " +
            std::to_string(capacity()));
    }
    std::uint64_t listed = 0;
    for (std::uint64_t page = 0; page < heads_.size(); ++page) {
      std::uint64_t above = epoch;
      for (std::uint32_t copy = heads_[page]; copy != no_copy; copy = records_[copy].next_of_page) {
        const record& each = records_[copy];
        if (owner[copy] == 0 || each.page != page || each.written >= above || owner[copy] >= above) {
          blame("page " + std::to_string(page) + " lists copy " + std::to_string(copy) + " of page " +
                std::to_string(each.page) + ", version " + std::to_string(each.written) + ", out of place");
          return found;
        }
        above = each.written;
        ++listed;
      }
    }
    if (listed != owned) {
      blame(std::to_string(owned) + " copies are owned, pages list " + std::to_string(listed));
    }
    return found;
  }

 private:
  struct record {
    std::uint64_t page = 0;
    std::uint64_t written = 0;
    std::uint32_t next_of_page = no_copy;
    std::uint32_t next_owned = no_copy;  // or the next free copy
  };

  fixed_array<record> records_;
  fixed_array<std::uint32_t> heads_;
  std::uint32_t free_list_ = no_copy;
  std::uint64_t free_ = 0;
};

/// Calls `visit(first, count)` for the runs of pages that `is_in` accepts.
template <class IsIn, class Visit>
void runs_of(std::uint64_t pages, const IsIn& is_in, Visit& visit) {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  for (std::uint64_t page = 0; page < pages; ++page) {
    if (is_in(page)) {
      if (count++ == 0) first = page;
    } else if (count != 0) {
      visit(first, count);
      count = 0;
    }
  }
  if (count != 0) visit(first, count);
}

[[nodiscard]] inline std::uint64_t checked_page_bytes(std::uint64_t bytes, const char* name) {
  if (bytes < 64 || (bytes & (bytes - 1)) != 0 || bytes > max_bytes) {
    throw length_error(std::string(name) + ": page_bytes is " + std::to_string(bytes) +
                       ", allowed are powers of two from 64 on");
  }
  return bytes;
}

[[nodiscard]] inline std::uint32_t checked_snapshots(std::uint32_t snapshots, const char* name) {
  if (snapshots == 0) throw argument_error(std::string(name) + ": max_snapshots is 0; allow at least one");
  return snapshots;
}

/// Returns the number of pages of `range`, after it has checked both spans.
[[nodiscard]] inline std::uint64_t cow_pages_of(std::span<const std::byte> range,
                                                std::span<const std::byte> pool, std::uint64_t page_bytes,
                                                const char* name) {
  if (range.empty()) throw length_error(std::string(name) + ": a range of 0 bytes; give it at least 1");
  const std::uint64_t pages = (range.size() - 1) / page_bytes + 1;
  const std::uint64_t copies = pool.size() / page_bytes;
  if (pages >= no_copy || copies >= no_copy) {
    throw length_error(std::string(name) + ": " + std::to_string(pages) + " pages and " +
                       std::to_string(copies) + " in the pool, the most is " + std::to_string(no_copy - 1) +
                       " each; take larger pages");
  }
  const auto address = [](const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); };
  if (!pool.empty() && address(pool.data()) < address(range.data()) + range.size() &&
      address(range.data()) < address(pool.data()) + pool.size()) {
    throw argument_error(std::string(name) + ": range and pool overlap; the pool must be memory of its own");
  }
  return pages;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
