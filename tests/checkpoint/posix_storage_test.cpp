#include <llmmem/checkpoint/posix_storage.hpp>
#if defined(LLMMEM_TESTS_URING)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
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

/// The call's refusal: its text without the root, and that what it is and its number are as said.
template <class Work>
std::string refusal(const std::string& root, storage_call call, int number, Work work) {
  try {
    work();
  } catch (const storage_error& error) {
    CHECK(error.call() == call);
    CHECK(error.number() == number);
    std::string text = error.what();
    for (std::size_t at = text.find(root); at != std::string::npos; at = text.find(root))
      text.replace(at, root.size(), "ROOT");
    return text;
  }
  return "done";
}

std::vector<std::byte> bytes_of_text(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class Storage>
void write_text(Storage& storage, const std::string& path, const std::string& text) {
  auto output = storage.create(path, text.size());
  const std::vector<std::byte> bytes = bytes_of_text(text);
  output.finish_write(output.begin_write(0, bytes));
  output.sync();
}

template <class Storage>
std::vector<std::string> names_in(Storage& storage, const std::string& path = "") {
  std::vector<std::string> names;
  for (const storage_entry& each : storage.list(path)) {
    const char kind = each.what == storage_entry::kind::file     ? 'f'
                      : each.what == storage_entry::kind::folder ? 'd'
                      : each.what == storage_entry::kind::link   ? 'l'
                                                                 : 'o';
    names.push_back(each.name + ":" + kind);
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Runs in a child process, and gives what it returned.
template <class Work>
int in_child(Work work) {
  const ::pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      status = work();
    } catch (...) {
      status = 98;
    }
    ::_exit(status);
  }
  REQUIRE(child > 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Bytes of any length at any offsets, from memory that is aligned or not, in any order, several under way.
template <io_engine Engine>
void writes_in_any_order(direct_io direct) {
  temporary_folder folder;
  posix_storage<Engine> storage(folder.file("run"), {.direct = direct});
  for (const auto seed : seeds(25)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto total = static_cast<std::size_t>(random.below(40'000U));
    std::vector<std::byte> memory(total + 8192);
    for (std::byte& each : memory)
      each = static_cast<std::byte>(random.below(256U));
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    const std::size_t aligned =
        (4096 - address % 4096) % 4096 + (random.once_in(2) ? 0 : random.below(4096U));
    const std::span<const std::byte> all(memory.data() + aligned, total);
    std::vector<std::pair<std::size_t, std::size_t>> parts;
    for (std::size_t at = 0; at < total;) {
      const std::size_t wanted = random.once_in(2) ? 4096 * (1 + random.below(3U)) : 1 + random.below(9000U);
      parts.emplace_back(at, std::min(wanted, total - at));
      at += parts.back().second;
    }
    for (std::size_t i = parts.size(); i > 1; --i)
      std::swap(parts[i - 1], parts[random.below(i)]);
    const std::string name = "f" + std::to_string(seed);
    {
      auto output = storage.create(name, total);
      CHECK(std::filesystem::file_size(folder.path() / "run" / name) == total);
      std::vector<typename posix_storage<Engine>::output::write_token> tokens;
      for (const auto& [at, count] : parts) {
        tokens.push_back(output.begin_write(at, all.subspan(at, count)));
        if (random.once_in(3)) {
          const std::size_t which = random.below(tokens.size());
          output.finish_write(tokens[which]);
          tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(which));
        }
      }
      if (random.once_in(2)) output.sync();
    }
    const auto input = storage.open(name);
    REQUIRE(input.bytes() == total);
    std::vector<std::byte> read(total);
    input.read(0, read);
    REQUIRE(std::equal(read.begin(), read.end(), all.begin(), all.end()));
    for (int i = 0; i < 8 && total != 0; ++i) {
      const std::size_t at = random.once_in(2) ? random.below(total) : random.below(total) / 4096 * 4096;
      const std::size_t count = random.below(total - at + 1);
      std::vector<std::byte> part(count + 4096);
      const auto into = std::span(part).subspan(random.below(4096U), count);
      input.read(at, into);
      REQUIRE(std::equal(into.begin(), into.end(), all.begin() + static_cast<std::ptrdiff_t>(at)));
    }
  }
  CHECK(storage.stats().failures == 0);
}

}  // namespace

TEST_SUITE("posix_storage") {
  TEST_CASE("bytes written in any order are read in any parts") {
    for (const direct_io direct : {direct_io::preferred, direct_io::never})
      writes_in_any_order<posix_io>(direct);
#if defined(LLMMEM_TESTS_URING)
    for (const direct_io direct : {direct_io::preferred, direct_io::never})
      writes_in_any_order<uring_io>(direct);
#endif
  }

  TEST_CASE("create makes only new files, and an existing one of that name stays as it was") {
    temporary_folder folder;
    const std::string root = std::filesystem::canonical(folder.path()).string();
    posix_storage<> storage(root);
    write_text(storage, "file", "old");
    storage.make_folder("folder");
    std::filesystem::create_symlink("nowhere", folder.path() / "dangling");
    write_text(storage, "other", "new");
    storage.make_folder("other folder");
    for (const std::string name : {"file", "folder", "dangling"}) {
      CAPTURE(name);
      const std::string of = "ROOT/" + name;
      CHECK(refusal(root, storage_call::make_folder, EEXIST, [&] { storage.make_folder(name); }) ==
            of + ": the folder cannot be created: File exists");
      CHECK(refusal(root, storage_call::create, EEXIST, [&] {
              static_cast<void>(storage.create(name, 10));
            }) == of + ": the file cannot be created: File exists");
      for (const std::string from : {"other", "other folder"}) {
        CHECK(refusal(root, storage_call::rename, EEXIST, [&] { storage.rename(from, name); }) ==
              of + ": cannot be renamed: File exists; its name is still ROOT/" + from);
      }
      CHECK(refusal(root, storage_call::link, EEXIST, [&] { storage.link("other", name); }) ==
            of + ": cannot be linked: File exists; to ROOT/other");
    }
    CHECK(content(folder.path() / "file") == "old");
    CHECK(content(folder.path() / "other") == "new");
    CHECK(names_in(storage) ==
          std::vector<std::string>{"dangling:l", "file:f", "folder:d", "other folder:d", "other:f"});
    CHECK_FALSE(std::filesystem::exists(folder.path() / "nowhere"));
    // An empty folder, too, though rename(2) would take its place.
    storage.rename("other folder", "renamed");
    CHECK(refusal(root, storage_call::rename, EEXIST, [&] { storage.rename("renamed", "folder"); }) !=
          "done");
  }

  TEST_CASE("replace replaces a file, link gives it a second name, and remove takes one away") {
    temporary_folder folder;
    posix_storage<> storage(folder.path().string());
    write_text(storage, "a", "one");
    write_text(storage, "b", "two");
    storage.link("a", "c");
    storage.replace("b", "a");
    CHECK(content(folder.path() / "a") == "two");
    CHECK(content(folder.path() / "c") == "one");
    CHECK(names_in(storage) == std::vector<std::string>{"a:f", "c:f"});
    storage.replace("a", "d");  // to a name that is free
    storage.remove("c");
    CHECK(names_in(storage) == std::vector<std::string>{"d:f"});
    storage.make_folder("f");
    write_text(storage, "f/x", "three");
    storage.rename("f", "g");
    CHECK(content(folder.path() / "g" / "x") == "three");
    storage.sync_folder("g");
    storage.sync_folder("");
    storage.remove("g/x");
    storage.remove_folder("g");
    CHECK(names_in(storage) == std::vector<std::string>{"d:f"});
  }

  TEST_CASE("each refusal names the call, the path and the system's reason") {
    temporary_folder folder;
    const std::string root = std::filesystem::canonical(folder.path()).string();
    posix_storage<> storage(root);
    write_text(storage, "file", "text");
    storage.make_folder("full");
    write_text(storage, "full/x", "y");
    const auto said = [&](storage_call call, int number, auto work) {
      return refusal(root, call, number, work);
    };
    CHECK(said(storage_call::open, ENOENT, [&] { static_cast<void>(storage.open("no")); }) ==
          "ROOT/no: cannot be opened: No such file or directory");
    CHECK(said(storage_call::create, ENOENT, [&] { static_cast<void>(storage.create("no/x", 1)); }) ==
          "ROOT/no/x: the file cannot be created: No such file or directory");
    CHECK(said(storage_call::make_folder, ENOENT, [&] { storage.make_folder("no/x"); }) ==
          "ROOT/no/x: the folder cannot be created: No such file or directory");
    CHECK(said(storage_call::rename, ENOENT, [&] { storage.rename("no", "x"); }) ==
          "ROOT/x: cannot be renamed: No such file or directory; its name is still ROOT/no");
    CHECK(said(storage_call::replace, ENOENT, [&] { storage.replace("no", "file"); }) ==
          "ROOT/file: cannot replace another file: No such file or directory");
    CHECK(said(storage_call::replace, EISDIR, [&] { storage.replace("file", "full"); }) ==
          "ROOT/full: cannot replace another file: Is a directory");
    CHECK(said(storage_call::link, ENOENT, [&] { storage.link("no", "x"); }) ==
          "ROOT/x: cannot be linked: No such file or directory; to ROOT/no");
    CHECK(said(storage_call::remove, ENOENT, [&] { storage.remove("no"); }) ==
          "ROOT/no: cannot be removed: No such file or directory");
    CHECK(said(storage_call::remove, EISDIR, [&] { storage.remove("full"); }) ==
          "ROOT/full: cannot be removed: Is a directory");
    CHECK(said(storage_call::remove_folder, ENOTEMPTY, [&] { storage.remove_folder("full"); }) ==
          "ROOT/full: the folder cannot be removed: Directory not empty");
    CHECK(said(storage_call::remove_folder, ENOTDIR, [&] { storage.remove_folder("file"); }) ==
          "ROOT/file: the folder cannot be removed: Not a directory");
    CHECK(said(storage_call::list, ENOENT, [&] { static_cast<void>(storage.list("no")); }) ==
          "ROOT/no: the folder cannot be listed: No such file or directory");
    CHECK(said(storage_call::list, ENOTDIR, [&] { static_cast<void>(storage.list("file")); }) ==
          "ROOT/file: the folder cannot be listed: Not a directory");
    CHECK(said(storage_call::sync_folder, ENOENT, [&] { storage.sync_folder("no"); }) ==
          "ROOT/no: the folder cannot be synced: names in it may be lost: No such file or directory");
    CHECK(said(storage_call::sync_folder, ENOTDIR, [&] { storage.sync_folder("file"); }) ==
          "ROOT/file: the folder cannot be synced: names in it may be lost: Not a directory");
    CHECK(said(storage_call::lock, EISDIR, [&] { static_cast<void>(storage.try_lock("full")); }) ==
          "ROOT/full: cannot be locked: Is a directory");
    CHECK(content(folder.path() / "file") == "text");
  }

  TEST_CASE("bytes past the end are an error, also if the file was truncated meanwhile") {
    temporary_folder folder;
    const std::string root = std::filesystem::canonical(folder.path()).string();
    posix_storage<> storage(root);
    write_text(storage, "file", std::string(10'000, 'x'));
    const auto input = storage.open("file");
    std::vector<std::byte> into(5000);
    const auto said = [&](std::uint64_t offset, std::size_t count) {
      return refusal(root, storage_call::read, 0, [&] { input.read(offset, std::span(into).first(count)); });
    };
    CHECK(said(10'000, 0) == "done");
    CHECK(said(9'999, 1) == "done");
    CHECK(said(10'000, 1) ==
          "ROOT/file: cannot be read; 1 bytes at offset 10000, but the file ends at 10000");
    CHECK(said(5'001, 5000) ==
          "ROOT/file: cannot be read; 5000 bytes at offset 5001, but the file ends at 10000");
    CHECK(said(~std::uint64_t{0}, 2) ==
          "ROOT/file: cannot be read; 2 bytes at offset 18446744073709551615, but the file ends at 10000");
    std::filesystem::resize_file(folder.path() / "file", 100);
    CHECK(said(50, 100) ==
          "ROOT/file: cannot be read; 100 bytes at offset 50, but the file was truncated while it was read");
    CHECK(input.bytes() == 10'000);
  }

  TEST_CASE("links, pipes, sockets and folders are not files, and no call waits for them") {
    temporary_folder folder;
    const std::string root = std::filesystem::canonical(folder.path()).string();
    posix_storage<> storage(root);
    write_text(storage, "file", "text");
    std::filesystem::create_symlink("file", folder.path() / "link");
    std::filesystem::create_symlink("outside", folder.path() / "dangling");
    REQUIRE(::mkfifo((folder.path() / "pipe").c_str(), 0600) == 0);
    storage.make_folder("folder");
    const int listening = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", root.c_str());
    REQUIRE(::bind(listening, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    const auto opened = [&](const char* name, int number) {
      return refusal(root, storage_call::open, number, [&] { static_cast<void>(storage.open(name)); });
    };
    const std::string of_link =
        "Too many levels of symbolic links; it is a symbolic link, which is not followed; put the file "
        "itself "
        "there (the folder of a whole checkpoint may be a link, a file of it may not)";
    CHECK(opened("link", ELOOP) == "ROOT/link: cannot be opened: " + of_link);
    CHECK(opened("dangling", ELOOP) == "ROOT/dangling: cannot be opened: " + of_link);
    CHECK(opened("pipe", EINVAL) ==
          "ROOT/pipe: cannot be opened: Invalid argument; it is not a regular file");
    CHECK(opened("folder", EISDIR) ==
          "ROOT/folder: cannot be opened: Is a directory; it is not a regular file");
    CHECK(opened("socket", ENXIO) == "ROOT/socket: cannot be opened: No such device or address");
    const auto locked = [&](const char* name, int number) {
      return refusal(root, storage_call::lock, number, [&] { static_cast<void>(storage.try_lock(name)); });
    };
    CHECK(locked("link", ELOOP) == "ROOT/link: cannot be locked: " + of_link);
    CHECK(locked("dangling", ELOOP) == "ROOT/dangling: cannot be locked: " + of_link);
    CHECK(locked("pipe", EINVAL) ==
          "ROOT/pipe: cannot be locked: Invalid argument; it is not a regular file");
    CHECK_FALSE(std::filesystem::exists(folder.path() / "outside"));
    CHECK(names_in(storage) ==
          std::vector<std::string>{"dangling:l", "file:f", "folder:d", "link:l", "pipe:o", "socket:o"});
    for (const char* name : {"link", "dangling", "pipe", "socket"})
      storage.remove(name);
    CHECK(content(folder.path() / "file") == "text");
    ::close(listening);
  }

  TEST_CASE("a path that continues after a zero byte is refused by every call, and nothing is done") {
    temporary_folder folder;
    const std::string root = std::filesystem::canonical(folder.path()).string();
    posix_storage<> storage(root);
    write_text(storage, "a", "one");
    storage.make_folder("f");
    const std::string bad("a\0b", 3);
    const std::string bad_folder("f\0b", 3);
    const std::string why = "; the path contains a zero byte";
    const auto said = [&](storage_call call, auto work) { return refusal(root, call, 0, work); };
    CHECK(said(storage_call::make_folder, [&] { storage.make_folder(std::string("n\0b", 3)); }) ==
          "ROOT/n: the folder cannot be created" + why);
    CHECK(said(storage_call::create, [&] { static_cast<void>(storage.create(std::string("n\0b", 3), 1)); }) ==
          "ROOT/n: the file cannot be created" + why);
    CHECK(said(storage_call::open, [&] { static_cast<void>(storage.open(bad)); }) ==
          "ROOT/a: cannot be opened" + why);
    CHECK(said(storage_call::rename, [&] { storage.rename(bad, "n"); }) == "ROOT/a: cannot be renamed" + why);
    CHECK(said(storage_call::rename, [&] { storage.rename("a", std::string("n\0b", 3)); }) ==
          "ROOT/n: cannot be renamed" + why);
    CHECK(said(storage_call::replace, [&] { storage.replace(bad, "n"); }) ==
          "ROOT/a: cannot replace another file" + why);
    CHECK(said(storage_call::replace, [&] { storage.replace("a", std::string("n\0b", 3)); }) ==
          "ROOT/n: cannot replace another file" + why);
    CHECK(said(storage_call::link, [&] { storage.link(bad, "n"); }) == "ROOT/a: cannot be linked" + why);
    CHECK(said(storage_call::link, [&] { storage.link("a", std::string("n\0b", 3)); }) ==
          "ROOT/n: cannot be linked" + why);
    CHECK(said(storage_call::remove, [&] { storage.remove(bad); }) == "ROOT/a: cannot be removed" + why);
    CHECK(said(storage_call::remove_folder, [&] { storage.remove_folder(bad_folder); }) ==
          "ROOT/f: the folder cannot be removed" + why);
    CHECK(said(storage_call::list, [&] { static_cast<void>(storage.list(bad_folder)); }) ==
          "ROOT/f: the folder cannot be listed" + why);
    CHECK(said(storage_call::sync_folder, [&] { storage.sync_folder(bad_folder); }) ==
          "ROOT/f: the folder cannot be synced: names in it may be lost" + why);
    CHECK(said(storage_call::lock, [&] { static_cast<void>(storage.try_lock(bad)); }) ==
          "ROOT/a: cannot be locked" + why);
    CHECK_THROWS_WITH_AS(posix_storage<>(std::string("/tmp/x\0y", 8)),
                         "/tmp/x: the folder cannot be created; the path contains a zero byte",
                         storage_error);
    CHECK(names_in(storage) == std::vector<std::string>{"a:f", "f:d"});
  }

  TEST_CASE("a lock is held against other objects and processes, and ends with its object") {
    temporary_folder folder;
    posix_storage<> storage(folder.path().string());
    posix_storage<> other(folder.path().string());
    {
      const auto held = storage.try_lock("LOCK");
      REQUIRE(held);
      CHECK(held->is_held());
      CHECK_FALSE(storage.try_lock("LOCK"));
      CHECK_FALSE(other.try_lock("LOCK"));
      CHECK(other.try_lock("LOCK 2"));
      CHECK(in_child([&] {
              posix_storage<> mine(folder.path().string());
              return mine.try_lock("LOCK") ? 1 : 0;
            }) == 0);
      CHECK(held->is_held());
    }
    CHECK(std::filesystem::exists(folder.path() / "LOCK"));
    CHECK(other.try_lock("LOCK"));
    // It ends with a process, however that ends.
    CHECK(in_child([&] {
            posix_storage<> mine(folder.path().string());
            const auto held = mine.try_lock("LOCK");
            return held ? (std::raise(SIGKILL), 1) : 2;
          }) == -1);
    CHECK(other.try_lock("LOCK"));
    CHECK(content(folder.path() / "LOCK").empty());
  }

  TEST_CASE("a lock ends with its object although a child that was forked meanwhile lives on") {
    temporary_folder folder;
    posix_storage<> storage(folder.path().string());
    auto held = storage.try_lock("LOCK");
    REQUIRE(held);
    int wake[2];
    REQUIRE(::pipe(wake) == 0);
    const ::pid_t child = ::fork();
    if (child == 0) {  // a data loader's worker, say
      ::close(wake[1]);
      char byte = 0;
      static_cast<void>(!::read(wake[0], &byte, 1));
      ::_exit(0);
    }
    ::close(wake[0]);
    held.reset();
    CHECK(storage.try_lock("LOCK"));
    ::close(wake[1]);
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
  }

  TEST_CASE("the removal or replacement of a lock's file is detected, and its contents stay") {
    temporary_folder folder;
    posix_storage<> storage(folder.path().string());
    write_text(storage, "LOCK", "pid 1234");
    const auto held = storage.try_lock("LOCK");
    REQUIRE(held);
    CHECK(content(folder.path() / "LOCK") == "pid 1234");
    std::filesystem::rename(folder.path() / "LOCK", folder.path() / "moved");
    CHECK_FALSE(held->is_held());
    const auto second = storage.try_lock("LOCK");  // of another file of that name
    REQUIRE(second);
    CHECK(second->is_held());
    CHECK_FALSE(held->is_held());
    std::filesystem::remove(folder.path() / "LOCK");
    CHECK_FALSE(second->is_held());
    // A link to the very file is not the file.
    std::filesystem::create_symlink("moved", folder.path() / "LOCK");
    CHECK_FALSE(held->is_held());
    std::filesystem::remove(folder.path() / "LOCK");
    std::filesystem::rename(folder.path() / "moved", folder.path() / "LOCK");
    CHECK(held->is_held());
  }

  TEST_CASE("missing space is reported when the file is created, and nothing is left") {
    temporary_folder folder;
    const std::string root = std::filesystem::canonical(folder.path()).string();
    CHECK(in_child([&] {
            std::signal(SIGXFSZ, SIG_IGN);
            posix_storage<> storage(root);
            const ::rlimit little{100'000, 100'000};
            if (::setrlimit(RLIMIT_FSIZE, &little) != 0) return 2;
            try {
              static_cast<void>(storage.create("large", 100'001));
              return 3;
            } catch (const storage_error& error) {
              if (error.call() != storage_call::reserve || error.number() != EFBIG) return 4;
              if (std::string(error.what()) !=
                  root + "/large: space cannot be allocated for the file: File too large; 100001 bytes")
                return 5;
            }
            if (!storage.list("").empty()) return 6;
            auto output = storage.create("fits", 100'000);
            // A write past the limit fails, and the file is dead from then on.
            const std::vector<std::byte> bytes(5000);
            const auto token = output.begin_write(98'000, bytes);
            try {
              output.finish_write(token);
              return 7;
            } catch (const storage_error& error) {
              if (error.call() != storage_call::write || error.number() != EFBIG) return 8;
            }
            output.finish_write(output.begin_write(0, bytes));
            for (int i = 0; i < 2; ++i) {
              try {
                output.sync();
                return 9;
              } catch (const storage_error& error) {
                if (error.call() != storage_call::sync) return 10;
                if (std::string(error.what()) !=
                    root + "/fits: cannot be synced: written bytes may be lost; a write to it failed before")
                  return 11;
              }
            }
            // A failure that nobody asked for is told by sync.
            auto silent = storage.create("silent", 100'000);
            static_cast<void>(silent.begin_write(98'000, bytes));
            try {
              silent.sync();
              return 12;
            } catch (const storage_error& error) {
              if (error.call() != storage_call::write || error.number() != EFBIG) return 13;
            }
            return 0;
          }) == 0);
    posix_storage<> storage(root);
    CHECK(refusal(root, storage_call::reserve, EFBIG, [&] {
            static_cast<void>(storage.create("x", ~std::uint64_t{0}));
          }) == "ROOT/x: space cannot be allocated for the file: File too large; 18446744073709551615 bytes");
    CHECK_FALSE(std::filesystem::exists(folder.path() / "x"));
  }

  TEST_CASE("unavailable direct I/O is refused by the storage, and leaves no file") {
    posix_storage<> kernel("/proc", {.missing = missing_root::refuse, .direct = direct_io::required});
    const std::string said =
        refusal("/proc", storage_call::open, 0, [&] { static_cast<void>(kernel.open("version")); });
    CHECK(said.starts_with("ROOT/version: cannot be opened; ROOT/version: direct I/O is required, but "));
  }

  TEST_CASE("every writing call reports an unwritable folder") {
    temporary_folder folder;
    if (::geteuid() == 0) {
      MESSAGE("permissions were not tested: root may do anything, but in /proc");
      posix_storage<> kernel("/proc", {.missing = missing_root::refuse});
      CHECK(refusal("/proc", storage_call::create, ENOENT, [&] {
              static_cast<void>(kernel.create("llmmem", 1));
            }) == "ROOT/llmmem: the file cannot be created: No such file or directory");
      CHECK(refusal("/proc", storage_call::make_folder, ENOENT, [&] { kernel.make_folder("llmmem"); }) ==
            "ROOT/llmmem: the folder cannot be created: No such file or directory");
      CHECK(refusal("/proc", storage_call::lock, ENOENT, [&] {
              static_cast<void>(kernel.try_lock("LOCK"));
            }) == "ROOT/LOCK: cannot be locked: No such file or directory");
      return;
    }
    posix_storage<> storage(folder.path().string());
    ::chmod(folder.path().c_str(), 0500);
    CHECK(refusal(folder.path().string(), storage_call::create, EACCES, [&] {
            static_cast<void>(storage.create("x", 1));
          }) == "ROOT/x: the file cannot be created: Permission denied");
    CHECK(refusal(folder.path().string(), storage_call::make_folder, EACCES, [&] {
            storage.make_folder("x");
          }) == "ROOT/x: the folder cannot be created: Permission denied");
    ::chmod(folder.path().c_str(), 0700);
  }

  TEST_CASE("the folder is created with its parents, or refused if it does not exist") {
    temporary_folder folder;
    const std::string root = folder.file("a/b//c/");
    CHECK_THROWS_WITH_AS(posix_storage<>(root, {.missing = missing_root::refuse}),
                         (root + ": cannot be opened: No such file or directory").c_str(), storage_error);
    CHECK_FALSE(std::filesystem::exists(folder.path() / "a"));
    const posix_storage<> made(root);
    CHECK(made.path("") == std::filesystem::canonical(folder.path() / "a/b/c").string());
    CHECK(made.path("x/y") == made.path("") + "/x/y");
    const posix_storage<> again(root, {.missing = missing_root::refuse});
    CHECK(again.path("") == made.path(""));
    std::ofstream(folder.path() / "file") << "x";
    CHECK_THROWS_WITH_AS(
        posix_storage<>(folder.file("file")),
        (std::filesystem::canonical(folder.path()).string() + "/file: cannot be opened: Not a directory")
            .c_str(),
        storage_error);
    CHECK_THROWS_WITH_AS(
        posix_storage<>(folder.file("file/below")),
        (folder.file("file/below") + ": the folder cannot be created: Not a directory").c_str(),
        storage_error);
    CHECK_THROWS_WITH_AS(posix_storage<>(""), ": cannot be opened: No such file or directory", storage_error);
  }

  TEST_CASE("a relative folder stays the same when the process changes its directory") {
    temporary_folder folder;
    CHECK(in_child([&] {
            if (::chdir(folder.path().c_str()) != 0) return 2;
            posix_storage<> storage("here/run");
            if (::chdir("/") != 0) return 3;
            storage.make_folder("f");
            write_text(storage, "f/x", "text");
            const auto held = storage.try_lock("LOCK");
            if (!held || !held->is_held()) return 4;
            return storage.open("f/x").bytes() == 4 ? 0 : 5;
          }) == 0);
    CHECK(content(folder.path() / "here/run/f/x") == "text");
  }

  TEST_CASE("files and folders are created with the requested permissions, less the umask") {
    temporary_folder folder;
    const ::mode_t before = ::umask(022);
    posix_storage<> storage(folder.file("run"), {.file_permissions = 0666, .folder_permissions = 0777});
    storage.make_folder("f");
    write_text(storage, "x", "y");
    ::umask(before);
    using std::filesystem::perms;
    CHECK(std::filesystem::status(folder.path() / "run/x").permissions() == perms{0644});
    CHECK(std::filesystem::status(folder.path() / "run/f").permissions() == perms{0755});
    CHECK(std::filesystem::status(folder.path() / "run").permissions() == perms{0755});
  }

  TEST_CASE("nonces never repeat") {
    temporary_folder folder;
    posix_storage<> one(folder.path().string());
    posix_storage<> two(folder.path().string());
    std::set<std::uint64_t> drawn;
    for (int i = 0; i < 100; ++i) {
      drawn.insert(one.nonce());
      drawn.insert(two.nonce());
    }
    CHECK(drawn.size() == 200);
  }

  TEST_CASE("a file system without space reports it when the file is created") {
    temporary_folder folder;
    const std::string mount = "mount -t tmpfs -o size=64k llmmem " + folder.path().string() + " 2>/dev/null";
    if (::geteuid() != 0 || std::system(mount.c_str()) != 0) {
      MESSAGE("not tested: a small file system cannot be mounted here");
      return;
    }
    {
      const std::string root = folder.path().string();
      posix_storage<> storage(root);
      CHECK(refusal(root, storage_call::reserve, ENOSPC,
                    [&] { static_cast<void>(storage.create("large", 1'000'000)); }) ==
            "ROOT/large: space cannot be allocated for the file: No space left on device; 1000000 bytes");
      CHECK(names_in(storage).empty());
      write_text(storage, "small", std::string(8000, 's'));
      CHECK(content(folder.path() / "small") == std::string(8000, 's'));
    }
    CHECK(std::system(("umount " + folder.path().string()).c_str()) == 0);
  }
}
