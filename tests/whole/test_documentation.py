"""Commands that the documentation shows are real: scripts, modules, flags and configuration files exist."""

import re
import shlex
from pathlib import Path

import pytest

from eagle3.common import config, options
from eagle3.doctor import DoctorOptions

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "01_generate_synthetic.py": options.GenerateOptions,
    "02_extract_hidden_states.py": options.ExtractOptions,
    "03_build_vocab_mapping.py": options.VocabOptions,
    "04_train.py": options.TrainOptions,
    "05_fix_weight_keys.py": options.ExportOptions,
    "06_benchmark.py": options.BenchmarkOptions,
}
PLACES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("configs/*.yaml")),
          *sorted(ROOT.glob("0*.py")), *sorted((ROOT / "eagle3").glob("*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]
STARTS = r"(?:python (?:0\d_\w+\.py|-m eagle3\.|benchmarks/)|\./(?:run|test|setup)\.sh)"


def commands(path: Path) -> list[list[str]]:
    """Return the words of each command in a file: in backquotes, or a line of its own."""
    text = path.read_text(encoding="utf-8").replace("\\\\\n", " ").replace("\\\n", " ")
    found = re.findall(rf"`({STARTS}[^`]*)`", text) + re.findall(rf"^ *({STARTS}[^`\n]*)$", text, re.MULTILINE)
    plain = [re.sub(r"\s+(#|\(|→).*", "", command).replace("…", "").rstrip("&;, ") for command in found]
    return [shlex.split(command) for command in plain]


ALL = [pytest.param(words, id=f"{path.name}: {' '.join(words)[:60]}") for path in PLACES for words in commands(path)]


def test_commands_are_found():
    assert len(ALL) > 30
    assert ["./run.sh"] in [words for parameter in ALL for words in parameter.values]


@pytest.mark.parametrize("words", ALL)
def test_a_command_is_real(words):
    if words[0].startswith("./"):
        script, flags = ROOT / words[0], words[1:]
        assert script.is_file()
        text = script.read_text()
        assert all(flag in text for flag in flags if flag.startswith("--")), flags
    elif words[1:3] == ["-m", "eagle3.doctor"]:
        parse(DoctorOptions, words[3:])
    elif words[1] == "-m":
        source = (ROOT / "eagle3" / f"{words[2].removeprefix('eagle3.')}.py").read_text()
        assert all(f'"{flag}"' in source for flag in words[3:] if flag.startswith("--"))
    elif words[1].startswith("benchmarks/"):
        source = (ROOT / words[1]).read_text()
        assert all(f'"{flag}"' in source for flag in words[2:] if flag.startswith("--"))
    else:
        parse(OPTIONS[words[1]], words[2:])


def parse(options_class: type, arguments: list[str]) -> None:
    """Parse arguments as the script would; a configuration that a user is to write stands for any other."""
    given = ["configs/kimi-k2.5.yaml" if word.startswith("configs/mine") else word for word in arguments]
    given = [str(ROOT / word) if word.startswith("configs/") else word for word in given]
    given = ["4" if word == "N" else word for word in given]
    config.parse(options_class, given, "")
