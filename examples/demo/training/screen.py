"""The output of the demo with --train: steps, the growing table of scored versions, the result."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from examples.demo.processes import ServerProcess
from examples.demo.screen import Growing, Steps
from examples.demo.traffic import KEYS_PER_PULL
from examples.demo.training.report import Scored, ServerBack, TrainerBack, TrainingReport

__all__ = ["TrainingLines", "TrainingScreen"]

_EQUAL = {
    True: Text("✓ bit by bit", style="green"),
    False: Text("✗ differs", style="bold red"),
    None: Text("newer rows too", style="dim"),
}


class TrainingLines(Growing):
    """The table of scored versions, above a bar of steps."""

    def __init__(self, steps: int) -> None:
        names = ("      step", "version", "training loss", "held-out loss", "AUC")
        super().__init__((*names, "as by trainer's rows"), "steps", steps)

    def line(self, scored: Scored) -> None:
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
    """The output of the demo with --train, written as Screen writes its own."""

    def begin(self, report: TrainingReport) -> None:
        """Print the first lines."""
        self._console.print(Text("petps demo --train", style="bold"))
        self._console.print(
            Text(
                f"a DLRM on {report.ratings:,} {report.data}: {report.keys:,} ids in "
                f"{len(report.fields)} fields; {report.held_out:,} samples are held out, and never "
                "trained on",
                style="dim",
            )
        )
        self._console.print()

    def serving(self, server: ServerProcess, facts: dict[str, Any], report: TrainingReport) -> None:
        """Print that the server answers with empty tables."""
        self.step(
            "server",
            f"{server.url}, process {facts['pid']}; {len(report.fields)} empty tables of "
            f"{report.dim} float32, medium {report.medium}, durability {report.durability}",
            f"watch it live: http://127.0.0.1:{server.http_port}/ · log {report.log}",
        )

    def training(self, report: TrainingReport, seconds: float) -> None:
        """Print that the workers are ready."""
        self.step(
            "trainer",
            f"{report.workers} workers, {report.steps} steps of {report.workers * report.batch} "
            f"samples; ready after {seconds:.1f} s",
            "petps.train: rows and optimizer state in a pool of each worker, mode nested; "
            "held-out samples are scored by served rows meanwhile",
        )
        self._console.print()

    def trainer_back(self, back: TrainerBack) -> None:
        """Print the kill of the trainer and its restart."""
        self._console.print()
        self.step("kill -9", f"of both workers, after step {back.step}", mark="[red]✗[/red]")
        self.step(
            "restart",
            f"first step {back.to_first_step:.1f} s after the kill, from step {back.restored} on: "
            f"pools reopened in {1e3 * back.open:.0f} ms, rolled back in "
            f"{1e3 * back.restore:.0f} ms, the rest is Python and PyTorch starting",
            f"{back.unlearnt} published versions are unlearnt: a server that has them catches up "
            "to the next version of the store",
        )
        self._console.print()

    def server_back(self, back: ServerBack) -> None:
        """Print the kill of the server and its restart."""
        self._console.print()
        self.step(
            "kill -9",
            f"of the server, as version {back.version_before} came after step {back.step}",
            mark="[red]✗[/red]",
        )
        self.step(
            "restart",
            f"first pull {back.exec_to_first_pull_ms:.0f} ms after exec, "
            f"{back.open_to_first_pull_ms:.1f} ms after the pool's open call",
            f"the newest version was served {back.caught_up_ms:.0f} ms after exec; training went "
            f"on; the client only waited ({back.client_waited_ms:.0f} ms, "
            f"{back.client_failures} failed pulls)",
        )
        self._console.print()

    def result(self, report: TrainingReport) -> None:
        """Print all figures again, and the verdict."""
        self._console.print()
        self._console.print(_numbers(report))
        self._console.print()
        comparison, final = report.comparison, report.final
        if report.passed and comparison is not None and final is not None:
            self._console.print(
                Text(f"✓ every row of version {final.version} is the trainer's, bit by bit: ",
                     style="bold green")
                + Text(
                    f"{comparison.rows_equal:,} rows equal, "
                    f"{comparison.missing_as_they_should:,} keys never trained and missing",
                    style="green",
                )
            )  # fmt: skip
            self._console.print(
                Text(f"✓ AUC {final.auc_served:.6f} by served rows and by the trainer's: ",
                     style="bold green")
                + Text(
                    f"all {final.samples:,} scores are equal, and so they were of "
                    f"{report.compared} versions while training went on",
                    style="green",
                )
            )  # fmt: skip
        for complaint in report.complaints:
            self._console.print(Text(f"✗ {complaint}", style="bold red"))
        self._console.print(Text(f"{report.seconds:.0f} s; plots: {report.plots}", style="dim"))


def _numbers(report: TrainingReport) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
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
        f"by served rows; {len(report.scored)} versions while training went on, and the last",
    )
    table.add_row(
        "AUC",
        f"{final.auc_served:.6f}",
        f"by served rows; by the trainer's {final.auc_trainer:.6f}; version {final.version}",
    )
    table.add_row(
        "freshness",
        f"p50 {fresh.p50_ms:.0f}, p90 {fresh.p90_ms:.0f}, p99 {fresh.p99_ms:.0f} ms",
        f"from the end of a step to the first pull that is served its version; {fresh.versions} "
        f"versions while nothing was down; worst of all {fresh.worst_ms / 1e3:.1f} s",
    )
    if fresh.message_p50_ms is not None and fresh.message_p99_ms is not None:
        table.add_row(
            "",
            f"p50 {fresh.message_p50_ms:.0f}, p99 {fresh.message_p99_ms:.0f} ms",
            "from a message's publishing to its rows being servable, by the server's own status",
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
        f"{stages.samples_per_second:,.0f} samples/s; waited for rows {stages.lookup_stall_ms:.2f} "
        "ms of it",
    )
    ahead = ("prefetch", "route", "exchange", "retrieve", "write-back")
    for label, names, said in (
        ("  ahead", ahead, "on threads of their own"),
        ("  computed", ("freshen", "dense", "reduce", "update"), "on the caller's"),
        ("  crossing", ("send_rows", "take_gradients"), "rows and gradients, on the link's"),
    ):
        parts = ", ".join(f"{name} {stages.stages_ms.get(name, 0.0):.1f}" for name in names)
        table.add_row(label, f"{sum(stages.stages_ms.get(n, 0.0) for n in names):.1f} ms",
                      f"{parts} ms; {said}")  # fmt: skip
    table.add_row(
        "exposed",
        f"{100 * stages.exposed_share:.0f} %",
        f"of the time that rows and gradients cross is waited for: {stages.exposed_ms:.1f} of "
        f"{stages.crossing_ms:.1f} ms; all processes share {report.processors} processors, and to "
        "cross is computation here",
    )
    if report.trainer_back is not None:
        table.add_row(
            "trainer back",
            f"{report.trainer_back.to_first_step:.1f} s",
            "from kill -9 to the first step of the new run; its first version was served "
            f"{report.trainer_back.to_served:.1f} s after the kill, by "
            f"{report.trainer_back.catch_ups} partitions that caught up from the store",
        )
    if report.server_back is not None:
        table.add_row(
            "server back",
            f"{report.server_back.open_to_first_pull_ms:.1f} ms",
            "from the pool's open call to the first pull after kill -9; "
            f"{report.server_back.exec_to_first_pull_ms:.0f} ms from exec (Python and its imports)",
        )
    return table
