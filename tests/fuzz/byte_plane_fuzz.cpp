/// Any bytes as an encoded chunk of every codec that has a form of its own: refused, or decoded to a chunk
/// that comes back when it is encoded.
#include <llmmem/codec/byte_plane.hpp>
#ifdef LLMMEM_TESTS_ZSTD
#include <llmmem/codec/zstd_plane.hpp>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

namespace {

using bytes_of = std::vector<std::byte>;

/// The header is the codec's own where `honest` says so, so that what lies behind it is reached.
template <class Codec>
void decode(std::span<const std::uint8_t> data, std::size_t chunk, bool honest) {
  chunk -= chunk % Codec::element_bytes;
  Codec codec(std::size_t{1} << 16);
  bytes_of form;
  if (honest) {
    bytes_of nothing(Codec::worst_case_bytes(0));
    nothing.resize(codec.encode({}, nothing).value());
    const std::uint64_t size = chunk;
    std::memcpy(nothing.data() + 16, &size, sizeof(size));
    form = nothing;
  }
  const auto rest = std::as_bytes(data);
  form.insert(form.end(), rest.begin(), rest.end());
  form.shrink_to_fit();
  bytes_of out(chunk);
  if (!codec.decode(form, out)) return;

  bytes_of again(Codec::worst_case_bytes(chunk));
  const auto length = codec.encode(out, again);
  if (!length) std::abort();
  bytes_of back(chunk);
  if (!codec.decode(std::span(again).first(*length), back)) std::abort();
  if (back != out) std::abort();
}

/// The same of a compressor alone.
template <class Plane>
void decompress(std::span<const std::uint8_t> data, std::size_t size) {
  Plane plane(std::size_t{1} << 16);
  const bytes_of form(std::as_bytes(data).begin(), std::as_bytes(data).end());
  bytes_of out(size + 1);
  if (!plane.decompress(form, out)) return;
  bytes_of again(2 * out.size() + 400);
  const auto length = plane.compress(out, again);
  if (!length) return;
  bytes_of back(out.size());
  if (!plane.decompress(std::span(again).first(*length), back) || back != out) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using enum llmmem::dtype;
  if (size < 3) return 0;
  const std::size_t chunk = (data[1] + 256U * data[2]) % 5000;
  const bool honest = (data[0] & 0x80U) == 0;
  const std::span rest(data + 3, size - 3);
  switch (data[0] & 0x7FU) {
    case 0:
      decode<llmmem::byte_plane<bf16>>(rest, chunk, honest);
      break;
    case 1:
      decode<llmmem::byte_plane<f32>>(rest, chunk, honest);
      break;
    case 2:
      decompress<llmmem::huffman_plane>(rest, chunk);
      break;
#ifdef LLMMEM_TESTS_ZSTD
    case 3:
      decode<llmmem::byte_plane<bf16, llmmem::zstd_plane>>(rest, chunk, honest);
      break;
    case 4:
      decompress<llmmem::zstd_plane>(rest, chunk);
      break;
#endif
    default:
      break;
  }
  return 0;
}
