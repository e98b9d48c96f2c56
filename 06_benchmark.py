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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import files
from eagle3.errors import PreconditionError, UsageError
from eagle3.log import duration, logger
from eagle3.options import BenchmarkOptions
from eagle3.script import main
from eagle3.stage import Stage

SCHEMA_VERSION = 1


@dataclass
class Plan:
    """What is measured with what.

    Attributes:
        prompts: `Prompt`s to ask. drafter: folder, or None when only an attached server knows it.
        counts: draft-token counts, BASELINE first. inputs: identity of each input by name.
    """

    prompts: list[Any]
    model: Path
    drafter: Path | None
    counts: list[int]
    inputs: dict[str, Any]


def run(options: BenchmarkOptions, stage: Stage) -> None:
    """Measure each server at each concurrency, predict, compare, report."""
    plan = make_plan(options, stage)
    if options.common.dry_run:
        describe(options, plan)
        return
    if not stage.open(inputs=plan.inputs):
        return
    from eagle3 import measurements

    runs = [run for count in plan.counts for run in measure_server(options, stage, plan, count)]
    for count in plan.counts[1:]:
        predict(options, stage, plan, [run for run in runs if run["draft_tokens"] == count])
    measurements.compare(stage.directory, runs, greedy=options.benchmark.temperature == 0)
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


def make_plan(options: BenchmarkOptions, stage: Stage) -> Plan:
    """Check everything that can be checked before a server is started."""
    from eagle3 import engines, prompts
    from eagle3.measurements import BASELINE

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
    inputs = {
        "model": files.model_identity(model),
        "drafter": files.model_identity(drafter) if drafter else "attached",
        "prompts": files.sha256_json([[prompt.id, prompt.messages, prompt.tools] for prompt in asked]),
        "engine": "attached" if attached else engines.check(options.engine, model),
    }
    return Plan(asked, model, drafter, [BASELINE, *section.draft_tokens], inputs)


def find_drafter(options: BenchmarkOptions, stage: Stage) -> Path | None:
    """Return the drafter's folder: --drafter, else the run's finished export; None if attached and neither."""
    default = stage.run_dir / "05_export" / options.engine.kind
    if options.benchmark.drafter:
        drafter = Path(options.benchmark.drafter)
    elif options.benchmark.drafter_endpoint and not default.exists():
        logger.warning("no drafter folder: the acceptance of the attached server cannot be predicted")
        return None
    else:
        stage.upstream(default.parent, "--drafter")
        drafter = default
    for name in ("config.json", "model.safetensors"):
        if not (drafter / name).is_file():
            raise PreconditionError(
                f"not an exported drafter: {name} is missing", where=drafter, fix="name another with --drafter"
            )
    return drafter


def describe(options: BenchmarkOptions, plan: Plan) -> None:
    """Print what a run would start and ask."""
    section = options.benchmark
    requests = len(plan.prompts) * len(plan.counts) * len(section.concurrency)
    logger.info("verifier %s, drafter %s", plan.model, plan.drafter)
    logger.info("servers: %s", ", ".join(name_of(count) for count in plan.counts))
    logger.info("%d requests, at most %d tokens (estimate)", requests, requests * section.max_tokens)


# --- measuring --------------------------------------------------------------------------------------------


def name_of(draft_tokens: int, concurrency: int | None = None) -> str:
    """Return the name of a server, or of one measurement on it: drafter-3, baseline_c8."""
    server = f"drafter-{draft_tokens}" if draft_tokens else "baseline"
    return f"{server}_c{concurrency}" if concurrency else server


def measure_server(options: BenchmarkOptions, stage: Stage, plan: Plan, draft_tokens: int) -> list[dict[str, Any]]:
    """Return one server's measurements, one a concurrency; those already on disk are kept."""
    from eagle3 import load, measurements

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
    from eagle3 import engines, launch, servers

    endpoint = options.benchmark.drafter_endpoint if draft_tokens else options.benchmark.baseline_endpoint
    if endpoint:
        yield servers.attach(endpoint, plan.model)
        return
    arguments = [*engines.no_prefix_caching(options.engine), *options.benchmark.serve_args]
    if options.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    speculative = {"model": str(plan.drafter), "num_speculative_tokens": draft_tokens} if draft_tokens else None
    label = f"{stage.directory.name}-{name_of(draft_tokens)}"
    with launch.serve(
        options.engine, plan.model, stage=stage, label=label, extra_args=arguments, speculative=speculative
    ) as server:
        yield server


# --- afterwards -------------------------------------------------------------------------------------------


def predict(options: BenchmarkOptions, stage: Stage, plan: Plan, runs: list[dict[str, Any]]) -> None:
    """Set `predicted` and `difference` of the first run: the acceptance walked offline on its very replies."""
    from eagle3.measurements import replies_of

    run, section = runs[0], options.benchmark
    if not section.predict or section.temperature > 0 or plan.drafter is None:
        return
    replies = [
        (reply["prompt_token_ids"], reply["completion_token_ids"])
        for reply in replies_of(stage.directory, run)
        if reply["prompt_token_ids"] and len(reply["completion_token_ids"]) > 1
    ]
    if not replies:
        logger.warning("no token ids, or only replies of one token: the acceptance cannot be predicted")
        return
    path = stage.directory / "runs" / f"predicted_{run['name']}.json"
    basis = {"fingerprint": run["fingerprint"], "replies": run["replies"]}
    stored = files.read_json(path) if path.exists() else {}
    if {name: stored.get(name) for name in basis} != basis:
        from eagle3.acceptance import predict_for_replies

        stage.check_stop()
        logger.info("predicting the acceptance of %s on %d replies", run["name"], len(replies))
        started = time.monotonic()
        walk = predict_for_replies(
            stage=stage, options=options, drafter=plan.drafter, replies=replies, draft_tokens=run["draft_tokens"]
        )
        stored = basis | {"length": walk.length, "by_position": list(walk.by_position), "rounds": walk.rounds}
        files.write_json(path, stored)
        logger.info("predicted after %s", duration(time.monotonic() - started))
    run["predicted"] = {name: stored[name] for name in ("length", "by_position", "rounds")}
    if run["acceptance"]:
        run["difference"] = run["predicted"]["length"] - run["acceptance"]["length"]


def publish(directory: Path, results: dict[str, Any]) -> dict[str, Path]:
    """Make report and plots, print the table, and return the files made, by name."""
    from eagle3 import report

    made = report.render(directory)
    logger.info("results\n%s", report.text_table(results))
    logger.info("report: %s", directory / "report.html")
    return {path.name: path for path in made}


if __name__ == "__main__":
    main(__doc__, BenchmarkOptions, run)
