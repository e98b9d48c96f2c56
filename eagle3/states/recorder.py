"""Reading the residual stream off a running decoder: where the engine gives it, or by hooks on the layers.

What is captured, for layers [a, b, c, N-1]: the stream entering layers a, b and c, and the output of layer N-1, the
teacher state, before the final norm. There are two ways to it, which give the same bits in eager mode:

- outputs: models that serve EAGLE-3 return the streams entering given layers beside their normed output; id N is the
  stream behind the last layer. That works inside compiled graphs, and costs what serving costs.
- hooks on the layers, for every model with a list of layers; not inside compiled graphs. vLLM's layers return the
  stream in two parts that have to be added at once, because the next layer's fused norm writes into them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def positions_in(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the positions [tokens] or [3, tokens] that a vLLM layer was given, None where it has none.

    Most layers take them first, gpt-oss second: they are the whole numbers among the arguments.
    """
    import torch

    given = (value for value in (keywords.get("positions"), *arguments) if isinstance(value, torch.Tensor))
    return next((value for value in given if not value.is_floating_point()), None)


class LayerHooks:
    """Forward hooks that keep the four streams and the positions of the latest pass.

    The streams entering layers a, b, c are the outputs of the layers before them.
    """

    def __init__(self, model: Any, layers: Sequence[int], num_layers: int) -> None:
        _, modules, _ = decoder_layers(model, num_layers)
        self._slots = {layer - 1: slot for slot, layer in enumerate(layers[:-1])}
        self._count = len(layers)
        self._streams: dict[int, Any] = {}
        self.positions: Any = None
        for index, module in enumerate(modules):
            if index in self._slots or index == num_layers - 1:
                module.register_forward_hook(self._hook(index, last=index == num_layers - 1), with_kwargs=True)

    def take(self) -> list[Any]:
        """Return and forget the streams of the latest pass, [tokens, H] each; none of a pass that ended early."""
        taken, self._streams = self._streams, {}
        return [taken[slot] for slot in sorted(taken)] if len(taken) == self._count else []

    def _hook(self, index: int, *, last: bool) -> Any:
        def hook(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            value = stream(output)
            if index in self._slots:
                self._streams[self._slots[index]] = value
            if last:
                self._streams[self._count - 1] = value
                self.positions = positions_in(arguments, keywords)

        return hook


@dataclass
class Pass:
    """What a forward pass of the engine showed: ids and positions [n], streams [n, H] by slot, normed output [n, H].

    n is the engine's: behind the tokens there may be padding.
    """

    tokens: Any
    positions: Any
    streams: list[Any]
    hidden: Any


class EngineTap:
    """Sits on an engine's whole model and tells of each pass; the engine itself notices nothing.

    Passes before `listen` (profiling, warming up) are shown to `rehearse`, so that the memory which a pass needs here
    is in use when the engine measures how much it may take for its cache.
    """

    def __init__(self, model: Any, layers: Sequence[int], num_layers: int, *, outputs: bool,
                 rehearse: Callable[[Pass], object]) -> None:
        """Make the model give its streams: by its own outputs (before it is compiled), or by hooks."""
        self.path, _, self._embedding = decoder_layers(model, num_layers)
        self._slots, self._tell, self._tokens = len(layers), rehearse, None
        self._hooks = None if outputs else LayerHooks(model, layers, num_layers)
        if outputs:
            model.set_aux_hidden_state_layers((*layers[:-1], num_layers))
        model.register_forward_hook(self._end, with_kwargs=True)

    def listen(self, tell: Callable[[Pass], object]) -> None:
        """Tell of all passes from now on. The embedding is watched from here: a compiler must not see the hook."""
        self._tell = tell
        self._embedding.register_forward_pre_hook(self._on_tokens)

    def _on_tokens(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        self._tokens = arguments[0]  # models for images get embeddings, and their tokens are seen only here

    def _end(self, _module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        import torch

        streams, hidden, positions = self._read(arguments, keywords, output)
        if streams and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            tokens = keywords.get("input_ids", arguments[0] if arguments else None)
            tokens = self._tokens if tokens is None else tokens
            self._tell(Pass(tokens, positions[0] if positions.dim() == 2 else positions, streams, hidden))
        return hidden

    def _read(self, arguments: Any, keywords: Any, output: Any) -> tuple[list[Any], Any, Any]:
        if self._hooks is not None:
            return self._hooks.take(), output, self._hooks.positions
        hidden, streams = output if isinstance(output, tuple) else (output, [])
        if len(streams) != self._slots:
            raise LookupError(f"{self._slots} streams asked for, {len(streams)} given: run with --capture hooks")
        positions = keywords.get("positions")
        return list(streams), hidden, positions if positions is not None else arguments[1]
