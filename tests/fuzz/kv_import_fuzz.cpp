/// Any bytes as a stream of keys and values: refused or taken, never more than was asked for, and after a
/// refusal nothing is left.
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/kv_transfer.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

namespace {

constexpr llmmem::kv_layout shape{.layers = 1, .heads = 1, .head_dim = 2, .block_tokens = 2};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  llmmem::paged_allocator<> cache(
      {.blocks = 8, .block_tokens = 2, .max_sequences = 2, .max_sequence_tokens = 12});
  std::vector<std::byte> bytes(shape.total_bytes(cache.max_physical_blocks()));
  // Magic, version and fingerprint are right; all behind them is the input's. The digests then hold for what
  // the input says only if its first byte asks for that, so that what lies behind them is reached.
  std::vector<std::byte> stream(sizeof(llmmem::detail::kv_stream_header));
  llmmem::detail::kv_stream_header header{
      .block_tokens = 2, .contents = shape.content_fingerprint(), .block_bytes = shape.block_bytes()};
  const bool sign = size > 0 && (data[0] & 1U) != 0;
  std::size_t used = size > 0 ? 1 : 0;
  if (size > used) header.tokens = data[used++] % 16U;
  if (size > used) header.first_block = data[used++] % 8U;
  std::memcpy(stream.data(), &header, sizeof(header));
  const auto* const rest = reinterpret_cast<const std::byte*>(data + used);
  stream.insert(stream.end(), rest, rest + (size - used));
  const std::size_t ids_end = sizeof(header) + header.tokens * sizeof(llmmem::token_id);
  if (sign && stream.size() >= ids_end) {
    const auto ids = std::span(stream).subspan(sizeof(header), ids_end - sizeof(header));
    const llmmem::block_key of_ids = llmmem::detail::digest_of(ids, llmmem::detail::header_digest);
    const llmmem::block_key digest = llmmem::detail::digest_of(std::span(stream).first(sizeof(header)),
                                                               {.low = of_ids.low, .high = of_ids.high});
    const auto signature = std::as_bytes(std::span(&digest, 1));
    stream.insert(stream.begin() + static_cast<std::ptrdiff_t>(ids_end), signature.begin(), signature.end());
  }
  std::size_t at = 0;
  const auto source = [&](std::span<std::byte> part) noexcept {
    if (part.size() > stream.size() - at) return false;
    if (!part.empty()) std::memcpy(part.data(), stream.data() + at, part.size());
    at += part.size();
    return true;
  };
  const auto received =
      llmmem::import_sequence(cache, {bytes.data(), cache.max_physical_blocks(), shape}, source);
  if (!received && cache.stats().free_blocks != 8) std::abort();
  if (!cache.audit().empty()) std::abort();
  return 0;
}
