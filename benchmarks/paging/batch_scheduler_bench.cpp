// What the order of requests and the rules of preemption make of an hour of a chat service: the requests of
// the Azure conversation trace (arrivals, lengths; the lengths of answers are hidden from the scheduler), on
// 2,048 blocks of 16 tokens.
//
//   serve/rules/n   the trace with its arrivals n percent as fast as recorded
//
// Time is simulated: a step takes 8 ms and 20 us for each token it computes. Everything reported comes from
// that clock, except `step_us`, the processor time of the scheduler for one step.
//
//   tokens/s        prompt and answer tokens of all requests, per second of simulated time
//   wait_p50/p99    seconds from arrival to the first token
//   few_p99         the same for the three tenants with a tenth of the requests each; one has the other 70%
//   recomputed      percent of the computed tokens that had been computed before
//
// `vllm` are the rules of vLLM's scheduler, written again over the same allocator: requests grow one by one;
// one that lacks a block preempts the last running one, itself in the end; a prompt is admitted when the
// blocks of its first part are free. Its requests are served by arrival. `priority` is by_priority with the
// three small tenants one step above and a head start of 100 requests; `edf` has deadlines 2 s (small
// tenants) and 60 s after arrival.

#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/batch_scheduler.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint32_t most_running = 64;
constexpr std::uint64_t step_tokens = 2'048;

struct recorded {
  double arrival = 0;  // seconds
  std::uint64_t prompt = 0;
  std::uint64_t answer = 0;
  std::uint32_t tenant = 0;
};

std::vector<recorded> read_requests() {
  const char* folder = std::getenv("LLMMEM_DATA_DIR");
  const std::filesystem::path data = folder == nullptr ? LLMMEM_BENCH_DATA_DIR : folder;
  std::ifstream in(data / "azure_llm_inference_2023_conv.csv");
  std::vector<recorded> out;
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    // 2023-11-16 18:15:46.6805900,374,44
    const auto number = [&](std::size_t at, std::size_t size) { return std::stod(line.substr(at, size)); };
    const double second = number(11, 2) * 3'600 + number(14, 2) * 60 + number(17, 10);
    const std::size_t first = line.find(',');
    const std::size_t next = line.find(',', first + 1);
    const std::uint64_t i = out.size() % 10;
    out.push_back({.arrival = second,
                   .prompt = std::stoull(line.substr(first + 1)),
                   .answer = std::stoull(line.substr(next + 1)),
                   .tenant = i < 7 ? 0 : static_cast<std::uint32_t>(i - 6)});
  }
  for (std::size_t i = out.size(); i > 0; --i)
    out[i - 1].arrival -= out.front().arrival;
  return out;
}

/// Has the tokens of each request; no KV.
struct engine {
  std::vector<std::vector<token_id>> texts;

  [[nodiscard]] std::span<const token_id> tokens(std::uint64_t user) noexcept { return texts[user]; }
  void copy(const block_copy&) noexcept {}
  void exhausted(std::uint64_t, const failure&) noexcept { std::abort(); }
};

/// vLLM's rules over the same allocator.
class vllm_rules {
 public:
  vllm_rules(paged_allocator<>& cache, engine& client) : cache_(&cache), client_(&client) {}

  void submit(std::uint64_t user, const request_class&) { waiting_.push_back({.user = user}); }
  std::span<const scheduled_work> step() {
    work_.clear();
    std::uint64_t budget = step_tokens;
    bool has_preempted = false;
    for (std::size_t i = 0; i < running_.size() && budget > 0; ++i) {
      const auto rest = client_->tokens(running_[i].user).subspan(running_[i].written);
      const auto part = rest.first(std::min<std::size_t>(rest.size(), budget));
      bool fits = true;
      while (!cache_->append(running_[i].sequence, part)) {
        has_preempted = true;
        preempt();
        fits = i < running_.size();
        if (!fits) break;
      }
      if (!fits) break;
      add(running_[i], part.size());
      budget -= part.size();
    }
    while (!has_preempted && !waiting_.empty() && running_.size() < most_running && budget > 0) {
      entry next = waiting_.front();
      const auto tokens = client_->tokens(next.user);
      next.sequence = cache_->create().value();
      next.written = cache_->match(next.sequence, tokens.first(tokens.size() - 1)).value().tokens;
      const auto rest = tokens.subspan(next.written);
      const auto part = rest.first(std::min<std::size_t>(rest.size(), budget));
      if (!cache_->append(next.sequence, part)) {
        cache_->release(next.sequence).value();
        break;
      }
      waiting_.pop_front();
      running_.push_back(next);
      add(running_.back(), part.size());
      budget -= part.size();
    }
    return work_;
  }
  void completed() {
    for (const scheduled_work& each : work_)
      cache_->commit(each.sequence, each.first + each.count).value();
  }
  void finish(std::uint64_t user) {
    const auto at =
        std::find_if(running_.begin(), running_.end(), [&](const entry& each) { return each.user == user; });
    cache_->release(at->sequence).value();
    running_.erase(at);
  }
  [[nodiscard]] std::uint64_t preempted() const { return preempted_; }
  [[nodiscard]] std::uint64_t recomputed() const { return recomputed_; }
  [[nodiscard]] std::uint64_t computed() const { return computed_; }

 private:
  struct entry {
    std::uint64_t user = 0;
    sequence_id sequence{};
    std::uint64_t written = 0;
    std::uint64_t computed = 0;
  };

  void preempt() {
    entry last = running_.back();
    running_.pop_back();
    cache_->release(last.sequence).value();
    last.written = 0;
    waiting_.push_front(last);
    ++preempted_;
  }
  void add(entry& each, std::uint64_t count) {
    work_.push_back({.user = each.user, .sequence = each.sequence, .first = each.written, .count = count});
    const std::uint64_t end = each.written + count;
    computed_ += count;
    if (each.computed > each.written) recomputed_ += std::min(each.computed, end) - each.written;
    each.computed = std::max(each.computed, end);
    each.written = end;
  }

  paged_allocator<>* cache_;
  engine* client_;
  std::vector<entry> running_;
  std::deque<entry> waiting_;
  std::vector<scheduled_work> work_;
  std::uint64_t preempted_ = 0;
  std::uint64_t recomputed_ = 0;
  std::uint64_t computed_ = 0;
};

template <class Order>
class our_rules {
 public:
  our_rules(paged_allocator<>& cache, engine& client, Order order)
      : scheduler_(cache, client,
                   {.max_running = most_running,
                    .max_requests = 20'000,
                    .max_step_tokens = step_tokens,
                    .watermark = 8},
                   std::move(order)) {}

  void submit(std::uint64_t user, const request_class& of) {
    tickets_.resize(user + 1);
    tickets_[user] = scheduler_.submit(user, {}, {}, of).value();
  }
  std::span<const scheduled_work> step() { return scheduler_.step().value().work; }
  void completed() { scheduler_.completed().value(); }
  void finish(std::uint64_t user) { scheduler_.finish(tickets_[user]).value(); }
  [[nodiscard]] std::uint64_t preempted() const { return scheduler_.stats().preempted; }
  [[nodiscard]] std::uint64_t recomputed() const { return scheduler_.stats().recomputed_tokens; }
  [[nodiscard]] std::uint64_t computed() const { return scheduler_.stats().computed_tokens; }

 private:
  batch_scheduler<paged_allocator<>, engine, Order> scheduler_;
  std::vector<request_ticket> tickets_;
};

double percentile(std::vector<double>& values, double part) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::size_t>(part * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

template <class Make>
void serve(benchmark::State& state, Make&& make) {
  const std::vector<recorded> requests = read_requests();
  if (requests.empty()) {
    state.SkipWithError("LLMMEM_DATA_DIR has no azure_llm_inference_2023_conv.csv");
    return;
  }
  const double speed = static_cast<double>(state.range(0)) / 100;
  for (auto _ : state) {
    paged_allocator<> cache({.blocks = 2'048, .block_tokens = 16, .max_sequences = most_running});
    engine client;
    client.texts.resize(requests.size());
    auto rules = make(cache, client);
    std::size_t arrived = 0;
    std::size_t left = requests.size();
    std::uint64_t tokens = 0;
    std::uint64_t steps = 0;
    double now = 0;
    std::chrono::nanoseconds spent{};
    std::vector<double> waits;
    std::vector<double> waits_of_few;
    std::vector<std::uint64_t> over;
    while (left > 0) {
      for (; arrived < requests.size() && requests[arrived].arrival / speed <= now; ++arrived) {
        std::vector<token_id>& text = client.texts[arrived];
        text.resize(requests[arrived].prompt);
        for (std::size_t i = 0; i < text.size(); ++i)
          text[i] = static_cast<token_id>(arrived * 7 + i);
        const bool is_small = requests[arrived].tenant != 0;
        rules.submit(arrived, {.priority = is_small ? 1U : 0U,
                               .tenant = requests[arrived].tenant,
                               .deadline = static_cast<std::uint64_t>((now + (is_small ? 2 : 60)) * 1e6)});
      }
      const auto begin = std::chrono::steady_clock::now();
      const auto work = rules.step();
      spent += std::chrono::steady_clock::now() - begin;
      if (work.empty()) {
        now = std::max(now + 0.001, arrived < requests.size() ? requests[arrived].arrival / speed : now);
        continue;
      }
      ++steps;
      std::uint64_t computed = 0;
      for (const scheduled_work& each : work)
        computed += each.count;
      now += 0.008 + 20e-6 * static_cast<double>(computed);
      over.clear();
      for (const scheduled_work& each : work) {
        std::vector<token_id>& text = client.texts[each.user];
        const recorded& of = requests[each.user];
        if (each.first + each.count != text.size()) continue;
        if (text.size() == of.prompt) {
          waits.push_back(now - of.arrival / speed);
          if (of.tenant != 0) waits_of_few.push_back(waits.back());
        }
        text.push_back(static_cast<token_id>(text.size()));
        if (text.size() >= of.prompt + of.answer) over.push_back(each.user);
      }
      const auto then = std::chrono::steady_clock::now();
      rules.completed();
      for (const std::uint64_t user : over)
        rules.finish(user);
      spent += std::chrono::steady_clock::now() - then;
      for (const std::uint64_t user : over) {
        tokens += client.texts[user].size();
        client.texts[user] = {};
        --left;
      }
    }
    state.SetIterationTime(now);
    state.counters["tokens/s"] = static_cast<double>(tokens) / now;
    state.counters["wait_p50"] = percentile(waits, 0.5);
    state.counters["wait_p99"] = percentile(waits, 0.99);
    state.counters["few_p99"] = percentile(waits_of_few, 0.99);
    state.counters["preempted"] = static_cast<double>(rules.preempted());
    state.counters["recomputed"] =
        100 * static_cast<double>(rules.recomputed()) / static_cast<double>(rules.computed());
    state.counters["step_us"] =
        std::chrono::duration<double, std::micro>(spent).count() / static_cast<double>(steps);
  }
}

template <class Order>
auto ours(Order order) {
  return [order = std::move(order)](paged_allocator<>& cache, engine& client) mutable {
    return our_rules<Order>(cache, client, std::move(order));
  };
}

void speeds(benchmark::internal::Benchmark* bench) {
  bench->Arg(100)->Arg(140)->Arg(200)->Iterations(1)->UseManualTime()->Unit(benchmark::kSecond);
}

void vllm(benchmark::State& state) {
  serve(state, [](paged_allocator<>& cache, engine& client) { return vllm_rules(cache, client); });
}
void fcfs(benchmark::State& state) {
  serve(state, ours(first_come_first_served{}));
}
void priority(benchmark::State& state) {
  serve(state, ours(by_priority(100)));
}
void edf(benchmark::State& state) {
  serve(state, ours(earliest_deadline_first{}));
}
void fair(benchmark::State& state) {
  serve(state, ours(fair_shares(4)));
}

BENCHMARK(vllm)->Name("serve/vllm")->Apply(speeds);
BENCHMARK(fcfs)->Name("serve/fcfs")->Apply(speeds);
BENCHMARK(priority)->Name("serve/priority")->Apply(speeds);
BENCHMARK(edf)->Name("serve/edf")->Apply(speeds);
BENCHMARK(fair)->Name("serve/fair")->Apply(speeds);

}  // namespace
