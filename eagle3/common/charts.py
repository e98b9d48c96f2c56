"""Line charts as SVG inside a page: drawn while a run goes on, without a plotting library."""

import math
from collections.abc import Sequence

from eagle3.common.pages import Html, escaped

Series = dict[str, list[tuple[float, float]]]  # name: points (x, y)

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 260, 64, 150, 12, 34
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_MOST_POINTS = 400  # of a series: more than a page has pixels for


def line_chart(series: Series, x_label: str, *, log_x: bool = False, marks: bool = False) -> Html:
    """Return a chart of several lines with a legend; Html("") when no series has a point.

    Args:
        log_x: x on a logarithmic scale (all x positive). marks: a dot at each point.
    """
    lines = {name: _thinned(points) for name, points in series.items() if points}
    if not lines:
        return Html("")
    xs, ys = zip(*(point for points in lines.values() for point in points), strict=True)
    scale = math.log10 if log_x else float
    x_low, x_high = _range([scale(x) for x in xs], margin=0)
    y_low, y_high = _range(ys, margin=0.05)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (scale(x) - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        up = (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - up, 1)

    ticks_x = sorted({*xs}) if log_x else _ticks(min(xs), max(xs))
    parts = [_tick_x(place(x, y_low)[0], x) for x in ticks_x]
    parts += [_tick_y(place(xs[0], y)[1], y) for y in _ticks(y_low, y_high)]
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(*point) for point in points]
        joined = " ".join(f"{x},{y}" for x, y in placed)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if marks or len(placed) == 1:
            parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(_WIDTH - _RIGHT + 10, _TOP + 14 + 17 * number, name, f'fill="{colour}"'))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, x_label, 'text-anchor="middle" fill="#444"'))
    return Html(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" font-size="12" role="img">{"".join(parts)}</svg>')


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return finite points, as means of neighbours where there are too many to be seen."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    each = -(-len(finite) // _MOST_POINTS) or 1
    groups = [finite[start : start + each] for start in range(0, len(finite), each)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


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
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _tick_x(x: float, value: float) -> str:
    return (f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_HEIGHT - _BOTTOM}" stroke="#eee"/>'
            + _text(x, _HEIGHT - _BOTTOM + 14, f"{value:,.6g}", 'text-anchor="middle" fill="#444"'))


def _tick_y(y: float, value: float) -> str:
    return (f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>'
            + _text(_LEFT - 6, y + 4, f"{value:.4g}", 'text-anchor="end" fill="#444"'))


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escaped(text)}</text>'
