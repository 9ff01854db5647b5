# SPDX-License-Identifier: Apache-2.0
"""CPU reference kernels of the vendor's operators: the executable specification of what each one computes."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
