"""Stage 06: measure what the drafter is worth: acceptance, tokens per second, speed-up.

For the verifier alone and for each draft-token count a server is started (or attached to), warmed up, and
asked every prompt at each concurrency. Acceptance comes from the engine's own counters, as differences
around the measured part. The acceptance is predicted by walking these very replies offline, at whatever
temperature; the two should agree. At temperature 0 the replies with and without drafter are compared.

Reads   05_export/ENGINE (or --drafter), a file of held-out prompts, the verifier
Writes  06_bench/results.json, report.html and PNG plots (python -m eagle3.report 06_bench makes them again
        from results.json alone); runs/ holds each finished measurement, which a resumed run keeps
Needs   an engine; a server is started once for the verifier and once for each draft-token count

  python 06_benchmark.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2
  python 06_benchmark.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2 --draft-tokens 1 3 5 \
      --out runs/smollm2/06_bench_depths
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import files
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage

if TYPE_CHECKING:
    from eagle3.benchmark.plan import MeasurementPlan

SCHEMA_VERSION = 1


def run(options: BenchmarkOptions, stage: Stage) -> None:
    """Measure each server at each concurrency, predict, compare, report."""
    if options.common.dry_run:
        from eagle3.dryrun.benchmark import describe

        look_ahead(options, stage, describe(options, stage))
        return
    from eagle3.benchmark import measurements, prediction, serving
    from eagle3.benchmark.plan import make_plan, name_of

    plan = make_plan(options, stage)
    if not stage.open(inputs=plan.inputs, holds=lambda: any((stage.directory / "runs").glob("*"))):
        return
    stage.manifest.update(look_ahead(options, stage, plan))
    runs = [run for count in plan.counts for run in measure_server(options, stage, plan, count)]
    measurements.compare(stage.directory, runs, greedy=options.benchmark.temperature == 0)
    first = options.benchmark.concurrency[0]  # acceptance at temperature 0 does not depend on it
    if plan.capture and plan.drafter:
        drafted = [run for run in runs if run["draft_tokens"] and run["concurrency"] == first]
        prediction.predict_runs(stage, options.model, plan.capture, plan.drafter, drafted, baseline=name_of(0, first),
                                sources={prompt.id: prompt.source for prompt in plan.prompts})
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
        "serving": serving.advise(runs, model=str(plan.model), drafter=str(plan.drafter or "DRAFTER")),
    }
    files.write_json(stage.directory / "results.json", results)
    outputs = publish(stage.directory, results)
    stage.complete(
        counts={"measurements": len(runs), "requests": sum(run["requests"] for run in runs)},
        outputs={"results.json": stage.directory / "results.json"} | outputs,
    )


def look_ahead(options: BenchmarkOptions, stage: Stage, plan: "MeasurementPlan") -> dict[str, Any]:
    """Look at what the servers and the drafter need, before any of them starts; return the manifest's words on it."""
    section = options.benchmark
    if section.baseline_endpoint and section.drafter_endpoint:
        return {}
    from eagle3.checks import preflight

    speculates = not section.drafter_endpoint
    drafter = plan.drafter if speculates and plan.drafter and plan.drafter.exists() else None
    return preflight.before_engine(options, stage, speculates=speculates, drafter=drafter,
                                   serve_args=section.serve_args)


def measure_server(options: BenchmarkOptions, stage: Stage, plan: "MeasurementPlan", draft_tokens: int
                   ) -> list[dict[str, Any]]:
    """Return one server's measurements, one a concurrency; those already on disk are kept."""
    from eagle3.benchmark import load, measurements
    from eagle3.benchmark.plan import name_of
    from eagle3.engines import speculation

    words = [*options.engine.args, *options.benchmark.serve_args]
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
                figures["engine"] = {"kind": server.kind, "version": server.version, "attached": server.child is None,
                                     "speculation": speculation.of_server(server, words, options.engine.env)}
                done[concurrency] = measurements.store(stage.directory, figures | {"fingerprint": fingerprint}, replies)
    return [done[concurrency] for concurrency in section.concurrency]


@contextlib.contextmanager
def serving(options: BenchmarkOptions, stage: Stage, plan: "MeasurementPlan", draft_tokens: int) -> Iterator[Any]:
    """Yield the server for a draft-token count: the attached one, else one that is started for it."""
    from eagle3.benchmark.plan import name_of, server_words
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


def publish(directory: Path, results: dict[str, Any]) -> dict[str, Path]:
    """Make report and plots, print the table, and return the files made, by name."""
    from eagle3.benchmark import report

    made = report.render(directory)
    logger.info("results\n%s", report.text_table(report.load(directory)))
    logger.info("report: %s", directory / "report.html")
    return {path.name: path for path in made}


if __name__ == "__main__":
    main(__doc__, BenchmarkOptions, run)
