# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the other scripts: finds or makes the Python environment.
#
#   source environment.sh; prepare_environment requirements.txt
#
# sets ROOT (the repository) and PYTHON. With an NPU that is your own python3, since torch_npu belongs to your CANN
# installation and nothing is installed for you; elsewhere it is .venv at the root of the repository, made and
# filled on first use. pip's settings (index, proxy, certificates, cache) are yours and used as they are.
set -euo pipefail

ROOT="$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # the current directory is the user's: a torch.py there must not be imported

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Set PYTHON to one that can run requirements file $1 of the repository.
prepare_environment() {
    if [[ -e /dev/davinci_manager ]]; then
        use_own_python "$1"
    else
        # a torch_npu without CANN, found in site-packages, would make `import torch` fail
        export TORCH_DEVICE_BACKEND_AUTOLOAD=0
        use_venv "$1"
    fi
}

use_own_python() {
    local modules=torch_npu,transformers,safetensors,pydantic,typer,rich,yaml,jinja2 install=requirements-npu.txt
    PYTHON="$(command -v python3)" || fail "no python3 on PATH; source your CANN environment first"
    is_new_enough "$PYTHON" || fail "$PYTHON is $("$PYTHON" --version 2>&1); Python 3.11 or newer is needed"
    if [[ $1 == requirements-dev.txt ]]; then
        modules+=,pytest,hypothesis,mypy,ruff
        install+=" -r requirements-dev.txt"
    fi
    "$PYTHON" -c "import $modules" 2>/dev/null || fail "$PYTHON cannot import all of $modules: source your CANN" \
        "set_env.sh, then in $ROOT: python3 -m pip install -r $install"
}

use_venv() {
    local venv="$ROOT/.venv" stamp="$ROOT/.venv/.installed-$1" base
    PYTHON="$venv/bin/python"
    if ! is_new_enough "$PYTHON" || ! "$PYTHON" -c 'import pip' 2>/dev/null; then # absent, or interrupted half way
        base="$(find_python)"
        make_venv "$base" "$venv"
    fi
    # the stamp is what was installed, word for word, and is written last: an interrupted install is done again
    if [[ ! -f $stamp || "$(<"$stamp")" != "$(wanted "$1")" ]]; then
        rm -f "$stamp"
        announce "$1"
        "$PYTHON" -m pip install --disable-pip-version-check -r "$ROOT/$1" >&2 ||
            fail "pip could not install $1 into $venv (its message is above); run the same command to try again"
        write_stamp requirements.txt
        write_stamp "$1"
    fi
}

# Contents of requirements file $1 and of the one it includes, the Python they were installed for, and the torch it
# sees: one that is reused from outside may change or vanish.
wanted() {
    (cd "$ROOT" && cat requirements.txt "$1")
    "$PYTHON" --version
    echo "torch $(torch_of "$PYTHON")"
}

write_stamp() {
    wanted "$1" >"$ROOT/.venv/.stamp.$$"
    mv "$ROOT/.venv/.stamp.$$" "$ROOT/.venv/.installed-$1"
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# A Python >= 3.11 that can make virtual environments. The interpreter behind an active one is what counts, as the
# new environment sees that one's packages, not those of the active environment.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if is_new_enough "$candidate" && "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
            return
        fi
    done
    fail "no Python 3.11 or newer with venv and pip on PATH; install one (on Debian also python3-venv)"
}

torch_pin() {
    sed -n 's/^torch==//p' "$ROOT/requirements.txt"
}

# The version of torch that Python $1 sees, without a local part such as +cpu; nothing if there is none.
torch_of() {
    "$1" -c 'from importlib.metadata import version; print(version("torch").partition("+")[0])' 2>/dev/null || true
}

make_venv() {
    local options=(--clear)
    if [[ "$(torch_of "$1")" == "$(torch_pin)" ]]; then
        options+=(--system-site-packages)
    fi
    "$1" -m venv "${options[@]}" "$2" >&2 || fail "$1 could not make $2 (its message is above)"
}

announce() {
    local pin what size
    pin="$(torch_pin)"
    what="torch $pin, transformers"
    size="about 250 MB with a CPU build of torch; a CUDA build may take several GB: point pip at a CPU build to avoid it"
    if [[ "$(torch_of "$PYTHON")" == "$pin" ]]; then
        what="transformers"
        size="at most 60 MB; torch $pin is there already"
    fi
    printf 'installing %s and what else %s names into %s, from your configured package index: %s\n' \
        "$what" "$1" "$ROOT/.venv" "$size" >&2
}

# From a script's arguments: CONFIG (also exported as CASE_NAME, its name without .yaml) and the OPTIONS behind it.
# A relative path starts here, or else at the root of the repository.
take_config() {
    CONFIG="$ROOT/configs/qwen3_moe_tiny.yaml"
    if [[ $# -gt 0 && $1 != -* ]]; then
        CONFIG="$1"
        shift
        [[ -e $CONFIG || ! -e $ROOT/$CONFIG ]] || CONFIG="$ROOT/$CONFIG"
    fi
    # shellcheck disable=SC2034 # for the script that sources this file
    OPTIONS=("$@")
    CASE_NAME="$(basename -- "$CONFIG" .yaml)"
    export CASE_NAME
}
