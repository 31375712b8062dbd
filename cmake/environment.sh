# Shared by the scripts (tests/run, examples/run, .ci/*): makes a Python environment and fetches what a build needs. The machine needs only
# python3 >= 3.10, a C++ compiler and git. Source it in bash, under set -euo pipefail.
#
# Debian packages are installed by apt-get if that is allowed (root, or sudo without a password). Otherwise they are unpacked below the
# build folder, which needs no rights. Packages from PyPI go into a virtual environment. Nothing else on the machine changes.
#
#   PYTHON               the interpreter that makes the environment (python3)
#   PACELINE_BUILD_DIR   the folder of all build results (build/ in the checkout)
#   PACELINE_VENV        the virtual environment (venv/ in the build folder), created if missing
#   PACELINE_WERROR      ON: warnings in our own C++ are errors (OFF)
#   PACELINE_UNITY       OFF: compiles each file of a room alone, which takes longer as a whole and is quicker after a change (ON)

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
build_dir="$(absolute "${PACELINE_BUILD_DIR:-$root/build}")"
venv="$(absolute "${PACELINE_VENV:-$build_dir/venv}")"
debian_dir="$build_dir/debian"
werror="${PACELINE_WERROR:-OFF}"
unity="${PACELINE_UNITY:-ON}"
jobs="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
mkdir -p "$build_dir"

say() { printf '\n== %s\n' "$*"; }
note() { printf -- '-- %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the comment at the top of the script.
usage() { sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p}' "$0"; }
# Ends a script that was called with wrong arguments.
die_usage() {
  printf 'error: %s\n\n' "$*" >&2
  usage >&2
  exit 2
}

# Runs a command as root, if that needs no password. Otherwise fails.
as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    command -v sudo >/dev/null && sudo -n true 2>/dev/null && sudo -n "$@"
  fi
}

apt_updated=no
# debian_install PACKAGE...: installs Debian packages. Fails if that is not allowed.
debian_install() {
  command -v apt-get >/dev/null && as_root true || return 1
  note "installing $*"
  local log="$build_dir/apt.log"
  local install=(as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@")
  if "${install[@]}" >"$log" 2>&1 </dev/null; then return 0; fi
  if [ "$apt_updated" = no ]; then
    apt_updated=yes
    as_root apt-get update >>"$log" 2>&1 </dev/null || true
    if "${install[@]}" >>"$log" 2>&1 </dev/null; then return 0; fi
  fi
  note "apt-get could not install $* (see $log)"
  return 1
}

# debian_unpack PACKAGE...: downloads packages and unpacks them below the build folder. Needs no rights.
debian_unpack() {
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
  local apt=(apt-get) log="$build_dir/apt.log" lists="$build_dir/apt"
  mkdir -p "$debian_dir/archives"
  note "unpacking $* into $debian_dir"
  (
    cd "$debian_dir/archives"
    if ! "${apt[@]}" download "$@" >"$log" 2>&1 </dev/null; then
      # This machine has no package lists, so fetch our own.
      mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial"
      apt+=(-o "Dir::State::lists=$lists/lists" -o "Dir::Cache=$lists/cache" -o Debug::NoLocking=1)
      "${apt[@]}" update >>"$log" 2>&1 </dev/null && "${apt[@]}" download "$@" >>"$log" 2>&1 </dev/null
    fi
    for package in "$@"; do
      dpkg-deb -x "$package"_*.deb "$debian_dir"
    done
  ) || return 1
}

debian_get() { debian_install "$@" || debian_unpack "$@"; }

compiler="${CXX:-c++}"
has_header() { echo "#include <$1>" | "$compiler" -x c++ -E - >/dev/null 2>&1; }

# need_header HEADER WHAT PACKAGE...: makes sure that HEADER can be included.
need_header() {
  local header="$1" what="$2"
  shift 2
  has_header "$header" && return 0
  debian_get "$@" || true
  has_header "$header" || die "$what is missing and could not be fetched. Install it (on Debian: apt-get install $*) and try again."
}

# Lets compilers find unpacked packages.
use_unpacked() {
  export CPLUS_INCLUDE_PATH="$debian_dir/usr/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
  export CMAKE_PREFIX_PATH="$debian_dir/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"
  local multiarch
  multiarch="$("$compiler" -print-multiarch 2>/dev/null || true)"
  if [ -n "$multiarch" ]; then
    export CPLUS_INCLUDE_PATH="$debian_dir/usr/include/$multiarch:$CPLUS_INCLUDE_PATH"
    export LD_LIBRARY_PATH="$debian_dir/usr/lib/$multiarch${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  fi
}

has_pip() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

# Makes the virtual environment and puts it first on PATH. Debian's python3 lacks ensurepip, so this tries several ways, the simplest first.
need_venv() {
  if ! has_pip; then
    local python="${PYTHON:-python3}" version wheel
    command -v "$python" >/dev/null || die "$python is not there: paceline needs Python >= 3.10"
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is Python $version; paceline needs >= 3.10"
    say "Python $version environment in $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 || true
    if ! has_pip && debian_install "python$version-venv"; then
      rm -rf "$venv"
      "$python" -m venv "$venv" >/dev/null 2>&1 || true
    fi
    if ! has_pip && "$python" -m pip --version >/dev/null 2>&1; then
      rm -rf "$venv"
      "$python" -m pip install -q --target "$build_dir/virtualenv" virtualenv &&
        PYTHONPATH="$build_dir/virtualenv" "$python" -m virtualenv -q "$venv" || true
    fi
    if ! has_pip && debian_unpack python3-pip-whl; then
      rm -rf "$venv"
      "$python" -m venv --without-pip "$venv" || true
      wheel="$(echo "$debian_dir"/usr/share/python-wheels/pip-*.whl)"
      PYTHONPATH="$wheel" "$venv/bin/python" -m pip install -q pip || true
    fi
    has_pip || die "cannot make a virtual environment: install Python's venv module (on Debian: apt-get install python3-venv)"
  fi
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
  unset PYTHONHOME
}

# pip_once REQUIREMENT...: installs into the environment. Skips requirements that it has installed before, without asking the index.
pip_once() {
  local stamp="$venv/.paceline-requirements"
  touch "$stamp"
  grep -qxF -- "$*" "$stamp" && return 0
  note "pip install $*"
  "$venv/bin/python" -m pip install -q "$@"
  printf '%s\n' "$*" >>"$stamp"
}

# requirements LIST...: prints the requirements in these lists of pyproject.toml, one per line. (Python 3.10 has no tomllib.)
requirements() {
  "$venv/bin/python" - "$root/pyproject.toml" "$@" <<'PYTHON'
import ast, pathlib, re, sys

text = pathlib.Path(sys.argv[1]).read_text()
for name in sys.argv[2:]:
    print(*ast.literal_eval(re.search(rf"^{name} = (\[.*?\])$", text, re.S | re.M)[1]), sep="\n")
PYTHON
}

# The compiler, and an environment whose pip can build with it.
need_compiler() {
  command -v "$compiler" >/dev/null || die "no C++ compiler: $compiler is not there (on Debian: apt-get install g++)"
  use_unpacked
  need_venv
  pip_once "pip>=23.1" # older versions do not know --config-settings
}

# CMake, Ninja and the build requirements from PyPI.
have_build_tools=no
need_build_tools() {
  [ "$have_build_tools" = no ] || return 0
  have_build_tools=yes
  need_compiler
  local needed
  mapfile -t needed < <(requirements requires)
  pip_once "${needed[@]}" "cmake>=3.28" "ninja>=1.11"
}

# One CMake build for the tests, the binding, the package, and all that is installed, so that they share the library's objects.
# configure_dev OPTION...: for the tests and the package under test.
dev_dir="$build_dir/dev"
configure_dev() {
  need_build_tools
  need_python_headers
  need_header gtest/gtest.h GoogleTest libgtest-dev
  # With nvcc a test reads the kernels' machine code.
  if command -v nvcc >/dev/null && ! command -v cuobjdump >/dev/null; then pip_once nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm; fi
  cmake --preset dev -S "$root" -B "$dev_dir" -DPACELINE_WERROR="$werror" -DPACELINE_UNITY="$unity" -DPACELINE_PYTHON=ON \
    -DPACELINE_BENCHMARKS=OFF -DPACELINE_EXAMPLES=OFF -DPython_EXECUTABLE="$venv/bin/python" ${CMAKE_ARGS:-} "$@"
}
# configure_release OPTION...: for what is installed: kernels for all GPUs, and nothing but the library.
configure_release() {
  need_build_tools
  cmake --preset release -S "$root" -B "$dev_dir" -UCMAKE_CUDA_ARCHITECTURES -DPACELINE_WERROR="$werror" -DPACELINE_UNITY="$unity" \
    -DPACELINE_TESTS=OFF -DPACELINE_GPU_TESTS=OFF -DPACELINE_BENCHMARKS=OFF -DPACELINE_EXAMPLES=OFF ${CMAKE_ARGS:-} "$@"
}

# build_package FOLDER VERB...: runs pip's VERB for this checkout, in the CMake build in FOLDER. Without pip's isolation, which would put
# the build tools into a new folder each time and so recompile everything.
build_package() {
  local folder="$1"
  shift
  CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$jobs}" "$venv/bin/python" -m pip "$@" -q --no-build-isolation \
    --config-settings=build-dir="$folder" --config-settings=build.targets=_core --config-settings=cmake.define.PACELINE_UNITY="$unity"
}

# install_paceline [EXTRA,...]: installs the package with its extras. Rebuilds only what has changed.
install_paceline() {
  configure_dev >/dev/null
  note "pip install .${1:+[$1]}"
  build_package "$dev_dir" install "$root${1:+[$1]}"
}

need_python_headers() {
  local include version
  include="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  version="$(basename "$include")"
  if [ ! -e "$include/Python.h" ]; then
    [ -e "$debian_dir/usr/include/$version/Python.h" ] || debian_install "lib$version-dev" ||
      debian_unpack "lib$version-dev" libexpat1-dev zlib1g-dev || true
    [ -e "$include/Python.h" ] || [ -e "$debian_dir/usr/include/$version/Python.h" ] ||
      die "Python.h is missing and could not be fetched. Install it (on Debian: apt-get install python3-dev) and try again."
  fi
  # Unpacked headers lie in an unusual folder, which FindPython accepts as given.
  if [ ! -e "$include/Python.h" ]; then
    export CMAKE_ARGS="${CMAKE_ARGS:+$CMAKE_ARGS }-DPython_INCLUDE_DIR=$debian_dir/usr/include/$version"
  fi
}

# The checkers, with fixed versions, because newer versions may report other things.
need_checkers() {
  need_build_tools
  pip_once "ruff==0.17.5" "mypy==2.4.1" "clang-format==23.1.5" "pybind11-stubgen==3.0.0"
}

# A browser, which tests look at pages with. It is large, so it is only installed for .ci/run, in about 20 s.
need_chromium() {
  command -v chromium >/dev/null && return 0
  if [ -n "${CI:-}" ]; then
    if debian_install chromium; then return 0; fi
    note "warning: chromium could not be installed"
  fi
  note "chromium is not there, so tests that look at a page in a browser are skipped (on Debian: apt-get install chromium)"
}
