#!/usr/bin/env bash
# clang_cuda.sh CLANG TOOLKIT WORK, from the top of the tree: clang++ as the compiler of CUDA C++. It compiles the engine of
# tests/consumer_cuda for sm_80 and sm_90 with the toolkit's ptxas, as two units whose device code is to be linked, and reads all
# kernels; warnings are errors.
set -euo pipefail

clang=$1
toolkit=$2
work=$3
flags=(-x cuda -std=c++20 "--cuda-path=$toolkit" -Wno-unknown-cuda-version -Iinclude
  -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Werror)
for unit in engine blocks; do
  "$clang" "${flags[@]}" --cuda-gpu-arch=sm_80 --cuda-gpu-arch=sm_90 -fgpu-rdc --offload-new-driver \
    -c "tests/consumer_cuda/$unit.cu" -o "$work/clang_$unit.o"
done
"$clang" "${flags[@]}" --cuda-gpu-arch=sm_90 -fsyntax-only tests/kernels/all_kernels.cu
