# SPDX-License-Identifier: Apache-2.0
# Sourced by test.sh and demo.sh: enters the virtual environment, made at first use, and installs
# the checkout into it with the tested versions. FASTCOLL_VENV names another place than .venv, PYTHON
# another Python, FASTCOLL_TORCH another release of torch, which then brings what it needs itself.

install_checkout() { # extras
  local venv=${FASTCOLL_VENV:-$PWD/.venv} python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "fastcoll needs Python 3.11 or newer; name one with PYTHON=..." >&2
    return 1
  fi
  if ! command -v "${CXX:-g++}" >/dev/null; then
    echo "fastcoll needs a C++20 compiler (g++ or clang++); name one with CXX=..." >&2
    return 1
  fi
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  PATH="$venv/bin:$PATH"
  # The tests start hundreds of processes: without bytecode each would compile what it imports. Who
  # wants none beside the sources has it in the environment.
  if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    unset PYTHONDONTWRITEBYTECODE
    PYTHONPYCACHEPREFIX=$(cd "$venv" && pwd)/pycache
    export PYTHONPYCACHEPREFIX
  fi
  # A module deleted from the checkout would be installed again from an earlier build.
  [ ! -d build ] || find build -name '*.py' -delete
  # Nothing could run the GPU side: do not make the newcomer wait two minutes for it.
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || export FASTCOLL_CUDA=${FASTCOLL_CUDA:-0}
  local constraints=constraints.txt
  if [ -n "${FASTCOLL_TORCH:-}" ]; then
    constraints=$venv/constraints.txt
    sed "s/^torch==.*/torch==$FASTCOLL_TORCH/; /^\(triton\|setuptools\|networkx\|sympy\)==/d" \
      constraints.txt >"$constraints"
  fi
  echo "Installing fastcoll[$1] into $venv"
  # --no-compile: not the ten thousand modules that nobody imports.
  python -m pip install --quiet --disable-pip-version-check --no-compile -c "$constraints" ".[$1]"
}
