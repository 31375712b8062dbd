# PACELINE_CUDA=AUTO|ON|OFF. This version has no CUDA sources yet: AUTO and OFF build for the CPU, whether or not nvcc is there, and ON
# is refused at once rather than giving a library that silently lacks what was asked for.
include_guard(GLOBAL)

string(TOUPPER "${PACELINE_CUDA}" paceline_cuda)
if(paceline_cuda STREQUAL "ON")
  message(FATAL_ERROR "PACELINE_CUDA=ON: paceline ${PROJECT_VERSION} has no CUDA backend yet; "
                      "configure with PACELINE_CUDA=AUTO or OFF for the host devices")
elseif(NOT paceline_cuda MATCHES "^(AUTO|OFF)$")
  message(FATAL_ERROR "PACELINE_CUDA is '${PACELINE_CUDA}'; it may be AUTO, ON or OFF")
endif()
message(STATUS "paceline: host devices only (this version has no CUDA backend)")
