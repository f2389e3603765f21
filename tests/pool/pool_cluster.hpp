/// @file
/// Nodes of a pool in one thread, and a seat that a test speaks for.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/pool/detail/pool_wire.hpp>
#include <llmmem/pool/kv_pool.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include "pool/pool_node.hpp"

namespace llmmem_tests {

using namespace llmmem;  // NOLINT(google-build-using-namespace): of tests alone

using cache_type = paged_allocator<pooled_traits>;
using node_type = pool_node<cache_type, thread_endpoint>;

inline const std::array paged_group{full_attention({"kv", 1, 16, 4})};

inline std::vector<token_id> prompt_of(std::uint32_t family, std::size_t tokens) {
  std::vector<token_id> out;
  for (std::size_t i = 0; i < tokens; ++i)
    out.push_back(static_cast<token_id>(family * 10'000 + i));
  return out;
}

/// Some nodes of one thread.
struct cluster {
  explicit cluster(std::uint32_t nodes, const node_form& form = {.groups = paged_group},
                   const kv_pool_options& options = {}, std::span<const std::uint32_t> domains = {})
      : net(nodes, {.copied_bytes = 65536, .lane_bytes = 1 << 20}) {
    for (std::uint32_t i = 0; i < nodes; ++i)
      ends.push_back(std::make_unique<thread_endpoint>(net, seat_id{i}));
    for (std::uint32_t i = 0; i < nodes; ++i) {
      kv_pool_options own = options;
      if (!domains.empty()) own.domain = domains[i];
      all.push_back(std::make_unique<node_type>(*ends[i], form, own));
    }
    settle();
  }
  void end(std::size_t node) {
    all[node].reset();
    ends[node].reset();
    settle();
  }
  void settle() {
    for (int i = 0; i < 8; ++i) {
      for (auto& each : all) {
        if (each) each->step();
      }
    }
  }
  served_request serve(std::size_t node, std::span<const token_id> prompt) {
    const auto out = all[node]->serve(prompt, [&](auto& request) {
      for (int i = 0; i < 16 && request.where().next == offload::answer::pending; ++i)
        settle();
      request.fetch();
      for (int i = 0; i < 64 && !request.has_arrived(); ++i)
        settle();
    });
    settle();
    CHECK(all[node]->wrong() == "");
    return out;
  }
  thread_network net;
  std::vector<std::unique_ptr<thread_endpoint>> ends;
  std::vector<std::unique_ptr<node_type>> all;
};

/// A seat whose process says what a test wants.
struct stranger {
  stranger(thread_network& net, std::uint32_t seat) : end(net, seat_id{seat}) {}

  frame_buffer buffer_for(seat_id, const frame_header& frame) noexcept {
    bytes.resize(frame.bytes);
    return {.what = frame_buffer::answer::take, .bytes = bytes};
  }
  void on_frame(seat_id, const frame_header& frame) noexcept { data.push_back(frame); }
  void on_message(seat_id, const frame_header& frame, std::span<const std::byte> what) noexcept {
    words.emplace_back(static_cast<detail::pool_frame>(frame.kind),
                       std::vector<std::byte>(what.begin(), what.end()));
  }
  void on_death(seat_id, comm::death) noexcept {}
  void on_joined(seat_id) noexcept {}
  [[nodiscard]] bool keeps_waiting() const noexcept { return true; }

  void hear() {
    while (end.poll(deadline{0}, *this)) {
    }
  }
  /// Introduces itself as a node like the one that it has heard.
  void join() {
    hear();
    for (const auto& [kind, what] : words) {
      if (kind != detail::pool_frame::hello) continue;
      std::vector<std::byte> mine = what;
      const std::uint64_t nonce = end.nonce();
      std::memcpy(mine.data() + mine.size() - sizeof(nonce), &nonce, sizeof(nonce));
      end.post(seat_id{0}, {.kind = 1}, mine);
      return;
    }
  }
  void post(detail::pool_frame kind, const detail::pool_writer& what) {
    end.post(seat_id{0}, {.kind = static_cast<std::uint16_t>(kind)}, what.bytes());
  }
  /// Says that it has the first `chunks` blocks of a chain.
  void publish(const kv_chain& chain, std::uint32_t chunks) {
    detail::pool_writer out;
    out.put(chain.keys()[0]);
    out.put(chunks);
    for (std::uint32_t i = 0; i < chunks; ++i)
      out.put(detail::hint_digest(chain.keys()[i]));
    out.put(~std::uint64_t{0} >> (64 - chunks));
    out.put(++published);
    post(detail::pool_frame::publish, out);
  }

  thread_endpoint end;
  std::vector<std::byte> bytes;
  std::vector<frame_header> data;
  std::uint64_t published = 0;
  std::vector<std::pair<detail::pool_frame, std::vector<std::byte>>> words;
};

/// A node and a seat that a test speaks for. The directory of the chain used lies with the node or with the
/// stranger, as the hash has it: the stranger answers what it is asked.
struct node_and_stranger {
  explicit node_and_stranger(const kv_pool_options& options = {})
      : net(2, {.copied_bytes = 65536, .lane_bytes = 1 << 20}), other(net, 1), end(net, seat_id{0}) {
    node = std::make_unique<node_type>(end, node_form{.groups = paged_group}, options);
    node->step();
    other.join();
    node->step();
  }
  /// Asks for a chain, and is told that the stranger holds its first `chunks` blocks.
  auto ask(const kv_chain& chain, std::uint32_t chunks) {
    other.publish(chain, chunks);
    node->step();
    auto request = node->pool().ask(chain, 0).value();
    other.words.clear();
    other.hear();
    for (const auto& [kind, what] : other.words) {
      if (kind != detail::pool_frame::ask) continue;
      detail::pool_reader in(what);
      detail::pool_writer out;
      out.put(in.template take<std::uint64_t>());
      out.put(in.template take<std::uint32_t>());
      out.put(std::uint32_t{1});
      out.put(seat_id{1});
      out.put(other.end.nonce());
      out.put(~std::uint64_t{0} >> (64 - chunks));
      other.post(detail::pool_frame::answer, out);
    }
    node->step();
    return request;
  }
  /// The request's number, taken from the first message that asks for blocks.
  std::uint64_t asked_id() {
    other.words.clear();
    other.hear();
    for (const auto& [kind, what] : other.words) {
      if (kind == detail::pool_frame::get) return detail::pool_reader(what).take<std::uint64_t>();
    }
    return 0;
  }
  void send(const frame_header& header, std::span<const std::byte> bytes) {
    static_cast<void>(other.end.send(seat_id{0}, header, bytes, other_time(), other));
    node->step();
  }
  [[nodiscard]] deadline other_time() const { return deadline{other.end.now_ns() + 1'000'000'000}; }

  thread_network net;
  stranger other;
  thread_endpoint end;
  std::unique_ptr<node_type> node;
};

inline frame_header block_frame(std::uint64_t id, std::uint32_t part, std::span<const std::byte> bytes) {
  return {.epoch = id,
          .message = bytes.size(),
          .offset = 0,
          .bytes = static_cast<std::uint32_t>(bytes.size()),
          .tag = part,
          .crc = crc32c(0, bytes),
          .kind = static_cast<std::uint16_t>(detail::pool_frame::data),
          .is_checked = 1};
}

}  // namespace llmmem_tests
