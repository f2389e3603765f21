#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/partition_bytes.hpp>
#include <llmmem/sharding/replicated.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "support/partition_checks.hpp"

using namespace llmmem;
using llmmem_tests::tensors_of;

TEST_CASE("a rank holds its local elements and owns its part of them, each tensor in its own width") {
  const std::vector<tensor_facts> tensors{
      {.name = "w", .shape = tensor_shape::matrix(3, 4), .element_bytes = 2},
      {.name = "m", .shape = tensor_shape::vector(6), .element_bytes = 8}};
  const llmmem::sharding::replicated all(tensors, rank_count{3});
  const flat_uneven cut = flat_uneven::even(tensors, rank_count{2});
  for (std::uint32_t r = 0; r < 3; ++r) {
    CHECK(local_bytes(all, tensors, rank_id{r}) == 72);
    CHECK(owned_bytes(all, tensors, rank_id{r}) == 24);
  }
  CHECK(local_bytes(cut, tensors, rank_id{0}) == 18);
  CHECK(local_bytes(cut, tensors, rank_id{1}) == 54);
  CHECK(owned_bytes(cut, tensors, rank_id{1}) == 54);
}

TEST_CASE("another partition's catalogue is refused with the first difference") {
  const auto tensors = tensors_of({tensor_shape::matrix(2, 3), tensor_shape::vector(4)});
  const llmmem::sharding::replicated p(tensors, rank_count{1});
  const auto one = tensors_of({tensor_shape::matrix(2, 3)});
  const auto other = tensors_of({tensor_shape::matrix(2, 3), tensor_shape::vector(5)});
  CHECK_THROWS_WITH_AS(local_bytes(p, one, rank_id{0}),
                       "local_bytes: a catalogue of 1 tensors for a partition of 2; give the one that it was "
                       "made from",
                       argument_error);
  CHECK_THROWS_WITH_AS(owned_bytes(p, other, rank_id{0}),
                       "owned_bytes: tensor 'w' is 5 x 1 in the catalogue and 4 x 1 in the partition",
                       argument_error);
  const auto wide = tensors_of({tensor_shape::vector(max_bytes), tensor_shape::vector(0)}, 1);
  const llmmem::sharding::replicated huge(wide, rank_count{1});
  CHECK(local_bytes(huge, wide, rank_id{0}) == max_bytes);
  const auto wider = tensors_of({tensor_shape::vector(max_bytes), tensor_shape::vector(0)}, 2);
  CHECK_THROWS_WITH_AS(
      local_bytes(huge, wider, rank_id{0}),
      "local_bytes: 9223372036854775807 x 2 exceeds the limit of 2^63 - 1 bytes; lower one of the two",
      length_error);
}
