"""Check that the task satisfies RollArt's contract."""

from rollart_testing import assert_checks, check_agent

from {{ cookiecutter.module }}.plugin import rollart_environments
from {{ cookiecutter.module }}.task import {{ cookiecutter.class_name }}


def test_the_task_keeps_the_contract() -> None:
    (spec,) = rollart_environments()
    assert_checks(check_agent({{ cookiecutter.class_name }}, spec=spec, num_tasks=1))
