"""The common form of a status, from a server or from a pool opened in this process."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["normalise_status"]

_DTYPE_NAMES: Final = ("f32", "f16", "bf16", "int8")  # native/codec/codec.h Dtype, never renumbered


def normalise_status(status: dict[str, Any]) -> dict[str, Any]:
    """Replace the numbers of a native server's status by names, in place, and return the status.

    Tables then name their dtype and instance. Instances get their aliases and a state: ``serving``
    (an alias or the plain model name refers to it), ``frozen`` (an alias was switched away from it)
    or ``following`` (it exists beside the served instance).
    """
    instances = {entry["id"]: entry["name"] for entry in status.get("instances", [])}
    for table in status.get("tables", []):
        dtype = table["dtype"]
        if isinstance(dtype, int):
            is_known = dtype < len(_DTYPE_NAMES)
            table["dtype"] = _DTYPE_NAMES[dtype] if is_known else f"dtype {dtype}"
        if isinstance(table["instance"], int):
            table["instance"] = instances.get(table["instance"], str(table["instance"]))
    aliased_ids = set(status.get("aliases", {}).values())
    for entry in status.get("instances", []):
        newest = next(
            instance["id"]
            for instance in reversed(status["instances"])
            if instance["model"] == entry["model"]
        )
        is_default = entry["model"] not in status["aliases"] and newest == entry["id"]
        entry["aliases"] = [
            alias for alias, instance_id in status["aliases"].items() if instance_id == entry["id"]
        ]
        unserved_state = "frozen" if entry["frozen"] else "following"
        entry["state"] = "serving" if entry["id"] in aliased_ids or is_default else unserved_state
    return status
