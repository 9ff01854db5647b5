#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Score exact answers:  bash scripts/eval.sh [CONFIG] [options of `python -m executor eval`]
# Without a CONFIG the tiny MoE of assets/ is scored; without --file on the held-out questions of its task.
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

take_config "$@"
prepare_environment requirements.txt
exec "$PYTHON" -m executor eval "$CONFIG" --file "$ROOT/assets/heldout.jsonl" "${OPTIONS[@]}" # a later --file wins
