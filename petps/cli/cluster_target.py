"""The etcd and the model that the commands of a cluster are about."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from petps.errors import InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from petps.cluster.etcd import Compare, Etcd
    from petps.cluster.records import Keys, State
    from petps.config import ClusterConfig

__all__ = ["ClusterTarget", "ConfigFile", "ModelName", "cluster_config", "open_target"]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A configuration file with [cluster]; its keys may be variables too."
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The model; by default the only one of the cluster.")
]

PATIENCE_SECONDS: Final = 10.0  # of a command; etcd's members may elect a leader just now
LOOK_SECONDS: Final = 0.2
PRESENT_SECONDS: Final = 3.0  # between a server's registration and its first report, at most


def cluster_config(file: Path | None) -> ClusterConfig:
    """Return [cluster] of a file and the environment. Raises InvalidArgument without endpoints."""
    from petps.config import read_settings

    # The commands use no pool, so their file needs none.
    config = read_settings(file, os.environ, {"pool": {"path": Path("unused")}}).config.cluster
    if not config.endpoints:
        raise InvalidArgument(
            "no etcd is configured: give --config FILE with endpoints in [cluster], or set "
            "PETPS_CLUSTER_ENDPOINTS, for instance to '[\"http://127.0.0.1:2379\"]'"
        )
    return config


@dataclass(frozen=True)
class ClusterTarget:
    """A model of a cluster."""

    etcd: Etcd
    keys: Keys

    def state(self) -> State:
        """Return the model's state. Raises Unavailable if etcd does not answer."""
        from petps.cluster.records import State, read_state

        read = self.etcd.read(self.keys.root)
        if not read.values:
            return State(self.keys.model)
        texts = {key: value.text for key, value in read.values.items()}
        revisions = {key: value.changed for key, value in read.values.items()}
        return read_state(self.keys, texts, revisions)

    def state_when_present(self, address: str | None = None) -> State:
        """Return the state once this server, or each one that has registered, is present.

        Servers that are not after PRESENT_SECONDS are away.
        """
        until = time.monotonic() + PRESENT_SECONDS
        while True:
            state = self.state()
            awaited = {known for known in state.registrations if address in (None, known)}
            if awaited <= set(state.members) or time.monotonic() > until:
                return state
            time.sleep(LOOK_SECONDS)

    def controller(self) -> str:
        """Return the name of the elected controller; '': there is none."""
        import json

        from petps.cluster.records import Keys

        key = Keys.election(self.keys.prefix)
        value = self.etcd.read(key).values.get(key)
        return "" if value is None else str(json.loads(value.text).get("name", ""))

    def put(self, puts: dict[str, str], deletes: tuple[str, ...] = ()) -> None:
        """Write and delete keys."""
        self.etcd.commit((), puts, deletes)

    def put_if(self, compares: tuple[Compare, ...], puts: dict[str, str]) -> bool:
        """Write keys if the conditions hold. Return whether they did."""
        return self.etcd.commit(compares, puts) is not None

    def watch(self, seconds: float | None = None) -> Iterator[State]:
        """Yield the state now, and then each other one; end after ``seconds``.

        While etcd does not answer, this waits for it, at most until then.
        """
        before, until = None, None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                state = self.state()
            except Unavailable:
                if until is None or time.monotonic() >= until:
                    raise
            else:
                if state != before:
                    before = state
                    yield state
            if until is not None and time.monotonic() >= until:
                return
            time.sleep(LOOK_SECONDS)


@contextmanager
def open_target(file: Path | None, model: str | None) -> Iterator[ClusterTarget]:
    """Yield the target. model None: the only one of the cluster.

    Raises NotFound if the cluster has none, and InvalidArgument if it has several.
    """
    from petps.cluster.etcd import Etcd
    from petps.cluster.records import Keys
    from petps.server.cluster import access_of

    config = cluster_config(file)
    etcd = Etcd(access_of(config), patience=PATIENCE_SECONDS)
    try:
        if model is None:
            model = _only_model(etcd, config.prefix)
        yield ClusterTarget(etcd, Keys(config.prefix, model))
    finally:
        etcd.close()


def _only_model(etcd: Etcd, prefix: str) -> str:
    from petps.cluster.records import Keys

    root = Keys.models(prefix)
    models = sorted({key.removeprefix(root).partition("/")[0] for key in etcd.read(root).values})
    if not models:
        raise NotFound(
            f"no server has registered below {prefix}: start one with the same [cluster] section"
        )
    if len(models) > 1:
        raise InvalidArgument(f"the cluster has the models {', '.join(models)}: name one (--model)")
    return models[0]
