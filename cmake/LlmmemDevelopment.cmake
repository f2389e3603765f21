# What our own tests, benchmarks and examples are built with. Consumers never read this file.

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_EXTENSIONS OFF)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")

  find_program(LLMMEM_CCACHE ccache DOC "Compiler cache; -NOTFOUND builds without")
  mark_as_advanced(LLMMEM_CCACHE)
  if(LLMMEM_CCACHE)
    foreach(language IN ITEMS CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER "${LLMMEM_CCACHE}")
      endif()
    endforeach()
  endif()
endif()

option(LLMMEM_WERROR "Make the warnings of our own targets errors" ON)

# The warnings our own targets are held to. Link PRIVATE.
set(llmmem_warning_flags -Wall -Wextra -Wconversion -Wsign-conversion -Wpedantic -Wshadow -Wold-style-cast)
# -Wold-style-cast is no CUDA flag: nvcc's own generated host code casts that way.
set(llmmem_cuda_warning_flags -Xcompiler=-Wall,-Wextra,-Wshadow)
if(LLMMEM_WERROR)
  list(APPEND llmmem_warning_flags -Werror)
  list(APPEND llmmem_cuda_warning_flags -Xcompiler=-Werror -Werror=all-warnings)
endif()
add_library(llmmem_warnings INTERFACE)
target_compile_options(
  llmmem_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${llmmem_warning_flags}>"
                            "$<$<COMPILE_LANGUAGE:CUDA>:${llmmem_cuda_warning_flags}>")
# g++ spends an eighth of a large unit's time on collecting garbage that fits into memory.
target_compile_options(llmmem_warnings INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1000000>")

# In a tree that does not optimise: programs that run for longer than they take to optimise.
set(LLMMEM_OPTIMISED
    ""
    CACHE STRING "Programs of tests and examples to compile with -Og")
function(llmmem_optimise_if_listed target)
  if(target IN_LIST LLMMEM_OPTIMISED)
    target_compile_options(${target} PRIVATE -Og)
  endif()
endfunction()

# llmmem_use_instances(<target> <primitive>...): the target's sources declare what the default form of each primitive
# instantiates, and link what is compiled once for all such targets: see docs/your_engine.md.
find_package(Threads REQUIRED)
foreach(primitive IN ITEMS checkpoint paging schedule)
  string(TOUPPER ${primitive} name)
  add_library(llmmem_${primitive}_instances STATIC EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/${primitive}_instances.cpp")
  target_link_libraries(llmmem_${primitive}_instances PRIVATE llmmem::llmmem llmmem_warnings Threads::Threads)
  target_compile_definitions(llmmem_${primitive}_instances PUBLIC LLMMEM_EXTERN_${name})
  llmmem_optimise_if_listed(llmmem_${primitive}_instances)
endforeach()
function(llmmem_use_instances target)
  foreach(primitive IN LISTS ARGN)
    target_link_libraries(${target} PRIVATE llmmem_${primitive}_instances)
  endforeach()
endfunction()

# What the reader of request traces, examples/replay_trace/read_trace.hpp, unpacks with: each library is optional, and a
# file that needs one that is missing is refused by name.
add_library(llmmem_trace_reader INTERFACE)
find_package(ZLIB QUIET)
if(ZLIB_FOUND)
  target_link_libraries(llmmem_trace_reader INTERFACE ZLIB::ZLIB)
  target_compile_definitions(llmmem_trace_reader INTERFACE LLMMEM_TRACE_ZLIB)
else()
  message(STATUS "examples: traces packed with gzip are NOT read, zlib was not found (Debian: zlib1g-dev)")
endif()
if(TARGET llmmem::zstd)
  target_link_libraries(llmmem_trace_reader INTERFACE llmmem::zstd)
  target_compile_definitions(llmmem_trace_reader INTERFACE LLMMEM_TRACE_ZSTD)
else()
  message(STATUS "examples: traces packed with zstd are NOT read, there is no llmmem::zstd (Debian: libzstd-dev)")
endif()

include(FetchContent)

# llmmem_dependency(<name> VERSION <v> DEBIAN <package> URL <url> SHA256 <hash>)
#
# A package of our tests, benchmarks or examples: the installed one if there is one, else the pinned archive, else an
# error that names what to install.
function(llmmem_dependency name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "VERSION;DEBIAN;URL;SHA256" "")
  if(TARGET ${name}::${name})
    return()
  endif()
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW) # so that our options reach projects of older CMake policies
  set(system "")
  if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.25)
    set(system SYSTEM) # so that our warnings stop at its headers
  endif()
  FetchContent_Declare(
    ${name} ${system}
    URL "${arg_URL}"
    URL_HASH "SHA256=${arg_SHA256}"
    DOWNLOAD_EXTRACT_TIMESTAMP TRUE
    FIND_PACKAGE_ARGS ${arg_VERSION} QUIET GLOBAL)
  find_package(${name} ${arg_VERSION} QUIET GLOBAL)
  if(NOT ${name}_FOUND)
    if(FETCHCONTENT_FULLY_DISCONNECTED)
      message(FATAL_ERROR "${name} ${arg_VERSION} is not installed. Debian and Ubuntu: apt install ${arg_DEBIAN}. "
                          "Else: ${arg_URL}")
    endif()
    message(STATUS "${name} ${arg_VERSION} is not installed (Debian and Ubuntu: apt install ${arg_DEBIAN}); "
                   "fetching ${arg_URL}")
  endif()
  FetchContent_MakeAvailable(${name})
endfunction()

macro(llmmem_need_doctest)
  set(DOCTEST_WITH_TESTS OFF)
  set(DOCTEST_NO_INSTALL ON)
  llmmem_dependency(
    doctest
    VERSION 2.4
    DEBIAN doctest-dev
    URL https://github.com/doctest/doctest/archive/refs/tags/v2.4.11.tar.gz
    SHA256 632ed2c05a7f53fa961381497bf8069093f0d6628c5f26286161fbd32a560186)
endmacro()

macro(llmmem_need_nlohmann_json)
  set(JSON_BuildTests OFF)
  llmmem_dependency(
    nlohmann_json
    VERSION 3.10
    DEBIAN nlohmann-json3-dev
    URL https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    SHA256 d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d)
endmacro()

macro(llmmem_need_benchmark)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  llmmem_dependency(
    benchmark
    VERSION 1.6
    DEBIAN libbenchmark-dev
    URL https://github.com/google/benchmark/archive/refs/tags/v1.8.3.tar.gz
    SHA256 6bc180a57d23d4d9515519f92b0c83d61b05b5bab188961f36ac7b06b0d9e9ce)
endmacro()

macro(llmmem_need_fmt)
  set(FMT_INSTALL OFF)
  llmmem_dependency(
    fmt
    VERSION 9
    DEBIAN libfmt-dev
    URL https://github.com/fmtlib/fmt/archive/refs/tags/10.2.1.tar.gz
    SHA256 1250e4cc58bf06ee631567523f48848dc4596133e163f02615c97f78bab6c811)
endmacro()

macro(llmmem_need_CLI11)
  set(CLI11_BUILD_TESTS OFF)
  set(CLI11_BUILD_EXAMPLES OFF)
  set(CLI11_BUILD_DOCS OFF)
  llmmem_dependency(
    CLI11
    VERSION 2.1
    DEBIAN libcli11-dev
    URL https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.4.2.tar.gz
    SHA256 f2d893a65c3b1324c50d4e682c0cdc021dd0477ae2c048544f39eed6654b699a)
endmacro()

# Turns the CUDA language on, for our own device tests only. CMake before 3.25.2 does not know that nvcc speaks C++20.
macro(llmmem_enable_cuda_language)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA"
     AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12
     AND NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_COMPILE_FEATURES cuda_std_20)
    list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
endmacro()

# Device code that is compiled and never executed: nvcc 13 may leave most optimisations out.
option(LLMMEM_CUDA_FAST_COMPILE "Compile device code of benchmarks without optimising it: a tree that runs none of them" OFF)

# llmmem_compile_fast(<target>): for a target of CUDA that such a tree only compiles.
function(llmmem_compile_fast target)
  if(LLMMEM_CUDA_FAST_COMPILE AND CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>")
  endif()
endfunction()
