/// The settings of training memory in every combination: one digest, and the bytes that the library predicts.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "refit/application.hpp"
#include "refit/saved_run.hpp"
#include "support/program_run.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"
#include "train_gpt/application.hpp"

using namespace train_gpt;
using namespace llmmem_tests;

namespace {

using arguments = std::vector<std::string>;

/// One setting and its values; the first of each is what a run has without it.
struct feature {
  const char* name;
  std::vector<arguments> values;
};

const std::vector<feature>& features() {
  static const std::vector<feature> all{
      {"parallel",
       {{"--parallel", "data"}, {"--parallel", "zero1"}, {"--parallel", "zero2"}, {"--parallel", "zero3"}}},
      {"memory",
       {{},
        {"--memory", "tiered", "--budget-mib", "1"},
        {"--memory", "tiered", "--budget-mib", "1", "--host-mib", "1", "--schedule", "lookahead"},
        {"--memory", "tiered", "--budget-mib", "1", "--schedule", "on_demand"}}},
      {"recompute",
       {{}, {"--recompute", "selective"}, {"--recompute", "full"}, {"--recompute", "budget:120000"}}},
      {"gather_ahead", {{}, {"--gather-ahead", "1"}}},
      {"update", {{}, {"--update", "after_backward"}}},
      {"save", {{}, {"--checkpoint-every", "1"}}},
      {"ranks", {{"--ranks", "2"}, {"--ranks", "1"}, {"--ranks", "3"}}},
      {"optimizer", {{}, {"--optimizer", "sgd"}, {"--optimizer", "adafactor"}}},
      {"wire",
       {{},
        {"--wire", "bf16"},
        {"--wire", "int8", "--node-ranks", "1"},
        {"--wire", "zeropp", "--node-ranks", "1"}}},
      {"clip", {{}, {"--clip-norm", "0.25"}}},
      {"scale", {{}, {"--loss-scale", "1024", "--loss-scale-interval", "1"}}},
      {"sums", {{}, {"--sums-in-flight", "1"}, {"--sums-in-flight", "3"}}},
      {"apart",
       {{},
        {"--workers", "3", "--local-steps", "1", "--outer", "sgd"},
        {"--workers", "2", "--local-steps", "2"}}},
      {"tiles", {{}, {"--tiles", "2"}, {"--tiles", "5"}}},
  };
  return all;
}
constexpr std::size_t parallel = 0, gather_ahead = 3, save = 5, ranks = 6, optimizer = 7, wire = 8, clip = 9,
                      apart = 12, tiles = 13;

/// Which value of each feature.
using combination = std::vector<std::size_t>;

/// Gathers ahead are of weights in shards, all ranks must divide the batch of 6, and Adafactor works on whole
/// matrices.
bool is_refused(std::size_t a, std::size_t value_of_a, std::size_t b, std::size_t value_of_b) {
  if (a == parallel && b == gather_ahead) return value_of_b != 0 && value_of_a != 3;
  if (a == optimizer && b == tiles) return value_of_a == 2 && value_of_b != 0;
  if (a != ranks || b != apart) return false;
  return (value_of_a == 2 && value_of_b == 1) || (value_of_a == 0 && value_of_b == 2);
}
bool is_allowed(const combination& of) {
  return !is_refused(parallel, of[parallel], gather_ahead, of[gather_ahead]) &&
         !is_refused(ranks, of[ranks], apart, of[apart]) &&
         !is_refused(optimizer, of[optimizer], tiles, of[tiles]);
}

arguments arguments_of(const combination& of, const std::string& folder) {
  arguments all;
  for (std::size_t i = 0; i < of.size(); ++i) {
    const arguments& more = features()[i].values[of[i]];
    all.insert(all.end(), more.begin(), more.end());
  }
  if (of[save] != 0) all.insert(all.end(), {"--checkpoint-dir", folder});
  return all;
}

outcome run(const arguments& more, std::uint64_t steps) {
  arguments all{
      "--layers", "2",       "--width", "12",        "--heads", "2",      "--context",
      "7",        "--batch", "6",       "--threads", "1",       "--text", LLMMEM_SOURCE_DIR "/README.md",
      "--json"};
  all.insert(all.end(), {"--steps", std::to_string(steps)});
  all.insert(all.end(), more.begin(), more.end());
  return run_captured([&](std::FILE* out, std::FILE* notes) { return run_application(all, out, notes); });
}

nlohmann::json json_of(const arguments& more, std::uint64_t steps = 2) {
  std::string told;
  for (const std::string& each : more)
    told += each + " ";
  CAPTURE(told);
  const outcome done = run(more, steps);
  REQUIRE_MESSAGE(done.status == exit_status::success, done.notes);
  return nlohmann::json::parse(done.out);
}

/// Each term that was predicted is what was measured, to the byte, or the bound that it is said to be.
void check_predicted(const nlohmann::json& measured) {
  const nlohmann::json& predicted = measured["predicted"];
  const auto is_bound = [&](const char* term) {
    const auto& bounds = predicted["bounds"];
    return std::find(bounds.begin(), bounds.end(), term) != bounds.end();
  };
  for (const char* const term :
       {"kept_state_bytes", "peak_state_bytes", "peak_record_bytes", "peak_bytes", "bytes_sent"}) {
    CAPTURE(term);
    if (is_bound(term)) {
      CHECK(measured[term] <= predicted[term]);
    } else {
      CHECK(measured[term] == predicted[term]);
    }
  }
  const std::size_t tiers = measured["tier_peak_bytes"].size();
  REQUIRE(predicted["tier_peak_bytes"].size() == tiers);
  for (std::size_t i = 0; i < tiers; ++i) {
    CAPTURE(i);
    if (i + 1 == tiers) {
      CHECK(measured["tier_peak_bytes"][i] == predicted["tier_peak_bytes"][i]);
    } else {
      CHECK(measured["tier_peak_bytes"][i] <= predicted["tier_peak_bytes"][i]);
    }
  }
}

/// The losses and the digest of as many ranks and workers, with the same optimizer and clipping, that keep
/// everything in plain memory. A loss scale that is a power of two changes no bits. A wire that loses
/// something has the bits of its own sums: with plain data parallelism their owners' sums are rounded too,
/// and with sharded weights these are; the groups of a wire are those of a tile.
const nlohmann::json& plain(const combination& of) {
  static std::map<std::vector<std::size_t>, nlohmann::json> known;
  const bool is_lossy = of[wire] != 0 && features()[ranks].values[of[ranks]].back() != "1";
  const std::size_t kind = !is_lossy ? 0 : of[parallel] == 0 ? 1 : of[parallel] == 3 ? 3 : 2;
  const std::vector key{of[ranks], of[optimizer], is_lossy ? of[wire] : 0, kind,
                        of[clip],  of[apart],     is_lossy ? of[tiles] : 0};
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  arguments all = features()[ranks].values[of[ranks]];
  const auto add = [&](const arguments& more) { all.insert(all.end(), more.begin(), more.end()); };
  add(features()[optimizer].values[of[optimizer]]);
  add(features()[clip].values[of[clip]]);
  add(features()[apart].values[of[apart]]);
  if (is_lossy) {
    add(features()[wire].values[of[wire]]);
    add(features()[tiles].values[of[tiles]]);
    if (kind > 1) add({"--parallel", kind == 2 ? "zero1" : "zero3"});
  }
  return known[key] = json_of(all);
}

void check(const combination& of) {
  const temporary_folder folder;
  const nlohmann::json json = json_of(arguments_of(of, folder.file("checkpoints")));
  CHECK(json["digest"] == plain(of)["digest"]);
  CHECK(json["losses"] == plain(of)["losses"]);
  for (const nlohmann::json& each : json["ranks"])
    check_predicted(each);
}

}  // namespace

TEST_CASE("every pair of settings trains to the same digest, and takes the predicted bytes") {
  // Each pair of values is in some combination: the next is the one with the most pairs that were in none.
  std::vector<std::pair<std::pair<std::size_t, std::size_t>, std::pair<std::size_t, std::size_t>>> missing;
  for (std::size_t a = 0; a < features().size(); ++a) {
    for (std::size_t b = a + 1; b < features().size(); ++b) {
      for (std::size_t va = 0; va < features()[a].values.size(); ++va) {
        for (std::size_t vb = 0; vb < features()[b].values.size(); ++vb) {
          if (!is_refused(a, va, b, vb)) missing.push_back({{a, va}, {b, vb}});
        }
      }
    }
  }
  const auto covers = [](const combination& of, const auto& pair) {
    return of[pair.first.first] == pair.first.second && of[pair.second.first] == pair.second.second;
  };
  random_numbers random(1);
  std::size_t runs = 0;
  while (!missing.empty()) {
    combination best;
    std::size_t most = 0;
    for (int tries = 0; tries < 60; ++tries) {
      combination of;
      for (const feature& each : features())
        of.push_back(random.below(static_cast<std::uint32_t>(each.values.size())));
      const auto& [first, second] = missing.front();
      of[first.first] = first.second;
      of[second.first] = second.second;
      if (!is_allowed(of)) continue;
      const auto count = static_cast<std::size_t>(
          std::count_if(missing.begin(), missing.end(), [&](const auto& pair) { return covers(of, pair); }));
      if (count > most) {
        most = count;
        best = of;
      }
    }
    REQUIRE(most != 0);
    check(best);
    std::erase_if(missing, [&](const auto& pair) { return covers(best, pair); });
    ++runs;
  }
  MESSAGE(runs << " combinations");
}

TEST_CASE("random settings train to the same digest, and take the predicted bytes") {
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    random_numbers random(seed + 100);
    combination of;
    do {
      of.clear();
      for (const feature& each : features())
        of.push_back(random.below(static_cast<std::uint32_t>(each.values.size())));
    } while (!is_allowed(of));
    check(of);
  }
}

TEST_CASE("settings in small tiers run, or are refused before the first step with the bytes they need") {
  const auto runs = [](const arguments& all) {
    std::string told;
    for (const std::string& each : all)
      told += each + " ";
    CAPTURE(told);
    const outcome done = run(all, 2);
    if (done.status == exit_status::success) {
      for (const nlohmann::json& each : nlohmann::json::parse(done.out)["ranks"])
        check_predicted(each);
      return true;
    }
    const bool is_said = done.notes.find("at once, in pages of 16384") != done.notes.npos ||
                         done.notes.find("the largest chunk takes") != done.notes.npos ||
                         done.notes.find("raise --host-mib to") != done.notes.npos;
    CHECK_MESSAGE(is_said, done.notes);
    CHECK(done.notes.find("step 0/") == done.notes.npos);
    return false;
  };
  // Tiles of 1 KiB, which take pages of 16 KiB, and stay from their last forward use to their backward use.
  CHECK(runs({"--ranks", "1", "--parallel", "zero3", "--tiles", "8", "--gather-ahead", "1", "--memory",
              "tiered", "--budget-mib", "1"}));
  CHECK_FALSE(runs({"--ranks", "1", "--width", "96", "--memory", "tiered", "--budget-mib", "1"}));
  CHECK_FALSE(runs({"--ranks", "1", "--width", "48", "--context", "64", "--memory", "tiered", "--budget-mib",
                    "3", "--host-mib", "1"}));
  for (const auto seed : seeds(5)) {
    CAPTURE(seed);
    random_numbers random(seed + 200);
    const auto one_of = [&](const arguments& values) {
      return values[random.below(static_cast<std::uint32_t>(values.size()))];
    };
    arguments all{"--memory",     "tiered",
                  "--budget-mib", "1",
                  "--schedule",   one_of({"on_demand", "lookahead", "next_use"}),
                  "--width",      one_of({"12", "16", "32"}),
                  "--context",    one_of({"7", "16", "33"}),
                  "--recompute",  one_of({"none", "selective", "full"}),
                  "--ranks",      one_of({"1", "2", "3"}),
                  "--parallel",   one_of({"zero1", "zero3"})};
    if (all.back() == "zero3") all.insert(all.end(), {"--gather-ahead", one_of({"1", "2", "5"})});
    if (random.once_in(3)) all.insert(all.end(), {"--host-mib", "1"});
    all.insert(all.end(), {"--tiles", one_of({"0", "3", "8", "12"})});
    static_cast<void>(runs(all));
  }
}

TEST_CASE("the bytes are also as predicted for ranges of whole pages") {
  const arguments large{"--width", "128", "--layers", "3", "--batch", "2"};
  for (const arguments& more : std::vector<arguments>{{},
                                                      {"--recompute", "full"},
                                                      {"--ranks", "2", "--parallel", "zero1"},
                                                      {"--tiles", "3"},
                                                      {"--ranks", "2", "--parallel", "zero3"}}) {
    arguments all = large;
    all.insert(all.end(), more.begin(), more.end());
    const nlohmann::json json = json_of(all, 1);
    for (const nlohmann::json& each : json.value("ranks", nlohmann::json::array()))
      check_predicted(each);
    if (!json.contains("ranks")) CHECK(json["peak_resident_bytes"] == json["predicted"]["peak_bytes"]);
  }
}

TEST_CASE("the peak is also as predicted without ranks") {
  const nlohmann::json reference = json_of({});
  for (const arguments& memory : features()[1].values) {
    for (const arguments& again : features()[2].values) {
      arguments all = memory;
      all.insert(all.end(), again.begin(), again.end());
      if (again == features()[2].values[memory.size() % 3]) all.insert(all.end(), {"--tiles", "3"});
      const nlohmann::json json = json_of(all);
      CHECK(json["digest"] == reference["digest"]);
      CHECK(json["losses"] == reference["losses"]);
      const nlohmann::json& predicted = json["predicted"];
      if (memory.empty()) {
        CHECK(json["peak_resident_bytes"] == predicted["peak_bytes"]);
        CHECK(predicted["bounds"].empty());
      } else {
        CHECK(json["peak_resident_bytes"] <= predicted["peak_bytes"]);
      }
    }
  }
}

TEST_CASE(
    "a run resumes from a checkpoint of any settings with any others, to bits that depend only on the "
    "ranks") {
  constexpr std::uint64_t first = 2;
  constexpr std::uint64_t all = 4;
  const std::vector<arguments> settings{
      {"--ranks", "2"},
      {"--ranks", "2", "--parallel", "zero3", "--memory", "tiered", "--budget-mib", "1", "--recompute",
       "full"},
      {"--ranks", "2", "--parallel", "zero1", "--memory", "tiered", "--budget-mib", "1", "--schedule",
       "on_demand", "--tiles", "5"},
      {"--ranks", "3", "--parallel", "zero3", "--gather-ahead", "1"},
      {"--ranks", "3", "--parallel", "zero2", "--memory", "tiered", "--budget-mib", "1", "--schedule",
       "on_demand"},
      {},
      {"--memory", "tiered", "--budget-mib", "1", "--recompute", "selective", "--schedule", "on_demand"},
      {"--ranks", "1", "--parallel", "zero2", "--tiles", "3"}};
  const auto ranks_of = [](const arguments& of) {
    return of.empty() || of[0] != "--ranks" ? std::string("1") : of[1];
  };
  std::map<std::pair<std::string, std::string>, nlohmann::json> seen;  // by the ranks before and after
  for (const arguments& before : settings) {
    const temporary_folder folder;
    const auto with = [&](arguments of, const std::string& name) {
      of.insert(of.end(), {"--checkpoint-dir", folder.file(name), "--checkpoint-every", "1", "--resume"});
      return of;
    };
    static_cast<void>(json_of(with(before, "saved"), first));
    for (const arguments& after : settings) {
      std::filesystem::remove_all(folder.file("copy"));
      std::filesystem::copy(folder.file("saved"), folder.file("copy"),
                            std::filesystem::copy_options::recursive);
      const nlohmann::json json = json_of(with(after, "copy"), all);
      CHECK(json["losses"].size() == all + 1);
      for (const nlohmann::json& each : json.value("ranks", nlohmann::json::array()))
        check_predicted(each);
      const auto key = std::pair(ranks_of(before), ranks_of(after));
      const auto [found, is_new] = seen.try_emplace(key, json);
      CHECK(json["digest"] == found->second["digest"]);
      CHECK(json["losses"] == found->second["losses"]);
      if (!is_new || key.first != key.second) continue;
      arguments whole;  // the same number of ranks: that is the run that was never stopped
      if (key.first != "1") whole = {"--ranks", key.first};
      const nlohmann::json uninterrupted = json_of(whole, all);
      CHECK(json["digest"] == uninterrupted["digest"]);
      CHECK(json["losses"] == uninterrupted["losses"]);
    }
  }
}

TEST_CASE("runs with other optimizers resume from their checkpoints to the same bits, and not from AdamW's") {
  for (const std::string optimizer : {"sgd", "adafactor", "muon"}) {
    CAPTURE(optimizer);
    const temporary_folder folder;
    const arguments saved{"--optimizer",        optimizer, "--checkpoint-dir", folder.file("saved"),
                          "--checkpoint-every", "1",       "--resume"};
    static_cast<void>(json_of(saved, 1));
    arguments in_shards = saved;
    in_shards.insert(in_shards.end(), {"--ranks", "1", "--parallel", optimizer == "muon" ? "data" : "zero3",
                                       "--memory", "tiered", "--budget-mib", "1", "--schedule", "on_demand"});
    const nlohmann::json json = json_of(in_shards, 3);
    CHECK(json["digest"] == json_of({"--optimizer", optimizer}, 3)["digest"]);
    CHECK(json["digest"] != json_of({}, 3)["digest"]);
    const outcome other = run({"--checkpoint-dir", folder.file("saved"), "--resume"}, 3);
    CHECK(other.status == exit_status::wrong_usage);
    CHECK(other.notes.find("optimizer " + optimizer) != other.notes.npos);
  }
}

TEST_CASE(
    "workers that train apart resume in their second round and before it, with other settings, to the same "
    "bits") {
  const auto with = [](const std::string& of_worker, const arguments& more, std::uint64_t steps) {
    arguments all{"--workers", "2", "--local-steps", "3", "--ranks", of_worker, "--batch", "4"};
    all.insert(all.end(), more.begin(), more.end());
    const nlohmann::json json = json_of(all, steps);
    for (const nlohmann::json& each : json["ranks"])
      check_predicted(each);
    return json;
  };
  const std::vector<arguments> settings{{"--optimizer", "muon"},
                                        {"--parallel", "zero1", "--tiles", "2"},
                                        {"--parallel", "zero3", "--memory", "tiered", "--budget-mib", "1",
                                         "--schedule", "on_demand", "--loss-scale", "64"}};
  for (const arguments& before : settings) {
    const std::string of_worker = before == settings.front() ? "1" : "2";
    const arguments& after = before == settings.front() ? before
                             : before == settings[1]    ? settings[2]
                                                        : settings[1];
    const nlohmann::json uninterrupted = with(of_worker, before, 6);
    for (const std::uint64_t first : {3U, 4U}) {
      CAPTURE(first);
      const temporary_folder folder;
      const arguments saved{"--checkpoint-dir", folder.file("saved"), "--resume"};
      const auto joined = [&](arguments all) {
        all.insert(all.end(), saved.begin(), saved.end());
        return all;
      };
      static_cast<void>(with(of_worker, joined(before), first));
      const nlohmann::json json = with(of_worker, joined(after), 6);
      CHECK(json["digest"] == uninterrupted["digest"]);
      CHECK(json["losses"] == uninterrupted["losses"]);
    }
  }
  const temporary_folder folder;
  const arguments saved{"--checkpoint-dir", folder.file("saved"), "--checkpoint-every", "1", "--resume"};
  static_cast<void>(with("1", saved, 1));
  for (const arguments& other :
       std::vector<arguments>{{"--local-steps", "4"}, {"--outer", "sgd"}, {"--workers", "4"}}) {
    arguments all{"--workers", "2", "--local-steps", "3", "--batch", "4"};
    all.insert(all.end(), saved.begin(), saved.end());
    all.insert(all.end(), other.begin(), other.end());
    const outcome refused = run(all, 2);
    CAPTURE(refused.notes);
    CHECK(refused.status == exit_status::wrong_usage);
    CHECK(refused.notes.find("workers 2 local-steps 3 outer nesterov rate 0.7 momentum 0.9") !=
          refused.notes.npos);
  }
}

TEST_CASE("a round's messages are paid once in its steps, and its wire makes them smaller") {
  const auto with = [](const arguments& more) {
    arguments all{"--workers", "4", "--batch", "4"};
    all.insert(all.end(), more.begin(), more.end());
    const nlohmann::json json = json_of(all, 8);
    for (const nlohmann::json& each : json["ranks"])
      check_predicted(each);
    // Each loss, and the digest: 8 bytes to each other rank.
    return json["ranks"][0]["bytes_sent"].get<std::uint64_t>() - 8 * 10 * 3;
  };
  const std::uint64_t each = with({"--local-steps", "1"});
  CHECK(with({"--local-steps", "4"}) * 4 == each);
  CHECK(with({"--local-steps", "8"}) * 8 == each);
  CHECK(with({"--local-steps", "9"}) == 0);
  const std::uint64_t one = with({"--local-steps", "8"});
  CHECK(with({"--local-steps", "8", "--outer-wire", "bf16"}) * 2 == one);
  CHECK(with({"--local-steps", "8", "--outer-wire", "int8"}) * 100 < 27 * one);
  CHECK(with({"--local-steps", "8", "--outer-wire", "int4"}) * 100 < 15 * one);
}

TEST_CASE(
    "sums of the largest gradients have one digest in memory and tiers, saved and resumed, and take the "
    "predicted bytes") {
  const auto with = [](const arguments& wire, const arguments& more, std::uint64_t steps) {
    arguments all{"--optimizer", "sgd"};
    all.insert(all.end(), wire.begin(), wire.end());
    all.insert(all.end(), more.begin(), more.end());
    const nlohmann::json json = json_of(all, steps);
    for (const nlohmann::json& each : json["ranks"])
      check_predicted(each);
    return json;
  };
  const arguments tiers{"--memory", "tiered", "--budget-mib", "1", "--schedule"};
  const auto in_tiers = [&](const char* schedule, arguments more) {
    more.insert(more.begin(), schedule);
    more.insert(more.begin(), tiers.begin(), tiers.end());
    return more;
  };
  for (const arguments& wire : std::vector<arguments>{
           {"--wire", "topk:0.01", "--ranks", "3"},
           {"--wire", "topk:0.001:bf16", "--ranks", "2"},
           {"--wire", "topk:0.5:kept", "--workers", "2", "--local-steps", "2", "--ranks", "1"}}) {
    const nlohmann::json memory = with(wire, {}, 3);
    for (const arguments& more :
         std::vector<arguments>{in_tiers("next_use", {"--recompute", "full"}),
                                in_tiers("on_demand", {"--update", "after_backward"})}) {
      const temporary_folder folder;
      arguments saved{"--checkpoint-dir", folder.file("saved"), "--resume"};
      static_cast<void>(with(wire, saved, 2));
      saved.insert(saved.end(), more.begin(), more.end());
      const nlohmann::json json = with(wire, saved, 3);
      CHECK(json["digest"] == memory["digest"]);
      CHECK(json["losses"] == memory["losses"]);
    }
  }
  // With all gradients and a momentum that is kept, it is SGD with momentum, up to the order of additions.
  const nlohmann::json dense = with({}, {"--ranks", "3"}, 3);
  const nlohmann::json all = with({"--wire", "topk:1:kept"}, {"--ranks", "3"}, 3);
  for (std::size_t i = 0; i < 4; ++i) {
    const auto loss = [&](const nlohmann::json& of) {
      return std::strtod(of["losses"][i].get<std::string>().c_str(), nullptr);
    };
    CHECK(std::abs(loss(all) - loss(dense)) < 1e-5);
  }
  // The momentum of each rank is its own: as many ranks continue, and with the same share.
  const temporary_folder folder;
  const arguments saved{"--checkpoint-dir", folder.file("saved"), "--resume"};
  static_cast<void>(with({"--wire", "topk:0.01:bf16", "--ranks", "2"}, saved, 1));
  for (const arguments& other : std::vector<arguments>{{"--wire", "topk:0.01:bf16", "--ranks", "3"},
                                                       {"--wire", "topk:0.02:bf16", "--ranks", "2"},
                                                       {"--wire", "topk:0.01", "--ranks", "2"},
                                                       {"--wire", "topk:0.01:bf16:kept", "--ranks", "2"},
                                                       {"--ranks", "2"}}) {
    arguments resumed{"--optimizer", "sgd"};
    resumed.insert(resumed.end(), other.begin(), other.end());
    resumed.insert(resumed.end(), saved.begin(), saved.end());
    const outcome refused = run(resumed, 2);
    CAPTURE(refused.notes);
    CHECK(refused.status == exit_status::wrong_usage);
    CHECK(refused.notes.find("optimizer sgd wire topk:0.01:bf16 ranks 2;") != refused.notes.npos);
  }
}

TEST_CASE(
    "gathers ahead of layers that differ in size send at most what is predicted, which is named a bound") {
  const nlohmann::json json = json_of({"--layers", "3", "--width", "3", "--heads", "1", "--ranks", "2",
                                       "--parallel", "zero3", "--gather-ahead", "1"},
                                      3);
  for (const nlohmann::json& each : json["ranks"]) {
    check_predicted(each);
    CHECK(each["bytes_sent"] < each["predicted"]["bytes_sent"]);
  }
}

TEST_CASE("muon has one digest in memory and tiers, and its ranks share out the matrices of each layer") {
  const auto with = [&](const std::string& world, const arguments& more, std::uint64_t steps) {
    arguments all{"--optimizer", "muon", "--batch", "6"};
    if (world != "0") all.insert(all.end(), {"--ranks", world});
    all.insert(all.end(), more.begin(), more.end());
    const nlohmann::json json = json_of(all, steps);
    for (const nlohmann::json& each : json.value("ranks", nlohmann::json::array()))
      check_predicted(each);
    if (world == "0" && json["predicted"]["bounds"].empty())
      CHECK(json["peak_resident_bytes"] == json["predicted"]["peak_bytes"]);
    return json;
  };
  for (const std::string world : {"1", "2", "3"}) {
    CAPTURE(world);
    const nlohmann::json data = with(world, {}, 3);
    if (world == "1") CHECK(data["digest"] == with("0", {"--threads", "3"}, 3)["digest"]);
    CHECK(data["digest"] != json_of({"--batch", "6", "--ranks", world}, 3)["digest"]);
    for (const arguments& more :
         std::vector<arguments>{{"--update", "after_backward", "--threads", "6"},
                                {"--recompute", "full", "--loss-scale", "64"},
                                {"--memory", "tiered", "--budget-mib", "1", "--recompute", "selective"}}) {
      const nlohmann::json json = with(world, more, 3);
      CHECK(json["digest"] == data["digest"]);
      CHECK(json["losses"] == data["losses"]);
    }
    const temporary_folder folder;
    static_cast<void>(with(world, {"--checkpoint-dir", folder.file("saved")}, 1));
    const nlohmann::json resumed = with(world, {"--checkpoint-dir", folder.file("saved"), "--resume"}, 3);
    CHECK(resumed["digest"] == data["digest"]);
  }
  const outcome cut = run({"--optimizer", "muon", "--ranks", "2", "--parallel", "zero1"}, 1);
  CHECK(cut.status == exit_status::wrong_usage);
  CHECK(cut.notes.find("--optimizer muon works on whole matrices, which shards cut") != cut.notes.npos);
}

TEST_CASE("adafactor has one digest over stages, tiers and a resume with other shards") {
  const nlohmann::json alone = json_of({"--optimizer", "adafactor", "--batch", "4"}, 3);
  for (const std::string world : {"1", "2", "4"}) {
    CAPTURE(world);
    const auto with = [&](const arguments& more, std::uint64_t steps) {
      arguments all{"--optimizer", "adafactor", "--batch", "4", "--ranks", world};
      all.insert(all.end(), more.begin(), more.end());
      const nlohmann::json json = json_of(all, steps);
      for (const nlohmann::json& each : json["ranks"])
        check_predicted(each);
      return json;
    };
    const nlohmann::json data = with({}, 3);
    if (world == "1") CHECK(data["digest"] == alone["digest"]);
    CHECK(data["digest"] != json_of({"--batch", "4", "--ranks", world}, 3)["digest"]);
    for (const arguments& more :
         std::vector<arguments>{{"--parallel", "zero1"},
                                {"--parallel", "zero2", "--update", "after_backward", "--threads", "3"},
                                {"--parallel", "zero3", "--gather-ahead", "1"},
                                {"--parallel", "zero3", "--memory", "tiered", "--budget-mib", "1"}}) {
      const nlohmann::json json = with(more, 3);
      CHECK(json["digest"] == data["digest"]);
      CHECK(json["losses"] == data["losses"]);
    }
    const temporary_folder folder;
    static_cast<void>(with({"--parallel", "zero2", "--checkpoint-dir", folder.file("saved")}, 1));
    const nlohmann::json resumed =
        with({"--parallel", "zero3", "--checkpoint-dir", folder.file("saved"), "--resume"}, 3);
    CHECK(resumed["digest"] == data["digest"]);
  }
}

namespace {

double loss(const nlohmann::json& of, std::size_t step) {
  return std::strtod(of["losses"][step].get<std::string>().c_str(), nullptr);
}

arguments four_ranks(const arguments& more) {
  arguments all{"--batch", "8", "--ranks", "4"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

TEST_CASE("every wire trains within a band of the plain losses, with the predicted bytes, which are fewer") {
  constexpr std::uint64_t steps = 6;
  const struct {
    arguments wire;
    double band;
    double share;  // of the plain bytes, at most
  } wires[] = {{{"--wire", "bf16"}, 0.0005, 0.501},
               {{"--wire", "fp8", "--node-ranks", "2"}, 0.005, 0.29},
               {{"--wire", "int8"}, 0.005, 0.26},
               {{"--wire", "int4", "--error-feedback"}, 0.03, 0.135},
               {{"--wire", "zeropp", "--node-ranks", "2"}, 0.03, 0.25},
               {{"--wire", "zeropp", "--node-ranks", "2", "--error-feedback"}, 0.03, 0.25}};
  for (const std::string kind : {"data", "zero2", "zero3"}) {
    CAPTURE(kind);
    const nlohmann::json reference = json_of(four_ranks({"--parallel", kind}), steps);
    for (const auto& each : wires) {
      CAPTURE(each.wire[1]);
      arguments all{"--parallel", kind};
      all.insert(all.end(), each.wire.begin(), each.wire.end());
      const nlohmann::json json = json_of(four_ranks(all), steps);
      for (std::size_t rank = 0; rank < 4; ++rank) {
        check_predicted(json["ranks"][rank]);
        const double sent = json["ranks"][rank]["bytes_sent"].get<double>();
        const double plainly = reference["ranks"][rank]["bytes_sent"].get<double>();
        // Weights that all ranks have completely are refreshed plainly, also once as they are drawn.
        CHECK(sent / plainly < (kind == "zero2" ? (8 + 6 * each.share) / 13 : each.share));
      }
      double off = 0;
      for (std::size_t step = 0; step <= steps; ++step)
        off = std::max(off, std::abs(loss(json, step) - loss(reference, step)));
      CHECK(off < each.band);
      CHECK(off > 0);
    }
  }
}

TEST_CASE("a rank gathers a tile instead of a layer, and not more again than what it computes again") {
  const auto with = [](const arguments& more) {
    arguments all{"--width", "24", "--layers", "3", "--parallel", "zero3"};
    all.insert(all.end(), more.begin(), more.end());
    const nlohmann::json json = json_of(four_ranks(all));
    for (const nlohmann::json& each : json["ranks"])
      check_predicted(each);
    return json;
  };
  const auto gathered = [](const nlohmann::json& of) {
    return of["ranks"][3]["peak_state_bytes"].get<std::uint64_t>() -
           of["ranks"][3]["kept_state_bytes"].get<std::uint64_t>();
  };
  const auto sent = [](const nlohmann::json& of) {
    return of["ranks"][3]["bytes_sent"].get<std::uint64_t>();
  };
  const nlohmann::json whole = with({});
  const nlohmann::json cut = with({"--tiles", "8"});
  CHECK(cut["digest"] == whole["digest"]);
  CHECK(cut["losses"] == whole["losses"]);
  CHECK(sent(cut) == sent(whole));
  // The weights and gradients of the embedding's tokens and positions are the largest that remain.
  CHECK(gathered(whole) > 2 * gathered(cut));
  const nlohmann::json again = with({"--tiles", "8", "--recompute", "full"});
  CHECK(again["digest"] == whole["digest"]);
  CHECK(gathered(again) == gathered(cut));
  CHECK(sent(again) > sent(cut));
  CHECK(sent(with({"--tiles", "8", "--recompute", "selective"})) == sent(cut));
  const nlohmann::json ahead = with({"--tiles", "8", "--recompute", "full", "--gather-ahead", "2"});
  CHECK(ahead["digest"] == whole["digest"]);
  // Sums in the background and gathers within a node take turns on one thread.
  const nlohmann::json near = with({"--tiles", "8", "--recompute", "full", "--node-ranks", "2",
                                    "--secondary-shards", "--sums-in-flight", "1"});
  CHECK(near["losses"].size() == 3);
  for (const auto& [more, why] : std::vector<std::pair<arguments, std::string>>{
           {{"--tiles", "13"}, "--tiles 13 of matrices with --width 12 rows"},
           {{"--tiles", "2", "--optimizer", "muon"}, "--optimizer muon works on whole matrices"},
           {{"--tiles", "2", "--optimizer", "adafactor"}, "--optimizer adafactor works on whole matrices"},
           {{"--tiles", "2", "--optimizer", "sgd", "--wire", "topk:0.5", "--ranks", "2"},
            "would send those of each tile"}}) {
    const outcome refused = run(more, 1);
    CAPTURE(refused.notes);
    CHECK(refused.status == exit_status::wrong_usage);
    CHECK(refused.notes.find(why) != refused.notes.npos);
  }
}

TEST_CASE("secondary shards change no bits, and take and send the predicted bytes") {
  for (const arguments& by : std::vector<arguments>{
           {},
           {"--wire", "zeropp"},
           {"--wire", "int8", "--memory", "tiered", "--budget-mib", "1", "--recompute", "full"},
           {"--wire", "bf16", "--error-feedback", "--clip-norm", "0.25"}}) {
    arguments all{"--parallel", "zero3", "--node-ranks", "2"};
    all.insert(all.end(), by.begin(), by.end());
    const nlohmann::json without = json_of(four_ranks(all));
    all.push_back("--secondary-shards");
    const nlohmann::json json = json_of(four_ranks(all));
    CHECK(json["digest"] == without["digest"]);
    CHECK(json["losses"] == without["losses"]);
    for (const nlohmann::json& each : json["ranks"])
      check_predicted(each);
  }
}

TEST_CASE("plain messages in two hops have the losses of other sums, and the predicted bytes") {
  for (const std::string kind : {"data", "zero1", "zero3"}) {
    const nlohmann::json one = json_of(four_ranks({"--parallel", kind}));
    const nlohmann::json two = json_of(four_ranks({"--parallel", kind, "--node-ranks", "2"}));
    CHECK(loss(two, 2) == doctest::Approx(loss(one, 2)).epsilon(1e-6));
    for (const nlohmann::json& each : two["ranks"])
      check_predicted(each);
  }
}

TEST_CASE("a run over a wire resumes to the bits of one that was never stopped, in tiers too") {
  for (const arguments& by : std::vector<arguments>{
           {"--wire", "int8", "--parallel", "zero3", "--memory", "tiered", "--budget-mib", "1"},
           {"--wire", "zeropp", "--node-ranks", "2", "--parallel", "zero1"}}) {
    const temporary_folder folder;
    arguments saved = by;
    saved.insert(saved.end(),
                 {"--checkpoint-dir", folder.file("saved"), "--checkpoint-every", "1", "--resume"});
    static_cast<void>(json_of(four_ranks(saved), 1));
    const nlohmann::json json = json_of(four_ranks(saved), 3);
    const nlohmann::json uninterrupted = json_of(four_ranks(by), 3);
    CHECK(json["digest"] == uninterrupted["digest"]);
    CHECK(json["losses"] == uninterrupted["losses"]);
    for (const nlohmann::json& each : json["ranks"])
      check_predicted(each);
  }
}

TEST_CASE("clipped steps are shorter, and without ranks have the bits of one rank") {
  const nlohmann::json free = json_of({}, 3);
  const nlohmann::json clipped = json_of({"--clip-norm", "0.25"}, 3);
  CHECK(clipped["digest"] != free["digest"]);
  CHECK(clipped["losses"][0] == free["losses"][0]);
  CHECK(json_of({"--clip-norm", "1e30"}, 3)["digest"] == free["digest"]);
  for (const arguments& more :
       std::vector<arguments>{{"--ranks", "1"},
                              {"--memory", "tiered", "--budget-mib", "1"},
                              {"--memory", "tiered", "--budget-mib", "1", "--recompute", "full"},
                              {"--loss-scale", "65536", "--update", "after_backward"}}) {
    arguments all{"--clip-norm", "0.25"};
    all.insert(all.end(), more.begin(), more.end());
    CHECK(json_of(all, 3)["digest"] == clipped["digest"]);
  }
}

TEST_CASE("a loss scale of any power of two changes no bits, also of clipped steps") {
  // 70 times the scale doubles: it stays at 2^64.
  const nlohmann::json clipped = json_of({"--clip-norm", "1e-6"}, 2);
  for (const std::string scale : {"5.9604644775390625e-08", "1024", "18446744073709551616"}) {
    const nlohmann::json scaled = json_of({"--clip-norm", "1e-6", "--loss-scale", scale}, 2);
    CHECK(scaled["digest"] == clipped["digest"]);
    CHECK(scaled["skipped_steps"] == 0);
  }
  const nlohmann::json most =
      json_of({"--loss-scale", "9223372036854775808", "--loss-scale-interval", "1"}, 3);
  CHECK(most["loss_scale"] == 0x1p+64);
}

TEST_CASE("a run resumes with a loss scale or without one, and not with another limit of the norm") {
  const arguments every{"--checkpoint-every", "1", "--resume", "--checkpoint-dir"};
  const auto saved = [&](const temporary_folder& folder, arguments by) {
    by.insert(by.end(), every.begin(), every.end());
    by.push_back(folder.file("saved"));
    return by;
  };
  const temporary_folder clips;
  static_cast<void>(json_of(saved(clips, {"--clip-norm", "0.25"}), 1));
  for (const arguments& other : std::vector<arguments>{{}, {"--clip-norm", "0.5"}, {"--loss-scale", "8"}}) {
    const outcome refused = run(saved(clips, other), 2);
    CHECK(refused.status == exit_status::wrong_usage);
    CHECK(refused.notes.find("clip-norm 0.25") != refused.notes.npos);
  }
  // Without a scale, with one, which begins as asked, and without it again.
  const nlohmann::json clipped = json_of({"--clip-norm", "0.25"}, 3);
  CHECK(json_of(saved(clips, {"--clip-norm", "0.25", "--loss-scale", "1024"}), 2)["loss_scale"] == 1024);
  const nlohmann::json without = json_of(saved(clips, {"--clip-norm", "0.25"}), 3);
  CHECK(without["loss_scale"] == 1);
  CHECK(without["digest"] == clipped["digest"]);
  const temporary_folder free;
  static_cast<void>(json_of(saved(free, {}), 1));
  const outcome refused = run(saved(free, {"--clip-norm", "0.25"}), 2);
  CHECK(refused.status == exit_status::wrong_usage);
  static_cast<void>(json_of(saved(free, {"--loss-scale", "8"}), 2));
  CHECK(json_of(saved(free, {}), 3)["digest"] == json_of({}, 3)["digest"]);
}

TEST_CASE("the loss scale grows, and its count of clean steps is in the checkpoint") {
  const arguments scaled{"--loss-scale", "1024", "--loss-scale-interval", "3"};
  const nlohmann::json grown = json_of(scaled, 4);
  CHECK(grown["loss_scale"] == 2048);
  CHECK(grown["skipped_steps"] == 0);
  CHECK(json_of(scaled, 2)["loss_scale"] == 1024);
  const temporary_folder folder;
  for (const std::uint64_t steps : {1U, 2U, 4U}) {
    arguments saved = scaled;
    saved.insert(saved.end(),
                 {"--checkpoint-dir", folder.file("saved"), "--checkpoint-every", "1", "--resume"});
    if (steps == 2) saved.insert(saved.end(), {"--ranks", "1", "--parallel", "zero2"});
    const nlohmann::json json = json_of(saved, steps);
    if (steps != 4) continue;
    CHECK(json["loss_scale"] == 2048);
    CHECK(json["digest"] == grown["digest"]);
  }
}

namespace {

/// Trains two steps on two ranks, or as `more` says, and saves them.
void save_run(const std::string& folder, const arguments& more) {
  arguments all{"--layers",         "2",   "--width",   "32",
                "--heads",          "2",   "--context", "8",
                "--batch",          "4",   "--steps",   "2",
                "--threads",        "1",   "--text",    LLMMEM_SOURCE_DIR "/README.md",
                "--checkpoint-dir", folder};
  all.insert(all.end(), more.begin(), more.end());
  const auto done =
      run_captured([&](std::FILE* out, std::FILE* notes) { return run_application(all, out, notes); });
  REQUIRE_MESSAGE(done.status == exit_status::success, done.notes);
}

outcome refit_program(const arguments& all) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return refit_example::run_application(all, out, notes); });
}

}  // namespace

TEST_CASE("engines take a run that train_gpt saved, to the same bits from any settings") {
  const temporary_folder folder;
  std::uint32_t bf16 = 0;
  std::uint32_t codes = 0;
  std::size_t saved = 0;
  std::uint64_t read_by_one = 0;
  for (const arguments& more : std::vector<arguments>{
           {"--ranks", "2"},
           {"--ranks", "2", "--parallel", "zero3", "--tiles", "3"},
           {"--ranks", "2", "--parallel", "zero1", "--memory", "tiered", "--budget-mib", "1", "--recompute",
            "full"},
           {"--ranks", "2", "--parallel", "zero3", "--memory", "tiered", "--budget-mib", "1", "--host-mib",
            "1", "--gather-ahead", "1"},
           {"--ranks", "2", "--parallel", "zero2", "--sums-in-flight", "1", "--clip-norm", "1e30"}}) {
    const std::string name = folder.file("run" + std::to_string(saved++));
    save_run(name, more);
    for (const auto& [engines, form] :
         {std::pair(1U, refit_example::weight_form::bf16), std::pair(2U, refit_example::weight_form::bf16),
          std::pair(1U, refit_example::weight_form::int8)}) {
      CAPTURE(engines);
      const refit_example::saved_result result = refit_example::refit_saved(name, engines, form);
      CHECK(result.saved_by == 2);
      CHECK(result.line.step == 2);
      CHECK(result.line.wrong_tensors == 0);
      CHECK(result.line.sent_bytes == 0);
      // Each engine reads every tensor that it has a part of once, as floats.
      if (form == refit_example::weight_form::bf16 && engines == 1)
        CHECK(result.read_bytes == 2 * result.image_bytes);
      if (read_by_one != 0) CHECK(result.read_bytes == engines * read_by_one);
      if (engines == 1) read_by_one = result.read_bytes;
      CHECK(result.line.loss > 4);
      if (engines != 1) continue;
      std::uint32_t& known = form == refit_example::weight_form::bf16 ? bf16 : codes;
      if (saved == 1) known = result.checksum;
      CHECK(result.checksum == known);
    }
  }
  CHECK(bf16 != codes);
  // Of workers that train apart, the first one's; of another run, other weights.
  save_run(folder.file("apart"), {"--workers", "2", "--local-steps", "2", "--optimizer", "sgd"});
  const refit_example::saved_result of_first =
      refit_example::refit_saved(folder.file("apart"), 1, refit_example::weight_form::bf16);
  CHECK(of_first.line.wrong_tensors == 0);
  CHECK(of_first.checksum != bf16);

  const auto json = nlohmann::json::parse(
      refit_program({"--from", folder.file("run3"), "--engines", "2", "--form", "bf16", "--json"}).out);
  CHECK(json["wrong_tensors"] == 0);
  CHECK(json["saved_by"] == 2);
  CHECK(json["step"] == 2);
  CHECK(json["image_bytes"].get<std::uint64_t>() > 0);
  CHECK(json["read_bytes"] == 2 * read_by_one);

  // A run that has diverged: JSON has no NaN.
  save_run(folder.file("diverged"), {"--workers", "2", "--local-steps", "1", "--optimizer", "sgd", "--steps",
                                     "30", "--outer-rate", "100", "--width", "8"});
  const outcome diverged = refit_program({"--from", folder.file("diverged"), "--engines", "1", "--json"});
  CHECK(nlohmann::json::parse(diverged.out)["loss"].is_null());
  CHECK(refit_program({"--from", folder.file("run0"), "--engines", "1"}).out.find("\n1 engine: ") !=
        std::string::npos);
}

TEST_CASE("a folder that cannot be an engine's source is refused with the reason") {
  const temporary_folder folder;
  const auto refused = [](const arguments& all, const std::string& why, exit_status status) {
    const outcome done = refit_program(all);
    CAPTURE(done.notes);
    CHECK(done.status == status);
    CHECK(done.notes.find(why) != done.notes.npos);
  };
  std::filesystem::create_directory(folder.file("empty"));
  refused({"--from", folder.file("empty")}, "empty has no complete checkpoint", exit_status::failure);
  refused({"--from", folder.file("none")}, "refit: " + folder.file("none") + " is no folder",
          exit_status::failure);
  CHECK_FALSE(std::filesystem::exists(folder.file("none")));
  refused({"--from", folder.file("empty"), "--steps", "2"}, "--from takes weights that are trained",
          exit_status::wrong_usage);
  using llmmem::refit_bands;
  const refit_example::engine_model engine = refit_example::engine_of(
      std::vector<llmmem::refit_tensor>{
          {.name = "worker1.ln_f.bias", .shape = llmmem::tensor_shape::vector(8)},
          {.name = "h.0.attn.c_attn.weight", .shape = llmmem::tensor_shape::matrix(8, 24)},
          {.name = "h.0.attn.c_attn.bias", .shape = llmmem::tensor_shape::vector(24)}},
      refit_example::weight_form::bf16);
  REQUIRE(engine.rules.size() == 6);
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string part = std::string("h.0.attn.") + "qkv"[i];
    CHECK(engine.rules[i].target == part + ".weight");
    CHECK(engine.rules[i].from == refit_bands::columns(8 * i, 8));
    CHECK(engine.rules[3 + i].target == part + ".bias");
    CHECK(engine.rules[3 + i].from == refit_bands::rows(8 * i, 8));
  }
  const refit_example::engine_model quantised = refit_example::engine_of(
      std::vector<llmmem::refit_tensor>{
          {.name = "h.0.attn.c_attn.weight", .shape = llmmem::tensor_shape::matrix(64, 192)},
          {.name = "h.0.mlp.c_fc.weight", .shape = llmmem::tensor_shape::matrix(64, 256)}},
      refit_example::weight_form::int8);
  refit_example::detail::check_engines(quantised, 2);
  CHECK_THROWS_WITH_AS(
      refit_example::detail::check_engines(quantised, 3),
      "--engines 3: 32 columns have one scale, and the 64 columns of 'h.0.attn.q.weight' are 2 such groups, "
      "which so many engines do not share evenly; take --engines 1, 2, or --form bf16",
      llmmem::argument_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(refit_example::engine_of(
                           std::vector<llmmem::refit_tensor>{{.name = "mean.h.0.ln_1.weight"}},
                           refit_example::weight_form::bf16)),
                       "the checkpoint has no weights with the names that train_gpt gives",
                       llmmem::argument_error);
}
