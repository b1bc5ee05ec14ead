# SPDX-License-Identifier: Apache-2.0
# holdfast_torch: the C++ side of the PyTorch that python3 finds, or that HOLDFAST_TORCH_DIR names (the directory of the
# Python package). No target where there is none, or one without CUDA.
find_program(HOLDFAST_PYTHON NAMES python3 python)
mark_as_advanced(HOLDFAST_PYTHON)
if(NOT DEFINED HOLDFAST_TORCH_DIR AND HOLDFAST_PYTHON)
  execute_process(
    COMMAND ${HOLDFAST_PYTHON} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(HOLDFAST_TORCH_DIR "${torch_dir}" CACHE PATH "PyTorch's Python package (empty: no PyTorch)")
if(EXISTS "${HOLDFAST_TORCH_DIR}/lib/libc10_cuda.so")
  add_library(holdfast_torch INTERFACE)
  target_include_directories(holdfast_torch SYSTEM INTERFACE ${HOLDFAST_TORCH_DIR}/include)
  target_link_libraries(holdfast_torch INTERFACE
    ${HOLDFAST_TORCH_DIR}/lib/libc10_cuda.so ${HOLDFAST_TORCH_DIR}/lib/libc10.so)
  # Its CUDA runtime is a Python package of its own, which libc10_cuda.so knows how to find.
  target_link_options(holdfast_torch INTERFACE -Wl,--allow-shlib-undefined)
  target_compile_features(holdfast_torch INTERFACE cxx_std_20)
else()
  message(STATUS "PyTorch with CUDA not found: what needs it is left out")
endif()
