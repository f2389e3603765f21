/// A directory in a real Redis server, which is killed, stopped, emptied and filled with garbage.
#include <llmmem/pool/detail/redis_values.hpp>

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/random.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_CASE("names of incarnations and entries are read back exactly, and nothing else is") {
  const detail::redis_life life{.nonce = 0x0123'4567'89AB'CDEF, .life = 3};
  const detail::redis_field text = detail::redis_life_text(life);
  CHECK(text.view() == "0123456789abcdef:00000003");
  CHECK(detail::parse_redis_life(text.view()) == life);
  const detail::redis_field field = detail::redis_field_of(seat_id{7}, life);
  CHECK(field.view() == "0007:0123456789abcdef:00000003");
  REQUIRE(detail::parse_redis_field(field.view(), 8));
  CHECK(detail::parse_redis_field(field.view(), 8)->seat == seat_id{7});
  CHECK(detail::parse_redis_field(field.view(), 8)->life == life);
  CHECK_FALSE(detail::parse_redis_field(field.view(), 7));  // there is no such seat
  for (std::size_t i = 0; i < field.view().size(); ++i) {
    CHECK_FALSE(detail::parse_redis_field(field.view().substr(0, i), 8));
    std::string changed(field.view());
    changed[i] = 'G';
    CHECK_FALSE(detail::parse_redis_field(changed, 8));
  }
  CHECK_FALSE(detail::parse_redis_field(std::string(field.view()) + "0", 8));
  CHECK_FALSE(detail::parse_redis_life("0123456789ABCDEF:00000003"));
  CHECK_FALSE(detail::parse_redis_life("0123456789abcdef:00000000"));
}

TEST_CASE("records of a span are read back, and a damaged value yields none of them") {
  constexpr std::array<std::uint32_t, 3> digests{1, 2, 0xFFFF'FFFF};
  constexpr std::array<std::uint64_t, 2> masks{0b101, 0b010};
  detail::redis_record_writer out(2);
  out.add(digests, masks);
  out.add(std::span(digests).first(1), std::array<std::uint64_t, 2>{1, 0});
  std::vector<std::size_t> chunks;
  const auto note = [&](std::span<const std::uint32_t> of, std::span<const std::uint64_t> has) {
    chunks.push_back(of.size());
    CHECK(of.back() == (of.size() == 3 ? 0xFFFF'FFFF : 1));
    CHECK(has[0] == (of.size() == 3 ? 0b101U : 1U));
  };
  const std::string right(out.view());
  CHECK(detail::read_redis_records(right, 2, note));
  CHECK(chunks == std::vector<std::size_t>{3, 1});
  const auto none = [](std::span<const std::uint32_t>, std::span<const std::uint64_t>) { CHECK(false); };
  CHECK_FALSE(detail::read_redis_records(right, 1, none));
  CHECK_FALSE(detail::read_redis_records(right + "x", 2, none));
  for (std::size_t i = 0; i < right.size(); ++i)
    CHECK_FALSE(detail::read_redis_records(right.substr(0, i), 2, none));
  std::string changed = right;
  changed[4] = 0;  // no chunks
  CHECK_FALSE(detail::read_redis_records(changed, 2, none));
  changed[4] = 65;
  CHECK_FALSE(detail::read_redis_records(changed, 2, none));
  changed = right;
  changed[3] = 3;  // records
  CHECK_FALSE(detail::read_redis_records(changed, 2, none));
  changed = right;
  changed[5 + 12] = 0x0F;  // a block of a chunk that the record lacks
  CHECK_FALSE(detail::read_redis_records(changed, 2, none));
  // Any bytes: what is read stays inside of the value, which the address sanitizer sees.
  random_numbers random(3);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = right.substr(0, random.below(std::uint64_t{right.size()}));
    for (std::uint32_t k = random.below(std::uint32_t{4}); k != 0 && !bytes.empty(); --k)
      bytes[random.below(std::uint64_t{bytes.size()})] = static_cast<char>(random.next());
    static_cast<void>(detail::read_redis_records(bytes, 2, [](auto of, auto) { CHECK(of.size() <= 64); }));
  }
}

#ifdef LLMMEM_TESTS_REDIS

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <llmmem/error.hpp>
#include <llmmem/pool/redis_directory.hpp>

#include <chrono>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>

#include "pool/pool_cluster.hpp"
#include "support/redis_server.hpp"
#include "support/temporary_folder.hpp"

namespace {

constexpr std::uint64_t ms = 1'000'000;

/// Returns whether there is a server; says why not.
bool has_redis() {
  if (!redis_program().empty()) return true;
  MESSAGE("skipped: no redis-server on PATH (Debian: redis-server)");
  return false;
}

/// What a directory sees of a pool, and its answers.
struct test_link : detail::any_directory_link {
  [[nodiscard]] std::uint64_t now_ns() const noexcept {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) + away_ns;
  }
  bool on_answer(std::uint32_t, std::uint64_t id, std::uint32_t index,
                 const pool::span_holders& found) noexcept {
    CHECK(id == 11);
    CHECK(index == 5);
    ++answers;
    last = found;
    return true;
  }
  void on_unknown(std::uint64_t id, std::uint32_t) noexcept {
    CHECK(id == 11);
    ++unknown;
  }
  void on_keepers_changed() noexcept { ++changes; }

  std::uint64_t away_ns = 0;
  int answers = 0;
  int unknown = 0;
  int changes = 0;
  pool::span_holders last;
};

constexpr const char* name_of_zero = "llmmem:0000000000000001:node:0000";
constexpr block_key span_a{.low = 0xA, .high = 0xB};

redis_options at(const redis_server& server) {
  return {.unix_socket = server.socket(),
          .lifetime_ns = 30'000 * ms,
          .answer_ns = 100'000'000 * ms,
          .retry_ns = 1 * ms};
}

/// A node without a pool: a directory, and the table of what it has published.
struct directory_node {
  directory_node(const redis_options& options, std::uint32_t seat, std::uint64_t nonce,
                 std::uint64_t likeness = 1)
      : directory(options),
        table(256, 1, {}),
        id{.seat = seat_id{seat}, .nonce = nonce, .likeness = likeness, .seats = 3, .groups = 1} {
    directory.begin(link, id);
  }
  /// Makes steps until something is so.
  template <class F>
  bool until(F&& is_so) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!is_so()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      directory.progress(link);
    }
    return true;
  }
  /// Lets time pass on its clock: the server's stands still for it, so that no test depends on speed.
  void sleep(std::uint64_t ns) {
    settle();  // no answer is awaited meanwhile
    link.away_ns += ns;
    directory.progress(link);
    for (int i = 0; i < 3; ++i)
      settle();  // also what the first answers lead to
  }
  bool is(pool::redis_state state) {
    return until([&] { return directory.state() == state; });
  }
  void settle() {
    const std::uint64_t questions = directory.stats().questions;
    ask();
    CHECK(until([&] { return directory.stats().answers + directory.stats().unknown > questions; }));
  }
  /// @param when_sent  called before the server's replies are read.
  void announce(
      const std::vector<std::uint32_t>& chunks, std::uint64_t mask,
      const std::function<void()>& when_sent = [] {}) {
    const std::uint32_t entry =
        table.put(span_a, id.seat, id.nonce, chunks, std::array<std::uint64_t, 1>{mask});
    const detail::span_entry& each = table.at(entry);
    directory.announce(link, span_a, {std::span(each.digests).first(each.chunks), table.masks(entry)},
                       pool::span_records(table, span_a));
    when_sent();
    settle();
  }
  void retract(std::uint32_t place, std::uint32_t digest) {
    directory.retract(link, span_a, {.group = 0, .place = place, .digest = digest},
                      pool::span_records(table, span_a));
    table.take_back(span_a, id.seat, 0, place, digest);
    settle();
  }
  void announce_again() {
    const pool::span_records all(table, span_a);
    all.for_each([&](const pool::span_record& each) { directory.announce(link, span_a, each, all); });
    settle();
  }
  pool::asked ask() {
    return directory.ask(link, {.id = 11, .index = 5, .span = span_a, .digests = digests});
  }
  /// Asks for chunks 1, 2, 3, 4 and returns the answer.
  pool::span_holders found() {
    link.last = {};
    const int before = link.answers + link.unknown;
    REQUIRE(ask() == pool::asked::pending);
    REQUIRE(until([&] { return link.answers + link.unknown != before; }));
    return link.last;
  }

  std::vector<std::uint32_t> digests{1, 2, 3, 4};  // of the questions
  test_link link;
  redis_directory directory;
  detail::span_table table;
  pool::directory_identity id;
};

/// A server, and two nodes whose directories are up.
struct two_nodes {
  two_nodes() {
    REQUIRE(zero.is(pool::redis_state::up));
    REQUIRE(one.is(pool::redis_state::up));
  }
  redis_server server{};
  directory_node zero{at(server), 0, 100};
  directory_node one{at(server), 1, 101};
};

/// A server that says what a test wants to each command.
class nonsense_server {
 public:
  explicit nonsense_server(std::string says) : says_(std::move(says)) {
    socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::snprintf(to.sun_path, sizeof(to.sun_path), "%s", path().c_str());
    REQUIRE(::bind(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0);
    REQUIRE(::listen(socket_, 4) == 0);
  }
  ~nonsense_server() {
    ::close(socket_);
    if (client_ >= 0) ::close(client_);
  }
  [[nodiscard]] std::string path() const { return folder_.file("s"); }
  void step() {
    if (client_ < 0) {
      client_ = ::accept(socket_, nullptr, nullptr);
      if (client_ >= 0)
        static_cast<void>(::send(client_, says_.data(), says_.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
      return;
    }
    std::size_t left = says_.size() < 5'000'000 ? 0 : says_.size();
    while (left != 0 && ::send(client_, says_.data(), says_.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0) {
    }
  }

 private:
  temporary_folder folder_;
  std::string says_;
  int socket_ = -1;
  int client_ = -1;
};

}  // namespace

TEST_SUITE("redis_directory") {
  TEST_CASE("a node finds what others announce, by what their chains have in common with its own") {
    if (!has_redis()) return;
    redis_server server;
    directory_node zero(at(server), 0, 100);
    directory_node one(at(server), 1, 101);
    directory_node other(at(server), 2, 102, 2);  // of other weights
    for (auto* each : {&zero, &one, &other})
      REQUIRE(each->is(pool::redis_state::up));
    CHECK(zero.link.changes == 1);
    CHECK(zero.directory.has_received_all());
    zero.announce({1, 2, 3}, 0b111, [&] { CHECK_FALSE(zero.directory.has_received_all()); });
    CHECK(zero.directory.has_received_all());
    zero.announce({1, 2, 9, 9}, 0b1111);
    auto found = one.found();
    REQUIRE(found.count == 1);
    CHECK(found.holders[0].seat == seat_id{0});
    CHECK(found.holders[0].nonce == 100);
    CHECK(found.masks[0] == 0b111);
    CHECK(other.found().count == 0);
    CHECK(zero.found().count == 0);  // itself
    one.announce({1, 2, 3, 4}, 0b1001);
    CHECK(zero.found().masks[0] == 0b1001);
    // It no longer has the longer match: its other chain counts.
    zero.retract(2, 3);
    CHECK(one.found().masks[0] == 0b11);
    zero.retract(0, 1);
    zero.retract(1, 2);
    CHECK(one.found().count == 0);
    CHECK(server.ask({"HLEN", "llmmem:0000000000000001:span:000000000000000b000000000000000a"}) == "2");
    zero.retract(2, 9);
    zero.retract(3, 9);
    CHECK(server.ask({"HLEN", "llmmem:0000000000000001:span:000000000000000b000000000000000a"}) == "1");
    CHECK(one.found().count == 0);
    CHECK(server.ask({"KEYS", "*:span:*"}).size() > 10);
    CHECK(one.directory.stats().refused_values == 0);
  }

  TEST_CASE("of a hundred chains that begin alike, the one most alike is found") {
    if (!has_redis()) return;
    two_nodes nodes;
    auto& [server, zero, one] = nodes;
    const auto chain = [](std::uint32_t which, std::uint32_t chunks) {
      std::vector<std::uint32_t> out;
      for (std::uint32_t i = 0; i < chunks; ++i)
        out.push_back(i < 21 ? i : which * 100 + i);  // 21 chunks in common
      return out;
    };
    for (std::uint32_t i = 0; i < 100; ++i)
      zero.announce(chain(i, 30 + i % 35), ~std::uint64_t{0} >> (64 - (30 + i % 35)));
    for (std::uint32_t i = 0; i < 100; i += 9) {
      CAPTURE(i);
      one.digests = chain(i, 64);
      const auto found = one.found();
      REQUIRE(found.count == 1);
      CHECK(std::popcount(found.masks[0]) == static_cast<int>(30 + i % 35));
    }
    one.digests = chain(777, 64);
    CHECK(std::popcount(one.found().masks[0]) == 21);
    // A block of their common beginning goes: the newest chains are corrected, at nine values each at most.
    const std::uint64_t announced = zero.directory.stats().announced;
    zero.retract(20, 20);
    CHECK(zero.directory.stats().announced - announced <= 16 * 9);
    CHECK(std::popcount(one.found().masks[0]) == 20);
    one.digests = chain(99, 64);
    CHECK(std::popcount(one.found().masks[0]) == 58);  // of 59
  }

  TEST_CASE("entries of a node that sleeps beyond its lifetime count no more, and are removed") {
    if (!has_redis()) return;
    two_nodes nodes;
    auto& [server, zero, one] = nodes;
    zero.announce({1, 2}, 0b11);
    const std::string name = server.ask({"KEYS", "*:span:*"});
    const std::string key = name.substr(0, name.size() - 1);
    CHECK(one.found().count == 1);
    // The server's clock is real.
    server.ask({"PEXPIRE", name_of_zero, "20"});
    REQUIRE(one.until([&] { return one.found().count == 0; }));
    CHECK(one.directory.stats().dead_entries > 0);
    REQUIRE(one.until([&] { return server.ask({"HLEN", key}) == "0"; }));
    CHECK(one.directory.stats().repaired > 0);
    // It wakes, finds its name gone, takes a new incarnation, and is asked to announce again.
    const int changes = zero.link.changes;
    zero.sleep(11'000 * ms);
    REQUIRE(zero.until([&] { return zero.link.changes > changes; }));
    zero.announce_again();
    CHECK(server.ask({"HKEYS", key}) == "0000:0000000000000064:00000002\n");
    CHECK(one.found().count == 1);
    // Before a third of its lifetime has passed it renews nothing, then it does.
    server.ask({"PEXPIRE", name_of_zero, "15000"});
    zero.sleep(9'000 * ms);
    CHECK(std::stoll(server.ask({"PTTL", name_of_zero})) <= 15'000);
    zero.sleep(2'000 * ms);
    CHECK(std::stoll(server.ask({"PTTL", name_of_zero})) > 15'000);
    CHECK(zero.directory.stats().incarnations == 2);
    CHECK(zero.link.changes == changes + 1);
  }

  TEST_CASE("a name that a new process takes is a new incarnation, and the old process announces nothing") {
    if (!has_redis()) return;
    redis_server server;
    directory_node old(at(server), 0, 100);
    directory_node one(at(server), 1, 101);
    REQUIRE(old.is(pool::redis_state::up));
    REQUIRE(one.is(pool::redis_state::up));
    old.announce({1, 2}, 0b11);
    CHECK(one.found().count == 1);
    {
      directory_node fresh(at(server), 0, 200);
      REQUIRE(fresh.is(pool::redis_state::up));
      CHECK(one.found().count == 0);
      old.sleep(11'000 * ms);
      REQUIRE(old.is(pool::redis_state::name_taken));
      CHECK(old.directory.why().code == errc::directory_name_taken);
      CHECK_FALSE(old.directory.has_received_all());
      CHECK(old.directory.why().message().find("seat 0") != std::string::npos);
      old.announce({1, 2, 3}, 0b111);
      CHECK(one.found().count == 0);
      fresh.announce({1}, 1);
      REQUIRE(one.found().count == 1);
      CHECK(one.found().holders[0].nonce == 200);
      CHECK(old.found().count == 0);  // it asks as before; the entry of its own seat is of no use to it
    }
    // The new process has ended, and given its name back.
    old.sleep(11'000 * ms);
    REQUIRE(old.is(pool::redis_state::up));
    CHECK(old.directory.why().code == errc::ok);
    old.announce_again();
    REQUIRE(one.found().count == 1);
    CHECK(one.found().holders[0].nonce == 100);
  }

  TEST_CASE("a process that ends before it has seen that its name is taken leaves the name to the new one") {
    if (!has_redis()) return;
    redis_server server;
    auto old = std::make_unique<directory_node>(at(server), 0, 100);
    REQUIRE(old->is(pool::redis_state::up));
    directory_node fresh(at(server), 0, 200);
    REQUIRE(fresh.is(pool::redis_state::up));
    old.reset();
    CHECK(server.ask({"GET", name_of_zero}) == "00000000000000c8:00000001");
  }

  TEST_CASE("questions to a server that is stopped become unknown once, and later ones are unknown at once") {
    if (!has_redis()) return;
    redis_server server;
    directory_node zero(at(server), 0, 100);
    REQUIRE(zero.is(pool::redis_state::up));
    CHECK(zero.found().count == 0);
    server.stop();
    REQUIRE(zero.ask() == pool::asked::pending);
    zero.directory.progress(zero.link);
    CHECK(zero.link.unknown == 0);
    zero.link.away_ns += 200'000'000 * ms;
    zero.directory.progress(zero.link);
    CHECK(zero.link.unknown == 1);
    CHECK(zero.directory.state() == pool::redis_state::down);
    CHECK_FALSE(zero.directory.has_received_all());
    CHECK(zero.directory.why().code == errc::directory_unreachable);
    CHECK(zero.directory.keeper_of(zero.link, span_a) == pool::no_keeper);
    CHECK(zero.ask() == pool::asked::unreachable);
    // A stopped server takes connections, but says nothing.
    const std::uint64_t losses = zero.directory.stats().losses;
    REQUIRE(zero.until([&] {
      zero.link.away_ns += 200'000'000 * ms;
      return zero.directory.stats().losses > losses;
    }));
    CHECK(zero.directory.state() == pool::redis_state::down);
    CHECK(zero.ask() == pool::asked::unreachable);
    server.go_on();
    const int changes = zero.link.changes;
    REQUIRE(zero.is(pool::redis_state::up));
    CHECK(zero.link.changes == changes + 1);
    CHECK(zero.directory.why().code == errc::ok);
    CHECK(zero.found().count == 0);
    CHECK(zero.link.answers == 2);
  }

  TEST_CASE("a look for dead entries waits until the buffer has space for the names of all nodes") {
    if (!has_redis()) return;
    redis_server server;
    redis_options options = at(server);
    options.buffer_bytes = 65536;
    directory_node zero(options, 0, 100);
    zero.id.seats = 256;
    zero.directory.begin(zero.link, zero.id);
    REQUIRE(zero.is(pool::redis_state::up));
    {
      directory_node dead(at(server), 1, 101);
      REQUIRE(dead.is(pool::redis_state::up));
      dead.announce({1, 2}, 0b11);
    }
    server.ask({"PING"});  // after the name's end
    server.ask({"PING"});
    REQUIRE(zero.ask() == pool::asked::pending);
    server.ask({"PING"});
    server.ask({"PING"});  // the replies are here
    server.stop();
    const std::vector<std::uint32_t> chain(64, 7);
    const std::uint32_t entry =
        zero.table.put(span_a, zero.id.seat, 100, chain, std::array<std::uint64_t, 1>{~std::uint64_t{0}});
    const pool::span_record record{zero.table.at(entry).digests, zero.table.masks(entry)};
    for (int i = 0; i < 210; ++i)
      zero.directory.announce(zero.link, span_a, record, pool::span_records(zero.table, span_a));
    zero.directory.progress(zero.link);
    CHECK(zero.directory.stats().dead_entries == 1);
    CHECK(zero.directory.stats().losses == 0);
    server.go_on();
    REQUIRE(zero.until([&] { return zero.directory.stats().repaired == 1; }));
  }

  TEST_CASE("a server that is emptied, or killed and given an old file, is told everything again") {
    if (!has_redis()) return;
    two_nodes nodes;
    auto& [server, zero, one] = nodes;
    const auto is_told = [&](directory_node& who, auto&& act) {
      const int changes = who.link.changes;
      act();
      return who.until([&] { return who.link.changes > changes; });
    };
    for (auto* each : {&zero, &one})
      REQUIRE(is_told(*each, [&] {
        server.ask({"FLUSHALL"});
        each->sleep(11'000 * ms);
      }));
    zero.sleep(11'000 * ms);  // its new name went with the second time
    zero.announce({1, 2}, 0b11);
    CHECK(one.found().count == 1);
    server.ask({"SAVE"});
    zero.announce({1, 2, 3}, 0b111);
    REQUIRE(is_told(zero, [&] {
      server.kill();
      CHECK(zero.until([&] { return zero.directory.state() == pool::redis_state::down; }));
      CHECK(zero.ask() == pool::asked::unreachable);
      server.start();  // from the file
    }));
    REQUIRE(one.is(pool::redis_state::down));
    REQUIRE(one.is(pool::redis_state::up));
    zero.announce_again();
    CHECK(one.found().masks[0] == 0b111);
    // A file of before another incarnation: the node comes back by its own name, or when that has expired.
    server.ask({"SET", name_of_zero, "0000000000000064:00000001", "PX", "900000"});
    REQUIRE(is_told(zero, [&] { zero.sleep(11'000 * ms); }));
    server.ask({"SET", name_of_zero, "0000000000000007:00000001", "PX", "20"});
    const int changes = zero.link.changes;
    REQUIRE(zero.until([&] {
      zero.sleep(11'000 * ms);
      return zero.link.changes > changes;
    }));
    zero.announce_again();
    CHECK(one.found().count == 1);
  }

  TEST_CASE("garbage in the server's keys is counted, and yields no holder") {
    if (!has_redis()) return;
    two_nodes nodes;
    auto& [server, zero, one] = nodes;
    zero.announce({1, 2}, 0b11);
    const std::string names = server.ask({"KEYS", "*:span:*"});
    const std::string key = names.substr(0, names.size() - 1);
    const std::string field = "0000:0000000000000064:00000001";
    const std::string value = server.ask({"HGET", key, field});
    server.ask({"HSET", key, "nonsense", value, "00ff:0000000000000064:00000001", value, "0001", ""});
    CHECK(one.found().count == 1);
    CHECK(one.directory.stats().refused_values == 3);
    for (const std::string& bad : {std::string(), value + "x", std::string(100'000, 'L'),
                                   value.substr(0, value.size() - 1), "L1\x01\x01\xFF" + value.substr(5)}) {
      server.ask({"HSET", key, field, bad});
      CHECK(one.found().count == 0);
    }
    CHECK(one.directory.stats().refused_values == 3 * 6 + 5);
    // Entries beyond those that are read, of processes that do not live.
    for (int i = 0; i < 200; ++i)
      server.ask(
          {"HSET", key, "0002:00000000000000" + std::to_string(100 + i).substr(1) + ":00000001", value});
    CHECK(one.found().count == 0);
    // A value that is far too long closes the connection, and the question is unknown.
    server.ask({"DEL", key});
    server.ask({"HSET", key, field, std::string(3'000'000, 'x')});
    const int unknown = one.link.unknown;
    one.found();
    CHECK(one.link.unknown == unknown + 1);
    CHECK(one.directory.why().message().find("too long") != std::string::npos);
    REQUIRE(one.is(pool::redis_state::up));
    // So does a reply of values each of which is shorter.
    server.ask({"DEL", key});
    for (int i = 0; i < 12; ++i)
      server.ask({"HSET", key, std::to_string(i), std::string(900'000, 'x')});
    one.found();
    CHECK(one.link.unknown == unknown + 2);
    CHECK(one.directory.why().message().find("too long") != std::string::npos);
    REQUIRE(one.is(pool::redis_state::up));
    // A key of another type: the server refuses, and the connection stays.
    server.ask({"SET", key, "text"});
    one.found();
    CHECK(one.link.unknown == unknown + 3);
    CHECK(one.directory.state() == pool::redis_state::up);
    CHECK(one.directory.why().code == errc::directory_refused);
    CHECK(one.directory.why().message().find("WRONGTYPE") != std::string::npos);
    // A name that is none is replaced, although it would never expire.
    server.ask({"DEL", key});
    server.ask({"SET", name_of_zero, "garbage"});
    const int changes = zero.link.changes;
    zero.sleep(11'000 * ms);
    REQUIRE(zero.until([&] { return zero.link.changes > changes; }));
    zero.announce_again();
    CHECK(one.found().count == 1);
  }

  TEST_CASE("a server that speaks nonsense is down, whatever numbers it claims") {
    // A length alone may still be met, so it is given up when no more has come in time.
    for (const auto& [says, why] : std::initializer_list<std::pair<std::string, error_code>>{
             {"*1000000000\r\n", errc::directory_refused},
             {"$99999999999999\r\n", errc::directory_unreachable},
             {"hello\r\n", errc::directory_refused},
             {"*-5\r\n", errc::directory_refused},
             {"+OK\r\n+OK\r\n+OK\r\n", errc::directory_refused},
             {"*900\r\n*900\r\n", errc::directory_refused},
             {"$900000000\r\n" + std::string(6'000'000, 'x'), errc::directory_refused}}) {
      CAPTURE(says.substr(0, 20));
      nonsense_server server(says);
      directory_node node({.unix_socket = server.path(),
                           .answer_ns = (why == errc::directory_refused ? 20'000 : 20) * ms,
                           .retry_ns = 1'000'000 * ms},
                          0, 100);
      REQUIRE(node.until([&] {
        server.step();
        return node.directory.state() == pool::redis_state::down;
      }));
      CHECK(node.ask() == pool::asked::unreachable);
      CHECK(node.directory.why().code == why);
    }
  }

  TEST_CASE("announcements that a full server refuses are repeated until it takes them") {
    if (!has_redis()) return;
    two_nodes of;
    const int changes = of.zero.link.changes;
    of.server.ask({"CONFIG", "SET", "maxmemory", "1"});
    of.zero.announce({1, 2}, 0b11);
    CHECK(of.zero.directory.stats().refused_commands == 1);
    CHECK_FALSE(of.zero.directory.has_received_all());
    CHECK(of.zero.directory.why().message().find("OOM") != std::string::npos);
    CHECK(of.one.found().count == 0);
    // The pool hears that it must announce again, after one, two, four ms and so on.
    std::uint64_t wait = 1;
    for (int i = 1; i <= 6; ++i) {
      CAPTURE(i);
      of.zero.link.away_ns += wait * 1000 * ms;  // the test may be slow
      of.zero.directory.progress(of.zero.link);
      CHECK(of.zero.link.changes == changes + i);
      CHECK(of.zero.directory.takes(of.zero.link, of.zero.directory.keeper_of(of.zero.link, span_a)));
      if (i == 6) of.server.ask({"CONFIG", "SET", "maxmemory", "0"});
      of.zero.announce_again();
      CHECK(of.zero.directory.has_received_all() == (i == 6));
    }
    CHECK(of.zero.directory.stats().refused_commands == 6);
    CHECK(of.one.found().count == 1);
    of.zero.sleep(3'000 * ms);                   // longer than any wait, shorter than its name lives
    CHECK(of.zero.link.changes == changes + 6);  // all is said
    // A key of another type is not worth it.
    of.server.ask({"SET", "llmmem:0000000000000001:span:000000000000000b000000000000000a", "x"});
    of.zero.announce_again();
    of.zero.sleep(1'000 * ms);
    CHECK(of.zero.link.changes == changes + 6);
  }

  TEST_CASE("all addresses of a server are tried, the last one that answered first") {
    if (!has_redis()) return;
    // Nothing else listens on the port: this process has it at another address.
    const int taken = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at_loopback{};
    at_loopback.sin_family = AF_INET;
    at_loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 2);
    REQUIRE(::bind(taken, reinterpret_cast<const sockaddr*>(&at_loopback), sizeof(at_loopback)) == 0);
    socklen_t size = sizeof(at_loopback);
    REQUIRE(::getsockname(taken, reinterpret_cast<sockaddr*>(&at_loopback), &size) == 0);
    const std::uint16_t port = ntohs(at_loopback.sin_port);
    redis_server server({"--bind", "127.0.0.2", "--port", std::to_string(port)});
    redis_options options = at(server);
    options.unix_socket.clear();
    options.host = "127.0.0.1,127.0.0.3,127.0.0.2";
    options.port = port;
    directory_node node(options, 0, 100);
    bool was_down = false;
    REQUIRE(node.until([&] {
      was_down = was_down || node.directory.state() == pool::redis_state::down;
      return node.directory.state() == pool::redis_state::up;
    }));
    CHECK_FALSE(was_down);
    CHECK(node.directory.stats().losses == 2);
    CHECK(node.directory.why().code == errc::ok);
    CHECK(node.found().count == 0);
    server.kill();
    REQUIRE(node.is(pool::redis_state::down));
    server.start();
    REQUIRE(node.is(pool::redis_state::up));
    ::close(taken);
    options.host = "127.0.0.1,127.0.0.3";
    directory_node alone(options, 1, 101);
    REQUIRE(alone.is(pool::redis_state::down));
    CHECK(alone.directory.stats().losses == 2);
    CHECK_THROWS_AS(redis_directory({.host = "127.0.0.1,"}), argument_error);
  }

  TEST_CASE("a server's words are in the error text, without control characters") {
    nonsense_server server("-ERR no\x1B[31m\nroom\r\n");
    directory_node node({.unix_socket = server.path(), .answer_ns = 20'000 * ms, .retry_ns = 1'000'000 * ms},
                        0, 100);
    REQUIRE(node.until([&] {
      server.step();
      return node.directory.state() == pool::redis_state::down;
    }));
    CHECK(node.directory.why().message().find("): ERR no?[31m?room: ") != std::string::npos);
    if (!has_redis()) return;
    // A server that closes the connection, perhaps before the first command is sent.
    redis_server full({"--maxclients", "1"});
    directory_node refused(at(full), 0, 100);
    REQUIRE(refused.is(pool::redis_state::down));
    CHECK(refused.directory.why().message().find("max number of clients") != std::string::npos);
  }

  TEST_CASE("addresses, passwords and databases") {
    CHECK_THROWS_WITH_AS(redis_directory({}),
                         "redis_directory: redis_options must give either unix_socket or host, and not both",
                         argument_error);
    CHECK_THROWS_AS(redis_directory({.unix_socket = std::string(200, 'x')}), argument_error);
    CHECK_THROWS_AS(redis_directory({.host = std::string(300, 'x')}), argument_error);
    CHECK_THROWS_AS(redis_directory({.unix_socket = "s", .lifetime_ns = 1}), argument_error);
    CHECK_THROWS_AS(redis_directory({.unix_socket = "s", .user = "me"}), argument_error);
    CHECK_THROWS_AS(redis_directory({.unix_socket = "s", .prefix = std::string(65, 'x')}), argument_error);
    // Nothing listens there: unknown without a wait.
    directory_node alone({.host = "127.0.0.1", .port = 1}, 0, 100);
    REQUIRE(alone.is(pool::redis_state::down));
    CHECK(alone.directory.why().message().find(
              "redis_directory (127.0.0.1:1): the server cannot be reached (errno 111") == 0);
    if (!has_redis()) return;
    redis_server server({"--requirepass", "secret"});
    redis_options options = at(server);
    directory_node without(options, 0, 100);
    REQUIRE(without.is(pool::redis_state::down));
    CHECK(without.directory.why().code == errc::directory_refused);
    CHECK(without.directory.why().message().find("NOAUTH") != std::string::npos);
    options.password = "wrong";
    directory_node wrong(options, 0, 100);
    REQUIRE(wrong.is(pool::redis_state::down));
    options.password = "secret";
    options.database = 3;
    options.prefix = "mine:";
    directory_node right(options, 0, 100);
    REQUIRE(right.is(pool::redis_state::up));
    right.announce({1}, 1);
    server.ask({"AUTH", "secret"});
    CHECK(server.ask({"KEYS", "*"}).empty());
    server.ask({"SELECT", "3"});
    CHECK(server.ask({"KEYS", "mine:*"}).size() > 40);
    options.user = "default";
    directory_node named(options, 1, 101);
    REQUIRE(named.is(pool::redis_state::up));
    CHECK(named.found().count == 1);
  }
}

#endif
