#include <llmmem/space/file.hpp>

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem_tests::temporary_folder;

namespace {

/// What `call` returns in a child process, which ends with it: an exit status.
template <class Call>
[[nodiscard]] int in_a_child(Call call) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(call());
  int status = -1;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

[[nodiscard]] std::uint64_t bytes_on_device(const io_file& file) {
  struct stat status{};
  REQUIRE(::fstat(file.buffered(), &status) == 0);
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

void put(io_file& file, std::uint64_t offset, const std::string& text) {
  REQUIRE(::pwrite(file.buffered(), text.data(), text.size(), static_cast<off_t>(offset)) ==
          static_cast<ssize_t>(text.size()));
}

[[nodiscard]] std::string text_of(const io_file& file, std::uint64_t offset, std::size_t count) {
  std::string text(count, '?');
  const ssize_t got = ::pread(file.buffered(), text.data(), count, static_cast<off_t>(offset));
  text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  return text;
}

}  // namespace

TEST_CASE("each mode opens, makes, keeps and refuses files as documented") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  CHECK_THROWS_WITH_AS(io_file(path, {.mode = open_mode::read}),
                       (path + ": cannot be opened: No such file or directory (errno 2)").c_str(), io_error);
  CHECK_THROWS_WITH_AS(io_file(path, {.mode = open_mode::update}),
                       (path + ": cannot be opened: No such file or directory (errno 2)").c_str(), io_error);
  {
    io_file made(path, {.mode = open_mode::create_new, .permissions = 0640});
    put(made, 0, "kept");
    struct stat status{};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    CHECK((status.st_mode & 0777U & ~0640U) == 0);
    CHECK((status.st_mode & 0600U) == 0600U);
    CHECK(made.is_writable());
    CHECK(made.path() == path);
  }
  CHECK_THROWS_WITH_AS(io_file(path, {.mode = open_mode::create_new}),
                       (path + ": cannot be opened: File exists (errno 17)").c_str(), io_error);
  CHECK(text_of(io_file(path), 0, 9) == "kept");  // create is the default
  CHECK(io_file(path, {.mode = open_mode::update}).size().value() == 4);
  io_file seen(path, {.mode = open_mode::read});
  CHECK_FALSE(seen.is_writable());
  CHECK(text_of(seen, 0, 9) == "kept");
  const std::string refused =
      path +
      ": it was opened only for reading; open it with open_mode::update or open_mode::create (a "
      "model_file_space is never written: adopt its contents, and keep changes in another buffer)";
  CHECK(seen.resize(9).error().message() == refused);
  CHECK(seen.reserve(0, 9).error().message() == refused);
  CHECK(seen.punch(0, 2).error().message() == refused);
  CHECK(seen.copy(2, 0, 2).error().message() == refused);
  CHECK(seen.size().value() == 4);
}

TEST_CASE("a path that is not a regular file is refused at once, with its kind") {
  const temporary_folder folder;
  const std::string inside = folder.path().string();
  for (const open_mode mode : {open_mode::read, open_mode::update, open_mode::create}) {
    CHECK_THROWS_WITH_AS(io_file(inside, {.mode = mode}),
                         (inside + ": cannot be opened: Is a directory (errno 21)").c_str(), io_error);
  }
  const std::string pipe = folder.file("pipe");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  // Nobody writes to it: an open that waits would wait for ever.
  for (const open_mode mode : {open_mode::read, open_mode::update}) {
    CHECK_THROWS_WITH_AS(
        io_file(pipe, {.mode = mode}),
        (pipe + ": cannot be opened: it is a pipe or a socket, which has no offsets").c_str(), io_error);
  }
  const std::string socket = folder.file("socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  REQUIRE(socket.size() < sizeof address.sun_path);
  std::memcpy(address.sun_path, socket.c_str(), socket.size());
  const int listening = ::socket(AF_UNIX, SOCK_STREAM, 0);
  REQUIRE(::bind(listening, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  CHECK_THROWS_WITH_AS(io_file(socket, {.mode = open_mode::update}),
                       (socket + ": cannot be opened: No such device or address (errno 6)").c_str(),
                       io_error);
  ::close(listening);
  const std::string behind = folder.file("data") + std::string(1, '\0') + "x";
  CHECK_THROWS_WITH_AS(io_file{behind},
                       (folder.file("data") + ": cannot be opened: the path contains a zero byte").c_str(),
                       io_error);
  CHECK_THROWS_WITH_AS(io_file("/nowhere/data"),
                       "/nowhere/data: cannot be opened: No such file or directory (errno 2)", io_error);
}

TEST_CASE("a read-only folder is reported as such") {
  const temporary_folder folder;
  REQUIRE(::chmod(folder.path().c_str(), 0500) == 0);
  const std::string path = folder.file("data");
  if (::access(folder.path().c_str(), W_OK) != 0) {
    CHECK_THROWS_WITH_AS(io_file{path}, (path + ": cannot be opened: Permission denied (errno 13)").c_str(),
                         io_error);
  }
  REQUIRE(::chmod(folder.path().c_str(), 0700) == 0);
}

TEST_CASE("descriptors end with the object, and started programs do not inherit them") {
  const temporary_folder folder;
  int buffered = -1;
  int direct = -1;
  {
    const io_file file(folder.file("data"));
    buffered = file.buffered();
    direct = file.direct();
    CHECK((::fcntl(buffered, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK((::fcntl(buffered, F_GETFL) & O_NONBLOCK) == 0);
    if (direct >= 0) {
      CHECK((::fcntl(direct, F_GETFD) & FD_CLOEXEC) != 0);
      CHECK((::fcntl(direct, F_GETFL) & O_DIRECT) != 0);
    }
  }
  CHECK(::fcntl(buffered, F_GETFD) == -1);
  CHECK((direct < 0 || ::fcntl(direct, F_GETFD) == -1));
}

TEST_CASE("the file reports why it uses the page cache, and required direct I/O makes that an error") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  const io_file cached(path, {.direct = direct_io::never});
  CHECK(cached.direct() == -1);
  CHECK(cached.fallback() == fallback_reason::not_asked);
  CHECK(cached.fallback_errno() == 0);

  const io_file file(path);
  CHECK((file.direct() >= 0) == (file.fallback() == fallback_reason::none));
  if (file.direct() >= 0) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    CHECK(file.limits().offset_alignment % page == 0);
    file.reject_direct();
    CHECK(file.direct() == -1);
    CHECK(file.fallback() == fallback_reason::rejected);
  }

  const io_file zeros("/dev/zero", {.mode = open_mode::update});
  CHECK(zeros.direct() == -1);
  CHECK(zeros.fallback() == fallback_reason::refused);
  CHECK(zeros.fallback_errno() == EINVAL);
  CHECK_THROWS_WITH_AS(io_file("/dev/zero", {.mode = open_mode::read, .direct = direct_io::required}),
                       "/dev/zero: direct I/O is required, but the file system does not open files for "
                       "direct I/O; use another file system, or direct_io::preferred",
                       io_error);
  CHECK(to_string(fallback_reason::none) == "direct");
  CHECK(to_string(fallback_reason::not_asked) == "direct I/O was not requested");
  CHECK(to_string(fallback_reason::unsupported) ==
        "the file system reports that it has no direct I/O for this file");
  CHECK(to_string(fallback_reason::rejected) ==
        "the file system refused a direct transfer with the required alignment");
}

TEST_CASE("a lock ends with its object even if others have the open file, and a child's end keeps it") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  const auto try_lock = [&path] { return io_file(path).lock().code(); };
  std::optional<io_file> file(std::in_place, path);
  REQUIRE(file->lock());
  file->unlock_at_end();
  CHECK(in_a_child([&] {
          file.reset();
          return 0;
        }) == 0);
  CHECK(try_lock() == errc::file_locked);
  const int other = ::dup(file->buffered());  // as a ring has it
  file.reset();
  CHECK(try_lock() == errc::ok);
  ::close(other);

  file.emplace(path);
  REQUIRE(file->lock());
  const int another = ::dup(file->buffered());
  file.reset();
  CHECK(try_lock() == errc::file_locked);
  ::close(another);
}

TEST_CASE("one object has a lock, among processes and within one, until the object ends") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  const auto try_lock = [&path] {
    io_file other(path);
    const result<void> got = other.lock();
    return got ? 0 : got.code() == errc::file_locked ? 1 : 2;
  };
  {
    io_file file(path);
    REQUIRE(file.lock());
    CHECK(file.lock());  // it has it
    CHECK(in_a_child(try_lock) == 1);
    CHECK(try_lock() == 1);
    io_file other(path);
    CHECK(other.lock().error().message() ==
          path +
              ": another process, or another object in this one, holds the file; end that, or use another "
              "path: each rank and each tier needs its own");
  }
  CHECK(in_a_child(try_lock) == 0);
  CHECK(try_lock() == 0);
}

TEST_CASE("a file has the requested length, and added bytes read as zero") {
  const temporary_folder folder;
  io_file file(folder.file("data"));
  put(file, 0, "abcdef");
  REQUIRE(file.resize(3));
  REQUIRE(file.resize(5));
  CHECK(file.size().value() == 5);
  CHECK(text_of(file, 0, 9) == std::string("abc\0\0", 5));
  CHECK(file.resize(std::uint64_t{5} << 40));  // 5 TiB of nothing
  CHECK(file.size().value() == std::uint64_t{5} << 40);
  CHECK(file.resize(std::uint64_t{1} << 63).error() ==
        failure{errc::grow_failed, EFBIG, std::uint64_t{1} << 63, 0});
}

TEST_CASE("pages are taken and returned at the requested places, and neighbouring contents stay") {
  const temporary_folder folder;
  io_file file(folder.file("data"));
  constexpr std::uint64_t mib = 1 << 20;
  REQUIRE(file.reserve(mib, 2 * mib));
  CHECK(file.size().value() == 3 * mib);
  CHECK(bytes_on_device(file) >= 2 * mib);
  CHECK(bytes_on_device(file) < 3 * mib);
  put(file, mib - 4, "leftRIGHT");
  REQUIRE(file.reserve(mib, mib));  // again: contents stay
  CHECK(text_of(file, mib - 4, 9) == "leftRIGHT");
  REQUIRE(file.punch(mib, 2 * mib));
  CHECK(file.size().value() == 3 * mib);
  CHECK(bytes_on_device(file) < mib);
  CHECK(text_of(file, mib - 4, 9) == std::string("left\0\0\0\0\0", 9));
  CHECK(file.reserve(mib, 0));
  CHECK(file.punch(mib, 0));
  CHECK(file.reserve(1, max_bytes).error() == failure{errc::grow_failed, EFBIG, max_bytes, 1});
  CHECK(file.punch(max_bytes, 1).error() == failure{errc::grow_failed, EFBIG, 1, max_bytes});
}

TEST_CASE("a refusal of memory by the system is reported with its reason") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  // In a child, because the limit holds for all of a process.
  CHECK(
      in_a_child([&path] {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit most{1 << 20, 1 << 20};
        if (::setrlimit(RLIMIT_FSIZE, &most) != 0) return 9;
        io_file file(path);
        if (!file.reserve(0, 1 << 20)) return 8;
        const result<void> refused = file.reserve(1 << 20, 4096);
        if (refused.error().message() != path +
                                             ": allocation of 4096 bytes at offset 1048576 failed: File too "
                                             "large (errno 27)") {
          return 7;
        }
        return file.resize((1 << 20) + 1).error() == failure{errc::grow_failed, EFBIG, (1 << 20) + 1, 0} ? 0
                                                                                                         : 6;
      }) == 0);
  io_file full("/dev/full", {.mode = open_mode::update});
  CHECK(full.reserve(0, 4096).error() == failure{errc::grow_failed, ENODEV, 4096, 0});
}

TEST_CASE("bytes are copied within a file, also if the system has no call for it") {
  const temporary_folder folder;
  io_file file(folder.file("data"));
  std::string text(100'000, 'a');
  for (std::size_t i = 0; i < text.size(); ++i)
    text[i] = static_cast<char>('a' + i % 23);
  put(file, 0, text);
  REQUIRE(file.copy(200'001, 13, 99'000));
  CHECK(text_of(file, 200'001, 99'000) == text.substr(13, 99'000));
  CHECK(file.copy(0, 5, 0));
  CHECK(text_of(file, 0, 100) == text.substr(0, 100));
  CHECK(file.copy(0, 299'000, 5000).error() == failure{errc::file_ends, 0, 304'000, 299'001});
  CHECK(file.copy(0, max_bytes, 1).error() == failure{errc::write_failed, EFBIG, 1, 0});
  CHECK(file.copy(max_bytes, 0, 1).error() == failure{errc::write_failed, EFBIG, 1, max_bytes});

  io_file zeros("/dev/zero", {.mode = open_mode::update});
  CHECK(zeros.copy(0, 100'000, 50'000));
  io_file full("/dev/full", {.mode = open_mode::update});
  CHECK(full.copy(0, 8192, 8192).error().message() ==
        "/dev/full: write of 8192 bytes at offset 0 failed: No space left on device (errno 28)");
}

TEST_CASE("a sync succeeds on a file, and reports if there is nothing to sync to") {
  const temporary_folder folder;
  io_file file(folder.file("data"));
  put(file, 0, "abc");
  CHECK(file.sync());
  io_file zeros("/dev/zero", {.mode = open_mode::update});
  CHECK(zeros.sync().error().message() ==
        "/dev/zero: sync failed: Invalid argument (errno 22); earlier writes may be lost: write them again "
        "to another file");
}

TEST_CASE("a renamed or removed file stays the opened file") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  io_file file(path);
  put(file, 0, "mine");
  REQUIRE(::unlink(path.c_str()) == 0);
  io_file other(path);
  put(other, 0, "other");
  CHECK(text_of(file, 0, 9) == "mine");
  CHECK(file.size().value() == 4);
  CHECK(other.size().value() == 5);
}
