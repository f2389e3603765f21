/// Any bytes, packed ones too: either a trace that keeps its own promises, or one of the documented errors.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "replay_trace/read_trace.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace replay_trace;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const bad_lines on_bad_line : {bad_lines::refuse, bad_lines::skip}) {
    memory_source source(text, "fuzz");
    try {
      const trace from = read_trace(
          source,
          {.on_bad_line = on_bad_line, .max_line_bytes = 4096, .max_unpacked_bytes = std::uint64_t{1} << 18});
      if (from.size() == 0) std::abort();
      const bool has_ids = from.format() == trace_format::mooncake || from.format() == trace_format::bailian;
      // All requests count their ids alike: a block that is not full has one, or has none.
      bool all_blocks = true;
      bool full_blocks = true;
      for (std::size_t i = 0; i < from.size(); ++i) {
        const request one = from[i];
        if (one.input_tokens > max_request_tokens || one.output_tokens > max_request_tokens) std::abort();
        if (one.hashed_tokens > one.input_tokens) std::abort();
        const std::uint64_t full = one.input_tokens / from.block_tokens();
        const std::uint64_t all = full + (one.input_tokens % from.block_tokens() != 0 ? 1 : 0);
        all_blocks = all_blocks && one.block_ids.size() == all;
        full_blocks = full_blocks && one.block_ids.size() == full;
        if (!has_ids && !one.block_ids.empty()) std::abort();
      }
      if (has_ids && !all_blocks && !full_blocks) std::abort();
    } catch (const trace_error&) {
      // Refused with its reason: what bad input is for.
    }
  }
  return 0;
}
