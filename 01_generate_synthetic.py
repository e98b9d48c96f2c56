"""Stage 01: ask the verifier and keep what it generates, with the exact token ids: prompts → traces.

A drafter learns to predict its verifier, so it is trained on the verifier's own replies. Reads prompts: JSON
lines, a JSON array, Parquet, a folder or a hub dataset of {"id", "messages": [{"role", "content"}], "tools"},
{"id", "prompt"}, ShareGPT {"conversations": [{"from", "value"}]} or user turns alone {"turns": ["…", "…"]}; id and
tools may be missing. With --prompts self:20000 the verifier invents them: its template up to where the user speaks is
sampled, cleaned, and kept as self_prompts.jsonl.
Writes into RUN_DIR/01_traces:
  traces.jsonl    one finished reply a line: texts, token ids, what was asked
  skipped.jsonl   prompts that gave no trace (cut inside the reasoning, empty, too long, refused by the
                  template, …) with the reason; they are not asked again until their prompt changes
  failures.jsonl  prompts whose requests failed in the last run; the next run asks them again
  data_report.html, .json   lengths, endings, repetition, what is asked, per source: look at it before spending
                  GPU hours
Needs OpenAI-compatible servers of the verifier: running ones (--endpoint, once or more; the key in
OPENAI_API_KEY), or --serve, which starts the engine on --model and stops it afterwards. With --model, prompts
are measured before they are sent, and servers that give no token ids will do.

  python 01_generate_synthetic.py --config configs/smollm2-135m.yaml --run-dir runs/smollm2 --serve
  python 01_generate_synthetic.py --prompts prompts/train.jsonl --run-dir runs/kimi --reasoning required \\
      --model /models/Kimi-K2.5 --trust-remote-code --endpoint http://127.0.0.1:8000/v1 --concurrency 128

The same command resumes: only what is missing is asked. Appended prompts extend the traces; other sampling,
another model or a changed prompt under an old id is refused.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import config, files
from eagle3.common.errors import UsageError
from eagle3.common.log import logger
from eagle3.common.machine import require_free_disk
from eagle3.common.options import BenchmarkOptions, GenerateOptions, GenerateSection
from eagle3.common.script import main
from eagle3.common.stage import Stage

if TYPE_CHECKING:
    from eagle3.traces.prompts import PromptSource
    from eagle3.traces.sampling import Mix
    from eagle3.traces.self_prompts import Plan
    from eagle3.traces.trace_rows import Ledger
    from eagle3.traces.worklist import Survey, Worklist

HELD_OUT = Path(__file__).parent / "prompts" / "benchmark.jsonl"
Started = tuple[list[str], Callable[[], None]]
# These decide how the server is run or where prompts come from; each trace has its own key for the rest.
NOT_IN_FINGERPRINT = ("generate.prompts", "generate.self_", "generate.serve_args", "generate.served_model_name",
                      "generate.sampling")


def run(options: GenerateOptions, stage: Stage) -> None:
    """Survey the prompts, find what is missing, ask for it, and say what came of it."""
    from eagle3.traces import trace_rows
    from eagle3.traces.sampling import Mix
    from eagle3.traces.worklist import Worklist

    section = options.generate
    check_choices(options)
    config.require(section.prompts, "--prompts", "the source of prompts")
    mix, plan = Mix(section), invented(options)
    if options.common.dry_run:
        from eagle3.dryrun.generate import describe

        describe(options, stage, mix, plan)
        look_ahead(options, stage)
        return
    source = None if plan else survey_source(section, options, stage)
    model = files.model_identity(Path(options.model.path)) if options.model.path else None

    stage.open(
        inputs={"model": model, "prompts": source_identity(section.prompts)},
        results=fingerprint_options(options, mix),
        stale_on=("model",),
        grows=True,
        holds=lambda: trace_rows.lie_in(stage.directory),
    )
    with contextlib.ExitStack() as running:
        started = functools.cache(lambda: start(options, stage, running))  # once, and only if anything is asked
        if plan:
            section = dataclasses.replace(section, prompts=str(invent(options, stage, plan, started)))
        if source is None:
            source = survey_source(section, options, stage)
        stage.manifest["prompts"] = source.counts.to_dict()
        ledger = trace_rows.Ledger(stage.directory, ask_again=section.ask_again)
        worklist = Worklist(source, mix, ledger)
        survey = worklist.look_over(section.served_model_name, stage.check_stop)
        if stage.finished(ledger.content, missing=survey.missing):
            return
        require_free_disk(stage.directory, survey.bytes, "the traces")
        logger.info("%d of %d prompts to ask", survey.missing, survey.expected)
        figures = ask(options, stage, ledger, worklist, survey, started) if survey.missing else survey.figures(ledger)
    conclude(options, stage, ledger, figures)


def survey_source(section: GenerateSection, options: GenerateOptions, stage: Stage) -> "PromptSource":
    """Return the prompts of a source after a look at all of them."""
    from eagle3.traces.prompts import PromptSource
    from eagle3.traces.self_prompts import count_of

    limit = min(filter(None, (count_of(options.generate.prompts), options.common.limit)), default=None)
    source = PromptSource(section, limit)
    logger.info("%s", source.scan(stage.check_stop).line())
    return source


def invented(options: GenerateOptions) -> "Plan | None":
    """Return what --prompts self:N asks for, None for another source; what stage 06 will measure on is held out."""
    from eagle3.benchmark.prompt_sets import user_texts
    from eagle3.traces import self_prompts

    if self_prompts.count_of(options.generate.prompts) is None:
        return None
    config.require(options.model.path, "--model", "the folder whose template --prompts self:N speaks in")
    measured = config.of_file(BenchmarkOptions, options.common.config).benchmark
    return self_prompts.plan(options.generate, [str(HELD_OUT), *filter(None, [measured.prompts])],
                             options.common.limit, user_texts(measured.prompt_sets))


def invent(options: GenerateOptions, stage: Stage, plan: "Plan", started: Callable[[], Started]) -> Path:
    """Let the verifier invent what is missing of the plan's prompts; return their file."""
    from eagle3.traces.chat import load_chat
    from eagle3.traces.endpoints import Pool
    from eagle3.traces.inventing import invent as invent_rest
    from eagle3.traces.self_prompts import Record

    plan.settings["model"] = files.sha256_json(stage.manifest["inputs"]["model"])
    record = Record(plan, stage.directory)
    if not record.complete:
        chat = load_chat(Path(options.model.path), trust_remote_code=options.model.trust_remote_code)
        urls, look = started()
        pool = Pool(urls, options.generate)
        pool.connect(chat.think_tags)
        progress = stage.progress("own prompts", plan.count, "prompts")
        stage.begin()
        with contextlib.closing(progress):
            invent_rest(record, pool, chat, progress, look)
    stage.manifest["inputs"]["prompts"] |= {"sha256": files.sha256_file(record.prompts)}
    stage.manifest["invented"] = record.figures()
    return record.prompts


def check_choices(options: GenerateOptions) -> None:
    """Raise UsageError unless endpoints or --serve are given, and --model where something needs it."""
    section = options.generate
    if bool(section.endpoint) == section.serve:
        raise UsageError(
            "no server is chosen" if not section.serve else "two servers are chosen",
            where="--endpoint, --serve",
            expected="one of them",
            fix="--serve starts the engine on --model; --endpoint URL uses a running server",
        )
    if section.serve:
        config.require(options.model.path, "--model", "the verifier's folder")
    if section.check_tokens:
        config.require(options.model.path, "--model", "the folder whose template --check-tokens compares with")
    if section.endpoint:
        from eagle3.traces import client

        for url in section.endpoint:
            client.base_url(url)


def source_identity(prompts: str) -> dict[str, Any]:
    """Return what the manifest says of the source; each trace has its own key for what matters."""
    path = Path(prompts)
    return {"path": prompts} | ({"sha256": files.sha256_file(path)} if path.is_file() else {})


def fingerprint_options(options: GenerateOptions, mix: "Mix") -> dict[str, Any]:
    """Return the options that a resume must not change."""
    basis = {name: value for name, value in config.result_options(options).items()
             if name.startswith("generate.") and not name.startswith(NOT_IN_FINGERPRINT)}
    return basis | ({"generate.sampling": mix.identity()} if options.generate.sampling else {})


def ask(options: GenerateOptions, stage: Stage, ledger: "Ledger", worklist: "Worklist", survey: "Survey",
        started: Callable[[], Started]) -> dict[str, Any]:
    """Ask for what is missing; return the figures of the manifest."""
    from eagle3.traces.chat import DEFAULT_THINK_TAGS, load_chat
    from eagle3.traces.endpoints import Pool
    from eagle3.traces.generation import Generator

    section = options.generate
    chat = load_chat(Path(options.model.path), trust_remote_code=options.model.trust_remote_code
                     ) if options.model.path else None
    urls, look = started()
    pool = Pool(urls, section)
    served = pool.connect(chat.think_tags if chat else DEFAULT_THINK_TAGS)
    ledger.refuse_other_model(served.name)
    stage.manifest["server"] = {"endpoints": urls, "model": served.name, "max_model_len": served.limit}
    progress = stage.progress("traces", survey.expected, "prompts", survey.expected - survey.missing)
    limit = min(filter(None, (section.max_model_len, served.limit)), default=None)
    generator = Generator(section, ledger, pool=pool, chat=chat, limit=limit, progress=progress)
    stage.begin()
    ledger.open()
    try:
        asyncio.run(generator.run(worklist.work(served.name, survey), look))
    finally:
        progress.close()
        ledger.close()
        stage.manifest["counts"] = survey.figures(ledger, generator.came_of_it)
        stage.manifest.update(generator.maker.figures(), tagged=generator.came_of_it["tagged"])
        generator.maker.report()
    stage.manifest["closing_id"] = chat.closing_id if chat else None
    return stage.manifest["counts"]


def start(options: GenerateOptions, stage: Stage, running: contextlib.ExitStack) -> Started:
    """Return the servers' addresses and a look at whether to go on; a server of --serve is started and looked after."""
    from eagle3.traces.serving import server

    stage.manifest.update(look_ahead(options, stage))
    return running.enter_context(server(options, stage))


def look_ahead(options: GenerateOptions, stage: Stage) -> dict[str, Any]:
    """Look at what the server of --serve needs, before it is started; return what the manifest says of the engine."""
    if not options.generate.serve:
        return {}
    from eagle3.checks import preflight
    from eagle3.traces.serving import server_arguments

    return preflight.before_engine(options, stage, serve_args=server_arguments(options))


def conclude(options: GenerateOptions, stage: Stage, ledger: "Ledger", figures: dict[str, Any]) -> None:
    """Say what came of it and complete the stage.

    Raises FailureLimitError when too many prompts failed or none gave a trace.
    """
    from eagle3.traces import outcome, token_counts

    stage.manifest["counts"] = figures
    outcome.say(ledger, figures, stage.manifest.get("tagged", 0))
    outcome.require_enough(stage.directory, figures, options.generate.max_failures)
    outcome.write_data_report(stage.directory, stage.manifest.get("closing_id"))
    outputs = {name: stage.directory / f"{name}.jsonl" for name in ("traces", "skipped")}
    if ledger.tokens.write(counts := stage.directory / token_counts.FILE_NAME):
        outputs["token_counts"] = counts
    stage.complete(counts=figures, outputs=outputs, content=ledger.content)


if __name__ == "__main__":
    main(__doc__, GenerateOptions, run)
