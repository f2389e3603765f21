/// @file
/// What kernels executed, as lines of text with tabs between their fields.
#pragma once

#include <cstdio>
#include <string>

#include "ptx_machine/warp.hpp"

namespace ptx_machine {

/// Writes a line for each statement of `of`: architecture, kernel, launches, line of the PTX, opcode, how
/// often a warp executed it; where the machine profiles, how often it accessed global memory, the lanes of
/// these accesses, the bytes that the lanes asked for, and the sectors of 32 bytes that they touched; the
/// source line. Statements that never ran are among them: that is coverage.
inline void write_profile(std::FILE* to, const code& of) {
  for (const inst& each : of.insts) {
    if (each.from == nullptr) continue;  // the end of the body
    std::fprintf(to, "%d\t%s\t%llu\t%d\t%s\t%llu\t%llu\t%llu\t%llu\t%llu\t%s\n", of.of->arch,
                 of.of->name.c_str(), static_cast<unsigned long long>(of.launches), each.from->line,
                 std::string(each.from->opcode).c_str(), static_cast<unsigned long long>(each.runs),
                 static_cast<unsigned long long>(each.accesses), static_cast<unsigned long long>(each.lanes),
                 static_cast<unsigned long long>(each.bytes), static_cast<unsigned long long>(each.sectors),
                 of.of->source_of(*each.from).c_str());
  }
}

}  // namespace ptx_machine
