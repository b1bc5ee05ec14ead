# SPDX-License-Identifier: Apache-2.0
# holdfast_torch: the C++ side of the PyTorch that python3 finds, or that HOLDFAST_TORCH_DIR names (the directory of the
# Python package). No target where there is none, or none that was built for this toolkit's major version.
find_program(HOLDFAST_PYTHON NAMES python3 python)
mark_as_advanced(HOLDFAST_PYTHON)
set(HOLDFAST_TORCH_DIR "" CACHE PATH "PyTorch's Python package (empty: what python3 finds)")
set(torch_dir "${HOLDFAST_TORCH_DIR}")
if(NOT torch_dir AND HOLDFAST_PYTHON)
  execute_process(
    COMMAND ${HOLDFAST_PYTHON} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(torch_cuda "")
if(EXISTS "${torch_dir}/lib/libc10_cuda.so" AND EXISTS "${torch_dir}/version.py")
  file(STRINGS ${torch_dir}/version.py torch_cuda REGEX "^cuda.*= '[0-9]+")
  string(REGEX REPLACE "^cuda.*= '([0-9]+).*" "\\1" torch_cuda "${torch_cuda}")
endif()
if(torch_cuda AND torch_cuda EQUAL CUDAToolkit_VERSION_MAJOR)
  set(holdfast_torch_dir ${torch_dir})
  add_library(holdfast_torch INTERFACE)
  target_include_directories(holdfast_torch SYSTEM INTERFACE ${torch_dir}/include)
  target_link_libraries(holdfast_torch INTERFACE ${torch_dir}/lib/libc10_cuda.so ${torch_dir}/lib/libc10.so)
  # Torch's is the shared CUDA runtime: ours in the same program, too, which as an option comes before the static one.
  target_link_options(holdfast_torch INTERFACE -Wl,--allow-shlib-undefined $<TARGET_FILE:CUDA::cudart>
    -Wl,-rpath,$<TARGET_FILE_DIR:CUDA::cudart>)
else()
  message(STATUS "No PyTorch for CUDA ${CUDAToolkit_VERSION_MAJOR} found: what needs it is left out")
endif()
