# shellcheck shell=bash
# What the scripts share: finding or installing what they need, and saying what they do. Sourced, never run.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck disable=SC2034 # read by the scripts
jobs=$(nproc)

# The request traces: LLMMEM_DATA_DIR, else the checkout's sibling shared/data. Set but empty means none.
if [[ -z ${LLMMEM_DATA_DIR+set} ]]; then
  LLMMEM_DATA_DIR=
  if [[ -d ../shared/data ]]; then
    LLMMEM_DATA_DIR=$(cd ../shared/data && pwd)
  fi
fi
export LLMMEM_DATA_DIR

# clang's runtime names the functions on a stack only by a program that this variable names.
ASAN_SYMBOLIZER_PATH=${ASAN_SYMBOLIZER_PATH-$(command -v llvm-symbolizer || command -v addr2line || true)}
export ASAN_SYMBOLIZER_PATH
export ASAN_OPTIONS=${ASAN_OPTIONS-detect_stack_use_after_return=1:strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS-halt_on_error=1:second_deadlock_stack=1}

say() { printf '%s\n' "$*"; }
die() {
  say "error: $*" >&2
  exit 1
}
# lacking: as die, when the machine lacks something, not the library.
lacking() {
  say "error: $*" >&2
  exit 2
}

# step TITLE: prints a header for the next step, and the time of the previous one.
step_title=
step_began=0
step() {
  step_done
  step_title=$1
  step_began=$SECONDS
  printf '\n== %s\n' "$1"
}
step_done() {
  if [[ -n $step_title ]]; then
    say "-- $step_title: $((SECONDS - step_began)) s"
  fi
  step_title=
}

# is_present PROBE: a command, <a header>, or /a/file*, possibly with a wildcard.
is_present() {
  case $1 in
    '<'*) printf '#include %s\n' "$1" | c++ -std=c++17 -x c++ -E - >/dev/null 2>&1 ;;
    /*) compgen -G "$1" >/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

# missing_packages PACKAGE=PROBE...: prints the packages whose probe finds nothing.
missing_packages() {
  local entry
  for entry; do
    is_present "${entry#*=}" || say "${entry%%=*}"
  done
}

# apt_install PACKAGE...: installs them, as root or by sudo; fails where there is no apt or a package is unknown.
apt_updated=
apt_install() {
  local as_root=()
  command -v apt-get >/dev/null || return 1
  if ((EUID != 0)); then
    command -v sudo >/dev/null || return 1
    as_root=(sudo)
  fi
  say "installing: $*"
  if [[ -z $apt_updated ]]; then
    "${as_root[@]}" apt-get update -qq || return 1
    apt_updated=yes
  fi
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# need PACKAGE=PROBE...: installs what is missing, by Debian's names; names what it cannot install and stops.
need() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  apt_install "${missing[@]}" || true
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  lacking "this machine lacks, by their Debian names: ${missing[*]}"
}

# want PACKAGE=PROBE...: as need, but returns 1 where something stays missing.
want() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  apt_install "${missing[@]}" || return 1
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]} == 0))
}

need_build_tools() {
  need g++=g++ cmake=cmake ninja-build=ninja
  want ccache=ccache || say "no ccache: every build starts from nothing"
  need_cmake
}

need_cmake() {
  local version
  version=$(cmake --version | sed -nE '1s/.* ([0-9]+\.[0-9]+).*/\1/p')
  if [[ $(printf '%s\n3.25\n' "$version" | sort -V | head -n 1) != 3.25 ]]; then
    lacking "CMake $version is too old, the presets need 3.25 (https://cmake.org/download)"
  fi
}

# find_clang: a clang++ of version 16 or newer, best first; nothing where there is none.
find_clang() {
  local candidate major
  for candidate in clang++-19 clang++-{22,21,20,18,17,16} clang++; do
    command -v "$candidate" >/dev/null || continue
    major=$("$candidate" -dumpversion | cut -d. -f1)
    if ((major >= 16)); then
      say "$candidate"
      return
    fi
  done
}

# find_nvcc: puts nvcc on PATH from where the toolkit installs itself; fails where there is none.
find_nvcc() {
  command -v nvcc >/dev/null && return
  local home
  for home in "${CUDA_HOME-}" /usr/local/cuda; do
    if [[ -x $home/bin/nvcc ]]; then
      export PATH="$home/bin:$PATH"
      return
    fi
  done
  return 1
}

# find_cccl: prints CMake's arguments for CCCL 3.2 or newer: that of CCCL_HOME, or the package of the Python index, which is
# headers alone. Nothing where it is not to be had.
cccl_package=nvidia-cuda-cccl==13.3.5.0.6
find_cccl() {
  local home=${CCCL_HOME-}
  if [[ -z $home ]]; then
    home=$PWD/build/cccl
    if [[ ! -d $home/nvidia ]]; then
      mkdir -p "$home"
      python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$home" "$cccl_package" >&2 || return 0
      python3 -m zipfile -e "$home"/*.whl "$home" >&2 || return 0
    fi
    home=$(dirname "$(find "$home" -path '*/cuda/memory_resource' -print -quit)")/..
  fi
  say -DLLMMEM_CCCL=ON "-DLLMMEM_CCCL_INCLUDE_DIR=$(realpath "$home")"
}

# find_rmm: prints CMake's arguments for RMM's headers and library, as the packages of the Python index have them, in
# build/rmm. Nothing where they are not to be had: the test that uses them is then left out, and CMake says so.
rmm_packages=(librmm-cu13==26.10.0 rapids-logger==0.3.0)
find_rmm() {
  local home=$PWD/build/rmm
  if [[ ! -d $home/librmm ]]; then
    mkdir -p "$home"
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$home" "${rmm_packages[@]}" >&2 || return 0
    local each
    for each in "$home"/*.whl; do
      python3 -m zipfile -e "$each" "$home" >&2 || return 0
    done
  fi
  say "-DLLMMEM_TESTS_RMM=$home"
}

# find_cufile: the same for cuFile, in build/cufile.
cufile_package=nvidia-cufile==1.20.0.107
find_cufile() {
  local home=$PWD/build/cufile
  if [[ ! -d $home/nvidia ]]; then
    mkdir -p "$home"
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$home" "$cufile_package" >&2 || return 0
    python3 -m zipfile -e "$home"/*.whl "$home" >&2 || return 0
  fi
  say -DLLMMEM_CUFILE=ON "-DLLMMEM_CUFILE_INCLUDE_DIR=$(dirname "$(find "$home" -name cufile.h -print -quit)")"
}

# find_cuda12: prints CMake's argument for a CUDA Toolkit 12.8 that clang++ compiles with: headers, ptxas and libdevice, as the
# packages of the Python index have them, put together in build/cuda12. Nothing where they are not to be had.
cuda12_packages=(nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-nvcc-cu12==12.8.93 nvidia-cuda-cccl-cu12==12.8.90)
find_cuda12() {
  local home=$PWD/build/cuda12 each
  if [[ ! -x $home/bin/ptxas ]]; then
    mkdir -p "$home/wheels" "$home/bin" "$home/include" "$home/nvvm"
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$home/wheels" "${cuda12_packages[@]}" >&2 || return 0
    for each in "$home"/wheels/*.whl; do
      python3 -m zipfile -e "$each" "$home/wheels" >&2 || return 0
    done
    for each in cuda_runtime cuda_cccl cuda_nvcc; do
      cp -r "$home/wheels/nvidia/$each/include/." "$home/include" || return 0
    done
    # clang++'s own headers include it, and use two macros of it.
    : >"$home/include/curand_mtgp32_kernel.h"
    cp -r "$home/wheels/nvidia/cuda_nvcc/nvvm/libdevice" "$home/nvvm" || return 0
    say '{"cuda": {"name": "CUDA SDK", "version": "12.8.0"}}' >"$home/version.json"
    install -m 755 "$home/wheels/nvidia/cuda_nvcc/bin/ptxas" "$home/bin" || return 0
    rm -r "$home/wheels"
  fi
  say "-DLLMMEM_TESTS_CUDA12=$home"
}

# find_nvbench: prints CMake's arguments for NVBench's headers and library, as the package of the Python index has them for this
# nvcc, in build/nvbench. Nothing where they are not to be had: its rows are then left out.
nvbench_package=cuda-bench==0.3.0
find_nvbench() {
  local home=$PWD/build/nvbench major
  find_nvcc || return 0
  if [[ ! -d $home/cuda ]]; then
    mkdir -p "$home"
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$home" "$nvbench_package" >&2 || return 0
    python3 -m zipfile -e "$home"/*.whl "$home" >&2 || return 0
  fi
  major=$(nvcc --version | sed -nE 's/.*release ([0-9]+).*/\1/p')
  [[ ! -d $home/cuda/bench/cu$major/nvbench ]] || say "-DLLMMEM_BENCH_NVBENCH=$home/cuda/bench/cu$major/nvbench"
}

# logged NAME COMMAND...: the command's output goes to build/log/NAME, and is shown when it fails.
logged() {
  local log=build/log/$1
  shift
  mkdir -p build/log
  if ! "$@" >"$log" 2>&1 </dev/null; then
    cat "$log"
    die "failed: $* (all of it is above and in $log)"
  fi
  # CMake warns of everything that will not be tested.
  sed -nE '/^CMake Warning/,/^$/p; /^-- (gates|benchmarks): /p' "$log"
}

# configure NAME CMAKE_ARGUMENT...
configure() {
  local log=$1-configure
  shift
  logged "$log" cmake "$@"
  # Given another compiler than last time, CMake starts from nothing and forgets every other setting, such as the kinds of tests.
  if grep -q "require your cache to be deleted" "build/log/$log"; then
    logged "$log" cmake "$@"
  fi
}

# build_preset PRESET [CMAKE_ARGUMENT...]
build_preset() {
  local preset=$1
  shift
  configure "$preset" --preset "$preset" "$@"
  local keep_going=()
  if [[ -f build/$preset/build.ninja ]]; then
    keep_going=(-- -k 0) # show every error, not the first
  fi
  logged "$preset-build" cmake --build --preset "$preset" --parallel "$jobs" "${keep_going[@]}"
}

# Sets tsan_launcher to what runs programs of build/tsan here: nothing, or setarch -R.
# shellcheck disable=SC2034 # those that source this file use it
tsan_launcher=()
find_tsan_launcher() {
  local programs=(build/tsan/bin/test_*_concurrent)
  if ! "${programs[0]}" --version >/dev/null 2>&1 && setarch -R "${programs[0]}" --version >/dev/null 2>&1; then
    say "the thread sanitizer cannot handle this kernel's address randomisation: tests run without it (setarch -R)"
    # shellcheck disable=SC2034
    tsan_launcher=(setarch -R)
  fi
}
