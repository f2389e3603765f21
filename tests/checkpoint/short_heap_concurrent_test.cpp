#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/mirrored_coordinator.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/recover.hpp>
#include <llmmem/checkpoint/xxh3_chunk_digest.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/heap_counter.hpp"
#include "support/hooked_storage.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;

namespace {

using mirror_type = mirrored_coordinator<solo_coordinator<posix_storage<>>, posix_storage<>>;

struct traits : checkpointer_traits {
  using coordinator_type = mirror_type;
  using digest_type = xxh3_chunk_digest;
};

const std::vector<state_tensor> one_tensor{
    {.name = "weights", .type = safetensors_type::u8, .shape = {5000}, .group = "model", .part = {}}};

/// Two tiers, a checkpointer above them, and a state that changes a little each step.
struct run {
  temporary_folder place{};
  posix_storage<> local{place.file("local")};
  posix_storage<> durable{place.file("durable")};
  solo_coordinator<posix_storage<>> fast{local};
  mirror_type mirror{fast, durable, keep_last_and_every{}, {.buffer_bytes = 4096, .retry_after_ns = 1'000}};
  async_checkpointer<traits> saves{
      mirror, one_tensor, {.ring_bytes = 2048, .chunk_bytes = 1024, .full_every = 3}};
  std::vector<std::byte> state = std::vector<std::byte>(5000);
  std::vector<std::span<const std::byte>> spans{state};

  commit_ticket save(std::uint64_t step) {
    state[static_cast<std::size_t>(step * 997 % state.size())] = static_cast<std::byte>(step);
    const snapshot_guard guard = saves.begin_snapshot(step, host_state_view(spans));
    guard.wait_staged();
    static_cast<void>(guard.ticket().wait());
    CHECK(saves.flush());
    return guard.ticket();
  }
};

template <class Storage>
std::vector<std::byte> loaded(Storage& storage, const found_checkpoint& found) {
  std::vector<std::byte> state(5000);
  const std::vector<wanted_tensor> wanted{wanted_tensor{.name = "weights"}};
  load_checkpoint(storage, found, wanted,
                  [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> part) {
                    std::copy(part.begin(), part.end(), state.begin() + static_cast<std::ptrdiff_t>(offset));
                  },
                  {.readers = 1});
  return state;
}

std::size_t drafts_in(posix_storage<>& storage) {
  const std::vector<storage_entry> all = storage.list("");
  return static_cast<std::size_t>(std::ranges::count_if(
      all, [](const storage_entry& each) { return each.name.starts_with(checkpoint_names::draft); }));
}

}  // namespace

TEST_SUITE("checkpoints, short heap") {
  TEST_CASE("without memory, a reason is a short text or truncated") {
    const std::string text(100, 'x');
    std::string whole = "not told";
    std::string last;
    {
      const short_heap heap(1, heap_refusal::forever);
      std::thread([&] {
        whole = detail::reason(text);
        last = detail::reason(text, "no room");
      }).join();
    }
    CHECK(short_heap::refused() == 2);
    CHECK(whole == "out of memory");
    CHECK(last == "no room");
    CHECK(detail::reason(text, "no room") == text + "no room");
  }

  TEST_CASE("if any request for memory fails, a save ends and reports it, and the next one works") {
    for (const heap_refusal how : {heap_refusal::once, heap_refusal::forever}) {
      std::uint64_t failed = 0;
      bool ended = false;
      // One after the other up to there; then fewer, up to the last.
      for (std::uint64_t first = 1; !ended; first += first < 40 ? 1 : 13) {
        CAPTURE(first);
        run of;
        REQUIRE(of.save(1).is_committed());
        commit_ticket ticket;
        bool is_copied = false;
        {
          const short_heap heap(first, how);
          ticket = of.save(2);
          is_copied = of.mirror.wait_copied(ticket.generation());
          ended = short_heap::refused() == 0;
        }
        const std::vector<std::byte> second = of.state;
        if (ticket.status() != commit_status::committed) ++failed;
        CHECK(ticket.why().empty() == ticket.is_committed());
        if (ended) CHECK(is_copied);
        const commit_ticket next = of.save(3);
        CHECK(next.why() == "");
        REQUIRE(next.is_committed());
        CHECK(of.mirror.wait_copied(next.generation()));
        for (posix_storage<>* const each : {&of.local, &of.durable}) {
          // Memory that was short once was there again for who tidied up.
          if (how == heap_refusal::once) CHECK(drafts_in(*each) == 0);
          const checkpoint_search search = find_checkpoint(*each);
          REQUIRE(search.found);
          CHECK(search.found->id.step == 3);
          CHECK(loaded(*each, *search.found) == of.state);
        }
        for (const checkpoint_id& id : list_checkpoints(of.local)) {
          if (id.step != 2) continue;
          CHECK(loaded(of.local, open_checkpoint(of.local, id, verification::checksums)) == second);
        }
      }
      CHECK(failed > 10);
    }
  }

  TEST_CASE("a visible checkpoint is uncertain, not refused, even if there is no memory for the text") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    const auto commit_with_short_heap = [&]<class Make>(std::uint64_t first, Make make) {
      simulated_storage storage;
      std::atomic<bool> is_named{false};
      std::atomic<bool> is_short{false};
      const storage_error no_sync(storage_call::sync_folder, "the folder", EIO);
      const auto refuse = [&](storage_call what, const std::string& path) {
        const auto is_checkpoint = [](const checkpoint_id& each) { return each.step == 10; };
        if (what != storage_call::sync_folder || !path.empty() || is_short) return;
        if (std::ranges::none_of(list_checkpoints(storage), is_checkpoint)) return;
        is_named = true;
        is_named.notify_all();
        is_short.wait(false);
        throw storage_error(no_sync);
      };
      hooked_storage<decltype(refuse)> hooked(storage, refuse);
      auto coordinator = make(hooked);
      const checkpoint_draft draft = coordinator->begin(10);
      const checkpoint_manifest part = write_rank(storage, world, draft, 0);
      bool is_uncertain = false;
      std::thread commits([&] {
        try {
          coordinator->commit(draft, part);
        } catch (const durability_uncertain&) {
          is_uncertain = true;
        } catch (...) {
        }
      });
      is_named.wait(false);
      bool refused = false;
      {
        const short_heap heap(first, heap_refusal::once);
        is_short = true;
        is_short.notify_all();
        commits.join();
        refused = short_heap::refused() != 0;
      }
      CHECK(is_uncertain);
      return refused;
    };
    for (const bool alone : {true, false}) {
      CAPTURE(alone);
      std::uint64_t first = 1;
      for (bool goes_on = true; goes_on; ++first) {
        CAPTURE(first);
        goes_on = alone
                      ? commit_with_short_heap(first,
                                               []<class Storage>(Storage& storage) {
                                                 return std::make_unique<solo_coordinator<Storage>>(storage);
                                               })
                      : commit_with_short_heap(first, []<class Storage>(Storage& storage) {
                          return std::make_unique<file_coordinator<Storage>>(
                              storage, file_coordinator_options{.rank = 0, .world = 1});
                        });
      }
      CHECK(first > 2);
    }
  }
}
