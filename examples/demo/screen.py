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

__all__ = ["DeltaLines", "Growing", "Screen", "Steps"]

PIPE_COLUMNS: Final = 100  # the width where none is known (a pipe, a file)
LABEL_COLUMNS: Final = 10


class Growing:
    """A table that grows, with a progress bar below it that counts ``total`` ``what``."""

    def __init__(self, columns: Sequence[str], what: str, total: int) -> None:
        self._table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
        for name in columns:
            self._table.add_column(name, justify="right")
        self._progress = _progress()
        self._task = self._progress.add_task(f"  {what}", total=total)

    def shown(self) -> Stack:
        """Return the table and the bar."""
        return Stack(self._table, self._progress)

    def done(self) -> Table:
        """Return the table alone."""
        return self._table

    def advance(self) -> None:
        """Count one more as done."""
        self._progress.advance(self._task)

    def reached(self, count: int) -> None:
        """Set how many are done."""
        self._progress.update(self._task, completed=count)

    def add(self, *cells: str | Text) -> None:
        """Add a line."""
        self._table.add_row(*cells)


class DeltaLines(Growing):
    """The table of deltas: call ``advance`` after each delta and ``line`` after each group."""

    def __init__(self, k: int, deltas: int) -> None:
        names = ("  accesses", "version", "rows sent", "deleted", "fresh after")
        super().__init__((*names, f"hit@{k}", "popularity", "gain"), "deltas", deltas)

    def line(self, group: Group) -> None:
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

    def step(self, label: str, text: str, detail: str = "", mark: str = "[green]✓[/green]") -> None:
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
    def working(self, what: str) -> Iterator[None]:
        """Show a spinner during the block."""
        if not self._console.is_terminal or self._console.quiet:
            yield
            return
        with self._console.status(what):
            yield

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar during the block. Yield a function that adds n to what is done."""
        if not self._console.is_terminal or self._console.quiet:
            yield lambda n: None
            return
        with _progress(self._console, transient=True) as progress:
            task = progress.add_task(f"  {what}", total=total)
            yield lambda n: progress.advance(task, n)

    @contextmanager
    def growing(self, lines: Growing) -> Iterator[None]:
        """Show the table and its bar during the block; the table stays afterwards."""
        if not self._console.is_terminal or self._console.quiet:
            yield
            if lines.done().row_count:
                self._console.print(lines.done())
            return
        with Live(lines.shown(), console=self._console, refresh_per_second=8) as live:
            yield
            live.update(lines.done())

    def show_kept(self, folder: Path) -> None:
        """Print the path of the work folder that is kept."""
        self._console.print(Text(f"kept: {folder}", style="dim"))


class Screen(Steps):
    """The output of the demo."""

    # ---- steps

    def begin(self, trace: Trace, report: Report) -> None:
        """Print the first lines."""
        self._console.print(Text("petps demo", style="bold"))
        self._console.print(
            Text(
                f"{report.accesses:,} of {len(trace.accesses):,} real accesses to "
                f"{len(trace.keys):,} objects: {report.trace}",
                style="dim",
            )
        )
        self._console.print()

    def pool(self, path: Path, medium: str, durability: str) -> None:
        """Print that the pool is made."""
        self.step("pool", f"{path}", f"medium {medium}, durability {durability}")

    def base(self, accesses: int, seconds: float, base: dict[str, Any], log: str) -> None:
        """Print that the base is published."""
        self.step(
            "base",
            f"{base['rows']:,} rows, learned from {accesses:,} accesses in {seconds:.1f} s",
            f"skip-gram with negative sampling; log {log}",
        )

    def serving(
        self, server: ServerProcess, facts: dict[str, Any], ready: float, base: float
    ) -> None:
        """Print that the server answers and has the base."""
        self.step(
            "server",
            f"{server.url}, process {facts['pid']}; the base was servable after {base:.2f} s",
            f"watch it live: http://127.0.0.1:{server.http_port}/",
        )

    def idle(self, report: Report) -> None:
        """Print the figures of pulls without other load."""
        latency = report.pull_idle
        assert latency is not None
        self.step(
            "idle",
            f"{report.pulls_per_second:,.0f} pulls/s of {KEYS_PER_PULL} keys by one thread "
            f"({KEYS_PER_PULL * report.pulls_per_second / 1e6:.2f} M rows/s)",
            f"p50 {latency.p50_ms:.2f} ms, p99 {latency.p99_ms:.2f} ms",
        )

    def restart(self, restart: Restart) -> None:
        """Print the kill of the server and its restart."""
        self._console.print()
        self.step(
            "kill -9",
            f"in the middle of a delta of {restart.delta_rows:,} rows: "
            f"{100 * restart.share_visible:.0f} % of them were visible",
            mark="[red]✗[/red]",
        )
        self.step(
            "restart",
            f"first correct pull {restart.exec_to_first_correct_pull_ms:.0f} ms after exec, "
            f"{restart.open_to_first_correct_pull_ms:.1f} ms after the pool's open call",
            f"the delta was whole {restart.caught_up_ms:.0f} ms after exec; the client only waited "
            f"({restart.client_waited_ms:.0f} ms, {restart.client_failures} failed pulls)",
        )
        self._console.print()

    @contextmanager
    def deltas(self, report: Report, deltas: int) -> Iterator[DeltaLines]:
        """Show the growing table of deltas during the block."""
        lines = DeltaLines(report.k, deltas)
        if self._console.is_terminal and not report.groups:
            self._console.print()
        with self.growing(lines):
            yield lines

    # ---- the end

    def result(self, report: Report) -> None:
        """Print all figures again, and the verdict."""
        self._console.print()
        self._console.print(_numbers(report))
        comparison = report.comparison
        assert comparison is not None
        gain = 100 * (report.hit_rate - report.popularity_rate)
        if gain <= 0:
            self._console.print(
                Text("! the served rows did not beat popularity on these accesses", style="yellow")
            )
        self._console.print()
        if report.passed:
            self._console.print(
                Text("✓ every row is the trainer's, bit by bit: ", style="bold green")
                + Text(
                    f"{comparison.rows_equal:,} rows equal, "
                    f"{comparison.missing_as_they_should:,} keys missing as they should",
                    style="green",
                )
            )
        else:
            self._console.print(
                Text(f"✗ {comparison.wrong:,} keys are wrong: ", style="bold red")
                + Text(
                    f"{comparison.rows_different:,} rows differ, {comparison.rows_lost:,} are "
                    f"lost, {comparison.rows_undead:,} should be missing and are not",
                    style="red",
                )
            )
        self._console.print(Text(f"{report.seconds:.0f} s", style="dim"))


def _numbers(report: Report) -> Table:
    idle, during, fresh = report.pull_idle, report.pull_during_apply, report.freshness
    restart = report.restart
    assert idle is not None
    assert fresh is not None
    assert restart is not None
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
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
        f"from publish() to the first pull that is served it; {fresh.versions} deltas",
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


def _progress(console: Console | None = None, *, transient: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=transient,
    )
