"""A package named sglang for tests on CPUs: SGLang's interfaces, as far as a capture uses them, around a tiny Llama.

SGLang itself cannot serve here: its kernels are for GPUs. Taken after its sources, 0.5.8 to 0.5.23: layers called with
(positions, hidden_states, forward_batch, residual) that return (hidden, residual), norms that write into both, the
logits processor called with (ids, normed, head, batch), a model that is called by its `forward` and not as a module,
ids and positions in buffers that the next pass overwrites, the engine's model in a spawned process, arguments parsed by
its own parser. Its hook manager is SGLang's file of 0.5.17, word for word but for what it logs.
"""

from pathlib import Path

SERVER_ARGS = '''
import argparse, dataclasses, json


@dataclasses.dataclass
class ServerArgs:
    model_path: str = ""
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    dtype: str = "auto"
    trust_remote_code: bool = False
    context_length: int = 0
    skip_tokenizer_init: bool = False
    disable_radix_cache: bool = False
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    max_total_tokens: int = 0
    disable_overlap_schedule: bool = False
    disable_cuda_graph: bool = False
    cuda_graph_backend_prefill: str = ""
    cuda_graph_backend_decode: str = ""
    enforce_disable_flashinfer_allreduce_fusion: bool = False
    enable_dp_attention: bool = False
    attention_backend: str = ""
    sampling_backend: str = ""
    mem_fraction_static: float = 0.9
    broken: str = ""
    forward_hooks: list = None

    @staticmethod
    def add_cli_args(parser):
        for field in dataclasses.fields(ServerArgs):
            flag = "--" + field.name.replace("_", "-")
            if field.type is bool:
                parser.add_argument(flag, action="store_true")
            else:
                parser.add_argument(flag, type=json.loads if field.name == "forward_hooks" else field.type,
                                    default=field.default)


def prepare_server_args(argv):
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return ServerArgs(**vars(parser.parse_args(argv)))
'''

HOOK_MANAGER = '''
import fnmatch, importlib


def register_forward_hooks(model, hook_specs):
    name_to_module = dict(model.named_modules())
    for spec in hook_specs:
        hook = resolve_callable(spec["hook_factory"])(spec.get("config") or {})
        for name, module in name_to_module.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in spec["target_modules"]):
                module.register_forward_hook(hook)


def resolve_callable(path):
    module_name, fn_name = path.split(":", 1)
    return getattr(importlib.import_module(module_name), fn_name)
'''

LOGITS_PROCESSOR = '''
import dataclasses
import torch


@dataclasses.dataclass
class LogitsMetadata:
    forward_mode: object
    next_token_logits_buffer: object = None

    @classmethod
    def from_forward_batch(cls, batch):
        return cls(batch.forward_mode, batch.next_token_logits_buffer)


class LogitsProcessor(torch.nn.Module):
    def forward(self, input_ids, hidden_states, lm_head, batch, aux_hidden_states=None):
        ends = torch.tensor(batch.extend_seq_lens_cpu).cumsum(0) - 1
        self.every = self._get_logits(hidden_states, lm_head, LogitsMetadata(batch.forward_mode))
        return self.every[ends]

    def _get_logits(self, hidden_states, lm_head, logits_metadata):
        assert logits_metadata.next_token_logits_buffer is None, "the engine's own logits would be overwritten"
        return (hidden_states.to(lm_head.weight.dtype) @ lm_head.weight.T).float()
'''

MODEL = '''
import types
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor


class Mode:
    def is_idle(self): return False
    def is_decode(self): return False


class Norm(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, hidden, residual=None):
        if residual is None:
            return self.norm(hidden)
        residual.add_(hidden)  # in place, as the fused kernels do
        hidden.copy_(self.norm(residual))
        return hidden, residual


class Layer(torch.nn.Module):
    def __init__(self, layer, rotary):
        super().__init__()
        self.self_attn, self.mlp, self._rotary = layer.self_attn, layer.mlp, [rotary]
        self.input_layernorm, self.post_attention_layernorm = map(
            Norm, (layer.input_layernorm, layer.post_attention_layernorm))

    def forward(self, positions, hidden_states, forward_batch, residual):
        if residual is None:
            residual, hidden_states = hidden_states.clone(), self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        parts, start = [], 0
        for length in forward_batch.extend_seq_lens_cpu:
            some = hidden_states[None, start : start + length]
            angles = self._rotary[0](some, positions[None, start : start + length])
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None].to(some.dtype)
            parts.append(self.self_attn(some, position_embeddings=angles, attention_mask=mask)[0][0])
            start += length
        hidden_states, residual = self.post_attention_layernorm(torch.cat(parts), residual)
        return self.mlp(hidden_states), residual


class Model(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embed_tokens, self.norm = model.embed_tokens, Norm(model.norm)
        self.layers = torch.nn.ModuleList(Layer(each, model.rotary_emb) for each in model.layers)

    def forward(self, input_ids, positions, batch):
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, batch, residual)
        return self.norm(hidden, residual)[0]


class CausalLM(torch.nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.model, self.lm_head, self.logits_processor = Model(whole.model), whole.lm_head, LogitsProcessor()

    @torch.no_grad()
    def forward(self, input_ids, positions, batch):
        return self.logits_processor(input_ids, self.model(input_ids, positions, batch), self.lm_head, batch)


def scheduler(arguments, connection):
    """A scheduler process: passes of at most max_prefill_tokens, in the order of the requests."""
    from transformers import AutoModelForCausalLM
    from sglang.srt.model_executor.hook_manager import register_forward_hooks

    torch.set_num_threads(1)
    whole = AutoModelForCausalLM.from_pretrained(arguments.model_path, dtype=getattr(torch, arguments.dtype),
                                                 attn_implementation="eager").eval()
    model = CausalLM(whole)
    hooks = arguments.forward_hooks
    register_forward_hooks(model, hooks[1:] if arguments.broken == "layers" else hooks)
    ids_buffer = torch.zeros(4096, dtype=torch.int64)
    place_buffer = torch.zeros(4096, dtype=torch.int64)
    connection.send("ready")
    while True:
        jobs = connection.recv()
        replies, rest = [], list(jobs)
        while rest:
            some, tokens = [], 0
            while rest and (not some or tokens + len(rest[0]) < arguments.max_prefill_tokens):
                some.append(rest.pop(0))
                tokens += len(some[-1])
            ids, places = ids_buffer[:tokens], place_buffer[:tokens]
            ids.copy_(torch.tensor([token for each in some for token in each]))
            places.copy_(torch.tensor([place for each in some for place in range(len(each))]))
            if arguments.broken == "ids":
                ids[0] += 1
            batch = types.SimpleNamespace(forward_mode=Mode(), input_ids=ids, positions=places,
                                          extend_seq_lens_cpu=[len(each) for each in some],
                                          next_token_logits_buffer=torch.zeros(len(some), 1))
            last = model.forward(ids, places, batch).log_softmax(-1)
            every = model.logits_processor.every.log_softmax(-1)
            ids_buffer.fill_(-1), place_buffer.fill_(-1)  # as the next pass would
            start = 0
            for each, row in zip(some, last):
                token = int(row.argmax())
                said = [(None, each[0], None)] + [(float(every[start + k, next_one]), next_one, None)
                                                  for k, next_one in enumerate(each[1:])]
                replies.append({"meta_info": {"output_token_logprobs": [(float(row[token]), token, None)],
                                              "input_token_logprobs": said}})
                start += len(each)
        connection.send(replies)
'''

ENGINE = '''
import multiprocessing
from sglang.srt import tiny_model


class Engine:
    def __init__(self, *, server_args):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=tiny_model.scheduler, args=(server_args, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.recv() == "ready"

    def generate(self, *, input_ids, sampling_params, return_logprob, logprob_start_len):
        assert sampling_params == {"max_new_tokens": 1, "temperature": 0.0} and return_logprob
        self._connection.send(input_ids)
        return self._connection.recv()
'''

FILES = {
    "sglang/__init__.py": "", "sglang/srt/__init__.py": "", "sglang/srt/entrypoints/__init__.py": "",
    "sglang/srt/layers/__init__.py": "", "sglang/srt/model_executor/__init__.py": "",
    "sglang/srt/server_args.py": SERVER_ARGS, "sglang/srt/model_executor/hook_manager.py": HOOK_MANAGER,
    "sglang/srt/layers/logits_processor.py": LOGITS_PROCESSOR, "sglang/srt/tiny_model.py": MODEL,
    "sglang/srt/entrypoints/engine.py": ENGINE,
}


def write(folder: Path, version: str = "0.5.17") -> Path:
    """Write the package, installed as `version`, into a folder for PYTHONPATH; return the folder."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.lstrip("\n"))
    about = folder / f"sglang-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return folder
