# What nvcc makes of the library: a project that uses it from CUDA C++, and the code of its kernels. No GPU is needed.
add_test(
  NAME "${LLMMEM_TEST_PREFIX}consumer_cuda"
  COMMAND
    "${CMAKE_COMMAND}" "-DCONSUMER=${CMAKE_CURRENT_SOURCE_DIR}/consumer_cuda" -DPROGRAM=engine "-DLLMMEM_SOURCE=${PROJECT_SOURCE_DIR}"
    "-DWORK=${CMAKE_CURRENT_BINARY_DIR}/consumer_cuda"
    "-DCOMPILER=${CMAKE_CXX_COMPILER}" "-DGENERATOR=${CMAKE_GENERATOR}"
    "-DMORE=-DCMAKE_CUDA_COMPILER=${CMAKE_CUDA_COMPILER};-DCMAKE_CUDA_ARCHITECTURES=80-real\\;90-real\\;100-real\\;120" -P
    "${CMAKE_CURRENT_LIST_DIR}/consumer.cmake")
set_tests_properties("${LLMMEM_TEST_PREFIX}consumer_cuda" PROPERTIES LABELS gate TIMEOUT 600)

# The same by clang++ with another toolkit, and all kernels by its front end.
set(LLMMEM_TESTS_CUDA12
    ""
    CACHE PATH "Folder of a CUDA Toolkit 12 for clang++: include/, bin/ptxas, nvvm/; empty: clang++ compiles no device code")
find_program(LLMMEM_CLANGXX clang++-19)
if(LLMMEM_TESTS_CUDA12 AND LLMMEM_CLANGXX)
  add_test(NAME "${LLMMEM_TEST_PREFIX}consumer_clang_cuda" COMMAND bash "${CMAKE_CURRENT_LIST_DIR}/clang_cuda.sh" "${LLMMEM_CLANGXX}"
                                                                   "${LLMMEM_TESTS_CUDA12}" "${CMAKE_CURRENT_BINARY_DIR}")
  set_tests_properties("${LLMMEM_TEST_PREFIX}consumer_clang_cuda" PROPERTIES LABELS gate TIMEOUT 600 WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
endif()

# The kernels' code, read in PTX and in the report of ptxas. Device tests have all kernels for sm_80 already, except in a
# tree without them, or with some of them.
find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)
set(device_code "${CMAKE_CURRENT_BINARY_DIR}/device_code")
get_property(programs GLOBAL PROPERTY llmmem_kernel_programs)
set(ptx_files "${device_code}/kernels_90.ptx")
set(programs_of_tests "")
if(programs AND 80 IN_LIST LLMMEM_PTX_ARCHITECTURES AND NOT LLMMEM_PTX_TESTS)
  foreach(program IN LISTS programs)
    list(APPEND programs_of_tests "$<TARGET_FILE:${program}>")
    list(APPEND ptx_files "${device_code}/${program}_80.ptx")
  endforeach()
  list(PREPEND programs_of_tests --programs)
else()
  list(APPEND ptx_files "${device_code}/kernels_80.ptx")
endif()
add_test(NAME "${LLMMEM_TEST_PREFIX}device_code"
         COMMAND Python3::Interpreter "${CMAKE_CURRENT_LIST_DIR}/device_code.py" "${CMAKE_CUDA_COMPILER}"
                 "${CMAKE_CURRENT_SOURCE_DIR}/kernels/all_kernels.cu" "${PROJECT_SOURCE_DIR}/include" "${device_code}"
                 ${programs_of_tests})
set_tests_properties("${LLMMEM_TEST_PREFIX}device_code" PROPERTIES LABELS gate TIMEOUT 900 FIXTURES_SETUP device_code)

# The interpreter that executes device tests knows every instruction of that PTX, also those that no test executes.
add_executable(read_ptx "${PROJECT_SOURCE_DIR}/tests/ptx_machine/read_ptx.cpp")
target_include_directories(read_ptx PRIVATE "${PROJECT_SOURCE_DIR}/tests")
target_compile_features(read_ptx PRIVATE cxx_std_20)
target_compile_options(read_ptx PRIVATE -O1 -fno-strict-aliasing)
target_link_libraries(read_ptx PRIVATE llmmem_warnings)
add_test(NAME "${LLMMEM_TEST_PREFIX}known_instructions"
         COMMAND read_ptx ${ptx_files})
set_tests_properties("${LLMMEM_TEST_PREFIX}known_instructions" PROPERTIES LABELS gate TIMEOUT 120 FIXTURES_REQUIRED
                                                                          device_code)
