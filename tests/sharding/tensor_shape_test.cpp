#include <llmmem/sharding/tensor_shape.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using namespace llmmem;

TEST_CASE("a shape is its first dimension by the product of the others") {
  struct example {
    std::vector<std::uint64_t> dimensions;
    std::uint64_t rows, columns, elements;
  };
  for (const example& each :
       {example{{}, 1, 1, 1}, example{{7}, 7, 1, 7}, example{{0}, 0, 1, 0}, example{{3, 4}, 3, 4, 12},
        example{{0, 4}, 0, 4, 0}, example{{3, 0}, 3, 0, 0}, example{{2, 3, 4}, 2, 12, 24},
        example{{2, max_bytes, max_bytes, 0}, 2, 0, 0}}) {
    const tensor_shape shape = tensor_shape::of(each.dimensions);
    CHECK(shape.rows() == each.rows);
    CHECK(shape.columns() == each.columns);
    CHECK(shape.elements() == each.elements);
    CHECK(shape.dimensions() == each.dimensions.size());
  }
  CHECK(tensor_shape::scalar() == tensor_shape::of({}));
  CHECK(tensor_shape::vector(7) == tensor_shape::of(std::vector<std::uint64_t>{7}));
  CHECK(tensor_shape::matrix(3, 4) == tensor_shape::of(std::vector<std::uint64_t>{3, 4}));
  CHECK(tensor_shape::vector(max_bytes).elements() == max_bytes);
}

TEST_CASE("a shape with too many elements is refused with the product that exceeds the limit") {
  CHECK_THROWS_WITH_AS(tensor_shape::matrix(std::uint64_t{1} << 32, std::uint64_t{1} << 31),
                       "tensor_shape: rows x columns: 4294967296 x 2147483648 exceeds the limit of 2^63 - 1 "
                       "bytes; lower one of the two",
                       length_error);
  CHECK_THROWS_AS(tensor_shape::vector(max_bytes + 1), length_error);
  CHECK_THROWS_AS(tensor_shape::matrix(max_bytes + 1, 0), length_error);
  CHECK_THROWS_AS(tensor_shape::of(std::vector<std::uint64_t>{0, max_bytes, 2}), length_error);
  const tensor_facts facts{.name = "w", .shape = tensor_shape::vector(max_bytes), .element_bytes = 2};
  CHECK_THROWS_AS(facts.bytes(), length_error);
}
