#!/bin/sh
# Make .venv and install Elman into it, editable, in the versions of constraints.txt.
# usage: tools/setup.sh [EXTRA,...]     e.g. tools/setup.sh dev,data
# PYTHON names the interpreter; otherwise python3.11 or any newer python3 on the path is taken.
set -eu
cd "$(dirname "$0")/.."

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

echo "setup: installing elman${1:+[$1]}"
pip install -qq -c constraints.txt -e ".${1:+[$1]}"
