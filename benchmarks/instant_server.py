"""An OpenAI-compatible server that answers at once, in a process of its own, for the benchmarks beside it.

Every chat completion gets the same ready-made bytes (texts, prompt and completion ids), so that the client is
what is measured. A streamed one comes as a chunk a token, each a packet of its own, in turns with the other streams,
as fast as the server can. GET /stats gives the chat requests since the last GET /reset, and when the first came and the
last was answered (time.monotonic, which all processes of a machine share).

  python benchmarks/instant_server.py --tokens 100      (prints its address)
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

MODEL = "instant"
_HEAD = "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"


def _response(value: object, status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    return _HEAD.format(status=status, length=len(body)).encode() + body


def _completion(tokens: int) -> bytes:
    ids = [1000 + 37 * number % 30000 for number in range(tokens)]
    text = " ".join(f"word{number % 89}" for number in range(tokens * 3 // 4))
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", "token_ids": ids}
    return _response({
        "id": "x", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice],
        "usage": {"prompt_tokens": 30, "completion_tokens": tokens, "total_tokens": tokens + 30},
        "prompt_token_ids": list(range(500, 530)),
    })


def _stream(tokens: int) -> list[bytes]:
    """Return the chunks of a streamed completion as vLLM sends them: role, tokens with their ids, usage, end."""
    def event(**fields: object) -> bytes:
        body = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        line = b"data: " + json.dumps(body | fields).encode() + b"\n\n"
        return f"{len(line):x}\r\n".encode() + line + b"\r\n"

    def choice(delta: dict, **more: object) -> dict:
        return {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more]}

    head = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n")
    first = event(**choice({"role": "assistant", "content": ""}), prompt_token_ids=list(range(500, 530)))
    words = [event(**choice({"content": f" word{number % 89}"}, token_ids=[1000 + 37 * number % 30000],
                            finish_reason="stop" if number == tokens - 1 else None)) for number in range(tokens)]
    last = event(choices=[], usage={"prompt_tokens": 30, "completion_tokens": tokens, "total_tokens": tokens + 30})
    return [head + first, *words, last + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


class _State:
    """What the connections share."""

    def __init__(self, tokens: int) -> None:
        self.completion, self.stream = _completion(tokens), _stream(tokens)
        self.models = _response({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 65536}]})
        self.count, self.first, self.last = 0, 0.0, 0.0

    def answer(self, line: bytes) -> bytes:
        if line.startswith(b"POST /v1/chat/completions"):
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.count += 1
            return self.completion
        if line.startswith(b"GET /v1/models"):
            return self.models
        if line.startswith(b"GET /reset"):
            self.count, self.first, self.last = 0, 0.0, 0.0
        if line.startswith((b"GET /reset", b"GET /stats", b"GET /health")):
            return _response({"count": self.count, "first": self.first, "last": self.last})
        return _response({"error": {"message": "not here"}}, "404 Not Found")


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with keep-alive; bodies come with Content-Length."""

    def __init__(self, state: _State) -> None:
        self.state, self.buffer = state, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to answer on."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole by now."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            mark = head.lower().find(b"\r\ncontent-length:")
            length = int(head[mark + 17 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            answer = self.state.answer(head)
            if length and b'"stream": true' in body:
                self.task = asyncio.ensure_future(self._send_stream())
            else:
                self.transport.write(answer)  # type: ignore[attr-defined]

    async def _send_stream(self) -> None:
        for chunk in self.state.stream:
            self.transport.write(chunk)  # type: ignore[attr-defined]
            await asyncio.sleep(0)  # the others' turn
        self.state.last = time.monotonic()


async def _serve(tokens: int) -> None:
    state = _State(tokens)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(state), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


class Running:
    """The server of `running()`, seen from the benchmark."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, name: str) -> dict:
        """Return what GET /stats or /reset says: count, first, last."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url.removesuffix('/v1')}/{name}", timeout=30) as response:
            return json.load(response)


@contextlib.contextmanager
def running(tokens: int = 100) -> Iterator[Running]:
    """Start the server as a process, yield it, stop it."""
    process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--tokens", str(tokens)],
                               stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Running(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a completion")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args().tokens))


if __name__ == "__main__":
    main()
