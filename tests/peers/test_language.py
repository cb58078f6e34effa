"""attnlab's language model and block against the same model and block in PyTorch, number by number."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import LanguageModelConfig
from attnlab.kernels.losses import cross_entropy
from attnlab.kernels.masks import padding_mask
from attnlab.layers.block import TransformerBlock
from attnlab.layers.positions import NoEncoding
from attnlab.models.language import LanguageModel

pytestmark = pytest.mark.peers

TOLERANCE = 64 * float(np.finfo(np.float32).eps)  # 7.6e-6: some tens of rounding errors, for values of order one
V, D, L, T, N, B = 11, 8, 2, 6, 2, 3
CONFIG = LanguageModelConfig(layers=L, width=D, heads=N, context=T)
LENGTHS = np.array([6, 1, 4])


def random_params(init, x):
    """Return random parameters for this input; biases and norm scales are random too."""
    shapes = jax.eval_shape(init, jax.random.key(0), x)['params']
    random = np.random.default_rng(1)
    return jax.tree.map(lambda x: (0.5 * random.standard_normal(x.shape)).astype(np.float32), shapes)


def both_models(mlp):
    """Return attnlab's model, random parameters, PyTorch's model with the same parameters, and tokens [B, T + 1]."""
    from attnlab.bench import lm_torch as peer

    model = LanguageModel(V, dataclasses.replace(CONFIG, mlp=mlp))
    tokens = np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)
    params = random_params(model.init, tokens[:, :-1])
    torch_model = peer.LanguageModel(V, D, L, T, N, mlp)
    peer.load_parameters(torch_model, params)
    return model, params, torch_model, tokens


LAYER = {
    'qkv': 'self_attn.in_proj_', 'out': 'self_attn.out_proj.', 'attention_norm': 'norm1.', 'mlp_norm': 'norm2.',
    'up': 'linear1.', 'down': 'linear2.',
}  # fmt: skip


def encoder_layer_state_dict(params):
    """Return a block's parameters or gradients with the names of `torch.nn.TransformerEncoderLayer`."""
    from attnlab.bench.lm_torch import block_state_dict

    entries = ((*name.split('.'), np.asarray(x)) for name, x in block_state_dict(params).items())
    return {LAYER[layer] + kind: x for layer, kind, x in entries}


def assert_close(ours, theirs, name):
    scale = max(1.0, float(np.max(np.abs(theirs), initial=0.0)))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * scale, err_msg=name, strict=True)


@pytest.mark.parametrize('mlp', ['gelu', 'gelu_tanh'])
def test_loss_logits_and_gradients_equal_those_of_pytorch(mlp):
    torch = pytest.importorskip('torch')
    from attnlab.bench import lm_torch as peer

    model, params, torch_model, tokens = both_models(mlp)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    @jax.jit
    def ours(params):
        def loss(params):
            logits, _ = model.apply({'params': params}, jnp.asarray(inputs))
            sums = cross_entropy(logits, jnp.asarray(labels), padding=-1)
            return sums.total / sums.weight, logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, logits), gradients = ours(params)
    tensors = [torch.from_numpy(np.array(x)).long() for x in (inputs, labels)]
    with torch.no_grad():
        assert_close(logits, torch_model(tensors[0]).numpy(), 'logits')
    their_value = peer.loss(torch_model, *tensors)
    their_value.backward()
    assert_close(value, np.float32(their_value.item()), 'loss')
    theirs = {name: x.grad.numpy() for name, x in torch_model.named_parameters()}
    expected = peer.state_dict(gradients)
    assert expected.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(expected[name], gradient, f'gradient of {name}')


def test_logits_with_a_cache_equal_those_of_pytorch_without():
    torch = pytest.importorskip('torch')
    from attnlab.decode.cache import extend_cache, init_cache

    model, params, torch_model, tokens = both_models('gelu')
    tokens = tokens[:, :T]
    with torch.no_grad():
        expected = torch_model(torch.from_numpy(tokens).long()).numpy()
    ours, theirs = init_cache(model, params, B, T), torch_model.start(B)
    for begin, end in ((0, 3), (3, 4), (4, 5), (5, 6)):
        ours, logits = jax.jit(partial(extend_cache, model))(params, ours, tokens[:, begin:end])
        with torch.inference_mode():
            last = torch_model(torch.from_numpy(tokens[:, begin:end]).long(), theirs, begin).numpy()
        assert_close(logits, expected[:, begin:end], f'attnlab from {begin}')
        assert_close(last, expected[:, end - 1 : end], f'PyTorch at {end - 1}')


def test_greedy_decoding_gives_the_tokens_of_pytorch():
    torch = pytest.importorskip('torch')
    from attnlab.bench import lm
    from attnlab.bench import lm_torch as peer

    model, params, torch_model, tokens = both_models('gelu')
    # With a random norm, all decoded tokens would be equal.
    params['stack']['norm'] = {'scale': np.ones(D, np.float32), 'bias': np.zeros(D, np.float32)}
    peer.load_parameters(torch_model, params)
    rows = prompt = tokens[:, :2]
    for _ in range(T - 2):
        with torch.no_grad():
            chosen = torch_model(torch.from_numpy(rows).long())[:, -1].argmax(-1, keepdim=True)
        rows = np.concatenate([rows, chosen.numpy()], axis=1)
    assert len(np.unique(rows[:, 2:])) > 1
    np.testing.assert_array_equal(peer.generate_greedily(torch_model, prompt, T - 2), rows[:, 2:])
    np.testing.assert_array_equal(lm.greedy_decoder(model, params, prompt, T - 2)(), rows[:, 2:])


@pytest.mark.parametrize('act', ['gelu', 'relu'])
@pytest.mark.parametrize('order', ['pre', 'post'])
def test_a_block_equals_the_encoder_layer_of_pytorch(order, act):
    torch = pytest.importorskip('torch')
    block = TransformerBlock(dataclasses.replace(CONFIG, order=order, mlp=act), NoEncoding())
    mask = padding_mask(keys=jnp.asarray(LENGTHS))
    x, d_out = np.random.default_rng(2).standard_normal((2, B, T, D)).astype(np.float32)
    token_mask = np.arange(T) < LENGTHS[:, None]
    options = dict(mask=mask, token_mask=None, deterministic=True)
    params = random_params(partial(block.init, **options), x)

    @jax.jit
    def ours(params, x):
        output, vjp = jax.vjp(lambda params, x: block.apply({'params': params}, x, **options)[0], params, x)
        return output, vjp(jnp.asarray(d_out * token_mask[..., None]))

    output, (gradients, d_x) = ours(params, x)
    layer = torch.nn.TransformerEncoderLayer(D, N, 4 * D, 0.0, act, batch_first=True, norm_first=order == 'pre')
    layer.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in encoder_layer_state_dict(params).items()})
    theirs = torch.from_numpy(x).requires_grad_()
    their_output = layer(theirs, src_key_padding_mask=torch.from_numpy(~token_mask))
    their_output.backward(torch.from_numpy(d_out * token_mask[..., None]))
    assert_close(output[token_mask], their_output.detach().numpy()[token_mask], 'output')
    assert_close(d_x, theirs.grad.numpy(), 'gradient of x')
    expected = encoder_layer_state_dict(gradients)
    for name, value in layer.named_parameters():
        assert_close(expected[name], value.grad.numpy(), f'gradient of {name}')
