#!/bin/sh
# Make .venv and install WHAT ('.' or '.[dev]') into it.
#
# PyTorch comes from its CPU wheel index if there is no NVIDIA driver and that index answers within 5 s: an ordinary
# install would bring gigabytes of CUDA. TORCH_INDEX overrides the choice; TORCH_INDEX= (empty) takes the ordinary index.
set -eu

if [ $# -ne 1 ]; then
    echo "usage: sh scripts/install.sh WHAT    (WHAT is . or '.[dev]'; run it where pyproject.toml is)" >&2
    exit 2
fi
WHAT=$1
PYTHON=${PYTHON:-python3}
CPU_INDEX=https://download.pytorch.org/whl/cpu
TORCH=$("$PYTHON" - <<'END'
import sys
if sys.version_info < (3, 11):
    sys.exit("penstock needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (PYTHON=... make names another)")
import tomllib
wanted = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
print(next(item for item in wanted if item.startswith("torch")))
END
)

answers() {
    "$PYTHON" - "$1/torch/" >/dev/null 2>&1 <<'END'
import os
import sys
import threading
import urllib.request


def ask():
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
    os._exit(0)


thread = threading.Thread(target=ask, daemon=True)
thread.start()
thread.join(5)  # looking up the name is not under urlopen's timeout
os._exit(1)
END
}

has_nvidia() {
    [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1
}

if [ -z "${TORCH_INDEX+set}" ]; then
    TORCH_INDEX=
    if ! has_nvidia && answers "$CPU_INDEX"; then
        TORCH_INDEX=$CPU_INDEX
    fi
fi

has_pip() {
    .venv/bin/python -m pip --version >/dev/null 2>&1
}

# Without python3-venv, Debian's venv module fails and leaves a .venv that has a python, no pip, and nothing installed.
if ! has_pip; then
    if [ -f .venv/pyvenv.cfg ] && [ -z "$(ls .venv/lib/python*/site-packages 2>/dev/null)" ]; then
        rm -rf .venv
    elif [ -e .venv ]; then
        echo "$PWD/.venv: given one without pip that is in use; needed none there (remove it), or one with pip" >&2
        exit 1
    fi
    if ! said=$("$PYTHON" -m venv .venv 2>&1) || ! has_pip; then
        rm -rf .venv
        echo "$said" >&2
        echo "$PYTHON cannot make a virtual environment with pip; needed its venv module (on Debian and Ubuntu:" \
            "apt install python3-venv), or another Python (PYTHON=... names one)" >&2
        exit 1
    fi
fi
if ! .venv/bin/python -c 'import torch' >/dev/null 2>&1; then
    echo "installing $TORCH from ${TORCH_INDEX:-the ordinary index}"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$TORCH" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable "$WHAT"
