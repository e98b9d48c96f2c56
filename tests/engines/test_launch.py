"""Engines: starting, attaching, identity, ending with the parent, version gates, counters."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_engine import install
from support.project import ROOT

from eagle3.common.errors import Interrupted, PreconditionError
from eagle3.common.options import EngineOptions
from eagle3.engines import counters, defaults, installed, launch, servers
from eagle3.engines.counters import Counters


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "verifier"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def start(tmp_path, model):
    """Return a function that serves the model with a fake engine in some mode."""
    python = install(tmp_path)

    def serve(mode="serve", *, args=(), timeout_min=1.0, check_stop=lambda: None, **env):
        env = {"FAKE_MODE": mode, "FAKE_LOG": str(tmp_path / "requests")} | env
        engine = EngineOptions(python=python, env=env, args=list(args), startup_timeout_min=timeout_min)
        stage = SimpleNamespace(run_dir=tmp_path / "run", check_stop=check_stop)
        return launch.serve(engine, model, stage=stage, label="test")

    return serve


def pids_of(path):
    return json.loads(path.read_text().splitlines()[-1])["pids"]


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


# --- start and attach -------------------------------------------------------------------------------------


def test_server_is_ready_identified_and_stopped_with_its_workers(start, model, tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with start("worker") as server:
            assert (server.kind, server.version, server.model_name) == ("vllm", "0.32.0", str(model))
            assert server.base_url == server.root_url + "/v1" and "127.0.0.1" in server.root_url
            pids = pids_of(tmp_path / "requests")
            assert all(alive(pid) for pid in pids)
        assert not any(alive(pid) for pid in pids)
        assert alive(bystander.pid)
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
    assert wait_until(lambda: not any(alive(pid) for pid in pids), 15)


# --- versions and environment -----------------------------------------------------------------------------


def test_missing_engine_names_the_interpreter(tmp_path):
    python = install(tmp_path, engine="something-else")
    with pytest.raises(PreconditionError) as error:
        installed.check(EngineOptions(kind="sglang", python=python))
    assert python in str(error.value) and "sglang" in str(error.value)
    with pytest.raises(PreconditionError, match="does not run"):
        installed.check(EngineOptions(python=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("version", "model_type", "fits"),
    [("0.17.1", "kimi_k25", False), ("0.18.0", "kimi_k25", True), ("0.17.1", "llama", True),
     ("0.17.1", "deepseek_v3", False)],
)
def test_old_vllm_is_refused_for_kimi_and_deepseek(tmp_path, model, version, model_type, fits):
    (model / "config.json").write_text(json.dumps({"model_type": "x", "text_config": {"model_type": model_type}}))
    engine = EngineOptions(python=install(tmp_path, version))
    if fits:
        assert installed.check(engine, model) == version
    else:
        with pytest.raises(PreconditionError, match="patches"):
            installed.check(engine, model)


def test_environment_defaults_give_way_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    python = install(tmp_path)
    env = defaults.default_env(EngineOptions(python=python, startup_timeout_min=90))
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2" and "HF_HUB_OFFLINE" not in env
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "5400"
    given = defaults.default_env(EngineOptions(python=python, env={"VLLM_CPU_KVCACHE_SPACE": "8"}))
    assert given["VLLM_CPU_KVCACHE_SPACE"] == "8"


def test_sglang_gets_all_three_speculation_flags():
    speculative = {"model": "/d", "num_speculative_tokens": 3}
    text = " ".join(launch.command(EngineOptions(kind="sglang"), Path("/m"), 80, [], speculative))
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in text
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path /d" in text and "--host 127.0.0.1" in text


# --- counters ---------------------------------------------------------------------------------------------


def page(drafts, accepted, positions=()):
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
        f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="a b"}} {drafts}',
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.79e9',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * drafts}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}',
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {count}'
        for i, count in enumerate(positions)
    ]
    return "\n".join(lines) + "\n"


def test_acceptance_length_is_pooled_over_rounds():
    assert Counters(10, 30, 15).acceptance_length() == 2.5
    replies = [{"spec_verify_ct": 10, "completion_tokens": 30}, {"spec_verify_ct": 1, "completion_tokens": 1}]
    assert counters.from_meta_info(replies).acceptance_length() == pytest.approx(31 / 11)  # not (3 + 1) / 2


def test_counters_are_differences():
    before, after = counters.parse(page(100, 200, (90, 70, 40))), counters.parse(page(110, 215, (98, 75, 42)))
    counted = counters.difference(before, after)
    assert counted == Counters(10, 30, 15, (8, 5, 2))
    assert counted.acceptance_length() == 2.5
    assert counted.acceptance_by_position() == [0.8, 0.5, 0.2]


def test_counters_add_up_over_engines():
    second = page(10, 20, (8, 7, 5)).replace('engine="0"', 'engine="1"')
    assert counters.parse(page(1, 2, (1, 1, 0)) + second) == Counters(11, 33, 22, (9, 8, 5))


def test_missing_counters_are_unavailable_not_zero():
    assert counters.parse("vllm:num_requests_running 0\n") is None
    assert counters.parse(page(5, 5).replace("accepted_tokens_total", "renamed_total")) is None
    assert counters.difference(None, Counters(1, 3, 1)) is None
    assert counters.difference(Counters(1, 3, 1), None) is None
    assert Counters(0, 0, 0).acceptance_length() is None
    assert counters.from_meta_info([{"completion_tokens": 5}]) is None
    assert counters.from_meta_info([]) is None


def test_restarted_server_is_an_error():
    with pytest.raises(PreconditionError, match="restarted"):
        counters.difference(Counters(100, 300, 200), Counters(10, 30, 15))


def test_sglang_histogram_becomes_acceptance_by_position():
    meta = {"spec_verify_ct": 10, "completion_tokens": 25, "spec_num_correct_drafts": 15,
            "spec_num_proposed_drafts": 30, "spec_correct_drafts_histogram": [2, 3, 3, 2]}
    single = {"completion_tokens": 1}  # prefill only
    counted = counters.from_meta_info([meta, single])
    assert counted == Counters(10, 30, 15, (8, 5, 2))


def test_module_imports_no_engine():
    code = ("import sys; from eagle3.engines import installed, launch, servers, counters; "
            "print([m for m in ('vllm', 'torch') if m in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert result.stdout.strip() == "[]", result.stderr
