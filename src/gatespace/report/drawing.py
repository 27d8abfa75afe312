"""Figure style and rendering: one drawing → SVG, PNG, and inline SVG.

Figures are 720 units wide, with text of 8.5 to 9.5 units; on a phone they scroll, so that text stays legible. Inline,
their colours are the page's CSS variables, so that they follow light and dark mode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from gatespace.errors import missing_extra
from gatespace.report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.0
"""Inches; 720 SVG units."""
SMALL = 8.5
FONT = 9.5
INK, MUTED, GRID, PAPER, BAND = "#1b1d21", "#5c626b", "#d7dae0", "#ffffff", "#eceef2"
# Okabe and Ito's colour-blind-safe palette. Markers differ too: no figure needs colour to be read.
BLUE, ORANGE, GREEN, PINK, SKY, AMBER = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
VARIABLES = {
    INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", BAND: "band",
    BLUE: "blue", ORANGE: "orange", GREEN: "green", PINK: "pink", SKY: "sky", AMBER: "amber",
}  # fmt: skip
_DPI = 150
_EDGE = 0.08
"""Inches between the edge and a key."""
_KEY_ROW = 0.185
"""Inches per line of a key."""
_CHARACTER = 0.083
"""Maximum width of a label's character, in inches."""

Key = Sequence[tuple[str, str]]
"""(text, colour); the first character of a text is the mark, drawn in the colour."""


@dataclass(frozen=True)
class Chart:
    """A figure with its description and data."""

    name: str
    """Name of its files."""
    title: str
    finding: str
    """What it shows in words, as alternative text."""
    data: Table
    """The plotted numbers."""
    draw: Callable[[], Figure]
    task: str = ""
    """The task it belongs to; empty for the whole study."""


@dataclass(frozen=True)
class Rendered:
    """A chart as files and as inline SVG."""

    chart: Chart
    svg: bytes
    png: bytes | None
    inline: str


def render(charts: Sequence[Chart], *, png: bool = True) -> list[Rendered]:
    """Draw all charts. The same charts give the same SVG."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise missing_extra("a report", module="matplotlib", extra="study") from None
    with _style():
        return [_render(chart, png=png) for chart in charts]


def _render(chart: Chart, *, png: bool) -> Rendered:
    about: dict[str, Any] = {"Title": chart.title, "Description": chart.finding}
    figure, vector, pixels = chart.draw(), io.BytesIO(), io.BytesIO()
    figure.savefig(vector, format="svg", metadata={**about, "Date": None, "Creator": "gatespace"})
    if png:
        figure.savefig(pixels, format="png", dpi=_DPI, metadata={**about, "Software": None})
    # Role and description are for screen readers; matplotlib puts the description only into RDF.
    svg = vector.getvalue().decode().replace("<svg ", '<svg role="img" ', 1)
    svg = svg.replace("</title>", f"</title>\n <desc>{escape(chart.finding)}</desc>", 1)
    return Rendered(chart, svg.encode(), pixels.getvalue() if png else None, _inline(svg, chart.name))


_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "gatespace",
    "svg.fonttype": "none",  # keep text as text: selectable, searchable, scalable
    "text.parse_math": False,  # a task's label may contain a $
    "font.size": FONT,
    "axes.linewidth": 0.6,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": FONT,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.labelsize": SMALL,
    **{f"{axis}tick.color": MUTED for axis in "xy"},
    **{f"{axis}tick.labelcolor": INK for axis in "xy"},
    **{f"{axis}tick.major.width": 0.6 for axis in "xy"},
    **{f"{axis}tick.major.size": 3 for axis in "xy"},
}


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # Labels in a script that the font lacks: browsers fall back to another font, PNGs show a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


# ---------------------------------------------------------------------------------------------------- canvas


def canvas(height: float) -> Figure:
    """Return an empty figure of `height` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    return figure


def panel(figure: Figure, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Add axes to a figure, with margins in inches."""
    across, height = figure.get_size_inches()
    axes = figure.add_axes(
        (left / across, bottom / height, (across - left - right) / across, (height - top - bottom) / height)
    )
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def rows_figure(
    labels: Sequence[str],
    key: Key = (),
    *,
    row: float,
    top: float | None = None,
    rest: float = 0.5,
    bottom: float = 0.42,
    right: float = 0.15,
) -> tuple[Figure, Axes]:
    """Return a figure with a key above one named row per label, the first on top; all lengths in inches.

    Args:
        labels: Row labels.
        key: Legend of the marks.
        row: Height of a row.
        top: Height above the rows; None: as needed for the key.
        rest: Additional height, for the axis below the rows and its label.
        bottom: Margin below the rows.
        right: Margin on the right.
    """
    top = key_height(key) if top is None else top
    figure = canvas(top + rest + row * len(labels))
    texts = [short(label) for label in labels]
    left = max(0.6, 0.14 + _CHARACTER * max(map(len, texts), default=1))
    axes = panel(figure, left=left, right=right, top=top, bottom=bottom)
    axes.set_ylim(len(texts) - 0.4, -0.6)
    axes.set_yticks(range(len(texts)), texts)
    axes.tick_params(axis="y", length=0, pad=4)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    draw_key(figure, key)
    return figure, axes


def draw_interval(axes: Axes, place: float, ends: tuple[float | None, float | None], limit: float, colour: str) -> None:
    """Draw the interval as a line, with an arrow where it leaves the figure."""
    low, high = ends
    if low is None or high is None:
        return
    axes.plot(
        [max(low, -limit), min(high, limit)], [place] * 2, color=colour, linewidth=1.4, solid_capstyle="butt", zorder=2
    )
    for beyond, end, marker in ((low < -limit, -limit, "<"), (high > limit, limit, ">")):
        if beyond:
            axes.plot([end], [place], marker=marker, color=colour, markersize=4.5, clip_on=False, zorder=3)


def draw_key(figure: Figure, key: Key) -> None:
    """Write the key at the top, each text after its mark, without a legend box."""
    across, height = figure.get_size_inches()
    for text, colour, x, line in _flow(key):
        at = 1 - (_EDGE + _KEY_ROW * line) / height
        figure.text(x / across, at, text[0], color=colour, fontsize=FONT - 0.5, va="top", ha="left")
        figure.text((x + 0.14) / across, at, text[1:].strip(), fontsize=FONT - 0.5, va="top", ha="left")


def key_height(key: Key, margin: float = 0.12) -> float:
    """Return the height of a key, in inches."""
    return margin + _KEY_ROW * (1 + max((line for *_, line in _flow(key)), default=0))


def _flow(key: Key) -> list[tuple[str, str, float, int]]:
    """Text, colour, x position and line of every part of a key."""
    x, line, found = _EDGE, 0, []
    for text, colour in key:
        length = 0.17 + 0.068 * len(text)
        if x > _EDGE and x + length > WIDTH:
            x, line = _EDGE, line + 1
        found.append((text, colour, x, line))
        x += length
    return found


def short(label: str, most: int = 40) -> str:
    """Shorten a label to fit next to a row; the table below the figure has it in full."""
    line = " ".join(label.split())
    return line if len(line) <= most else line[: most - 1] + "…"


# ---------------------------------------------------------------------------------------------------- inline SVG

_TAG = re.compile(r"<[^>]*>")
_NOT_INLINE = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
_FONT_FAMILY = re.compile(r'font-family:[^;"]*;? ?')
_ID = re.compile(r'(?<= id=")|(?<=href="#)|(?<=url\(#)')
_COLOUR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")
_NUMBER = re.compile(r"(\d\.\d\d)\d+")


def _inline(svg: str, name: str) -> str:
    """The drawing as inline SVG: unique ids, the page's colours and fonts, no namespaces."""

    def tag(match: re.Match[str]) -> str:
        text = _ID.sub(f"{name}-", _FONT_FAMILY.sub("", match[0]))
        text = _COLOUR.sub(lambda m: f"var(--{VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], text)
        return _NUMBER.sub(r"\1", " ".join(text.split()))

    box = svg.partition('viewBox="')[2].partition('"')[0]
    content = _TAG.sub(tag, _NOT_INLINE.sub("", svg[svg.index("<title>") :]))
    return f'<svg class="chart" role="img" viewBox="{box}">{content}'
