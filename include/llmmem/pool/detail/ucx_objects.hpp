/// @file
/// Owners of UCX objects: a context with its worker, memory, a connection to another worker.
#pragma once

#include <llmmem/config.hpp>

#include <ucp/api/ucp.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Names and values as in UCX's environment, without `UCX_`; a null name is left out.
using ucx_settings = std::array<std::pair<const char*, const char*>, 3>;

/// A context and its only worker. `status` says why there is none.
class ucx_worker {
 public:
  explicit ucx_worker(const ucx_settings& settings) noexcept {
    ucp_config_t* config = nullptr;
    status = ucp_config_read(nullptr, nullptr, &config);
    if (status != UCS_OK) return;
    for (const auto& [name, value] : settings) {
      if (status == UCS_OK && name != nullptr) status = ucp_config_modify(config, name, value);
    }
    ucp_params_t wanted{};
    wanted.field_mask = UCP_PARAM_FIELD_FEATURES;
    wanted.features = UCP_FEATURE_RMA;
    if (status == UCS_OK) status = ucp_init(&wanted, config, &context_);
    ucp_config_release(config);
    if (status != UCS_OK) return;
    ucp_worker_params_t single{};
    single.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    single.thread_mode = UCS_THREAD_MODE_SINGLE;
    status = ucp_worker_create(context_, &single, &worker_);
  }
  ucx_worker(const ucx_worker&) = delete;
  ucx_worker& operator=(const ucx_worker&) = delete;
  ~ucx_worker() {
    if (worker_ != nullptr) ucp_worker_destroy(worker_);
    if (context_ != nullptr) ucp_cleanup(context_);
  }

  [[nodiscard]] ucp_context_h context() const noexcept { return context_; }
  [[nodiscard]] ucp_worker_h worker() const noexcept { return worker_; }

  ucs_status_t status = UCS_OK;

 private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
};

/// Memory that UCX allocates and registers, with the key by which others reach it.
class ucx_memory {
 public:
  ucx_memory(const ucx_worker& of, std::uint64_t bytes) noexcept : context_(of.context()) {
    ucp_mem_map_params_t wanted{};
    wanted.field_mask =
        UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    wanted.length = static_cast<std::size_t>(bytes);
    wanted.flags = UCP_MEM_MAP_ALLOCATE;
    status = ucp_mem_map(context_, &wanted, &memory_);
    if (status != UCS_OK) return;
    ucp_mem_attr_t found{};
    found.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
    status = ucp_mem_query(memory_, &found);
    data = static_cast<std::byte*>(found.address);
    if (status == UCS_OK) status = ucp_rkey_pack(context_, memory_, &key, &key_bytes);
  }
  ucx_memory(const ucx_memory&) = delete;
  ucx_memory& operator=(const ucx_memory&) = delete;
  ~ucx_memory() {
    if (key != nullptr) ucp_rkey_buffer_release(key);
    if (memory_ != nullptr) static_cast<void>(ucp_mem_unmap(context_, memory_));
  }

  ucs_status_t status = UCS_OK;
  std::byte* data = nullptr;
  void* key = nullptr;
  std::size_t key_bytes = 0;

 private:
  ucp_context_h context_;
  ucp_mem_h memory_ = nullptr;
};

/// A connection to another worker, and the key of its memory. It does not move: UCX has its address.
class ucx_peer {
 public:
  ucx_peer() noexcept = default;
  ucx_peer(const ucx_peer&) = delete;
  ucx_peer& operator=(const ucx_peer&) = delete;
  ~ucx_peer() {
    if (key_ != nullptr) ucp_rkey_destroy(key_);
  }

  /// The key must be unpacked while the connection is open, and outlives what is read by it.
  [[nodiscard]] ucs_status_t open(const ucx_worker& by, const void* address, const void* key) noexcept {
    ucp_ep_params_t wanted{};
    wanted.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    wanted.address = static_cast<const ucp_address_t*>(address);
    wanted.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    wanted.err_handler.cb = [](void* of, ucp_ep_h, ucs_status_t) {
      static_cast<ucx_peer*>(of)->is_broken_ = true;
    };
    wanted.err_handler.arg = this;
    const ucs_status_t made = ucp_ep_create(by.worker(), &wanted, &end_);
    if (made != UCS_OK) {
      end_ = nullptr;
      return made;
    }
    const ucs_status_t unpacked = ucp_ep_rkey_unpack(end_, key, &key_);
    if (unpacked != UCS_OK) key_ = nullptr;
    return unpacked;
  }
  /// Begins to close the connection; what is read by it ends. Call `is_closed` until it returns true.
  void close() noexcept {
    if (end_ == nullptr) return;
    ucp_request_param_t how{};
    how.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    how.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* const begun = ucp_ep_close_nbx(std::exchange(end_, nullptr), &how);
    if (UCS_PTR_IS_PTR(begun)) closing_ = begun;
  }
  [[nodiscard]] bool is_closed() noexcept {
    if (end_ != nullptr) return false;
    if (closing_ != nullptr && ucp_request_check_status(closing_) != UCS_INPROGRESS)
      ucp_request_free(std::exchange(closing_, nullptr));
    return closing_ == nullptr;
  }
  [[nodiscard]] bool is_broken() const noexcept { return is_broken_ || end_ == nullptr; }

  /// Returns where this process has mapped the other's memory, or null.
  [[nodiscard]] std::byte* pointer(std::uint64_t remote) const noexcept {
    void* at = nullptr;
    return ucp_rkey_ptr(key_, remote, &at) == UCS_OK ? static_cast<std::byte*>(at) : nullptr;
  }
  /// Returns null if the bytes are there, or a request, or an error (`UCS_PTR_IS_ERR`).
  [[nodiscard]] void* get(std::byte* into, std::uint64_t bytes, std::uint64_t remote) noexcept {
    const ucp_request_param_t plain{};
    return ucp_get_nbx(end_, into, static_cast<std::size_t>(bytes), remote, key_, &plain);
  }
  /// Returns the transports of the connection's lanes as UCX prints them, as `posix` or `tcp tcp`.
  [[nodiscard]] std::string lanes() const {
    std::string out;
    char* text = nullptr;
    std::size_t bytes = 0;
    std::FILE* const file = ::open_memstream(&text, &bytes);
    if (file == nullptr) return out;
    ucp_ep_print_info(end_, file);
    std::fclose(file);
    std::string_view left(text, bytes);
    // lane[0]:  1:posix/memory.0 md[1]          -> md[1]/posix/sysdev[255] am am_bw#0
    for (auto at = left.find("lane["); at != std::string_view::npos; at = left.find("lane[")) {
      left.remove_prefix(at);
      const std::string_view line = left.substr(0, left.find('\n'));
      left.remove_prefix(line.size());
      const auto name = line.find(':', line.find("]:") + 2);
      const auto end = line.find('/', name == std::string_view::npos ? line.size() : name);
      if (end == std::string_view::npos) continue;
      if (!out.empty()) out += ' ';
      out += line.substr(name + 1, end - name - 1);
    }
    std::free(text);
    return out;
  }

 private:
  ucp_ep_h end_ = nullptr;
  ucp_rkey_h key_ = nullptr;
  void* closing_ = nullptr;
  bool is_broken_ = false;
};

/// Returns whether all of a range can be read, by the system's list of mappings: a pointer computed from
/// another process's number may lead anywhere, also to pages that are mapped and may not be read.
[[nodiscard]] inline bool is_readable(const std::byte* data, std::uint64_t bytes) noexcept {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> maps(std::fopen("/proc/self/maps", "re"),
                                                             &std::fclose);
  if (maps == nullptr) return false;
  auto at = reinterpret_cast<std::uintptr_t>(data);
  if (bytes > ~std::uint64_t{0} - at) return false;
  const std::uint64_t end = at + bytes;
  std::array<char, 1024> line{};
  bool is_line_start = true;
  while (at < end && std::fgets(line.data(), static_cast<int>(line.size()), maps.get()) != nullptr) {
    const bool starts = std::exchange(is_line_start, std::strchr(line.data(), '\n') != nullptr);
    char* after = line.data();
    if (!starts) continue;  // the rest of a long path
    const std::uint64_t first = std::strtoull(after, &after, 16);
    if (*after != '-') return false;
    const std::uint64_t last = std::strtoull(after + 1, &after, 16);
    if (at >= first && at < last) {
      if (after[0] != ' ' || after[1] != 'r') return false;
      at = last;
    }
  }
  return at >= end;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
