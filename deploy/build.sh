#!/usr/bin/env bash
# Builds the Python packages into .venv (editable), with build/release as the build folder.
# deploy/bootstrap.sh must have run before. Needs no network.
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
if ! python -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
  --no-build-isolation --editable . --config-settings=build-dir=build/release >build/install.log 2>&1; then
  cat build/install.log >&2
  echo "build: failed; the whole log is in build/install.log" >&2
  exit 1
fi
