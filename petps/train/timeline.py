"""When each stage of each batch ran: totals always, single spans if the caller asks to keep them.

Owns:        Timeline; COLORS of drawings.
Never does:  decide what a stage is.
Called by:   pipeline.py; trainers, demo, bench and tests, which read it.
Threads:     any.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

__all__ = ["COLORS", "Span", "Timeline"]

# The number of spans kept; beyond it the oldest half is dropped. A step has about 10, and 5 more
# for each micro-batch.
SPANS_MAX: Final = 1 << 17
COLORS: Final = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d")


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

    def write(self, path: str | Path, worker: int = 0) -> None:
        """Write the spans for a trace viewer (chrome://tracing, Perfetto)."""
        spans = self.spans()
        tracks = {track: number for number, track in enumerate(_tracks(spans))}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": worker, "tid": number, "args": {"name": name}}
            for name, number in tracks.items()
        ]
        for span in spans:
            args = {"batch": span.batch} | ({} if span.micro is None else {"micro": span.micro})
            events.append(
                {"name": span.stage, "ph": "X", "pid": worker, "tid": tracks[span.track],
                 "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6, "args": args}
            )  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": events}))

    def draw(self, path: str | Path, batches: int = 4) -> None:
        """Draw the last trained batches, and the stages that ran ahead of later ones, as an SVG.

        Each track has a row and each batch a colour.
        """
        spans = self.spans()
        last = max((span.batch for span in spans if span.stage == "dense"), default=0)
        spans = [span for span in spans if span.batch > last - batches]
        trained = min((span.begin for span in spans if span.micro is not None), default=0.0)
        spans = [span for span in spans if span.begin >= trained]
        Path(path).write_text(_svg(spans))


def _tracks(spans: list[Span]) -> list[str]:
    return list({span.track: None for span in sorted(spans, key=lambda span: span.begin)})


def _svg(spans: list[Span]) -> str:
    left, width, row = 110, 1000, 26
    tracks = _tracks(spans)
    begin = min((span.begin for span in spans), default=0.0)
    scale = width / max(max((span.end for span in spans), default=1.0) - begin, 1e-9)
    size = f'width="{left + width + 20}" height="{row * (len(tracks) + 2)}"'
    fonts = 'font-family="sans-serif" font-size="11"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts}>']
    for number, track in enumerate(tracks):
        out.append(f'<text x="4" y="{row * number + 17}">{escape(track)}</text>')
    for span in spans:
        x, y = left + (span.begin - begin) * scale, row * tracks.index(span.track) + 4
        part = "" if span.micro is None else f", micro-batch {span.micro}"
        label = f"{span.stage}, batch {span.batch}{part}: {1e3 * (span.end - span.begin):.2f} ms"
        out.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max((span.end - span.begin) * scale, 0.5):.2f}" '
            f'height="{row - 6}" fill="{COLORS[span.batch % len(COLORS)]}">'
            f"<title>{escape(label)}</title></rect>"
        )
    milliseconds = 1e3 * width / scale
    out.append(f'<text x="{left}" y="{row * (len(tracks) + 1)}">{milliseconds:.1f} ms</text>')
    return "\n".join([*out, "</svg>"])
