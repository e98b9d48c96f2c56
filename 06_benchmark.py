"""Stage 06: measure what the drafter is worth: acceptance, tokens per second, speed-up.

For the verifier alone and for each draft-token count a server is started (or attached to), warmed up, and asked every
prompt set at each temperature and number of requests in flight; at the end the verifier alone once more, which shows
by how much the machine drifted. Acceptance comes from the engine's own counters, as differences around the measured
part; times come from streams, chunk by chunk. The acceptance is predicted by walking these very replies offline, at
whatever temperature; the two should agree. At temperature 0 the replies with and without drafter are compared.

Reads   05_export/ENGINE (or --drafter), files of held-out prompts, the verifier
Writes  06_bench/results.json and report.html (python -m eagle3.report 06_bench makes it again from results.json
        alone); runs/ holds each finished measurement, which is kept when it runs again, also with
        more values on an axis
Needs   an engine; a server is started twice for the verifier and once for each draft-token count

  python 06_benchmark.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2
  python 06_benchmark.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2 --draft-tokens 1 3 5 \
      --concurrency 1 8 --temperature 0 1 --repeats 3 --prompt-sets gsm8k=data/gsm8k/test.jsonl --limit 64
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import files
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage

if TYPE_CHECKING:
    from eagle3.benchmark.matrix import Cell, ServerKind
    from eagle3.benchmark.plan import MeasurementPlan

SCHEMA_VERSION = 2


def run(options: BenchmarkOptions, stage: Stage) -> None:
    """Measure on each server what is not measured yet, predict, compare, report."""
    if options.common.dry_run:
        from eagle3.dryrun.benchmark import describe

        look_ahead(options, stage, describe(options, stage))
        return
    from eagle3.benchmark import comparison, measurements
    from eagle3.benchmark.plan import STALE_ON, make_plan, options_of_all

    plan = make_plan(options, stage)
    if not stage.open(inputs=plan.inputs, results=options_of_all(options), stale_on=STALE_ON, grows=True,
                      holds=lambda: any((stage.directory / "runs").glob("*")),
                      upgraded=functools.partial(measurements.adopted, stage.directory)):
        return
    runs = measurements.kept(stage.directory, stage.manifest["fingerprint"])
    missing = sum(map(len, plan.matrix.all_missing(runs).values()))
    shown = [each for each in runs if plan.matrix.shown(each)]
    if stage.finished(plan.content(shown), missing):
        return
    if missing:
        stage.manifest.update(look_ahead(options, stage, plan))
    stage.begin()
    for kind in plan.servers:
        runs += measure_server(options, stage, plan, kind, runs)
    shown = comparison.in_order([each for each in runs if plan.matrix.shown(each)], plan.matrix)
    results = conclude(options, stage, plan, shown)
    files.write_json(stage.directory / "results.json", results)
    outputs = publish(stage.directory)
    stage.complete(
        counts={"measurements": len(shown), "requests": sum(each["requests"] for each in shown)},
        outputs={"results.json": stage.directory / "results.json"} | outputs,
        content=plan.content(shown),
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


def measure_server(options: BenchmarkOptions, stage: Stage, plan: "MeasurementPlan", kind: "ServerKind",
                   kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure what of one server is missing, on a server that is started for it; return that."""
    from eagle3.benchmark import load, matrix

    cells, names = plan.matrix.missing(kind, kept), {matrix.key_of(each): each["name"] for each in kept}
    for cell in plan.matrix.cells(kind):
        if cell not in cells:
            logger.info("%s is measured already", names.get(matrix.key_of(cell.key()), cell.name(plan.first_set)))
    if not cells:
        return []
    with serving(options, stage, plan, kind) as server:
        first = plan.sets[cells[0].prompts].prompts
        load.warm_up(server, first[: options.benchmark.warmup_prompts], options.benchmark, stage)
        return [measure_cell(options, stage, plan, cell, server) for cell in cells]


def measure_cell(options: BenchmarkOptions, stage: Stage, plan: "MeasurementPlan", cell: "Cell", server: Any
                 ) -> dict[str, Any]:
    """Make one measurement and keep it."""
    from eagle3.benchmark import load, measurements
    from eagle3.benchmark.plan import server_gpus
    from eagle3.engines import speculation

    name, gpus = cell.name(plan.first_set), server_gpus(options) if server.child else None
    figures, replies = load.measure(
        server, plan.sets[cell.prompts].prompts, options.benchmark, cell.concurrency, stage, name,
        temperature=cell.temperature, seed=cell.repeat - 1, gpus=gpus)
    words = [*options.engine.args, *options.benchmark.serve_args]
    engine = {"kind": server.kind, "version": server.version, "attached": server.child is None,
              "speculation": speculation.of_server(server, words, options.engine.env)}
    measured = {"name": name} | cell.key() | figures | {"engine": engine, "fingerprint": stage.manifest["fingerprint"]}
    return measurements.store(stage.directory, measured, replies)


@contextlib.contextmanager
def serving(options: BenchmarkOptions, stage: Stage, plan: "MeasurementPlan", kind: "ServerKind") -> Iterator[Any]:
    """Yield a server of a kind: the attached one, else one that is started for it."""
    from eagle3.benchmark.plan import endpoint_of, server_words
    from eagle3.engines import launch, servers

    endpoint = endpoint_of(options, kind)
    if endpoint:
        yield servers.attach(endpoint, plan.model)
        return
    arguments, speculative = server_words(options, plan, kind)
    with launch.serve(options.engine, plan.model, stage=stage, label=f"{stage.directory.name}-{kind.name}",
                      extra_args=arguments, speculative=speculative) as server:
        yield server


def conclude(options: BenchmarkOptions, stage: Stage, plan: "MeasurementPlan", runs: list[dict[str, Any]]
             ) -> dict[str, Any]:
    """Compare, predict, and return what results.json holds."""
    from eagle3.benchmark import comparison, matrix, measurements, prediction, serving_advice
    from eagle3.benchmark.plan import options_of_all

    comparison.compare_replies(stage.directory, runs)
    if plan.capture and plan.drafter:
        first = options.benchmark.concurrency[0]  # acceptance does not depend on it
        walked = [each for each in runs if each["server"] == matrix.DRAFTER and each["repeat"] == 1
                  and (each["concurrency"] == first or measurements.prediction(stage.directory, each))]
        sources = {prompt.id: prompt.source for each in plan.sets.values() for prompt in each.prompts}
        prediction.predict_runs(stage, options.model, plan.capture, plan.drafter, walked, sources=sources)
    cells = comparison.cells(runs)
    verdict = comparison.verdict(cells, stage.directory, str(plan.control)) if plan.control else None
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {"path": str(plan.model), "identity": files.sha256_json(plan.inputs["model"])},
        "drafter": {"path": str(plan.drafter or "attached"), "identity": files.sha256_json(plan.inputs["drafter"])},
        "engine": runs[-1]["engine"],
        "settings": {
            "max_tokens": options.benchmark.max_tokens,
            "warmup_prompts": options.benchmark.warmup_prompts,
            "repeats": options.benchmark.repeats,
            "gpus": stage.manifest["gpus"],
        },
        "made_with": stage.made_with() | {"deciding": options_of_all(options) | {
            "engine.tensor_parallel_size": options.engine.tensor_parallel_size}},  # the same replies, another speed
        "sets": [each.to_dict() for each in plan.sets.values()],
        "runs": cells,
        "drift": comparison.drift(runs),
        "control": verdict,
        "serving": serving_advice.advise(cells, model=str(plan.model), drafter=str(plan.drafter or "DRAFTER")),
    }


def publish(directory: Path) -> dict[str, Path]:
    """Write the report, print its tables, and return the file made, by name."""
    from eagle3.benchmark import report

    page = report.render(directory)
    logger.info("results\n%s", report.text_table(report.load(directory)))
    logger.info("report: %s", page)
    return {page.name: page}


if __name__ == "__main__":
    main(__doc__, BenchmarkOptions, run)
