"""Every command of `stepwell`, with its flags and help. What a command does is in a file of its name."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, CycloptsError, Parameter

from stepwell.cli.errors import CommandError
from stepwell.cli.flags import ConfigFile, option_flags
from stepwell.config import ConfigError, resolve
from stepwell.server.launch import LaunchError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell gives it


def _version() -> str:
    return version("stepwell")


app = App(
    name="stepwell",
    help="A tiered KV cache for large-language-model inference.",
    version=_version,
    help_format="markdown",
)
# By name, so that what they need is imported for them alone.
app.command("stepwell.cli.trace:app", name="trace", help="Look into traces, convert them, make them up.")
app.command("stepwell.cli.replay:replay", name="replay", help="What caches would give on recorded traffic.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status (0 done, 1 failed, 2 wrong flags or configuration)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        hint = ""
        if arguments[:1] == ["run"] and "--" not in arguments:
            hint = " Write `--` before the engine's command: stepwell run -- vllm serve MODEL"
        return _fail(f"{error}{hint}", EXIT_USAGE)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except (CommandError, LaunchError) as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    # --help and --version print, and give nothing.
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    print(f"stepwell: {message}", file=sys.stderr)
    return status


@app.command
@option_flags()
def serve(*, config: ConfigFile = None, **flags: str | None) -> int:
    """Run the cache server in the foreground, until SIGTERM or Ctrl-C.

    Engines of this user on this node find it at its socket. Their cached chunks live as long as it does.
    """
    effective = resolve(flags, os.environ, config)
    from stepwell.server.serve import run as run_server

    return run_server(effective.config)


@app.command
@option_flags()
def run(
    *command: Annotated[str, Parameter(help="The engine's command, after `--`: vllm serve MODEL ...")],
    config: ConfigFile = None,
    **flags: str | None,
) -> int:
    """Start an engine with the cache: stepwell run -- vllm serve MODEL ...

    Starts the cache server where none answers, adds the connector to a vLLM command, and becomes that
    command. The server goes on when the engine ends, so the next start finds its cache warm.
    """
    effective = resolve(flags, os.environ, config)
    from stepwell.cli.run import run_engine

    return run_engine(command, effective.config, os.environ)


@app.command
@option_flags("socket")
def stats(
    *,
    as_json: Annotated[
        bool,
        Parameter(
            name="--json",
            negative=(),
            show_default=False,
            help="Print the counters as JSON. Default: a table.",
        ),
    ] = False,
    config: ConfigFile = None,
    **flags: str | None,
) -> int:
    """Show what the cache server holds and has done since it started: bytes, chunks and tokens."""
    effective = resolve(flags, os.environ, config)
    from stepwell.cli.stats import print_stats

    return print_stats(effective.config.socket, as_json)


@app.command
@option_flags("socket")
def clear(*, config: ConfigFile = None, **flags: str | None) -> int:
    """Forget every chunk, and say how many chunks that were. Engines finish the reads under way."""
    effective = resolve(flags, os.environ, config)
    from stepwell import wire
    from stepwell.cli.ask import ask

    print(f"{ask(effective.config.socket, wire.Clear(None), wire.Cleared).chunks} chunks removed")
    return 0


@app.command
def fsck(
    folder: Annotated[Path, Parameter(help="The folder of a disk tier (--disk).")],
    /,
    *,
    as_json: Annotated[
        bool,
        Parameter(name="--json", negative=(), show_default=False, help="Print it as JSON. Default: as text."),
    ] = False,
) -> int:
    """Check a disk tier's folder while no server uses it: chunks, spaces, bytes, damaged records.

    Reads every chunk and changes nothing. Exits with 1 where a record is damaged.
    """
    from stepwell.cli.fsck import run

    return run(folder, as_json)


@app.command(name="config")
@option_flags()
def show_config(
    *,
    as_json: Annotated[
        bool,
        Parameter(name="--json", negative=(), show_default=False, help="Print it as JSON. Default: a table."),
    ] = False,
    config: ConfigFile = None,
    **flags: str | None,
) -> int:
    """Show the value of every option in its unit, and where it came from. Starts nothing."""
    effective = resolve(flags, os.environ, config)
    if as_json:
        rows = {each.name: {"value": each.value, "source": each.source} for each in effective.settings}
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return 0
    width = max(len(each.name) for each in effective.settings)
    value_width = max(len(each.value) for each in effective.settings)
    for each in effective.settings:
        print(f"{each.name:{width}}  {each.value:{value_width}}  {each.source}")
    return 0


@app.command
def demo(
    *,
    json: Annotated[
        Path | None,
        Parameter(
            show_default=False, help="Also write the figures (seconds, tokens) here. Default: nowhere."
        ),
    ] = None,
    report: Annotated[
        Path,
        Parameter(show_default=False, help="Write the picture here, as HTML. Default: demo-report.html."),
    ] = Path("demo-report.html"),
    quick: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            help="Fewer and shorter prompts. Default: the whole demo, under 10 minutes.",
        ),
    ] = False,
) -> int:
    """Run the same requests on vLLM without and with Stepwell, and compare.

    Shows the time to the first token in seconds, and the prompt tokens that were computed and not.
    """
    from stepwell.cli.demo import run

    return run(json, report, quick)


@app.command
def bench(
    *,
    json: Annotated[
        Path | None, Parameter(show_default=False, help="Also write the figures here. Default: nowhere.")
    ] = None,
) -> int:
    """Measure a cache server of its own on this machine against its speed targets.

    Store and load of 64 MiB in chunks of 2 and 32 MiB, as a part of a plain memcpy of the same sizes;
    look-ups in milliseconds. Needs 600 MiB of memory and some 10 seconds. Exits with 1 where a target is
    missed.
    """
    from stepwell.cli.bench import run

    return run(json)
