"""Figure style and rendering: one drawing → SVG, PNG, and inline SVG.

Every figure is drawn twice, with text of 8.5 to 9.5 units: 720 units wide for the page and the files, and 360 for
phones, so that it is legible on both. Inline, its colours are the page's CSS variables, so that it follows light and
dark mode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from gatespace.errors import missing_extra
from gatespace.report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 10.0, 5.0
"""Inches; 720 and 360 SVG units."""
_width: ContextVar[float] = ContextVar("width", default=WIDE)
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
    """A figure with its description and data.

    Args:
        name: Name of its files.
        title: Title.
        finding: What it shows in words, as alternative text.
        data: The plotted numbers.
        draw: Draws it.
        task: The task it belongs to; empty for the whole study.
    """

    name: str
    title: str
    finding: str
    data: Table
    draw: Callable[[], Figure]
    task: str = ""


@dataclass(frozen=True)
class Rendered:
    """A chart as files and as inline SVG, for wide and for narrow windows."""

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
    drawn: dict[float, str] = {}
    pixels = io.BytesIO()
    for inches in (WIDE, NARROW):
        token = _width.set(inches)
        try:
            figure, vector = chart.draw(), io.BytesIO()
        finally:
            _width.reset(token)
        figure.savefig(vector, format="svg", metadata={**about, "Date": None, "Creator": "gatespace"})
        drawn[inches] = _described(vector.getvalue().decode(), chart)
        if png and inches == WIDE:
            figure.savefig(pixels, format="png", dpi=_DPI, metadata={**about, "Software": None})
    inline = _inline(drawn[WIDE], chart, "wide") + _inline(drawn[NARROW], chart, "narrow")
    return Rendered(chart, drawn[WIDE].encode(), pixels.getvalue() if png else None, inline)


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


def width() -> float:
    """Return the width of the current figure, in inches."""
    return _width.get()


def is_wide() -> bool:
    """Whether the current figure is the one for wide windows."""
    return width() == WIDE


def canvas(height: float) -> Figure:
    """Return an empty figure of the current width and `height` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width(), height))
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
        if x > _EDGE and x + length > width():
            x, line = _EDGE, line + 1
        found.append((text, colour, x, line))
        x += length
    return found


def short(label: str, most: int | None = None) -> str:
    """Shorten a label to fit next to a row; the table below the figure has it in full."""
    most = most or (40 if is_wide() else 26)
    line = " ".join(label.split())
    return line if len(line) <= most else line[: most - 1] + "…"


# ---------------------------------------------------------------------------------------------------- inline SVG

_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_FONT_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
_NO_TURN = re.compile(r"rotate\(-?0 [^)]*\)\s*")
_SKIPPED = {"metadata", "title", "desc", "style"}


def _described(svg: str, chart: Chart) -> str:
    """Add role and description for screen readers; matplotlib puts the description only into RDF."""
    end = "</title>"
    svg = svg.replace(end, f"{end}\n <desc>{escape(chart.finding)}</desc>", 1)
    return svg.replace("<svg ", '<svg role="img" ', 1)


def _inline(svg: str, chart: Chart, form: str) -> str:
    """The drawing as inline SVG: unique ids, the page's colours and fonts, no namespaces."""
    root, name = ElementTree.fromstring(svg), f"{chart.name}-{form}"
    used = set(_REFERENCE.findall(svg)) | {
        value[1:] for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")
    }
    parts = [
        f'<svg class="chart {form}" role="img" viewBox="{root.attrib["viewBox"]}" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(chart.title)}</title>'
        f'<desc id="{name}-d">{escape(chart.finding)}</desc>'
    ]
    for node in root:
        _write(node, parts, name, used)
    return "".join(parts) + "</svg>"


def _write(node: ElementTree.Element, parts: list[str], name: str, used: set[str]) -> None:
    tag = node.tag.rpartition("}")[2]
    if tag in _SKIPPED or (tag == "defs" and all(child.tag.rpartition("}")[2] in _SKIPPED for child in node)):
        return
    attributes = []
    for key, value in node.attrib.items():
        key = key.rpartition("}")[2]
        if key == "id":
            # Drop unreferenced ids, which would only collide with other figures'.
            if value not in used:
                continue
            value = f"{name}-{value}"
        elif key == "href":
            value = f"#{name}-{value[1:]}"
        elif key == "style":
            value = _FONT_FAMILY.sub("", value)
            value = _COLOUR.sub(lambda m: f"var(--{VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], value)
        elif key == "transform":
            value = _NO_TURN.sub("", value)
        if key in ("d", "x", "y", "transform", "points", "width", "height"):
            value = _NUMBER.sub(lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), " ".join(value.split()))
        value = _REFERENCE.sub(lambda m: f"url(#{name}-{m[1]})", value)
        if value:
            attributes.append(f" {key}={quoteattr(value)}")
    if tag == "g" and not attributes:
        for child in node:
            _write(child, parts, name, used)
        return
    parts.append(f"<{tag}{''.join(attributes)}>")
    if tag in ("text", "tspan") and node.text:
        parts.append(escape(node.text))
    for child in node:
        _write(child, parts, name, used)
        if tag == "text" and child.tail:
            parts.append(escape(child.tail))
    parts.append(f"</{tag}>")
