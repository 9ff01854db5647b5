# SPDX-License-Identifier: Apache-2.0
"""The part of a plan that is about fused operators: which are used, and why not the others."""

from executor.config import RunConfig
from executor.decisions import Decision
from executor.errors import UserError
from executor.ops.forms import FUSED, Forms, forms
from executor.platform.features import Features

COMBINE = "combine_add_rms_norm"  # of MC2's rows, with the norm that follows: a matter of strategies, not of one layer
NAMES = (*FUSED, COMBINE)


def plan_fusions(run: RunConfig, features: Features) -> tuple[Forms, bool, list[Decision]]:
    """The forms that layers call, whether MC2 combines in the next norm, and a decision if anything is left plain.

    Raises:
        UserError: ``model_config.unfused`` has a name that is none of ``NAMES``.
    """
    model = run.model
    for name in model.unfused:
        if name not in NAMES:
            raise UserError(f"model_config.unfused has {name!r}; one of {', '.join(NAMES)}")
    plain = {name: f"not documented for {features.name}" for name in NAMES if name not in features.fused}
    if model.exe_mode == "eager":
        plain["rotary"] = "run eagerly, its kernel writes into its inputs"
    if model.shipped_converters and model.exe_mode == "ge_graph":
        plain["gate_topk"] = "torchair's own converter of it raises TypeError"
    plain.update(dict.fromkeys(model.unfused, "model_config.unfused"))
    decisions = [Decision("plain operators", ", ".join(plain), "; ".join(f"{n}: {why}" for n, why in plain.items()))]
    used = forms([name for name in plain if name in FUSED])
    return used, COMBINE not in plain, decisions if plain else []
