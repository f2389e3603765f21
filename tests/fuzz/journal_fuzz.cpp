/// Any bytes as a journal, any records under checksums that fit, a world's journal with bytes changed:
/// refused with a reason, or replayed into a sound cache.
#include <llmmem/paging/journal_replay.hpp>
#include <llmmem/paging/journal_what_if.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include "support/journal_hybrid_world.hpp"
#include "support/journal_world.hpp"

namespace {

using namespace llmmem;
using fuzzed_cache = paged_allocator<what_if_traits>;

/// A cache as the header says, if that is a small one.
fuzzed_cache small_cache(const journal_header& header) {
  const paged_options& options = header.options;
  if (options.blocks > 256 || options.block_capacity > 256 || options.block_tokens > 64 ||
      options.max_sequences > 64 || options.max_sequence_tokens > 100'000) {
    throw length_error("too large to be tried");
  }
  return fuzzed_cache(options);
}

/// The same over groups of layers.
llmmem_tests::traced_hybrid small_hybrid(const paging::hybrid_journal_header& header) {
  const hybrid_options& options = header.options;
  std::uint64_t largest = 1;
  for (const layer_group& each : options.groups) {
    if (each.block_tokens > 64 || each.block_bytes > 4096) throw length_error("too large to be tried");
    largest = each.block_bytes > largest ? each.block_bytes : largest;
  }
  if (options.budget_bytes > 256 * largest || options.page_bytes > 64 * largest ||
      options.max_sequences > 64 || options.max_sequence_tokens > 10'000 || options.max_chunks > 10'000) {
    throw length_error("too large to be tried");
  }
  return llmmem_tests::traced_hybrid(options, llmmem_tests::named_evictions{"lru"});
}

void live_hybrid(std::span<const std::byte> journal) {
  try {
    auto done = llmmem::paging::replay(journal, small_hybrid);
    if (!done.cache().audit().empty()) std::abort();
    if (done.end().offset > journal.size()) std::abort();
    if (done.end().reason.empty() && !done.divergence() && done.end().offset != journal.size()) std::abort();
    done.release_all();
    if (!done.divergence() && done.cache().stats().pages.active_bytes != 0) std::abort();
    if (!done.cache().audit().empty()) std::abort();
    static_cast<void>(paging::hybrid_what_if(journal, std::array{std::string_view("lru")}));
  } catch (const error&) {
    // Refused with its reason.
  }
}

void live(std::span<const std::byte> journal) {
  if (journal.size() > 9 && journal[9] == std::byte{hybrid_journal_version}) return live_hybrid(journal);
  try {
    auto done = llmmem::paging::replay(journal, small_cache);
    if (!done.cache().audit().empty()) std::abort();
    if (done.end().offset > journal.size()) std::abort();
    if (done.end().reason.empty() && !done.divergence() && done.end().offset != journal.size()) std::abort();
    done.release_all();
    if (!done.divergence() && done.cache().stats().active_blocks != 0) std::abort();
    if (!done.cache().audit().empty()) std::abort();
    static_cast<void>(what_if(journal, std::array{std::string_view("lru"), std::string_view("min")}));
  } catch (const error&) {
    // Refused with its reason: what bad input is for.
  }
}

/// A length and as many bytes each.
std::vector<std::vector<std::byte>> payloads(std::span<const std::byte> from) {
  std::vector<std::vector<std::byte>> out{llmmem_tests::header_payload(
      {.blocks = 12, .block_capacity = 16, .block_tokens = 2, .max_sequences = 4})};
  while (!from.empty()) {
    const auto length = std::min(static_cast<std::size_t>(from[0]), from.size() - 1);
    out.emplace_back(from.begin() + 1, from.begin() + 1 + static_cast<std::ptrdiff_t>(length));
    from = from.subspan(1 + length);
  }
  return out;
}

/// The journal of a world that the first byte seeds, with the bytes that the others say changed.
template <class World>
std::vector<std::vector<std::byte>> edited_payloads(std::span<const std::byte> from) {
  const auto at = [&](std::size_t i) { return i < from.size() ? std::to_integer<std::size_t>(from[i]) : 0; };
  World world(at(0));
  for (int i = 0; i < 20; ++i)
    world.step();
  std::vector<std::vector<std::byte>> out = llmmem_tests::payloads_of(world.bytes());
  for (std::size_t i = 1; i + 2 < from.size(); i += 3) {
    std::vector<std::byte>& changed = out[at(i) % out.size()];
    if (!changed.empty()) changed[at(i + 1) % changed.size()] = from[i + 2];
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  if (bytes.empty()) return 0;
  if (bytes[0] == std::byte{'l'}) {
    live(bytes);
  } else if (bytes[0] == std::byte{'w'}) {
    live(
        llmmem_tests::framed(edited_payloads<llmmem_tests::journal_world<what_if_traits>>(bytes.subspan(1))));
  } else if (bytes[0] == std::byte{'g'}) {
    live(llmmem_tests::framed(edited_payloads<llmmem_tests::journal_hybrid_world>(bytes.subspan(1))));
  } else {
    live(llmmem_tests::framed(payloads(bytes.subspan(1))));
  }
  return 0;
}
