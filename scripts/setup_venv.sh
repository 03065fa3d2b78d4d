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
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  venv=$(cd "$venv" && pwd)
  PATH="$venv/bin:$PATH"
  # The tests start hundreds of processes: without bytecode each would compile what it imports. Who
  # wants none beside the sources has it in the environment.
  if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$venv/pycache
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
  # The compiler takes a minute, and so do the packages that fastcoll needs: side by side.
  # --no-compile: not the ten thousand modules that nobody imports.
  local pip=(python -m pip --quiet --disable-pip-version-check) ready
  ready=$(mktemp -d)
  build_wheel &
  { list_requirements "$1" && cat "$constraints"; } >"$ready/versions"
  cmp --quiet "$ready/versions" "$venv/versions" || {
    list_requirements "$1" >"$ready/requirements.txt"
    "${pip[@]}" install --no-compile -c "$constraints" -r "$ready/requirements.txt" || {
      kill $! || true # it may be complete
      wait $! || true
      rm -r "$ready"
      return 1
    }
    cp "$ready/versions" "$venv"
    # The bytecode of the largest packages, once: else each worker of pytest would make all of it.
    # Some extras lack the last ones.
    python -c 'import torch.distributed, hypothesis, jax' 2>/dev/null || true
  }
  wait $!
  "${pip[@]}" install --no-compile --force-reinstall --no-deps "$ready"/*.whl
  rm -r "$ready"
}

# With packages of its own, always in the same place: in a new one each time, as pip would have it,
# ccache would find nothing.
build_wheel() {
  local tools=$venv/build-tools
  cmp --quiet constraints.txt "$tools/constraints.txt" || {
    "${pip[@]}" install --upgrade --target "$tools" -c constraints.txt setuptools pybind11
    cp constraints.txt "$tools"
  }
  PYTHONPATH=$tools exec "${pip[@]}" wheel --no-build-isolation --no-deps -w "$ready" .
}

list_requirements() { # extra
  "${PYTHON:-python3}" - "$1" <<'END'
import sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]

def of(extra):
    for line in project["optional-dependencies"][extra]:
        if line.startswith("fastcoll["):
            for other in line.removeprefix("fastcoll[").removesuffix("]").split(","):
                yield from of(other)
        else:
            yield line

print(*project["dependencies"], *of(sys.argv[1]), sep="\n")
END
}
