"""What an engine said when it started with the drafter; texts as in vLLM 0.16–0.32 and SGLang 0.5.9–0.5.14."""

import re
from pathlib import Path

_READ_BYTES = 8 << 20
_START = re.compile(r"non-default args:|server_args=")


class EngineLog:
    """What the engine said when it last started with the drafter; empty for a server that others started."""

    def __init__(self, path: Path) -> None:
        """Read the end of the log, from the last start on."""
        self.path, self.text = path, ""
        if path.is_file():
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - _READ_BYTES))
                self.text = file.read().decode(errors="replace")
            starts = [match.start() for match in _START.finditer(self.text)]
            self.text = self.text[starts[-1]:] if starts else self.text

    def says(self, pattern: str) -> str:
        """Return what the last match of a pattern captured (all of it without a group), "" when nothing matches."""
        found = re.findall(pattern, self.text, re.MULTILINE)
        return str(found[-1]) if found else ""

    @property
    def captured(self) -> list[int]:
        """The auxiliary layers that vLLM names, by either of its model runners."""
        text = self.says(r"auxiliary layers from (?:speculative config|config|model): [(\[]([\d, ]+)[)\]]")
        return [int(word) for word in text.split(",") if word.strip()]

    @property
    def error(self) -> str:
        """The last exception that is a reason and not only news of another one, shortened."""
        return self.says(r"^.*?\b((?!EngineDead)[A-Z]\w*(?:Error|Exception): (?!Engine core init).*)$")[:300]

    @property
    def eager(self) -> bool:
        """Whether nothing was compiled."""
        return bool(self.says(r"'enforce_eager': True|Enforce eager set"))

    @property
    def prefix_caching(self) -> bool | None:
        """Whether prompts shared cached states; None when the log does not say."""
        value = self.says(r"enable_prefix_caching'?[=:] ?(True|False)")
        without = self.says(r"disable_radix_cache=(True|False)")
        return value == "True" if value else without == "False" if without else None
