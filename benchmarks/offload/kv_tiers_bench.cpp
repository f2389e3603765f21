/// The cost of tiers below a paged cache: blocks moved between host memories, compared with memcpy; between
/// host and file, compared with plain reads of the same blocks; control per block; lookups.
#include <llmmem/offload/kv_tiers.hpp>

#include <benchmark/benchmark.h>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/transfer/file_space.hpp>
#if __has_include(<liburing.h>)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

struct traits : paged_traits {
  using observer = offload::tier_link;
};
using cache_type = paged_allocator<traits>;

constexpr std::uint64_t moved_bytes = std::uint64_t{64} << 20;

/// A block of that many bytes, for 16 tokens.
kv_layout layout_of(std::uint64_t bytes, std::uint32_t layers = 4) {
  return {.layers = layers,
          .heads = 1,
          .head_dim = static_cast<std::uint32_t>(bytes / layers / 16),
          .block_tokens = 16,
          .has_values = false,
          .element = dtype::int8,
          .order = block_order::block_first};
}

/// Bytes at the beginning of a page, as memory of a cache is. Copies into memory that begins 16 bytes after a
/// page take 1.6 times as long.
class page_memory {
 public:
  page_memory(std::size_t bytes, std::byte value) : bytes_(bytes + page) {
    const auto at = reinterpret_cast<std::uintptr_t>(bytes_.data());
    used_ = std::span(bytes_).subspan((page - at % page) % page, bytes);
    std::fill(used_.begin(), used_.end(), value);
  }
  [[nodiscard]] std::byte* data() const { return used_.data(); }
  [[nodiscard]] std::size_t size() const { return used_.size(); }
  [[nodiscard]] std::span<std::byte> span() const { return used_; }

 private:
  static constexpr std::size_t page = 4096;
  std::vector<std::byte> bytes_;
  std::span<std::byte> used_;
};

struct rig {
  explicit rig(std::uint64_t bytes, std::uint32_t layers = 4)
      : layout(layout_of(bytes, layers)),
        blocks(std::max<std::uint64_t>(moved_bytes / bytes, 16)),
        cache({.blocks = blocks, .block_tokens = 16, .max_sequences = 2, .max_sequence_tokens = blocks * 16}),
        kv(layout.total_bytes(cache.physical_blocks()), std::byte{1}),
        host({.budget = blocks * bytes + 4096}),
        prompt(blocks * 16) {
    std::iota(prompt.begin(), prompt.end(), 0);
  }
  [[nodiscard]] auto mover() {
    return offload::layout_mover(host_executor{},
                                 {.data = kv.data(), .blocks = cache.physical_blocks(), .layout = layout});
  }
  sequence_id write() {
    const sequence_id id = cache.create().value();
    cache.append(id, prompt).value();
    cache.commit(id).value();
    return id;
  }

  kv_layout layout;
  std::uint64_t blocks;
  cache_type cache;
  page_memory kv;
  host_space host;
  std::vector<token_id> prompt;
};

void report(benchmark::State& state, const rig& r) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(r.blocks * r.layout.block_bytes()));
  state.counters["blocks"] = static_cast<double>(r.blocks);
}

/// The limit: the same bytes by memcpy, block by block.
void host_memcpy(benchmark::State& state) {
  rig r(static_cast<std::uint64_t>(state.range(0)));
  const page_memory there(r.kv.size(), std::byte{2});
  const std::size_t bytes = r.layout.block_bytes();
  for (auto _ : state) {
    for (std::uint64_t b = 0; b < r.blocks; ++b)
      std::memcpy(there.data() + b * bytes, r.kv.data() + (b + 1) * bytes, bytes);
    benchmark::ClobberMemory();
  }
  report(state, r);
}

void host_load(benchmark::State& state) {
  rig r(static_cast<std::uint64_t>(state.range(0)));
  kv_tiers tiers(r.cache, r.mover(), {.load_headroom = 0},
                 offload::kv_tier(r.host, r.blocks * r.layout.block_bytes()));
  const sequence_id first = r.write();
  tiers.store(first).value();
  r.cache.release(first).value();
  r.cache.drop_idle();
  const kv_chain chain(r.cache, r.prompt);
  for (auto _ : state) {
    const sequence_id id = r.cache.create().value();
    auto load = tiers.prepare_load(id, chain).value();
    for (std::uint32_t l = 0; l < r.layout.layers; ++l)
      load.wait(l).value();
    if (!load.complete().is_complete()) state.SkipWithError("a load failed");
    state.PauseTiming();
    r.cache.release(id).value();
    r.cache.drop_idle();
    state.ResumeTiming();
  }
  report(state, r);
}

void host_store(benchmark::State& state) {
  rig r(static_cast<std::uint64_t>(state.range(0)));
  kv_tiers tiers(r.cache, r.mover(), {.load_headroom = 0},
                 offload::kv_tier(r.host, r.blocks * r.layout.block_bytes()));
  for (auto _ : state) {
    state.PauseTiming();
    tiers.clear();
    r.cache.drop_idle();
    const sequence_id id = r.write();
    state.ResumeTiming();
    if (tiers.store(id).value() != r.blocks) state.SkipWithError("a block was not stored");
    state.PauseTiming();
    r.cache.release(id).value();
    state.ResumeTiming();
  }
  report(state, r);
}

std::string file_of(const char* name) {
  return (std::filesystem::temp_directory_path() / name).string();
}

/// The limit: the same file's blocks by the queue alone, all requested before the first wait.
template <class Engine, class... Options>
void file_read(benchmark::State& state, Options... options) {
  rig r(static_cast<std::uint64_t>(state.range(0)));
  const std::size_t bytes = r.layout.block_bytes();
  const std::string path = file_of("llmmem_bench_read");
  {
    file_space<Engine> disk(path, {.budget = r.blocks * bytes, .queue = {.max_operations = 4096}},
                            options...);
    const auto range = disk.try_allocate(r.blocks * bytes, 4096).value();
    disk.copy_in_async(range, r.kv.span().first(r.blocks * bytes), {}).value().wait();
    // Whole pages, as the slots of a tier, so that the copies bypass the page cache.
    const auto memory = r.host.try_allocate(r.blocks * bytes, 4096).value();
    std::vector<transfer_fence> fences(r.blocks);
    for (auto _ : state) {
      for (std::uint64_t b = 0; b < r.blocks; ++b) {
        fences[b] = disk.copy_out_async(memory.span().subspan(b * bytes, bytes),
                                        range.subrange(b * bytes, bytes).value(), {})
                        .value();
      }
      for (const transfer_fence& each : fences)
        each.wait();
    }
    r.host.deallocate(memory);
    disk.deallocate(range);
  }
  std::filesystem::remove(path);
  report(state, r);
}

/// fio's rate for the same reads, past the page cache; 0 if it is not there or lacks the engine. Its start
/// does not count.
double rate_of_fio(const std::string& path, const char* engine, std::uint64_t block_bytes) {
  const std::string command = "fio --name=blocks --filename=" + path +
                              " --size=" + std::to_string(moved_bytes) +
                              " --bs=" + std::to_string(block_bytes) +
                              " --rw=read --loops=8 --direct=1 --iodepth=64 --ioengine=" + engine +
                              " --output-format=terse --terse-version=3 2>/dev/null";
  std::FILE* const out = ::popen(command.c_str(), "r");
  if (out == nullptr) return 0;
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), out));
  ::pclose(out);
  std::size_t at = 0;
  for (int field = 0; field < 6 && at < text.size(); ++field)
    at = std::min(text.find(';', at), text.size() - 1) + 1;  // the seventh: KiB a second
  return at < text.size() ? std::strtod(text.c_str() + at, nullptr) * 1024 : 0;
}

/// The peer: fio reads as many blocks of that size from a file, 64 at once.
void file_fio(benchmark::State& state, const char* engine) {
  const std::string path = file_of("llmmem_bench_fio");
  const auto bytes = static_cast<std::uint64_t>(state.range(0));
  for (auto _ : state) {
    const double rate = rate_of_fio(path, engine, bytes);
    if (rate == 0) {
      state.SkipWithError("no fio, or none with this engine");
      break;
    }
    state.SetIterationTime(static_cast<double>(moved_bytes) / rate);
  }
  std::filesystem::remove(path);
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(moved_bytes));
}

/// Blocks come from the file through a first tier of one eighth as many slots, are checked and restored.
template <class Engine, class... Options>
void file_load(benchmark::State& state, Options... options) {
  rig r(static_cast<std::uint64_t>(state.range(0)));
  const std::size_t bytes = r.layout.block_bytes();
  const std::string path = file_of("llmmem_bench_load");
  {
    file_space<Engine> disk(path, {.budget = r.blocks * bytes, .queue = {.max_operations = 4096}},
                            options...);
    kv_tiers tiers(r.cache, r.mover(), {.load_headroom = 0},
                   offload::kv_tier(r.host, r.blocks * bytes / 8, write_through{}),
                   offload::kv_tier(disk, r.blocks * bytes));
    const sequence_id first = r.write();
    while (tiers.stats().tiers[1].held != r.blocks) {
      tiers.store(first).value();
      tiers.flush();
    }
    r.cache.release(first).value();
    r.cache.drop_idle();
    const kv_chain chain(r.cache, r.prompt);
    for (auto _ : state) {
      const sequence_id id = r.cache.create().value();
      auto load = tiers.prepare_load(id, chain).value();
      if (!load.complete().is_complete()) state.SkipWithError("a load failed");
      state.PauseTiming();
      r.cache.release(id).value();
      r.cache.drop_idle();
      state.ResumeTiming();
    }
  }
  std::filesystem::remove(path);
  report(state, r);
}

/// Blocks go from the cache through a first tier that has all of them to the file, past the page cache. As a
/// store of the peers, it ends when the kernel has taken them all; nothing is flushed to the medium.
template <class Engine, class... Options>
void file_store(benchmark::State& state, Options... options) {
  rig r(static_cast<std::uint64_t>(state.range(0)));
  const std::size_t bytes = r.layout.block_bytes();
  const std::string path = file_of("llmmem_bench_store");
  {
    file_space<Engine> disk(path, {.budget = r.blocks * bytes, .queue = {.max_operations = 4096}},
                            options...);
    kv_tiers tiers(r.cache, r.mover(), {.max_transfers = 4096, .load_headroom = 0},
                   offload::kv_tier(r.host, r.blocks * bytes, write_through{}),
                   offload::kv_tier(disk, r.blocks * bytes));
    for (auto _ : state) {
      state.PauseTiming();
      tiers.clear();
      r.cache.drop_idle();
      const sequence_id id = r.write();
      state.ResumeTiming();
      tiers.store(id).value();
      tiers.flush();
      if (tiers.stats().tiers[1].held != r.blocks) state.SkipWithError("a block is not in the file");
      state.PauseTiming();
      r.cache.release(id).value();
      state.ResumeTiming();
    }
  }
  std::filesystem::remove(path);
  report(state, r);
}

/// Copies into the cache on a thread of its own, as a device's copy engine does.
class copy_thread {
 public:
  /// Passes when the thread has done so many copies.
  struct fence_type {
    const std::atomic<std::uint64_t>* done = nullptr;
    std::uint64_t number = 0;

    [[nodiscard]] bool ready() const noexcept { return done == nullptr || done->load() >= number; }
    void wait() const noexcept {
      for (std::uint64_t seen = 0; done != nullptr && (seen = done->load()) < number;)
        done->wait(seen);
    }
    friend bool operator==(const fence_type&, const fence_type&) noexcept = default;
  };

  copy_thread() : thread_([this] { run(); }) {}
  ~copy_thread() {
    {
      const std::scoped_lock held(mutex_);
      is_over_ = true;
    }
    awake_.notify_one();
    thread_.join();
  }
  template <class F>
  fence_type submit(F&& work) {
    const std::scoped_lock held(mutex_);
    queue_.emplace_back(std::forward<F>(work));
    awake_.notify_one();
    return {&done_, ++begun_};
  }

 private:
  void run() {
    std::unique_lock held(mutex_);
    for (;;) {
      awake_.wait(held, [this] { return is_over_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const auto next = std::move(queue_.front());
      queue_.pop_front();
      held.unlock();
      next();
      ++done_;
      done_.notify_all();
      held.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable awake_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t begun_ = 0;
  std::atomic<std::uint64_t> done_{0};
  bool is_over_ = false;
  std::thread thread_;
};

/// The mover of `rig` on that thread, over a link of 2 GB/s: the copies of a layer take as long as its bytes.
/// Other programs' use of the processors changes that little.
struct threaded_mover {
  using inner_type = offload::layout_mover<host_executor>;
  using fence_type = copy_thread::fence_type;
  static constexpr bool runs_on_caller = false;

  [[nodiscard]] std::size_t groups() const noexcept { return inner.groups(); }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t group) const noexcept {
    return inner.block_bytes(group);
  }
  [[nodiscard]] std::uint32_t layers(std::size_t group) const noexcept { return inner.layers(group); }
  result<fence_type> save(std::size_t group, const offload::slot_memory& slots,
                          std::span<const offload::slot_pair> pairs, const fence_type& after) {
    after.wait();
    return copy(pairs, [=, this](std::span<const offload::slot_pair> all) {
      static_cast<void>(inner.save(group, slots, all, {}));
    });
  }
  result<fence_type> restore(std::size_t group, const offload::slot_memory& slots,
                             std::span<const offload::slot_pair> pairs, const layer_range& which) {
    const auto bytes = pairs.size() * inner.block_bytes(group) * which.count / inner.layers(group);
    return copy(pairs, [=, this](std::span<const offload::slot_pair> all) {
      const auto now = std::chrono::steady_clock::now();
      link_free = std::max(link_free, now) + std::chrono::nanoseconds(bytes / 2);
      static_cast<void>(inner.restore(group, slots, all, which));
      std::this_thread::sleep_until(link_free);
    });
  }

  inner_type inner;
  copy_thread* thread;
  std::chrono::steady_clock::time_point link_free{};  // of the thread

 private:
  template <class F>
  fence_type copy(std::span<const offload::slot_pair> pairs, F&& f) {
    return thread->submit(
        [f, all = std::vector<offload::slot_pair>(pairs.begin(), pairs.end())] { f(std::span(all)); });
  }
};

/// A load whose 32 layers are used one after another while a thread copies the following ones: its time, as a
/// share of the larger of link and computing. Computing a layer is a wait, as for a device.
void prefetch_by_layer(benchmark::State& state) {
  using seconds = std::chrono::duration<double>;
  const auto clock = [] { return std::chrono::steady_clock::now(); };
  rig r(std::uint64_t{2} << 20, 32);
  copy_thread thread;
  kv_tiers tiers(r.cache, threaded_mover{.inner = r.mover(), .thread = &thread}, {.load_headroom = 0},
                 offload::kv_tier(r.host, r.blocks * r.layout.block_bytes()));
  const sequence_id stored = r.write();
  tiers.store(stored).value();
  tiers.flush();
  r.cache.release(stored).value();
  r.cache.drop_idle();
  const kv_chain chain(r.cache, r.prompt);
  const auto run = [&](seconds of_layer, seconds& first_layer) {
    const sequence_id id = r.cache.create().value();
    const auto start = clock();
    auto next = start;
    auto load = tiers.prepare_load(id, chain).value();
    std::vector<copy_thread::fence_type> fences;
    for (std::uint32_t l = 0; l < r.layout.layers; ++l)
      fences.push_back(load.issue(l).value());
    for (const auto& each : fences) {
      // A layer that was here before its turn begins when the one before it ended, however late this thread
      // wakes up.
      if (!each.ready()) {
        each.wait();
        next = std::max(next, clock());
      }
      if (&each == &fences.front()) first_layer = clock() - start;
      next += std::chrono::duration_cast<std::chrono::nanoseconds>(of_layer);
      if (of_layer.count() != 0) std::this_thread::sleep_until(next);
    }
    const seconds taken = clock() - start;
    if (!load.complete().is_complete()) state.SkipWithError("a load failed");
    r.cache.release(id).value();
    r.cache.drop_idle();
    return taken;
  };
  std::vector<double> ratios;
  std::vector<double> firsts;
  const auto median = [](std::vector<double>& of) {
    std::sort(of.begin(), of.end());
    return of[of.size() / 2];
  };
  for (auto _ : state) {
    seconds first_layer{};
    const seconds link = run(seconds(0), first_layer);
    const seconds compute = link * (static_cast<double>(state.range(0)) / 100);
    const seconds both = run(compute / r.layout.layers, first_layer);
    state.SetIterationTime(both.count());
    ratios.push_back(both / std::max(link, compute));
    firsts.push_back(first_layer / link);
  }
  state.counters["of_max"] = median(ratios);
  state.counters["first_layer_of_link"] = median(firsts);
}

/// Keys of a chain that is in the first tier, or in none.
void lookup(benchmark::State& state) {
  const auto keys = static_cast<std::uint64_t>(state.range(0));
  const std::uint32_t step = keys > 1'000'000 ? 1 : 16;  // tokens of a block: the lookup sees keys alone
  cache_type cache(
      {.blocks = 16, .block_tokens = step, .max_sequences = 2, .max_sequence_tokens = 16 * step});
  const kv_layout layout{.layers = 1,
                         .heads = 1,
                         .head_dim = 16,
                         .block_tokens = step,
                         .has_values = false,
                         .element = dtype::int8};
  std::vector<std::byte> kv(layout.total_bytes(cache.physical_blocks()));
  host_space host({.budget = keys * layout.block_bytes() + 4096});
  kv_tiers tiers(cache,
                 offload::layout_mover(host_executor{}, {.data = kv.data(), .blocks = 17, .layout = layout}),
                 {.load_headroom = 0}, offload::kv_tier(host, keys * layout.block_bytes()));
  std::vector<token_id> tokens(keys * step);
  std::iota(tokens.begin(), tokens.end(), 0);
  const kv_chain chain(cache, tokens);
  // Sixteen blocks at a time go down; each sequence continues where the last one ended.
  std::vector<block_key> all(chain.keys().begin(), chain.keys().end());
  for (std::uint64_t first = 0; first < keys; first += 16) {
    const sequence_id id = cache.create().value();
    const std::uint64_t count = std::min<std::uint64_t>(16, keys - first);
    cache.extend(id, count * step).value();
    cache.commit(id, keyed_blocks{.keys = std::span(all).subspan(first, count), .tokens = count * step})
        .value();
    tiers.store(id).value();
    cache.release(id).value();
    cache.drop_idle();
  }
  for (auto _ : state) {
    const auto where = tiers.lookup(chain, 0);
    if (where.tokens != keys * step) state.SkipWithError("not all was found");
    benchmark::DoNotOptimize(where);
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(keys));
  state.counters["bytes/key"] = static_cast<double>(tiers.stats().metadata_bytes) / static_cast<double>(keys);
}

BENCHMARK(host_memcpy)->RangeMultiplier(4)->Range(16 << 10, 4 << 20);
BENCHMARK(host_load)->RangeMultiplier(4)->Range(16 << 10, 4 << 20);
BENCHMARK(host_store)->RangeMultiplier(4)->Range(16 << 10, 4 << 20);
void file_sizes(benchmark::internal::Benchmark* rows) {
  rows->RangeMultiplier(4)->Range(16 << 10, 4 << 20);
}
BENCHMARK(file_read<posix_io>)->Name("file_read/posix")->Apply(file_sizes)->UseRealTime();
BENCHMARK(file_load<posix_io>)->Name("file_load/posix")->Apply(file_sizes)->UseRealTime();
#if __has_include(<liburing.h>)
// As many requests at once as fio has.
void read_by_uring(benchmark::State& state) {
  file_read<uring_io>(state, uring_options{.depth = 64});
}
void load_by_uring(benchmark::State& state) {
  file_load<uring_io>(state, uring_options{.depth = 64});
}
BENCHMARK(read_by_uring)->Name("file_read/io_uring")->Apply(file_sizes)->UseRealTime();
void store_by_uring(benchmark::State& state) {
  file_store<uring_io>(state, uring_options{.depth = 64});
}
BENCHMARK(store_by_uring)->Name("file_store/io_uring")->Apply(file_sizes)->UseRealTime();
BENCHMARK(load_by_uring)->Name("file_load/io_uring")->Apply(file_sizes)->UseRealTime();
#endif
BENCHMARK_CAPTURE(file_fio, io_uring, "io_uring")->Apply(file_sizes)->UseManualTime();
BENCHMARK_CAPTURE(file_fio, libaio, "libaio")->Apply(file_sizes)->UseManualTime();
BENCHMARK(lookup)->Arg(1 << 10)->Arg(1 << 14)->Arg(1 << 18)->Arg(10'000'000);
// Percent of the link's time that computing takes.
BENCHMARK(prefetch_by_layer)->Arg(50)->Arg(100)->Arg(200)->UseManualTime()->Iterations(20);
// A block of 64 bytes shows the cost without the copy.
BENCHMARK(host_load)->Arg(64)->Name("control_load");
BENCHMARK(host_store)->Arg(64)->Name("control_store");

}  // namespace
