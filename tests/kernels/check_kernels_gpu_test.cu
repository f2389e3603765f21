// Parity, sums, deltas and checksums on a device, each against the host's run of the same work, and checksums
// against the processor's own as well: every byte, bit and sum, also replayed from a graph.
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/ordered_sum.hpp>
#include <llmmem/kernels/xor_blocks.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

#include "support/cache_world.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

std::vector<std::byte> any_bytes(std::uint64_t count, std::mt19937_64& random) {
  std::vector<std::byte> out(count);
  std::ranges::generate(out, [&] { return static_cast<std::byte>(random()); });
  return out;
}

std::uint64_t any_length(std::mt19937_64& random) {
  constexpr std::uint64_t longest[] = {40, 3000, 70'000, 3'000'000};
  return random() % longest[random() % std::size(longest)];
}

std::uint64_t any_skew(std::mt19937_64& random) {
  constexpr std::uint64_t skews[] = {0, 0, 0, 4, 1};
  return skews[random() % std::size(skews)];
}

/// The offsets of several buffers: the same for all, or each its own, multiples of `width`.
class any_skews {
 public:
  any_skews(std::mt19937_64& random, std::uint64_t width) : random_(&random), width_(width) {
    same_ = next();
    is_same_ = random() % 2 == 0;
  }
  [[nodiscard]] std::uint64_t operator()() { return is_same_ ? same_ : next(); }

 private:
  [[nodiscard]] std::uint64_t next() { return (*random_)() % (16 / width_) * width_; }

  std::mt19937_64* random_;
  std::uint64_t width_;
  std::uint64_t same_;
  bool is_same_;
};

/// Runs something on a stream, from a graph twice, so that what is overwritten is so again.
template <class Work>
void on_device(std::uint64_t seed, cudaStream_t stream, const char* what, const Work& work) {
  const device_executor run(stream);
  launch_or_replay(seed, stream, what, [&] { return work(run).has_value(); }, 2);
}

void check_parity(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const std::uint64_t bytes = any_length(random);
  any_skews skews(random, 1);
  const std::uint64_t skew = skews();
  const std::uint64_t count = random() % (most_parity_shards + 1);
  std::vector<std::vector<std::byte>> contents;
  std::vector<device_array<std::byte>> shards;
  std::vector<const std::byte*> here;
  std::vector<const std::byte*> there;
  for (std::uint64_t i = 0; i < count; ++i) {
    contents.push_back(any_bytes(bytes + 16, random));
    shards.emplace_back(contents.back());
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t own = skews();
    here.push_back(contents[i].data() + own);
    there.push_back(shards[i].data() + own);
  }
  std::vector<std::byte> expected(bytes + 64, poison);
  const device_array<std::byte> parity(expected);
  on_device(seed, stream, "parity",
            [&](const auto& run) { return xor_parity(run, there, parity.data() + 16 + skew, bytes); });
  require(xor_parity(host_executor{}, here, expected.data() + 16 + skew, bytes).has_value(),
          "parity on the host", seed);
  require(parity.host() == expected, "the parity differs from the host's", seed);
}

/// Sums of any bits: infinities, subnormals and NaNs too.
void check_sum(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};
  const dtype elements = types[random() % std::size(types)];
  const std::uint64_t width = bits_of(elements) / 8;
  const std::uint64_t bytes = any_length(random) / 8 / width * width;
  const std::uint64_t count = 1 + random() % (random() % 5 == 0 ? 40 : 5);
  any_skews skews(random, random() % 8 == 0 ? 1 : width);  // now and then of no element
  const std::uint64_t skew = skews();
  std::vector<std::vector<std::byte>> contents;
  std::vector<device_array<std::byte>> parts;
  for (std::uint64_t i = 0; i < count; ++i) {
    contents.push_back(any_bytes(bytes + 16, random));
    parts.emplace_back(contents.back());
  }
  std::vector<const std::byte*> here;
  std::vector<const std::byte*> there;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t own = skews();
    here.push_back(contents[i].data() + own);
    there.push_back(parts[i].data() + own);
  }
  std::vector<std::byte> expected(bytes + 64, poison);
  const device_array<std::byte> sum(expected);
  on_device(seed, stream, "sum", [&](const auto& run) {
    return sum_in_order(run, elements, there, sum.data() + 16 + skew, bytes);
  });
  require(sum_in_order(host_executor{}, elements, here, expected.data() + 16 + skew, bytes).has_value(),
          "a sum on the host", seed);
  require(sum.host() == expected, "the sum differs from the host's", seed);
}

void check_delta(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const std::uint64_t bytes = any_length(random);
  any_skews skews(random, 1);
  const std::uint64_t skew = skews();
  const std::uint64_t changed = skews();
  const std::uint64_t written = skews();
  const dirty_page_options pages{.page_bytes = 512U << random() % 5};
  const std::uint64_t words = dirty_words(bytes, pages);
  std::vector<std::byte> before = any_bytes(bytes + 64, random);
  std::vector<std::byte> after(bytes + 64);
  std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(skew), bytes,
              after.begin() + static_cast<std::ptrdiff_t>(changed));
  for (std::uint64_t i = random() % 20; i-- != 0;)
    after[random() % after.size()] ^= static_cast<std::byte>(1 + random() % 255);
  std::vector<std::byte> delta(bytes + 64, poison);
  std::vector<std::uint32_t> bits(words + 1, 0xDEAD'BEEF);
  std::vector<std::uint32_t> looked = bits;
  const device_array<std::byte> device_before(before);
  const device_array<std::byte> device_after(after);
  const device_array<std::byte> device_delta(delta);
  const device_array<std::uint32_t> device_bits(bits);
  const device_array<std::uint32_t> device_looked(looked);
  const auto make = [&](const auto& run, const std::byte* from, const std::byte* to, std::byte* made,
                        std::uint32_t* dirty, std::uint32_t* seen) -> result<void> {
    if (auto done = compare_dirty(run, from + skew, to + changed, bytes, {seen, words}, pages); !done)
      return done;
    return xor_delta(run, from + skew, to + changed, made + written, bytes, {dirty, words}, pages);
  };
  on_device(seed, stream, "delta", [&](const auto& run) {
    return make(run, device_before.data(), device_after.data(), device_delta.data(), device_bits.data(),
                device_looked.data());
  });
  require(make(host_executor{}, before.data(), after.data(), delta.data(), bits.data(), looked.data())
              .has_value(),
          "delta on the host", seed);
  require(device_delta.host() == delta, "the delta differs from the host's", seed);
  require(device_bits.host() == bits, "the dirty bits differ from the host's", seed);
  require(device_looked.host() == looked, "compared pages differ from the host's", seed);
  const device_executor run(stream);
  require(apply_delta(run, device_before.data() + skew, device_delta.data() + written, bytes,
                      {device_bits.data(), words}, pages)
              .has_value(),
          "apply", seed);
  check(cudaStreamSynchronize(stream), "apply");
  std::copy_n(after.begin() + static_cast<std::ptrdiff_t>(changed), bytes,
              before.begin() + static_cast<std::ptrdiff_t>(skew));
  require(device_before.host() == before, "an applied delta is not the new bytes", seed);
}

void check_pool(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const std::uint64_t bytes = any_length(random) % 400'000;
  const std::uint64_t stride = random() % 3 == 0 ? bytes + random() % 20 : (bytes + 15) / 16 * 16;
  const std::uint64_t blocks = 1 + random() % 9;
  const std::uint64_t skew = any_skew(random);
  std::vector<std::byte> pool = any_bytes(blocks * stride + 16, random);
  std::vector<std::byte> room(pool.size(), poison);
  std::vector<block_pair> pairs;
  for (std::uint64_t i = 0; i < blocks; ++i)
    pairs.push_back({static_cast<std::int64_t>(random() % (blocks + 2)) - 1, static_cast<std::int64_t>(i)});
  std::vector<std::uint32_t> crcs(2 * blocks, 0xDEAD'BEEF);
  std::vector<std::uint64_t> digests(2 * blocks, 0xDEAD'BEEF);
  const device_array<std::byte> device_pool(pool);
  const device_array<std::byte> device_room(room);
  const device_array<block_pair> device_pairs(pairs);
  const device_array<std::uint32_t> device_crcs(crcs);
  const device_array<std::uint64_t> device_digests(digests);
  const auto all = [&](const auto& run, const std::byte* from, std::byte* to, const block_pair* list,
                       std::uint32_t* crc, std::uint64_t* digest) -> result<void> {
    const block_pool_view source{from + skew, stride, blocks};
    const strided_blocks every(source, bytes);
    const numbered_blocks some(source, bytes, {list, blocks}, {to + skew, stride, blocks});
    if (auto done = crc32c_blocks(run, every, {crc, blocks}); !done) return done;
    if (auto done = digest_blocks(run, every, {digest, blocks}); !done) return done;
    if (auto done = copy_and_crc32c(run, some, {crc + blocks, blocks}); !done) return done;
    return copy_and_digest(run, some, {digest + blocks, blocks});
  };
  on_device(seed, stream, "sums of a pool", [&](const auto& run) {
    return all(run, device_pool.data(), device_room.data(), device_pairs.data(), device_crcs.data(),
               device_digests.data());
  });
  require(
      all(host_executor{}, pool.data(), room.data(), pairs.data(), crcs.data(), digests.data()).has_value(),
      "sums on the host", seed);
  require(device_crcs.host() == crcs, "a CRC-32C differs from the host's", seed);
  require(device_digests.host() == digests, "a digest differs from the host's", seed);
  require(device_room.host() == room, "copied blocks differ from the host's", seed);
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::span block(pool.data() + skew + i * stride, bytes);
    require(crcs[i] == crc32c(0, block), "a CRC-32C is not the processor's", seed);
    require(digests[i] == block_digest(block), "a digest is not the host function's", seed);
  }
}

void check_tasks(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const std::uint64_t multiple = std::uint64_t{1} << seed % 5;
  const std::vector<std::byte> source = any_bytes(600'000, random);
  // Sources and destinations at the same offsets from a multiple of 16, or at others.
  const std::uint64_t apart = random() % 2 * (random() % 16 / multiple * multiple);
  std::vector<std::byte> expected(source.size() + 16, poison);
  const device_array<std::byte> from(source);
  const device_array<std::byte> to(expected);
  std::vector<copy_task> tasks;
  std::vector<std::uint32_t> crcs;
  std::uint64_t longest = 0;
  for (std::uint64_t at = 0; at + 90'000 < source.size() && tasks.size() < few_copies::most;) {
    const std::uint64_t bytes = random() % (random() % 5 == 0 ? 90'000 : 500);
    tasks.push_back({from.data() + at, to.data() + at + apart, bytes});
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(at), bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(at + apart));
    crcs.push_back(crc32c(0, std::span(source).subspan(at, bytes)));
    longest = std::max(longest, bytes);
    at = (at + bytes + multiple) / multiple * multiple;
  }
  const device_array<copy_task> on_the_device(tasks);
  const device_array<std::uint32_t> sums(std::vector<std::uint32_t>(tasks.size(), 0xDEAD'BEEF));
  const auto aligned = static_cast<std::uint32_t>(multiple);
  on_device(seed, stream, "sums of tasks", [&](const auto& run) -> result<void> {
    if (auto done = crc32c_blocks(run, few_copies(tasks), {sums.data(), sums.size()}); !done) return done;
    return copy_and_crc32c(run,
                           listed_copies({on_the_device.data(), tasks.size()}, longest, {aligned, aligned}),
                           {sums.data(), sums.size()});
  });
  require(sums.host() == crcs, "a task's CRC-32C is not the processor's", seed);
  require(to.host() == expected, "a copied task differs", seed);
}

}  // namespace

int main() {
  check_worlds(200, [](std::uint64_t seed, cudaStream_t stream) {
    check_parity(seed, stream);
    check_sum(seed, stream);
    check_delta(seed, stream);
    check_pool(seed, stream);
    check_tasks(seed, stream);
  });
}
