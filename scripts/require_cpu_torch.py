"""Stops the set-up where pip brought a CUDA build of torch: vLLM for CPUs does not run with it.

Read from torch's version file, since torch cannot be imported before its own requirements are there.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

MESSAGE = """\
setup: this torch was built for {built_for}, but vLLM for CPUs needs a CPU build.
  pip takes the first build that its package indexes offer. Point it at PyTorch's CPU builds as well,
  then run the set-up again (PyTorch's "Get Started" page names the address for pip and CPU):
      .venv/bin/pip uninstall torch
      PIP_EXTRA_INDEX_URL=<address of PyTorch's CPU builds> make setup"""

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit("setup: torch is not installed in this environment")
version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
for platform in ("cuda", "hip", "xpu"):
    if version.get(platform) is not None:
        sys.exit(MESSAGE.format(built_for=f"{platform} {version[platform]}"))
