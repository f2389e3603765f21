// Any bytes as a checkpoint's manifest, as they are and with the right checksum behind them, which anybody
// can make: refused with format_error, or taken, and then all that is said fits together and is written as it
// was read.
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <span>
#include <string>
#include <string_view>

namespace {

void must(bool holds) {
  if (!holds) std::abort();
}

std::string sealed(std::string_view body) {
  char sum[9];
  std::snprintf(sum, sizeof sum, "%08x",
                llmmem::crc32c(0, std::as_bytes(std::span(body.data(), body.size()))));
  return std::string(body) + "\"crc32c\":\"" + sum + "\"}\n";
}

/// Each piece is of a file that is there, no longer than that, and of elements that its tensor has.
void check_pieces(const llmmem::checkpoint_manifest& manifest) {
  for (const llmmem::checkpoint_tensor& tensor : manifest.tensors) {
    const std::uint64_t elements = llmmem::elements_of(tensor);
    must(tensor.pieces.size() <= llmmem::max_checkpoint_pieces);
    for (const llmmem::checkpoint_piece& piece : tensor.pieces) {
      must(piece.file < manifest.files.size());
      must(piece.runs.is_valid(elements));
      must(llmmem::bytes_of(tensor.type, piece.runs.elements(), "piece") <= manifest.files[piece.file].bytes);
    }
  }
}

void check_files(const llmmem::checkpoint_manifest& manifest) {
  std::set<std::string> names;
  for (const llmmem::checkpoint_file& file : manifest.files) {
    must(names.insert(file.name).second && !file.name.empty() && file.name[0] != '.');
    must(file.name.find('/') == std::string::npos && file.name.find('\0') == std::string::npos);
    must(file.rank < manifest.world);
    const std::uint64_t chunks = file.chunks.size();
    must(file.bytes == 0 ? chunks == 0 : chunks == (file.bytes - 1) / manifest.chunk_bytes + 1);
  }
}

bool is_taken(const std::string& text) {
  try {
    const llmmem::checkpoint_manifest manifest = llmmem::read_manifest(text, "fuzz");
    check_files(manifest);
    check_pieces(manifest);
    const std::string again = llmmem::to_json(manifest);
    must(llmmem::read_manifest(again, "again") == manifest);
    must(llmmem::to_json(llmmem::read_manifest(again, "again")) == again);
    return true;
  } catch (const llmmem::format_error&) {
    return false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  static_cast<void>(is_taken(text));
  static_cast<void>(is_taken(sealed(text)));
  // What was a manifest, before it was changed: with the sum that it should have now.
  constexpr std::size_t tail = 22;
  if (size >= tail) static_cast<void>(is_taken(sealed(std::string_view(text).substr(0, size - tail))));
  return 0;
}
