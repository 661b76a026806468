"""When each stage of each batch ran: always the totals, and each span if the caller keeps them.

Owns:        Timeline.
Never does:  decide what a stage is.
Called by:   pipeline.py; trainers, demo, bench and tests, which read it.
Threads:     any.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from petps.errors import FailedPrecondition

__all__ = ["Span", "Timeline", "new_figure", "save_figure"]

# The number of spans kept; beyond it the oldest half is dropped. A step has about 10, and 5 more
# for each micro-batch.
SPANS_MAX: Final = 1 << 17
LEGEND_MAX: Final = 24


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of one batch, in seconds on the monotonic clock.

    track: the resource it ran on. processor: the processor seconds that its thread used within
    it, or None if they are not known.
    """

    track: str
    stage: str
    batch: int
    begin: float
    end: float
    micro: int | None = None
    processor: float | None = None


class Timeline:
    """The spans of stages. keep: also keep each span, for write(), draw() and spans()."""

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._mutex = threading.Lock()
        self._totals: dict[str, float] = {}
        self._processor: dict[str, float] = {}
        self._spans: list[Span] = []

    @contextmanager
    def span(self, track: str, stage: str, batch: int, micro: int | None = None) -> Iterator[None]:
        """Record the block as a span."""
        begin, used = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            used = time.thread_time() - used
            self.add(Span(track, stage, batch, begin, time.monotonic(), micro, used))

    def add(self, span: Span) -> None:
        """Add a span that has ended."""
        with self._mutex:
            self._totals[span.stage] = self._totals.get(span.stage, 0.0) + span.end - span.begin
            used = self._processor.get(span.stage, 0.0) + (span.processor or 0.0)
            self._processor[span.stage] = used
            if self._keep:
                self._spans.append(span)
                if len(self._spans) > SPANS_MAX:
                    del self._spans[: SPANS_MAX // 2]

    def totals(self) -> dict[str, float]:
        """Return the seconds of each stage since reset()."""
        with self._mutex:
            return dict(self._totals)

    def processor_totals(self) -> dict[str, float]:
        """Return the processor seconds of each stage's thread since reset()."""
        with self._mutex:
            return dict(self._processor)

    def spans(self) -> list[Span]:
        """Return the spans kept, in the order in which they ended."""
        with self._mutex:
            return list(self._spans)

    def reset(self) -> None:
        """Forget everything so far, for example after a warm-up."""
        with self._mutex:
            self._totals.clear()
            self._processor.clear()
            self._spans.clear()

    @classmethod
    def read(cls, path: str | Path) -> Timeline:
        """Return the spans that write() wrote, without their processor times."""
        timeline, tracks = cls(keep=True), {}
        for event in json.loads(Path(path).read_text())["traceEvents"]:
            args = event["args"]
            if event["name"] == "thread_name":
                tracks[event["tid"]] = args["name"]
            elif event["ph"] == "X":
                begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                track, stage = tracks[event["tid"]], event["name"]
                timeline.add(Span(track, stage, args["batch"], begin, end, args.get("micro")))
        return timeline

    def write(self, path: str | Path, rank: int = 0, name: str = "") -> None:
        """Write the spans for a trace viewer (chrome://tracing, Perfetto).

        name: of the process, if it is not a rank's.
        """
        Path(path).write_text(json.dumps({"traceEvents": self.events(rank, name)}))

    def events(self, rank: int = 0, name: str = "") -> list[dict[str, object]]:
        """Return what write() writes."""
        spans = self.spans()
        tracks = {track: number for number, track in enumerate(_tracks(spans))}
        process = {"name": name or f"rank {rank}"}
        events: list[dict[str, object]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": process},
            *(
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": number,
                 "args": {"name": track}}
                for track, number in tracks.items()
            ),
        ]  # fmt: skip
        for span in spans:
            args = {"batch": span.batch} | ({} if span.micro is None else {"micro": span.micro})
            events.append(
                {"name": span.stage, "ph": "X", "pid": rank, "tid": tracks[span.track],
                 "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6, "args": args}
            )  # fmt: skip
        return events

    def between(self, begin: float, end: float) -> Timeline:
        """Return the spans of which a part lies between two moments."""
        timeline = Timeline(keep=True)
        for span in self.spans():
            if span.end >= begin and span.begin <= end:
                timeline.add(span)
        return timeline

    def draw(
        self, path: str | Path, batches: int | None = 4, own_rows: Collection[str] = ()
    ) -> None:
        """Draw the last trained batches, and the stages that ran ahead of later ones, as an SVG.

        batches: None draws all spans.

        Each track has a row and each batch a colour; up to LEGEND_MAX are named. The stages of
        ``own_rows`` have rows of their own, because longer stages of their track would hide them.
        Raise FailedPrecondition without matplotlib.
        """
        spans = self.spans()
        if batches is not None:
            last = max((span.batch for span in spans if span.stage == "dense"), default=0)
            spans = [span for span in spans if span.batch > last - batches]
            trained = min((span.begin for span in spans if span.micro is not None), default=0.0)
            spans = [span for span in spans if span.begin >= trained]
        begin = min((span.begin for span in spans), default=0.0)
        spans = [
            replace(span, track=span.stage) if span.stage in own_rows else span for span in spans
        ]
        tracks = _tracks(spans)
        figure = new_figure(1.5 + 0.3 * len(tracks))
        axes = figure.subplots()
        for batch in sorted({span.batch for span in spans}):
            batch_spans = [span for span in spans if span.batch == batch]
            axes.barh(
                [tracks.index(span.track) for span in batch_spans],
                [1e3 * (span.end - span.begin) for span in batch_spans],
                left=[1e3 * (span.begin - begin) for span in batch_spans],
                label=f"batch {batch}",
            )
        axes.set_yticks(range(len(tracks)), tracks)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        if 0 < len({span.batch for span in spans}) <= LEGEND_MAX:
            figure.legend(loc="outside right upper")
        save_figure(figure, path)


def _tracks(spans: list[Span]) -> list[str]:
    return list({span.track: None for span in sorted(spans, key=lambda span: span.begin)})


def new_figure(height: float) -> Any:
    """Return a matplotlib figure of this height in inches. Raise FailedPrecondition without it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise FailedPrecondition("matplotlib is not installed: pip install petps[plots]") from None
    return Figure(figsize=(10, height), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as an SVG in which text stays text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, format="svg")
