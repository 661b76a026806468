"""Installs the wheels of dist/ where a stranger would, and uses them there. `make wheels` first.

    python -m tests.docs.strangers debian               a fresh Debian 12 (needs root, debootstrap)
    python -m tests.docs.strangers beside [NAME...]     beside each of BESIDE, or those named

The first runs the README's quickstart line by line, with the seconds of each line. The second
installs a neighbour and petps into one environment, imports both, and pulls. Both download from
PyPI and Debian: several GB for all neighbours. So no test suite runs them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.docs.pages import ROOT, blocks_of, runs

DIST: Final = ROOT / "dist"
DEBIAN: Final = "http://deb.debian.org/debian"
# What is installed together with petps, by the name that is imported.
BESIDE: Final = {
    "tensorflow": ["tensorflow-cpu"],
    "feast": ["feast"],
    "ray": ["ray"],
    # torchrec's default needs a GPU's driver, and this fbgemm needs this torch.
    "torchrec": ["torchrec", "torch==2.14.*", "fbgemm-gpu-cpu"],
}
UNUSABLE: Final = {"torchrec": ["fbgemm-gpu"]}  # removed again: it hides the one for a CPU
CLIENT_NUMPY: Final = ("numpy==1.26.*", "numpy")
USE: Final = """
import {name}, numpy, petps, petps_client
with petps.create("use.pool") as pool:
    pool.create_table("items", dim=4, capacity=100)
    pool.push("items", [1], numpy.ones((1, 4), numpy.float32))
    assert pool.pull("items", [1, 2]).sum() == 4
version = getattr({name}, "__version__", "")
print("petps beside {name}", version, "with numpy", numpy.__version__)
"""


def _timed(command: list[str], shown: str, folder: Path | None = None) -> None:
    began = time.monotonic()
    print(f"+ {shown}", flush=True)
    subprocess.run(command, cwd=folder, check=True)
    print(f"  [{time.monotonic() - began:.1f} s]", flush=True)


def debian(root: Path) -> None:
    """Install Debian 12 into ``root``, and run the quickstart there."""
    packages = "python3,python3-venv,ca-certificates"
    _timed(
        [
            "debootstrap",
            "--variant=minbase",
            f"--include={packages}",
            "bookworm",
            str(root),
            DEBIAN,
        ],
        "debootstrap bookworm (only to have the machine)",
    )
    home = root / "srv"
    shutil.copytree(DIST, home / "dist")
    for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"):
        shutil.copy(name, root / name.lstrip("/"))
    script = ["set -e", "cd /srv", "export PIP_FIND_LINKS=/srv/dist PIP_NO_CACHE_DIR=1"]
    quickstart = (ROOT / "README.md").read_text().split("## Quickstart")[1].split("\n## ")[0]
    is_first = True  # the tests do not run the block that installs; this does
    for block in blocks_of(quickstart):
        if not runs(block) and not is_first:
            continue
        is_first = False
        lines = block.code.splitlines()
        if block.language == "python":
            lines = [f"python - <<'PETPS_END'\n{block.code}PETPS_END"]
        for line in lines:
            script += ["began=$(date +%s.%N)", f"cat <<'PETPS_SHOWN'\n+ {line}\nPETPS_SHOWN", line]
            script.append("python3 -c \"import time; print(f'  [{time.time() - $began:.1f} s]')\"")
    script += ["petps --version", "kill %1", "wait"]
    (home / "quickstart.sh").write_text("\n".join(script) + "\n")
    mounts = "mount -t proc proc proc && mount --rbind /dev dev"
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mounts} && exec chroot . bash /srv/quickstart.sh"],
        cwd=root,
        check=True,
    )


def beside(name: str, folder: Path) -> None:
    """Install petps and ``name`` into an environment below ``folder``, and use both."""
    python = folder / name / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-cache-dir", "--find-links", str(DIST), "petps", *BESIDE[name]]
    _timed(install, f"pip install petps {' '.join(BESIDE[name])}")
    for package in UNUSABLE.get(name, []):
        subprocess.run([*pip, "uninstall", "--yes", package], check=True)
        subprocess.run(
            [*pip, "install", "--force-reinstall", "--no-deps", f"{package}-cpu"], check=True
        )
    subprocess.run([str(python), "-c", USE.format(name=name)], cwd=folder, check=True)
    (folder / "use.pool").unlink()


def client(numpy: str, folder: Path) -> None:
    """Install petps-client with this numpy, and show what was installed and its size."""
    python = folder / "client" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "client")], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = ["--find-links", str(DIST), "petps-client", numpy]
    _timed([*pip, "install", "--no-cache-dir", *wheels], f"pip install petps-client '{numpy}'")
    show = "import numpy, petps_client; print('petps-client with numpy', numpy.__version__)"
    subprocess.run([str(python), "-c", show], check=True)


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.strangers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("where", choices=["debian", "beside"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BESIDE))
    options = parser.parse_args()
    if not list(DIST.glob("petps-*.whl")):
        parser.error(f"{DIST} has no wheels: run `make wheels`")
    unknown = set(options.names) - set(BESIDE)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose among {', '.join(BESIDE)}")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        if options.where == "debian":
            debian(Path(folder) / "debian")
            return
        for name in options.names or BESIDE:
            beside(name, Path(folder))
        for numpy in CLIENT_NUMPY:
            client(numpy, Path(folder))


if __name__ == "__main__":
    main()
