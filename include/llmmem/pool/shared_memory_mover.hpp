/// @file
/// `shared_memory_mover`: the nodes of a pool on one machine read each other's first tier. Linux.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/pool/detail/block_export.hpp>
#include <llmmem/pool/detail/region_source.hpp>
#include <llmmem/pool/errors.hpp>
#include <llmmem/pool/mover.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/space/memory_file.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How a `shared_memory_mover` is set up.
struct shared_memory_options {
  std::uint64_t bytes = 0;                   ///< of its space: the budget of the tiers that take from it
  std::uint64_t blocks = 0;                  ///< that others can find at once: the slots of the first tier
  std::string name = "shared_memory_mover";  ///< its name in error texts, and its space's
};

/// Reads blocks of other processes on this machine from their memory: one copy, by the reader, while the
/// owner computes, sleeps, is stopped or has died.
///
///     shared_memory_mover mover({.bytes = budget, .blocks = slots});
///     kv_tiers tiers(cache, layout_mover(...), {...}, offload::kv_tier(mover.space(), budget));
///     kv_pool pool(tiers, end, mover, {.model = layout.content_fingerprint()});
///
/// Its space is a memfd whose length is sealed, so no process can make a reader fault. The pool's hello names
/// it (/proc/PID/fd/N), and other nodes map it read-only. A process of another user, PID namespace or machine
/// cannot open it; its blocks come by message then (`pool::stats::refused_introductions`, `why`).
///
/// Processes of the same user are trusted as those of the pool are: they can open the memory for writing,
/// too, and a wrong byte is then found by its checksum unless the writer changed that as well.
///
/// @par Complexity      a block one copy, which computes its CRC-32C on the way (`copy_crc32c`), in the
/// reader.
///                      The index takes 128 to 256 bytes for each of `blocks`, in addition to `bytes`.
/// @par Thread safety   its space any number of threads; the rest that of its pool.
/// @par Errors          the constructor throws `length_error` for 0 bytes or blocks, and `comm_error` when
///                      the system refuses the memory.
/// @par Source          vLLM, SGLang and Mooncake copy within one machine through shared memory; the
///                      generation before and after a copy is a seqlock (Linux).
class shared_memory_mover {
 public:
  static constexpr bool moves_by_message = false;
  using space_type = basic_host_space<detail::region_source>;

  explicit shared_memory_mover(const shared_memory_options& options) : name_(options.name) {
    constexpr std::uint64_t most = std::uint64_t{1} << 48;
    if (options.bytes == 0 || options.blocks == 0 || options.bytes > most || options.blocks > most / 256) {
      throw length_error(name_ + ": " + std::to_string(options.bytes) + " bytes for " +
                         std::to_string(options.blocks) +
                         " blocks; both must be at least 1, and below 2^48 bytes and 2^40 blocks");
    }
    const detail::export_shape shape = detail::export_shape::of(options.blocks, options.bytes);
    file_ = memory_file("llmmem pool");
    const auto refuse = [&](int error) {
      failure{.code = errc::mover_refused,
              .index = static_cast<std::uint32_t>(error),
              .wanted = shape.bytes,
              .where = name_}
          .raise();
    };
    if (!file_.is_open()) refuse(errno);
    if (const int error = file_.resize(shape.bytes)) refuse(error);
    if (const int error = file_.seal_length()) refuse(error);
    std::byte* const base = file_.map(nullptr, 0, shape.bytes, PROT_READ | PROT_WRITE);
    if (base == nullptr) refuse(errno);
    own_ = mapping(base, shape);
    std::array<std::uint64_t, 2> nonce{};
    while (::getrandom(nonce.data(), sizeof(nonce), 0) != static_cast<ssize_t>(sizeof(nonce))) {
      if (errno != EINTR) refuse(errno);
    }
    mine_.nonce_low = nonce[0];
    mine_.nonce_high = nonce[1];
    mine_.process = static_cast<std::uint32_t>(::getpid());
    mine_.file = static_cast<std::uint32_t>(file_.descriptor());
    mine_.bytes = shape.bytes;
    std::memcpy(mine_bytes_.data(), &mine_, sizeof(mine_));
    index_ = detail::export_index(base, shape, mine_.nonce_low, mine_.nonce_high);
    space_.emplace(detail::region_source(base + shape.first, shape.bytes - shape.first),
                   host_options{.budget = options.bytes, .name = name_});
  }
  shared_memory_mover(const shared_memory_mover&) = delete;
  shared_memory_mover& operator=(const shared_memory_mover&) = delete;

  /// The memory that other nodes can read: for the first tier. Its ranges end before the mover.
  [[nodiscard]] space_type& space() noexcept LLMMEM_LIFETIMEBOUND { return *space_; }
  /// Returns the last refusal of another node's memory.
  [[nodiscard]] failure why() const noexcept { return why_; }

  /// @name What a `pool_mover` has
  /// @{
  [[nodiscard]] pool::mover_limits limits() const noexcept {
    return {.one_sided = true, .needs_owner_progress = false, .max_piece = max_bytes};
  }
  [[nodiscard]] bool can_offer(std::span<const std::byte> bytes) const noexcept {
    return index_.holds(bytes);
  }
  [[nodiscard]] std::span<const std::byte> introduction() const noexcept LLMMEM_LIFETIMEBOUND {
    return mine_bytes_;
  }
  result<void> attach(seat_id seat, std::span<const std::byte> bytes) noexcept;
  void detach(seat_id seat) noexcept {
    if (to_index(seat) < others_.size()) others_[to_index(seat)] = {};
  }
  [[nodiscard]] bool reaches(seat_id seat) const noexcept {
    return to_index(seat) < others_.size() && others_[to_index(seat)].memory.base() != nullptr;
  }
  bool offer(const block_key& name, std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
    if (!index_.holds(bytes)) return false;
    index_.put(name, bytes, crc);
    return true;
  }
  [[nodiscard]] bool is_offered(const block_key& name) const noexcept { return index_.has(name); }
  void withdraw(const block_key& name) noexcept { index_.remove(name); }
  void withdraw_all() noexcept { index_.clear(); }
  pool::moved fetch(seat_id seat, const block_key& name, std::span<std::byte> into,
                    const pool::move_ticket&) noexcept {
    if (!reaches(seat)) return pool::moved::unreached;
    const mapping& from = others_[to_index(seat)].memory;
    return detail::copy_exported(from.base(), from.shape(), name, into, [] {});
  }
  void drop(const pool::move_ticket&) noexcept {}
  template <class F>
  void progress(F&&) noexcept {}
  /// @}

 private:
  /// Mapped memory, with its shape.
  class mapping {
   public:
    mapping() noexcept = default;
    mapping(std::byte* base, const detail::export_shape& shape) noexcept : base_(base), shape_(shape) {}
    mapping(mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), shape_(other.shape_) {}
    mapping& operator=(mapping&& other) noexcept {
      std::swap(base_, other.base_);
      std::swap(shape_, other.shape_);
      return *this;
    }
    ~mapping() {
      if (base_ != nullptr) ::munmap(base_, static_cast<std::size_t>(shape_.bytes));
    }
    void set_index(std::uint64_t buckets, std::uint64_t first) noexcept {
      shape_.buckets = buckets;
      shape_.first = first;
    }
    [[nodiscard]] const std::byte* base() const noexcept { return base_; }
    [[nodiscard]] const detail::export_shape& shape() const noexcept { return shape_; }

   private:
    std::byte* base_ = nullptr;
    detail::export_shape shape_{};
  };
  /// How another process finds this memory.
  struct introduced {
    std::uint64_t kind = 0x6D66'6473'6861'7265;  // of this mover
    std::uint64_t nonce_low = 0;
    std::uint64_t nonce_high = 0;
    std::uint64_t bytes = 0;
    std::uint32_t process = 0;
    std::uint32_t file = 0;

    friend constexpr bool operator==(const introduced&, const introduced&) noexcept = default;
  };
  struct other {
    introduced what{};
    mapping memory{};
  };
  struct opened {
    int file = -1;
    ~opened() {
      if (file >= 0) ::close(file);
    }
  };

  [[nodiscard]] failure refused(seat_id seat, std::uint64_t wanted, int error) noexcept {
    why_ = {.code = errc::mover_unreached,
            .index = to_index(seat),
            .wanted = wanted,
            .found = static_cast<std::uint64_t>(error),
            .where = name_};
    return why_;
  }

  std::string name_;
  memory_file file_;
  mapping own_;
  introduced mine_{};
  std::array<std::byte, sizeof(introduced)> mine_bytes_{};
  detail::export_index index_;
  std::optional<space_type> space_;
  std::vector<other> others_;  // by seat
  failure why_{};
};

inline result<void> shared_memory_mover::attach(seat_id seat, std::span<const std::byte> bytes) noexcept {
  introduced what;
  if (bytes.size() != sizeof(what)) return refused(seat, bytes.size(), EPROTO);
  std::memcpy(&what, bytes.data(), sizeof(what));
  if (what.kind != introduced{}.kind) return refused(seat, bytes.size(), EPROTO);
  if (reaches(seat) && others_[to_index(seat)].what == what) return {};
  detach(seat);
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%u/fd/%u", what.process, what.file);
  // The path may name anything: a device or a pipe is looked at, and not opened.
  const opened named{::open(path.data(), O_PATH | O_CLOEXEC)};
  struct stat status{};
  if (named.file < 0 || ::fstat(named.file, &status) != 0) return refused(seat, what.bytes, errno);
  if (!S_ISREG(status.st_mode) || static_cast<std::uint64_t>(status.st_size) != what.bytes)
    return refused(seat, what.bytes, EPROTO);
  std::snprintf(path.data(), path.size(), "/proc/self/fd/%d", named.file);
  const opened file{::open(path.data(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.file < 0) return refused(seat, what.bytes, errno);
  // Without the seal its owner could cut it, and a reader would get a bus error.
  const int seals = ::fcntl(file.file, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return refused(seat, what.bytes, EPROTO);
  if (what.bytes < sizeof(detail::export_header)) return refused(seat, what.bytes, EPROTO);
  void* const at = ::mmap(nullptr, static_cast<std::size_t>(what.bytes), PROT_READ, MAP_SHARED, file.file, 0);
  if (at == MAP_FAILED) return refused(seat, what.bytes, errno);
  auto* const base = static_cast<std::byte*>(at);
  other made{.what = what, .memory = mapping(base, {.bytes = what.bytes})};
  detail::export_header header;
  std::memcpy(&header, base, sizeof(header));
  if (header.nonce_low != what.nonce_low || header.nonce_high != what.nonce_high ||
      !detail::export_shape::is_right(header, what.bytes))
    return refused(seat, what.bytes, EPROTO);
  made.memory.set_index(header.buckets, header.first);
  try {
    if (to_index(seat) >= others_.size()) others_.resize(std::size_t{to_index(seat)} + 1);
  } catch (const std::bad_alloc&) {
    return refused(seat, what.bytes, ENOMEM);
  }
  others_[to_index(seat)] = std::move(made);
  return {};
}

static_assert(pool_mover<shared_memory_mover>);

}  // namespace v0
}  // namespace llmmem
