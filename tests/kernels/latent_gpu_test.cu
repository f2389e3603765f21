// Records of latents against the host's run: appends, gathers and attention; every bit of caches, rows,
// outputs and flags. By tensor cores, whose sums are a device's own, outputs near the host's.
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/latent_tokens.hpp>
#include <llmmem/kernels/paged_attention.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/device.cuh"
#include "support/latent_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// The memory that a run's pointers are of.
struct latent_pointers {
  const std::int64_t* slots = nullptr;
  const std::byte* latents = nullptr;
  const std::byte* rotary = nullptr;
  const std::byte* queries = nullptr;
  const std::int32_t* padded = nullptr;
  const std::int32_t* tokens = nullptr;
  const std::int32_t* sequences = nullptr;
  const std::int32_t* lengths = nullptr;
  const float* outer = nullptr;
  std::byte* cache = nullptr;
  std::byte* gathered[2] = {nullptr, nullptr};
  std::byte* out = nullptr;
  float* log_sum_exp = nullptr;
  std::byte* workspace = nullptr;
  std::uint32_t* flag = nullptr;
};

template <class Run>
bool all_of(const latent_world& world, const Run& run, const latent_pointers& at, std::uint64_t workspace) {
  const kv_memory cache{at.cache, world.blocks, world.layout};
  const std::span<const std::int64_t> slots(at.slots, world.slots.size());
  const slot_front front(slots, world.layout.block_tokens, world.blocks);
  const std::uint64_t size = element_bytes(world.element);
  const token_options options{
      .element = world.element, .scales = {.keys = at.outer}, .out_of_range = at.flag};
  if (!append_mla(run, front, world.rows_of(at.latents, world.record.latents),
                  world.rows_of(at.rotary, world.record.rotary), world.record, cache, latent_world::layer,
                  options))
    return false;
  if (!gather_mla(run, front, {at.gathered[0], world.record.latents * size, 0},
                  {at.gathered[1], world.record.rotary * size, 0}, world.record, cache, latent_world::layer,
                  options))
    return false;
  attention_options how = world.options;
  how.scales.keys = at.outer;
  how.log_sum_exp = at.log_sum_exp;
  how.out_of_range = at.flag;
  return paged_attention(run, world.tables(at.padded, at.tokens),
                         {.rows = world.sequences.size(), .sequences = at.sequences, .lengths = at.lengths},
                         world.query_rows(at.queries), world.out_rows(at.out), cache, latent_world::layer,
                         {at.workspace, static_cast<std::size_t>(workspace)}, how)
      .has_value();
}

/// Sums differ in their last digits, so a weight may be rounded to the next bf16: 2^-8 of values below 1.
void require_near(const latent_world& world, const std::vector<std::byte>& here,
                  const std::vector<std::byte>& host, std::uint64_t seed) {
  for (std::size_t i = 0; i < host.size() / element_bytes(world.element); ++i)
    require(std::fabs(world.number(here, i) - world.number(host, i)) <= 0x1p-8F + 0x1p-7F,
            "outputs by tensor cores are not near the host's", seed);
}

void check_latents(std::uint64_t seed, cudaStream_t stream, attention_arithmetic arithmetic) {
  std::mt19937_64 random(seed);
  constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};
  const auto order = static_cast<block_order>(random() % block_order_count);
  latent_world world(random, all_records[seed % all_records.size()].record, types[seed / 9 % 3], order, 12);
  if (seed % 3 == 0) world.outer = 0.37F;
  const bool is_tensor = arithmetic == attention_arithmetic::tensor_cores;
  if (is_tensor && !llmmem::detail::is_tensor_record(world.record)) return;
  world.options.arithmetic = arithmetic;
  for (std::uint32_t i = 0; i < 3; ++i) {
    // A NaN, an infinity, and what is subnormal in floats.
    constexpr float special[] = {std::numeric_limits<float>::quiet_NaN(),
                                 std::numeric_limits<float>::infinity(), 0x1p-140F};
    const std::size_t elements = world.latents.size() / element_bytes(world.element);
    if (seed % 4 == 1 && !is_tensor)
      store_element(world.element, world.latents.data() + random() % elements * element_bytes(world.element),
                    special[i]);
  }
  const std::uint64_t workspace =
      attention_workspace_bytes(world.sequences.size(), world.layout, world.options);
  std::vector<std::byte> host_cache = world.cache;
  std::vector<std::byte> host_rows[2] = {std::vector<std::byte>(world.latents.size(), std::byte{0x5A}),
                                         std::vector<std::byte>(world.rotary.size(), std::byte{0x5A})};
  std::vector<std::byte> host_out(world.out_bytes(), std::byte{0x5A});
  std::vector<std::byte> host_workspace(workspace, std::byte{0xFF});
  std::vector<float> host_logs(world.sequences.size() * world.query_heads);
  std::vector<std::uint32_t> host_flag{0};
  const device_array<std::int64_t> slots(world.slots);
  const device_array<std::byte> latents(world.latents);
  const device_array<std::byte> rotary(world.rotary);
  const device_array<std::byte> queries(world.queries);
  const device_array<std::int32_t> padded(world.padded);
  const device_array<std::int32_t> tokens(world.tokens);
  const device_array<std::int32_t> sequences(world.sequences);
  const device_array<std::int32_t> lengths(world.lengths);
  const device_array<float> outer(std::vector<float>{world.outer});
  const device_array<std::byte> cache(world.cache);
  const device_array<std::byte> rows[2] = {device_array<std::byte>(host_rows[0]),
                                           device_array<std::byte>(host_rows[1])};
  const device_array<std::byte> out(host_out);
  const device_array<std::byte> device_workspace(host_workspace);
  const device_array<float> logs(host_logs);
  const device_array<std::uint32_t> flag(host_flag);
  require(all_of(world, host_executor{},
                 {world.slots.data(),
                  world.latents.data(),
                  world.rotary.data(),
                  world.queries.data(),
                  world.padded.data(),
                  world.tokens.data(),
                  world.sequences.data(),
                  world.lengths.data(),
                  &world.outer,
                  host_cache.data(),
                  {host_rows[0].data(), host_rows[1].data()},
                  host_out.data(),
                  host_logs.data(),
                  host_workspace.data(),
                  host_flag.data()},
                 workspace),
          "a run on the host", seed);
  launch_or_replay(seed, stream, "a run", [&] {
    return all_of(world, device_executor(stream),
                  {slots.data(),
                   latents.data(),
                   rotary.data(),
                   queries.data(),
                   padded.data(),
                   tokens.data(),
                   sequences.data(),
                   lengths.data(),
                   outer.data(),
                   cache.data(),
                   {rows[0].data(), rows[1].data()},
                   out.data(),
                   logs.data(),
                   device_workspace.data(),
                   flag.data()},
                  workspace);
  });
  require(cache.host() == host_cache, "records differ from the host's", seed);
  require(rows[0].host() == host_rows[0], "gathered latents differ from the host's", seed);
  require(rows[1].host() == host_rows[1], "gathered rotary parts differ from the host's", seed);
  if (is_tensor) {
    require_near(world, out.host(), host_out, seed);
  } else {
    require(out.host() == host_out, "outputs differ from the host's", seed);
  }
  const std::vector<float> here = logs.host();
  for (std::size_t i = 0; i < here.size(); ++i)
    require(std::bit_cast<std::uint32_t>(here[i]) == std::bit_cast<std::uint32_t>(host_logs[i]) ||
                (is_tensor && std::fabs(here[i] - host_logs[i]) < 1e-4F),
            "logarithms differ from the host's", seed);
  require(flag.host() == host_flag, "the flag differs from the host's", seed);
}

void check_all(std::uint64_t seed, cudaStream_t stream) {
  check_latents(seed, stream, attention_arithmetic::reproducible);
  check_latents(seed, stream, attention_arithmetic::tensor_cores);
}

}  // namespace

int main() {
  check_worlds(48, check_all);
}
