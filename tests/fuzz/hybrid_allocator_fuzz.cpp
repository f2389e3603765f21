/// Any order of calls: the allocator of several groups keeps its promises about the memory behind its blocks,
/// see support/hybrid_world.hpp. A broken one leaves as an exception, which the fuzzer reports with its
/// input.
#include <cstddef>
#include <cstdint>

#include "support/choice_bytes.hpp"
#include "support/hybrid_world.hpp"

using namespace llmmem_tests;

namespace {

template <class Traits>
using world = hybrid_world<Traits, choice_bytes>;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  choice_bytes choices({data, size});
  switch (choices.below(std::uint32_t{3})) {
    case 0:
      live<world<hybrid_world_traits>>(choices);
      break;
    case 1:
      live<world<weak_hybrid_world_traits>>(choices);
      break;
    default:
      live<world<trusting_hybrid_world_traits>>(choices);
  }
  return 0;
}
