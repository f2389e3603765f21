// read_ptx FILE...: whether the machine knows every instruction of every kernel in these files of PTX. The
// machine reports an instruction that it does not know when a test executes it; this finds those that no test
// executes.
//
// Exit status 0: it knows all of them. 1: each that it does not know is named, with its line and kernel.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "ptx_machine/bind.hpp"

namespace {

using namespace ptx_machine;

/// Prints the instructions of `of` that have no handler; returns how many.
std::size_t unknown_instructions(const char* path, kernel& of, const std::vector<u64>& variables) {
  std::size_t unknown = 0;
  const code made = binder(of, variables).take();
  for (const inst& each : made.insts) {
    if (each.run != unsupported) continue;
    ++unknown;
    std::printf("%s:%d: the machine does not know '%s', of kernel %s\n", path, each.from->line,
                std::string(each.from->text).c_str(), of.name.c_str());
  }
  return unknown;
}

}  // namespace

int main(int count, char** paths) {
  std::size_t unknown = 0, kernels = 0;
  for (int n = 1; n < count; ++n) {
    try {
      std::ifstream file(paths[n]);
      module all(std::string(std::istreambuf_iterator<char>(file), {}));
      const std::vector<u64> variables(all.variables().size());
      const std::vector<std::string> names = all.kernel_names();
      if (names.empty()) throw std::runtime_error("no kernel in it");
      for (const std::string& name : names)
        unknown += unknown_instructions(paths[n], *all.find(name), variables);
      kernels += names.size();
    } catch (const std::exception& wrong) {
      std::printf("%s: %s\n", paths[n], wrong.what());
      ++unknown;
    }
  }
  std::printf("%zu kernels, %zu unknown instructions\n", kernels, unknown);
  return unknown == 0 && kernels != 0 ? 0 : 1;
}
