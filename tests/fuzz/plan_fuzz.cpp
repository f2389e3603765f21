/// Any bytes as a plan, and a plan with bytes changed under a checksum that fits: refused with a reason, or
/// read, written again as it was, and simulated within budgets or refused step by step.
#include <llmmem/schedule/plan_text.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "support/random.hpp"
#include "support/schedule_world.hpp"

namespace {

using namespace llmmem;

schedule_trace small_trace() {
  llmmem_tests::random_numbers random(7);
  return llmmem_tests::random_trace(
      random,
      {.chunks = 4, .accesses = 10, .most_units = 2, .writes = true, .discards = true, .overlaps = true});
}

void live(std::string_view text, const schedule_trace& trace) {
  try {
    const schedule_plan plan = read_plan(text);
    if (write_plan(plan) != text) std::abort();
    const llmmem::schedule::simulation run = simulate(trace, plan, 3, timeline_detail::full);
    for (std::size_t tier = 0; tier < plan.machine.budgets.size(); ++tier) {
      if (run.most_bytes[tier] > plan.machine.budgets[tier]) std::abort();
    }
  } catch (const error&) {
    // Refused with its reason: what bad input is for.
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto trace = small_trace();
  live({reinterpret_cast<const char*>(data), size}, trace);
  const schedule_machine machine{.budgets = {trace.max_leased_bytes() + 1'000, 6'000},
                                 .links = {{.bytes_per_second = 1'000'000'000, .duplex = link_duplex::half}},
                                 .edges = {0, 0}};
  std::string text = write_plan(schedule::lookahead{2}(trace, machine));
  text.resize(text.rfind("crc32c"));
  for (std::size_t i = 0; i + 3 <= size; i += 3) {
    const std::size_t at = (std::size_t{data[i]} << 8 | data[i + 1]) % text.size();
    text[at] = static_cast<char>(data[i + 2]);
  }
  const std::uint32_t crc = detail::text_crc(text);
  text += "crc32c ";
  for (int i = 8; i-- > 0;)
    text += "0123456789abcdef"[crc >> (4 * i) & 15U];
  live(text + "\n", trace);
  return 0;
}
