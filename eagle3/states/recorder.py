"""Reading the residual stream off a running decoder: forward hooks, and which tokens of which sample they saw.

What is captured, for layers [a, b, c, N-1]: the stream entering layers a, b and c, and the output of layer N-1, the
teacher state, before the final norm. vLLM's layers return the stream in two parts that have to be added at once,
because the next layer's fused norm writes into them.
"""

from collections.abc import Sequence
from typing import Any

_EMBEDDINGS = ("embed_tokens", "embedding", "word_embeddings", "wte")  # vLLM's gpt-oss has the second


def decoder_layers(model: Any, count: int) -> tuple[str, Any, Any]:
    """Return (path, the decoder's ModuleList of `count` layers, the token embedding beside it).

    Raises LookupError naming the lists found when none fits.
    """
    import torch

    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.split(".")[-1] == "layers"
    }
    for name, module in sorted(lists.items(), key=lambda item: len(item[0])):
        owner = model.get_submodule(name.rpartition(".")[0])
        embedding = next((getattr(owner, own) for own in _EMBEDDINGS if hasattr(owner, own)), None)
        if len(module) == count and embedding is not None:
            return name, module, embedding
    raise LookupError(f"no decoder with {count} layers; lists found: { {n: len(m) for n, m in lists.items()} }")


def stream(output: Any) -> Any:
    """Return the residual stream [tokens, H] that a decoder layer's output stands for (a new tensor)."""
    if not isinstance(output, tuple):
        return output.clone()
    if len(output) > 1 and output[1] is not None:
        return output[0] + output[1]
    return output[0].clone()


def _positions(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return a copy of the positions that a vLLM layer was given, None where it has none.

    Most layers take them first, gpt-oss second: they are the whole numbers among the arguments.
    """
    import torch

    given = (value for value in (keywords.get("positions"), *arguments) if isinstance(value, torch.Tensor))
    whole = next((value for value in given if not value.is_floating_point()), None)
    return None if whole is None else whole.detach().clone()


class Recorder:
    """Forward hooks that keep, for each forward pass, token ids, positions and the four streams.

    The streams entering layers a, b, c are the outputs of the layers before them.
    """

    def __init__(self, model: Any, layers: Sequence[int], num_layers: int) -> None:
        self.path, modules, embedding = decoder_layers(model, num_layers)
        self.slots = {layer - 1: slot for slot, layer in enumerate(layers[:-1])}
        self.slots_last = len(layers) - 1
        self.passes: list[dict[str, Any]] = []
        self.handles = [embedding.register_forward_pre_hook(self._on_tokens)]
        for index, module in enumerate(modules):
            if index in self.slots or index == num_layers - 1:
                hook = self._hook(index, last=index == num_layers - 1)
                self.handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _on_tokens(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        self.passes.append({"tokens": arguments[0].detach().clone(), "streams": {}})

    def _hook(self, index: int, *, last: bool) -> Any:
        def hook(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            current = self.passes[-1]
            value = stream(output)
            if index in self.slots:
                current["streams"][self.slots[index]] = value
            if last:
                current["streams"][self.slots_last] = value
                current["positions"] = _positions(arguments, keywords)

        return hook

    def take(self) -> list[tuple[list[int], list[int], Any]]:
        """Return and forget the passes as (token ids, positions, states [tokens, slots, H])."""
        import torch

        taken = []
        for current in self.passes:
            if len(current["streams"]) != self.slots_last + 1:
                continue  # a pass that ended early
            positions = current["positions"]
            positions = positions[0] if positions.dim() == 2 else positions  # M-RoPE repeats text positions
            states = torch.stack([current["streams"][slot] for slot in sorted(current["streams"])], dim=1)
            count = min(len(states), len(positions), len(current["tokens"]))
            taken.append((current["tokens"][:count].tolist(), positions[:count].tolist(), states[:count]))
        self.passes = []
        return taken


def assign(
    passes: list[tuple[list[int], list[int], Any]], jobs: list[tuple[int, list[int]]]
) -> tuple[dict[int, Any], dict[int, str]]:
    """Give each job its states out of the passes, matched by position and token ids.

    Args:
        passes: from Recorder.take; a pass holds one or more pieces of sequences one after the other.
        jobs: (sample number, token ids).
    Returns:
        ({sample: states [T, slots, H]}, {sample: what is missing}). A sequence may come in several pieces
        (chunked prefill); a sample counts only when every one of its tokens has been seen.
    """
    import torch

    pieces: dict[int, list[Any]] = {number: [] for number, _ in jobs}
    filled = dict.fromkeys(pieces, 0)
    for tokens, positions, states in passes:
        starts = [0] + [k for k in range(1, len(positions)) if positions[k] != positions[k - 1] + 1]
        for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
            for number, ids in jobs:
                offset = positions[start]
                if filled[number] == offset and ids[offset : offset + stop - start] == tokens[start:stop]:
                    pieces[number].append(states[start:stop])
                    filled[number] += stop - start
                    break
    complete, missing = {}, {}
    for number, ids in jobs:
        if filled[number] == len(ids):
            complete[number] = torch.cat(pieces[number]) if len(pieces[number]) > 1 else pieces[number][0]
        else:
            missing[number] = f"states for {filled[number]} of {len(ids)} tokens (cached prefix?)"
    return complete, missing
