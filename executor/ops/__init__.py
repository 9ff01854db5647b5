# SPDX-License-Identifier: Apache-2.0
"""Operators in three columns: our call, the vendor's schema, a reference kernel.

Importing this package registers the reference kernels of every operator that the models use.
"""

from executor.platform.npu import load_torch_npu

load_torch_npu()

from executor.ops import reference  # noqa: E402, F401
