# SPDX-License-Identifier: Apache-2.0
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(holdfast_package_dir ${CMAKE_INSTALL_DATADIR}/cmake/Holdfast)  # share: no architecture

install(DIRECTORY include/holdfast TYPE INCLUDE FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(TARGETS holdfast EXPORT Holdfast)
install(EXPORT Holdfast NAMESPACE Holdfast:: FILE HoldfastTargets.cmake
  DESTINATION ${holdfast_package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/HoldfastConfigVersion.cmake
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  cmake/HoldfastConfig.cmake
  cmake/HoldfastDependencies.cmake
  ${PROJECT_BINARY_DIR}/HoldfastConfigVersion.cmake
  DESTINATION ${holdfast_package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/holdfast)
