"""The output of the demo with --train: steps, the growing table of scored versions, the result."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from examples.demo.processes import ServerProcess
from examples.demo.screen import GrowingTable, Steps, make_figures
from examples.demo.traffic import KEYS_PER_PULL
from examples.demo.training.report import (
    Checkpoints,
    Scored,
    ServerBack,
    TrainerBack,
    TrainingReport,
)

__all__ = ["TrainingLines", "TrainingScreen"]

_EQUAL = {
    True: Text("✓ bit by bit", style="green"),
    False: Text("✗ differs", style="bold red"),
    None: Text("newer rows served", style="dim"),
}


class TrainingLines(GrowingTable):
    """The table of scored versions, above a bar of steps."""

    def __init__(self, steps: int) -> None:
        names = ("      step", "version", "training loss", "held-out loss", "AUC")
        super().__init__((*names, "equals the trainer's"), "steps", steps)

    def add_line(self, scored: Scored) -> None:
        """Add the line of a scored version."""
        self.add(
            f"{scored.step:,}",
            f"{scored.version:,}",
            f"{scored.training_loss:.4f}",
            f"{scored.log_loss:.4f}",
            f"{scored.auc:.4f}",
            _EQUAL[scored.equal],
        )


class TrainingScreen(Steps):
    """The output of the demo with --train."""

    def print_header(self, report: TrainingReport) -> None:
        """Print the title and the source of the samples."""
        self._print_title(
            "petps demo --train",
            f"a DLRM on {report.ratings:,} {report.data}: {report.keys:,} ids in "
            f"{len(report.fields)} fields; {report.held_out:,} samples are held out, and never "
            "trained on",
        )

    def print_server(
        self, server: ServerProcess, facts: dict[str, Any], report: TrainingReport
    ) -> None:
        """Print the addresses of the server, which has empty tables."""
        self.print_step(
            "server",
            f"{server.url}, process {facts['pid']}; {len(report.fields)} empty tables of "
            f"{report.dim} float32, medium {report.medium}, durability {report.durability}",
            f"status page: http://127.0.0.1:{server.http_port}/ · log {report.log}",
        )

    def print_training(self, report: TrainingReport, seconds: float) -> None:
        """Print that the trainer's processes are ready."""
        self.print_step(
            "trainer",
            f"{report.workers} processes, {report.steps} steps of "
            f"{report.workers * report.batch} samples; ready after {seconds:.1f} s",
            "petps.train: each process keeps rows and optimizer state in a pool, mode nested; "
            "held-out samples are scored by served rows during training; another process merges "
            "and purges the checkpoint store",
        )
        self._console.print()

    def print_trainer_back(self, back: TrainerBack) -> None:
        """Print the kill of the trainer and its restart."""
        self._console.print()
        self.print_step(
            "kill -9",
            f"of both trainer processes, after step {back.step}",
            mark="[red]✗[/red]",
        )
        self.print_step(
            "restart",
            f"first step {back.to_first_step:.1f} s after the kill, from step {back.restored} on: "
            f"pools reopened in {1e3 * back.open:.0f} ms, rolled back in "
            f"{1e3 * back.restore:.0f} ms; the rest is the start of Python and PyTorch",
            f"the new run does not have {back.unlearnt} published versions: it begins with the "
            "restored version, and the server makes its rows equal to it",
        )
        self._console.print()

    def print_server_back(self, back: ServerBack) -> None:
        """Print the kill of the server and its restart."""
        self._console.print()
        self.print_step(
            "kill -9",
            f"of the server, which had version {back.version_before}, after step {back.step}",
            mark="[red]✗[/red]",
        )
        self.print_step(
            "restart",
            f"first pull {back.exec_to_first_pull_ms:.0f} ms after exec, "
            f"{back.open_to_first_pull_ms:.1f} ms after the pool's open call",
            f"the newest version was served {back.caught_up_ms:.0f} ms after exec; training "
            f"continued; the client waited {back.client_waited_ms:.0f} ms, and "
            f"{back.client_failures} pulls failed",
        )
        self._console.print()

    def print_result(self, report: TrainingReport) -> None:
        """Print all figures again, and the verdict."""
        self._console.print()
        self._console.print(_figures_of(report))
        self._console.print()
        comparison, final = report.comparison, report.final
        if report.passed and comparison is not None and final is not None:
            self._print_passed(
                f"every row of version {final.version} is the trainer's, bit by bit",
                f"{comparison.rows_equal:,} rows equal, "
                f"{comparison.missing_as_they_should:,} keys never trained and missing",
            )
            self._print_passed(
                f"AUC {final.auc_served:.6f} by served rows and by the trainer's",
                f"all {final.samples:,} scores are equal, as were those of {report.compared} "
                "versions during training",
            )
        for complaint in report.complaints:
            self._console.print(Text(f"✗ {complaint}", style="bold red"))
        self._console.print(Text(f"{report.seconds:.0f} s; plots: {report.plots}", style="dim"))


def _figures_of(report: TrainingReport) -> Table:
    table = make_figures()
    final, fresh, stages, pull = report.final, report.freshness, report.stages, report.pull
    assert final is not None
    assert fresh is not None
    assert stages is not None
    if report.scored:
        table.add_row(
            "training loss",
            f"{report.scored[0].training_loss:.4f} → {report.scored[-1].training_loss:.4f}",
            f"mean logarithmic loss of the steps of a version; {report.steps} steps, one epoch",
        )
    table.add_row(
        "held-out loss",
        f"{report.scored[0].log_loss:.4f} → {final.log_loss:.4f}"
        if report.scored
        else f"{final.log_loss:.4f}",
        f"by served rows; {len(report.scored)} versions during training, and the last one",
    )
    table.add_row(
        "AUC",
        f"{final.auc_served:.6f}",
        f"by served rows; by the trainer's {final.auc_trainer:.6f}; version {final.version}",
    )
    table.add_row(
        "freshness",
        "not measured"
        if fresh.p50_ms is None
        else f"p50 {fresh.p50_ms:.0f}, p90 {fresh.p90_ms:.0f}, p99 {fresh.p99_ms:.0f} ms",
        f"from the end of a step to the first pull that shows its version; {fresh.versions} "
        f"versions while nothing was down; worst of all {fresh.worst_ms / 1e3:.1f} s",
    )
    if fresh.message_p50_ms is not None and fresh.message_p99_ms is not None:
        table.add_row(
            "",
            f"p50 {fresh.message_p50_ms:.0f}, p99 {fresh.message_p99_ms:.0f} ms",
            "from the publishing of a message until its rows are servable, by the server's status",
        )
    if pull is not None:
        table.add_row(
            "pull",
            f"p50 {pull.p50_ms:.2f}, p99 {pull.p99_ms:.2f} ms",
            f"{pull.pulls:,} pulls of {KEYS_PER_PULL} keys; client, server and trainer share "
            f"{report.processors} processors",
        )
    table.add_row(
        "step",
        f"p50 {stages.step_p50_ms:.1f} ms",
        f"{stages.samples_per_second:,.0f} samples/s; each step waits "
        f"{stages.lookup_stall_ms:.2f} ms for rows",
    )
    ahead = ("prefetch", "arrange", "route", "exchange", "retrieve", "write-back")
    for label, names, threads in (
        ("  ahead", ahead, "on threads of their own"),
        ("  computed", ("freshen", "dense", "reduce", "update"), "on the caller's thread"),
        ("  crossing", ("send_rows", "take_gradients"), "rows and gradients, on the link's thread"),
    ):
        times = {name: stages.stages_ms.get(name, 0.0) for name in names}
        parts = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
        table.add_row(label, f"{sum(times.values()):.1f} ms", f"{parts} ms; {threads}")
    table.add_row(
        "exposed",
        f"{100 * stages.exposed_share:.0f} %",
        f"of the time in which rows and gradients cross, training waits: {stages.exposed_ms:.1f} "
        f"of {stages.crossing_ms:.1f} ms; all processes share {report.processors} processors, "
        "which also do the crossing",
    )
    if report.checkpoints is not None:
        _add_checkpoints(table, report.checkpoints)
    if report.trainer_back is not None:
        table.add_row(
            "trainer back",
            f"{report.trainer_back.to_first_step:.1f} s",
            "from kill -9 to the first step of the new run; its first version was served "
            f"{report.trainer_back.to_served:.1f} s after the kill, when "
            f"{report.trainer_back.catch_ups} partitions had caught up from the store",
        )
    if report.server_back is not None:
        table.add_row(
            "server back",
            f"{report.server_back.open_to_first_pull_ms:.1f} ms",
            "from the pool's open call to the first pull after kill -9; "
            f"{report.server_back.exec_to_first_pull_ms:.0f} ms from exec (Python and its imports)",
        )
    return table


def _add_checkpoints(table: Table, checkpoints: Checkpoints) -> None:
    """Add a line for each of staged, quantised, clustered, compacted, merged, purged, kept."""
    table.add_row(
        "staged",
        f"{100 * checkpoints.copy_share:.2f} %",
        f"of the training time is the wait for copies; {checkpoints.steps_behind} steps were "
        f"trained while {checkpoints.versions} versions of the store were written, "
        f"{checkpoints.behind_s:.2f} s each",
    )
    table.add_row(
        "quantised",
        f"{100 * checkpoints.stored_bytes / max(1, checkpoints.exact_bytes):.0f} %",
        f"of the bytes of float32: rows as {checkpoints.row_dtype}, with keys and filters; the log "
        "and the server have float32",
    )
    table.add_row(
        "clustered",
        f"{checkpoints.dedup_given:.2f} → {checkpoints.dedup_clustered:.2f}",
        "distinct keys of the micro-batches over those of the batch",
    )
    table.add_row(
        "compacted", f"{checkpoints.ids_dropped:,} ids", "repeated, dropped behind the steps"
    )
    table.add_row(
        "merged",
        f"{checkpoints.merges}",
        f"merges by a process beside the training; {checkpoints.resets} bases after the first",
    )
    table.add_row(
        "purged",
        f"{checkpoints.purged}",
        f"versions by the same process; the {checkpoints.kept} kept versions restore, and "
        f"{checkpoints.rows_compared:,} rows of {checkpoints.compared} of them are the trainer's, "
        "rounded",
    )
