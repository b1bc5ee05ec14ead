# SPDX-License-Identifier: Apache-2.0
# Fails unless README.md shows code that is compiled, and results that are printed.
#     cmake -DPROGRAM_DIR=<where the examples were built> -P check_readme.cmake
#
# A code block of README.md behind one of these marks must be
#     <!-- region FILE NAME -->       what is between "// [NAME]" and "// [/NAME]" in FILE, less its indentation
#     <!-- output PROGRAM -->         what PROGRAM prints
cmake_minimum_required(VERSION 3.25)

cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH source_dir)
set(readme_file ${source_dir}/README.md)

# The lines of a region.
function(region out file name)
  file(READ ${source_dir}/${file} text)
  if(NOT text MATCHES "\n( *)// \\[${name}\\]\n(.*\n) *// \\[/${name}\\]\n")
    message(FATAL_ERROR "${file} has no region ${name}")
  endif()
  set(indentation "${CMAKE_MATCH_1}")
  string(REPLACE "\n${indentation}" "\n" text "\n${CMAKE_MATCH_2}")
  string(SUBSTRING "${text}" 1 -1 text)
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# What a program prints.
function(output out program)
  execute_process(COMMAND ${PROGRAM_DIR}/${program} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

file(READ ${readme_file} rest)
set(checked 0)
while(rest MATCHES "<!-- (region|output) ([^ ]+) ?([^ ]*) -->\n```[a-z]*\n")
  set(kind ${CMAKE_MATCH_1})
  set(what "${CMAKE_MATCH_2} ${CMAKE_MATCH_3}")
  set(mark "${CMAKE_MATCH_0}")
  if(kind STREQUAL "region")
    region(wanted ${CMAKE_MATCH_2} ${CMAKE_MATCH_3})
  else()
    output(wanted ${CMAKE_MATCH_2})
  endif()

  string(FIND "${rest}" "${mark}" at)
  string(LENGTH "${mark}" length)
  math(EXPR at "${at} + ${length}")
  string(SUBSTRING "${rest}" ${at} -1 rest)
  string(FIND "${rest}" "```" at)
  string(SUBSTRING "${rest}" 0 ${at} shown)
  math(EXPR at "${at} + 3")
  string(SUBSTRING "${rest}" ${at} -1 rest)

  if(NOT shown STREQUAL wanted)
    message(FATAL_ERROR "README.md: the ${kind} ${what} has changed. README.md shows\n${shown}\nand should show\n${wanted}")
  endif()
  math(EXPR checked "${checked} + 1")
endwhile()
if(checked EQUAL 0)
  message(FATAL_ERROR "README.md has no marked block")
endif()
message(STATUS "README.md: ${checked} blocks are as they should be")
