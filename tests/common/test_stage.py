"""A stage as a process: it completes once, is made again when damaged or told to, and refuses other options."""


from support.pipeline import manifest


def test_a_stage_completes_once(tmp_path, stage):
    code, errors = stage("--max-length", "100")
    assert code == 0, errors
    assert errors.splitlines()[-1].endswith("next: python 03_build_vocab_mapping.py --run-dir runs/x")
    first = manifest(tmp_path / "runs/x/02_states")
    assert (first["status"], first["stage"], first["error"]) == ("complete", "02_states", "")
    assert first["outputs"]["result"]["bytes"] == 100
    assert first["options"]["extract"]["max_length"] == 100
    assert first["versions"]["python"]
    code, errors = stage("--max-length", "100")
    assert code == 0
    assert "complete already" in errors
    assert manifest(tmp_path / "runs/x/02_states") == first


def test_options_that_change_no_result_may_change(tmp_path, stage):
    assert stage()[0] == 0
    code, errors = stage("--batch-tokens", "99999", "--log-level", "debug")
    assert (code, "complete already" in errors) == (0, True)


def test_a_damaged_output_is_made_again(tmp_path, stage):
    assert stage()[0] == 0
    (tmp_path / "runs/x/02_states/result.txt").write_bytes(b"short")
    code, errors = stage()
    assert (code, "missing or damaged" in errors) == (0, True)
    assert (tmp_path / "runs/x/02_states/result.txt").stat().st_size == 100


def test_a_changed_option_is_refused_with_both_ways_on(tmp_path, stage):
    assert stage("--max-length", "100")[0] == 0
    code, errors = stage("--max-length", "200", "--engine-args", "--a 'b c'", TOY_INPUT="two")
    assert code == 3
    assert "extract.max_length: 100 → 200" in errors
    assert "engine.args: [] → " in errors
    assert "input traces: \"one\" → \"two\"" in errors
    ways = [line for line in errors.splitlines() if "python 02_extract_hidden_states.py" in line]
    assert ways[0].endswith("--out runs/x/02_states_2")
    assert "--restart" in ways[1]
    assert "'--a '\"'\"'b c'\"'\"''" in ways[0]  # can be copied as it is
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "complete"


def test_restart_moves_the_old_result_aside(tmp_path, stage):
    assert stage("--max-length", "100")[0] == 0
    assert stage("--max-length", "200", "--restart")[0] == 0
    assert stage("--max-length", "300", "--restart")[0] == 0
    manifests = [manifest(tmp_path / f"runs/x/02_states{end}") for end in ("", ".old-1", ".old-2")]
    lengths = [content["options"]["extract"]["max_length"] for content in manifests]
    assert lengths == [300, 100, 200]
    assert (tmp_path / "runs/x/02_states.old-1/result.txt").exists()


def test_out_writes_beside(tmp_path, stage):
    assert stage("--max-length", "100")[0] == 0
    assert stage("--max-length", "200", "--out", "runs/x/02_states_200")[0] == 0
    assert manifest(tmp_path / "runs/x/02_states_200")["options"]["extract"]["max_length"] == 200
    assert manifest(tmp_path / "runs/x/02_states")["options"]["extract"]["max_length"] == 100
    assert (tmp_path / "runs/x/logs/02_states_200.log").exists()
