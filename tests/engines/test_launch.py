"""Servers: started or attached, of the right model, ended with their workers and with the parent."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_engine import install
from support.processes import gone, lives
from support.project import ROOT

from eagle3.common.errors import Interrupted, PreconditionError
from eagle3.common.options import EngineOptions
from eagle3.common.processes import Child
from eagle3.engines import launch, servers, stall


@pytest.fixture
def start(tmp_path, model):
    """Return a function that serves the model with a fake engine in some mode."""
    python = install(tmp_path)

    def serve(mode="serve", *, args=(), timeout_min=1.0, stall_min=5.0, check_stop=lambda: None, **env):
        env = {"FAKE_MODE": mode, "FAKE_LOG": str(tmp_path / "requests")} | env
        engine = EngineOptions(python=python, env=env, args=list(args), startup_timeout_min=timeout_min,
                               stall_min=stall_min)
        stage = SimpleNamespace(run_dir=tmp_path / "run", check_stop=check_stop)
        return launch.serve(engine, model, stage=stage, label="test")

    return serve


def pids_of(path):
    return json.loads(path.read_text().splitlines()[-1])["pids"]


def test_server_is_ready_identified_and_stopped_with_its_workers(start, model, tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with start("worker") as server:
            assert (server.kind, server.version, server.model_name) == ("vllm", "0.32.0", str(model))
            assert server.base_url == server.root_url + "/v1" and "127.0.0.1" in server.root_url
            pids = pids_of(tmp_path / "requests")
            assert all(lives(pid) for pid in pids)
        assert gone(pids)
        assert lives(bystander.pid)
        assert "fake engine starts" in (tmp_path / "run/logs/test-server.log").read_text()
    finally:
        bystander.kill()
        bystander.wait()


def test_child_that_exits_fails_at_once_with_the_end_of_its_own_log(start, tmp_path):
    log = tmp_path / "run/logs/test-server.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line of an earlier server\n")
    started = time.monotonic()
    with pytest.raises(PreconditionError, match="weights are upside down") as error, start("exit"):
        pytest.fail("it was never ready")
    assert time.monotonic() - started < 10
    assert "exit code 7" in str(error.value) and "earlier server" not in str(error.value)


def test_another_model_on_the_server_is_refused_and_the_child_stopped(start):
    with pytest.raises(PreconditionError, match="serves another model") as error, start(FAKE_MODEL="/models/stranger"):
        pytest.fail("the identity was not checked")
    assert "/models/stranger" in str(error.value)


def test_port_in_use_is_named_and_left_alone(start):
    with start(FAKE_MODEL="x/verifier") as foreign:  # equal folder name: accepted
        port = foreign.root_url.rsplit(":", 1)[1]
        with pytest.raises(PreconditionError, match="port is in use") as error, start(args=["--port", port]):
            pytest.fail("two servers on one port")
        assert "x/verifier" in str(error.value)
        assert servers.get(foreign.root_url + "/health") == "{}"


def test_startup_timeout_and_signal_stop_the_waiting(start):
    with pytest.raises(PreconditionError, match="did not answer within"), start("hang", timeout_min=0.02):
        pytest.fail("it never listens")

    def stop():
        raise Interrupted(signal.SIGTERM)

    with pytest.raises(Interrupted), start("hang", check_stop=stop):
        pytest.fail("it never listens")


def test_an_engine_that_stands_still_is_noticed_looked_at_and_stopped(start, tmp_path):
    tool = tmp_path / "py-spy"  # beside the engine's interpreter
    tool.write_text('#!/bin/sh\necho "Thread $3: waiting in a fake all-reduce"\n')
    tool.chmod(0o755)
    with pytest.raises(PreconditionError, match="stands still") as error, start("hang", stall_min=0.03):
        pytest.fail("it never listens")
    said = str(error.value)
    assert "fake engine starts" in said and "CUDA graphs: --enforce-eager" in said and "--engine-stall-min" in said
    stacks = (tmp_path / "run/logs/test-server.stacks").read_text()
    assert str(tmp_path / "run/logs/test-server.stacks") in said
    (pid,) = set(re.findall(r"Thread (\d+): waiting", stacks))
    assert gone([int(pid)], 10)
    tool.unlink()
    with pytest.raises(PreconditionError, match="py-spy is not installed"), start("hang", stall_min=0.03):
        pytest.fail("it never listens")


@pytest.mark.parametrize("mode", ["compute", "read"])
def test_an_engine_that_works_in_silence_is_left_alone(start, mode):
    with start(mode, stall_min=0.025) as server:  # three seconds of silence, twice as long as may be
        assert server.kind == "vllm"


def test_what_its_last_lines_speak_of_is_named_first(tmp_path):
    log = tmp_path / "engine.log"
    program = ("import time; print('Init torch distributed ends.'); print('Capture cuda graph begin.', flush=True); "
               "time.sleep(600)")
    with Child([sys.executable, "-c", program], log_path=log) as child:
        watch = stall.Watch(EngineOptions(kind="sglang", stall_min=0.02), child)

        def wait():
            while True:
                watch.check()
                time.sleep(0.05)

        with pytest.raises(PreconditionError) as error:
            wait()
    fix = error.value.parts["fix"]
    assert "CUDA graphs (its log speaks of it): --disable-cuda-graph" in fix
    assert fix.index("its log speaks of it") < fix.index("a port that") and "all-reduce, which some" in fix


def test_attach_checks_the_model(start, model, tmp_path):
    with start() as server:
        assert servers.attach(server.base_url, model).model_name == str(model)
        assert servers.attach(server.root_url + "/", model).base_url == server.base_url
        with pytest.raises(PreconditionError, match="serves another model"):
            servers.attach(server.base_url, tmp_path / "other")
    with pytest.raises(PreconditionError, match="no OpenAI-compatible server"):
        servers.attach(server.base_url, model)
    with pytest.raises(PreconditionError, match="no OpenAI-compatible server"):
        servers.attach("no address", model)


def test_server_dead_in_use_is_noticed(start):
    with start() as server:
        server.require_alive()
        server.child.stop()
        with pytest.raises(PreconditionError, match="ended while it was in use"):
            server.require_alive()


def test_killed_parent_leaves_no_orphan(tmp_path, model):
    python = install(tmp_path)
    program = (
        "import sys, time, types, pathlib\n"
        "from eagle3.engines import launch\n"
        "from eagle3.common.options import EngineOptions\n"
        "python, model, here = sys.argv[1:]\n"
        "engine = EngineOptions(python=python, env={'FAKE_MODE': 'worker', 'FAKE_LOG': here + '/pids'})\n"
        "stage = types.SimpleNamespace(run_dir=pathlib.Path(here), check_stop=lambda: None)\n"
        "with launch.serve(engine, pathlib.Path(model), stage=stage, label='test'):\n"
        "    print('ready', flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, python, str(model), str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )
    assert parent.stdout.readline() == "ready\n"
    pids = pids_of(tmp_path / "pids")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(pids, 15)


def test_sglang_gets_all_three_speculation_flags():
    speculative = {"model": "/d", "num_speculative_tokens": 3}
    text = " ".join(launch.command(EngineOptions(kind="sglang"), Path("/m"), 80, [], speculative))
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in text
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path /d" in text and "--host 127.0.0.1" in text
