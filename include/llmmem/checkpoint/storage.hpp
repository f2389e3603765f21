/// @file
/// `checkpoint_storage`: what a checkpoint asks of a file system, call by call, so that a real one and one
/// that loses power can stand under the same code.
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

/// The call as an error text has it, before the reason: `"cannot be synced"`.
[[nodiscard]] constexpr std::string_view to_string(storage_call call) noexcept {
  constexpr std::string_view texts[storage_calls] = {
      "the folder cannot be made",
      "the file cannot be made",
      "room cannot be taken for the file",
      "cannot be written",
      "cannot be synced: what was written may be lost",
      "cannot be opened",
      "cannot be read",
      "the folder cannot be synced: names in it may be lost",
      "cannot be given its name",
      "cannot be put in the place of another file",
      "cannot be linked",
      "cannot be removed",
      "the folder cannot be removed",
      "the folder cannot be listed",
      "cannot be locked",
  };
  return texts[static_cast<std::size_t>(call)];
}

/// A storage refused a call. The text has the whole path, what could not be done and what the system said.
class storage_error : public io_error {
 public:
  /// @param path    as people know it, the storage's root included.
  /// @param number  the system's error number; 0 when it gave none.
  /// @param detail  goes behind: how much, where, how to mend it.
  storage_error(storage_call call, const std::string& path, int number, const std::string& detail = {})
      : io_error(path + ": " + std::string(to_string(call)) +
                 (number == 0 ? std::string()
                              : ": " + std::error_code(number, std::generic_category()).message()) +
                 (detail.empty() ? "" : "; ") + detail),
        call_(call),
        number_(number) {}

  [[nodiscard]] storage_call call() const noexcept { return call_; }
  /// The system's, as `errno` has them.
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  storage_call call_;
  int number_;
};

namespace detail {

/// What storages say that cannot do a call at all.
[[nodiscard]] constexpr bool is_unsupported(int number) noexcept {
  return number == EINVAL || number == ENOSYS || number == EOPNOTSUPP || number == EPERM || number == EXDEV;
}

}  // namespace detail

/// A name in a folder. A `link` is a symbolic one, whatever it leads to; `remove` removes the link alone.
struct storage_entry {
  std::string name;
  enum class kind : std::uint8_t { file, folder, other, link } what = kind::file;

  friend bool operator==(const storage_entry&, const storage_entry&) = default;
};

/// A new file that is being written.
///
/// - `begin_write(offset, bytes)` may return before the bytes are there; they stay as they are until
///   `finish_write` of what it gave has returned, or `sync`, or the object is gone. Any order, offset and
///   length; two writes do not overlap.
/// - `sync()` returns once all that was written, and what is needed to read it, is on the device. It waits
///   for writes that are under way. After a failure nothing is known of any of it, and every later sync
///   fails, too: the file is dead, and what must last goes to another one.
/// - The destructor waits for writes under way and closes. What was not synced may be lost.
///
/// All three throw `storage_error`.
template <class F>
concept storage_output = requires(F& file, std::uint64_t offset, std::span<const std::byte> bytes,
                                  const typename F::write_token& token) {
  { file.begin_write(offset, bytes) } -> std::same_as<typename F::write_token>;
  file.finish_write(token);
  file.sync();
};

/// A file that is there, to be read. `read` fills all of `into`, or throws `storage_error`; also for bytes
/// past the end.
template <class F>
concept storage_input = requires(const F& file, std::uint64_t offset, std::span<std::byte> into) {
  { file.bytes() } -> std::same_as<std::uint64_t>;
  file.read(offset, into);
};

/// A folder on a file system, and the calls that checkpoints are made of. Paths are below it, parted by '/';
/// the empty one is the folder itself. Nothing here is durable but by `sync` (of a file's bytes) and
/// `sync_folder` (of a folder's own names): that is all a user of a storage may count on after a crash, and
/// what `testing::simulated_storage` holds him to.
///
/// - `make_folder(path)`      a new one; EEXIST when there is anything of that name.
/// - `create(path, bytes)`    a new file with room for `bytes`, so that lack of it shows now (ENOSPC, EDQUOT)
///                            and not in the middle; EEXIST likewise. Its size is `bytes` from then on; a
///                            write past them makes it longer.
/// - `open(path)`             a file that is there, to be read.
/// - `rename(from, to)`       gives a file or folder another name, at once: whoever looks, at any time and
///                            after any crash, finds one or the other. EEXIST when there is a `to`.
/// - `replace(from, to)`      the same for files, in the place of a `to` that is there.
/// - `link(from, to)`         a second name for a file; EEXIST; EOPNOTSUPP or EPERM where there are none.
/// - `remove(path)`, `remove_folder(path)`   a file; a folder that is empty.
/// - `list(path)`             what is in a folder, in no order.
/// - `sync_folder(path)`      returns once the names in it are on the device as they are now.
/// - `try_lock(path)`         takes the lock of that name, a file that is made for it if need be, or nothing
///                            when somebody else has it. It ends with the object, or with the process and the
///                            children that it forked.
///                            `is_held()` says whether the name still is that lock's.
/// - `nonce()`                64 bits that no other process is given.
/// - `path(below)`            a path as people know it, for texts.
///
/// All throw `storage_error`, but `nonce` and `path`.
///
/// @par Thread safety   calls from any threads at once; one thread a file.
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
