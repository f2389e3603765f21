/// Nodes killed at any moment, in real processes: every block that arrives is right, and the others finish.
#include "pool/killed_nodes.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_SUITE("kv_pool kill") {
  TEST_CASE("a node may be killed at any moment while blocks pass as messages") {
    using node = pool_node<cache_type, socket_endpoint>;
    kill_many(4, [](kill_board& board, socket_endpoint& end, std::uint64_t seed) {
      live_until_killed<node>(board, end, seed);
    });
  }

  TEST_CASE("a node may be killed at any moment while others read its memory") {
    using node = pool_node<cache_type, socket_endpoint, pool::embedded_directory, shared_memory_mover&>;
    kill_many(4, [](kill_board& board, socket_endpoint& end, std::uint64_t seed) {
      shared_memory_mover mover(kill_memory());
      live_until_killed<node>(board, end, seed, mover);
    });
  }
}
