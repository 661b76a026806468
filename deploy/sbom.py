"""Writes the SBOM of a distribution (CycloneDX, JSON): Python packages and native libraries.

    python deploy/sbom.py NAME --python ENVIRONMENT/bin/python --cyclonedx PROGRAM --out FILE

ENVIRONMENT is one in which NAME was installed from its wheel. The packages are those that it needs
there. The native libraries are those that auditwheel copied into the wheel, which lists them in
`*.dist-info/sboms/`, and those of NATIVE.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

# Libraries that no wheel contains as a file: name -> Debian package, scope, how petps uses it.
NATIVE: Final = {
    "xxhash": ("libxxhash-dev", "required", "compiled in, from its header"),
    "libibverbs": ("libibverbs-dev", "optional", "loaded only when RDMA is used, if it is there"),
}


def main() -> int:
    """Write the file. Return 1 if the environment lacks the distribution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--python", required=True, type=Path)
    parser.add_argument("--cyclonedx", required=True)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    command = [
        options.cyclonedx, "environment", "--output-reproducible", "--mc-type", "library",
        str(options.python),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    document = json.loads(done.stdout)
    components = {component["bom-ref"]: component for component in document["components"]}
    roots = [ref for ref, part in components.items() if part["name"] == options.name]
    if not roots:
        print(f"sbom: {options.python} has no {options.name}: install its wheel", file=sys.stderr)
        return 1
    needs = {entry["ref"]: entry.get("dependsOn", []) for entry in document["dependencies"]}
    python = _reachable(roots[0], needs)
    native = [*_copied_libraries(options.python, python, components), *_other_libraries()]
    document["metadata"]["component"] = components[roots[0]]
    kept = sorted(ref for ref in python if ref != roots[0])
    document["components"] = [*(components[ref] for ref in kept), *native]
    document["dependencies"] = [
        *({"ref": ref, "dependsOn": sorted(needs.get(ref, []))} for ref in kept),
        {
            "ref": roots[0],
            "dependsOn": sorted([*needs.get(roots[0], []), *(part["bom-ref"] for part in native)]),
        },
        *({"ref": part["bom-ref"]} for part in native),
    ]
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"sbom: {options.out}: {len(kept)} packages, {len(native)} native libraries")
    return 0


def _reachable(root: str, needs: dict[str, list[str]]) -> set[str]:
    """Return the root and what it needs: not pip, which every environment has."""
    found: set[str] = set()
    waiting = [root]
    while waiting:
        ref = waiting.pop()
        if ref not in found:
            found.add(ref)
            waiting += needs.get(ref, [])
    return found


def _copied_libraries(
    python: Path, refs: set[str], components: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the libraries in the wheels of petps, as auditwheel lists them."""
    find = "import sysconfig; print(sysconfig.get_path('platlib'))"
    packages = Path(subprocess.check_output([python, "-c", find], text=True).strip())
    libraries: dict[str, dict[str, Any]] = {}
    for ref in refs:
        name = components[ref]["name"].replace("-", "_")
        for file in packages.glob(f"{name}-*.dist-info/sboms/auditwheel.cdx.json"):
            listed = json.loads(file.read_text())
            wheel = listed["metadata"]["component"]["bom-ref"]
            for library in listed["components"]:
                if name.startswith("petps") and library["bom-ref"] != wheel:
                    library["bom-ref"] = library["purl"]  # a package has several files
                    libraries[library["purl"]] = library
    return [libraries[purl] for purl in sorted(libraries)]


def _other_libraries() -> list[dict[str, Any]]:
    """Return NATIVE, with the version of the Debian package if there is one."""
    libraries = []
    for name, (package, scope, use) in NATIVE.items():
        show = ["dpkg-query", "--show", "--showformat=${Version}", package]
        try:
            version = subprocess.check_output(show, text=True, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):  # no Debian, or no such package
            version = ""
        libraries.append(
            {
                "bom-ref": f"native:{name}",
                "type": "library",
                "name": name,
                "scope": scope,
                "description": use,
                **({"version": version} if version else {}),
            }
        )
    return libraries


if __name__ == "__main__":
    sys.exit(main())
