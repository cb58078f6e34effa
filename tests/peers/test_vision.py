"""attnlab's Vision Transformer against the same model in PyTorch, number by number."""

import jax
import numpy as np
import pytest

from attnlab.bench import steps, vit

pytestmark = pytest.mark.peers


def test_logits_loss_and_gradients_equal_those_of_pytorch():
    from attnlab.bench import vit_torch as peer

    sizes = vit.VitSizes(side=8, width=16, layers=2, heads=2, mlp_width=24, classes=5, batch=3)
    model, params, (images, labels) = vit.create_vit(sizes)
    random = np.random.default_rng(3)
    params = jax.tree.map(lambda x: np.asarray(x + 0.3 * random.normal(size=x.shape), np.float32), params)
    torch_model = peer.VisionTransformer(8, 4, 16, 2, 2, 24, 5)
    peer.load_parameters(torch_model, params)
    pixels, targets = peer.to_tensors((images, labels))
    images, labels = jax.numpy.asarray(images), jax.numpy.asarray(labels)
    logits = jax.jit(lambda params: model.apply({'params': params}, images)[0])(params)
    np.testing.assert_allclose(logits, torch_model(pixels).detach().numpy(), atol=2e-5)

    def mean_loss(params):
        sums = steps.model_loss(model)(params, (images, labels), jax.random.key(0))
        return sums.total / sums.weight

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
    theirs = peer.loss(torch_model, pixels, targets)
    theirs.backward()
    assert float(loss) == pytest.approx(theirs.item(), rel=1e-5)
    expected = {name: x.grad.numpy() for name, x in torch_model.named_parameters()}
    gradients = peer.state_dict(gradient)
    assert gradients.keys() == expected.keys()
    for name, x in gradients.items():
        np.testing.assert_allclose(x, expected[name], atol=2e-5 * max(1.0, np.abs(expected[name]).max()), err_msg=name)
