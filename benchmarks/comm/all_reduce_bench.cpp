/// @file
/// Sums over two processes: ours over Unix sockets and over TCP on the loopback, beside Gloo over TCP where
/// that is installed: its `allreduce` (a ring, what PyTorch calls) and its halving-doubling. One iteration is
/// a round of each, in turns, so that the machine is the same for all. `tcp_vs_ring` is the median over the
/// rounds of Gloo's time / ours, 1 being as fast; `_p10` and `_p90` are the spread.
///
/// LLMMEM_BENCH_SEGMENT_KIB     segment_bytes of ours (the default of `collective_call`)
/// LLMMEM_BENCH_ALL_REDUCE_KIB  the largest sum (1024); 262144 takes 2 GiB of memory

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>

#include <benchmark/benchmark.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef LLMMEM_BENCH_GLOO
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#endif

#include "comm/local_job.hpp"

namespace {

using namespace llmmem;

/// The code that sums: the same in both processes.
class summer {
 public:
  virtual ~summer() = default;
  virtual void sum(std::vector<float>& data) = 0;
};

class our_sum final : public summer {
 public:
  explicit our_sum(const socket_options& options) : end_(options), ranks_(end_) {
    ranks_.join(ranks_.after(10'000'000'000)).value();
  }
  void sum(std::vector<float>& data) override {
    all_reduce(ranks_, std::as_writable_bytes(std::span(data)), sum_f32, call_).value();
  }

 private:
  socket_endpoint end_;
  communicator<socket_endpoint> ranks_;
  collective_call call_{
      .segment_bytes = llmmem_bench::number("LLMMEM_BENCH_SEGMENT_KIB", collective_call{}.segment_bytes >> 10)
                       << 10};
};

#ifdef LLMMEM_BENCH_GLOO
/// Two ranks of Gloo that meet in a folder.
std::shared_ptr<gloo::Context> gloo_context(std::uint32_t rank, const std::string& folder) {
  gloo::transport::tcp::attr where("127.0.0.1");
  const auto context = std::make_shared<gloo::rendezvous::Context>(static_cast<int>(rank), 2);
  gloo::rendezvous::FileStore store(folder);
  auto device = gloo::transport::tcp::CreateDevice(where);
  context->connectFullMesh(store, device);
  return context;
}

class gloo_ring_sum final : public summer {
 public:
  explicit gloo_ring_sum(std::shared_ptr<gloo::Context> context) : context_(std::move(context)) {}
  void sum(std::vector<float>& data) override {
    gloo::AllreduceOptions options(context_);
    options.setOutput(data.data(), data.size());
    options.setReduceFunction(
        static_cast<void (*)(void*, const void*, const void*, std::size_t)>(gloo::sum<float>));
    gloo::allreduce(options);
  }

 private:
  std::shared_ptr<gloo::Context> context_;
};

class gloo_halving_sum final : public summer {
 public:
  gloo_halving_sum(const std::shared_ptr<gloo::Context>& context, std::vector<float>& data)
      : algorithm_(std::make_unique<gloo::AllreduceHalvingDoubling<float>>(
            context, std::vector<float*>{data.data()}, static_cast<int>(data.size()))) {}
  void sum(std::vector<float>&) override { algorithm_->run(); }

 private:
  std::unique_ptr<gloo::Algorithm> algorithm_;
};
#endif

struct job {
  llmmem_bench::bench_folder local;
  llmmem_bench::bench_folder store;
  socket_options options[2] = {llmmem_bench::job_options(llmmem_bench::socket_kind::local, 2, local),
                               llmmem_bench::job_options(llmmem_bench::socket_kind::tcp, 2, local)};
};

/// All of them, for one rank: unix, tcp, and those of Gloo.
std::vector<std::unique_ptr<summer>> summers(std::uint32_t rank, const job& of,
                                             [[maybe_unused]] std::vector<float>& data) {
  std::vector<std::unique_ptr<summer>> all;
  for (socket_options options : of.options) {
    options.seat = seat_id{rank};
    all.push_back(std::make_unique<our_sum>(options));
  }
#ifdef LLMMEM_BENCH_GLOO
  const auto context = gloo_context(rank, of.store.path());
  all.push_back(std::make_unique<gloo_ring_sum>(context));
  all.push_back(std::make_unique<gloo_halving_sum>(context, data));
#endif
  return all;
}

/// One round of one of them; both processes call it.
double round_of(summer& by, std::vector<float>& data, std::uint64_t count) {
  by.sum(data);  // they begin together
  const auto began = std::chrono::steady_clock::now();
  for (std::uint64_t i = 0; i < count; ++i)
    by.sum(data);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

/// The ratios of `a`'s time to `b`'s, over alternating rounds.
void put_ratio(benchmark::State& state, const std::string& name, const std::vector<double>& a,
               const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i)
    ratios.push_back(a[i] / b[i]);
  std::sort(ratios.begin(), ratios.end());
  state.counters[name] = ratios[ratios.size() / 2];
  state.counters[name + "_p10"] = ratios[ratios.size() / 10];
  state.counters[name + "_p90"] = ratios[ratios.size() - 1 - ratios.size() / 10];
}

double median_of(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void sum_of_two(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::uint64_t count = std::clamp<std::uint64_t>((16U << 20) / bytes, 1, 100);
  const job of;
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("no sockets");
  const detail::descriptor here(ends[0]);
  detail::descriptor there(ends[1]);
  // The numbers stay finite after any number of sums: they are zeros, except for the check.
  llmmem_bench::bench_process other([&] {
    ::close(ends[0]);
    std::vector<float> data(bytes / 4);
    const auto all = summers(1, of, data);
    for (unsigned char which = 0; ::read(ends[1], &which, 1) == 1;) {
      std::fill(data.begin(), data.end(), 0.0F);
      static_cast<void>(round_of(*all[which], data, count));
    }
    return 0;
  });
  there.close();
  std::vector<float> data(bytes / 4);
  const auto all = summers(0, of, data);
  const auto one_round = [&](unsigned char which) {
    std::fill(data.begin(), data.end(), 0.0F);
    if (::write(here.get(), &which, 1) != 1) throw std::runtime_error("the other process is gone");
    return round_of(*all[which], data, count);
  };
  std::vector<std::vector<double>> times(all.size());
  std::size_t turn = 0;
  for (auto _ : state) {
    // A contestant inherits the caches and cores of the previous one, so each is first in turn.
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t which = (i + turn) % all.size();
      times[which].push_back(one_round(static_cast<unsigned char>(which)));
    }
    ++turn;
    state.SetIterationTime(times[1].back());
  }
  static constexpr const char* names[] = {"unix", "tcp", "ring", "halving"};
  for (std::size_t i = 0; i < all.size(); ++i)
    state.counters[std::string(names[i]) + "_us"] = median_of(times[i]) / static_cast<double>(count) * 1e6;
  for (std::size_t i = 2; i < all.size(); ++i) {
    put_ratio(state, std::string("tcp_vs_") + names[i], times[i], times[1]);
    put_ratio(state, std::string("unix_vs_") + names[i], times[i], times[0]);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes));
}

[[maybe_unused]] const bool is_registered = [] {
  const std::int64_t most = std::int64_t{llmmem_bench::number("LLMMEM_BENCH_ALL_REDUCE_KIB", 1024)} << 10;
  for (std::int64_t bytes = 1024; bytes <= (256 << 20) && bytes <= most; bytes *= 4) {
    benchmark::RegisterBenchmark("all_reduce/llmmem", sum_of_two)
        ->Arg(bytes)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
  return true;
}();

}  // namespace
