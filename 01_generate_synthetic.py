"""Stage 01: ask the verifier and keep what it generates, with the exact token ids: prompts → traces.

A drafter learns to predict its verifier, so it is trained on the verifier's own replies. Reads prompts: JSON
lines, a JSON array, Parquet, a folder or a hub dataset of {"id", "messages": [{"role", "content"}], "tools"},
{"id", "prompt"} or ShareGPT {"conversations": [{"from", "value"}]}; id and tools may be missing.
Writes into RUN_DIR/01_traces:
  trace_rows.jsonl    one finished reply a line: texts, token ids, what was asked
  skipped.jsonl   prompts that gave no trace (cut inside the reasoning, empty, too long, refused by the
                  template, …) with the reason; they are not asked again until their prompt changes
  failures.jsonl  prompts whose requests failed in the last run; the next run asks them again
  data_report.html, .json, .png   lengths, endings, repetition, per source: look at it before spending GPU hours
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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3.common import config, files
from eagle3.common.errors import FailureLimitError, StaleError, UsageError
from eagle3.common.log import logger, size
from eagle3.common.options import GenerateOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage, require_free_disk

TRUNCATED_WARNING = 0.05  # share of replies lost to max_tokens above which the user should know
# These decide how the server is run or where prompts come from; each trace has its own key for the rest.
NOT_IN_FINGERPRINT = ("generate.prompts", "generate.serve_args", "generate.served_model_name", "generate.sampling")


def run(options: GenerateOptions, stage: Stage) -> None:
    """Survey the prompts, find what is missing, ask for it, and say what came of it."""
    from eagle3.traces import trace_rows
    from eagle3.traces.prompts import PromptSource
    from eagle3.traces.sampling import Mix
    from eagle3.traces.worklist import Worklist

    section = options.generate
    check_choices(options)
    config.require(section.prompts, "--prompts", "the source of prompts")
    mix = Mix(section)
    if options.common.dry_run:
        describe(options, stage, mix)
        return
    source = PromptSource(section, options.common.limit)
    counts = source.scan(stage.check_stop)
    logger.info("%s", counts.line())
    model = files.model_identity(Path(options.model.path)) if options.model.path else None

    stage.open(
        inputs={"model": model, "prompts": source_identity(section.prompts)},
        results=fingerprint_options(options, mix),
        stale_on=("model",),
        grows=True,
        holds=lambda: trace_rows.lie_in(stage.directory),
    )
    stage.manifest["prompts"] = counts.to_dict()
    ledger = trace_rows.Ledger(stage.directory)
    worklist = Worklist(source, mix, ledger)
    survey = look_over(stage, worklist, ledger)
    if stage.finished(ledger.content, missing=survey.missing):
        return
    require_free_disk(stage.directory, survey.bytes, "the traces")
    logger.info("%d of %d prompts to ask", survey.missing, survey.expected)
    figures = ask(options, stage, ledger, worklist, survey) if survey.missing else survey.figures(ledger)
    conclude(options, stage, ledger, figures)


def look_over(stage: Stage, worklist: Any, ledger: Any) -> Any:
    """Return the survey of what is missing, under the model's name that was asked before (if none was, all is)."""
    name = stage.options.generate.served_model_name or ledger.model
    refuse_other_model(stage, ledger.model, name)
    return worklist.survey(name, stage.check_stop)


# --- checks and estimates ---------------------------------------------------------------------------------


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


def describe(options: GenerateOptions, stage: Stage, mix: Any) -> None:
    """Print what would be done; fail where the run would."""
    from eagle3.dryrun.dry_run import DryRun
    from eagle3.traces import trace_rows
    from eagle3.traces.worklist import CHARACTERS_PER_TOKEN

    section, plan = options.generate, DryRun(stage, options.model.path)
    ledger = trace_rows.Ledger(stage.directory, read=not options.common.restart)
    survey = survey_for(plan, options, ledger, mix)
    plan.say("reads", f"{section.prompts}: {survey.expected:,} prompts, {survey.missing:,} of them to ask")
    plan.say("writes", f"{stage.directory}; estimate: {survey.prompt_tokens:,} prompt tokens ({CHARACTERS_PER_TOKEN} "
             f"characters a token), at most {survey.tokens:,} generated tokens, at most {size(survey.bytes)}")
    if section.serve:
        plan.say("engine", plan.engine(options.engine))
        plan.say("starts", plan.server(options.engine, server_arguments(options)))
        each = plan.known.tokens_per_sample if plan.known else section.max_model_len or section.max_tokens
        plan.memory(options.engine, prefill=8192, cached=section.concurrency * each,
                    why=f"{section.concurrency} requests of {each:,}")
    else:
        plan.say("asks", ", ".join(section.endpoint) + f", {section.concurrency} requests at a time")
        with plan.only_there("server"):
            from eagle3.traces.endpoints import Pool

            name = Pool(section.endpoint, section).connect(("", "")).name
            refuse_other_model(stage, ledger.model, name)
            plan.say("", f"they serve {name}")
    plan.disk(stage.directory, survey.bytes, "the traces")
    if plan.known:
        tokens = survey.missing * plan.known.tokens_per_sample
        plan.time(plan.known.trace_seconds(tokens), f"{tokens:,} tokens, {plan.known.tokens_per_sample:,} a sample and "
                  f"{plan.known.tokens / plan.known.trace_s:,.0f} tok/s as in {plan.known.name}, without loading")
    plan.end()
    look_ahead(options, stage)


def survey_for(plan: Any, options: GenerateOptions, ledger: Any, mix: Any) -> Any:
    """Return the survey of the prompts; where they are not here either, of as many as the reference run had."""
    from eagle3.traces.prompts import PromptSource
    from eagle3.traces.worklist import Survey, Worklist

    section, stage = options.generate, plan.stage
    if plan.elsewhere and plan.known and not Path(section.prompts).exists() and not plan.named("--prompts"):
        count = min(plan.known.samples, options.common.limit or plan.known.samples)
        plan.not_here(f"prompts: {section.prompts}; planned for {count:,}, as many as in {plan.known.name}")
        return Survey(expected=count, missing=count, tokens=count * section.max_tokens)
    source = PromptSource(section, options.common.limit)
    plan.say("prompts", source.scan(stage.check_stop).line())
    return look_over(stage, Worklist(source, mix, ledger), ledger)


def fingerprint_options(options: GenerateOptions, mix: Any) -> dict[str, Any]:
    """Return the options that a resume must not change."""
    basis = {name: value for name, value in config.result_options(options).items()
             if name.startswith("generate.") and name not in NOT_IN_FINGERPRINT}
    return basis | ({"generate.sampling": mix.identity()} if options.generate.sampling else {})


# --- asking -----------------------------------------------------------------------------------------------


def ask(options: GenerateOptions, stage: Stage, ledger: Any, worklist: Any, survey: Any) -> dict[str, Any]:
    """Ask for what is missing; return the figures of the manifest."""
    from eagle3.traces.chat import DEFAULT_THINK_TAGS, load_chat
    from eagle3.traces.endpoints import Pool
    from eagle3.traces.generation import Generator

    section = options.generate
    stage.manifest.update(look_ahead(options, stage))
    chat = load_chat(Path(options.model.path), trust_remote_code=options.model.trust_remote_code
                     ) if options.model.path else None
    with server(options, stage) as (urls, look):
        pool = Pool(urls, section)
        served = pool.connect(chat.think_tags if chat else DEFAULT_THINK_TAGS)
        refuse_other_model(stage, ledger.model, served.name)
        stage.manifest["server"] = {"endpoints": urls, "model": served.name, "max_model_len": served.limit}
        progress = stage.progress("traces", survey.expected, "prompts", survey.expected - survey.missing)
        limit = min(filter(None, (section.max_model_len, served.limit)), default=None)
        generator = Generator(section, ledger, pool=pool, chat=chat, limit=limit, progress=progress)
        ledger.open()
        try:
            asyncio.run(generator.run(worklist.work(served.name, survey), look))
        finally:
            progress.close()
            ledger.close()
            stage.manifest["counts"] = survey.figures(ledger, generator.came_of_it)
            stage.manifest["token_check"] = generator.token_check.figures
            stage.manifest["tagged"] = generator.came_of_it["tagged"]
            generator.token_check.report()
    stage.manifest["closing_id"] = chat.closing_id if chat else None
    return stage.manifest["counts"]


def look_ahead(options: GenerateOptions, stage: Stage) -> dict[str, Any]:
    """Look at what the server of --serve needs, before it is started; return what the manifest says of the engine."""
    if not options.generate.serve:
        return {}
    from eagle3.checks import preflight

    return preflight.before_engine(options, stage, serve_args=server_arguments(options))


@contextlib.contextmanager
def server(options: GenerateOptions, stage: Stage) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """Yield (addresses ending in /v1, a function that raises when the run must stop)."""
    from eagle3.engines import launch
    from eagle3.traces import client

    section = options.generate
    if not section.serve:
        yield [client.base_url(url) for url in section.endpoint], stage.check_stop
        return
    with launch.serve(
        options.engine, Path(options.model.path), stage=stage, label="generate", extra_args=server_arguments(options)
    ) as started:

        def look() -> None:
            stage.check_stop()
            started.require_alive()

        stage.manifest["engine"] = {"kind": started.kind, "version": started.version}
        yield [started.base_url], look


def server_arguments(options: GenerateOptions) -> list[str]:
    """Return the arguments of --serve's server besides engine.args."""
    return [*options.generate.serve_args, *(["--trust-remote-code"] if options.model.trust_remote_code else [])]


def refuse_other_model(stage: Stage, old: str, new: str) -> None:
    """Raise StaleError when the traces that lie there were asked of a model with another name."""
    if old and Path(old).name != Path(new).name:
        raise StaleError(
            "another model is to be asked than the one that made the traces here",
            where=stage.directory,
            expected=old,
            found=new,
            fix="ask the old model, or write elsewhere with --out",
        )


# --- the end ----------------------------------------------------------------------------------------------


def conclude(options: GenerateOptions, stage: Stage, ledger: Any, figures: dict[str, Any]) -> None:
    """Say what came of it and complete the stage.

    Raises FailureLimitError when too many prompts failed or none gave a trace.
    """
    stage.manifest["counts"], failed = figures, figures["failed"]
    lost, kept = figures["skipped"].get("truncated", 0), ledger.counts["truncated"]
    answers = ledger.counts["traces"] + lost
    logger.info("%d traces (%d generated tokens), %d with reasoning; skipped: %s; failed: %d",
                ledger.counts["traces"], ledger.counts["completion_tokens"], ledger.counts["with_reasoning"],
                figures["skipped"] or "none", failed)
    if tagged := stage.manifest.get("tagged"):
        logger.warning("%d replies had their reasoning inside the content; it was moved out. A reasoning parser on the "
                       "server does that itself (vLLM: --reasoning-parser NAME)", tagged)
    if lost or kept:
        say = logger.warning if lost > TRUNCATED_WARNING * answers else logger.info
        say("cut at max_tokens: %d of %d replies lost (%.1f%%), %d kept%s", lost, answers, 100 * lost / answers, kept,
            "; raise --max-tokens" if say is logger.warning else "")
    if others := ledger.counts["traces"] - figures["done"]:
        logger.info("%d traces are of prompts outside this file or --limit; they stay", others)
    if failed > options.generate.max_failures or not figures["done"]:
        raise FailureLimitError(
            f"{failed} prompts failed" if failed else "no prompt gave a trace",
            where=stage.directory / ("failures.jsonl" if failed else "skipped.jsonl"),
            expected=f"at most {options.generate.max_failures} failures and at least one trace",
            found=first_reason(stage.directory / ("failures.jsonl" if failed else "skipped.jsonl")),
            fix="the traces so far are kept; the same command asks the failed ones again",
        )
    describe_data(stage)
    outputs = {name: stage.directory / f"{name}.jsonl" for name in ("traces", "skipped")}
    stage.complete(counts=figures, outputs=outputs, content=ledger.content)


def describe_data(stage: Stage) -> None:
    """Write the data report; a trace is not worth less for a plot that failed."""
    from eagle3.traces import data_report

    try:
        data_report.write(stage.directory, closing_id=stage.manifest.get("closing_id"))
        logger.info("data report: %s", stage.directory / "data_report.html")
    except Exception as error:  # noqa: BLE001 - whatever a plotting library raises
        logger.warning("no data report: %s: %s", type(error).__name__, error)


def first_reason(path: Path) -> str:
    """Return the most frequent reason in a file of records, with one example of its detail."""
    counted: Counter[str] = Counter()
    details: dict[str, str] = {}
    for _, record in files.read_jsonl(path):
        counted[record["reason"]] += 1
        details.setdefault(record["reason"], record["detail"])
    if not counted:
        return ""
    reason, number = counted.most_common(1)[0]
    return f"{number} × {reason}" + (f", such as: {details[reason]}" if details[reason] else "")


if __name__ == "__main__":
    main(__doc__, GenerateOptions, run)
