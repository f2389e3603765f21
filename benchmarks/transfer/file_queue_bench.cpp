/// @file
/// File queues against fio on the same file, block and depth. One iteration moves the whole amount, so that
/// the ends of a run (opening, the first requests, the last) count the same for everyone.
///
/// LLMMEM_BENCH_IO_MIB   bytes of the file and of an iteration (16)
/// LLMMEM_BENCH_IO_DIR   its folder (the system's for temporary files)
/// LLMMEM_BENCH_FIO      run fio's rows (only when set)
/// LLMMEM_BENCH_TUNER    run the tuner's rows (only when set): a sweep of settings, and what the tuner finds

#include <llmmem/space/host.hpp>
#include <llmmem/transfer/file_queue.hpp>
#if __has_include(<liburing.h>)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

[[nodiscard]] std::uint64_t total_bytes() {
  const char* const text = std::getenv("LLMMEM_BENCH_IO_MIB");
  return (text != nullptr ? std::strtoull(text, nullptr, 10) : 16) << 20;
}

[[nodiscard]] std::string path_of_file() {
  const char* const folder = std::getenv("LLMMEM_BENCH_IO_DIR");
  const std::filesystem::path where =
      folder != nullptr ? std::filesystem::path(folder) : std::filesystem::temp_directory_path();
  return (where / fmt::format("llmmem-bench-{}", ::getpid())).string();
}

/// The file of all rows: written once, removed at the end.
struct bench_file {
  std::string path = path_of_file();

  bench_file() {
    const io_file file(path);
    file_queue<> queue;
    const std::vector<std::byte> part(std::size_t{1} << 20, std::byte{1});
    for (std::uint64_t at = 0; at < total_bytes(); at += part.size())
      queue.start(write_to(file, at, part)).value().wait();
  }
  bench_file(const bench_file&) = delete;
  bench_file& operator=(const bench_file&) = delete;
  ~bench_file() { ::unlink(path.c_str()); }
};

[[nodiscard]] const bench_file& shared_file() {
  static const bench_file file;
  return file;
}

enum class pattern { sequential, random };

struct workload {
  const char* name;
  pattern order;
  io_direction way;
  std::uint64_t block;
  std::uint32_t depth;
};

constexpr std::array workloads{
    workload{"seq_read_1M", pattern::sequential, io_direction::read, 1 << 20, 32},
    workload{"seq_write_1M", pattern::sequential, io_direction::write, 1 << 20, 32},
    workload{"rand_read_64K", pattern::random, io_direction::read, 1 << 16, 32},
    workload{"rand_write_64K", pattern::random, io_direction::write, 1 << 16, 32},
    workload{"rand_read_4K", pattern::random, io_direction::read, 1 << 12, 32},
};

/// Bytes of one iteration: small blocks need not move the whole file.
[[nodiscard]] std::uint64_t bytes_of(const workload& load) {
  const std::uint64_t all = total_bytes();
  return load.block < (1 << 16) ? all / 4 : all;
}

[[nodiscard]] double processor_seconds(int who) {
  rusage use{};
  ::getrusage(who, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

void report(benchmark::State& state, const workload& load, double cpu_seconds) {
  const double bytes = static_cast<double>(bytes_of(load)) * static_cast<double>(state.iterations());
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes));
  state.counters["cpu_ms_per_GB"] = cpu_seconds * 1e3 / (bytes * 1e-9);
}

/// Copies of one block each, `depth` under way at any time, as fio's jobs do.
template <class Engine, class... Args>
void move_by_queue(benchmark::State& state, const workload& load, llmmem::transfer::driven_by driver,
                   huge_pages pages, Args... engine) {
  const io_file file(shared_file().path, {.mode = open_mode::update});
  if (file.direct() < 0) return state.SkipWithError("no direct I/O here");
  file_queue<Engine> queue({.driver = driver, .block_bytes = load.block, .depth = load.depth}, engine...);
  host_space memory(page_source({.huge = pages}), {.budget = load.block * load.depth + (1 << 21)});
  const auto range = memory.try_allocate(load.block * load.depth, 4096).value();
  std::memset(range.data, 1, load.block * load.depth);  // fio fills its buffers before its clock starts, too
  std::vector<transfer_fence> fences(load.depth);
  const std::uint64_t blocks = total_bytes() / load.block;
  const std::uint64_t count = bytes_of(load) / load.block;
  std::uint64_t random = 1;
  const double before = processor_seconds(RUSAGE_SELF);
  for (auto _ : state) {
    const auto began = std::chrono::steady_clock::now();
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::size_t slot = i % load.depth;
      fences[slot].wait();
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      const std::uint64_t at = load.order == pattern::random ? (random >> 33) % blocks : i;
      const file_copy copy{&file, load.way, at * load.block, range.data + slot * load.block, load.block};
      fences[slot] = queue.start(copy).value();
    }
    for (const transfer_fence& each : fences)
      each.wait();
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  report(state, load, processor_seconds(RUSAGE_SELF) - before);
  memory.deallocate(range);
}

/// One number of fio's JSON, the first of that name after `section`.
[[nodiscard]] double number_in(const std::string& json, std::string_view section, std::string_view name) {
  const std::size_t begin = json.find(fmt::format("\"{}\" : {{", section));
  const std::size_t at = json.find(fmt::format("\"{}\" : ", name), begin == std::string::npos ? 0 : begin);
  return at == std::string::npos ? 0 : std::strtod(json.c_str() + at + name.size() + 5, nullptr);
}

#if __has_include(<liburing.h>)
/// Reads of 4 KiB, from the device or from the page cache, of a registered or unregistered file.
void read_small(benchmark::State& state, direct_io direct, bool is_registered) {
  const workload load{"", pattern::random, io_direction::read, 1 << 12, 32};
  const io_file file(shared_file().path, {.mode = open_mode::read, .direct = direct});
  uring_io engine({.depth = load.depth, .issuer = uring_issuer::one_thread});
  const int descriptor = direct == direct_io::never ? file.buffered() : file.direct();
  if (descriptor < 0) return state.SkipWithError("no direct I/O here");
  if (is_registered && !engine.register_file(descriptor))
    return state.SkipWithError("no table of files here");
  host_space memory({.budget = load.block * load.depth + (1 << 21)});
  const auto range = memory.try_allocate(load.block * load.depth, 4096).value();
  std::memset(range.data, 1, load.block * load.depth);
  const std::uint64_t blocks = total_bytes() / load.block;
  const std::uint64_t count = bytes_of(load) / load.block;
  if (direct == direct_io::never) {
    for (std::uint64_t at = 0; at < total_bytes(); at += range.bytes)
      file_queue<>().start(read_from(file, at, {range.data, load.block * load.depth})).value().wait();
  }
  std::uint64_t random = 1;
  const auto ask = [&](std::uint64_t slot) {
    random = random * 6364136223846793005ULL + 1442695040888963407ULL;
    static_cast<void>(engine.try_queue({.file = descriptor,
                                        .bytes = 1 << 12,
                                        .offset = (random >> 33) % blocks * load.block,
                                        .data = range.data + slot * load.block,
                                        .tag = slot}));
  };
  const double before = processor_seconds(RUSAGE_SELF);
  for (auto _ : state) {
    const auto began = std::chrono::steady_clock::now();
    for (std::uint64_t slot = 0; slot < load.depth; ++slot)
      ask(slot);
    std::array<io_completion, 32> done{};
    std::uint64_t asked = load.depth;
    while (engine.in_flight() != 0) {
      const std::size_t got = engine.reap(done, {.least = 1}).value();
      for (std::size_t i = 0; i < got; ++i) {
        if (done[i].outcome != 1 << 12) return state.SkipWithError("a read failed");
        if (asked++ < count) ask(done[i].tag);
      }
    }
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  report(state, load, processor_seconds(RUSAGE_SELF) - before);
  state.counters["cpu_ns_per_read"] = state.counters["cpu_ms_per_GB"] * 4096e-9 * 1e6;
  memory.deallocate(range);
}
#endif

void move_by_fio(benchmark::State& state, const workload& load, const char* engine) {
  const bool reads = load.way == io_direction::read;
  const std::string order =
      load.order == pattern::random ? (reads ? "randread" : "randwrite") : (reads ? "read" : "write");
  const std::string command = fmt::format(
      "fio --name=x --filename={} --direct=1 --ioengine={} --rw={} --bs={} --iodepth={} --size={} "
      "--io_size={} "
      "--norandommap --overwrite=1 --fallocate=none --thread --scramble_buffers=0 --gtod_reduce=1 "
      "--output-format=json 2>/dev/null",
      shared_file().path, engine, order, load.block, load.depth, total_bytes(), bytes_of(load));
  double own = 0;
  for (auto _ : state) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen(command.c_str(), "r"), &::pclose);
    std::string json;
    std::array<char, 4096> part{};
    while (const std::size_t got = std::fread(part.data(), 1, part.size(), pipe.get()))
      json.append(part.data(), got);
    const double seconds = number_in(json, reads ? "read" : "write", "runtime") * 1e-3;
    const double rate = number_in(json, reads ? "read" : "write", "bw_bytes");
    if (seconds == 0 || rate == 0) return state.SkipWithError("fio did not run");
    // Its own clock counts whole milliseconds, and the rate is finer.
    const double took = static_cast<double>(bytes_of(load)) / rate;
    own +=
        (number_in(json, "job options", "usr_cpu") + number_in(json, "job options", "sys_cpu")) / 100 * took;
    state.SetIterationTime(took);
  }
  report(state, load, own);
}

#if __has_include(<liburing.h>)
/// Consecutive large copies, of which more wait than the queue may have in flight.
class stream {
 public:
  explicit stream(io_direction way) : way_(way) { std::memset(range_.data, 1, range_.bytes); }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  ~stream() { memory_.deallocate(range_); }

  /// Moves `bytes`, or until `enough()`; returns bytes per nanosecond.
  template <class Enough>
  double run(file_queue<uring_io>& queue, std::uint64_t bytes, Enough enough) {
    const auto began = std::chrono::steady_clock::now();
    std::array<transfer_fence, copies> fences{};
    std::uint64_t moved = 0;
    for (std::uint64_t i = 0; moved < bytes && !enough(); ++i, moved += copy_bytes) {
      fences[i % copies].wait();
      const std::uint64_t at = i * copy_bytes % (total_bytes() / copy_bytes * copy_bytes);
      fences[i % copies] =
          queue.start(file_copy{&file_, way_, at, range_.data + i % copies * copy_bytes, copy_bytes}).value();
    }
    for (const transfer_fence& each : fences)
      each.wait();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    return static_cast<double>(moved) / took.count();
  }
  double speed_of(const io_setting& setting, std::uint64_t bytes) {
    file_queue<uring_io> queue({.driver = llmmem::transfer::driven_by::waiters,
                                .block_bytes = setting.block_bytes,
                                .depth = setting.depth},
                               uring_options{.depth = setting.depth, .issuer = uring_issuer::one_thread});
    return run(queue, bytes, [] { return false; });
  }

 private:
  static constexpr std::uint64_t copies = 16;
  static constexpr std::uint64_t copy_bytes = std::uint64_t{16} << 20;

  io_direction way_;
  io_file file_{shared_file().path, {.mode = open_mode::update}};
  host_space memory_{{.budget = copies * copy_bytes + (1 << 21)}};
  memory_range<host_space> range_ = memory_.try_allocate(copies * copy_bytes, 1 << 21).value();
};

[[nodiscard]] double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// A sweep over all settings, in rounds; then the tuner from its default start; then both winners again,
/// because the best of many noisy figures is too good.
void tune(benchmark::State& state, io_direction way) {
  constexpr std::uint64_t amount = std::uint64_t{256} << 20;
  constexpr io_setting least{1, std::uint64_t{1} << 16};
  constexpr io_setting most{32, std::uint64_t{1} << 22};
  for (auto _ : state) {
    stream work(way);
    std::vector<io_setting> settings;
    for (std::uint32_t depth = least.depth; depth <= most.depth; depth *= 2) {
      for (std::uint64_t block = least.block_bytes; block <= most.block_bytes; block *= 2)
        settings.push_back({depth, block});
    }
    std::vector<std::vector<double>> speeds(settings.size());
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < settings.size(); ++i)
        speeds[i].push_back(work.speed_of(settings[i], amount));
    }
    std::size_t best = 0;
    for (std::size_t i = 1; i < settings.size(); ++i) {
      if (median_of(speeds[i]) > median_of(speeds[best])) best = i;
    }
    file_queue<uring_io> queue({.driver = llmmem::transfer::driven_by::waiters,
                                .depth = most.depth,
                                .tuning = io_tuning::on,
                                .tuner = {.least = least, .most = most}},
                               uring_options{.depth = most.depth, .issuer = uring_issuer::one_thread});
    const auto began = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    };
    const std::uint64_t all = std::uint64_t{1} << 50;
    work.run(queue, all, [&] { return queue.stats().is_at_rest || seconds() > 60; });
    const file_queue_stats found = queue.stats();
    const double took = seconds();
    // The tuner alone, from the worst corner, until it settles for the third time.
    io_tuner climber({.first = least, .least = least, .most = most});
    std::uint32_t windows = 0;
    for (int rests = 0; rests < 3 && windows < climber.max_windows(); ++windows) {
      const io_setting now = climber.setting();
      const std::uint64_t bytes =
          std::clamp(8 * now.depth * now.block_bytes, std::uint64_t{32} << 20, amount);
      const double speed = work.speed_of(now, bytes);
      const bool was_at_rest = climber.is_at_rest();
      climber.window(bytes, static_cast<std::uint64_t>(static_cast<double>(bytes) / speed));
      if (climber.is_at_rest() && !was_at_rest) ++rests;
    }
    std::vector<double> of_sweep;
    std::vector<double> of_tuner;
    std::vector<double> of_climber;
    std::vector<double> ratios;
    std::vector<double> climber_ratios;
    for (int round = 0; round < 9; ++round) {
      of_sweep.push_back(work.speed_of(settings[best], amount));
      of_tuner.push_back(work.speed_of(found.best, amount));
      of_climber.push_back(work.speed_of(climber.best(), amount));
      ratios.push_back(of_tuner.back() / of_sweep.back());
      climber_ratios.push_back(of_climber.back() / of_sweep.back());
    }
    state.counters["sweep_depth"] = settings[best].depth;
    state.counters["sweep_KiB"] = static_cast<double>(settings[best].block_bytes >> 10);
    state.counters["sweep_GBps"] = median_of(of_sweep);
    state.counters["tuner_depth"] = found.best.depth;
    state.counters["tuner_KiB"] = static_cast<double>(found.best.block_bytes >> 10);
    state.counters["tuner_GBps"] = median_of(of_tuner);
    state.counters["tuner_of_sweep"] = median_of(ratios);
    state.counters["tuner_seconds"] = took;
    state.counters["tuner_GB"] = static_cast<double>(found.bytes_read + found.bytes_written) * 1e-9;
    state.counters["at_rest"] = found.is_at_rest ? 1 : 0;
    state.counters["corner_depth"] = climber.best().depth;
    state.counters["corner_KiB"] = static_cast<double>(climber.best().block_bytes >> 10);
    state.counters["corner_GBps"] = median_of(of_climber);
    state.counters["corner_of_sweep"] = median_of(climber_ratios);
    state.counters["corner_windows"] = windows;
    std::string table;
    for (std::size_t i = 0; i < settings.size(); ++i)
      table += fmt::format("{}x{}K {:.2f}  ", settings[i].depth, settings[i].block_bytes >> 10,
                           median_of(speeds[i]));
    state.SetLabel(table);
  }
}
#endif

const int registered = [] {
  const auto add = [](const workload& load, const char* who, auto run) {
    benchmark::RegisterBenchmark(fmt::format("io/{}/{}", load.name, who).c_str(), run)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  };
  for (const workload& load : workloads) {
    add(load, "llmmem_posix", [&load](benchmark::State& state) {
      move_by_queue<posix_io>(state, load, llmmem::transfer::driven_by::waiters, huge_pages::advise);
    });
#if __has_include(<liburing.h>)
    const auto add_uring = [&](const char* who, llmmem::transfer::driven_by driver, huge_pages pages) {
      add(load, who, [&load, driver, pages](benchmark::State& state) {
        move_by_queue<uring_io>(state, load, driver, pages,
                                uring_options{.depth = load.depth, .issuer = uring_issuer::one_thread});
      });
    };
    add_uring("llmmem", llmmem::transfer::driven_by::waiters, huge_pages::advise);
    add_uring("llmmem_small_pages", llmmem::transfer::driven_by::waiters, huge_pages::never);
    add_uring("llmmem_thread", llmmem::transfer::driven_by::own_thread, huge_pages::advise);
    add(load, "llmmem_one_buffer", [&load](benchmark::State& state) {
      workload alone = load;
      alone.depth = 1;
      move_by_queue<uring_io>(state, alone, llmmem::transfer::driven_by::waiters, huge_pages::never,
                              uring_options{.depth = 1, .issuer = uring_issuer::one_thread});
    });
#endif
    // As fio's psync: one block of memory in small pages, repeatedly.
    add(load, "llmmem_posix_one_buffer", [&load](benchmark::State& state) {
      workload alone = load;
      alone.depth = 1;
      move_by_queue<posix_io>(state, alone, llmmem::transfer::driven_by::waiters, huge_pages::never);
    });
    if (std::getenv("LLMMEM_BENCH_FIO") != nullptr) {
      add(load, "fio_psync", [&load](benchmark::State& state) { move_by_fio(state, load, "psync"); });
      add(load, "fio_uring", [&load](benchmark::State& state) { move_by_fio(state, load, "io_uring"); });
    }
  }
#if __has_include(<liburing.h>)
  if (std::getenv("LLMMEM_BENCH_TUNER") != nullptr) {
    for (const auto& [name, way] : {std::pair{"read", io_direction::read}, {"write", io_direction::write}}) {
      benchmark::RegisterBenchmark(fmt::format("tuner/{}", name).c_str(),
                                   [way](benchmark::State& state) { tune(state, way); })
          ->Iterations(1)
          ->Unit(benchmark::kSecond);
    }
  }
  for (const auto& [where, direct] :
       {std::pair{"direct", direct_io::preferred}, {"cached", direct_io::never}}) {
    for (const bool is_registered : {false, true}) {
      benchmark::RegisterBenchmark(
          fmt::format("files/{}_read_4K/{}", where, is_registered ? "table" : "descriptor").c_str(),
          [direct, is_registered](benchmark::State& state) { read_small(state, direct, is_registered); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
#endif
  return 0;
}();

}  // namespace
