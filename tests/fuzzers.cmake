# tests/fuzz/*_fuzz.cpp are libFuzzer targets; each runs for two seconds as a test, for as long as you like by
# scripts/soak. Inputs worth keeping lie in tests/fuzz/corpus/<name>/.
include(CheckCXXSourceCompiles)

file(GLOB sources CONFIGURE_DEPENDS fuzz/*_fuzz.cpp)
set(CMAKE_REQUIRED_FLAGS "-fsanitize=fuzzer,address,undefined")
check_cxx_source_compiles(
  "extern \"C\" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }" LLMMEM_HAS_LIBFUZZER)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT LLMMEM_HAS_LIBFUZZER)
  message(FATAL_ERROR "LLMMEM_TESTS asks for fuzz, which needs clang++ and its runtime (Debian: libclang-rt-19-dev)")
endif()

llmmem_need_fmt()
foreach(source IN LISTS sources)
  cmake_path(GET source STEM name)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE llmmem_test_support llmmem_trace_reader fmt::fmt) # the examples' headers print with it
  target_compile_options(${name} PRIVATE -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer,address,undefined)
  string(REGEX REPLACE "_fuzz$" "" stem "${name}")
  set(corpus "")
  if(IS_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/fuzz/corpus/${stem}")
    set(corpus "${CMAKE_CURRENT_SOURCE_DIR}/fuzz/corpus/${stem}")
  endif()
  # New inputs go to the first folder: the build tree's.
  file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/corpus/${stem}")
  set(test "${LLMMEM_TEST_PREFIX}fuzz/${stem}")
  add_test(NAME "${test}" COMMAND ${name} -max_total_time=2 -seed=1 -timeout=10 -print_final_stats=1
                                  "${CMAKE_CURRENT_BINARY_DIR}/corpus/${stem}" ${corpus})
  set_tests_properties("${test}" PROPERTIES LABELS fuzz TIMEOUT 120)
endforeach()
