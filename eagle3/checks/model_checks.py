"""Checks of engine and verifier: version, patches and known faults, files of the model, tokenizer, offline settings."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from eagle3.checks.subject import Subject
from eagle3.common import machine, tensor_files
from eagle3.common.errors import PreconditionError, StageError
from eagle3.common.findings import FAIL, OK, WARN, Finding, said
from eagle3.common.log import size
from eagle3.drafter import verifier
from eagle3.engines import capturing, installed, patch_files, patching

_WEIGHTS_SHARE = 0.92  # of the GPUs' memory; the rest is the KV cache's
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_ROOT = Path(__file__).resolve().parents[2]
# A process of its own that does not find torch: tokenizers need none, and importing it takes longer than all else.
_READ_TOKENIZER = """
import importlib.util, json, pathlib, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
from eagle3.common import errors
from eagle3.traces import chat
try:
    found = chat.load_chat(pathlib.Path(sys.argv[1]), trust_remote_code=sys.argv[2] == "True")
    tags = [*found.think_tags, found.closing_id] if found.closing_id is not None else None
    print(json.dumps({"end": [found.decode([found.end_id]), found.end_id], "tags": tags}))
except errors.StageError as error:
    print(json.dumps({"what": error.what} | {name: str(part) for name, part in error.parts.items()}))
"""


def check_engine(subject: Subject) -> Iterator[Finding]:
    """The engine is installed where it is said to be, and new enough, or patched, for what is asked of it."""
    engine, family = subject.engine, subject.folder is not None and installed.is_deepseek_family(subject.folder)
    version = installed.check(engine, subject.folder if subject.speculates else None)
    yield said(OK, "", f"{engine.kind} {version} in {installed.interpreter(engine)}")
    if subject.captures and (reason := capturing.refusal(engine)):  # the doctor's engine may be there to serve alone
        yield said(WARN if subject.speculates else FAIL, "capture", reason,
                   "stage 02 with another engine (--engine, --engine-python), or without that argument")
    if not subject.speculates:
        return
    for patch in installed.patch_states(engine):
        if patch.state not in patching.GOOD:
            note = f"; {patch.note}" if patch.note else ""
            yield said(WARN, f"patch {patch.name}", f"{patch.state}: {patch.what}{note}",
                       installed.apply_command(engine))
    for gate in patch_files.gates(engine.kind, version):
        if family or gate["verifier"].startswith("every"):
            yield said(WARN, f"{engine.kind} {version}", gate["lacks"], gate["fix"])


def check_offline(subject: Subject) -> Iterator[Finding]:
    """Whether anything may ask a model hub; here nothing needs to."""
    given = {name: subject.environment[name] for name in _OFFLINE if name in subject.environment}
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    if any(value.lower() in ("0", "false", "no", "off", "") for value in given.values()):
        yield said(WARN, "", f"{told}: the engine may ask a model hub, and wait for it where there is no network",
                   "unset it; engines are then started offline")
        return
    yield said(OK, "", f"{told or 'nothing is set'}; engines are started offline")


def check_model(subject: Subject) -> Iterator[Finding]:
    """All files of the verifier are there and whole, and the weights fit the memory."""
    folder = subject.folder
    if folder is None:
        yield said(WARN, "", "no model is named", "give it with --model or --config")
        return
    if not folder.is_dir():
        set_to = [name for name in _OFFLINE if os.environ.get(name)]
        raise PreconditionError(f"{folder} is not a folder" + (f", and {set_to[0]} is set" if set_to else ""),
                                fix="give the folder with --model; models are not downloaded here")
    facts = verifier.read(folder)
    layers = facts.layers(subject.model.layers)
    yield said(OK, "", f"{facts.architecture}: {facts.num_layers} layers, hidden {facts.hidden_size}, vocabulary "
               f"{facts.vocab_size:,}; captured layers {layers}")
    problems, count, total = _weights(folder)
    yield said(FAIL if problems else OK, "weights", "; ".join(problems[:4]) if problems else
               f"{count} files, {size(total)}, each as long as its header says",
               "download these files again" if problems else "")
    if not problems:
        yield from check_teacher(subject)
    yield from _room_for(total, subject)


def check_teacher(subject: Subject) -> Iterator[Finding]:
    """Embedding, final norm and head of the verifier are there as plain numbers of the right shapes, in one decoder."""
    if subject.folder is None or not subject.folder.is_dir():
        return
    facts = verifier.read(subject.folder)
    entries = verifier.shared_entries(facts)
    names = verifier.shared_names(verifier.weight_map(subject.folder), facts)
    tied = ", which is the embedding" * (names["lm_head"] == names["embed_tokens"])
    how = f"; {facts.output}" * bool(str(facts.output))
    yield said(OK, "teacher", f"{names['norm']}; {names['lm_head']} {list(entries['lm_head'].shape)}{tied}{how}")


def _weights(folder: Path) -> tuple[list[str], int, int]:
    """Return (what is wrong, number of files, bytes) of a model's weights, from index, headers and lengths."""
    names = tensor_files.weight_map(folder) if (folder / tensor_files.INDEX).exists() else None
    problems, total = [], 0
    every = sorted(set(names.values())) if names else [tensor_files.SINGLE]
    for shard in every:
        path = folder / shard
        total += path.stat().st_size if path.exists() else 0
        try:
            found = tensor_files.read_header(path)
        except StageError as error:
            problems.append(" ".join([f"{shard}: {error.what}", str(error.parts["found"])]).strip())
            continue
        missing = {name for name, where in (names or {}).items() if where == shard} - found.keys()
        if missing:
            problems.append(f"{shard}: lacks {len(missing)} tensors of the index, such as {min(missing)}")
    return problems, len(every), total


def _room_for(total: int, subject: Subject) -> Iterator[Finding]:
    used = subject.gpus[: subject.engine.tensor_parallel_size]
    memory = sum(gpu.total_mib for gpu in used) * machine.MIB
    if memory and total > _WEIGHTS_SHARE * memory:
        yield said(FAIL, "gpu memory", f"{size(total)} of weights for {size(memory)} of GPU memory",
                   "raise engine.tensor_parallel_size")
    elif not used and total > machine.memory():
        yield said(FAIL, "memory", f"{size(total)} of weights, no GPU, and {size(machine.memory())} of memory",
                   "run it on a machine with GPUs")


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """The tokenizer loads and has a template; which token ends a turn, which enclose reasoning."""
    if subject.folder is None or not subject.folder.is_dir():
        return
    command = [sys.executable, "-c", _READ_TOKENIZER, str(subject.folder), str(subject.model.trust_remote_code)]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    if result.returncode != 0:
        raise PreconditionError("the tokenizer could not be read", where=subject.folder,
                                found=result.stderr.strip()[-500:])
    told = json.loads(result.stdout.strip().splitlines()[-1])
    if "what" in told:
        raise PreconditionError(told.pop("what"), **told)
    tags = told["tags"]
    yield said(OK, "", f"a turn ends with {told['end'][0]!r} ({told['end'][1]}); reasoning "
               + (f"is enclosed in {tags[0]} {tags[1]} ({tags[2]})" if tags else "has no tokens of its own"))
