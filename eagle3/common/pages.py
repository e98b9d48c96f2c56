"""Pages for a browser and tables for a terminal, in which text of unknown origin is only ever text.

What a page is put together from takes plain text and returns `Html`, so the type checker sees text that nobody has
escaped. A page is one file: no script, no link, charts inside it, and a policy by which a browser loads nothing. One
design for all: it follows the reader's light or dark setting, and fits a phone and paper.
"""

import html
from collections.abc import Sequence
from typing import NewType

Html = NewType("Html", str)
Table = tuple[list[str], list[list[str]]]  # head, rows

# Characters that hide or reorder the text around them, or are themselves not seen: controls, marks of direction, spaces
# without width, tags. The joiners (U+200C, U+200D) stay: Persian and many emoji need them.
_UNPRINTABLE = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), 0xAD, 0x61C, 0x200B, 0x200E, 0x200F,
                              *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF, *range(0xE0000, 0xE0080)], "·")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --text: #1d2125; --soft: #59626b; --line: #d5dade; --back: #fff; --box: #f3f5f7;
  --warn: #a33a00; --c0: #1f6fb4; --c1: #c8421f; --c2: #2a8a3a; --c3: #7d52b0; --c4: #b07600; --c5: #0e8594;
  --c6: #8a5445; --c7: #6d7278; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ea; --soft: #a2abb4; --line: #3c444c; --back: #15191d;
  --box: #20262c; --warn: #ff9d66; --c0: #6cb2f0; --c1: #ff8a66; --c2: #6fcf7f; --c3: #bf9cf0; --c4: #e8b64a;
  --c5: #4fd0e0; --c6: #d0a090; --c7: #a8b0b8; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; color: var(--text);
  background: var(--back); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.lead { font-size: 1.2rem; font-weight: 600; border-left: .3rem solid var(--c0); padding-left: .8rem; }
.warn { border-left: .3rem solid var(--warn); padding-left: .8rem; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .1rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; }
.scrolling { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 7rem; }
pre { white-space: pre-wrap; background: var(--box); padding: .5rem .7rem; font-size: .9rem; }
figure { margin: .5rem 0 1rem; display: flex; flex-wrap: wrap; gap: 0 1.5rem; align-items: flex-start; }
figure > * { flex: 1 1 20rem; min-width: 0; }
figcaption { flex-basis: 100%; font-weight: 600; }
figure svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } svg .row { fill: var(--text); } svg .grid { stroke: var(--line); }
.key { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .85rem; }
.key svg { display: inline; width: 1.6rem; height: .7rem; margin-right: .3rem; }
@media (max-width: 30rem) { dl { display: block; } dd { margin-bottom: .4rem; } body { padding: .7rem; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; } figure > * { flex-basis: 40%; }
  .scrolling { overflow-x: visible; } table { width: 100%; font-size: 9px; } th, td { white-space: normal;
  padding: .1rem .2rem; } th:first-child, td:first-child { min-width: 0; } h2, h3, figcaption { break-after: avoid; }
  figure svg, tr { break-inside: avoid; } }
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


def lead(text: str) -> Html:
    """Return the line that says what a page comes to: its first."""
    return Html(f'<p class="lead">{escaped(text)}</p>')


def warning(text: str) -> Html:
    """Return a paragraph that nobody should miss."""
    return Html(f'<p class="warn">{escaped(text)}</p>')


def block(text: str) -> Html:
    """Return a text whose lines and spaces stay."""
    return _tag("pre", text)


def definitions(facts: dict[str, str]) -> Html:
    """Return a list of names with what is said of each."""
    return Html(f"<dl>{''.join(_tag('dt', name) + _tag('dd', text) for name, text in facts.items())}</dl>")


def table(head: list[str], rows: list[list[str]]) -> Html:
    """Return a table; where it is wider than the page, it scrolls in its own box. On paper its cells wrap."""
    lines = [("th", head), *(("td", row) for row in rows)]
    body = "".join(f"<tr>{''.join(_tag(name, cell) for cell in cells)}</tr>" for name, cells in lines)
    return Html(f'<div class="scrolling" tabindex="0"><table>{body}</table></div>')


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
