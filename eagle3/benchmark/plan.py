"""What a benchmark measures with what, and everything of it that can be checked before a server is started."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.benchmark.measurements import BASELINE
from eagle3.common import files
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkOptions, EngineOptions
from eagle3.common.stage import Stage
from eagle3.engines import defaults, installed
from eagle3.traces import prompts
from eagle3.traces.prompts import Prompt


@dataclass
class MeasurementPlan:
    """What is measured with what.

    Attributes:
        prompts: to ask. drafter: folder, or None when only an attached server knows it.
        counts: draft-token counts, BASELINE first. inputs: identity of each input by name.
        capture: the vLLM that captures the replies' states for the prediction; None for no prediction.
    """

    prompts: list[Prompt]
    model: Path
    drafter: Path | None
    counts: list[int]
    inputs: dict[str, Any]
    capture: EngineOptions | None = None


def make_plan(options: BenchmarkOptions, stage: Stage, dry: Any = None) -> MeasurementPlan:
    """Check everything that can be checked before a server is started; `dry` is the dry run that this is for."""
    check_choices(options)
    section = options.benchmark
    asked = prompts.read_prompts(Path(section.prompts), options.common.limit)
    model, drafter = Path(options.model.path), find_drafter(options, stage)
    attached = section.baseline_endpoint and section.drafter_endpoint
    version = dry.engine(options.engine, model) if dry else installed.engine_version(options.engine)
    inputs = {
        "model": files.model_identity(model),
        "drafter": files.model_identity(drafter) if drafter and drafter.exists() else "attached",
        "prompts": files.sha256_json([[prompt.id, prompt.messages, prompt.tools] for prompt in asked]),
        "engine": "attached" if attached else version,
    }
    capture = None
    with dry.only_there("the prediction's engine") if dry else contextlib.nullcontext():
        capture = capture_engine(options) if drafter else None
    return MeasurementPlan(asked, model, drafter, [BASELINE, *section.draft_tokens], inputs, capture)


def check_choices(options: BenchmarkOptions) -> None:
    """Raise UsageError unless the options name what to measure."""
    section = options.benchmark
    if not options.model.path:
        raise UsageError("no model", where="--model", fix="name the verifier's folder with --model")
    if not section.prompts:
        raise UsageError("no prompts", where="--prompts", fix="name a file of held-out prompts with --prompts")
    for name, values in (("--draft-tokens", section.draft_tokens), ("--concurrency", section.concurrency)):
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise UsageError("needs different numbers of at least 1", where=name, found=values)
    if section.drafter_endpoint and len(section.draft_tokens) > 1:
        raise UsageError(
            "a running server has one draft-token count",
            where="--draft-tokens",
            found=section.draft_tokens,
            fix="give the count that the server of --drafter-endpoint was started with",
        )


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
    for name in ("config.json", "model.safetensors"):
        if not (drafter / name).is_file():
            raise PreconditionError(
                f"not an exported drafter: {name} is missing", where=drafter, fix="name another with --drafter"
            )
    return drafter


def capture_engine(options: BenchmarkOptions) -> EngineOptions | None:
    """Return the vLLM with which acceptance is predicted, None when it is not to be or cannot be."""
    section = options.benchmark
    if not section.predict:
        return None
    if options.engine.kind == "vllm":
        return options.engine
    engine = dataclasses.replace(options.engine, kind="vllm", python=section.capture_python, args=[], env={})
    if installed.engine_version(engine) is None:
        logger.warning("the acceptance will not be predicted: there is no vLLM to capture states with in %s; name an "
                       "interpreter that has it with --capture-python", installed.interpreter(engine))
        return None
    return engine


def name_of(draft_tokens: int, concurrency: int | None = None) -> str:
    """Return the name of a server, or of one measurement on it: drafter-3, baseline_c8."""
    server = f"drafter-{draft_tokens}" if draft_tokens else "baseline"
    return f"{server}_c{concurrency}" if concurrency else server


def server_words(options: BenchmarkOptions, plan: MeasurementPlan, draft_tokens: int
                 ) -> tuple[list[str], dict[str, Any] | None]:
    """Return the server's arguments besides engine.args, and what it is told of the drafter."""
    arguments = [*defaults.no_prefix_caching(options.engine), *options.benchmark.serve_args]
    if options.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    return arguments, ({"model": str(plan.drafter), "num_speculative_tokens": draft_tokens} if draft_tokens else None)
