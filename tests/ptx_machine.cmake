# Every device test as a program that needs no GPU: nvcc makes PTX of it, and tests/ptx_machine executes that PTX in the
# place of the CUDA runtime. One program runs on every architecture; each is a test of its own, labelled `ptx`.
set(LLMMEM_PTX_ARCHITECTURES
    "80;90"
    CACHE STRING "Virtual architectures whose PTX the tests labelled `ptx` execute")
set(LLMMEM_PTX_TESTS
    ""
    CACHE STRING "Names of the tests labelled `ptx` to build, without the architecture; empty: all")

option(LLMMEM_PTX_OF_EACH "Compile every device test for each architecture, not only those whose code depends on it" ON)
# Without, the others are compiled for the lowest one: a newer device executes that PTX as well. What depends on the
# architecture is how fp8 is converted (include/llmmem/kernels/detail/e4m3_steps.hpp), and what CUB does.
set(depends_on_architecture "^ptx_machine/(arithmetic|conversions|machine|tensor_cores|unknown)$|^kernels/(elements|kernel_costs|kv_kernels|number_kernels)$|^interop/cccl$")

# Rows of 32 lanes are what vector instructions are for. Products and sums stay apart but where PTX joins them.
add_library(
  llmmem_ptx_machine OBJECT
  ptx_machine/runtime/allocations.cpp
  ptx_machine/runtime/captures.cpp
  ptx_machine/runtime/copies.cpp
  ptx_machine/runtime/devices.cpp
  ptx_machine/runtime/errors.cpp
  ptx_machine/runtime/kernels.cpp
  ptx_machine/runtime/scheduler.cpp
  ptx_machine/runtime/state.cpp
  ptx_machine/runtime/streams.cpp
  ptx_machine/runtime/virtual_memory.cpp)
target_include_directories(llmmem_ptx_machine PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_include_directories(llmmem_ptx_machine SYSTEM PRIVATE "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}")
target_compile_features(llmmem_ptx_machine PRIVATE cxx_std_20)
target_compile_options(llmmem_ptx_machine PRIVATE -O3 -march=native -fno-strict-aliasing -ffp-contract=off)
target_link_libraries(llmmem_ptx_machine PUBLIC Threads::Threads PRIVATE llmmem_warnings)

set(architectures "${LLMMEM_PTX_ARCHITECTURES}")
list(TRANSFORM architectures APPEND -virtual)

# Random worlds of the tests that take longest; scripts/soak goes through all. Every other test goes through all here, too.
set(worlds_of_kernels/check_kernels 60)
set(worlds_of_kernels/kv_kernels 150)
set(worlds_of_paged_decode/paged_decode 1)

# Where tests write what they executed. An earlier run's profiles would be added to.
list(GET LLMMEM_PTX_ARCHITECTURES -1 last_architecture)
set(profiles "${CMAKE_CURRENT_BINARY_DIR}/profiles")
add_test(NAME "${LLMMEM_TEST_PREFIX}empty_profiles" COMMAND "${CMAKE_COMMAND}" -DPROFILES=${profiles} -P
                                                            "${CMAKE_CURRENT_SOURCE_DIR}/ptx_machine/empty_profiles.cmake")
set_tests_properties("${LLMMEM_TEST_PREFIX}empty_profiles" PROPERTIES LABELS ptx FIXTURES_SETUP "${LLMMEM_TEST_PREFIX}profiles")

# llmmem_add_ptx_test(<name> <source> [SEEDS <count>] [ARGUMENTS <argument>...]): <name> is the test's in ctest, without the architecture. Exit status
# 77, "no device", is a failure here. With SEEDS it runs once more, with a few worlds, in that many orders of its
# asynchronous work.
function(llmmem_add_ptx_test name source)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "SEEDS" "ARGUMENTS")
  if(LLMMEM_PTX_TESTS AND NOT name IN_LIST LLMMEM_PTX_TESTS)
    return()
  endif()
  string(REPLACE "/" "_" target "ptx_${name}")
  add_executable(${target} "${source}")
  set(compiled_for "${architectures}")
  if(NOT LLMMEM_PTX_OF_EACH AND NOT name MATCHES "${depends_on_architecture}")
    list(GET architectures 0 compiled_for)
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${compiled_for}" CUDA_RUNTIME_LIBRARY None)
  target_link_libraries(${target} PRIVATE llmmem_test_support llmmem_ptx_machine llmmem_warnings)
  if(name MATCHES "^kernels/")
    set_property(GLOBAL APPEND PROPERTY llmmem_kernel_programs ${target})
  endif()
  # The host's part runs for seconds: to optimise it further takes longer than that saves.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda;--no-compress;-lineinfo;-Xcompiler=-Og>)
  if(name MATCHES "cccl")
    target_include_directories(${target} BEFORE PRIVATE $<TARGET_PROPERTY:llmmem::cccl,INTERFACE_INCLUDE_DIRECTORIES>)
  endif()
  foreach(architecture IN LISTS LLMMEM_PTX_ARCHITECTURES)
    # A whole model: its kernels have tests of their own, which run on each.
    if(name STREQUAL "paged_decode/paged_decode" AND NOT LLMMEM_PTX_OF_EACH AND NOT architecture EQUAL last_architecture)
      continue()
    endif()
    set(test "${LLMMEM_TEST_PREFIX}${name}_ptx${architecture}")
    set(environment "PTX_MACHINE_ARCHITECTURE=${architecture}")
    if(DEFINED "worlds_of_${name}")
      list(APPEND environment "LLMMEM_TEST_WORLDS=${worlds_of_${name}}")
    endif()
    # Both are legal: lanes that parted at a branch join behind it, as devices mostly have it, or only where an instruction
    # joins them. Each architecture runs one of the two. What kernels cost is counted as devices mostly run them.
    if(architecture LESS 89 AND NOT name MATCHES "^ptx_machine/|/kernel_costs$")
      list(APPEND environment "PTX_MACHINE_APART=1")
    endif()
    add_test(NAME "${test}" COMMAND ${target} ${arg_ARGUMENTS})
    # The last architecture's runs say what they executed: see device_coverage below.
    if(architecture EQUAL last_architecture AND NOT name MATCHES "^ptx_machine/")
      list(APPEND environment "PTX_MACHINE_PROFILE_FILE=${profiles}/${target}.txt")
      set_tests_properties("${test}" PROPERTIES FIXTURES_REQUIRED "${LLMMEM_TEST_PREFIX}profiles" FIXTURES_SETUP
                                                "${LLMMEM_TEST_PREFIX}device_coverage")
    endif()
    set_tests_properties("${test}" PROPERTIES LABELS ptx TIMEOUT 900 ENVIRONMENT "${environment}")
  endforeach()
  if(arg_SEEDS)
    set(test "${LLMMEM_TEST_PREFIX}${name}_seeds")
    add_test(NAME "${test}" COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/ptx_machine/seeds.sh" 1 ${arg_SEEDS} $<TARGET_FILE:${target}>)
    set_tests_properties("${test}" PROPERTIES LABELS ptx TIMEOUT 900 ENVIRONMENT "LLMMEM_TEST_WORLDS=3")
  endif()
endfunction()

# What no device has: faults that are planted, orders that are chosen.
llmmem_add_ptx_test(ptx_machine/machine ptx_machine/machine_test.cu)
llmmem_add_ptx_test(ptx_machine/streams ptx_machine/streams_test.cu)
llmmem_add_ptx_test(ptx_machine/pipeline ptx_machine/pipeline_test.cu)
llmmem_add_ptx_test(ptx_machine/unknown ptx_machine/unknown_test.cu)
file(
  GLOB_RECURSE sources CONFIGURE_DEPENDS
  RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  *_gpu_test.cu)
list(FILTER sources EXCLUDE REGEX "nccl")
if(NOT TARGET llmmem::cccl)
  message(STATUS "device tests: those of CCCL are NOT built, there is no llmmem::cccl")
  list(FILTER sources EXCLUDE REGEX "cccl")
endif()
foreach(source IN LISTS sources)
  string(REGEX REPLACE "_gpu_test\\.cu$" "" name "${source}")
  # One order of paged_decode takes as long as all seeds of another; tests of arithmetic wait after each launch.
  if(name MATCHES "^ptx_machine/|^paged_decode/paged_decode$|^kernels/elements$")
    llmmem_add_ptx_test("${name}" "${source}")
  else()
    llmmem_add_ptx_test("${name}" "${source}" SEEDS 5)
  endif()
endforeach()
# What each kernel costs a device, compared with the page that says it.
llmmem_add_ptx_test(kernels/kernel_costs kernels/kernel_costs.cu ARGUMENTS "${PROJECT_SOURCE_DIR}/docs/benchmarks/kernel_costs.md")
llmmem_add_ptx_test(device_step "${PROJECT_SOURCE_DIR}/examples/device_step/device_step.cu" SEEDS 15)

# RMM's adaptors over spaces, and spaces over its resources: the host's part alone, with the headers of CCCL that RMM brings.
set(LLMMEM_TESTS_RMM
    ""
    CACHE PATH "Folder with librmm and rapids_logger as pip unpacks them; empty: the test of RMM is not built")
if(LLMMEM_TESTS_RMM)
  llmmem_add_ptx_test(interop/rmm interop/rmm_parts.cpp)
  if(TARGET ptx_interop_rmm)
    target_include_directories(ptx_interop_rmm SYSTEM PRIVATE "${LLMMEM_TESTS_RMM}/librmm/include/rapids" "${LLMMEM_TESTS_RMM}/librmm/include"
                                                              "${LLMMEM_TESTS_RMM}/rapids_logger/include" "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}")
    target_compile_options(ptx_interop_rmm PRIVATE -O0)
    target_link_libraries(ptx_interop_rmm PRIVATE "${LLMMEM_TESTS_RMM}/librmm/lib64/librmm.so"
                                                  "${LLMMEM_TESTS_RMM}/rapids_logger/lib64/librapids_logger.so")
  endif()
else()
  message(STATUS "device tests: that of RMM is NOT built, LLMMEM_TESTS_RMM names no folder")
endif()

# cuFile itself needs a device: it is compiled, and says without one why it does not work.
if(TARGET llmmem::cufile AND (NOT LLMMEM_PTX_TESTS OR "transfer/cufile" IN_LIST LLMMEM_PTX_TESTS))
  add_executable(cufile_without_device transfer/cufile_without_device.cpp)
  target_link_libraries(cufile_without_device PRIVATE llmmem::cufile llmmem::cuda llmmem_warnings)
  target_compile_options(cufile_without_device PRIVATE -O0)
  add_test(NAME "${LLMMEM_TEST_PREFIX}transfer/cufile_without_device" COMMAND cufile_without_device)
  set_tests_properties("${LLMMEM_TEST_PREFIX}transfer/cufile_without_device" PROPERTIES LABELS ptx TIMEOUT 60 SKIP_RETURN_CODE 77)
endif()

# NCCL opens a device by itself: its test is compiled here, and runs on devices only.
if(TARGET llmmem::nccl AND NOT LLMMEM_PTX_TESTS)
  add_library(nccl_transport_gpu_compiles OBJECT comm/nccl_transport_gpu_test.cu)
  set_target_properties(nccl_transport_gpu_compiles PROPERTIES CUDA_ARCHITECTURES 90-virtual)
  target_link_libraries(nccl_transport_gpu_compiles PRIVATE llmmem_test_support llmmem::nccl llmmem_warnings)
endif()

# How much of the device code all of these have executed.
if(NOT LLMMEM_PTX_TESTS)
  find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)
  add_test(
    NAME "${LLMMEM_TEST_PREFIX}device_coverage"
    COMMAND "${Python3_EXECUTABLE}" tests/ptx_machine/coverage.py "${profiles}" 99
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties("${LLMMEM_TEST_PREFIX}device_coverage" PROPERTIES LABELS ptx TIMEOUT 120 FIXTURES_REQUIRED
                                                                         "${LLMMEM_TEST_PREFIX}device_coverage")
endif()
