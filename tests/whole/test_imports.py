"""Who may import what, and that a question such as --help never waits for torch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import ROOT

from eagle3.common.stage import STAGES

PACKAGE = ROOT / "eagle3"
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))
           if path.name != "__init__.py"}
COMMANDS = sorted(path.stem for path in PACKAGE.glob("*.py") if path.name != "__init__.py")
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("0*.py"))}
# What a folder may import besides itself, in the order in which they stand on each other. A command may import all.
BELOW = {
    "common": "",
    "engines": "common",
    "drafter": "common",
    "traces": "common engines",
    "states": "common engines drafter",
    "training": "common drafter states",
    "benchmark": "common engines drafter traces states training",
    "checks": "common engines drafter traces benchmark",
    "dryrun": "common engines drafter traces states training benchmark checks",
}
ENGINES = {"vllm", "sglang"}
HEAVY = {"torch", "transformers", "numpy", "vllm", "sglang", "speculators", "openai", "datasets", "safetensors"}


def imports(path):
    """Return [(module, not run on import)] of a file; `from eagle3 import log` counts as eagle3.common.log."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            each = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend((name if name in MODULES else node.module, inside) for name in each)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = inside or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")  # never run
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def top(module):
    return module.split(".")[0]


def folder_of(module):
    """Return the folder of a module of the package; "" for a command, None for anything else."""
    words = module.split(".")
    return None if words[0] != "eagle3" else words[1] if len(words) > 2 else ""


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_imports_only_what_it_stands_on(folder):
    for path in (PACKAGE / folder).glob("*.py"):
        for module, _ in imports(path):
            assert folder_of(module) in (None, folder, *BELOW[folder].split()), f"{path.relative_to(ROOT)}: {module}"


def test_every_folder_has_its_place_and_what_stands_above_them_is_a_command():
    assert sorted(BELOW) == sorted(path.name for path in PACKAGE.iterdir() if any(path.glob("*.py")))
    for name in COMMANDS:
        assert 'if __name__ == "__main__":' in MODULES[f"eagle3.{name}"].read_text(encoding="utf-8"), name


@pytest.mark.parametrize("path", sorted((PACKAGE / "common").glob("*.py")), ids=lambda path: path.stem)
def test_what_all_share_needs_the_standard_library_and_yaml_alone(path):
    for module, inside in imports(path):
        allowed = top(module) in sys.stdlib_module_names or module == "yaml" or (module == "tqdm" and inside)
        assert allowed or folder_of(module) == "common", f"{path.stem} imports {module}"


def test_no_two_modules_import_each_other():
    graph = {name: {module for module, _ in imports(path) if module in MODULES} for name, path in MODULES.items()}
    while leaves := [name for name, needed in graph.items() if not needed & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"in a circle or above one: {sorted(graph)}"


@pytest.mark.parametrize("path", [*MODULES.values(), *SCRIPTS.values()], ids=lambda path: path.stem)
def test_engines_are_imported_only_where_they_live_and_only_in_functions(path):
    for module, inside in imports(path):
        if top(module) in ENGINES:
            assert path.parent.name == "engines" or path.stem in (
                "engine_side", "vllm_worker", "sglang_side", "sglang_hooks"), f"{path}: {module}"
            # vLLM's worker class is derived from: that module is imported by vLLM alone, inside its processes.
            assert inside or path.stem == "vllm_worker", f"{path.name} imports {module} at its top"


def test_nobody_but_vllm_imports_its_worker():
    for path in [*MODULES.values(), *SCRIPTS.values()]:
        assert not [module for module, _ in imports(path) if module.endswith("vllm_worker")], path


def dynamic_imports(path):
    """Return the literal names given to import_module and its like; a script's name is no identifier."""
    loaders = ("import_module", "__import__", "run_path", "run_module")
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).split(".")[-1] in loaders and call.args]
    return [str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)]


def test_no_script_is_imported():
    stems = set(STAGES) | set(SCRIPTS)
    for path in [*MODULES.values(), *SCRIPTS.values()]:
        named = [module for module, _ in imports(path)] + dynamic_imports(path)
        assert not [name for name in named if Path(name).name.removesuffix(".py") in stems], path.name


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=lambda path: path.stem)
def test_a_script_starts_light(path):
    for module, inside in imports(path):
        assert inside or is_light(module), f"{path.name} imports {module} at its top"


def is_light(module):
    """Say whether importing it loads nothing but the standard library, YAML and rooms of the same kind."""
    if module in MODULES:
        return all(inside or is_light(name) for name, inside in imports(MODULES[module]))
    if module.startswith("eagle3."):
        return True  # the __init__ of a folder: a line of words
    return top(module) in sys.stdlib_module_names or module == "yaml"


def test_every_script_is_a_stage():
    assert set(SCRIPTS) <= set(STAGES)


HELPS = {stem: [str(path)] for stem, path in SCRIPTS.items()}
HELPS |= {f"eagle3.{name}": ["-m", f"eagle3.{name}"] for name in COMMANDS}


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
