/// @file
/// The options, states and counters of `redis_directory`.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// Where the Redis server of a directory is, and how it is used. Times in nanoseconds.
struct redis_options {
  std::string unix_socket{};  ///< path of the server's socket; or
  /// Its name or address, looked up once, by the constructor; or several, with commas between them, of one
  /// server. Of a name with several addresses all are tried, at most 8.
  std::string host{};
  std::uint16_t port = 6379;
  std::string user{};  ///< empty: the default user
  std::string password{};
  std::uint32_t database = 0;
  std::string prefix = "llmmem:";  ///< of all keys, at most 64 bytes: nodes of one pool have the same
  /// How long this node counts as alive after its last renewal; it renews at a third of it. A dead node's
  /// entries count no more after that time. At least 10 ms.
  std::uint64_t lifetime_ns = 10'000'000'000;
  /// The server counts as down when it leaves a command unanswered for so long. Requests of the pool then
  /// find only blocks of this node's own tiers, at once.
  std::uint64_t answer_ns = 250'000'000;
  /// Time after which a server that is down is tried again; doubled with each attempt, up to 16 times.
  std::uint64_t retry_ns = 500'000'000;
  std::uint32_t max_questions = 256;        ///< that may be open at once; the pool asks further ones later
  std::uint32_t buffer_bytes = 256 * 1024;  ///< for commands that the server has not read; at least 65,536
  std::uint32_t max_reply_bytes = 1 << 20;  ///< a longer reply closes the connection
  std::string name = "redis_directory";     ///< its name in error texts
};

namespace pool {

/// The state of a `redis_directory`.
enum class redis_state : std::uint8_t {
  connecting,  ///< for the first time: questions wait
  up,
  down,       ///< blocks of other nodes are `unknown`; it connects again by itself
  name_taken  ///< questions are answered, but another process has this node's name: nothing is announced
};

/// Counters of a `redis_directory`.
struct redis_stats {
  std::uint64_t questions = 0;
  std::uint64_t answers = 0;
  std::uint64_t unknown = 0;         ///< questions without an answer
  std::uint64_t announced = 0;       ///< values written
  std::uint64_t connections = 0;     ///< that came up
  std::uint64_t losses = 0;          ///< connections that failed, or were not made
  std::uint64_t incarnations = 0;    ///< times that this node set its name, or tried to
  std::uint64_t refused_values = 0;  ///< names and values in the server that are malformed
  std::uint64_t refused_commands = 0;
  std::uint64_t dead_entries = 0;   ///< entries of dead incarnations that were found, and ignored
  std::uint64_t repaired = 0;       ///< of these, removed from the server
  std::uint64_t open_commands = 0;  ///< whose replies have not been read
};

}  // namespace pool
}  // namespace v0
}  // namespace llmmem
