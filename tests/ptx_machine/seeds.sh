#!/usr/bin/env bash
# seeds.sh FIRST COUNT PROGRAM: runs PROGRAM with COUNT orders of its asynchronous work, chosen by the seeds from FIRST on,
# and once with work that runs no sooner than something waits for it. Ends at the first failure, and names the seed.
set -euo pipefail

first=$1 count=$2 program=$3
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for ((seed = first; seed < first + count; ++seed)); do
  PTX_MACHINE_SEED=$seed "$program" >"$log" 2>&1 || {
    cat "$log"
    echo "FAILED: PTX_MACHINE_SEED=$seed $program"
    exit 1
  }
done
PTX_MACHINE_LATE=1 PTX_MACHINE_APART=1 "$program" >"$log" 2>&1 || {
  cat "$log"
  echo "FAILED: PTX_MACHINE_LATE=1 PTX_MACHINE_APART=1 $program"
  exit 1
}
tail -n 1 "$log"
echo "$count seeds from $first on, and as late as may be"
