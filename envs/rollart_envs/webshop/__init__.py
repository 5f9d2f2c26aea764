"""WebShop: shop for a product that fits an instruction.

A simulated shop after Yao et al., "WebShop: Towards Scalable Real-World Web Interaction with
Grounded Language Agents" (arXiv 2207.01206), implemented again. The environment class is imported
on first access, so that importing :mod:`rollart_envs.webshop.config` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollart_envs.webshop.env import WebShopEnv

__all__ = ["WebShopEnv"]


def __getattr__(name: str) -> object:
    if name == "WebShopEnv":
        from rollart_envs.webshop.env import WebShopEnv

        return WebShopEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
