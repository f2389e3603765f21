include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(llmmem_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/llmmem")

install(TARGETS llmmem EXPORT llmmemTargets FILE_SET HEADERS)
install(
  EXPORT llmmemTargets
  NAMESPACE llmmem::
  DESTINATION "${llmmem_package_dir}")

configure_package_config_file(cmake/llmmemConfig.cmake.in "${PROJECT_BINARY_DIR}/llmmemConfig.cmake"
                              INSTALL_DESTINATION "${llmmem_package_dir}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may break.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/llmmemConfigVersion.cmake" COMPATIBILITY SameMinorVersion
                                 ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/llmmemConfig.cmake" "${PROJECT_BINARY_DIR}/llmmemConfigVersion.cmake"
              cmake/LlmmemComponents.cmake DESTINATION "${llmmem_package_dir}")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
