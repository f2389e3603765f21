/// The life of a paged sequence: allocate, share a cached prefix, fork, copy on write, free.
///
/// The "KV" is the text itself, one byte per token, so that every copy and every shared block is readable.
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/space/host.hpp>

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "common/standard_descriptors.hpp"

namespace {

std::vector<llmmem::token_id> tokens_of(std::string_view text) {
  return {text.begin(), text.end()};
}

/// A cache of four-token blocks, and their bytes.
struct engine {
  llmmem::paged_allocator<> cache{{.blocks = 64, .block_tokens = 4}};
  llmmem::host_space host{{.budget = 1 << 20}};
  llmmem::block_storage<llmmem::host_space> storage{host, cache.physical_blocks(), 4};

  std::byte& kv(llmmem::sequence_id sequence, std::uint64_t position) const {
    return storage[cache.blocks(sequence)[position / 4]].data[position % 4];
  }

  /// An engine's work for new tokens: it makes space, copies a shared last block, writes their KV, and
  /// commits it.
  void append(llmmem::sequence_id sequence, std::string_view text) {
    const llmmem::append_result grown = cache.append(sequence, tokens_of(text)).value();
    storage.copy_async(host, grown.copy).value().wait();
    for (std::uint64_t i = 0; i < text.size(); ++i)
      kv(sequence, grown.first + i) = std::byte(text[i]);
    cache.commit(sequence).value();
  }

  /// Makes a sequence for a prompt: shares cached blocks, and computes the rest.
  llmmem::sequence_id start(std::string_view prompt) {
    const llmmem::sequence_id sequence = cache.create().value();
    const std::uint64_t hit = cache.match(sequence, tokens_of(prompt)).value().tokens;
    std::printf("prompt of %2zu tokens: %llu from the cache, %llu computed\n", prompt.size(),
                static_cast<unsigned long long>(hit), static_cast<unsigned long long>(prompt.size() - hit));
    append(sequence, prompt.substr(hit));
    return sequence;
  }

  void show(const char* name, llmmem::sequence_id sequence) const {
    std::string text;
    for (std::uint64_t i = 0; i < cache.tokens(sequence); ++i)
      text += static_cast<char>(kv(sequence, i));
    std::printf("  %-6s blocks", name);
    for (const llmmem::block_id block : cache.blocks(sequence))
      std::printf(" %2u", llmmem::to_index(block));
    std::printf("   \"%s\"\n", text.c_str());
  }
};

}  // namespace

int main() {
  example::hold_standard_descriptors();
  engine engine;
  const llmmem::sequence_id first = engine.start("You are helpful. Say hi.");
  engine.append(first, " Hi");
  engine.show("first", first);

  const llmmem::sequence_id second = engine.start("You are helpful. Count!");  // shares its first four blocks
  engine.show("second", second);

  const llmmem::sequence_id twin = engine.cache.fork(second).value();  // shares everything
  engine.append(second, " 1 2 3");  // the first to write copies the last block
  engine.append(twin, " one");
  engine.show("second", second);
  engine.show("twin", twin);

  for (const llmmem::sequence_id each : {first, second, twin})
    engine.cache.release(each).value();
  const llmmem::paged_stats after = engine.cache.stats();
  std::printf("released: %llu blocks in use, %llu kept for the next prompt, %llu free\n",
              static_cast<unsigned long long>(after.active_blocks),
              static_cast<unsigned long long>(after.idle_blocks),
              static_cast<unsigned long long>(after.free_blocks));
  if (const auto again = engine.cache.release(first); !again) {
    std::printf("releasing twice is refused: %s\n", again.error().message().c_str());
  }
  return example::after_printing("paged_sequence", engine.cache.audit().empty() ? 0 : 1);
}
