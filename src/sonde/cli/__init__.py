"""The command line: ``sonde`` and ``python -m sonde``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from .console import UsageError, did_you_mean

# each is a module here with ``arguments(parser)``, ``run(options) -> exit code`` and a docstring whose first line is the help
COMMANDS = ("doctor", "demo", "bench", "explain", "tune", "build", "cache")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 success, 1 a wrong result, 2 a bad request, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot print "×" must not abort a benchmark
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except UsageError as problem:
        print(f"sonde: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sonde: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sonde", description="Fused sampling-and-aggregation operators for PyTorch.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    known = {}
    for name in COMMANDS:
        module = import_module(f".{name}", __package__)
        short, _, long = (module.__doc__ or "").partition("\n\n")
        known[name] = commands.add_parser(name, help=short, description=short, epilog=" ".join(long.split()))
        module.arguments(known[name])
        known[name].set_defaults(run=module.run)

    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UsageError(did_you_mean("command", argv[0], COMMANDS))
    options, rest = parser.parse_known_args(argv)
    if rest:
        command = known.get(options.command, parser)
        near = get_close_matches(rest[0], command._option_string_actions, 1)
        hint = f"did you mean {near[0]}?" if near else f"see {command.prog} --help"
        raise UsageError(f"unknown argument {rest[0]!r}; {hint}")
    if options.version:
        from .. import __version__

        print(f"sonde {__version__}")
    elif options.command is None:
        parser.print_help()
    else:
        return options.run(options)
    return 0
