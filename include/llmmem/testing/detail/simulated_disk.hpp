/// @file
/// The state of a `simulated_storage`: both accounts, the power, the faults and the owners.
#pragma once

#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/testing/detail/simulated_tree.hpp>
#include <llmmem/testing/simulated_storage_options.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {
namespace detail {

/// A write that `finish_write` has not ended yet.
struct simulated_flight {
  std::uint64_t number = 0;
  std::uint64_t node = 0;
  std::uint64_t offset = 0;
  std::span<const std::byte> bytes;
  std::string path;
  enum class state : std::uint8_t { under_way, landed } now = state::under_way;
};

/// @par Thread safety   all but `call` under `mutex`, which `call` takes.
struct simulated_disk {
  explicit simulated_disk(simulated_storage_options given) : options(std::move(given)) {
    if (options.sector_bytes == 0) {
      throw argument_error("simulated_storage '" + options.name +
                           "': sectors of 0 bytes; sector_bytes is at least 1");
    }
    restart_faults();
  }

  /// Runs `work` as a call: counts it, and lets it fail as planned. Runs `refused` if the call never begins.
  template <class Work, class Refused>
  void call(storage_call what, const std::string& path, const std::string& text, Work&& work,
            Refused&& refused) {
    const std::lock_guard lock(mutex);
    enter(text);
    try {
      const storage_fault fault = next_fault(what);
      const bool syncs = what == storage_call::sync || what == storage_call::sync_folder;
      if (fault.count != 0 && fault.what != storage_fault::kind::reported) {
        refused(syncs && fault.what == storage_fault::kind::lost);
        throw storage_error(what, full(path), fault.number, "a planned fault");
      }
      work();
      if (fault.count != 0) throw storage_error(what, full(path), fault.number, "a planned fault");
    } catch (const storage_error& failure) {
      trace.back() += ": " + std::error_code(failure.number(), std::generic_category()).message();
      if (cut_is_due()) power_off();
      throw;
    }
    if (cut_is_due()) power_off();
  }
  template <class Work>
  void call(storage_call what, const std::string& path, const std::string& text, Work&& work) {
    call(what, path, text, std::forward<Work>(work), [](bool) {});
  }

  // Paths.
  [[nodiscard]] std::string full(const std::string& path) const {
    return path.empty() ? options.name : options.name + "/" + path;
  }
  /// The place of a name: its folder and the last part.
  struct place {
    std::uint64_t folder = simulated_tree::root;
    std::string name;
    std::uint64_t node = 0;  ///< the node that it leads to; 0: none

    [[nodiscard]] bool same_as(const place& other) const {
      return folder == other.folder && name == other.name;
    }
  };
  /// Throws ENOENT or ENOTDIR if there is no such folder, EINVAL for an invalid path. Name "" is the root.
  [[nodiscard]] place find(storage_call what, const std::string& path) const {
    place at;
    at.node = simulated_tree::root;
    std::size_t begin = 0;
    while (!path.empty()) {
      std::size_t end = path.find('/', begin);
      if (end == std::string::npos) end = path.size();
      at.folder = at.node;
      at.name = path.substr(begin, end - begin);
      if (at.name.empty() || at.name == "." || at.name == "..") {
        fail(what, path, EINVAL, "a path's parts are names, separated by one '/'");
      }
      if (at.name.size() > 255) fail(what, path, ENAMETOOLONG);
      if (at.folder == 0) fail(what, path, ENOENT, "its folder is not there");
      if (!seen.nodes.at(at.folder).is_folder()) fail(what, path, ENOTDIR);
      const auto& names = seen.nodes.at(at.folder).names;
      const auto found = names.find(at.name);
      at.node = found == names.end() ? 0 : found->second;
      if (end == path.size()) break;
      begin = end + 1;
    }
    return at;
  }
  [[nodiscard]] place find_there(storage_call what, const std::string& path) const {
    place at = find(what, path);
    if (at.node == 0) fail(what, path, ENOENT);
    return at;
  }
  [[nodiscard]] place find_file(storage_call what, const std::string& path) const {
    place at = find_there(what, path);
    if (is_folder(at.node)) fail(what, path, EISDIR);
    return at;
  }
  [[nodiscard]] std::uint64_t find_folder(storage_call what, const std::string& path) const {
    const place at = find_there(what, path);
    if (!is_folder(at.node)) fail(what, path, ENOTDIR);
    return at.node;
  }
  [[nodiscard]] place find_free(storage_call what, const std::string& path) const {
    place at = find(what, path);
    if (at.node != 0) fail(what, path, EEXIST);
    return at;
  }
  [[nodiscard]] bool is_folder(std::uint64_t node) const { return seen.nodes.at(node).is_folder(); }
  [[noreturn]] void fail(storage_call what, const std::string& path, int number,
                         const std::string& detail = {}) const {
    throw storage_error(what, full(path), number, detail);
  }

  // Effects.
  void take(simulated_effect effect) {
    seen.apply(effect, options.unwritten);
    pending.push_back(std::move(effect));
  }
  void take_names(std::uint64_t folder, std::vector<std::pair<std::string, std::uint64_t>> names,
                  std::string text) {
    take({simulated_effect::kind::names, folder, 0, {}, std::move(names), std::move(text)});
  }
  [[nodiscard]] std::uint64_t new_node(simulated_node::kind what) {
    const std::uint64_t number = next_node++;
    seen.nodes[number].what = what;
    device.nodes[number].what = what;
    return number;
  }
  void set_size(storage_call what, const std::string& path, std::uint64_t node, std::uint64_t bytes) {
    const std::uint64_t now = seen.nodes.at(node).size;
    const std::uint64_t used = options.capacity == max_bytes ? 0 : seen.used();
    if (bytes > max_bytes) fail(what, path, EFBIG);
    if (bytes > now && (used > options.capacity || bytes - now > options.capacity - used)) {
      fail(what, path, ENOSPC,
           std::to_string(bytes - now) + " bytes requested, " + std::to_string(used) + " of " +
               std::to_string(options.capacity) + " are in use");
    }
    take({simulated_effect::kind::size,
          node,
          bytes,
          {},
          {},
          "size of '" + path + "': " + std::to_string(bytes) + " bytes"});
  }
  /// Moves a write's bytes to where reads see them.
  void land(simulated_flight& flight) {
    if (flight.now == simulated_flight::state::landed) return;
    flight.now = simulated_flight::state::landed;
    if (flight.bytes.empty()) return;
    const std::uint64_t end = flight.offset + flight.bytes.size();
    if (end > seen.nodes.at(flight.node).size) set_size(storage_call::write, flight.path, flight.node, end);
    take({simulated_effect::kind::data,
          flight.node,
          flight.offset,
          {flight.bytes.begin(), flight.bytes.end()},
          {},
          "data of '" + flight.path + "': " + std::to_string(flight.bytes.size()) + " bytes at " +
              std::to_string(flight.offset)});
  }
  /// Returns the write of that number, no longer in flight; one that has landed if there is none.
  [[nodiscard]] simulated_flight take_out(std::uint64_t number) {
    simulated_flight flight;
    flight.now = simulated_flight::state::landed;
    std::erase_if(flights, [&](const simulated_flight& each) {
      if (each.number == number) flight = each;
      return each.number == number;
    });
    return flight;
  }
  /// Lands all writes of a file and forgets them: their memory belongs to its owner again.
  void land_all_of(std::uint64_t node) {
    std::vector<simulated_flight> mine;
    std::erase_if(flights, [&](const simulated_flight& each) {
      if (each.node == node) mine.push_back(each);
      return each.node == node;
    });
    for (simulated_flight& each : mine)
      land(each);
  }
  /// Moves the pending effects that a sync of that node covers to the device.
  void settle(std::uint64_t node) {
    std::erase_if(pending, [&](const simulated_effect& each) {
      if (each.node == node) device.apply(each, options.unwritten);
      return each.node == node;
    });
  }
  void forget(std::uint64_t node) {
    std::erase_if(pending, [node](const simulated_effect& each) { return each.node == node; });
  }

  // Power.
  [[nodiscard]] bool cut_is_due() const { return options.power_cut_at != 0 && calls >= options.power_cut_at; }
  [[noreturn]] void power_off() {
    off = true;
    trace.emplace_back("-- power cut --");
    // Writes in flight may have reached the device with the present contents of their memory, which may not
    // be read later.
    std::vector<simulated_flight> last;
    std::swap(last, flights);
    for (simulated_flight& each : last) {
      try {
        land(each);
      } catch (const storage_error&) {  // no space: the write did not arrive
      }
    }
    throw power_cut{calls};
  }
  void enter(const std::string& text) {
    if (off) throw power_cut{calls};
    ++calls;
    if (options.power_cut_at != 0 &&
        (calls > options.power_cut_at ||
         (calls == options.power_cut_at && options.cut == power_cut_when::before_call))) {
      power_off();
    }
    trace.push_back(text);
  }

  // Faults.
  void restart_faults() {
    fault_seen.assign(options.faults.size(), 0);
    fault_left.clear();
    for (const storage_fault& each : options.faults)
      fault_left.push_back(each.count);
  }
  /// Returns the fault of this call; one with `count` 0 if there is none.
  [[nodiscard]] storage_fault next_fault(storage_call what) {
    storage_fault found;
    found.count = 0;
    for (std::size_t i = 0; i < options.faults.size(); ++i) {
      const storage_fault& each = options.faults[i];
      if (each.call && *each.call != what) continue;
      const std::uint64_t number = ++fault_seen[i];
      if (fault_left[i] == 0 || number < each.first) continue;
      const std::uint64_t since = number - each.first;
      if (since != 0 && (each.every == 0 || since % each.every != 0)) continue;
      if (found.count != 0) continue;
      --fault_left[i];
      found = each;
      found.count = 1;
    }
    return found;
  }

  std::mutex mutex;
  simulated_storage_options options;
  simulated_tree seen;
  simulated_tree device;
  std::vector<simulated_effect> pending;
  std::vector<simulated_flight> flights;
  std::set<std::uint64_t> dead;   ///< files and folders that no sync makes durable any longer
  std::set<std::uint64_t> locks;  ///< files that are locked
  std::vector<std::uint64_t> fault_seen;
  std::vector<std::uint64_t> fault_left;
  std::vector<std::string> trace;
  std::uint64_t next_node = simulated_tree::root + 1;
  std::uint64_t next_write = 1;
  std::uint64_t calls = 0;
  std::uint64_t nonces = 0;
  bool off = false;
  std::uint64_t users = 1;  ///< storages, outputs, inputs and locks
};

}  // namespace detail
}  // namespace testing
}  // namespace v0
}  // namespace llmmem
