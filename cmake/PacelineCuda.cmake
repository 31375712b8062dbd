# PACELINE_CUDA=AUTO|ON|OFF decides whether the CUDA backend is built. AUTO builds it if there is an nvcc of CUDA 12.5 or newer. It may be
# PyPI's, which pip's builds fetch (build_backend.py). Sets PACELINE_WITH_CUDA. Only the runtime is linked, statically, so the library loads
# without a driver. It gets the few driver functions that it needs from the runtime (cudaGetDriverEntryPointByVersion, since CUDA 12.5).
include_guard(GLOBAL)

string(TOUPPER "${PACELINE_CUDA}" paceline_cuda)
if(NOT paceline_cuda MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "PACELINE_CUDA is '${PACELINE_CUDA}'; it may be AUTO, ON or OFF")
endif()

set(paceline_pypi_nvcc "cuda-toolkit[nvcc,cudart,cccl]==13.0.*") # as in build_backend.py

# Names nvcc in the environment variable CUDACXX, unless it is there already: from PATH, from CUDA_HOME, CUDA_PATH or /usr/local/cuda, or
# from PyPI's packages in the environment of the Python that CMake finds. CMake by itself would take an nvcc on PATH that is too old.
function(paceline_name_nvcc)
  if(CMAKE_CUDA_COMPILER OR NOT "$ENV{CUDACXX}" STREQUAL "")
    return()
  endif()
  unset(CMAKE_CUDA_COMPILER CACHE) # an earlier search, which found none
  set(home /usr/local/cuda)
  foreach(variable CUDA_PATH CUDA_HOME)
    if(NOT "$ENV{${variable}}" STREQUAL "")
      set(home "$ENV{${variable}}")
    endif()
  endforeach()
  find_program(on_path nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
  foreach(nvcc IN ITEMS "${on_path}" "${home}/bin/nvcc")
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE said RESULT_VARIABLE failed ERROR_QUIET)
    if(NOT failed AND said MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL 12.5)
      set(ENV{CUDACXX} "${nvcc}")
      return()
    endif()
  endforeach()
  foreach(folder IN LISTS paceline_python_path)
    set(pypi "${folder}/nvidia/cu13")
    set(complete TRUE) # other packages bring some of these files
    foreach(part bin/nvcc nvvm/bin/cicc include/cuda_runtime.h include/crt include/cccl lib/libcudart_static.a)
      if(NOT EXISTS "${pypi}/${part}")
        set(complete FALSE)
      endif()
    endforeach()
    if(complete)
      set(ENV{CUDACXX} "${pypi}/bin/nvcc")
      # Its libraries lie in lib, and nvcc looks for them in lib64. The shared runtime lacks the name that FindCUDAToolkit looks for.
      set(ENV{LIBRARY_PATH} "${pypi}/lib:$ENV{LIBRARY_PATH}")
      file(GLOB runtime "${pypi}/lib/libcudart.so.*")
      set(CUDA_CUDART "${runtime}" CACHE FILEPATH "PyPI's CUDA runtime" FORCE)
      return()
    endif()
  endforeach()
endfunction()

set(PACELINE_WITH_CUDA OFF)
if(NOT paceline_cuda STREQUAL "OFF")
  include(PacelinePythonPackages) # for paceline_python_path
  paceline_name_nvcc()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit 12.5 QUIET)
  endif()
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND TARGET CUDA::cudart_static)
    set(PACELINE_WITH_CUDA ON)
  elseif(paceline_cuda STREQUAL "ON")
    message(FATAL_ERROR "PACELINE_CUDA=ON needs the CUDA toolkit, 12.5 or newer, with nvcc and the static runtime: name its place with "
                        "-DCMAKE_CUDA_COMPILER=/path/to/nvcc, or `pip install '${paceline_pypi_nvcc}'` into the Python environment "
                        "that CMake finds, or configure with PACELINE_CUDA=OFF for the host devices alone")
  endif()
endif()

if(NOT PACELINE_WITH_CUDA)
  if(paceline_cuda STREQUAL "AUTO")
    set(paceline_why ": no nvcc of CUDA 12.5 or newer works here. PyPI's is ${paceline_pypi_nvcc}")
  endif()
  message(STATUS "paceline: host devices only (PACELINE_CUDA=${paceline_cuda}${paceline_why})")
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
