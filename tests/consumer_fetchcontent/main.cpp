#include <llmmem/llmmem.hpp>

#include <cstdio>

namespace {

llmmem::result<int> reserve(unsigned blocks) {
  if (blocks > 12) return llmmem::failure{llmmem::errc::out_of_blocks, 0, blocks, 12, "engine"};
  return static_cast<int>(blocks);
}

}  // namespace

int main() {
  if (!reserve(12)) return 1;
  const auto refused = reserve(30);
  if (refused) return 1;
  std::puts(refused.error().message().c_str());
}
