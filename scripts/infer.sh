#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Answer prompts:  bash scripts/infer.sh [CONFIG] [options of `python -m executor.cli infer`]
# Without a CONFIG the tiny MoE of assets/ runs; without any argument it is asked four questions of its task.
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

if [[ $# -eq 0 ]]; then # none of these was seen in training
    set -- --prompt "841+379" --prompt "640-77" --prompt "reverse jihg" --prompt "sort hgfed"
fi
take_config "$@"
prepare_environment requirements.txt
exec "$PYTHON" -m executor.cli infer "$CONFIG" "${OPTIONS[@]}"
