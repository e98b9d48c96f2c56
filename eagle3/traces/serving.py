"""The servers that stage 01 asks: running ones, or one that it starts and stops."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle3.common.options import GenerateOptions
from eagle3.common.stage import Stage
from eagle3.engines import launch
from eagle3.traces import client


@contextlib.contextmanager
def server(options: GenerateOptions, stage: Stage) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """Yield (addresses ending in /v1, a function that raises when the run must stop)."""
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
