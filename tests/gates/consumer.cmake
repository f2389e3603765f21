# cmake -DCONSUMER=... -DLLMMEM_SOURCE=... -DWORK=... -DCOMPILER=... -DGENERATOR=... [-DPROGRAM=...]
#       [-DMORE=...] -P consumer.cmake
#
# Builds and runs a program that uses the library the way its users do, from nothing each time: a consumer must not work
# thanks to what an earlier run left. PROGRAM (consumer) is what it builds; exit status 77 means that it says what it
# lacks. MORE is for its configuration.
if(NOT DEFINED PROGRAM)
  set(PROGRAM consumer)
endif()
file(REMOVE_RECURSE "${WORK}")
set(prefix "${WORK}/prefix")
if(CONSUMER MATCHES "find_package")
  # Configured as a user would, on a machine without what tests, benchmarks and examples need.
  set(plain "-DFETCHCONTENT_FULLY_DISCONNECTED=ON")
  foreach(package IN ITEMS doctest benchmark nlohmann_json fmt CLI11)
    list(APPEND plain "-DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON")
  endforeach()
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${LLMMEM_SOURCE}" -B "${WORK}/plain" -G "${GENERATOR}"
                          "-DCMAKE_CXX_COMPILER=${COMPILER}" ${plain} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${CMAKE_COMMAND}" --install "${WORK}/plain" --prefix "${prefix}" OUTPUT_QUIET
                          COMMAND_ERROR_IS_FATAL ANY)
  # The package must not find its way back to the checkout.
  file(GLOB installed "${prefix}/share/cmake/llmmem/*")
  foreach(file IN LISTS installed)
    file(READ "${file}" text)
    string(FIND "${text}" "${LLMMEM_SOURCE}" position)
    if(NOT position EQUAL -1)
      message(FATAL_ERROR "${file} names the checkout ${LLMMEM_SOURCE}")
    endif()
  endforeach()
endif()

execute_process(
  COMMAND
    "${CMAKE_COMMAND}" -S "${CONSUMER}" -B "${WORK}/build" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${COMPILER}"
    "-DCMAKE_PREFIX_PATH=${prefix}" "-DFETCHCONTENT_SOURCE_DIR_LLMMEM=${LLMMEM_SOURCE}"
    -DFETCHCONTENT_FULLY_DISCONNECTED=ON ${MORE} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${WORK}/build" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${WORK}/build/${PROGRAM}" RESULT_VARIABLE status)
if(NOT status MATCHES "^(0|77)$")
  message(FATAL_ERROR "${PROGRAM} ended with ${status}")
endif()
if(CONSUMER MATCHES "subdirectory")
  execute_process(COMMAND "${CMAKE_COMMAND}" --install "${WORK}/build" --prefix "${prefix}" OUTPUT_QUIET
                          COMMAND_ERROR_IS_FATAL ANY)
  file(READ "${prefix}/share/cmake/engine/engineTargets.cmake" text)
  string(FIND "${text}" "llmmem::llmmem" position)
  if(position EQUAL -1 OR NOT EXISTS "${prefix}/share/cmake/llmmem/llmmemConfig.cmake")
    message(FATAL_ERROR "the installed engine does not name llmmem::llmmem, or llmmem is not installed with it")
  endif()
endif()
