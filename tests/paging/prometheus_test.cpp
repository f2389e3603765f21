#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/cache_metrics.hpp>
#include <llmmem/paging/prometheus.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "support/exposition.hpp"
#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::string page_of(const paged_stats& stats, const cache_histograms& histograms,
                    std::span<const prometheus_label> labels = {}) {
  std::string page;
  write_prometheus(stats, 16, histograms, labels, [&](std::string_view text) { page += text; });
  return page;
}

/// The lines of one family.
std::string family(const std::string& page, const std::string& name) {
  std::string out;
  for (std::size_t at = 0; at < page.size();) {
    const std::size_t end = page.find('\n', at) + 1;
    const std::string line = page.substr(at, end - at);
    const std::string_view rest = line.starts_with("# ") ? std::string_view(line).substr(7) : line;
    if (rest.starts_with(name)) out += line;
    at = end;
  }
  return out;
}

}  // namespace

TEST_CASE("a counter, a gauge and a histogram are written exactly as Prometheus defines") {
  paged_stats stats{.tokens = 24, .table_blocks = 2, .allocations = 12, .evicting_allocations = 5};
  cache_histograms histograms;
  for (const std::uint64_t each : {1'000U, 1'500U, 30'000U})
    histograms.lifetime.add(each);
  histograms.lifetime.add(6'000'000'000);
  const std::array labels{prometheus_label{"engine", "0"}};
  const std::string page = page_of(stats, histograms, labels);
  CHECK(family(page, "llmmem_kv_allocations_from_free_total") ==
        "# HELP llmmem_kv_allocations_from_free_total Allocated blocks that were free.\n# TYPE "
        "llmmem_kv_allocations_from_free_total counter\nllmmem_kv_allocations_from_free_total{engine=\"0\"} "
        "7\n");
  CHECK(family(page, "llmmem_kv_token_occupancy") ==
        "# HELP llmmem_kv_token_occupancy Share of the slots in block tables that hold a token.\n"
        "# TYPE llmmem_kv_token_occupancy gauge\n"
        "llmmem_kv_token_occupancy{engine=\"0\"} 0.75\n");
  std::string expected =
      "# HELP llmmem_kv_block_lifetime_seconds From being stored to being dropped, sampled.\n# TYPE "
      "llmmem_kv_block_lifetime_seconds histogram\n";
  const std::array<std::string_view, 21> bounds{"0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1",
                                                "0.2",   "0.5",   "1",     "2",    "5",    "10",   "20",
                                                "50",    "100",   "200",   "500",  "1000", "2000", "5000"};
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    expected += "llmmem_kv_block_lifetime_seconds_bucket{engine=\"0\",le=\"" + std::string(bounds[i]) +
                "\"} " +
                (i == 0  ? "1"
                 : i < 5 ? "2"
                         : "3") +
                "\n";
  }
  expected +=
      "llmmem_kv_block_lifetime_seconds_bucket{engine=\"0\",le=\"+Inf\"} 4\n"
      "llmmem_kv_block_lifetime_seconds_sum{engine=\"0\"} 6000.0325\n"
      "llmmem_kv_block_lifetime_seconds_count{engine=\"0\"} 4\n";
  CHECK(family(page, "llmmem_kv_block_lifetime_seconds") == expected);
}

TEST_CASE("without labels there are no braces except for le") {
  const std::string page = page_of({}, {});
  CHECK(page.starts_with(
      "# HELP llmmem_kv_blocks Usable blocks.\n# TYPE llmmem_kv_blocks gauge\nllmmem_kv_blocks 0\n"));
  CHECK(page.find("llmmem_kv_block_idle_before_evict_seconds_bucket{le=\"0.001\"} 0\n") != page.npos);
  CHECK(page.find("llmmem_kv_block_idle_before_evict_seconds_sum 0\n") != page.npos);
}

TEST_CASE("a strict reader reads any label value back") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::string value;
    for (std::uint64_t i = random.below(std::uint64_t{12}); i > 0; --i)
      value += "a\"\\\n{},= "[random.below(std::uint64_t{9})];
    const std::array labels{prometheus_label{"model", value}, prometheus_label{"_r2", "x"}};
    const exposition page(page_of({.blocks = seed}, {}, labels));
    const exposed_sample& sample = page.families().at("llmmem_kv_blocks").samples.at(0);
    CHECK(sample.labels == label_map{{"model", value}, {"_r2", "x"}});
    CHECK(sample.value == static_cast<double>(seed));
  }
}

TEST_CASE("pages of a live cache are well-formed, and their counters and buckets never decrease") {
  struct measured : paged_traits {
    using observer = cache_metrics<>;
  };
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    paged_allocator<measured> cache({.blocks = 10, .block_tokens = 16}, cache_metrics<>({.blocks = 10}));
    std::map<std::string, double> last;
    for (int i = 0; i < 60; ++i) {
      cache.observer().clock().set(static_cast<std::uint64_t>(i) * 40'000);
      std::vector<token_id> prompt(random.below(std::uint64_t{120}), random.once_in(3) ? 1 : 2);
      const auto sequence = cache.create().value();
      const auto hit = cache.match(sequence, prompt).value();
      cache.append(sequence, std::span(prompt).subspan(hit.tokens)).value();
      cache.commit(sequence).value();
      cache.release(sequence).value();
      if (random.once_in(9)) cache.drop_idle();

      const exposition page(page_of(cache.stats(), cache.observer().histograms()));
      for (const auto& [name, shown] : page.families()) {
        if (shown.type == "gauge") continue;
        for (const exposed_sample& each : shown.samples) {
          const auto le = each.labels.find("le");
          double& before = last[each.name + (le == each.labels.end() ? "" : le->second)];
          CHECK(each.value >= before);
          before = each.value;
        }
      }
    }
    CHECK(last.at("llmmem_kv_match_returned_blocks_total") > 0);
    CHECK(last.at("llmmem_kv_block_reuse_gap_seconds_count") > 0);
  }
}

TEST_CASE("a cache without metrics is written without histograms") {
  std::string page;
  write_prometheus(paged_stats{}, 16, {}, [&](std::string_view text) { page += text; });
  CHECK(exposition(page).families().size() == 24);
  CHECK(page.find("histogram") == page.npos);
}

TEST_CASE("label names that Prometheus refuses are refused before anything is written") {
  const auto with = [](std::span<const prometheus_label> labels) {
    write_prometheus(paged_stats{}, 16, labels, [](std::string_view) { FAIL("something was written"); });
  };
  const std::string rules =
      "\"; a name has letters, digits and _, does not begin with a digit or __, and is not le";
  for (const std::string name : {"", "2a", "a-b", "__name__", "le", "\xc3\xa9"}) {
    CAPTURE(name);
    const std::array labels{prometheus_label{name, "x"}};
    const std::string text = "write_prometheus: label name \"" + name + rules;
    CHECK_THROWS_WITH_AS(with(labels), text.c_str(), argument_error);
  }
  const std::array twice{prometheus_label{"a", "1"}, prometheus_label{"a", "2"}};
  CHECK_THROWS_WITH_AS(with(twice), "write_prometheus: label name \"a\" is given twice", argument_error);
}

TEST_CASE("a page is written without allocations") {
  std::uint64_t bytes = 0;
  const std::array labels{prometheus_label{"engine", "\n"}};
  const std::uint64_t before = heap_allocations();
  write_prometheus(paged_stats{}, 16, cache_histograms{}, labels,
                   [&](std::string_view text) { bytes += text.size(); });
  CHECK(heap_allocations() == before);
  CHECK(bytes > 5'000);
}
