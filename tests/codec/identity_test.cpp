#include <llmmem/codec/identity.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>

using namespace llmmem;

TEST_CASE("the identity's form is the chunk, and a form of another size is refused with both sizes") {
  const identity_codec codec(16);
  const std::array<std::byte, 3> chunk{std::byte{1}, std::byte{2}, std::byte{3}};
  std::array<std::byte, 3> form{};
  CHECK(codec.encode(chunk, form).value() == 3);
  CHECK(form == chunk);
  std::array<std::byte, 4> out{};
  CHECK(codec.decode(form, out).error().message() ==
        "identity_codec: the encoded bytes are damaged at block 0: 3 found, 4 expected; discard the decoded "
        "bytes, and fetch the encoded ones again");
  CHECK(codec.metadata_bytes() == 0);
}
