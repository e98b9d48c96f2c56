"""Stage 01: ask the verifier and keep what it generates, with the exact token ids: prompts → traces.

A drafter learns to predict its verifier, so it is trained on the verifier's own replies. Reads prompts, JSON
lines (or one JSON array) of {"id", "messages": [{"role", "content"}], "tools"} or {"id", "prompt"}; id and
tools may be missing. Writes into RUN_DIR/01_traces:
  traces.jsonl    one finished reply a line: texts, token ids, what was asked
  skipped.jsonl   prompts that gave no trace (cut inside the reasoning, empty, too long, refused by the
                  template, …) with the reason; they are not asked again until their prompt changes
  failures.jsonl  prompts whose requests failed in the last run; the next run asks them again
Needs an OpenAI-compatible server of the verifier: a running one (--endpoint; its key in OPENAI_API_KEY), or
--serve, which starts the engine on --model and stops it afterwards. With --model, prompts are measured before
they are sent, and servers that give no token ids will do.

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

from eagle3 import config, files
from eagle3.errors import FailureLimitError, StaleError, UsageError
from eagle3.log import logger, size
from eagle3.options import GenerateOptions
from eagle3.script import main
from eagle3.stage import Stage, require_free_disk

TRUNCATED_WARNING = 0.05  # share of replies lost to max_tokens above which the user should know
# A line of traces.jsonl spends about 6 bytes on a token's id and 5 on its text.
BYTES_PER_TOKEN = 11
CHARACTERS_PER_TOKEN = 4
# These decide how the server is run or where prompts come from; each trace has its own key for the rest.
NOT_IN_FINGERPRINT = ("generate.prompts", "generate.serve_args", "generate.served_model_name")


def run(options: GenerateOptions, stage: Stage) -> None:
    """Read the prompts, find what is missing, ask for it, and say what came of it."""
    from eagle3 import prompts as prompt_files
    from eagle3 import traces

    section = options.generate
    check_server_choice(options)
    path = Path(config.require(section.prompts, "--prompts", "the prompts file"))
    prompts = prompt_files.read_prompts(path, options.common.limit)
    model = files.model_identity(Path(options.model.path)) if options.model.path else None
    if options.common.dry_run:
        say_plan(options, stage, prompts)
        return

    stage.open(
        inputs={"model": model, "prompts": {"path": str(path), "sha256": files.sha256_file(path)}},
        results=fingerprint_options(options),
        stale_on=("model",),
        grows=True,
        holds=lambda: traces.lie_in(stage.directory),
    )
    ledger = traces.Ledger(stage.directory)
    todo = missing(stage, ledger, prompts)
    if stage.finished(ledger.content, missing=len(todo)):
        return
    require_free_disk(stage.directory, estimate(todo, options)["bytes"], "the traces")
    logger.info("%d of %d prompts to ask", len(todo), len(prompts))
    failed = ask(options, stage, ledger, prompts) if todo else 0
    conclude(options, stage, ledger, prompts, failed)


def missing(stage: Stage, ledger: Any, prompts: list[Any]) -> list[Any]:
    """Return the prompts to ask as far as it can be told without a server."""
    from eagle3.traces import request_keys

    section = stage.options.generate
    name = section.served_model_name or ledger.model
    refuse_other_model(stage, ledger.model, name)
    return ledger.missing(prompts, request_keys(prompts, section, name))


# --- checks and estimates ---------------------------------------------------------------------------------


def check_server_choice(options: GenerateOptions) -> None:
    """Raise UsageError unless exactly one of --endpoint and --serve is given, --serve with a model."""
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
    if section.endpoint:
        from eagle3 import replies

        replies.base_url(section.endpoint)


def estimate(prompts: list[Any], options: GenerateOptions) -> dict[str, int]:
    """Return upper estimates of prompt tokens, generated tokens and bytes; every reply at max_tokens."""
    characters = sum(len(message.get("content") or "") for prompt in prompts for message in prompt.messages)
    prompt_tokens = characters // CHARACTERS_PER_TOKEN
    generated = len(prompts) * options.generate.max_tokens
    return {"prompt": prompt_tokens, "generated": generated, "bytes": (prompt_tokens + generated) * BYTES_PER_TOKEN}


def say_plan(options: GenerateOptions, stage: Stage, prompts: list[Any]) -> None:
    """Print what would be done; fail where the run would."""
    from eagle3 import engines, replies, traces

    section, todo, done = options.generate, prompts, ""
    if not options.common.restart:
        ledger = traces.Ledger(stage.directory)
        todo, done = missing(stage, ledger, prompts), ledger.model
    guess = estimate(todo, options)
    require_free_disk(stage.directory, guess["bytes"], "the traces")
    if section.serve:
        version = engines.check(options.engine, Path(options.model.path))
        source = f"would start {options.engine.kind} {version} on {options.model.path}"
    else:
        url = replies.base_url(section.endpoint or "")
        name = replies.served_model(url, section.served_model_name).name
        refuse_other_model(stage, done, name)
        source = f"would ask {url} for {name}"
    logger.info("%d prompts, %d of them to ask; %s", len(prompts), len(todo), source)
    logger.info("estimate: %s prompt tokens (%d characters a token), at most %s generated tokens, at most %s in %s",
                f"{guess['prompt']:,}", CHARACTERS_PER_TOKEN, f"{guess['generated']:,}", size(guess["bytes"]),
                stage.directory)


def fingerprint_options(options: GenerateOptions) -> dict[str, Any]:
    """Return the options that a resume must not change."""
    return {name: value for name, value in config.result_options(options).items()
            if name.startswith("generate.") and name not in NOT_IN_FINGERPRINT}


# --- asking -----------------------------------------------------------------------------------------------


def ask(options: GenerateOptions, stage: Stage, ledger: Any, prompts: list[Any]) -> int:
    """Ask for what is missing; return how many prompts failed."""
    from eagle3 import replies, traces
    from eagle3.chat import DEFAULT_THINK_TAGS, load_chat
    from eagle3.generation import Generator

    section = options.generate
    chat = load_chat(Path(options.model.path), trust_remote_code=options.model.trust_remote_code,
                     arguments=section.chat_template_kwargs) if options.model.path else None
    with server(options, stage) as (url, look):
        served = replies.served_model(url, section.served_model_name)
        refuse_other_model(stage, ledger.model, served.name)
        stage.manifest["server"] = {"endpoint": url, "model": served.name, "max_model_len": served.limit}
        keys = traces.request_keys(prompts, section, served.name)
        todo = ledger.missing(prompts, keys)
        progress = stage.progress("traces", len(prompts), "prompts", len(prompts) - len(todo))
        ledger.open()
        try:
            client = replies.Client(url, served.name, section, chat.think_tags if chat else DEFAULT_THINK_TAGS)
            limit = min(filter(None, (section.max_model_len, served.limit)), default=None)
            generator = Generator(
                section, ledger, keys, client=client, model=served.name, chat=chat, limit=limit, progress=progress
            )
            asyncio.run(generator.run(todo, look))
        finally:
            progress.close()
            ledger.close()
            stage.manifest["counts"] = ledger.figures(prompts, progress.failed)
    return progress.failed


@contextlib.contextmanager
def server(options: GenerateOptions, stage: Stage) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (address ending in /v1, a function that raises when the run must stop)."""
    from eagle3 import launch, replies

    section = options.generate
    if not section.serve:
        yield replies.base_url(section.endpoint or ""), stage.check_stop
        return
    with launch.serve(
        options.engine, Path(options.model.path), stage=stage, label="generate", extra_args=section.serve_args
    ) as started:

        def look() -> None:
            stage.check_stop()
            started.require_alive()

        stage.manifest["engine"] = {"kind": started.kind, "version": started.version}
        yield started.base_url, look


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


def conclude(options: GenerateOptions, stage: Stage, ledger: Any, prompts: list[Any], failed: int) -> None:
    """Say what came of it and complete the stage.

    Raises FailureLimitError when too many prompts failed or none gave a trace.
    """
    figures = ledger.figures(prompts, failed)
    stage.manifest["counts"] = figures
    lost, kept = figures["skipped"].get("truncated", 0), ledger.counts["truncated"]
    answers = ledger.counts["traces"] + lost
    logger.info("%d traces (%d generated tokens); skipped: %s; failed: %d", ledger.counts["traces"],
                ledger.counts["completion_tokens"], figures["skipped"] or "none", failed)
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
            found=first_reason(stage, ledger, failed),
            fix="the traces so far are kept; the same command asks the failed ones again",
        )
    outputs = {name: stage.directory / f"{name}.jsonl" for name in ("traces", "skipped")}
    stage.complete(counts=figures, outputs=outputs, content=ledger.content)


def first_reason(stage: Stage, ledger: Any, failed: int) -> str:
    """Return the most frequent reason, with one example of its detail."""
    records = [row for _, row in files.read_jsonl(stage.directory / "failures.jsonl")] if failed else [
        *ledger.skipped.values()]
    if not records:
        return ""
    reason, number = Counter(record["reason"] for record in records).most_common(1)[0]
    detail = next(record["detail"] for record in records if record["reason"] == reason)
    return f"{number} × {reason}" + (f", such as: {detail}" if detail else "")


if __name__ == "__main__":
    main(__doc__, GenerateOptions, run)
