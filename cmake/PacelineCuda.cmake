# PACELINE_CUDA=AUTO|ON|OFF decides whether the CUDA backend is built. AUTO builds it if there is an nvcc of CUDA 12.5 or newer. Sets
# PACELINE_WITH_CUDA. Only the runtime is linked, statically, so the library loads without a driver. It gets the few driver functions that
# it needs from the runtime (cudaGetDriverEntryPointByVersion, since CUDA 12.5).
include_guard(GLOBAL)

string(TOUPPER "${PACELINE_CUDA}" paceline_cuda)
if(NOT paceline_cuda MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "PACELINE_CUDA is '${PACELINE_CUDA}'; it may be AUTO, ON or OFF")
endif()

set(PACELINE_WITH_CUDA OFF)
if(NOT paceline_cuda STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit 12.5 QUIET)
  endif()
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND TARGET CUDA::cudart_static)
    set(PACELINE_WITH_CUDA ON)
  elseif(paceline_cuda STREQUAL "ON")
    message(FATAL_ERROR "PACELINE_CUDA=ON needs the CUDA toolkit, 12.5 or newer, with nvcc and the static runtime: name its place with "
                        "-DCMAKE_CUDA_COMPILER=/path/to/nvcc, or configure with PACELINE_CUDA=OFF for the host devices alone")
  endif()
endif()

if(NOT PACELINE_WITH_CUDA)
  message(STATUS "paceline: host devices only (PACELINE_CUDA=${paceline_cuda}, no CUDA toolkit in use)")
  return()
endif()

# Machine code for these architectures, and intermediate code of the last one for all later GPUs. If this variable is not set here, CMake
# reads the environment variable CUDAARCHS.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}" STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90)
  if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
    set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90-real 100-real 120)
  endif()
endif()
enable_language(CUDA)
message(STATUS "paceline: with CUDA ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
