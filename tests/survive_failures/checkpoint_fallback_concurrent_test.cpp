// More ranks die than the redundancy bears, and the job goes on from its files.
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/seeds.hpp"
#include "support/small_job.hpp"
#include "support/temporary_folder.hpp"
#include "survive_failures/application.hpp"
#include "survive_failures/fault_plan.hpp"
#include "survive_failures/reference.hpp"
#include "survive_failures/report.hpp"
#include "survive_failures/saved_job.hpp"
#include "survive_failures/threads.hpp"

using namespace survive_failures;
using llmmem_tests::kept_log;
using llmmem_tests::seeds;
using llmmem_tests::small_job;
using llmmem_tests::some_text;
using llmmem_tests::temporary_folder;
using llmmem_tests::text_of;

namespace {

job_plan saved_plan(const temporary_folder& folder, std::uint64_t steps, std::uint64_t every,
                    std::uint64_t seed, const std::string& scheme = "mirror:2") {
  job_plan plan = small_job(4, steps, scheme, seed);
  plan.transport = transport_kind::threads;
  plan.restart_ms = seed % 2;
  plan.checkpoint_dir = folder.file("saved");
  plan.checkpoint_every = every;
  return plan;
}

/// A run that comes to its end, and to the weights of one without failures.
struct ended_job {
  job_figures figures;
  std::string notes;
};
ended_job run_right(const job_plan& plan, std::vector<planned_fault> faults = {}) {
  kept_log kept(plan);
  const train_gpt::corpus text = some_text(plan);
  thread_job(plan, text, kept.log(), std::move(faults)).run();
  const job_figures figures = kept.log().figures();
  CHECK(job_result{figures, reference_digest(plan, text, 1)}.identical());
  return {figures, kept.text()};
}

/// As many, from a seat on.
std::vector<std::uint32_t> seats_from(std::uint64_t first, std::uint32_t count) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < count; ++i)
    all.push_back(static_cast<std::uint32_t>((first + i) % 4));
  return all;
}

/// What the program says, and how it ends.
struct said {
  example::exit_status status{};
  std::string notes;
};
said run_program(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"--layers", "1",         "--width", "8",           "--heads",
                                     "2",        "--context", "4",       "--transport", "thread"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const example::file_handle out(std::tmpfile(), &std::fclose);
  const example::file_handle notes(std::tmpfile(), &std::fclose);
  REQUIRE(out);
  REQUIRE(notes);
  said all{run_application(arguments, out.get(), notes.get()), {}};
  std::rewind(notes.get());
  for (int c = std::fgetc(notes.get()); c != EOF; c = std::fgetc(notes.get()))
    all.notes += static_cast<char>(c);
  return all;
}

}  // namespace

TEST_SUITE("checkpoint_fallback") {
  TEST_CASE(
      "after three of four ranks and then all die, the job continues from its files to the same weights") {
    for (const std::string scheme : {"mirror:2", "parity:3", "compute"}) {
      for (const auto seed : seeds(3)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const temporary_folder folder;
        const job_plan plan = saved_plan(folder, 60, 7, seed, scheme);
        const ended_job ended = run_right(
            plan, {{.after_step = 16, .delay_ns = random() % 5'000'000, .seats = seats_from(random(), 3)},
                   {.after_step = 40, .delay_ns = random() % 5'000'000, .seats = seats_from(0, 4)}});
        CAPTURE(ended.notes);
        CHECK(ended.figures.faults == 2);
        CHECK(ended.figures.deaths.size() == 7);
        REQUIRE(ended.figures.restored_from.size() >= 2);
        for (const std::uint64_t each : ended.figures.restored_from)
          CHECK(each % 7 == 0);
        CHECK(ended.figures.restored_from.back() >= 28);
        // Two intervals, where a death met the save between them.
        CHECK(ended.figures.steps_lost <= 14 * ended.figures.restored_from.size());
      }
    }
  }

  TEST_CASE(
      "regardless of which rank dies during a save, the previous checkpoint stays complete, and the job "
      "continues") {
    std::uint64_t unsaved = 0;
    std::uint64_t restored = 0;
    for (const auto seed : seeds(6)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const temporary_folder folder;
      const job_plan plan = saved_plan(folder, 40, 1, seed);
      std::vector<planned_fault> faults;
      for (std::uint64_t i = 0; i < 6; ++i) {
        faults.push_back({.after_step = 3 + 5 * i,
                          .delay_ns = random() % 6'000'000,
                          .seats = seats_from(random(), static_cast<std::uint32_t>(1 + random() % 4))});
      }
      const ended_job ended = run_right(plan, faults);
      CAPTURE(ended.notes);
      unsaved += ended.notes.find(" is not saved: ") != std::string::npos ? 1U : 0U;
      restored += ended.figures.restored_from.size();
      llmmem::posix_storage<> storage(plan.checkpoint_dir);
      for (const llmmem::checkpoint_id& id : llmmem::list_checkpoints(storage))
        CHECK_NOTHROW(
            static_cast<void>(llmmem::open_checkpoint(storage, id, llmmem::verification::checksums)));
      CHECK(llmmem::find_checkpoint(storage).found->id.step == 40);
    }
    CHECK(unsaved > 0);
    CHECK(restored > 0);
  }

  TEST_CASE("before the first save all ranks begin again, and the computation counts as lost") {
    const temporary_folder folder;
    const ended_job ended =
        run_right(saved_plan(folder, 20, 1000, 1), {{.after_step = 8, .delay_ns = 0, .seats = {0, 1, 3}}});
    CHECK(ended.figures.restored_from.empty());
    CHECK(ended.figures.steps_lost >= 8);
    CHECK(ended.notes.find("step 0 started again, no checkpoint: ") != std::string::npos);
  }

  TEST_CASE("tolerated losses are restored from memory, also if there are files") {
    const temporary_folder folder;
    const ended_job ended =
        run_right(saved_plan(folder, 30, 5, 1), {{.after_step = 12, .delay_ns = 0, .seats = {2}}});
    CHECK(ended.figures.deaths.size() == 1);
    CHECK(ended.figures.steps_lost == 0);
    CHECK(ended.figures.restored_from.empty());
  }

  TEST_CASE("a second run continues from the newest checkpoint, and a finished one has nothing left to do") {
    const temporary_folder folder;
    CHECK(run_right(saved_plan(folder, 30, 7, 1)).figures.restored_from.empty());
    const ended_job second = run_right(saved_plan(folder, 63, 7, 1));
    CHECK(second.figures.restored_from == std::vector<std::uint64_t>{28});
    CHECK(second.figures.steps_lost == 0);
    const ended_job third = run_right(saved_plan(folder, 63, 7, 1));
    CHECK(third.figures.restored_from == std::vector<std::uint64_t>{63});
    const std::string json = to_json(saved_plan(folder, 63, 7, 1), job_result{third.figures, 0});
    CHECK(json.find(R"("steps_lost": 0, "restored_from": [63], )") != std::string::npos);
  }

  TEST_CASE("all ranks pass over a damaged checkpoint and take the one before") {
    const temporary_folder folder;
    const job_plan plan = saved_plan(folder, 30, 10, 1);
    run_right(plan);
    const std::string newest = plan.checkpoint_dir + "/step-0000000030-g00000003";
    for (const auto& each : std::filesystem::directory_iterator(newest)) {
      if (each.path().filename().string().find("rank-00002") == std::string::npos) continue;
      std::fstream file(each.path(), std::ios::binary | std::ios::in | std::ios::out);
      file.seekp(-1, std::ios::end).put('\x55');
    }
    CHECK(run_right(plan).figures.restored_from == std::vector<std::uint64_t>{20});
  }

  TEST_CASE("a folder locked by another process does not stop the training") {
    const temporary_folder folder;
    const job_plan plan = saved_plan(folder, 6, 6, 1);
    llmmem::posix_storage<> storage(plan.checkpoint_dir);
    const auto lock = storage.try_lock(std::string(llmmem::checkpoint_names::lock));
    REQUIRE(lock);
    const ended_job ended = run_right(plan);
    CHECK(ended.notes.find("rank 1: step 6 is not saved: rank 0 cannot open the folder\n") !=
          std::string::npos);
    CHECK(ended.notes.find("rank 0: step 6 is not saved: " + plan.checkpoint_dir) != std::string::npos);
    CHECK_FALSE(llmmem::find_checkpoint(storage).found);
  }

  TEST_CASE("checkpoints of another job are refused on every rank") {
    const temporary_folder folder;
    const job_plan plan = saved_plan(folder, 14, 7, 1);
    run_right(plan);
    const std::string where = plan.checkpoint_dir + "/step-0000000014-g00000002: ";
    const auto refused = [&](const job_plan& other) {
      const train_gpt::corpus text = some_text(other);
      const std::string why = text_of([&] { static_cast<void>(saved_job(other, text).newest()); });
      // So does each rank.
      kept_log kept(other);
      CHECK(text_of([&] { thread_job(other, text, kept.log(), {}).run(); }) == why);
      return why;
    };
    const std::string this_job = "--ranks 4 --seed 1 --layers 1 --width 8 --heads 2 --context 4 --batch 4";
    const std::string sum = fmt::format(", text of 4000 bytes, CRC-32C {:08x}", some_text(plan).checksum());
    const auto differs = [&](const std::string& other) {
      return where + "is a checkpoint of another job: " + this_job + sum + "; this one is " + other + sum +
             ". Ask for that one, or give --checkpoint-dir another folder";
    };
    job_plan other = plan;
    other.seed = 2;
    CHECK(refused(other) ==
          differs("--ranks 4 --seed 2 --layers 1 --width 8 --heads 2 --context 4 --batch 4"));
    other = plan;
    other.ranks = 2;
    CHECK(refused(other) ==
          differs("--ranks 2 --seed 1 --layers 1 --width 8 --heads 2 --context 4 --batch 4"));
    other = plan;
    other.shape.width = 16;
    CHECK(refused(other) ==
          differs("--ranks 4 --seed 1 --layers 1 --width 16 --heads 2 --context 4 --batch 4"));
    other = plan;
    other.steps = 10;
    CHECK(refused(other) == where + "is of step 14, past --steps 10; ask for --steps 14 at least");

    job_plan foreign = plan;
    foreign.checkpoint_dir = folder.file("foreign");
    {
      llmmem::posix_storage<> storage(foreign.checkpoint_dir);
      llmmem::checkpoint_folder made(storage);
      llmmem_tests::save_step(made, {}, 5);
    }
    CHECK(refused(foreign) == foreign.checkpoint_dir +
                                  "/step-0000000005-g00000001: is no checkpoint of survive_failures; give "
                                  "--checkpoint-dir another folder");
  }

  TEST_CASE("the program reports where it continues, and refuses another job and impossible options") {
    const temporary_folder folder;
    const std::string saved = folder.file("saved");
    const said first = run_program({"--steps", "10", "--checkpoint-dir", saved, "--checkpoint-every", "5"});
    CAPTURE(first.notes);
    CHECK(first.status == example::exit_status::success);
    CHECK(first.notes.find("continues from step") == std::string::npos);
    const said second = run_program({"--steps", "12", "--checkpoint-dir", saved});
    CHECK(second.status == example::exit_status::success);
    CHECK(second.notes.rfind("continues from step 10 in " + saved + "\n", 0) == 0);
    const said other = run_program({"--steps", "12", "--checkpoint-dir", saved, "--seed", "9"});
    CHECK(other.status == example::exit_status::failure);
    CHECK(other.notes.find("is a checkpoint of another job: --ranks 4 --seed 1 ") != std::string::npos);

    const std::string behind = "\nrun survive_failures --help for the options\n";
    const auto usage = [&](const std::vector<std::string>& more) {
      const said wrong = run_program(more);
      CHECK(wrong.status == example::exit_status::wrong_usage);
      return wrong.notes;
    };
    CHECK(usage({"--checkpoint-every", "5"}) ==
          "survive_failures: --checkpoint-every is of checkpoints; add --checkpoint-dir DIR" + behind);
    CHECK(usage({"--checkpoint-dir", ""}) ==
          "survive_failures: --checkpoint-dir \"\": must be a folder" + behind);
    CHECK(usage({"--checkpoint-dir", saved, "--checkpoint-every", "0"}) ==
          "survive_failures: --checkpoint-every \"0\": must be a whole number from 1 to 1000000000" + behind);
    CHECK(
        usage({"--checkpoint-dir", saved, "--transport", "sim"}) ==
        "survive_failures: --checkpoint-dir: files are not simulated; take --transport socket or thread, or "
        "leave it out" +
            behind);
  }
}
