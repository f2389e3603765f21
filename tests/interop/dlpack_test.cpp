#include <llmmem/interop/dlpack.hpp>

#include <doctest/doctest.h>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace llmmem;

namespace {

// The structures as the specification of DLPack 1.1 lays them out.
enum dl_device_type : std::int32_t { on_cpu = 1, on_cuda = 2 };
struct dl_device {
  dl_device_type device_type;
  std::int32_t device_id;
};
struct dl_data_type {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct dl_tensor_type {
  void* data;
  dl_device device;
  std::int32_t ndim;
  dl_data_type dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct dl_managed {
  dl_tensor_type dl_tensor;
  void* manager_ctx;
  void (*deleter)(dl_managed*);
};
struct dl_version {
  std::uint32_t major;
  std::uint32_t minor;
};
struct dl_managed_versioned {
  dl_version version;
  void* manager_ctx;
  void (*deleter)(dl_managed_versioned*);
  std::uint64_t flags;
  dl_tensor_type dl_tensor;
};
static_assert(dlpack_managed<dl_managed> && !dlpack_versioned<dl_managed>);
static_assert(dlpack_versioned<dl_managed_versioned>);

using tensor = dlpack_tensor<dl_managed_versioned>;

/// A tensor that a foreign library made, and how often it was deleted.
struct foreign {
  foreign() {
    managed = {.version = {1, 3},
               .manager_ctx = this,
               .deleter = [](dl_managed_versioned* of) { ++static_cast<foreign*>(of->manager_ctx)->deleted; },
               .flags = 0,
               .dl_tensor = {.data = bytes.data(),
                             .device = {on_cpu, 0},
                             .ndim = 2,
                             .dtype = {4, 16, 1},
                             .shape = shape.data(),
                             .strides = nullptr,
                             .byte_offset = 4}};
  }
  std::array<std::byte, 64> bytes{};
  std::array<std::int64_t, 2> shape{3, 5};
  std::array<std::int64_t, 2> strides{5, 1};
  dl_managed_versioned managed{};
  int deleted = 0;
};

std::string refusal_of(foreign& theirs) {
  try {
    const tensor taken(&theirs.managed);
  } catch (const error& why) {
    return why.what();
  }
  return "";
}

}  // namespace

TEST_SUITE("dlpack") {
  TEST_CASE("a foreign tensor is read in place, and deleted once") {
    foreign theirs;
    theirs.bytes[4] = std::byte{9};
    {
      tensor first(&theirs.managed);
      CHECK(first.type() == safetensors_type::bf16);
      CHECK(first.elements() == 15);
      CHECK(first.bytes().size() == 30);
      CHECK(first.bytes()[0] == std::byte{9});
      CHECK(first.strides().empty());
      CHECK(first.is_contiguous());
      CHECK(first.place() == dlpack_place{dlpack_place::cpu, 0});
      first.writable_bytes()[1] = std::byte{7};
      tensor second(std::move(first));
      CHECK(theirs.deleted == 0);
      CHECK(second.shape()[1] == 5);
    }
    CHECK(theirs.bytes[5] == std::byte{7});
    CHECK(theirs.deleted == 1);
  }

  TEST_CASE(
      "strides of a row-major tensor are accepted, others are not, and extents of 1 may have any stride") {
    foreign theirs;
    theirs.managed.dl_tensor.strides = theirs.strides.data();
    {
      const tensor taken(&theirs.managed);
      CHECK(taken.is_contiguous());
    }
    theirs.strides = {1, 3};
    {
      const tensor taken(&theirs.managed);
      CHECK(!taken.is_contiguous());
      CHECK_THROWS_WITH_AS(
          taken.bytes(),
          "dlpack_tensor: the tensor is not contiguous; copy it to a contiguous one in its own "
          "library",
          argument_error);
    }
    theirs.shape = {1, 5};
    theirs.strides = {77, 1};
    CHECK(tensor(&theirs.managed).is_contiguous());
    theirs.shape = {0, 5};
    theirs.strides = {3, 3};
    CHECK(tensor(&theirs.managed).bytes().empty());
  }

  TEST_CASE("the host does not read device memory, nor write a read-only tensor") {
    foreign theirs;
    theirs.managed.dl_tensor.device = {on_cuda, 1};
    {
      const tensor taken(&theirs.managed);
      CHECK(taken.addresses().size() == 30);
      CHECK_THROWS_AS(taken.bytes(), argument_error);
    }
    theirs.managed.dl_tensor.device = {on_cpu, 0};
    theirs.managed.flags = 1;
    tensor taken(&theirs.managed);
    CHECK(taken.is_read_only());
    CHECK(taken.bytes().size() == 30);
    CHECK_THROWS_WITH_AS(taken.writable_bytes(), "dlpack_tensor: the tensor is read-only; copy it",
                         argument_error);
  }

  TEST_CASE("an unknown tensor is refused, and stays with the caller") {
    foreign theirs;
    auto& of = theirs.managed;
    const auto changed = [&](auto change) {
      foreign whole;
      of = whole.managed;
      of.manager_ctx = &theirs;
      of.dl_tensor.shape = theirs.shape.data();
      change();
      return refusal_of(theirs);
    };
    CHECK(changed([&] { of.version.major = 2; }).find("major version 2 of DLPack, but 1 is known") !=
          std::string::npos);
    CHECK(changed([&] { of.flags = 4; }).find("are padded") != std::string::npos);
    CHECK(changed([&] { of.dl_tensor.dtype.lanes = 4; }).find("vectors of 4 lanes") != std::string::npos);
    CHECK(changed([&] { of.dl_tensor.dtype = {3, 64, 1}; }).find("element type 3 of 64 bits is not known") !=
          std::string::npos);
    CHECK(changed([&] { of.dl_tensor.ndim = -1; }).find("-1 dimensions") != std::string::npos);
    CHECK(changed([&] { of.dl_tensor.shape = nullptr; }).find("without a shape") != std::string::npos);
    CHECK(changed([&] { theirs.shape = {-3, 5}; }).find("negative extent") != std::string::npos);
    constexpr std::int64_t large = std::numeric_limits<std::int64_t>::max() / 4;
    CHECK(changed([&] { theirs.shape = {large, large}; }).find("exceeds 2^63 - 1 bytes") !=
          std::string::npos);
    theirs.shape = {3, 5};
    CHECK(changed([&] { of.dl_tensor.data = nullptr; }).find("its address is null") != std::string::npos);
    CHECK(changed([&] {
            of.dl_tensor.byte_offset = ~std::uint64_t{0};
          }).find("past the end of the addresses") != std::string::npos);
    CHECK(theirs.deleted == 0);
    CHECK_THROWS_AS(tensor(nullptr), argument_error);
  }

  TEST_CASE(
      "an exported tensor describes itself completely, and keeps its owner until the consumer has finished") {
    const auto owner = std::make_shared<std::vector<std::byte>>(24);
    const std::array<std::int64_t, 3> shape{2, 1, 3};
    dl_managed_versioned* const out = to_dlpack<dl_managed_versioned>(
        {.data = owner->data(), .type = safetensors_type::f32, .shape = shape, .is_read_only = true}, owner);
    CHECK(owner.use_count() == 2);
    CHECK(out->version.major == 1);
    CHECK(out->flags == 1);
    CHECK(out->dl_tensor.data == owner->data());
    CHECK(out->dl_tensor.ndim == 3);
    CHECK(out->dl_tensor.dtype.code == 2);
    CHECK(out->dl_tensor.dtype.bits == 32);
    CHECK(out->dl_tensor.strides[0] == 3);
    CHECK(out->dl_tensor.strides[1] == 3);
    CHECK(out->dl_tensor.strides[2] == 1);
    out->deleter(out);
    CHECK(owner.use_count() == 1);
  }

  TEST_CASE("every element type survives a round trip, in both structures") {
    std::array<std::byte, 64> bytes{};
    const std::array<std::int64_t, 1> shape{4};
    for (std::size_t i = 0; i < safetensors_types; ++i) {
      const auto type = static_cast<safetensors_type>(i);
      CAPTURE(name_of(type));
      const tensor first(
          to_dlpack<dl_managed_versioned>({.data = bytes.data(), .type = type, .shape = shape}, 0));
      CHECK(first.type() == type);
      CHECK(first.bytes().size() == (bits_of(type) * 4 + 7) / 8);
      const dlpack_tensor<dl_managed> second(
          to_dlpack<dl_managed>({.data = bytes.data(), .type = type, .shape = shape}, 0));
      CHECK(second.type() == type);
    }
  }

  TEST_CASE("a tensor that the structure cannot describe is not exported") {
    const std::array<std::int64_t, 2> shape{2, 3};
    const std::array<std::int64_t, 1> strides{1};
    CHECK_THROWS_WITH_AS(to_dlpack<dl_managed>({.shape = shape, .is_read_only = true}, 0),
                         "to_dlpack: DLManagedTensor cannot say that a tensor is read-only; use "
                         "DLManagedTensorVersioned, or export a copy",
                         argument_error);
    CHECK_THROWS_WITH_AS(to_dlpack<dl_managed>({.shape = shape, .strides = strides}, 0),
                         "to_dlpack: 1 strides for 2 dimensions; give one for each, or none", argument_error);
    CHECK_THROWS_WITH_AS(to_dlpack<dl_managed>({.shape = shape}, 0),
                         "to_dlpack: the address of a tensor with elements is null; give that of its first",
                         argument_error);
    const std::array<std::int64_t, 2> negative{2, -3};
    CHECK_THROWS_AS(to_dlpack<dl_managed>({.shape = negative}, 0), argument_error);
  }

  TEST_CASE("a tensor without elements has any extents, no address, and strides that fit") {
    const std::array<std::int64_t, 4> shape{7, 0, std::int64_t{1} << 40, std::int64_t{1} << 40};
    dl_managed_versioned* const out = to_dlpack<dl_managed_versioned>({.shape = shape}, 0);
    CHECK(out->dl_tensor.strides[3] == 1);
    CHECK(out->dl_tensor.strides[2] == std::int64_t{1} << 40);
    CHECK(out->dl_tensor.strides[0] == std::numeric_limits<std::int64_t>::max());
    out->dl_tensor.byte_offset = 8;
    const tensor taken(out);
    CHECK(taken.elements() == 0);
    CHECK(taken.is_contiguous());
    CHECK(taken.data() == nullptr);
    CHECK(taken.bytes().empty());
  }

  TEST_CASE("a chunk of a tiered buffer is exported under its lease, and a foreign tensor becomes a chunk") {
    host_space fast({.budget = 4096});
    host_space slow({.budget = 1 << 20});
    tiered_buffer<host_space, host_space> buffer({}, {fast, 4096}, {slow, 1 << 20});
    foreign theirs;
    theirs.bytes.fill(std::byte{3});
    const auto chunk = buffer.create(30).value();
    {
      const tensor taken(&theirs.managed);
      const auto lease = buffer.write(chunk).value();
      std::memcpy(lease.range().data, taken.bytes().data(), taken.bytes().size());
    }
    const std::array<std::int64_t, 2> shape{3, 5};
    auto lease = std::make_shared<decltype(buffer.read(chunk).value())>(buffer.read(chunk).value());
    auto* const data = const_cast<std::byte*>(lease->range().data);
    const tensor seen(to_dlpack<dl_managed_versioned>(
        {.data = data, .type = safetensors_type::bf16, .shape = shape, .is_read_only = true},
        std::move(lease)));
    CHECK(seen.bytes()[29] == std::byte{3});
    CHECK(seen.is_read_only());
  }
}
