"""Shows on a real engine that `python -m eagle3.doctor --explain` names what was done to a good drafter.

    python tests/manual/seeded_faults.py
    python tests/manual/seeded_faults.py --run runs/mine --config configs/mine.yaml --work /big/w --faults wrong-ids

Not part of the default tests: ten servers are started, one after another (two minutes each on two CPU cores). Takes a
finished run, and for each fault a copy of what the explanation reads (large files are hard links), does the damage
there, measures a few prompts with 06_benchmark.py, its own check of the drafter switched off, asks the doctor why
acceptance is low, and asks the static checks about the same files. The verifier alone is not measured: a stub answers
in its place. What was measured stays in --work; a second run explains it anew without starting a server.

Exit code 1 when a fault that costs acceptance is not named first, for more than one fault, or when one that costs
nothing on this engine passes the static checks.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.stub_server import Stub  # noqa: E402

sys.path.insert(0, str(ROOT))

IDS = "eagle_aux_hidden_state_layer_ids"
KEPT = ("manifest.json", "traces.jsonl", "config.json", "trainer.json", "model.safetensors", "checksums.json",
        "vocab_mapping.safetensors")  # fmt: skip
COSTS = 0.05  # of the acceptance length; less is no effect
MEASURED = "measured"  # marks a folder whose fault has been measured
BARE_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


# --- the faults: each changes the served drafter's folder, or the folder of the verifier that is served ----------


def nothing(drafter, model):
    pass


def wrong_ids(drafter, model):
    layers = read(model / "config.json")["num_hidden_layers"]
    ids = [2, layers // 3, layers // 2]  # the deepest counts most, and is often the engines' default
    change(drafter, lambda config: config | {IDS: ids, "eagle_config": config["eagle_config"] | {IDS: ids}})


def random_embeddings(drafter, model):
    import torch

    shape = [read(drafter / "config.json")[name] for name in ("vocab_size", "hidden_size")]
    table = (0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).bfloat16()
    rewrite(drafter, lambda tensors: tensors | {"embed_tokens.weight": table})


def missing_lm_head(drafter, model):
    rewrite(drafter, lambda tensors: {name: value for name, value in tensors.items() if name != "lm_head.weight"})


def shifted_d2t(drafter, model):
    def shift(tensors):
        tensors["d2t"][:-1] += 1  # not the last, which would leave the vocabulary
        return tensors

    rewrite(drafter, shift)


def wrong_rope(drafter, model):
    change(drafter, lambda config: config | {
        "rope_theta": 100.0, "rope_parameters": config["rope_parameters"] | {"rope_theta": 100.0}})


def wrong_norm_flag(drafter, model):
    change(drafter, lambda config: config | {"norm_before_residual": True})


def small_max_positions(drafter, model):
    change(drafter, lambda config: config | {"max_position_embeddings": 64})


def foreign_tokenizer(drafter, model):
    path = model / "tokenizer.json"
    content = read(path)
    special = {token["id"] for token in content["added_tokens"]}
    plain = {token: number for token, number in content["model"]["vocab"].items() if number not in special}
    ids = sorted(plain.values())
    moved = dict(zip(ids, ids[1000:] + ids[:1000], strict=True))
    content["model"]["vocab"] |= {token: moved[number] for token, number in plain.items()}
    write(path, json.dumps(content, ensure_ascii=False))


def off_template(drafter, model):
    write(model / "chat_template.jinja", BARE_TEMPLATE)


# Fault: what does it, the number of the cause that is to be named, a word of the evidence that has to come first.
FAULTS = {
    "none": (nothing, None, ""),
    "wrong-ids": (wrong_ids, 1, "trained were"),
    "random-embeddings": (random_embeddings, 2, "embedding"),
    "missing-lm-head": (missing_lm_head, 7, "lm_head.weight"),
    "shifted-d2t": (shifted_d2t, 7, "d2t"),
    "wrong-rope": (wrong_rope, 5, "theta"),
    "wrong-norm-flag": (wrong_norm_flag, 6, "norm_before_residual"),
    "small-max-positions": (small_max_positions, 5, "max_position_embeddings"),
    "foreign-tokenizer": (foreign_tokenizer, 9, "tokenizer"),
    "off-template": (off_template, 9, "template"),
}


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, text):
    """Replace a file that may be a hard link to the original."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def change(folder, function):
    write(folder / "config.json", json.dumps(function(read(folder / "config.json")), indent=2))


def rewrite(folder, function):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = function({name: value.clone() for name, value in load_file(path).items()})
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


# --- one fault on the engine ------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "runs/smollm2-135m", help="finished run of a good drafter")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/smollm2-135m.yaml", help="its configuration")
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m", help="its verifier")
    parser.add_argument("--work", type=Path, help="folder for copies and outcomes (default: a temporary one)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    parser.add_argument("--limit", type=int, default=12, help="prompts (default: 12)")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest reply (default: 48)")
    parser.add_argument("--draft-tokens", type=int, default=3, help="tokens drafted a round (default: 3)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).absolute()
        for name in given.faults:
            if not (work / name / MEASURED).exists():
                measure(given, work / name, name)
        outcomes = {name: judge(given, work / name, name) for name in given.faults}
    print(table(outcomes))
    sys.exit(verdict(outcomes))


def measure(given, folder, name):
    """Seed a fault in a fresh copy of the run and of the verifier, and measure it."""
    shutil.rmtree(folder, ignore_errors=True)
    run, model = places(given, folder)
    copy(given.run, run, lambda path: path.name in KEPT and path.relative_to(given.run).parts[0] not in
         ("06_bench", "logs"))
    copy(given.model, model, lambda path: True)
    FAULTS[name][0](run / "05_export" / "vllm", model)
    with Stub({"model": model.name}) as stub:
        call("06_benchmark.py", *which(given, folder), "--limit", given.limit, "--max-tokens", given.max_tokens,
             "--draft-tokens", given.draft_tokens, "--concurrency", given.limit, "--baseline-endpoint", stub.url,
             "--no-preflight", log=folder / "benchmark.log")
    if not (run / "06_bench" / "manifest.json").exists():
        raise SystemExit(f"{name}: stage 06 did not get as far as a server, see {folder / 'benchmark.log'}")
    (folder / MEASURED).touch()


def judge(given, folder, name):
    """Ask for an explanation and the static checks; return what came of it."""
    run, model = places(given, folder)
    told = call("-m", "eagle3.doctor", "--explain", run, "--model", model, "--json", log=folder / "explain.log")
    if not told.stdout:
        raise SystemExit(f"{name}: no explanation\n{told.stderr}")
    answer, (_, number, word) = json.loads(told.stdout), FAULTS[name]
    first = answer["causes"][0] if answer["causes"][0]["status"] == "found" else None
    right = bool(first and first["number"] == number and word in first["evidence"][0]["text"])
    return {"figures": answer["figures"], "low": answer["low"], "right": right if number else first is None,
            "cause": f"{first['number']} {first['name']}" if first else "none",
            "static": static_checks(which(given, folder), run / "05_export" / "vllm", folder)}


def places(given, folder):
    """Return the copies of run and verifier; servers are known by their folder's name."""
    return folder / given.run.name, folder / "model" / given.model.name


def which(given, folder):
    run, model = places(given, folder)
    return ["--config", given.config, "--run-dir", run, "--model", model]


def static_checks(where, drafter, folder):
    """Return {check: whether it fails} of everything that looks at the files before a server is started."""
    exported = call("05_fix_weight_keys.py", *where, "--checkpoint", drafter, "--check", log=folder / "check.log")
    doctor = call("-m", "eagle3.doctor", *where, "--drafter", drafter, "--json", log=folder / "doctor.log")
    lines = json.loads(doctor.stdout)["lines"] if doctor.stdout else []
    preflight = call("06_benchmark.py", *where, "--dry-run", "--out", folder / "dry", log=folder / "preflight.log")
    return {"05 --check": exported.returncode != 0, "06": preflight.returncode != 0,
            "doctor": any(line["level"] == "fail" and line["check"].startswith("drafter") for line in lines)}


def copy(source, target, wanted):
    """Copy a tree with hard links where the file system allows them; links to folders stay links."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_symlink() and path.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(os.readlink(path))
        elif path.is_file() and wanted(path) and not any(parent.is_symlink() for parent in path.parents):
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:  # another file system
                shutil.copy2(path, place)


def call(*words, log):
    """Run a command of the project in its root, keep what it said, and return the finished process."""
    process = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    log.write_text(process.stdout + process.stderr)
    return process


# --- the outcome ------------------------------------------------------------------------------------------


def falls(outcome, good):
    """Return by how much the acceptance length lies below the good drafter's on the same prompts; None if unknown."""
    measured, expected = (each["figures"].get("measured") for each in (outcome, good or {"figures": {}}))
    nothing_accepted = {"length": 1.0}  # by an engine that refuses
    return expected["length"] - (measured or nothing_accepted)["length"] if expected else None


def table(outcomes):
    """Return a row a fault: lengths, first cause named, whether it is right, which static checks fail."""
    rows = [("fault", "measured", "predicted", "against good", "called low", "first cause", "right",
             "static checks that fail")]
    for name, outcome in outcomes.items():
        lengths = [f"{outcome['figures'][key]['length']:.3f}" if key in outcome["figures"] else "–"
                   for key in ("measured", "predicted")]
        fall = falls(outcome, outcomes.get("none"))
        failing = ", ".join(check for check, fails in outcome["static"].items() if fails) or "none"
        rows.append((name, *lengths, "–" if fall is None else f"{-fall:+.3f}", "yes" if outcome["low"] else "no",
                     outcome["cause"], "yes" if outcome["right"] else "NO", failing))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def verdict(outcomes):
    """Return the exit code, and say why when it is not 0."""
    good, costly = outcomes.get("none"), {}
    for name, outcome in outcomes.items():
        fall = falls(outcome, good)
        costly[name] = outcome["low"] if fall is None else fall > COSTS
    faults = [name for name in outcomes if name != "none"]
    misnamed = [name for name in faults if costly[name] and not outcomes[name]["right"]]
    hidden = [name for name in faults if not costly[name] and not any(outcomes[name]["static"].values())]
    wrong = ["the good drafter is called faulty"] * bool(good and (good["low"] or not good["right"]))
    wrong += [f"named wrongly: {', '.join(misnamed)}"] * (len(misnamed) > 1)
    wrong += [f"without effect, and passed by every static check: {', '.join(hidden)}"] * bool(hidden)
    print("\n".join(wrong) or "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
