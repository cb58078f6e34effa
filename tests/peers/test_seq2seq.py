"""attnlab's recurrent models against the same models in PyTorch, number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import RecurrentConfig
from attnlab.kernels.losses import cross_entropy
from attnlab.models.recurrent import RecurrentSeq2Seq

pytestmark = pytest.mark.peers

TOLERANCE = 64 * float(np.finfo(np.float32).eps)  # 7.6e-6: some tens of rounding errors, for values of order one
VOCABULARIES, EMBEDDING, HIDDEN = (11, 13), 6, 5


def make_batch():
    """Return source [4, 6], inputs and labels [4, 5]; sources have 6, 1, 4, 3 tokens and outputs have 2, 5, 1, 5."""
    random = np.random.default_rng(0)
    sides = []
    for size, lengths in zip(VOCABULARIES, ((6, 1, 4, 3), (2, 5, 1, 5)), strict=True):
        tokens = random.integers(4, size, (4, max(lengths))).astype(np.int32)
        sides.append(np.where(np.arange(max(lengths)) < np.array(lengths)[:, None], tokens, 0))
    source, labels = sides
    return source, np.concatenate([np.full((4, 1), 2, np.int32), labels[:, :-1]], axis=1), labels


def both_models(*dimensions):
    """Return attnlab's model, its random parameters, and PyTorch's model with the same parameters; no dropout."""
    from attnlab.bench import seq2seq_torch as peer

    names = ('cell', 'embedding', 'hidden', 'encoder_layers', 'bidirectional', 'reverse_source', 'attention')
    model = RecurrentSeq2Seq(*VOCABULARIES, RecurrentConfig(**dict(zip(names, dimensions, strict=True))))
    source, inputs, _ = make_batch()
    shapes = jax.eval_shape(model.init, jax.random.key(0), *map(jnp.asarray, (source, inputs)))['params']
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda x: (0.5 * random.standard_normal(x.shape)).astype(np.float32), shapes)
    torch_model = peer.Seq2Seq(*VOCABULARIES, *dimensions, 0.0)
    peer.load_parameters(torch_model, params)
    return model, params, torch_model


def assert_close(ours, theirs, name):
    scale = max(1.0, float(np.max(np.abs(theirs), initial=0.0)))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * scale, err_msg=name, strict=True)


@pytest.mark.parametrize('attention', ['additive', 'dot', 'none'])
@pytest.mark.parametrize('cell', ['gru', 'lstm'])
@pytest.mark.parametrize(
    'layers, bidirectional, reverse',
    [(1, True, False), (1, False, False), (2, True, False), (2, False, True), (2, True, True)],
)
def test_loss_logits_weights_and_gradients_equal_those_of_pytorch(attention, cell, layers, bidirectional, reverse):
    torch = pytest.importorskip('torch')
    from attnlab.bench import seq2seq_torch as peer

    model, params, torch_model = both_models(cell, EMBEDDING, HIDDEN, layers, bidirectional, reverse, attention)
    source, inputs, labels = make_batch()
    tensors = [torch.from_numpy(x).long() for x in (source, inputs, labels)]

    @jax.jit
    def ours(params):
        def loss(params):
            logits, weights = model.apply({'params': params}, *map(jnp.asarray, (source, inputs)))
            sums = cross_entropy(logits, jnp.asarray(labels), 0.1)
            return sums.total / sums.weight, (logits, weights)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, (logits, weights)), gradients = ours(params)
    with torch.no_grad():
        their_logits, their_weights = torch_model(*tensors[:2])
    assert_close(logits, their_logits.numpy(), 'logits')
    assert_close(weights, their_weights.numpy(), 'weights')
    their_value = peer.loss(torch_model, *tensors, 0.1)
    their_value.backward()
    assert_close(value, np.float32(their_value.item()), 'loss')
    theirs = {name: x.grad.numpy() for name, x in torch_model.named_parameters()}
    expected = peer.state_dict(gradients, reverse)
    assert expected.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if cell == 'gru' or 'bias_ih' not in name:  # attnlab's LSTM does not have the second bias of PyTorch's
            assert_close(expected[name], gradient, f'gradient of {name}')


@pytest.mark.parametrize('cell', ['gru', 'lstm'])
@pytest.mark.parametrize('reverse', [False, True])
def test_states_at_token_positions_equal_those_of_pytorch(cell, reverse):
    torch = pytest.importorskip('torch')
    model, params, torch_model = both_models(cell, EMBEDDING, HIDDEN, 2, True, reverse, 'additive')
    source, *_ = make_batch()
    _, memory = model.apply({'params': params}, jnp.asarray(source), method='encode')
    with torch.no_grad():
        states, last = torch_model.encode(torch.from_numpy(source).long())
        start = torch.tanh(torch_model.start(last))
    assert_close(np.asarray(memory.memory)[source != 0], states.numpy()[source != 0], 'states')
    state, _ = model.apply({'params': params}, jnp.asarray(source), method='encode')
    assert_close(state[1] if cell == 'lstm' else state, start.numpy(), 'the first state')
