/// @file
/// `delta`: the complete newest version, and the differences of older ones.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/version/concepts.hpp>
#include <llmmem/version/detail/version_slots.hpp>
#include <llmmem/version/detail/xor_deltas.hpp>
#include <llmmem/version/errors.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the bytes of a value: the bytes of its elements if it is a contiguous range of trivially copyable
/// elements, otherwise its own.
template <class T>
[[nodiscard]] auto version_bytes(T& value) noexcept {
  if constexpr (requires { std::span{value.data(), value.size()}; }) {
    static_assert(std::is_trivially_copyable_v<typename std::remove_const_t<T>::value_type>);
    if constexpr (std::is_const_v<T>) {
      return std::as_bytes(std::span{value.data(), value.size()});
    } else {
      return std::as_writable_bytes(std::span{value.data(), value.size()});
    }
  } else {
    static_assert(std::is_trivially_copyable_v<std::remove_const_t<T>>);
    if constexpr (std::is_const_v<T>) {
      return std::as_bytes(std::span{&value, 1});
    } else {
      return std::as_writable_bytes(std::span{&value, 1});
    }
  }
}

template <class T>
class delta_state;

}  // namespace detail

/// Keeps the complete newest version, and older versions as xor differences in the byte ranges that changed,
/// each to the version after it. So a read of the newest version, the most frequent one, costs nothing.
///
/// For state that changes little at a time: embeddings, experts, tables. Dense Adam changes every byte of its
/// state every step: use `stash` or `copy_on_write` for it. `versions` and `bytes` both bound the chain: each
/// publish makes the newest version the base, and drops the oldest differences until the new difference fits.
/// A difference of more than `bytes` drops all older versions.
///
/// A pin of an older version rebuilds the version in one of `views` values, which all its pins share; it then
/// stays even after its difference is dropped. `delta{.versions = 16, .bytes = 1 << 20}`.
struct delta {
  static constexpr const char* default_name = "delta";
  [[deprecated("its name is default_name")]] static constexpr const char* usual_name = default_name;

  std::uint32_t versions = 8;     ///< kept without pins, including the newest; at least 1
  std::uint64_t bytes = 1 << 20;  ///< for differences: 16 bytes per run of changed bytes, and the bytes
  std::uint32_t views = 2;        ///< older versions that may be pinned at once, including dropped ones

  [[nodiscard]] constexpr std::uint32_t slots() const noexcept { return views + 2; }
  [[nodiscard]] static constexpr std::uint32_t kept() noexcept { return 1; }

  template <class T>
  using state = detail::delta_state<T>;
};

namespace detail {

/// The state of `delta`. `T` is trivially copyable, or a contiguous range of trivially copyable elements
/// whose length never changes.
///
/// @par Complexity   publish O(bytes of the value); pin of the newest O(views), of an older version O(bytes
///      of the value and of the differences back to it). Nothing is allocated after construction unless
///      copying or moving a `T` allocates.
/// @par Thread safety   as `version_slots`, but differences are applied and recorded under its mutex, so a
///      pin of an older version delays other calls.
/// @par Errors   `errc::size_mismatch` for a value of another length, which `publish_in_place` detects after
///      the write; `errc::table_full` if all views are taken.
template <class T>
class delta_state : public version_slots<T, delta> {
  using base = version_slots<T, delta>;

 public:
  using pinned = typename base::pinned;

  /// @param prototype  a value with the length of every version.
  /// @throws argument_error  for 0 versions.
  /// @throws out_of_memory   when the source has no space for the differences.
  explicit delta_state(delta retain = {}, const T& prototype = T{}, const char* name = delta::default_name,
                       const metadata_source& source = {})
      : base(retain, prototype, name),
        length_(version_bytes(prototype).size()),
        deltas_(retain.bytes, retain.versions, source, name) {
    if (retain.versions == 0) throw argument_error(this->name_ + ": versions is 0; keep at least the newest");
  }

  result<version_id> publish(T value) noexcept(std::is_nothrow_move_assignable_v<T>) {
    if (const auto bytes = version_bytes(std::as_const(value)).size(); bytes != length_)
      return differs(bytes);
    return publish_in_place(
        [&](T& into, const T*) noexcept(std::is_nothrow_move_assignable_v<T>) { into = std::move(value); });
  }

  template <class Writer>
    requires std::is_invocable_v<Writer&, T&, const T*>
  result<version_id> publish_in_place(Writer&& write) noexcept(
      std::is_nothrow_invocable_v<Writer&, T&, const T*>) {
    auto begun = this->begin_write();
    if (!begun) return begun.error();
    typename base::unfinished guard{this, true};
    T& into = this->slots_[begun->into].value;
    write(into, begun->newest);
    const auto newer = version_bytes(std::as_const(into));
    if (newer.size() != length_) return differs(newer.size());
    guard.armed = false;
    if (begun->newest == nullptr) return this->finish_write();
    const auto older = version_bytes(*begun->newest);
    const std::uint64_t size = xor_deltas::size_of(older, newer);

    const std::lock_guard lock(this->mutex_);
    const bool fits = size <= deltas_.capacity();
    while (deltas_.count() != 0 && (!fits || deltas_.count() + 1 >= this->retain_.versions ||
                                    deltas_.used() + size > deltas_.capacity())) {
      deltas_.drop_oldest();
    }
    if (fits && this->retain_.versions > 1) deltas_.append(older, newer, size);
    return this->finish_write_locked();
  }

  [[nodiscard]] result<pinned> pin(version_id version) noexcept {
    const std::lock_guard lock(this->mutex_);
    const std::uint64_t wanted = to_number(version);
    if (wanted < first_kept() || wanted >= this->last_ || this->slot_of(wanted) != base::none) {
      auto given = this->pin_locked(wanted);
      if (!given && given.code() == errc::version_expired) {
        failure why = given.error();
        why.found = oldest_locked();
        return why;
      }
      return given;
    }
    // Leaves a slot for the writer, so that views alone never block it.
    const std::uint32_t at = view_slot();
    if (at == base::none || this->empty_slots() < (this->into_ == base::none ? 2U : 1U)) {
      ++this->counts_.refused_pins;
      return failure{.code = errc::table_full, .wanted = 1, .found = 0, .where = this->name_.c_str()};
    }
    const auto from = version_bytes(std::as_const(this->slots_[this->newest_].value));
    const auto into = version_bytes(this->slots_[at].value);
    std::memcpy(into.data(), from.data(), length_);
    deltas_.take_back(into, this->last_ - wanted);
    this->fill_slot(at, wanted);
    return this->pin_slot(at);
  }

  [[nodiscard]] version_id oldest() const noexcept {
    const std::lock_guard lock(this->mutex_);
    return version_id{oldest_locked()};
  }

  /// Returns the number of versions that can be rebuilt, plus pinned versions that no longer can.
  [[nodiscard]] std::uint64_t live() const noexcept {
    const std::lock_guard lock(this->mutex_);
    return live_locked();
  }

  /// Returns the bytes that differences take now.
  [[nodiscard]] std::uint64_t delta_bytes() const noexcept {
    const std::lock_guard lock(this->mutex_);
    return deltas_.used();
  }

  /// Counts the complete values, except `live`, which is the result of `live()`.
  [[nodiscard]] version_stats stats() const noexcept {
    const std::lock_guard lock(this->mutex_);
    version_stats now = this->counts_;
    now.live = live_locked();
    return now;
  }

  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found = base::audit();
    const std::lock_guard lock(this->mutex_);
    if (deltas_.used() > deltas_.capacity() || deltas_.count() >= this->retain_.versions) {
      found.push_back(this->name_ + ": " + std::to_string(deltas_.count()) + " differences in " +
                      std::to_string(deltas_.used()) + " bytes, allowed are " +
                      std::to_string(this->retain_.versions - 1) + " in " +
                      std::to_string(deltas_.capacity()));
    }
    return found;
  }

 private:
  [[nodiscard]] std::uint64_t first_kept() const noexcept { return this->last_ - deltas_.count(); }
  [[nodiscard]] std::uint64_t oldest_locked() const noexcept {
    const std::uint64_t whole = this->oldest_slot_version();
    return this->last_ != 0 && (whole == 0 || first_kept() < whole) ? first_kept() : whole;
  }
  [[nodiscard]] std::uint64_t live_locked() const noexcept {
    if (this->last_ == 0) return 0;
    std::uint64_t count = deltas_.count() + 1;
    for (const auto& each : this->slots_)
      count += each.version != 0 && each.version < first_kept() ? 1U : 0U;
    return count;
  }

  [[nodiscard]] failure differs(std::uint64_t bytes) const noexcept {
    return {.code = errc::size_mismatch, .wanted = bytes, .found = length_, .where = this->name_.c_str()};
  }

  // Skips slots of another length, which a writer that was refused or threw may have left.
  [[nodiscard]] std::uint32_t view_slot() const noexcept {
    for (std::uint32_t i = 0; i < this->slots_.size(); ++i) {
      const auto& each = this->slots_[i];
      if (each.version == 0 && i != this->into_ && version_bytes(each.value).size() == length_) return i;
    }
    return base::none;
  }

  std::uint64_t length_;
  xor_deltas deltas_;
};

}  // namespace detail

static_assert(retain_policy<delta, int>);

}  // namespace v0
}  // namespace llmmem
