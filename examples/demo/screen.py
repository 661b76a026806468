"""The output of the demo: steps, the growing table of deltas, and the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.demo.processes import ServerProcess
from examples.demo.report import Group, Report, Restart
from examples.demo.trace import Trace
from examples.demo.traffic import KEYS_PER_PULL

__all__ = ["DeltaLines", "GrowingTable", "Screen", "Steps", "make_figures"]

PIPE_COLUMNS: Final = 100  # the width where none is known (a pipe, a file)
LABEL_COLUMNS: Final = 10


class GrowingTable:
    """A table that grows, with a progress bar below it for ``total`` steps."""

    def __init__(self, columns: Sequence[str], label: str, total: int) -> None:
        self._table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
        for name in columns:
            self._table.add_column(name, justify="right")
        self._progress = _make_progress()
        self._task = self._progress.add_task(f"  {label}", total=total)

    @property
    def table_and_bar(self) -> Stack:
        """The table with the bar below it."""
        return Stack(self._table, self._progress)

    @property
    def table(self) -> Table:
        """The table alone."""
        return self._table

    def advance(self) -> None:
        """Add one completed step."""
        self._progress.advance(self._task)

    def set_completed(self, count: int) -> None:
        """Set the number of completed steps."""
        self._progress.update(self._task, completed=count)

    def add(self, *cells: str | Text) -> None:
        """Add a line."""
        self._table.add_row(*cells)


class DeltaLines(GrowingTable):
    """The table of deltas: call ``advance`` after each delta, ``add_line`` after each group."""

    def __init__(self, k: int, deltas: int) -> None:
        names = ("  accesses", "version", "rows sent", "deleted", "fresh after")
        super().__init__((*names, f"hit@{k}", "popularity", "gain"), "deltas", deltas)

    def add_line(self, group: Group) -> None:
        """Add the line of a group."""
        gain = 100 * (group.hit_rate - group.popularity_rate)
        self.add(
            f"{group.accesses:,}",
            f"{group.version:,}",
            f"{group.rows:,}",
            f"{group.deleted:,}",
            f"{group.freshness_p50_ms:.1f} ms",
            f"{100 * group.hit_rate:.1f} %",
            f"{100 * group.popularity_rate:.1f} %",
            Text(f"{gain:+.1f}", style="green" if gain > 0 else "red"),
        )


class Steps:
    """A writer of steps and progress to ``console``; a quiet one (for --json) writes nothing."""

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self._console = console or Console(quiet=quiet, highlight=False)
        if not self._console.is_terminal:
            self._console.width = PIPE_COLUMNS

    @property
    def _is_live(self) -> bool:
        """Whether the console can show something that changes."""
        return self._console.is_terminal and not self._console.quiet

    def _print_title(self, title: str, summary: str) -> None:
        self._console.print(Text(title, style="bold"))
        self._console.print(Text(summary, style="dim"))
        self._console.print()

    def _print_passed(self, verdict: str, counts: str) -> None:
        self._console.print(
            Text(f"✓ {verdict}: ", style="bold green") + Text(counts, style="green")
        )

    def print_step(
        self, label: str, text: str, detail: str = "", mark: str = "[green]✓[/green]"
    ) -> None:
        """Print a finished step."""
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=LABEL_COLUMNS, style="bold")
        line.add_column(overflow="fold")
        line.add_row(mark, label, Text(text))
        if detail:
            line.add_row("", "", Text(detail, style="dim"))
        self._console.print(line)

    @contextmanager
    def show_spinner(self, text: str) -> Iterator[None]:
        """Show a spinner during the block."""
        if not self._is_live:
            yield
            return
        with self._console.status(text):
            yield

    @contextmanager
    def show_bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar during the block. Yield a function that adds n completed steps."""
        if not self._is_live:
            yield lambda n: None
            return
        with _make_progress(self._console, transient=True) as progress:
            task = progress.add_task(f"  {text}", total=total)
            yield lambda n: progress.advance(task, n)

    @contextmanager
    def show_table(self, lines: GrowingTable) -> Iterator[None]:
        """Show the table and its bar during the block; the table stays afterwards."""
        if not self._is_live:
            yield
            if lines.table.row_count:
                self._console.print(lines.table)
            return
        with Live(lines.table_and_bar, console=self._console, refresh_per_second=8) as live:
            yield
            live.update(lines.table)

    def show_kept(self, folder: Path) -> None:
        """Print the path of the work folder that is kept."""
        self._console.print(Text(f"kept: {folder}", style="dim"))


class Screen(Steps):
    """The output of the demo."""

    # ---- steps

    def print_header(self, trace: Trace, report: Report) -> None:
        """Print the title and the source of the accesses."""
        self._print_title(
            "petps demo",
            f"{report.accesses:,} of {len(trace.accesses):,} real accesses to "
            f"{len(trace.keys):,} objects: {report.trace}",
        )

    def print_pool(self, path: Path, medium: str, durability: str) -> None:
        """Print the path and the medium of the new pool."""
        self.print_step("pool", f"{path}", f"medium {medium}, durability {durability}")

    def print_base(self, accesses: int, seconds: float, base: dict[str, Any], log: str) -> None:
        """Print the size of the published base."""
        self.print_step(
            "base",
            f"{base['rows']:,} rows, learned from {accesses:,} accesses in {seconds:.1f} s",
            f"skip-gram with negative sampling; log {log}",
        )

    def print_server(self, server: ServerProcess, facts: dict[str, Any], base: float) -> None:
        """Print the addresses of the server, which has loaded the base in ``base`` seconds."""
        self.print_step(
            "server",
            f"{server.url}, process {facts['pid']}; the base was servable after {base:.2f} s",
            f"status page: http://127.0.0.1:{server.http_port}/",
        )

    def print_idle(self, report: Report) -> None:
        """Print the figures of pulls without other load."""
        latency = report.pull_idle
        assert latency is not None
        self.print_step(
            "idle",
            f"{report.pulls_per_second:,.0f} pulls/s of {KEYS_PER_PULL} keys by one thread "
            f"({KEYS_PER_PULL * report.pulls_per_second / 1e6:.2f} M rows/s)",
            f"p50 {latency.p50_ms:.2f} ms, p99 {latency.p99_ms:.2f} ms",
        )

    def print_restart(self, restart: Restart) -> None:
        """Print the kill of the server and its restart."""
        self._console.print()
        self.print_step(
            "kill -9",
            f"in the middle of a delta of {restart.delta_rows:,} rows: "
            f"{100 * restart.share_visible:.0f} % of them were visible",
            mark="[red]✗[/red]",
        )
        self.print_step(
            "restart",
            f"first correct pull {restart.exec_to_first_correct_pull_ms:.0f} ms after exec, "
            f"{restart.open_to_first_correct_pull_ms:.1f} ms after the pool's open call",
            f"the delta was complete {restart.caught_up_ms:.0f} ms after exec; the client waited "
            f"{restart.client_waited_ms:.0f} ms, and {restart.client_failures} pulls failed",
        )
        self._console.print()

    @contextmanager
    def show_deltas(self, report: Report, deltas: int) -> Iterator[DeltaLines]:
        """Show the growing table of deltas during the block."""
        lines = DeltaLines(report.k, deltas)
        if self._console.is_terminal and not report.groups:
            self._console.print()
        with self.show_table(lines):
            yield lines

    # ---- the end

    def print_result(self, report: Report) -> None:
        """Print all figures again, and the verdict."""
        self._console.print()
        self._console.print(_figures_of(report))
        comparison = report.comparison
        assert comparison is not None
        gain = 100 * (report.hit_rate - report.popularity_rate)
        if gain <= 0:
            self._console.print(
                Text("! the served rows did not beat popularity on these accesses", style="yellow")
            )
        self._console.print()
        if report.passed:
            self._print_passed(
                "every row is the trainer's, bit by bit",
                f"{comparison.rows_equal:,} rows equal, "
                f"{comparison.missing_as_they_should:,} keys missing as they should",
            )
        else:
            self._console.print(Text(f"✗ {comparison.complaint}", style="bold red"))
        self._console.print(Text(f"{report.seconds:.0f} s", style="dim"))


def make_figures() -> Table:
    """Return an empty table with the columns name, value and explanation."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    return table


def _figures_of(report: Report) -> Table:
    idle, during, fresh = report.pull_idle, report.pull_during_apply, report.freshness
    restart = report.restart
    assert idle is not None
    assert fresh is not None
    assert restart is not None
    table = make_figures()
    sent = f"{report.rows_published:,} rows and {report.rows_deleted:,} deletions in deltas"
    table.add_row("rows served", f"{report.rows:,}", f"of {report.dim} float32; {sent}")
    table.add_row(
        "pulls/s", f"{report.pulls_per_second:,.0f}", f"of {KEYS_PER_PULL} keys, one thread, idle"
    )
    table.add_row(
        "pull, idle",
        f"p50 {idle.p50_ms:.2f}, p99 {idle.p99_ms:.2f} ms",
        f"{idle.pulls:,} pulls of {KEYS_PER_PULL} keys, from call to rows in the caller's array",
    )
    if during is not None:
        table.add_row(
            "pull, applying",
            f"p50 {during.p50_ms:.2f}, p99 {during.p99_ms:.2f} ms",
            f"{during.pulls:,} pulls between publish() and servable; client, server and trainer "
            f"share {report.processors} processors",
        )
    table.add_row(
        "freshness",
        f"p50 {fresh.p50_ms:.1f}, p99 {fresh.p99_ms:.1f} ms",
        f"from publish() to the first pull that shows the delta; {fresh.versions} deltas",
    )
    table.add_row(
        "restart",
        f"{restart.open_to_first_correct_pull_ms:.1f} ms",
        "from the pool's open call to the first correct pull after kill -9; "
        f"{restart.exec_to_first_correct_pull_ms:.0f} ms from exec (Python and its imports)",
    )
    table.add_row(
        f"hit@{report.k}",
        f"{100 * report.hit_rate:.1f} %",
        f"next access among the {report.k} nearest by the served rows; by popularity "
        f"{100 * report.popularity_rate:.1f} %; {report.predictions:,} predictions",
    )
    return table


def _make_progress(console: Console | None = None, *, transient: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=transient,
    )
