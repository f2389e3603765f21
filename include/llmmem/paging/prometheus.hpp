/// @file
/// Writes a paged cache's statistics in Prometheus' text exposition format, 0.0.4.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/cache_metrics.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// A label of every sample: `engine="0"`. The value may hold any UTF-8.
struct prometheus_label {
  std::string_view name;
  std::string_view value;
};

/// The destination of `write_prometheus`: called with pieces of the text, in order.
template <class S>
concept text_sink = std::is_invocable_v<S&, std::string_view>;

/// The media type of the text, for the HTTP response.
inline constexpr std::string_view prometheus_content_type = "text/plain; version=0.0.4; charset=utf-8";

namespace detail {

/// Writes families of samples with the same labels. Formats numbers on the stack.
template <text_sink Sink>
class prometheus_writer {
 public:
  prometheus_writer(std::span<const prometheus_label> labels, Sink& sink) noexcept
      : labels_(labels), sink_(&sink) {}

  void counter(std::string_view name, std::string_view help, std::uint64_t value) {
    family(name, help, "counter");
    sample(name, "", value);
  }
  template <class Number>
  void gauge(std::string_view name, std::string_view help, Number value) {
    family(name, help, "gauge");
    sample(name, "", value);
  }
  void histogram(std::string_view name, std::string_view help, const duration_histogram& of) {
    family(name, help, "histogram");
    std::uint64_t below = 0;
    for (std::size_t i = 0; i < of.bounds.size(); ++i) {
      below += of.counts[i];
      std::array<char, 32> bound{};
      sample(name, "_bucket", below, format(bound, seconds(of.bounds[i])));
    }
    sample(name, "_bucket", of.count(), "+Inf");
    sample(name, "_sum", seconds(of.sum));
    sample(name, "_count", of.count());
  }

 private:
  [[nodiscard]] static double seconds(std::uint64_t microseconds) noexcept {
    return static_cast<double>(microseconds) / 1e6;
  }
  template <class Number>
  [[nodiscard]] static std::string_view format(std::array<char, 32>& digits, Number value) noexcept {
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    return {digits.data(), static_cast<std::size_t>(end - digits.data())};
  }

  void put(std::string_view text) { (*sink_)(text); }

  void family(std::string_view name, std::string_view help, std::string_view type) {
    for (const std::string_view part :
         {std::string_view("# HELP "), name, std::string_view(" "), help, std::string_view("\n# TYPE "), name,
          std::string_view(" "), type, std::string_view("\n")})
      put(part);
  }

  template <class Number>
  void sample(std::string_view name, std::string_view suffix, Number value, std::string_view bound = {}) {
    put(name);
    put(suffix);
    std::string_view before = "{";
    for (const prometheus_label& label : labels_) {
      put(before);
      put(label.name);
      put("=\"");
      escaped(label.value);
      put("\"");
      before = ",";
    }
    if (!bound.empty()) {
      put(before);
      put("le=\"");
      put(bound);
      put("\"");
      before = ",";
    }
    put(before == "," ? "} " : " ");
    std::array<char, 32> number{};
    put(format(number, value));
    put("\n");
  }

  void escaped(std::string_view value) {
    for (std::size_t at; (at = value.find_first_of("\\\"\n")) != value.npos; value.remove_prefix(at + 1)) {
      put(value.substr(0, at));
      put(value[at] == '\\' ? "\\\\" : value[at] == '"' ? "\\\"" : "\\n");
    }
    put(value);
  }

  std::span<const prometheus_label> labels_;
  Sink* sink_;
};

inline void check_labels(std::span<const prometheus_label> labels) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const std::string_view name = labels[i].name;
    bool good = !name.empty() && is_letter(name[0]) && !name.starts_with("__") && name != "le";
    for (const char c : name)
      good = good && (is_letter(c) || (c >= '0' && c <= '9'));
    if (!good) {
      throw argument_error(
          "write_prometheus: label name \"" + std::string(name) +
          "\"; a name has letters, digits and _, does not begin with a digit or __, and is not le");
    }
    for (std::size_t k = 0; k < i; ++k) {
      if (labels[k].name == name) {
        throw argument_error("write_prometheus: label name \"" + std::string(name) + "\" is given twice");
      }
    }
  }
}

template <text_sink Sink>
void write_stats(const paged_stats& stats, std::uint32_t block_tokens, prometheus_writer<Sink>& out) {
  out.gauge("llmmem_kv_blocks", "Usable blocks.", stats.blocks);
  out.gauge("llmmem_kv_active_blocks", "Blocks held by sequences or waiting for a fence.",
            stats.active_blocks);
  out.gauge("llmmem_kv_idle_blocks", "Blocks that are not in use and keep their contents.",
            stats.idle_blocks);
  out.gauge("llmmem_kv_free_blocks", "Blocks that hold nothing.", stats.free_blocks);
  out.gauge("llmmem_kv_retiring_blocks", "Blocks in use above the end of a pool that was shrunk.",
            stats.retiring_blocks);
  out.gauge("llmmem_kv_cached_blocks", "Blocks that a match can find.", stats.cached_blocks);
  out.gauge("llmmem_kv_deferred_references", "References that wait for a fence.", stats.deferred);
  out.gauge("llmmem_kv_sequences", "Sequences alive.", stats.sequences);
  out.gauge("llmmem_kv_tokens", "Tokens of living sequences; a shared token counts once per sequence.",
            stats.tokens);
  out.gauge("llmmem_kv_token_occupancy", "Share of the slots in block tables that hold a token.",
            stats.token_occupancy(block_tokens));

  out.counter("llmmem_kv_allocations_total", "Blocks allocated.", stats.allocations);
  out.counter("llmmem_kv_allocations_from_free_total", "Allocated blocks that were free.",
              stats.allocations - stats.evicting_allocations);
  out.counter("llmmem_kv_allocations_from_evict_total", "Allocated blocks that had to be evicted first.",
              stats.evicting_allocations);
  out.counter("llmmem_kv_evictions_total", "Blocks whose contents were dropped to make space.",
              stats.evictions);
  out.counter("llmmem_kv_registrations_total", "Blocks that became cached.", stats.registrations);
  out.counter("llmmem_kv_duplicates_total", "Commits that found equal contents already cached.",
              stats.duplicates);
  out.counter("llmmem_kv_deduplicated_total", "Blocks released in favour of equal cached ones.",
              stats.deduplicated);
  out.counter("llmmem_kv_replaced_total", "Cached blocks replaced by others with the same key.",
              stats.replaced);
  out.counter("llmmem_kv_refused_total", "Blocks that the admission policy refused.", stats.refused);
  out.counter("llmmem_kv_copies_total", "Copies on write.", stats.copies);
  out.counter("llmmem_kv_matches_total", "Calls of match.", stats.matches);
  out.counter("llmmem_kv_match_requested_blocks_total", "Blocks that matches looked for.",
              stats.requested_blocks);
  out.counter("llmmem_kv_match_returned_blocks_total", "Blocks that matches shared.", stats.hit_blocks);
  out.counter("llmmem_kv_match_returned_tokens_total", "Tokens that matches shared.", stats.hit_tokens);
}

}  // namespace detail

/// Writes `stats` as gauges and counters.
///
/// Counters never go back while the cache lives. Requested and returned blocks are separate counters, so a
/// hit ratio over any time can be computed: `rate(..._returned_blocks_total[5m]) /
/// rate(..._requested_blocks_total[5m])`.
///
///     std::string page;
///     write_prometheus(cache.stats(), cache.block_tokens(), labels,
///                      [&](std::string_view text) { page += text; });
///
/// @param block_tokens  of the cache, for its token occupancy.
/// @param labels  added to every sample, for a process that serves several caches: `{{"engine", "0"}}`.
/// @param sink  called with pieces of the text.
/// @par Errors   `argument_error` for a label name that Prometheus refuses, before anything is written; what
///   the sink throws.
template <text_sink Sink>
void write_prometheus(const paged_stats& stats, std::uint32_t block_tokens,
                      std::span<const prometheus_label> labels, Sink&& sink) {
  detail::check_labels(labels);
  detail::prometheus_writer<std::remove_reference_t<Sink>> out(labels, sink);
  detail::write_stats(stats, block_tokens, out);
}

/// Writes the same, and the measurements of a `cache_metrics` in seconds.
template <text_sink Sink>
void write_prometheus(const paged_stats& stats, std::uint32_t block_tokens,
                      const cache_histograms& histograms, std::span<const prometheus_label> labels,
                      Sink&& sink) {
  detail::check_labels(labels);
  detail::prometheus_writer<std::remove_reference_t<Sink>> out(labels, sink);
  detail::write_stats(stats, block_tokens, out);
  out.histogram("llmmem_kv_block_lifetime_seconds", "From being stored to being dropped, sampled.",
                histograms.lifetime);
  out.histogram("llmmem_kv_block_residency_seconds", "From being stored to the last use, sampled.",
                histograms.residency);
  out.histogram("llmmem_kv_block_idle_before_evict_seconds", "From the last use to being dropped, sampled.",
                histograms.idle);
  out.histogram("llmmem_kv_block_reuse_gap_seconds", "From one use to the next, sampled.",
                histograms.reuse_gap);
  out.gauge("llmmem_kv_block_sample_one_in", "One of so many blocks is measured.", histograms.sample_one_in);
}

}  // namespace v0
}  // namespace llmmem
