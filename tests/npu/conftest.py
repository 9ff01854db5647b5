# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests on a card: the device, or one reason why there is none; and what to report at the end."""

from collections import defaultdict

import pytest

from executor.ops.reference.product import get_product, set_product
from tests.npu import card


def pytest_configure(config):
    """A card that was asked for and is not there ends the run with one line."""
    try:
        card.find()
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_runtest_setup(item):
    """Without a device every test of this folder is skipped. Here, and not in a fixture: pytest then prints the reason
    once, as it comes from one line."""
    if card.find() is None:
        pytest.skip(card.NO_CARD)


@pytest.fixture(scope="session")
def device():
    """The device under test."""
    return card.find()


@pytest.fixture(autouse=True)
def _rounding_of_the_product(device):
    """Reference kernels round as the product under test does; a runner of a test may have chosen another."""
    before = get_product()
    set_product(device.product)
    yield
    set_product(before)


def pytest_report_header():
    """Versions, first lines of what a report needs."""
    found = card.find()
    if found is None or found.torch_device.type == "cpu":
        return f"npu tests: {card.NO_CARD if found is None else 'the CPU checks itself'}"
    import torch
    import torch_npu

    cann = getattr(torch_npu.utils, "get_cann_version", lambda: "unknown")()
    return (
        f"npu tests: {torch.npu.get_device_name(0)} ({found.platform}), torch {torch.__version__}, "
        f"torch_npu {torch_npu.__version__}, CANN {cann}"
    )


def pytest_terminal_summary(terminalreporter):
    """Errors per operator, the largest over all cases, as in ``compare.Finding``."""
    errors = defaultdict(list)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call" and report.nodeid.startswith("tests/npu/"):
                for name, value in report.user_properties:
                    errors[name].append((*value, outcome))
    if not errors:
        return
    terminalreporter.section("errors on the device, per operator")
    terminalreporter.write_line(f"{'':44}{'typical':>10}{'worst':>10}   (0: equal)")
    for name, found in errors.items():
        typical, worst, outcomes = (max(values) if i < 2 else values for i, values in enumerate(zip(*found)))
        state = "" if "failed" not in outcomes else f"  {outcomes.count('failed')} outputs of failed cases"
        terminalreporter.write_line(f"{name:44}{typical:10.2f}{worst:10.2f}{state}")
