"""A stub of an OpenAI-compatible server with scripted faults and deterministic answers.

In a test: `with Stub({"replies": {"Hi": [{"status": 500}, {}]}}) as stub:` and then `stub.url`, `stub.calls`.
By hand:   python tests/support/stub_server.py --port 0 --script faults.json   (prints its address)

The script is one JSON object:
  model, max_model_len      what /v1/models lists
  delay_s                   before every answer
  die_after                 gone (connections refused) after that many chat requests
  default                   a step for every prompt without steps of its own
  replies                   {text of the last user message: [step, …]}; the last step repeats
  refuses                   names of fields; a request that has one is answered with HTTP 400 (or `refuses_status`)
                            and, with `refuses_detail`, a list of what is wrong with it, as FastAPI does
  chat                      a `Chat` (in Python only) that makes the token ids and the counts of usage
  says                      (in Python only) a function of a /v1/completions request's body that gives its choice
  spelled                   with chat: each character as tokens of its own, so that ids differ and texts do not
  paths                     {path: body} of other GETs, such as /metrics
  unstreamed                requests for a stream are answered whole
  streams_lack              names of fields of the choice that a stream has not
  listed                    more fields of the model in /v1/models, such as owned_by
A step may have: status, headers, message (an error); delay_s; reset (close without an answer); raw (a body as
it stands, or an object); content, reasoning, finish_reason, tool_calls; reasoning_field; token_ids (false: none given);
shown: {field: value} of the message instead of what was generated, such as a stripped content; usage; choice, more:
fields of the choice and of the body.
Without `content` the answer is a function of the prompt text. Token ids are the UTF-8 bytes of the texts.
"""

import argparse
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

END_TOKEN = 256


def answer_to(text: str) -> str:
    return f"You said {text[::-1]!r}, which has {len(text)} characters."


class Stub:
    """The server in a thread; `calls` lists the last user text of each chat request as it arrives."""

    def __init__(self, script: dict[str, Any] | None = None, port: int = 0) -> None:
        self.script = script or {}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.authorization: list[str] = []
        self.lines: list[str] = []  # of all requests, as they came: "GET /v1/models"
        self.in_flight = self.most_in_flight = 0
        self.dead = False
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self.server = _Server(("127.0.0.1", port), _Handler)
        self.server.stub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> "Stub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if not self.dead:
            self.dead = True
            self.server.shutdown()
            self.server.server_close()

    def next_step(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        with self._lock:
            self.calls.append(text)
            self.bodies.append(body)
            steps = self.script.get("replies", {}).get(text) or [self.script.get("default", {})]
            step = steps[min(self._asked[text], len(steps) - 1)]
            self._asked[text] += 1
            if len(self.calls) > self.script.get("die_after", float("inf")):
                step = {"reset": True}
                threading.Thread(target=self.stop, daemon=True).start()
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            return step

    def completion(self, body: dict[str, Any], text: str, step: dict[str, Any]) -> dict[str, Any]:
        content, reasoning = step.get("content", answer_to(text)), step.get("reasoning")
        reason = step.get("finish_reason", "stop")
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": step.get("tool_calls", [])}
        if reasoning is not None:
            message[step.get("reasoning_field", self.script.get("reasoning_field", "reasoning"))] = reasoning
        message |= step.get("shown", {})
        prompt_ids, ids = self._token_ids(body, reasoning, content, reason)
        choice = {"index": 0, "message": message, "finish_reason": reason} | step.get("choice", {})
        response = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice],
                    "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}}
        if body.get("return_token_ids") and step.get("token_ids", self.script.get("token_ids", True)):
            response["prompt_token_ids"] = prompt_ids
            choice.setdefault("token_ids", ids)
        if "usage" in step:
            response["usage"] = step["usage"]
        return response | step.get("more", {})

    def _token_ids(self, body: dict[str, Any], reasoning: str | None, content: str | None, reason: str | None
                   ) -> tuple[list[int], list[int]]:
        with self._lock:  # tokenizers have a state while they work
            return self._token_ids_of(body, reasoning, content, reason)

    def _token_ids_of(self, body: dict[str, Any], reasoning: str | None, content: str | None, reason: str | None
                      ) -> tuple[list[int], list[int]]:
        chat, text = self.script.get("chat"), (reasoning or "") + (content or "")
        as_bytes = list(json.dumps(body["messages"]).encode())
        if chat is None:
            return as_bytes, list(text.encode()) + ([END_TOKEN] if reason == "stop" else [])
        if self.script.get("spelled"):
            ids = [token for letter in text for token in chat._text_ids(letter)] + [chat.end_id]
            return as_bytes, ids if reason == "stop" else ids[:-1]
        prompt_ids = chat.prompt_ids(body["messages"], body.get("tools", []), body.get("chat_template_kwargs"))
        ids = chat.completion_ids(prompt_ids, reasoning, content)
        return prompt_ids, ids if reason == "stop" else ids[:-1]


def _part(value: Any, k: int, count: int) -> Any:
    """Return the k-th of `count` parts of a text or list."""
    return value[len(value) * k // count : len(value) * (k + 1) // count]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    stub: Stub

    def handle_error(self, *_: object) -> None:  # clients that are killed are part of the test
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        stub = self.server.stub
        self._note_line()
        if self.path == "/v1/models":
            model = {"id": stub.script.get("model", "stub-model"), "object": "model"} | stub.script.get("listed", {})
            if stub.script.get("max_model_len"):
                model["max_model_len"] = stub.script["max_model_len"]
            self._send(200, {"object": "list", "data": [model]})
        elif self.path == "/stats":
            self._send(200, {"requests": len(stub.calls), "most_in_flight": stub.most_in_flight})
        elif self.path in stub.script.get("paths", {}):
            self._send(200, stub.script["paths"][self.path])
        else:
            self._send(404, {"error": {"message": "not here"}})

    def do_POST(self) -> None:
        stub = self.server.stub
        self._note_line()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub.authorization.append(self.headers.get("Authorization", ""))
        continued = self.path == "/v1/completions"  # token ids go on; they may contain no user at all
        text = "" if continued else str([m for m in body["messages"] if m["role"] == "user"][-1]["content"])
        step = stub.next_step(body, text)
        try:
            time.sleep(step.get("delay_s", stub.script.get("delay_s", 0)))
            self._answer(body, text, step)
        finally:
            stub.in_flight -= 1

    def _note_line(self) -> None:
        """Note what was asked; a proxy is asked for a whole address, and answers as that server would."""
        self.server.stub.lines.append(f"{self.command} {self.path}")
        if "://" in self.path:
            self.path = "/" + self.path.split("/", 3)[3]

    def _answer(self, body: dict[str, Any], text: str, step: dict[str, Any]) -> None:
        stub = self.server.stub
        if step.get("reset") or stub.dead:
            self.close_connection = True
        elif "status" in step:
            error = {"error": {"message": step.get("message", f"scripted {step['status']}")}}
            self._send(step["status"], error, step.get("headers", {}))
        elif refused := [name for name in stub.script.get("refuses", []) if name in body]:
            items = [{"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted"}
                     for name in refused]
            said = {"detail": items} if stub.script.get("refuses_detail") else {"error": {"message": str(items)}}
            self._send(stub.script.get("refuses_status", 400), said)
        elif "raw" in step:
            self._send(200, step["raw"])
        elif self.path == "/v1/completions":
            choice = stub.script["says"](body)
            self._send(200, {"object": "text_completion", "model": body["model"], "choices": [choice],
                             "usage": {"completion_tokens": 5}})
        elif body.get("stream") and not stub.script.get("unstreamed"):
            self._stream(stub.completion(body, text, step), step.get("chunks", 3))
        else:
            self._send(200, stub.completion(body, text, step))

    def _stream(self, whole: dict[str, Any], count: int) -> None:
        """Send a completion as a stream: texts and ids in `count` parts, the last with the reason, then the usage."""
        (choice,), message = whole["choices"], whole["choices"][0]["message"]
        lacking = self.server.stub.script.get("streams_lack", [])
        choice = {name: value for name, value in choice.items() if name not in lacking}
        rest = {name: value for name, value in choice.items() if name not in ("message", "token_ids", "finish_reason")}
        head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        events = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
        if "prompt_token_ids" in whole:
            events[0]["prompt_token_ids"] = whole["prompt_token_ids"]
        for k in range(count):
            delta = {name: _part(value, k, count) for name, value in message.items()
                     if name not in ("role", "tool_calls") and value}
            if message.get("tool_calls") and k == 0:
                delta["tool_calls"] = message["tool_calls"]
            part = rest | {"delta": delta, "finish_reason": reason if k == count - 1 else None}
            events.append({"choices": [part | ({"token_ids": _part(ids, k, count)} if ids else {})]})
        events.append({"choices": [], "usage": whole.get("usage")})
        lines = [b"data: " + json.dumps(head | event).encode() + b"\n\n" for event in events]
        data = b"".join([*lines, b"data: [DONE]\n\n"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--script", type=Path, help="JSON file with faults")
    arguments = parser.parse_args()
    script = json.loads(arguments.script.read_text()) if arguments.script else {}
    with Stub(script, arguments.port) as stub:
        print(stub.url, flush=True)
        while not stub.dead:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
