#include "replay_trace/unpacking_source.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "replay_trace/read_trace.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace replay_trace;

namespace {

/// Bytes from their hexadecimal digits.
std::string bytes(std::string_view digits) {
  const auto value = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string out;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2)
    out += static_cast<char>(value(digits[i]) * 16 + value(digits[i + 1]));
  return out;
}

constexpr std::string_view one_request =
    "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [7, 8]}\n";

/// `one_request`, by `gzip -9n` and by `zstd -19 --check`: other programs than ours.
std::string gzip_request() {
  return bytes(
      "1f8b0800000000000203ab562ac9cc4d2d2e49cc2d50b25230d55150cacc2b282d89cf49cd4b2fc9000a9919180005f34b4b50"
      "448d816219"
      "89c519f19929c5406eb4b98e82456c2d1700cdf524664e000000");
}
std::string zstd_request() {
  return bytes(
      "28b52ffd244e15020012440e11907d12184463"
      "1bdfff09d22f8a643ce91960abe3c124477f5b5cf032f81e06cef53d08511c3dc48f3ab970b634be07e2e8ed64f8ba19f1eb01"
      "00ca639601"
      "236753b7");
}

trace read(std::string_view text, const read_options& options = {}) {
  memory_source source(text, "t");
  return read_trace(source, options);
}

std::string why(std::string_view text, const read_options& options = {}) {
  try {
    static_cast<void>(read(text, options));
  } catch (const trace_error& error) {
    return error.what();
  }
  return "accepted";
}

/// A source that gives 1 to `most` bytes at a time.
struct dripping_bytes {
  std::string_view rest;
  llmmem_tests::random_numbers random;
  std::uint64_t most;
  std::size_t read(std::span<char> into) {
    const std::size_t count =
        std::min({into.size(), rest.size(), static_cast<std::size_t>(1 + random.below(most))});
    std::copy_n(rest.begin(), count, into.begin());
    rest.remove_prefix(count);
    return count;
  }
  [[nodiscard]] std::string_view name() const { return "t"; }
};

/// Everything that an unpacking_source gives of `packed`, read in pieces that `seed` chooses.
std::string unpacked(std::string_view packed, std::uint64_t seed) {
  llmmem_tests::random_numbers random(seed);
  dripping_bytes source{packed, llmmem_tests::random_numbers(seed + 1), 1 + random.below(std::uint64_t{300})};
  unpacking_source unpacking(source, std::uint64_t{1} << 30);
  std::string text;
  std::vector<char> piece(1 + random.below(std::uint64_t{300}));
  while (const std::size_t got = unpacking.read(piece))
    text.append(piece.data(), got);
  return text;
}

/// What one way of packing must do, whichever it is. `pack` packs into one member that carries a checksum.
[[maybe_unused]] void check_packing(const std::string& kind,
                                    const std::function<std::string(std::string_view)>& pack) {
  for (const auto seed : llmmem_tests::seeds(100)) {  // members one behind the other are one text
    CAPTURE(seed);
    llmmem_tests::random_numbers random(seed);
    std::string text;
    std::string packed;
    const std::uint64_t members = 1 + random.below(std::uint64_t{3});
    for (std::uint64_t i = 0; i < members; ++i) {
      std::string part(random.below(std::uint64_t{2000}), ' ');
      for (char& c : part)
        c = static_cast<char>('a' + random.below(std::uint64_t{3}));
      text += part;
      packed += pack(part);
    }
    REQUIRE(unpacked(packed, seed) == text);
  }

  const std::string text = std::string(one_request) + std::string(one_request);
  const std::string packed = pack(text);
  CHECK(read(packed).size() == 2);
  for (std::size_t length = 4; length < packed.size(); ++length) {  // cut short
    CAPTURE(length);
    REQUIRE(why(std::string_view(packed).substr(0, length)) ==
            "t: the " + kind + " data ends in the middle, after " + std::to_string(length) +
                " bytes: the file is cut short; fetch it again");
  }
  for (std::size_t at = 4; at < packed.size(); ++at) {  // damaged: refused, or of no consequence
    CAPTURE(at);
    std::string damaged = packed;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x20);
    const std::string got = why(damaged, {.on_bad_line = bad_lines::skip});
    REQUIRE((got == "accepted" || got.starts_with("t: the " + kind + " data ")));
    if (got == "accepted") REQUIRE(unpacked(damaged, 1) == text);
  }
  CHECK(why(packed + "rubbish behind it").starts_with("t: the " + kind + " data is damaged at about byte "));
  CHECK(why(pack(packed)).starts_with("t: is packed twice: unpack it, and what is in it with `" + kind));
  CHECK(why(pack("")) == "t: no request in it: it is empty");
  CHECK(why(pack("\n\n{\n")).starts_with("t:3:2: "));  // lines are those of the text

  // Bombs: a long line ends at the line's limit, blank lines at the limit of the whole.
  const std::string long_line = pack(std::string(8 << 20, 'x'));
  CHECK(long_line.size() < (64U << 10));
  CHECK(why(long_line, {.max_line_bytes = 1 << 20})
            .starts_with("t:1:1: the line is longer than 1048576 bytes"));
  const std::string blank_lines = pack(std::string(8 << 20, '\n'));
  CHECK(why(blank_lines, {.max_unpacked_bytes = 1 << 20}) ==
        "t: the " + kind + " data unpacks to more than 1048576 bytes; if it is meant to, unpack it with `" +
            kind + " -d`");
  CHECK(read(packed, {.max_unpacked_bytes = text.size()}).size() == 2);
  CHECK(why(packed, {.max_unpacked_bytes = text.size() - 1}) != "accepted");
}

#ifdef LLMMEM_TRACE_ZLIB
std::string gzip(std::string_view text) {
  z_stream stream{};
  REQUIRE(::deflateInit2_(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY, ZLIB_VERSION,
                          static_cast<int>(sizeof stream)) == Z_OK);
  std::string in(text);
  std::string out(::deflateBound(&stream, in.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(in.data());
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(::deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  ::deflateEnd(&stream);
  return out;
}
#endif

#ifdef LLMMEM_TRACE_ZSTD
std::string zstd(std::string_view text) {
  const std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> context(ZSTD_createCCtx(), &ZSTD_freeCCtx);
  REQUIRE(ZSTD_isError(ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1)) == 0);
  std::string out(ZSTD_compressBound(text.size()), '\0');
  const std::size_t size = ZSTD_compress2(context.get(), out.data(), out.size(), text.data(), text.size());
  REQUIRE(ZSTD_isError(size) == 0);
  out.resize(size);
  return out;
}
#endif

}  // namespace

TEST_CASE("unpacked data passes through unchanged, regardless of its length and cuts") {
  for (const auto seed : llmmem_tests::seeds(100)) {
    CAPTURE(seed);
    llmmem_tests::random_numbers random(seed);
    std::string text(random.below(std::uint64_t{1000}), ' ');
    for (char& c : text)
      c = static_cast<char>('a' + random.below(std::uint64_t{26}));
    text = text.substr(0, seed % 3 == 0 ? 6 : text.size());
    REQUIRE(unpacked(text, seed) == text);
  }
}

#ifdef LLMMEM_TRACE_ZLIB
TEST_CASE("a trace packed with gzip is read, recognised by its first bytes") {
  const trace from = read(gzip_request());
  REQUIRE(from.size() == 1);
  CHECK(from.name() == "t");
  CHECK(from[0].input_tokens == 600);
  CHECK(read(gzip_request() + gzip_request()).size() == 2);
  CHECK(read(gzip_request() + std::string(512, '\0')).size() == 1);  // tapes and archives pad with zeros
  CHECK(read(gzip_request() + std::string(512, '\0') + gzip_request()).size() == 2);
  std::string wrong_checksum = gzip_request();
  wrong_checksum[wrong_checksum.size() - 8] ^= 1;
  CHECK(why(wrong_checksum) == "t: the gzip data is damaged at about byte 78: incorrect data check");
  check_packing("gzip", gzip);
}
#else
TEST_CASE("a trace packed with gzip is refused by a program without zlib, which says what to do") {
  CHECK(why(gzip_request()) ==
        "t: is gzip data, and this program was built without zlib: install it (Debian: zlib1g-dev) and "
        "configure the "
        "build again, or unpack the file with `gzip -d`");
}
#endif

#ifdef LLMMEM_TRACE_ZSTD
TEST_CASE("a trace packed with zstd is read, recognised by its first bytes") {
  const trace from = read(zstd_request());
  REQUIRE(from.size() == 1);
  CHECK(from[0].input_tokens == 600);
  const std::string skippable = bytes("5a2a4d1803000000010203");  // pzstd begins with one
  CHECK(read(skippable + zstd_request() + skippable).size() == 1);
  CHECK(why(skippable) == "t: no request in it: it is empty");
  // A window of 2 GiB: a hostile frame may not have it.
  CHECK(why(bytes("28b52ffd00a801000078")).find("requires too much memory") != std::string::npos);
  check_packing("zstd", zstd);
}
#else
TEST_CASE("a trace packed with zstd is refused by a program without zstd, which says what to do") {
  CHECK(why(zstd_request()) ==
        "t: is zstd data, and this program was built without zstd: install it (Debian: libzstd-dev) and "
        "configure the "
        "build again, or unpack the file with `zstd -d`");
}
#endif

TEST_CASE("data of other packers is refused by name, with a tool that unpacks it") {
  CHECK(why(bytes("fd377a585a000004")) == "t: is xz data, which is not read: unpack it with `xz -d`");
  CHECK(why("BZh91AY&SY") == "t: is bzip2 data, which is not read: unpack it with `bzip2 -d`");
  CHECK(why(bytes("04224d186440a7")) == "t: is lz4 data, which is not read: unpack it with `lz4 -d`");
  CHECK(why(bytes("504b0304140000")) == "t: is zip data, which is not read: unpack it with `unzip`");
  CHECK(why(bytes("504b0304140000"), {.format = trace_format::azure, .on_bad_line = bad_lines::skip}) ==
        "t: is zip data, which is not read: unpack it with `unzip`");
}

TEST_CASE("a library that the build did not find is named with its package") {
  CHECK(std::string(lacks_library("a.gz", *find_packing("\x1f\x8b"), "zlib", "zlib1g-dev").what()) ==
        "a.gz: is gzip data, and this program was built without zlib: install it (Debian: zlib1g-dev) and "
        "configure "
        "the build again, or unpack the file with `gzip -d`");
}
