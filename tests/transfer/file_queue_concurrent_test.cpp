#include <llmmem/transfer/file_queue.hpp>
#if defined(LLMMEM_TESTS_URING)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/random.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::temporary_folder;

namespace {

/// Several threads with a part of the file each write, read back, cancel and promote through one queue.
template <class Engine, class... Args>
void serves_several_threads(llmmem::transfer::driven_by driver, Args... engine) {
  const temporary_folder folder;
  const io_file file(folder.file("data"));
  file_queue<Engine> queue({.driver = driver, .block_bytes = 4096, .max_operations = 16}, engine...);
  constexpr std::size_t part = 40'000;
  std::vector<std::thread> threads;
  std::vector<int> wrong(3);
  for (std::size_t me = 0; me < wrong.size(); ++me) {
    threads.emplace_back([&, me] {
      random_numbers random(me);
      std::vector<std::byte> mine(part);
      std::vector<std::byte> back(part);
      for (int turn = 0; turn < 60; ++turn) {
        mine[random.below(part)] = static_cast<std::byte>(turn);
        const auto written =
            queue.start(write_to(file, me * part, mine), llmmem::transfer::urgency::write_back);
        const auto ahead =
            queue.start(read_from(file, me * part, back), llmmem::transfer::urgency::prefetch, *written);
        if (!written || !ahead) {
          ++wrong[me];
          break;
        }
        if (random.once_in(3)) queue.promote(*ahead, llmmem::transfer::urgency::demand);
        if (random.once_in(4)) {
          queue.cancel(*ahead);
          if (const auto outcome = ahead->settled(); !outcome && outcome.code() != errc::cancelled)
            ++wrong[me];
          queue.clear_failures();
        } else if (!ahead->settled() || back != mine) {
          ++wrong[me];
        }
        if (!written->settled()) ++wrong[me];
      }
    });
  }
  for (std::thread& each : threads)
    each.join();
  CHECK(wrong == std::vector<int>(wrong.size()));
  queue.wait_idle();
}

}  // namespace

TEST_CASE("threads that share a queue get their own bytes and outcomes") {
  serves_several_threads<posix_io>(llmmem::transfer::driven_by::own_thread);
  serves_several_threads<posix_io>(llmmem::transfer::driven_by::waiters);
}

#if defined(LLMMEM_TESTS_URING)
TEST_CASE("threads that share a queue over io_uring get their own bytes and outcomes") {
  serves_several_threads<uring_io>(transfer::driven_by::own_thread,
                                   uring_options{.issuer = uring_issuer::one_thread});
  serves_several_threads<uring_io>(transfer::driven_by::waiters,
                                   uring_options{.issuer = uring_issuer::any_thread});
}
#endif
