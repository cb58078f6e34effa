"""Text of experiment files for sweeps: their beginning, and the sweep functions that follow it."""

EXPERIMENT = '''
"""The grammar experiment cut down to a second or two."""
from attnlab import configs
from attnlab.sweeps import chained, grid, product, zipped

TINY = {tiny!r}

def get_config(arg=''):
    config = configs.load_experiment('experiments/align/grammar_gru.py', list(TINY.items()))
    config = config.copy_and_resolve_references()
    config.unlock()
    return config
'''

LANGUAGE = '''
"""A language model that compiles in a second."""
from attnlab import configs
from attnlab.sweeps import grid

FIELDS = {fields!r}

def get_config(arg=''):
    config = configs.load_experiment('experiments/language/shakespeare_char.py', list(FIELDS.items()))
    config = config.copy_and_resolve_references()
    config.unlock()
    return config
'''

CHECKED = """
def sweep_rates(): return grid({'optimizer.learning_rate': (1e-3, 1, '0.5'), 'model.attention': ('additive', 'dot')})
def sweep_seeds(): return grid({'seed': range(3)})
def sweep_sizes(): return zipped({'model.hidden': (8, 16), 'model.embedding': (4, 6)})
def sweep_both(): return chained(sweep_seeds(), product(sweep_sizes(), grid({'model.dropout': [0.0]})))
def sweep_same(): return [{'seed': 0}, {'seed': 1}, {'seed': 0}]
def sweep_equal(): return [{}, {'seed': 0}]
def sweep_none(): return iter(())
def sweep_typo(): return [{'seed': 1}, {'model.hiden': 3}]
def sweep_kind(): return [{'seed': 1.5}]
def sweep_bad(): return [{'seed': 1}, {'model.attention': 'sideways'}]
def sweep_rate(): return [{'seed': 1}, {'optimizer.schedule': 'up'}]
def sweep_mesh(): return [{'train.mesh': 'data=1'}, {'train.mesh': 'data=3'}]
def sweep_list(): return [3]
def sweep_fails(): return grid(3)
def sweep_odd(): return zipped({'seed': (1, 2), 'model.hidden': (8,)})
def sweep_twice(): return [{}]
def search_twice(trial): return {}
def search_space(trial): return {'optimizer.learning_rate': trial.suggest_float('r', 1e-4, 1e-1)}
"""

TRAINED = """
def sweep_three(): return grid({'optimizer.learning_rate': (0.01, 1e38, 0.02)})
def sweep_seeds(): return grid({'seed': range(2)})
def sweep_more(): return grid({'seed': range(3)})
def search_rate(trial): return {'optimizer.learning_rate': trial.suggest_float('rate', 1e-3, 1e-1, log=True)}
"""

SEARCHED = """
def sweep_seeds(): return grid({'seed': range(4)})
def search_rate(trial): return {'optimizer.learning_rate': trial.suggest_float('rate', 1e-4, 1, log=True)}
def search_bad(trial): return {'optimizer.rate': trial.suggest_float('rate', 1e-4, 1)}
def search_two(trial):
    return {'optimizer.learning_rate': trial.suggest_float('rate', 1e-4, 1, log=True),
            'model.dropout': trial.suggest_float('dropout', 0, 0.5), 'model.attention': trial.suggest_categorical(
                'score', ['additive', 'dot'])}
"""
