#include <llmmem/comm/operation_queue.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/errors.hpp>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using namespace llmmem;

}  // namespace

TEST_SUITE("operation_queue") {
  TEST_CASE("operations run one after another, in the order of submission") {
    std::vector<int> order;  // of one thread
    const auto noted = [&](int number) {
      return [&order, number]() -> result<void> {
        order.push_back(number);
        return {};
      };
    };
    operation_queue queue;
    using noting = llmmem::comm::operation<decltype(noted(0))>;
    std::vector<std::unique_ptr<noting>> all;
    for (int i = 0; i < 100; ++i) {
      all.push_back(std::make_unique<noting>(noted(i)));
      queue.put(*all.back());
    }
    queue.wait(*all.back()).value();
    CHECK(queue.is_done(*all.front()));
    REQUIRE(order.size() == 100);
    for (int i = 0; i < 100; ++i)
      CHECK(order[static_cast<std::size_t>(i)] == i);
    queue.put(*all[7]);  // again
    queue.wait(*all[7]).value();
    CHECK(order.back() == 7);
  }

  TEST_CASE("the submitter of an operation continues meanwhile") {
    operation_queue queue;
    std::atomic<bool> may_end{false};
    comm::operation waits([&]() -> result<void> {
      while (!may_end)
        std::this_thread::yield();
      return {};
    });
    queue.put(waits);
    CHECK_FALSE(queue.is_done(waits));
    may_end = true;
    queue.wait(waits).value();
    CHECK(queue.is_done(waits));
  }

  TEST_CASE("the wait for an operation returns its failure or rethrows its exception, and the others run") {
    operation_queue queue;
    comm::operation fails([]() -> result<void> { return failure{errc::peer_failed, 3, 0, 0}; });
    comm::operation throws([]() -> result<void> { throw std::runtime_error("killed"); });
    queue.put(fails);
    queue.put(throws);
    CHECK(queue.run([]() -> result<void> { return {}; }).has_value());
    CHECK(queue.wait(fails).error() == failure{errc::peer_failed, 3, 0, 0});
    CHECK_THROWS_WITH_AS(static_cast<void>(queue.wait(throws)), "killed", std::runtime_error);
    CHECK(queue.run([]() -> result<void> { return failure{errc::stopped, 0, 0, 0}; }).code() ==
          errc::stopped);
    comm::operation never([]() -> result<void> { return {}; });
    CHECK(queue.wait(never).has_value());
  }

  TEST_CASE("all submitted operations run before the queue ends") {
    int run = 0;
    const auto count = [&]() -> result<void> {
      ++run;
      return {};
    };
    comm::operation one(count);
    comm::operation two(count);
    {
      operation_queue queue;
      queue.put(one);
      queue.put(two);
    }
    CHECK(run == 2);
  }
}
