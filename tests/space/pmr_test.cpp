#include <llmmem/space/pmr.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <new>
#include <vector>

using namespace llmmem;

namespace {

/// Counts what is live, and throws at the n-th request.
class counting_resource : public std::pmr::memory_resource {
 public:
  explicit counting_resource(int refuse_at = 0) : refuse_at_(refuse_at) {}
  std::size_t live_bytes = 0;

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (++calls_ == refuse_at_) throw std::bad_alloc();
    void* const data = std::pmr::new_delete_resource()->allocate(bytes, alignment);
    live_bytes += bytes;
    return data;
  }
  void do_deallocate(void* data, std::size_t bytes, std::size_t alignment) override {
    live_bytes -= bytes;
    std::pmr::new_delete_resource()->deallocate(data, bytes, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  int calls_ = 0;
  int refuse_at_;
};

}  // namespace

TEST_CASE("bytes come from the resource and return to it, the last ones with the space") {
  counting_resource upstream;
  {
    pmr_space space{pmr_source{&upstream}, host_options{.budget = 1000, .name = "arena"}};
    const auto a = space.try_allocate(100, 64).value();
    const auto b = space.try_allocate(200, 8).value();
    std::memset(a.data, 1, a.bytes);
    std::memset(b.data, 2, b.bytes);
    CHECK(upstream.live_bytes == 300);
    CHECK(space.used() == 300);
    space.deallocate(a);
    CHECK(upstream.live_bytes == 200);
    CHECK(space.try_allocate(801, 8).error().message() ==
          "arena: 801 bytes needed, but 800 left in its budget; release ranges, or raise the budget");
  }
  CHECK(upstream.live_bytes == 0);
}

TEST_CASE("standard pools work as the upstream resource") {
  std::pmr::unsynchronized_pool_resource pool;
  pmr_space space{pmr_source{&pool}, host_options{.budget = 1 << 20}};
  std::vector<pmr_space::range_type> live;
  for (std::uint64_t i = 1; i <= 100; ++i)
    live.push_back(space.try_allocate(i * 7, 16).value());
  for (const auto& range : live)
    space.deallocate(range);
  CHECK(space.used() == 0);
}

TEST_CASE("an exception of the resource counts as a refusal, and none passes") {
  for (int n = 1; n <= 8; ++n) {
    CAPTURE(n);
    counting_resource upstream{n};
    pmr_space space{pmr_source{&upstream}, host_options{.budget = 1000, .name = "arena"}};
    for (int call = 1; call <= 8; ++call) {
      const auto range = space.try_allocate(10, 8);
      REQUIRE(range.has_value() == (call != n));
      if (!range) CHECK(range.code() == errc::system_refused);
    }
    CHECK(space.used() == 70);
    CHECK(upstream.live_bytes == 70);
  }
}

TEST_CASE("a null resource is refused") {
  CHECK_THROWS_WITH_AS(pmr_source(nullptr), "pmr_source: the upstream resource is null", argument_error);
}
