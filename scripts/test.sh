#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests:  bash scripts/test.sh [--all] [options of pytest]
# --all includes the tests marked `full`. pytest's closing line is the last one printed.
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

select=(-m "not full")
options=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        select=()
    else
        options+=("$argument")
    fi
done
prepare_environment requirements-dev.txt
cd -- "$ROOT"
exec "$PYTHON" -m pytest "${select[@]}" "${options[@]}"
