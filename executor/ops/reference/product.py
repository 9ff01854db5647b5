# SPDX-License-Identifier: Apache-2.0
"""Which product's rounding the reference kernels follow.

A few operators round differently on Atlas A2 / A3 and on Ascend 950 (``npu_add_rms_norm``,
``npu_add_rms_norm_cast``). The vendor's schemas have no argument for it, since a card only ever is one product, so
the choice is a process-wide setting here: made once by the runner from ``model_config.platform_version``.
"""

from typing import get_args

from executor.platform.features import Product

_product: Product = "a3"


def set_product(product: Product) -> None:
    """Follow the rounding points of ``product`` from now on. Raises ValueError for a name we do not know."""
    global _product
    if product not in get_args(Product):
        raise ValueError(f"product {product!r} is not one of {', '.join(get_args(Product))}")
    _product = product


def get_product() -> Product:
    return _product
