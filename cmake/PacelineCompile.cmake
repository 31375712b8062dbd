# What every target of this project is compiled with.
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
  # What nvcc hands to the host compiler is not what was written: pedantry and conversions are not for it.
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

# paceline_precompile(<target> <header>...): what most of its C++ files include is read once. Reading it takes longer than the rest of many files.
function(paceline_precompile target)
  foreach(header IN LISTS ARGN)
    target_precompile_headers(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>")
  endforeach()
endfunction()
