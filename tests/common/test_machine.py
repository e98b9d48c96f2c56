"""What a machine is found to have."""


import pytest
from support.examined import findings, subject

from eagle3.checks import machine_checks
from eagle3.common import machine

H200 = "0, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-a0"
SECOND = "1, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-b1"


def test_gpus_are_read_with_memory_and_capability(smi):
    smi([H200, SECOND])
    assert [gpu.index for gpu in machine.gpus()] == [0, 1]
    assert machine.gpus()[0] == machine.Gpu(0, "NVIDIA H200", 143771, 12, "580.1", (9, 0), "GPU-a0")
    assert findings(machine_checks.check_gpus, subject(engine__tensor_parallel_size=2))[""].status == "ok"


@pytest.mark.parametrize(("visible", "indexes"), [
    ("1", [1]), ("1,0", [1, 0]), ("GPU-b", [1]), ("0,7,1", [0]), ("", []),
])
def test_only_visible_gpus_count(smi, monkeypatch, visible, indexes):
    smi([H200, SECOND])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in machine.gpus()] == indexes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.index for gpu in subject(engine__env={"CUDA_VISIBLE_DEVICES": visible}).gpus] == indexes
