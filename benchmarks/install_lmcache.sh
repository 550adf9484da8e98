#!/usr/bin/env bash
# Installs LMCache into a folder of its own, for `engine.py --lmcache-dir` and `first_pass.py --lmcache-dir`. It is a
# guest of these benchmarks and never a dependency; without its dependencies, because it would replace torch and
# vLLM. Give the Python that has vLLM in PYTHON (default: .venv/bin/python).
set -euo pipefail
(($# == 1)) || { echo "usage: install_lmcache.sh FOLDER" >&2; exit 2; }
"${PYTHON:-.venv/bin/python}" -m pip --quiet --disable-pip-version-check install --no-deps --target "$1" \
    lmcache==0.5.6 aiofile==3.12.3 aiofiles==25.1.0 caio==0.12.10 awscrt==0.38.1 nvtx==0.2.17 \
    sortedcontainers==2.4.0 redis==8.1.0 opentelemetry-exporter-prometheus==0.61b0 grpcio-observability==1.78.0
