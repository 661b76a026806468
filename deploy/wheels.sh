#!/usr/bin/env bash
# Builds the wheels of petps and petps-client into dist/, checks them, and runs each in a clean
# environment: petps serves, and petps-client alone pulls. Beside them it writes an SBOM of each
# (deploy/sbom.py). deploy/bootstrap.sh must have run before.
# Usage: deploy/wheels.sh [PYTHON]   (without an argument: the one of .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:-.venv/bin/python}
work=$PWD/build/wheels/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
export CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-2}" CMAKE_GENERATOR=Ninja
rm -rf "$work"
mkdir -p "$work" dist

fail() {
  echo "wheels: $*" >&2
  exit 1
}

# Makes a clean environment $1 and installs the other arguments into it.
make_environment() {
  "$python" -m venv "$1"
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

# Prints the megabytes of the folders and files given.
megabytes() { du -cm "$@" | tail -n 1 | cut -f1; }

echo "wheels: building with $("$python" --version)"
make_environment "$work/tools" -r deploy/requirements/wheels.txt
for folder in client/python .; do
  "$work/tools/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" "$folder" \
    >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; fail "the wheel of $folder was not built"; }
done
# auditwheel copies OpenSSL into the wheel, and names the oldest glibc that the wheel runs with.
for wheel in "$work"/*.whl; do
  PATH="$work/tools/bin:$PATH" "$work/tools/bin/auditwheel" repair --wheel-dir "$work/repaired" \
    "$wheel" >"$work/audit.log" 2>&1 || { cat "$work/audit.log" >&2; fail "$wheel is not portable"; }
done
for wheel in "$work"/repaired/*.whl; do
  "$work/tools/bin/python" -m zipfile --list "$wheel" >"$work/files"
  if grep -E ' ?(tests|examples|bench)/|\.npz' "$work/files"; then
    fail "$(basename "$wheel") holds files that are not of the product (above)"
  fi
  grep -q LICENSE "$work/files" || fail "$(basename "$wheel") lacks the license"
done
cp "$work"/repaired/*.whl dist/

client=$(echo "$work"/repaired/petps_client-*.whl)
server=$(echo "$work"/repaired/petps-*.whl)
make_environment "$work/client" "$client"
make_environment "$work/server" "$client" "$server"
for name in petps-client petps; do
  environment=$work/server
  if [ "$name" = petps-client ]; then environment=$work/client; fi
  "$work/tools/bin/python" deploy/sbom.py "$name" --python "$environment/bin/python" \
    --cyclonedx "$work/tools/bin/cyclonedx-py" --out "dist/$name.cdx.json"
done
cd "$work"
server/bin/petps --version
server/bin/petps create wheel.pool --table items:4:f32:100
server/bin/petps serve wheel.pool --port 0 --http-port 0 --grpc-port 0 --ready-file ready >serve.log 2>&1 &
process=$!
trap 'kill "$process" 2>/dev/null || true' EXIT
for _ in $(seq 300); do [ -s ready ] || sleep 0.1; done
[ -s ready ] || { cat serve.log >&2; fail "the installed server did not start"; }
client/bin/python - ready <<'PYTHON'
import json
import pathlib
import sys

import numpy as np
import petps_client

ready = json.loads(pathlib.Path(sys.argv[1]).read_text())
with petps_client.connect(f"petps://127.0.0.1:{ready['port']}/default") as client:
    client.push("items", [1, 2], np.ones((2, 4), np.float32))
    rows, found = client.pull("items", [1, 2, 3], return_mask=True)
assert rows.sum() == 8 and found.tolist() == [True, True, False], (rows, found)
print("wheels: the client pulled two rows from the server")
PYTHON

packages() { echo "$1"/lib/python3*/site-packages; }
base=$(megabytes "$(packages tools)"/pip)
numpy=$(megabytes "$(packages client)"/numpy*)
echo "wheels: sizes, installed, without pip:"
echo "  petps-client $(($(megabytes "$(packages client)"/petps_client*))) MB, with numpy" \
  "$(($(megabytes "$(packages client)") - base)) MB (numpy $numpy MB)"
echo "  petps $(megabytes "$(packages server)"/petps*) MB, with all that it needs" \
  "$(($(megabytes "$(packages server)") - base)) MB"
ls -l "$OLDPWD"/dist/*.whl | awk '{print "  " $5, $9}' | sed 's|[^ ]*/||'
