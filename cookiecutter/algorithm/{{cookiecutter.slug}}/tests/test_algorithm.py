"""Check that the algorithm satisfies RollArt's contract and computes its formula."""

import pytest
from rollart_testing import assert_checks, check_algorithm, example_group

from {{ cookiecutter.module }}.algorithm import {{ cookiecutter.class_name }}


def test_the_algorithm_keeps_the_contract() -> None:
    assert_checks(check_algorithm({{ cookiecutter.class_name }}()))


def test_each_member_stands_against_the_mean_of_the_others() -> None:
    group = example_group([1.0, 0.0, 0.5])
    rows = {{ cookiecutter.class_name }}().advantages([group], {})
    assert [max(row, key=abs) for row in rows] == pytest.approx([0.75, -0.75, 0.0])
