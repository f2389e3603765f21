/// @file
/// The calls of `simulated_storage`.
#pragma once

#include <llmmem/testing/detail/simulated_disk.hpp>
#include <llmmem/testing/detail/simulated_tree.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

namespace detail {

inline simulated_disk_handle::simulated_disk_handle(const simulated_disk_handle& other) : disk_(other.disk_) {
  if (disk_ == nullptr) return;
  const std::lock_guard lock(disk_->mutex);
  ++disk_->users;
}

inline simulated_disk_handle::~simulated_disk_handle() {
  if (disk_ == nullptr) return;
  bool last = false;
  {
    const std::lock_guard lock(disk_->mutex);
    last = --disk_->users == 0;
  }
  if (last) delete disk_;
}

[[nodiscard]] inline std::string quoted(const std::string& path) {
  return "'" + path + "'";
}

/// A new name for a new or existing node.
[[nodiscard]] inline std::string name_text(const std::string& path) {
  return "name of " + quoted(path);
}

/// `rename` and `replace`: one effect in one folder.
inline void move_name(simulated_disk& disk, storage_call what, const std::string& from,
                      const std::string& to) {
  const auto source = disk.find_there(what, from);
  const auto target = disk.find(what, to);
  const std::string both = "to " + quoted(disk.full(to));
  if (source.name.empty() || target.name.empty()) disk.fail(what, from, EBUSY, both);
  if (!disk.options.rename_allowed) disk.fail(what, from, EOPNOTSUPP, both);
  if (what == storage_call::rename) {
    if (target.node != 0) disk.fail(what, from, EEXIST, both);
  } else {
    if (disk.is_folder(source.node)) disk.fail(what, from, EISDIR, both);
    if (target.node != 0 && disk.is_folder(target.node)) disk.fail(what, from, EISDIR, both);
  }
  if (source.folder != target.folder) {
    disk.fail(what, from, EXDEV, both + ", which is in another folder: a rename stays in its own");
  }
  if (source.node == target.node) return;  // two names of one file: POSIX leaves both
  disk.take_names(source.folder, {{source.name, 0}, {target.name, source.node}},
                  "rename of " + quoted(from) + " to " + quoted(to));
}

/// Adds a write in flight to the pending effects, with the present contents of its memory.
[[nodiscard]] inline std::vector<simulated_effect> pending_now(const simulated_disk& disk) {
  std::vector<simulated_effect> effects = disk.pending;
  std::map<std::uint64_t, std::uint64_t> sizes;
  for (const simulated_flight& each : disk.flights) {
    if (each.now == simulated_flight::state::landed || each.bytes.empty()) continue;
    const std::uint64_t end = each.offset + each.bytes.size();
    std::uint64_t& size = sizes.try_emplace(each.node, disk.seen.nodes.at(each.node).size).first->second;
    if (end > size) {
      size = end;
      effects.push_back({simulated_effect::kind::size,
                         each.node,
                         end,
                         {},
                         {},
                         "size of " + quoted(each.path) + ": " + std::to_string(end) + " bytes"});
    }
    effects.push_back({simulated_effect::kind::data,
                       each.node,
                       each.offset,
                       {each.bytes.begin(), each.bytes.end()},
                       {},
                       "data of " + quoted(each.path) + ": " + std::to_string(each.bytes.size()) +
                           " bytes at " + std::to_string(each.offset)});
  }
  return effects;
}

/// A moment at which the machine stops: what the device has, and what it may have.
struct simulated_crash {
  std::string name;  ///< the storage's
  simulated_tree device;
  std::vector<simulated_effect> effects;
  std::vector<std::vector<std::size_t>> needs;
  std::byte fill{};
  std::uint64_t sector_bytes = 1;

  /// Returns what is left. @pre `check(choice)` passes.
  [[nodiscard]] simulated_tree tree(const crash_choice& choice) const {
    simulated_tree left = device;
    for (std::size_t i = 0; i < choice.survives.size(); ++i) {
      if (!choice.survives[i]) continue;
      const bool torn = choice.torn && choice.torn->effect == i;
      left.apply(effects[i], fill, torn ? choice.torn->bytes : effects[i].bytes.size());
    }
    left.prune(fill);
    return left;
  }
  /// Throws `argument_error` for a state that a device cannot reach.
  void check(const crash_choice& choice) const {
    const auto survives = [&](std::size_t i) { return i < choice.survives.size() && choice.survives[i]; };
    if (choice.survives.size() > effects.size()) {
      refuse(std::to_string(choice.survives.size()) + " effects are chosen among " +
             std::to_string(effects.size()));
    }
    for (std::size_t i = 0; i < effects.size(); ++i) {
      for (const std::size_t each : needs[i]) {
        if (survives(i) && !survives(each)) {
          refuse("'" + effects[i].text + "' survives without '" + effects[each].text + "'");
        }
      }
    }
    if (!choice.torn) return;
    const auto [index, bytes] = *choice.torn;
    if (index >= effects.size() || !survives(index)) refuse("the torn write does not survive");
    const simulated_effect& torn = effects[index];
    if (bytes == 0 || bytes >= torn.bytes.size() || (torn.offset + bytes) % sector_bytes != 0) {
      refuse("'" + torn.text + "' is torn at " + std::to_string(bytes) + " bytes, where no sector of " +
             std::to_string(sector_bytes) + " bytes begins");
    }
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw argument_error("simulated_storage '" + name + "': an impossible crash: " + why);
  }
};

/// Finds the file at `path`, to damage it; throws `argument_error`. Calls `change(node)` for what running
/// code sees and for what the device has.
template <class Change>
void damage(simulated_disk& disk, const std::string& path, const std::string& what, Change&& change) {
  const std::lock_guard lock(disk.mutex);
  std::uint64_t node = 0;
  try {
    node = disk.find_file(storage_call::open, path).node;
  } catch (const storage_error& failure) {
    throw argument_error("simulated_storage: " + what + ": " + failure.what());
  }
  for (simulated_tree* tree : {&disk.seen, &disk.device}) {
    simulated_node& file = tree->nodes.at(node);
    file.data.resize(file.size, disk.options.unwritten);
    change(file, tree == &disk.seen ? disk.full(path) : std::string());
  }
  disk.trace.push_back("damage " + quoted(path) + ": " + what);
}

}  // namespace detail

inline simulated_storage::simulated_storage(simulated_storage_options options)
    : disk_(new detail::simulated_disk(std::move(options))) {}

inline void simulated_storage::make_folder(const std::string& path) {
  disk_->call(storage_call::make_folder, path, "make_folder " + detail::quoted(path), [&] {
    const auto at = disk_->find_free(storage_call::make_folder, path);
    disk_->take_names(at.folder, {{at.name, disk_->new_node(detail::simulated_node::kind::folder)}},
                      detail::name_text(path));
  });
}

inline simulated_storage::output simulated_storage::create(const std::string& path, std::uint64_t bytes) {
  detail::simulated_disk::place at;
  disk_->call(storage_call::create, path, "create " + detail::quoted(path), [&] {
    at = disk_->find_free(storage_call::create, path);
    at.node = disk_->new_node(detail::simulated_node::kind::file);
    disk_->take_names(at.folder, {{at.name, at.node}}, detail::name_text(path));
  });
  if (bytes != 0) {
    try {
      disk_->call(storage_call::reserve, path,
                  "reserve " + detail::quoted(path) + " " + std::to_string(bytes) + " bytes",
                  [&] { disk_->set_size(storage_call::reserve, path, at.node, bytes); });
    } catch (const storage_error&) {
      const std::lock_guard lock(disk_->mutex);
      const auto& names = disk_->seen.nodes.at(at.folder).names;
      const auto found = names.find(at.name);
      if (found != names.end() && found->second == at.node) {
        disk_->take_names(at.folder, {{at.name, 0}}, "removal of " + detail::quoted(path));
      }
      throw;
    }
  }
  return {disk_, at.node, path};
}

inline simulated_storage::input simulated_storage::open(const std::string& path) {
  std::uint64_t node = 0;
  disk_->call(storage_call::open, path, "open " + detail::quoted(path),
              [&] { node = disk_->find_file(storage_call::open, path).node; });
  return {disk_, node, path};
}

inline void simulated_storage::rename(const std::string& from, const std::string& to) {
  disk_->call(storage_call::rename, from, "rename " + detail::quoted(from) + " to " + detail::quoted(to),
              [&] { detail::move_name(*disk_, storage_call::rename, from, to); });
}

inline void simulated_storage::replace(const std::string& from, const std::string& to) {
  disk_->call(storage_call::replace, from, "replace " + detail::quoted(to) + " by " + detail::quoted(from),
              [&] { detail::move_name(*disk_, storage_call::replace, from, to); });
}

inline void simulated_storage::link(const std::string& from, const std::string& to) {
  disk_->call(storage_call::link, from, "link " + detail::quoted(from) + " as " + detail::quoted(to), [&] {
    const auto source = disk_->find_there(storage_call::link, from);
    if (disk_->is_folder(source.node)) disk_->fail(storage_call::link, from, EPERM);
    if (!disk_->options.links_allowed) disk_->fail(storage_call::link, from, EOPNOTSUPP);
    const auto target = disk_->find_free(storage_call::link, to);
    disk_->take_names(target.folder, {{target.name, source.node}}, detail::name_text(to));
  });
}

inline void simulated_storage::remove(const std::string& path) {
  disk_->call(storage_call::remove, path, "remove " + detail::quoted(path), [&] {
    const auto at = disk_->find_file(storage_call::remove, path);
    disk_->take_names(at.folder, {{at.name, 0}}, "removal of " + detail::quoted(path));
  });
}

inline void simulated_storage::remove_folder(const std::string& path) {
  disk_->call(storage_call::remove_folder, path, "remove_folder " + detail::quoted(path), [&] {
    const std::uint64_t node = disk_->find_folder(storage_call::remove_folder, path);
    if (path.empty()) disk_->fail(storage_call::remove_folder, path, EBUSY);
    if (!disk_->seen.nodes.at(node).names.empty()) {
      disk_->fail(storage_call::remove_folder, path, ENOTEMPTY);
    }
    const auto at = disk_->find(storage_call::remove_folder, path);
    disk_->take_names(at.folder, {{at.name, 0}}, "removal of " + detail::quoted(path));
  });
}

inline std::vector<storage_entry> simulated_storage::list(const std::string& path) {
  std::map<std::pair<std::uint64_t, std::string>, storage_entry> entries;
  disk_->call(storage_call::list, path, "list " + detail::quoted(path), [&] {
    for (const auto& [name, node] :
         disk_->seen.nodes.at(disk_->find_folder(storage_call::list, path)).names) {
      // Sorted names would hide code that relies on their order.
      std::uint64_t place = detail::spread(disk_->options.seed);
      for (const char each : name)
        place = detail::spread(place ^ static_cast<unsigned char>(each));
      const auto what = disk_->is_folder(node) ? storage_entry::kind::folder : storage_entry::kind::file;
      entries.emplace(std::pair(place, name), storage_entry{name, what});
    }
  });
  std::vector<storage_entry> listed;
  listed.reserve(entries.size());
  for (auto& [place, entry] : entries)
    listed.push_back(std::move(entry));
  return listed;
}

inline void simulated_storage::sync_folder(const std::string& path) {
  constexpr auto what = storage_call::sync_folder;
  disk_->call(
      what, path, "sync_folder " + detail::quoted(path),
      [&] {
        const std::uint64_t node = disk_->find_folder(what, path);
        if (disk_->dead.contains(node)) disk_->fail(what, path, EIO, "a sync of it has failed before");
        disk_->settle(node);
      },
      [&](bool lost) {
        const std::uint64_t node = disk_->find_folder(what, path);
        if (lost) disk_->dead.insert(node);
      });
}

inline std::optional<simulated_storage::lock_type> simulated_storage::try_lock(const std::string& path) {
  constexpr auto what = storage_call::lock;
  std::uint64_t node = 0;
  try {
    disk_->call(what, path, "lock " + detail::quoted(path), [&] {
      auto at = disk_->find(what, path);
      if (at.node == 0) {
        at.node = disk_->new_node(detail::simulated_node::kind::file);
        disk_->take_names(at.folder, {{at.name, at.node}}, detail::name_text(path));
      }
      if (disk_->is_folder(at.node)) disk_->fail(what, path, EISDIR);
      if (disk_->locks.insert(at.node).second) node = at.node;
    });
  } catch (const storage_error&) {
    const std::lock_guard lock(disk_->mutex);
    disk_->locks.erase(node);
    throw;
  }
  if (node == 0) return std::nullopt;
  return lock_type(disk_, node, path);
}

inline std::uint64_t simulated_storage::nonce() {
  const std::lock_guard lock(disk_->mutex);
  return detail::spread(detail::spread(disk_->options.seed) + disk_->nonces++);
}

inline std::string simulated_storage::path(const std::string& below) const {
  return disk_->full(below);
}

inline std::uint64_t simulated_storage::calls() const {
  const std::lock_guard lock(disk_->mutex);
  return disk_->calls;
}

inline void simulated_storage::cut_power_at(std::uint64_t call, power_cut_when when) {
  const std::lock_guard lock(disk_->mutex);
  disk_->options.power_cut_at = call;
  disk_->options.cut = when;
}

inline bool simulated_storage::power_is_off() const {
  const std::lock_guard lock(disk_->mutex);
  return disk_->off;
}

inline std::vector<pending_effect> simulated_storage::pending() const {
  const std::lock_guard lock(disk_->mutex);
  const auto effects = detail::pending_now(*disk_);
  auto needs = detail::needs_of(effects);
  std::vector<pending_effect> texts;
  texts.reserve(effects.size());
  for (std::size_t i = 0; i < effects.size(); ++i) {
    texts.push_back({effects[i].text, std::move(needs[i]), effects[i].offset, effects[i].bytes.size()});
  }
  return texts;
}

inline detail::simulated_crash simulated_storage::crash_now() const {
  const std::lock_guard lock(disk_->mutex);
  detail::simulated_crash crash;
  crash.name = disk_->options.name;
  crash.device = disk_->device;
  crash.effects = detail::pending_now(*disk_);
  crash.needs = detail::needs_of(crash.effects);
  crash.fill = disk_->options.unwritten;
  crash.sector_bytes = disk_->options.sector_bytes;
  return crash;
}

inline simulated_storage simulated_storage::restarted(const detail::simulated_crash& crash,
                                                      const crash_choice& choice,
                                                      detail::simulated_tree tree) const {
  const std::lock_guard lock(disk_->mutex);
  simulated_storage_options options = disk_->options;
  options.faults.clear();
  options.power_cut_at = 0;
  detail::simulated_disk_handle after(new detail::simulated_disk(std::move(options)));
  after->trace = disk_->trace;
  after->trace.emplace_back("-- crash --");
  for (std::size_t i = 0; i < crash.effects.size(); ++i) {
    const bool survived = i < choice.survives.size() && choice.survives[i];
    const bool torn = choice.torn && choice.torn->effect == i;
    after->trace.push_back((survived ? "survived: " : "lost: ") + crash.effects[i].text +
                           (torn ? ", torn after " + std::to_string(choice.torn->bytes) : ""));
  }
  after->seen = tree;
  after->device = std::move(tree);
  after->next_node = disk_->next_node;
  // Far enough apart that the two never give the same number.
  after->nonces = disk_->nonces + (std::uint64_t{1} << 32);
  return {std::in_place, std::move(after)};
}

inline simulated_storage simulated_storage::after_crash(const crash_choice& choice) const {
  const detail::simulated_crash crash = crash_now();
  crash.check(choice);
  return restarted(crash, choice, crash.tree(choice));
}

inline crash_choice simulated_storage::all_survives() const {
  return {.survives = std::vector<bool>(pending().size(), true)};
}

inline void simulated_storage::set_faults(std::vector<storage_fault> faults) {
  const std::lock_guard lock(disk_->mutex);
  disk_->options.faults = std::move(faults);
  disk_->restart_faults();
}

inline void simulated_storage::flip(const std::string& path, std::uint64_t bit) {
  detail::damage(*disk_, path, "flip bit " + std::to_string(bit), [&](auto& file, const std::string& where) {
    if (bit / 8 < file.size) {
      file.data[bit / 8] ^= std::byte{1} << (bit % 8);
    } else if (!where.empty()) {
      throw argument_error(where + ": bit " + std::to_string(bit) + " cannot be flipped in a file of " +
                           std::to_string(file.size) + " bytes");
    }
  });
}

inline void simulated_storage::truncate(const std::string& path, std::uint64_t bytes) {
  detail::damage(*disk_, path, "truncate to " + std::to_string(bytes), [&](auto& file, const auto& where) {
    if (!where.empty() && bytes >= file.size) {
      throw argument_error(where + ": cannot be truncated to " + std::to_string(bytes) +
                           " bytes, because it has " + std::to_string(file.size));
    }
    if (bytes < file.size) file.size = bytes;
    file.data.resize(file.size);
  });
}

inline void simulated_storage::grow(const std::string& path, std::uint64_t bytes) {
  detail::damage(*disk_, path, "grow to " + std::to_string(bytes), [&](auto& file, const auto& where) {
    if (!where.empty() && bytes <= file.size) {
      throw argument_error(where + ": cannot grow to " + std::to_string(bytes) + " bytes, because it has " +
                           std::to_string(file.size));
    }
    if (bytes > file.size) file.size = bytes;
    file.data.resize(file.size, disk_->options.unwritten);
  });
}

inline std::map<std::string, std::vector<std::byte>> simulated_storage::files() const {
  const std::lock_guard lock(disk_->mutex);
  std::map<std::string, std::vector<std::byte>> all;
  disk_->seen.walk([&](const std::string& path, std::uint64_t, const detail::simulated_node& node) {
    if (node.is_folder()) return;
    all[path] = node.data;
    all[path].resize(node.size, disk_->options.unwritten);
  });
  return all;
}

inline std::vector<std::string> simulated_storage::folders() const {
  const std::lock_guard lock(disk_->mutex);
  std::vector<std::string> all;
  disk_->seen.walk([&](const std::string& path, std::uint64_t, const detail::simulated_node& node) {
    if (node.is_folder()) all.push_back(path);
  });
  return all;
}

inline std::uint64_t simulated_storage::fingerprint() const {
  const std::lock_guard lock(disk_->mutex);
  detail::simulated_tree all = disk_->seen;
  all.prune(disk_->options.unwritten);
  return all.fingerprint();
}

inline std::vector<std::string> simulated_storage::trace() const {
  const std::lock_guard lock(disk_->mutex);
  return disk_->trace;
}

inline simulated_storage_options simulated_storage::options() const {
  const std::lock_guard lock(disk_->mutex);
  return disk_->options;
}

inline simulated_storage::output::output(detail::simulated_disk_handle disk, std::uint64_t node,
                                         std::string path)
    : disk_(std::move(disk)), node_(node), path_(std::move(path)) {}

inline simulated_storage::output::~output() {
  if (!disk_) return;
  const std::lock_guard lock(disk_->mutex);
  try {
    disk_->land_all_of(node_);
  } catch (const storage_error&) {   // no space: what was not synced may be lost
  } catch (const std::bad_alloc&) {  // no memory: the same
  }
}

inline simulated_storage::output::write_token simulated_storage::output::begin_write(
    std::uint64_t offset, std::span<const std::byte> bytes) {
  constexpr auto what = storage_call::write;
  write_token token;
  const std::string extent = std::to_string(bytes.size()) + " bytes at " + std::to_string(offset);
  try {
    disk_->call(what, path_, "begin_write " + detail::quoted(path_) + " " + extent, [&] {
      if (offset > max_bytes || bytes.size() > max_bytes - offset) disk_->fail(what, path_, EFBIG);
      for (const auto& each : disk_->flights) {
        const bool apart = offset + bytes.size() <= each.offset || each.offset + each.bytes.size() <= offset;
        if (each.node != node_ || apart) continue;
        disk_->fail(what, path_, EINVAL,
                    extent + " overlap a write in flight of " + std::to_string(each.bytes.size()) +
                        " bytes at " + std::to_string(each.offset));
      }
      detail::simulated_flight flight{disk_->next_write++, node_, offset, bytes, path_};
      if (disk_->options.writes == simulated_writes::at_once) disk_->land(flight);
      token.number = flight.number;
      disk_->flights.push_back(std::move(flight));
    });
  } catch (const storage_error&) {
    // Its caller has no token to wait with, so the memory belongs to the caller again.
    const std::lock_guard lock(disk_->mutex);
    auto flight = disk_->take_out(token.number);
    disk_->land(flight);
    throw;
  }
  return token;
}

inline void simulated_storage::output::finish_write(const write_token& token) {
  disk_->call(
      storage_call::write, path_, "finish_write " + detail::quoted(path_),
      [&] {
        auto flight = disk_->take_out(token.number);
        disk_->land(flight);
      },
      // A refused write has ended too.
      [&](bool) { (void)disk_->take_out(token.number); });
}

inline void simulated_storage::output::sync() {
  constexpr auto what = storage_call::sync;
  const auto refused = [&](bool lost) {
    disk_->land_all_of(node_);
    if (lost) disk_->forget(node_);
  };
  try {
    disk_->call(
        what, path_, "sync " + detail::quoted(path_),
        [&] {
          disk_->land_all_of(node_);
          if (disk_->dead.contains(node_)) disk_->fail(what, path_, EIO, "a sync of it has failed before");
          disk_->settle(node_);
        },
        refused);
  } catch (const storage_error&) {
    const std::lock_guard lock(disk_->mutex);
    disk_->dead.insert(node_);
    throw;
  }
}

inline simulated_storage::input::input(detail::simulated_disk_handle disk, std::uint64_t node,
                                       std::string path)
    : disk_(std::move(disk)), node_(node), path_(std::move(path)) {}

inline std::uint64_t simulated_storage::input::bytes() const {
  const std::lock_guard lock(disk_->mutex);
  return disk_->seen.nodes.at(node_).size;
}

inline void simulated_storage::input::read(std::uint64_t offset, std::span<std::byte> into) const {
  constexpr auto what = storage_call::read;
  disk_->call(what, path_,
              "read " + detail::quoted(path_) + " " + std::to_string(into.size()) + " bytes at " +
                  std::to_string(offset),
              [&] {
                const detail::simulated_node& file = disk_->seen.nodes.at(node_);
                if (offset > file.size || into.size() > file.size - offset) {
                  disk_->fail(what, path_, 0,
                              std::to_string(into.size()) + " bytes at " + std::to_string(offset) +
                                  " pass its end at " + std::to_string(file.size));
                }
                for (std::size_t i = 0; i < into.size(); ++i) {
                  into[i] = offset + i < file.data.size() ? file.data[offset + i] : disk_->options.unwritten;
                }
              });
}

inline simulated_storage::lock_type::lock_type(detail::simulated_disk_handle disk, std::uint64_t node,
                                               std::string path)
    : disk_(std::move(disk)), node_(node), path_(std::move(path)) {}

inline simulated_storage::lock_type::~lock_type() {
  if (!disk_) return;
  const std::lock_guard lock(disk_->mutex);
  disk_->locks.erase(node_);
}

inline bool simulated_storage::lock_type::is_held() const {
  if (!disk_) return false;
  const std::lock_guard lock(disk_->mutex);
  try {
    return !disk_->off && disk_->find(storage_call::lock, path_).node == node_;
  } catch (const storage_error&) {
    return false;  // its folder no longer exists
  }
}

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
