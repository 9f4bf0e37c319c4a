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

# What the tests use besides Python. Without these, the tests that need one skip themselves and say so.
case ",${1:-}," in *,dev,*) programs="chromium strace" ;; *) programs="" ;; esac
missing=""
for program in $programs; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing Debian packages:$missing"
        # shellcheck disable=SC2086
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >/dev/null ||
            echo "setup: could not install$missing; some tests will skip themselves"
    else
        echo "setup: some tests use programs that are missing here; on Debian: apt install$missing"
    fi
fi
