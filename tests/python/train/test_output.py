"""A small trainer whose rows go to checkpoints and to a log, each at its own intervals.

The trainer is real: it learns a factorisation from batches that depend only on the seed and the
step. So its state after any step is known by training again from the start (the plain replay).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Column, Store, Table
from petps.checkpoint.chunk import STAMP
from petps.checkpoint.files import LocalFiles
from petps.checkpoint.published import POSITION
from petps.checkpoint.quantise import Quantising
from petps.delta import Delivery, Kind, RowsBody, TableSchema, decode_record
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument, IoError, NotFound, ResourceExhausted
from petps.publish import Position, Publisher
from petps.train import ArrayTable, TrackedSource, TrainerOutput
from petps.train.tracker import Tracker

SEED = 7
USERS, ITEMS, DIM, P = 400, 150, 8, 2
STEPS = 60
SCHEMAS = {name: TableSchema(name, "f32", DIM) for name in ("users", "items")}


def store_tables() -> list[Table]:
    row = Column("row", "f32", DIM)
    return [Table("users", (row,)), Table("items", (row, Column("sum", "f32", 1)))]


class Trainer:
    """Matrix factorisation. Items: Adagrad with a sum for each row, sparse keys; some expire."""

    def __init__(self, tracker: Tracker | None = None) -> None:
        random = np.random.default_rng(SEED)
        tracker = Tracker() if tracker is None else tracker
        self.user_rows = random.normal(size=(USERS, DIM)).astype(np.float32)
        self.item_rows = random.normal(size=(ITEMS, DIM)).astype(np.float32)
        self.first_rows = self.item_rows.copy()
        self.sums = np.zeros(ITEMS, np.float32)
        self.present = np.zeros(ITEMS, np.bool_)
        keys = np.sort(random.choice(2**62, ITEMS, replace=False).astype(np.uint64))
        self.users = ArrayTable(tracker, "users", self.user_rows)
        self.items = ArrayTable(
            tracker,
            "items",
            self.item_rows,
            columns={"sum": self.sums},
            keys=keys,
            present=self.present,
        )
        self.step = 0

    @property
    def tables(self) -> list[ArrayTable]:
        return [self.users, self.items]

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            random = np.random.default_rng((SEED, self.step))
            users = random.choice(USERS // 4 + 3 * self.step, 12, replace=False)
            items = random.choice(ITEMS, 12, replace=False)
            left, right = self.users.lookup(users), self.items.lookup(items)
            new = ~self.present[items]
            right[new] = self.first_rows[items[new]]
            sums = np.where(new, 0, self.sums[items])
            error = (1 - (left * right).sum(axis=1))[:, None]
            # As ArrayTable allows: these rows were looked up in this step.
            self.user_rows[users] += np.float32(0.1) * error * right
            gradient = error * left
            sums = sums + (gradient**2).mean(axis=1)
            scale = np.sqrt(sums + np.float32(1e-3))[:, None]
            self.items.update(items, right + np.float32(0.1) * gradient / scale, sum=sums)
            if self.step % 5 == 0:
                self.items.delete(random.choice(np.flatnonzero(self.present), 3, replace=False))
            for table in self.tables:  # evaluation is not tracked
                table.evaluate()
                table.lookup(np.arange(100))
                table.train()

    def rows(self) -> dict[str, dict[int, bytes]]:
        """Return the rows by table and key."""
        actual = {}
        for table in self.tables:
            keys = table.keys()
            gathered = table.gather(keys).columns
            actual[table.name] = {
                int(key): row.tobytes() for key, row in zip(keys, gathered["row"], strict=True)
            }
        return actual


def replayed(step: int) -> Trainer:
    trainer = Trainer()
    trainer.train(step)
    return trainer


def assert_holds(store: Store, version: int, trainer: Trainer) -> None:
    """Check that a version restores the trainer's state, as the codec stores it."""
    actual = store.restore(version)
    for table in trainer.tables:
        keys = table.keys()
        np.testing.assert_array_equal(actual[table.name].keys, keys)
        gathered = table.gather(keys).columns
        for column in store.tables_of(version)[table.name].columns:
            if column.name == STAMP:
                continue  # tests/python/ingest/test_expiry_store.py
            expected = column.stored(gathered[column.name])
            np.testing.assert_array_equal(actual[table.name].columns[column.name], expected)


class Served:
    """The state of servers: every version of a log, by replaying all of its records."""

    def __init__(self, log: DirectoryLog) -> None:
        self.versions: dict[int, dict[str, dict[int, bytes]]] = {}
        self.rows = 0
        served: dict[str, dict[int, bytes]] = {"users": {}, "items": {}}
        streams = [iter(self._records(log, partition)) for partition in range(P)]
        while True:
            commits = [self._to_commit(stream, served) for stream in streams]
            if None in commits:
                assert commits == [None] * P
                return
            assert len(set(commits)) == 1
            assert commits[0] is not None
            self.versions[commits[0]] = {name: dict(rows) for name, rows in served.items()}

    def _to_commit(
        self, stream: Iterator[object], served: dict[str, dict[int, bytes]]
    ) -> int | None:
        for record in stream:
            if record.header.kind == Kind.COMMIT:  # type: ignore[attr-defined]
                return int(record.header.version)  # type: ignore[attr-defined]
            body = record.body  # type: ignore[attr-defined]
            if not isinstance(body, RowsBody):
                continue
            table = served[record.header.table]  # type: ignore[attr-defined]
            self.rows += len(body.keys)
            for number, key in enumerate(body.keys.tolist()):
                if body.deleted is not None and body.deleted[number]:
                    table.pop(key, None)
                else:
                    table[key] = body.rows[number].tobytes()
        return None

    @staticmethod
    def _records(log: DirectoryLog, partition: int) -> list[object]:
        actual: list[object] = []
        subscription = log.subscribe({partition: 0})
        while events := subscription.poll(max_bytes=1 << 22, timeout=0):
            for event in events:
                assert isinstance(event, Delivery)
                actual.append(
                    decode_record(
                        event.message,
                        model="m",
                        partition=partition,
                        partitions=P,
                        schema_of=SCHEMAS.get,
                    )
                )
        subscription.close()
        return actual


def touched_only(
    rows: Mapping[str, dict[int, bytes]], first: Trainer
) -> dict[str, dict[int, bytes]]:
    """Leave out the users that no step has touched, because no delta has them."""
    start = first.rows()
    users = {key: row for key, row in rows["users"].items() if start["users"][key] != row}
    return {"users": users, "items": dict(rows["items"])}


def make_output(
    folder: Path,
    policy: str,
    *,
    create: bool = True,
    quantising: Quantising | None = None,
    spill: bool = False,
    files: LocalFiles | None = None,
) -> tuple[Trainer, TrainerOutput, Store, DirectoryLog]:
    """Make a trainer and its output, with a new store and run, or else with those of the folder."""
    budget = {"memory_bytes": 500, "spill": folder / "spill"} if spill else {}
    tracker = Tracker(**budget)  # type: ignore[arg-type]
    trainer = Trainer(tracker)
    place = files or folder / "store"
    store = Store.create(place, "m", store_tables(), quantising) if create else Store.open(place)
    log = DirectoryLog(folder / "log", partitions=P)
    publisher = Publisher(log, "m", P, tables=SCHEMAS)
    if create:
        publisher.begin_continue(None)
    output = TrainerOutput(
        tracker, trainer.tables, store=store, policy=POLICIES[policy](), publisher=publisher
    )
    return trainer, output, store, log


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("spill", [False, True], ids=["memory", "spilled"])
def test_every_version_of_store_and_log_equals_the_replay(
    tmp_path: Path, policy: str, spill: bool
) -> None:
    trainer, output, store, log = make_output(tmp_path, policy, spill=spill)
    checkpoints: dict[int, int] = {}
    published: dict[int, int] = {}
    while trainer.step < STEPS:
        trainer.train()
        both = trainer.step % 20 == 0
        if trainer.step % 5 == 0:
            version = len(checkpoints) + 1
            output.checkpoint(version, publish=both, step=trainer.step)
            output.arrange()
            checkpoints[version] = trainer.step
            if both:
                assert output.publisher is not None
                published[output.publisher.version] = trainer.step
        elif trainer.step % 3 == 0:
            published[output.publish(step=trainer.step)] = trainer.step
    for version, step in checkpoints.items():
        assert_holds(store, version, replayed(step))
    served = Served(log)
    assert served.versions.keys() == published.keys()
    first = Trainer()
    for version, step in published.items():
        expected = touched_only(replayed(step).rows(), first)
        actual = served.versions[version]
        assert actual["items"] == expected["items"]
        assert {key: actual["users"].get(key) for key in expected["users"]} == expected["users"]


def test_quantised_checkpoints_beside_a_log_of_whole_rows(tmp_path: Path) -> None:
    trainer, output, store, log = make_output(tmp_path, "consecutive", quantising=Quantising(10))
    for version in range(1, 6):
        trainer.train(4)
        output.checkpoint(version, publish=True)
        assert_holds(store, version, trainer)
        assert store.tables_of(version)["users"].columns[0].dtype.endswith("4")
        served = Served(log).versions[version]
        assert served["items"] == trainer.rows()["items"]


def test_a_trainer_that_continues_from_quantised_rows_publishes_all_of_them(
    tmp_path: Path,
) -> None:
    """Servers have the rows of before; the trainer's are those that the store has kept of them."""
    trainer, output, store, log = make_output(tmp_path, "oneshot", quantising=Quantising(1))
    trainer.train(4)
    output.checkpoint(1, publish=True)
    trainer.train(4)
    output.checkpoint(2, publish=True)
    before = trainer.rows()["items"]
    log.close()
    again, output, store, log = make_output(tmp_path, "oneshot", create=False)
    assert output.publisher is not None
    output.publisher.begin_continue(output.restore(2))
    again.step = 8
    assert again.rows()["items"].keys() == before.keys()
    assert again.rows()["items"] != before
    again.train(1)
    version = output.publish()
    assert Served(log).versions[version] == again.rows()
    # The store's next version has what changed since its base, and not all rows.
    entry = output.checkpoint(3)
    assert entry.rows < store.state.version(1).rows


@pytest.mark.parametrize("policy", ["consecutive", "intermittent", "2d", "merged"])
def test_a_crashed_trainer_continues_from_its_checkpoint(tmp_path: Path, policy: str) -> None:
    trainer, output, store, log = make_output(tmp_path, policy)
    trainer.train(3)
    output.publish(step=3)
    trainer.train(4)
    output.checkpoint(1)  # the rows of 4 steps are owed to the log
    output.arrange()
    for version in range(2, 5):
        trainer.train(4)
        output.checkpoint(version, publish=version == 3)
        output.arrange()
    at = trainer.step
    trainer.train(2)  # these steps are lost
    log.close()

    again, output, store, log = make_output(tmp_path, policy, create=False)
    assert output.publisher is not None
    position = output.restore(4)
    assert position is not None
    assert position.version == 2
    output.publisher.begin_continue(position)
    again.step = at
    assert again.rows() == replayed(at).rows()
    np.testing.assert_array_equal(again.sums[again.present], replayed(at).sums[again.present])

    again.train(3)
    version = output.publish()
    expected = replayed(again.step).rows()["items"]
    assert Served(log).versions[version]["items"] == expected
    for number in range(5, 9):
        output.checkpoint(number, publish=number == 7)
        output.arrange()
        assert_holds(store, number, replayed(again.step))
        again.train(2)
    for number in range(1, 5):
        assert_holds(store, number, replayed(3 + 4 * number))


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5, 6])
def test_a_restore_that_failed_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Whichever read of the store fails, a second restore() does what the first would have done."""
    trainer, output, store, log = make_output(tmp_path, "oneshot")
    trainer.train(4)
    output.checkpoint(1, publish=True)
    trainer.train(4)
    output.checkpoint(2)  # a difference: its keys, and those owed to the log, must come again
    expected = trainer.rows()
    log.close()

    again, output, store, log = make_output(tmp_path, "oneshot", create=False)
    assert output.publisher is not None
    calls = 0

    def once(call: Callable[..., object]) -> Callable[..., object]:
        def count(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise IoError("the network is down")
            return call(*arguments, **options)

        return count

    for name in ("count_restore", "part", "read"):
        monkeypatch.setattr(store, name, once(getattr(store, name)))
    try:
        position = output.restore(2)
        assert calls < failing, "it passed over an error"
    except IoError:
        position = output.restore(2)
    assert position is not None
    output.publisher.begin_continue(position)
    again.step = 8
    version = output.publish()
    assert Served(log).versions[version]["items"] == expected["items"]
    again.train(2)
    output.checkpoint(3)
    assert_holds(store, 3, replayed(10))


def test_a_difference_is_not_written_after_a_resume_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, output, _, _ = make_output(tmp_path, "oneshot")
    trainer.train(4)
    output.checkpoint(1)
    trainer.train(4)
    output.checkpoint(2)
    tracker = Tracker()
    again = Trainer(tracker)
    store = Store.open(tmp_path / "store")
    output = TrainerOutput(tracker, again.tables, store=store, policy=POLICIES["oneshot"]())

    real, calls = store.read, 0

    def fail_later(*arguments, **options):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls > 1:  # the tables are loaded; this read is of the difference's keys
            raise IoError("the network is down")
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", fail_later)
        with pytest.raises(IoError, match="network"):
            output.restore(2)
    with pytest.raises(FailedPrecondition, match=r"since version 1 is not tracked .*resume\(\)"):
        output.checkpoint(3)
    assert output.restore(2) is None
    output.checkpoint(3)
    assert_holds(store, 3, replayed(8))


def test_rows_are_owed_to_the_log_by_key(tmp_path: Path) -> None:
    """The restored table has other positions for the same keys."""
    table = Table.of("t", 1)
    log = DirectoryLog(tmp_path / "log", partitions=P)
    schemas = {"t": TableSchema("t", "f32", 1)}

    def make(store: Store, keys: list[int]) -> tuple[ArrayTable, TrainerOutput, Tracker]:
        tracker = Tracker()
        trained = ArrayTable(
            tracker,
            "t",
            np.zeros((len(keys), 1), np.float32),
            keys=np.array(keys, np.uint64),
            present=np.zeros(len(keys), np.bool_),
        )
        publisher = Publisher(log, "m", P, tables=schemas)
        policy = POLICIES["consecutive"]()
        output = TrainerOutput(tracker, [trained], store=store, policy=policy, publisher=publisher)
        return trained, output, tracker

    store = Store.create(tmp_path / "store", "m", [table])
    trained, output, _ = make(store, [10, 20, 30])
    assert output.publisher is not None
    output.publisher.begin_continue(None)
    trained.update([0, 1, 2], [1, 2, 3])
    output.publish()
    trained.update([2], [7])
    output.checkpoint(1)
    trained, output, tracker = make(Store.open(tmp_path / "store"), [5, 10, 20, 30])
    assert output.restore(1) is not None
    owed = tracker.read("publish").ids("t")
    assert trained.keys_of(owed).tolist() == [30]


def test_rows_are_gathered_once_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, output, _, log = make_output(tmp_path, "consecutive")
    gathered = 0
    real = ArrayTable.gather

    def counted(self, keys):  # type: ignore[no-untyped-def]
        nonlocal gathered
        gathered += len(keys)
        return real(self, keys)

    trainer.train(5)
    output.checkpoint(1, publish=True)
    before = Served(log).rows
    trainer.train(5)
    monkeypatch.setattr(ArrayTable, "gather", counted)
    info = output.checkpoint(2, publish=True)
    assert info.rows == gathered == Served(log).rows - before > 0


def test_a_refusing_log_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, output, store, log = make_output(tmp_path, "consecutive")
    trainer.train(5)
    output.checkpoint(1, publish=True)
    trainer.train(5)

    def refuse(*_: object) -> None:
        raise ResourceExhausted("the log is full")

    with monkeypatch.context() as patch:
        patch.setattr(log, "publish", refuse)
        with pytest.raises(ResourceExhausted, match="log is full"):
            output.checkpoint(2, {"dense": b"weights"}, publish=True)
    assert_holds(store, 2, trainer)  # the checkpoint was completed
    assert store.part(2, "dense") == b"weights"
    with pytest.raises(NotFound):
        store.part(2, POSITION)  # the position in the log is not known
    trainer.train(1)
    with pytest.raises(FailedPrecondition, match=r"run .* ended with an error"):
        output.publish()
    position = json.loads(store.part(1, POSITION))
    output.publisher = Publisher(log, "m", P, tables=SCHEMAS)
    output.publisher.begin_continue(Position.from_json(position))
    version = output.publish()
    served = Served(log).versions[version]
    assert served["items"] == trainer.rows()["items"]
    expected = touched_only(trainer.rows(), Trainer())["users"]
    assert {key: served["users"].get(key) for key in expected} == expected


class FailingFiles(LocalFiles):
    """Files on a disk that is full while ``full`` is set."""

    full = False

    def write(self, path, pieces):  # type: ignore[no-untyped-def]
        if self.full:
            next(iter(pieces))
            raise IoError(f"{path}: no space left on device")
        super().write(path, pieces)


@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
def test_a_refusing_store_loses_no_row(tmp_path: Path, policy: str) -> None:
    files = FailingFiles(tmp_path / "store")
    trainer, output, store, log = make_output(tmp_path, policy, files=files)
    publisher = output.publisher
    assert publisher is not None
    trainer.train(5)
    output.checkpoint(1, publish=True)
    for number in range(2, 8):
        trainer.train(3)
        files.full = True
        with pytest.raises(IoError, match="no space left"):
            output.checkpoint(number, publish=True)
        assert publisher.version == number  # the log's version was completed
        served = Served(log).versions[publisher.version]
        assert served["items"] == trainer.rows()["items"]
        assert store.state.versions()[-1].version == number - 1
        files.full = False
        trainer.train(2)
        output.checkpoint(number)
        assert_holds(store, number, trainer)


def test_a_cancelled_checkpoint_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, output, store, _ = make_output(tmp_path, "consecutive")
    trainer.train(5)
    output.checkpoint(1)
    trainer.train(5)
    real = ArrayTable.gather

    def cancelling(self, keys):  # type: ignore[no-untyped-def]
        output.cancel()
        return real(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(ArrayTable, "gather", cancelling)
        with pytest.raises(FailedPrecondition, match="was cancelled"):
            output.checkpoint(2)
    trainer.train(1)
    output.checkpoint(2)
    assert_holds(store, 2, trainer)


def test_bad_calls_are_named(tmp_path: Path) -> None:
    trainer, output, store, log = make_output(tmp_path, "consecutive")
    with pytest.raises(FailedPrecondition, match="version 3 is not the newest"):
        output.restore(3)
    trainer.train(2)
    output.checkpoint(1)
    output.checkpoint(2)
    with pytest.raises(FailedPrecondition, match="version 1 is not the newest"):
        output.restore(1)
    tracker = Tracker({"other": None})
    only = TrainerOutput(tracker, [])
    with pytest.raises(FailedPrecondition, match="has no store"):
        only.checkpoint(1)
    with pytest.raises(NotFound, match="no tenant 'publish'"):
        only.publish()
    with pytest.raises(InvalidArgument, match="both a store and a policy"):
        TrainerOutput(tracker, [], store=store)
    with pytest.raises(InvalidArgument, match="must have the same tables: table"):
        TrainerOutput(tracker, [], store=store, policy=POLICIES["full"]())
    with pytest.raises(NotFound, match="tracker has no table"):
        TrackedSource(tracker, [trainer.users])
    log.close()


def test_a_delta_of_untracked_changes_is_refused(tmp_path: Path) -> None:
    """A source that was not resumed knows no change since the store's newest version."""
    trainer, output, store, _ = make_output(tmp_path, "consecutive")
    trainer.train(2)
    output.checkpoint(1)
    tracker = Tracker()
    again = Trainer(tracker)
    source = TrackedSource(tracker, again.tables)
    source.begin()
    checkpointer = Checkpointer(store, POLICIES["consecutive"](), source)
    with pytest.raises(FailedPrecondition, match=r"since version 1 is not tracked .*resume\(\)"):
        checkpointer.write(2)
