/// Any bytes: either a trace that keeps its own promises, or one of the documented errors.
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
      const trace from = read_trace(source, {.on_bad_line = on_bad_line, .max_line_bytes = 4096});
      if (from.size() == 0) std::abort();
      for (std::size_t i = 0; i < from.size(); ++i) {
        const request one = from[i];
        const std::uint64_t blocks = (one.input_tokens + from.block_tokens() - 1) / from.block_tokens();
        if (one.input_tokens > max_request_tokens || one.output_tokens > max_request_tokens) std::abort();
        if (from.format() != trace_format::azure && one.block_ids.size() != blocks) std::abort();
      }
    } catch (const trace_error&) {
      // Refused with its reason: what bad input is for.
    }
  }
  return 0;
}
