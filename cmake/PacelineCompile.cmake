# Compile options of every target of this project.
include_guard(GLOBAL)

set(paceline_sanitizers "" thread address undefined "address;undefined")
if(NOT PACELINE_SANITIZE IN_LIST paceline_sanitizers AND NOT PACELINE_SANITIZE STREQUAL "address;undefined")
  message(FATAL_ERROR "PACELINE_SANITIZE is '${PACELINE_SANITIZE}'; it may be 'thread' or 'address;undefined'")
endif()

function(paceline_compile target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               POSITION_INDEPENDENT_CODE ON
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON)
  # nvcc rewrites the code before the host compiler sees it, so warnings about style and conversions would be wrong there.
  set(cxx "$<COMPILE_LANGUAGE:CXX>")
  set(cuda "$<COMPILE_LANGUAGE:CUDA>")
  target_compile_options(
    ${target} PRIVATE "$<${cxx}:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wno-sign-conversion>"
                      "$<${cuda}:-Xcompiler=-Wall,-Wextra>")
  if(PACELINE_WERROR)
    target_compile_options(${target} PRIVATE "$<${cxx}:-Werror>" "$<${cuda}:-Werror=all-warnings;-Xcompiler=-Werror>")
  endif()
  if(PACELINE_SANITIZE)
    list(JOIN PACELINE_SANITIZE "," kinds)
    target_compile_options(
      ${target} PRIVATE "$<${cxx}:-fsanitize=${kinds};-fno-omit-frame-pointer;-fno-sanitize-recover=all;-g1>")
    target_link_options(${target} PUBLIC -fsanitize=${kinds})
  endif()
endfunction()

# paceline_precompile(<target> <header>...): precompiles headers that most of its C++ files include. Parsing them takes longer than the rest
# of many files.
function(paceline_precompile target)
  foreach(header IN LISTS ARGN)
    target_precompile_headers(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>")
  endforeach()
endfunction()

# paceline_unit(<target> <unit> <source>...): adds sources to a target. With PACELINE_UNITY they are compiled as one file, which parses
# headers once and finds names that stand for two things in these sources. A source with options of its own stays apart.
function(paceline_unit target unit)
  target_sources(${target} PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${unit})
  set_target_properties(${target} PROPERTIES UNITY_BUILD "${PACELINE_UNITY}" UNITY_BUILD_MODE GROUP)
endfunction()

# paceline_units(<target> <source>...): adds sources to a target, as units of six: more of them at once save little, and take memory.
function(paceline_units target)
  list(LENGTH ARGN count)
  math(EXPR last "${count} - 1")
  foreach(begin RANGE 0 ${last} 6)
    list(SUBLIST ARGN ${begin} 6 sources)
    paceline_unit(${target} from_${begin} ${sources})
  endforeach()
endfunction()
