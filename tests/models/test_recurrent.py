"""The recurrent encoder-decoder: results of PyTorch and of Flax's cell, padding, causality, the original equations."""

import dataclasses
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from attnlab.configs import RecurrentConfig
from attnlab.decode.greedy import greedy_search
from attnlab.kernels.losses import cross_entropy
from attnlab.layers.recurrent import GRUCell
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.tasks.align.translator import shift_right
from tests.quick import QUICK

GOLDEN = Path(__file__).parents[1] / 'golden' / 'recurrent.npz'
TOLERANCE = 64 * float(np.finfo(np.float32).eps)
V, EMBEDDING, HIDDEN = 13, 6, 5
BOS, EOS = 2, 3
LONG = [5, 8, 12, 4, 6, 11, 9, 7, EOS]
SHORT = [7, 9, 4, EOS]

quick = partial(jax.jit, compiler_options=QUICK)


def make_model(cell='gru', attention='additive', layers=1, bidirectional=True, reverse=False):
    """Return a model, and random parameters large enough that its outputs differ clearly."""
    config = RecurrentConfig(
        cell=cell, attention=attention, embedding=EMBEDDING, hidden=HIDDEN, encoder_layers=layers,
        bidirectional=bidirectional, reverse_source=reverse,
    )  # fmt: skip
    model = RecurrentSeq2Seq(V, V, config)
    tokens = jnp.ones((1, 2), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)['params']
    random = np.random.default_rng(21)
    return model, jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), jnp.float32), shapes)


def pad(*sentences, width):
    return jnp.array([sentence + [0] * (width - len(sentence)) for sentence in sentences], jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize('attention', ['additive', 'dot', 'none'])
@pytest.mark.parametrize('cell', ['gru', 'lstm'])
def test_outputs_and_gradients_equal_those_of_pytorch(cell, attention):
    with np.load(GOLDEN) as file:
        golden = {key: file[key] for key in ('source', 'inputs', 'labels', 'smoothing')}
        keys = ('params', 'logits', 'weights', 'loss', 'gradients')
        golden |= {key: file[f'{cell}/{attention}/{key}'] for key in keys}
    model = RecurrentSeq2Seq(7, 7, RecurrentConfig(cell=cell, attention=attention, embedding=4, hidden=3))
    source, inputs = (jnp.asarray(golden[side]) for side in ('source', 'inputs'))
    shapes = jax.eval_shape(model.init, jax.random.key(0), source, inputs)['params']
    flat, unflatten = ravel_pytree(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    assert golden['params'].shape == flat.shape

    @jax.jit
    def values(flat):
        def loss(flat):
            logits, weights = model.apply({'params': unflatten(flat)}, source, inputs)
            sums = cross_entropy(logits, jnp.asarray(golden['labels']), float(golden['smoothing']))
            return sums.total / sums.weight, (logits, weights)

        return jax.value_and_grad(loss, has_aux=True)(flat)

    (loss, (logits, weights)), gradients = values(golden['params'])
    results = {'logits': logits, 'weights': weights, 'loss': loss, 'gradients': gradients}
    for key, x in results.items():
        np.testing.assert_allclose(x, golden[key], rtol=TOLERANCE, atol=TOLERANCE, err_msg=key, strict=True)


@pytest.mark.slow
def test_the_gru_cell_equals_that_of_flax():
    random = np.random.default_rng(0)
    state, inputs = (jnp.asarray(random.standard_normal((4, size)), jnp.float32) for size in (HIDDEN, EMBEDDING))
    flax_cell = nn.GRUCell(HIDDEN)
    flax_params = flax_cell.init(jax.random.key(0), state, inputs)['params']
    flax_params = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), flax_params)

    def gates(letter, kind):
        return [flax_params[letter + gate].get(kind, np.zeros(HIDDEN, np.float32)) for gate in 'rzn']

    params = {
        name: {'kernel': np.concatenate(gates(letter, 'kernel'), 1), 'bias': np.concatenate(gates(letter, 'bias'))}
        for name, letter in (('input', 'i'), ('hidden', 'h'))
    }
    _, expected = flax_cell.apply({'params': flax_params}, state, inputs)
    output = GRUCell(HIDDEN).apply({'params': params}, state, inputs)
    np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields',
    [
        dict(attention='additive'),
        dict(cell='lstm', attention='dot', layers=2),
        dict(attention='none'),
        dict(cell='lstm', attention='additive', bidirectional=False, reverse=True),
        dict(attention='dot', layers=2, reverse=True),
    ],
    ids=lambda fields: '-'.join(map(str, fields.values())),
)
def test_a_row_does_not_depend_on_padding_or_other_rows(fields):
    model, params = make_model(**fields)
    target = [6, 11, 4, 8, EOS]

    @jax.jit
    def run(source, labels):
        state, encoded = model.apply({'params': params}, source, method='encode')
        logits, weights = model.apply({'params': params}, source, shift_right(labels))
        step = lambda state, tokens: model.apply({'params': params}, state, encoded, tokens, method='decode')
        decoded = greedy_search(step, state, source.shape[0], bos_id=BOS, eos_id=EOS, max_tokens=12)
        return state, encoded.memory, logits, weights, decoded

    def result(row, source, labels):
        """Return the results for SHORT, which is in that row, at its real positions."""
        state, memory, logits, weights, decoded = run(source, labels)
        S, T = len(SHORT), len(target)
        memory = memory[row] if memory.ndim == 2 else memory[row, :S]
        weights = weights[row, :T], decoded.weights[row]
        for x in weights:
            assert not np.any(x[:, S:]), 'weight on padding'
        arrays = (jax.tree.map(lambda x: x[row], state), memory, logits[row, :T], [x[:, :S] for x in weights])
        return arrays, decoded.tokens[row]

    alone, tokens = result(0, pad(SHORT, width=4), pad(target, width=5))
    assert len(set(tokens.tolist())) > 2, 'the decoded tokens are all alike'
    for row, source, labels in (
        (0, pad(SHORT, width=9), pad(target, width=8)),
        (1, pad(LONG, SHORT, LONG, width=9), pad(LONG, target, LONG, width=9)),
    ):
        arrays, same_tokens = result(row, source, labels)
        # jaxlib 0.10.1 sums the products of one row and of three in another order: 2e-6 apart.
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=4e-6), arrays, alone)
        np.testing.assert_array_equal(same_tokens, tokens)


@pytest.mark.slow
@pytest.mark.parametrize('attention', ['additive', 'dot', 'none'])
def test_the_embedding_of_padding_gets_no_gradient(attention):
    model, params = make_model(attention=attention)
    source, labels = pad(LONG, SHORT, width=9), pad([6, EOS], [9, 4, 5, EOS], width=5)

    @quick
    @jax.grad
    def gradient(params):
        logits, _ = model.apply({'params': params}, source, shift_right(labels))
        return jnp.sum(jnp.where(labels[..., None] != 0, logits, 0.0) ** 2)

    gradients = gradient(params)
    assert not np.any(gradients['embed_source']['embedding'][0])
    assert np.all(np.any(gradients['embed_source']['embedding'][np.array([*LONG, *SHORT])], axis=1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('attention', ['additive', 'dot', 'none'])
def test_nan_in_the_embedding_of_padding_has_no_effect(attention):
    model, params = make_model(attention=attention)
    source, inputs = pad(LONG, SHORT, width=9), pad([BOS, 6], [BOS, 9], width=2)
    run = quick(lambda params: model.apply({'params': params}, source, inputs))
    expected = run(params)
    params['embed_source']['embedding'] = params['embed_source']['embedding'].at[0].set(jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, run(params), expected)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('t', [0, 1, 3])
@pytest.mark.parametrize('attention', ['additive', 'none'])
def test_a_label_changes_only_later_logits(attention, t):
    model, params = make_model(attention=attention)
    source, labels = pad(LONG, width=9), pad([6, 4, 9, 8, EOS], width=5)
    changed = labels.at[0, t].set(11)
    assert shift_right(labels).tolist() == [[BOS, 6, 4, 9, 8]]
    run = quick(lambda labels: model.apply({'params': params}, source, shift_right(labels))[0])
    differs = np.any(np.asarray(run(labels)) != np.asarray(run(changed)), axis=(0, 2))
    assert differs.tolist() == [position > t for position in range(5)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('attention', ['additive', 'dot', 'none'])
@pytest.mark.parametrize('cell', ['gru', 'lstm'])
def test_decoding_steps_equal_teacher_forcing(cell, attention):
    model, params = make_model(cell, attention)
    source, inputs = pad(LONG, SHORT, width=9), pad([BOS, 6, 4], [BOS, 9, 9], width=3)
    variables = {'params': params}
    logits, weights = quick(model.apply)(variables, source, inputs)
    state, encoded = quick(partial(model.apply, method='encode'))(variables, source)
    decode = quick(lambda state, tokens: model.apply(variables, state, encoded, tokens, method='decode'))
    for t in range(inputs.shape[1]):
        state, step_logits, step_weights = decode(state, inputs[:, t])
        np.testing.assert_allclose(step_logits, logits[:, t], rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(step_weights, weights[:, t], rtol=1e-6, atol=1e-6)


def test_a_model_with_a_fixed_context_has_no_attention_parameters_and_weights():
    model, params = make_model(attention='none')
    _, attention_params = make_model(attention='additive')
    assert set(params['step']) == {'recurrence'}
    assert set(attention_params['step']) == {'recurrence', 'attend'}
    source = pad(LONG, SHORT, width=9)
    logits, weights = quick(model.apply)({'params': params}, source, source)
    assert weights.shape == (2, 9, 0) and logits.shape == (2, 9, V)


def test_attention_weights_sum_to_one():
    for attention in ('additive', 'dot'):
        model, params = make_model(attention=attention)
        source, inputs = pad(LONG, SHORT, width=9), pad([BOS, 6], [BOS, 9], width=2)
        _, weights = quick(model.apply)({'params': params}, source, inputs)
        np.testing.assert_allclose(jnp.sum(weights, axis=-1), 1.0, rtol=1e-6)


def test_dropout_needs_a_key_and_changes_the_logits():
    model, params = make_model()
    model = model.clone(config=dataclasses.replace(model.config, dropout=0.5))
    source, inputs = pad(LONG, width=9), pad([BOS, 6], width=2)
    rngs = lambda seed: {'dropout': jax.random.key(seed)}
    run = quick(lambda seed: model.apply({'params': params}, source, inputs, False, rngs=rngs(seed))[0])
    assert np.array_equal(run(0), run(0)) and not np.array_equal(run(0), run(1))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def original_logits(params, source, inputs, has_attention):
    """Return the logits of one pair by the equations of appendix A of Bahdanau et al. 2015, in a float64 loop."""
    E, F = params['embed_source']['embedding'], params['embed_target']['embedding']
    H = params['start']['kernel'].shape[1]

    def cell(weights, s, *inputs):
        x = np.concatenate(inputs) @ weights['input']['kernel']
        (r, u), n = np.split(x[: 2 * H] + s @ weights['hidden']['kernel'], 2), x[2 * H :]
        proposed = np.tanh(n + (sigmoid(r) * s) @ weights['candidate']['kernel'])
        z = 1 - sigmoid(u)  # the paper's z is the weight of the new state, 1 - ours
        return (1 - z) * s + z * proposed

    def run(weights, xs):
        states = [np.zeros(H)]
        for x in xs:
            states.append(cell(weights['cell']['gru'], states[-1], x))
        return states[1:]

    embedded = [E[token] for token in source]
    forward = run(params['encoder']['forward_0'], embedded)
    if has_attention:
        backward = run(params['encoder']['backward_0'], embedded[::-1])[::-1]
        h, first = np.concatenate([forward, backward], axis=1), backward[0]
    else:
        h, first = np.array(forward), forward[-1]
    s, step, logits = np.tanh(first @ params['start']['kernel']), params['step'], []
    for token in inputs:
        c = h[-1]
        if has_attention:
            attend = step['attend']
            e = np.tanh(s @ attend['query']['kernel'] + h @ attend['key']['kernel']) @ attend['vector'][:, 0]
            c = np.exp(e - e.max()) @ h / np.exp(e - e.max()).sum()
        t = np.concatenate([s, c, F[token]]) @ params['read']['kernel']
        logits.append(np.maximum(t[0::2], t[1::2]) @ params['output']['kernel'])
        s = cell(step['recurrence']['gru'], s, F[token], c)
    return np.array(logits)


@pytest.mark.slow
@pytest.mark.parametrize('has_attention', [True, False])
def test_the_original_model_equals_the_equations_of_the_paper(has_attention):
    attention = 'additive' if has_attention else 'none'
    config = RecurrentConfig(
        attention=attention, embedding=EMBEDDING, hidden=6, bidirectional=has_attention, original=True
    )
    model = RecurrentSeq2Seq(V, V, config)
    source, inputs = pad(LONG, SHORT, width=10), pad([BOS, 7, 4], [BOS, 9, 12], width=3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), source, inputs)['params']
    random = np.random.default_rng(5)
    params = jax.tree.map(lambda x: random.standard_normal(x.shape) / 2, shapes)
    variables = {'params': jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)}
    logits, _ = quick(model.apply)(variables, source, inputs)
    for row, sentence in enumerate((LONG, SHORT)):
        expected = original_logits(params, sentence, inputs[row].tolist(), has_attention)
        np.testing.assert_allclose(logits[row], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    state, encoded = quick(partial(model.apply, method='encode'))(variables, source)
    decode = quick(lambda state, tokens: model.apply(variables, state, encoded, tokens, method='decode'))
    for t in range(3):
        state, step_logits, _ = decode(state, inputs[:, t])
        np.testing.assert_allclose(step_logits, logits[:, t], rtol=0, atol=TOLERANCE * np.abs(logits).max())
