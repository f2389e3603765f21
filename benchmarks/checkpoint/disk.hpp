/// @file
/// The limits of a disk: the simplest writer and reader, and fio as a child, on the same folder.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "checkpoint/state.hpp"

namespace llmmem_benchmarks {

inline constexpr std::uint64_t disk_block = std::uint64_t{4} << 20;

enum class page_cache : std::uint8_t { past_it, through_it };

[[nodiscard]] inline std::runtime_error system_trouble(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

class descriptor {
 public:
  descriptor(const std::string& path, int flags) : number_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (number_ < 0) throw system_trouble(path);
  }
  descriptor(const descriptor&) = delete;
  descriptor& operator=(const descriptor&) = delete;
  ~descriptor() { ::close(number_); }

  [[nodiscard]] int number() const noexcept { return number_; }
  void sync() const {
    if (::fdatasync(number_) != 0) throw system_trouble("fdatasync");
  }

 private:
  int number_;
};

/// Writes `bytes` of `from`, block by block, to a new file with allocated space; then syncs it and its name.
/// `told` has the time without the syncs.
[[nodiscard]] inline turn write_raw(const std::string& folder, std::span<const std::byte> from,
                                    page_cache how) {
  const std::string path = folder + "/raw";
  turn taken;
  taken.seconds = seconds_of([&] {
    const descriptor file(path, O_WRONLY | O_CREAT | O_EXCL | (how == page_cache::past_it ? O_DIRECT : 0));
    taken.told["write_ms"] =
        1e3 * seconds_of([&] {
          if (::fallocate(file.number(), 0, 0, static_cast<off_t>(from.size())) != 0)
            throw system_trouble("fallocate");
          for (std::size_t at = 0; at < from.size();) {
            const std::size_t block = std::min<std::size_t>(disk_block, from.size() - at);
            const ssize_t put = ::pwrite(file.number(), from.data() + at, block, static_cast<off_t>(at));
            if (put <= 0) throw system_trouble(path);
            at += static_cast<std::size_t>(put);
          }
        });
    file.sync();
    const descriptor named(folder, O_RDONLY | O_DIRECTORY);
    if (::fsync(named.number()) != 0) throw system_trouble(folder);
  });
  ::unlink(path.c_str());
  return taken;
}

/// Reads all of a file by several readers, a block at a time, each into its own memory.
[[nodiscard]] inline turn read_raw(const std::string& path, unsigned readers, page_cache how) {
  const host_memory memory(disk_block * readers);
  const descriptor file(path, O_RDONLY | (how == page_cache::past_it ? O_DIRECT : 0));
  struct ::stat seen{};
  if (::fstat(file.number(), &seen) != 0) throw system_trouble(path);
  const auto bytes = static_cast<std::uint64_t>(seen.st_size);
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> is_bad{false};
  const auto work = [&](unsigned reader) {
    for (std::uint64_t at = next.fetch_add(disk_block); at < bytes; at = next.fetch_add(disk_block)) {
      if (::pread(file.number(), memory.data() + reader * disk_block, disk_block, static_cast<off_t>(at)) <=
          0)
        is_bad = true;
    }
  };
  turn taken;
  taken.seconds = seconds_of([&] {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < readers; ++i)
      others.emplace_back(work, i);
    work(0);
    for (std::thread& each : others)
      each.join();
  });
  if (is_bad) throw std::runtime_error(path + ": could not be read");
  return taken;
}

/// Removes its pages from the page cache. @pre the file is synced.
inline void forget_pages(const std::string& path) {
  const descriptor file(path, O_RDONLY);
  static_cast<void>(::posix_fadvise(file.number(), 0, 0, POSIX_FADV_DONTNEED));
}

/// One number of fio's JSON, the first of that name after `section`.
[[nodiscard]] inline double number_in(const std::string& json, const std::string& section,
                                      const std::string& name) {
  const std::size_t begin = json.find("\"" + section + "\" : {");
  const std::size_t at = begin == std::string::npos ? begin : json.find("\"" + name + "\" : ", begin);
  return at == std::string::npos ? 0 : std::strtod(json.c_str() + at + name.size() + 5, nullptr);
}

/// Runs fio with `settings`; returns its own time for `bytes`, without its start and with its final sync.
[[nodiscard]] inline turn run_fio(const std::string& settings, const std::string& section,
                                  std::uint64_t bytes) {
  if (std::system("command -v fio >/dev/null 2>&1") != 0) throw std::runtime_error("fio is not installed");
  const std::string command =
      "fio --name=x --thread --scramble_buffers=0 --gtod_reduce=1 --output-format=json " + settings +
      " 2>/dev/null";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen(command.c_str(), "r"), &::pclose);
  if (pipe == nullptr) throw system_trouble("fio");
  std::string json;
  std::array<char, 4096> part{};
  while (const std::size_t got = std::fread(part.data(), 1, part.size(), pipe.get()))
    json.append(part.data(), got);
  // Its clock counts whole milliseconds, and the rate is finer.
  const double rate = number_in(json, section, "bw_bytes");
  if (rate <= 0) throw std::runtime_error("fio did not run: " + settings);
  return {.seconds = static_cast<double>(bytes) / rate, .told = {}};
}

/// A sequential write of a new file with allocated space, synced at the end.
[[nodiscard]] inline turn write_by_fio(const std::string& folder, std::uint64_t bytes,
                                       const std::string& engine) {
  const std::string path = folder + "/fio";
  const turn taken =
      run_fio("--filename=" + path + " --rw=write --bs=" + std::to_string(disk_block) +
                  " --size=" + std::to_string(bytes) + " --fallocate=native --end_fsync=1 " + engine,
              "write", bytes);
  ::unlink(path.c_str());
  return taken;
}

[[nodiscard]] inline turn read_by_fio(const std::string& path, std::uint64_t bytes,
                                      const std::string& settings) {
  return run_fio("--filename=" + path + " --rw=read --bs=" + std::to_string(disk_block) +
                     " --size=" + std::to_string(bytes / disk_block * disk_block) + " " + settings,
                 "read", bytes / disk_block * disk_block);
}

}  // namespace llmmem_benchmarks
