"""What no source file may hold, whatever for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "runs text as code",
    "__import__": "importlib.import_module says the same and is found by tools",
    "hasattr": "a capability is declared, not guessed from a name",
    "breakpoint": "left over",
    "torch.load": "may unpickle; weights and states are safetensors",
    "torch.save": "pickles; weights and states are safetensors",
    "torch.manual_seed": "the global generator is the user's",
    "torch.seed": "the global generator is the user's",
    "torch.set_default_dtype": "the default dtype is the user's",
    "torch.set_default_device": "the default device is the user's",
    "random.seed": "the global generator is the user's",
    "np.random.seed": "the global generator is the user's",
    "numpy.random.seed": "the global generator is the user's",
}
OF_THE_COMMAND_LINE = {"print", "input", "sys.exit", "exit", "quit", "os._exit"}
COMMAND_LINE = ("cli", "__main__")


def dotted(node: ast.AST) -> str:
    """``torch.load`` of an attribute or a name, or nothing for anything more involved."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def offences(tree: ast.AST, top: str) -> Iterator[tuple[ast.AST, str]]:
    """Every forbidden thing in the code, with the reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                if name.split(".")[0] in FORBIDDEN_MODULES:
                    yield node, f"imports {name}, which can run code from a file"
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in FORBIDDEN_CALLS:
                yield node, f"calls {name}: {FORBIDDEN_CALLS[name]}"
            if name in OF_THE_COMMAND_LINE and top not in COMMAND_LINE:
                yield node, f"calls {name}: only the command line prints and exits"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not _is_false(keyword.value):
                    yield node, f"passes allow_pickle to {name}"
        elif isinstance(node, ast.Attribute) and dotted(node) == "sys.argv" and top not in COMMAND_LINE:
            yield node, "reads sys.argv: only the command line does"
        elif isinstance(node, ast.Raise) and _raised(node) == "SystemExit" and top not in COMMAND_LINE:
            yield node, "raises SystemExit: only the command line exits"
        elif isinstance(node, ast.Assert):
            yield node, "asserts: a user's mistake is a UserError, and `python -O` would let it pass"
        elif isinstance(node, ast.ExceptHandler) and _swallows_everything(node):
            yield node, "catches everything and goes on: name the exception, or say why by raising another"


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _raised(node: ast.Raise) -> str:
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return dotted(raised) if raised else ""


def _swallows_everything(node: ast.ExceptHandler) -> bool:
    catches_all = node.type is None or dotted(node.type) in ("Exception", "BaseException")
    return catches_all and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)


def test_no_source_file_holds_a_forbidden_thing(sources):
    wrong = [f"{s.at(node)}: {why}" for s in sources for node, why in offences(s.tree, s.top)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "top", "is_offence"),
    [
        ("import pickle", "data", True),
        ("from joblib import dump", "data", True),
        ("def f(x):\n    return eval(x)", "text", True),
        ("model.eval()", "training", False),
        ("re.compile('a')", "text", False),
        ("torch.load(path)", "models", True),
        ("np.load(path, allow_pickle=True)", "data", True),
        ("np.load(path, allow_pickle=False)", "data", False),
        ("hasattr(cell, 'scan')", "cells", True),
        ("print('x')", "training", True),
        ("print('x')", "cli", False),
        ("raise SystemExit(2)", "text", True),
        ("raise SystemExit(2)", "cli", False),
        ("sys.argv[1:]", "settings", True),
        ("assert x > 0", "cells", True),
        ("try:\n    f()\nexcept Exception:\n    pass", "cli", True),
        ("try:\n    f()\nexcept OSError:\n    pass", "cli", False),
    ],
)
def test_the_test_itself_sees_each_offence(code, top, is_offence):
    assert bool(list(offences(ast.parse(code), top))) == is_offence
