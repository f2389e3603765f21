/// Any order of calls: the allocator keeps its promises about the memory behind its blocks, see
/// support/paged_world.hpp. A broken one leaves as an exception, which the fuzzer reports with its input.
#include <cstddef>
#include <cstdint>

#include "support/choice_bytes.hpp"
#include "support/paged_world.hpp"

namespace {

using namespace llmmem_tests;

template <class Traits>
void live(choice_bytes choices) {
  paged_world<Traits, choice_bytes> world(choices);
  while (!world.choices().empty())
    world.step();
  world.end();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  choice_bytes choices({data, size});
  switch (choices.below(std::uint32_t{7})) {
    case 0:
      live<world_traits>(choices);
      break;
    case 1:
      live<weak_world_traits>(choices);
      break;
    case 2:
      live<copying_world_traits>(choices);
      break;
    case 3:
      live<stealing_world_traits>(choices);
      break;
    case 4:
      live<choosy_world_traits>(choices);
      break;
    case 5:
      live<alone_world_traits>(choices);
      break;
    default:
      live<trusting_world_traits>(choices);
  }
  return 0;
}
