/// @file
/// `checkpoint_storage`: the file system calls that checkpoints need, so that the same code runs on a real
/// one and on one that simulates power loss.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A call of a storage, for error texts and fault plans.
enum class storage_call : std::uint8_t {
  make_folder,
  create,
  reserve,
  write,
  sync,
  open,
  read,
  sync_folder,
  rename,
  replace,
  link,
  remove,
  remove_folder,
  list,
  lock,
};
inline constexpr std::size_t storage_calls = 15;

/// Returns the call in an error text, before the reason: `"cannot be synced"`.
[[nodiscard]] constexpr std::string_view to_string(storage_call call) noexcept {
  constexpr std::string_view texts[storage_calls] = {
      "the folder cannot be created",
      "the file cannot be created",
      "space cannot be allocated for the file",
      "cannot be written",
      "cannot be synced: written bytes may be lost",
      "cannot be opened",
      "cannot be read",
      "the folder cannot be synced: names in it may be lost",
      "cannot be renamed",
      "cannot replace another file",
      "cannot be linked",
      "cannot be removed",
      "the folder cannot be removed",
      "the folder cannot be listed",
      "cannot be locked",
  };
  return texts[static_cast<std::size_t>(call)];
}

/// A storage refused a call. The text has the whole path, the failed action and the system's reason.
class storage_error : public io_error {
 public:
  /// @param path    as shown to people, including the storage's root.
  /// @param number  the system's error number; 0 if there is none.
  /// @param detail  appended: how much, where, how to resolve it.
  storage_error(storage_call call, const std::string& path, int number, const std::string& detail = {})
      : io_error(path + ": " + std::string(to_string(call)) +
                 (number == 0 ? std::string()
                              : ": " + std::error_code(number, std::generic_category()).message()) +
                 (detail.empty() ? "" : "; ") + detail),
        call_(call),
        number_(number) {}

  [[nodiscard]] storage_call call() const noexcept { return call_; }
  /// The system's error number, as in `errno`.
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  storage_call call_;
  int number_;
};

namespace detail {

/// Whether the error means that the storage does not support the call.
[[nodiscard]] constexpr bool is_unsupported(int number) noexcept {
  return number == EINVAL || number == ENOSYS || number == EOPNOTSUPP || number == EPERM || number == EXDEV;
}

}  // namespace detail

/// A name in a folder. A `link` is symbolic, of any target; `remove` removes only the link.
struct storage_entry {
  std::string name;
  enum class kind : std::uint8_t { file, folder, other, link } what = kind::file;

  friend bool operator==(const storage_entry&, const storage_entry&) = default;
};

/// A new file that is being written.
///
/// - `begin_write(offset, bytes)` may return before the bytes are written; they must stay unchanged until
///   `finish_write` of its result, or `sync`, has returned, or the object is destroyed. Any order, offset and
///   length; two writes must not overlap.
/// - `sync()` returns once everything written, and what is needed to read it, is on the device. It waits for
///   writes in flight. After a failure nothing is known of any of it, and every later sync fails too: the
///   file is dead, and data that must last goes to another one.
/// - The destructor waits for writes in flight and closes. What was not synced may be lost.
///
/// All three throw `storage_error`.
template <class F>
concept storage_output = requires(F& file, std::uint64_t offset, std::span<const std::byte> bytes,
                                  const typename F::write_token& token) {
  { file.begin_write(offset, bytes) } -> std::same_as<typename F::write_token>;
  file.finish_write(token);
  file.sync();
};

/// An existing file for reading. `read` fills all of `into`, or throws `storage_error`; also for bytes past
/// the end.
template <class F>
concept storage_input = requires(const F& file, std::uint64_t offset, std::span<std::byte> into) {
  { file.bytes() } -> std::same_as<std::uint64_t>;
  file.read(offset, into);
};

/// A folder on a file system, and the calls that checkpoints use. Paths are relative to it, separated by '/';
/// the empty path is the folder itself. Only `sync` (of a file's bytes) and `sync_folder` (of a folder's own
/// names) make anything durable: a user of a storage may rely on nothing more after a crash, and
/// `testing::simulated_storage` checks that.
///
/// - `make_folder(path)`      creates a folder; EEXIST when anything of that name exists.
/// - `create(path, bytes)`    creates a file with space for `bytes`, so that a lack of it shows now (ENOSPC,
///   EDQUOT) and not in the middle; EEXIST if the name is taken. Its size is `bytes` from then on; a write
///   past them makes it longer.
/// - `open(path)`             opens an existing file for reading.
/// - `rename(from, to)`       renames a file or folder atomically: at any time and after any crash, a reader
///   finds one name or the other. EEXIST when `to` exists.
/// - `replace(from, to)`      the same for files, replacing an existing `to`.
/// - `link(from, to)`         adds a second name for a file; EEXIST; EOPNOTSUPP or EPERM if not supported.
/// - `remove(path)`, `remove_folder(path)`   removes a file; an empty folder.
/// - `list(path)`             lists a folder, in no order.
/// - `sync_folder(path)`      returns once the present names in it are on the device.
/// - `try_lock(path)`         takes the lock of that name, creating a file for it if necessary, or returns
///   nothing when another holder has it. The lock ends with the object, or with the process and the children
///   that it forked. `is_held()` says whether the name still refers to that lock.
/// - `nonce()`                returns 64 bits that no other process gets.
/// - `path(below)`            returns a path as shown to people, for texts.
///
/// All throw `storage_error`, except `nonce` and `path`.
///
/// @par Thread safety   calls from any threads concurrently; one thread per file.
template <class S>
concept checkpoint_storage = storage_output<typename S::output> && storage_input<typename S::input> &&
                             requires(S& storage, const S& seen, const std::string& path, std::uint64_t bytes,
                                      const typename S::lock_type& lock) {
                               storage.make_folder(path);
                               { storage.create(path, bytes) } -> std::same_as<typename S::output>;
                               { storage.open(path) } -> std::same_as<typename S::input>;
                               storage.rename(path, path);
                               storage.replace(path, path);
                               storage.link(path, path);
                               storage.remove(path);
                               storage.remove_folder(path);
                               { storage.list(path) } -> std::same_as<std::vector<storage_entry>>;
                               storage.sync_folder(path);
                               {
                                 storage.try_lock(path)
                               } -> std::same_as<std::optional<typename S::lock_type>>;
                               { lock.is_held() } -> std::same_as<bool>;
                               { storage.nonce() } -> std::same_as<std::uint64_t>;
                               { seen.path(path) } -> std::same_as<std::string>;
                             };

}  // namespace v0
}  // namespace llmmem
