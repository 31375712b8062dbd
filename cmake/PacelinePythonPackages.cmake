# Lets find_package and find_path find packages installed by pip: fmt from the cmeel-fmt wheel (under cmeel.prefix/), and pybind11.
#
# It asks the interpreter for its path. That covers virtual environments and pip's isolated build environment, which is a folder that an
# environment variable adds to the path. CMAKE_PREFIX_PATH comes first. The system's own packages are the fallback and need no Python.
include_guard(GLOBAL)

set(Python_FIND_VIRTUALENV FIRST)
if(PACELINE_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
endif()

if(Python_Interpreter_FOUND)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sys; print(';'.join(p for p in sys.path if p))"
    OUTPUT_VARIABLE paceline_python_path
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  foreach(folder IN LISTS paceline_python_path)
    foreach(package cmeel.prefix pybind11)
      if(IS_DIRECTORY "${folder}/${package}")
        list(APPEND CMAKE_PREFIX_PATH "${folder}/${package}")
      endif()
    endforeach()
  endforeach()
endif()
