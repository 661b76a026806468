#!/usr/bin/env bash
# Builds the Python packages into .venv (editable) with build/release as build folder.
# deploy/bootstrap.sh must have run. Needs no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What is there already decides what must be configured again; the rest is ninja's business.
mkdir -p build
export CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-2}"
export CMAKE_GENERATOR=Ninja PETPS_TESTS=ON PETPS_BENCH=ON
export PATH="$PWD/.venv/bin:$PATH"
# Read from the disk once: the build gives its first call 5 s, which a busy disk may take.
cmake --version >/dev/null
ninja --version >/dev/null
if ! python -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
  --no-build-isolation --editable . --config-settings=build-dir=build/release >build/install.log 2>&1; then
  cat build/install.log >&2
  echo "build: failed; the whole log is in build/install.log" >&2
  exit 1
fi
