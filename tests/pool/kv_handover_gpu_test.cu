// Keys and values from device memory to device memory between unequal splits: the messages and the blocks
// have the bits of the host's, behind the fences of the layers.
#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/offload/executor_packer.hpp>
#include <llmmem/pool/kv_handover.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "support/device.cuh"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/split_world.hpp"

namespace handover_tests {  // named: nvcc warns of unused members of a type without linkage

using namespace llmmem;

/// Keeps messages from each rank to each rank.
struct carried_messages {
  rank_id mine{};
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::vector<std::byte>>> messages{};
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> taken{};

  [[nodiscard]] rank_id rank() const noexcept { return mine; }
  [[nodiscard]] rank_count world() const noexcept { return rank_count{64}; }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return {ns}; }
  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t, deadline) {
    messages[{to_index(mine), to_index(to)}].emplace_back(bytes.begin(), bytes.end());
    return {};
  }
  result<void> recv(std::span<std::byte> into, rank_id from, std::uint32_t, deadline) {
    const std::pair key(to_index(from), to_index(mine));
    std::ranges::copy(messages.at(key).at(taken[key]++), into.begin());
    return {};
  }
  result<void> exchange(std::span<const std::byte>, rank_id, std::span<std::byte>, rank_id, std::uint32_t,
                        deadline) {
    return {};
  }
  void revoke() noexcept {}
};
static_assert(transport<carried_messages>);

}  // namespace handover_tests

namespace {

using namespace llmmem;
using handover_tests::carried_messages;
using namespace llmmem_tests;

constexpr device_id first{0};
constexpr std::uint64_t most_tokens = 24;

/// The memory of one rank on the device. The engine's stream writes it layer by layer, and reads it.
class device_rank {
 public:
  device_rank(device_space& space, pinned_space& pinned, const rank_memory& like)
      : space_(&space),
        pinned_(&pinned),
        layout_(like.layout),
        blocks_(like.blocks),
        engine_(space, first, {.depth = 8}) {
    range_ = space.try_allocate(like.bytes.size(), 256).value();
    host_ = pinned.try_allocate(like.bytes.size(), 64).value();
  }
  ~device_rank() {
    space_->deallocate(range_);
    pinned_->deallocate(host_);
  }
  device_rank(const device_rank&) = delete;
  device_rank& operator=(const device_rank&) = delete;

  [[nodiscard]] kv_memory memory() const {
    return {.data = range_.data, .blocks = blocks_, .layout = layout_};
  }
  /// Returns the fence behind which the bytes are on the device.
  device_queue::fence_type write(std::span<const std::byte> bytes) {
    std::ranges::copy(bytes, host_.data);
    return engine_.copy_in_async(range_, host_.span().first(bytes.size()), {}).value();
  }
  std::vector<std::byte> read(const device_queue::fence_type& after) {
    engine_
        .copy_out_async(host_.span().first(static_cast<std::size_t>(range_.bytes)), range_,
                        std::span(&after, 1))
        .value()
        .wait();
    return {host_.data, host_.data + range_.bytes};
  }

 private:
  device_space* space_;
  pinned_space* pinned_;
  kv_layout layout_;
  std::uint64_t blocks_;
  device_queue engine_;
  device_space::range_type range_{};
  pinned_space::range_type host_{};
};

void fill(rank_memory& memory, std::uint64_t tokens) {
  for (std::uint32_t layer = 0; layer < memory.layout.layers; ++layer)
    memory.each_vector(layer, tokens, [&](auto bytes, auto p, auto token, auto head) {
      std::ranges::copy(contents(bytes.size(), layer, p, token, head), bytes.begin());
    });
}

void check_handover(std::uint64_t seed) {
  random_numbers random(seed);
  const kv_layout whole = any_split_model(random);
  const std::vector<kv_layout> from = small_side(whole, 3, random);
  const std::vector<kv_layout> to = small_side(whole, 3, random);
  const std::uint64_t tokens = 1 + random.below(most_tokens);
  const paging::kv_split_plan plan(from, to);
  std::vector<rank_id> prefill, decode;
  for (std::uint32_t i = 0; i < from.size() + to.size(); ++i)
    (i < from.size() ? prefill : decode).push_back(rank_id{i});

  std::uint64_t largest = 0;
  for (const auto& share : plan.shares())
    largest =
        std::max(largest, (plan.token_bytes(share) + 24 * plan.token_vectors(share)) * most_tokens + 256);
  const std::uint64_t staging =
      (1 + random.below(std::uint64_t{3})) * largest;  // one to three slots and more
  device_space space(device_pool_source<cuda_runtime>(first), {.budget = 64 << 20});
  pinned_space pinned(pinned_source<cuda_runtime>(), {.budget = 64 << 20});
  const auto ring = pinned.try_allocate(staging, 64).value();
  carried_messages by_device, by_host;
  device_queue copies(space, first, {.depth = 4});
  const auto packer = [&] {
    return offload::executor_packer(device_executor(copies.stream()), offload::queue_mark(copies),
                                    ring.span());
  };
  const kv_handover_options options{.max_tokens = most_tokens};
  for (std::uint32_t rank = 0; rank < from.size() + to.size(); ++rank) {
    by_device.mine = by_host.mine = rank_id{rank};
    const bool sends = rank < from.size();
    rank_memory host(sends ? from[rank] : to[rank - from.size()], tokens, random);
    host.planes.clear();
    if (sends) fill(host, tokens);
    device_rank device(space, pinned, host);
    const auto written = device.write(host.bytes);  // the receiver's: zeros
    kv_handover on_device(by_device, plan, prefill, decode, options, packer());
    kv_handover on_host(by_host, plan, prefill, decode, options);
    require(on_device.staging_bytes() <= staging, "the ring is inside its budget", seed);
    if (!sends) copies.follow(std::span(&written, 1)).value();
    device_queue::fence_type last = written;
    for (std::uint32_t layer = 0; layer < whole.layers; ++layer) {
      const kv_handover_part part{.request = 7, .layer = layer, .range = {0, tokens}};
      if (sends) {
        on_device.send(part, device.memory(), host.table, {}, written).value();
        on_host.send(part, host.memory(), host.table, {}).value();
      } else {
        last = on_device.receive_async(part, device.memory(), host.table, {}).value();
        on_host.receive(part, host.memory(), host.table, {}).value();
      }
    }
    require(device.read(last) == host.bytes, "a rank's memory has the bits of the host's", seed);
  }
  require(by_device.messages == by_host.messages, "messages have the bits of the host's", seed);
  pinned.deallocate(ring);
  require(space.used() == 0 && pinned.used() == 0, "all memory is returned", seed);
}

}  // namespace

int main() {
  require_device();
  for (const auto seed : seeds(12, 3))
    check_handover(seed);
  std::printf("kv_handover: bits equal to the host's\n");
  return 0;
}
