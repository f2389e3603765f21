/// @file
/// `lease`: the protocol of a lease file, apart from the system, so that tests go through its interleavings.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The process that owns a lease, as far as a process of the same machine can check it.
struct lease_owner {
  std::int64_t process = 0;
  std::uint64_t start = 0;  ///< of the process, in ticks since the machine started
  std::string place{};      ///< the boot of the machine and the namespaces of its numbers; empty if unknown
  std::string host{};       ///< for people

  friend bool operator==(const lease_owner&, const lease_owner&) = default;
};

/// The contents of a lease file. All texts of one lease have the same length: a renewal replaces the bytes in
/// place, and changes digits only.
struct lease_record {
  bool is_free = false;  ///< its owner released it, or gave it up
  std::uint64_t renewed = 0;
  std::uint64_t length_ns = 0;
  std::string token{};  ///< drawn at random for each lease
  lease_owner owner{};

  friend bool operator==(const lease_record&, const lease_record&) = default;
};

inline constexpr std::string_view lease_mark = "llmmem lease 1\n";
inline constexpr std::uint64_t least_lease_ns = 1'000'000;
/// How often a lease is renewed at least, so that others soon see that its owner lives.
inline constexpr std::uint64_t longest_renewal_ns = 2'000'000'000;
/// How often a lease is read while it is watched, at least.
inline constexpr std::uint64_t longest_look_ns = 250'000'000;
inline constexpr std::uint64_t longest_lease_ns = std::uint64_t{600} * 1'000'000'000;

[[nodiscard]] inline std::string to_text(const lease_record& lease) {
  const std::string count = std::to_string(lease.renewed);
  std::string text(lease_mark);
  text += lease.is_free ? "state free\n" : "state held\n";
  text += "renewed " + std::string(count.size() < 20 ? 20 - count.size() : 0, '0') + count + "\n";
  text += "length_ns " + std::to_string(lease.length_ns) + "\n";
  text += "token " + lease.token + "\n";
  text += "process " + std::to_string(lease.owner.process) + "\n";
  text += "start " + std::to_string(lease.owner.start) + "\n";
  text += "place " + lease.owner.place + "\n";
  text += "host " + lease.owner.host + "\n";
  return text + "end\n";
}

/// Returns nothing for contents that are not whole: its creation was interrupted, or a write was torn.
[[nodiscard]] inline std::optional<lease_record> read_lease(std::string_view text) {
  const auto take = [&text](std::string_view name) -> std::optional<std::string_view> {
    if (!text.starts_with(name)) return std::nullopt;
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view value = text.substr(name.size(), end - name.size());
    text.remove_prefix(end + 1);
    return value;
  };
  const auto take_number = [&take](std::string_view name) -> std::optional<std::uint64_t> {
    const std::optional<std::string_view> digits = take(name);
    if (!digits || digits->empty() || digits->size() > 20) return std::nullopt;
    std::uint64_t value = 0;
    for (const char each : *digits) {
      const auto digit = static_cast<std::uint64_t>(each - '0');
      if (each < '0' || each > '9' || value > (~std::uint64_t{0} - digit) / 10) return std::nullopt;
      value = value * 10 + digit;
    }
    return value;
  };
  if (!text.starts_with(lease_mark)) return std::nullopt;
  text.remove_prefix(lease_mark.size());
  const auto state = take("state ");
  const auto renewed = take_number("renewed ");
  const auto length = take_number("length_ns ");
  const auto token = take("token ");
  const auto process = take_number("process ");
  const auto start = take_number("start ");
  const auto place = take("place ");
  const auto host = take("host ");
  if (!state || (*state != "free" && *state != "held") || !renewed || !length || !token || !process ||
      !start || !place || !host || text != "end\n" || *length < least_lease_ns ||
      *length > longest_lease_ns || *process > std::uint64_t{0x7FFF'FFFF})
    return std::nullopt;
  return lease_record{.is_free = *state == "free",
                      .renewed = *renewed,
                      .length_ns = *length,
                      .token = std::string(*token),
                      .owner = {.process = static_cast<std::int64_t>(*process),
                                .start = *start,
                                .place = std::string(*place),
                                .host = std::string(*host)}};
}

/// Whether the contents cannot be those of a lease, also not in part.
[[nodiscard]] inline bool is_foreign_lease(std::string_view text) noexcept {
  const std::size_t common = text.size() < lease_mark.size() ? text.size() : lease_mark.size();
  return text.substr(0, common) != lease_mark.substr(0, common);
}

/// What this process saw last in the leases of others, by name, and when by its own clock. A lease whose
/// contents changed since is renewed by a living owner: the next look then need not wait.
///
/// @par Thread safety   any threads.
class lease_sightings {
 public:
  struct sighting {
    std::uint64_t number = 0;
    std::string text{};
    std::uint64_t since_ns = 0;
  };

  [[nodiscard]] std::optional<sighting> last(const std::string& name) const {
    const std::scoped_lock lock(mutex_);
    for (const named& each : all_) {
      if (each.name == name) return each.seen;
    }
    return std::nullopt;
  }
  void note(const std::string& name, sighting seen) {
    const std::scoped_lock lock(mutex_);
    for (named& each : all_) {
      if (each.name != name) continue;
      each.seen = std::move(seen);
      return;
    }
    if (all_.size() >= max_names) all_.clear();  // then they are watched again
    all_.push_back({name, std::move(seen)});
  }
  void forget(const std::string& name) {
    const std::scoped_lock lock(mutex_);
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (all_[i].name != name) continue;
      if (i + 1 != all_.size()) all_[i] = std::move(all_.back());
      all_.pop_back();
      return;
    }
  }

 private:
  struct named {
    std::string name{};
    sighting seen{};
  };

  static constexpr std::size_t max_names = 256;
  mutable std::mutex mutex_;
  std::vector<named> all_;
};

/// A lease of one name.
///
/// The leases of a name are files with ascending numbers; the one with the highest number counts. Its
/// successor is the file with the next number, which is created exclusively: of any number of processes, one
/// succeeds. So no process removes or overwrites what another one may hold:
///
/// - *Take.* Read the highest lease; continue if it is free, if its owner is dead, or if its contents
///   stay the same for its whole length, by the clock of the process that watches (two clocks are never
///   compared).
///   Create the next number. Then read the former lease again: if it was renewed meanwhile, its owner lives,
///   and the new file is removed. A higher number means that another process was faster, too.
/// - *Renew.* Write own contents in place; then look for a higher number. In any order of this and of a take,
///   the owner sees the higher number, or the one that takes sees the renewal, or both give way.
/// - *Hold.* Until `length_ns` after the beginning of the last renewal, and only while no higher number
///   exists. A lease that ran out is lost permanently: its owner takes a new one like any other process.
/// - Only the holder removes lower numbers. The highest stays, also a free one, so that no number comes back.
///
/// @tparam System   `numbers()`: of all existing leases of the name; `read(number)`: their contents, nothing
///   if there is none; `create(number, text)`: exclusively, false if it exists; `write(text)`: replaces the
///   contents of the file that this object created, also if its name is another's now; `is_named(number)`:
///   whether that file still has this name; `remove(number)`; `remove_drafts()`: what interrupted creations
///   left; `now_ns()`; `pause(ns)`; `owner()`; `is_dead(owner)`; `token()`; `name()`; `ends_with_name()`:
///   whether no process will ask for the name again.
/// @par Thread safety   one thread at a time; `ends_ns` any.
template <class System>
class lease {
 public:
  lease(System& system, std::uint64_t length_ns, lease_sightings& seen)
      : system_(&system), seen_(&seen), length_ns_(length_ns) {}
  lease(const lease&) = delete;
  lease& operator=(const lease&) = delete;

  /// Takes the lease, or returns false if another one has it. Waits for up to a quarter of its length, 2 s
  /// at most, while a living owner renews it, and for its length and an eighth if the owner is silent.
  /// @throws io_error  for a file that is no lease, and the system's errors.
  [[nodiscard]] bool try_take() {
    for (int tries = 0; tries < 16; ++tries) {
      const std::uint64_t before = highest();
      std::string seen;
      if (before != 0) {
        std::optional<std::string> text = system_->read(before);
        if (!text) continue;  // a holder with a higher number removed it
        seen = std::move(*text);
        if (!may_take(before, seen)) return false;
      }
      return create_after(before, seen);
    }
    return false;
  }

  /// Whether there is a lease of the name, of any owner, also a free one.
  [[nodiscard]] bool exists() const { return highest() != 0; }

  /// Whether this object has the lease now, by what the folder shows and by its own clock.
  [[nodiscard]] bool is_held() {
    if (ends_ns_.load(std::memory_order_relaxed) == 0) return false;
    return (is_current() && is_last()) || give_up();
  }
  /// The same by the clock alone: without a look at the folder.
  [[nodiscard]] bool is_current() const noexcept {
    const std::uint64_t end = ends_ns_.load(std::memory_order_acquire);
    return end != 0 && system_->now_ns() < end;
  }

  /// Renews the lease. @return false if it is lost. @throws the system's errors: it is held until it runs
  /// out.
  bool renew() {
    if (ends_ns_.load(std::memory_order_relaxed) == 0) return false;
    const std::uint64_t begun = system_->now_ns();
    if (!is_current()) return give_up();
    ++record_.renewed;
    system_->write(to_text(record_));
    if (!is_last()) return give_up();
    ends_ns_.store(begun + length_ns_, std::memory_order_release);
    return true;
  }

  /// Ends it; the next process may take it at once.
  void release() noexcept {
    if (record_.token.empty()) return;
    // Where leases of the name were removed before, another process may have this number by now.
    if (system_->ends_with_name() && system_->is_named(number_)) system_->remove(number_);
    give_up();
    record_.token.clear();
  }

  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

 private:
  [[nodiscard]] std::uint64_t highest() const {
    std::uint64_t most = 0;
    for (const std::uint64_t each : system_->numbers())
      most = each > most ? each : most;
    return most;
  }
  [[nodiscard]] bool is_last() const { return highest() == number_ && system_->is_named(number_); }

  /// Writes only to the file that this object created: another lease stays as it is.
  bool give_up() noexcept {
    ends_ns_.store(0, std::memory_order_release);
    record_.is_free = true;
    try {
      system_->write(to_text(record_));
    } catch (...) {  // others wait until it runs out
    }
    return false;
  }

  [[nodiscard]] bool may_take(std::uint64_t number, const std::string& text) {
    const std::optional<lease_record> found = read_lease(text);
    if (!found && is_foreign_lease(text)) {
      throw io_error(
          system_->name() + "." + std::to_string(number) +
          ": it is not a lease file; another program wrote it: remove it if no process uses the file "
          "that it locks");
    }
    if (found && (found->is_free || system_->is_dead(found->owner))) return true;
    const std::uint64_t length = found ? found->length_ns : length_ns_;
    const std::uint64_t now = system_->now_ns();
    lease_sightings::sighting seen{number, text, now};
    if (const auto last = seen_->last(system_->name()); last && last->number == number) {
      if (last->text != text) {
        seen_->note(system_->name(), std::move(seen));
        return false;
      }
      seen.since_ns = last->since_ns;
    }
    const std::uint64_t end = seen.since_ns + length + length / 8;
    seen_->note(system_->name(), std::move(seen));
    // At least one look follows the end, even if this process slept in between.
    for (bool is_over = false;;) {
      const std::optional<std::string> again = system_->read(number);
      if (!again) return false;
      if (*again != text) {
        if (is_freed(text, *again)) return true;
        seen_->note(system_->name(), {number, *again, system_->now_ns()});
        return false;
      }
      if (is_over) return true;
      const std::uint64_t at = system_->now_ns();
      is_over = at >= end;
      if (is_over) continue;
      const std::uint64_t look = length / 16 + 1 < longest_look_ns ? length / 16 + 1 : longest_look_ns;
      system_->pause(end - at < look ? end - at : look);
    }
  }

  /// Whether the lease that was judged is as it was, or free.
  [[nodiscard]] bool is_unchanged(std::uint64_t number, const std::string& text) const {
    const std::optional<std::string> now = system_->read(number);
    if (!now) return false;
    return *now == text || is_freed(text, *now);
  }
  [[nodiscard]] static bool is_freed(const std::string& before, const std::string& now) {
    const std::optional<lease_record> was = read_lease(before);
    const std::optional<lease_record> is = read_lease(now);
    return was && is && is->is_free && is->token == was->token;
  }

  [[nodiscard]] bool create_after(std::uint64_t before, const std::string& seen) {
    if (before == ~std::uint64_t{0}) {
      throw io_error(system_->name() + "." + std::to_string(before) +
                     ": no higher number exists; remove the file if no process uses the file that it locks");
    }
    lease_record made{.is_free = false,
                      .renewed = 0,
                      .length_ns = length_ns_,
                      .token = system_->token(),
                      .owner = system_->owner()};
    const std::uint64_t begun = system_->now_ns();
    if (!system_->create(before + 1, to_text(made))) return false;
    number_ = before + 1;
    record_ = std::move(made);
    try {
      if ((before != 0 && !is_unchanged(before, seen)) || !is_last()) {
        withdraw();
        return false;
      }
    } catch (...) {
      withdraw();
      throw;
    }
    ends_ns_.store(begun + length_ns_, std::memory_order_release);
    seen_->forget(system_->name());
    remove_lower();
    return true;
  }

  void withdraw() noexcept {
    give_up();
    if (system_->is_named(number_)) system_->remove(number_);
    record_.token.clear();
  }

  /// The next holder removes what is left.
  void remove_lower() noexcept {
    try {
      for (const std::uint64_t each : system_->numbers()) {
        if (each < number_) system_->remove(each);
      }
      system_->remove_drafts();
    } catch (...) {
    }
  }

  System* system_;
  lease_sightings* seen_;
  std::uint64_t length_ns_;
  std::uint64_t number_ = 0;
  lease_record record_{};
  std::atomic<std::uint64_t> ends_ns_{0};  // by the own clock; 0: not held
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
