#include <llmmem/testing/crash_states.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem::testing::crash_choice;
using llmmem::testing::crash_limits;
using llmmem::testing::power_cut;
using llmmem::testing::power_cut_when;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;
using llmmem::testing::simulated_writes;
using llmmem::testing::storage_fault;
using llmmem::testing::sweep_power_cuts;
using llmmem::testing::visit_crash_states;
using llmmem_tests::text_of;

static_assert(!std::is_base_of_v<std::exception, power_cut>);
static_assert(!std::is_copy_constructible_v<simulated_storage>);

namespace {

constexpr std::byte poison{0xDB};

std::vector<std::byte> filled(std::size_t count, int with) {
  return std::vector<std::byte>(count, static_cast<std::byte>(with));
}

/// Writes a new file; it is whole, and not synced.
simulated_storage::output written(simulated_storage& storage, const std::string& path,
                                  const std::vector<std::byte>& bytes) {
  auto file = storage.create(path, bytes.size());
  file.finish_write(file.begin_write(0, bytes));
  return file;
}

/// A file that outlasts everything.
void settled(simulated_storage& storage, const std::string& path, const std::vector<std::byte>& bytes) {
  written(storage, path, bytes).sync();
  const auto slash = path.rfind('/');
  storage.sync_folder(slash == std::string::npos ? "" : path.substr(0, slash));
}

template <class Work>
int number_of(Work&& work) {
  try {
    work();
  } catch (const storage_error& failure) {
    return failure.number();
  }
  return -1;
}

using all_files = std::map<std::string, std::vector<std::byte>>;

/// What all crashes leave.
std::set<all_files> states_of(const simulated_storage& storage, const crash_limits& limits = {}) {
  std::set<all_files> states;
  visit_crash_states(storage, limits, [&](simulated_storage& after) { states.insert(after.files()); });
  return states;
}

}  // namespace

TEST_CASE("running code sees all its effects, as a map of paths would") {
  simulated_storage storage({.name = "disk"});
  storage.make_folder("a");
  storage.make_folder("a/b");
  auto file = storage.create("a/b/x", 4);
  CHECK(storage.files() == all_files{{"a/b/x", filled(4, 0xDB)}});
  const auto bytes = filled(2, 7);
  file.finish_write(file.begin_write(1, bytes));
  file.finish_write(file.begin_write(5, bytes));
  const std::vector<std::byte> whole{poison, std::byte{7}, std::byte{7}, poison,
                                     poison, std::byte{7}, std::byte{7}};
  CHECK(storage.files() == all_files{{"a/b/x", whole}});

  storage.link("a/b/x", "y");
  storage.rename("a/b/x", "a/b/z");
  CHECK(storage.files() == all_files{{"a/b/z", whole}, {"y", whole}});
  written(storage, "a/b/w", bytes);
  storage.replace("a/b/w", "a/b/z");
  CHECK(storage.files() == all_files{{"a/b/z", bytes}, {"y", whole}});
  storage.rename("a", "c");
  CHECK(storage.folders() == std::vector<std::string>{"c", "c/b"});
  auto listed = storage.list("");
  std::sort(listed.begin(), listed.end(), [](const auto& x, const auto& y) { return x.name < y.name; });
  CHECK(listed ==
        std::vector<storage_entry>{{"c", storage_entry::kind::folder}, {"y", storage_entry::kind::file}});

  const auto input = storage.open("y");
  storage.remove("y");
  CHECK(input.bytes() == 7);
  std::array<std::byte, 3> read{};
  input.read(4, read);
  CHECK(read == std::array<std::byte, 3>{poison, std::byte{7}, std::byte{7}});
  storage.remove("c/b/z");
  storage.remove_folder("c/b");
  storage.remove_folder("c");
  CHECK(storage.files().empty());
  CHECK(storage.list("").empty());
  CHECK(storage.path("a/b") == "disk/a/b");
  CHECK(storage.path("") == "disk");
}

TEST_CASE("lists are unordered, and repeat in the same order") {
  const auto listed = [](std::uint64_t seed) {
    simulated_storage storage({.seed = seed});
    std::string names;
    for (const char each : std::string("abcdefgh"))
      storage.make_folder({each});
    for (const auto& each : storage.list(""))
      names += each.name;
    return names;
  };
  CHECK(listed(1).size() == 8);
  CHECK(listed(1) != "abcdefgh");
  CHECK(listed(1) == listed(1));
  CHECK(listed(1) != listed(2));
}

TEST_CASE("replace creates a missing name, and two names of one file both stay") {
  simulated_storage storage;
  written(storage, "a", filled(1, 1));
  storage.replace("a", "b");
  CHECK(storage.files() == all_files{{"b", filled(1, 1)}});
  storage.link("b", "c");
  storage.replace("b", "c");
  CHECK(storage.files().size() == 2);
}

TEST_CASE("fingerprints are equal exactly if the visible contents are") {
  const auto made = [](auto&& work) {
    simulated_storage storage;
    written(storage, "a", filled(3, 1));
    work(storage);
    return storage.fingerprint();
  };
  const auto one = made([](simulated_storage&) {});
  CHECK(one == made([](simulated_storage& storage) {
          written(storage, "b", filled(3, 2));
          storage.remove("b");
        }));
  const auto linked = [&](const char* to) {
    return made([&](simulated_storage& storage) {
      written(storage, "b", filled(3, 1));
      storage.link(to, "c");
    });
  };
  const std::set<std::uint64_t> all{
      one,
      linked("a"),
      linked("b"),
      made([](simulated_storage& storage) { storage.link("a", "b"); }),
      made([](simulated_storage& storage) { written(storage, "b", filled(3, 1)); }),
      made([](simulated_storage& storage) { written(storage, "b", {}); }),
      made([](simulated_storage& storage) { storage.make_folder("b"); }),
      made([](simulated_storage& storage) { storage.rename("a", "b"); }),
      made([](simulated_storage& storage) { storage.flip("a", 0); }),
      made([](simulated_storage& storage) { storage.truncate("a", 2); }),
  };
  CHECK(all.size() == 10);
}

TEST_CASE("impossible calls are refused with the error of POSIX, and change nothing") {
  simulated_storage storage({.name = "disk"});
  storage.make_folder("folder");
  storage.make_folder("folder/in");
  written(storage, "file", filled(3, 1));
  written(storage, "other", filled(3, 2));
  const auto before = storage.fingerprint();
  const auto pending = storage.pending().size();

  CHECK(text_of([&] { storage.make_folder("file"); }) ==
        "disk/file: the folder cannot be created: File exists");
  CHECK(number_of([&] { storage.make_folder(""); }) == EEXIST);
  CHECK(number_of([&] { storage.make_folder("no/where"); }) == ENOENT);
  CHECK(number_of([&] { storage.make_folder("file/in"); }) == ENOTDIR);
  CHECK(number_of([&] { storage.make_folder("a//b"); }) == EINVAL);
  CHECK(number_of([&] { storage.make_folder("/a"); }) == EINVAL);
  CHECK(number_of([&] { storage.make_folder("folder/.."); }) == EINVAL);
  CHECK(number_of([&] { storage.make_folder(std::string(256, 'x')); }) == ENAMETOOLONG);
  CHECK(number_of([&] { (void)storage.create("folder", 1); }) == EEXIST);
  CHECK(number_of([&] { (void)storage.open("none"); }) == ENOENT);
  CHECK(number_of([&] { (void)storage.open("folder"); }) == EISDIR);
  CHECK(number_of([&] { storage.rename("file", "other"); }) == EEXIST);
  CHECK(number_of([&] { storage.rename("file", "file"); }) == EEXIST);
  CHECK(number_of([&] { storage.rename("none", "new"); }) == ENOENT);
  CHECK(number_of([&] { storage.replace("folder", "new"); }) == EISDIR);
  CHECK(number_of([&] { storage.replace("file", "folder"); }) == EISDIR);
  CHECK(text_of([&] { storage.rename("file", "folder/file"); }) ==
        "disk/file: cannot be renamed: Invalid cross-device link; to 'disk/folder/file', which is in another "
        "folder: a rename stays in its own");
  CHECK(number_of([&] { storage.link("file", "other"); }) == EEXIST);
  CHECK(number_of([&] { storage.link("folder", "new"); }) == EPERM);
  CHECK(number_of([&] { storage.remove("folder"); }) == EISDIR);
  CHECK(number_of([&] { storage.remove("none"); }) == ENOENT);
  CHECK(number_of([&] { storage.remove_folder("folder"); }) == ENOTEMPTY);
  CHECK(number_of([&] { storage.remove_folder("file"); }) == ENOTDIR);
  CHECK(number_of([&] { (void)storage.list("file"); }) == ENOTDIR);
  CHECK(number_of([&] { storage.sync_folder("file"); }) == ENOTDIR);
  CHECK(number_of([&] { (void)storage.try_lock("folder"); }) == EISDIR);
  std::array<std::byte, 4> four{};
  CHECK(text_of([&] { storage.open("file").read(0, four); }) ==
        "disk/file: cannot be read; 4 bytes at 0 pass its end at 3");

  CHECK(storage.fingerprint() == before);
  CHECK(storage.pending().size() == pending);
  CHECK(text_of([] { simulated_storage({.name = "disk", .sector_bytes = 0}); }) ==
        "simulated_storage 'disk': sectors of 0 bytes; sector_bytes is at least 1");
}

TEST_CASE("mounts without links or without rename report that") {
  simulated_storage storage({.links_allowed = false, .rename_allowed = false});
  written(storage, "a", filled(1, 1));
  CHECK(number_of([&] { storage.link("a", "b"); }) == EOPNOTSUPP);
  CHECK(number_of([&] { storage.rename("a", "b"); }) == EOPNOTSUPP);
  CHECK(number_of([&] { storage.replace("a", "b"); }) == EOPNOTSUPP);
  CHECK(storage.files().contains("a"));
}

TEST_CASE("nothing is durable before its own sync: a file's sync covers no name, a folder's sync no bytes") {
  simulated_storage storage;
  {
    auto file = written(storage, "a", filled(4, 1));
    CHECK(storage.after_crash().files().empty());
    file.sync();
  }
  CHECK(storage.after_crash().files().empty());
  storage.sync_folder("");
  CHECK(storage.after_crash().files() == all_files{{"a", filled(4, 1)}});
  written(storage, "b", filled(4, 2));
  storage.sync_folder("");
  CHECK(states_of(storage) == std::set<all_files>{{{"a", filled(4, 1)}, {"b", {}}},
                                                  {{"a", filled(4, 1)}, {"b", filled(4, 0xDB)}},
                                                  {{"a", filled(4, 1)}, {"b", filled(4, 2)}}});
}

TEST_CASE("a sync of a folder covers neither its own name nor the names in its subfolders") {
  simulated_storage storage;
  storage.make_folder("a");
  storage.make_folder("a/b");
  storage.sync_folder("a");
  CHECK(storage.after_crash().folders().empty());
  storage.sync_folder("");
  CHECK(storage.after_crash().folders() == std::vector<std::string>{"a", "a/b"});
  storage.make_folder("a/c");
  storage.sync_folder("");
  CHECK(storage.after_crash().folders() == std::vector<std::string>{"a", "a/b"});
}

TEST_CASE("a crash may undo a removal until its folder is synced") {
  simulated_storage storage;
  settled(storage, "a", filled(4, 1));
  storage.remove("a");
  CHECK(states_of(storage) == std::set<all_files>{{}, {{"a", filled(4, 1)}}});
  storage.sync_folder("");
  CHECK(states_of(storage) == std::set<all_files>{{}});
}

TEST_CASE("a rename takes effect on both names or neither, and not without the first name's creation") {
  simulated_storage storage;
  (void)storage.create("a", 0);
  storage.rename("a", "b");
  CHECK(states_of(storage) == std::set<all_files>{{}, {{"a", {}}}, {{"b", {}}}});
  const auto pending = storage.pending();
  REQUIRE(pending.size() == 2);
  CHECK(pending[0].text == "name of 'a'");
  CHECK(pending[1].text == "rename of 'a' to 'b'");
  CHECK(pending[1].needs == std::vector<std::size_t>{0});
  CHECK(text_of([&] { (void)storage.after_crash({.survives = {false, true}}); }) ==
        "simulated_storage 'simulated': an impossible crash: 'rename of 'a' to 'b'' survives without 'name "
        "of 'a''");
  CHECK(text_of([&] { (void)storage.after_crash({.survives = {true, true, true}}); }) ==
        "simulated_storage 'simulated': an impossible crash: 3 effects are chosen among 2");
}

TEST_CASE("names without a common history reach the device in any order") {
  simulated_storage storage;
  (void)storage.create("a", 0);
  (void)storage.create("b", 0);
  storage.rename("b", "c");
  CHECK(states_of(storage).contains(all_files{{"c", {}}}));
  CHECK(states_of(storage).size() == 6);
}

TEST_CASE("at most one write is torn, at a sector boundary of the file") {
  simulated_storage storage({.sector_bytes = 4});
  settled(storage, "a", filled(12, 1));
  settled(storage, "b", filled(12, 1));
  auto file = storage.create("c", 16);
  storage.sync_folder("");
  file.sync();
  const auto two = filled(10, 2);
  file.finish_write(file.begin_write(2, two));  // sectors begin at 4 and 8
  std::set<all_files> expected;
  for (const int there : {0, 2, 6, 10}) {
    auto bytes = filled(16, 0xDB);
    std::fill_n(bytes.begin() + 2, there, std::byte{2});
    expected.insert({{"a", filled(12, 1)}, {"b", filled(12, 1)}, {"c", bytes}});
  }
  CHECK(states_of(storage) == expected);
  CHECK(visit_crash_states(storage, {.tears = 1}, [](simulated_storage&) {}).exhaustive == false);
  CHECK(visit_crash_states(storage, {.tears = 2}, [](simulated_storage&) {}).exhaustive == true);
  CHECK(text_of([&] { (void)storage.after_crash({{true}, crash_choice::torn_write{0, 3}}); }) ==
        "simulated_storage 'simulated': an impossible crash: 'data of 'c': 10 bytes at 2' is torn at 3 "
        "bytes, where no sector of 4 bytes begins");
  CHECK(text_of([&] { (void)storage.after_crash({{false}, crash_choice::torn_write{0, 2}}); }) ==
        "simulated_storage 'simulated': an impossible crash: the torn write does not survive");
  CHECK_THROWS_AS((void)storage.after_crash({{true}, crash_choice::torn_write{0, 10}}), argument_error);
}

TEST_CASE("a torn write of many sectors is torn after the first, before the last and between") {
  simulated_storage storage({.sector_bytes = 1});
  const auto ones = filled(101, 1);
  {
    auto file = storage.create("a", 101);
    file.sync();
    storage.sync_folder("");
    file.finish_write(file.begin_write(0, ones));
  }
  std::set<std::ptrdiff_t> there;
  for (const auto& files : states_of(storage))
    there.insert(std::count(files.at("a").begin(), files.at("a").end(), std::byte{1}));
  CHECK(there == std::set<std::ptrdiff_t>{0, 1, 50, 100, 101});
  CHECK(states_of(storage, {.tears = 1000}).size() == 102);
}

TEST_CASE("bytes that did not reach the device have the configured contents") {
  simulated_storage storage({.unwritten = std::byte{0}});
  auto file = storage.create("a", 2);
  storage.sync_folder("");
  file.sync();
  CHECK(storage.after_crash().files() == all_files{{"a", filled(2, 0)}});
}

namespace {

/// The model that the crash rules are held against, by another road: worlds are sets of effects that have
/// come to the device. An effect may join each world that has what it needs; a sync leaves the worlds that
/// have all it covers. One folder, and no subset is ever enumerated.
struct naive_crashes {
  struct effect {
    enum class kind { data, size, names } what;
    int file = 0;
    std::uint64_t offset = 0;
    std::vector<std::byte> bytes;
    std::vector<std::pair<std::string, int>> names;  // -1: gone
  };
  std::vector<effect> effects;
  std::set<std::set<std::size_t>> worlds{{}};
  std::uint64_t sector = 4;

  void join(const effect& what) {
    const std::size_t number = effects.size();
    std::set<std::size_t> needs;
    for (const auto& [name, file] : what.names) {
      for (std::size_t i = number; i-- > 0;) {
        const auto& theirs = effects[i].names;
        if (std::any_of(theirs.begin(), theirs.end(), [&](const auto& each) { return each.first == name; })) {
          needs.insert(i);
          break;
        }
      }
    }
    effects.push_back(what);
    auto more = worlds;
    for (auto world : worlds) {
      if (!std::includes(world.begin(), world.end(), needs.begin(), needs.end())) continue;
      world.insert(number);
      more.insert(world);
    }
    worlds = more;
  }
  template <class Covered>
  void sync(Covered&& covered) {
    std::erase_if(worlds, [&](const auto& world) {
      for (std::size_t i = 0; i < effects.size(); ++i) {
        if (covered(effects[i]) && !world.contains(i)) return true;
      }
      return false;
    });
    // What all have can no longer be torn.
  }
  [[nodiscard]] std::set<all_files> states(const std::set<std::size_t>& untearable) const {
    std::set<all_files> all;
    for (const auto& world : worlds) {
      all.insert(render(world, effects.size(), 0));
      for (const std::size_t i : world) {
        if (effects[i].what != effect::kind::data || untearable.contains(i)) continue;
        for (std::uint64_t bytes = 1; bytes < effects[i].bytes.size(); ++bytes) {
          if ((effects[i].offset + bytes) % sector == 0) all.insert(render(world, i, bytes));
        }
      }
    }
    return all;
  }
  [[nodiscard]] all_files render(const std::set<std::size_t>& world, std::size_t torn,
                                 std::uint64_t bytes) const {
    std::map<int, std::uint64_t> sizes;
    std::map<int, std::map<std::uint64_t, std::byte>> contents;
    std::map<std::string, int> names;
    for (const std::size_t i : world) {
      const effect& each = effects[i];
      if (each.what == effect::kind::size) sizes[each.file] = each.offset;
      for (std::uint64_t k = 0; k < (i == torn ? bytes : each.bytes.size()); ++k)
        contents[each.file][each.offset + k] = each.bytes[k];
      for (const auto& [name, file] : each.names) {
        names.erase(name);
        if (file >= 0) names[name] = file;
      }
    }
    all_files files;
    for (const auto& [name, file] : names) {
      files[name].assign(sizes[file], poison);
      for (const auto& [at, byte] : contents[file]) {
        if (at < sizes[file]) files[name][at] = byte;
      }
    }
    return files;
  }
};

}  // namespace

TEST_CASE("crash states equal those of a model that adds effects to worlds and removes worlds at syncs") {
  std::size_t states = 0;
  for (const auto seed : llmmem_tests::seeds(150)) {
    CAPTURE(seed);
    llmmem_tests::random_numbers random{seed};
    simulated_storage storage({.sector_bytes = 4});
    naive_crashes model;
    std::set<std::size_t> synced;
    std::map<std::string, int> names;
    std::vector<simulated_storage::output> files;
    std::vector<std::uint64_t> sizes;
    const std::vector<std::string> all_names{"a", "b", "c"};
    using effect = naive_crashes::effect;
    for (int step = 0; step < 14 && model.effects.size() < 11; ++step) {
      const std::string& name = all_names[random.below(3U)];
      const std::string& to = all_names[random.below(3U)];
      const bool there = names.contains(name);
      switch (random.below(9U)) {
        case 0:
        case 1:
          if (there) break;
          sizes.push_back(random.below(3U) * 5);
          names[name] = static_cast<int>(files.size());
          model.join({effect::kind::names, 0, 0, {}, {{name, names[name]}}});
          files.push_back(storage.create(name, sizes.back()));
          if (sizes.back() != 0) model.join({effect::kind::size, names[name], sizes.back(), {}, {}});
          break;
        case 2:
        case 3: {
          if (files.empty()) break;
          const std::size_t file = random.below(files.size());
          const std::uint64_t offset = random.below(6U);
          const auto bytes = filled(1 + random.below(9U), step + 1);
          files[file].finish_write(files[file].begin_write(offset, bytes));
          if (offset + bytes.size() > sizes[file]) {
            sizes[file] = offset + bytes.size();
            model.join({effect::kind::size, static_cast<int>(file), sizes[file], {}, {}});
          }
          model.join({effect::kind::data, static_cast<int>(file), offset, bytes, {}});
          break;
        }
        case 4: {
          if (files.empty()) break;
          const int file = static_cast<int>(random.below(files.size()));
          files[static_cast<std::size_t>(file)].sync();
          const auto covered = [&](const effect& each) { return each.names.empty() && each.file == file; };
          model.sync(covered);
          for (std::size_t i = 0; i < model.effects.size(); ++i) {
            if (covered(model.effects[i])) synced.insert(i);
          }
          break;
        }
        case 5:
          storage.sync_folder("");
          model.sync([](const effect& each) { return !each.names.empty(); });
          break;
        case 6:
          if (!there || (names.contains(to) && names[to] == names[name])) break;
          storage.replace(name, to);
          model.join({effect::kind::names, 0, 0, {}, {{name, -1}, {to, names[name]}}});
          names[to] = names[name];
          names.erase(name);
          break;
        case 7:
          if (!there || names.contains(to)) break;
          storage.link(name, to);
          names[to] = names[name];
          model.join({effect::kind::names, 0, 0, {}, {{to, names[to]}}});
          break;
        default:
          if (!there) break;
          storage.remove(name);
          names.erase(name);
          model.join({effect::kind::names, 0, 0, {}, {{name, -1}}});
      }
    }
    const auto expected = model.states(synced);
    const auto found = states_of(storage, {.exhaustive_up_to = 16, .tears = 10});
    REQUIRE(found == expected);
    states += found.size();
    // A sample finds nothing that cannot be.
    for (const auto& each : states_of(storage, {.exhaustive_up_to = 0, .samples = 20, .seed = seed}))
      REQUIRE(expected.contains(each));
  }
  CHECK(states > 1000);
}

namespace {

enum class omitted { nothing, file_sync, last_folder_sync, temporary_file, order };

/// The classic way to replace a file, or that way with a step left out. Notes what it has acknowledged.
struct replacing {
  omitted step = omitted::nothing;
  int acknowledged = 0;

  void operator()(simulated_storage& storage) {
    acknowledged = 0;
    for (const int version : {1, 2}) {
      const auto bytes = filled(24, version);
      if (step == omitted::temporary_file) {
        if (version == 2) storage.remove("a");
        auto file = written(storage, "a", bytes);
        file.sync();
        storage.sync_folder("");
      } else {
        auto file = written(storage, "a.tmp", bytes);
        if (step != omitted::file_sync) file.sync();
        if (step == omitted::order) storage.sync_folder("");
        storage.replace("a.tmp", "a");
        if (step == omitted::nothing || step == omitted::file_sync) storage.sync_folder("");
      }
      acknowledged = version;
    }
  }
};

/// Crash states of the protocol in which "a" is not one whole version, and in which it is an older one than
/// was acknowledged.
struct verdict {
  int broken = 0;
  int forgotten = 0;
  bool exhaustive = false;
};
verdict verdict_on(omitted step) {
  replacing run{step};
  verdict found;
  const simulated_storage empty({.sector_bytes = 8});
  const auto sweep = sweep_power_cuts(empty, run, [&](simulated_storage& after) {
    const auto files = after.files();
    int version = 0;
    if (files.contains("a")) {
      version = files.at("a") == filled(24, 1) ? 1 : files.at("a") == filled(24, 2) ? 2 : -1;
    }
    found.broken += version == -1 ? 1 : 0;
    found.forgotten += version != -1 && version < run.acknowledged ? 1 : 0;
  });
  CHECK(sweep.states > sweep.power_cuts);
  found.exhaustive = sweep.exhaustive;
  return found;
}

}  // namespace

TEST_CASE(
    "write next to it, sync, rename, sync the folder: complete and never forgotten in any crash state") {
  const verdict found = verdict_on(omitted::nothing);
  CHECK(found.exhaustive);
  CHECK(found.broken == 0);
  CHECK(found.forgotten == 0);
}

TEST_CASE("the same steps without the file's sync leave broken files") {
  CHECK(verdict_on(omitted::file_sync).broken > 0);
}

TEST_CASE("the same steps without the folder's last sync forget acknowledged files") {
  const verdict found = verdict_on(omitted::last_folder_sync);
  CHECK(found.broken == 0);
  CHECK(found.forgotten > 0);
}

TEST_CASE("a sync of the folder before the rename does not count after it") {
  const verdict found = verdict_on(omitted::order);
  CHECK(found.broken == 0);
  CHECK(found.forgotten > 0);
}

TEST_CASE("a replacement in place leaves broken files and forgets acknowledged ones") {
  const verdict found = verdict_on(omitted::temporary_file);
  CHECK(found.broken > 0);
  CHECK(found.forgotten > 0);
}

TEST_CASE("the power fails at the named call, before or after its effect, and stays off") {
  const auto run = [](simulated_storage& storage) {
    auto file = storage.create("a", 4);
    const auto bytes = filled(4, 1);
    file.finish_write(file.begin_write(0, bytes));
    file.sync();
    storage.sync_folder("");
    storage.make_folder("b");
  };
  std::uint64_t calls = 0;
  {
    simulated_storage storage;
    run(storage);
    calls = storage.calls();
    CHECK(calls == 7);
    CHECK(storage.trace() == std::vector<std::string>{"create 'a'", "reserve 'a' 4 bytes",
                                                      "begin_write 'a' 4 bytes at 0", "finish_write 'a'",
                                                      "sync 'a'", "sync_folder ''", "make_folder 'b'"});
  }
  for (const auto when : {power_cut_when::before_call, power_cut_when::after_call}) {
    const std::uint64_t late = when == power_cut_when::after_call ? 1 : 0;
    for (std::uint64_t call = 1; call <= calls; ++call) {
      CAPTURE(call);
      simulated_storage storage({.power_cut_at = call, .cut = when});
      std::uint64_t at = 0;
      try {
        run(storage);
      } catch (const power_cut& cut) {
        at = cut.call;
      }
      CHECK(at == call);
      CHECK(storage.power_is_off());
      const std::uint64_t done = call - 1 + late;
      CHECK(storage.files().size() == (done >= 1 ? 1 : 0));
      CHECK(storage.folders().size() == (done >= 7 ? 1 : 0));
      CHECK(storage.after_crash().files().size() == (done >= 6 ? 1 : 0));
      CHECK_THROWS_AS((void)storage.list(""), power_cut);
      CHECK_THROWS_AS((void)storage.create("z", 1), power_cut);
      CHECK(storage.trace().back() == "-- power cut --");
    }
  }
}

TEST_CASE("a call that would fail at the moment of the power cut is cut") {
  simulated_storage storage({.power_cut_at = 1, .cut = power_cut_when::after_call});
  CHECK_THROWS_AS((void)storage.open("none"), power_cut);
}

TEST_CASE("outputs and locks end quietly when the power is off") {
  simulated_storage storage({.writes = simulated_writes::deferred});
  {
    auto file = storage.create("a", 4);
    const auto lock = storage.try_lock("lock");
    REQUIRE(lock);
    CHECK(lock->is_held());
    std::optional bytes = filled(4, 1);
    file.begin_write(0, *bytes);
    storage.cut_power_at(1);
    CHECK_THROWS_AS(storage.sync_folder(""), power_cut);
    CHECK_FALSE(lock->is_held());
    std::fill(bytes->begin(), bytes->end(), std::byte{9});  // nobody reads it any more
  }
  // The write was under way: all of it may have come.
  const auto after = storage.after_crash(storage.all_survives());
  CHECK(after.files().at("a") == filled(4, 1));
  const auto states = states_of(storage);
  CHECK(states.contains({}));
  CHECK(states.contains({{"a", filled(4, 0xDB)}}));
}

TEST_CASE("a storage after a crash has no faults, power cuts, locks or pending effects") {
  simulated_storage storage(
      {.faults = {{.first = 100, .every = 1, .count = storage_fault::forever}}, .seed = 5});
  settled(storage, "a", filled(4, 1));
  const auto lock = storage.try_lock("lock");
  storage.sync_folder("");
  storage.cut_power_at(1);
  CHECK_THROWS_AS(storage.make_folder("b"), power_cut);
  simulated_storage after = storage.after_crash();
  CHECK(after.calls() == 0);
  CHECK(after.pending().empty());
  CHECK(after.try_lock("lock").has_value());
  CHECK(after.options().faults.empty());
  CHECK_FALSE(after.power_is_off());
  const auto trace = after.trace();
  CHECK(std::count(trace.begin(), trace.end(), "-- crash --") == 1);
  // And the first one is as it was.
  CHECK(storage.power_is_off());
  after.remove("a");
  CHECK(storage.files().contains("a"));
}

TEST_CASE("a sweep cuts before each call and after the last, and counts states that differ") {
  std::vector<std::uint64_t> folders;
  const auto sweep = sweep_power_cuts(
      simulated_storage(),
      [](simulated_storage& storage) {
        storage.make_folder("a");
        storage.make_folder("b");
        storage.remove_folder("b");
      },
      [&](simulated_storage& after) { folders.push_back(after.folders().size()); });
  CHECK(sweep.power_cuts == 4);
  CHECK(sweep.exhaustive);
  // Nothing; with and without "a"; any of both; and the same again, since a removal may be undone.
  CHECK(sweep.states == 1 + 2 + 4 + 4);
  CHECK(std::count(folders.begin(), folders.end(), 2) == 2);
}

TEST_CASE("a power cut may interrupt recovery, whose effects are then pending") {
  const simulated_storage empty;
  int nested = 0;
  sweep_power_cuts(
      empty, [](simulated_storage& storage) { settled(storage, "a.tmp", filled(4, 1)); },
      [&](simulated_storage& after) {
        sweep_power_cuts(
            after,
            [](simulated_storage& storage) {
              for (const auto& each : storage.list(""))
                storage.remove(each.name);
              storage.sync_folder("");
            },
            [&](simulated_storage& twice) {
              for (const auto& [path, bytes] : twice.files())
                CHECK(path == "a.tmp");
              ++nested;
            });
      });
  CHECK(nested > 10);
}

TEST_CASE("deferred writes read their memory as late as possible") {
  simulated_storage storage({.writes = simulated_writes::deferred});
  auto file = storage.create("a", 12);
  auto bytes = filled(4, 1);
  const auto token = file.begin_write(0, bytes);
  CHECK(storage.files().at("a") == filled(12, 0xDB));
  CHECK(storage.pending().back().text == "data of 'a': 4 bytes at 0");
  std::fill(bytes.begin(), bytes.end(), std::byte{2});
  file.finish_write(token);
  const auto three = filled(4, 3);
  file.begin_write(4, three);
  file.sync();
  auto four = filled(4, 4);
  {
    const auto other = storage.create("b", 0);
    file.begin_write(8, four);
    const auto gone = std::move(file);
  }
  std::vector<std::byte> expected = filled(4, 2);
  for (const int each : {3, 4})
    expected.insert(expected.end(), 4, static_cast<std::byte>(each));
  CHECK(storage.files().at("a") == expected);
}

TEST_CASE("two overlapping writes in flight are refused by name") {
  simulated_storage storage;
  auto file = storage.create("a", 12);
  const auto bytes = filled(4, 1);
  const auto first = file.begin_write(2, bytes);
  CHECK(text_of([&] { file.begin_write(5, bytes); }) ==
        "simulated/a: cannot be written: Invalid argument; 4 bytes at 5 overlap a write in flight of 4 bytes "
        "at "
        "2");
  file.begin_write(6, bytes);
  file.finish_write(first);
  file.finish_write(first);
  CHECK(number_of([&] { file.begin_write(2, bytes); }) == -1);
  file.sync();
  CHECK(number_of([&] { file.begin_write(2, bytes); }) == -1);
}

TEST_CASE("faults hit the calls that they name, by number, once or permanently") {
  simulated_storage storage;
  storage.set_faults(
      {{.call = storage_call::make_folder, .first = 2, .every = 2, .count = 2, .number = EDQUOT},
       {.call = storage_call::list, .first = 1, .every = 1, .count = storage_fault::forever}});
  std::vector<int> numbers;
  for (int i = 0; i < 7; ++i) {
    numbers.push_back(number_of([&] { storage.make_folder(std::to_string(i)); }));
    CHECK(number_of([&] { (void)storage.list(""); }) == EIO);
  }
  CHECK(numbers == std::vector{-1, EDQUOT, -1, EDQUOT, -1, -1, -1});
  CHECK(storage.folders() == std::vector<std::string>{"0", "2", "4", "5", "6"});

  storage.set_faults({{.first = 3, .number = EROFS}});
  storage.make_folder("a");
  storage.sync_folder("");
  CHECK(text_of([&] { storage.remove_folder("a"); }) ==
        "simulated/a: the folder cannot be removed: Read-only file system; a planned fault");
  storage.remove_folder("a");
  CHECK(storage.trace()[storage.trace().size() - 2] == "remove_folder 'a': Read-only file system");
}

TEST_CASE("a fault that is only reported is a success that the caller does not learn of") {
  simulated_storage storage({.faults = {{.what = storage_fault::kind::reported}}});
  CHECK(number_of([&] { storage.make_folder("a"); }) == EIO);
  CHECK(storage.folders().size() == 1);
  storage.set_faults({{.call = storage_call::lock, .what = storage_fault::kind::reported}});
  CHECK(number_of([&] { (void)storage.try_lock("lock"); }) == EIO);
  CHECK(storage.try_lock("lock").has_value());
}

TEST_CASE("after a failed sync every later one fails, and earlier writes may or may not be on the device") {
  for (const auto what :
       {storage_fault::kind::refused, storage_fault::kind::lost, storage_fault::kind::reported}) {
    simulated_storage storage({.faults = {{.call = storage_call::sync, .what = what}}});
    auto file = written(storage, "a", filled(4, 1));
    storage.sync_folder("");
    CHECK(text_of([&] { file.sync(); }) ==
          "simulated/a: cannot be synced: written bytes may be lost: Input/output error; a planned fault");
    CHECK(text_of([&] { file.sync(); }) ==
          "simulated/a: cannot be synced: written bytes may be lost: Input/output error; a sync of it has "
          "failed before");
    CHECK(storage.files().at("a") == filled(4, 1));
    const auto states = states_of(storage);
    CHECK(states.contains({{"a", filled(4, 1)}}) == (what != storage_fault::kind::lost));
    CHECK(states.contains({{"a", {}}}) == (what != storage_fault::kind::reported));
  }
}

TEST_CASE("a lost sync of a folder is never repeated; a refused one may be tried again") {
  for (const auto what : {storage_fault::kind::refused, storage_fault::kind::lost}) {
    simulated_storage storage({.faults = {{.call = storage_call::sync_folder, .what = what}}});
    storage.make_folder("a");
    CHECK(number_of([&] { storage.sync_folder(""); }) == EIO);
    CHECK(number_of([&] { storage.sync_folder(""); }) == (what == storage_fault::kind::lost ? EIO : -1));
    CHECK(storage.after_crash().folders().size() == (what == storage_fault::kind::lost ? 0 : 1));
  }
}

TEST_CASE("a write that fails at its end no longer uses its memory") {
  simulated_storage storage({.writes = simulated_writes::deferred});
  auto file = storage.create("a", 4);
  std::optional bytes = filled(4, 1);
  const auto token = file.begin_write(0, *bytes);
  storage.set_faults({{.call = storage_call::write, .number = ENOSPC}});
  CHECK(number_of([&] { file.finish_write(token); }) == ENOSPC);
  bytes.reset();
  // One that is called a failure as it begins is not looked at again, either.
  bytes = filled(2, 2);
  storage.set_faults({{.call = storage_call::write, .what = storage_fault::kind::reported}});
  CHECK(number_of([&] { file.begin_write(2, *bytes); }) == EIO);
  bytes.reset();
  file.sync();
  CHECK(storage.files().at("a") == std::vector<std::byte>{poison, poison, std::byte{2}, std::byte{2}});
}

TEST_CASE("a storage is full by the bytes of its files, and removed files return their space") {
  simulated_storage storage({.capacity = 10});
  written(storage, "a", filled(6, 1));
  CHECK(text_of([&] { (void)storage.create("b", 5); }) ==
        "simulated/b: space cannot be allocated for the file: No space left on device; 5 bytes requested, "
        "6 of 10 are in use");
  CHECK_FALSE(storage.files().contains("b"));
  {
    auto file = storage.create("b", 4);
    const auto bytes = filled(4, 1);
    CHECK(number_of([&] { file.begin_write(1, bytes); }) == ENOSPC);
    CHECK(number_of([&] { file.begin_write(0, bytes); }) == -1);
  }
  storage.remove("b");
  storage.link("a", "c");  // no room of its own
  CHECK(number_of([&] { (void)storage.create("d", 4); }) == -1);
  storage.remove("a");
  CHECK(number_of([&] { (void)storage.create("more", 1); }) == ENOSPC);
  storage.remove("c");
  CHECK(number_of([&] { (void)storage.create("e", 6); }) == -1);
}

TEST_CASE("a file that found no space may exist, empty, after a crash") {
  simulated_storage storage({.capacity = 10});
  CHECK(number_of([&] { (void)storage.create("b", 11); }) == ENOSPC);
  CHECK(states_of(storage) == std::set<all_files>{{}, {{"b", {}}}});
}

TEST_CASE("damage at rest stays in the file, and a place outside it is refused") {
  simulated_storage storage;
  settled(storage, "a", filled(4, 0));
  storage.flip("a", 17);
  auto bytes = filled(4, 0);
  bytes[2] = std::byte{2};
  CHECK(storage.files().at("a") == bytes);
  CHECK(storage.after_crash().files().at("a") == bytes);
  storage.truncate("a", 3);
  bytes.pop_back();
  CHECK(storage.after_crash().files().at("a") == bytes);
  storage.grow("a", 4);
  bytes.push_back(poison);
  CHECK(storage.after_crash().files().at("a") == bytes);
  CHECK(storage.files().at("a") == bytes);
  CHECK(text_of([&] { storage.flip("a", 32); }) ==
        "simulated/a: bit 32 cannot be flipped in a file of 4 bytes");
  CHECK(text_of([&] { storage.truncate("a", 4); }) ==
        "simulated/a: cannot be truncated to 4 bytes, because it has 4");
  CHECK(text_of([&] { storage.grow("a", 4); }) == "simulated/a: cannot grow to 4 bytes, because it has 4");
  CHECK(text_of([&] { storage.grow("b", 4); }) ==
        "simulated_storage: grow to 4: simulated/b: cannot be opened: No such file or directory");
}

TEST_CASE("one owner has a lock until it ends, and no longer once the name is another file's") {
  simulated_storage storage;
  {
    auto lock = storage.try_lock("lock");
    REQUIRE(lock);
    CHECK(lock->is_held());
    CHECK_FALSE(storage.try_lock("lock").has_value());
    const auto moved = std::move(*lock);
    CHECK(moved.is_held());
    CHECK_FALSE(lock->is_held());
    CHECK(storage.try_lock("other").has_value());
    CHECK(storage.try_lock("other").has_value());  // it has ended
    storage.remove("lock");
    CHECK_FALSE(moved.is_held());
    const auto second = storage.try_lock("lock");
    REQUIRE(second);
    CHECK(second->is_held());
    CHECK_FALSE(moved.is_held());
    written(storage, "new", filled(1, 1));
    storage.replace("new", "lock");
    CHECK_FALSE(second->is_held());
  }
  CHECK(storage.try_lock("lock").has_value());
}

TEST_CASE("nonces never repeat, also after a crash, and follow from the seed") {
  simulated_storage storage({.seed = 3});
  simulated_storage same({.seed = 3});
  simulated_storage other({.seed = 4});
  std::set<std::uint64_t> met;
  for (int i = 0; i < 100; ++i) {
    const auto nonce = storage.nonce();
    CHECK(nonce == same.nonce());
    met.insert(nonce);
    met.insert(other.nonce());
  }
  simulated_storage after = storage.after_crash();
  simulated_storage again = after.after_crash();
  for (int i = 0; i < 100; ++i) {
    met.insert(storage.nonce());
    met.insert(after.nonce());
    met.insert(again.nonce());
  }
  CHECK(met.size() == 500);
}

TEST_CASE("a sample has the extremes, and reports that it is a sample") {
  simulated_storage storage;
  for (int i = 0; i < 30; ++i)
    (void)storage.create(std::to_string(i), 0);
  std::set<std::size_t> counts;
  std::size_t alone = 0;
  const auto visits = visit_crash_states(storage, {.samples = 10}, [&](simulated_storage& after) {
    counts.insert(after.files().size());
    alone += after.files().size() == 1 ? 1U : 0U;
  });
  CHECK_FALSE(visits.exhaustive);
  CHECK(visits.states >= 62);
  CHECK(visits.states <= 72);
  CHECK(counts.contains(0));
  CHECK(counts.contains(29));
  CHECK(counts.contains(30));
  CHECK(alone >= 30);
  CHECK(states_of(storage, {.samples = 10}) == states_of(storage, {.samples = 10}));
  CHECK(states_of(storage, {.samples = 10}) != states_of(storage, {.samples = 10, .seed = 2}));
  CHECK(text_of([&] { (void)states_of(storage, {.exhaustive_up_to = 25}); }) ==
        "visit_crash_states: 2^25 states would be visited; exhaustive_up_to is at most 24");
}

TEST_CASE("a crash state describes its origin") {
  simulated_storage storage({.sector_bytes = 4});
  auto file = written(storage, "a", filled(8, 1));
  const auto after =
      storage.after_crash({.survives = {true, true, true}, .torn = crash_choice::torn_write{2, 4}});
  CHECK(after.trace() == std::vector<std::string>{"create 'a'", "reserve 'a' 8 bytes",
                                                  "begin_write 'a' 8 bytes at 0", "finish_write 'a'",
                                                  "-- crash --", "survived: name of 'a'",
                                                  "survived: size of 'a': 8 bytes",
                                                  "survived: data of 'a': 8 bytes at 0, torn after 4"});
  CHECK(storage.after_crash().trace().back() == "lost: data of 'a': 8 bytes at 0");
}
