"""`stepwell demo`: the demo itself is in `stepwell.demo`; here is what to do where it cannot run."""

from importlib.util import find_spec
from pathlib import Path

from stepwell.cli.errors import CommandError


def run(json_path: Path | None, report_path: Path, quick: bool) -> int:
    """Run the demo; its exit status. Raises CommandError where the engine is not installed."""
    missing = [name for name in ("torch", "vllm") if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"the demo runs a real engine, but {' and '.join(missing)} cannot be imported here; run "
            "`make demo` in a checkout, or `pip install 'stepwell[vllm]'`"
        )
    from stepwell.demo.main import run_demo

    return run_demo(json_path, report_path, quick)
