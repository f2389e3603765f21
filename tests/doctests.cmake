# tests/<folder>/*_test.cpp make one program a folder, test_<folder>, and one ctest entry a file, <folder>/<header>.
# Files named *_concurrent_test.cpp make a program of their own, test_<folder>_concurrent, labelled `concurrent`: the
# thread sanitizer runs these only. Files named *_program_test.cpp run an example's program, and are built with the examples.
llmmem_need_doctest()
llmmem_need_nlohmann_json()

add_library(llmmem_doctest_main OBJECT support/doctest_main.cpp support/heap_counter.cpp)
# CHECK_THROWS of a [[nodiscard]] function is no value ignored.
# Assertions that are functions and no blocks of their own compile in a fifth less time; an exception inside of one ends its
# test case, which then has failed.
target_compile_definitions(llmmem_doctest_main PUBLIC DOCTEST_CONFIG_VOID_CAST_EXPRESSIONS
                                                      DOCTEST_CONFIG_SUPER_FAST_ASSERTS)
target_link_libraries(llmmem_doctest_main PUBLIC doctest::doctest PRIVATE llmmem_test_support)

# Preloaded into examples' programs: calls on files fail.
if(LLMMEM_TEST_EXAMPLES)
  add_library(llmmem_failing_calls MODULE EXCLUDE_FROM_ALL preload/failing_calls.cpp)
  target_compile_features(llmmem_failing_calls PRIVATE cxx_std_20)
  target_link_libraries(llmmem_failing_calls PRIVATE llmmem_warnings ${CMAKE_DL_LIBS})
endif()

option(LLMMEM_TESTS_ALONE "Makes a program of each test file, alone_<folder>_<header>: scripts/mutate builds one at a time"
       OFF)
set(LLMMEM_TESTS_WITHOUT
    ""
    CACHE STRING
          "Unit and concurrent tests that this tree leaves to another: folders, or regular expressions of <folder>/<name>")
set(LLMMEM_TESTS_TOGETHER
    0
    CACHE STRING "KiB of a folder's test files that one translation unit compiles at most, about; 0: each file by itself")

# llmmem_tests_together(<out> <target> <source>...): fewer translation units, in which the headers that the sources share
# are parsed, and what they instantiate is compiled, once: less time for all, more for one that changes.
# Each source is a namespace of its own, and its headers come before, in none.
function(llmmem_tests_together out target)
  set(units "")
  set(headers "")
  set(sources "")
  set(bytes 0)
  # Units of about the same size: the last would else be a small one that parses all headers again.
  set(total 0)
  foreach(source IN LISTS ARGN)
    file(SIZE "${CMAKE_CURRENT_SOURCE_DIR}/${source}" size)
    math(EXPR total "${total} + ${size}")
  endforeach()
  math(EXPR parts "${total} / (${LLMMEM_TESTS_TOGETHER} * 1024) + 1")
  math(EXPR most "${total} / ${parts}")
  list(LENGTH ARGN left)
  foreach(source IN LISTS ARGN)
    set(path "${CMAKE_CURRENT_SOURCE_DIR}/${source}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
    string(MAKE_C_IDENTIFIER "${source}" scope)
    file(STRINGS "${path}" lines REGEX "^#(include|if|ifdef|ifndef|elif|else|endif)")
    list(JOIN lines "\n" lines)
    string(APPEND headers "${lines}\n")
    string(APPEND sources "namespace ${scope} {\n#include \"${source}\"\n}\n")
    file(SIZE "${path}" size)
    math(EXPR bytes "${bytes} + ${size}")
    math(EXPR left "${left} - 1")
    if(bytes GREATER_EQUAL most OR left EQUAL 0)
      list(LENGTH units number)
      set(unit "${CMAKE_CURRENT_BINARY_DIR}/together/${target}_${number}.cpp")
      file(CONFIGURE OUTPUT "${unit}" CONTENT "${headers}\n${sources}" @ONLY)
      list(APPEND units "${unit}")
      set(headers "")
      set(sources "")
      set(bytes 0)
    endif()
  endforeach()
  set(${out} "${units}" PARENT_SCOPE)
endfunction()

function(llmmem_doctest_program target folder)
  add_executable(${target} ${ARGN})
  target_link_libraries(${target} PRIVATE llmmem_doctest_main llmmem_test_support nlohmann_json::nlohmann_json)
  # Tests of whole programs find them, and the files they read, here.
  set(examples "${LLMMEM_TEST_EXAMPLES}")
  if(TARGET ${folder})
    set(examples "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
  endif()
  target_compile_definitions(${target} PRIVATE "LLMMEM_SOURCE_DIR=\"${PROJECT_SOURCE_DIR}\""
                                               "LLMMEM_EXAMPLES_DIR=\"${examples}\"")
  if(IS_DIRECTORY "${PROJECT_SOURCE_DIR}/examples/${folder}")
    target_compile_options(${target} PRIVATE -ffp-contract=off) # as the examples themselves
    llmmem_need_CLI11()
    llmmem_need_fmt()
    target_link_libraries(${target} PRIVATE llmmem_trace_reader CLI11::CLI11 fmt::fmt)
  endif()
  if(folder STREQUAL "train_gpt" AND TARGET llmmem_failing_calls)
    add_dependencies(${target} llmmem_failing_calls)
    target_compile_definitions(${target} PRIVATE "LLMMEM_FAILING_CALLS=\"$<TARGET_FILE:llmmem_failing_calls>\"")
  endif()
  # Not for all: NCCL is some 200 MB to load.
  if(folder STREQUAL "comm" AND TARGET llmmem::nccl)
    target_link_libraries(${target} PRIVATE llmmem::nccl)
    target_compile_definitions(${target} PRIVATE LLMMEM_TESTS_NCCL)
  endif()
  # Not for all: UCX hooks the program's memory before main, and programs with an address sanitizer crash there.
  if(folder STREQUAL "pool" AND TARGET llmmem::ucx)
    target_link_libraries(${target} PRIVATE llmmem::ucx)
    target_compile_definitions(${target} PRIVATE LLMMEM_TESTS_UCX)
  endif()
  llmmem_optimise_if_listed(${target})
endfunction()

function(llmmem_add_doctests target folder label)
  set(sources ${ARGN})
  if(NOT sources OR NOT label IN_LIST LLMMEM_TESTS)
    return()
  endif()
  if(LLMMEM_TESTS_TOGETHER)
    llmmem_tests_together(units ${target} ${sources})
    llmmem_doctest_program(${target} ${folder} ${units})
  elseif(NOT LLMMEM_TESTS_ALONE)
    llmmem_doctest_program(${target} ${folder} ${sources})
  endif()
  foreach(source IN LISTS sources)
    string(REGEX REPLACE "_test\\.cpp$" "" name "${source}")
    if(LLMMEM_TESTS_ALONE)
      string(REPLACE "/" "_" target "alone_${name}")
      llmmem_doctest_program(${target} ${folder} ${source})
    endif()
    set(test "${LLMMEM_TEST_PREFIX}${name}")
    add_test(NAME "${test}" COMMAND ${target} "--source-file=*tests/${source}" --no-intro)
    # doctest calls it a success when no test ran.
    set_tests_properties("${test}" PROPERTIES LABELS ${label} TIMEOUT ${LLMMEM_TEST_TIMEOUT} FAIL_REGULAR_EXPRESSION
                                              "test cases: +0 [|] +0 passed")
    if(source MATCHES "redis")
      set_tests_properties("${test}" PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: no (hiredis|redis-server)")
    elseif(source MATCHES "_ucx_")
      set_tests_properties("${test}" PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: no UCX")
    endif()
  endforeach()
endfunction()

file(
  GLOB_RECURSE sources CONFIGURE_DEPENDS
  RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  *_test.cpp)
# They run an example's program.
if(NOT LLMMEM_TEST_EXAMPLES)
  list(FILTER sources EXCLUDE REGEX "_program_test\\.cpp$")
endif()
foreach(without IN LISTS LLMMEM_TESTS_WITHOUT)
  list(FILTER sources EXCLUDE REGEX "^(${without})(/.*)?(_test\\.cpp)?$")
endforeach()
set(folders ${sources})
list(TRANSFORM folders REPLACE "/.*$" "")
list(REMOVE_DUPLICATES folders)
foreach(folder IN LISTS folders)
  set(concurrent ${sources})
  list(FILTER concurrent INCLUDE REGEX "^${folder}/")
  set(unit ${concurrent})
  list(FILTER concurrent INCLUDE REGEX "_concurrent_test\\.cpp$")
  list(FILTER unit EXCLUDE REGEX "_concurrent_test\\.cpp$")
  llmmem_add_doctests(test_${folder} ${folder} unit ${unit})
  llmmem_add_doctests(test_${folder}_concurrent ${folder} concurrent ${concurrent})
endforeach()
