# SPDX-License-Identifier: Apache-2.0
include(CMakeFindDependencyMacro)
find_dependency(CUDAToolkit 13.0)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/HoldfastDependencies.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/HoldfastTargets.cmake)
