// The tool on a folder as Hugging Face publishes it.
#include <doctest/doctest.h>

#include <filesystem>
#include <string>

#include "support/published_model.hpp"
#include "support/tool_folder.hpp"

using namespace llmmem_tests;
using checkpoint_tool::exit_status;

TEST_CASE("a published model is listed, shown and verified by its index") {
  const published_model model;
  const world_folder world;
  const std::string path = std::filesystem::canonical(model.path()).string();
  const std::string listed = world.text({"list", path});
  CHECK(listed.find("a published model: 6 tensors in 3 files") != std::string::npos);
  CHECK(listed.find("model-00002-of-00003.safetensors") != std::string::npos);
  CHECK(listed.find("lm_head.weight") == std::string::npos);
  CHECK(world.text({"verify", path}) == listed);
  CHECK(world.text({"show", path}).find("lm_head.weight  BF16 [16, 8]") != std::string::npos);
  const nlohmann::json shown = world.json({"show", path});
  CHECK(shown["published"] == true);
  CHECK(shown["tensors"].size() == 6);
  CHECK(shown["tensors"][0]["name"] == "lm_head.weight");
  CHECK(shown["tensors"][0]["file"] == "model-00003-of-00003.safetensors");
  std::filesystem::remove(model.file("model-00003-of-00003.safetensors"));
  const outcome missing = world.run({"verify", path});
  CHECK(missing.status == exit_status::failure);
  CHECK(missing.notes.find("model-00003-of-00003.safetensors: cannot be opened") != std::string::npos);
  CHECK(missing.notes.find("\"lm_head.weight\" among them") != std::string::npos);
}

TEST_CASE(
    "a published model is resharded into a checkpoint of several ranks with the same bytes, and back into "
    "files") {
  const published_model model;
  const world_folder world;
  CHECK(world.json({"convert", model.path(), "DIR/four", "--world", "4", "--partition", "rows"})["world"] ==
        4);
  CHECK(world.run({"verify", "DIR/four"}).status == exit_status::success);
  const nlohmann::json same = world.json({"diff", model.path(), "DIR/four"});
  CHECK(same["identical"] == true);
  CHECK(world.json({"convert", "DIR/four", "DIR/one"})["tensors"] == 6);
  CHECK(world.run({"diff", "DIR/one", model.path()}).status == exit_status::success);
}

TEST_CASE("a file with the name of a checkpoint is not a checkpoint") {
  const published_model model;
  const world_folder world;
  CHECK(world.run({"convert", model.path(), "DIR/run"}).status == exit_status::success);
  std::filesystem::copy_file(model.file("model-00001-of-00003.safetensors"), world / "run/model.safetensors");
  CHECK(world.text({"list", "DIR/run"}).find("whole, the newest") != std::string::npos);
}
