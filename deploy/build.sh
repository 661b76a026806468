#!/usr/bin/env bash
# Builds both distributions into .venv (editable): petps, with build/release as its build folder,
# and petps-client, with build/client. deploy/bootstrap.sh must have run before. Needs no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# cmake and ninja configure and build only what has changed.
mkdir -p build
export CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-2}"
export CMAKE_GENERATOR=Ninja PETPS_TESTS=ON PETPS_BENCH=ON
export PATH="$PWD/.venv/bin:$PATH"
# Load both programs from the disk once: the build allows its first call 5 s, and a busy disk may
# need longer.
cmake --version >/dev/null
ninja --version >/dev/null

# Installs the distribution of folder $1 with the build folder $2.
install() {
  local log="build/install-$(basename "$2").log"
  echo "build: compiling and installing into .venv: $1 (minutes the first time; log: $log)" >&2
  if ! python -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --editable "$1" --config-settings=build-dir="$PWD/$2" >"$log" 2>&1; then
    cat "$log" >&2
    echo "build: failed; the whole log is in $log" >&2
    exit 1
  fi
}

# In this order: replacing a petps from before petps-client existed removes files of the latter.
install . build/release
install client/python build/client
