"""Everything that can be wrong before a model is loaded, looked at in seconds: machine, engine, model, drafter.

  python -m eagle3.doctor --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  python -m eagle3.doctor --config configs/kimi-k2.5.yaml --drafter runs/kimi/05_export/vllm --json

Each line is ok, warn or fail, with what was found and what to do. Nothing is changed, no process is touched, no
weights are loaded. Exit code 0, or 3 when a line is fail.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from eagle3 import config, engines, files, log, machine, patches, shards, verifier
from eagle3.errors import PreconditionError, StageError
from eagle3.log import size
from eagle3.options import CommonOptions, EngineOptions, ModelOptions, option

_SHARED_MEMORY = 4 << 30  # bytes; NCCL and the engines' workers pass tensors through it
_OPEN_FILES = 4096
_HELD_SHARE = 0.05  # of a GPU's memory, above which somebody is in the way
_WEIGHTS_SHARE = 0.92  # of the GPUs' memory; the rest is the KV cache's
_SKEW_S = 5.0
_BORN = datetime(2025, 1, 1, tzinfo=UTC).timestamp()  # a clock before that was never set


@dataclass
class DoctorSection:
    """What else to look at."""

    drafter: str | None = option(None, "exported drafter to check against the model", path=True)


@dataclass
class DoctorOptions:
    """Options of the doctor: those of the stages that load a model."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    doctor: DoctorSection = field(default_factory=DoctorSection)


@dataclass(frozen=True)
class Line:
    """One finding: level is ok, warn or fail."""

    level: str
    check: str
    found: str
    fix: str = ""


Check = Callable[[DoctorOptions], Iterator[Line]]


def examine(options: DoctorOptions) -> list[Line]:
    """Return the findings of all checks; what a check raises is a failure of its own."""
    lines: list[Line] = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            lines += [Line(line.level, line.check or name, line.found, line.fix) for line in check(options)]
        except StageError as error:
            fix = str(error.parts.get("fix", ""))
            told = [error.what, *(f"{k} {error.parts[k]}" for k in ("where", "expected", "found") if error.parts[k])]
            lines.append(Line("fail", name, "; ".join(told), fix))
    return lines


# --- the machine ------------------------------------------------------------------------------------------


def check_gpus(options: DoctorOptions) -> Iterator[Line]:
    """GPUs are there, as many as tensor parallelism wants, and nobody else holds them."""
    found, wanted = machine.gpus(), options.engine.tensor_parallel_size
    if not found:
        yield Line("fail" if wanted > 1 else "warn", "", "no NVIDIA GPU is visible",
                   "the engine will run on the CPU" if wanted == 1 else "see nvidia-smi and CUDA_VISIBLE_DEVICES")
        return
    names = ", ".join(sorted({f"{gpu.name} ({size(gpu.total_mib * machine.MIB)})" for gpu in found}))
    enough = len(found) >= wanted
    yield Line("ok" if enough else "fail", "", f"{len(found)} × {names}, driver {found[0].driver}",
               "" if enough else f"tensor_parallel_size is {wanted}")
    held = [gpu for gpu in found if gpu.used_mib > _HELD_SHARE * gpu.total_mib]
    if held:
        yield Line("fail", "gpu memory", "; ".join(f"GPU {gpu.index}: {size(gpu.used_mib * machine.MIB)} in use"
                                                   for gpu in held) + _who(),
                   "wait for them, ask their owner, or choose other GPUs with CUDA_VISIBLE_DEVICES (nothing is killed)")


def _who() -> str:
    known = [f"pid {h.pid} of {h.user}, {size(h.used_mib * machine.MIB)}: {h.command}" for h in machine.holders()]
    return " by " + "; ".join(known) if known else " by processes that cannot be seen from here (another container?)"


def check_architecture(options: DoctorOptions) -> Iterator[Line]:
    """The engine's torch has code for these GPUs."""
    found = machine.gpus()
    if not found:
        return
    compiled = engines.compiled_architectures(options.engine)
    for major, minor in sorted({gpu.capability for gpu in found}):
        fits = any(_runs(name, major, minor) for name in compiled)
        yield Line("ok" if fits else "fail", "", f"compute capability {major}.{minor}; the engine's torch has code for "
                   + (", ".join(compiled) or "CPUs only"), "" if fits else "install a torch built for this GPU")
        if major == 12:
            yield Line("warn", "blackwell sm120", "101,376 bytes of shared memory a block: kernels tuned for "
                       "data-centre GPUs can fail at long sequences or head sizes above 128",
                       "if one does, use smaller blocks or another attention backend in engine.args")
    if len(found) > 2 and not machine.has_nvlink():
        yield Line("warn", "links", f"{len(found)} GPUs without NVLink: vLLM has no custom all-reduce there",
                   "expect less speed-up from tensor parallelism; pipeline parallelism does not work with EAGLE-3")


def _runs(compiled: str, major: int, minor: int) -> bool:
    """Say whether code named sm_90 or compute_90 runs: binaries within a major version, PTX on anything newer."""
    kind, _, digits = compiled.rstrip("af").partition("_")
    if not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


def check_resources(options: DoctorOptions) -> Iterator[Line]:
    """Disk, shared memory, open files, clock."""
    run_dir = Path(options.common.run_dir or ".")
    free, shared = machine.free_disk(run_dir), machine.shared_memory()
    yield Line("ok", "disk", f"{size(free)} free for {run_dir}; each stage's --dry-run says what it needs")
    many = options.engine.tensor_parallel_size > 1
    small = many and shared < _SHARED_MEMORY
    yield Line("fail" if small else "ok", "shared memory", f"/dev/shm has {size(shared)}",
               "start the container with --shm-size 16g or --ipc host" if small else "")
    limit = machine.open_file_limit()
    few = 0 <= limit < _OPEN_FILES
    yield Line("warn" if few else "ok", "open files", f"limit {limit:,}" if limit >= 0 else "no limit",
               "ulimit -n 65536 before starting" if few else "")
    now, skew = datetime.now(UTC), machine.clock_skew(run_dir)
    if now.timestamp() < _BORN:
        yield Line("fail", "clock", f"it is said to be {now:%Y-%m-%d}", "set it: certificates and caches go by it")
    elif abs(skew) > _SKEW_S:
        yield Line("warn", "clock", f"the disk's clock is {skew:+.0f} s off", "run NTP on the file server")
    else:
        yield Line("ok", "clock", f"{now:%Y-%m-%d %H:%M} UTC")


# --- engine and model -------------------------------------------------------------------------------------


def check_engine(options: DoctorOptions) -> Iterator[Line]:
    """The engine is installed where it is said to be, and new enough for this verifier."""
    model = Path(options.model.path) if options.model.path else None
    version = engines.check(options.engine, model)
    yield Line("ok", "", f"{options.engine.kind} {version} in {engines.interpreter(options.engine)}")
    for patch in patches.state(engines.interpreter(options.engine), options.engine.kind):
        if patch["state"] not in ("applied", "not needed"):
            yield Line("fail" if patch["state"] == "unknown" else "warn", f"patch {patch['name']}",
                       f"{patch['state']}: {patch['what']}" + (f"; {patch['note']}" if patch["note"] else ""),
                       f"python -m eagle3.patches apply --engine {options.engine.kind} "
                       f"--python {engines.interpreter(options.engine)}")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)]
    if model and not model.is_dir():
        also = f", and {offline[0]} is set" if offline else ""
        yield Line("fail", "model folder", f"{model} is not a folder{also}",
                   "give the folder with --model; models are not downloaded here")


def check_model(options: DoctorOptions) -> Iterator[Line]:
    """All files of the verifier are there and whole, and the weights fit the GPUs."""
    if not options.model.path:
        yield Line("warn", "", "no model is named", "give it with --model or --config")
        return
    facts = verifier.read(Path(options.model.path))
    layers = facts.layers(options.model.layers)
    yield Line("ok", "", f"{facts.architecture}: {facts.num_layers} layers, hidden {facts.hidden_size}, vocabulary "
               f"{facts.vocab_size:,}; captured layers {layers}")
    indexed = (facts.folder / "model.safetensors.index.json").exists()
    shards = sorted(set(verifier.weight_map(facts.folder).values())) if indexed else ["model.safetensors"]
    broken = [f"{name}: {problem}" for name in shards if (problem := _shard_problem(facts.folder / name))]
    total = sum((facts.folder / name).stat().st_size for name in shards if (facts.folder / name).exists())
    yield Line("fail" if broken else "ok", "weights", "; ".join(broken[:4]) if broken else
               f"{len(shards)} files, {size(total)}, each as long as its header says",
               "download these files again" if broken else "")
    memory = sum(gpu.total_mib for gpu in machine.gpus()[: options.engine.tensor_parallel_size]) * machine.MIB
    if memory and total > _WEIGHTS_SHARE * memory:
        yield Line("fail", "gpu memory", f"{size(total)} of weights for {size(memory)} of GPU memory",
                   "raise engine.tensor_parallel_size")


def _shard_problem(path: Path) -> str:
    """Return what is wrong with a safetensors file by its header and length, "" when nothing is."""
    try:
        shards.read_header(path)
    except StageError as error:
        return " ".join([error.what, str(error.parts["found"])]).strip()
    return ""


def check_tokenizer(options: DoctorOptions) -> Iterator[Line]:
    """The tokenizer loads and has a template; which token ends a turn, which enclose reasoning."""
    if not options.model.path:
        return
    from eagle3.chat import load_chat

    chat = load_chat(Path(options.model.path), trust_remote_code=options.model.trust_remote_code)
    tags = chat.think_tags if chat.closing_id is not None else None
    yield Line("ok", "", f"a turn ends with {chat.decode([chat.end_id])!r} ({chat.end_id}); reasoning "
               + (f"is enclosed in {tags[0]} {tags[1]} ({chat.closing_id})" if tags else "has no tokens of its own"))


# --- the drafter ------------------------------------------------------------------------------------------


def check_drafter(options: DoctorOptions) -> Iterator[Line]:
    """The exported drafter belongs to this verifier and says what engines need."""
    if not options.doctor.drafter:
        return
    from eagle3 import killers
    from eagle3.checkpoint import Export

    folder = Path(options.doctor.drafter)
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    export = Export(
        folder=folder,
        raw=files.read_json(folder / "config.json", fix="name an exported drafter with --drafter"),
        tensors=shards.read(folder),
        verifier=facts,
        engine=options.engine.kind,
        version=engines.engine_version(options.engine),
        serving_length=facts.max_positions,
        trained_ids=facts.layers(options.model.layers)[:-1],
    )
    for finding in killers.run(export, values=False):
        told = finding.found or finding.reason
        expected = f"; expected {finding.expected}" if finding.expected and finding.status != "ok" else ""
        yield Line(finding.status, f"drafter {finding.name}", told + expected, finding.fix)
    yield from _compile_cache(folder)


def _compile_cache(drafter: Path) -> Iterator[Line]:
    root = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm")) / "torch_compile_cache"
    if not root.is_dir():
        return
    newest = max((entry.stat().st_mtime for entry in root.iterdir()), default=0.0)
    if newest and newest < (drafter / "config.json").stat().st_mtime:
        yield Line("warn", "compile cache", f"{root} is older than the drafter's config.json; vLLM 0.16 does not see "
                   "that auxiliary layer ids have changed", f"rm -r {root}, or set VLLM_DISABLE_COMPILE_CACHE=1")


CHECKS: list[Check] = [check_gpus, check_architecture, check_resources, check_engine, check_model, check_tokenizer,
                       check_drafter]


def main(arguments: list[str]) -> int:
    """Examine what the command line names, print, and return the exit code."""
    log.set_up(None, "info")
    try:
        options = config.parse(DoctorOptions, arguments, __doc__ or "")
        lines = examine(options)
    except StageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.common.json:
        print(json.dumps({"schema_version": 1, "lines": [asdict(line) for line in lines]}, indent=2))
    else:
        for line in lines:
            fix = f"\n{'':<6}→ {line.fix}" if line.fix and line.level != "ok" else ""
            print(f"{line.level:<5} {line.check}: {line.found}{fix}")
    return PreconditionError.exit_code if any(line.level == "fail" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
