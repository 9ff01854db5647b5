#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests that need one NPU:  bash scripts/test_npu.sh [options of pytest]
# Without a card they fail here; under scripts/test.sh they are skipped. docs/on_a_card.md says what they prove.
export NPU_SMOKE_DEVICE="${NPU_SMOKE_DEVICE:-npu}"
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/test.sh" tests/npu "$@"
