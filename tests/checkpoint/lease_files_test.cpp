// Locks by lease files: on file systems that have no flock, and by the user's word.
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/hold.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>
#include <llmmem/transfer/file_lock.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/temporary_folder.hpp"
#include "support/without_flock.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::atomic<bool> syncs_are_slow = false;

}  // namespace

/// That of the system, or, of a file system that is far away, one that takes longer than a lease of 1 ms.
extern "C" int fdatasync(int file) {
  if (syncs_are_slow) ::usleep(2'000);
  return static_cast<int>(::syscall(SYS_fdatasync, file));
}

namespace {

constexpr std::uint64_t ms = 1'000'000;
constexpr std::uint64_t minutes = 60'000 * ms;
constexpr checkpoint_world small{.ranks = 1, .files = 1};

posix_storage_options by_lease(std::uint64_t length_ns) {
  return {.locks = file_locks::lease_file, .lease_ns = length_ns};
}

std::vector<std::string> leases(const temporary_folder& folder) {
  std::vector<std::string> names;
  for (const auto& each : std::filesystem::directory_iterator(folder.file("run/.leases")))
    names.push_back(each.path().filename().string());
  return names;
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

/// A lease of a process on another machine.
std::string of_elsewhere(std::uint64_t length_ns) {
  return detail::to_text({.is_free = false,
                          .renewed = 4,
                          .length_ns = length_ns,
                          .token = "0123",
                          .owner = {.process = 1, .start = 1, .place = "elsewhere", .host = "other"}});
}

/// A process with the lock of a folder, until it is let go on or ended.
std::unique_ptr<told_child> holder(const temporary_folder& folder, const posix_storage_options& how) {
  return std::make_unique<told_child>([&](auto tell, auto wait) {
    posix_storage<> storage(folder.file("run"), how);
    const auto lock = storage.try_lock("LOCK");
    tell(lock ? "has it" : "refused");
    static_cast<void>(wait());
  });
}

}  // namespace

TEST_SUITE("lease files") {
  TEST_CASE(
      "where a file system has no flock, what needs a lock takes a lease file, and a second one is refused") {
    const temporary_folder folder;
    for (const int number : {ENOLCK, ENOSYS, EOPNOTSUPP}) {
      told_child child([&](auto tell, auto) {
        if (!refuse_flock(number)) return tell("not allowed");
        posix_storage<> storage(folder.file("run"), {.lease_ns = 6'000 * ms});
        {
          const auto lock = storage.try_lock("LOCK");
          tell(lock && lock->is_held() ? "taken" : "not taken");
          if (number != ENOLCK) return;  // the rest waits
          posix_storage<> other(folder.file("run"), {.lease_ns = 6'000 * ms});
          tell(other.try_lock("LOCK") ? "taken" : "refused");
        }
        tell(storage.try_lock("LOCK") ? "taken" : "refused");
        const std::string tier = folder.file("tier");
        const file_space_options space{.budget = 65536, .file = {.lease_ns = 6'000 * ms}};
        const persistent_file_space<> one(tier, {.space = space});
        tell(text_of([&] { const persistent_file_space<> two(tier, {.space = space}); }));
        tell(text_of([&] { const file_space<> two(tier, space); }));
        posix_storage<> trusted(folder.file("run"), {.locks = file_locks::caller});
        const auto first = trusted.try_lock("LOCK");
        const auto second = trusted.try_lock("LOCK");
        tell(first && second ? "both" : "one");
      });
      const std::string first = child.next();
      if (first == "not allowed") {
        MESSAGE("not tested: the system lets no process filter its calls");
        return;
      }
      CHECK(first == "taken");
      if (number != ENOLCK) continue;
      CHECK(child.next() == "refused");
      CHECK(child.next() == "taken");
      const std::string held =
          folder.file("tier") +
          ": another process, or another object in this one, holds the file; end that, or "
          "use another path: each rank and each tier needs its own";
      CHECK(child.next() == held);
      CHECK(child.next() == held);
      CHECK(child.next() == "both");
      CHECK(child.next() == "ended");
    }
  }

  TEST_CASE(
      "a killed process of this machine loses its lease at once, also before its parent waited for it") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(9 * minutes));
    for (const bool waits : {true, false}) {
      const auto child = holder(folder, by_lease(9 * minutes));
      REQUIRE(child->next() == "has it");
      detail::lease_owner owner = detail::this_process();
      owner.process = child->process();
      owner.start = detail::status_of(child->process())->start;
      CHECK_FALSE(detail::has_ended(owner, detail::this_process()));
      child->end(waits);
      REQUIRE(detail::has_ended(owner, detail::this_process()));
      CHECK(storage.try_lock("LOCK").has_value());  // else this waits for ten minutes
    }
  }

  TEST_CASE("only of a process of the same place is it known that it ended") {
    const detail::lease_owner self = detail::this_process();
    REQUIRE_FALSE(self.place.empty());
    CHECK_FALSE(detail::has_ended(self, self));
    detail::lease_owner other = self;
    other.start += 1;  // its number was given to another process
    CHECK(detail::has_ended(other, self));
    other.place = "elsewhere";
    CHECK_FALSE(detail::has_ended(other, self));
    CHECK_FALSE(detail::has_ended({.process = self.process, .start = 1}, {.process = 1}));
    other = self;
    other.process = 0;
    CHECK_FALSE(detail::has_ended(other, self));
  }

  TEST_CASE(
      "a process of another machine loses its lease when it was silent for its length, and a torn one too") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(20 * ms));
    std::uint64_t number = 7;
    for (const std::string& text :
         {of_elsewhere(20 * ms), of_elsewhere(20 * ms).substr(0, 50), std::string(), std::string("llmmem")}) {
      write(folder.file("run/.leases/LOCK." + std::to_string(number)), text);
      const auto lock = storage.try_lock("LOCK");
      CHECK(lock.has_value());
      const std::vector<std::string> left = leases(folder);
      REQUIRE(left.size() == 1);
      const std::uint64_t taken = std::stoull(left[0].substr(5));
      CHECK(taken > number);
      number = taken + 1;
    }
  }

  TEST_CASE("a file that is no lease is refused with its name, and what cannot be a folder of leases, too") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(20 * ms));
    const std::string path = folder.file("run/.leases/LOCK.3");
    write(path, "4711\n");
    const std::string lock = std::filesystem::canonical(folder.path()).string() + "/run/LOCK";
    CHECK(text_of([&] { static_cast<void>(storage.try_lock("LOCK")); }) ==
          lock + ": cannot be locked; " + std::filesystem::canonical(path).string() +
              ": it is not a lease file; another program wrote it: remove it if no process uses the file "
              "that it "
              "locks");
    CHECK(contents(path) == "4711\n");
    std::filesystem::remove_all(folder.file("run/.leases"));
    write(folder.file("run/.leases"), "a file");
    const std::string text = text_of([&] { static_cast<void>(storage.try_lock("LOCK")); });
    CAPTURE(text);
    CHECK(
        text.ends_with("; a lease file is needed: let processes write to that folder, or set `locks` to "
                       "file_locks::caller and ensure that no other process has " +
                       lock));
    CHECK_THROWS_WITH_AS(
        static_cast<void>(posix_storage<>(folder.file("run"), by_lease(1)).try_lock("LOCK")),
        (lock + ": a lease of 1 ns; set lease_ns to 1 ms at least and 10 minutes at most").c_str(),
        argument_error);
  }

  TEST_CASE("of processes that take over a lease together, one has it") {
    for (const bool was_held : {true, false}) {
      const temporary_folder folder;
      std::filesystem::create_directories(folder.file("run"));
      if (was_held) write(folder.file("run/.leases/LOCK.41"), of_elsewhere(20 * ms));
      std::vector<std::unique_ptr<told_child>> all;
      for (int i = 0; i < 6; ++i)
        all.push_back(holder(folder, by_lease(6'000 * ms)));
      int count = 0;
      for (const auto& each : all) {
        const std::string told = each->next();
        CHECK((told == "has it" || told == "refused"));
        count += told == "has it" ? 1 : 0;
      }
      CHECK(count == 1);
    }
  }

  TEST_CASE("a process that was stopped past its lease commits nothing, also if no process took the folder") {
    for (const bool is_taken : {true, false}) {
      const temporary_folder folder;
      told_child child([&](auto tell, auto wait) {
        // With flock a stopped process of the same machine keeps the folder.
        if (!refuse_flock(ENOLCK)) return tell("the system lets no process filter its calls");
        posix_storage<> storage(folder.file("run"), by_lease(60 * ms));
        // A busy machine may let a lease of this length run out before the file is open.
        std::optional<checkpoint_folder<posix_storage<>>> own;
        own.emplace(storage);
        save_step(*own, {.ranks = 1, .files = 1}, 1);
        const checkpoint_draft draft = own->begin(2);
        const checkpoint_manifest all = write_rank(storage, small, draft, 0);
        tell("ready");
        static_cast<void>(wait());
        try {
          own->commit(draft, all);
          tell("committed");
        } catch (const fenced& error) {
          tell(error.what());
        }
        own->abandon(draft);
        try {
          static_cast<void>(own->begin(3));
          tell("begun");
        } catch (const fenced&) {
          tell("fenced");
        }
      });
      const std::string first = child.next();
      if (first != "ready") {
        MESSAGE("not tested: " << first);
        continue;
      }
      child.send(SIGSTOP);
      std::optional<posix_storage<>> storage;
      std::optional<checkpoint_folder<posix_storage<>>> next;
      if (is_taken) {
        storage.emplace(folder.file("run"), by_lease(9 * minutes));
        next.emplace(*storage);
        save_step(*next, small, 2);
      } else {
        ::usleep(120'000);
      }
      child.send(SIGCONT);
      child.let_go_on();
      CHECK(child.next() ==
            std::filesystem::canonical(folder.path()).string() +
                "/run/LOCK: it was removed or replaced while this process held it, or its lease ran "
                "out: another one may commit to the folder now; nothing was committed");
      // Where nobody has it, it takes a new lease.
      CHECK(child.next() == (is_taken ? "fenced" : "begun"));
      if (!is_taken) continue;
      save_step(*next, small, 3);
      const checkpoint_search found = find_checkpoint(*storage);
      REQUIRE(found.found);
      CHECK(found.found->id.step == 3);
      CHECK(list_checkpoints(*storage).size() == 3);
    }
  }

  TEST_CASE("a checkpoint that a reader holds by a lease stays, and its hold ends with the reader") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(9 * minutes));
    checkpoint_folder run(storage);
    save_step(run, small, 1);
    told_child child([&](auto tell, auto wait) {
      posix_storage<> own(folder.file("run"), by_lease(4'000 * ms));
      const held_checkpoint held = hold_newest(own);
      tell(held.hold && held.hold->is_held() ? "held" : "not held");
      static_cast<void>(wait());
    });
    REQUIRE(child.next() == "held");
    for (std::uint64_t step = 2; step < 6; ++step) {
      save_step(run, small, step);
      static_cast<void>(run.tidy(keep_last_and_every{.last = 2}));
    }
    CHECK(list_checkpoints(storage).size() == 3);
    child.end();
    static_cast<void>(run.tidy(keep_last_and_every{.last = 2}));
    CHECK(list_checkpoints(storage).size() == 2);
    for (const std::string& each : leases(folder))
      CHECK_FALSE(each.starts_with(".hold"));
    for (const storage_entry& each : storage.list(""))
      CHECK_FALSE(each.name.starts_with(".hold"));
  }

  TEST_CASE("flock and lease files exclude each other on one machine") {
    const temporary_folder folder;
    posix_storage<> locks(folder.file("run"));
    posix_storage<> leased(folder.file("run"), by_lease(40 * ms));
    {
      const auto lock = locks.try_lock("LOCK");
      REQUIRE(lock);
      CHECK_FALSE(leased.try_lock("LOCK"));
    }
    {
      const auto lock = leased.try_lock("LOCK");
      REQUIRE(lock);
      CHECK_FALSE(locks.try_lock("LOCK"));
    }
    // Where leases of the file exist, a process without flock may come: the lock is a lease, too.
    write(folder.file("run/.leases/LOCK.9"), of_elsewhere(20 * ms));
    const auto lock = locks.try_lock("LOCK");
    REQUIRE(lock);
    CHECK(leases(folder) == std::vector<std::string>{"LOCK.10"});
  }

  TEST_CASE("a lease that was removed by hand is no lock, and a forked child does not have its parent's") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(9 * minutes));
    const auto lock = storage.try_lock("LOCK");
    REQUIRE(lock);
    {
      told_child child([&](auto tell, auto) {
        tell(lock->is_held() ? "held" : "not held");
        const_cast<std::optional<posix_storage<>::lock_type>&>(lock).reset();
        tell("over");
      });
      CHECK(child.next() == "not held");
      CHECK(child.next() == "over");
    }
    CHECK(lock->is_held());
    std::filesystem::remove(folder.file("run/.leases/LOCK.1"));
    CHECK_FALSE(lock->is_held());
  }

  TEST_CASE(
      "what an interrupted creation left is removed, and where links do not work, O_EXCL creates a lease") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(9 * minutes));
    write(folder.file("run/.leases/LOCK.new-00"), "llmmem");
    write(folder.file("run/.leases/LOCK.other"), "kept");
    CHECK(storage.try_lock("LOCK").has_value());
    std::vector<std::string> left = leases(folder);
    std::sort(left.begin(), left.end());
    CHECK(left == std::vector<std::string>{"LOCK.1", "LOCK.other"});
    told_child child([&](auto tell, auto) {
      if (!refuse_call(__NR_link, EPERM) || !refuse_call(__NR_linkat, EPERM)) return tell("not allowed");
      const auto lock = storage.try_lock("LOCK");
      tell(lock && lock->is_held() ? "taken" : "not taken");
    });
    const std::string told = child.next();
    CHECK((told == "taken" || told == "not allowed"));
  }

  TEST_CASE("a folder whose LOCK was removed is locked again by the next save, also by a lease") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(2'000 * ms));
    checkpoint_folder run(storage);
    save_step(run, small, 1);
    std::filesystem::remove(folder.file("run/LOCK"));
    save_step(run, small, 2);
    CHECK(list_checkpoints(storage).size() == 2);
    posix_storage<> other(folder.file("run"), by_lease(2'000 * ms));
    CHECK_FALSE(other.try_lock("LOCK"));
  }

  TEST_CASE("a lease that is too short for its file system is refused with its length") {
    const temporary_folder folder;
    told_child child([&](auto tell, auto) {
      posix_storage<> storage(folder.file("run"), by_lease(1 * ms));
      syncs_are_slow = true;
      tell(text_of([&] { static_cast<void>(storage.try_lock("LOCK")); }));
    });
    CHECK(child.next().find("a lease of 1000000 ns may be too short") != std::string::npos);
  }

  TEST_CASE("a holder whose lease was removed by hand leaves the next one that has its number") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(9 * minutes));
    auto former = storage.try_lock("LOCK");
    REQUIRE(former);
    std::filesystem::remove(folder.file("run/LOCK"));
    std::filesystem::remove(folder.file("run/.leases/LOCK.1"));
    const auto next = storage.try_lock("LOCK");
    REQUIRE(next);
    REQUIRE(leases(folder) == std::vector<std::string>{"LOCK.1"});
    std::filesystem::rename(folder.file("run/LOCK"), folder.file("run/moved"));
    former.reset();
    std::filesystem::rename(folder.file("run/moved"), folder.file("run/LOCK"));
    CHECK(next->is_held());
  }

  TEST_CASE("a forked child copies nothing to the file of its parent, which has the lease") {
    const temporary_folder folder;
    file_space<> space(folder.file("tier"),
                       {.budget = 65536, .file = {.locks = file_locks::lease_file, .lease_ns = 9 * minutes}});
    const auto range = space.try_allocate(4096, 1);
    std::vector<std::byte> bytes(4096);
    told_child child([&](auto tell, auto) {
      const auto copied = space.copy_in_async(*range, bytes, {});
      tell(!copied && copied.error().code == errc::lease_lost ? "refused" : "copied");
    });
    CHECK(child.next() == "refused");
    CHECK(space.copy_in_async(*range, bytes, {}));
  }

  TEST_CASE("the leases of a file whose name begins like the drafts of another file stay") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"), by_lease(9 * minutes));
    const auto longer = storage.try_lock("tier.new-0a");
    REQUIRE(longer);
    CHECK(storage.try_lock("tier").has_value());
    CHECK(longer->is_held());
  }

  TEST_CASE("a space of a file whose lease ran out copies nothing more") {
    const temporary_folder folder;
    const std::string path = folder.file("tier");
    told_child child([&](auto tell, auto wait) {
      if (!refuse_flock(ENOLCK)) return tell("not allowed");
      file_space<> space(path,
                         {.budget = 65536, .file = {.locks = file_locks::lease_file, .lease_ns = 20 * ms}});
      const auto range = space.try_allocate(4096, 1);
      std::vector<std::byte> bytes(4096);
      tell("ready");
      static_cast<void>(wait());
      const auto in = space.copy_in_async(*range, bytes, {});
      const auto out = space.copy_out_async(bytes, *range, {});
      tell(in ? "copied" : in.error().message());
      tell(out ? "copied" : out.error().message());
    });
    if (child.next() != "ready") return;
    child.send(SIGSTOP);
    const file_space<> next(
        path, {.budget = 65536, .file = {.locks = file_locks::lease_file, .lease_ns = 9 * minutes}});
    child.send(SIGCONT);
    child.let_go_on();
    const std::string lost =
        path +
        ": the lease of the file ran out while this process was stopped, or is its parent's, and another "
        "process may have the file now; open it again, with a longer lease_ns";
    CHECK(child.next() == lost);
    CHECK(child.next() == lost);
  }
}
