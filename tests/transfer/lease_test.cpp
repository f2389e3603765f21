// The protocol of lease files in a folder that a test steps through: all orders of the calls of several
// processes.
#include <llmmem/transfer/detail/lease.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "support/error_text.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t second = 1'000'000'000;

/// Every text of a lease that was written, so that the state of a folder is short.
std::vector<std::string>& known_texts() {
  static std::vector<std::string> all;
  return all;
}
std::size_t text_number(const std::string& text) {
  auto& all = known_texts();
  const auto found = std::find(all.begin(), all.end(), text);
  if (found != all.end()) return static_cast<std::size_t>(found - all.begin());
  all.push_back(text);
  return all.size() - 1;
}

/// What all processes share: one folder, and time that passes for all.
struct lease_world {
  std::map<std::uint64_t, int> names{};  // number: file
  std::vector<std::size_t> files{};      // of known texts
  std::uint64_t now = 0;
  std::set<int> dead{};
  std::function<void(lease_world&)> before_create{};  // what another process does just then
  std::string events{};  // "t3": lease 3 is taken, "a3": its holder acts, "k3": it knows that its act counts

  [[nodiscard]] std::string key() const {
    std::string all = std::to_string(now) + events;
    for (const auto& [number, file] : names)
      all += "," + std::to_string(number) + "=" + std::to_string(file);
    for (const std::size_t each : files)
      all += "/" + std::to_string(each);
    for (const int each : dead)
      all += "!" + std::to_string(each);
    return all;
  }
};

/// The calls of one process. Each is a step; a process is run again from its beginning for each step, and
/// finds the results of the earlier ones in its log.
class stepped_system {
 public:
  stepped_system(lease_world& world, int process, std::vector<std::string>& log, bool is_remote, bool waits)
      : world_(&world), log_(&log), process_(process), is_remote_(is_remote), waits_(waits) {}

  [[nodiscard]] bool is_parked() const noexcept { return is_parked_; }
  /// From here on all calls are made at once.
  void run_freely() noexcept { is_free_ = true; }
  void stop_clock() noexcept { clock_stands_ = true; }

  [[nodiscard]] std::string name() const { return "LOCK"; }
  [[nodiscard]] std::vector<std::uint64_t> numbers() {
    const std::string text = step([&] {
      std::string all;
      for (const auto& each : world_->names)
        all += static_cast<char>(each.first);
      return all;
    });
    return {text.begin(), text.end()};
  }
  [[nodiscard]] std::optional<std::string> read(std::uint64_t number) {
    const std::string text = step([&] {
      const auto found = world_->names.find(number);
      return found == world_->names.end()
                 ? "-"
                 : std::to_string(world_->files[static_cast<std::size_t>(found->second)]);
    });
    return text == "-" ? std::nullopt : std::optional(known_texts()[std::stoul(text)]);
  }
  /// In two steps, as where the file system has no links.
  [[nodiscard]] bool create(std::uint64_t number, const std::string& text) {
    const std::string made = step([&]() -> std::string {
      if (world_->before_create) world_->before_create(*world_);
      if (world_->names.contains(number)) return "-";
      world_->names[number] = static_cast<int>(world_->files.size());
      world_->files.push_back(text_number(""));
      return std::to_string(world_->names[number]);
    });
    if (made == "-") return false;
    own_ = std::stoi(made);
    write(text);
    return true;
  }
  void write(const std::string& text) {
    step([&] {
      world_->files[static_cast<std::size_t>(own_)] = text_number(text);
      return std::string();
    });
  }
  [[nodiscard]] bool is_named(std::uint64_t number) noexcept {
    return quiet_step([&] {
             const auto found = world_->names.find(number);
             return found != world_->names.end() && found->second == own_ ? "1" : "0";
           }) == "1";
  }
  void remove(std::uint64_t number) noexcept {
    quiet_step([&] {
      world_->names.erase(number);
      return std::string();
    });
  }
  void remove_drafts() const noexcept {}
  /// Each process has a clock of its own.
  [[nodiscard]] std::uint64_t now_ns() noexcept {
    if (clock_stands_) return 5000 * second;
    return std::stoull(quiet_step([&] { return std::to_string(world_->now); })) +
           static_cast<std::uint64_t>(process_ + 1) * 1000 * second;
  }
  void pause(std::uint64_t) {
    step([&] {
      if (waits_) world_->now += 12 * second;  // at once past the end of the watch
      return std::string();
    });
    if (!waits_ || clock_stands_) throw gone_away{};
  }
  [[nodiscard]] detail::lease_owner owner() const {
    return {.process = process_ + 1, .start = 7, .place = "here", .host = "host"};
  }
  [[nodiscard]] bool is_dead(const detail::lease_owner& owner) {
    if (is_remote_) return false;
    return step([&] { return world_->dead.contains(static_cast<int>(owner.process) - 1) ? "1" : "0"; }) ==
           "1";
  }
  [[nodiscard]] std::string token() const { return std::string(1, static_cast<char>('a' + process_)); }
  [[nodiscard]] bool ends_with_name() const noexcept { return false; }

  /// What a holder does to the folder: it gives a checkpoint its name.
  void act(std::uint64_t number) {
    step([&] {
      world_->events += "a" + std::to_string(number);
      return std::string();
    });
  }
  /// Is no step: as if at the moment of the last one.
  void note(char what, std::uint64_t number) {
    if (is_parked_) return;
    if (at_++ < log_->size()) return;
    world_->events += what + std::to_string(number);
    log_->emplace_back();
  }

 private:
  struct parked {};
  struct gone_away {};

  template <class Work>
  std::string step(Work work) {
    std::string got = quiet_step(std::move(work));
    if (is_parked_) throw parked{};
    return got;
  }
  template <class Work>
  std::string quiet_step(Work work) noexcept {
    if (is_parked_) return "0";
    if (at_ < log_->size()) return (*log_)[at_++];
    if (has_stepped_ && !is_free_) {
      is_parked_ = true;
      return "0";
    }
    has_stepped_ = true;
    log_->push_back(work());
    ++at_;
    return log_->back();
  }

  lease_world* world_;
  std::vector<std::string>* log_;
  int process_;
  bool is_remote_;
  bool waits_;
  int own_ = -1;
  std::size_t at_ = 0;
  bool has_stepped_ = false;
  bool is_parked_ = false;
  bool is_free_ = false;
  bool clock_stands_ = false;
};

using stepped_lease = detail::lease<stepped_system>;
using process_work = std::function<void(stepped_system&, stepped_lease&)>;

/// All orders of all steps of the processes, from one state of the folder. Each state is visited once.
class all_orders {
 public:
  struct choices {
    bool is_remote = false;  // each process is on a machine of its own
    bool waits = true;       // false: one that would have to watch another's lease goes away instead
    int kills = 0;           // at most so many processes end at any step
    bool has_clocks = true;  // false: the clock of the first process stands still
  };
  all_orders(std::vector<process_work> work, const choices& how) : work_(std::move(work)), how_(how) {}

  void run(const lease_world& begin) {
    std::vector<one> processes(work_.size());
    visit(begin, processes, how_.kills);
  }
  [[nodiscard]] std::size_t states() const noexcept { return seen_.size(); }
  [[nodiscard]] std::size_t ends() const noexcept { return ends_; }
  [[nodiscard]] std::size_t ends_without_holder() const noexcept { return without_; }

 private:
  struct one {
    std::vector<std::string> log{};
    bool is_over = false;
  };

  void visit(const lease_world& world, const std::vector<one>& processes, int kills) {
    std::string key = world.key() + std::to_string(kills);
    for (const one& each : processes) {
      key += each.is_over ? "|." : "|";
      for (const std::string& text : each.log)
        key += text + ";";
    }
    if (!seen_.insert(std::hash<std::string>{}(key)).second) return;
    bool is_end = true;
    for (std::size_t i = 0; i < processes.size(); ++i) {
      if (processes[i].is_over) continue;
      is_end = false;
      lease_world next = world;
      std::vector<one> moved = processes;
      moved[i].is_over = advance(next, static_cast<int>(i), moved[i].log);
      visit(next, moved, kills);
      if (kills == 0 || processes[i].log.empty()) continue;
      next = world;
      moved = processes;
      next.dead.insert(static_cast<int>(i));
      moved[i].is_over = true;
      visit(next, moved, kills - 1);
    }
    if (is_end) end(world);
  }

  /// Whether each act that counts came before any process had a later lease, and so was seen by it.
  [[nodiscard]] static bool counts_are_right(const std::string& events) {
    for (std::size_t i = 0; i < events.size(); i += 2) {
      if (events[i] != 'k') continue;
      const std::size_t act = events.rfind(std::string("a") + events[i + 1], i);
      for (std::size_t j = 0; j < act; j += 2) {
        if (events[j] == 't' && events[j + 1] > events[i + 1]) return false;
      }
    }
    return true;
  }

  /// Whether each lease was released before the next one was taken.
  [[nodiscard]] static bool is_held_by_one(const std::string& events) {
    bool is_held = false;
    for (std::size_t i = 0; i < events.size(); i += 2) {
      if (events[i] != 't' && events[i] != 'r') continue;
      if (is_held == (events[i] == 't')) return false;
      is_held = events[i] == 't';
    }
    return true;
  }

  [[nodiscard]] bool advance(lease_world& world, int process, std::vector<std::string>& log) {
    stepped_system system(world, process, log, how_.is_remote, how_.waits);
    if (!how_.has_clocks && process == 0) system.stop_clock();
    detail::lease_sightings seen;
    stepped_lease lease(system, 10 * second, seen);
    try {
      work_[static_cast<std::size_t>(process)](system, lease);
    } catch (...) {
    }
    return !system.is_parked();
  }

  void end(lease_world world) {
    ++ends_;
    if (world.events.find('t') == std::string::npos) ++without_;
    CAPTURE(world.events);
    REQUIRE(counts_are_right(world.events));
    if (!how_.waits) REQUIRE(is_held_by_one(world.events));
    // Whatever was left, the next one gets it.
    std::vector<std::string> log;
    const int process = static_cast<int>(work_.size());
    bool is_taken = false;
    for (bool is_over = false; !is_over;) {
      stepped_system system(world, process, log, true, true);
      detail::lease_sightings seen;
      stepped_lease lease(system, 10 * second, seen);
      try {
        is_taken = lease.try_take();
      } catch (...) {
      }
      is_over = !system.is_parked();
    }
    REQUIRE(is_taken);
  }

  std::vector<process_work> work_;
  choices how_;
  std::unordered_set<std::size_t> seen_{};
  std::size_t ends_ = 0;
  std::size_t without_ = 0;
};

/// Acts as a commit does, with a look before and after.
void act_once(stepped_system& system, stepped_lease& lease) {
  if (!lease.is_held()) return;
  system.act(lease.number());
  if (lease.is_held()) system.note('k', lease.number());
}

void take_only(stepped_system& system, stepped_lease& lease) {
  if (lease.try_take()) system.note('t', lease.number());
}

void take_and_act(stepped_system& system, stepped_lease& lease) {
  if (!lease.try_take()) return;
  system.note('t', lease.number());
  act_once(system, lease);
}

std::string lease_text(int process, bool is_free) {
  return detail::to_text({.is_free = is_free,
                          .renewed = 3,
                          .length_ns = 10 * second,
                          .token = "z",
                          .owner = {.process = process + 1, .start = 7, .place = "here", .host = "host"}});
}

lease_world with_lease(const std::string& text, int dead = -1) {
  lease_world world;
  world.names[5] = 0;
  world.files.push_back(text_number(text));
  if (dead >= 0) world.dead.insert(dead);
  return world;
}

}  // namespace

TEST_SUITE("lease") {
  TEST_CASE("the text of a lease is read as it was written, and any part of it is not") {
    const detail::lease_record lease{.is_free = false,
                                     .renewed = 17,
                                     .length_ns = 30 * second,
                                     .token = "0123",
                                     .owner = {.process = 4711, .start = 12, .place = "a b c", .host = "h"}};
    const std::string text = to_text(lease);
    CHECK(detail::read_lease(text) == lease);
    for (std::size_t bytes = 0; bytes < text.size(); ++bytes) {
      CHECK_FALSE(detail::read_lease(text.substr(0, bytes)).has_value());
      CHECK_FALSE(detail::is_foreign_lease(text.substr(0, bytes)));
    }
    detail::lease_record renewed = lease;
    renewed.renewed = ~std::uint64_t{0};
    CHECK(to_text(renewed).size() == text.size());
    renewed.is_free = true;
    CHECK(to_text(renewed).size() == text.size());
    CHECK(detail::is_foreign_lease("4711\n"));
    CHECK_FALSE(detail::read_lease("llmmem lease 1\nstate lost" + text.substr(25)).has_value());
    for (const std::uint64_t length : {std::uint64_t{0}, 601 * second}) {
      renewed.length_ns = length;
      CHECK_FALSE(detail::read_lease(to_text(renewed)).has_value());
    }
  }

  TEST_CASE("of processes that take a lease together, in any order of their calls, exactly one has it") {
    std::size_t states = 0;
    const auto race = [&](std::size_t processes, const lease_world& begin) {
      all_orders orders(std::vector<process_work>(processes, &take_only), {.waits = false});
      orders.run(begin);
      CHECK(orders.ends() != 0);
      CHECK(orders.ends_without_holder() == 0);
      states += orders.states();
    };
    for (const std::size_t processes : {std::size_t{2}, std::size_t{3}}) {
      race(processes, {});
      race(processes, with_lease(lease_text(9, true)));
      race(processes, with_lease(lease_text(9, false), 9));
    }
    MESSAGE("states: " << states);
  }

  TEST_CASE("one that was slow gets no number below that of a holder, in any order of the calls") {
    const process_work twice = [](stepped_system& system, stepped_lease& lease) {
      if (!lease.try_take()) return;
      system.note('t', lease.number());
      system.note('r', lease.number());
      lease.release();
      take_only(system, lease);
    };
    all_orders orders({twice, &take_only}, {.waits = false});
    orders.run(with_lease(lease_text(9, true)));
    CHECK(orders.ends() != 0);
    MESSAGE("states: " << orders.states());
  }

  TEST_CASE("a lease that ran out is lost, also if no process took it, and is taken again at once") {
    lease_world world;
    std::vector<std::string> log;
    stepped_system system(world, 0, log, true, true);
    system.run_freely();
    detail::lease_sightings seen;
    stepped_lease lease(system, 10 * second, seen);
    REQUIRE(lease.try_take());
    world.now += 9 * second;
    CHECK(lease.is_held());
    CHECK(lease.renew());
    world.now += 9 * second;
    CHECK(lease.is_held());
    for (const bool is_renewed : {true, false}) {
      world.now += 10 * second;
      CHECK_FALSE(lease.is_current());
      const bool is_kept = is_renewed ? lease.renew() : lease.is_held();
      CHECK_FALSE(is_kept);
      CHECK_FALSE(lease.is_held());
      const std::uint64_t before = world.now;
      REQUIRE(lease.try_take());
      CHECK(world.now == before);
    }
  }

  TEST_CASE("one that takes over gives way to an owner that renews just then, and to a faster one") {
    const std::string renewed = lease_text(8, false);  // other contents
    const auto renew = [&](lease_world& world) { world.files[0] = text_number(renewed); };
    const auto overtake = [&](lease_world& world) {
      world.names[9] = static_cast<int>(world.files.size());
      world.files.push_back(text_number(renewed));
    };
    for (const std::function<void(lease_world&)>& meanwhile :
         {std::function<void(lease_world&)>(renew), std::function<void(lease_world&)>(overtake)}) {
      lease_world world = with_lease(lease_text(9, false));
      world.before_create = meanwhile;
      std::vector<std::string> log;
      stepped_system system(world, 0, log, true, true);
      system.run_freely();
      detail::lease_sightings seen;
      stepped_lease lease(system, 10 * second, seen);
      CHECK_FALSE(lease.try_take());
      CHECK_FALSE(lease.is_held());
      CHECK_FALSE(world.names.contains(6));
      CHECK(world.names.contains(5));
    }
  }

  TEST_CASE(
      "a higher number ends a lease, also where the lower one was not removed, and so does its removal") {
    for (const bool is_renewed : {true, false}) {
      for (const bool is_removed : {true, false}) {
        lease_world world;
        std::vector<std::string> log;
        stepped_system system(world, 0, log, true, true);
        system.run_freely();
        detail::lease_sightings seen;
        stepped_lease lease(system, 10 * second, seen);
        REQUIRE(lease.try_take());
        if (is_removed) {
          world.names.clear();
        } else {
          world.names[2] = static_cast<int>(world.files.size());
          world.files.push_back(text_number(lease_text(9, false)));
        }
        const bool is_kept = is_renewed ? lease.renew() : lease.is_held();
        CHECK_FALSE(is_kept);
        CHECK_FALSE(lease.is_current());
      }
    }
  }

  TEST_CASE(
      "the second look at a lease that was renewed since needs no wait, and one that was not, the rest of "
      "it") {
    lease_world world = with_lease(lease_text(9, false));
    std::vector<std::string> log;
    detail::lease_sightings seen;
    seen.note("LOCK", {5, lease_text(8, false), 1000 * second});
    stepped_system system(world, 0, log, true, true);
    system.run_freely();
    stepped_lease lease(system, 10 * second, seen);
    CHECK_FALSE(lease.try_take());
    CHECK(world.now == 0);
    CHECK(seen.last("LOCK")->text == lease_text(9, false));
    world.now += 12 * second;
    CHECK(lease.try_take());
    CHECK(world.now == 12 * second);
  }

  TEST_CASE("where each waits for a silent owner, and any of them sleeps, at most one acts with success") {
    std::size_t states = 0;
    for (const std::string& text :
         {lease_text(9, false), std::string(), lease_text(9, false).substr(0, 60)}) {
      all_orders orders({&take_and_act, &take_and_act}, {});
      orders.run(with_lease(text));
      states += orders.states();
    }
    MESSAGE("states: " << states);
  }

  TEST_CASE(
      "an owner that renews and sleeps and one that takes over never both act with success, in any order of "
      "their calls") {
    const process_work owner = [](stepped_system& system, stepped_lease& lease) {
      if (!lease.try_take()) return;
      system.note('t', lease.number());
      for (int i = 0; i < 2; ++i) {
        if (!lease.renew()) return;
        act_once(system, lease);
      }
      lease.release();
    };
    std::size_t states = 0;
    all_orders orders({owner, &take_and_act}, {.is_remote = true});
    orders.run({});
    states += orders.states();
    // The order of the calls alone is enough: the owner's clock stands still, and its lease does not run out.
    const process_work without_clock = [](stepped_system& system, stepped_lease& lease) {
      if (!lease.try_take()) return;
      system.note('t', lease.number());
      if (lease.renew()) act_once(system, lease);
    };
    all_orders of_calls({without_clock, &take_and_act}, {.is_remote = true, .has_clocks = false});
    of_calls.run({});
    states += of_calls.states();
    MESSAGE("states: " << states);
  }

  TEST_CASE("a process killed at any step blocks nobody for good, and never makes two owners") {
    std::size_t states = 0;
    for (const bool is_remote : {true, false}) {
      all_orders orders({&take_and_act, &take_and_act}, {.is_remote = is_remote, .kills = 1});
      orders.run(with_lease(lease_text(9, is_remote), 9));
      states += orders.states();
    }
    MESSAGE("states: " << states);
  }
}
