/// @file
/// The bodies of the collectives over a wire.
#pragma once

#include <llmmem/comm/wired_collectives.hpp>
#include <llmmem/comm/wired_sums.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Contributions and sums in one range, by block.
class range_ends {
 public:
  range_ends(std::span<float> all, std::span<const std::uint64_t> blocks, std::uint32_t self,
             std::span<float> residual) noexcept
      : all_(all), blocks_(blocks), self_(self), residual_(residual) {}

  [[nodiscard]] const float* values(std::uint32_t rank, std::uint64_t at,
                                    std::span<float> room) const noexcept {
    const float* const from = all_.data() + blocks_[rank] + at;
    if (residual_.empty()) return from;
    const float* const lost = residual_.data() + blocks_[rank] + at;
    for (std::size_t i = 0; i < room.size(); ++i)
      room[i] = from[i] + lost[i];
    return room.data();
  }
  [[nodiscard]] bool keeps_errors() const noexcept { return !residual_.empty(); }
  void keep_error(std::uint32_t rank, std::uint64_t at, const float* values,
                  std::span<const float> restored) const noexcept {
    float* const lost = residual_.data() + blocks_[rank] + at;
    for (std::size_t i = 0; i < restored.size(); ++i)
      lost[i] = lost_of(values[i], restored[i]);
  }
  void sum(std::uint64_t at, std::span<const float> values) const noexcept {
    std::ranges::copy(values, all_.begin() + static_cast<std::ptrdiff_t>(blocks_[self_] + at));
  }

 private:
  std::span<float> all_;
  std::span<const std::uint64_t> blocks_;
  std::uint32_t self_;
  std::span<float> residual_;
};

/// Gathers encoded blocks: in two hops if `node_ranks` is not 0.
template <transport T, wire_codec W>
result<void> gather_wired(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                          std::uint32_t node_ranks, const W& wire, collective_call& call) {
  const collective all(ranks, call);
  if (auto fits = all.fit(blocks, values.size(), 1); !fits) return fits;
  if (node_ranks != 0 && all.world() % node_ranks != 0) return all.misfit(all.world(), node_ranks);
  if (all.world() == 1) return {};
  std::vector<std::uint64_t> encoded(blocks.size());
  for (std::uint32_t rank = 0; rank < all.world(); ++rank)
    encoded[rank + 1] = encoded[rank] + wire.bytes(blocks[rank + 1] - blocks[rank]);
  call.scratch.resize(encoded.back());
  const std::span<std::byte> messages(call.scratch);
  wire.encode(block_of(values, blocks, all.self()), messages.data() + encoded[all.self()]);
  const result<void> done = node_ranks == 0
                                ? llmmem::all_gather(ranks, messages, encoded, call)
                                : llmmem::two_hop_all_gather(ranks, messages, encoded, node_ranks, call);
  if (!done) return done;
  for (std::uint32_t rank = 0; rank < all.world(); ++rank)
    wire.decode(messages.data() + encoded[rank], block_of(values, blocks, rank));
  return {};
}

template <transport T, wire_codec W>
result<void> reduce_wired(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                          std::uint32_t node_ranks, const hop_wires<W>& wires, collective_call& call,
                          std::span<float> residual) {
  const collective all(ranks, call);
  if (auto fits = all.fit(blocks, values.size(), 1); !fits) return fits;
  if (node_ranks != 0 && all.world() % node_ranks != 0) return all.misfit(all.world(), node_ranks);
  if (!residual.empty() && residual.size() != values.size())
    return all.misfit(values.size(), residual.size());
  const wired_sum<W> sum(blocks, wires, node_ranks, call.segment_bytes);
  call.scratch.resize(sum.scratch_bytes());
  range_ends ends(values, blocks, all.self(), residual);
  return sum.run(ranks, ends, call.scratch, call);
}

}  // namespace detail

template <transport T, wire_codec W>
result<void> all_gather(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                        const W& wire, collective_call& call) {
  return detail::gather_wired(ranks, values, blocks, 0, wire, call);
}

template <transport T, wire_codec W>
result<void> two_hop_all_gather(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                                std::uint32_t node_ranks, const W& wire, collective_call& call) {
  if (node_ranks == 0) return detail::collective<T>::misfit(to_number(ranks.world()), 0);
  return detail::gather_wired(ranks, values, blocks, node_ranks, wire, call);
}

template <transport T, wire_codec W>
result<void> reduce_scatter(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                            const W& wire, collective_call& call, std::span<float> residual) {
  return detail::reduce_wired(ranks, values, blocks, 0, hop_wires<W>{wire, wire}, call, residual);
}

template <transport T, wire_codec W>
result<void> two_hop_reduce_scatter(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                                    std::uint32_t node_ranks, const hop_wires<W>& wires,
                                    collective_call& call, std::span<float> residual) {
  if (node_ranks == 0) return detail::collective<T>::misfit(to_number(ranks.world()), 0);
  return detail::reduce_wired(ranks, values, blocks, node_ranks, wires, call, residual);
}

template <transport T, wire_codec W>
result<void> all_reduce(T& ranks, std::span<float> values, const W& wire, collective_call& call,
                        std::span<float> residual) {
  const std::vector<std::uint64_t> blocks = even_blocks(values.size(), ranks.world());
  if (auto done = reduce_scatter(ranks, values, blocks, wire, call, residual); !done) return done;
  return all_gather(ranks, values, blocks, wire, call);
}

template <transport T, wire_codec W>
result<void> hierarchical_all_reduce(T& ranks, std::span<float> values, std::uint32_t node_ranks,
                                     const hop_wires<W>& wires, collective_call& call,
                                     std::span<float> residual) {
  const std::vector<std::uint64_t> blocks = even_blocks(values.size(), ranks.world());
  if (auto done = two_hop_reduce_scatter(ranks, values, blocks, node_ranks, wires, call, residual); !done)
    return done;
  return two_hop_all_gather(ranks, values, blocks, node_ranks, wires.between, call);
}

}  // namespace v0
}  // namespace llmmem
