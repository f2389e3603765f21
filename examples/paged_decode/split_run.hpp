/// @file
/// Runs requests over a contiguous cache, and over one that is split between a device and the host.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/text.hpp"
#include "paged_decode/comparison.hpp"
#include "paged_decode/latent_run.hpp"
#include "paged_decode/split_cache.hpp"

namespace paged_decode {

struct split_experiment {
  std::uint32_t device_threads = 1;
  std::uint32_t host_threads = 1;
  std::uint64_t device_blocks = 0;  ///< 0: half of what all sequences take without sharing
};

struct split_finding {
  service_result contiguous{};
  service_result split{};
  split_counts counts{};
  std::uint64_t device_blocks = 0;
  std::uint64_t most_device_blocks = 0;  ///< in use at once
  std::uint64_t most_host_blocks = 0;

  [[nodiscard]] bool is_identical() const { return split.digest() == contiguous.digest(); }
};

/// Runs the requests with a model, of which `contiguous` keeps everything in one place.
template <decoder_model Model>
[[nodiscard]] split_finding compare_split_of(const experiment& what, const split_experiment& asked,
                                             const Model& made, contiguous_cache contiguous) {
  split_finding out;
  out.contiguous = service(made, contiguous, what.plan).run();

  const paged_config how = what.large_enough();
  const std::uint64_t each = (what.plan.most_tokens() + how.block_tokens - 1) / how.block_tokens;
  out.device_blocks =
      asked.device_blocks != 0 ? asked.device_blocks : std::max<std::uint64_t>(how.blocks / 2, 1);
  split_config split{.device_threads = asked.device_threads,
                     .host_threads = asked.host_threads,
                     .device_blocks = out.device_blocks};
  for (std::uint32_t request = 0; request < what.plan.requests; ++request)
    split.sequence_blocks.push_back(each * what.plan.samples_of(request));
  host_place device_place;
  host_place place;
  split_cache cache(what.shape, how, split, device_place, place);
  out.split = service(made, cache, what.plan).run();
  out.counts = cache.counts();
  for (const llmmem::decode_side side : {llmmem::decode_side::device, llmmem::decode_side::host}) {
    const auto& part = cache.part(side);
    (side == llmmem::decode_side::device ? out.most_device_blocks : out.most_host_blocks) =
        part.counts().block_capacity;
    if (const auto wrong = part.allocator().audit(); !wrong.empty())
      throw llmmem::error("paged_decode: the allocator's audit says: " + wrong.front());
  }
  return out;
}

/// With a `latent_model` if the cache keeps records of latents.
[[nodiscard]] inline split_finding compare_split(const experiment& what, const split_experiment& asked) {
  const std::uint64_t most = what.most_tokens();
  if (const auto& record = what.cache.record) {
    return compare_split_of(what, asked, latent_model(what.shape, most, what.plan.seed),
                            contiguous_cache(what.shape, *record, most));
  }
  return compare_split_of(what, asked, model(what.shape, most, what.plan.seed),
                          contiguous_cache(what.shape, what.cache.form, most));
}

[[nodiscard]] inline std::string to_report(const split_experiment& asked, const experiment& what,
                                           const split_finding& found) {
  const split_counts& of = found.counts;
  const auto milliseconds = [](std::uint64_t ns) { return static_cast<double>(ns) / 1e6; };
  return fmt::format(
      "{} tokens in {} answers, keys and values in {}, split between a device of {} threads and {} blocks "
      "and a "
      "host of {} threads\n"
      "  contiguous cache   digest {:016x}, {} steps\n"
      "  split cache        digest {:016x}, {} steps\n"
      "  {}\n"
      "  device             {} sequences in all steps, {} tokens attended to, {} blocks at most\n"
      "  host               {} sequences in all steps, {} tokens attended to, {} blocks at most\n"
      "  link               {} of queries, keys, values and results\n"
      "  attention          {:.1f} ms predicted from the steps before, {:.1f} ms measured\n",
      found.split.answer_tokens(what.plan), found.split.transcripts.size(), name_of(what.cache),
      asked.device_threads, found.device_blocks, asked.host_threads, found.contiguous.digest(),
      found.contiguous.steps, found.split.digest(), found.split.steps,
      found.is_identical() ? "identical: every token, every bit of every logit" : "NOT IDENTICAL",
      example::grouped(of.sequences[0]), example::grouped(of.tokens[0]), found.most_device_blocks,
      example::grouped(of.sequences[1]), example::grouped(of.tokens[1]), found.most_host_blocks,
      example::bytes_text(static_cast<double>(of.link_bytes)), milliseconds(of.predicted_ns),
      milliseconds(of.measured_ns));
}

[[nodiscard]] inline std::string to_json(const split_experiment& asked, const experiment& what,
                                         const split_finding& found) {
  const split_counts& of = found.counts;
  return fmt::format(
      R"({{"identical": {}, "tokens": {}, "kv": "{}", "contiguous_digest": "{:016x}", "digest": "{:016x}", )"
      R"("contiguous_steps": {}, "steps": {}, "device_threads": {}, "host_threads": {}, "device_blocks": {}, )"
      R"("most_device_blocks": {}, "most_host_blocks": {}, "device_sequences": {}, "host_sequences": {}, )"
      R"("device_tokens": {}, "host_tokens": {}, "link_bytes": {}, "predicted_ns": {}, "measured_ns": {}}})"
      "\n",
      found.is_identical(), found.split.answer_tokens(what.plan), name_of(what.cache),
      found.contiguous.digest(), found.split.digest(), found.contiguous.steps, found.split.steps,
      asked.device_threads, asked.host_threads, found.device_blocks, found.most_device_blocks,
      found.most_host_blocks, of.sequences[0], of.sequences[1], of.tokens[0], of.tokens[1], of.link_bytes,
      of.predicted_ns, of.measured_ns);
}

}  // namespace paged_decode
