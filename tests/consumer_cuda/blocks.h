// What the two translation units of the engine share.
#pragma once

#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/result.hpp>

#include <cstdint>
#include <span>

/// Makes a stream do a few copies. In blocks.cu.
llmmem::result<void> copy_pieces(std::span<const llmmem::copy_task> pieces, cudaStream_t stream);

/// The value of byte `i` in this engine's pattern. In blocks.cu, called by a kernel of engine.cu: device code
/// is linked.
__device__ std::uint8_t pattern_at(std::uint32_t i);
