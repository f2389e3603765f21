/// Tensors with names: what of them is there in the next process, and how that is told.
#include <llmmem/codec/bf16_cast.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>
#include <llmmem/tiering/persistent_tensors.hpp>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
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
constexpr std::uint64_t kib = 1024;
using disk_space = persistent_file_space<>;
using buffer_type = tiered_buffer<host_space, disk_space>;
using tensors_type = persistent_tensors<buffer_type>;

struct named {
  std::string name;
  std::uint64_t size;
};
constexpr chunk_mapping_options packed{.group_bytes = 2048, .split_bytes = 4096, .unit = 512};

/// "a", "b" and "c" share the first chunk, "alone" has the second, "large" the next three.
const std::vector<named> usual{{"a", 300}, {"b", 40}, {"c", 700}, {"alone", 3000}, {"large", 9000}};

[[nodiscard]] tensor_names names_of(const std::vector<named>& all) {
  std::vector<std::string> names;
  for (const named& each : all)
    names.push_back(each.name);
  return tensor_names(std::move(names));
}
[[nodiscard]] chunk_mapping mapping_of(const std::vector<named>& all,
                                       const chunk_mapping_options& options = packed) {
  std::vector<tensor_size> sizes;
  for (const named& each : all)
    sizes.push_back({.bytes = each.size, .alignment = 64});
  return map_to_chunks(sizes, options);
}

/// The buffer of one process.
struct process {
  host_space host{{.budget = 1 << 20}};
  disk_space disk;
  buffer_type buffer;

  explicit process(const std::string& path, std::uint64_t top = 16 * kib)
      : disk(path, {.space = {.budget = 256 * kib, .queue = {.driver = llmmem::transfer::driven_by::waiters}},
                    .max_chunks = 64}),
        buffer({.max_chunks = 64, .name = "buffer"}, {host, top, 512}, {disk, 256 * kib, 512}) {}
  ~process() {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
  process(const process&) = delete;
  process& operator=(const process&) = delete;
};

/// One life of the tensors.
struct life : process {
  tensors_type tensors;

  explicit life(const std::string& path, const std::vector<named>& all = usual,
                llmmem::tiering::other_layout on_other = llmmem::tiering::other_layout::refuse,
                const chunk_mapping_options& options = packed)
      : process(path), tensors(buffer, disk, "weights", names_of(all), mapping_of(all, options), on_other) {}
  ~life() {
    for (const std::string& broken : tensors.audit())
      FAIL_CHECK(broken);
  }

  void fill(const std::string& name, int value) {
    tensors
        .for_each_part<access_mode::write>(*tensors.find(name),
                                           [&](auto& lease, const tensor_part&) {
                                             std::ranges::fill(lease.span(), static_cast<std::byte>(value));
                                           })
        .value();
  }
  [[nodiscard]] bool holds(const std::string& name, int value) {
    bool all = true;
    const result<void> seen =
        tensors.for_each_part<access_mode::read>(*tensors.find(name), [&](auto& lease, const tensor_part&) {
          all = all && std::ranges::all_of(lease.span(), [&](std::byte each) {
                  return each == static_cast<std::byte>(value);
                });
        });
    return seen && all;
  }
  [[nodiscard]] bool has(const std::string& name) {
    return tensors.has_contents(*tensors.find(name)).value();
  }
  /// Flips a bit of the chunk in the file.
  void damage(const std::string& name, std::uint32_t part = 0) {
    const chunk_handle chunk = tensors.chunk(*tensors.find(name), part).value();
    REQUIRE(buffer.evict(chunk));
    const std::uint32_t number = to_index(tensors.mapping().parts(*tensors.find(name))[part].chunk);
    const chunk_extent* at =
        disk.index().find(key_of_name("tensors of weights: chunk " + std::to_string(number)));
    REQUIRE(at != nullptr);
    char there = 0;
    const auto where = static_cast<off_t>(at->offset + 1);
    REQUIRE(::pread(disk.file().buffered(), &there, 1, where) == 1);
    there = static_cast<char>(there ^ 16);
    REQUIRE(::pwrite(disk.file().buffered(), &there, 1, where) == 1);
  }
};

void keep_all(const std::string& path) {
  life now(path);
  for (std::size_t i = 0; i < usual.size(); ++i)
    now.fill(usual[i].name, static_cast<int>(i) + 1);
  REQUIRE(now.tensors.persist());
}

/// A folder whose files can be replaced, but that cannot itself be opened, and so not be synced.
class unreadable_folder {
 public:
  explicit unreadable_folder(std::filesystem::path folder) : folder_(std::move(folder)), was_(::geteuid()) {
    constexpr uid_t nobody = 65534;
    if (was_ == 0) REQUIRE(::chown(folder_.c_str(), nobody, static_cast<gid_t>(-1)) == 0);
    REQUIRE(::chmod(folder_.c_str(), 0300) == 0);
    if (was_ == 0) REQUIRE(::seteuid(nobody) == 0);  // who may read all folders reads this one
  }
  unreadable_folder(const unreadable_folder&) = delete;
  unreadable_folder& operator=(const unreadable_folder&) = delete;
  ~unreadable_folder() {
    CHECK(::seteuid(was_) == 0);
    CHECK(::chmod(folder_.c_str(), 0700) == 0);
  }

 private:
  std::filesystem::path folder_;
  uid_t was_;
};

[[nodiscard]] std::string why_refused(const std::string& path, const std::vector<named>& all,
                                      const chunk_mapping_options& options = packed) {
  try {
    life now(path, all, llmmem::tiering::other_layout::refuse, options);
  } catch (const argument_error& refused) {
    return refused.what();
  }
  return "taken";
}

}  // namespace

TEST_CASE("the same tensors opened in the next process have their contents") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  {
    life now(path);
    CHECK(now.tensors.recovery().message() ==
          "0 tensors were restored; nothing was kept before; 5 were never persisted");
    CHECK(now.tensors.without_contents().size() == 5);
  }
  keep_all(path);
  for (int again = 0; again < 2; ++again) {
    life now(path);
    CHECK(now.tensors.recovery().message() == "5 tensors were restored");
    CHECK(now.tensors.without_contents().empty());
    for (std::size_t i = 0; i < usual.size(); ++i)
      CHECK(now.holds(usual[i].name, static_cast<int>(i) + 1));
  }
}

TEST_CASE("tensors are found by name") {
  const temporary_folder folder;
  life now(folder.file("tier"));
  CHECK(now.tensors.find("large").value() == tensor_id{4});
  CHECK(now.tensors.names()[tensor_id{1}] == "b");
  CHECK(!now.tensors.find("larg"));
}

TEST_CASE("other tensors under the same name are refused with the first difference") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  const std::string says = "weights: other tensors are kept in " + path + ".weights.tensors: ";
  const std::string mends = "; take another name for these, or other_layout::start_over to drop those";
  auto other = usual;
  other[3].size = 2999;
  CHECK(why_refused(path, other) == says + "tensor 3, \"alone\", has 2999 bytes, kept were 3000" + mends);
  other = usual;
  std::swap(other[1], other[2]);
  CHECK(why_refused(path, other) == says + "tensor 1 is \"c\", kept was \"b\"" + mends);
  other = usual;
  other.pop_back();
  CHECK(why_refused(path, other) == says + "4 tensors, kept were 5: \"large\" is missing" + mends);
  other = usual;
  other.push_back({"more", 10});
  CHECK(why_refused(path, other) == says + "6 tensors, kept were 5: \"more\" is new" + mends);
  CHECK(why_refused(path, usual, {.group_bytes = 2048, .split_bytes = 8192, .unit = 512}) ==
        says + "tensor 4, \"large\", is in 2 parts, kept was in 3: the mapping's options differ" + mends);
  CHECK(why_refused(path, usual, {.group_bytes = 512, .split_bytes = 4096, .unit = 512}) ==
        says +
            "tensor 2, \"c\", is in chunk 1 from byte 0 on, kept in chunk 0 from byte 384 on: the mapping's "
            "options differ" +
            mends);
  // Every part lies where it did, only the room behind the last of a chunk differs.
  CHECK(why_refused(path, usual, {.group_bytes = 2048, .split_bytes = 4096, .unit = 1024}) ==
        says +
            "tensor 0, \"a\", is in a chunk of 2048 bytes, kept in one of 1536: the mapping's options "
            "differ" +
            mends);
  // Nothing was touched by being refused.
  life now(path);
  CHECK(now.tensors.recovery().kept == 5);
  CHECK(now.holds("large", 5));
}

TEST_CASE("other tensors replace the kept ones on request") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  auto other = usual;
  other[4].size = 100;
  {
    life now(path, other, llmmem::tiering::other_layout::start_over);
    CHECK(now.tensors.recovery().message() ==
          "0 tensors were restored; other tensors were kept, which were given up; 5 were never persisted");
    CHECK(now.disk.index().size() == 0);
    CHECK(now.buffer.stats().tiers[1].chunks == 2);
  }
  {
    life now(path, other);  // these are kept from then on, though they have nothing yet
    CHECK(!now.tensors.recovery().is_new);
    now.fill("large", 9);
    REQUIRE(now.tensors.persist());
  }
  life now(path, other);
  CHECK(now.tensors.recovery().kept == 1);
  CHECK(now.tensors.recovery().empty == 4);
  CHECK(now.holds("large", 9));
}

TEST_CASE("a tensor first written after the last persist has no contents in the next process") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  {
    life now(path);
    now.fill("a", 1);
    now.fill("alone", 2);
    REQUIRE(now.tensors.persist());
    now.fill("b", 3);
    now.fill("large", 4);
    REQUIRE(now.buffer.flush());  // in the file, and in its index
  }
  life now(path);
  CHECK(now.tensors.recovery().kept == 2);
  CHECK(now.tensors.recovery().empty == 3);
  CHECK(now.tensors.recovery().missing.empty());
  CHECK(now.tensors.recovery().removed == 3);
  CHECK(now.holds("a", 1));
  CHECK(now.holds("alone", 2));
  CHECK(!now.has("b"));
  CHECK(!now.has("large"));
  CHECK(now.tensors.read(tensor_id{1}).code() == errc::no_contents);
}

TEST_CASE("chunks that a process never persisted do not hinder the next one") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  {
    life now(path);
    now.fill("a", 1);
    now.fill("large", 1);
    REQUIRE(now.buffer.flush());
    CHECK(now.disk.index().size() == 4);
  }
  life now(path);
  CHECK(now.tensors.recovery().removed == 4);
  CHECK(now.tensors.recovery().is_new);
  now.fill("a", 2);
  CHECK(now.holds("a", 2));
}

TEST_CASE("a tensor whose chunk is missing is reported with its neighbours, and no others are") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  {
    process now(path);
    for (const char* chunk : {"0", "3"}) {
      const auto found = now.buffer.find(key_of_name("tensors of weights: chunk " + std::string(chunk)));
      REQUIRE(now.buffer.remove(found.value()));
    }
  }
  {
    life now(path);
    const persistent_recovery& found = now.tensors.recovery();
    CHECK(found.missing == std::vector{tensor_id{0}, tensor_id{1}, tensor_id{2}, tensor_id{4}});
    CHECK(found.kept == 1);
    CHECK(found.message() ==
          "1 tensors were restored; 4 are missing, the first of them \"a\": compute them again");
    CHECK(now.tensors.without_contents() == found.missing);
    CHECK(now.holds("alone", 4));
    CHECK(now.tensors.has_contents(tensor_id{4}, 0).value());
    CHECK(!now.tensors.has_contents(tensor_id{4}, 1).value());
    now.fill("b", 7);
    REQUIRE(now.buffer.flush());
  }
  // Of a chunk that was made anew the table vouches for nothing, though it once did.
  life now(path);
  CHECK(!now.has("a"));
  CHECK(now.tensors.recovery().kept == 1);
}

TEST_CASE("a discarded tensor stays discarded, even if its chunk is written again before the process ends") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  {
    life now(path);
    for (const char* each : {"a", "b", "c"})
      REQUIRE(now.tensors.discard(*now.tensors.find(each)));
    now.fill("b", 8);  // all of the chunk is dirty: what lies around it is anything
    REQUIRE(now.buffer.flush());
  }
  life now(path);
  CHECK(!now.has("a"));
  CHECK(!now.has("c"));
  CHECK(now.holds("large", 5));
}

TEST_CASE("a discard that the table cannot record is refused, and the tensor keeps its contents") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  life now(path);
  // The name that the new table has first is taken, by what cannot be removed so.
  std::filesystem::create_directory(path + ".weights.tensors.new");
  const result<void> gone = now.tensors.discard(tensor_id{0});
  CHECK(gone.code() == errc::not_opened);
  CHECK(now.holds("a", 1));
  std::filesystem::remove(path + ".weights.tensors.new");
  REQUIRE(now.tensors.discard(tensor_id{0}));
  CHECK(!now.has("a"));
  const auto held = now.tensors.read(tensor_id{1}).value();
  CHECK(now.tensors.discard(tensor_id{1}).code() == errc::chunk_leased);
}

TEST_CASE("a table of uncertain durability is written again even if it is the same") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const auto cannot_sync = [&](auto&& act) {
    const unreadable_folder blind(folder.path());
    const result<void> done = act();
    CHECK(done.code() == errc::sync_failed);
  };
  keep_all(path);
  {
    life now(path);
    // The new table has the name, and says that "alone" has nothing.
    cannot_sync([&] { return now.tensors.discard(*now.tensors.find("alone")); });
    CHECK(now.holds("alone", 4));
    REQUIRE(now.tensors.persist());
  }
  {
    life now(path);
    CHECK(now.holds("alone", 4));
    REQUIRE(now.tensors.discard(*now.tensors.find("b")));
    now.fill("b", 7);
    // The new table has the name, and vouches for "b".
    cannot_sync([&] { return now.tensors.persist(); });
    REQUIRE(now.tensors.discard(*now.tensors.find("b")));
    REQUIRE(now.buffer.flush());
  }
  life now(path);
  CHECK(!now.has("b"));
  CHECK(now.holds("a", 1));
}

TEST_CASE("persist is refused while a tensor is written, and the table stays as it was") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  {
    life now(path);
    now.fill("a", 1);
    REQUIRE(now.tensors.persist());
    auto held = now.tensors.write(*now.tensors.find("alone")).value();
    CHECK(now.tensors.persist().code() == errc::chunk_leased);
  }
  life now(path);
  CHECK(now.tensors.recovery().kept == 1);
  CHECK(!now.has("alone"));
}

TEST_CASE("check_kept gives up the tensors in damaged chunks, and names them") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  {
    life now(path);
    REQUIRE(now.tensors.discard(*now.tensors.find("c")));
    now.damage("b");
    now.damage("large", 1);
    CHECK(now.tensors.read(*now.tensors.find("b")).code() == errc::checksum_differs);
    CHECK(now.tensors.check_kept().value() == 3);
    CHECK(now.tensors.recovery().missing == std::vector{tensor_id{0}, tensor_id{1}, tensor_id{4}});
    CHECK(now.tensors.recovery().first_missing == "a");
    CHECK(now.tensors.check_kept().value() == 0);
    CHECK(!now.has("large"));
    now.fill("b", 9);
    CHECK(now.holds("b", 9));
    CHECK(now.holds("alone", 4));
  }
  life now(path);
  CHECK(now.tensors.recovery().kept == 1);
}

TEST_CASE("check_kept recreates the chunks that the buffer's own check has removed") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  {
    life now(path);
    now.damage("b");
    REQUIRE(now.buffer.check_kept().value() == 1);
    CHECK(now.tensors.write(*now.tensors.find("b")).code() == errc::stale_handle);
    CHECK(now.tensors.check_kept().value() == 3);
    CHECK(now.tensors.recovery().missing == std::vector<tensor_id>{tensor_id{0}, tensor_id{1}, tensor_id{2}});
    CHECK(now.tensors.without_contents() == now.tensors.recovery().missing);
    now.fill("b", 7);
    CHECK(now.holds("alone", 4));
    REQUIRE(now.tensors.persist());
  }
  life now(path);
  CHECK(now.holds("b", 7));
  CHECK(!now.has("a"));
}

TEST_CASE(
    "a table that is damaged, or of another file, proves nothing; a file that is not a table is refused") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const std::string table = path + ".weights.tensors";
  keep_all(path);
  const auto size = std::filesystem::file_size(table);
  const auto flip = [&](std::uint64_t at) {
    std::fstream file(table, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const int there = file.get();
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(there ^ 1));
  };
  for (const std::uint64_t at : {std::uint64_t{0}, std::uint64_t{20}, std::uint64_t{60}, size - 1}) {
    CAPTURE(at);
    keep_all(path);
    flip(at);
    life now(path);
    CHECK(now.tensors.recovery().table_damaged);
    CHECK(now.tensors.recovery().removed == 5);
    CHECK(now.tensors.without_contents().size() == 5);
  }
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{20}, size - 1}) {
    keep_all(path);
    std::filesystem::resize_file(table, length);
    CHECK(life(path).tensors.recovery().table_damaged);
  }
  keep_all(path);
  std::filesystem::remove(path);  // the tier begins anew beside it
  CHECK(life(path).tensors.recovery().message() ==
        "0 tensors were restored; their table was of another file, all were given up; 5 were never "
        "persisted");
  std::ofstream(table, std::ios::trunc) << "something that somebody else has written, and is longer";
  CHECK_THROWS_WITH_AS(
      life{path},
      (table + ": cannot be taken as a table of tensors: it is another kind of file; move it "
               "away, or take another name for the tensors")
          .c_str(),
      io_error);
}

TEST_CASE("without a table, no chunk of an earlier, larger set keeps its space") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  {
    process both(path);
    tensors_type other(both.buffer, both.disk, "biases", names_of(usual), mapping_of(usual));
    static_cast<void>(other.write(tensor_id{0}).value());
    REQUIRE(other.persist());
  }
  std::filesystem::remove(path + ".weights.tensors");
  const std::vector<named> fewer(usual.begin(), usual.begin() + 3);
  life now(path, fewer);
  CHECK(now.tensors.recovery().removed == 5);
  CHECK(now.disk.index().size() == 1);  // the other set's
  CHECK(now.buffer.stats().tiers[1].chunks == 2);
}

TEST_CASE("two sets of tensors share a file, and each finds its own") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const std::vector<named> few{{"a", 100}, {"b", 200}};
  for (int round = 0; round < 2; ++round) {
    process now(path);
    tensors_type weights(now.buffer, now.disk, "weights", names_of(usual), mapping_of(usual));
    tensors_type moments(now.buffer, now.disk, "moments", names_of(few), mapping_of(few));
    if (round == 0) {
      std::ranges::fill(weights.write(tensor_id{0}).value().span(), std::byte{1});
      std::ranges::fill(moments.write(tensor_id{0}).value().span(), std::byte{2});
      REQUIRE(weights.persist());
      REQUIRE(moments.persist());
      continue;
    }
    CHECK(weights.read(tensor_id{0}).value().span()[0] == std::byte{1});
    CHECK(moments.read(tensor_id{0}).value().span()[0] == std::byte{2});
    CHECK(moments.recovery().empty == 1);
  }
}

TEST_CASE("tensors opened again in the same process have their persisted contents") {
  const temporary_folder folder;
  process now(folder.file("tier"));
  for (int round = 0; round < 3; ++round) {
    tensors_type tensors(now.buffer, now.disk, "weights", names_of(usual), mapping_of(usual));
    CHECK(tensors.recovery().kept == (round == 0 ? 0 : 1));
    CHECK(tensors.recovery().removed == (round == 0 ? 0 : 1));
    std::ranges::fill(tensors.write(tensor_id{0}).value().span(), std::byte{1});
    REQUIRE(tensors.persist());
    std::ranges::fill(tensors.write(tensor_id{3}).value().span(), std::byte{2});
    CHECK(tensors.audit().empty());
  }
}

TEST_CASE("a lossy codec in the last tier keeps the tensors, and never encodes their table") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  using cast_buffer = tiered_buffer<host_space, tier<disk_space, lru_eviction, write_back, bf16_cast>>;
  for (int round = 0; round < 2; ++round) {
    host_space host({.budget = 1 << 20});
    disk_space disk(path, {.space = {.budget = 256 * kib}});
    cast_buffer buffer({.largest_chunk_bytes = 4096}, {host, 32 * kib, 512}, {disk, 256 * kib, 512});
    persistent_tensors tensors(buffer, disk, "weights", names_of(usual), mapping_of(usual));
    CHECK(tensors.recovery().kept == (round == 0 ? 0 : 1));
    if (round == 1) CHECK(tensors.read(tensor_id{0}).value().span()[3] == std::byte{0x3F});
    if (round == 1) continue;
    auto lease = tensors.write(tensor_id{0}).value();
    for (std::size_t i = 0; i < lease.span().size(); ++i)
      lease.span()[i] = i % 4 == 3 ? std::byte{0x3F} : i % 4 == 2 ? std::byte{0x80} : std::byte{0};
    lease.end();
    REQUIRE(tensors.persist());
  }
}

TEST_CASE("invalid names of tensors are refused with how to resolve it") {
  const temporary_folder folder;
  process now(folder.file("tier"));
  const auto refused = [&](const std::string& set, std::vector<std::string> names) {
    try {
      tensors_type tensors(now.buffer, now.disk, set, tensor_names(std::move(names)), mapping_of(usual));
    } catch (const argument_error& why) {
      return std::string(why.what());
    }
    return std::string("taken");
  };
  CHECK(
      refused("a/b", {"a", "b", "c", "d", "e"}) ==
      "persistent_tensors: \"a/b\" cannot name a set: use 1 to 64 letters, digits, '_', '-' and '.', no '.' "
      "first");
  CHECK(refused("..", {"a", "b", "c", "d", "e"}).starts_with("persistent_tensors: \"..\" cannot"));
  CHECK(refused("", {"a", "b", "c", "d", "e"}).starts_with("persistent_tensors: \"\" cannot"));
  CHECK(refused("w", {"a", "b"}) == "w: 2 names for 5 tensors; give one name for each tensor");
  CHECK(refused("w", {"a", "b", "a", "d", "e"}) ==
        "tensor_names: tensors 0 and 2 are both called \"a\"; names must differ");
  CHECK(refused("w", {"a", "", "c", "d", "e"}) == "tensor_names: tensor 1 has an empty name; give it one");
  CHECK(now.buffer.stats().tiers[1].chunks == 0);
}

TEST_CASE("tensors that do not fit leave the kept ones as they were") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  keep_all(path);
  const std::vector<named> huge{{"x", 200 * kib}, {"y", 100 * kib}};
  {
    process now(path);
    CHECK_THROWS_AS(tensors_type(now.buffer, now.disk, "others", names_of(huge), mapping_of(huge)),
                    out_of_memory);
    CHECK(now.buffer.stats().tiers[1].chunks == 5);
  }
  life now(path);
  CHECK(now.tensors.recovery().kept == 5);
}

namespace {

/// What a tensor may hold in the next process.
struct history {
  std::vector<int> versions;  // since the last persist, the persisted one first
  bool is_persisted = false;  // had contents then
  bool is_touched = false;    // its chunk was stored, or may have been, since
  [[nodiscard]] bool may_be(int seen) const { return std::ranges::count(versions, seen) != 0; }
};

}  // namespace

TEST_CASE("after any end of a process, the next one has persisted versions or newer ones, or none") {
  for (const std::uint64_t seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const temporary_folder folder;
    const std::string path = folder.file("tier");
    std::vector<history> expected(usual.size());
    int version = 1;
    for (int n = 0; n < 4; ++n) {
      CAPTURE(n);
      life now(path);
      for (std::size_t i = 0; i < usual.size(); ++i) {
        CAPTURE(usual[i].name);
        history& h = expected[i];
        const bool is_missing =
            std::ranges::count(now.tensors.recovery().missing, tensor_id{static_cast<std::uint32_t>(i)}) != 0;
        if (!now.has(usual[i].name)) {
          CHECK((!h.is_persisted || is_missing));
          if (h.is_persisted) REQUIRE(h.is_touched);
          h = {};
          continue;
        }
        REQUIRE(h.is_persisted);
        int seen = -1;
        for (const int each : h.versions) {
          if (now.holds(usual[i].name, each % 251)) seen = each;
        }
        // A large tensor may be of several versions: they are its parts' own.
        if (i != 4) REQUIRE(seen >= 0);
        h.versions = seen >= 0 ? std::vector{seen} : h.versions;
        h.is_touched = seen < 0;
      }
      const auto touch = [&](std::size_t i) {
        for (std::size_t k = 0; k < 3; ++k) {
          if (i < 3) expected[k].is_touched = true;
        }
        expected[i].is_touched = true;
      };
      for (int step = 0; step < 40; ++step) {
        const std::size_t i = random.below(static_cast<std::uint32_t>(usual.size()));
        history& h = expected[i];
        switch (random.below(6U)) {
          case 0:
          case 1:
          case 2:
            now.fill(usual[i].name, ++version % 251);
            h.versions.push_back(version);
            touch(i);
            break;
          case 3:
            REQUIRE(now.tensors.discard(tensor_id{static_cast<std::uint32_t>(i)}));
            h = {};
            touch(i);
            break;
          case 4:
            if (random.once_in(2)) REQUIRE(now.tensors.flush(tensor_id{static_cast<std::uint32_t>(i)}));
            break;
          default: {
            if (!random.once_in(4)) break;
            REQUIRE(now.tensors.persist());
            for (std::size_t k = 0; k < usual.size(); ++k) {
              history& each = expected[k];
              each.is_persisted = now.has(usual[k].name);
              each.is_touched = false;
              if (!each.versions.empty()) each.versions = {each.versions.back()};
              if (!each.is_persisted) each = {};
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a killed process leaves complete tensors, or the next one reports them as missing") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  random_numbers random(11);
  int first = 0;
  for (int round = 0; round < 6; ++round) {
    int pipes[2];
    REQUIRE(::pipe(pipes) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::close(pipes[0]);
      life now(path);
      for (int n = first;; ++n) {
        for (const named& each : usual)
          now.fill(each.name, n % 100);
        if (n % 3 == 0) static_cast<void>(now.tensors.persist());
        if (::write(pipes[1], &n, sizeof n) != sizeof n) ::_exit(1);
      }
    }
    ::close(pipes[1]);
    const int until = first + 2 + static_cast<int>(random.below(40U));
    int n = 0;
    while (::read(pipes[0], &n, sizeof n) == sizeof n) {
      if (n == until) ::kill(child, SIGKILL);
    }
    ::close(pipes[0]);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    life after(path);
    const persistent_recovery& found = after.tensors.recovery();
    CHECK(!found.table_damaged);
    CHECK(found.kept + found.missing.size() == usual.size());
    for (std::size_t i = 0; i + 1 < usual.size(); ++i) {
      const std::string& name = usual[i].name;
      if (!after.has(name)) continue;
      bool is_complete = false;
      for (int value = 0; value < 100 && !is_complete; ++value)
        is_complete = after.holds(name, value);
      CHECK(is_complete);
    }
    first = n + 1;
  }
}
