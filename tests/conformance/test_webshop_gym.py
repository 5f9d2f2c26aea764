"""WebShop through Gymnasium's own checker, in every form it has."""

from __future__ import annotations

import warnings

import pytest
from gymnasium.utils.env_checker import check_env

from rollart_envs.webshop import WebShopEnv


@pytest.mark.parametrize("mode", ["text", "text_rich", "html", "terse"])
def test_gymnasium_accepts_it(mode):
    env = WebShopEnv(observation_mode=mode, page_handles=mode == "terse")
    with warnings.catch_warnings():
        # Gymnasium warns of an environment that was not made by its own registry.
        warnings.simplefilter("ignore", UserWarning)
        check_env(env, skip_render_check=True)
    env.close()
