# cmake -DCONSUMER=... -DLLMMEM_SOURCE=... -DLLMMEM_BUILD=... -DWORK=... -DCOMPILER=... -DGENERATOR=... [-DPROGRAM=...]
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
  execute_process(COMMAND "${CMAKE_COMMAND}" --install "${LLMMEM_BUILD}" --prefix "${prefix}" OUTPUT_QUIET
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
