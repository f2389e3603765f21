/// @file
/// The options of a `simulated_storage`: its power cuts, faults and limits.
#pragma once

#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// Thrown by every call once the power is off. It is neither an `llmmem::error` nor a `std::exception`, so
/// that no handler of errors catches it and continues: nothing runs after it.
struct power_cut {
  std::uint64_t call = 0;  ///< the call at which it went off, counted from 1
};

/// When the power goes off.
enum class power_cut_when : std::uint8_t {
  before_call,  ///< that call has no effect
  after_call,   ///< it has its effect, but its caller never learns of it
};

/// When a write reads its caller's memory. The contract allows any time until `finish_write`, `sync` or the
/// output's end: correct code passes with both.
enum class simulated_writes : std::uint8_t {
  at_once,   ///< in `begin_write`
  deferred,  ///< as late as possible: memory that is reused too early shows in the file
};

/// A fault, and the calls that it hits.
struct storage_fault {
  static constexpr std::uint64_t forever = std::numeric_limits<std::uint64_t>::max();
  [[deprecated("its name is forever")]] static constexpr std::uint64_t for_ever = forever;
  enum class kind : std::uint8_t {
    refused,   ///< nothing is done
    reported,  ///< it is done, but reported as a failure
    lost,      ///< of a sync: its effects never become durable, though reads still see them until a crash;
               ///< of a sync of a folder: nor by a later one; of others: refused
  };

  std::optional<storage_call> call{};  ///< only these are counted; empty: all calls
  std::uint64_t first = 1;             ///< number of the first that fails, counted from 1
  std::uint64_t every = 0;             ///< and each `every`-th after it; 0: only the first
  std::uint64_t count = 1;             ///< the most that fail
  int number = EIO;                    ///< an `errno` value
  kind what = kind::refused;
};

/// Options of a simulated storage.
struct simulated_storage_options {
  std::string name = "simulated";      ///< the root, for error texts
  std::uint64_t sector_bytes = 512;    ///< written completely or not at all; smaller: smaller tests
  std::byte unwritten{0xDB};           ///< the contents of bytes that never reached the device
  std::uint64_t capacity = max_bytes;  ///< bytes of all files that have a name
  simulated_writes writes = simulated_writes::at_once;
  bool links_allowed = true;       ///< else `link` fails with EOPNOTSUPP
  bool rename_allowed = true;      ///< else `rename` and `replace` do, as on mounts of object stores
  std::uint64_t power_cut_at = 0;  ///< number of the call, counted from 1; 0: never
  power_cut_when cut = power_cut_when::before_call;
  std::vector<storage_fault> faults{};
  std::uint64_t seed = 1;  ///< determines nonces, and the order of lists
};

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
