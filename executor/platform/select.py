# SPDX-License-Identifier: Apache-2.0
"""From ``model_config.platform_version`` to the features to plan for, and to the device to run on."""

import torch

from executor.errors import UserError
from executor.platform import npu
from executor.platform.features import NPU, Features, cpu


def planned_features(platform_version: str) -> Features:
    """Features of the platform asked for; ``auto`` is the machine this runs on."""
    name = (npu.detect() or "cpu") if platform_version == "auto" else platform_version
    return cpu() if name == "cpu" else NPU[name]


def device(features: Features) -> torch.device:
    """The device to run on. Raises UserError if the plan is for a machine that this one is not."""
    if features.device_type == "cpu":
        return torch.device("cpu")
    found = npu.detect()
    if found != features.name:
        here = f"an NPU of {found}" if found else "no NPU"
        raise UserError(
            f"model_config.platform_version={features.name}, but this machine has {here}; add --explain to only check "
            "the recipe, or --set model_config.platform_version=cpu to run it here with the reference kernels"
        )
    return torch.device("npu", npu.device_index())
