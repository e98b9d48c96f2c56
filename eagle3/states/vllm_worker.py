"""vLLM's worker with a tap on the model: imported by vLLM (`worker_cls`), in each process of the engine."""

from typing import Any

from vllm.platforms import current_platform

from eagle3.states import pass_sender, self_check
from eagle3.states.recorder import EngineTap, Pass
from eagle3.states.settings import CaptureSettings

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

TAPPED = "eagle3_capture"  # in vLLM's additional_config, which is part of the key of its compiled graphs


class CaptureWorker(Worker):  # type: ignore[misc, valid-type]
    """Taps the model before it is compiled, and sends every pass after `capture_start`."""

    def load_model(self, *args: Any, **keywords: Any) -> None:
        """Load the model and tap it."""
        super().load_model(*args, **keywords)
        self._tapped = self.vllm_config.additional_config[TAPPED]
        fp8 = self._tapped["fp8"]
        self._tap = EngineTap(self.model_runner.get_model(), self._tapped["layers"], self._tapped["num_layers"],
                              outputs=self._tapped["outputs"],
                              rehearse=lambda passed: pass_sender.rehearse(passed, fp8=fp8))

    def execute_model(self, scheduler_output: Any, *args: Any, **keywords: Any) -> Any:
        """Note what the pass holds, then run it."""
        self._scheduled = scheduler_output.num_scheduled_tokens
        return super().execute_model(scheduler_output, *args, **keywords)

    # --- called by collective_rpc ---

    def capture_start(self, settings: str) -> str:
        """Send passes from now on; `settings` is the JSON of CaptureSettings. Returns the decoder's path."""
        options = CaptureSettings.from_json(settings)
        self._sums: list[list[float]] | None = None
        self._sender = pass_sender.PassSender(options, self.device, first_rank=self.rank == 0)
        self._tap.listen(self._send)
        return self._tap.path

    def capture_mark(self, batch: int) -> list[list[float]] | None:
        """Say that a batch is through; return the checksums of this rank's first pass."""
        self._sender.mark(batch)
        return self._sums

    def _send(self, passed: Pass) -> None:
        count = sum(self._scheduled.values())
        if self._sums is None:
            self._sums = self_check.checksums([each[:count] for each in passed.streams])
        model = self.model_runner.get_model()
        self._sender.send(passed, count, len(self._scheduled), lambda rows: model.compute_logits(passed.hidden[rows]))
