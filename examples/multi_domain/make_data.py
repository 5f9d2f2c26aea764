"""Write the three datasets of `examples/multi_domain.yaml` into this folder."""

import json
import random
from itertools import combinations
from pathlib import Path

NUM_ROWS = 200
WORDS = """
    apple bread chair dance eagle flute grape house island jewel kite lemon mouse night ocean
    paper queen river stone table uncle violin water yard zebra
""".split()  # noqa: SIM905
OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}


def math_rows():
    """Yield rows in GSM8K's format."""
    for a in range(2, 22):
        for b in range(2, 12):
            steps = f"{a} + {b} = {a + b}\n#### {a + b}"
            yield {"question": f"Ann has {a} cards and gets {b} more. How many?", "answer": steps}


def code_rows():
    """Yield tasks with tests, and a solution."""
    for name, sign in OPERATIONS.items():
        for n in range(2, 72):
            function = f"{name}_{n}"
            tests = [f"assert {function}({x}) == {x} {sign} {n}" for x in (0, 3, -5)]
            yield {
                "prompt": f"Write {function}(x), which returns x {sign} {n}.",
                "tests": {"entry_point": function, "test": tests},
                "solution": f"def {function}(x):\n    return x {sign} {n}",
            }


def general_rows():
    """Yield questions with a short answer."""
    for first, second in combinations(WORDS, 2):
        shown = random.sample([first, second], 2)
        yield {"question": f"Which is earlier: {shown[0]} or {shown[1]}?", "answer": first}


random.seed(0)
for name, rows in (("math", math_rows()), ("code", code_rows()), ("general", general_rows())):
    some = list(rows)
    random.shuffle(some)
    lines = (json.dumps(row) + "\n" for row in some[:NUM_ROWS])
    Path(__file__).with_name(f"{name}.jsonl").write_text("".join(lines))
