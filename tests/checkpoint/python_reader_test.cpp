// A checkpoint is read without the library, from what is published of its files' format.
#include <llmmem/async_checkpointer.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/small_checkpoint.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// As zlib has it: bit by bit, polynomial 0xEDB88320.
std::uint32_t crc32_of(std::span<const std::byte> bytes) {
  std::uint32_t sum = ~std::uint32_t{0};
  for (const std::byte each : bytes) {
    sum ^= static_cast<std::uint32_t>(each);
    for (int i = 0; i < 8; ++i)
      sum = (sum >> 1) ^ ((sum & 1U) != 0 ? 0xEDB8'8320U : 0U);
  }
  return ~sum;
}

std::string line_of(const state_tensor& tensor, const std::vector<std::byte>& value) {
  std::string line = tensor.name + " " + std::string(name_of(tensor.type)) + " ";
  for (std::size_t i = 0; i < tensor.shape.size(); ++i)
    line += (i == 0 ? "" : ",") + std::to_string(tensor.shape[i]);
  char sum[9];
  std::snprintf(sum, sizeof sum, "%08x", crc32_of(value));
  return line + " " + std::to_string(value.size()) + " " + sum + "\n";
}

/// What a command wrote, errors too, and its exit status.
std::pair<std::string, int> run(const std::string& command) {
  std::FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::string text;
  std::array<char, 4096> part{};
  for (std::size_t got = 0; (got = std::fread(part.data(), 1, part.size(), pipe)) != 0;)
    text.append(part.data(), got);
  return {text, ::pclose(pipe)};
}

}  // namespace

TEST_CASE("Python reads saved checkpoints by the published format alone") {
  CHECK(crc32_of(std::as_bytes(std::span("123456789", 9))) == 0xCBF4'3926U);  // the usual check
  if (run("python3 -c 'pass'").second != 0) {
    MESSAGE("not tested: there is no python3");
    return;
  }
  const std::vector<state_tensor> tensors{
      {.name = "embed.weight", .type = safetensors_type::f32, .shape = {64, 33}},
      {.name = "head.weight", .type = safetensors_type::bf16, .shape = {17, 3, 5}},
      {.name = "tokens", .type = safetensors_type::u8, .shape = {9000}},
      {.name = "step", .type = safetensors_type::i64, .shape = {}},
      {.name = "none", .type = safetensors_type::f32, .shape = {0, 4}},
      {.name = "layers.0.bias", .type = safetensors_type::f32, .shape = {1000}},
      {.name = "positions", .type = safetensors_type::i64, .shape = {2, 100}},
  };
  random_numbers random(5);
  const tensor_values values = random_values(random, tensors);
  std::vector<std::span<const std::byte>> spans(values.begin(), values.end());
  temporary_folder folder;
  {
    posix_storage<> storage(folder.file("run"));
    solo_coordinator coordinator(storage);
    async_checkpointer<> checkpointer(
        coordinator, tensors, {.ring_bytes = 64 << 10, .chunk_bytes = 4096, .max_shard_bytes = 10'000});
    const snapshot_guard guard = checkpointer.begin_snapshot(1200, host_state_view(spans), {{"seed", {}}});
    REQUIRE(guard.ticket().wait() == commit_status::committed);
  }
  std::map<std::string, std::string> lines;  // in the order of names
  for (std::size_t i = 0; i < tensors.size(); ++i)
    lines[tensors[i].name] = line_of(tensors[i], values[i]);
  std::string expected;
  for (const auto& [name, line] : lines)
    expected += line;

  const std::string script = "python3 '" LLMMEM_SOURCE_DIR "/tests/checkpoint/read_safetensors.py' ";
  const std::string saved = folder.file("run/step-0000001200-g00000001");
  const auto [text, status] = run(script + "'" + saved + "'");
  CHECK(status == 0);
  const std::size_t note = text.find("# ");
  REQUIRE(note != std::string::npos);
  CHECK(text.substr(0, note) == expected);
  MESSAGE(text.substr(note, text.size() - note - 1));
  CHECK(run(script + "'" + folder.file("run") + "'").second != 0);  // it can fail
}
