"""Command lines that end in a program with options of its own."""

from typing import Any

from typer.core import TyperCommand, TyperOption


class ProgramCommand(TyperCommand):
    """``space exec [OPTIONS] SANDBOX [OPTIONS] [--] PROGRAM ARGUMENTS…``.

    What follows the sandbox is the program's, its options too; our own options may stand there only in front of ``--``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {
            name: parameter.is_flag
            for parameter in self.params
            if isinstance(parameter, TyperOption)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        return super().parse_args(ctx, options_first(args, options))


def options_first(args: list[str], options: dict[str, bool]) -> list[str]:
    """Move our options that stand between the first word and ``--`` in front of it.

    ``options`` says of each whether it is a flag. A ``--`` behind a second word is the program's own.
    """
    ours, words, at = [], [], 0
    while at < len(args) and args[at] != "--":
        name, equals, _ = args[at].partition("=")
        if not name.startswith("-"):
            words.append(args[at])
            if len(words) > 1:
                return args
            at += 1
            continue
        takes_next = not equals and not options.get(name, _is_joined(name, options))
        ours += args[at : at + 1 + takes_next]
        at += 1 + takes_next
    return args if at >= len(args) else [*ours, *words, *args[at:]]


def _is_joined(name: str, options: dict[str, bool]) -> bool:
    """Whether it is a short option with its value in the same word, or not one of ours at all."""
    return name not in options
