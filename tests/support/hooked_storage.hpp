/// @file
/// A storage that does something else before each call: the world goes on, a disk hangs.
#pragma once

#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// Hands calls on to another storage; those of its files go there directly.
template <class Before>
class hooked_storage {
 public:
  using output = llmmem::testing::simulated_storage::output;
  using input = llmmem::testing::simulated_storage::input;
  using lock_type = llmmem::testing::simulated_storage::lock_type;
  using call = llmmem::storage_call;

  /// @param before  `void(storage_call, const std::string& path)`; by whichever thread calls.
  hooked_storage(llmmem::testing::simulated_storage& below, Before before)
      : below_(&below), before_(std::move(before)) {}

  void make_folder(const std::string& path) { on(call::make_folder, path).make_folder(path); }
  output create(const std::string& path, std::uint64_t bytes) {
    return on(call::create, path).create(path, bytes);
  }
  input open(const std::string& path) { return on(call::open, path).open(path); }
  void rename(const std::string& from, const std::string& to) { on(call::rename, from).rename(from, to); }
  void replace(const std::string& from, const std::string& to) { on(call::replace, from).replace(from, to); }
  void link(const std::string& from, const std::string& to) { on(call::link, from).link(from, to); }
  void remove(const std::string& path) { on(call::remove, path).remove(path); }
  void remove_folder(const std::string& path) { on(call::remove_folder, path).remove_folder(path); }
  std::vector<llmmem::storage_entry> list(const std::string& path) { return on(call::list, path).list(path); }
  void sync_folder(const std::string& path) { on(call::sync_folder, path).sync_folder(path); }
  std::optional<lock_type> try_lock(const std::string& path) { return on(call::lock, path).try_lock(path); }
  std::uint64_t nonce() { return below_->nonce(); }
  [[nodiscard]] std::string path(const std::string& below) const { return below_->path(below); }

 private:
  llmmem::testing::simulated_storage& on(call what, const std::string& path) {
    before_(what, path);
    return *below_;
  }

  llmmem::testing::simulated_storage* below_;
  Before before_;
};

}  // namespace llmmem_tests
