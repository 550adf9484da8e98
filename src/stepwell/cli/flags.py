"""Gives commands the flags of the configuration's options, and `--config`."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Parameter

from stepwell.config import OPTIONS, Option

Command: TypeAlias = Callable[..., int]

ConfigFile: TypeAlias = Annotated[
    Path | None,
    Parameter(
        name="--config",
        show_default=False,
        help=(
            "TOML file of options, as in `memory = '64GiB'`; the environment (STEPWELL_MEMORY) and flags win "
            "over it. Default: the file that STEPWELL_CONFIG names, else none."
        ),
    ),
]


def option_flags(*names: str) -> Callable[[Command], Command]:
    """Replace a command's `**flags: str | None` by the flags of the options `names`, or of all options.

    Cyclopts reads flags from a function's signature; writing them there would declare each option twice.
    """
    options = [option for option in OPTIONS.values() if not names or option.name in names]

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        kept = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*kept, *(_parameter(option) for option in options)]
        )
        return command

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    help_text = f"{option.help} Default: {option.default_text(os.environ)}."
    annotation = Annotated[
        str | None, Parameter(name=option.flag, show_default=False, negative=(), help=help_text)
    ]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
