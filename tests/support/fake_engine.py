"""An interpreter that holds a fake vLLM: an HTTP server that answers at once and can misbehave.

`install(folder)` returns the path of the interpreter. Behaviour comes from the environment of the engine:
  FAKE_MODE      serve (default), exit (print and leave), hang (never listen), worker (start a child of its own),
                 compute, read (do so silently for three seconds, then serve),
                 die (leave at the eleventh request, that is in the second measurement, but once),
                 deaf (listen, never answer chats)
  FAKE_MODEL     the model it says it serves; default: the one it was started for
  FAKE_METRICS   "no": no speculation counters
  FAKE_PAUSE_S   seconds after each chunk of a stream
  FAKE_CHANGE    id number of the prompt that is answered differently with a drafter
Every request is appended to FAKE_LOG as a JSON line, and with worker the two process ids.
"""

import os
import stat
import sys
from pathlib import Path

SERVER = '''
import argparse, json, os, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--port", type=int)
parser.add_argument("--speculative-config", type=json.loads)
options, rest = parser.parse_known_args()
mode = os.environ.get("FAKE_MODE", "serve")
model = os.environ.get("FAKE_MODEL", options.model)
drafts, lock = [0], threading.Lock()
died = os.environ.get("FAKE_LOG", "") + ".died"


def note(**what):
    if "FAKE_LOG" in os.environ:
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps(what) + "\\n")


print("fake engine starts", flush=True)
if mode == "exit":
    print("RuntimeError: the weights are upside down", flush=True)
    sys.exit(7)
if mode == "hang":
    time.sleep(600)
if mode in ("compute", "read"):  # without a word, for three seconds
    ends = time.monotonic() + 3
    while time.monotonic() < ends:
        if mode == "read":
            with open("/dev/zero", "rb") as zeros:
                zeros.read(1 << 20)
            time.sleep(0.1)
if mode == "worker":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(pids=[os.getpid(), child.pid])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, body):
        data = body.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body, ids):
        """Send the ids as vLLM does: a chunk a round, here of two tokens with a drafter after the first one."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        size = 2 if options.speculative_config else 1
        parts = [ids[:1]] + [ids[i:i + size] for i in range(1, len(ids), size)]
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        events = [{"prompt_token_ids": [1, 2, 3], "choices": [first]}]
        for k, part in enumerate(parts):
            words = " ".join(map(str, part))
            reason = "length" if k == len(parts) - 1 else None
            delta = {"content": words if k == 0 else " " + words}
            events.append({"choices": [{"index": 0, "delta": delta, "token_ids": part, "finish_reason": reason}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(ids)}})
        for event in events:
            event |= {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": model}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            self.wfile.flush()
            time.sleep(float(os.environ.get("FAKE_PAUSE_S", 0)))
        self.wfile.write(b"data: [DONE]\\n\\n")
        self.close_connection = True

    def do_GET(self):
        if self.path == "/v1/models":
            self.send(json.dumps({"data": [{"id": model, "root": model, "owned_by": "vllm"}]}))
        elif self.path == "/version":
            self.send('{"version": "0.32.0"}')
        elif self.path == "/metrics" and options.speculative_config and os.environ.get("FAKE_METRICS") != "no":
            n = drafts[0]
            lines = [f"vllm:spec_decode_num_{k}_total{{engine=\\"0\\"}} {v}" for k, v in
                     (("drafts", n), ("draft_tokens", 3 * n), ("accepted_tokens", 1.5 * n))]
            lines += [f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\\"0\\",position=\\"{i}\\"}} {v}"
                      for i, v in enumerate((0.8 * n, 0.5 * n, 0.2 * n))]
            self.send("# HELP x y\\n" + "\\n".join(lines) + "\\n")
        else:
            self.send("{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        note(text=text, max_tokens=body["max_tokens"], drafter=bool(options.speculative_config), seed=body.get("seed"),
             temperature=body.get("temperature"), pid=os.getpid(),
             authorization=self.headers["Authorization"])
        with lock:
            drafts[0] += 10
            if mode == "die" and drafts[0] > 100 and not os.path.exists(died):
                open(died, "w").close()
                print("Segmentation fault in fake kernel", flush=True)
                os._exit(9)
        if mode == "deaf":
            time.sleep(600)
        ids = [len(text)] + list(range(body["max_tokens"] - 1))
        if options.speculative_config and text.endswith(os.environ.get("FAKE_CHANGE", "never")):
            ids[5] = 99
        if body.get("stream"):
            return self.stream(body, ids)
        self.send(json.dumps({
            "id": "x", "object": "chat.completion", "created": 0, "model": model, "prompt_token_ids": [1, 2, 3],
            "choices": [{"index": 0, "finish_reason": "length", "token_ids": ids,
                         "message": {"role": "assistant", "content": " ".join(map(str, ids))}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}}))


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
'''


def install(folder: Path, version: str = "0.32.0", engine: str = "vllm") -> str:
    """Make an interpreter in `folder` whose `engine` is the fake one and whose torch sees no GPU."""
    packages = folder / "packages"
    module = packages / "vllm/entrypoints/openai"
    module.mkdir(parents=True)
    (module / "api_server.py").write_text(SERVER)
    for package in (module, *module.parents[:2]):
        (package / "__init__.py").touch()
    (packages / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    metadata = packages / f"{engine}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    interpreter = folder / "python"
    interpreter.write_text(
        f'#!/bin/sh\nPYTHONPATH="{packages}{os.pathsep}$PYTHONPATH" exec "{sys.executable}" "$@"\n'
    )
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    return str(interpreter)
