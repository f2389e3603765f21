// Replays a trace of LLM requests through a paged KV cache: see README.md next to this file.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "common/standard_streams.hpp"
#include "replay_trace/application.hpp"
#include "replay_trace/paged_replay.hpp"

namespace {

/// Returns whether the environment's locale is UTF-8: the first of these variables that is set and not empty
/// decides.
bool utf8_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view locale(value);
    return locale.find("UTF-8") != locale.npos || locale.find("utf8") != locale.npos;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  replay_trace::console console;
  if (isatty(STDERR_FILENO) == 1) console.progress = replay_trace::progress_style::terminal;
  if (!utf8_locale()) console.bars = replay_trace::bar_style::ascii;
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(replay_trace::run_application(arguments, replay_trace::replay, console));
}
