#include <llmmem/tiering/chunk_index.hpp>

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::temporary_folder;

namespace {

using contents = std::map<std::uint64_t, chunk_extent>;  // by the id of the key
using bytes = std::vector<char>;

constexpr std::size_t record_bytes = 72;
constexpr std::size_t first_change = 2;  // behind the header and how many records are durable
constexpr chunk_key ours{.low = 7, .high = 9};

[[nodiscard]] chunk_index_options of(std::uint32_t max_chunks, std::uint32_t slack = 1000) {
  return {.file_id = ours, .max_chunks = max_chunks, .slack = slack};
}

[[nodiscard]] contents all_of(const chunk_index& index, std::uint64_t ids) {
  contents found;
  for (std::uint64_t id = 0; id < ids; ++id) {
    if (const chunk_extent* const extent = index.find(key_from_id(id))) found[id] = *extent;
  }
  std::uint64_t counted = 0;
  index.for_each([&](const chunk_extent&) { ++counted; });
  CHECK(counted == found.size());
  CHECK(index.size() == found.size());
  return found;
}

[[nodiscard]] bytes file_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void put_file(const std::string& path, const bytes& all) {
  std::ofstream(path, std::ios::binary).write(all.data(), static_cast<std::streamsize>(all.size()));
}

/// One change, to a map and to an index.
struct change {
  std::uint64_t id = 0;
  std::optional<chunk_extent> extent;

  void apply(contents& to) const {
    if (extent) {
      to[id] = *extent;
    } else {
      to.erase(id);
    }
  }
  [[nodiscard]] result<void> apply(chunk_index& to) const {
    return extent ? to.keep(*extent) : to.drop(key_from_id(id));
  }
};

[[nodiscard]] change any_change(random_numbers& random, std::uint64_t ids) {
  const std::uint64_t id = random.below(ids);
  if (random.once_in(3)) return {id, {}};
  return {id, chunk_extent{.key = key_from_id(id),
                           .offset = random.next(),
                           .bytes = random.next(),
                           .stored = random.next(),
                           .format = random.next(),
                           .checksum = static_cast<std::uint32_t>(random.next())}};
}

/// A journal of changes that each wrote a record.
[[nodiscard]] std::vector<change> written_changes(random_numbers& random, chunk_index& index,
                                                  std::size_t count) {
  std::vector<change> made;
  contents now;
  while (made.size() < count) {
    const change next = any_change(random, 6);
    if (!next.extent && !now.contains(next.id)) continue;
    REQUIRE(next.apply(index));
    next.apply(now);
    made.push_back(next);
  }
  return made;
}

[[nodiscard]] contents after(const std::vector<change>& changes, std::size_t first, std::size_t end) {
  contents now;
  for (std::size_t i = first; i < end; ++i)
    changes[i].apply(now);
  return now;
}

}  // namespace

TEST_CASE("an index equals the map written to it, also when it is opened repeatedly") {
  for (const std::uint64_t seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const temporary_folder folder;
    const std::string path = folder.file("index");
    const auto slack = random.below(40U);
    contents expected;
    for (int life = 0; life < 6; ++life) {
      chunk_index index(path, of(16, slack));
      CHECK(index.recovery().damaged + index.recovery().torn + index.recovery().overtaken == 0);
      REQUIRE(all_of(index, 24) == expected);
      for (int step = 0; step < 60; ++step) {
        const change next = any_change(random, 24);
        const bool fits = !next.extent || expected.contains(next.id) || expected.size() < 16;
        const result<void> done = next.apply(index);
        REQUIRE(done.has_value() == fits);
        if (fits) {
          next.apply(expected);
        } else {
          CHECK(done.code() == errc::table_full);
        }
        REQUIRE(all_of(index, 24) == expected);
        REQUIRE(index.journal_bytes() <= (2 * 16 + slack + 2) * record_bytes);
        if (random.once_in(9)) REQUIRE(index.sync());
      }
      CHECK(std::filesystem::file_size(path) == index.journal_bytes());
    }
    CHECK(!std::filesystem::exists(path + ".new"));
  }
}

TEST_CASE("a journal cut anywhere has the state before some last changes") {
  random_numbers random(5);
  const temporary_folder folder;
  const std::string path = folder.file("index");
  std::vector<change> changes;
  {
    chunk_index index(path, of(8));
    changes = written_changes(random, index, 12);
  }
  const bytes whole = file_bytes(path);
  REQUIRE(whole.size() == 14 * record_bytes);
  for (std::size_t cut = 0; cut < whole.size(); ++cut) {
    CAPTURE(cut);
    put_file(path, bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(cut)));
    const std::size_t left = cut / record_bytes;
    {
      chunk_index index(path, of(8));
      REQUIRE(all_of(index, 6) == after(changes, 0, left < first_change ? 0 : left - first_change));
      CHECK(index.recovery().torn == cut % record_bytes);
      CHECK(index.recovery().damaged + index.recovery().lost == 0);
      REQUIRE(index.keep({.key = key_from_id(3), .bytes = cut}));
    }
    chunk_index again(path, of(8));
    CHECK(again.recovery().torn == 0);
    REQUIRE(again.find(key_from_id(3)) != nullptr);
    CHECK(again.find(key_from_id(3))->bytes == cut);
  }
}

TEST_CASE("a damaged record voids all records before it") {
  random_numbers random(6);
  const temporary_folder folder;
  const std::string path = folder.file("index");
  std::vector<change> changes;
  {
    chunk_index index(path, of(8));
    changes = written_changes(random, index, 12);
  }
  const bytes whole = file_bytes(path);
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    const std::size_t at = bit / 8;
    const std::size_t number = at / record_bytes;
    CAPTURE(bit);
    bytes damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (bit % 8)));
    put_file(path, damaged);
    if (number == 0 && at >= 4 && at < 8) {
      CHECK_THROWS_AS(chunk_index(path, of(8)), io_error);
      CHECK(file_bytes(path) == damaged);
      continue;
    }
    contents left;
    {
      chunk_index index(path, of(8));
      left = all_of(index, 6);
      const index_recovery& seen = index.recovery();
      if (number == 0) {
        // It has the salt: without it nothing is known to be of this journal.
        REQUIRE(left.empty());
        CHECK(seen.damaged == changes.size() + first_change);
      } else if (number == 1) {
        REQUIRE(left == after(changes, 0, changes.size()));
        CHECK(seen.damaged == 1);
        CHECK(seen.overtaken == 0);
      } else if (number == changes.size() + 1) {
        REQUIRE(left == after(changes, 0, changes.size() - 1));
        CHECK(seen.torn == record_bytes);
        CHECK(seen.overtaken == 0);
      } else {
        const std::size_t gone = number - first_change;
        REQUIRE(left == after(changes, gone + 1, changes.size()));
        CHECK(seen.damaged == 1);
        contents whole_map = after(changes, 0, gone);
        for (std::size_t i = gone + 1; i < changes.size(); ++i)
          whole_map.erase(changes[i].id);
        CHECK(seen.overtaken == whole_map.size());
      }
      CHECK(seen.records == (number == 0 ? 0 : changes.size() + 1));
      CHECK(seen.lost == 0);
    }
    chunk_index again(path, of(8));
    CHECK(again.recovery().damaged + again.recovery().torn == 0);
    REQUIRE(all_of(again, 6) == left);
  }
}

TEST_CASE("a complete record in another record's place is damage") {
  random_numbers random(7);
  const temporary_folder folder;
  const std::string path = folder.file("index");
  std::vector<change> changes;
  {
    chunk_index index(path, of(8));
    changes = written_changes(random, index, 9);
  }
  bytes moved = file_bytes(path);
  std::copy_n(moved.begin() + 2 * record_bytes, record_bytes, moved.begin() + 5 * record_bytes);
  put_file(path, moved);
  const chunk_index index(path, of(8));
  CHECK(index.recovery().damaged == 1);
  CHECK(all_of(index, 6) == after(changes, 4, 9));
}

TEST_CASE("records of an older journal at the end of a new one do not count") {
  random_numbers random(8);
  const temporary_folder folder;
  const std::string path = folder.file("index");
  {
    chunk_index older(path, of(8));
    static_cast<void>(written_changes(random, older, 40));
  }
  const bytes old = file_bytes(path);
  std::filesystem::remove(path);
  std::vector<change> changes;
  {
    chunk_index index(path, of(8));
    changes = written_changes(random, index, 9);
  }
  const bytes whole = file_bytes(path);
  // As a file system gives them back: blocks of the file that was replaced, from some page on.
  for (const std::size_t from :
       {whole.size(), whole.size() - record_bytes / 2, whole.size() - 3 * record_bytes}) {
    CAPTURE(from);
    bytes mixed(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(from));
    mixed.insert(mixed.end(), old.begin() + static_cast<std::ptrdiff_t>(from), old.end());
    put_file(path, mixed);
    const std::size_t kept = from / record_bytes - first_change;
    const chunk_index index(path, of(8));
    CHECK(all_of(index, 6) == after(changes, 0, kept));
    CHECK(index.recovery().torn == mixed.size() - (kept + first_change) * record_bytes);
    CHECK(index.recovery().damaged == 0);
  }
  // Nor does one pass that an older journal had in the middle.
  bytes mixed = whole;
  std::copy_n(old.begin() + 4 * record_bytes, record_bytes, mixed.begin() + 4 * record_bytes);
  put_file(path, mixed);
  const chunk_index index(path, of(8));
  CHECK(index.recovery().damaged == 1);
  CHECK(all_of(index, 6) == after(changes, 3, 9));
}

TEST_CASE("an unreadable end that was durable counts as damage, and not as cut off by a crash") {
  for (const std::uint64_t seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const temporary_folder folder;
    const std::string path = folder.file("index");
    std::vector<change> changes;
    std::size_t durable = 0;
    {
      chunk_index index(path, of(8));
      contents now;
      while (changes.size() < 12) {
        const change next = any_change(random, 6);
        if (!next.extent && !now.contains(next.id)) continue;
        REQUIRE(next.apply(index));
        next.apply(now);
        changes.push_back(next);
        if (random.once_in(5)) {
          REQUIRE(index.sync());
          durable = changes.size();
        }
      }
    }
    const bytes whole = file_bytes(path);
    REQUIRE(whole.size() == (12 + first_change) * record_bytes);
    const bool is_cut = random.once_in(2);
    for (std::size_t left = 0; left < 12; ++left) {
      CAPTURE(left);
      bytes damaged = whole;
      const std::size_t end = (left + first_change) * record_bytes;
      if (is_cut) {
        damaged.resize(end);
      } else {
        for (std::size_t at = end; at < damaged.size(); at += record_bytes)
          damaged[at + random.below(record_bytes)] ^= static_cast<char>(1 << random.below(8U));
      }
      put_file(path, damaged);
      {
        const chunk_index index(path, of(8));
        const index_recovery& seen = index.recovery();
        CHECK(seen.torn == (is_cut ? 0 : whole.size() - end));
        CHECK(seen.lost == (left < durable ? durable - left : 0));
        CHECK(seen.damaged == 0);
        const contents before = after(changes, 0, left);
        // What the lost records said may have been of any chunk.
        REQUIRE(all_of(index, 6) == (left < durable ? contents{} : before));
        CHECK(seen.overtaken == (left < durable ? before.size() : 0));
      }
      const chunk_index again(path, of(8));
      CHECK(again.recovery().lost + again.recovery().torn + again.recovery().damaged == 0);
    }
  }
}

TEST_CASE("a file that is not an index, or of another file or version, is refused and left as it is") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  const std::string what = path + ": cannot be taken as the index of a tier: ";
  const auto refused = [&](const std::string& why) {
    const bytes before = file_bytes(path);
    CHECK_THROWS_WITH_AS(chunk_index(path, of(8)), (what + why).c_str(), io_error);
    CHECK(file_bytes(path) == before);
  };
  put_file(path, bytes(3000, 'x'));
  refused("it is another kind of file; take another path, or move it away");
  put_file(path, bytes(20, 'x'));
  refused("it is another kind of file; take another path, or move it away");
  std::filesystem::remove(path);
  {
    chunk_index other(path, {.file_id = {.low = 8, .high = 9}, .max_chunks = 8});
    REQUIRE(other.keep({.key = key_from_id(1)}));
  }
  refused("it belongs to another file; bring its own back, or remove it to start empty");
  // The header of the first version: no salt, and nothing of what is durable.
  std::array<std::byte, record_bytes> first{};
  detail::put_number(first.data() + 4, 0x696D'6C6C, 4);
  detail::put_number(first.data() + 16, ours.low, 8);
  detail::put_number(first.data() + 24, ours.high, 8);
  detail::put_number(first.data() + 32, 1, 8);
  detail::put_number(first.data(), crc32c(0, std::span(first).subspan(4)), 4);
  bytes as_read(record_bytes);
  std::memcpy(as_read.data(), first.data(), record_bytes);
  put_file(path, as_read);
  refused("it is of version 1, this is version 2; remove it to start empty");
  CHECK_THROWS_WITH_AS(chunk_index(path, of(0)), "chunk_index: max_chunks is 0; it must be at least 1",
                       argument_error);
  CHECK_THROWS_AS(chunk_index(folder.file("no/such/folder"), of(8)), io_error);
}

TEST_CASE("an index opened for fewer chunks than it has keeps the first, and reports it") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  {
    chunk_index index(path, of(8));
    for (std::uint64_t id = 0; id < 8; ++id)
      REQUIRE(index.keep({.key = key_from_id(id), .bytes = id}));
  }
  {
    const chunk_index index(path, of(5));
    CHECK(index.size() == 5);
    CHECK(index.recovery().surplus == 3);
  }
  const chunk_index again(path, of(8));
  CHECK(again.size() == 5);
  CHECK(again.recovery().surplus == 0);
}

TEST_CASE("an index without space on the device refuses the change and stays as it was") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  {
    chunk_index index(path, of(64, 4));
    for (std::uint64_t id = 0; id < 10; ++id)
      REQUIRE(index.keep({.key = key_from_id(id), .bytes = id}));
    const contents full = all_of(index, 64);
    // Room for the ten, the two before them and half a record: neither one more, nor all of them anew with
    // one more.
    rlimit little = before;
    little.rlim_cur = 12 * record_bytes + record_bytes / 2;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &little) == 0);
    const result<void> more = index.keep({.key = key_from_id(20)});
    const result<void> gone = index.drop(key_from_id(4));
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(more.code() == errc::write_failed);
    CHECK(more.error().index == EFBIG);
    CHECK(gone.code() == errc::write_failed);
    CHECK(all_of(index, 64) == full);
    REQUIRE(index.drop(key_from_id(4)));
    REQUIRE(index.keep({.key = key_from_id(21), .bytes = 21}));
  }
  std::signal(SIGXFSZ, old_handler);
  const chunk_index again(path, of(64));
  CHECK(again.recovery().damaged + again.recovery().torn == 0);
  CHECK(again.size() == 10);
  CHECK(again.find(key_from_id(4)) == nullptr);
  CHECK(again.find(key_from_id(21)) != nullptr);
}

TEST_CASE("a journal that cannot be rewritten grows further, and is rewritten later") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  chunk_index index(path, of(4, 8));
  std::filesystem::create_directory(path + ".new");  // in the way of the file that it would make
  for (std::uint64_t i = 0; i < 40; ++i)
    REQUIRE(index.keep({.key = key_from_id(i % 3), .bytes = i}));
  CHECK(index.journal_bytes() == 42 * record_bytes);
  std::filesystem::remove(path + ".new");
  for (std::uint64_t i = 40; i < 50; ++i)
    REQUIRE(index.keep({.key = key_from_id(i % 3), .bytes = i}));
  CHECK(index.journal_bytes() < 20 * record_bytes);
  REQUIRE(index.find(key_from_id(1)) != nullptr);
  CHECK(index.find(key_from_id(1))->bytes == 49);
}

TEST_CASE("each name has its own key, equal wherever it is made") {
  static_assert(key_of_name("wq") == key_of_name("wq"));
  CHECK(key_of_name("") != key_of_name(std::string_view("\0", 1)));
  CHECK(key_of_name("abcd") != key_of_name("abc"));
  CHECK(key_of_name(std::string_view("a\0b", 3)) != key_of_name("ab"));
  // Kept in files: the bytes of SHA-256 over the length in 8 bytes and the name in whole words, big-endian.
  CHECK(key_of_name("layers.0.wq") == chunk_key{.low = 0x43f9'dfc8'5dc7'20d2, .high = 0x56b1'b498'f292'ceba});
}

TEST_CASE("an index opened by a relative path is rewritten in place, wherever the process has moved") {
  const temporary_folder folder;
  const temporary_folder elsewhere;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  {
    chunk_index index("index", of(4, 8));
    std::filesystem::current_path(elsewhere.path());
    for (std::uint64_t i = 0; i < 40; ++i)
      REQUIRE(index.keep({.key = key_from_id(i % 3), .bytes = i}));
    REQUIRE(index.drop(key_from_id(0)));
    REQUIRE(index.sync());
  }
  std::filesystem::current_path(before);
  CHECK(std::filesystem::is_empty(elsewhere.path()));
  const chunk_index again(folder.file("index"), of(4, 8));
  CHECK(again.size() == 2);
  CHECK(again.find(key_from_id(0)) == nullptr);
}

TEST_CASE("the index does not write to the target of a link next to it") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  put_file(folder.file("precious"), bytes(100, 'p'));
  std::filesystem::create_symlink(folder.file("precious"), path + ".new");
  {
    chunk_index index(path, of(4));
    REQUIRE(index.keep({.key = key_from_id(1)}));
  }
  CHECK(file_bytes(folder.file("precious")) == bytes(100, 'p'));
  CHECK(!std::filesystem::is_symlink(path));
}

TEST_CASE("an index opened for fewer chunks than it once had keeps all that are left") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  {
    chunk_index index(path, of(8));
    for (std::uint64_t id = 0; id < 8; ++id)
      REQUIRE(index.keep({.key = key_from_id(id), .bytes = id}));
    for (std::uint64_t id = 0; id < 4; ++id)
      REQUIRE(index.drop(key_from_id(id)));
  }
  const chunk_index index(path, of(4));
  CHECK(index.recovery().surplus == 0);
  CHECK(index.size() == 4);
}

TEST_CASE("a journal extended to a terabyte is opened in the memory and time of its contents") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  {
    chunk_index index(path, of(8));
    for (std::uint64_t id = 0; id < 5; ++id)
      index.keep({.key = key_from_id(id), .offset = id, .bytes = 9}).value();
    index.drop(key_from_id(3)).value();
    index.sync().value();
  }
  const std::uint64_t records = std::filesystem::file_size(path) / record_bytes;
  constexpr std::uint64_t terabyte = std::uint64_t{1} << 40;
  std::filesystem::resize_file(path, terabyte);
  {
    chunk_index index(path, of(8));
    CHECK(all_of(index, 9).size() == 4);
    CHECK(index.recovery().torn == terabyte - records * record_bytes);
    CHECK(index.recovery().damaged == 0);
  }
  CHECK(std::filesystem::file_size(path) == records * record_bytes);
  // With something far behind: it is no record, and nothing before it is doubted for it.
  std::filesystem::resize_file(path, terabyte);
  {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(terabyte / 2);
    file << "what is no record";
  }
  chunk_index index(path, of(8));
  CHECK(all_of(index, 9).size() == 4);
  CHECK(index.recovery().records == records);
}

TEST_CASE("a long journal of few chunks is folded while it is read, in any order of changes") {
  for (const auto seed : seeds(2)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const temporary_folder folder;
    const std::string path = folder.file("index");
    contents expected;
    {
      chunk_index index(path, of(16, 40'000));
      for (std::uint64_t i = 0; i < 9000; ++i) {
        change each{.id = random.below(16U), .extent = std::nullopt};
        if (random.below(3U) != 0) each.extent = chunk_extent{.key = key_from_id(each.id), .offset = i};
        each.apply(expected);
        each.extent ? index.keep(*each.extent).value() : index.drop(key_from_id(each.id)).value();
      }
    }
    const chunk_index index(path, of(16));
    CHECK(all_of(index, 16) == expected);
    CHECK(index.recovery().records > 7000);
  }
}
