# cmake -DCOMPILER=... -DSOURCE=... -DINCLUDE=... -P compile_fail.cmake
#
# SOURCE must compile with LLMMEM_COMPILE_FAIL_CONTROL defined, and must not compile without, with an error that matches
# its first line, `// expect: <regular expression>`. The control keeps it from failing for another reason. A second line
# `// flags: <flags>` is for what must not compile.
file(STRINGS "${SOURCE}" flags REGEX "^// flags: ")
string(REGEX REPLACE "^// flags: " "" flags "${flags}")
separate_arguments(flags UNIX_COMMAND "${flags}")
file(STRINGS "${SOURCE}" lines LIMIT_COUNT 1)
if(NOT lines MATCHES "^// expect: (.+)$")
  message(FATAL_ERROR "${SOURCE}: the first line must be: // expect: <regular expression>")
endif()
set(expected "${CMAKE_MATCH_1}")

set(command "${COMPILER}" -std=c++20 -fsyntax-only -Wall -Wextra -Werror "-I${INCLUDE}" "${SOURCE}")
execute_process(COMMAND ${command} -DLLMMEM_COMPILE_FAIL_CONTROL RESULT_VARIABLE status ERROR_VARIABLE output)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${SOURCE}: the control does not compile:\n${output}")
endif()

set(ENV{LC_ALL} C)
execute_process(COMMAND ${command} ${flags} RESULT_VARIABLE status ERROR_VARIABLE output)
if(status EQUAL 0)
  message(FATAL_ERROR "${SOURCE}: compiles, and must not (expected an error like: ${expected})")
endif()
if(NOT output MATCHES "${expected}")
  message(FATAL_ERROR "${SOURCE}: fails to compile, but no error matches: ${expected}\n${output}")
endif()
