// Any bytes as the beginning of a safetensors file: refused with format_error, or taken, and then all that is
// said of the file fits it. The first four bytes tell how much longer the file is than what is given of it.
#include <llmmem/model/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

namespace {

void must(bool holds) {
  if (!holds) std::abort();
}

/// What was read, laid out again, is read as the same tensors.
void check_again(const llmmem::safetensors_header& header) {
  std::vector<llmmem::safetensors_tensor> tensors;
  for (const llmmem::safetensors_entry& each : header.entries) {
    if (each.name == "__metadata__") return;
    tensors.push_back({each.name, each.type, each.shape});
  }
  const llmmem::safetensors_layout again = llmmem::lay_out_safetensors(tensors, header.metadata, 8);
  must(again.header.data_bytes == header.data_bytes);
  const auto bytes = std::as_bytes(std::span(again.head));
  must(llmmem::read_safetensors(bytes, again.file_bytes(), "again") == again.header);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  const std::uint64_t more = data[0] | std::uint64_t{data[1]} << 8 | std::uint64_t{data[2]} << 16;
  const auto begin = std::as_bytes(std::span(data, size)).subspan(4);
  // A header as long as what is left, too: else most inputs end at their length.
  std::vector<std::byte> file(begin.begin(), begin.end());
  if (data[3] % 2 == 0 && file.size() >= 8) {
    for (std::size_t i = 0; i < 8; ++i)
      file[i] = static_cast<std::byte>(((file.size() - 8) >> (8 * i)) & 0xFF);
  }
  try {
    const llmmem::safetensors_header header = llmmem::read_safetensors(file, file.size() + more, "fuzz");
    std::uint64_t at = 0;
    for (const llmmem::safetensors_entry& each : header.entries) {
      must(each.begin == at && each.end >= each.begin);
      at = each.end;
    }
    must(at == header.data_bytes && header.file_bytes() == file.size() + more);
    check_again(header);
  } catch (const llmmem::format_error&) {
  }
  return 0;
}
