#include "replay_trace/read_trace.hpp"

#include <doctest/doctest.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "replay_trace/generator.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace replay_trace;

namespace {

trace read(std::string_view text, const read_options& options = {}) {
  memory_source source(text, "t");
  return read_trace(source, options);
}

std::vector<std::uint64_t> ids(const trace& from, std::size_t request) {
  return {from[request].block_ids.begin(), from[request].block_ids.end()};
}

constexpr std::string_view good =
    R"({"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]})";
constexpr std::string_view header = "TIMESTAMP,ContextTokens,GeneratedTokens";

}  // namespace

TEST_CASE("a Mooncake trace is read unchanged") {
  const trace from =
      read(R"({"timestamp": 27000, "input_length": 1025, "output_length": 52, "hash_ids": [0, 1, 2]}
{"hash_ids":[0],"output_length":1,"input_length":512,"timestamp":3000,"extra":{"a":[1,{"b":null}],"c":"\u00e9"}}
)");
  CHECK(from.format() == trace_format::mooncake);
  CHECK(from.block_tokens() == 512);
  REQUIRE(from.size() == 2);
  CHECK(from[0].timestamp_us == 27'000'000);
  CHECK(from[0].input_tokens == 1025);
  CHECK(from[0].output_tokens == 52);
  CHECK(ids(from, 0) == std::vector<std::uint64_t>{0, 1, 2});
  CHECK(ids(from, 1) == std::vector<std::uint64_t>{0});
  CHECK(distinct_blocks(from) == 3);
  CHECK(longest_request_blocks(from) == 3);
}

TEST_CASE("a Bailian trace is recognised by its chat_id, or by sixteen tokens an id") {
  const trace named = read(R"({"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 17, )"
                           R"("output_length": 9, "type": "text", "turn": 1, "hash_ids": [5, 5]})");
  CHECK(named.format() == trace_format::bailian);
  CHECK(named.block_tokens() == 16);
  CHECK(named[0].timestamp_us == 61'500'000);
  CHECK(ids(named, 0) == std::vector<std::uint64_t>{5, 5});
  CHECK(read(R"({"timestamp": 1, "input_length": 33, "output_length": 9, "hash_ids": [1, 2, 3]})").format() ==
        trace_format::bailian);
  CHECK(read(R"({"timestamp": 1, "input_length": 9, "output_length": 9, "hash_ids": [1]})").format() ==
        trace_format::mooncake);  // fits both
  CHECK(read(good, {.format = trace_format::bailian, .block_tokens = 300}).block_tokens() == 300);
}

TEST_CASE("an Azure trace has lengths only") {
  const std::string text =
      "\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-11-16 18:15:46.6805900,374,44\r\n"
      "\r\n"
      "\"2023-11-16 18:15:47\",\"396\",109";
  const trace from = read(text);
  CHECK(from.format() == trace_format::azure);
  CHECK_FALSE(from.has_block_ids());
  REQUIRE(from.size() == 2);
  CHECK(from[0].input_tokens == 374);
  CHECK(from[0].output_tokens == 44);
  CHECK(from[1].input_tokens == 396);
  CHECK(from[1].timestamp_us - from[0].timestamp_us == 319'410);
}

TEST_CASE("sessions without timestamps are timed by their delays") {
  const trace from = read(
      R"({"session_id": "a", "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}
{"session_id": "b", "input_length": 600, "output_length": 2, "hash_ids": [0, 2], "delay": null, "timestamp": null}
{"session_id": "a", "delay": 1500, "input_length": 1030, "output_length": 9, "hash_ids": [0, 1, 3]}
{"session_id": "b", "delay": 0.5, "input_length": 600, "output_length": 2, "hash_ids": [0, 2]}
{"session_id": "a", "delay": 250, "input_length": 1030, "output_length": 9, "hash_ids": [0, 1, 3]}
{"session_id": 7, "delay": 3, "input_length": 1, "output_length": 1, "hash_ids": [9]}
)");
  CHECK(from.format() == trace_format::mooncake);
  CHECK(from.block_tokens() == 512);
  CHECK_FALSE(from.has_timestamps());
  REQUIRE(from.size() == 6);
  const std::uint64_t times[] = {0, 0, 1'500'000, 500, 1'750'000, 3'000};
  for (std::size_t i = 0; i < from.size(); ++i)
    CHECK(from[i].timestamp_us == times[i]);
}

TEST_CASE("a timestamp takes precedence over a delay, and later turns count from it") {
  const trace from = read(
      R"({"session_id": "s", "timestamp": 12.5, "delay": 3.0, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}
{"session_id": "s", "delay": 2, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}
{"session_id": "s", "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}
{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}
)");
  CHECK(from.has_timestamps());
  REQUIRE(from.size() == 4);
  CHECK(from[0].timestamp_us == 12'500);
  CHECK(from[1].timestamp_us == 14'500);
  CHECK(from[2].timestamp_us == 14'500);
  CHECK(from[3].timestamp_us == 1'000);
}

TEST_CASE("a trace may have no timestamps") {
  const std::string line = R"({"input_length": 600, "output_length": 3, "hash_ids": [7, 8]})";
  const trace from = read(line + "\n" + line);
  CHECK(from.format() == trace_format::mooncake);
  CHECK(from.size() == 2);
  CHECK_FALSE(from.has_timestamps());
}

TEST_CASE("the first line that shows it distinguishes ids of full blocks only from ids of all blocks") {
  const auto line = [](int input, std::string_view some_ids) {
    return R"({"timestamp": 0, "input_length": )" + std::to_string(input) +
           R"(, "output_length": 5, "hash_ids": [)" + std::string(some_ids) + "]}\n";
  };
  const trace floor = read(line(1024, "0, 1") + line(1030, "0, 1") + line(100, ""));
  CHECK(floor.format() == trace_format::mooncake);
  CHECK(floor.block_tokens() == 512);
  CHECK(floor[1].hashed_tokens == 1024);
  CHECK(floor[2].hashed_tokens == 0);
  CHECK(read(line(1030, "0, 1, 2"))[0].hashed_tokens == 1030);

  const trace bailian = read(line(70, "1, 2, 3, 4"));
  CHECK(bailian.format() == trace_format::bailian);
  CHECK(bailian[0].hashed_tokens == 64);
  CHECK(
      read(
          R"({"chat_id": 1, "timestamp": 0, "input_length": 70, "output_length": 1, "hash_ids": [1, 2, 3, 4]})")
          .block_tokens() == 16);
  CHECK(read(line(70, "1, 2"), {.block_tokens = 32})[0].hashed_tokens == 64);

  const auto why = [&](const std::string& text, const read_options& options = {}) -> std::string {
    try {
      static_cast<void>(read(text, options));
    } catch (const trace_error& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(why(line(1030, "0, 1") + line(600, "0, 1"))
            .starts_with(
                "t:2:59: hash_ids has 2 ids, but input_length 600 makes 1 full blocks of 512 tokens, as they "
                "are counted since line 1; near "));
  CHECK(why(line(512, "0") + line(600, "0, 1") + line(1030, "0, 1"))
            .starts_with(
                "t:3:60: hash_ids has 2 ids, but input_length 1030 makes 3 blocks of 512 tokens, as they are "
                "counted since line 2; near "));
  CHECK(why(line(5000, "0, 1")).find("makes 10 blocks of 512 tokens; it would fit --block-tokens 2048;") !=
        std::string::npos);
  CHECK(why(line(600, "0, 1, 2, 3, 4"), {.block_tokens = 512}).find("; it would fit --block-tokens 128;") !=
        std::string::npos);
  // A line that is passed over settles nothing.
  CHECK(read(line(1 << 20, "0") + line(600, "0, 1") + line(600, "0") + line(601, "0, 1"),
             {.on_bad_line = bad_lines::skip})
            .size() == 2);
}

TEST_CASE("a Mooncake trace may have blocks of sixteen tokens") {
  const std::string line =
      R"({"timestamp": 1, "input_length": 64, "output_length": 5, "hash_ids": [0, 1, 2, 3]})";
  const trace from = read(line, {.format = trace_format::mooncake});
  CHECK(from.format() == trace_format::mooncake);
  CHECK(from.block_tokens() == 16);
  CHECK(from[0].timestamp_us == 1'000);
  CHECK(read(R"({"session_id": "s", "input_length": 33, "output_length": 9, "hash_ids": [1, 2, 3]})")
            .format() == trace_format::mooncake);
  // The first line fits both sizes, the second one.
  const trace later = read(R"({"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1]})"
                           "\n" +
                           line);
  CHECK(later.block_tokens() == 16);
}

TEST_CASE("ids may be signed, but a trace cannot have both negative ids and ids past 2^63") {
  const std::string negative =
      R"({"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [-8446744073709551615, 12]})"
      "\n";
  const std::string large =
      R"({"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [9223372036854775808, 12]})"
      "\n";
  CHECK(ids(read(negative), 0) == std::vector<std::uint64_t>{10000000000000000001ULL, 12});
  CHECK(ids(read(large), 0) == std::vector<std::uint64_t>{9223372036854775808ULL, 12});
  CHECK(ids(read(R"({"timestamp": 0, "input_length": 1536, "output_length": 1, )"
                 R"("hash_ids": [-9223372036854775808, -0, -1]})"),
            0) == std::vector<std::uint64_t>{9223372036854775808ULL, 0, ~0ULL});
  CHECK_THROWS_WITH_AS(
      read(negative + large),
      doctest::Contains("t:2:60: hash_ids are below 0 in line 1 and above 2^63 - 1 in line 2: write "
                        "all of them signed or all of them unsigned; near "),
      trace_error);
  CHECK_THROWS_AS(read(large + negative), trace_error);
  CHECK(read(large + negative + large, {.on_bad_line = bad_lines::skip}).size() == 2);
}

TEST_CASE("a malformed session, delay or timestamp is refused by file, line, column and reason") {
  const auto why = [&](std::string_view fields) -> std::string {
    try {
      static_cast<void>(read(std::string(good) + "\n{" + std::string(fields) +
                             R"("input_length": 600, "output_length": 3, "hash_ids": [7, 8]})"));
    } catch (const trace_error& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(why(R"("session_id": "s", )") == "accepted");
  CHECK(why(R"("delay": 3, )") == "accepted");
  CHECK(why("").starts_with(
      "t:2:1: field timestamp is missing, which the first request has; only a request with "
      "session_id or delay may go without; near "));
  CHECK(why(R"("timestamp": null, )").starts_with("t:2:1: field timestamp is missing"));
  CHECK(why(R"("session_id": null, "delay": null, )").starts_with("t:2:1: field timestamp is missing"));
  CHECK(why(R"("timestamp": nul, )").starts_with("t:2:15: expected a value"));
  CHECK(why(R"("session_id": "s", "session_id": "s", )")
            .starts_with("t:2:21: field session_id stands there twice"));
  CHECK(why(R"("session_id": [1], )").starts_with("t:2:16: session_id is not a number: [1"));
  CHECK(why(R"("session_id": "\x", )") != "accepted");
  CHECK(why(R"("session_id": ")" + std::string(257, 's') + R"(", )")
            .starts_with("t:2:2: session_id has 257 bytes, the most is 256; near "));
  CHECK(why(R"("delay": -1, )").starts_with("t:2:11: delay is negative: -1"));
  CHECK(why(R"("delay": "1", )").starts_with("t:2:11: delay is not a number: "));
  CHECK(why(R"("delay": 1e300, )").starts_with("t:2:2: delay is more than 285 years"));
  CHECK(why(R"("timestamp": 1e300, )").starts_with("t:2:2: timestamp is more than 285 years"));
  const std::string turn =
      R"({"session_id": "s", "delay": 8e12, "input_length": 1, "output_length": 3, "hash_ids": [7]})"
      "\n";
  CHECK_THROWS_WITH_AS(read(turn + turn),
                       doctest::Contains("t:2:1: the delays of its session are more than 285 years"),
                       trace_error);
}

TEST_CASE("a BurstGPT trace is read by the names of its columns") {
  const trace from = read(
      "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
      "5,ChatGPT,472,18,490,Conversation log\n"
      "45.5,GPT-4,1087,230,1317,API log\n");
  CHECK(from.format() == trace_format::burstgpt);
  CHECK(from.block_tokens() == 16);
  CHECK_FALSE(from.has_block_ids());
  CHECK(from.has_timestamps());
  REQUIRE(from.size() == 2);
  CHECK(from[0].timestamp_us == 5'000'000);
  CHECK(from[0].input_tokens == 472);
  CHECK(from[0].output_tokens == 18);
  CHECK(from[1].timestamp_us == 45'500'000);
  // Other columns, another order, quotes.
  const trace other = read(
      "\xef\xbb\xbfSession ID,Response tokens,\"Timestamp\",Elapsed time,Request tokens\r\n"
      ",7,\"1e1\",\"a, b\",9\r\n");
  REQUIRE(other.size() == 1);
  CHECK(other[0].timestamp_us == 10'000'000);
  CHECK(other[0].input_tokens == 9);
  CHECK(other[0].output_tokens == 7);
}

TEST_CASE("a malformed line of a BurstGPT trace is refused by file, line, column and reason") {
  const auto why = [&](std::string_view line, const read_options& options = {}) -> std::string {
    try {
      static_cast<void>(read(
          "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + std::string(line) + "\n",
          options));
    } catch (const trace_error& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(why("5,ChatGPT,472,18,491,Conversation log") ==
        "t:2:18: Total tokens is 491, but Request tokens and Response tokens make 490; near "
        "\"5,ChatGPT,472,18,491,Conversation log\"");
  CHECK(why("5,ChatGPT,472").starts_with("t:2:14: 3 of 6 fields: Response tokens is missing; near "));
  CHECK(why("5,ChatGPT,472,18,490,log,log").starts_with("t:2:25: more than 6 fields; near "));
  CHECK(why("-5,ChatGPT,472,18,490,log")
            .starts_with("t:2:1: Timestamp is not a time in seconds, such as 45 or 45.5: -5; near "));
  for (const char* time : {"", "inf", "nan", "0x5", "5s", " 5", ".5", "1e999", "2023-11-16 18:15:46"}) {
    CAPTURE(time);
    CHECK(why(std::string(time) + ",ChatGPT,472,18,490,log").starts_with("t:2:1: Timestamp is not a time"));
  }
  CHECK(why("1e300,ChatGPT,472,18,490,log").starts_with("t:2:1: Timestamp is more than 285 years"));
  CHECK(why("5,ChatGPT,-472,18,490,log").starts_with("t:2:11: Request tokens is negative: -472; near "));
  CHECK(why("5,ChatGPT,472,1.5,490,log")
            .starts_with("t:2:15: Response tokens is not a whole number: 1.5; near "));
  CHECK(why("5,ChatGPT,99999999,18,490,log")
            .starts_with("t:2:11: Request tokens is 99999999, the most a request"));
  CHECK(why("5,\"ChatGPT,472,18,490,log").starts_with("t:2:3: a quote is not closed"));
  CHECK(why("5,ChatGPT,472,18,490,log", {.format = trace_format::burstgpt}) == "accepted");
  CHECK_THROWS_WITH_AS(
      read("5,ChatGPT,472,18,490,log\n", {.format = trace_format::burstgpt}),
      doctest::Contains("t:1:1: no header yet with the columns Timestamp, Request tokens and Response "
                        "tokens, each of them once; near "),
      trace_error);
}

TEST_CASE("a malformed JSON line is refused by file, line, column and reason") {
  const std::string before = std::string(good) + "\n";
  const auto why = [&](std::string_view line) -> std::string {
    try {
      static_cast<void>(read(before + std::string(line) + "\n" + std::string(good)));
    } catch (const trace_error& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(
      why(R"({"timestamp": 5, "input_length": -600, "output_length": 3, "hash_ids": [7, 8]})") ==
      R"(t:2:34: input_length is negative: -600; near "...mp\": 5, \"input_length\": -600, \"output_length\": 3, \"hash_...")");
  CHECK(why(R"({"timestamp": 5, "input_length": 600, "hash_ids": [7, 8]})")
            .starts_with("t:2:1: field output_length is missing; near "));
  CHECK(why(R"({"input_length": 600, "output_length": 3, "hash_ids": [7, 8]})")
            .starts_with("t:2:1: field timestamp is missing"));
  CHECK(why(R"({"timestamp": 5, "input_length": 600, "output_length": 3})")
            .starts_with("t:2:1: field hash_ids is missing"));
  CHECK(
      why(R"({"timestamp": 5, "timestamp": 6, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]})")
          .starts_with("t:2:18: field timestamp stands there twice"));
  CHECK(why(R"({"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7]})")
            .starts_with("t:2:59: hash_ids has 1 ids, but input_length 600 makes 2 blocks of 512 tokens"));
  CHECK(why(R"({"timestamp": 5, "input_length": "600", "output_length": 3, "hash_ids": [7, 8]})")
            .starts_with("t:2:34: input_length is not a number: \\\"600\\\""));
  CHECK(why(R"({"timestamp": 5, "input_length": 600.5, "output_length": 3, "hash_ids": [7, 8]})")
            .starts_with("t:2:34: input_length is not a whole number: 600.5"));
  CHECK(why(R"({"timestamp": 5, "input_length": 18446744073709551616, "output_length": 3, "hash_ids": []})")
            .starts_with("t:2:34: input_length passes 2^64 - 1: 18446744073709551616"));
  CHECK(why(R"({"timestamp": 5, "input_length": 99999999, "output_length": 3, "hash_ids": []})")
            .starts_with("t:2:18: input_length is 99999999, the most a request may have is 16777216 tokens"));
  CHECK(why(R"({"timestamp": 5, "input_length": 1, "output_length": 3, "hash_ids": [-9223372036854775809]})")
            .find("hash_ids passes -2^63: -9223372036854775809") != std::string::npos);
  CHECK(why(R"({"timestamp": 5, "input_length": 1, "output_length": 3, "hash_ids": [-99999999999999999999]})")
            .find("hash_ids passes -2^63: -99999999999999999999") != std::string::npos);
  CHECK(why(R"({"timestamp": 5, "input_length": 1, "output_length": 3, "hash_ids": [-]})")
            .find("hash_ids is not a number: -") != std::string::npos);
  CHECK(why(R"({"timestamp": 5, "input_length": 1, "output_length": 3, "hash_ids": [--1]})")
            .find("hash_ids is not a number: --1") != std::string::npos);
  CHECK(why(R"({"timestamp": 5, "input_length": 1, "output_length": 3, "hash_ids": [-1.5]})")
            .find("hash_ids is not a whole number: -1.5") != std::string::npos);
  CHECK(why(R"({"timestamp": 5, "input_length": 1, "output_length": 3, "hash_ids": [-01]})")
            .find("hash_ids has a leading zero: -01") != std::string::npos);
  CHECK(why(R"({"timestamp": 5, "input_length": 1, "output_length": 3, "hash_ids": ["7"]})")
            .find(R"(hash_ids is not a number: \"7\")") != std::string::npos);
  CHECK(why(R"({"timestamp": -5, "input_length": 1, "output_length": 3, "hash_ids": [1]})")
            .find("timestamp is negative: -5") != std::string::npos);
  CHECK(why(R"({"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]} x)")
            .find("something follows the end of the object") != std::string::npos);
  CHECK(why(R"({"timestamp": 5,)").find("but the line ends") != std::string::npos);
  CHECK(why("[1, 2]").find("a JSON object must begin with '{'") != std::string::npos);
  CHECK(why(std::string("{\"timestamp\": 5,\0}", 17)).find("a NUL byte: the file is binary or damaged") !=
        std::string::npos);
  CHECK(why("{\"a\": " + std::string(100, '[') + std::string(100, ']') + "}")
            .find("nested more than 64 levels deep") != std::string::npos);
  CHECK(why("{\"a\xff\": 1}") != "accepted");
  CHECK(why("{\"a\\ud800\": 1}") != "accepted");
  CHECK(why("{\"a\": 01}") != "accepted");
  CHECK(why("{\"a\": nul}") != "accepted");
  CHECK(why("{\"a\": 1,}") != "accepted");
}

TEST_CASE("a malformed CSV line is refused by file, line, column and reason") {
  const auto why = [&](std::string_view line) -> std::string {
    try {
      static_cast<void>(read(std::string(header) + "\n" + std::string(line) + "\n"));
    } catch (const trace_error& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(why("2023-11-16 18:15:46,-374,44") ==
        R"(t:2:21: ContextTokens is negative: -374; near "2023-11-16 18:15:46,-374,44")");
  CHECK(why("2023-11-16 18:15:46,374").find("2 of 3 fields: GeneratedTokens is missing") !=
        std::string::npos);
  CHECK(why("2023-11-16 18:15:46,374,44,5").find("more than 3 fields") != std::string::npos);
  CHECK(why("2023-11-16 18:15:46,,44").find("ContextTokens is not a whole number: nothing there") !=
        std::string::npos);
  CHECK(why("2023-11-16 18:15:46,3e2,44").find("ContextTokens is not a whole number: 3e2") !=
        std::string::npos);
  CHECK(why("2023-13-16 18:15:46,374,44") != "accepted");
  CHECK(why("2023-02-30 18:15:46,374,44") != "accepted");
  CHECK(why("yesterday,374,44") != "accepted");
  CHECK(why("\"2023-11-16 18:15:46,374,44").find("a quote is not closed") != std::string::npos);
}

TEST_CASE("the error for a file that is not a trace says what the file is") {
  CHECK_THROWS_WITH_AS(read(""), "t: no request in it: it is empty", trace_error);
  CHECK_THROWS_WITH_AS(read("\n \n"), "t: no request in it: it is empty", trace_error);
  CHECK_THROWS_WITH_AS(read(header), "t: no request in it, only the header", trace_error);
  CHECK_THROWS_WITH_AS(
      read("hello\n"),
      "t:1:1: cannot tell the format: neither a JSON object nor the header "
      "TIMESTAMP,ContextTokens,GeneratedTokens (Azure) nor one with Timestamp, Request tokens "
      "and Response tokens (BurstGPT); name it with --format; near \"hello\"",
      trace_error);
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 132054902\n";
  for (const auto& options : {read_options{}, read_options{.format = trace_format::bailian},
                              read_options{.on_bad_line = bad_lines::skip}}) {
    CHECK_THROWS_WITH_AS(read(pointer, options), "t: is a Git LFS pointer, not the data: run `git lfs pull`",
                         trace_error);
  }
  CHECK_THROWS_AS(read("\x1f\x8b"), trace_error);
  CHECK_THROWS_AS(read("Timestamp,Request tokens"), trace_error);
  CHECK_THROWS_AS(read("Timestamp,Request tokens,Response tokens,Timestamp"), trace_error);
  CHECK_THROWS_WITH_AS(read("Timestamp,Request tokens,Response tokens\n"),
                       "t: no request in it, only the header", trace_error);
  CHECK_THROWS_AS(read(good, {.format = trace_format::azure}), trace_error);
  CHECK_THROWS_AS(read(good, {.block_tokens = 0}), llmmem::length_error);
  CHECK_THROWS_WITH_AS(read_trace_file("/nonexistent/trace"),
                       "/nonexistent/trace: cannot open it: No such file or directory", llmmem::system_error);
  CHECK_THROWS_WITH_AS(read_trace_file("/"), "/: is a directory; name one trace file", llmmem::system_error);
}

TEST_CASE("malformed lines are skipped on request and counted, and the first is kept") {
  const trace from =
      read(std::string(good) + "\n{\n" + std::string(good) + "\nrubbish\n", {.on_bad_line = bad_lines::skip});
  CHECK(from.size() == 2);
  CHECK(from.skipped().count == 2);
  CHECK(from.skipped().first.starts_with("t:2:2: "));
  CHECK_THROWS_AS(read("{\n{\n", {.on_bad_line = bad_lines::skip}), trace_error);  // nothing is left
}

namespace {

/// A gigabyte without a newline, made as it is read.
struct endless_source {
  std::uint64_t left = std::uint64_t{1} << 30;
  std::uint64_t given = 0;
  std::size_t read(std::span<char> into) {
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(into.size(), left));
    std::fill_n(into.begin(), count, 'x');
    left -= count;
    given += count;
    return count;
  }
  [[nodiscard]] std::string_view name() const { return "endless"; }
};

}  // namespace

TEST_CASE("a line of a gigabyte is refused after the limit, not read into memory") {
  endless_source source;
  CHECK_THROWS_WITH_AS(read_trace(source, {.max_line_bytes = 1 << 20}),
                       doctest::Contains("endless:1:1: the line is longer than 1048576 bytes"), trace_error);
  CHECK(source.given < (2U << 20));
}

TEST_CASE("a line at the limit is read, one byte more is not") {
  const std::string text(good);
  CHECK(read(text + "\r\n", {.max_line_bytes = text.size()}).size() == 1);
  CHECK_THROWS_AS(read(text, {.max_line_bytes = text.size() - 1}), trace_error);
}

TEST_CASE("lines are the same, regardless of how the source cuts them") {
  struct dripping_source {
    std::string_view rest;
    llmmem_tests::random_numbers random;
    std::size_t read(std::span<char> into) {
      const std::size_t count =
          std::min({into.size(), rest.size(), static_cast<std::size_t>(1 + random.below(std::uint64_t{7}))});
      std::copy_n(rest.begin(), count, into.begin());
      rest.remove_prefix(count);
      return count;
    }
    [[nodiscard]] std::string_view name() const { return "drip"; }
  };
  for (const auto seed : llmmem_tests::seeds(50)) {
    CAPTURE(seed);
    llmmem_tests::random_numbers random(seed);
    std::vector<std::string> lines;
    std::string text;
    for (int i = 0; i < 20; ++i) {
      lines.emplace_back(random.below(std::uint64_t{12}), static_cast<char>('a' + i));
      text += lines.back() + (random.once_in(2) ? "\n" : "\r\n");
    }
    dripping_source source{text, llmmem_tests::random_numbers(seed)};
    line_reader reader(source, 8);
    for (const std::string& expected : lines) {
      const auto line = reader.next();
      REQUIRE(line);
      REQUIRE(line->whole == (expected.size() <= 8));
      REQUIRE(line->text == expected.substr(0, 8));
    }
    CHECK_FALSE(reader.next());
  }
}

TEST_CASE("the real traces have the counts of their descriptions") {
  const char* folder = std::getenv("LLMMEM_DATA_DIR");
  const std::string data = folder == nullptr ? "" : folder;
  if (data.empty() || !std::filesystem::exists(data + "/mooncake_conversation_trace.jsonl")) {
    MESSAGE("NOT CHECKED on real data: LLMMEM_DATA_DIR has no traces");
    return;
  }
  const trace mooncake = read_trace_file(data + "/mooncake_conversation_trace.jsonl");
  CHECK(mooncake.format() == trace_format::mooncake);
  CHECK(mooncake.size() == 12'031);
  CHECK(mooncake.block_ids().size() == 288'500);
  CHECK(distinct_blocks(mooncake) == 182'790);
  const trace azure = read_trace_file(data + "/azure_llm_inference_2023_conv.csv");
  CHECK(azure.format() == trace_format::azure);
  CHECK(azure.size() == 19'366);
}
