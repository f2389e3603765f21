/// @file
/// Random programs on a tiered buffer, against one vector of bytes a chunk.
#pragma once

#include <llmmem/eviction/admission.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

/// How a world behaves.
struct tiered_world_options {
  std::size_t chunks = 24;
  std::uint64_t most_bytes = 40'000;  ///< of a chunk
  std::uint64_t unit = 1;             ///< chunks have multiples of it
  int steps = 250;
  bool may_fail = false;  ///< whether devices fail: operations may then be refused, and change nothing
};

/// One buffer and what must be in it. `Touch` reads and writes leased bytes: `get(range, offset, span)` and
/// `put(range, offset, span)`, for spaces that the host cannot follow.
/// @tparam Random  where its choices come from: `random_numbers`, or the bytes of a fuzzer.
template <class Buffer, class Touch, class Random = random_numbers>
class tiered_world {
 public:
  using bytes = std::vector<std::byte>;

  tiered_world(Buffer& buffer, Touch touch, std::uint64_t seed, tiered_world_options options)
    requires(std::same_as<Random, random_numbers>)
      : buffer_(buffer), touch_(touch), random_(seed), options_(options) {}
  tiered_world(Buffer& buffer, Touch touch, Random random, tiered_world_options options)
    requires(!std::integral<Random>)
      : buffer_(buffer), touch_(touch), random_(random), options_(options) {}

  void run() {
    for (int step = 0; step < options_.steps; ++step) {
      CAPTURE(step);
      act();
      for (const std::string& broken : buffer_.audit())
        FAIL_CHECK(broken);
      for (const auto& tier : buffer_.stats().tiers)
        REQUIRE(tier.used <= tier.budget);
    }
    finish();
  }

 private:
  struct chunk {
    llmmem::chunk_handle handle;
    std::optional<bytes> contents;
    std::uint64_t size = 0;
  };

  void act() {
    if (chunks_.size() < 3 || (chunks_.size() < options_.chunks && random_.once_in(6))) return create();
    const std::size_t at = random_.below(chunks_.size());
    chunk& c = chunks_[at];
    switch (random_.below(15U)) {
      case 0:
      case 1:
        return write(c);
      case 2:
      case 3:
        return update(c);
      case 4:
        if (!c.contents) {
          CHECK(buffer_.prefetch(c.handle).code() == llmmem::errc::no_contents);
          return;
        }
        return fine(buffer_.prefetch(c.handle));
      case 5:
        return fine(buffer_.evict(c.handle));
      case 6:
        return fine(buffer_.flush(c.handle));
      case 7:
        if (!random_.once_in(4)) return;
        return discard(c);
      case 8:
        if (!random_.once_in(6)) return buffer_.progress();
        REQUIRE(buffer_.remove(c.handle));
        CHECK(buffer_.bytes(c.handle).code() == llmmem::errc::stale_handle);
        chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(at));
        return;
      case 9:
        if (!random_.once_in(2)) return;
        return resize(c);
      case 10:
        if (chunks_.size() < options_.chunks) return clone(c);
        return change_beside_a_reader(c);
      case 11:
        return change_beside_a_reader(c);
      default:
        return read(c);
    }
  }

  /// What comes behind the old contents is anything: it is written at once.
  void resize(chunk& c) {
    const std::uint64_t any = 1 + random_.below(options_.most_bytes);
    const std::uint64_t size = (any + options_.unit - 1) / options_.unit * options_.unit;
    const auto done = buffer_.resize(c.handle, size);
    if (!done) {
      if (done.code() != llmmem::errc::out_of_bytes) refused(done.error());
      CHECK(buffer_.bytes(c.handle).value() == c.size);
      return;
    }
    CHECK(buffer_.bytes(c.handle).value() == size);
    const std::uint64_t old = std::exchange(c.size, size);
    if (!c.contents) return;
    c.contents->resize(size);
    if (size <= old) return;
    auto lease = buffer_.update(c.handle, old, size - old);
    if (!lease) {
      refused(lease.error());
      return discard(c);
    }
    const bytes more = fresh(size - old);
    std::copy(more.begin(), more.end(), c.contents->begin() + static_cast<std::ptrdiff_t>(old));
    touch_.put(lease->range(), old, more);
  }

  template <class Result>
  void fine(const Result& outcome) {
    if (!options_.may_fail) REQUIRE_MESSAGE(outcome, outcome.error().message());
  }

  void create() {
    const std::uint64_t any = random_.once_in(3) && options_.most_bytes > 4096
                                  ? 4096 * (1 + random_.below(options_.most_bytes / 4096))
                                  : 1 + random_.below(options_.most_bytes);
    const std::uint64_t size = (any + options_.unit - 1) / options_.unit * options_.unit;
    const auto made = buffer_.create(size);
    if (!made) {
      CHECK(made.code() == llmmem::errc::out_of_bytes);
      return;
    }
    chunks_.push_back({*made, {}, size});
  }

  /// One that shares what it has needs a place to part with.
  void discard(chunk& c) {
    const auto gone = buffer_.discard(c.handle);
    if (gone) return c.contents.reset();
    CHECK(gone.code() == llmmem::errc::out_of_bytes);
    CHECK(buffer_.stats().shared > 1);
  }

  /// Contents of its own from here on, whoever shares the buffer's.
  void clone(const chunk& c) {
    const auto made = buffer_.clone(c.handle);
    REQUIRE(made);
    chunk twin = c;
    twin.handle = *made;
    chunks_.push_back(std::move(twin));
  }

  /// A lease of one chunk is not in the way of another, though it be its clone.
  void change_beside_a_reader(chunk& c) {
    chunk& other = chunks_[random_.below(chunks_.size())];
    auto lease = buffer_.read(c.handle);
    if (!lease || &other == &c) return;
    is_crowded_ = true;
    if (random_.once_in(2)) {
      write(other);
    } else {
      update(other);
    }
    is_crowded_ = false;
    same(*lease, c);
  }

  [[nodiscard]] bytes fresh(std::size_t count) {
    bytes made(count);
    for (std::byte& each : made)
      each = static_cast<std::byte>(filler());
    return made;
  }

  [[nodiscard]] std::uint64_t filler() {
    if constexpr (requires { random_.filler(); }) {
      return random_.filler();
    } else {
      return random_.next();
    }
  }

  void write(chunk& c) {
    auto lease = buffer_.write(c.handle);
    if (!lease) return refused(lease.error());
    c.contents = fresh(c.size);
    touch_.put(lease->range(), 0, *c.contents);
  }

  void update(chunk& c) {
    const std::uint64_t offset = random_.below(c.size);
    const std::uint64_t count = 1 + random_.below(c.size - offset);
    auto lease = buffer_.update(c.handle, offset, count);
    if (!c.contents) {
      CHECK(lease.code() == llmmem::errc::no_contents);
      return;
    }
    if (!lease) return refused(lease.error());
    same(*lease, c);
    const bytes changed = fresh(count);
    std::copy(changed.begin(), changed.end(), c.contents->begin() + static_cast<std::ptrdiff_t>(offset));
    touch_.put(lease->range(), offset, changed);
  }

  /// Sometimes several at once, one of them twice.
  void read(chunk& c) {
    auto lease = buffer_.read(c.handle);
    if (!c.contents) {
      CHECK(lease.code() == llmmem::errc::no_contents);
      return;
    }
    if (!lease) return refused(lease.error());
    same(*lease, c);
    if (!random_.once_in(2)) return;
    const chunk& other = chunks_[random_.below(chunks_.size())];
    auto second = buffer_.read(other.handle);
    if (second && other.contents) same(*second, other);
    same(*lease, c);
    CHECK(buffer_.write(c.handle).code() == llmmem::errc::chunk_leased);
    CHECK(buffer_.remove(c.handle).code() == llmmem::errc::chunk_leased);
  }

  void refused(const llmmem::failure& why) {
    if (is_crowded_ && why.code == llmmem::errc::out_of_bytes) return;
    if (!options_.may_fail) FAIL(why.message());
  }

  template <class Lease>
  void same(const Lease& lease, const chunk& c) {
    bytes seen(c.size);
    touch_.get(lease.range(), 0, seen);
    const bool equal = seen == *c.contents;
    REQUIRE(equal);
  }

  /// Everything is still there, and all of it reaches the last tier.
  void finish() {
    // Devices that fail now and then let everything through in the end.
    for (int attempt = 0; options_.may_fail && attempt < 200 && !buffer_.flush(); ++attempt)
      continue;
    if (options_.may_fail) return;
    REQUIRE(buffer_.flush());
    for (chunk& c : chunks_) {
      if (!c.contents) continue;
      REQUIRE(buffer_.evict(c.handle));
      read(c);
    }
  }

  Buffer& buffer_;
  Touch touch_;
  Random random_;
  tiered_world_options options_;
  std::vector<chunk> chunks_;
  bool is_crowded_ = false;  // a chunk is leased beside one that may part, which takes two places more
};

/// Touches leased bytes directly.
struct host_touch {
  template <class Range>
  void get(const Range& range, std::uint64_t offset, std::span<std::byte> into) const {
    std::copy_n(range.data + offset, into.size(), into.data());
  }
  template <class Range>
  void put(const Range& range, std::uint64_t offset, std::span<const std::byte> from) const {
    std::copy(from.begin(), from.end(), range.data + offset);
  }
};

/// Touches leased bytes by the copies of their space.
template <class Space>
struct queue_touch {
  Space* space;

  template <class Range>
  void get(const Range& range, std::uint64_t offset, std::span<std::byte> into) const {
    space->copy_out_async(into, range.subrange(offset, into.size()).value(), {}).value().wait();
  }
  template <class Range>
  void put(const Range& range, std::uint64_t offset, std::span<const std::byte> from) const {
    space->copy_in_async(range.subrange(offset, from.size()).value(), from, {}).value().wait();
  }
};

/// Admits chunks by their contents, at random.
class admit_half {
 public:
  explicit admit_half(llmmem::slot_count, const llmmem::metadata_source& = {}) noexcept {}
  [[nodiscard]] bool admit(const llmmem::admission_request& request) noexcept {
    return (request.hint.content + ++asked_) % 2 == 0;
  }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }

 private:
  std::uint64_t asked_ = 0;
};

/// Bytes of the tiers of most worlds.
inline constexpr std::uint64_t top_bytes = 160'000;
inline constexpr std::uint64_t host_bytes = 320'000;
inline constexpr std::uint64_t disk_bytes = 4 << 20;

}  // namespace llmmem_tests
