#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Answer prompts:  bash scripts/infer.sh [CONFIG] [options of `python -m executor infer`]
# Without a CONFIG the tiny MoE of assets/ runs; without a prompt it is asked the four questions its recipe names.
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

take_config "$@"
prepare_environment requirements.txt
exec "$PYTHON" -m executor infer "$CONFIG" "${OPTIONS[@]}"
