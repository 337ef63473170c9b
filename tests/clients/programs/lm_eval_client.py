"""python lm_eval_client.py URL FOLDER: `local-completions` on the task that lies in the folder, by its own tokenizer
endpoints. Prints for each question the log-likelihood of each choice."""

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager

results = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": "tiny",
        "base_url": f"{sys.argv[1]}/completions",
        "tokenizer_backend": "remote",
        "max_length": 512,
        "batch_size": 4,
    },
    tasks=["local_choices"],
    task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False),
    bootstrap_iters=0,
    log_samples=True,
)
samples = sorted(results["samples"]["local_choices"], key=lambda sample: sample["doc_id"])
print(json.dumps([[float(choice[0]) for choice in sample["filtered_resps"]] for sample in samples]))
