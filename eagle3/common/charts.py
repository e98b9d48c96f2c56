"""Charts as SVG inside a page, without a plotting library: each with its key, its values on hover and a table of them.

A chart is drawn for the width of a phone and grows with the page, text and all. Colours are the page's, so that dark
and light are its business; lines are told apart by their dashes too, since paper may be grey.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from eagle3.common import pages
from eagle3.common.pages import Html, escaped

# A point is (x, y), or (x, y, lowest, highest) with the spread of y.
Point = tuple[float, ...]
Series = dict[str, list[Point]]
Rows = Mapping[str, Mapping[str, float | None]]  # row: {mark: value}

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 260, 54, 12, 10, 40
_COLOURS = 8
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_ROW = 34  # of a chart by rows: its name above its marks
_BAR = 12
_MOST_POINTS = 300  # of a series: more than a page has pixels for
_MOST_LINES = 14  # of a chart's table
_MOST_LETTERS = 62  # of a row's name


def line_chart(title: str, series: Series, x_label: str, *, log_x: bool = False, marks: bool = False,
               y_range: tuple[float | None, float | None] = (None, None)) -> Html:
    """Return a chart of several lines; Html("") when no series has a point.

    Args:
        log_x: x on a logarithmic scale (all x positive). marks: a dot at each point.
        y_range: ends of the y axis; None follows the values.
    """
    lines = {name: thinned for name, points in series.items() if (thinned := _thinned(points))}
    if not lines:
        return Html("")
    xs = [point[0] for points in lines.values() for point in points]
    scale = math.log10 if log_x else float
    x_low, x_high = _range([scale(x) for x in xs], margin=0)
    y_low, y_high = _range([y for points in lines.values() for point in points for y in point[1:]], margin=0.05)
    y_low, y_high = (given if given is not None else found
                     for given, found in zip(y_range, (y_low, y_high), strict=True))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (scale(x) - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        up = (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - up, 1)

    parts = [_tick_x(place(x, y_low)[0], x, _HEIGHT - _BOTTOM)
             for x in (_apart(xs, place) if log_x else _ticks(min(xs), max(xs)))]
    parts += [_tick_y(place(xs[0], y)[1], y) for y in _ticks(y_low, y_high)]
    for number, (name, points) in enumerate(lines.items()):
        stroke = f'stroke="{_colour(number)}"'
        joined = " ".join("{},{}".format(*place(*point[:2])) for point in points)
        parts.append(f'<polyline points="{joined}" fill="none" {stroke} stroke-width="2" '
                     f'stroke-dasharray="{_dashes(number)}"/>')
        for point in points:
            x, y = place(*point[:2])
            if len(point) > 2 and point[2] < point[3]:
                ends = (place(point[0], end)[1] for end in point[2:])
                parts.append('<line x1="{0}" x2="{0}" y1="{1}" y2="{2}" {3}/>'.format(x, *ends, stroke))
            said = f"{name}: {_said(point)} at {_number(point[0])}"
            size = 3 if marks or len(points) == 1 else 1.5
            parts.append(f'<circle cx="{x}" cy="{y}" r="{size}" fill="{_colour(number)}">{_hover(said)}</circle>')
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_label, 'text-anchor="middle"'))
    return _figure(title, _svg(title, _HEIGHT, parts), [*lines], _line_table(lines, x_label), dashed=True)


def dot_chart(title: str, rows: Rows, x_label: str) -> Html:
    """Return a chart with a line a row and a dot for each of its marks; Html("") without values."""
    shown = {name: told for name, marks in rows.items()
             if (told := {mark: value for mark, value in marks.items() if value is not None})}
    if not shown:
        return Html("")
    kinds = list(dict.fromkeys(mark for marks in shown.values() for mark in marks))
    high = max(value for marks in shown.values() for value in marks.values()) or 1.0
    parts = []
    for number, (name, marks) in enumerate(shown.items()):
        y = _TOP + _ROW * number + 24
        ends = [_across(value, high) for value in marks.values()]
        parts.append(_text(4, y - 10, _cut(name), 'class="row"'))
        parts.append(f'<line x1="{min(ends)}" x2="{max(ends)}" y1="{y}" y2="{y}" class="grid" stroke-width="3"/>')
        for mark, value in marks.items():
            parts.append(_dot(_across(value, high), y, kinds.index(mark), f"{name}, {mark}: {_number(value)}"))
    drawing = _by_row(title, parts, len(shown), high, x_label)
    return _figure(title, drawing, kinds, _row_table(shown, kinds))


def bar_chart(title: str, rows: Rows, x_label: str) -> Html:
    """Return a chart with a bar a row, put together of its parts; Html("") without any."""
    shown = {name: {part: value for part, value in parts.items() if value} for name, parts in rows.items()}
    kinds = list(dict.fromkeys(part for parts in shown.values() for part in parts))
    if not kinds:
        return Html("")
    high = max(sum(value or 0 for value in parts.values()) for parts in shown.values())
    drawn = []
    for number, (name, values) in enumerate(shown.items()):
        y, start = _TOP + _ROW * number + 16, 0.0
        drawn.append(_text(4, y - 3, _cut(name), 'class="row"'))
        for part, value in values.items():
            left, right = _across(start, high), _across(start + (value or 0), high)
            said = _hover(f"{name}, {part}: {_number(value or 0)}")
            drawn.append(f'<rect x="{left}" y="{y}" width="{round(right - left, 1)}" height="{_BAR}" '
                         f'fill="{_colour(kinds.index(part))}">{said}</rect>')
            start += value or 0
    return _figure(title, _by_row(title, drawn, len(shown), high, x_label), kinds, _row_table(shown, kinds))


# --- what charts are made of ------------------------------------------------------------------------------


def _figure(title: str, svg: str, names: Sequence[str], table: pages.Table, *, dashed: bool = False) -> Html:
    """Return a chart with its title, what its colours mean and, beside it, its values."""
    keys = []
    for number, name in enumerate(names):
        mark = (f'<line x1="1" x2="27" y1="6" y2="6" stroke="{_colour(number)}" stroke-width="3" '
                f'stroke-dasharray="{_dashes(number)}"/>' if dashed else _dot(14, 6, number))
        keys.append(f'<li><svg viewBox="0 0 28 12" aria-hidden="true">{mark}</svg>{escaped(name)}</li>')
    key = f'<ul class="key">{"".join(keys)}</ul>'
    return Html(f"<figure><figcaption>{escaped(title)}</figcaption><div>{svg}{key}</div>{pages.table(*table)}</figure>")


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    return (f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escaped(title)}">'
            f'{"".join(parts)}</svg>')


def _by_row(title: str, parts: Sequence[str], count: int, high: float, x_label: str) -> str:
    """Return the drawing of a chart by rows, from 0 to `high`, with its axis below."""
    foot = _TOP + _ROW * count
    axis = [_tick_x(_across(x, high), x, foot) for x in _ticks(0, high)]
    axis.append(_text(_WIDTH / 2, foot + 34, x_label, 'text-anchor="middle"'))
    return _svg(title, foot + _BOTTOM, [*axis, *parts])


def _line_table(lines: Series, x_label: str) -> pages.Table:
    """Return the values of lines, of many some; what there is more of, lines or places, goes downwards."""
    xs = sorted({point[0] for points in lines.values() for point in points})
    shown = xs if len(xs) <= _MOST_LINES else [xs[k * (len(xs) - 1) // (_MOST_LINES - 1)] for k in range(_MOST_LINES)]
    told = {(name, point[0]): _said(point) for name, points in lines.items() for point in points}
    if len(xs) > len(lines):
        return [x_label, *lines], [[_number(x), *(told.get((name, x), "–") for name in lines)] for x in shown]
    return ["", *map(_number, shown)], [[name, *(told.get((name, x), "–") for x in shown)] for name in lines]


def _row_table(rows: Rows, kinds: Sequence[str]) -> pages.Table:
    return ["", *kinds], [[name, *("–" if (value := marks.get(kind)) is None else _number(value) for kind in kinds)]
                          for name, marks in rows.items()]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return finite points, as means of neighbours where there are too many to be seen."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    each = -(-len(finite) // _MOST_POINTS)
    if each <= 1:
        return finite
    groups = [finite[start : start + each] for start in range(0, len(finite), each)]
    return [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in groups]


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    more = (high - low) * margin or (0.5 * abs(high) or 1.0 if high == low else 0.0)
    return low - more, high + more


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers within a range."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _apart(xs: Sequence[float], place: Callable[[float, float], tuple[float, float]]) -> list[float]:
    """Return those of the values that leave room for each other's names."""
    kept: list[float] = []
    for x in sorted(set(xs)):
        if not kept or place(x, 0)[0] - place(kept[-1], 0)[0] > 7 * len(_number(x)) + 6:
            kept.append(x)
    return kept


def _across(value: float, high: float) -> float:
    return round(8 + value / high * (_WIDTH - 32), 1)


def _tick_x(x: float, value: float, foot: float) -> str:
    said = _number(value)
    anchor = "end" if x + 4 * len(said) > _WIDTH else "middle"  # the last one may not stand over the edge
    return (f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{foot}" class="grid"/>'
            + _text(x, foot + 15, said, f'text-anchor="{anchor}"'))


def _tick_y(y: float, value: float) -> str:
    return (f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" class="grid"/>'
            + _text(_LEFT - 5, y + 4, _number(value), 'text-anchor="end"'))


def _dot(x: float, y: float, number: int, said: str = "") -> str:
    """Return a mark: a disc, a square or a rhombus, so that colour alone tells nothing."""
    fill = f'fill="{_colour(number)}"'
    if number % 3 == 0:
        return f'<circle cx="{x}" cy="{y}" r="5" {fill}>{_hover(said)}</circle>'
    turned = f' transform="rotate(45 {x} {y})"' if number % 3 == 2 else ""
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {fill}{turned}>{_hover(said)}</rect>'


def _colour(number: int) -> str:
    return f"var(--c{number % _COLOURS})"


def _dashes(number: int) -> str:
    return _DASHES[number // 2 % len(_DASHES)] if number % 2 == 0 else _DASHES[(number // 2 + 1) % len(_DASHES)]


def _said(point: Point) -> str:
    spread = f" [{_number(point[2])}–{_number(point[3])}]" if len(point) > 2 and point[2] < point[3] else ""
    return _number(point[1]) + spread


def _number(value: float) -> str:
    """Return a figure: whole and large ones whole, others with four significant digits."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


def _hover(text: str) -> str:
    return f"<title>{escaped(text)}</title>" if text else ""


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escaped(text)}</text>'
