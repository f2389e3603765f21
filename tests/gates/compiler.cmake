# What the headers promise to this tree's compiler: each compiles alone, all of them in two translation units link, and
# misuse does not compile. In a tree with device tests the compiler is nvcc, host and device.
#
# These targets are not part of `all`: ctest builds them, so that a header that does not compile is one failed test with
# its name and not the end of the build.

# llmmem_add_build_test(<name> <target>)  a test that builds `target`, and runs it if RUN is given
function(llmmem_add_build_test name target)
  cmake_parse_arguments(PARSE_ARGV 2 arg "RUN" "" "")
  set(keep_going "")
  if(CMAKE_GENERATOR MATCHES "Ninja")
    set(keep_going -- -k 0) # report every header that fails, not the first
  endif()
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  set(test "${LLMMEM_TEST_PREFIX}${name}")
  add_test(NAME "${test}" COMMAND "${CMAKE_COMMAND}" --build "${PROJECT_BINARY_DIR}" --parallel ${cores} --target
                                  ${target} ${keep_going})
  set_tests_properties("${test}" PROPERTIES LABELS gate TIMEOUT 1800 PROCESSORS ${cores} RESOURCE_LOCK
                                            "${PROJECT_BINARY_DIR}")
  if(arg_RUN)
    add_test(NAME "${test}_runs" COMMAND ${target})
    set_tests_properties("${test}" PROPERTIES FIXTURES_SETUP "${test}")
    set_tests_properties("${test}_runs" PROPERTIES LABELS gate TIMEOUT 60 FIXTURES_REQUIRED "${test}")
  endif()
endfunction()

set(extension cpp)
set(patterns *.hpp)
set(header_target llmmem::llmmem)
if(uses_nvcc)
  set(extension cu)
  set(patterns *.hpp *.cuh)
  set(header_target llmmem::cuda)
endif()
list(TRANSFORM patterns PREPEND "${PROJECT_SOURCE_DIR}/include/llmmem/")
file(
  GLOB_RECURSE headers CONFIGURE_DEPENDS
  RELATIVE "${PROJECT_SOURCE_DIR}/include"
  ${patterns})

# The umbrella says which headers need an optional library, and which target brings it.
file(STRINGS "${PROJECT_SOURCE_DIR}/include/llmmem/llmmem.hpp" needs REGEX "^//+ +<[^>]+> needs llmmem::")
set(optional_targets "")
foreach(line IN LISTS needs)
  string(REGEX MATCH "<([^>]+)> needs (llmmem::[a-z_]+)" match "${line}")
  set(header "${CMAKE_MATCH_1}")
  set(target "${CMAKE_MATCH_2}")
  if(TARGET ${target})
    list(APPEND optional_targets ${target})
  else()
    message(STATUS "gates: <${header}> is NOT compiled, ${target} was not found")
    list(REMOVE_ITEM headers "${header}")
  endif()
endforeach()
list(REMOVE_DUPLICATES optional_targets)

# What runs, if at all, is empty: to optimise it, and to describe it to a debugger, would take most of the time.
set(cheaply -O0 -g0)
if(extension STREQUAL "cu")
  set(cheaply -Xcompiler=-O0)
endif()

# 1. Each header alone, twice, among names that other people's headers define as macros. What one lacks, one compiler
# says as well as three (LLMMEM_TESTS=alone); nvcc gets those that only it compiles. All compilers get all of them below.
# alone.py leaves out what the unit of another header shows as well.
set(alone_headers ${headers})
if(extension STREQUAL "cu")
  list(FILTER alone_headers INCLUDE REGEX "[.]cuh$")
elseif(NOT "alone" IN_LIST LLMMEM_TESTS)
  set(alone_headers "")
else()
  find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/gates/alone.py" "${PROJECT_SOURCE_DIR}/include" ${headers}
    OUTPUT_VARIABLE alone_headers
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" alone_headers "${alone_headers}")
endif()
set(alone_sources "")
foreach(unit IN LISTS alone_headers)
  string(REPLACE " " ";" unit "${unit}")
  list(GET unit -1 header)
  string(REGEX REPLACE "[/.]" "_" stem "${header}")
  list(TRANSFORM unit REPLACE "(.+)" "#include <\\1>" OUTPUT_VARIABLE include_lines)
  list(JOIN include_lines "\n" include_lines)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/alone/${stem}.${extension}")
  configure_file(gates/alone.in "${source}" @ONLY)
  list(APPEND alone_sources "${source}")
endforeach()
if(alone_sources)
  add_library(headers_alone OBJECT EXCLUDE_FROM_ALL ${alone_sources})
  target_link_libraries(headers_alone PRIVATE ${header_target} ${optional_targets} llmmem_warnings)
  set_target_properties(headers_alone PROPERTIES CUDA_ARCHITECTURES 80-virtual)
  target_compile_options(headers_alone PRIVATE ${cheaply})
  llmmem_add_build_test(headers_alone headers_alone)
endif()

# 2. One definition: two translation units with every header, in one program; in the second the other way round. nvcc takes
# minutes for each: its first has the headers that no other compiler joins, and what that unit instantiates.
if("joined" IN_LIST LLMMEM_TESTS)
  set(first_headers ${headers})
  if(extension STREQUAL "cu")
    list(FILTER first_headers INCLUDE REGEX "[.]cuh$")
    list(APPEND first_headers llmmem/paged_allocator.hpp llmmem/eviction/any.hpp llmmem/paging/block_storage.hpp
         llmmem/space/host.hpp)
  endif()
  # nvcc parses a unit twice, for the host and for the device. Headers whose code is the same in both need that once.
  set(second_headers ${headers})
  set(host_headers "")
  if(extension STREQUAL "cu")
    foreach(header IN LISTS headers)
      file(STRINGS "${PROJECT_SOURCE_DIR}/include/${header}" of_devices LIMIT_COUNT 1
           REGEX "LLMMEM_HD|__CUDA|__device__|__global__|immintrin|asm ")
      if(NOT of_devices AND header MATCHES "[.]hpp$")
        list(APPEND host_headers "${header}")
      endif()
    endforeach()
    list(REMOVE_ITEM second_headers ${host_headers})
  endif()
  foreach(each IN ITEMS first_headers second_headers host_headers)
    list(TRANSFORM ${each} REPLACE "(.+)" "#include <\\1>")
  endforeach()
  list(REVERSE second_headers)
  list(REVERSE host_headers)
  list(JOIN first_headers "\n" include_lines)
  list(JOIN second_headers "\n" reversed_lines)
  list(JOIN host_headers "\n" host_lines)
  set(odr_sources "")
  foreach(unit IN ITEMS first second)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/odr/${unit}.${extension}")
    configure_file(gates/odr_${unit}.in "${source}" @ONLY)
    list(APPEND odr_sources "${source}")
  endforeach()
  add_executable(one_definition EXCLUDE_FROM_ALL ${odr_sources})
  target_link_libraries(one_definition PRIVATE ${header_target} ${optional_targets} llmmem_warnings)
  if(NOT CMAKE_BUILD_TYPE STREQUAL "Release" OR extension STREQUAL "cu")
    target_compile_options(one_definition PRIVATE ${cheaply})
  else()
    target_compile_options(one_definition PRIVATE -O3) # as users build: compilers warn of most then
  endif()
  set_target_properties(one_definition PROPERTIES CUDA_ARCHITECTURES 80-virtual)
  llmmem_add_build_test(one_definition one_definition RUN)
endif()

# 3. Misuse that must not compile, and says why. The build type makes no difference: Debug trees have these tests.
if(extension STREQUAL "cpp" AND "misuse" IN_LIST LLMMEM_TESTS)
  file(GLOB sources CONFIGURE_DEPENDS compile_fail/*.cpp)
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    set(test "${LLMMEM_TEST_PREFIX}compile_fail/${name}")
    add_test(
      NAME "${test}"
      COMMAND "${CMAKE_COMMAND}" "-DCOMPILER=${CMAKE_CXX_COMPILER}" "-DSOURCE=${source}"
              "-DINCLUDE=${PROJECT_SOURCE_DIR}/include" -P "${CMAKE_CURRENT_LIST_DIR}/compile_fail.cmake")
    set_tests_properties("${test}" PROPERTIES LABELS gate TIMEOUT 120)
  endforeach()
endif()
