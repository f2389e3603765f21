# examples/mpi_ranks with four ranks on this machine, where there is an MPI.
set(test "${LLMMEM_TEST_PREFIX}examples/mpi_ranks")
set(program "${LLMMEM_TEST_EXAMPLES}/mpi_ranks")
if(NOT TARGET mpi_ranks AND NOT EXISTS "${program}")
  add_test(NAME "${test}" COMMAND "${CMAKE_COMMAND}" -E echo
                                  "SKIPPED: no MPI was found (Debian: libmpich-dev or libopenmpi-dev)")
  set_tests_properties("${test}" PROPERTIES SKIP_REGULAR_EXPRESSION "^SKIPPED: ")
  return()
endif()
find_program(LLMMEM_MPIEXEC NAMES mpiexec mpirun HINTS "${MPIEXEC_EXECUTABLE}" DOC "Starts the ranks of MPI programs")
mark_as_advanced(LLMMEM_MPIEXEC)
if(NOT LLMMEM_MPIEXEC)
  add_test(NAME "${test}" COMMAND "${CMAKE_COMMAND}" -E echo "SKIPPED: there is an MPI, but no mpiexec")
  set_tests_properties("${test}" PROPERTIES SKIP_REGULAR_EXPRESSION "^SKIPPED: ")
  return()
endif()
add_test(NAME "${test}" COMMAND "${LLMMEM_MPIEXEC}" -n 4 "${program}")
# Open MPI starts neither as root nor more ranks than cores unless told to; others do not look at these.
set_tests_properties(
  "${test}"
  PROPERTIES LABELS unit TIMEOUT 120 PASS_REGULAR_EXPRESSION "4 ranks: .* are right" ENVIRONMENT
             "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1")
