// Runs the library's collectives over MPI, and checks the results: see README.md next to this file.
#include <llmmem/comm/collectives.hpp>

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include "common/standard_descriptors.hpp"
#include "mpi_ranks/mpi_ranks.hpp"

namespace {

using namespace llmmem;
constexpr std::uint64_t second = 1'000'000'000;
constexpr std::size_t count = 300'007;  // not a multiple of the ranks

/// Whole numbers, so that sums are exact in any order.
float value(std::uint32_t rank, std::size_t i) {
  return static_cast<float>(rank + i % 1000);
}

/// Whether all checks of this rank passed; each failed one is printed.
bool check_all(mpi_ranks::mpi_transport& ranks) {
  const std::uint32_t world = to_number(ranks.world());
  const std::uint32_t self = to_index(ranks.rank());
  bool is_good = true;
  const auto check = [&](bool is_so, const char* what) {
    if (!is_so) std::fprintf(stderr, "mpi_ranks: rank %u: %s\n", self, what);
    is_good = is_good && is_so;
  };
  const auto by = [&] { return ranks.after(60 * second); };
  std::vector<float> data(count);
  const auto fill = [&](std::uint32_t rank) {
    for (std::size_t i = 0; i < count; ++i)
      data[i] = value(rank, i);
  };
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(data));
  const auto n = static_cast<float>(world);

  for (const reduce_algorithm way :
       {reduce_algorithm::direct, reduce_algorithm::ring, reduce_algorithm::tree}) {
    fill(self);
    collective_call call{.by = by(), .algorithm = way};
    all_reduce(ranks, bytes, sum_f32, call).value();
    bool is_sum = true;
    for (std::size_t i = 0; i < count; ++i)
      is_sum = is_sum && data[i] == n * value(0, i) + n * (n - 1) / 2;
    check(is_sum, "an all-reduce is not the sum of all ranks");
  }

  fill(self);
  broadcast(ranks, bytes, rank_id{world - 1}, {.by = by()}).value();
  check(data[1] == value(world - 1, 1) && data[count - 1] == value(world - 1, count - 1),
        "a broadcast is not what its root had");

  const std::vector<std::uint64_t> blocks = even_blocks(bytes.size(), ranks.world(), sizeof(float));
  fill(0);
  for (std::size_t i = 0; i < count; ++i) {
    if (i * 4 < blocks[self] || i * 4 >= blocks[self + 1]) data[i] = -1;
  }
  all_gather(ranks, bytes, blocks, {.by = by()}).value();
  const std::vector<float> gathered = data;
  fill(0);
  check(gathered == data, "an all-gather does not have all ranks' blocks");

  const std::vector<std::uint64_t> words = even_blocks(std::uint64_t{8} * world, ranks.world(), 8);
  std::vector<std::uint64_t> out(world);
  std::vector<std::uint64_t> into(world);
  for (std::uint32_t r = 0; r < world; ++r)
    out[r] = std::uint64_t{self} << 32U | r;
  all_to_all(ranks, std::as_bytes(std::span(out)), words, std::as_writable_bytes(std::span(into)), words,
             {.by = by()})
      .value();
  for (std::uint32_t r = 0; r < world; ++r)
    check(into[r] == (std::uint64_t{r} << 32U | self), "an all-to-all mixes up its blocks");

  barrier(ranks, {.by = by()}).value();

  // No rank sends this, so the deadline ends the wait, and later messages arrive complete.
  if (world > 1) {
    const rank_id next{(self + 1) % world};
    const rank_id last{(self + world - 1) % world};
    const auto late = ranks.recv(bytes, last, 99, ranks.after(second / 100));
    check(late.code() == errc::peer_timed_out,
          "the wait for a message that no rank sends passes the deadline");
    barrier(ranks, {.by = by()}).value();
    ranks
        .exchange(std::as_bytes(std::span(out)), next, std::as_writable_bytes(std::span(into)), last, 99,
                  by())
        .value();
    check(into[0] == (std::uint64_t{to_index(last)} << 32U), "an exchange after a late message is another");
    ranks.exchange(bytes.first(8), next, bytes.subspan(8, 8), last, 3, by()).value();
    const auto longer = ranks.exchange(bytes.first(8), next, bytes.subspan(8, 16), last, 3, by());
    check(longer.code() == errc::size_mismatch, "a message of another length is taken");
  }
  return is_good;
}

}  // namespace

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  MPI_Init(&argc, &argv);
  if (argc > 1) {
    std::fprintf(stderr, "mpi_ranks: it takes no arguments: mpiexec -n 4 mpi_ranks\n");
    MPI_Finalize();
    return 2;
  }
  bool is_good = false;
  std::uint32_t world = 0;
  std::uint32_t self = 0;
  try {
    mpi_ranks::mpi_transport ranks(MPI_COMM_WORLD);
    world = to_number(ranks.world());
    self = to_index(ranks.rank());
    is_good = check_all(ranks);
  } catch (const error& failed) {
    std::fprintf(stderr, "mpi_ranks: rank %u: %s\n", self, failed.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // the others wait for this one
  }
  int all_good = is_good ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &all_good, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (self == 0 && all_good != 0) {
    std::printf(
        "%u ranks: all-reduce by three ways, broadcast, all-gather, all-to-all and barrier are right\n",
        world);
  }
  const int status = example::after_printing("mpi_ranks", all_good != 0 ? 0 : 1);
  MPI_Finalize();
  return status;
}
