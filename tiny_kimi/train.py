"""Trains the model from nothing on its tasks, packs the weights, and measures what is left of them on held-out tasks.

    python -m tiny_kimi.train --minutes 8 --out tiny_kimi/weights.xz      about ten minutes on one H200

Every question is new. The loss is taken on reasoning and answer. Experts are kept equally busy as DeepSeek-V3 does it:
no loss for it, but a bias on each expert's score that rises while the expert has less than its share. In the last fifth
of the time matrices are rounded to 6 bits in each forward pass, so that the packed weights are the trained ones.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from tiny_kimi import model as tiny
from tiny_kimi import tokenizer
from tiny_kimi.tasks import Task, tasks

_POOL = 8  # batches that are sorted by length together
_USUAL_LENGTH = 80  # tokens of a task
_PAD_TO = 32
_PAD = tokenizer.ids()["[PAD]"]
_BIAS_STEP = 1e-3
_ROUNDED_FROM = 0.8  # of the time


class Batches(IterableDataset):
    """Endless batches of (ids [N, T], labels [N, T]) of about `tokens` tokens, texts of similar length together."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        source = tasks(1_000_003 * (1 + (info.id if info else 0)))
        backend, order = tokenizer.load(), torch.Generator().manual_seed(info.id if info else 0)
        while True:
            pool = itertools.islice(source, self.tokens * _POOL // _USUAL_LENGTH)
            batches = list(self._cut(sorted(encode(backend, pool), key=lambda row: len(row[0]))))
            for place in torch.randperm(len(batches), generator=order).tolist():
                yield batches[place]

    def _cut(self, rows: list[tuple[list[int], int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and (stop - start) * _padded(len(rows[stop][0])) < self.tokens:
                stop += 1
            yield collate(rows[start:stop])
            start = stop


def encode(backend: Any, pool: Iterator[Task]) -> list[tuple[list[int], int]]:
    """Return (ids, length of the prompt) of each task."""
    some = list(pool)
    prompts = backend.encode_batch([tokenizer.prompt_text(task.question) for task in some])
    replies = backend.encode_batch([tokenizer.reply_text(task.reasoning, task.answer) for task in some])
    return [(prompt.ids + reply.ids, len(prompt.ids)) for prompt, reply in zip(prompts, replies, strict=True)]


def collate(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and the labels one token ahead, -100 where nothing is to be learnt."""
    length = _padded(max(len(ids) for ids, _ in rows))
    ids = torch.full((len(rows), length), _PAD)
    labels = torch.full((len(rows), length), -100)
    for place, (row, prompt) in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        labels[place, prompt - 1 : len(row) - 1] = torch.tensor(row[prompt:])
    return ids, labels


def _padded(length: int) -> int:
    return -(-length // _PAD_TO) * _PAD_TO


# --- the model in training --------------------------------------------------------------------------------


def all_experts(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every expert on every token [T, H], weighted: few and small, so that sorting tokens would cost more."""
    share = torch.zeros(len(hidden), self.num_experts, device=hidden.device, dtype=weights.dtype)
    share = share.scatter(1, index, weights).t().unsqueeze(-1)
    gate, up = (hidden @ self.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    return (((self.act_fn(gate) * up) @ self.down_proj.transpose(1, 2)) * share).sum(0).to(hidden.dtype)


def build(device: str) -> Any:
    """Return a fresh text model in float32 whose experts run as `all_experts`."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    torch.manual_seed(0)
    DeepseekV3Experts.forward = all_experts
    network = DeepseekV3ForCausalLM(tiny.text_config()).float()
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embed" in name else 0.7 / math.sqrt(parameter.shape[-1]))
    return network.to(device)


def load_of(router: Any, chosen: torch.Tensor) -> torch.Tensor:
    """Return how many tokens each expert got [E], without waiting for the GPU as bincount would."""
    counts = torch.zeros(router.num_experts, device=chosen.device)
    return counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=counts.dtype))


def balance(loads: dict[Any, torch.Tensor]) -> None:
    """Move each expert's bias a step towards an equal load (DeepSeek-V3, section 2.1.2)."""
    for router, load in loads.items():
        router.e_score_correction_bias += _BIAS_STEP * torch.sign(load.mean() - load)


class Rounded(torch.nn.Module):
    """A parametrization: the weight rounded to 6 bits in the forward pass, the gradient as if it were not."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight of the same shape."""
        levels, scale = tiny.quantize(weight.detach())
        return weight + (levels * scale - weight.detach())


def matrices(network: Any) -> Iterator[tuple[Any, str]]:
    """Yield (module, parameter name) of what is packed in 6 bits."""
    for module in network.modules():
        yield from ((module, name) for name, p in module.named_parameters(recurse=False) if p.dim() > 1)


def train(network: Any, given: argparse.Namespace, device: str) -> None:
    """Train for the given minutes."""
    from torch.nn.utils import parametrize

    loads: dict[Any, torch.Tensor] = {}
    routers = [module for module in network.modules() if hasattr(module, "e_score_correction_bias")]
    for router in routers:
        router.register_forward_hook(lambda module, _, out: loads.__setitem__(module, load_of(module, out[2])))
    decayed = [p for p in network.parameters() if p.dim() > 1]
    plain = [p for p in network.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                                  lr=given.lr, betas=(0.9, 0.98), fused=True)
    loader = DataLoader(Batches(given.batch_tokens), batch_size=None, num_workers=given.workers)
    started, step, tokens, rounded = time.monotonic(), 0, 0, False
    for ids, labels in loader:
        progress = (time.monotonic() - started) / (60 * given.minutes)
        if progress >= 1:
            break
        if progress > _ROUNDED_FROM and not rounded:
            rounded = True
            for module, name in list(matrices(network)):
                parametrize.register_parametrization(module, name, Rounded())
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = network(input_ids=ids.to(device, non_blocking=True), use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), labels.to(device, non_blocking=True).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance(loads)
        step, tokens = step + 1, tokens + ids.numel()
        if step % given.log_every == 0:
            busy = max(float(load.max() / load.sum()) for load in loads.values())
            rate = tokens / (time.monotonic() - started)
            print(f"{progress:6.1%} step {step} loss {float(loss.detach()):.4f} busiest expert {busy:.0%} "
                  f"{rate:,.0f} tokens/s", flush=True)
    for module in [module for module in network.modules() if parametrize.is_parametrized(module)]:
        for name in list(module.parametrizations):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)


# --- afterwards -------------------------------------------------------------------------------------------


def published(network: Any) -> dict[str, torch.Tensor]:
    """Return the weights under the names of published checkpoints: an expert's matrices one by one."""
    tensors = {}
    for name, tensor in network.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            tensors[name] = tensor
    return tensors


@torch.inference_mode()
def accuracy(folder: Path, device: str, count: int) -> dict[str, Any]:
    """Return the share of right answers, by kind too, and of closed think blocks on held-out tasks, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    codec = AutoTokenizer.from_pretrained(folder, padding_side="left")
    asked = list(itertools.islice(tasks(7, held_out=True), count))
    given = codec([tokenizer.prompt_text(task.question) for task in asked], return_tensors="pt", padding=True,
                  add_special_tokens=False).to(device)
    output = network.generate(**given, max_new_tokens=384, do_sample=False)[:, given["input_ids"].shape[1] :]
    right: Counter[str] = Counter()
    closed = 0
    for task, ids in zip(asked, output.tolist(), strict=True):
        reasoning, tag, answer = codec.decode(ids).partition("</think>")
        closed += bool(tag and reasoning)
        right[task.kind] += answer.partition("<|im_end|>")[0] == task.answer and "<|im_end|>" in answer
    asked_by_kind = Counter(task.kind for task in asked)
    return {"tasks": count, "correct": right.total() / count, "closed": closed / count,
            "by_kind": {kind: right[kind] / number for kind, number in asked_by_kind.items()}}


def main() -> int:
    """Train, pack, measure; exit code 1 when less than 90% of the answers are right or a think block stays open."""
    parser = argparse.ArgumentParser(prog="python -m tiny_kimi.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training (default: 8)")
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens a step (default: 65,536)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default: 3e-3)")
    parser.add_argument("--workers", type=int, default=0, help="processes that make tasks (default: 0)")
    parser.add_argument("--log-every", type=int, default=100, help="steps between lines (default: 100)")
    parser.add_argument("--held-out", type=int, default=1100, help="tasks asked at the end (default: 1,100)")
    parser.add_argument("--out", type=Path, default=tiny.WEIGHTS, help="packed weights (default: those of the project)")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="only measure this text-only folder")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = given.measure or given.out.with_suffix(".model")
    if not given.measure:
        torch.set_float32_matmul_precision("high")
        network = build(device)
        print(f"{sum(p.numel() for p in network.parameters()):,} parameters", flush=True)
        train(network, given, device)
        tiny.pack(published(network), given.out)
        print(f"{given.out}: {given.out.stat().st_size:,} bytes", flush=True)
        tiny.write(folder, text_only=True, weights=given.out)
    result = accuracy(folder, device, given.held_out)
    print(json.dumps(result))
    return 0 if result["correct"] >= 0.9 and result["closed"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
