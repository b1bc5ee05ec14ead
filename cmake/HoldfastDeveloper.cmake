# SPDX-License-Identifier: Apache-2.0
# Settings for our own tests, benchmarks and examples: CUDA, warnings, sanitizers, ccache.

# ---- CUDA ----------------------------------------------------------------------------------------
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND CUDAToolkit_NVCC_EXECUTABLE)
  set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})  # nvcc need not be on the PATH
endif()
if(NOT DEFINED HOLDFAST_CUDA)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(holdfast_have_nvcc ON)
  endif()
endif()
option(HOLDFAST_CUDA "Build the .cu parts (needs nvcc)" ${holdfast_have_nvcc})
if(HOLDFAST_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 90-real 100-real)
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  endif()
endif()

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)  # there are none

# ---- warnings are errors, for our own targets only -----------------------------------------------
add_library(holdfast_warnings INTERFACE)
set(holdfast_warning_flags -Wall -Wextra -Wshadow -Wconversion -Werror)
string(REPLACE ";" "," holdfast_nvcc_warning_flags "${holdfast_warning_flags}")
string(APPEND holdfast_nvcc_warning_flags ",-Wno-maybe-uninitialized")  # g++ 12 sees one in cub that isn't there
target_compile_options(holdfast_warnings INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${holdfast_warning_flags};-Wpedantic>"
  # Not pedantic: nvcc's generated host code is full of line markers that it objects to.
  "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=${holdfast_nvcc_warning_flags}>")

# ---- sanitizers ------------------------------------------------------------------------------------
if(HOLDFAST_SANITIZE)
  list(JOIN HOLDFAST_SANITIZE "," holdfast_sanitizers)
  add_compile_options(-fsanitize=${holdfast_sanitizers} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${holdfast_sanitizers})
endif()

# ---- compile time ----------------------------------------------------------------------------------
find_program(HOLDFAST_CCACHE ccache)
mark_as_advanced(HOLDFAST_CCACHE)
if(HOLDFAST_CCACHE)
  foreach(language CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${HOLDFAST_CCACHE})
    endif()
  endforeach()
  set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)  # ccache saves more, and caches nothing that uses them
endif()
