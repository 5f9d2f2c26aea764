"""Check that the environment satisfies RollArt's contract."""

from rollart_testing import assert_checks, check_env

from {{ cookiecutter.module }}.env import {{ cookiecutter.class_name }}
from {{ cookiecutter.module }}.plugin import rollart_environments


def test_the_environment_keeps_the_contract() -> None:
    (spec,) = rollart_environments()
    assert_checks(check_env({{ cookiecutter.class_name }}, spec=spec))
