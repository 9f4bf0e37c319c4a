#!/bin/sh
# Make .venv and install Elman into it, editable, in the versions of constraints.txt.
# usage: tools/setup.sh [EXTRA,...]     e.g. tools/setup.sh dev,data
# PYTHON names the interpreter; otherwise python3.11 or any newer python3 on the path is taken.
set -eu
cd "$(dirname "$0")/.."
pytorch_cpu_wheels=https://download.pytorch.org/whl/cpu

fail() {
    echo "setup: $1" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3.11 python3 python}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer among: ${PYTHON:-python3.11, python3, python}; install one, or name it: make PYTHON=/path/to/python3.11"
}

if ! is_new_enough .venv/bin/python; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; on Debian and Ubuntu: apt install python3-venv"
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

pip() {
    .venv/bin/python -m pip --disable-pip-version-check "$@"
}

# On Linux a plain `pip install torch` brings gigabytes of CUDA libraries. The CPU build comes first, from the wheels
# that pip already knows of or else from PyTorch's own; a PyTorch of the right version that is there stays.
torch=$(sed -n 's/^torch==//p' constraints.txt)
if [ "$(uname -s)" = Linux ] && ! .venv/bin/python -c "
from importlib.metadata import version
raise SystemExit(version('torch').split('+')[0] != '$torch')" 2>/dev/null; then
    echo "setup: installing PyTorch $torch for the CPU (about 200 MB)"
    pip install -qq -c constraints.txt "torch==$torch+cpu" 2>/dev/null ||
        pip install -qq -c constraints.txt --extra-index-url "$pytorch_cpu_wheels" "torch==$torch+cpu"
fi

echo "setup: installing elman${1:+[$1]}"
pip install -qq -c constraints.txt -e ".${1:+[$1]}"
