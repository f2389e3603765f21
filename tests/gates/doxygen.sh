#!/usr/bin/env bash
# doxygen.sh DOXYGEN WORK: the public headers' documentation is whole and right. Run from the root of the checkout.
set -euo pipefail

doxygen=$1 work=$2
rm -rf "$work"
mkdir -p "$work"
(cat docs/Doxyfile && echo "OUTPUT_DIRECTORY = $work" && echo "WARN_LOGFILE = $work/warnings") | "$doxygen" -
# Members may share one comment, and #define lines one too.
findings=$(grep -vE 'Member .* (of (class|struct|union) .*|\(macro definition\) of file .*) is not documented\.$' \
  "$work/warnings" || true)
rm -rf "$work"
if [[ -n $findings ]]; then
  echo "$findings"
  exit 1
fi
