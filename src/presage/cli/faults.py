"""How a command ends without an answer: one sentence on stderr and an exit code.

0 answered; 1 not answered although the input was valid (nothing fits, out of memory, disk full, internal error);
2 user error; 3 the condition of --fail-if holds; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from presage.errors import PresageError, near
from presage.text import printable

ANSWERED, UNANSWERED, MISTAKEN, CONDITION_HELD, INTERRUPTED = 0, 1, 2, 3, 130
GUESSES = ((".py", "predict"), (".presage", "predict"), (".toml", "job"), (".json", "trace"), (".json.gz", "trace"))


def run_guarded(run: Callable[[], Any], debug: bool) -> int:
    """Run a command; print any error as one sentence and return the exit code."""
    try:
        code = run()
        sys.stdout.flush()
        if code == INTERRUPTED:  # the parser of the command line was there first
            raise KeyboardInterrupt
    except BrokenPipeError:  # the reader of a pipe has left: nothing to report, and nobody to report it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNANSWERED
    except (Exception, KeyboardInterrupt) as e:
        if debug:
            _trace()
        text, code = describe_error(e)
        if text:
            print(printable(text), file=sys.stderr)
    return code if isinstance(code, int) else ANSWERED


def describe_error(e: BaseException) -> tuple[str, int]:
    """The sentence to print for an error, and the exit code."""
    if isinstance(e, PresageError):
        return f"presage: {e}", e.exit_code
    if isinstance(e, KeyboardInterrupt):
        return "presage: interrupted", INTERRUPTED
    if hasattr(e, "format_message"):  # of the parser of the command line
        return describe_usage_error(e), getattr(e, "exit_code", MISTAKEN) if e.format_message() else ANSWERED
    if isinstance(e, MemoryError):
        return "presage: out of memory: try fewer --draws, ranks or traces", UNANSWERED
    if isinstance(e, OSError) and e.filename is not None:
        return f"presage: {e.filename}: {e.strerror or e}", MISTAKEN
    if isinstance(e, OSError):
        return f"presage: the output could not be written: {e.strerror or e}", UNANSWERED
    return _fault(e), UNANSWERED


def _fault(e: BaseException) -> str:
    """The sentence for an internal error, with its location."""
    frame, where = e.__traceback__, ""
    while frame is not None:
        code = frame.tb_frame.f_code.co_filename
        where = f" in {'/'.join(code.split('/')[-2:])}:{frame.tb_lineno}" if "presage" in code else where
        frame = frame.tb_next
    what = " ".join(f"{type(e).__name__}: {e}".split())[:200]
    return f"presage: internal error, please report it with the output of --debug ({what}{where})"


def _trace() -> None:
    import traceback

    traceback.print_exc()


# ---- mistakes on the command line


def describe_usage_error(e: Any) -> str:
    """The sentence for an error of the option parser."""
    text = e.format_message().strip()
    if not text:  # help was shown instead
        return ""
    context, name = getattr(e, "ctx", None), getattr(e, "option_name", None)
    path = context.command_path if context is not None else "presage"
    if type(e).__name__ == "NoSuchOption":
        problem = (
            f"unknown option {name}{_near_option(context, str(name), e.possibilities or ())}{_after_dashes(context)}"
        )
    elif type(e).__name__ == "MissingParameter":
        problem = _lowered(text.rstrip(".").replace("'", "")) + _example(context)
    elif text.startswith("No such command") and context is not None:
        problem = _no_command(text.split("'")[1], context)
    else:
        problem = _lowered(_value(text))
    return " ".join(f"{path}: {problem} (see {path} --help)".split())


def _value(text: str) -> str:
    """A shorter message for an invalid option value."""
    name, quote, rest = text.rstrip(".").removeprefix("Invalid value for '").partition("': ")
    return f"{name}: {rest.partition(', unable to parse')[0].replace('Input', 'it', 1)}" if quote else text.rstrip(".")


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _example(context: Any) -> str:
    """The first example of the command's help."""
    from rich.markup import render

    lines = (line.strip() for line in render((context and context.command.help) or "").plain.splitlines())
    example = next((line for line in lines if line.startswith(f"{context.command_path} ")), "")
    return f", as in: {example}" if example else ""


def _near_option(context: Any, name: str, like: Sequence[str]) -> str:
    """Commands that have this option, else similar options of this command."""
    root = context.find_root().command if context is not None else None
    owners = [c for c, command in getattr(root, "commands", {}).items() if any(name in p.opts for p in command.params)]
    if owners:
        return f"; {', '.join(owners[:4])} {'has' if len(owners) == 1 else 'have'} it"
    close = get_close_matches(name, like, 2, 0.75) or sorted(like)
    return f": did you mean {' or '.join(close)}?" if close else ""


def _after_dashes(context: Any) -> str:
    """A reminder, where a script may have been meant to get the option."""
    takes = context is not None and any(p.name == "words" for p in context.command.params)
    return "; a script's own arguments go after --" if takes else ""


def _no_command(name: str, context: Any) -> str:
    """Similar commands, or the command that takes such a file."""
    path, known = context.command_path, getattr(context.command, "commands", {})
    verb = next((verb for end, verb in GUESSES if name.partition(":")[0].endswith(end)), "")
    if name in ("help", "version"):
        hint = f": did you mean {path} --{name}?"
    elif verb in known:
        hint = f": did you mean {path} {verb} {name}?"
    else:
        hint = near(name, known) or f": choose from {', '.join(known)}"
    return f"unknown command {name}{hint}"
