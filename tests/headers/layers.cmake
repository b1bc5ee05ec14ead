# SPDX-License-Identifier: Apache-2.0
# Fails on an #include that points up the layers of the design.
#     cmake -DINCLUDE_DIR=<directory that holds holdfast/> -P layers.cmake
cmake_minimum_required(VERSION 3.25)

# The table, lowest layer first. Headers of one layer may include each other. An entry `name` is the
# public header name.hpp (and .cuh), and whatever is behind it: detail/name.hpp, detail/name_*.hpp and
# detail/name/. An entry `name/*` is the directory, and detail/name/. The first entry that fits counts.
set(layers
  "version error view detail/process"
  "device/* detail/host_* detail/cuda_*"
  "memory_resource detail/resource_* detail/virtual_range"
  "resource/* detail/caching_*"
  "block detail/release_queue"
  "capture"
  "padded_query_buffer padded_head_vector"
  "tail_padded_allocator anchored_scratch"
  "workspace"
  "row_format"
  "kernel/* row_encode"
  "debug/* interop/*"
  "holdfast")

set(rank 0)
set(patterns "")
foreach(layer IN LISTS layers)
  string(REPLACE " " ";" entries "${layer}")
  foreach(entry IN LISTS entries)
    if(entry MATCHES "^(.*_)[*]$")
      list(APPEND patterns "^${CMAKE_MATCH_1}")
    elseif(entry MATCHES "^(.*)/[*]$")
      list(APPEND patterns "^(${CMAKE_MATCH_1}/|detail/${CMAKE_MATCH_1}[_/.])")
    else()
      list(APPEND patterns "^(${entry}[.][^/]*$|detail/${entry}[_/.])")
    endif()
    list(APPEND ranks ${rank})
  endforeach()
  math(EXPR rank "${rank} + 1")
endforeach()

set(complaints 0)
macro(complain text)
  message(NOTICE "${text}")  # no wrapping, unlike an error
  math(EXPR complaints "${complaints} + 1")
endmacro()

# rank_of(<header, relative to holdfast/> <variable>): the number of its layer, or -1.
function(rank_of header result)
  foreach(pattern rank IN ZIP_LISTS patterns ranks)
    if(header MATCHES "${pattern}")
      set(${result} ${rank} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} -1 PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE headers RELATIVE ${INCLUDE_DIR}/holdfast
  ${INCLUDE_DIR}/holdfast/*.hpp ${INCLUDE_DIR}/holdfast/*.cuh)
foreach(header IN LISTS headers)
  rank_of(${header} rank)
  if(rank EQUAL -1)
    complain("${header} has no layer: add it to the table in tests/headers/layers.cmake")
    continue()
  endif()
  file(STRINGS ${INCLUDE_DIR}/holdfast/${header} includes REGEX "^[ \t]*#[ \t]*include[ \t]*[<\"]")
  foreach(include IN LISTS includes)
    if(include MATCHES "\"(.*)\"")
      complain("${header} includes \"${CMAKE_MATCH_1}\": spell it <holdfast/...>")
    elseif(include MATCHES "<holdfast/([^>]+)>")
      set(included ${CMAKE_MATCH_1})
      rank_of(${included} included_rank)
      if(included_rank GREATER rank)
        list(GET layers ${rank} layer)
        list(GET layers ${included_rank} included_layer)
        complain("${header} (layer: ${layer}) points up to ${included} (layer: ${included_layer})")
      endif()
      if(header MATCHES "hpp$" AND included MATCHES "cuh$")
        complain("${header} includes ${included}, which needs nvcc")
      endif()
    endif()
  endforeach()
endforeach()
list(LENGTH headers count)
if(complaints)
  message(FATAL_ERROR "${count} headers read, ${complaints} complaints (above)")
endif()
message(STATUS "${count} headers read, every include points down")
