// Real processes, one a rank, of which one is killed.
#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>

#include <doctest/doctest.h>

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint32_t world_size = 3;
const checkpoint_world world{.ranks = world_size, .files = 1, .file_bytes = 5000, .write_bytes = 2500};

/// What a rank tells its parent: a line for each step it knows to be committed, and why it ended.
class rank_process {
 public:
  template <class Work>
  explicit rank_process(Work work) {
    std::array<int, 2> ends{};
    REQUIRE(::pipe(ends.data()) == 0);
    std::fflush(nullptr);
    id_ = ::fork();
    REQUIRE(id_ >= 0);
    if (id_ == 0) {
      ::close(ends[0]);
      ::alarm(60);  // whatever happens
      const auto say = [&](const std::string& line) {
        const std::string text = line + "\n";
        static_cast<void>(!::write(ends[1], text.data(), text.size()));
      };
      int status = 0;
      try {
        work(say);
      } catch (const error& failure) {
        say(std::string("error ") + failure.what());
        status = 1;
      } catch (const std::exception& failure) {
        say(std::string("unexpected ") + failure.what());
        status = 2;
      }
      ::_exit(status);
    }
    ::close(ends[1]);
    from_ = ends[0];
  }
  rank_process(const rank_process&) = delete;
  rank_process& operator=(const rank_process&) = delete;
  ~rank_process() {
    kill();
    static_cast<void>(end());
  }

  void kill() const {
    if (!ended_) ::kill(id_, SIGKILL);
  }
  /// Waits for its end; its exit status, or -1 when it was killed.
  int end() {
    if (ended_) return status_;
    std::array<char, 4096> some{};
    for (ssize_t count = 0; (count = ::read(from_, some.data(), some.size())) > 0;)
      told_.append(some.data(), static_cast<std::size_t>(count));
    ::close(from_);
    int status = 0;
    ::waitpid(id_, &status, 0);
    ended_ = true;
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return status_;
  }
  [[nodiscard]] const std::string& told() const { return told_; }
  [[nodiscard]] std::uint64_t last_step() const {
    std::uint64_t last = 0;
    std::size_t at = 0;
    while ((at = told_.find("step ", at)) != std::string::npos) {
      if (at == 0 || told_[at - 1] == '\n')
        last = std::max<std::uint64_t>(last, std::stoull(told_.substr(at + 5)));
      at += 5;
    }
    return last;
  }

 private:
  ::pid_t id_ = -1;
  int from_ = -1;
  bool ended_ = false;
  int status_ = 0;
  std::string told_;
};

/// Saves steps from behind the newest checkpoint on, until `most` are saved, or something fails.
template <class Say>
void run_rank(const std::string& folder, std::uint32_t rank, std::uint64_t most, const Say& say) {
  using namespace std::chrono_literals;
  posix_storage<> storage(folder, {.direct = direct_io::never, .queue = {.name = "rank"}});
  file_coordinator coordinator(storage, {.rank = rank,
                                         .world = world_size,
                                         .join_within = 2000ms,
                                         .begin_within = 1000ms,
                                         .commit_within = 700ms,
                                         .poll = 1ms});
  const checkpoint_search search = find_checkpoint(storage);
  std::uint64_t step = search.found ? search.found->id.step : 0;
  say("found " + std::to_string(step));
  for (std::uint64_t i = 0; i < most; ++i) {
    step += 10;
    const checkpoint_draft draft = coordinator.begin(step);
    coordinator.commit(draft, write_rank(storage, world, draft, rank));
    say("step " + std::to_string(step));
    if (const std::string trouble = coordinator.tidy(); !trouble.empty()) say("trouble " + trouble);
  }
}

}  // namespace

TEST_SUITE("ranks, each a process") {
  TEST_CASE("after one rank is killed, the others end and name the silent rank, and a new run continues") {
    std::uint64_t committed = 0;
    for (const auto seed : seeds(6)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const temporary_folder folder;
      const std::string path = folder.file("run");
      static_cast<void>(posix_storage<>(path));  // one makes it, before three want to
      const std::uint32_t victim = seed % 3 == 0 ? 0 : random.below(world_size);
      CAPTURE(victim);
      std::uint64_t acknowledged_step = 0;
      {
        const auto rank = [&](std::uint32_t number) {
          return [&path, number](const auto& say) { run_rank(path, number, 1'000'000, say); };
        };
        rank_process zero(rank(0));
        rank_process one(rank(1));
        rank_process two(rank(2));
        rank_process* const all[] = {&zero, &one, &two};
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(std::uint64_t{300'000})));
        all[victim]->kill();
        for (std::uint32_t number = 0; number < world_size; ++number) {
          const int status = all[number]->end();
          const std::string& told = all[number]->told();
          CAPTURE(number);
          CAPTURE(told.substr(told.size() - std::min<std::size_t>(told.size(), 400)));
          acknowledged_step = std::max(acknowledged_step, all[number]->last_step());
          if (number == victim) {
            CHECK(status == -1);
            continue;
          }
          CHECK(status == 1);
          const std::string why = told.substr(std::min(told.find("error "), told.size()));
          const bool names_it = why.find("rank " + std::to_string(victim)) != std::string::npos;
          // Who has not joined hears of nobody but rank 0, which may hear of several that left.
          const bool was_joining = why.find("rank 0 has not begun a session") != std::string::npos ||
                                   why.find("not joined") != std::string::npos;
          CHECK((names_it || was_joining));
        }
      }
      committed += acknowledged_step / 10;
      {
        posix_storage<> storage(path);
        CHECK(what_is_lost(storage, world,
                           acknowledged_step == 0 ? acknowledged{} : acknowledged{acknowledged_step}) == "");
        CHECK(what_is_torn(storage, world, commit_method::rename) == "");
      }
      const auto again = [&](std::uint32_t number) {
        return [&path, number](const auto& say) { run_rank(path, number, 2, say); };
      };
      rank_process two(again(2));
      rank_process zero(again(0));
      rank_process one(again(1));
      for (rank_process* const each : {&zero, &one, &two}) {
        const int status = each->end();
        CAPTURE(each->told());
        CHECK(status == 0);
        CHECK(each->last_step() >= acknowledged_step + 20);
        CHECK(each->told().find("trouble") == std::string::npos);
      }
      posix_storage<> storage(path);
      CHECK(what_is_lost(storage, world, acknowledged{zero.last_step()}) == "");
      const auto names = storage.list("");
      CHECK(std::none_of(names.begin(), names.end(), [](const storage_entry& each) {
        return each.name.rfind(checkpoint_names::draft, 0) == 0;
      }));
    }
    MESSAGE(committed << " checkpoints were committed before");
  }
}
