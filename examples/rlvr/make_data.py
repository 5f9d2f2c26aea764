"""Write a dataset of arithmetic: `python examples/rlvr/make_data.py train.jsonl`."""

import json
import random
import sys

draw = random.Random(0)
questions = {}
while len(questions) < 4000:
    largest = draw.randint(3, 9)  # each answer is equally likely
    digits = [largest, *(draw.randint(0, largest) for _ in range(4))]
    draw.shuffle(digits)
    questions[f"What is the largest digit of {''.join(map(str, digits))}?"] = str(largest)
with open(sys.argv[1], "w") as file:
    for question, answer in questions.items():
        print(json.dumps({"question": question, "answer": answer}), file=file)
