/// Any order of calls: the allocator keeps its promises about the memory behind its blocks, see
/// support/paged_world.hpp. A broken one leaves as an exception, which the fuzzer reports with its input.
#include <cstddef>
#include <cstdint>

#include "support/choice_bytes.hpp"
#include "support/paged_world.hpp"

using namespace llmmem_tests;

namespace {

template <class Traits>
using world = paged_world<Traits, choice_bytes>;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  choice_bytes choices({data, size});
  switch (choices.below(std::uint32_t{7})) {
    case 0:
      live<world<world_traits>>(choices);
      break;
    case 1:
      live<world<weak_world_traits>>(choices);
      break;
    case 2:
      live<world<copying_world_traits>>(choices);
      break;
    case 3:
      live<world<stealing_world_traits>>(choices);
      break;
    case 4:
      live<world<choosy_world_traits>>(choices);
      break;
    case 5:
      live<world<alone_world_traits>>(choices);
      break;
    default:
      live<world<trusting_world_traits>>(choices);
  }
  return 0;
}
