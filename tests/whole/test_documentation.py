"""What the documentation shows is real: commands and their flags, links between documents, paths, modules, causes."""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import ROOT

from eagle3.checks.causes import CAUSES, ENGINE_SIDE
from eagle3.common import config, options
from eagle3.doctor import DoctorOptions

OPTIONS = {
    "01_generate_synthetic.py": options.GenerateOptions,
    "02_extract_hidden_states.py": options.ExtractOptions,
    "03_build_vocab_mapping.py": options.VocabOptions,
    "04_train.py": options.TrainOptions,
    "05_fix_weight_keys.py": options.ExportOptions,
    "06_benchmark.py": options.BenchmarkOptions,
}
DOCUMENTS = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks/README.md",
             ROOT / "patches/README.md", ROOT / "recipes/README.md"]
PLACES = [*DOCUMENTS, *sorted(ROOT.glob("configs/*.yaml")), *sorted(ROOT.glob("recipes/*.yaml")),
          *sorted(ROOT.glob("0*.py")), *sorted((ROOT / "eagle3").rglob("*.py")),
          *sorted(ROOT.glob("benchmarks/*.py"))]
STARTS = (r"(?:python (?:0\d_\w+\.py|-m (?:eagle3|tiny_kimi)\.|benchmarks/|tests/manual/)"
          r"|\./(?:run|test|setup)\.sh)")
FOLDERS = "eagle3|tests|benchmarks|docs|patches|recipes|tiny_kimi"
PLACEHOLDERS = {"eagle3/X.py"}


def commands(path: Path) -> list[list[str]]:
    """Return the words of each command in a file: in backquotes, or a line of its own."""
    text = path.read_text(encoding="utf-8").replace("\\\\\n", " ").replace("\\\n", " ")
    found = re.findall(rf"`(?:nohup )?({STARTS}[^`]*)`", text)
    found += re.findall(rf"^ *({STARTS}[^`\n]*)$", text, re.MULTILINE)
    plain = [re.sub(r"\s+(#|\(|→).*", "", command).replace("…", "").rstrip("&;, ") for command in found]
    return [shlex.split(command) for command in plain]


ALL = [pytest.param(words, id=f"{path.name}: {' '.join(words)[:60]}") for path in PLACES for words in commands(path)]


def test_commands_are_found_in_every_document():
    assert len(ALL) > 60
    assert ["./run.sh"] in [words for parameter in ALL for words in parameter.values]
    without = [path.name for path in DOCUMENTS if not commands(path)]
    assert without == []


@pytest.mark.parametrize("words", ALL)
def test_a_command_is_real(words):
    if words[0].startswith("./"):
        has_flags(words[1:], r"(--[\w-]+)\)", (ROOT / words[0]).read_text())  # the labels of a case
    elif words[1:3] == ["-m", "eagle3.doctor"]:
        parse(DoctorOptions, words[3:])
    elif words[1] == "-m" and re.fullmatch(r"eagle3\.[a-z]+", words[2]):
        has_flags(words[3:], r"(--[\w-]+)", usage_of(words[2]))
    elif words[1] == "-m" and words[2] not in ("eagle3.X", "eagle3."):  # these stand for any command
        has_flags(words[3:], r'"(--[\w-]+)"', ROOT.joinpath(*words[2].split(".")).with_suffix(".py").read_text())
    elif words[1].startswith(("benchmarks/", "tests/manual/")):
        has_flags(words[2:], r'"(--[\w-]+)"', with_siblings(ROOT / words[1]))
    elif words[1] != "-m":
        parse(OPTIONS[words[1]], words[2:])


def has_flags(words: list[str], pattern: str, text: str) -> None:
    """Require every flag among the words of a command to be told by a text; a word with spaces is a flag's value."""
    given = {word.partition("=")[0] for word in words if word.startswith("--") and " " not in word}
    assert given <= set(re.findall(pattern, text))


def with_siblings(script: Path) -> str:
    """Return a script's text and that of the scripts beside it from which it imports."""
    text = script.read_text()
    beside = (script.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.MULTILINE))
    return text + "".join(path.read_text() for path in beside if path.exists())


@functools.cache
def usage_of(module: str) -> str:
    """Return the usage that a command prints, without the description: an example there proves nothing."""
    answer = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, text=True, check=True,
                            capture_output=True).stdout
    return answer.partition("\n\n")[0]


def parse(options_class: type, arguments: list[str]) -> None:
    """Parse arguments as the script would; a configuration that a user is to write stands for any other."""
    given = ["configs/kimi-k2.5.yaml" if word.startswith("configs/mine") else word for word in arguments]
    given = [str(ROOT / word) if word.startswith(("configs/", "recipes/")) else word for word in given]
    given = ["4" if word == "N" else word for word in given]
    config.parse(options_class, given, "")


# --- links, paths, names ------------------------------------------------------------------------------------


def links(path: Path) -> list[str]:
    """Return the targets of a document's links that stay inside the project."""
    found = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    return [target for target in found if not re.match(r"\w+:", target)]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKS = [pytest.param(path, target, id=f"{path.relative_to(ROOT)}: {target}") for path in DOCUMENTS
         for target in links(path)]


@pytest.mark.parametrize(("path", "target"), LINKS)
def test_a_link_leads_somewhere(path, target):
    name, _, anchor = target.partition("#")
    found = (path.parent / name).resolve() if name else path
    assert found.exists(), f"{path.name}: {target}"
    assert not anchor or anchor in anchors(found), f"{path.name}: {target}; there are {sorted(anchors(found))}"


def test_every_document_is_linked_from_the_readme():
    reached = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / "README.md")}
    assert {path for path in DOCUMENTS if path.parent == ROOT / "docs"} <= reached
    assert ROOT / "AGENTS.md" in reached


def paths(path: Path) -> list[str]:
    """Return the paths of the project that a document names in backquotes."""
    quoted = re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8"))
    found = [word for words in quoted for word in re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*", words)]
    return [word.rstrip(".") for word in found if word not in PLACEHOLDERS]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_backquotes_exist(path):
    assert [word for word in paths(path) if not (ROOT / word).exists()] == []


def test_paths_are_found():
    named = set(paths(ROOT / "AGENTS.md"))
    assert {"eagle3/common/options.py", "tests/support/", "benchmarks/"} <= named
    folders = {f"eagle3/{path.parent.name}/" for path in (ROOT / "eagle3").glob("*/__init__.py")}
    assert folders <= named, "every folder has its line in AGENTS.md"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_by_dotted_name_exist(path):
    for name in set(re.findall(r"\beagle3((?:\.\w+)+)", path.read_text(encoding="utf-8"))) - {".X"}:
        words, source = name.split(".")[1:], ROOT / "eagle3"
        while words and source.is_dir():
            source = source / words[0] if (source / words[0]).is_dir() else source / f"{words[0]}.py"
            words = words[1:]
        assert source.exists(), f"eagle3{name}"
        assert not words or re.search(rf"^(?:def|class) {words[0]}\b", source.read_text(), re.MULTILINE), name


def test_the_causes_of_low_acceptance_are_those_of_the_code():
    rows = re.findall(r"^\| (\d+) \| ([^|]+?)( \(\*engine\*\))? \|", (ROOT / "docs/low-acceptance.md").read_text(),
                      re.MULTILINE)
    code = [(number, " ".join(cause.__doc__.split()), cause in ENGINE_SIDE) for number, cause in enumerate(CAUSES, 1)]
    assert [(int(number), name, bool(engine)) for number, name, engine in rows] == code
