/// Chunks with keys: what is there again when a tier's file is opened anew.
#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/codec/huffman_plane.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using bytes = std::vector<std::byte>;
using disk_space = persistent_file_space<>;
using plain_codec = identity_codec;
using plane_codec = byte_plane<dtype::bf16>;
constexpr std::uint64_t kib = 1024;

template <class Codec>
using kept_tier = tier<disk_space, lru_eviction, write_back, Codec>;
template <class Codec>
using two = tiered_buffer<host_space, kept_tier<Codec>>;
template <class Codec>
using three = tiered_buffer<host_space, host_space, kept_tier<Codec>>;

[[nodiscard]] persistent_file_options of(std::uint64_t budget, std::uint32_t max_chunks = 64) {
  persistent_file_options options;
  options.space.budget = budget;
  options.space.queue.driver = llmmem::transfer::driven_by::waiters;
  options.max_chunks = max_chunks;
  return options;
}

/// One life of a buffer.
template <class Buffer>
struct life {
  host_space host{{.budget = 1 << 20}};
  disk_space disk;
  Buffer buffer;

  explicit life(const std::string& path, persistent_file_options options = of(512 * kib),
                std::uint32_t max_chunks = 64)
    requires(Buffer::tiers == 2)
      : disk(path, options),
        buffer(with(max_chunks), {host, 32 * kib, 512}, {disk, options.space.budget, 512}) {}
  explicit life(const std::string& path, persistent_file_options options = of(512 * kib),
                std::uint32_t max_chunks = 64)
    requires(Buffer::tiers == 3)
      : disk(path, options),
        buffer(with(max_chunks), {host, 32 * kib, 512}, {host, 48 * kib, 512},
               {disk, options.space.budget, 512}) {}
  ~life() {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
  life(const life&) = delete;
  life& operator=(const life&) = delete;

  [[nodiscard]] static tiered_options with(std::uint32_t max_chunks) {
    tiered_options options;
    options.max_chunks = max_chunks;
    options.largest_chunk_bytes = 6000;
    options.name = "kept";
    return options;
  }
  [[nodiscard]] bytes contents(chunk_handle chunk) {
    const auto lease = buffer.read(chunk).value();
    return {lease.span().begin(), lease.span().end()};
  }
  void write(chunk_handle chunk, const bytes& all) {
    auto lease = buffer.write(chunk).value();
    std::ranges::copy(all, lease.span().begin());
  }
};

[[nodiscard]] bytes any_bytes(random_numbers& random, std::size_t count) {
  bytes made(count);
  for (std::byte& each : made)
    each = static_cast<std::byte>(random.next());
  return made;
}

/// What a chunk has held since it was made, and which of it the last tier had for certain.
struct history {
  std::vector<bytes> versions;
  std::size_t sure = 0;
  bool is_sure = false;

  /// Which version `seen` is, not before the one that is sure.
  [[nodiscard]] bool may_be(const bytes& seen) const {
    for (std::size_t i = is_sure ? sure : 0; i < versions.size(); ++i) {
      if (versions[i] == seen) return true;
    }
    return false;
  }
};

/// Random operations on keyed chunks of one buffer after the other over one file.
template <class Buffer>
void run_lives(std::uint64_t seed) {
  CAPTURE(seed);
  random_numbers random(seed);
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  std::map<std::uint64_t, history> expected;  // by the id of the key
  for (int n = 0; n < 5; ++n) {
    CAPTURE(n);
    life<Buffer> now(path);
    auto& buffer = now.buffer;
    for (auto each = expected.begin(); each != expected.end();) {
      CAPTURE(each->first);
      const auto found = buffer.find(key_from_id(each->first));
      if (!found) {
        CHECK(found.code() == errc::no_such_key);
        REQUIRE(!each->second.is_sure);
        each = expected.erase(each);
        continue;
      }
      const bytes seen = now.contents(*found);
      REQUIRE(each->second.may_be(seen));
      each->second = {{seen}, 0, true};
      ++each;
    }
    CHECK(now.disk.recovery().kept == expected.size());
    CHECK(now.disk.recovery().other_form + now.disk.recovery().misplaced + now.disk.recovery().damaged == 0);
    for (int step = 0; step < 120; ++step) {
      const std::uint64_t id = random.below(20U);
      const auto handle = buffer.find(key_from_id(id));
      REQUIRE(handle.has_value() == expected.contains(id));
      if (!handle) {
        const std::uint64_t size = 2 * (1 + random.below(3000U));
        const auto made = buffer.create(size, key_from_id(id));
        if (!made) {
          CHECK(made.code() == errc::out_of_bytes);
          continue;
        }
        CHECK(buffer.create(size, key_from_id(id)).code() == errc::key_taken);
        expected[id];
        continue;
      }
      history& h = expected[id];
      const std::uint64_t size = buffer.bytes(*handle).value();
      switch (random.below(10U)) {
        case 0:
        case 1:
          h.versions.push_back(any_bytes(random, size));
          now.write(*handle, h.versions.back());
          break;
        case 2:
        case 3: {
          if (h.versions.empty()) break;
          const std::uint64_t offset = random.below(size);
          const bytes change = any_bytes(random, 1 + random.below(size - offset));
          bytes next = h.versions.back();
          std::ranges::copy(change, next.begin() + static_cast<std::ptrdiff_t>(offset));
          auto lease = buffer.update(*handle, offset, change.size()).value();
          std::ranges::copy(change, lease.span().begin() + static_cast<std::ptrdiff_t>(offset));
          h.versions.push_back(next);
          break;
        }
        case 4:
          REQUIRE(buffer.flush(*handle));
          if (h.versions.empty()) break;
          h.sure = h.versions.size() - 1;
          h.is_sure = true;
          break;
        case 5:
          REQUIRE(buffer.evict(*handle));
          break;
        case 6:
          if (!random.once_in(4)) break;
          REQUIRE(buffer.remove(*handle));
          CHECK(buffer.find(key_from_id(id)).code() == errc::no_such_key);
          expected.erase(id);
          break;
        case 7: {
          if (!random.once_in(3)) break;
          const std::uint64_t other = 2 * (1 + random.below(3000U));
          if (!buffer.resize(*handle, other)) break;
          if (other != size) h = {};
          if (random.once_in(2)) {
            REQUIRE(buffer.discard(*handle));
            h = {};
            break;
          }
          h.versions.push_back(any_bytes(random, other));
          now.write(*handle, h.versions.back());
          break;
        }
        case 8: {
          // A clone has no key; which of both is written first decides who keeps the place.
          const chunk_handle twin = buffer.clone(*handle).value();
          if (!h.versions.empty() && random.once_in(2)) {
            const auto lease = buffer.write(twin);
            if (!lease) CHECK(lease.code() == errc::out_of_bytes);
          } else if (!h.versions.empty()) {
            const bytes next = any_bytes(random, size);
            auto lease = buffer.write(*handle);
            if (lease) {
              std::ranges::copy(next, lease->span().begin());
              // Its bytes lie elsewhere from now on, and nowhere but in tier 0.
              h = {{next}, 0, false};
            }
          }
          REQUIRE(buffer.remove(twin));
          break;
        }
        default:
          if (!h.versions.empty()) REQUIRE(now.contents(*handle) == h.versions.back());
      }
    }
    if (random.once_in(2)) {
      REQUIRE(buffer.persist());
      for (auto& [id, h] : expected) {
        if (h.versions.empty()) continue;
        h.sure = h.versions.size() - 1;
        h.is_sure = true;
      }
    }
  }
}

}  // namespace

TEST_CASE("the last tier's contents are there in the next process, and nothing else has that key") {
  for (const std::uint64_t seed : seeds(25)) {
    run_lives<two<plain_codec>>(seed);
    run_lives<three<plain_codec>>(seed);
    run_lives<two<plane_codec>>(seed);
    run_lives<three<plane_codec>>(seed);
  }
}

TEST_CASE("a key names one chunk, and an unknown key none") {
  const temporary_folder folder;
  life<two<plain_codec>> now(folder.file("tier"));
  const chunk_handle first = now.buffer.create(100, key_of_name("a")).value();
  const auto again = now.buffer.create(50, key_of_name("a"));
  CHECK(again.code() == errc::key_taken);
  CHECK(again.error().message() == "kept: chunk 0 has that key; find() it, or remove it first");
  CHECK(now.buffer.find(key_of_name("a")).value() == first);
  CHECK(now.buffer.find(key_of_name("b")).error().message() ==
        "kept: no chunk has that key; create a chunk with it, and write that");
  life<two<plain_codec>> few(folder.file("few"), of(64 * kib, 2));
  for (std::uint64_t id = 0; id < 2; ++id)
    REQUIRE(few.buffer.create(100, key_from_id(id)));
  CHECK(few.buffer.create(100, key_from_id(2)).code() == errc::table_full);
  REQUIRE(few.buffer.create(100));
  REQUIRE(few.buffer.remove(few.buffer.find(key_from_id(1)).value()));
  CHECK(few.buffer.create(100, key_from_id(2)));
  // Without contents there is nothing to keep.
  REQUIRE(now.buffer.persist());
  CHECK(now.disk.index().size() == 0);
  static_assert(!tiered_buffer<host_space, file_space<>>::persists_chunks);
}

TEST_CASE("chunks that reached the file are in the index even without a call of progress") {
  const temporary_folder folder;
  host_space host({.budget = 1 << 20});
  disk_space disk(folder.file("tier"), of(64 * kib));
  tiered_buffer<tier<host_space, lru_eviction, write_through>, disk_space> buffer({}, {host, 32 * kib, 512},
                                                                                  {disk, 64 * kib, 512});
  for (std::uint64_t id = 0; id < 30; ++id) {
    const chunk_handle chunk = buffer.create(1024, key_from_id(id)).value();
    auto lease = buffer.write(chunk).value();
    std::ranges::fill(lease.span(), std::byte{1});
  }
  CHECK(disk.index().size() > 20);
}

TEST_CASE("a resized chunk leaves nothing in its old place") {
  random_numbers random(8);
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const bytes second = any_bytes(random, 3000);
  {
    life<two<plain_codec>> now(path);
    const chunk_handle first = now.buffer.create(3000, key_from_id(1)).value();
    now.write(first, any_bytes(random, 3000));
    REQUIRE(now.buffer.persist());
    REQUIRE(now.buffer.resize(first, 5000));
    // Its place is free, and taken by another.
    const chunk_handle other = now.buffer.create(3000, key_from_id(2)).value();
    now.write(other, second);
    REQUIRE(now.buffer.flush(other));
  }
  life<two<plain_codec>> now(path);
  CHECK(now.disk.recovery().message() == "1 chunks were restored");
  CHECK(now.buffer.find(key_from_id(1)).code() == errc::no_such_key);
  CHECK(now.contents(now.buffer.find(key_from_id(2)).value()) == second);
}

TEST_CASE("a chunk whose middle copy must leave during a resize leaves nothing behind either") {
  random_numbers random(8);
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const bytes third = any_bytes(random, 2 * kib);
  {
    host_space host({.budget = 1 << 20});
    disk_space disk(path, of(64 * kib));
    three<plain_codec> buffer({}, {host, 6 * kib, 512}, {host, 4 * kib, 512}, {disk, 64 * kib, 512});
    const auto fill = [&](chunk_handle chunk) {
      auto all = buffer.write(chunk).value();
      std::ranges::fill(all.span(), std::byte{1});
    };
    const chunk_handle first = buffer.create(2 * kib, key_from_id(1)).value();
    fill(first);
    REQUIRE(buffer.evict(first));
    buffer.progress();
    CHECK(buffer.tier_of(first).value() == 1);
    const chunk_handle second = buffer.create(4 * kib).value();
    fill(second);
    // Its new place in tier 0 takes the second chunk's, which takes that of its old copy in tier 1.
    REQUIRE(buffer.resize(first, 4 * kib));
    CHECK(disk.index().size() == 0);
    const chunk_handle other = buffer.create(2 * kib, key_from_id(2)).value();
    {
      auto all = buffer.write(other).value();
      std::ranges::copy(third, all.span().begin());
    }
    REQUIRE(buffer.flush(other));
  }
  life<two<plain_codec>> now(path, of(64 * kib));
  CHECK(now.disk.recovery().message() == "1 chunks were restored");
  CHECK(now.contents(now.buffer.find(key_from_id(2)).value()) == third);
}

TEST_CASE("a clone continues without the key of a removed chunk") {
  random_numbers random(8);
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const bytes fresh = any_bytes(random, 500);
  {
    life<two<plain_codec>> now(path);
    const chunk_handle first = now.buffer.create(700, key_from_id(1)).value();
    const bytes old = any_bytes(random, 700);
    now.write(first, old);
    REQUIRE(now.buffer.persist());
    const chunk_handle twin = now.buffer.clone(first).value();
    REQUIRE(now.buffer.remove(first));
    CHECK(now.buffer.find(key_from_id(1)).code() == errc::no_such_key);
    CHECK(now.disk.index().size() == 0);
    CHECK(now.contents(twin) == old);
    now.write(now.buffer.create(500, key_from_id(1)).value(), fresh);
    REQUIRE(now.buffer.persist());
    CHECK(now.disk.index().size() == 1);
  }
  life<two<plain_codec>> now(path);
  CHECK(now.contents(now.buffer.find(key_from_id(1)).value()) == fresh);
}

TEST_CASE("damaged bytes in the file are never handed out, and check_kept removes their chunk") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  random_numbers random(3);
  std::vector<bytes> contents;
  {
    life<two<plain_codec>> now(path);
    for (std::uint64_t id = 0; id < 9; ++id) {
      contents.push_back(any_bytes(random, 1000 + 100 * id));
      now.write(now.buffer.create(contents.back().size(), key_from_id(id)).value(), contents.back());
    }
    REQUIRE(now.buffer.persist());
  }
  {
    life<two<plain_codec>> now(path);
    const auto damage = [&](std::uint64_t id) {
      const std::uint64_t at = now.disk.index().find(key_from_id(id))->offset + 900;
      const char flipped = static_cast<char>(static_cast<int>(contents[id][900]) ^ 16);
      REQUIRE(::pwrite(now.disk.file().buffered(), &flipped, 1, static_cast<off_t>(at)) == 1);
    };
    damage(2);
    damage(7);
    const auto refused = now.buffer.read(now.buffer.find(key_from_id(2)).value());
    CHECK(refused.code() == errc::checksum_differs);
    CHECK(now.buffer.check_kept().value() == 2);
    CHECK(now.buffer.find(key_from_id(7)).code() == errc::no_such_key);
    CHECK(now.disk.recovery().message() ==
          "7 chunks were restored; 2 chunks were dropped: their bytes were damaged");
    CHECK(now.buffer.check_kept().value() == 0);
  }
  life<two<plain_codec>> now(path);
  CHECK(now.disk.recovery().message() == "7 chunks were restored");
  for (const std::uint64_t id : {0U, 1U, 3U, 4U, 5U, 6U, 8U})
    CHECK(now.contents(now.buffer.find(key_from_id(id)).value()) == contents[id]);
}

TEST_CASE("chunks without a place are given up, and counted by reason") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const auto fill = [&] {
    std::filesystem::remove(path);
    life<two<plain_codec>> now(path);
    for (std::uint64_t id = 0; id < 10; ++id)
      now.write(now.buffer.create(1024, key_from_id(id)).value(), bytes(1024, std::byte{1}));
    REQUIRE(now.buffer.persist());
  };
  fill();
  {
    const life<two<plane_codec>> now(path);
    CHECK(now.disk.recovery().message() ==
          "0 chunks were restored; 10 chunks were dropped: written with another codec, or too large for "
          "this buffer");
  }
  fill();
  {
    const life<two<plain_codec>> now(path, of(4 * kib));
    CHECK(now.disk.recovery().message() ==
          "4 chunks were restored; 6 chunks were dropped: past the budget, or overlapping others");
    CHECK(now.disk.index().size() == 4);
  }
  fill();
  {
    const life<two<plain_codec>> now(path, of(512 * kib), 3);
    CHECK(now.disk.recovery().message() ==
          "3 chunks were restored; 7 chunks were dropped: more than max_chunks of the buffer");
  }
  fill();
  const life<two<plain_codec>> now(path, of(512 * kib, 8));
  CHECK(now.disk.recovery().message() ==
        "8 chunks were restored; 2 chunks were dropped: more than max_chunks of the space");
}

TEST_CASE("an index without space refuses changes, and persist reports it until there is space") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  {
    life<two<plain_codec>> now(path, of(16 * kib));
    const chunk_handle chunk = now.buffer.create(1024, key_from_id(1)).value();
    const chunk_handle other = now.buffer.create(1024, key_from_id(2)).value();
    now.write(other, bytes(1024, std::byte{2}));
    REQUIRE(now.buffer.flush(other));
    rlimit little = before;
    little.rlim_cur = 64 * kib + 16 * kib;  // as long as the file is: only the index grows
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &little) == 0);
    bool is_full = false;
    for (int i = 0; i < 1000 && !is_full; ++i) {
      now.write(chunk, bytes(1024, static_cast<std::byte>(i)));
      is_full = !now.buffer.flush(chunk) || now.buffer.stats().background_failures != 0;
    }
    CHECK(is_full);
    // With its record or without it, the chunk is as it was last written.
    const bytes last = now.contents(chunk);
    const result<void> gone = now.buffer.discard(other);
    const result<void> kept = now.buffer.persist();
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(gone.code() == errc::write_failed);
    CHECK(kept.code() == errc::write_failed);
    CHECK(now.contents(other) == bytes(1024, std::byte{2}));
    CHECK(now.contents(chunk) == last);
    REQUIRE(now.buffer.persist());
    CHECK(now.disk.index().size() == 2);
  }
  std::signal(SIGXFSZ, old_handler);
  life<two<plain_codec>> now(path, of(16 * kib));
  CHECK(now.disk.recovery().kept == 2);
}

namespace {

/// What the killed process says of itself: chunk `id` is about to be written for the n-th time, or is there.
struct report {
  std::uint32_t id = 0;
  std::uint32_t version = 0;
  bool is_sure = false;
};

[[nodiscard]] bytes of_version(std::uint32_t id, std::uint32_t version, std::size_t count) {
  random_numbers random(id * 1'000'003ULL + version);
  return any_bytes(random, count);
}

constexpr std::uint32_t ids = 12;
[[nodiscard]] constexpr std::size_t size_of(std::uint32_t id) {
  return 700 + 400 * id;
}

/// Writes chunks for ever, through a first tier that holds a few of them.
template <class Buffer>
[[noreturn]] void write_until_killed(const std::string& path, std::uint64_t seed, int say) {
  random_numbers random(seed);
  life<Buffer> now(path);
  std::map<std::uint32_t, std::uint32_t> versions;
  for (std::uint32_t version = 1;; ++version) {
    const std::uint32_t id = random.below(ids);
    const auto tell = [&](bool is_sure) {
      const report told{id, version, is_sure};
      if (::write(say, &told, sizeof told) != sizeof told) ::_exit(1);
    };
    auto chunk = now.buffer.find(key_from_id(id));
    if (!chunk) chunk = now.buffer.create(size_of(id), key_from_id(id));
    tell(false);
    now.write(*chunk, of_version(id, version, size_of(id)));
    if (random.once_in(4) && now.buffer.flush(*chunk)) tell(true);
    if (random.once_in(50)) static_cast<void>(now.buffer.persist());
  }
}

template <class Buffer>
void kill_and_look(std::uint64_t seed) {
  CAPTURE(seed);
  random_numbers random(seed);
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  std::map<std::uint32_t, std::vector<report>> told;
  for (int life_number = 0; life_number < 4; ++life_number) {
    told.clear();
    int pipes[2];
    REQUIRE(::pipe(pipes) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::close(pipes[0]);
      write_until_killed<Buffer>(path, seed * 10 + static_cast<std::uint64_t>(life_number), pipes[1]);
    }
    ::close(pipes[1]);
    const std::uint64_t reports = 20 + random.below(400U);
    report one;
    for (std::uint64_t i = 0; ::read(pipes[0], &one, sizeof one) == sizeof one; ++i) {
      told[one.id].push_back(one);
      if (i == reports) ::kill(child, SIGKILL);
    }
    ::close(pipes[0]);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));

    life<Buffer> after(path);
    CHECK(after.disk.recovery().index.damaged == 0);
    std::uint64_t gone = 0;
    for (const auto& [id, reports_of] : told) {
      CAPTURE(id);
      const auto chunk = after.buffer.find(key_from_id(id));
      const bool was_sure = reports_of.back().is_sure;
      if (!chunk) {
        // Either never stored, or being overwritten: never one that was flushed and left alone.
        REQUIRE(!was_sure);
        ++gone;
        continue;
      }
      const bytes seen = after.contents(*chunk);
      bool is_known = false;
      for (auto each = reports_of.rbegin(); each != reports_of.rend() && !is_known; ++each) {
        is_known = seen == of_version(id, each->version, size_of(id));
        if (each->is_sure) break;  // nothing older
      }
      // Of an earlier process, where this one did not get to store it.
      const bool is_old = std::ranges::none_of(reports_of, [](const report& each) { return each.is_sure; });
      REQUIRE((is_known || (is_old && life_number > 0)));
    }
    CHECK(gone <= told.size());
    // Each life's chunks begin anew, so that versions are this one's.
    for (std::uint32_t id = 0; id < ids; ++id) {
      if (const auto chunk = after.buffer.find(key_from_id(id)); chunk && random.once_in(2))
        REQUIRE(after.buffer.remove(*chunk));
    }
  }
}

}  // namespace

TEST_CASE("a process killed during a demotion leaves complete chunks, as flushed or newer, or none") {
  for (const std::uint64_t seed : seeds(6)) {
    kill_and_look<two<plain_codec>>(seed);
    kill_and_look<three<plane_codec>>(seed);
  }
}

TEST_CASE("a chunk whose resize failed is kept as it was") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const bytes contents(1024, std::byte{7});
  {
    life<two<plain_codec>> now(path, of(16 * kib));
    const chunk_handle chunk = now.buffer.create(1024, key_from_id(1)).value();
    now.write(chunk, contents);
    REQUIRE(now.buffer.persist());
    CHECK(now.buffer.resize(chunk, 64 * kib).code() == errc::out_of_bytes);  // in the last tier
    CHECK(now.disk.index().size() == 1);
    CHECK(now.contents(chunk) == contents);
  }
  life<two<plain_codec>> now(path, of(16 * kib));
  REQUIRE(now.buffer.find(key_from_id(1)));
  CHECK(now.contents(now.buffer.find(key_from_id(1)).value()) == contents);
}

TEST_CASE("a chunk resized while its copy moves down is in the index only at its final place") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  host_space host({.budget = 1 << 20});
  disk_space disk(path, of(512 * kib));
  // Each of the upper tiers holds four units.
  three<plain_codec> buffer({.max_chunks = 64, .name = "kept"}, {host, 2 * kib, 512}, {host, 2 * kib, 512},
                            {disk, 512 * kib, 512});
  const auto write = [&](chunk_handle chunk, int value) {
    auto lease = buffer.write(chunk).value();
    std::ranges::fill(lease.span(), static_cast<std::byte>(value));
  };
  const chunk_handle chunk = buffer.create(512, key_from_id(1)).value();
  write(chunk, 1);
  REQUIRE(buffer.execute(chunk, plan_operation::write_back, 0) ==
          llmmem::tiering::step_outcome::done);  // to the tier between
  buffer.progress();
  // The others fill what is left, dirty: for one to leave the first tier one must leave the second.
  std::vector<chunk_handle> others;
  for (int i = 0; i < 6; ++i) {
    others.push_back(buffer.create(512).value());
    write(others.back(), 10 + i);
    static_cast<void>(buffer.read(chunk).value());
  }
  CHECK(buffer.tier_of(chunk).value() == 0);
  const std::uint64_t before = disk.index().size();
  REQUIRE(buffer.resize(chunk, 1024));
  CHECK(before == 0);
  CHECK(disk.index().find(key_from_id(1)) == nullptr);
  CHECK(buffer.audit().empty());
}

TEST_CASE("a chunk made in this process and damaged does not count as restored") {
  const temporary_folder folder;
  life<two<plain_codec>> now(folder.file("tier"));
  const chunk_handle chunk = now.buffer.create(1024, key_from_id(1)).value();
  now.write(chunk, bytes(1024, std::byte{1}));
  REQUIRE(now.buffer.persist());
  REQUIRE(now.buffer.evict(chunk));
  const char damaged = 2;
  const std::uint64_t at = now.disk.index().find(key_from_id(1))->offset + 5;
  REQUIRE(::pwrite(now.disk.file().buffered(), &damaged, 1, static_cast<off_t>(at)) == 1);
  CHECK(now.buffer.check_kept().value() == 1);
  CHECK(now.disk.recovery().kept == 0);
  CHECK(now.disk.recovery().damaged == 1);
}

TEST_CASE("a second buffer on a space counts its own finds, not the first buffer's") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  {
    life<two<plain_codec>> now(path);
    now.write(now.buffer.create(1024, key_from_id(1)).value(), bytes(1024, std::byte{1}));
    REQUIRE(now.buffer.persist());
  }
  host_space host({.budget = 1 << 20});
  disk_space disk(path, of(512 * kib));
  for (int n = 0; n < 2; ++n) {
    const two<plain_codec> buffer({}, {host, 32 * kib, 512}, {disk, 512 * kib, 512});
    CHECK(disk.recovery().kept == 1);
  }
}

TEST_CASE("a process with less memory keeps the chunks of one with more, and evicts none") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const bytes contents(8 * kib, std::byte{3});
  {
    life<two<plain_codec>> now(path);
    now.write(now.buffer.create(8 * kib, key_from_id(1)).value(), contents);
    REQUIRE(now.buffer.persist());
  }
  {
    host_space host({.budget = 1 << 20});
    disk_space disk(path, of(512 * kib));
    two<plain_codec> buffer({}, {host, 4 * kib, 512}, {disk, 512 * kib, 512});
    const chunk_handle small = buffer.create(2 * kib).value();
    std::ranges::fill(buffer.write(small).value().span(), std::byte{1});
    const auto refused = buffer.read(buffer.find(key_from_id(1)).value());
    CHECK(refused.code() == errc::out_of_bytes);
    CHECK(buffer.tier_of(small).value() == 0);
    CHECK(buffer.create(8 * kib).error().index == 1);
  }
  life<two<plain_codec>> now(path);
  CHECK(now.contents(now.buffer.find(key_from_id(1)).value()) == contents);
}
