#!/usr/bin/env bash
# Installs what is missing to build and test petps on Debian 12: Debian packages, then .venv.
#
# It uses the network only if something is missing, so a second run works offline.
# Usage: deploy/bootstrap.sh [packages|venv|wheels|lab|aarch64|fuzz|train|docs|page|operate|chaos|deploy]
# (without an argument: the first two)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The only list of Debian packages: what builds the wheels, and what else builds and tests petps.
# python3-venv and python3-dev are added below if the python3 in use has no ensurepip or no
# Python.h.
WHEEL_PACKAGES=(
  ccache
  cmake
  g++
  libibverbs-dev    # native/transport/rdma, which looks for devices at run time
  libssl-dev        # native/tls
  libxxhash-dev
  ninja-build
)
PACKAGES=(
  "${WHEEL_PACKAGES[@]}"
  clang-format-14
  libabsl-dev       # bench/micro only, which compares the index with absl::flat_hash_map
  libbenchmark-dev
  libgtest-dev
  openssl           # certificates of the tests
)
# Packages for the tests against a real Kafka broker (tests/kafka), which are skipped without them.
BROKER_PACKAGES=(
  maven
  openjdk-17-jre-headless
)
# Packages for the guest of `make lab` (tests/lab). Other targets do not install them.
LAB_PACKAGES=(
  btrfs-progs
  busybox-static
  cpio
  dmsetup
  e2fsprogs
  ibverbs-providers
  iproute2
  kmod
  ndctl
  python3-pyverbs
  qemu-system-x86
  rdma-core
  xfsprogs
)
# Packages for `make docs`: the C++ interface from its header, and diagrams from text.
DOCS_PACKAGES=(
  doxygen
  graphviz
)
# Packages for `make aarch64`: a compiler and an emulator for another processor.
AARCH64_PACKAGES=(
  g++-aarch64-linux-gnu
  qemu-user-static
)
# Packages for `make deploy-check`: what builds an image without a daemon, and systemd's checks.
DEPLOY_PACKAGES=(
  buildah
  debootstrap
  systemd           # systemd-analyze
)
# Packages for `make fuzz`: libFuzzer and the sanitizers of clang.
FUZZ_PACKAGES=(
  clang-16
  libclang-rt-16-dev
)
# Packages for `make drill`: certificates that expire, and clocks that jump.
OPERATE_PACKAGES=(
  libfaketime
)
# Packages for `make chaos`: network namespaces, small file systems, and clocks that jump.
CHAOS_PACKAGES=(
  e2fsprogs
  iproute2
  libfaketime
  procps
  util-linux
)
# Packages for `make page`: a browser, and fonts for its pictures.
PAGE_PACKAGES=(
  chromium
  fonts-dejavu-core
)
CONSTRAINTS=deploy/requirements/constraints.txt
# Packages that `make test-train` and `make demo-train` need in addition to .venv. They go into
# .venv-train. Other targets do not install them.
TRAIN=deploy/requirements/train.txt
# What `make docs` needs in addition to .venv.
DOCS=deploy/requirements/docs.txt
# What `make fuzz` needs in addition to .venv: a fuzzer of Python code.
FUZZ=deploy/requirements/fuzz.txt
# What `make page` needs in addition to .venv: the driver of the browser.
PAGE=deploy/requirements/page.txt
# The checker of accessibility, from npm, and the SHA-256 of its script.
AXE=axe-core@4.14.1
AXE_SHA256=29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c
# The last release of TorchRec with the first generation of its tracker. It has a folder of its own.
OLD_TORCHREC=1.4.0

fail() {
  echo "bootstrap: $*" >&2
  exit 1
}

installed() {
  [ "$(dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null | cut -c1-2)" = "ii" ]
}

# Prints the first interpreter of version 3.11 or newer.
find_python() {
  local candidate
  for candidate in python3 python3.11 python3.12 python3.13 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

python_lacks_venv() { ! "$1" -c 'import ensurepip, venv' 2>/dev/null; }
python_lacks_headers() {
  ! "$1" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
}

# Installs its arguments, and Python with what it lacks.
install_packages() {
  command -v dpkg-query >/dev/null ||
    fail "this is no Debian: install the equivalents of $* python3-venv python3-dev"
  local python packages=("$@")
  python=$(find_python)
  if [ -z "$python" ]; then
    packages+=(python3 python3-venv python3-dev)
  else
    if python_lacks_venv "$python"; then packages+=(python3-venv); fi
    if python_lacks_headers "$python"; then packages+=(python3-dev); fi
  fi
  install_missing "${packages[@]}"
}

# Installs those of its arguments that are missing.
install_missing() {
  local missing=() package
  for package in "$@"; do
    installed "$package" || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  echo "bootstrap: installing ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      fail "missing Debian packages, and this user is neither root nor has sudo. As root, run:" \
        "apt-get install --no-install-recommends ${missing[*]}"
    as_root=(sudo)
  fi
  export DEBIAN_FRONTEND=noninteractive
  "${as_root[@]}" apt-get update -qq ||
    echo "bootstrap: apt-get update failed; continuing with the present package lists" >&2
  "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    fail "apt-get could not install: ${missing[*]}. Install them, then run this again."
}

# Prints the packages that the broker lacks. A java or mvn that no package installed is enough.
missing_for_broker() {
  local package
  for package in "${BROKER_PACKAGES[@]}"; do
    case "$package" in
      maven) command -v mvn >/dev/null && continue ;;
      openjdk-*) command -v java >/dev/null && continue ;;
    esac
    installed "$package" || echo "$package"
  done
}

# Installs the packages that the broker lacks, or prints that its tests are skipped. Never fails.
install_broker_packages() {
  local missing as_root=()
  mapfile -t missing < <(missing_for_broker)
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi
  echo "bootstrap: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  if ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >/dev/null 2>&1; then
    echo "bootstrap: apt-get could not install ${missing[*]}. Tests against a real Kafka broker" \
      "will be skipped." >&2
  fi
}

# Prints the build requirements, dependencies and extras of pyproject.toml, one per line.
python_requirements() {
  .venv/bin/python - <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    document = tomllib.load(file)
project = document["project"]
requirements = [*document["build-system"]["requires"], *project["dependencies"]]
for name, extra in project["optional-dependencies"].items():
    requirements += extra if name in ("test", "bench") else []
# petps-client is built from this repository (deploy/build.sh).
print("\n".join(sorted({name for name in requirements if not name.startswith("petps-client")})))
PYTHON
}

install_venv() {
  local python
  python=$(find_python)
  [ -n "$python" ] || fail "no Python of version 3.11 or newer: install python3"
  # Create .venv again if its interpreter does not run or is too old.
  if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv || fail "$python -m venv failed: install python3-venv"
  fi
  local expected stamp=.venv/petps-requirements
  expected=$({
    cat "$CONSTRAINTS"
    python_requirements
  } | sha256sum | cut -d' ' -f1)
  [ "$(cat "$stamp" 2>/dev/null)" = "$expected" ] && return
  echo "bootstrap: installing Python packages into .venv"
  python_requirements >.venv/petps-requirements.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint "$CONSTRAINTS" --requirement .venv/petps-requirements.txt ||
    fail "pip could not install the packages pinned in $CONSTRAINTS (is there a network?)"
  echo "$expected" >"$stamp"
}

# Builds the S3 server of the tests, or prints that its tests are skipped. Never fails. A test that
# built it would reach its time limit on a slow machine.
build_s3_server() {
  local reason
  reason=$(.venv/bin/python -m tests.s3.server 2>&1) ||
    echo "bootstrap: $reason. Tests against a real S3 server will be skipped." >&2
}

# Unpacks etcd into .cache/etcd, or prints that its tests are skipped. Never fails. Installing the
# package would start a server.
unpack_etcd() {
  local folder=.cache/etcd
  if command -v etcd >/dev/null || [ -x "$folder/usr/bin/etcd" ]; then return; fi
  echo "bootstrap: unpacking etcd into $folder"
  rm -rf "$folder" && mkdir -p "$folder"
  (cd "$folder" && apt-get download -qq etcd-server && dpkg -x etcd-server_*.deb . &&
    rm etcd-server_*.deb) >/dev/null 2>&1 ||
    echo "bootstrap: apt-get could not download etcd-server. Tests against a real etcd will be" \
      "skipped." >&2
}

# Makes $1, an environment that also sees the packages of .venv.
make_environment() {
  rm -rf "$1"
  .venv/bin/python -m venv "$1" || fail "python -m venv failed: install python3-venv"
  "$1/bin/python" - "$PWD/.venv" <<'PYTHON'
import pathlib
import sys
import sysconfig

version = f"python{sys.version_info.major}.{sys.version_info.minor}"
shared = pathlib.Path(sys.argv[1], "lib", version, "site-packages")
own = pathlib.Path(sysconfig.get_path("purelib"))
(own / "petps-shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
PYTHON
}

# Adds PyTorch and Ray to the packages of .venv.
install_train() {
  local expected stamp=.venv-train/petps-requirements
  expected=$({
    cat "$CONSTRAINTS" "$TRAIN"
    echo "$OLD_TORCHREC $PWD"
  } | sha256sum | cut -d' ' -f1)
  [ "$(cat "$stamp" 2>/dev/null)" = "$expected" ] && return
  echo "bootstrap: installing PyTorch and Ray into .venv-train (2.5 GB to download, 6 GB on disk)"
  make_environment .venv-train
  local pip=(.venv-train/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
    --no-compile)
  { "${pip[@]}" --requirement "$TRAIN" &&
    "${pip[@]}" --target .venv-train/old-torchrec "torchrec==$OLD_TORCHREC"; } ||
    fail "pip could not install the packages pinned in $TRAIN (is there a network, and 9 GB?)"
  echo "$expected" >"$stamp"
}

# Adds Sphinx to the packages of .venv.
install_docs() {
  local expected stamp=.venv-docs/petps-requirements
  install_missing "${DOCS_PACKAGES[@]}"
  expected=$({
    cat "$CONSTRAINTS" "$DOCS"
    echo "$PWD"
  } | sha256sum | cut -d' ' -f1)
  [ "$(cat "$stamp" 2>/dev/null)" = "$expected" ] && return
  echo "bootstrap: installing Sphinx into .venv-docs"
  make_environment .venv-docs
  .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
    --requirement "$DOCS" || fail "pip could not install the packages pinned in $DOCS"
  echo "$expected" >"$stamp"
}

# Adds clang, and atheris to the packages of .venv.
install_fuzz() {
  local expected stamp=.venv-fuzz/petps-requirements
  install_missing "${FUZZ_PACKAGES[@]}"
  expected=$({
    cat "$CONSTRAINTS" "$FUZZ"
    echo "$PWD"
  } | sha256sum | cut -d' ' -f1)
  [ "$(cat "$stamp" 2>/dev/null)" = "$expected" ] && return
  echo "bootstrap: installing atheris into .venv-fuzz"
  make_environment .venv-fuzz
  .venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
    --requirement "$FUZZ" || fail "pip could not install the packages pinned in $FUZZ"
  echo "$expected" >"$stamp"
}

# Adds a browser, its driver, and the checker of accessibility: .cache/axe/axe.min.js.
install_page() {
  local expected stamp=.venv-page/petps-requirements script=.cache/axe/axe.min.js
  command -v npm >/dev/null || PAGE_PACKAGES+=(npm)
  install_missing "${PAGE_PACKAGES[@]}"
  expected=$({
    cat "$CONSTRAINTS" "$PAGE"
    echo "$PWD"
  } | sha256sum | cut -d' ' -f1)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$expected" ]; then
    echo "bootstrap: installing Playwright into .venv-page"
    make_environment .venv-page
    .venv-page/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
      --requirement "$PAGE" || fail "pip could not install the packages pinned in $PAGE"
    echo "$expected" >"$stamp"
  fi
  echo "$AXE_SHA256  $script" | sha256sum --check --status 2>/dev/null && return
  echo "bootstrap: fetching $AXE"
  mkdir -p .cache/axe
  (cd .cache/axe && npm pack --silent "$AXE" >/dev/null && tar -xzf axe-core-*.tgz --strip-components=1 \
    package/axe.min.js package/LICENSE && rm axe-core-*.tgz) || fail "npm could not fetch $AXE"
  echo "$AXE_SHA256  $script" | sha256sum --check --status ||
    fail "$script of $AXE is not the pinned one: remove it, and look at where npm has it from"
}

# Unpacks Prometheus into .cache/prometheus. Installing the package would start a server that
# listens on port 9090 of every address.
install_operate() {
  (install_missing "${OPERATE_PACKAGES[@]}") ||
    echo "bootstrap: without libfaketime (above) the drill leaves out two failures" >&2
  if command -v prometheus >/dev/null && command -v promtool >/dev/null; then return; fi
  local folder=.cache/prometheus as_root=()
  [ -x "$folder/usr/bin/promtool" ] && return
  echo "bootstrap: unpacking Prometheus into $folder"
  if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi
  "${as_root[@]}" apt-get update -qq >/dev/null 2>&1 ||
    echo "bootstrap: apt-get update failed; continuing with the present package lists" >&2
  rm -rf "$folder" && mkdir -p "$folder"
  (cd "$folder" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . &&
    rm prometheus_*.deb) 2>/dev/null ||
    fail "apt-get could not download prometheus (is there a network?). Tests that need it are skipped."
}

# Installs what tests/deploy checks with. A tool that cannot be installed is reported by its tests,
# which are skipped.
install_deploy() {
  install_missing "${DEPLOY_PACKAGES[@]}"
  .venv/bin/python -m tests.deploy.tools ||
    echo "bootstrap: some tools of tests/deploy are missing (above), so tests will be skipped." >&2
}

case "${1:-all}" in
  packages)
    install_packages "${PACKAGES[@]}"
    install_broker_packages
    ;;
  wheels) install_packages "${WHEEL_PACKAGES[@]}" ;;
  venv) install_venv ;;
  lab) install_missing "${LAB_PACKAGES[@]}" ;;
  aarch64) install_missing "${AARCH64_PACKAGES[@]}" ;;
  fuzz) install_fuzz ;;
  train) install_train ;;
  docs) install_docs ;;
  page) install_page ;;
  operate) install_operate ;;
  chaos) install_missing "${CHAOS_PACKAGES[@]}" ;;
  deploy) install_deploy ;;
  all)
    install_packages "${PACKAGES[@]}"
    install_broker_packages
    unpack_etcd
    install_venv
    build_s3_server
    ;;
  *) fail "unknown argument $1; usage: deploy/bootstrap.sh [packages|venv|wheels|lab|aarch64|fuzz|train|docs|page|operate|chaos|deploy]" ;;
esac
