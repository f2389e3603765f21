/// @file
/// Every state that a device may have after a crash of a `simulated_storage`, and every moment of a crash.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/testing/detail/simulated_tree.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// How many of the states after one crash to visit.
struct crash_limits {
  std::size_t exhaustive_up_to = 12;  ///< pending effects of which every subset is tried; at most 24
  std::size_t samples = 64;           ///< random subsets if there are more, in addition to the extremes
  std::uint64_t seed = 1;             ///< of these samples
  std::size_t tears = 3;  ///< places to tear a write: all, or the first, the last and some between
};

/// The states visited.
struct crash_visits {
  std::uint64_t states = 0;  ///< those of one crash all differ
  bool exhaustive = true;    ///< whether they are all that exist
};

namespace detail {

/// Where to tear a write: the bytes that remain of it.
struct tear_places {
  std::vector<std::uint64_t> bytes;
  bool all = true;
};
[[nodiscard]] inline tear_places tears_of(const simulated_effect& effect, std::uint64_t sector,
                                          std::size_t most) {
  const std::uint64_t first = sector - effect.offset % sector;
  if (first >= effect.bytes.size()) return {};
  const std::uint64_t count = (effect.bytes.size() - first - 1) / sector + 1;
  tear_places places;
  const std::uint64_t taken = count < most ? count : most;
  places.all = taken == count;
  for (std::uint64_t i = 0; i < taken; ++i) {
    const std::uint64_t at = taken == 1 ? 0 : i * (count - 1) / (taken - 1);
    places.bytes.push_back(first + at * sector);
  }
  return places;
}

/// Visits states of one crash, each once.
template <class Visit>
class crash_walk {
 public:
  crash_walk(const simulated_storage& storage, const crash_limits& limits, Visit& visit)
      : storage_(storage), limits_(limits), visit_(visit), crash_(storage.crash_now()) {
    for (const simulated_effect& each : crash_.effects) {
      tears_.push_back(tears_of(each, crash_.sector_bytes, limits.tears));
      if (!tears_.back().all) visits_.exhaustive = false;
    }
  }

  [[nodiscard]] crash_visits run() {
    if (crash_.effects.size() <= limits_.exhaustive_up_to) {
      every();
    } else {
      some();
    }
    return visits_;
  }

 private:
  using kind = simulated_effect::kind;

  /// Chooses names first, then sizes, then data, so that it never makes an invisible choice, such as data of
  /// a file without a name, or past its size: the state would look the same without it.
  void every() {
    std::vector<std::size_t> order;
    for (const kind each : {kind::names, kind::size, kind::data}) {
      for (std::size_t i = 0; i < crash_.effects.size(); ++i) {
        if (crash_.effects[i].what == each) order.push_back(i);
      }
    }
    std::vector<bool> survives(order.size());
    choose(order, 0, survives, crash_.device);
  }
  void choose(const std::vector<std::size_t>& order, std::size_t at, std::vector<bool>& survives,
              const simulated_tree& tree) {
    if (at == order.size()) {
      look({survives, std::nullopt});
      look_at_tears(survives);
      return;
    }
    choose(order, at + 1, survives, tree);
    const simulated_effect& effect = crash_.effects[order[at]];
    if (!has_needs(survives, order[at]) || !shows(tree, effect)) return;
    survives[order[at]] = true;
    if (effect.what == kind::data) {  // no later choice looks at data
      choose(order, at + 1, survives, tree);
    } else {
      simulated_tree with = tree;
      with.apply(effect, crash_.fill);
      choose(order, at + 1, survives, with);
    }
    survives[order[at]] = false;
  }
  /// Whether an effect changes what is visible of a tree.
  [[nodiscard]] static bool shows(const simulated_tree& tree, const simulated_effect& effect) {
    if (effect.what == kind::names) return true;
    if (effect.what == kind::data && effect.offset >= tree.nodes.at(effect.node).size) return false;
    bool named = false;
    tree.walk([&](const std::string&, std::uint64_t number, const simulated_node&) {
      named = named || number == effect.node;
    });
    return named;
  }

  void some() {
    visits_.exhaustive = false;
    const std::size_t count = crash_.effects.size();
    look({{}, std::nullopt});
    const std::vector<bool> all(count, true);
    look({all, std::nullopt});
    look_at_tears(all);
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<bool> alone_lost(count, true);
      alone_lost[i] = false;
      close(alone_lost);
      look({alone_lost, std::nullopt});
      std::vector<bool> alone_there(count);
      bring(alone_there, i);
      look({alone_there, std::nullopt});
    }
    for (std::size_t sample = 0; sample < limits_.samples && count != 0; ++sample) {
      // Few, half or most of them, because a fair coin for each would hardly ever lose just two of a hundred.
      const std::uint64_t of_eight = 1 + random() % 7;
      std::vector<bool> survives(count);
      for (std::size_t i = 0; i < count; ++i)
        survives[i] = random() % 8 < of_eight;
      close(survives);
      look({survives, std::nullopt});
      const std::size_t torn = random() % count;
      const auto& places = tears_[torn].bytes;
      if (!survives[torn] || places.empty()) continue;
      look({survives, crash_choice::torn_write{torn, places[random() % places.size()]}});
    }
  }

  [[nodiscard]] bool has_needs(const std::vector<bool>& survives, std::size_t effect) const {
    for (const std::size_t each : crash_.needs[effect]) {
      if (!survives[each]) return false;
    }
    return true;
  }
  /// Removes effects that lack another one that they need.
  void close(std::vector<bool>& survives) const {
    for (std::size_t i = 0; i < survives.size(); ++i)
      survives[i] = survives[i] && has_needs(survives, i);
  }
  /// Adds an effect, and those that it needs.
  void bring(std::vector<bool>& survives, std::size_t effect) const {
    std::vector<std::size_t> wanted{effect};
    while (!wanted.empty()) {
      const std::size_t each = wanted.back();
      wanted.pop_back();
      survives[each] = true;
      wanted.insert(wanted.end(), crash_.needs[each].begin(), crash_.needs[each].end());
    }
  }
  void look_at_tears(const std::vector<bool>& survives) {
    for (std::size_t i = 0; i < survives.size(); ++i) {
      if (!survives[i]) continue;
      for (const std::uint64_t bytes : tears_[i].bytes)
        look({survives, crash_choice::torn_write{i, bytes}});
    }
  }
  void look(const crash_choice& choice) {
    simulated_tree tree = crash_.tree(choice);
    if (!met_.insert(tree.fingerprint()).second) return;
    ++visits_.states;
    simulated_storage after = storage_.restarted(crash_, choice, std::move(tree));
    visit_(after);
  }
  [[nodiscard]] std::uint64_t random() noexcept { return spread(limits_.seed * 0x1'0000'0001ULL + drawn_++); }

  const simulated_storage& storage_;
  const crash_limits& limits_;
  Visit& visit_;
  simulated_crash crash_;
  std::vector<tear_places> tears_;
  std::set<std::uint64_t> met_;
  std::uint64_t drawn_ = 0;
  crash_visits visits_;
};

}  // namespace detail

/// Calls `visit(simulated_storage& after)` for each state that a device may have if the machine stopped now:
/// all states, if few effects are pending. Otherwise those in which no effect survives, all survive, all but
/// one (and those that need it), or one alone (with those that it needs); those with each write torn; and a
/// seeded sample. States that look the same are visited once. `after` belongs to the visitor, to recover in
/// and to crash again; `after.trace()` lists what was done and what survived.
///
/// @par Complexity   2^effects x tears x bytes of the files if exhaustive.
/// @par Errors   `argument_error` if `exhaustive_up_to` exceeds 24; what `visit` throws.
template <class Visit>
crash_visits visit_crash_states(const simulated_storage& storage, const crash_limits& limits, Visit&& visit) {
  if (limits.exhaustive_up_to > 24) {
    throw argument_error("visit_crash_states: 2^" + std::to_string(limits.exhaustive_up_to) +
                         " states would be visited; exhaustive_up_to is at most 24");
  }
  return detail::crash_walk(storage, limits, visit).run();
}

/// The result of a sweep.
struct power_cut_sweep {
  std::uint64_t power_cuts = 0;  ///< one for each call of the run, and one after the last
  std::uint64_t states = 0;      ///< after all of them
  bool exhaustive = true;        ///< every state of every cut
};

/// Runs `run(simulated_storage&)` to its end, and again with a power cut before its first call, before its
/// second, ... and calls `check(simulated_storage& after)` for the states after each, the last one's too.
/// Each run has a fresh copy of `start`, with all that is pending there; a run that differs each time is cut
/// at other places, without other effects. The run notes outside the storage, for `check`, what it has
/// acknowledged so far; it clears the notes as it begins.
///
/// `power_cut` passes through `run`, which must not catch it.
template <class Run, class Check>
power_cut_sweep sweep_power_cuts(const simulated_storage& start, Run&& run, Check&& check,
                                 const crash_limits& limits = {}) {
  power_cut_sweep sweep;
  for (bool ended = false; !ended;) {
    simulated_storage storage = start.after_crash(start.all_survives());
    storage.cut_power_at(++sweep.power_cuts);
    try {
      run(storage);
      ended = !storage.power_is_off();
    } catch (const power_cut&) {
    }
    const crash_visits visits = visit_crash_states(storage, limits, check);
    sweep.states += visits.states;
    sweep.exhaustive = sweep.exhaustive && visits.exhaustive;
  }
  return sweep;
}

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
