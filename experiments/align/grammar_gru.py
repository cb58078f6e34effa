"""English to French on the embedded grammar."""

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for attention, 'fixed' for one context vector."""
    config = ConfigDict()
    config.task = 'align'
    config.seed = 0
    config.data = ConfigDict(
        dict(name='grammar', train_examples=20_000, test_examples=500, vocabulary='words', vocabulary_size=2000, widths=(8, 12, 16, 20))
    )
    config.model = ConfigDict(
        dict(
            name='recurrent', cell='gru', embedding=64, hidden=128, encoder_layers=1, bidirectional=True,
            reverse_source=False, attention='none' if arg == 'fixed' else 'additive', dropout=0.2,
        )
    )
    config.optimizer = ConfigDict(
        dict(name='adam', learning_rate=1e-3, schedule='cosine', warmup='200 steps', clip=1.0, weight_decay=0.0)
    )
    config.train = ConfigDict(
        dict(
            batch_size=64, accumulate=1, duration='5 epochs', log_every='50 steps', eval_every='1 epoch',
            save_every='1 epoch', patience=0, label_smoothing=0.1,
        )
    )
    return config
