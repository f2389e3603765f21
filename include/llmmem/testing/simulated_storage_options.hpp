/// @file
/// How a `simulated_storage` is set up: its power cuts, faults and limits.
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

/// Thrown by every call once the power is off. No `llmmem::error` and no `std::exception`, so that a handler
/// of errors does not take it for one and run on: nothing runs on.
struct power_cut {
  std::uint64_t call = 0;  ///< the call at which it went off, counted from 1
};

/// When the power goes off.
enum class power_cut_when : std::uint8_t {
  before_call,  ///< that call has no effect
  after_call,   ///< it has its effect, and its caller never learns of it
};

/// When a write reads its caller's memory. The contract leaves all the time until `finish_write`, `sync` or
/// the output's end: code that is right passes with both.
enum class simulated_writes : std::uint8_t {
  at_once,   ///< in `begin_write`
  deferred,  ///< as late as may be: memory that is used again too early shows in the file
};

/// A call that fails, and which.
struct storage_fault {
  static constexpr std::uint64_t for_ever = std::numeric_limits<std::uint64_t>::max();
  enum class kind : std::uint8_t {
    refused,   ///< nothing is done
    reported,  ///< it is done all the same, and called a failure
    lost,  ///< of a sync: what it was to make durable never will be, though reads still see it until a crash;
           ///< of a sync of a folder: no later one will do; of others: refused
  };

  std::optional<storage_call> call{};  ///< only these are counted; all calls without
  std::uint64_t first = 1;             ///< number of the first that fails, counted from 1
  std::uint64_t every = 0;             ///< and of each `every` after it; 0: that one only
  std::uint64_t count = 1;             ///< how many fail at most
  int number = EIO;                    ///< as `errno` has them
  kind what = kind::refused;
};

/// How a simulated storage is set up.
struct simulated_storage_options {
  std::string name = "simulated";      ///< the root, as error texts have it
  std::uint64_t sector_bytes = 512;    ///< what a device writes wholly or not at all; smaller: smaller tests
  std::byte unwritten{0xDB};           ///< what bytes hold that never came to the device
  std::uint64_t capacity = max_bytes;  ///< bytes of all files that have a name
  simulated_writes writes = simulated_writes::at_once;
  bool links_allowed = true;       ///< else `link` fails with EOPNOTSUPP
  bool rename_allowed = true;      ///< else `rename` and `replace` do, as on mounts of object stores
  std::uint64_t power_cut_at = 0;  ///< number of the call, counted from 1; 0: never
  power_cut_when cut = power_cut_when::before_call;
  std::vector<storage_fault> faults{};
  std::uint64_t seed = 1;  ///< of nonces, and of the order of lists
};

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
