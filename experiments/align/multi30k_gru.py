"""English to French on Multi30k."""

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for attention, 'fixed' for one context vector."""
    config = ConfigDict()
    config.task = 'align'
    config.seed = 0
    config.data = ConfigDict(
        dict(name='multi30k', folder='', vocabulary='subwords', vocabulary_size=6000, widths=(12, 16, 20, 24, 32, 48))
    )
    config.model = ConfigDict(
        dict(
            name='recurrent', cell='gru', embedding=128, hidden=256, encoder_layers=1, bidirectional=True,
            reverse_source=False, attention='none' if arg == 'fixed' else 'additive', dropout=0.3,
        )
    )
    config.optimizer = ConfigDict(
        dict(name='adam', learning_rate=1e-3, schedule='cosine', warmup='200 steps', clip=1.0, weight_decay=0.0)
    )
    config.train = ConfigDict(
        dict(
            batch_size=128, accumulate=1, duration='30 epochs', log_every='50 steps', eval_every='1 epoch',
            save_every='1 epoch', patience=0, label_smoothing=0.1,
        )
    )
    return config
