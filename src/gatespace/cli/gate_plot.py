"""`gatespace gate --plot`: λ against each signal for several points, without pyplot's global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from gatespace.cli.gate import PAPER_SIGNALS, Point, extra_signals, lam_at, lam_range, weights
from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.files import atomic_write
from gatespace.gating.coefficients import Gate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
_MEANING = {
    "h": "teacher entropy, this token",
    "u": "teacher entropy, first response token",
    "gap": "1 − student prob. of teacher's choice",
}
# Okabe and Ito's colour-blind-safe palette without its yellow, which is too pale for a line on white.
# The three cycles have coprime lengths: 210 points are all distinct, and 30 are without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)), (0, (9, 2.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STEPS = 120
_LINE = 1.5
_LEVEL_LINE = 0.9
_PANEL_WIDTH = 2.55
_PANEL_HEIGHT = 2.35
_LEGEND_ROW = 0.2
_PANELS_PER_ROW = 4
_MARK_EVERY = 30
_NOTE_CHARACTERS = 46


def save_plot(path: Path, points: Sequence[Point], at: Mapping[str, float]) -> None:
    """Write the plot to `path` atomically. The same points give the same bytes."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(
            "--plot does not support this file type", got=path, instead=f"a name that ends in {', '.join(FORMATS)}"
        )
    if path.is_dir():
        raise UsageError("--plot needs the name of a file", got=f"the directory {path}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise missing_extra("--plot", module="matplotlib", extra="plot") from None
    gates = list({point.gate: None for point in points})
    with style():
        content = _render(draw(gates, at), suffix, _title(gates), _description(gates, at))
    try:
        atomic_write(path, content)
    except RunError as error:
        raise RunError("the plot could not be written", got=path, why=error.got or "") from None


@contextmanager
def style() -> Iterator[None]:
    """Apply our style inside the context, ignoring the user's matplotlibrc."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "gatespace", "font.size": 8, "axes.linewidth": 0.6})
        yield


def draw(gates: Sequence[Gate], at: Mapping[str, float]) -> Figure:
    """One panel per signal: λ as the signal goes from 0 to 1, with the others held as in `at`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    signals = [*PAPER_SIGNALS, *extra_signals(gates)]
    columns = len(signals) if len(signals) <= _PANELS_PER_ROW else _PANELS_PER_ROW - 1
    rows = -(-len(signals) // columns)
    width = 0.5 + columns * _PANEL_WIDTH
    legend_columns = _legend_columns(gates, width)
    legend_height = 0.12 + _LEGEND_ROW * -(-len(gates) // legend_columns)
    figure = Figure(figsize=(width, rows * _PANEL_HEIGHT + legend_height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for i, axis in enumerate(axes):
        if i < len(signals):
            _draw_panel(axis, signals[i], signals, gates, at, leftmost=i % columns == 0)
        else:
            axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=legend_columns, frameon=False, handlelength=3.6,
        columnspacing=1.6, borderaxespad=0.2,
    )  # fmt: skip
    for line in legend.get_lines():
        line.set_linewidth(_LINE)
    return figure


def _draw_panel(
    axis: Axes, signal: str, signals: Sequence[str], gates: Sequence[Gate], at: Mapping[str, float], *, leftmost: bool
) -> None:
    xs = [i / _STEPS for i in range(_STEPS + 1)]
    axis.axhline(0.5, color="0.55", linewidth=0.7, linestyle=(0, (2, 2)), zorder=1)
    for i, gate in enumerate(gates):
        axis.plot(
            xs,
            [lam_at(gate, {**at, signal: x}) for x in xs],
            label=gate.label,
            color=_COLOURS[i % len(_COLOURS)],
            linestyle=_DASHES[i % len(_DASHES)],
            # A gate that ignores this signal is a flat line here, drawn thinner as context.
            linewidth=_LINE if weights(gate).get(signal) else _LEVEL_LINE,
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=3.6,
            # Staggered, so that overlapping lines still show both markers.
            markevery=(int((i + 0.5) * _MARK_EVERY / len(gates)) if len(gates) > 1 else 0, _MARK_EVERY),
            clip_on=False,
            zorder=3,
        )
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    axis.tick_params(width=0.6, length=2.5)
    axis.spines[["top", "right"]].set_visible(False)
    meaning = _MEANING.get(signal)
    axis.set_xlabel(f"{signal}: {meaning}" if meaning else signal)
    if leftmost:
        axis.set_ylabel("← forward KL    λ    reverse KL →")
    # Non-breaking spaces keep "jsd = 0" on one line.
    others = ", ".join(f"{name}\u00a0=\u00a0{at[name]:g}" for name in signals if name != signal)
    axis.set_title(textwrap.fill(f"at {others}", _NOTE_CHARACTERS), fontsize=7, color="0.35", loc="left")


def _legend_columns(gates: Sequence[Gate], width: float) -> int:
    # About .075 inch per character at this size, and .6 inch for the line and the gap.
    longest = max(len(gate.label) for gate in gates)
    return max(1, min(len(gates), int((width - 0.2) / (0.6 + 0.075 * longest))))


def _render(figure: Figure, suffix: str, title: str, description: str) -> bytes:
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {
        ".png": {"Title": title, "Description": description, "Software": None},
        ".svg": {"Title": title, "Description": description, "Date": None, "Creator": "gatespace"},
        ".pdf": {"Title": title, "Subject": description, "CreationDate": None, "Creator": "gatespace"},
    }[suffix]
    figure.savefig(buffer, format=suffix[1:], dpi=200, metadata=metadata)
    content = buffer.getvalue()
    if suffix == ".svg":
        # matplotlib writes the description to RDF only, which screen readers ignore.
        end = b"</title>"
        content = content.replace(end, end + f"\n <desc>{escape(description)}</desc>".encode(), 1)
        content = content.replace(b"<svg ", b'<svg role="img" ', 1)
    return content


def _title(gates: Sequence[Gate]) -> str:
    return f"λ against each signal for {', '.join(gate.label for gate in gates)}"


def _description(gates: Sequence[Gate], at: Mapping[str, float]) -> str:
    held = ", ".join(f"{name} = {value:g}" for name, value in at.items())
    ranges = "; ".join(
        f"{gate.label} (coefficients {gate}) from {low:.3f} to {high:.3f}"
        for gate, (low, high) in zip(gates, map(lam_range, gates), strict=True)
    )
    return (
        "λ is the weight of reverse KL, 1 at the top; forward KL is at the bottom. One panel per signal, which goes "
        f"from 0 to 1 while the others are held at {held}. Reach of λ: {ranges}."
    )
