# SPDX-License-Identifier: Apache-2.0
# Holdfast::dependencies: what the headers need from the machine that compiles them.
#
# Included by the build and by the installed package alike, after they found CUDAToolkit and Threads:
# both resolve in the same way, and an installed package holds no path of the machine that built it.
if(NOT TARGET Holdfast::dependencies)
  add_library(Holdfast::dependencies INTERFACE IMPORTED)

  # <cuda/std/mdspan>, <cub/...>: the caller's CCCL if it has found one, else the toolkit's, which
  # nvcc finds by itself and a host compiler does not.
  if(TARGET CCCL::CCCL)
    target_link_libraries(Holdfast::dependencies INTERFACE CCCL::CCCL)
  else()
    foreach(_holdfast_dir IN LISTS CUDAToolkit_INCLUDE_DIRS)
      if(EXISTS ${_holdfast_dir}/cccl)
        target_include_directories(Holdfast::dependencies INTERFACE ${_holdfast_dir}/cccl)
      endif()
    endforeach()
  endif()
  target_include_directories(Holdfast::dependencies INTERFACE ${CUDAToolkit_INCLUDE_DIRS})

  # One CUDA runtime a program: the one that CMake gives to its CUDA sources.
  if(CMAKE_CUDA_RUNTIME_LIBRARY STREQUAL "Shared")
    target_link_libraries(Holdfast::dependencies INTERFACE CUDA::cudart)
  elseif(NOT CMAKE_CUDA_RUNTIME_LIBRARY STREQUAL "None")
    target_link_libraries(Holdfast::dependencies INTERFACE CUDA::cudart_static)
  endif()
  # CMake does not pass cxx_std_20 on to nvcc. A caller who enables CUDA later, or whose CMake does not
  # know that nvcc compiles C++20 (3.25.1), sets CMAKE_CUDA_STANDARD.
  if("cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
    target_compile_features(Holdfast::dependencies INTERFACE cuda_std_20)
  endif()

  target_link_libraries(Holdfast::dependencies INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
endif()
