"""RoPE as numbers: the inverse frequencies and the scaling of cos and sin that a configuration means.

Two spellings, or two engines, are the same when every position is turned by the same angles, whatever their keys.
The formulas are those of transformers' `modeling_rope_utils` (5.19), with which drafters are trained, in float64:
linear interpolation (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN (arXiv 2309.00071), LongRoPE
(arXiv 2402.13753) and Llama 3.1's.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.drafter.rope import DEFAULT_THETA, OLD_TYPES

Rope = dict[str, Any]
Frequencies = tuple[list[float], float]  # radians a token for each pair of a head's elements; factor of cos and sin
# Keys of images' and videos' positions: all three coordinates of a text token are its one position.
TEXT_ONLY = ("mrope_section", "mrope_interleaved")
_LARGE = 1e18  # beyond any theta, factor or length; NaN is not below it
_CLOSE = 1e-5  # of a frequency or factor: float32 keeps 24 bits


def normal(config: dict[str, Any], spelling: str = "both") -> Rope:
    """Return the flat rope of a configuration: rope_type, rope_theta, and what that type needs.

    Args:
        config: with `rope_parameters`, or `rope_theta` and `rope_scaling`, or both; a rope itself is taken as well.
        spelling: "new" as transformers 5 reads it (rope_scaling goes before rope_parameters), "old" as versions before
            (rope_theta and rope_scaling alone), "both" for rope_parameters before rope_scaling.
    Raises PreconditionError for values that are no RoPE: objects inside it (one per layer type), texts for numbers.
    """
    new, old = (_object(config, name) for name in ("rope_parameters", "rope_scaling"))
    told = {"new": old or new, "old": old, "both": old | new}[spelling]
    rope = dict(told) if new or old else {name: value for name, value in config.items() if name in _KEYS}
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    if not isinstance(rope["rope_type"], str):
        raise PreconditionError("RoPE is of no type", where="rope_type", expected=", ".join(_TYPES),
                                found=f"{rope['rope_type']!r:.80}")
    rope["rope_type"] = OLD_TYPES.get(rope["rope_type"], rope["rope_type"])
    theta = config.get("rope_theta") if spelling == "old" else rope.get("rope_theta") or config.get("rope_theta")
    rope["rope_theta"] = float(theta or DEFAULT_THETA) if _is_number(theta) or not theta else theta
    rope = {name: value for name, value in rope.items() if value is not None and name not in TEXT_ONLY}
    if rope["rope_type"] in ("dynamic", "llama3", "yarn", "longrope"):
        rope = {"max_position_embeddings": config.get("max_position_embeddings")} | rope
        rope = {name: value for name, value in rope.items() if value is not None}
    _require_plain(rope)
    return rope


def frequencies(rope: Rope, head_dim: int, length: int | None = None) -> Frequencies:
    """Return (inverse frequencies [head_dim/2], factor of cos and sin) for sequences of `length` tokens.

    What is not rotated (partial_rotary_factor) has frequency 0. Only dynamic NTK and LongRoPE depend on the length.
    Raises PreconditionError for a type that is not known, and when a value that it needs is missing.
    """
    rope = normal(rope)
    make = _TYPES.get(rope["rope_type"])
    if make is None:
        raise PreconditionError("unknown RoPE", where="rope_type", expected=", ".join(_TYPES), found=rope["rope_type"])
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    try:
        inverse, factor = make(rope, rotated, length)
    except KeyError as error:
        raise PreconditionError(f"RoPE of type {rope['rope_type']} lacks a value", where=f"rope {error}") from None
    except (ArithmeticError, ValueError, TypeError, IndexError) as error:
        raise PreconditionError(f"RoPE of type {rope['rope_type']} cannot be computed", where="rope", found=error
                                ) from None
    return inverse + [0.0] * (head_dim // 2 - len(inverse)), factor


def angles(rope: Rope, head_dim: int, positions: Iterable[int]) -> list[list[float]]:
    """Return the angle in radians [len(positions)][head_dim/2] by which each pair of a head is turned."""
    positions = list(positions)
    inverse, _ = frequencies(rope, head_dim, max(positions, default=0) + 1)
    return [[position * each for each in inverse] for position in positions]


def same(a: Rope, b: Rope, head_dim: int, length: int) -> bool:
    """Say whether two ropes turn and scale every token of sequences of up to `length` tokens alike."""
    return not difference(a, b, head_dim, length)


def difference(a: Rope, b: Rope, head_dim: int, length: int) -> str:
    """Return in words where two ropes part first on sequences of up to `length` tokens; "" when nowhere."""
    ends = {length, *(int(rope[name]) for rope in (normal(a), normal(b)) for name in rope
                      if name.endswith("max_position_embeddings") and rope[name] < length)}
    for end in sorted(ends):
        (left, left_factor), (right, right_factor) = (frequencies(rope, head_dim, end) for rope in (a, b))
        if not math.isclose(left_factor, right_factor, rel_tol=_CLOSE):
            return f"cos and sin are scaled by {left_factor:.4g} and {right_factor:.4g}"
        for pair, (one, other) in enumerate(zip(left, right, strict=True)):
            if not math.isclose(one, other, rel_tol=_CLOSE):
                return f"position {end - 1}, pair {pair}: {(end - 1) * one:.5g} and {(end - 1) * other:.5g} radians"
    return ""


# --- the types --------------------------------------------------------------------------------------------


def _plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-i / dim) for i in range(0, dim, 2)]


def _default(rope: Rope, dim: int, _: int | None) -> Frequencies:
    return _plain(rope["rope_theta"], dim), 1.0


def _linear(rope: Rope, dim: int, _: int | None) -> Frequencies:
    return [each / rope["factor"] for each in _plain(rope["rope_theta"], dim)], 1.0


def _dynamic(rope: Rope, dim: int, length: int | None) -> Frequencies:
    most, factor = rope.get("max_position_embeddings") or 0, rope["factor"]
    ratio = max(length or most, most) / most if most else 1.0
    return _plain(rope["rope_theta"] * (factor * ratio - (factor - 1)) ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: Rope, dim: int, _: int | None) -> Frequencies:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    trained = _trained(rope)

    def scaled(each: float) -> float:
        turns = trained * each / (2 * math.pi)
        if turns < low:
            return each / factor
        if turns > high:
            return each
        smooth = (turns - low) / (high - low)
        return (1 - smooth) * each / factor + smooth * each

    return [scaled(each) for each in _plain(rope["rope_theta"], dim)], 1.0


def _yarn(rope: Rope, dim: int, _: int | None) -> Frequencies:
    theta, factor, trained = rope["rope_theta"], rope["factor"], _trained(rope)

    def place(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    shares = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]  # of interpolation
    inverse = [each / factor * share + each * (1 - share)
               for each, share in zip(_plain(theta, dim), shares, strict=True)]
    return inverse, rope.get("attention_factor") or _yarn_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))


def _yarn_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _longrope(rope: Rope, dim: int, length: int | None) -> Frequencies:
    trained = _trained(rope)
    divisors = rope["long_factor" if length and length > trained else "short_factor"]
    inverse = [each / by for each, by in zip(_plain(rope["rope_theta"], dim), divisors, strict=True)]
    factor = rope.get("factor") or rope.get("max_position_embeddings", trained) / trained
    usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return inverse, rope.get("attention_factor") or usual


def _trained(rope: Rope) -> int:
    """Return the length before scaling; where it is left out, transformers takes max_position_embeddings."""
    return rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]


_TYPES: dict[str, Callable[[Rope, int, int | None], Frequencies]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip
_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
            "max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
            "partial_rotary_factor")  # fmt: skip
_LISTS = ("short_factor", "long_factor")
_KEYS = ("rope_type", "type", "truncate", *_NUMBERS, *_LISTS)


# --- forms from outside -----------------------------------------------------------------------------------


def _object(config: dict[str, Any], name: str) -> Rope:
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise PreconditionError("RoPE is no object of numbers", where=name, expected="an object",
                                found=repr(value)[:80])
    return value or {}


def _require_plain(rope: Rope) -> None:
    inner = [name for name, value in rope.items() if isinstance(value, dict)]
    if inner:
        raise PreconditionError("RoPE per layer type is not a drafter's: it has one layer", where="rope_parameters",
                                expected="numbers", found=f"objects: {', '.join(map(str, inner))}",
                                fix="write the trained one flat, usually that of full_attention")
    wrong = {name: rope[name] for name in _NUMBERS if name in rope and not (_is_number(rope[name]) and rope[name] > 0)}
    wrong |= {name: rope[name] for name in _LISTS if name in rope and not (
        isinstance(rope[name], list) and rope[name] and all(_is_number(each) and each > 0 for each in rope[name]))}
    if not wrong and rope.get("partial_rotary_factor", 1.0) > 1:
        wrong["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if wrong:
        raise PreconditionError("RoPE has values that are none", where="rope_parameters",
                                expected="positive numbers", found=repr(wrong)[:200])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGE
