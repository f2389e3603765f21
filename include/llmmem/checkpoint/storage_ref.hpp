/// @file
/// `storage_ref`: a reference to a checkpoint storage of any type. The functions of checkpoints use it, so
/// that they are compiled once and not for each storage.
#pragma once

#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>

#include <concepts>
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

namespace detail {

/// A new file of any storage. Tokens are numbers here; the file keeps the storage's own token until the write
/// is finished.
class any_output {
 public:
  any_output() = default;
  any_output(const any_output&) = delete;
  any_output& operator=(const any_output&) = delete;
  virtual ~any_output() = default;

  virtual std::uint64_t begin_write(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  virtual void finish_write(std::uint64_t token) = 0;
  virtual void sync() = 0;
};

/// A file of any storage, for reading.
class any_input {
 public:
  any_input() = default;
  any_input(const any_input&) = delete;
  any_input& operator=(const any_input&) = delete;
  virtual ~any_input() = default;

  [[nodiscard]] virtual std::uint64_t bytes() const = 0;
  virtual void read(std::uint64_t offset, std::span<std::byte> into) const = 0;
};

/// A lock of any storage.
class any_lock {
 public:
  any_lock() = default;
  any_lock(const any_lock&) = delete;
  any_lock& operator=(const any_lock&) = delete;
  virtual ~any_lock() = default;

  [[nodiscard]] virtual bool is_held() const = 0;
};

template <class Output>
class output_of final : public any_output {
 public:
  template <class Storage>
  output_of(Storage& storage, const std::string& path, std::uint64_t bytes)
      : output_(storage.create(path, bytes)) {}

  std::uint64_t begin_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    begun_.reserve(begun_.size() + 1);  // before the write, because a write that has begun must be recorded
    begun_.push_back({next_, output_.begin_write(offset, bytes)});
    return next_++;
  }
  void finish_write(std::uint64_t token) override {
    for (std::size_t i = 0; i < begun_.size(); ++i) {
      if (begun_[i].number != token) continue;
      const typename Output::write_token written = std::move(begun_[i].written);
      begun_.erase(begun_.begin() + static_cast<std::ptrdiff_t>(i));
      return output_.finish_write(written);
    }
  }
  void sync() override { output_.sync(); }

 private:
  struct begun_write {
    std::uint64_t number;
    typename Output::write_token written;
  };

  Output output_;
  std::vector<begun_write> begun_{};
  std::uint64_t next_ = 0;
};

template <class Input>
class input_of final : public any_input {
 public:
  template <class Storage>
  input_of(Storage& storage, const std::string& path) : input_(storage.open(path)) {}

  [[nodiscard]] std::uint64_t bytes() const override { return input_.bytes(); }
  void read(std::uint64_t offset, std::span<std::byte> into) const override { input_.read(offset, into); }

 private:
  Input input_;
};

template <class Lock>
class lock_of final : public any_lock {
 public:
  template <class Storage>
  lock_of(Storage& storage, const std::string& path) : lock_(storage.try_lock(path)) {}

  [[nodiscard]] bool is_taken() const noexcept { return lock_.has_value(); }
  [[nodiscard]] bool is_held() const override { return lock_->is_held(); }

 private:
  std::optional<Lock> lock_;
};

/// The calls of one storage type. Each call allocates its result before it calls the storage: if there is no
/// memory, nothing was done.
struct storage_table {
  void (*make_folder)(void* storage, const std::string& path);
  std::unique_ptr<any_output> (*create)(void* storage, const std::string& path, std::uint64_t bytes);
  std::unique_ptr<any_input> (*open)(void* storage, const std::string& path);
  void (*rename)(void* storage, const std::string& from, const std::string& to);
  void (*replace)(void* storage, const std::string& from, const std::string& to);
  void (*link)(void* storage, const std::string& from, const std::string& to);
  void (*remove)(void* storage, const std::string& path);
  void (*remove_folder)(void* storage, const std::string& path);
  std::vector<storage_entry> (*list)(void* storage, const std::string& path);
  void (*sync_folder)(void* storage, const std::string& path);
  std::unique_ptr<any_lock> (*try_lock)(void* storage, const std::string& path);
  std::uint64_t (*nonce)(void* storage);
  std::string (*path)(const void* storage, const std::string& below);
};

template <class S>
[[nodiscard]] S& storage_as(void* storage) noexcept {
  return *static_cast<S*>(storage);
}

template <class S>
inline constexpr storage_table storage_table_of{
    .make_folder = [](void* s, const std::string& path) { storage_as<S>(s).make_folder(path); },
    .create = [](void* s, const std::string& path, std::uint64_t bytes) -> std::unique_ptr<any_output> {
      return std::unique_ptr<any_output>(new output_of<typename S::output>(storage_as<S>(s), path, bytes));
    },
    .open = [](void* s, const std::string& path) -> std::unique_ptr<any_input> {
      return std::unique_ptr<any_input>(new input_of<typename S::input>(storage_as<S>(s), path));
    },
    .rename = [](void* s, const std::string& from,
                 const std::string& to) { storage_as<S>(s).rename(from, to); },
    .replace = [](void* s, const std::string& from,
                  const std::string& to) { storage_as<S>(s).replace(from, to); },
    .link = [](void* s, const std::string& from, const std::string& to) { storage_as<S>(s).link(from, to); },
    .remove = [](void* s, const std::string& path) { storage_as<S>(s).remove(path); },
    .remove_folder = [](void* s, const std::string& path) { storage_as<S>(s).remove_folder(path); },
    .list = [](void* s, const std::string& path) { return storage_as<S>(s).list(path); },
    .sync_folder = [](void* s, const std::string& path) { storage_as<S>(s).sync_folder(path); },
    .try_lock = [](void* s, const std::string& path) -> std::unique_ptr<any_lock> {
      std::unique_ptr<lock_of<typename S::lock_type>> lock(
          new lock_of<typename S::lock_type>(storage_as<S>(s), path));
      if (!lock->is_taken()) lock.reset();
      return lock;
    },
    .nonce = [](void* s) { return storage_as<S>(s).nonce(); },
    .path = [](const void* s, const std::string& below) { return static_cast<const S*>(s)->path(below); },
};

}  // namespace detail

/// A reference to a `checkpoint_storage` of any type: each call of the concept is one call through a table,
/// which costs nothing compared with a file system. Any storage converts to it, so functions that take a
/// `storage_ref` are called with the storage itself. It is itself a `checkpoint_storage`.
///
///     void prune(storage_ref storage);
///     posix_storage storage("/checkpoints/run-7");
///     prune(storage);
///
/// @par Complexity      one allocation per file and lock in addition to the storage's own work.
/// @par Thread safety   that of the storage, which must outlive it.
/// @par Errors          those of the storage, and `std::bad_alloc`.
class storage_ref {
 public:
  /// A new file: see `storage_output`.
  class output {
   public:
    using write_token = std::uint64_t;

    [[nodiscard]] write_token begin_write(std::uint64_t offset, std::span<const std::byte> bytes) {
      return file_->begin_write(offset, bytes);
    }
    void finish_write(const write_token& token) { file_->finish_write(token); }
    void sync() { file_->sync(); }

   private:
    friend class storage_ref;
    explicit output(std::unique_ptr<detail::any_output> file) noexcept : file_(std::move(file)) {}

    std::unique_ptr<detail::any_output> file_;
  };

  /// An existing file: see `storage_input`.
  class input {
   public:
    [[nodiscard]] std::uint64_t bytes() const { return file_->bytes(); }
    void read(std::uint64_t offset, std::span<std::byte> into) const { file_->read(offset, into); }

   private:
    friend class storage_ref;
    explicit input(std::unique_ptr<detail::any_input> file) noexcept : file_(std::move(file)) {}

    std::unique_ptr<detail::any_input> file_;
  };

  /// A lock held by this process.
  class lock_type {
   public:
    [[nodiscard]] bool is_held() const { return lock_->is_held(); }

   private:
    friend class storage_ref;
    explicit lock_type(std::unique_ptr<detail::any_lock> lock) noexcept : lock_(std::move(lock)) {}

    std::unique_ptr<detail::any_lock> lock_;
  };

  template <checkpoint_storage S>
    requires(!std::same_as<S, storage_ref>)
  storage_ref(S& storage) noexcept  // NOLINT(google-explicit-constructor): as a reference
      : storage_(&storage), table_(&detail::storage_table_of<S>) {}

  void make_folder(const std::string& path) const { table_->make_folder(storage_, path); }
  [[nodiscard]] output create(const std::string& path, std::uint64_t bytes) const {
    return output(table_->create(storage_, path, bytes));
  }
  [[nodiscard]] input open(const std::string& path) const { return input(table_->open(storage_, path)); }
  void rename(const std::string& from, const std::string& to) const { table_->rename(storage_, from, to); }
  void replace(const std::string& from, const std::string& to) const { table_->replace(storage_, from, to); }
  void link(const std::string& from, const std::string& to) const { table_->link(storage_, from, to); }
  void remove(const std::string& path) const { table_->remove(storage_, path); }
  void remove_folder(const std::string& path) const { table_->remove_folder(storage_, path); }
  [[nodiscard]] std::vector<storage_entry> list(const std::string& path) const {
    return table_->list(storage_, path);
  }
  void sync_folder(const std::string& path) const { table_->sync_folder(storage_, path); }
  [[nodiscard]] std::optional<lock_type> try_lock(const std::string& path) const {
    std::unique_ptr<detail::any_lock> lock = table_->try_lock(storage_, path);
    if (lock == nullptr) return std::nullopt;
    return lock_type(std::move(lock));
  }
  [[nodiscard]] std::uint64_t nonce() const { return table_->nonce(storage_); }
  [[nodiscard]] std::string path(const std::string& below) const { return table_->path(storage_, below); }

 private:
  void* storage_;
  const detail::storage_table* table_;
};

static_assert(checkpoint_storage<storage_ref>);

}  // namespace v0
}  // namespace llmmem
