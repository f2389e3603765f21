// A library that moves bytes between files and a device's memory, for tests of what stands on it.
#pragma once

#include <llmmem/transfer/device_file_io.hpp>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// What a test decides, and what the library saw.
struct library_state {
  std::mt19937_64 random{1};
  const char* why_not = nullptr;
  int refuse_open = 0;    // error number
  int refuse_submit = 0;  // error number, once
  bool is_short = false;  // moves half of a request
  bool is_late = false;   // nothing completes
  int open_files = 0;
  int batches = 0;
  std::uint32_t most_in_batch = 0;
  std::uint64_t requests = 0;
  std::vector<std::string> misuses{};
};

/// cuFile as `device_file_io` sees it, over pread and pwrite: a batch completes in any order, in parts.
class fake_library {
 public:
  struct file {
    int descriptor = -1;
    int number = 0;  // of the handle
  };
  using batch = std::uint32_t;

  explicit fake_library(library_state& state) : state_(&state) {}

  [[nodiscard]] const char* why_not() const noexcept { return state_->why_not; }
  [[nodiscard]] int open(file& made, int descriptor) noexcept {
    if (state_->refuse_open != 0) return state_->refuse_open;
    for (const auto& each : live_) {
      if (each.second == descriptor) return EEXIST;  // as cuFile: CU_FILE_HANDLE_ALREADY_REGISTERED
    }
    made = {descriptor, ++last_};
    live_[last_] = descriptor;
    ++state_->open_files;
    return 0;
  }
  void close(file opened) noexcept {
    if (live_.erase(opened.number) == 0) state_->misuses.emplace_back("closed twice");
    for (const auto& each_batch : pending_) {
      for (const auto& each : each_batch.second)
        if (each.file.number == opened.number) state_->misuses.emplace_back("closed while a request uses it");
    }
    --state_->open_files;
  }
  [[nodiscard]] int make(batch& made, std::uint32_t depth) noexcept {
    made = static_cast<batch>(depths_.size());
    depths_.push_back(depth);
    ++state_->batches;
    return 0;
  }
  void end(batch made) noexcept {
    pending_.erase(made);
    --state_->batches;
  }
  [[nodiscard]] int submit(batch by, std::span<const llmmem::device_file_request<file>> requests) noexcept {
    if (state_->refuse_submit != 0) return std::exchange(state_->refuse_submit, 0);
    auto& all = pending_[by];
    if (!all.empty()) state_->misuses.emplace_back("a second submission of a batch in flight");
    if (requests.size() > depths_[by]) state_->misuses.emplace_back("more requests than the batch holds");
    state_->most_in_batch = std::max(state_->most_in_batch, static_cast<std::uint32_t>(requests.size()));
    all.assign(requests.begin(), requests.end());
    std::ranges::shuffle(all, state_->random);
    return 0;
  }
  [[nodiscard]] int poll(batch by, std::span<llmmem::io_completion> out, std::uint32_t least,
                         std::uint64_t timeout_ns, std::uint32_t& count) noexcept {
    count = 0;
    static_cast<void>(timeout_ns);
    if (state_->is_late) return 0;
    auto& all = pending_[by];
    const std::size_t ready = std::max<std::size_t>(least, state_->random() % (all.size() + 1));
    while (count < ready && count < out.size() && !all.empty()) {
      const auto each = all.back();
      all.pop_back();
      if (!live_.contains(each.file.number)) state_->misuses.emplace_back("a request of a closed file");
      const auto bytes = static_cast<std::size_t>(state_->is_short ? (each.bytes + 1) / 2 : each.bytes);
      ++state_->requests;
      const ssize_t moved =
          each.way == llmmem::io_direction::read
              ? ::pread(each.file.descriptor, each.data, bytes, static_cast<off_t>(each.offset))
              : ::pwrite(each.file.descriptor, each.data, bytes, static_cast<off_t>(each.offset));
      out[count++] = {each.tag, moved < 0 ? -errno : static_cast<std::int32_t>(moved)};
    }
    return 0;
  }
  [[nodiscard]] int keep_registered(std::byte*, std::uint64_t bytes) noexcept {
    return bytes == 0 ? EINVAL : 0;
  }

 private:
  library_state* state_;
  int last_ = 0;
  std::map<int, int> live_;  // descriptors of the handles
  std::vector<std::uint32_t> depths_;
  std::map<batch, std::vector<llmmem::device_file_request<file>>> pending_;
};
static_assert(llmmem::device_file_library<fake_library>);

}  // namespace llmmem_tests
