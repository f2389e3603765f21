# tests/**/*_gpu_test.cu are one program each, labelled `gpu`. They need no test framework: a machine with a GPU may be
# bare. Exit status 77 means skipped, and the program has said why.
file(
  GLOB_RECURSE sources CONFIGURE_DEPENDS
  RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  *_gpu_test.cu)
if(NOT TARGET llmmem::nccl)
  message(STATUS "device tests: those of NCCL are NOT built, llmmem::nccl was not found")
  list(FILTER sources EXCLUDE REGEX "nccl")
  set(test "${LLMMEM_TEST_PREFIX}comm/nccl_transport_gpu")
  add_test(NAME "${test}" COMMAND "${CMAKE_COMMAND}" -E echo "SKIPPED: NCCL 2.28 or newer was not found")
  set_tests_properties("${test}" PROPERTIES LABELS gpu SKIP_REGULAR_EXPRESSION "^SKIPPED")
endif()
if(NOT TARGET llmmem::cccl)
  message(STATUS "device tests: those of CCCL are NOT built, there is no llmmem::cccl")
  list(FILTER sources EXCLUDE REGEX "cccl")
endif()
foreach(source IN LISTS sources)
  string(REGEX REPLACE "_gpu_test\\.cu$" "" name "${source}")
  string(REPLACE "/" "_" target "${name}_gpu_test")
  add_executable(${target} "${source}")
  target_link_libraries(${target} PRIVATE llmmem_test_support llmmem::cuda)
  if(name MATCHES "nccl")
    target_link_libraries(${target} PRIVATE llmmem::nccl)
  endif()
  if(name MATCHES "cccl")
    target_link_libraries(${target} PRIVATE llmmem::cccl)
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda>)
  set(test "${LLMMEM_TEST_PREFIX}${name}_gpu")
  add_test(NAME "${test}" COMMAND ${target})
  set_tests_properties("${test}" PROPERTIES LABELS gpu TIMEOUT 300 SKIP_RETURN_CODE 77)
endforeach()

# The example that runs on a device.
add_executable(device_step_gpu_test "${PROJECT_SOURCE_DIR}/examples/device_step/device_step.cu")
target_link_libraries(device_step_gpu_test PRIVATE llmmem_test_support llmmem::cuda)
add_test(NAME "${LLMMEM_TEST_PREFIX}device_step_gpu" COMMAND device_step_gpu_test)
set_tests_properties("${LLMMEM_TEST_PREFIX}device_step_gpu" PROPERTIES LABELS gpu TIMEOUT 300 SKIP_RETURN_CODE 77)
