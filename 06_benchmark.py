"""Stage 06: measure what the drafter is worth: acceptance, tokens per second, speed-up.

For the verifier alone and for each draft-token count a server is started (or attached to), warmed up, and
asked every prompt at each concurrency. Acceptance comes from the engine's own counters, as differences
around the measured part. At temperature 0 the replies with and without drafter are compared, and the
acceptance is predicted by walking these very replies offline; the two should agree.

Reads   05_export/ENGINE (or --drafter), a file of held-out prompts, the verifier
Writes  06_bench/results.json, report.html and PNG plots (python -m eagle3.report 06_bench makes them again
        from results.json alone); runs/ holds each finished measurement, which a resumed run keeps
Needs   an engine; a server is started once for the verifier and once for each draft-token count

  python 06_benchmark.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2
  python 06_benchmark.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2 --draft-tokens 1 3 5 \
      --out runs/smollm2/06_bench_depths
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import duration, logger
from eagle3.common.options import BenchmarkOptions, EngineOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage

SCHEMA_VERSION = 1


@dataclass
class Plan:
    """What is measured with what.

    Attributes:
        prompts: `Prompt`s to ask. drafter: folder, or None when only an attached server knows it.
        counts: draft-token counts, BASELINE first. inputs: identity of each input by name.
        capture: the vLLM that captures the replies' states for the prediction; None for no prediction.
    """

    prompts: list[Any]
    model: Path
    drafter: Path | None
    counts: list[int]
    inputs: dict[str, Any]
    capture: EngineOptions | None = None


def run(options: BenchmarkOptions, stage: Stage) -> None:
    """Measure each server at each concurrency, predict, compare, report."""
    if options.common.dry_run:
        describe(options, stage)
        return
    plan = make_plan(options, stage)
    if not stage.open(inputs=plan.inputs, holds=lambda: any((stage.directory / "runs").glob("*"))):
        return
    stage.manifest.update(look_ahead(options, stage, plan))
    from eagle3.benchmark import measurements, prediction

    runs = [run for count in plan.counts for run in measure_server(options, stage, plan, count)]
    measurements.compare(stage.directory, runs, greedy=options.benchmark.temperature == 0)
    first = options.benchmark.concurrency[0]  # acceptance at temperature 0 does not depend on it
    if plan.capture and plan.drafter:
        drafted = [run for run in runs if run["draft_tokens"] and run["concurrency"] == first]
        prediction.predict_runs(stage, options.model, plan.capture, plan.drafter, drafted, baseline=name_of(0, first))
    results = {
        "schema_version": SCHEMA_VERSION,
        "model": {"path": str(plan.model), "identity": files.sha256_json(plan.inputs["model"])},
        "drafter": {"path": str(plan.drafter or "attached"), "identity": files.sha256_json(plan.inputs["drafter"])},
        "engine": runs[-1]["engine"],
        "settings": {
            "prompts": len(plan.prompts),
            "max_tokens": options.benchmark.max_tokens,
            "temperature": options.benchmark.temperature,
            "warmup_prompts": options.benchmark.warmup_prompts,
            "gpus": stage.manifest["gpus"],
        },
        "runs": runs,
    }
    files.write_json(stage.directory / "results.json", results)
    outputs = publish(stage.directory, results)
    stage.complete(
        counts={"measurements": len(runs), "requests": sum(run["requests"] for run in runs)},
        outputs={"results.json": stage.directory / "results.json"} | outputs,
    )


def make_plan(options: BenchmarkOptions, stage: Stage, dry: Any = None) -> Plan:
    """Check everything that can be checked before a server is started; `dry` is the dry run that this is for."""
    from eagle3.benchmark.measurements import BASELINE
    from eagle3.engines import installed
    from eagle3.traces import prompts

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
    return Plan(asked, model, drafter, [BASELINE, *section.draft_tokens], inputs, capture)


def capture_engine(options: BenchmarkOptions) -> EngineOptions | None:
    """Return the vLLM with which acceptance is predicted, None when it is not to be or cannot be."""
    from eagle3.engines import installed

    section = options.benchmark
    if not section.predict or section.temperature > 0:
        return None
    if options.engine.kind == "vllm":
        return options.engine
    engine = dataclasses.replace(options.engine, kind="vllm", python=section.capture_python, args=[], env={})
    if installed.engine_version(engine) is None:
        logger.warning("the acceptance will not be predicted: there is no vLLM to capture states with in %s; name an "
                       "interpreter that has it with --capture-python", installed.interpreter(engine))
        return None
    return engine


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


def describe(options: BenchmarkOptions, stage: Stage) -> None:
    """Print what a run would start and ask."""
    from eagle3.dryrun.dry_run import DryRun

    section, dry = options.benchmark, DryRun(stage, options.model.path)
    plan = make_plan(options, stage, dry)
    requests = len(plan.prompts) * len(plan.counts) * len(section.concurrency)
    missing = "" if not plan.drafter or plan.drafter.exists() else ", which has not been exported yet"
    dry.say("reads", f"{len(plan.prompts)} prompts of {section.prompts}; verifier {plan.model}, drafter "
            f"{plan.drafter or 'of the attached server'}{missing}")
    dry.say("asks", f"{requests} requests, at most {requests * section.max_tokens:,} tokens (estimate); writes "
            f"{stage.directory}")
    dry.say("engine", plan.inputs["engine"])
    started = [count for count in plan.counts
               if not (section.drafter_endpoint if count else section.baseline_endpoint)]
    for count in started:
        dry.say("starts", f"{name_of(count)}: {dry.server(options.engine, *server_words(options, plan, count))}")
    longest, most = section.max_tokens, max(section.concurrency)
    dry.memory(options.engine, prefill=8192, cached=most * longest, why=f"{most} requests of {longest:,}")
    captures = 1 if plan.capture else 0
    if dry.known:
        loads = len(started) + captures
        dry.time(loads * dry.known.load_s, f"{loads} loads of the verifier ({len(started)} servers, {captures} for the "
                 f"prediction), {duration(dry.known.load_s)} each as in {dry.known.name}; without the requests")
    dry.end()
    look_ahead(options, stage, plan)


def look_ahead(options: BenchmarkOptions, stage: Stage, plan: Plan) -> dict[str, Any]:
    """Look at what the servers and the drafter need, before any of them starts; return the manifest's words on it."""
    section = options.benchmark
    if section.baseline_endpoint and section.drafter_endpoint:
        return {}
    from eagle3.checks import preflight

    speculates = not section.drafter_endpoint
    drafter = plan.drafter if speculates and plan.drafter and plan.drafter.exists() else None
    return preflight.before_engine(options, stage, speculates=speculates, drafter=drafter,
                                   serve_args=section.serve_args)


# --- measuring --------------------------------------------------------------------------------------------


def name_of(draft_tokens: int, concurrency: int | None = None) -> str:
    """Return the name of a server, or of one measurement on it: drafter-3, baseline_c8."""
    server = f"drafter-{draft_tokens}" if draft_tokens else "baseline"
    return f"{server}_c{concurrency}" if concurrency else server


def measure_server(options: BenchmarkOptions, stage: Stage, plan: Plan, draft_tokens: int) -> list[dict[str, Any]]:
    """Return one server's measurements, one a concurrency; those already on disk are kept."""
    from eagle3.benchmark import load, measurements

    section, fingerprint = options.benchmark, stage.manifest["fingerprint"]
    found = {c: measurements.finished(stage.directory, name_of(draft_tokens, c), fingerprint)
             for c in section.concurrency}
    done = {c: run for c, run in found.items() if run}
    missing = [c for c in section.concurrency if c not in done]
    if missing:
        with serving(options, stage, plan, draft_tokens) as server:
            load.warm_up(server, plan.prompts[: section.warmup_prompts], section, stage)
            for concurrency in missing:
                name = name_of(draft_tokens, concurrency)
                figures, replies = load.measure(server, plan.prompts, section, concurrency, stage, name)
                figures = {"name": name, "draft_tokens": draft_tokens, "concurrency": concurrency} | figures
                figures["engine"] = {"kind": server.kind, "version": server.version, "attached": server.child is None}
                done[concurrency] = measurements.store(stage.directory, figures | {"fingerprint": fingerprint}, replies)
    return [done[concurrency] for concurrency in section.concurrency]


@contextlib.contextmanager
def serving(options: BenchmarkOptions, stage: Stage, plan: Plan, draft_tokens: int) -> Iterator[Any]:
    """Yield the server for a draft-token count: the attached one, else one that is started for it."""
    from eagle3.engines import launch, servers

    endpoint = options.benchmark.drafter_endpoint if draft_tokens else options.benchmark.baseline_endpoint
    if endpoint:
        yield servers.attach(endpoint, plan.model)
        return
    arguments, speculative = server_words(options, plan, draft_tokens)
    label = f"{stage.directory.name}-{name_of(draft_tokens)}"
    with launch.serve(
        options.engine, plan.model, stage=stage, label=label, extra_args=arguments, speculative=speculative
    ) as server:
        yield server


def server_words(options: BenchmarkOptions, plan: Plan, draft_tokens: int) -> tuple[list[str], dict[str, Any] | None]:
    """Return the server's arguments besides engine.args, and what it is told of the drafter."""
    from eagle3.engines import defaults

    arguments = [*defaults.no_prefix_caching(options.engine), *options.benchmark.serve_args]
    if options.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    return arguments, ({"model": str(plan.drafter), "num_speculative_tokens": draft_tokens} if draft_tokens else None)


# --- afterwards -------------------------------------------------------------------------------------------


def publish(directory: Path, results: dict[str, Any]) -> dict[str, Path]:
    """Make report and plots, print the table, and return the files made, by name."""
    from eagle3.benchmark import report

    made = report.render(directory)
    logger.info("results\n%s", report.text_table(results))
    logger.info("report: %s", directory / "report.html")
    return {path.name: path for path in made}


if __name__ == "__main__":
    main(__doc__, BenchmarkOptions, run)
