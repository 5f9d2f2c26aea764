"""Write a dataset of arithmetic: `python examples/rlvr/make_data.py train.jsonl`."""

import json
import random
import sys

random.seed(0)
answers = {}
while len(answers) < 4000:
    num_even = random.randint(0, 5)  # each answer is equally likely
    digits = random.choices("02468", k=num_even) + random.choices("13579", k=5 - num_even)
    random.shuffle(digits)
    answers[f"How many digits of {''.join(digits)} are even?"] = str(num_even)
with open(sys.argv[1], "w") as file:
    for question, answer in answers.items():
        print(json.dumps({"question": question, "answer": answer}), file=file)
