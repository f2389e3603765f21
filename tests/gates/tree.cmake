# What holds for the sources as such, whatever compiles them.

# llmmem_add_gate(<name> COMMAND ... [NEEDS <program> VARIABLE <v> DEBIAN <package>])
#
# A gate whose program is missing is registered all the same, as one that did not run: ctest lists it at its end.
function(llmmem_add_gate name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NEEDS;DEBIAN" "COMMAND")
  if(arg_NEEDS)
    string(MAKE_C_IDENTIFIER "LLMMEM_${arg_NEEDS}" variable)
    string(TOUPPER ${variable} variable)
    find_program(${variable} ${arg_NEEDS})
    mark_as_advanced(${variable})
    if(NOT ${variable})
      message(WARNING "gates: ${name} will NOT run, ${arg_NEEDS} was not found (Debian: ${arg_DEBIAN})")
      set(arg_COMMAND "${CMAKE_COMMAND}" -E echo "NOT RUN: ${arg_NEEDS} was not found (Debian: ${arg_DEBIAN})")
    endif()
    list(TRANSFORM arg_COMMAND REPLACE "^PROGRAM$" "${${variable}}")
  endif()
  add_test(
    NAME "gate/${name}"
    COMMAND ${arg_COMMAND}
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties("gate/${name}" PROPERTIES LABELS gate TIMEOUT 600 SKIP_REGULAR_EXPRESSION "^NOT RUN: ")
endfunction()

set(gates "${CMAKE_CURRENT_LIST_DIR}")
set(work "${CMAKE_CURRENT_BINARY_DIR}/gates")
file(MAKE_DIRECTORY "${work}")

# A second compiler reads every header here: scripts/test --all alone runs it.
if("tidy" IN_LIST LLMMEM_TESTS)
  llmmem_add_gate(
    tidy
    NEEDS clang-tidy-19
    DEBIAN clang-tidy-19
    COMMAND bash "${gates}/tidy.sh" PROGRAM "${work}/tidy")
  # The oldest clang++ that the README names, which lacks features of the others.
  llmmem_add_gate(
    oldest_clang
    NEEDS clang++-16
    DEBIAN clang-16
    COMMAND PROGRAM -std=c++20 -fsyntax-only -Iinclude -Wall -Wextra -Wconversion -Wsign-conversion -Wpedantic -Wshadow -Wold-style-cast
            -Werror -include llmmem/llmmem.hpp -x c++ /dev/null)
endif()
if(NOT "tree" IN_LIST LLMMEM_TESTS)
  return()
endif()

# Programs of other people's that use the library, built as they would build them.
foreach(consumer IN ITEMS fetchcontent find_package subdirectory)
  llmmem_add_gate(
    consumer_${consumer}
    COMMAND "${CMAKE_COMMAND}" "-DCONSUMER=${CMAKE_CURRENT_SOURCE_DIR}/consumer_${consumer}"
            "-DLLMMEM_SOURCE=${PROJECT_SOURCE_DIR}" "-DWORK=${work}/${consumer}"
            "-DCOMPILER=${CMAKE_CXX_COMPILER}" "-DGENERATOR=${CMAKE_GENERATOR}" -P "${gates}/consumer.cmake")
endforeach()

find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)
llmmem_add_gate(header_rules COMMAND Python3::Interpreter "${gates}/header_rules.py")
llmmem_add_gate(layers COMMAND Python3::Interpreter "${gates}/layers.py")
llmmem_add_gate(
  ctags
  NEEDS ctags
  DEBIAN universal-ctags
  COMMAND Python3::Interpreter "${gates}/ctags.py" PROGRAM)
llmmem_add_gate(words COMMAND Python3::Interpreter "${gates}/words.py")
llmmem_add_gate(doc_links COMMAND Python3::Interpreter "${gates}/doc_links.py")
llmmem_add_gate(measured_picture COMMAND Python3::Interpreter scripts/measured_picture.py --check)
llmmem_add_gate(primitive_pictures COMMAND Python3::Interpreter scripts/primitive_pictures.py --check)
llmmem_add_gate(mutations_apply COMMAND Python3::Interpreter scripts/mutate.py --check tests/mutations)
llmmem_add_gate(include_cost COMMAND Python3::Interpreter "${gates}/include_cost.py" "${CMAKE_CXX_COMPILER}")
llmmem_add_gate(documented_code COMMAND Python3::Interpreter "${gates}/documented_code.py" "${CMAKE_CXX_COMPILER}")
llmmem_add_gate(
  format
  NEEDS clang-format-19
  DEBIAN clang-format-19
  COMMAND bash "${gates}/format.sh" PROGRAM)
llmmem_add_gate(
  doxygen
  NEEDS doxygen
  DEBIAN doxygen
  COMMAND Python3::Interpreter "${gates}/doxygen.py" PROGRAM "${work}/doxygen")
llmmem_add_gate(
  shellcheck
  NEEDS shellcheck
  DEBIAN shellcheck
  COMMAND PROGRAM --external-sources scripts/lib.sh scripts/demo scripts/test scripts/bench scripts/soak scripts/mutate
          scripts/gpu scripts/docs scripts/aarch64 .ci/run tests/scripts/gpu_script.sh)
llmmem_add_gate(gpu_script COMMAND bash tests/scripts/gpu_script.sh "${work}/gpu_script")
llmmem_add_gate(torch_twins COMMAND Python3::Interpreter benchmarks/kernels/torch_twins.py --self-test)
