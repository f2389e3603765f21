/// @file
/// The file of a run's last tier, and the speeds of the links between tiers.
#pragma once

#include <llmmem/space/buffer.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/transfer/file_space.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "common/program.hpp"

namespace train_gpt {

/// A file with a unique name in `folder`. Once it is open the name is removed, so that a killed program
/// leaves nothing there.
class tier_file {
 public:
  explicit tier_file(const std::string& folder) {
    const std::filesystem::path where =
        folder.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(folder);
    path_ = (where / "train_gpt-").string() + std::string(6, 'X');  // mkstemp puts letters of its own there
    const int file = ::mkstemp(path_.data());
    if (file < 0) throw example::file_error(where.string(), "made a file in (--tier-dir)");
    ::close(file);
  }
  tier_file(const tier_file&) = delete;
  tier_file& operator=(const tier_file&) = delete;
  ~tier_file() { unname(); }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  void unname() noexcept {
    if (!path_.empty()) ::unlink(path_.c_str());
    path_.clear();
  }

 private:
  std::string path_;
};

namespace detail {

inline constexpr std::uint64_t mib = std::uint64_t{1} << 20;

/// The median time of `times` copies, in seconds, because the fastest one may have hit a cache.
/// @param copy  called with the copy's number.
template <class Copy>
[[nodiscard]] double measured_seconds(std::size_t times, Copy copy) {
  std::vector<double> took;
  for (std::size_t i = 0; i < times; ++i) {
    const auto began = std::chrono::steady_clock::now();
    copy(i);
    took.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  std::sort(took.begin(), took.end());
  return took[times / 2];
}
/// The rate for plans: bytes per second of copies of `bytes`.
template <class Copy>
[[nodiscard]] std::uint64_t measured_rate(std::uint64_t bytes, std::size_t times, Copy copy) {
  return static_cast<std::uint64_t>(static_cast<double>(bytes) /
                                    std::max(measured_seconds(times, copy), 1e-6)) +
         1;
}

/// Each copy uses another part of the file, as in a step. @pre the file is still empty.
template <class File>
[[nodiscard]] llmmem::link_model file_link(File& file) {
  constexpr std::uint64_t bytes = 4 * mib;
  llmmem::host_space memory({.budget = 2 * bytes});
  const llmmem::space_buffer held(memory, bytes, std::align_val_t{4096});
  const std::span<std::byte> all = held.range().span();
  std::fill(all.begin(), all.end(), std::byte{1});
  const auto times = static_cast<std::size_t>(std::clamp<std::uint64_t>(file.capacity() / bytes, 1, 15));
  const auto run = [&](const llmmem::file_copy& copy) { file.queue().start(copy).value().wait(); };
  const std::uint64_t down =
      measured_rate(bytes, times, [&](std::size_t i) { run(llmmem::write_to(file.file(), i * bytes, all)); });
  const std::uint64_t up = measured_rate(
      bytes, times, [&](std::size_t i) { run(llmmem::read_from(file.file(), i * bytes, all)); });
  // The time of a request whose bytes hardly count, through the queue and back.
  const double small = measured_seconds(
      15, [&](std::size_t i) { run(llmmem::read_from(file.file(), i * 4096, all.first(4096))); });
  return {.bytes_per_second = up,
          .latency_ns = static_cast<std::uint64_t>(small * 1e9),
          .offload_bytes_per_second = down,
          .duplex = llmmem::link_duplex::half};
}

[[nodiscard]] inline llmmem::link_model memory_link() {
  const std::vector<std::byte> from(4 * mib, std::byte{1});
  std::vector<std::byte> to(from.size());
  const std::uint64_t rate =
      measured_rate(from.size(), 5, [&](std::size_t) { std::copy(from.begin(), from.end(), to.begin()); });
  return {.bytes_per_second = rate, .latency_ns = 1'000, .duplex = llmmem::link_duplex::half};
}

}  // namespace detail

}  // namespace train_gpt
