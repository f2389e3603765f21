// tensor_cores_gpu_test.cu: `mma.sync` against the arithmetic of tensor cores, bit for bit. The reference
// adds in floating point what the machine adds in integers, and takes the places of elements from the PTX
// ISA. The program also runs on a device, whose sums it then checks.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ptx_machine/checks.cuh"

namespace {

using llmmem_tests::check;
using llmmem_tests::device_array;
using std::uint32_t;

enum class element { f16, bf16, e4m3, e5m2 };
constexpr uint32_t most_depth = 32;

struct shape {
  element left, right;
  uint32_t depth;
};

/// Operands of a product and its result, in rows and columns.
struct tile {
  uint32_t a[16][most_depth], b[most_depth][8], c[16][8], d[16][8];
};
/// The same as lanes have it in registers.
struct fragments {
  uint32_t a[4], b[2], c[4], d[4];
};

#define LLMMEM_MMA_2(shape, types)                                                                         \
  asm volatile(                                                                                            \
      "mma.sync.aligned." shape ".row.col.f32." types ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};" \
      : "=r"(at.d[0]), "=r"(at.d[1]), "=r"(at.d[2]), "=r"(at.d[3])                                         \
      : "r"(at.a[0]), "r"(at.a[1]), "r"(at.b[0]), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]))
#define LLMMEM_MMA_4(shape, types)                                                                   \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types                                       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"                      \
               : "=r"(at.d[0]), "=r"(at.d[1]), "=r"(at.d[2]), "=r"(at.d[3])                          \
               : "r"(at.a[0]), "r"(at.a[1]), "r"(at.a[2]), "r"(at.a[3]), "r"(at.b[0]), "r"(at.b[1]), \
                 "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]))

/// One warp a block; a block for each product.
__global__ void multiply(fragments* all, element left, element right, uint32_t depth) {
  fragments& at = all[blockIdx.x * 32 + threadIdx.x];
  if (left == element::f16 && depth == 8) LLMMEM_MMA_2("m16n8k8", "f16.f16");
  if (left == element::f16 && depth == 16) LLMMEM_MMA_4("m16n8k16", "f16.f16");
  if (left == element::bf16 && depth == 8) LLMMEM_MMA_2("m16n8k8", "bf16.bf16");
  if (left == element::bf16 && depth == 16) LLMMEM_MMA_4("m16n8k16", "bf16.bf16");
#if __CUDA_ARCH__ >= 890
  if (depth == 32) {
    if (left == element::e4m3 && right == element::e4m3) LLMMEM_MMA_4("m16n8k32", "e4m3.e4m3");
    if (left == element::e4m3 && right == element::e5m2) LLMMEM_MMA_4("m16n8k32", "e4m3.e5m2");
    if (left == element::e5m2 && right == element::e4m3) LLMMEM_MMA_4("m16n8k32", "e5m2.e4m3");
    if (left == element::e5m2 && right == element::e5m2) LLMMEM_MMA_4("m16n8k32", "e5m2.e5m2");
  }
#endif
}

bool is_8_bit(element of) {
  return of == element::e4m3 || of == element::e5m2;
}
uint32_t bits_of(element of) {
  return is_8_bit(of) ? 8 : 16;
}

/// Runs a tile's product, through the fragments that the PTX ISA describes.
class products {
 public:
  explicit products(const shape& of) : shape_(of) {}

  void run(std::vector<tile>& tiles) const {
    std::vector<fragments> lanes(tiles.size() * 32);
    for (std::size_t n = 0; n < tiles.size(); ++n)
      each(tiles[n], &lanes[n * 32],
           [](uint32_t& word, uint32_t shift, uint32_t& value) { word |= value << shift; });
    device_array<fragments> on_device(lanes);
    multiply<<<static_cast<unsigned>(tiles.size()), 32>>>(on_device.data(), shape_.left, shape_.right,
                                                          shape_.depth);
    check(cudaGetLastError(), "multiply");
    lanes = on_device.host();
    for (std::size_t n = 0; n < tiles.size(); ++n) {
      for (uint32_t lane = 0; lane < 32; ++lane)
        for (uint32_t i = 0; i < 4; ++i)
          tiles[n].d[lane / 4 + (i >= 2 ? 8 : 0)][lane % 4 * 2 + (i & 1)] = lanes[n * 32 + lane].d[i];
    }
  }

 private:
  template <class Act>
  void each(tile& of, fragments* lanes, const Act& act) const {
    const uint32_t bits = bits_of(shape_.left), in_word = 32 / bits;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t g = lane / 4, t = lane % 4;
      for (uint32_t i = 0; i < 16 * shape_.depth / 32; ++i) {
        // 16 bits: rows g, g, g+8, g+8, and so on; 8 bits: the same of four elements.
        const uint32_t row = g + (i / in_word % 2 != 0 ? 8 : 0);
        const uint32_t column = in_word * t + i % in_word + (i >= 2 * in_word ? 4 * in_word : 0);
        act(lanes[lane].a[i / in_word], i % in_word * bits, of.a[row][column]);
      }
      for (uint32_t i = 0; i < 8 * shape_.depth / 32; ++i) {
        const uint32_t row = in_word * t + i % in_word + (i >= in_word ? 4 * in_word : 0);
        act(lanes[lane].b[i / in_word], i % in_word * bits, of.b[row][g]);
      }
      for (uint32_t i = 0; i < 4; ++i)
        act(lanes[lane].c[i], 0, of.c[g + (i >= 2 ? 8 : 0)][2 * t + (i & 1)]);
    }
  }
  shape shape_;
};

// ---- the reference ----

double value_of(element of, uint32_t bits) {
  const int digits = of == element::f16 ? 10 : of == element::bf16 ? 7 : of == element::e4m3 ? 3 : 2;
  const int width = static_cast<int>(bits_of(of));
  const int field_bits = width - 1 - digits, bias = (1 << (field_bits - 1)) - 1;
  const int field = static_cast<int>(bits >> digits) & ((1 << field_bits) - 1);
  const int fraction = static_cast<int>(bits) & ((1 << digits) - 1);
  const double sign = (bits >> (width - 1) & 1) != 0 ? -1.0 : 1.0;
  if (of == element::e4m3 && (bits & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  if (of != element::e4m3 && field == (1 << field_bits) - 1)
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  if (field == 0) return sign * std::ldexp(fraction, 1 - bias - digits);
  return sign * std::ldexp(fraction + (1 << digits), field - bias - digits);
}
int least_exponent(element of) {
  return of == element::bf16 ? -126 : of == element::e4m3 ? -6 : -14;
}
int exponent_of(double value, int least) {
  return value == 0 ? -126 : std::max(std::ilogb(value), least);
}
/// Of one step: the terms cut off at `fraction` bits below the largest exponent, the sum at `result` bits.
float added(const std::vector<double>& a, const std::vector<double>& b, const shape& of, float c,
            int fraction, int result) {
  double plain = c;
  for (std::size_t k = 0; k < a.size(); ++k)
    plain += a[k] * b[k];
  if (plain != plain) return std::bit_cast<float>(0x7FFFFFFF);
  if (std::isinf(plain)) return static_cast<float>(plain);
  int most = exponent_of(static_cast<double>(c), -126);
  for (std::size_t k = 0; k < a.size(); ++k)
    most = std::max(most,
                    exponent_of(a[k], least_exponent(of.left)) + exponent_of(b[k], least_exponent(of.right)));
  double units = std::trunc(std::ldexp(static_cast<double>(c), fraction - most));
  for (std::size_t k = 0; k < a.size(); ++k)
    units += std::trunc(std::ldexp(a[k] * b[k], fraction - most));
  if (units == 0) return 0;
  const double sum = std::ldexp(units, most - fraction);
  const int last = std::max(std::ilogb(sum), -126) - result;
  const double kept = std::ldexp(std::trunc(std::ldexp(sum, -last)), last);
  if (std::fabs(kept) >= 0x1p128) return static_cast<float>(kept < 0 ? -HUGE_VAL : HUGE_VAL);
  return static_cast<float>(kept + 0.0);
}
struct rules {
  int fraction = 25, result = 23;
  uint32_t step = 16;
};
rules rules_of(int architecture, const shape& of) {
  const bool is_small = is_8_bit(of.left);
  if (architecture < 90 && is_small) return {13, 13, std::min(of.depth, 16U)};
  if (architecture < 90) return {24, 23, std::min(of.depth, 8U)};
  return {25, 23, of.depth};
}
float reference(const tile& of, const shape& shape, const rules& by, uint32_t row, uint32_t column) {
  float sum = std::bit_cast<float>(of.c[row][column]);
  for (uint32_t first = 0; first < shape.depth; first += by.step) {
    std::vector<double> a, b;
    for (uint32_t k = first; k < first + by.step; ++k) {
      a.push_back(value_of(shape.left, of.a[row][k]));
      b.push_back(value_of(shape.right, of.b[k][column]));
    }
    sum = added(a, b, shape, sum, by.fraction, by.result);
  }
  return sum;
}

// ---- inputs ----

enum class inputs { whole_range, near_one, cancelling, tiny, huge, some_special, any_bits };
constexpr std::array all_inputs{inputs::whole_range, inputs::near_one,     inputs::cancelling, inputs::tiny,
                                inputs::huge,        inputs::some_special, inputs::any_bits};

class maker {
 public:
  explicit maker(std::uint64_t seed) : random_(seed) {}

  tile make(const shape& of, inputs kind) {
    tile made{};
    for (auto& row : made.a)
      for (uint32_t& each : row)
        each = number(of.left, kind);
    for (auto& row : made.b)
      for (uint32_t& each : row)
        each = number(of.right, kind);
    for (auto& row : made.c)
      for (uint32_t& each : row)
        each = accumulator(kind);
    if (kind == inputs::cancelling) {
      // Every second product takes the one before back, but for a last bit now and then.
      for (uint32_t k = 1; k < of.depth; k += 2) {
        for (auto& row : made.a)
          row[k] = row[k - 1] ^ (random_() % 4 == 0 ? 1U : 0U);
        for (uint32_t column = 0; column < 8; ++column)
          made.b[k][column] = made.b[k - 1][column] ^ 1U << (bits_of(of.right) - 1);
      }
      for (auto& row : made.c)
        for (uint32_t& each : row)
          if (random_() % 2 == 0) each = 0;
    }
    return made;
  }

 private:
  uint32_t number(element of, inputs kind) {
    const uint32_t width = bits_of(of), digits = of == element::f16    ? 10
                                                 : of == element::bf16 ? 7
                                                 : of == element::e4m3 ? 3
                                                                       : 2;
    const uint32_t field_bits = width - 1 - digits, fields = 1U << field_bits;
    const uint32_t bias = fields / 2 - 1, any = static_cast<uint32_t>(random_());
    const uint32_t outside = any >> 24 & (1U << digits) - 1, sign = any & 1U << (width - 1);
    const auto with = [&](uint32_t field) { return sign | field << digits | outside; };
    const auto among = [&](uint32_t first, uint32_t count) { return first + (any >> 16) % count; };
    switch (kind) {
      case inputs::near_one:
      case inputs::cancelling:
        return with(among(bias - std::min(bias - 1, 4U), std::min(bias - 1, 4U) + 4));
      case inputs::tiny:
        return any % 8 == 0 ? sign : with(among(0, of == element::bf16 ? 70 : 3));
      case inputs::huge:
        return with(among(fields - 4, 3));
      case inputs::any_bits:
        return any & ((1U << width) - 1);
      case inputs::some_special:
        if (random_() % 256 == 0) return any % 2 == 0 ? with(fields - 1) : sign | (fields - 1) << digits;
        [[fallthrough]];
      default:
        return any % 32 == 1 ? sign : with(among(0, fields - 1));
    }
  }
  uint32_t accumulator(inputs kind) {
    const auto any = static_cast<uint32_t>(random_());
    const uint32_t sign = any & 0x80000000, fraction = any & 0x7FFFFF;
    const auto among = [&](uint32_t first, uint32_t count) {
      return sign | (first + static_cast<uint32_t>(random_() % count)) << 23 | fraction;
    };
    switch (kind) {
      case inputs::near_one:
      case inputs::cancelling:
        return among(127 - 6, 12);
      case inputs::tiny:
        return any % 4 == 0 ? sign : among(0, 40);
      case inputs::huge:
        return among(127 + 10, 118);
      case inputs::any_bits:
        return any;
      case inputs::some_special:
        if (random_() % 64 == 0) return any % 2 == 0 ? among(255, 1) : sign | 255U << 23;
        [[fallthrough]];
      default:
        return any % 16 == 0 ? sign : random_() % 2 == 0 ? among(127 - 20, 40) : among(0, 255);
    }
  }
  std::mt19937_64 random_;
};

// ---- the tests ----

llmmem_tests::counted_checks checks;
void require(bool is, const std::string& what) {
  checks.require(is, what);
}
std::string text_of(const shape& of) {
  static const char* const names[] = {"f16", "bf16", "e4m3", "e5m2"};
  return std::string(names[static_cast<int>(of.left)]) + " * " + names[static_cast<int>(of.right)] +
         ", depth " + std::to_string(of.depth);
}
std::string hex(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%08x", std::bit_cast<uint32_t>(value));
  return text;
}

/// Every bit of many products; how many are not what rounding to nearest gives.
void check_bits(const shape& of, int architecture, std::uint64_t seed) {
  maker make(seed);
  const rules by = rules_of(architecture, of);
  std::uint64_t compared = 0, finite = 0, truncated = 0, subnormal = 0, infinite = 0, undefined = 0;
  for (const inputs kind : all_inputs) {
    std::vector<tile> tiles;
    for (int n = 0; n < 120; ++n)
      tiles.push_back(make.make(of, kind));
    products(of).run(tiles);
    for (const tile& each : tiles) {
      for (uint32_t row = 0; row < 16; ++row) {
        for (uint32_t column = 0; column < 8; ++column) {
          const float wanted = reference(each, of, by, row, column);
          const float made = std::bit_cast<float>(each.d[row][column]);
          require(std::bit_cast<uint32_t>(wanted) == each.d[row][column],
                  text_of(of) + ", inputs " + std::to_string(static_cast<int>(kind)) + ": " + hex(made) +
                      " instead of " + hex(wanted));
          ++compared;
          infinite += std::isinf(wanted) ? 1 : 0;
          undefined += wanted != wanted ? 1 : 0;
          subnormal += wanted != 0 && std::fabs(wanted) < 0x1p-126F ? 1 : 0;
          if (!std::isfinite(wanted)) continue;
          ++finite;
          double plain = std::bit_cast<float>(each.c[row][column]);
          for (uint32_t k = 0; k < of.depth; ++k)
            plain += value_of(of.left, each.a[row][k]) * value_of(of.right, each.b[k][column]);
          truncated += static_cast<float>(plain) != wanted ? 1 : 0;
        }
      }
    }
  }
  std::printf(
      "%s: %llu results, of which %llu finite (%llu of them not the nearest, %llu subnormal), %llu infinite, "
      "%llu NaN\n",
      text_of(of).c_str(), static_cast<unsigned long long>(compared), static_cast<unsigned long long>(finite),
      static_cast<unsigned long long>(truncated), static_cast<unsigned long long>(subnormal),
      static_cast<unsigned long long>(infinite), static_cast<unsigned long long>(undefined));
  require(truncated > finite / 50 && undefined > 1000, text_of(of) + ": the inputs reach too little");
  require(is_8_bit(of.left) || infinite > 400, text_of(of) + ": the inputs reach too few infinities");
}

/// Whatever the order of the products, the sum is within the bound that tensor_cores.hpp states; in the same
/// step the order changes nothing.
void check_bound(const shape& of, int architecture, std::uint64_t seed) {
  maker make(seed);
  std::mt19937_64 random(seed);
  const rules by = rules_of(architecture, of);
  const double steps = of.depth / by.step;
  const double bound = steps * ((by.step + 1) * std::ldexp(1, -by.fraction) + std::ldexp(1, -by.result));
  double largest = 0;
  std::vector<tile> tiles, orders, within;
  for (int n = 0; n < 200; ++n) {
    const tile made = make.make(of, n % 2 == 0 ? inputs::near_one : inputs::cancelling);
    for (const bool is_within : {false, true}) {
      const uint32_t span = is_within ? by.step : of.depth;
      tile other = made;
      std::vector<uint32_t> from(of.depth);
      for (uint32_t k = 0; k < of.depth; ++k)
        from[k] = k;
      for (uint32_t first = 0; first < of.depth; first += span)
        std::shuffle(from.begin() + first, from.begin() + first + span, random);
      for (uint32_t k = 0; k < of.depth; ++k) {
        for (uint32_t row = 0; row < 16; ++row)
          other.a[row][k] = made.a[row][from[k]];
        for (uint32_t column = 0; column < 8; ++column)
          other.b[k][column] = made.b[from[k]][column];
      }
      (is_within ? within : orders).push_back(other);
    }
    tiles.push_back(made);
  }
  products(of).run(tiles);
  products(of).run(orders);
  products(of).run(within);
  for (std::size_t n = 0; n < tiles.size(); ++n) {
    for (uint32_t row = 0; row < 16; ++row) {
      for (uint32_t column = 0; column < 8; ++column) {
        // Doubles add these numbers exactly: their bits span fewer than 53 places.
        double exact = std::bit_cast<float>(tiles[n].c[row][column]), sizes = std::fabs(exact);
        for (uint32_t k = 0; k < of.depth; ++k) {
          const double product =
              value_of(of.left, tiles[n].a[row][k]) * value_of(of.right, tiles[n].b[k][column]);
          exact += product;
          sizes += std::fabs(product);
        }
        for (const tile* each : {&tiles[n], &orders[n], &within[n]}) {
          const double off = std::fabs(std::bit_cast<float>(each->d[row][column]) - exact);
          largest = std::max(largest, off / sizes / bound);
          require(off <= bound * sizes, text_of(of) + ": a sum outside the bound");
        }
        require(tiles[n].d[row][column] == within[n].d[row][column],
                text_of(of) + ": the order inside a step changes a sum");
      }
    }
  }
  std::printf("%s: the largest error is %.2f of the bound %.3g\n", text_of(of).c_str(), largest, bound);
}

/// Products that are each too small for an accumulator of 1 add up or not, as the architecture keeps bits for
/// them.
void check_kept_bits(int architecture) {
  const shape of{element::f16, element::f16, 16};
  const auto sum_of_powers = [&](int power, uint32_t count) {
    tile made{};
    made.c[0][0] = std::bit_cast<uint32_t>(1.0F);
    for (uint32_t k = 0; k < count; ++k) {
      made.a[0][k] = 0x3C00;  // 1
      made.b[k][0] = power < -14 ? 1U << (power + 24) : static_cast<uint32_t>(power + 15) << 10;
    }
    std::vector<tile> tiles{made};
    products(of).run(tiles);
    return std::bit_cast<float>(tiles[0].d[0][0]);
  };
  require(sum_of_powers(-24, 1) == 1, "1 + 2^-24");
  require(sum_of_powers(-24, 2) == 1 + 0x1p-23F, "1 + 2 * 2^-24");
  require(sum_of_powers(-24, 16) == 1 + 0x1p-20F, "1 + 16 * 2^-24");
  tile made{};
  made.c[0][0] = std::bit_cast<uint32_t>(2.0F);
  for (uint32_t k = 0; k < 8; ++k)
    made.a[0][k] = 0x3C00, made.b[k][0] = 1;  // 8 products of 2^-24, beside 2
  std::vector<tile> tiles{made};
  products(of).run(tiles);
  require(std::bit_cast<float>(tiles[0].d[0][0]) == (architecture >= 90 ? 2 + 0x1p-21F : 2.0F),
          "2 + 8 * 2^-24: sm_90 keeps a bit more than sm_80");
}

}  // namespace

int main() {
  llmmem_tests::require_device();
  const int architecture = llmmem_tests::architecture_of_device();
  std::vector<shape> shapes{{element::f16, element::f16, 8},
                            {element::f16, element::f16, 16},
                            {element::bf16, element::bf16, 8},
                            {element::bf16, element::bf16, 16}};
  if (architecture >= 89) {
    for (const element left : {element::e4m3, element::e5m2})
      for (const element right : {element::e4m3, element::e5m2})
        shapes.push_back({left, right, 32});
  }
  std::uint64_t seed = 1;
  for (const shape& each : shapes) {
    check_bits(each, architecture, seed++);
    check_bound(each, architecture, seed++);
  }
  check_kept_bits(architecture);
  std::printf("sums of tensor cores of sm_%d: %d failed\n", architecture, checks.failed());
  return checks.status();
}
