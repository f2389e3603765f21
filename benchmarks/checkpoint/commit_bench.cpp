/// @file
/// The cost of a commit after the files are synced, and of its manifest.
///
///   commit/llmmem/<tensors>   checkpoint_folder::commit, its file there and synced before; the goal is less
///   than
///                             2 ms for 8 tensors
///   commit/floor/<tensors>    the same calls on bytes that are ready: a new file of that size, written past
///   the
///                             page cache, synced; the folder synced; renamed; the folder above synced
///   manifest/to_json, read, check_and_merge/<tensors>   in memory; an item is a tensor, so that what is
///                             quadratic shows; merge: rank 0's with rank 1's halves of the same tensors

#include <llmmem/checkpoint/detail/manifest_check.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/disk.hpp"

namespace {

using namespace llmmem_benchmarks;

constexpr std::uint64_t chunk_bytes = 4096;

/// Of one rank: one file, ten chunks a tensor (64 of 8 tensors), whole tensors or a rank's half of each.
[[nodiscard]] llmmem::checkpoint_manifest manifest_of(std::uint64_t tensors, std::uint32_t rank,
                                                      std::uint32_t world) {
  const std::uint64_t bytes = tensors == 8 ? 64 * chunk_bytes : tensors * 10 * chunk_bytes;
  llmmem::checkpoint_manifest made{
      .generation = 1, .step = 1, .world = world, .chunk_bytes = chunk_bytes, .files = {}, .tensors = {}};
  made.files.push_back({"model-" + std::to_string(rank) + ".safetensors", bytes, rank, 0, {}});
  for (std::uint64_t i = 0; i < bytes / chunk_bytes; ++i)
    made.files[0].chunks.push_back(static_cast<std::uint32_t>(i * 2654435761U));
  made.files[0].crc32c = llmmem::detail::combined_crc32c(made.files[0], chunk_bytes);
  for (std::uint64_t i = 0; i < tensors; ++i) {
    const std::string name =
        "model.layers." + std::to_string(i / 10) + ".part." + std::to_string(i % 10) + ".weight";
    const std::uint64_t elements = 64;
    const auto half = llmmem::element_runs::flat_range(rank * elements / world, elements / world);
    made.tensors.push_back(
        {name, llmmem::safetensors_type::f32, {elements}, {{.file = 0, .entry = name, .runs = half}}});
  }
  return made;
}

class commit_fixture {
 public:
  explicit commit_fixture(std::uint64_t tensors)
      : manifest_(manifest_of(tensors, 0, 1)), storage_(folder_.path + "/saves"), commits_(storage_) {}

  [[nodiscard]] turn commit() {
    const llmmem::checkpoint_draft draft = commits_.begin(++step_);
    make_file(storage_.path(draft.path(manifest_.files[0].name)));
    manifest_.step = draft.id.step;
    manifest_.generation = draft.id.generation;
    folder_.settle();
    turn taken;
    taken.seconds = seconds_of([&] { commits_.commit(draft, manifest_); });
    std::filesystem::remove_all(storage_.path(llmmem::folder_name(draft.id)));
    return taken;
  }

  [[nodiscard]] turn same_calls() {
    const std::string text = llmmem::to_json(manifest_);
    const std::uint64_t whole = (text.size() + 4095) / 4096 * 4096;
    const host_memory bytes(whole, ' ');
    const std::string draft = folder_.path + "/saves/raw-draft";
    const std::string name = folder_.path + "/saves/raw";
    std::filesystem::create_directory(draft);
    make_file(draft + "/model");
    folder_.settle();
    turn taken;
    taken.told["manifest_KiB"] = static_cast<double>(text.size()) / 1024;
    taken.seconds = seconds_of([&] {
      {
        const descriptor file(draft + "/MANIFEST", O_WRONLY | O_CREAT | O_EXCL | O_DIRECT);
        if (::fallocate(file.number(), 0, 0, static_cast<off_t>(whole)) != 0)
          throw system_trouble("fallocate");
        if (::pwrite(file.number(), bytes.data(), whole, 0) <= 0) throw system_trouble("pwrite");
        file.sync();
      }
      sync_folder(draft);
      std::filesystem::rename(draft, name);
      sync_folder(folder_.path + "/saves");
    });
    std::filesystem::remove_all(name);
    return taken;
  }

 private:
  void make_file(const std::string& path) const {
    const descriptor file(path, O_WRONLY | O_CREAT | O_EXCL);
    if (::ftruncate(file.number(), static_cast<off_t>(manifest_.files[0].bytes)) != 0)
      throw system_trouble(path);
    if (::fsync(file.number()) != 0) throw system_trouble(path);
  }
  static void sync_folder(const std::string& path) {
    const descriptor folder(path, O_RDONLY | O_DIRECTORY);
    if (::fsync(folder.number()) != 0) throw system_trouble(path);
  }

  bench_folder folder_{};
  llmmem::checkpoint_manifest manifest_;
  llmmem::posix_storage<> storage_;
  llmmem::checkpoint_folder<llmmem::posix_storage<>> commits_;
  std::uint64_t step_ = 0;
};

const int added = [] {
  for (const std::uint64_t tensors : {std::uint64_t{8}, std::uint64_t{1000}}) {
    const auto make = [tensors] {
      const auto fixture = std::make_shared<commit_fixture>(tensors);
      // Commits are short, so a turn is the median of several consecutive ones.
      const auto several = [](auto once) -> take_turn {
        return [once] {
          std::vector<double> seconds;
          turn taken;
          for (int i = 0; i < 5; ++i) {
            taken = once();
            seconds.push_back(taken.seconds);
          }
          taken.seconds = median_of(seconds);
          return taken;
        };
      };
      return std::vector<take_turn>{several([=] { return fixture->commit(); }),
                                    several([=] { return fixture->same_calls(); })};
    };
    add_experiment("commit", "/" + std::to_string(tensors), {"llmmem", "floor"}, make,
                   [](benchmark::State& state, const outcome& all, const std::string& who) {
                     count_share(state, all, who, "floor");
                   });
  }
  return 0;
}();

void write_json(benchmark::State& state) {
  const auto manifest = manifest_of(static_cast<std::uint64_t>(state.range(0)), 0, 1);
  for (auto _ : state)
    benchmark::DoNotOptimize(llmmem::to_json(manifest).size());
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void read_json(benchmark::State& state) {
  const std::string text = llmmem::to_json(manifest_of(static_cast<std::uint64_t>(state.range(0)), 0, 1));
  for (auto _ : state)
    benchmark::DoNotOptimize(llmmem::read_manifest(text, "benchmark").tensors.size());
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void merge(benchmark::State& state) {
  const auto first = manifest_of(static_cast<std::uint64_t>(state.range(0)), 0, 2);
  const auto second = manifest_of(static_cast<std::uint64_t>(state.range(0)), 1, 2);
  for (auto _ : state) {
    llmmem::checkpoint_manifest into = first;
    llmmem::merge_manifest(into, second, "benchmark");
    benchmark::DoNotOptimize(into.tensors.size());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

/// As a coordinator does for all its ranks, one part after another; an item is a tensor of a part.
void merge_world(benchmark::State& state) {
  constexpr std::uint64_t tensors = 1000;
  const auto world = static_cast<std::uint32_t>(state.range(0));
  std::vector<llmmem::checkpoint_manifest> parts;
  for (std::uint32_t rank = 0; rank < world; ++rank)
    parts.push_back(manifest_of(tensors, rank, world));
  for (auto _ : state) {
    llmmem::manifest_merger all;
    for (const llmmem::checkpoint_manifest& part : parts)
      all.add(part, "benchmark");
    benchmark::DoNotOptimize(std::move(all).finish("benchmark").tensors.size());
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(tensors) * world);
}

void sizes(benchmark::internal::Benchmark* rows) {
  rows->Arg(8)->Arg(1000)->Arg(3000)->Arg(10'000)->Unit(benchmark::kMillisecond)->MinTime(0.1);
}

BENCHMARK(write_json)->Name("manifest/to_json")->Apply(sizes);
BENCHMARK(read_json)->Name("manifest/read")->Apply(sizes);
BENCHMARK(merge)->Name("manifest/merge_two_ranks")->Apply(sizes);
BENCHMARK(merge_world)
    ->Name("manifest/merge_ranks")
    ->Arg(2)
    ->Arg(8)
    ->Arg(32)
    ->Unit(benchmark::kMillisecond)
    ->MinTime(0.1);

}  // namespace
