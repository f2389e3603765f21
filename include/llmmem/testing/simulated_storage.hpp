/// @file
/// `simulated_storage`: a file system in memory with power cuts, after which it has any state that a real
/// device might have.
#pragma once

#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>
#include <llmmem/testing/simulated_storage_options.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

namespace detail {
struct simulated_disk;
struct simulated_crash;
struct simulated_tree;
template <class Visit>
class crash_walk;

/// Shared ownership of a disk by outputs, inputs and locks. Not <memory>, because it adds 15,000 lines.
class simulated_disk_handle {
 public:
  explicit simulated_disk_handle(simulated_disk* owned) noexcept : disk_(owned) {}
  simulated_disk_handle(const simulated_disk_handle& other);
  simulated_disk_handle(simulated_disk_handle&& other) noexcept
      : disk_(std::exchange(other.disk_, nullptr)) {}
  simulated_disk_handle& operator=(simulated_disk_handle other) noexcept {
    std::swap(disk_, other.disk_);
    return *this;
  }
  ~simulated_disk_handle();

  [[nodiscard]] simulated_disk* operator->() const noexcept { return disk_; }
  [[nodiscard]] simulated_disk& operator*() const noexcept { return *disk_; }
  explicit operator bool() const noexcept { return disk_ != nullptr; }

 private:
  simulated_disk* disk_;
};
}  // namespace detail

/// An effect that no sync has covered yet.
struct pending_effect {
  std::string text{};                ///< "data of 'a': 512 bytes at 0"
  std::vector<std::size_t> needs{};  ///< effects, by index, without which this one cannot have survived
  std::uint64_t offset = 0;          ///< a write's offset
  std::uint64_t bytes = 0;           ///< of a write; 0: not a write, and cannot be torn
};

/// Which of the pending effects a device has after a crash.
struct crash_choice {
  /// By index in `pending()`; effects past its end are lost.
  std::vector<bool> survives{};

  /// A write of which only the beginning arrived.
  struct torn_write {
    std::size_t effect = 0;   ///< one that survives
    std::uint64_t bytes = 0;  ///< as far as it arrived: up to a sector's beginning
  };
  std::optional<torn_write> torn{};
};

/// A `checkpoint_storage` with two accounts: what running code sees, which is everything done so far, and
/// what the device certainly has, which is what syncs have covered. The difference is *pending*. For engines
/// whose files must survive a crash: run the code, cut the power anywhere, recover from every state that a
/// device could have, compare. `crash_states.hpp` enumerates them; docs/crash_testing.md shows how.
///
/// What is pending, and until when:
/// - a file's data, each `begin_write` an effect of its own, and its size, from `create` or a write past the
///   end: until `output.sync()`;
/// - a name that was made, removed or changed: until `sync_folder` of its own folder. A rename, or a
///   replacement, is one effect: both names or neither.
///
/// What a crash leaves (`after_crash`): all that is not pending, and **any subset of the pending effects**
/// **in which no effect on a name is present without the one before it on the same name**. So "create a,
/// rename a to b" may leave nothing, a, or b, but not b without a's creation; every file system guarantees
/// that much. It guarantees nothing else here: no order between two names, two files, data and size, or a
/// file and its name; a name does not cover its file's bytes, a file's sync does not cover its name, a
/// folder's sync does not cover its own name, and a rename does not flush. At most one write is torn: a
/// prefix of it that ends at a sector's beginning, in the file. A file whose size was lost has 0 bytes (or
/// its last surviving size); lost bytes within it are `unwritten`, and so are bytes that were never written,
/// even for running code.
///
/// @par Not modelled   sectors of one write in any order (only prefixes), several torn writes at once,
///      spontaneous decay of bytes (see `flip`), torn names, permissions, time, and space that removed files
///      still take while they are open. Names stay in their folder: `rename` and `replace` to another fail
///      with EXDEV. `replace` without an existing `to` renames, as in POSIX.
///
/// @par Thread safety   as the concept requires; one mutex. Outputs, inputs and locks keep what they need
///      alive.
/// @par Errors   `storage_error`; `power_cut`; `argument_error` from what is not part of the concept.
/// @par Source   after ALICE (Pillai et al., OSDI 2014) and SQLite's and LazyFS's crash tests.
class simulated_storage {
 public:
  class output;
  class input;
  class lock_type;

  /// Throws `argument_error` for sectors of 0 bytes.
  explicit simulated_storage(simulated_storage_options options = {});
  // Not copyable, because a copy would be a second name for the same disk; `after_crash(all_survives())`
  // makes another.
  simulated_storage(simulated_storage&&) noexcept = default;
  simulated_storage& operator=(simulated_storage&&) noexcept = default;
  ~simulated_storage() = default;

  // The concept.
  void make_folder(const std::string& path);
  /// Counts as two calls if `bytes` is not 0: `create` and `reserve`. If the second fails, the file is
  /// removed again: two pending effects.
  [[nodiscard]] output create(const std::string& path, std::uint64_t bytes);
  [[nodiscard]] input open(const std::string& path);
  void rename(const std::string& from, const std::string& to);
  void replace(const std::string& from, const std::string& to);
  void link(const std::string& from, const std::string& to);
  void remove(const std::string& path);
  void remove_folder(const std::string& path);
  /// Returns them in an order that depends on the seed alone.
  [[nodiscard]] std::vector<storage_entry> list(const std::string& path);
  void sync_folder(const std::string& path);
  [[nodiscard]] std::optional<lock_type> try_lock(const std::string& path);
  /// Depends on the seed and on the number of earlier ones; differs after each crash. Not counted as a call.
  [[nodiscard]] std::uint64_t nonce();
  [[nodiscard]] std::string path(const std::string& below) const;

  // Crashes.
  /// Calls so far: each of the concept's, and `begin_write`, `finish_write`, `sync` and `read`.
  [[nodiscard]] std::uint64_t calls() const;
  /// Cuts the power at that call, counted as in `calls()`; 0: never. For a call that is past: at the next.
  void cut_power_at(std::uint64_t call, power_cut_when when = power_cut_when::before_call);
  [[nodiscard]] bool power_is_off() const;
  /// Returns the effects that are not durable, oldest first, including writes in flight.
  [[nodiscard]] std::vector<pending_effect> pending() const;
  /// Returns the storage after the machine restarts: the same options, but no faults and no power cut; no
  /// locks; nothing pending. This one is unchanged. Throws `argument_error` for an impossible choice.
  [[nodiscard]] simulated_storage after_crash(const crash_choice& choice = {}) const;
  /// Returns the choice of all that is pending: the result of an orderly end.
  [[nodiscard]] crash_choice all_survives() const;

  // Faults.
  /// Plans these faults from now on, and restarts their counts from 1.
  void set_faults(std::vector<storage_fault> faults);
  /// Flips a bit of a file at rest, on the device too; `bit` counts from the lowest of the file's first byte.
  void flip(const std::string& path, std::uint64_t bit);
  /// Truncates a file at rest to `bytes` bytes, fewer than it has.
  void truncate(const std::string& path, std::uint64_t bytes);
  /// Extends a file at rest to `bytes` bytes, more than it has, with `unwritten` bytes.
  void grow(const std::string& path, std::uint64_t bytes);

  // What running code sees. None of these counts as a call, and all work while the power is off.
  /// Returns each file with its bytes, by path.
  [[nodiscard]] std::map<std::string, std::vector<std::byte>> files() const;
  /// Returns each folder, by path, without the root.
  [[nodiscard]] std::vector<std::string> folders() const;
  /// Equal for storages with the same folders, files and links between them (or by a chance of 2^-64).
  [[nodiscard]] std::uint64_t fingerprint() const;
  /// Returns the calls, one per line: "sync_folder 'step-1'", and how each failed. After a crash: also the
  /// calls before it, and which effects survived.
  [[nodiscard]] std::vector<std::string> trace() const;
  [[nodiscard]] simulated_storage_options options() const;

 private:
  template <class Visit>
  friend class detail::crash_walk;
  simulated_storage(std::in_place_t /*made*/, detail::simulated_disk_handle disk) : disk_(std::move(disk)) {}
  [[nodiscard]] detail::simulated_crash crash_now() const;
  [[nodiscard]] simulated_storage restarted(const detail::simulated_crash& crash, const crash_choice& choice,
                                            detail::simulated_tree tree) const;
  detail::simulated_disk_handle disk_;
};

/// A file during its write; see `storage_output`.
class simulated_storage::output {
 public:
  /// Names a write in flight.
  struct write_token {
    std::uint64_t number = 0;
  };

  output(output&&) noexcept = default;
  output& operator=(output&&) = delete;
  ~output();

  /// Fails with EINVAL for bytes of a write in flight.
  write_token begin_write(std::uint64_t offset, std::span<const std::byte> bytes);
  void finish_write(const write_token& token);
  void sync();

 private:
  friend simulated_storage;
  output(detail::simulated_disk_handle disk, std::uint64_t node, std::string path);
  detail::simulated_disk_handle disk_;
  std::uint64_t node_;
  std::string path_;
};

/// An existing file; see `storage_input`.
class simulated_storage::input {
 public:
  [[nodiscard]] std::uint64_t bytes() const;
  void read(std::uint64_t offset, std::span<std::byte> into) const;

 private:
  friend simulated_storage;
  input(detail::simulated_disk_handle disk, std::uint64_t node, std::string path);
  detail::simulated_disk_handle disk_;
  std::uint64_t node_;
  std::string path_;
};

/// A lock on a name; it ends with this object, and at a power cut.
class simulated_storage::lock_type {
 public:
  lock_type(lock_type&&) noexcept = default;
  lock_type& operator=(lock_type&&) = delete;
  ~lock_type();

  /// Whether the name still leads to the file that was locked. Never throws, and does not count as a call:
  /// false if the power is off.
  [[nodiscard]] bool is_held() const;

 private:
  friend simulated_storage;
  lock_type(detail::simulated_disk_handle disk, std::uint64_t node, std::string path);
  detail::simulated_disk_handle disk_;
  std::uint64_t node_;
  std::string path_;
};

static_assert(checkpoint_storage<simulated_storage>);

}  // namespace testing
}  // namespace v0
}  // namespace llmmem

#include <llmmem/testing/detail/simulated_storage_body.hpp>
