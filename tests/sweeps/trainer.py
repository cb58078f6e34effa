"""A stand-in for training that takes no time."""

import json
import math

EVALUATIONS = 8


class Trainer:
    """Replacement for `run.train_run`: eight evaluations; the score grows as the learning rate approaches 0.01.

    runs: (seed, learning rate) of every call.  steps: number of all steps.
    on_start: number of a call -> function that this call runs first.
    """

    def __init__(self):
        self.runs, self.steps, self.on_start = [], 0, {}

    def __call__(self, config, workdir, watch):
        rate, seed = config.optimizer.learning_rate, config.seed
        self.runs.append((seed, rate))
        if action := self.on_start.get(len(self.runs) - 1):
            action()
        file = workdir / 'metrics.jsonl'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('')
        for step in range(1, EVALUATIONS + 1):
            self.steps += 1
            score = 100 - 20 * abs(math.log10(rate) + 2) - 10 / step
            with file.open('a') as out:
                out.write(json.dumps({'step': step, 'split': 'valid', 'bleu': score}) + '\n')
            if step < EVALUATIONS:
                watch(step, {'bleu': score})
        return {'best_bleu': score, 'best_step': EVALUATIONS}


def raise_error(error):
    """Return a function without arguments that raises `error`."""

    def action():
        raise error

    return action
