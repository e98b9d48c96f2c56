"""Servers that answer: which model they serve, which engine they are, what they say over HTTP."""

import contextlib
import http.client
import ipaddress
import json
import os
import ssl
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.processes import Child

_HTTP_TIMEOUT_S = 10.0
# What a port can answer that is not an OpenAI-compatible server, or not one yet.
NO_ANSWER = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, http.client.HTTPException)


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
    models = listed(f"{root}/v1")
    for model in models:
        names = {str(model.get("id") or ""), str(model.get("root") or "")}
        if any(_same_model(name, model_path) for name in names):
            kind = "sglang" if model.get("owned_by") == "sglang" else "vllm"
            return Server(f"{root}/v1", root, str(model["id"]), kind, _version_of(root, kind), child)
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
        version = json.loads(get(f"{root}/{path}")).get("version")
        return str(version) if version else None
    return None


def listed(base_url: str) -> list[dict[str, Any]]:
    """Return the models that a server lists; one of NO_ANSWER when it does not answer as such a server does."""
    models = json.loads(get(f"{base_url}/models"))["data"]
    if not isinstance(models, list) or not all(isinstance(model, dict) and model.get("id") for model in models):
        raise ValueError("its list of models is not one of objects with ids")
    return models


def sampling_defaults(server: Server) -> dict[str, Any]:
    """Return what a server says of the sampling that it falls back on; {} where it does not tell (vLLM does not)."""
    with contextlib.suppress(*NO_ANSWER):
        told = json.loads(get(f"{server.root_url}/server_info"))
        return {name: told[name] for name in ("sampling_defaults", "preferred_sampling_params") if name in told}
    return {}


# --- one way to a server ----------------------------------------------------------------------------------


def proxy_for(url: str) -> str | None:
    """Return the proxy of the environment through which every request to this address goes; None for none.

    `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy` count, in small or capital letters; what is on this machine
    is asked directly whatever they say. Raises PreconditionError for a proxy that is not an HTTP one.
    """
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if _on_this_machine(host):
        return None
    known = urllib.request.getproxies_environment()
    proxy = known.get(parts.scheme) or known.get("all")
    bypassed = any(urllib.request.proxy_bypass(name, known) for name in (parts.netloc, host))
    if not proxy or bypassed:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if urllib.parse.urlsplit(proxy).scheme not in ("http", "https"):
        raise PreconditionError(
            "the environment names a proxy that is not an HTTP one", where=f"{parts.scheme}_proxy or all_proxy",
            expected="http://HOST:PORT", found=f"{urllib.parse.urlsplit(proxy).scheme}://…",
            fix=f"name an HTTP proxy, or ask the server directly: export no_proxy={host}",
        )
    return proxy


def _on_this_machine(host: str) -> bool:
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host == "localhost" or host.endswith(".localhost")


def tls_context() -> ssl.SSLContext:
    """Return how servers prove themselves: by the system's authorities (or SSL_CERT_FILE) and certifi's."""
    context = ssl.create_default_context()
    with contextlib.suppress(ImportError):
        import certifi

        context.load_verify_locations(certifi.where())
    return context


def transports(url: str, count: int) -> list[Any]:
    """Return HTTP clients for openai's library, all with one TLS context: loading the certificates takes a while."""
    import openai

    verify: Any = tls_context() if url.startswith("https:") else False  # nothing to verify in plain HTTP
    proxy = proxy_for(url)
    return [openai.DefaultAsyncHttpxClient(trust_env=False, proxy=proxy, verify=verify) for _ in range(count)]


def get(url: str) -> str:
    """Return the body of a GET; OSError when it fails."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key()}"})
    proxy = proxy_for(url)
    handlers: list[Any] = [urllib.request.ProxyHandler({request.type: proxy} if proxy else {})]
    if request.type == "https":
        handlers.append(urllib.request.HTTPSHandler(context=tls_context()))
    with urllib.request.build_opener(*handlers).open(request, timeout=_HTTP_TIMEOUT_S) as response:
        return response.read().decode(errors="replace")


def api_key() -> str:
    """Return the key for the server from the environment; servers without one take any."""
    return os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or "EMPTY"
