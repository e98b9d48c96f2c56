"""Servers that answer: which model they serve, which engine they are, what they say over HTTP."""

import contextlib
import http.client
import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from eagle3.common.errors import PreconditionError
from eagle3.common.processes import Child

_HTTP_TIMEOUT_S = 10.0
# What a port can answer that is not an OpenAI-compatible server, or not one yet.
NO_ANSWER = (OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException)


@dataclass(frozen=True)
class Server:
    """A server that answers; `child` is None when somebody else started it.

    Attributes:
        base_url: OpenAI-compatible root, ends in /v1.
        root_url: the same without /v1 (metrics, health).
        model_name: what to send as `model`.
        kind: vllm or sglang.
        version: engine version, or None when the server does not tell.
    """

    base_url: str
    root_url: str
    model_name: str
    kind: str
    version: str | None
    child: Child | None = None

    def require_alive(self) -> None:
        """Raise PreconditionError with the end of the log when a server started here has ended."""
        if self.child is not None and self.child.poll() is not None:
            raise ended(self.child, "the engine ended while it was in use")


def attach(url: str, model_path: Path) -> Server:
    """Return a running server after checking that it serves this model.

    Raises PreconditionError when nothing answers or when it serves another model.
    """
    root = url.rstrip("/").removesuffix("/v1")
    try:
        return identify(root, model_path)
    except NO_ANSWER as error:
        raise PreconditionError(
            "no OpenAI-compatible server answers", where=url, found=error, fix="start it, or correct the address"
        ) from None


def ended(child: Child, what: str) -> PreconditionError:
    """Return the error for a child that is gone: its exit code and the end of its log."""
    return PreconditionError(
        what,
        where=child.log_path,
        found=f"exit code {child.poll()}; the end of its log:\n{child.tail(30)}",
        fix="see the log; pass what the engine needs with --engine-args or --engine-env",
    )


def identify(root: str, model_path: Path, child: Child | None = None) -> Server:
    """Return the server at `root` if it serves the model: by path, else by the folder's name."""
    models = json.loads(get(f"{root}/v1/models"))["data"]
    for model in models:
        names = {str(model.get("id") or ""), str(model.get("root") or "")}
        if any(_same_model(name, model_path) for name in names):
            kind = "sglang" if model.get("owned_by") == "sglang" else "vllm"
            return Server(f"{root}/v1", root, model["id"], kind, _version_of(root, kind), child)
    raise PreconditionError(
        "the server serves another model",
        where=root,
        expected=model_path,
        found=", ".join(str(model.get("root") or model.get("id")) for model in models) or "no model",
        fix="give the address of a server of this model, or another --model",
    )


def _same_model(name: str, model_path: Path) -> bool:
    return bool(name) and Path(name).name == model_path.resolve().name or Path(name) == model_path


def _version_of(root: str, kind: str) -> str | None:
    path = "version" if kind == "vllm" else "server_info"
    with contextlib.suppress(*NO_ANSWER):
        return json.loads(get(f"{root}/{path}")).get("version")
    return None


def get(url: str) -> str:
    """Return the body of a GET; OSError when it fails. Proxies are not used: servers are near."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key()}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_HTTP_TIMEOUT_S) as response:
        return response.read().decode(errors="replace")


def api_key() -> str:
    """Return the key for the server from the environment; servers without one take any."""
    return os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or "EMPTY"
