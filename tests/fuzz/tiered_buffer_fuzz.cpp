/// Any order of calls on a tiered buffer of three tiers, of any sizes: see support/tiered_world.hpp.
#define DOCTEST_CONFIG_IMPLEMENT
#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/eviction/s3fifo.hpp>
#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "support/tiered_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// A byte a choice, two where it has more than 256 outcomes. When they have run out it goes on at random, by
/// a seed of theirs: a short input is a whole program too.
class choice_bytes {
 public:
  explicit choice_bytes(std::span<const std::uint8_t> bytes) noexcept : bytes_(bytes) {
    for (const std::uint8_t each : bytes)
      seed_ = (seed_ ^ each) * 0x100'0000'01B3ULL;
    rest_ = random_numbers(seed_);
  }

  std::uint64_t next() noexcept {
    if (bytes_.empty()) return rest_.next() >> 56;
    const std::uint64_t byte = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return byte;
  }
  std::uint64_t below(std::uint64_t bound) noexcept {
    return (bound > 256 ? next() << 8 | next() : next()) % bound;
  }
  std::uint32_t below(std::uint32_t bound) noexcept {
    return static_cast<std::uint32_t>(below(std::uint64_t{bound}));
  }
  bool once_in(std::uint64_t times) noexcept { return below(times) == 0; }

  /// Contents: not worth a byte of the input each.
  std::uint64_t filler() noexcept { return ++filled_; }

 private:
  std::span<const std::uint8_t> bytes_;
  std::uint64_t seed_ = 0xCBF2'9CE4'8422'2325ULL;
  random_numbers rest_{0};
  std::uint64_t filled_ = 0;
};

template <class... Tiers>
void live(choice_bytes choices, std::uint64_t element) {
  constexpr std::uint64_t most = 2000;
  host_space space({.budget = 1 << 20});
  const std::uint64_t top = 6144 + 64 * choices.below(std::uint64_t{100});
  const std::uint64_t middle = 8192 + 64 * choices.below(std::uint64_t{200});
  tiered_buffer<Tiers...> buffer({.max_chunks = 32,
                                  .max_transfers = 1 + choices.below(std::uint32_t{4}),
                                  .largest_chunk_bytes = most,
                                  .staging_slots = 1},
                                 {space, top, 64}, {space, middle, 64}, {space, 64 << 10, 64});
  tiered_world world(buffer, host_touch{}, choices,
                     {.chunks = 16, .most_bytes = most, .unit = element, .steps = 150});
  world.run();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static doctest::Context context;
  context.setAsDefaultForAssertsOutOfTestCases();
  context.setAssertHandler([](const doctest::AssertData& broken) {
    std::fprintf(stderr, "%s:%d: %s\n", broken.m_file, broken.m_line, broken.m_expr);
    std::abort();
  });
  choice_bytes choices({data, size});
  switch (choices.below(std::uint32_t{3})) {
    case 0:
      live<tier<host_space, lru_eviction, demoting<>>, host_space, host_space>(choices, 1);
      break;
    case 1:
      live<tier<host_space, s3fifo_eviction, write_through>,
           tier<host_space, lru_eviction, write_through_selective<2>, identity_codec, second_touch<3>>,
           host_space>(choices, 1);
      break;
    default:
      live<host_space, host_space, tier<host_space, lru_eviction, write_back, byte_plane<dtype::bf16>>>(
          choices, 2);
  }
  return 0;
}
