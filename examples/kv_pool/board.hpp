/// @file
/// The shared state of the job's processes outside the pool: the computed prompts, and counters.
#pragma once

#include <llmmem/error.hpp>

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "common/socket_folder.hpp"
#include "kv_pool/command_line.hpp"

namespace kv_pool_example {

/// The counters of one node. Its restarted process continues them.
struct node_figures {
  std::atomic<std::uint64_t> requests{0};
  std::atomic<std::uint64_t> computed{0};  ///< tokens
  std::atomic<std::uint64_t> matched{0};   ///< tokens in its own cache
  std::atomic<std::uint64_t> loaded{0};    ///< tokens from its own tiers
  std::atomic<std::uint64_t> fetched{0};   ///< tokens from other nodes
  std::atomic<std::uint64_t> served{0};    ///< blocks sent to other nodes
  std::atomic<std::uint64_t> read{0};      ///< blocks that it read from the memory of other nodes
  std::atomic<std::uint64_t> costly{0};    ///< tokens that it computed because moving them was more expensive
  std::atomic<std::uint64_t> verified{0};  ///< blocks from tiers or nodes, each byte of which was checked
  std::atomic<std::uint64_t> wrong{0};     ///< of these, blocks with a wrong byte
  std::atomic<std::uint64_t> layers{0};    ///< layers of prompts that it sent or received in a handover
  std::atomic<std::uint64_t> bytes{0};     ///< of these
  std::atomic<std::uint32_t> starts{0};
  std::atomic<bool> is_alive{false};
};

enum class progress : std::uint32_t { waiting, prefilled, answered };

/// Memory that all processes of the job share.
class board {
 public:
  explicit board(std::uint32_t requests)
      : requests_(requests), bytes_(sizeof(contents) + requests * sizeof(std::atomic<progress>)) {
    void* const at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) example::throw_errno("memory that the processes share");
    shared_ = ::new (at) contents;
    entries_ = reinterpret_cast<std::atomic<progress>*>(shared_ + 1);
    for (std::uint32_t i = 0; i < requests; ++i)
      ::new (entries_ + i) std::atomic<progress>{progress::waiting};
  }
  board(const board&) = delete;
  board& operator=(const board&) = delete;
  ~board() { ::munmap(shared_, bytes_); }

  [[nodiscard]] node_figures& node(std::uint32_t seat) noexcept { return shared_->nodes[seat]; }
  [[nodiscard]] progress at(std::uint32_t request) const noexcept { return entries_[request].load(); }
  void set_prefilled(std::uint32_t request) noexcept {
    progress expected = progress::waiting;
    entries_[request].compare_exchange_strong(expected, progress::prefilled);
  }
  void set_answered(std::uint32_t request) noexcept {
    entries_[request] = progress::answered;
    ++shared_->answered;
  }
  [[nodiscard]] std::uint32_t answered() const noexcept { return shared_->answered; }
  [[nodiscard]] bool is_over() const noexcept { return answered() == requests_ || shared_->is_given_up; }
  void give_up() noexcept { shared_->is_given_up = true; }
  /// Lets the requests from `command_line::held_from` on begin.
  void release() noexcept { shared_->is_released = true; }
  [[nodiscard]] bool is_released() const noexcept { return shared_->is_released; }

 private:
  struct contents {
    std::array<node_figures, std::size_t{2} * most_nodes> nodes{};
    std::atomic<std::uint32_t> answered{0};
    std::atomic<bool> is_given_up{false};
    std::atomic<bool> is_released{false};
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                std::atomic<progress>::is_always_lock_free);

  std::uint32_t requests_;
  std::size_t bytes_;
  contents* shared_ = nullptr;
  std::atomic<progress>* entries_ = nullptr;
};

}  // namespace kv_pool_example
