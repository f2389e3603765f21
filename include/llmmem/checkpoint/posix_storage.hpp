/// @file
/// `posix_storage`: checkpoints in a folder of a real file system.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/transfer/file_lock.hpp>
#include <llmmem/transfer/file_queue.hpp>

#if !defined(__linux__)
#error "llmmem/checkpoint/posix_storage.hpp needs Linux: renameat2, fallocate and folders that can be synced."
#endif

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// What to do if the folder does not exist.
enum class missing_root : std::uint8_t { make, refuse };

/// What to do with a symbolic link in the place of a file to read.
enum class symbolic_links : std::uint8_t {
  refuse,  ///< an error: a file from elsewhere may lead anywhere
  follow   ///< reads its target: for folders whose links the caller trusts
};

/// The options for the files of a checkpoint.
struct posix_storage_options {
  missing_root missing = missing_root::make;  ///< including its parents
  direct_io direct = direct_io::preferred;    ///< bypass the page cache, which a checkpoint would only flush
  std::uint32_t file_permissions = 0644;      ///< before the umask
  std::uint32_t folder_permissions = 0755;    ///< before the umask
  /// With `file_locks::caller` the lock of the folder always succeeds, if the caller ensures that only one
  /// process commits to the folder.
  file_locks locks = file_locks::system;
  std::uint64_t lease_ns = file_options{}.lease_ns;  ///< of a lease file: see `file_options::lease_ns`
  symbolic_links links = symbolic_links::refuse;     ///< of files opened for reading
  /// Of the writing queue. `max_failures` does not matter: each failure is reported and forgotten.
  file_queue_options queue{.block_bytes = std::uint64_t{4} << 20, .name = "checkpoint writer"};
};

/// A `checkpoint_storage` on a folder.
///
///     posix_storage storage("/checkpoints/run-7");
///
/// Writes go through a `file_queue<Engine>` with its own thread, so that they continue while the next bytes
/// are copied and checked; the caller's thread reads. Bytes at aligned offsets from aligned memory bypass the
/// page cache. If the file system cannot rename without replacing (`RENAME_NOREPLACE`), `rename` refuses with
/// EINVAL: see `commit_method` for the consequence. A symbolic link with a file's name does not count as a
/// file here.
///
/// @tparam Engine       `posix_io` is always available; `uring_io` keeps several writes in flight.
/// @par Thread safety   as the concept requires.
/// @par Errors          `storage_error`; the constructor also throws the errors of `file_queue`'s.
template <io_engine Engine = posix_io>
class posix_storage {
 public:
  class output;
  class input;
  class lock_type;

  explicit posix_storage(const std::string& root, posix_storage_options options = {});
  posix_storage(const posix_storage&) = delete;
  posix_storage& operator=(const posix_storage&) = delete;

  void make_folder(const std::string& path);
  [[nodiscard]] output create(const std::string& path, std::uint64_t bytes);
  [[nodiscard]] input open(const std::string& path);
  void rename(const std::string& from, const std::string& to);
  void replace(const std::string& from, const std::string& to);
  void link(const std::string& from, const std::string& to);
  void remove(const std::string& path);
  void remove_folder(const std::string& path);
  [[nodiscard]] std::vector<storage_entry> list(const std::string& path);
  void sync_folder(const std::string& path);
  [[nodiscard]] std::optional<lock_type> try_lock(const std::string& path);
  [[nodiscard]] std::uint64_t nonce();
  [[nodiscard]] std::string path(const std::string& below) const {
    return below.empty() ? root_ : root_ + "/" + below;
  }

  /// The statistics of the writing queue.
  [[nodiscard]] file_queue_stats stats() const noexcept { return queue_->stats(); }

 private:
  void make_root(const std::string& root);
  [[nodiscard]] std::string checked_path(storage_call call, const std::string& below) const;

  posix_storage_options options_;
  std::string root_;  // absolute, because the process may change its directory
  std::unique_ptr<file_queue<Engine>> queue_;
  detail::lease_sightings leases_;  // of other processes
};

/// A new file: see `storage_output`.
template <io_engine Engine>
class posix_storage<Engine>::output {
 public:
  using write_token = transfer_fence;

  output(output&&) noexcept = default;
  output& operator=(output&&) = delete;
  ~output() {
    for (const transfer_fence& each : pending_)
      static_cast<void>(each.conclude());
  }

  [[nodiscard]] write_token begin_write(std::uint64_t offset, std::span<const std::byte> bytes);
  void finish_write(const write_token& token);
  void sync();

 private:
  friend class posix_storage;
  output(file_queue<Engine>& queue, std::unique_ptr<io_file> file) : queue_(&queue), file_(std::move(file)) {}
  void told(const result<void>& how);

  file_queue<Engine>* queue_;
  std::unique_ptr<io_file> file_;
  std::vector<transfer_fence> pending_;
  bool failed_ = false;  // a write failed: the file does not hold the intended contents
};

/// A file that is there: see `storage_input`.
template <io_engine Engine>
class posix_storage<Engine>::input {
 public:
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  void read(std::uint64_t offset, std::span<std::byte> into) const;

 private:
  friend class posix_storage;
  explicit input(std::unique_ptr<io_file> file) : file_(std::move(file)) {}

  std::unique_ptr<io_file> file_;
  std::uint64_t bytes_ = 0;
};

/// A lock held by this process: flock on a file of that name, which stays, or a lease file for it
/// (`file_lock`); only the file with `file_locks::caller`.
template <io_engine Engine>
class posix_storage<Engine>::lock_type {
 public:
  /// Whether the name still refers to the locked file, which may have been removed or replaced, and its lease
  /// is still this process's.
  [[nodiscard]] bool is_held() const noexcept;

 private:
  friend class posix_storage;
  lock_type(std::unique_ptr<io_file> file, file_lock lock) : file_(std::move(file)), lock_(std::move(lock)) {}

  std::unique_ptr<io_file> file_;
  file_lock lock_;
};

static_assert(checkpoint_storage<posix_storage<>>);

#if !LLMMEM_CHECKPOINT_BODIES
extern template class file_queue<posix_io>;
extern template class posix_storage<posix_io>;
#endif

}  // namespace v0
}  // namespace llmmem

#include <llmmem/checkpoint/detail/posix_storage_body.hpp>
