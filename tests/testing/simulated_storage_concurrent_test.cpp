#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

using namespace llmmem;
using llmmem::testing::power_cut;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_writes;

TEST_CASE("threads write, rename and lock concurrently, and a power cut stops each of them") {
  simulated_storage storage({.writes = simulated_writes::deferred});
  constexpr int workers = 4;
  std::atomic<int> stopped = 0;
  std::atomic<int> locked = 0;
  std::vector<std::thread> threads;
  storage.cut_power_at(2000);
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker] {
      const std::vector<std::byte> bytes(100, static_cast<std::byte>(worker));
      const std::string name = std::to_string(worker);
      try {
        for (;;) {
          auto file = storage.create(name + ".tmp", bytes.size());
          file.begin_write(0, bytes);
          file.sync();
          storage.replace(name + ".tmp", name);
          storage.sync_folder("");
          if (const auto lock = storage.try_lock("lock")) {
            CHECK(locked++ == 0);
            (void)storage.nonce();
            --locked;
          }
        }
      } catch (const power_cut& cut) {
        CHECK(cut.call == 2000);
        ++stopped;
      }
    });
  }
  // Looking on is allowed at any time.
  while (!storage.power_is_off()) {
    (void)storage.files();
    (void)storage.after_crash().fingerprint();
    std::this_thread::yield();
  }
  for (auto& each : threads)
    each.join();
  CHECK(stopped == workers);
  for (const auto& [path, bytes] : storage.after_crash().files()) {
    if (path == "lock" || path.ends_with(".tmp")) continue;
    CHECK(bytes == std::vector<std::byte>(100, static_cast<std::byte>(std::stoi(path))));
  }
}
