# SPDX-License-Identifier: Apache-2.0
# holdfast_rmm: RMM, where it is found. By its files: its CMake package needs a newer CMake than we do.
set(HOLDFAST_INTEROP_DIR ${PROJECT_SOURCE_DIR}/build/interop CACHE PATH "Where others' libraries are looked for first")
foreach(cached HOLDFAST_RMM_INCLUDE_DIR HOLDFAST_RMM_LIBRARY HOLDFAST_RAPIDS_LOGGER_INCLUDE_DIR
    HOLDFAST_RAPIDS_LOGGER_LIBRARY HOLDFAST_CCCL_DIR)
  if(DEFINED ${cached} AND NOT EXISTS "${${cached}}")
    unset(${cached} CACHE)  # it went, or was not there the last time
  endif()
endforeach()
find_path(HOLDFAST_RMM_INCLUDE_DIR rmm/mr/pool_memory_resource.hpp HINTS ${HOLDFAST_INTEROP_DIR}/librmm/include)
find_library(HOLDFAST_RMM_LIBRARY rmm HINTS ${HOLDFAST_INTEROP_DIR}/librmm/lib64)
find_path(HOLDFAST_RAPIDS_LOGGER_INCLUDE_DIR rapids_logger/logger.hpp HINTS ${HOLDFAST_INTEROP_DIR}/rapids_logger/include)
find_library(HOLDFAST_RAPIDS_LOGGER_LIBRARY rapids_logger HINTS ${HOLDFAST_INTEROP_DIR}/rapids_logger/lib64)
mark_as_advanced(HOLDFAST_RMM_INCLUDE_DIR HOLDFAST_RMM_LIBRARY HOLDFAST_RAPIDS_LOGGER_INCLUDE_DIR
  HOLDFAST_RAPIDS_LOGGER_LIBRARY)
if(HOLDFAST_RMM_INCLUDE_DIR AND HOLDFAST_RMM_LIBRARY AND HOLDFAST_RAPIDS_LOGGER_INCLUDE_DIR AND HOLDFAST_RAPIDS_LOGGER_LIBRARY)
  message(STATUS "RMM is ${HOLDFAST_RMM_LIBRARY}")
  add_library(holdfast_rmm INTERFACE)
  # It brings the CCCL that it was built with.
  target_include_directories(holdfast_rmm SYSTEM INTERFACE ${HOLDFAST_RMM_INCLUDE_DIR}/rapids ${HOLDFAST_RMM_INCLUDE_DIR}
    ${HOLDFAST_RAPIDS_LOGGER_INCLUDE_DIR})
  target_link_libraries(holdfast_rmm INTERFACE ${HOLDFAST_RMM_LIBRARY} ${HOLDFAST_RAPIDS_LOGGER_LIBRARY})
endif()
