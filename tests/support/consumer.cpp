// One of the consumers needs no more of the library than this program: it compiles in a tenth of the time.
#if defined(CONSUMER_OF_ONE_PRIMITIVE)
#include <llmmem/paged_allocator.hpp>
#else
#include <llmmem/llmmem.hpp>
#endif

#include <array>
#include <cstdio>

// What an engine does with the library, small: a cached prompt is shared, not computed again.
int main() {
  llmmem::paged_allocator<> cache({.blocks = 64, .block_tokens = 4});
  const std::array<llmmem::token_id, 9> prompt{3, 1, 4, 1, 5, 9, 2, 6, 5};

  const llmmem::sequence_id first = cache.create().value();
  cache.append(first, prompt).value();
  cache.commit(first).value();

  const llmmem::sequence_id second = cache.create().value();
  if (cache.match(second, prompt).value().tokens != 8) return 1;
  cache.release(first).value();
  cache.release(second).value();

  const auto refused = cache.release(second);
  if (refused || !cache.audit().empty()) return 1;
  std::puts(refused.error().message().c_str());
}
