#!/usr/bin/env bash
# gpu_script.sh WORK: what scripts/gpu makes of a machine, by doubles of all that it calls: failures are gathered, the table and
# the JSON tell them, and nothing that fails keeps what follows from running.
set -euo pipefail

work=$(mkdir -p "$1" && cd "$1" && pwd)
root=$PWD
fail() {
  printf 'FAILED: %s\n' "$*" >&2
  tail -n 30 "$work/said" >&2
  exit 1
}

# A checkout of its own, so that no build of this one is touched.
rm -rf "${work:?}"/{tree,bin,there,compute-sanitizer}
mkdir -p "$work/tree/benchmarks/kernels" "$work/bin"
cp -r "$root/scripts" "$work/tree/"
cp "$root/benchmarks/kernels/torch_twins.py" "$work/tree/benchmarks/kernels/"

# double NAME: a program of that name, made of standard input.
double() {
  { printf '#!/usr/bin/env bash\n'; cat; } >"$work/bin/$1"
  chmod +x "$work/bin/$1"
}
double nvcc <<<'echo "Cuda compilation tools, release 13.0, V13.0.88"'
double nvidia-smi <<'END'
[[ ${FAKE_NO_GPU-} ]] && exit 9
case $1 in --list-gpus) echo "GPU 0: a double" ;; *name*) echo "a double, 1 MiB" ;; *) echo 580.1 ;; esac
END
double cmake <<'END'
case "$*" in
  --version) echo "cmake version 3.31.0" ;;
  --fresh*) mkdir -p build && echo "$*" >build/configured ;;
  --build*)
    [[ ${FAKE_BUILD-} ]] && echo "a compiler's complaint" && exit 1
    mkdir -p build/gpu/bin
    if grep -q "LLMMEM_BENCH_NVBENCH=.*/cu13/nvbench" build/configured && [[ $FAKE_NVBENCH != fails ]]; then
      printf '#!/usr/bin/env bash\necho "NVBench: $*"\n' >build/gpu/bin/nvbench_kernels
      chmod +x build/gpu/bin/nvbench_kernels
    fi
    cat >build/gpu/bin/bench_gpu_kernels_kernels <<'BENCH'
#!/usr/bin/env bash
echo a table
{
  echo '{"ceiling": "copy", "gb_per_s": 100.0}'
  echo '{"what": "copy", "shape": "1 MiB", "bytes": 1000000, "us": 20.0, "least_us": 19.0, "most_us": 30.0, "share_of": "copy"}'
  [[ ${FAKE_SLOW-} ]] && echo '{"what": "a copy that was being wri' && sleep 60
  echo '{"what": "up", "shape": "1 MiB", "bytes": 1000000, "us": 40.0, "least_us": 40.0, "most_us": 40.0, "share_of": "none"}'
} >"$LLMMEM_BENCH_ROWS"
BENCH
    cat >build/gpu/bin/bench_gpu_kernels_attention <<'BENCH'
#!/usr/bin/env bash
[[ ${FAKE_CRASH-} ]] && kill -SEGV $$
[[ ${FAKE_SILENCE-} ]] && exit 0
{
  echo '{"ceiling": "copy", "gb_per_s": 90.0}'
  echo '{"ceiling": "read", "gb_per_s": 125.0}'
  echo '{"what": "attention", "shape": "B 1", "bytes": 500000, "us": 10.0, "least_us": 5.0, "most_us": 15.0, "share_of": "read"}'
  echo '{"what": "memory", "shape": "and back", "bytes": 0, "us": 5.0, "least_us": 5.0, "most_us": 5.0, "share_of": "copy"}'
} >"$LLMMEM_BENCH_ROWS"
BENCH
    chmod +x build/gpu/bin/bench_gpu_*
    ;;
esac
END
double ctest <<END
case "\$*" in
  *json*)
    [[ \${FAKE_NO_TESTS-} ]] && echo '{"tests": []}' && exit 0
    echo '{"tests": [{"name": "device/device_probe_gpu", "command": ["$work/bin/device_probe"]},'
    echo '{"name": "kernels/one_gpu", "command": ["$work/bin/one", "a b", "\$c&"]},'
    echo '{"name": "space/two_gpu", "command": ["$work/bin/two"]}]}'
    ;;
  *) echo "1/1 Test #1: kernels/one_gpu"; [[ -z \${FAKE_TEST-} ]] ;;
esac
END
double device_probe <<'END'
echo "on a double"
echo "a kernel computed"
exit "${FAKE_PROBE-0}"
END
double one <<'END'
[[ $# == 2 && $1 == "a b" && $2 == '$c&' ]] && echo "$LLMMEM_TEST_WORLDS worlds"
END
double two <<<'echo two'
double compute-sanitizer <<'END'
tool=$2
while [[ $1 == --* ]]; do shift 2; done
echo "$tool $(basename "$1")" >>"$FAKE_ORDER"
echo "========= COMPUTE-SANITIZER"
case ${FAKE_TOOL-} in
  none) echo "========= Error: Device not supported. See the documentation"; exit 1 ;;
  silent) echo "========= ERROR SUMMARY: 0 errors"; exit 0 ;;
  dumb) echo "cannot attach" >&2; exit 255 ;;
  slow) sleep 60 ;;
  warns) echo "========= Warning: leaks are not supported" ;;
  finds) [[ $tool == memcheck && $1 == *probe ]] && echo "========= Invalid __global__ read of size 4 bytes" && exit 86 ;;
  race) [[ $tool == synccheck ]] && echo "a barrier" && exit 86 ;;
esac
exec "$@"
END
export FAKE_ORDER=$work/order

# gpu CODE [VARIABLE=VALUE...] [-- ARGUMENT...]: runs it, and wants that exit status.
gpu() {
  local wanted=$1 code=0
  local -a variables=()
  shift
  while (($#)) && [[ $1 != -- ]]; do
    variables+=("$1")
    shift
  done
  shift $(($# > 0))
  rm -rf "$work/tree/build" "$FAKE_ORDER"
  [[ " ${variables[*]} " != *" FAKE_NVBENCH="* ]] || mkdir -p "$work/tree/build/nvbench/cuda/bench/cu${FAKE_MAJOR:-13}/nvbench"
  (cd "$work/tree" && env PATH="$work/bin:$PATH" "${variables[@]}" bash scripts/gpu "$@") >"$work/said" 2>&1 || code=$?
  [[ $code == "$wanted" ]] || fail "scripts/gpu ${variables[*]} $* ended with $code, not $wanted"
}
results=$work/tree/build/gpu/results
# found EXPRESSION: of Python, over `all` of results.json and `how` each thing ended, that must hold.
found() {
  python3 -c 'import json, sys
all = json.load(open(sys.argv[1]))
how = {each["name"]: each["status"] for each in all["ran"]}
sys.exit(0 if eval(sys.argv[2]) else 1)' "$results/results.json" "$1" || fail "results.json: not so: $1"
}

gpu 0
found "all['ceilings_gb_per_s'] == {'copy': 100, 'read': 125}"
found "[row['share'] for row in all['rows']] == [0.5, None, 0.4, None]"
found "[row['share_of'] for row in all['rows']] == ['copy', None, 'read', None]"
found "how['ctest'] == 'passed' and how['synccheck/kernels/one_gpu'] == 'passed' and how['initcheck/space/two_gpu'] == 'passed'"
found "'synccheck/space/two_gpu' not in how and how['memcheck/space/two_gpu'] == 'passed'"
found "not any('racecheck' in name for name in how)"
found "all['machine']['machine'] == 'a double, 1 MiB' and all['machine']['CUDA'] == '13.0.88'"
grep -q '| copy | 1 MiB | 1000000 | 20.00 | 19.00 to 30.00 | 50.0 | 0.500 copy |' "$results/table.md" || fail "no row in table.md"
grep -q '| attention | B 1 | 500000 | 10.00 | 5.00 to 15.00 | 50.0 | 0.400 read |' "$results/table.md" || fail "no row of reading"
grep -q '^- ceiling .read.: 125.0 GB/s' "$results/table.md" || fail "table.md does not tell the ceiling of reading"
# The probe, then every test under memcheck, then each under the others.
diff - "$FAKE_ORDER" <<'END' || fail "the order of the sanitizer's runs"
memcheck device_probe
memcheck device_probe
memcheck one
memcheck two
initcheck device_probe
initcheck one
synccheck one
initcheck two
END
grep -qx "25 worlds" "$results/logs/memcheck_kernels_one_gpu" || fail "the sanitizer's worlds are not fewer"
gpu 0 LLMMEM_TEST_WORLDS=3 -- --skip tests --skip benchmarks --skip twins
grep -qx "3 worlds" "$results/logs/memcheck_kernels_one_gpu" || fail "LLMMEM_TEST_WORLDS of the caller is not kept"

gpu 1 FAKE_TEST=1
found "how['ctest'] == 'failed' and how['bench_gpu_kernels_kernels'] == 'passed' and len(all['rows']) == 4"
grep -q '^failed: tests ctest' "$work/said" || fail "the end does not name what failed"

gpu 1 FAKE_TOOL=race
found "how['synccheck/kernels/one_gpu'] == 'failed' and how['bench_gpu_kernels_attention'] == 'passed'"
gpu 1 FAKE_TOOL=finds
found "how['memcheck/device/device_probe_gpu'] == 'failed' and how['memcheck/kernels/one_gpu'] == 'passed'"

# A tool that cannot work on the machine is no failure of the tests.
for way in none silent dumb; do
  gpu 0 FAKE_TOOL=$way -- --skip benchmarks --skip twins
  found "how['compute-sanitizer'] == 'skipped' and not any('check/' in name for name in how)"
done
gpu 0 FAKE_TOOL=none -- --skip benchmarks --skip twins
grep -q 'skipped: it does not work here: Error: Device not supported' "$results/table.md" || fail "no reason in table.md"
gpu 0 FAKE_TOOL=warns -- --skip benchmarks --skip twins
found "how['memcheck/kernels/one_gpu'] == 'passed'"
gpu 3 FAKE_TOOL=slow -- --seconds 15 --skip tests --skip benchmarks --skip twins
found "how['compute-sanitizer'] == 'cut' and not any('check/' in name for name in how)"
# One that the least of the tests cannot judge is tried.
gpu 1 FAKE_PROBE=1 -- --skip benchmarks --skip twins
found "how['memcheck/device/device_probe_gpu'] == 'failed' and how['memcheck/kernels/one_gpu'] == 'passed'"
gpu 1 FAKE_NO_TESTS=1 -- --skip benchmarks --skip twins
found "how['tests'] == 'failed'"

gpu 1 FAKE_CRASH=1
found "how['bench_gpu_kernels_attention'] == 'failed' and len(all['rows']) == 2"

gpu 1 FAKE_SILENCE=1
found "how['bench_gpu_kernels_attention'] == 'failed' and len(all['rows']) == 2"

# NVBench's rows, where the package is there, and for this toolkit.
found "'nvbench_kernels' not in how"
gpu 0 FAKE_NVBENCH=1 -- --skip tests --skip sanitizer --skip twins
found "how['nvbench_kernels'] == 'passed' and len(all['rows']) == 4"
grep -q "NVBench: --min-time" "$work/said" || fail "the tables of NVBench are not shown"
gpu 1 FAKE_NVBENCH=fails -- --skip tests --skip sanitizer --skip twins
found "how['nvbench_kernels'] == 'failed' and how['bench_gpu_kernels_kernels'] == 'passed'"
gpu 0 FAKE_NVBENCH=1 -- --skip tests --skip sanitizer --skip twins --skip benchmarks
found "'nvbench_kernels' not in how"
FAKE_MAJOR=12 gpu 0 FAKE_NVBENCH=1 -- --skip tests --skip sanitizer --skip twins
found "'nvbench_kernels' not in how"

gpu 1 FAKE_BUILD=1
found "how['build'] == 'failed' and 'benchmarks' in how and all['rows'] == []"

gpu 3 FAKE_SLOW=1 -- --seconds 15 --skip sanitizer --skip twins
found "how['bench_gpu_kernels_kernels'] == 'cut' and how['compute-sanitizer'] == 'skipped'"
found "[row['what'] for row in all['rows'] if row['from'] == 'bench_gpu_kernels_kernels'] == ['copy']"

gpu 3 -- --seconds 5
found "how['configure'] == 'cut' and all['rows'] == []"

gpu 0 -- --out other --skip tests --skip sanitizer --skip twins
[[ -s $work/tree/other/results.json && -s $work/tree/other/table.md ]] || fail "--out other is not where the results are"
(cd "$work" && env PATH="$work/bin:$PATH" bash tree/scripts/gpu --out there --skip tests --skip sanitizer --skip twins) \
  >"$work/said" 2>&1 || fail "scripts/gpu called from elsewhere"
[[ -s $work/there/results.json ]] || fail "--out there is not where it was called from"

touch "$work/tree/a_file"
gpu 1 -- --out a_file
grep -q "no results can be written there" "$work/said" || fail "it does not say that no results can be written"
gpu 2 FAKE_NO_GPU=1
grep -q "no GPU here" "$work/said" || fail "it does not say what is lacking"
gpu 1 -- --seconds none
gpu 1 -- --skip nothing
gpu 1 -- --nonsense
gpu 0 -- --help
grep -q -- "--seconds N" "$work/said" || fail "--help does not help"

# On this machine a toolkit may have one of its own: the double of nvcc is what it is looked for beside.
mv "$work/bin/compute-sanitizer" "$work/a_sanitizer"
if command -v compute-sanitizer >/dev/null; then
  gpu 0 -- --skip sanitizer
else
  gpu 0
fi
found "how['compute-sanitizer'] == 'skipped' and not any('memcheck' in name for name in how)"
mkdir -p "$work/compute-sanitizer"
mv "$work/a_sanitizer" "$work/compute-sanitizer/compute-sanitizer"
gpu 0
found "how['memcheck/kernels/one_gpu'] == 'passed'"
echo "scripts/gpu: as it should be"
