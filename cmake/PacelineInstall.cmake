# cmake --install installs the library, its headers and find_package(paceline). The wheel contains the component "python" only.
include(CMakePackageConfigHelpers)

set(paceline_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/paceline")

install(
  TARGETS paceline
  EXPORT paceline-targets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT development
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT development)
install(
  EXPORT paceline-targets
  NAMESPACE paceline::
  DESTINATION "${paceline_config_dir}"
  COMPONENT development)
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/paceline-config.cmake.in" "${PROJECT_BINARY_DIR}/paceline-config.cmake"
                              INSTALL_DESTINATION "${paceline_config_dir}")
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/paceline-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/paceline-config.cmake" "${PROJECT_BINARY_DIR}/paceline-config-version.cmake"
  DESTINATION "${paceline_config_dir}"
  COMPONENT development)
install(
  FILES "${PROJECT_SOURCE_DIR}/LICENSE"
  DESTINATION "${CMAKE_INSTALL_DOCDIR}"
  COMPONENT runtime)
