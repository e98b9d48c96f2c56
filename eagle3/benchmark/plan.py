"""What a benchmark measures with what, and everything of it that can be checked before a server is started."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.benchmark import matrix, prompt_sets
from eagle3.benchmark.matrix import Matrix, ServerKind
from eagle3.benchmark.prompt_sets import PromptSet
from eagle3.common import config, files, machine
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkOptions, EngineOptions
from eagle3.common.stage import Stage
from eagle3.engines import capturing, defaults, installed

STALE_ON = ("model", "drafter", "engine")  # inputs that concern every measurement


def options_of_all(options: BenchmarkOptions) -> dict[str, Any]:
    """Return the options that concern every measurement: they and STALE_ON refuse, the axes add."""
    return {name: value for name, value in config.result_options(options).items() if name not in matrix.AXES}


@dataclass
class MeasurementPlan:
    """What is measured with what.

    Attributes:
        sets: prompts to ask, by set. drafter: folder, or None when only an attached server knows it.
        control: the second drafter's folder. matrix: the measurements. inputs: identity of each input by name.
        capture: the vLLM that captures the replies' states for the prediction; None for no prediction.
    """

    sets: dict[str, PromptSet]
    model: Path
    drafter: Path | None
    control: Path | None
    matrix: Matrix
    inputs: dict[str, Any]
    capture: EngineOptions | None = None

    @property
    def first_set(self) -> str:
        """The set that file names leave out."""
        return next(iter(self.sets))

    @property
    def servers(self) -> list[ServerKind]:
        """The servers, in the order in which they are started."""
        return self.matrix.servers

    def content(self, runs: list[dict[str, Any]]) -> str:
        """Return the hash of what the stage holds when it is complete with these measurements."""
        return files.sha256_json([sorted(run["replies"] + run["name"] for run in runs), self.matrix.control,
                                  bool(self.capture)])


def make_plan(options: BenchmarkOptions, stage: Stage, dry: Any = None) -> MeasurementPlan:
    """Check everything that can be checked before a server is started; `dry` is the dry run that this is for."""
    paths = check_choices(options)
    section = options.benchmark
    sets = {name: prompt_sets.read(name, path, options.common.limit) for name, path in paths.items()}
    model, drafter = Path(options.model.path), find_drafter(options, stage)
    control = Path(section.control) if section.control else None
    if control:
        _require_drafter(control, "--control")
    attached = section.baseline_endpoint and section.drafter_endpoint
    version = dry.engine(options.engine, model) if dry else installed.engine_version(options.engine)
    inputs = {
        "model": files.model_identity(model),
        "drafter": files.model_identity(drafter) if drafter and drafter.exists() else "attached",
        "engine": "attached" if attached else (version or "").removeprefix(f"{options.engine.kind} ") or version,
    } | {f"prompts {name}": each.identity for name, each in sets.items()}
    capture = None
    with dry.only_there("the prediction's engine") if dry else contextlib.nullcontext():
        capture = capture_engine(options) if drafter else None
    kinds = matrix.servers(section.draft_tokens, control=bool(control), again=section.baseline_again)
    identity = files.sha256_json(files.model_identity(control)) if control else ""
    identities = {name: each.identity for name, each in sets.items()}
    cells = Matrix(kinds, section.concurrency, section.temperature, identities, section.repeats, identity)
    return MeasurementPlan(sets, model, drafter, control, cells, inputs, capture)


def check_choices(options: BenchmarkOptions) -> dict[str, Path]:
    """Return the files of the prompt sets by name; UsageError unless the options name what to measure."""
    section = options.benchmark
    if not options.model.path:
        raise UsageError("no model", where="--model", fix="name the verifier's folder with --model")
    paths = prompt_sets.named(section.prompts, section.prompt_sets)
    for name, values in (("--draft-tokens", section.draft_tokens), ("--concurrency", section.concurrency)):
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise UsageError("needs different numbers of at least 1", where=name, found=values)
    if not section.temperature or len(set(section.temperature)) < len(section.temperature):
        raise UsageError("needs different numbers", where="--temperature", found=section.temperature)
    if section.drafter_endpoint and len(section.draft_tokens) > 1:
        raise UsageError(
            "a running server has one draft-token count",
            where="--draft-tokens",
            found=section.draft_tokens,
            fix="give the count that the server of --drafter-endpoint was started with",
        )
    if section.control and section.drafter_endpoint:
        raise UsageError("a control is served by an engine that this stage starts", where="--control",
                         fix="leave --drafter-endpoint out, or measure the control on its own, with another --out")
    return paths


def find_drafter(options: BenchmarkOptions, stage: Stage) -> Path | None:
    """Return the drafter's folder: --drafter, else the run's finished export; None if attached and neither."""
    default = stage.run_dir / "05_export" / options.engine.kind
    if options.benchmark.drafter:
        drafter = Path(options.benchmark.drafter)
    elif options.benchmark.drafter_endpoint and not default.exists():
        logger.warning("no drafter folder: the acceptance of the attached server cannot be predicted")
        return None
    else:
        exported = stage.upstream(default.parent, "--drafter", lambda: {"status": "not exported yet"})
        if exported["status"] != "complete":
            return default  # of a dry run, before there is one
        drafter = default
    _require_drafter(drafter, "--drafter")
    return drafter


def _require_drafter(folder: Path, option: str) -> None:
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise PreconditionError(
                f"not an exported drafter: {name} is missing", where=folder, fix=f"name another with {option}"
            )


def capture_engine(options: BenchmarkOptions) -> EngineOptions | None:
    """Return the engine with which acceptance is predicted, None when it is not to be or cannot be.

    It is the one that serves; a vLLM where SGLang cannot, or where --capture-python names one.
    """
    section = options.benchmark
    if not section.predict:
        return None
    reason = "" if section.capture_python and options.engine.kind == "sglang" else capturing.refusal(options.engine)
    if options.engine.kind == "vllm" or not (section.capture_python or reason):
        return options.engine
    engine = dataclasses.replace(options.engine, kind="vllm", python=section.capture_python, args=[], env={})
    if installed.engine_version(engine) is None:
        logger.warning("the acceptance will not be predicted: %sthere is no vLLM to capture states with in %s; name an "
                       "interpreter that has it with --capture-python", f"{reason}, and " * bool(reason),
                       installed.interpreter(engine))
        return None
    return engine


def endpoint_of(options: BenchmarkOptions, kind: ServerKind) -> str | None:
    """Return the address of the running server that stands for a kind, None where one is started."""
    section = options.benchmark
    return section.drafter_endpoint if kind.draft_tokens else section.baseline_endpoint


def server_words(options: BenchmarkOptions, plan: MeasurementPlan, kind: ServerKind
                 ) -> tuple[list[str], dict[str, Any] | None]:
    """Return the server's arguments besides engine.args, and what it is told of the drafter."""
    arguments = [*defaults.no_prefix_caching(options.engine), *options.benchmark.serve_args]
    if options.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    drafter = plan.control if kind.role == matrix.CONTROL else plan.drafter
    return arguments, ({"model": str(drafter), "num_speculative_tokens": kind.draft_tokens} if kind.draft_tokens
                       else None)


def server_gpus(options: BenchmarkOptions) -> list[str]:
    """Return the uuids of the GPUs that a server started here uses, none where there are none."""
    visible = options.engine.env.get("CUDA_VISIBLE_DEVICES")
    return [gpu.uuid for gpu in machine.gpus(visible)[: options.engine.tensor_parallel_size] if gpu.uuid]
