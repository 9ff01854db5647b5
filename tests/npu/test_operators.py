# SPDX-License-Identifier: Apache-2.0
"""Each vendor operator on the card against its reference kernel on the CPU, in the calls and sizes of the recipes."""

import torch

from tests.npu import card
from tests.npu.card import CPU, Device
from tests.npu.case import Case
from tests.npu.cases import all_cases
from tests.npu.compare import Finding


def pytest_generate_tests(metafunc):
    """Cases are made only where they can run, so that collecting costs nothing elsewhere."""
    if "case" in metafunc.fixturenames:
        cases = all_cases() if card.find() is not None else []
        metafunc.parametrize("case", cases or [None], ids=[case.name for case in cases] or ["no-card"])


def compare(case: Case, device: Device) -> list[Finding]:
    """One finding per output."""
    inputs = case.inputs()
    actual = device.run(case.call, inputs)
    reference = CPU.run(case.call, inputs)
    exact = CPU.run(case.call, [x.double() if x.is_floating_point() else x for x in inputs])
    assert len(actual) == len(case.rules)
    return [rule(*outputs) for rule, *outputs in zip(case.rules, actual, reference, exact, strict=True)]


@torch.inference_mode()
def test_operator(case, device, record_property):
    findings = compare(case, device)
    for finding in findings:
        record_property(case.operator, (finding.typical, finding.worst))
    wrong = [f"output {i}: {finding.complaint}" for i, finding in enumerate(findings) if finding.complaint]
    assert not wrong, "\n".join((f"{case.operator} is wrong on {device.platform}, {case.recipe}, {case.step}:", *wrong))
