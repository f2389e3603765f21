#include <llmmem/schedule/pipeline.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace llmmem;

namespace {

/// A device's list as the papers draw it: F0 F1 B0, with a chunk above 0 behind a dot.
std::string drawn(const pipeline_order& order, std::uint32_t device) {
  std::string text;
  for (const auto& task : order.tasks[device]) {
    if (!text.empty()) text += ' ';
    text += (task.pass == pipeline_pass::forward ? "F" : "B") + std::to_string(task.micro_batch);
    if (task.chunk > 0) text += '.' + std::to_string(task.chunk);
  }
  return text;
}

template <class Make>
std::string refusal(Make make, const pipeline_shape& shape) {
  try {
    static_cast<void>(make(shape));
  } catch (const error& refused) {
    return refused.what();
  }
  return "";
}

}  // namespace

TEST_CASE("gpipe runs all forward passes before the first backward pass") {
  const auto order = gpipe({.devices = 2, .micro_batches = 3});
  CHECK(drawn(order, 0) == "F0 F1 F2 B0 B1 B2");
  CHECK(drawn(order, 1) == "F0 F1 F2 B0 B1 B2");
}

TEST_CASE("1F1B has the order of PipeDream's figure") {
  const auto order = one_f_one_b({.devices = 4, .micro_batches = 6});
  CHECK(drawn(order, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
  CHECK(drawn(order, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5");
  CHECK(drawn(order, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
}

TEST_CASE("1F1B with fewer micro-batches than devices warms up with all of them") {
  const auto order = one_f_one_b({.devices = 4, .micro_batches = 2});
  CHECK(drawn(order, 0) == "F0 F1 B0 B1");
  CHECK(drawn(order, 2) == "F0 F1 B0 B1");
  CHECK(drawn(order, 3) == "F0 B0 F1 B1");
}

TEST_CASE(
    "interleaved 1F1B takes groups of micro-batches through the chunks, backwards from the last chunk") {
  const auto order = interleaved_1f1b({.devices = 2, .micro_batches = 4, .chunks = 2});
  CHECK(drawn(order, 1) == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3");
  CHECK(drawn(order, 0) == "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3");
}

TEST_CASE("interleaved 1F1B with one chunk is 1F1B") {
  const pipeline_shape shape{.devices = 3, .micro_batches = 7};
  CHECK(interleaved_1f1b(shape) == one_f_one_b(shape));
}

TEST_CASE("an empty pipeline, or one with too many tasks, is refused by name") {
  CHECK(refusal(gpipe, {.devices = 0, .micro_batches = 1}) ==
        "gpipe: devices is 0; a pipeline needs at least one");
  CHECK(refusal(one_f_one_b, {.devices = 1, .micro_batches = 0}) ==
        "one_f_one_b: micro_batches is 0; a pipeline needs at least one");
  CHECK(refusal(interleaved_1f1b, {.devices = 1, .micro_batches = 1, .chunks = 0}) ==
        "interleaved_1f1b: chunks is 0; a pipeline needs at least one");
  CHECK(refusal(gpipe, {.devices = 1, .micro_batches = 4'294'967'295}) ==
        "gpipe: 1 devices x 1 chunks x 4294967295 micro-batches exceed the limit of 134217728; lower one of "
        "the "
        "three");
  // Their product is 2^64, which is 0 in 64 bits.
  CHECK(refusal(interleaved_1f1b, {.devices = 1U << 31, .micro_batches = 4, .chunks = 1U << 31}) ==
        "interleaved_1f1b: 2147483648 devices x 2147483648 chunks x 4 micro-batches exceed the limit of "
        "134217728; "
        "lower one of the three");
  CHECK_THROWS_AS(static_cast<void>(gpipe({.devices = 1U << 31, .micro_batches = 1})), length_error);
}

TEST_CASE("an order that is impossible for its shape is refused with a valid one") {
  CHECK(refusal(gpipe, {.devices = 2, .micro_batches = 2, .chunks = 2}) ==
        "gpipe: chunks is 2, but this order has one chunk on each device; use interleaved_1f1b");
  CHECK(refusal(one_f_one_b, {.devices = 2, .micro_batches = 2, .chunks = 3}) ==
        "one_f_one_b: chunks is 3, but this order has one chunk on each device; use interleaved_1f1b");
  CHECK(refusal(interleaved_1f1b, {.devices = 4, .micro_batches = 6, .chunks = 2}) ==
        "interleaved_1f1b: micro_batches 6 is not a multiple of devices 4; 8 is the next multiple");
}
