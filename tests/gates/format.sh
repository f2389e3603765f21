#!/usr/bin/env bash
# format.sh CLANG_FORMAT: every C++ and CUDA source is as .clang-format has it. Run from the root of the checkout.
set -euo pipefail

mapfile -t sources < <(find include deprecated tests benchmarks examples -type f \
  \( -name '*.hpp' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) | sort)
echo "${#sources[@]} sources"
if ! "$1" --dry-run --Werror "${sources[@]}"; then
  echo "to fix: $1 -i \$(git ls-files '*.hpp' '*.cpp' '*.cuh' '*.cu')"
  exit 1
fi
