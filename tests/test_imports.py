"""Who may import what, and that a question such as --help never waits for torch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.stage import STAGES

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {path.stem: path for path in sorted((ROOT / "eagle3").glob("*.py")) if path.stem != "__init__"}
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("0*.py"))}
FOUNDATION = {"errors", "options", "config", "script", "stage", "interrupt", "lock", "provenance", "log", "files",
              "processes", "guard", "workers"}
ENGINES = {"vllm", "sglang"}
HEAVY = {"torch", "transformers", "numpy", "vllm", "sglang", "speculators", "openai", "datasets", "safetensors"}


def imports(path):
    """Return [(module, not run on import)] of a file; `from eagle3 import log` counts as eagle3.log."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module
            names = [f"eagle3.{alias.name}" for alias in node.names] if module == "eagle3" else [module]
            found.extend((name, inside) for name in names)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = inside or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")  # never run
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def top(module):
    return module.split(".")[0]


def room_of(module):
    return module.split(".")[1] if module.startswith("eagle3.") else None


@pytest.mark.parametrize("room", sorted(FOUNDATION))
def test_the_foundation_stands_on_the_standard_library_and_yaml(room):
    for module, inside in imports(ROOMS[room]):
        allowed = top(module) in sys.stdlib_module_names or module == "yaml" or (module == "tqdm" and inside)
        assert allowed or room_of(module) in FOUNDATION, f"{room} imports {module}"


@pytest.mark.parametrize("path", [*ROOMS.values(), *SCRIPTS.values()], ids=lambda path: path.stem)
def test_engines_are_imported_only_where_they_live_and_only_in_functions(path):
    for module, inside in imports(path):
        if top(module) in ENGINES:
            assert path.stem in ("capture", "engines"), f"{path.name} imports {module}"
            assert inside, f"{path.name} imports {module} at its top"


def dynamic_imports(path):
    """Return the literal names given to import_module and its like; a script's name is no identifier."""
    loaders = ("import_module", "__import__", "run_path", "run_module")
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).split(".")[-1] in loaders and call.args]
    return [str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)]


def test_no_script_is_imported():
    stems = set(STAGES) | set(SCRIPTS)
    for path in [*ROOMS.values(), *SCRIPTS.values()]:
        named = [module for module, _ in imports(path)] + dynamic_imports(path)
        assert not [name for name in named if Path(name).name.removesuffix(".py") in stems], path.name


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=lambda path: path.stem)
def test_a_script_starts_light(path):
    for module, inside in imports(path):
        assert inside or is_light(module), f"{path.name} imports {module} at its top"


def is_light(module):
    """Say whether importing it loads nothing but the standard library, YAML and rooms of the same kind."""
    if room_of(module) in ROOMS:
        return all(inside or is_light(name) for name, inside in imports(ROOMS[room_of(module)]))
    return top(module) in sys.stdlib_module_names or module == "yaml"


def test_every_script_is_a_stage():
    assert set(SCRIPTS) <= set(STAGES)


HELPS = {stem: [str(path)] for stem, path in SCRIPTS.items()}
HELPS |= {f"eagle3.{room}": ["-m", f"eagle3.{room}"] for room in ("status", "embedded", "doctor", "patches", "report",
                                                                        "datareport")}


@pytest.mark.parametrize("command", HELPS.values(), ids=HELPS)
def test_help_answers_within_a_second_without_torch(command):
    seconds = []
    for _ in range(3):  # processor time: other work on the machine does not count
        process = subprocess.Popen([sys.executable, "-X", "importtime", *command, "--help"], cwd=ROOT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = process.communicate()
        assert process.returncode == 0, errors[-2000:]
        imported = {line.rpartition("|")[2].strip() for line in errors.splitlines() if line.startswith("import time:")}
        assert not imported & HEAVY
        assert "usage:" in output
        seconds.append(cpu_seconds([sys.executable, *command, "--help"]))
        if seconds[-1] < 0.5:
            break
    assert min(seconds) < 1.0


def cpu_seconds(command):
    pid = os.posix_spawn(command[0], command, os.environ | {"PYTHONPATH": str(ROOT)},
                         file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime
