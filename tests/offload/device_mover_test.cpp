/// Tiers beneath a cache on a device: fences of a stream, a first tier in pinned memory, a device that is
/// lost.
#include <llmmem/offload/kv_tiers.hpp>

#include <doctest/doctest.h>
#include <llmmem/device/device.hpp>
#include <llmmem/device/device_fence.hpp>
#include <llmmem/device/device_queue.hpp>
#include <llmmem/device/pinned.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "support/fake_device.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_space = basic_device_space<device_pool_source<fake_runtime>>;
using fake_pinned = basic_host_space<pinned_source<fake_runtime>>;
using fake_queue = basic_device_queue<fake_space, fake_runtime>;

struct traits : paged_traits {
  using fence = device_fence<fake_runtime>;
  using observer = offload::tier_link;
};

constexpr kv_layout layout{.layers = 2, .heads = 1, .head_dim = 8, .block_tokens = 4};

/// The kernels of the copies run at once, on the host; their fences are those of a stream.
struct rig {
  std::vector<std::byte> bytes() const { return kv; }

  fake_device device{7};
  fake_space space{device_pool_source<fake_runtime>(device_id{0}, device), {.budget = 1 << 16}};
  fake_pinned pinned{pinned_source<fake_runtime>({}, device), {.budget = 1 << 16}};
  fake_queue queue{space, device_id{0}, {.depth = 8}, device};
  paged_allocator<traits> cache{
      {.blocks = 8, .block_tokens = 4, .max_sequences = 4, .max_sequence_tokens = 32}};
  std::vector<std::byte> kv = std::vector<std::byte>(layout.total_bytes(cache.physical_blocks()));
  kv_tiers<paged_allocator<traits>, offload::layout_mover<host_executor, offload::queue_mark<fake_queue>>,
           offload::kv_tier<fake_pinned>>
      tiers{
          cache,
          offload::layout_mover(host_executor{}, kv_memory{.data = kv.data(), .blocks = 9, .layout = layout},
                                offload::queue_mark(queue)),
          {.load_headroom = 0},
          offload::kv_tier(pinned, 8 * layout.block_bytes())};
};

}  // namespace

TEST_CASE("a cache on a device stores after its stream's fences, and streams can follow its loads") {
  rig r;
  std::vector<token_id> prompt(16);
  std::iota(prompt.begin(), prompt.end(), 0);
  const sequence_id one = r.cache.create().value();
  r.cache.append(one, prompt).value();
  for (std::size_t i = 0; i < r.kv.size(); ++i)
    r.kv[i] = static_cast<std::byte>(i * 13 + i / 7);
  const std::vector<block_id> blocks(r.cache.blocks(one).begin(), r.cache.blocks(one).end());
  const std::vector<std::byte> before = r.bytes();
  r.cache.commit(one).value();
  CHECK(r.tiers.store(one, r.queue.mark().value()).value() == 4);
  r.cache.release(one).value();
  r.tiers.flush();
  r.cache.drop_idle();
  std::fill(r.kv.begin(), r.kv.end(), std::byte{0});

  const kv_chain chain(r.cache, prompt);
  const sequence_id two = r.cache.create().value();
  auto load = r.tiers.prepare_load(two, chain).value();
  const auto first_layer = load.issue(0).value();
  CHECK(r.queue.follow(std::span(&first_layer, 1)));
  CHECK(load.complete().is_complete());
  const kv_memory was{.data = const_cast<std::byte*>(before.data()), .blocks = 9, .layout = layout};
  std::vector<std::byte> expected(layout.block_bytes());
  std::vector<std::byte> found(layout.block_bytes());
  for (std::size_t i = 0; i < 4; ++i) {
    copy_kv_block({.data = expected.data(), .blocks = 1, .layout = layout.packed()}, 0, was,
                  to_index(blocks[i]), 4);
    copy_kv_block({.data = found.data(), .blocks = 1, .layout = layout.packed()}, 0,
                  {.data = r.kv.data(), .blocks = 9, .layout = layout}, to_index(r.cache.blocks(two)[i]), 4);
    CHECK(found == expected);
  }
  CHECK(r.cache.audit() == std::vector<std::string>{});
}

TEST_CASE("tiers trust no bytes of a lost device") {
  rig r;
  std::vector<token_id> prompt(16);
  std::iota(prompt.begin(), prompt.end(), 0);
  const sequence_id one = r.cache.create().value();
  r.cache.append(one, prompt).value();
  r.cache.commit(one).value();
  r.tiers.store(one).value();
  r.tiers.flush();
  r.cache.release(one).value();
  r.cache.drop_idle();
  const kv_chain chain(r.cache, prompt);
  const sequence_id two = r.cache.create().value();
  auto load = r.tiers.prepare_load(two, chain).value();
  load.issue(0).value();
  r.device.lost = 700;
  const auto came = load.complete();
  CHECK(came.tokens == 0);
  CHECK(came.failed_blocks == 4);
  CHECK_FALSE(came.why.message().empty());
  CHECK(r.cache.cached_tokens(prompt) == 0);
  r.device.lost = 0;
}
