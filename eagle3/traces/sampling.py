"""Sampling settings: one for all prompts, or a weighted mix of which each conversation gets one by its id.

A mix file is a YAML or JSON list; what an entry leaves out comes from the stage's own options:
  - {name: thinking, weight: 3, temperature: 1.0, top_p: 0.95}
  - {name: instant, weight: 1, temperature: 0.6, reasoning: "off", chat_template_kwargs: {thinking: false}}
"""

import hashlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.files import sha256_json
from eagle3.common.options import GenerateSection

_REASONING = ("required", "optional", "off")


@dataclass(frozen=True)
class Setting:
    """How a prompt is sampled; `weight` is its share of the mix, in proportion to the others."""

    temperature: float
    top_p: float
    max_tokens: int
    chat_template_kwargs: dict[str, Any]
    reasoning: str
    name: str = ""
    weight: float = field(default=1.0, compare=False)

    def recorded(self, max_tokens: int, seed: int) -> dict[str, Any]:
        """Return what a trace says about its sampling; `max_tokens` may have been clamped."""
        named = {"name": self.name} if self.name else {}
        return named | {"max_tokens": max_tokens, "temperature": self.temperature, "top_p": self.top_p, "seed": seed}


class Mix:
    """The settings of a run."""

    def __init__(self, section: GenerateSection) -> None:
        """Read them from the section, or from the file that it names."""
        self.settings = _read(Path(section.sampling), section) if section.sampling else [_own(section)]
        self._seed = section.seed
        self._total = sum(setting.weight for setting in self.settings)

    def choose(self, conversation_id: str) -> Setting:
        """Return a conversation's setting: the same in every run, whatever else is asked."""
        if len(self.settings) == 1:
            return self.settings[0]
        digest = hashlib.sha256(f"{self._seed} {conversation_id}".encode()).digest()
        point = int.from_bytes(digest[:8], "big") / 2**64 * self._total
        for setting in self.settings:
            point -= setting.weight
            if point < 0:
                return setting
        return self.settings[-1]

    def identity(self) -> list[dict[str, Any]]:
        """Return what decides the results, for the fingerprint."""
        return [asdict(setting) for setting in self.settings]

    def key(self, setting: Setting, messages: list[Any], tools: list[Any], model: str) -> str:
        """Return a hash of all that decides a reply: prompt, sampling, template arguments, model.

        Of the model's name only the last path component counts: one server calls it by its folder, another
        by its name on the hub.
        """
        how = {name: getattr(setting, name) for name in ("max_tokens", "temperature", "top_p", "chat_template_kwargs")}
        return sha256_json([messages, tools, how | {"seed": self._seed}, Path(model).name])[:32]


def _own(section: GenerateSection) -> Setting:
    return Setting(section.temperature, section.top_p, section.max_tokens, section.chat_template_kwargs,
                   section.reasoning)


def _read(path: Path, section: GenerateSection) -> list[Setting]:
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PreconditionError("the sampling file cannot be read", where=path, found=error) from None
    if not isinstance(entries, list) or not entries:
        raise _problem(path, "a list of settings", entries)
    settings = [_setting(entry, f"{path} entry {i}", section) for i, entry in enumerate(entries, start=1)]
    names = [setting.name for setting in settings]
    if len(settings) > 1 and (len(set(names)) < len(names) or "" in names):
        raise _problem(path, "a different name for each setting", names)
    return settings


def _setting(entry: Any, where: str, section: GenerateSection) -> Setting:
    """Return one entry with the section's values for what it leaves out."""
    known = [item.name for item in fields(Setting)]
    if not isinstance(entry, dict) or set(entry) - set(known):
        raise _problem(where, "some of " + ", ".join(known), entry)
    values = asdict(_own(section)) | entry
    numbers = (("temperature", 0.0, None), ("top_p", 0.0, 1.0), ("weight", 0.0, None), ("max_tokens", 1, None))
    for name, low, high in numbers:
        value = values[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or value < low or (high is not None and value > high) or (name == "weight" and value == 0):
            raise _problem(f"{where}: {name}", f"a number from {low}" + (f" to {high}" if high else ""), value)
    if isinstance(values["max_tokens"], float) or not isinstance(values["chat_template_kwargs"], dict):
        raise _problem(where, "max_tokens a whole number, chat_template_kwargs an object", entry)
    if values["reasoning"] not in _REASONING:  # YAML 1.1 reads a bare off as false
        raise _problem(f"{where}: reasoning", " or ".join(f'"{word}"' for word in _REASONING), values["reasoning"])
    return Setting(**values | {"name": str(values["name"])})


def _problem(where: object, expected: str, found: object) -> PreconditionError:
    return PreconditionError("the sampling file is not valid", where=where, expected=expected, found=repr(found)[:300],
                             fix="correct it, or leave --sampling out")
