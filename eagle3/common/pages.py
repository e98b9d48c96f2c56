"""Pages for a browser, tables for a terminal and plots, in which text of unknown origin is only ever text.

What a page is put together from takes plain text and returns `Html`, so the type checker sees text that nobody has
escaped. A page is one file: no script, no link, plots inside it, and a policy by which a browser loads nothing.
"""

import base64
import html
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NewType

from eagle3.common import files
from eagle3.common.log import logger

Html = NewType("Html", str)
Table = tuple[list[str], list[list[str]]]  # head, rows

# Characters that hide or reorder the text around them, or are themselves not seen: controls, marks of direction, spaces
# without width, tags. The joiners (U+200C, U+200D) stay: Persian and many emoji need them.
_UNPRINTABLE = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), 0xAD, 0x61C, 0x200B, 0x200E, 0x200F,
                              *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF, *range(0xE0000, 0xE0080)], "·")
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1rem auto; padding: 0 1rem; color: #222; }
h1, h2, h3, dd { overflow-wrap: anywhere; } dt { font-weight: 600; } dd { margin: 0 0 .4rem; }
.scrolling { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
img { max-width: 100%; display: block; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: .5rem; }
"""


def visible(text: str) -> str:
    """Return a text of unknown origin with characters that hide or reorder others made visible."""
    return text.translate(_UNPRINTABLE).encode(errors="replace").decode()


# --- a page -----------------------------------------------------------------------------------------------


def document(title: str, *parts: Html) -> Html:
    """Return a whole page: the title as its heading, then the parts."""
    return Html(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{_STYLE}</style></head>'
        f"<body>{heading(title, 1)}{''.join(parts)}</body></html>\n"
    )


def heading(text: str, level: int = 2) -> Html:
    """Return a heading of level 1 to 6."""
    return _tag(f"h{level}", text)


def paragraph(text: str) -> Html:
    """Return a paragraph."""
    return _tag("p", text)


def block(text: str) -> Html:
    """Return a text whose lines and spaces stay."""
    return _tag("pre", text)


def definitions(facts: dict[str, str]) -> Html:
    """Return a list of names with what is said of each."""
    return Html(f"<dl>{''.join(_tag('dt', name) + _tag('dd', text) for name, text in facts.items())}</dl>")


def table(head: list[str], rows: list[list[str]]) -> Html:
    """Return a table; where it is wider than the page, it scrolls."""
    lines = [("th", head), *(("td", row) for row in rows)]
    body = "".join(f"<tr>{''.join(_tag(name, cell) for cell in cells)}</tr>" for name, cells in lines)
    return Html(f'<div class="scrolling" tabindex="0"><table>{body}</table></div>')


def image(png: Path) -> Html:
    """Return a PNG file as an image whose bytes are in the page."""
    data = base64.b64encode(png.read_bytes()).decode()
    return Html(f'<img alt="{escaped(png.stem)}" src="data:image/png;base64,{data}">')


def _tag(name: str, text: str) -> Html:
    return Html(f"<{name}>{escaped(text)}</{name}>")


def escaped(text: str) -> str:
    """Return a text as it stands in a page."""
    return html.escape(visible(text))


# --- a terminal -------------------------------------------------------------------------------------------


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table as aligned text, a line a row; what is beyond the width is cut off, and the cut is shown."""
    lines = [[visible(cell).replace("\n", " ").replace("\t", " ") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join(text if width is None or len(text) <= width else text[: width - 1] + "…" for text in texts)


# --- plots ------------------------------------------------------------------------------------------------


def save_plots(directory: Path, report: Any, drawings: dict[str, Callable[[Any], Any]]) -> list[Path]:
    """Save the figure that each function makes of a report as NAME.png; return the paths. None is nothing to show.

    The functions import matplotlib, which may be missing: then one warning says so and nothing is saved. Figures are
    made without pyplot, so none stays in memory and no backend is chosen for others.
    """
    made = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a text in a script that the font has not
        for name, draw in drawings.items():
            try:
                figure = draw(report)
            except ImportError:
                logger.warning("matplotlib is not installed: the report has tables, no plots (pip install matplotlib)")
                return []
            if figure is not None:
                made.append(directory / f"{name}.png")
                with files.replacing(made[-1]) as temporary:
                    figure.savefig(temporary, format="png")
    return made


def label(text: str) -> str:
    """Return a short text as matplotlib takes it literally: `$` would start a formula, a leading `_` hide it."""
    text = visible(text).replace("\n", " ")
    return " " * text.startswith("_") + (text if len(text) <= 28 else text[:27] + "…").replace("$", r"\$")
