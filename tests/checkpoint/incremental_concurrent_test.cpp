#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/testing/crash_states.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#ifdef LLMMEM_TESTS_XXHASH
#include <llmmem/checkpoint/xxh3_chunk_digest.hpp>
#endif

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/stuck_coordinator.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::crash_limits;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;
using llmmem::testing::simulated_writes;

namespace {

/// FNV-1a, twice: enough to tell a test's chunks apart.
struct plain_digest {
  static constexpr bool detects_changes = true;
  [[nodiscard]] static std::array<std::uint64_t, 2> of(std::span<const std::byte> bytes) noexcept {
    std::array<std::uint64_t, 2> sum{0xCBF2'9CE4'8422'2325ULL, 0x8422'2325'CBF2'9CE4ULL};
    for (const std::byte each : bytes) {
      sum[0] = (sum[0] ^ static_cast<std::uint64_t>(each)) * 0x100'0000'01B3ULL;
      sum[1] = (sum[1] ^ static_cast<std::uint64_t>(each)) * 0x100'0000'01B5ULL;
    }
    return sum;
  }
};
static_assert(chunk_digest<plain_digest>);

/// Tensors in two groups, of which single bytes change, and what they were at each version.
struct state {
  std::vector<state_tensor> tensors{};
  std::vector<std::vector<std::byte>> bytes{};
  std::vector<std::span<const std::byte>> spans{};
  std::uint64_t now = 1;                            // a version for every change
  std::vector<std::vector<std::uint64_t>> written;  // in which version a byte was

  explicit state(const std::vector<std::uint64_t>& sizes) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      tensors.push_back({.name = "tensor" + std::to_string(i),
                         .type = safetensors_type::u8,
                         .shape = {sizes[i]},
                         .group = i % 2 == 0 ? "model" : "optimizer",
                         .part = {}});
      bytes.emplace_back(static_cast<std::size_t>(sizes[i]));
      written.emplace_back(static_cast<std::size_t>(sizes[i]), 1);
    }
    for (const auto& each : bytes)
      spans.emplace_back(each);
  }
  state(const state&) = delete;
  state& operator=(const state&) = delete;

  void set(std::size_t tensor, std::size_t at, std::uint64_t value) {
    bytes[tensor][at] = static_cast<std::byte>(value);
    written[tensor][at] = now;
  }
  void set_all(std::uint64_t value) {
    for (std::size_t t = 0; t < bytes.size(); ++t) {
      for (std::size_t i = 0; i < bytes[t].size(); ++i)
        set(t, i, value + i);
    }
  }
  void change_some(random_numbers& random, std::uint64_t most) {
    for (std::uint64_t count = random.below(most + 1); count > 0; --count) {
      const std::size_t tensor = random.below(bytes.size());
      set(tensor, random.below(bytes[tensor].size()), random.next());
    }
  }
};

/// Knows what was written when, and says so.
class telling_view {
 public:
  static constexpr bool is_concurrent = true;

  explicit telling_view(state& of) : of_(&of), version_(of.now++) {}
  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    std::memcpy(into.data(), of_->bytes[tensor].data() + offset, into.size());
  }
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  [[nodiscard]] bool is_unchanged_since(std::uint64_t version, std::uint32_t tensor, std::uint64_t offset,
                                        std::uint64_t bytes) const {
    const std::span<const std::uint64_t> seen(of_->written[tensor]);
    return version != 0 && std::ranges::all_of(seen.subspan(offset, bytes),
                                               [&](std::uint64_t when) { return when <= version; });
  }

 private:
  state* of_;
  std::uint64_t version_;
};
static_assert(change_tracking_view<telling_view>);

struct digest_traits : checkpointer_traits {
  using storage_type = simulated_storage;
  using coordinator_type = solo_coordinator<simulated_storage>;
  using digest_type = plain_digest;
};
struct telling_traits : checkpointer_traits {
  using storage_type = simulated_storage;
  using coordinator_type = solo_coordinator<simulated_storage>;
  using view_type = telling_view;
};

struct stuck_traits : digest_traits {
  using coordinator_type = stuck_coordinator;
};

/// What a checkpoint has, as the state's tensors; what is wrong instead.
template <class Storage>
std::string compare(Storage& storage, const found_checkpoint& found, const std::vector<state_tensor>& tensors,
                    const std::vector<std::vector<std::byte>>& expected) {
  std::vector<std::vector<std::byte>> loaded;
  std::vector<wanted_tensor> wanted;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    loaded.emplace_back(expected[i].size());
    wanted.push_back({.name = tensors[i].name, .part = {}, .type = {}, .shape = {}});
  }
  for (const verification how : {verification::checksums, verification::sizes}) {
    for (auto& each : loaded)
      std::ranges::fill(each, std::byte{});
    load_checkpoint(storage, found, wanted,
                    [&](std::uint32_t i, std::uint64_t offset, std::span<const std::byte> part) {
                      std::memcpy(loaded[i].data() + offset, part.data(), part.size());
                    },
                    {.verify = how, .readers = 2});
    if (loaded != expected) return "other bytes";
  }
  return "";
}

/// Generations that a checkpoint refers to.
std::set<std::uint64_t> referred(const checkpoint_manifest& manifest) {
  std::set<std::uint64_t> all;
  for (const stored_chunks& each : manifest.stored) {
    if (each.generation != manifest.generation) all.insert(each.generation);
  }
  return all;
}

constexpr std::uint64_t chunk = 128;
constexpr checkpointer_options every_fourth_whole() {
  return {.ring_bytes = 4 * chunk, .chunk_bytes = chunk, .full_every = 4};
}

/// Saves and waits; the checkpoint as it is then.
template <class Checkpointer, class View>
found_checkpoint save(Checkpointer& saves, simulated_storage& storage, std::uint64_t step, View&& view) {
  const commit_ticket ticket = saves.begin_snapshot(step, std::forward<View>(view)).ticket();
  INFO(ticket.why());
  REQUIRE(ticket.wait() == commit_status::committed);
  saves.flush();
  return open_checkpoint(storage, {step, ticket.generation()}, verification::checksums);
}

}  // namespace

TEST_SUITE("incremental saves") {
  TEST_CASE("each kept checkpoint has the state of its moment, for any changes between saves") {
    for (const auto seed : seeds_within(30, 8)) {
      CAPTURE(seed);
      random_numbers random(seed);
      std::vector<std::uint64_t> sizes;
      for (std::uint64_t i = 0; i < 2 + random.below(std::uint64_t{5}); ++i)
        sizes.push_back(1 + random.below(std::uint64_t{2000}));
      state of(sizes);
      of.set_all(seed);
      simulated_storage_options options;
      options.writes = seed % 2 == 0 ? simulated_writes::deferred : simulated_writes::at_once;
      simulated_storage storage(options);
      const std::uint64_t keeps = 2 + random.below(std::uint64_t{3});
      solo_coordinator coordinator(storage, keep_last_and_every{.last = keeps});
      const checkpointer_options how{.ring_bytes = chunk * (2 + random.below(std::uint64_t{20})),
                                     .chunk_bytes = chunk,
                                     .max_shard_bytes = 1 + random.below(std::uint64_t{3000}),
                                     .max_pending = 1 + random.below(std::uint32_t{3}),
                                     .full_every = 2 + random.below(std::uint32_t{5})};
      const auto run = [&]<class Traits>(std::type_identity<Traits>, auto view) {
        async_checkpointer<Traits> saves(coordinator, of.tensors, how);
        std::map<std::uint64_t, std::vector<std::vector<std::byte>>> saved;
        for (std::uint64_t step = 1; step <= 14; ++step) {
          {
            const mutation_permit permit = saves.gate().mutate();
            random.once_in(6) ? of.set_all(random.next()) : of.change_some(random, 12);
          }
          static_cast<void>(saves.begin_snapshot(step, view()));
          saved[step] = of.bytes;
        }
        saves.flush();
        const std::vector<checkpoint_id> there = list_checkpoints(storage);
        REQUIRE(there.size() >= keeps);
        for (const checkpoint_id& id : there) {
          const found_checkpoint found = open_checkpoint(storage, id, verification::checksums);
          CHECK(compare(storage, found, of.tensors, saved[id.step]) == "");
          CHECK(referred(found.manifest).size() < how.full_every);
        }
        CHECK(there.front().step == 14);
        CHECK(saves.stats().committed == 14);
        CHECK(saves.stats().staging_peak <= how.ring_bytes);
      };
      if (random.once_in(2)) {
        run(std::type_identity<digest_traits>(), [&] { return host_state_view(of.spans); });
      } else {
        run(std::type_identity<telling_traits>(), [&] { return telling_view(of); });
      }
    }
  }

  TEST_CASE("an unchanged chunk is not written, nor even copied if the view detects changes") {
    state of({chunk * 40, chunk * 7 + 5});
    of.set_all(3);
    const auto run = [&]<class Traits>(std::type_identity<Traits>, auto view) {
      simulated_storage storage;
      solo_coordinator coordinator(storage);
      async_checkpointer<Traits> saves(coordinator, of.tensors, every_fourth_whole());
      const found_checkpoint whole = save(saves, storage, 1, view());
      CHECK(whole.manifest.stored.empty());
      const std::uint64_t all = saves.stats().persisted_bytes;
      CHECK(saves.stats().unchanged_bytes == 0);

      std::uint64_t before = saves.stats().staged_bytes;
      const found_checkpoint same = save(saves, storage, 2, view());
      CHECK(saves.stats().persisted_bytes == all);
      CHECK(saves.stats().unchanged_bytes == all);
      CHECK(referred(same.manifest) == std::set<std::uint64_t>{1});
      CHECK(saves.stats().staged_bytes == (Traits::digest_type::detects_changes ? before + all : before));
      for (const checkpoint_file& each : same.manifest.files)
        CHECK(each.runs == std::vector<chunk_run>{{0, each.chunks.size(), each.runs[0].stored, 0}});
      CHECK(storage.list(same.folder).size() == 1);  // the manifest

      // The first file's data begin at 4096, which is chunk 32.
      of.set(0, chunk * 10 + 1, 99);
      before = saves.stats().staged_bytes;
      const found_checkpoint one = save(saves, storage, 3, view());
      CHECK(saves.stats().persisted_bytes == all + chunk);
      CHECK(saves.stats().staged_bytes == before + (Traits::digest_type::detects_changes ? all : chunk));
      const checkpoint_file& file = one.manifest.files[0];
      REQUIRE(file.runs.size() == 3);
      CHECK(file.runs[0].count == 42);
      CHECK(file.runs[1] == chunk_run{42, 1, file.runs[1].stored, 0});
      CHECK(file.runs[2] == chunk_run{43, file.chunks.size() - 43, file.runs[0].stored, 43});
      CHECK(one.manifest.stored[file.runs[1].stored] ==
            stored_chunks{3, 3, "model.safetensors.changes", chunk});
      CHECK(compare(storage, one, of.tensors, of.bytes) == "");

      of.set(0, chunk * 10 + 1, 100);
      of.set(1, of.bytes[1].size() - 1, 100);  // in a chunk that is shorter than others
      const found_checkpoint two = save(saves, storage, 4, view());
      CHECK(referred(two.manifest) == std::set<std::uint64_t>{1});
      CHECK(compare(storage, two, of.tensors, of.bytes) == "");
      CHECK(save(saves, storage, 5, view()).manifest.stored.empty());  // the fifth is whole again
      CHECK(saves.stats().persisted_bytes == 2 * all + 2 * chunk + 5);
    };
    run(std::type_identity<digest_traits>(), [&] { return host_state_view(of.spans); });
    run(std::type_identity<telling_traits>(), [&] { return telling_view(of); });
  }

  TEST_CASE("if everything changed, the files are plain, so that every tool reads them") {
    state of({1000, 500});
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    async_checkpointer<digest_traits> saves(coordinator, of.tensors,
                                            {.ring_bytes = 16384, .chunk_bytes = 8192, .full_every = 100});
    for (std::uint64_t step = 1; step <= 3; ++step) {
      of.set_all(step);
      const found_checkpoint found = save(saves, storage, step, host_state_view(of.spans));
      CHECK(found.manifest.stored.empty());
      for (const checkpoint_file& each : found.manifest.files) {
        CHECK(each.runs.empty());
        CHECK(storage.open(found.folder + "/" + each.name).bytes() == each.bytes);
      }
      CHECK(storage.list(found.folder).size() == found.manifest.files.size() + 1);
    }
  }

  TEST_CASE("saves also work if files cannot be renamed, even if everything changed") {
    state of({1000, 500});
    simulated_storage_options options;
    options.rename_allowed = false;
    simulated_storage storage(options);
    solo_coordinator coordinator(storage);
    async_checkpointer<digest_traits> saves(coordinator, of.tensors, every_fourth_whole());
    for (std::uint64_t step = 1; step <= 6; ++step) {
      if (step != 3) of.set_all(step);
      const found_checkpoint found = save(saves, storage, step, host_state_view(of.spans));
      CHECK(compare(storage, found, of.tensors, of.bytes) == "");
    }
    CHECK(saves.stats().failed == 0);
  }

  TEST_CASE("retention keeps a checkpoint until no other refers to it") {
    state of({chunk * 20});
    simulated_storage storage;
    solo_coordinator coordinator(storage, keep_last_and_every{.last = 2});
    async_checkpointer<digest_traits> saves(coordinator, of.tensors,
                                            {.ring_bytes = 1024, .chunk_bytes = chunk, .full_every = 5});
    std::vector<std::vector<std::uint64_t>> kept;
    for (std::uint64_t step = 1; step <= 8; ++step) {
      of.set(0, (step - 1) * chunk, step);  // another chunk each time, so that each refers to all before it
      static_cast<void>(save(saves, storage, step, host_state_view(of.spans)));
      kept.emplace_back();
      for (const checkpoint_id& id : list_checkpoints(storage))
        kept.back().push_back(id.step);
    }
    CHECK(kept[3] == std::vector<std::uint64_t>{4, 3, 2, 1});
    CHECK(kept[4] == std::vector<std::uint64_t>{5, 4, 3, 2, 1});
    CHECK(kept[5] == std::vector<std::uint64_t>{6, 5, 4, 3, 2, 1});  // 5 is whole, and 4 was to be kept
    CHECK(kept[6] == std::vector<std::uint64_t>{7, 6});
    CHECK(find_checkpoint(storage).found->id.step == 8);
  }

  TEST_CASE("a checkpoint that refers to a removed one is not committed, and the next one is full") {
    state of({chunk * 20});
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    async_checkpointer<digest_traits> saves(coordinator, of.tensors, every_fourth_whole());
    const found_checkpoint first = save(saves, storage, 1, host_state_view(of.spans));
    storage.remove(first.folder + "/model.safetensors");
    of.set(0, 0, 7);
    const commit_ticket ticket = saves.begin_snapshot(2, host_state_view(of.spans)).ticket();
    CHECK(ticket.wait() == commit_status::not_committed);
    CHECK(ticket.why() ==
          "simulated/" + first.folder + "/model.safetensors: cannot be opened: No such file or directory");
    saves.flush();
    const found_checkpoint third = save(saves, storage, 3, host_state_view(of.spans));
    CHECK(third.manifest.stored.empty());
    storage.truncate(third.folder + "/model.safetensors", 100);
    const commit_ticket other = saves.begin_snapshot(4, host_state_view(of.spans)).ticket();
    CHECK(other.wait() == commit_status::not_committed);
    CHECK(other.why() == "simulated/" + third.folder +
                             "/model.safetensors: has 100 bytes, but the checkpoint of step 4 counts on " +
                             std::to_string(third.manifest.files[0].bytes) + "; nothing was committed");
    CHECK(find_checkpoint(storage).message().find("no checkpoint; passed over") == 0);
  }

  TEST_CASE("a damaged chunk of an earlier checkpoint is found in all that refer to it") {
    state of({chunk * 20});
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    async_checkpointer<digest_traits> saves(coordinator, of.tensors, every_fourth_whole());
    const found_checkpoint first = save(saves, storage, 1, host_state_view(of.spans));
    of.set(0, 0, 7);
    static_cast<void>(save(saves, storage, 2, host_state_view(of.spans)));
    const std::string file = first.folder + "/model.safetensors";
    storage.flip(file, 8 * (4096 + 5));  // the second no longer refers to this chunk
    CHECK(find_checkpoint(storage).found->id.step == 2);
    storage.flip(file, 8 * (4096 + 300));
    const checkpoint_search search = find_checkpoint(storage);
    CHECK(!search.found);
    REQUIRE(search.skipped.size() == 2);
    CHECK(search.skipped[0].why.find(file + ": bytes 4352 to 4480 are damaged") != std::string::npos);
  }

  TEST_CASE("if any call fails, once or permanently, every checkpoint reported as committed is complete") {
    for (const bool sticky : {false, true}) {
      for (std::uint64_t at = 1; at < 90; ++at) {
        CAPTURE(at);
        state of({chunk * 6, chunk * 3});
        simulated_storage storage;
        solo_coordinator coordinator(storage);
        std::map<std::uint64_t, std::vector<std::vector<std::byte>>> saved;
        std::set<std::uint64_t> told;
        {
          async_checkpointer<digest_traits> saves(coordinator, of.tensors, every_fourth_whole());
          storage.set_faults({{.first = at, .count = sticky ? ~std::uint64_t{0} : 1}});
          for (std::uint64_t step = 1; step <= 4; ++step) {
            if (step == 4) storage.set_faults({});
            of.set(step % 2, chunk * step / 2, step);
            saved[step] = of.bytes;
            const commit_ticket ticket = saves.begin_snapshot(step, host_state_view(of.spans)).ticket();
            if (ticket.wait() == commit_status::committed) told.insert(step);
            saves.flush();
          }
        }
        CHECK(told.contains(4));
        const checkpoint_search search = find_checkpoint(storage);
        REQUIRE(search.found);
        CHECK(search.found->id.step == 4);
        for (const checkpoint_id& id : list_checkpoints(storage)) {
          CHECK(compare(storage, open_checkpoint(storage, id, verification::checksums), of.tensors,
                        saved[id.step]) == "");
        }
      }
    }
  }

  TEST_CASE(
      "if the power fails at any call, acknowledged checkpoints are there with all that they refer to") {
    state of({chunk * 3, chunk + 9});
    // Where a sanitizer watches, one that refers to another is enough.
    const std::uint64_t steps = llmmem_tests::is_watched ? 2 : 4;
    simulated_storage_options options;
    options.sector_bytes = 64;
    std::optional<std::uint64_t> told;
    std::map<std::uint64_t, std::vector<std::vector<std::byte>>> saved;
    const auto sweep = llmmem::testing::sweep_power_cuts(
        simulated_storage(options),
        [&](simulated_storage& storage) {
          told = std::nullopt;
          of.set_all(0);
          solo_coordinator coordinator(storage, keep_last_and_every{.last = 2});
          async_checkpointer<digest_traits> saves(
              coordinator, of.tensors, {.ring_bytes = 1024, .chunk_bytes = chunk, .full_every = 3});
          for (std::uint64_t step = 1; step <= steps; ++step) {
            of.set(step % 2, step * 20, step);
            saved[step] = of.bytes;
            const commit_ticket ticket = saves.begin_snapshot(step, host_state_view(of.spans)).ticket();
            if (ticket.wait() == commit_status::committed) told = step;
            saves.flush();
          }
        },
        [&](simulated_storage& after) {
          const checkpoint_search search = find_checkpoint(after);
          if (told) REQUIRE(search.found);
          if (!search.found) return;
          if (told) REQUIRE(search.found->id.step >= *told);
          REQUIRE(compare(after, *search.found, of.tensors, saved[search.found->id.step]) == "");
          // Whatever else is called a checkpoint is one.
          for (const checkpoint_id& id : list_checkpoints(after))
            REQUIRE_NOTHROW(open_checkpoint(after, id, verification::checksums));
        },
        llmmem_tests::is_watched ? crash_limits{.exhaustive_up_to = 1, .samples = 1, .seed = 1, .tears = 1}
                                 : crash_limits{.exhaustive_up_to = 3, .samples = 3, .seed = 1, .tears = 1});
    CHECK(sweep.power_cuts > 20 * steps);
  }

  TEST_CASE("a snapshot that waits for the one before stalls training at most as long as allowed") {
    state of({chunk * 20});
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    checkpointer_options how = every_fourth_whole();
    how.ring_bytes = 1 << 16;
    how.max_stall_ns = 1'000'000'000;  // the first snapshot is copied in microseconds
    how.max_pending = 3;
    async_checkpointer<stuck_traits> saves(coordinator, of.tensors, how);
    const auto at_first = of.bytes;
    const commit_ticket first = saves.begin_snapshot(1, host_state_view(of.spans)).ticket();
    {
      const mutation_permit permit = saves.gate().mutate();
    }  // it is the first: it is copied at once
    const commit_ticket second = saves.begin_snapshot(2, host_state_view(of.spans)).ticket();
    {
      const mutation_permit permit = saves.gate().mutate();
      of.set_all(9);
    }
    CHECK(second.status() == commit_status::pending);  // training goes on, and it is known only later
    coordinator.open();
    CHECK(first.wait() == commit_status::committed);
    CHECK(second.wait() == commit_status::not_committed);
    CHECK(second.why() ==
          "async_checkpointer: step 2 was abandoned: it stalled the training for longer than max_stall_ns");
    const commit_ticket third = saves.begin_snapshot(3, host_state_view(of.spans)).ticket();
    CHECK(third.wait() == commit_status::committed);
    saves.flush();
    CHECK(compare(storage, open_checkpoint(storage, {1, first.generation()}, verification::checksums),
                  of.tensors, at_first) == "");
    const found_checkpoint last = open_checkpoint(storage, {3, third.generation()}, verification::checksums);
    CHECK(last.manifest.stored.empty());
    CHECK(compare(storage, last, of.tensors, of.bytes) == "");
  }

  TEST_CASE("ranks that share a folder save their own changes") {
    const temporary_folder folder;
    state zero({chunk * 30});
    state one({chunk * 30});
    one.tensors[0].name = "other";
    zero.set_all(1);
    one.set_all(2);
    struct traits : checkpointer_traits {
      using coordinator_type = file_coordinator<storage_type>;
      using digest_type = plain_digest;
    };
    const auto train = [&](std::uint32_t rank, state& of) {
      posix_storage<> storage(folder.file("run"));
      file_coordinator<posix_storage<>> coordinator(
          storage, {.rank = rank, .world = 2, .poll = std::chrono::milliseconds(1)},
          keep_last_and_every{.last = 2});
      async_checkpointer<traits> saves(coordinator, of.tensors, every_fourth_whole());
      for (std::uint64_t step = 1; step <= 6; ++step) {
        // Rank 0 changes a chunk each time, rank 1 all of it every second time.
        if (rank == 0) of.set(0, step * chunk, step);
        if (rank == 1 && step % 2 == 0) of.set_all(step);
        const commit_ticket ticket = saves.begin_snapshot(step, host_state_view(of.spans)).ticket();
        CHECK(ticket.wait() == commit_status::committed);
        CHECK(ticket.why() == "");
      }
    };
    std::thread other([&] { train(1, one); });
    train(0, zero);
    other.join();
    posix_storage<> storage(folder.file("run"));
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.skipped.empty());
    CHECK(search.found->id.step == 6);
    CHECK(!search.found->manifest.stored.empty());
    CHECK(compare(storage, *search.found, zero.tensors, zero.bytes) == "");
    CHECK(compare(storage, *search.found, one.tensors, one.bytes) == "");
  }

  TEST_CASE("chunks that are not consecutive in a stored file are two runs") {
    checkpoint_manifest part;
    checkpoint_file file;
    llmmem::detail::run_list runs(part, file);
    const stored_chunks in{1, 1, "old", 5};
    for (const std::uint64_t place : {0U, 1U, 3U, 2U})
      runs.add(in, place);
    CHECK(part.stored == std::vector<stored_chunks>{in});
    CHECK(file.runs == std::vector<chunk_run>{{0, 2, 0, 0}, {2, 1, 0, 3}, {3, 1, 0, 2}});
  }

  TEST_CASE("an incremental save without a way to detect changes is refused") {
    struct traits : checkpointer_traits {
      using storage_type = simulated_storage;
      using coordinator_type = solo_coordinator<simulated_storage>;
    };
    state of({10});
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    CHECK(text_of(
              [&] { const async_checkpointer<traits> saves(coordinator, of.tensors, {.full_every = 2}); }) ==
          "async_checkpointer: full_every is 2, but nothing detects changes: give the traits a digest_type "
          "(xxh3_chunk_digest), or a view that tracks changes (cow_state_view)");
    CHECK(text_of([&] {
            const async_checkpointer<traits> saves(coordinator, of.tensors, {.full_every = 0});
          }) == "async_checkpointer: full_every is 0; 1 writes each checkpoint whole");
    CHECK(text_of([&] {
            const async_checkpointer<digest_traits> saves(coordinator, of.tensors, {.full_every = 257});
          }) ==
          "async_checkpointer: full_every is 257, at most 256 is allowed, because a reader of a file opens "
          "one of each checkpoint since the last whole one");
    CHECK(text_of([&] {
            const async_checkpointer<digest_traits> saves(coordinator, of.tensors, {.full_every = 256});
          }) == "none");
  }

#ifdef LLMMEM_TESTS_XXHASH
  TEST_CASE("XXH3 distinguishes chunks by any bit and by their length") {
    std::vector<std::byte> bytes(300);
    std::set<std::array<std::uint64_t, 2>> seen{xxh3_chunk_digest::of(bytes)};
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      CHECK(seen.insert(xxh3_chunk_digest::of(bytes)).second);
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    for (std::size_t length = 0; length < bytes.size(); ++length)
      CHECK(seen.insert(xxh3_chunk_digest::of(std::span(bytes).first(length))).second);
  }
#endif
}
