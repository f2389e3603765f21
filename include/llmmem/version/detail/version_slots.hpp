/// @file
/// Complete versions in a fixed number of slots: the base of `latest`, `double_buffer`, `stash` and `delta`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/version/concepts.hpp>
#include <llmmem/version/errors.hpp>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Keeps the newest `retain.kept()` versions, and the pinned ones, in `retain.slots()` values of `T`.
///
/// A version is written into an empty slot. If `slots() == kept()`, there is no spare slot: then the oldest
/// version makes space, and is lost once the next write begins.
///
/// @par Complexity      everything O(slots), plus moving the value.
/// @par Thread safety   one thread publishes at a time; all other calls from any thread, also meanwhile. One
///      mutex, held for bookkeeping and never while a value is written or read.
template <class T, class Retain>
class version_slots {
 public:
  using value_type = T;
  using pinned = pinned_version<version_slots>;

  /// @param prototype  each slot is a copy of it until its first write. If it has the size of the versions,
  ///                   nothing allocates later.
  /// @param name       for error texts.
  /// @throws argument_error  for a policy without space for a version.
  explicit version_slots(Retain retain = {}, const T& prototype = T{},
                         const char* name = Retain::default_name)
      : version_slots(retain, [&](std::size_t) -> T { return prototype; }, name, from_factory{}) {}

  /// The same with slots made by `make(0)`, `make(1)`, ...: for values that cannot be copied.
  template <class Make>
    requires std::is_invocable_r_v<T, Make&, std::size_t>
  version_slots(Retain retain, Make&& make, const char* name = Retain::default_name)
      : version_slots(retain, make, name, from_factory{}) {}

  version_slots(const version_slots&) = delete;
  version_slots& operator=(const version_slots&) = delete;

  /// Makes `value` the newest version.
  /// @return its number, or `errc::version_pinned` if no slot is available; then nothing has changed.
  result<version_id> publish(T value) noexcept(std::is_nothrow_move_assignable_v<T>) {
    return publish_in_place(
        [&](T& into, const T*) noexcept(std::is_nothrow_move_assignable_v<T>) { into = std::move(value); });
  }

  /// Publishes what `write(into, newest)` leaves in `into` as the newest version. `into` holds an older
  /// version, or the prototype. `newest` is null if there is none, and `&into` if there is only one slot:
  /// then the write updates the newest version itself.
  ///
  /// If `write` throws, passes the exception on and publishes nothing; a version that made space is lost.
  template <class Writer>
    requires std::is_invocable_v<Writer&, T&, const T*>
  result<version_id> publish_in_place(Writer&& write) noexcept(
      std::is_nothrow_invocable_v<Writer&, T&, const T*>) {
    auto begun = begin_write();
    if (!begun) return begun.error();
    unfinished guard{this, true};
    write(slots_[begun->into].value, begun->newest);
    guard.armed = false;
    return finish_write();
  }

  [[nodiscard]] result<pinned> pin(version_id version) noexcept {
    const std::lock_guard lock(mutex_);
    return pin_locked(to_number(version));
  }

  /// Pins the newest version; `errc::no_such_version` before the first.
  [[nodiscard]] result<pinned> snapshot() noexcept {
    const std::lock_guard lock(mutex_);
    return pin_locked(newest_ == none ? last_ : slots_[newest_].version);
  }

  [[nodiscard]] version_id newest() const noexcept {
    const std::lock_guard lock(mutex_);
    return newest_ == none ? no_version : version_id{slots_[newest_].version};
  }
  [[nodiscard]] version_id oldest() const noexcept {
    const std::lock_guard lock(mutex_);
    return version_id{oldest_slot_version()};
  }
  [[nodiscard]] std::uint64_t live() const noexcept {
    const std::lock_guard lock(mutex_);
    return counts_.live;
  }
  /// Returns the most versions that can exist at once.
  [[nodiscard]] std::uint32_t slots() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }
  [[nodiscard]] const Retain& retain() const noexcept { return retain_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  [[nodiscard]] version_stats stats() const noexcept {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

  [[nodiscard]] std::vector<std::string> audit() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> found;
    const auto blame = [&](std::size_t i, const char* what) {
      found.push_back(name_ + ": slot " + std::to_string(i) + " (version " +
                      std::to_string(slots_[i].version) + ", " + std::to_string(slots_[i].pins) + " pins) " +
                      what);
    };
    std::uint64_t live = 0;
    std::uint64_t pins = 0;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const slot& each = slots_[i];
      pins += each.pins;
      live += each.version != 0 ? 1U : 0U;
      if (each.version > last_) blame(i, "has a number that was never given");
      if (each.version == 0 && each.pins != 0) blame(i, "is pinned and holds nothing");
      if (each.version != 0 && each.pins == 0 && !is_kept(each.version)) blame(i, "is kept without a pin");
      for (std::size_t j = 0; j < i; ++j) {
        if (each.version != 0 && slots_[j].version == each.version) blame(i, "holds what another slot does");
      }
    }
    const auto differ = [&](const char* what, std::uint64_t counted, std::uint64_t there) {
      if (counted == there) return;
      found.push_back(name_ + ": " + what + " counted " + std::to_string(counted) + ", there are " +
                      std::to_string(there));
    };
    differ("live versions", counts_.live, live);
    differ("pins", counts_.pinned, pins);
    return found;
  }

 protected:
  static constexpr std::uint32_t none = 0xFFFF'FFFF;

  struct slot {
    T value;
    std::uint64_t version = 0;  // 0: the slot holds no version
    std::uint32_t pins = 0;
  };
  struct writing {
    std::uint32_t into = none;
    const T* newest = nullptr;
  };
  // Undoes the beginning of a write if the writer throws.
  struct unfinished {
    version_slots* slots;
    bool armed;
    ~unfinished() {
      if (armed) slots->abandon_write();
    }
  };

  [[nodiscard]] result<writing> begin_write() noexcept {
    const std::lock_guard lock(mutex_);
    if (into_ != none) return refuse_publish({.code = errc::reentered, .where = name_.c_str()});
    const std::uint32_t into = find_free();
    if (into == none) {
      std::uint32_t pins = 0;
      const std::uint64_t in_the_way = pinned_longest(pins);
      return refuse_publish({.code = errc::version_pinned,
                             .index = pins,
                             .wanted = in_the_way,
                             .found = slots_.size(),
                             .where = name_.c_str()});
    }
    const T* newest = newest_ == none ? nullptr : &slots_[newest_].value;
    if (slots_[into].version != 0) drop(into);
    into_ = into;
    return writing{into, newest};
  }

  version_id finish_write() noexcept {
    const std::lock_guard lock(mutex_);
    return finish_write_locked();
  }

  version_id finish_write_locked() noexcept {
    newest_ = std::exchange(into_, none);
    slots_[newest_].version = ++last_;
    ++counts_.published;
    for (std::uint32_t i = 0; i < slots_.size(); ++i)
      drop_if_unwanted(i);
    count_live();
    return version_id{last_};
  }

  void abandon_write() noexcept {
    const std::lock_guard lock(mutex_);
    into_ = none;
  }

  [[nodiscard]] result<pinned> pin_locked(std::uint64_t version) noexcept {
    const std::uint32_t at = version == 0 ? none : slot_of(version);
    if (at != none) return pin_slot(at);
    ++counts_.refused_pins;
    const bool was = version != 0 && version <= last_;
    return failure{.code = was ? errc::version_expired : errc::no_such_version,
                   .wanted = version,
                   .found = was ? oldest_slot_version() : last_,
                   .where = name_.c_str()};
  }

  [[nodiscard]] pinned pin_slot(std::uint32_t at) noexcept {
    ++slots_[at].pins;
    ++counts_.pins;
    ++counts_.pinned;
    return pinned(this, at, version_id{slots_[at].version});
  }

  [[nodiscard]] std::uint32_t slot_of(std::uint64_t version) const noexcept {
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].version == version) return i;
    }
    return none;
  }

  [[nodiscard]] std::uint32_t empty_slot() const noexcept {
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].version == 0 && i != into_) return i;
    }
    return none;
  }

  /// Returns the slots that hold no version and are not being written.
  [[nodiscard]] std::uint32_t empty_slots() const noexcept {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < slots_.size(); ++i)
      count += slots_[i].version == 0 && i != into_ ? 1U : 0U;
    return count;
  }

  void fill_slot(std::uint32_t at, std::uint64_t version) noexcept {
    slots_[at].version = version;
    count_live();
  }

  [[nodiscard]] std::uint64_t oldest_slot_version() const noexcept {
    std::uint64_t lowest = 0;
    for (const slot& each : slots_) {
      if (each.version != 0 && (lowest == 0 || each.version < lowest)) lowest = each.version;
    }
    return lowest;
  }

  std::string name_;
  Retain retain_;
  std::vector<slot> slots_{};
  mutable std::mutex mutex_{};
  std::uint64_t last_ = 0;       // the latest number given
  std::uint32_t newest_ = none;  // slot of the newest version
  std::uint32_t into_ = none;    // slot that is being written
  version_stats counts_{};

 private:
  friend pinned;
  struct from_factory {};

  template <class Make>
  version_slots(Retain retain, Make&& make, const char* name, from_factory) : name_(name), retain_(retain) {
    const std::uint32_t count = retain_.slots();
    if (count == 0 || count < retain_.kept()) {
      throw argument_error(name_ + ": " + std::to_string(count) + " slots for " +
                           std::to_string(retain_.kept()) + " versions to keep; give it at least one each");
    }
    slots_.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i)
      slots_.push_back(slot{make(std::size_t{i})});
  }

  [[nodiscard]] const T& value_of(std::uint32_t at) const noexcept { return slots_[at].value; }

  void unpin(std::uint32_t at) noexcept {
    const std::lock_guard lock(mutex_);
    --slots_[at].pins;
    --counts_.pinned;
    drop_if_unwanted(at);
  }

  // Whether a version is one of the newest, which stay without pins. Numbers have no gaps.
  [[nodiscard]] bool is_kept(std::uint64_t version) const noexcept {
    return version + retain_.kept() > last_;
  }

  [[nodiscard]] std::uint32_t find_free() const noexcept {
    const std::uint32_t empty = empty_slot();
    if (empty != none) return empty;
    // With more slots than versions to keep, the oldest version is there only because of its pins.
    const std::uint32_t oldest = slot_of(oldest_slot_version());
    return slots_[oldest].pins == 0 ? oldest : none;
  }

  // Considers versions whose release would make space; the newest version only if there is one slot.
  [[nodiscard]] std::uint64_t pinned_longest(std::uint32_t& pins) const noexcept {
    const std::uint32_t oldest = slot_of(oldest_slot_version());
    pins = slots_[oldest].pins;
    return slots_[oldest].version;
  }

  void drop_if_unwanted(std::uint32_t at) noexcept {
    if (slots_[at].version != 0 && slots_[at].pins == 0 && !is_kept(slots_[at].version)) drop(at);
  }

  void drop(std::uint32_t at) noexcept {
    slots_[at].version = 0;
    if (newest_ == at) newest_ = none;
    --counts_.live;
    ++counts_.dropped;
  }

  void count_live() noexcept {
    ++counts_.live;
    if (counts_.live > counts_.max_live) counts_.max_live = counts_.live;
  }

  [[nodiscard]] failure refuse_publish(const failure& why) noexcept {
    ++counts_.refused_publishes;
    return why;
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
