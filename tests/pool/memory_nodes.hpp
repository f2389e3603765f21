/// @file
/// Nodes of a pool that read each other's memory: in one thread, and in processes of their own.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/pool/kv_pool.hpp>

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pool/pool_cluster.hpp"

namespace llmmem_tests {

template <class Mover, class Endpoint>
using memory_node = pool_node<cache_type, Endpoint, pool::embedded_directory, Mover&>;

inline node_form form_of(std::uint64_t slots) {
  return {.groups = paged_group, .blocks = 128, .slots = slots, .lower_slots = 128};
}

/// Nodes of one thread that read each other's memory.
template <class Mover>
struct memory_cluster {
  using node = memory_node<Mover, thread_endpoint>;

  template <class Options>
  memory_cluster(std::uint32_t nodes, std::uint64_t slots, const Options& options,
                 const kv_pool_options& how = {})
      : net(nodes, {.copied_bytes = 65536, .lane_bytes = 1 << 20}) {
    for (std::uint32_t i = 0; i < nodes; ++i) {
      ends.push_back(std::make_unique<thread_endpoint>(net, seat_id{i}));
      movers.push_back(std::make_unique<Mover>(options));
    }
    for (std::uint32_t i = 0; i < nodes; ++i)
      all.push_back(std::make_unique<node>(*ends[i], form_of(slots), how, *movers[i]));
    settle();
  }
  void settle(int steps = 8) {
    for (int i = 0; i < steps; ++i) {
      for (auto& each : all) {
        if (each) each->step();
      }
    }
  }
  served_request serve(std::size_t place, std::span<const token_id> prompt) {
    const auto out = all[place]->serve(prompt, [&](auto& request) {
      for (int i = 0; i < 16 && request.where().next == offload::answer::pending; ++i)
        settle();
      request.fetch();
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (!request.has_arrived() && std::chrono::steady_clock::now() < limit)
        settle();
    });
    settle();
    CHECK(all[place]->wrong() == "");
    return out;
  }

  thread_network net;
  std::vector<std::unique_ptr<thread_endpoint>> ends;
  std::vector<std::unique_ptr<Mover>> movers;
  std::vector<std::unique_ptr<node>> all;
};

inline socket_options socket_of(const std::string& folder, std::uint32_t seat) {
  return {.seat = seat_id{seat}, .seats = 2, .folder = folder};
}

/// Seat 0 in a process of its own, which has the blocks of a prompt and steps until it is killed.
template <class Mover>
class owner_process {
 public:
  template <class Options>
  owner_process(const std::string& folder, std::span<const token_id> prompt, const Options& options) {
    std::array<int, 2> told{};
    REQUIRE(::pipe(told.data()) == 0);
    process_ = ::fork();
    REQUIRE(process_ >= 0);
    if (process_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      live(folder, prompt, options, told[1]);
    }
    ::close(told[1]);
    told_ = told[0];
  }
  owner_process(const owner_process&) = delete;
  owner_process& operator=(const owner_process&) = delete;
  ~owner_process() {
    kill();
    ::close(told_);
  }

  void send(int signal) const { ::kill(process_, signal); }
  void kill() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = -1;
  }
  /// Returns when the owner has offered all blocks and the node knows it; false after 20 s.
  template <class Node>
  [[nodiscard]] bool is_known_to(Node& node, const kv_chain& chain) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto knows = [&] {
      auto request = node.pool().ask(chain, 0).value();
      request.wait_for_answers();
      return request.where().tokens == chain.tokens();
    };
    while (!knows()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      node.step();
    }
    char word = 0;
    return ::read(told_, &word, 1) == 1;
  }

 private:
  template <class Options>
  [[noreturn]] static void live(const std::string& folder, std::span<const token_id> prompt,
                                const Options& options, int told) {
    Mover mover(options);
    socket_endpoint end(socket_of(folder, 0));
    memory_node<Mover, socket_endpoint> node(end, form_of(128), {}, mover);
    node.serve(prompt, [](auto& request) { request.fetch(); });
    for (bool is_told = false;;) {
      node.step();
      node.pool().progress(1'000'000);
      if (!is_told && node.pool().stats().offered_blocks == prompt.size() / 4 && node.pool().peers() == 1)
        is_told = ::write(told, "1", 1) == 1;
    }
  }

  pid_t process_ = -1;
  int told_ = -1;
};

}  // namespace llmmem_tests
