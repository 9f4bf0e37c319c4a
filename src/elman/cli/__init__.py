"""The command line: each command parses, calls one public function, and prints.

Commands are given by name and imported when they are called, so that ``elman --help`` answers at once.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, get_args

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
    convert,
)

import elman
from elman.errors import ElmanError, LostProcessError, UserError
from elman.visible import clean

_SIGINT, _SIGPIPE = 2, 13
_REFUSALS = {errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP}
"""What the system says of a path that no file can have, or that this user may not follow."""
_LACKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What it says where there is no room for what is written, or the disk has failed."""
_SECONDS_UNTIL_SAID = 10.0
"""How long a process waits for another one to say what is wrong, and to be ended with it, before it says so itself."""


def _converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """What a word says, by the type that is wanted; where that is a whole number, none is rounded to one."""
    wanted = {kind, *get_args(kind)}
    if int in wanted and float not in wanted and not isinstance(tokens, dict):
        for token in tokens:
            if "." in token.value:
                raise CoercionError(token=token, target_type=int)
    return convert(kind, tokens)


app = App(
    name="elman",
    default_parameter=Parameter(converter=_converted),
    help="Train, judge, look into and sample recurrent neural language models. `elman COMMAND --help` tells more.",
    version=elman.__version__,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
for _name, _target, _help in (
    ("train", "train:train", "Train a model on a text and write its run folder."),
    ("resume", "train:resume", "Go on with a run from its newest checkpoint, as if it had never stopped."),
    ("lr-find", "lr_find:lr_find", "Find a learning rate by a short training whose rate rises."),
    ("bench", "bench:bench", "Measure this machine, and how fast each family trains and writes on it."),
    ("eval", "evaluate:evaluate", "Judge a model on the held-out part of its corpus, or on a text of yours."),
    ("score", "score:score", "Say how surprising a text is to a model, and where; follow a log."),
    ("sample", "sample:sample", "Draw text from a model, token by token."),
    ("compare", "compare:compare", "Hold models against each other on equal terms, over several seeds."),
    ("runs", "report:runs", "List runs."),
    ("report", "report:report", "Write the page of a run: how it went, how good it is, what it writes."),
    ("scorecard", "scorecard:scorecard", "Measure what recurrence and attention cost as texts grow."),
    ("tune", "tune:tune", "Search for settings, ending in a run file."),
    ("diagnose", "diagnose:diagnose", "Why does it loop? Repetition in a text, or in what a model writes."),
    ("translate", "translate:translate", "Write the targets of sources with a model that was trained on pairs."),
    ("inspect", "inspect:app", "Look into a model."),
    ("shrink", "shrink:shrink", "Make a trained model smaller, and say what that costs."),
    ("export", "export:app", "Write a model in the format of other tools."),
    ("data", "data:app", "Corpora: list them, fetch them, look at a text before training."),
    ("plan", "plan:plan", "What a training takes on one device or on many: memory, time, communication."),
    ("check", "check:check", "Run the contract suite on a cell and say in one line each what is wrong."),
    ("config", "config:app", "Show settings, resolved or as a schema."),
):
    app.command(f"elman.cli.{_target}", name=_name, help=_help)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after ``elman``; none: those that the process was started with.

    Returns:
        The exit code: 0, 2 for a mistake in what was given, 1 for a failure, 130 after Ctrl-C, 143 after SIGTERM.
    """
    _open_streams()
    _speak_utf8()
    # PyTorch's threads wait for each other after every small product. By default they hold their core for long
    # meanwhile, and training slows down tenfold as soon as another program needs one; this many turns are enough
    # where none does (docs/experiments.md). Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = app(_words(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code or 0
    except ElmanError as error:
        code = _complain("error", str(error), error.exit_code)
        if isinstance(error, LostProcessError):  # threads of PyTorch may go on waiting for the lost one
            sys.stderr.flush()
            os._exit(code)
        return code
    except CycloptsError as error:
        return _complain("error", _refusal(error), 2)
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else _SIGINT
        return _complain("interrupted", "nothing was left to save", 128 + number)
    except BrokenPipeError:
        _let_output_go()  # whoever read it has gone
        return 128 + _SIGPIPE
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # so rich says it
            return 128 + _SIGPIPE
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "tried to allocate" in str(error):  # so PyTorch says it
            what = "take a smaller model; in training, a smaller training.batch_size or training.bptt helps as well"
            return _complain("error", f"out of memory: {what}", 1)
        if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
            what = f"cannot open {str(error.filename)[:200]!r}: {error.strerror}; give another path"
            return _complain("error", what, 2)
        if isinstance(error, OSError) and error.errno in _LACKS:
            _let_output_go()
            where = "a file or the output" if error.filename is None else repr(str(error.filename)[:200])
            return _complain("error", f"{where} cannot be written: {error.strerror}; make room, or write elsewhere", 1)
        if os.environ.get("ELMAN_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _complain("bug", f"{what}; run with ELMAN_TRACEBACK=1 for the traceback", 1)


def _refusal(error: CycloptsError) -> str:
    """What is wrong with the words: as the parser says it, unless it guesses or says less than it knows."""
    if isinstance(error.__cause__, UserError):
        return str(error.__cause__)
    error.verbose = False
    if isinstance(error, MissingArgumentError) and error.keyword is not None:
        error.unused_tokens = None  # it would propose another spelling of an option that it knows
    elif isinstance(error, UnknownOptionError):
        given = str(error.token.keyword or error.token.value).partition("=")[0]
        names = [name for argument in error.argument_collection for name in argument.names]
        if same := [name for name in names if _without_section(name) == _without_section(given)]:
            return f"Unknown option: {given}. Did you mean {' or '.join(same)}?"
    elif isinstance(error, UnusedCliTokensError) and error.target is not None:
        command = " ".join((app.name[0], *(error.command_chain or ())))
        takes = [
            one.name.upper() for one in signature(error.target).parameters.values() if one.kind is one.POSITIONAL_ONLY
        ]
        return (
            f"{' '.join(error.unused_tokens or ())!r} is too much: {command} takes {' and '.join(takes) or 'nothing'} "
            f"beside its options; {command} --help lists them"
        )
    return str(error)


def _without_section(option: str) -> str:
    """``max_seconds`` of ``--training.max-seconds``."""
    return option.lstrip("-").rpartition(".")[2].replace("-", "_")


def _complain(what: str, message: str, exit_code: int) -> int:
    if exit_code == 2 and _another_says_it():
        time.sleep(_SECONDS_UNTIL_SAID)  # torchrun ends this process when the first has spoken and ended
    print(f"elman: {what}: {clean(' '.join(message.split()))}", file=sys.stderr)
    return exit_code


def _another_says_it() -> bool:
    """Whether the first process that torchrun started here refuses the same, as it does until they have met."""
    distributed = sys.modules.get("torch.distributed")
    have_met = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return os.environ.get("LOCAL_RANK", "0") not in ("", "0") and not have_met


def _open_streams() -> None:
    """Give the process those standard streams that it was started without: what is written there goes nowhere.

    A training goes on. A file that is opened later cannot take the number of a stream, and with it what others write.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # until the end


def _let_output_go() -> None:
    """Have what is still buffered go nowhere, or Python would complain at its exit."""
    with suppress(OSError):  # another stream may have taken its place
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _speak_utf8() -> None:
    """Texts are in any script: write UTF-8 whatever the locale says; bytes that are no text pass as they are."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


class _Dash(str):
    """A lone ``-``, which means standard input: the parser takes for an option whatever starts with a hyphen."""

    def startswith(self, *arguments: Any) -> bool:
        return False


def _words(argv: Sequence[str]) -> list[str]:
    """The words as the parser needs them: ``--section.switch true`` is one, for a switch alone takes no value."""
    words: list[str] = []
    for word in argv:
        if word in ("true", "false") and words and re.fullmatch(r"--\w+\.[\w-]+", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(_Dash(word) if word == "-" else word)
    return words
