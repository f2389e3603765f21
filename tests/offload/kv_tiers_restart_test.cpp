/// Tiers in files: blocks that a later process finds again, also after the first was killed.
#include <llmmem/offload/kv_tiers.hpp>

#include <doctest/doctest.h>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/offload/block_codec.hpp>
#include <llmmem/offload/detail/tier_stack.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "offload/varied_codec.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct traits : paged_traits {
  using observer = offload::tier_link;
};

constexpr kv_layout layout{.layers = 2, .heads = 2, .head_dim = 16, .block_tokens = 4};
constexpr std::uint64_t file_slots = 24;

std::vector<token_id> prompt_of(std::uint32_t number) {
  std::vector<token_id> tokens(16);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<token_id>((i < 8 ? number / 4 : number) * 100 + i);
  return tokens;
}

/// A byte of a block that depends on all its tokens and those before it. The bytes of every seventh block do
/// not ascend.
std::byte byte_of(std::span<const token_id> prompt, std::size_t block, std::size_t at) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < (block + 1) * 4; ++i)
    sum = sum * 31 + static_cast<std::uint64_t>(prompt[i]);
  return static_cast<std::byte>(sum + (sum % 7 == 0 ? at * at : at));
}

using varied = offload::coded<varied_codec<1>>;
constexpr double short_slot = 0.0625;  // too short for blocks that do not ascend

template <class Codec>
offload::kv_tier<persistent_file_space<>, lru_eviction, Codec> disk_tier(persistent_file_space<>& disk) {
  offload::kv_tier<persistent_file_space<>, lru_eviction, Codec> out(disk, file_slots * 4096);
  if (!std::is_same_v<Codec, offload::plain_blocks>) {
    out.slot_share = short_slot;
    out.granularity = 64;
  }
  return out;
}

/// A server: a small cache over one host slot more than a prompt takes, and a file.
template <class Codec = offload::plain_blocks>
class server {
 public:
  explicit server(const std::string& path)
      : cache_({.blocks = 6, .block_tokens = 4, .max_sequences = 2, .max_sequence_tokens = 16, .name = "kv"}),
        bytes_(layout.total_bytes(cache_.physical_blocks())),
        host_({.budget = 5 * layout.block_bytes()}),
        disk_(path, {.space = {.budget = file_slots * 4096},
                     .layout = layout.content_fingerprint(),
                     .max_chunks = 4096}),
        tiers_(cache_, offload::layout_mover(host_executor{}, memory()), {.load_headroom = 0},
               offload::kv_tier(host_, 5 * layout.block_bytes(), write_through{}), disk_tier<Codec>(disk_)) {}

  /// Serves one prompt, and stores it. Tokens that came from the tiers; a wrong byte ends it.
  std::uint64_t serve(std::uint32_t number) {
    const std::vector<token_id> prompt = prompt_of(number);
    const sequence_id id = cache_.create().value();
    const std::uint64_t hit = cache_.match(id, prompt).value().tokens;
    const kv_chain chain(cache_, prompt);
    auto load = tiers_.prepare_load(id, chain).value();
    const offload::load_result came = load.complete();
    cache_.truncate(id, came.tokens).value();
    check(id, prompt, came.tokens);
    cache_.append(id, std::span(prompt).subspan(static_cast<std::size_t>(came.tokens))).value();
    for (std::size_t b = static_cast<std::size_t>(came.tokens / 4); b < 4; ++b)
      each_byte(id, b, [&](std::byte& at, std::size_t i) { at = byte_of(prompt, b, i); });
    cache_.commit(id).value();
    tiers_.store(id).value();
    cache_.release(id).value();
    return came.tokens - hit;
  }
  void flush() { tiers_.flush(); }
  [[nodiscard]] offload::kv_tiers_stats stats() const { return tiers_.stats(); }
  [[nodiscard]] std::vector<std::string> audit() const { return tiers_.audit(); }
  [[nodiscard]] std::uint64_t wrong() const { return wrong_; }

 private:
  [[nodiscard]] kv_memory memory() {
    return {.data = bytes_.data(), .blocks = cache_.physical_blocks(), .layout = layout};
  }
  template <class F>
  void each_byte(sequence_id id, std::size_t block, F&& f) {
    std::vector<std::byte> packed(layout.block_bytes());
    const kv_memory staging{.data = packed.data(), .blocks = 1, .layout = layout.packed()};
    const std::uint64_t at = to_index(cache_.blocks(id)[block]);
    copy_kv_block(staging, 0, memory(), at, 4);
    for (std::size_t i = 0; i < packed.size(); ++i)
      f(packed[i], i);
    copy_kv_block(memory(), at, staging, 0, 4);
  }
  void check(sequence_id id, std::span<const token_id> prompt, std::uint64_t tokens) {
    for (std::size_t b = 0; b < tokens / 4; ++b)
      each_byte(id, b,
                [&](std::byte& at, std::size_t i) { wrong_ += at != byte_of(prompt, b, i) ? 1U : 0U; });
  }

  paged_allocator<traits> cache_;
  std::vector<std::byte> bytes_;
  host_space host_;
  persistent_file_space<> disk_;
  kv_tiers<paged_allocator<traits>, offload::layout_mover<host_executor>, offload::kv_tier<host_space>,
           offload::kv_tier<persistent_file_space<>, lru_eviction, Codec>>
      tiers_;
  std::uint64_t wrong_ = 0;
};

}  // namespace

TEST_CASE("a later process loads the blocks of a persistent file") {
  const temporary_folder folder;
  const std::string path = folder.file("kv.tier");
  {
    server<> first(path);
    for (std::uint32_t i = 0; i < 5; ++i) {
      CHECK(first.serve(i) <= 8);
      first.flush();
    }
  }
  server<> second(path);
  CHECK(second.stats().tiers[1].recovered >= 10);
  CHECK(second.audit() == std::vector<std::string>{});
  for (std::uint32_t i = 0; i < 4; ++i)
    CHECK(second.serve(i) >= 8);
  CHECK(second.wrong() == 0);
}

TEST_CASE("changed bytes of the file are misses") {
  const temporary_folder folder;
  const std::string path = folder.file("kv.tier");
  {
    server<> first(path);
    first.serve(1);
    first.flush();
  }
  {
    // Every block has its page: one byte of each is changed.
    const int file = ::open(path.c_str(), O_RDWR);
    REQUIRE(file >= 0);
    const off_t end = ::lseek(file, 0, SEEK_END);
    for (off_t at = 65536 + 100; at < end; at += 4096) {
      char byte = 0;
      REQUIRE(::pread(file, &byte, 1, at) == 1);
      byte = static_cast<char>(byte ^ 0x40);
      REQUIRE(::pwrite(file, &byte, 1, at) == 1);
    }
    ::close(file);
  }
  server<> second(path);
  CHECK(second.stats().tiers[1].recovered == 4);
  CHECK(second.serve(1) == 0);
  CHECK(second.stats().tiers[1].damaged == 4);
  CHECK(second.wrong() == 0);
}

TEST_CASE("a later process loads stored forms, and one of another codec or none does not take them") {
  const temporary_folder folder;
  const std::string path = folder.file("kv.tier");
  const auto serve_all = [](auto& of) {
    std::uint64_t loaded = 0;
    for (std::uint32_t i = 0; i < 5; ++i) {
      loaded += of.serve(i);
      of.flush();
    }
    CHECK(of.wrong() == 0);
    CHECK(of.audit() == std::vector<std::string>{});
    return loaded;
  };
  {
    server<varied> first(path);
    serve_all(first);
    const offload::kv_tier_stats disk = first.stats().tiers[1];
    CHECK(disk.slots == file_slots * 64);          // slots of 64 bytes, each of a block of 1024
    CHECK(disk.stored_bytes == disk.stored * 11);  // the head, and two bytes
    CHECK(disk.stored > 5);
    CHECK(disk.too_long > 0);
    CHECK(disk.failures == 0);
  }
  {
    server<varied> second(path);
    CHECK(second.stats().tiers[1].recovered >= 8);
    CHECK(serve_all(second) >= 24);
    CHECK(second.stats().tiers[1].damaged == 0);
  }
  {
    server<offload::coded<varied_codec<2>>> other(path);
    CHECK(other.stats().tiers[1].recovered >= 8);
    serve_all(other);
    CHECK(other.stats().tiers[1].damaged > 0);  // and written again, in its own form
  }
  server<> plain(path);
  CHECK(plain.stats().tiers[1].recovered == 0);
  CHECK(plain.serve(0) == 0);
  CHECK(plain.wrong() == 0);
}

namespace {

/// A codec that a later process replaces by one of shorter forms.
class long_codec : public varied_codec<3> {
 public:
  using varied_codec<3>::varied_codec;
  static constexpr std::uint64_t worst_case_bytes(std::uint64_t bytes) noexcept { return bytes + 6000; }
  llmmem::result<std::uint64_t> encode(std::span<const std::byte>, std::span<std::byte> out) noexcept {
    std::ranges::fill(out.first(5500), std::byte{7});
    return std::uint64_t{5500};
  }
};

/// A codec that names more bytes than it was given.
class lying_codec : public varied_codec<4> {
 public:
  using varied_codec<4>::varied_codec;
  llmmem::result<std::uint64_t> encode(std::span<const std::byte>, std::span<std::byte>) noexcept {
    return (std::uint64_t{1} << 32U) + 2;
  }
};

template <class Codec>
offload::kv_tiers_stats fill_wide_slots(persistent_file_space<>& disk) {
  const std::uint64_t bytes = 1024;
  const double share = 1;
  host_space host({.budget = 1 << 16});
  offload::kv_tier below(disk, 4 * 16384, {}, offload::coded<Codec>{});
  below.granularity = 16384;
  const kv_tiers_options options{.load_headroom = 0};
  detail::kv_tier_stack stack(options, std::span(&bytes, 1), std::span(&share, 1),
                              offload::kv_tier(host, 4 * bytes, write_through{}), below);
  const auto finish = [&] {
    for (int i = 0; i < 2; ++i) {
      stack.wait();
      stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
    }
  };
  if (const auto found = stack.find(0, key_from_id(1))) {
    static_cast<void>(stack.begin_read(found->tier, 0, found->slot, {}, 0));
  } else {
    stack.settle(0, stack.begin_fill(0, key_from_id(1), detail::parent_digest::none, false).value());
  }
  finish();
  offload::kv_tiers_stats out;
  stack.count(out);
  return out;
}

}  // namespace

TEST_CASE("a codec of shorter forms takes none that its buffers do not hold") {
  const temporary_folder folder;
  const auto serve = [&]<class Codec>(const Codec*) {
    persistent_file_space<> disk(folder.file("kv.tier"),
                                 {.space = {.budget = 4 * 16384}, .layout = 7, .max_chunks = 64});
    return fill_wide_slots<Codec>(disk);
  };
  const long_codec* const long_one = nullptr;
  CHECK(serve(long_one).tiers[1].stored == 1);
  CHECK(serve(long_one).tiers[1].recovered == 1);
  const varied_codec<1>* const short_one = nullptr;
  const offload::kv_tiers_stats later = serve(short_one);
  CHECK(later.tiers[1].recovered == 0);
  CHECK(later.tiers[1].stored == 1);
  const temporary_folder other;
  persistent_file_space<> disk(other.file("kv.tier"),
                               {.space = {.budget = 4 * 16384}, .layout = 7, .max_chunks = 64});
  const offload::kv_tiers_stats lied = fill_wide_slots<lying_codec>(disk);
  CHECK(lied.tiers[1].stored == 0);
  CHECK(lied.tiers[1].failures == 1);
  CHECK(lied.last_failure.code == errc::out_of_range);
}

namespace {

/// Kills servers at random moments. Returns how many blocks the next ones found.
template <class Server>
std::uint64_t kill_servers(std::uint64_t seed) {
  CAPTURE(seed);
  random_numbers random(seed);
  const temporary_folder folder;
  const std::string path = folder.file("kv.tier");
  for (int round = 0; round < 2; ++round) {
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      random_numbers own(seed + static_cast<std::uint64_t>(round));
      Server serving(path);
      for (;;) {
        serving.serve(own.below(std::uint32_t{12}));
        if (serving.wrong() != 0) ::_exit(1);
        static_cast<void>(!::write(ready[1], "x", 1));
      }
    }
    ::close(ready[1]);
    char byte = 0;
    for (std::uint64_t i = 2 + random.below(std::uint64_t{40}); i > 0; --i)
      REQUIRE(::read(ready[0], &byte, 1) == 1);
    ::usleep(static_cast<useconds_t>(random.below(std::uint64_t{500})));
    ::kill(child, SIGKILL);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    ::close(ready[0]);
  }
  Server after(path);
  const std::uint64_t recovered = after.stats().tiers[1].recovered;
  for (std::uint32_t i = 0; i < 12; ++i)
    after.serve(i);
  CHECK(after.wrong() == 0);
  CHECK(after.audit() == std::vector<std::string>{});
  return recovered;
}

}  // namespace

TEST_CASE("a process that is killed at any moment leaves no wrong block, plain or in a stored form") {
  std::uint64_t recovered = 0;
  std::uint64_t coded = 0;
  for (const std::uint64_t seed : llmmem_tests::seeds(8)) {
    recovered += kill_servers<server<>>(seed);
    coded += kill_servers<server<varied>>(seed);
  }
  CHECK(recovered > 0);
  CHECK(coded > 0);
}
