#!/usr/bin/env bash
# tidy.sh CLANG_TIDY WORK [CHECKS]: clang-tidy over every public .hpp, in one translation unit, so that what they share is read
# once. CHECKS: these in addition to those of .clang-tidy. Run from the root of the checkout.
set -euo pipefail

mkdir -p "$2"
unit="$2/headers.cpp"
# Headers that need an optional library are named by the umbrella; this machine may lack it.
mapfile -t optional < <(sed -nE 's|^//+ +<([^>]+)> needs llmmem::.*|\1|p' include/llmmem/llmmem.hpp)
(cd include && find llmmem -name '*.hpp' | sort) | while read -r header; do
  if [[ " ${optional[*]-} " != *" $header "* ]]; then
    echo "#include <$header>"
  fi
done >"$unit"
echo "$(wc -l <"$unit") headers"
# Standard output holds the findings; standard error counts what is hidden in other people's headers.
"$1" --config-file=.clang-tidy ${3:+"--checks=$3"} --quiet "$unit" -- -std=c++20 -Iinclude 2>"$2/errors" || { cat "$2/errors"; exit 1; }
